//! Character devices: sockets move to the run directory, files to the log directory, and terminals become
//! files.

use super::{CommandBuilder, MONITOR_ID};
use crate::cmdline::QemuOption;

/// Kinds of character devices that use nothing of the host.
const HOST_INDEPENDENT: &[&str] = &[
    "null",
    "ringbuf",
    "memory",
    "vc",
    "pty",
    "msmouse",
    "wctablet",
    "testdev",
    "spicevmc",
    "spiceport",
    "qemu-vdagent",
    "hub",
    "udp",
    "mux",
    "dbus",
];

impl CommandBuilder<'_> {
    /// Translates `-chardev`.
    pub(super) fn chardev(&mut self, option: &QemuOption) -> Option<QemuOption> {
        let mut value = option.parse_value();
        let id = value.get("id").unwrap_or_default();
        if id == MONITOR_ID {
            return None;
        }
        if let Some(log) = value.get("logfile") {
            let here = self.log(&log);
            self.notes.push(format!(
                "log {log} continues in {here}, and stays there when the guest is migrated away"
            ));
            value.set("logfile", &here);
        }
        let kind = value.get("backend").unwrap_or_default();
        match kind.as_str() {
            "file" => {
                if let Some(path) = value.get("path").filter(|path| is_relocated(path)) {
                    let here = self.log(&path);
                    self.notes.push(format!(
                        "file {path} continues in {here}, and stays there when the guest is migrated away"
                    ));
                    value.set("path", &here);
                }
                value.remove("input-path");
            }
            "socket" => {
                if value.get("fd").is_some() {
                    // A manager passed this monitor as a descriptor: our monitor replaces it.
                    return self.rewrite_passed_descriptor(&id);
                }
                let listens = value.get("server").as_deref() == Some("on");
                if let Some(path) = value.get("path").filter(|_| listens) {
                    let here = self.socket_in_run_dir(&path);
                    value.set("path", &here);
                    // No client connects before the guest exists.
                    value.remove("wait");
                    value.set("wait", "off");
                }
            }
            "stdio" => {
                let here = self.log(&format!("{id}.log"));
                self.notes.push(format!("character device {id} was a terminal and now writes to {here}"));
                value.set("backend", "file");
                value.set("path", &here);
                value.remove("signal");
            }
            _ if HOST_INDEPENDENT.contains(&kind.as_str()) => {}
            _ => {
                self.problem(
                    "chardev-of-host",
                    format!("character device {id} ({kind}) belongs to this host"),
                    "start the guest with a socket or a file instead",
                );
            }
        }
        Some(QemuOption::new("chardev", value.to_string()))
    }

    fn rewrite_passed_descriptor(&mut self, id: &str) -> Option<QemuOption> {
        let is_monitor =
            self.vm.options.iter().any(|option| {
                option.name == "mon" && option.parse_value().get("chardev").as_deref() == Some(id)
            });
        if is_monitor {
            let here = self.socket_in_run_dir(&format!("{id}.sock"));
            let path = here.replace(',', ",,");
            return Some(QemuOption::new(
                "chardev",
                format!("socket,id={id},path={path},server=on,wait=off"),
            ));
        }
        self.problem(
            "chardev-descriptor",
            format!("character device {id} uses a descriptor that was passed to QEMU"),
            "start the guest with a path instead",
        );
        None
    }

    /// Translates `-serial`, `-monitor` and similar options, which specify a character device in one word.
    pub(super) fn short_chardev(&mut self, option: &QemuOption) -> Option<QemuOption> {
        let name = option.name.as_str();
        let text = option.value.as_deref().unwrap_or_default();
        let number = self.out.iter().filter(|other| other.name == name).count();
        let monitor = ["monitor", "qmp", "qmp-pretty"].contains(&name);
        let (mux, word) = text.strip_prefix("mon:").map_or(("", text), |word| ("mon:", word));
        let (kind, rest) = word.split_once(':').unwrap_or((word, ""));
        let new = match kind {
            "stdio" | "con" if name == "monitor" => "none".to_owned(),
            "stdio" | "con" if monitor => return None,
            "stdio" | "con" => {
                let here = self.log(&format!("{name}{number}.log"));
                self.notes.push(format!("-{name} was a terminal and now writes to {here}"));
                // A monitor that shared the terminal is gone with it.
                if !mux.is_empty() && !self.vm.options.iter().any(|other| other.name == "monitor") {
                    self.out.push(QemuOption::new("monitor", "none"));
                }
                format!("file:{here}")
            }
            "file" => {
                let path = rest.split(',').next().unwrap_or_default();
                if is_relocated(path) {
                    let here = self.log(path);
                    self.notes.push(format!(
                        "file {path} continues in {here}, and stays there when the guest is migrated away"
                    ));
                    format!("{mux}file:{here}{}", rest.get(path.len()..).unwrap_or_default())
                } else {
                    text.to_owned()
                }
            }
            "unix" => {
                let mut parts = rest.split(',');
                let path = parts.next().unwrap_or_default();
                let flags: Vec<&str> = parts.collect();
                let listens = flags.iter().any(|flag| *flag == "server" || *flag == "server=on");
                if listens {
                    let here = self.socket_in_run_dir(path);
                    let is_wait = |flag: &&&str| !flag.contains("wait") && !flag.starts_with("server");
                    let others: Vec<&str> = flags.iter().filter(is_wait).copied().collect();
                    let others = others.join(",");
                    let comma = if others.is_empty() { "" } else { "," };
                    format!("{mux}unix:{here},server=on,wait=off{comma}{others}")
                } else {
                    text.to_owned()
                }
            }
            "none" | "null" | "vc" | "pty" | "chardev" | "tcp" | "telnet" | "websocket" | "udp"
            | "msmouse" | "ringbuf" => text.to_owned(),
            _ => {
                self.problem(
                    "chardev-of-host",
                    format!("-{name} {text} belongs to this host"),
                    "start the guest with a socket or a file instead",
                );
                return None;
            }
        };
        Some(QemuOption::new(name, new))
    }
}

/// Returns true if a file at this path is replaced by one on this host; a device belongs to the host.
fn is_relocated(path: &str) -> bool {
    !path.starts_with("/dev/")
}
