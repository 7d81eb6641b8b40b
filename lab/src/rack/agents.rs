//! Whimbrel on the hosts of a rack, as its manual says: a unit of systemd, a configuration, certificates. And guests
//! that it migrates.

use std::path::Path;
use std::thread;

use serde_json::Value;
use toml::{Table, toml};

use super::machine::GuestQemu;
use super::tools::{BROUGHT_FIRMWARE, BROUGHT_QEMU, MOUNTED};
use super::{Rack, RackHost, RackSerial};
use crate::error::{Error, Result};
use crate::follow::LONGEST_WAIT;
use crate::pki::{Identity, Pki};
use crate::spec::{Device, GuestSpec};
use crate::testing::CommandOutput;

/// The name of the host that keeps the ownership registry, if a rack has a host of this name.
pub const WITNESS: &str = "witness";
/// The directory of guests' files on each host.
const GUESTS: &str = "/srv/vms";
/// The agent's configuration on each host.
const CONFIGURATION: &str = "/etc/whimbrel/agent.toml";

/// The unit of the manual (docs/operations/agent.md).
const UNIT: &str = "[Unit]
Description=Whimbrel agent
Wants=network-online.target
After=network-online.target remote-fs.target rack-host.service

[Service]
ExecStart=/usr/local/bin/whimbrel agent --config /etc/whimbrel/agent.toml
Restart=always
RestartSec=1
KillMode=process
OOMScoreAdjust=-900

[Install]
WantedBy=multi-user.target
";

impl Rack {
    /// Installs and starts an agent on each host. Tables of `more` replace those of the configuration. A host with the
    /// name [`WITNESS`] keeps the ownership registry.
    pub fn install_agents(&self, more: &Table) -> Result<()> {
        let pki = Pki::new(&self.switch.directory().join("pki"))?;
        let identity = |host: &RackHost| pki.issue(host.name(), &[host.address().into()]);
        let identities = self.hosts.iter().map(identity).collect::<Result<Vec<_>>>()?;
        // Guests' kernels have the same paths as here.
        let cache = self.environment().cache().display().to_string();
        let install = &|host: &RackHost, identity: &Identity| {
            install(host, identity, &self.configuration(host, more))?;
            host.shell(&format!("mkdir -p \"$(dirname '{cache}')\" && ln -sfn {MOUNTED} '{cache}'")).map(drop)
        };
        thread::scope(|scope| {
            let hosts = self.hosts.iter().zip(&identities);
            let installs: Vec<_> =
                hosts.map(|(host, identity)| scope.spawn(move || install(host, identity))).collect();
            let mut ends = installs.into_iter().map(thread::ScopedJoinHandle::join);
            ends.try_for_each(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Replaces tables of a host's configuration by those of `more`, beside the usual ones, and starts its agent anew.
    pub fn configure(&self, host: &RackHost, more: &Table) -> Result<()> {
        host.write(CONFIGURATION, &self.configuration(host, more).to_string())?;
        start(host)
    }

    /// Returns a command's result on the program's command line on a host.
    pub fn whimbrel(&self, host: &RackHost, words: &[&str]) -> CommandOutput {
        let words: Vec<_> = ["whimbrel", "--json"].iter().chain(words).copied().collect();
        CommandOutput::by(&mut host.command(&words))
    }

    /// Starts the tiny guest on a host, as a unit `vm-NAME`, waits until its load runs, and lets the agent adopt it. A
    /// user that runs it is also in the group `kvm`, and owns its tap.
    pub fn start_guest(&self, host: &RackHost, spec: &GuestSpec) -> Result<RackSerial> {
        let user = spec.user.unwrap_or(0).to_string();
        for device in &spec.devices {
            if let Device::Net(net) = device {
                if spec.user.is_some() {
                    host.run(&["ip", "tuntap", "add", "dev", &net.tap, "mode", "tap", "user", &user])?;
                }
                self.tap(&net.tap)?;
            }
        }
        let directory = Path::new(GUESTS).join(&spec.name);
        let arguments = spec.arguments(self.environment(), &directory)?;
        let (name, unit) = (directory.display().to_string(), format!("vm-{}", spec.name));
        host.run(&["rm", "-rf", &name])?;
        host.run(&["install", "-d", "-o", &user, "-g", &user, &name])?;
        let mut words = vec!["systemd-run", "--quiet", "--collect", "--unit", &unit];
        let uid = format!("--uid={user}");
        if spec.user.is_some() {
            words.extend([uid.as_str(), "--property=SupplementaryGroups=kvm"]);
        }
        words.extend(["--", qemu_of(host)]);
        words.extend(arguments.iter().map(String::as_str));
        host.run(&words)?;
        let serial = host.serial(&name)?;
        serial.follow()?.wait_for_tick(LONGEST_WAIT, |_| true)?;
        host.run(&["whimbrel", "vm", "adopt", "--qmp", &format!("{name}/qmp.sock")])?;
        Ok(serial)
    }

    /// Makes a tap on each host, joined to the switch.
    pub fn tap(&self, name: &str) -> Result<()> {
        let script = format!(
            "ip tuntap add dev {name} mode tap 2>/dev/null || true; ip link set dev {name} master vms up"
        );
        self.hosts.iter().try_for_each(|host| host.shell(&script).map(drop))
    }

    /// Returns the serial line of a guest that has arrived at a host.
    pub fn serial_at(&self, host: &RackHost, vm: &str) -> Result<RackSerial> {
        let shown = self.whimbrel(host, &["vm", "show", vm]);
        let qmp = serde_json::from_str::<Value>(&shown.stdout)
            .ok()
            .and_then(|vm| Some(vm["qmp"].as_str()?.to_owned()));
        let qmp =
            qmp.ok_or_else(|| Error::Config(format!("{} has no guest {vm}: {shown:?}", host.name())))?;
        host.serial(&Path::new(&qmp).parent().unwrap_or(Path::new("/")).display().to_string())
    }

    /// Migrates a guest with `--verify`, and returns the report.
    pub fn migrate(&self, vm: &str, from: &RackHost, to: &RackHost, more: &[&str]) -> CommandOutput {
        let mut words = vec!["migrate", vm, "--to", to.name(), "--verify"];
        words.extend(more);
        self.whimbrel(from, &words)
    }

    fn configuration(&self, host: &RackHost, more: &Table) -> Table {
        let mut config = Table::new();
        let listen = |host: &RackHost| format!("{}:7740", host.address());
        config.insert("host".to_owned(), host.name().into());
        config.insert("listen".to_owned(), listen(host).into());
        let tls = toml! { ca = "ca.pem" certificate = "host.pem" key = "host.key" };
        config.insert("tls".to_owned(), tls.into());
        let peer = |host: &RackHost| {
            let address = Table::from_iter([("address".to_owned(), listen(host).into())]);
            (host.name().to_owned(), address.into())
        };
        config.insert("hosts".to_owned(), self.hosts.iter().map(peer).collect::<Table>().into());
        if host.name() == WITNESS {
            config.insert("role".to_owned(), "witness".into());
            return config;
        }
        if self.hosts.iter().any(|host| host.name() == WITNESS) {
            let registry = Table::from_iter([("host".to_owned(), WITNESS.into())]);
            config.insert("registry".to_owned(), registry.into());
        }
        if host.spec().qemu == GuestQemu::OfThisMachine {
            let qemu = toml! { binaries = [BROUGHT_QEMU] data_dirs = [BROUGHT_FIRMWARE] };
            config.insert("qemu".to_owned(), qemu.into());
        }
        let pool = toml! { pool = { directory = "/srv/images" } };
        config.insert("disks".to_owned(), pool.into());
        config.extend(more.clone());
        config
    }
}

/// Returns the program that runs guests on a host.
pub(super) fn qemu_of(host: &RackHost) -> &'static str {
    match host.spec().qemu {
        GuestQemu::OfTheHost => "/usr/bin/qemu-system-x86_64",
        GuestQemu::OfThisMachine => BROUGHT_QEMU,
    }
}

fn install(host: &RackHost, identity: &Identity, config: &Table) -> Result<()> {
    for (file, name) in
        [(&identity.ca, "ca.pem"), (&identity.certificate, "host.pem"), (&identity.key, "host.key")]
    {
        host.put(file, &format!("/etc/whimbrel/{name}"))?;
    }
    host.write(CONFIGURATION, &config.to_string())?;
    host.write("/etc/systemd/system/whimbrel.service", UNIT)?;
    host.shell(&format!(
        "install -m 755 {MOUNTED}/whimbrel /usr/local/bin/whimbrel; mkdir -p /srv/images {GUESTS}
        systemctl daemon-reload; systemctl --quiet enable whimbrel; sync"
    ))?;
    start(host)
}

/// Starts an agent, also anew, and waits until it answers.
fn start(host: &RackHost) -> Result<()> {
    let script = "systemctl restart whimbrel
        until whimbrel vm list >/dev/null 2>&1; do
            systemctl --quiet is-active whimbrel || { journalctl --unit whimbrel --lines 20 >&2; exit 1; }
            sleep 0.2
        done";
    host.shell(script).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_unit_is_that_of_the_manual() {
        let manual = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs/operations/agent.md");
        let manual = fs::read_to_string(manual).unwrap();
        let unit = manual.split("```ini\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        assert_eq!(UNIT.replace(" rack-host.service", "").trim(), unit.trim());
    }
}
