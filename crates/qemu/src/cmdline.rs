//! QEMU's command line, option by option.
//!
//! A table records for every option whether it has a value and how it is handled for another host:
//! kept, rewritten, dropped, or refused with a reason. An option that is not in the table is
//! refused unless the caller allows it by name: to drop an unknown option would change the guest,
//! and to keep it might point at something of this host.

use serde::{Deserialize, Serialize};

use crate::options::Value;

/// Treatment of an option when the guest moves to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionPolicy {
    /// Copied unchanged.
    Keep,
    /// Copied, with paths, sockets and similar values changed to fit the other host.
    Rewrite,
    /// Dropped, because it has no meaning on the other host; the text is the reason.
    Drop(&'static str),
    /// Blocker: a guest that was started with it cannot be moved; the text is the reason.
    Refuse(&'static str),
}

/// An entry of the table of QEMU's options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionSpec {
    /// Name without the dash.
    pub name: &'static str,
    /// True if a value follows the option.
    pub has_value: bool,
    /// Key that may be omitted at the start of the value.
    pub implied: Option<&'static str>,
    /// Treatment on another host.
    pub policy: OptionPolicy,
}

/// One option of a command line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QemuOption {
    /// Name without the dash. Where QEMU has two names, one is used for both (`M` is `machine`).
    pub name: String,
    /// Text that follows the option.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

impl QemuOption {
    /// Returns an option with a value.
    pub fn new(name: &str, value: impl Into<String>) -> Self {
        Self { name: name.to_owned(), value: Some(value.into()) }
    }

    /// Returns an option without a value.
    pub fn flag(name: &str) -> Self {
        Self { name: name.to_owned(), value: None }
    }

    /// Returns the parsed value.
    pub fn parse_value(&self) -> Value {
        let implied = option_spec(&self.name).and_then(|option_spec| option_spec.implied);
        Value::parse(self.value.as_deref().unwrap_or_default(), implied)
    }
}

const fn keep(name: &'static str) -> OptionSpec {
    OptionSpec { name, has_value: true, implied: None, policy: OptionPolicy::Keep }
}

const fn flag(name: &'static str) -> OptionSpec {
    OptionSpec { name, has_value: false, implied: None, policy: OptionPolicy::Keep }
}

const fn rewrite(name: &'static str, implied: Option<&'static str>) -> OptionSpec {
    OptionSpec { name, has_value: true, implied, policy: OptionPolicy::Rewrite }
}

const fn drop(name: &'static str, has_value: bool, why: &'static str) -> OptionSpec {
    OptionSpec { name, has_value, implied: None, policy: OptionPolicy::Drop(why) }
}

const fn refuse(name: &'static str, has_value: bool, why: &'static str) -> OptionSpec {
    OptionSpec { name, has_value, implied: None, policy: OptionPolicy::Refuse(why) }
}

const DEBUGGING: &str = "it serves debugging on the old host";
const START_ONLY: &str = "it only applies to the first start of the guest";
const XEN: &str = "guests of Xen are not supported";

/// The options that are known.
pub const OPTIONS: &[OptionSpec] = &[
    // The machine.
    rewrite("machine", Some("type")),
    keep("accel"),
    keep("cpu"),
    OptionSpec { implied: Some("cpus"), ..keep("smp") },
    keep("numa"),
    keep("m"),
    keep("global"),
    keep("boot"),
    keep("uuid"),
    keep("name"),
    keep("rtc"),
    keep("icount"),
    keep("compat"),
    keep("overcommit"),
    keep("k"),
    keep("g"),
    keep("vga"),
    keep("audio"),
    keep("audiodev"),
    keep("soundhw"),
    keep("watchdog"),
    keep("watchdog-action"),
    keep("action"),
    keep("usbdevice"),
    keep("tb-size"),
    keep("prom-env"),
    flag("enable-kvm"),
    flag("usb"),
    flag("no-acpi"),
    flag("no-hpet"),
    flag("no-fd-bootchk"),
    flag("win2k-hack"),
    flag("no-reboot"),
    flag("no-shutdown"),
    flag("nodefaults"),
    flag("no-user-config"),
    flag("only-migratable"),
    flag("nographic"),
    // Files of the host.
    rewrite("bios", None),
    rewrite("kernel", None),
    rewrite("initrd", None),
    rewrite("dtb", None),
    rewrite("shim", None),
    rewrite("option-rom", None),
    rewrite("fw_cfg", Some("name")),
    rewrite("smbios", None),
    rewrite("acpitable", None),
    keep("append"),
    rewrite("L", None),
    // Disks.
    rewrite("drive", None),
    rewrite("blockdev", None),
    rewrite("hda", None),
    rewrite("hdb", None),
    rewrite("hdc", None),
    rewrite("hdd", None),
    rewrite("fda", None),
    rewrite("fdb", None),
    rewrite("cdrom", None),
    rewrite("sd", None),
    rewrite("mtdblock", None),
    rewrite("pflash", None),
    keep("iscsi"),
    // Devices and their back ends.
    rewrite("device", Some("driver")),
    rewrite("object", Some("qom-type")),
    rewrite("netdev", Some("type")),
    rewrite("nic", Some("type")),
    rewrite("net", Some("type")),
    rewrite("chardev", Some("backend")),
    rewrite("serial", None),
    rewrite("parallel", None),
    rewrite("debugcon", None),
    rewrite("monitor", None),
    rewrite("qmp", None),
    rewrite("qmp-pretty", None),
    rewrite("mon", Some("chardev")),
    rewrite("display", Some("type")),
    rewrite("vnc", Some("vnc")),
    rewrite("spice", None),
    // QEMU's own process.
    keep("msg"),
    keep("sandbox"),
    keep("runas"),
    keep("run-with"),
    keep("seed"),
    flag("async-teardown"),
    flag("full-screen"),
    flag("no-frame"),
    flag("alt-grab"),
    flag("ctrl-grab"),
    flag("no-quit"),
    drop("mem-path", true, "the memory plan determines the memory back end"),
    flag("mem-prealloc"),
    drop("S", false, "the new QEMU always waits"),
    drop("incoming", true, START_ONLY),
    drop("loadvm", true, START_ONLY),
    drop("preconfig", false, START_ONLY),
    drop("daemonize", false, "the agent starts QEMU in a session of its own"),
    drop("pidfile", true, "the agent knows its processes"),
    drop("writeconfig", true, START_ONLY),
    drop("D", true, DEBUGGING),
    drop("d", true, DEBUGGING),
    drop("dfilter", true, DEBUGGING),
    drop("trace", true, DEBUGGING),
    drop("gdb", true, DEBUGGING),
    drop("s", false, DEBUGGING),
    drop("dump-vmstate", true, DEBUGGING),
    drop("enable-sync-profile", false, DEBUGGING),
    drop("singlestep", false, DEBUGGING),
    drop("one-insn-per-tb", false, DEBUGGING),
    drop("perfmap", false, DEBUGGING),
    drop("jitdump", false, DEBUGGING),
    drop("portrait", false, "the new QEMU has no window"),
    drop("rotate", true, "the new QEMU has no window"),
    drop("echr", true, "there is no terminal"),
    refuse("snapshot", false, "its writes go to a temporary file that only this process can see"),
    refuse("readconfig", true, "it hides further options in a file; write them on the command line"),
    refuse("set", true, "it changes other options; write the value into the option itself"),
    refuse("add-fd", true, "its descriptors cannot be passed to another host"),
    refuse("fsdev", true, "shared folders (9p) keep open files that cannot be moved"),
    refuse("virtfs", true, "shared folders (9p) keep open files that cannot be moved"),
    refuse("tpmdev", true, "the state of a TPM lies outside QEMU"),
    refuse("plugin", true, "plugins are code of this host"),
    refuse("chroot", true, "QEMU in a chroot cannot open its files again by their names"),
    refuse("semihosting", false, "the guest uses files of the host"),
    refuse("semihosting-config", true, "the guest uses files of the host"),
    refuse("xen-domid", true, XEN),
    refuse("xen-attach", false, XEN),
    refuse("xen-domid-restrict", false, XEN),
];

/// Returns the table's entry for an option.
pub fn option_spec(name: &str) -> Option<&'static OptionSpec> {
    OPTIONS.iter().find(|option_spec| option_spec.name == name)
}

/// Maps QEMU's alternative names to one name.
fn canonical_name(name: &str) -> &str {
    match name {
        "M" => "machine",
        "nouserconfig" => "no-user-config",
        other => other,
    }
}

/// Parses the arguments (without the program). An argument without a dash is a disk image, as in
/// QEMU. An unknown option is assumed to have a value when the next argument does not look like an
/// option; it is refused later anyway, unless it is allowed by name.
pub fn parse(arguments: &[String]) -> Vec<QemuOption> {
    let mut given = Vec::new();
    let mut rest = arguments.iter().peekable();
    while let Some(argument) = rest.next() {
        let name = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-'));
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            given.push(QemuOption::new("hda", argument.as_str()));
            continue;
        };
        let name = canonical_name(name).to_owned();
        let has_value = option_spec(&name).map_or_else(
            || rest.peek().is_some_and(|next| !next.starts_with('-')),
            |option_spec| option_spec.has_value,
        );
        let value = if has_value { rest.next().cloned() } else { None };
        given.push(QemuOption { name, value });
    }
    given
}

/// Converts options back to arguments.
pub fn arguments(given: &[QemuOption]) -> Vec<String> {
    given
        .iter()
        .flat_map(|option| [Some(format!("-{}", option.name)), option.value.clone()])
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn names_values_and_images() {
        let given = parse(&words("-M q35 --enable-kvm -m 512 disk.img -S -frobnicate 7 -wibble -usb"));
        let expected = [
            QemuOption::new("machine", "q35"),
            QemuOption::flag("enable-kvm"),
            QemuOption::new("m", "512"),
            QemuOption::new("hda", "disk.img"),
            QemuOption::flag("S"),
            QemuOption::new("frobnicate", "7"),
            QemuOption::flag("wibble"),
            QemuOption::flag("usb"),
        ];
        assert_eq!(given, expected);
        assert_eq!(arguments(&given[..3]), words("-machine q35 -enable-kvm -m 512"));
        assert_eq!(given[0].parse_value().get("type").as_deref(), Some("q35"));
    }

    #[test]
    fn the_table_names_each_option_once() {
        for (at, option) in OPTIONS.iter().enumerate() {
            assert!(OPTIONS[..at].iter().all(|other| other.name != option.name), "{}", option.name);
        }
    }

    proptest::proptest! {
        #[test]
        fn no_arguments_panic(arguments in proptest::collection::vec("-{0,2}[a-z]{0,8}", 0..8)) {
            let _ = parse(&arguments);
        }
    }
}
