//! Whole machines that QEMU emulates: their parameters, and QEMU's command line made from them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::TOOLS_BYTES;
use crate::environment::{Environment, Qemu, QemuVersion};
use crate::error::{Context, Result};

/// The kernel that a machine boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Kernel {
    /// The kernel of Debian 13: Linux 6.12.
    #[default]
    Debian13,
    /// The kernel of Debian 12: Linux 6.1.
    Debian12,
}

impl Kernel {
    /// Returns the directory of its files in the cache: the suite it is taken from.
    pub(super) fn directory(self) -> &'static str {
        match self {
            Self::Debian13 => "trixie",
            Self::Debian12 => "bookworm",
        }
    }
}

/// A host of a rack that is to be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSpec {
    /// Its name, also for the agents.
    pub name: String,
    /// The kernel that it boots.
    pub kernel: Kernel,
    /// The QEMU that runs the guests on it.
    pub qemu: GuestQemu,
    /// Processors.
    pub vcpus: u32,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// True if its disk keeps what was flushed when its power fails. Slower.
    pub durable: bool,
}

/// The QEMU that runs guests on a host of a rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum GuestQemu {
    /// The package that is installed on the host (Debian 13: 10.0).
    #[default]
    OfTheHost,
    /// The one that is installed on this machine (Debian 12: 7.2), brought along.
    OfThisMachine,
}

impl HostSpec {
    /// Returns a host with two processors, 1.5 GiB of memory, and the kernel and QEMU of Debian 13.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kernel: Kernel::default(),
            qemu: GuestQemu::default(),
            vcpus: 1,
            memory_mib: 1536,
            durable: false,
        }
    }

    /// Sets the kernel.
    #[must_use]
    pub fn kernel(self, kernel: Kernel) -> Self {
        Self { kernel, ..self }
    }

    /// Sets the QEMU that runs guests.
    #[must_use]
    pub fn qemu(self, qemu: GuestQemu) -> Self {
        Self { qemu, ..self }
    }

    /// Keeps what was flushed when the power fails.
    #[must_use]
    pub fn durable(self) -> Self {
        Self { durable: true, ..self }
    }
}

/// Files on this machine from which machines are made.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    /// The emulator.
    pub(super) qemu: Qemu,
    /// The disk, the kernels and the key of `scripts/rack`.
    pub(super) image: PathBuf,
}

impl Parts {
    /// Finds them. [`crate::Error::Missing`] where `scripts/setup` could not make them.
    pub(super) fn discover(environment: &Environment) -> Result<Self> {
        let image = environment.rack()?;
        // Disks name the ones that they are made from: by no link, which may vanish.
        let image = fs::canonicalize(&image).context(|| format!("cannot find {}", image.display()))?;
        Ok(Self { qemu: environment.qemu(QemuVersion::Newer)?, image })
    }

    /// Returns the private key that all machines accept.
    pub(super) fn ssh_key(&self) -> PathBuf {
        self.image.join("ssh_key")
    }
}

/// The start of a machine: from where, and with which files.
#[derive(Debug, Clone, Copy)]
pub(super) struct Start<'a> {
    pub(super) spec: &'a HostSpec,
    pub(super) number: u8,
    /// Directory of its disk, its sockets and its logs.
    pub(super) directory: &'a Path,
    /// The disk with what a run brings along.
    pub(super) tools: &'a Path,
    /// The tap that joins it to the switch.
    pub(super) tap: &'a str,
    /// The beginning of its run.
    pub(super) from: Begin,
}

/// The beginning of a machine's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// It boots from its disk.
    Boot,
    /// Its state will be loaded.
    State,
    /// Its state will be loaded, and its disk stays as it is: writes go to a temporary file.
    StateAndOldDisk,
}

impl Start<'_> {
    /// Returns QEMU's arguments. The devices are a part of every state: a change here makes states anew.
    pub(super) fn arguments(&self, parts: &Parts) -> Vec<String> {
        let spec = self.spec;
        let file = |name: &str| self.directory.join(name).display().to_string();
        let kernel = parts.image.join("kernels").join(spec.kernel.directory());
        let cache = if spec.durable { "writeback" } else { "unsafe" };
        let number = self.number;
        let mut line = parts.qemu.arguments();
        let mut add = |option: &str, value: String| line.extend([option.to_owned(), value]);
        add("-name", format!("rack-{}", spec.name));
        add("-machine", "q35,usb=off,vmport=off".to_owned());
        add("-accel", "tcg,thread=multi,tb-size=512".to_owned());
        // Five levels of page tables are untried below KVM.
        add("-cpu", "max,la57=off".to_owned());
        add("-smp", spec.vcpus.to_string());
        add("-m", spec.memory_mib.to_string());
        add("-display", "none".to_owned());
        add("-kernel", kernel.join("vmlinuz").display().to_string());
        add("-initrd", kernel.join("initrd.gz").display().to_string());
        add("-append", self.append());
        let scratch = if self.from == Begin::StateAndOldDisk { ",snapshot=on" } else { "" };
        let disk = file("disk.qcow2");
        add("-drive", format!("file={disk},if=none,id=root,cache={cache},discard=unmap{scratch}"));
        add("-device", "virtio-blk-pci,drive=root".to_owned());
        add(
            "-drive",
            format!(
                "file={},format=raw,if=none,id=tools,readonly=on,file.locking=off,cache=unsafe",
                self.tools.display()
            ),
        );
        add("-device", "virtio-blk-pci,drive=tools".to_owned());
        add("-netdev", format!("user,id=in,restrict=on,hostfwd=tcp:127.0.0.1:{}-:22", ssh_port(number)));
        add("-device", "virtio-net-pci,netdev=in,mac=52:54:00:93:00:01,romfile=".to_owned());
        add("-netdev", format!("tap,id={LINK},ifname={},script=no,downscript=no,vhost=off", self.tap));
        add("-device", format!("virtio-net-pci,netdev={LINK},mac=52:54:00:93:01:{number:02x},romfile="));
        add("-device", "virtio-rng-pci".to_owned());
        add("-chardev", format!("file,id=console,path={},append=on", file("console.log")));
        add("-serial", "chardev:console".to_owned());
        add("-qmp", format!("unix:{},server=on,wait=off", file(MONITOR)));
        if self.from != Begin::Boot {
            add("-incoming", "defer".to_owned());
        }
        // A machine that is reset would boot anew, and whoever uses it would find it empty: its end is noticed.
        line.extend(["-no-reboot", "-nodefaults", "-no-user-config"].map(str::to_owned));
        line
    }

    /// Returns the kernel's command line.
    fn append(&self) -> String {
        // The emulated time stamp counter is this machine's own. Calibrated against the emulated timer, it may be taken
        // for one of a sixth of its rate.
        let tsc = tsc_khz().map_or(String::new(), |khz| format!(" tsc_early_khz={khz} tsc=reliable"));
        format!(
            "console=ttyS0 rw quiet loglevel=4 mitigations=off nokaslr no_timer_check{tsc} audit=0 apparmor=0 \
             selinux=0 cryptomgr.notests rcupdate.rcu_expedited=1 systemd.show_status=0 net.ifnames=0 \
             kvm_amd.nested=0 rack.host={},{}",
            self.spec.name, self.number
        )
    }

    /// Describes all on which a state of this machine depends: it can be loaded where this is the same. Paths do not
    /// matter.
    pub(super) fn fingerprint(&self, parts: &Parts) -> Result<String> {
        let version = crate::run(Command::new(&parts.qemu.program).arg("--version"))?;
        let key = parts.image.join("key");
        let image = fs::read_to_string(&key).context(|| format!("cannot read {}", key.display()))?;
        let qemu = Qemu { data_dirs: Vec::new(), ..parts.qemu.clone() };
        let mut arguments = self.arguments(&Parts { qemu, image: parts.image.clone() }).join(" ");
        for path in [self.directory, &parts.image] {
            arguments = arguments.replace(&path.display().to_string(), "");
        }
        Ok(format!("{version}{image}{arguments}\n{TOOLS_BYTES}\n"))
    }
}

/// The name of QEMU's back end of a machine's cable.
pub(super) const LINK: &str = "cable";
/// The monitor's socket in a machine's directory.
pub(super) const MONITOR: &str = "qmp.sock";

/// Returns the port, of the rack's own loopback device, at which a machine's SSH server answers.
pub(super) fn ssh_port(number: u8) -> u16 {
    2200 + u16::from(number)
}

/// Returns the rate of this machine's time stamp counter, if the kernel reports it.
fn tsc_khz() -> Option<u64> {
    let base = fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/base_frequency");
    let reported = base.ok().and_then(|khz| khz.trim().parse().ok());
    reported.or_else(|| parse_mhz(&fs::read_to_string("/proc/cpuinfo").ok()?))
}

/// Returns the rate of the first processor in the text of `/proc/cpuinfo`, in kHz.
fn parse_mhz(cpuinfo: &str) -> Option<u64> {
    let line = cpuinfo.lines().find(|line| line.starts_with("cpu MHz"))?;
    let mhz: f64 = line.split(':').nth(1)?.trim().parse().ok()?;
    Some((mhz * 1000.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_the_counter_is_read() {
        assert_eq!(parse_mhz("processor\t: 0\ncpu MHz\t\t: 2595.124\ncpu MHz\t\t: 1.0\n"), Some(2_595_124));
        assert_eq!(parse_mhz("processor\t: 0\n"), None);
    }

    #[test]
    fn states_are_loaded_only_where_they_fit() {
        let directory = std::env::temp_dir();
        let qemu = Qemu { program: "/bin/echo".into(), img: "/bin/false".into(), data_dirs: Vec::new() };
        let parts = Parts { qemu, image: directory.join(format!("rack-{}", std::process::id())) };
        fs::create_dir_all(&parts.image).unwrap();
        fs::write(parts.image.join("key"), "1\n").unwrap();
        let fingerprint = |spec: &HostSpec, directory: &Path| {
            let tools = Path::new("/tools.img");
            let start = Start { spec, number: 1, directory, tools, tap: "tap1", from: Begin::Boot };
            start.fingerprint(&parts).unwrap()
        };
        let one = fingerprint(&HostSpec::new("x"), Path::new("/one"));
        assert_eq!(one, fingerprint(&HostSpec::new("x"), Path::new("/two")), "wherever its files are");
        let more = HostSpec { memory_mib: 2048, ..HostSpec::new("x") };
        assert_ne!(one, fingerprint(&more, Path::new("/one")));
        assert_ne!(one, fingerprint(&HostSpec::new("x").kernel(Kernel::Debian12), Path::new("/one")));
        fs::write(parts.image.join("key"), "2\n").unwrap();
        assert_ne!(one, fingerprint(&HostSpec::new("x"), Path::new("/one")));
        fs::remove_dir_all(&parts.image).unwrap();
    }
}
