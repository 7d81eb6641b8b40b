//! Connections of the guest to the outside: networks and displays.

use super::CommandBuilder;
use crate::cmdline::QemuOption;
use crate::options::Value;

impl CommandBuilder<'_> {
    pub(super) fn network(&mut self, option: &QemuOption) -> QemuOption {
        let mut value = option.parse_value();
        let kind = value.get("type").unwrap_or_default();
        let id = value.get("id").unwrap_or_default();
        match kind.as_str() {
            "tap" => self.tap(&mut value, &id),
            "bridge" => {
                let bridge = value.get("br").unwrap_or("br0".to_owned());
                let here = self.rules.tap.get(&bridge).or_else(|| self.rules.tap.get(&id)).cloned();
                if let Some(here) = here {
                    value.set("br", &here);
                }
            }
            _ => {
                if ["fd", "local.str", "addr.str", "remote.str"].iter().any(|key| value.get(key).is_some()) {
                    self.problem(
                        "network-descriptor",
                        format!("network {id} uses a descriptor that was passed to QEMU"),
                        "start the guest with a name or an address instead",
                    );
                }
                for key in ["local.path", "addr.path"] {
                    let listens = key == "local.path" || value.get("server").as_deref() == Some("on");
                    if let Some(path) = value.get(key).filter(|_| listens) {
                        let here = self.socket_in_run_dir(&path);
                        value.set(key, &here);
                    }
                }
            }
        }
        QemuOption::new(&option.name, value.to_string())
    }

    fn tap(&mut self, value: &mut Value, id: &str) {
        let ifname = value.get("ifname");
        let rule = |name: &str| self.rules.tap.get(name).cloned();
        let here = ifname.as_deref().and_then(rule).or_else(|| rule(id));
        let descriptors = ["fd", "fds"].iter().find_map(|key| value.get(key));
        if let Some(descriptors) = &descriptors {
            if here.is_none() {
                self.problem(
                    "tap-descriptor",
                    format!("network {id} is a tap that was passed to QEMU as a descriptor"),
                    format!("name the tap device to use on the destination (tap rule for {id:?})"),
                );
                return;
            }
            let queues = descriptors.split(':').count();
            let vhost = ["vhostfd", "vhostfds"].iter().any(|key| value.get(key).is_some());
            for key in ["fd", "fds", "vhostfd", "vhostfds"] {
                value.remove(key);
            }
            value.set("script", "no");
            value.set("downscript", "no");
            if queues > 1 {
                value.set("queues", &queues.to_string());
            }
            if vhost {
                value.set("vhost", "on");
            }
        }
        if let Some(here) = here {
            value.set("ifname", &here);
        }
    }

    pub(super) fn display(&mut self, option: &QemuOption) -> Option<QemuOption> {
        let kind = option.parse_value().get("type").unwrap_or_default();
        if ["none", "vnc", "egl-headless"].contains(&kind.as_str()) {
            return Some(option.clone());
        }
        self.notes.push(format!("the new QEMU has no window ({kind})"));
        None
    }

    pub(super) fn vnc(&mut self, option: &QemuOption) -> QemuOption {
        let mut value = option.parse_value();
        if let Some(path) = value.get("vnc").and_then(|vnc| vnc.strip_prefix("unix:").map(str::to_owned)) {
            let here = self.socket_in_run_dir(&path);
            value.set("vnc", &format!("unix:{here}"));
        }
        // The key may be omitted, and in old versions must be.
        let text = value.to_string();
        QemuOption::new("vnc", text.strip_prefix("vnc=").unwrap_or(&text))
    }

    pub(super) fn spice(&mut self, option: &QemuOption) -> QemuOption {
        let mut value = option.parse_value();
        if value.get("unix").as_deref() == Some("on")
            && let Some(path) = value.get("addr")
        {
            let here = self.socket_in_run_dir(&path);
            value.set("addr", &here);
        }
        QemuOption::new("spice", value.to_string())
    }
}
