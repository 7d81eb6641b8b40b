//! Network back ends, character devices and objects that were added or removed after the start.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use super::Problem;
use super::live::{self, LiveChardev, LiveState, NetBackend, Object};
use crate::cmdline::QemuOption;
use crate::qmp::{Qmp, QmpError};

/// Character devices that other options (`-serial`, `-qmp`) or QEMU itself create.
const CHARDEVS_OF_OTHER_OPTIONS: &[&str] =
    &["serial", "parallel", "compat_monitor", "debugcon", "gdb", "virtcon", "sclp", "seabios", "vdagent"];

/// Objects that can be described from their properties.
const DESCRIBABLE_OBJECTS: &[&str] = &[
    "iothread",
    "main-loop",
    "memory-backend-ram",
    "memory-backend-file",
    "memory-backend-memfd",
    "rng-random",
    "rng-builtin",
    "throttle-group",
    "can-bus",
];

/// Back end as QEMU reports it: a network's, a character device, or an object.
trait ReportedBackend {
    /// Name of the option that creates one.
    const OPTION: &'static str;

    fn id(&self) -> &str;

    /// Returns the problem of one that cannot be described.
    fn problem(&self) -> Problem;

    /// Returns true if QEMU itself creates it, or another option than [`Self::OPTION`].
    fn is_created_otherwise(&self, live: &LiveState, options: &[QemuOption]) -> bool;

    /// Returns the option that creates it; none if QEMU does not report enough.
    fn option(&self, live: &LiveState, qmp: &mut Qmp) -> Result<Option<QemuOption>, QmpError>;
}

impl ReportedBackend for NetBackend {
    const OPTION: &'static str = "netdev";

    fn id(&self) -> &str {
        &self.id
    }

    fn problem(&self) -> Problem {
        Problem::new(
            "network-unclear",
            new_and_unclear(&format!("network {} ({})", self.id, self.kind)),
            "give it with -netdev when the guest is started next, or unplug its card and remove it (netdev_del)",
        )
    }

    fn is_created_otherwise(&self, _live: &LiveState, options: &[QemuOption]) -> bool {
        let mut nics = options.iter().filter(|option| option.name == "nic" || option.name == "net");
        // A name that QEMU generated belongs to -nic, -net or the default card.
        self.id.starts_with('#')
            || nics.any(|nic| nic.parse_value().get("id").is_some_and(|id| id == self.id))
    }

    fn option(&self, live: &LiveState, qmp: &mut Qmp) -> Result<Option<QemuOption>, QmpError> {
        let option = netdev(self, &live.usernet);
        let has_vhost = option.is_some() && self.kind == "tap" && is_served_by_vhost(qmp, &self.id)?;
        Ok(if has_vhost { option.as_ref().map(with_vhost) } else { option })
    }
}

impl ReportedBackend for LiveChardev {
    const OPTION: &'static str = "chardev";

    fn id(&self) -> &str {
        &self.label
    }

    fn problem(&self) -> Problem {
        Problem::new(
            "chardev-unclear",
            new_and_unclear(&format!("character device {} ({})", self.label, self.filename)),
            "give it with -chardev when the guest is started next, or remove it (chardev-remove)",
        )
    }

    fn is_created_otherwise(&self, _live: &LiveState, _options: &[QemuOption]) -> bool {
        CHARDEVS_OF_OTHER_OPTIONS.iter().any(|start| self.label.starts_with(start))
            || self.label.ends_with("-base")
    }

    fn option(&self, _live: &LiveState, _qmp: &mut Qmp) -> Result<Option<QemuOption>, QmpError> {
        Ok(chardev_option(self))
    }
}

impl ReportedBackend for Object {
    const OPTION: &'static str = "object";

    fn id(&self) -> &str {
        &self.id
    }

    fn problem(&self) -> Problem {
        Problem::new(
            "object-unclear",
            new_and_unclear(&format!("object {} ({})", self.id, self.kind)),
            "give it with -object when the guest is started next, or remove it (object-del)",
        )
    }

    fn is_created_otherwise(&self, live: &LiveState, _options: &[QemuOption]) -> bool {
        live.default_ram_id.as_ref() == Some(&self.id) || self.id.starts_with("ram-node")
    }

    fn option(&self, _live: &LiveState, qmp: &mut Qmp) -> Result<Option<QemuOption>, QmpError> {
        if !DESCRIBABLE_OBJECTS.contains(&self.kind.as_str()) {
            return Ok(None);
        }
        let mut map = live::object_properties(qmp, self)?;
        map.insert("qom-type".to_owned(), self.kind.clone().into());
        map.insert("id".to_owned(), self.id.clone().into());
        Ok(Some(QemuOption::new("object", Json::Object(map).to_string())))
    }
}

/// Drops the options of removed back ends, and adds options for new ones.
pub(super) fn refresh(
    qmp: &mut Qmp,
    options: &mut Vec<QemuOption>,
    live: &LiveState,
    problems: &mut Vec<Problem>,
) -> Result<(), QmpError> {
    options.retain(|option| is_present(option, live));
    add_new(&live.nets, live, qmp, options, problems)?;
    add_new(&live.chardevs, live, qmp, options, problems)?;
    add_new(&live.objects, live, qmp, options, problems)
}

/// Returns false for the option of a back end that QEMU does not have any more.
fn is_present(option: &QemuOption, live: &LiveState) -> bool {
    let value = option.parse_value();
    let Some(id) = value.get("id") else { return true };
    match option.name.as_str() {
        "netdev" => {
            live.nets.iter().any(|net| net.id == id) || value.get("type").as_deref() == Some("hubport")
        }
        "chardev" => live.chardevs.iter().any(|chardev| chardev.label == id),
        "object" => live.objects.iter().any(|object| object.id == id),
        _ => true,
    }
}

/// Adds options for back ends of a kind that have none yet, and a problem for each that cannot be described.
fn add_new<T: ReportedBackend>(
    reported: &[T],
    live: &LiveState,
    qmp: &mut Qmp,
    options: &mut Vec<QemuOption>,
    problems: &mut Vec<Problem>,
) -> Result<(), QmpError> {
    let of_kind = options.iter().filter(|option| option.name == T::OPTION);
    let known: BTreeSet<String> = of_kind.filter_map(|option| option.parse_value().get("id")).collect();
    for backend in reported {
        if known.contains(backend.id()) || backend.is_created_otherwise(live, options) {
            continue;
        }
        match backend.option(live, qmp)? {
            Some(option) => options.push(option),
            None => problems.push(backend.problem()),
        }
    }
    Ok(())
}

fn new_and_unclear(name: &str) -> String {
    format!("{name} was added after the start, and QEMU does not report all its properties")
}

/// Returns the `-netdev` that creates a back end, if `info network` prints enough about it.
fn netdev(net: &NetBackend, usernet: &str) -> Option<QemuOption> {
    let detail = |key: &str| {
        net.details
            .split(',')
            .find_map(|part| part.trim().strip_prefix(key)?.strip_prefix('='))
            .map(str::to_owned)
    };
    let id = net.id.replace(',', ",,");
    match net.kind.as_str() {
        "user" => {
            let mut text = format!("type=user,id={id}");
            if let Some(network) = detail("net").filter(|network| network != "10.0.2.0") {
                let _ = write!(text, ",net={network}/24");
            }
            if detail("restrict").is_some_and(|restrict| restrict == "on" || restrict == "yes") {
                text.push_str(",restrict=on");
            }
            for forward in forwards(usernet, &net.id) {
                let _ = write!(text, ",hostfwd={forward}");
            }
            Some(QemuOption::new("netdev", text))
        }
        "tap" => {
            let ifname = detail("ifname")?;
            let mut text = format!("type=tap,id={id},ifname={ifname}");
            for key in ["script", "downscript"] {
                if let Some(script) = detail(key) {
                    let _ = write!(text, ",{key}={script}");
                }
            }
            Some(QemuOption::new("netdev", text))
        }
        _ => None,
    }
}

/// Returns true if the kernel carries the packets of the network card on a back end (vhost-net), which `info network` does
/// not print. A QEMU before 7.2 cannot report it.
fn is_served_by_vhost(qmp: &mut Qmp, id: &str) -> Result<bool, QmpError> {
    let ask = |qmp: &mut Qmp, command: &str, arguments: Json| match qmp.execute::<Json>(command, arguments) {
        // The device was unplugged since.
        Err(error) if error.is_refusal() => Ok(Json::Null),
        answer => answer,
    };
    let devices = ask(qmp, "x-query-virtio", Json::Null)?;
    for device in devices.as_array().into_iter().flatten().filter(|device| device["name"] == "virtio-net") {
        let path = &device["path"];
        if ask(qmp, "qom-get", json!({ "path": path, "property": "netdev" }))? == id {
            return Ok(ask(qmp, "x-query-virtio-status", json!({ "path": path }))?["vhost-started"] == true);
        }
    }
    Ok(false)
}

fn with_vhost(option: &QemuOption) -> QemuOption {
    let mut value = option.parse_value();
    value.set("vhost", "on");
    QemuOption::new(&option.name, value.to_string())
}

/// Returns the ports forwarded to the guest, from `info usernet`: `  TCP[HOST_FORWARD]  11
/// 127.0.0.1  5599       10.0.2.15    22     0     0`.
fn forwards(usernet: &str, id: &str) -> Vec<String> {
    let mut ours = false;
    let mut found = Vec::new();
    for line in usernet.lines() {
        if line.trim_start().starts_with("Hub ") {
            ours = line.contains(&format!("({id})"));
        } else if ours && line.contains("[HOST_FORWARD]") {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [protocol, _, from, from_port, to, to_port, ..] = words.as_slice() {
                let protocol = protocol.split('[').next().unwrap_or("tcp").to_lowercase();
                let from = if *from == "*" { "" } else { from };
                found.push(format!("{protocol}:{from}:{from_port}-{to}:{to_port}"));
            }
        }
    }
    found
}

/// Returns the `-chardev` that creates a character device, if its name specifies enough.
fn chardev_option(chardev: &LiveChardev) -> Option<QemuOption> {
    let id = chardev.label.replace(',', ",,");
    let name = chardev.filename.strip_prefix("disconnected:").unwrap_or(&chardev.filename);
    let (kind, rest) = name.split_once(':').unwrap_or((name, ""));
    let server = rest.contains(",server=on");
    let address = rest.split([',', ' ']).next().unwrap_or_default();
    let text = match kind {
        "null" | "ringbuf" => format!("backend={kind},id={id}"),
        "pty" => format!("backend=pty,id={id}"),
        "unix" if server => format!("backend=socket,id={id},path={address},server=on,wait=off"),
        "unix" => format!("backend=socket,id={id},path={address}"),
        "tcp" if server => {
            let (host, port) = address.rsplit_once(':')?;
            format!("backend=socket,id={id},host={host},port={port},server=on,wait=off")
        }
        _ => return None,
    };
    Some(QemuOption::new("chardev", text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_ends_become_options() {
        let net = |kind: &str, details: &str| NetBackend {
            id: "n".to_owned(),
            kind: kind.to_owned(),
            details: details.to_owned(),
        };
        let usernet = "Hub 0 (#net185):\n  TCP[HOST_FORWARD]  9 127.0.0.1  1 10.0.2.15 1 0 0\nHub -1 (n):
  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ
  TCP[HOST_FORWARD]  11       127.0.0.1  5599       10.0.2.15    22     0     0
  UDP[HOST_FORWARD]  12               *  53         10.0.2.15    53     0     0\n";
        assert_eq!(
            netdev(&net("user", "index=0,type=user,net=10.0.2.0,restrict=off"), usernet),
            Some(QemuOption::new(
                "netdev",
                "type=user,id=n,hostfwd=tcp:127.0.0.1:5599-10.0.2.15:22,hostfwd=udp::53-10.0.2.15:53"
            ))
        );
        assert_eq!(
            netdev(&net("tap", "index=0,type=tap,ifname=tap3,script=no,downscript=no"), ""),
            Some(QemuOption::new("netdev", "type=tap,id=n,ifname=tap3,script=no,downscript=no"))
        );
        let tap = netdev(&net("tap", "index=0,type=tap,ifname=tap3"), "").unwrap();
        assert_eq!(with_vhost(&tap), QemuOption::new("netdev", "type=tap,id=n,ifname=tap3,vhost=on"));
        assert_eq!(netdev(&net("tap", "index=0,type=tap,fd=20"), ""), None);
        assert_eq!(netdev(&net("vde", ""), ""), None);
    }

    #[test]
    fn character_devices_become_options() {
        let option = |filename: &str| {
            chardev_option(&LiveChardev { label: "c".to_owned(), filename: filename.to_owned() })
                .and_then(|given| given.value)
        };
        assert_eq!(option("null").as_deref(), Some("backend=null,id=c"));
        assert_eq!(
            option("disconnected:unix:/run/a,server=on").as_deref(),
            Some("backend=socket,id=c,path=/run/a,server=on,wait=off")
        );
        assert_eq!(
            option("tcp:127.0.0.1:5,server=on <-> 127.0.0.1:9").as_deref(),
            Some("backend=socket,id=c,host=127.0.0.1,port=5,server=on,wait=off")
        );
        assert_eq!(option("file"), None);
    }
}
