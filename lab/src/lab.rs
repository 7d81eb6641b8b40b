//! The laboratory: five network namespaces on one machine that stand for two hosts, a witness, a router and a client.
//!
//! ```text
//!                       migration link 10.90.0.0/24
//!                    (veth with tbf, or the emulator)
//!          ┌─ .1 ───────────────────────────────────── .2 ─┐
//!        ┌─┴─┐         control 10.91.0.0/24              ┌─┴─┐
//!        │ a ├─ .1 ──────── .3 ┌─────────┐ ───────── .2 ─┤ b │
//!        └─┬─┘                 │ witness │               └─┬─┘
//!   vms ═══╪═══ taps           └─────────┘       taps ═══╪═══ vms       (a bridge in each host)
//!          └──────────────┐ ┌────────┐ ┌──────────────────┘
//!                         └─┤ router ├─┘  VMs' network 10.92.0.0/24, the router is .254
//!                           └───┬────┘
//!                               │         clients' network 10.93.0.0/24, the router is .254
//!                           ┌───┴────┐
//!                           │ client │ .1
//!                           └────────┘
//! ```
//!
//! The client reaches a VM through the router, so a VM's connections survive a move only when the switch in the router
//! learns where the VM is now. Every namespace's name begins with a prefix, so several laboratories can be up at once,
//! and [`Lab::down`] finds all of one by its prefix alone, also after a crash.

mod packets;
mod wiring;

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

pub use crate::addresses::{Direction, MIGRATION_LINK, VM_BRIDGE, VM_GATEWAY, vm_address};
use crate::emulator::{Emulator, Settings};
use crate::error::{Context, Error, Result};
use crate::host::{Host, namespaces, remove_namespace};
use crate::run::run;
use crate::traffic::traffic;
pub use packets::Packets;
use wiring::drop_arriving;
pub(crate) use wiring::silence_ipv6;

/// The device towards the witness in each host.
const CONTROL_LINK: &str = "ctl";
/// The nftables table of cuts.
const CUTS: &str = "cut";

const MIGRATION: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 90, 0, 1), Ipv4Addr::new(10, 90, 0, 2)];
const CONTROL: [Ipv4Addr; 3] =
    [Ipv4Addr::new(10, 91, 0, 1), Ipv4Addr::new(10, 91, 0, 2), Ipv4Addr::new(10, 91, 0, 3)];
pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 93, 0, 1);
pub(crate) const CLIENT_GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 93, 0, 254);

/// The hosts, in the order in which they are drawn above.
const HOSTS: [&str; 5] = ["a", "b", "witness", "router", "client"];
/// Name of a host that only some laboratories have.
const THIRD: &str = "c";

/// The link between the two hosts.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Link {
    /// The full speed of this machine.
    #[default]
    Fast,
    /// A limited rate each way.
    Limited {
        /// The limit.
        rate_bytes_per_s: u64,
    },
    /// Emulated in user space: rate, delay, jitter and loss. Slower than the others.
    Emulated(Settings),
}

/// Configuration of a laboratory.
#[derive(Debug, Clone)]
pub struct LabConfig {
    /// Prefix of the namespaces' names. At most 20 letters, digits and dashes.
    pub prefix: String,
    /// Directory in which the hosts' directories are made.
    pub directory: PathBuf,
    /// The migration link.
    pub link: Link,
}

impl LabConfig {
    /// Returns a laboratory with this prefix, with its directory at the usual place.
    pub fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
            directory: Path::new("/var/tmp/whimbrel-lab").join(prefix),
            link: Link::default(),
        }
    }

    /// Returns a laboratory for one test: no other laboratory on this machine uses its prefix.
    pub fn for_test() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        Self::new(&format!("wt{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed)))
    }

    fn check(&self) -> Result<()> {
        let prefix = &self.prefix;
        let fine = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
        if prefix.is_empty() || prefix.len() > 20 || !prefix.chars().all(fine) {
            return Err(Error::Prefix(prefix.clone()));
        }
        Ok(())
    }

    /// Sets another migration link.
    #[must_use]
    pub fn link(mut self, link: Link) -> Self {
        self.link = link;
        self
    }
}

impl Default for LabConfig {
    fn default() -> Self {
        Self::new("whimbrel")
    }
}

/// A laboratory that is up. It is taken down when this is dropped, unless it was [`Lab::keep`]t.
#[derive(Debug)]
pub struct Lab {
    prefix: String,
    directory: PathBuf,
    emulator: Option<Emulator>,
    kept: bool,
    /// The first host.
    pub a: Host,
    /// The second host.
    pub b: Host,
    /// Reachable from both hosts, on neither.
    pub witness: Host,
    /// The router between VMs and client, and the switch of the VMs' network.
    pub router: Host,
    /// The host of the VMs' clients.
    pub client: Host,
}

impl Lab {
    /// Makes a laboratory. Remains of an earlier one with the same prefix are taken down first.
    pub fn up(config: &LabConfig) -> Result<Self> {
        Self::down(config)?;
        let mut lab = Self::handle(config)?;
        fs::create_dir_all(&lab.directory).context(|| format!("cannot make {}", lab.directory.display()))?;
        lab.hosts().into_iter().try_for_each(make)?;
        lab.connect_witness()?;
        lab.connect_vms()?;
        lab.connect_client()?;
        lab.connect_migration(&config.link)?;
        Ok(lab)
    }

    /// Returns handles of a laboratory that is up already (and stays so when this is dropped).
    pub fn attach(config: &LabConfig) -> Result<Self> {
        let mut lab = Self::handle(config)?;
        lab.kept = true;
        for host in lab.hosts() {
            let path = host.namespace_path();
            if !path.exists() {
                return Err(Error::Config(format!(
                    "no laboratory with prefix {} is up ({} is missing): bring it up with `whimbrel-lab up`",
                    config.prefix,
                    path.display()
                )));
            }
        }
        Ok(lab)
    }

    /// Takes a laboratory down: kills all that runs in its namespaces, removes them and its directory. Does nothing if
    /// there is none.
    pub fn down(config: &LabConfig) -> Result<()> {
        // The paths removed below contain the prefix: it must not lead to another directory.
        config.check()?;
        let names = [&HOSTS[..], &[THIRD]].concat();
        namespaces(&config.prefix, &names)?.iter().try_for_each(|name| remove_namespace(name))?;
        match fs::remove_dir_all(&config.directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context(|| format!("cannot remove {}", config.directory.display()))
            }
            _ => Ok(()),
        }
    }

    /// Keeps it up when this is dropped. An emulated link ends with this process all the same.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Makes a third host, whose bridge for VMs is connected with the router alone, and which is to have this address. It
    /// ends with the laboratory.
    pub fn add_third_host(&self, address: Ipv4Addr) -> Result<Host> {
        let host = Host::new(&self.prefix, THIRD, &self.directory, &[address]);
        make(&host)?;
        self.connect_third(&host)?;
        Ok(host)
    }

    /// Returns all its hosts, in the order in which they are drawn above.
    pub fn hosts(&self) -> [&Host; 5] {
        [&self.a, &self.b, &self.witness, &self.router, &self.client]
    }

    /// Describes the laboratory for a person who uses it by hand.
    pub fn describe(&self) -> String {
        let host = |host: &Host| {
            let control = host.control_address().filter(|control| *control != host.address());
            let control =
                control.map(|control| format!(", towards the witness {control}")).unwrap_or_default();
            let (name, namespace) = (host.name(), host.namespace());
            format!("{name:8} {}{control}: ip netns exec {namespace} COMMAND", host.address())
        };
        let network = format!(
            "VMs have addresses 10.92.0.1 to .253/24 and the gateway {VM_GATEWAY}; their taps belong on the bridge {VM_BRIDGE}."
        );
        let files = format!("Files are in {}.", self.directory.display());
        self.hosts().map(host).into_iter().chain([network, files]).collect::<Vec<_>>().join("\n")
    }

    /// Returns the directory that both hosts see: shared storage for VMs' disks.
    pub fn shared_directory(&self) -> Result<PathBuf> {
        let path = self.directory.join("shared");
        fs::create_dir_all(&path).context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    /// Returns the emulator of an emulated migration link, which changes settings and counts packets.
    pub fn emulator(&self) -> Option<&Emulator> {
        self.emulator.as_ref()
    }

    /// Changes the rate of the migration link, bytes per second each way. `None`: as fast as possible.
    pub fn set_rate(&self, rate_bytes_per_s: Option<u64>) -> Result<()> {
        if let Some(emulator) = &self.emulator {
            emulator.change(|settings| settings.rate_bytes_per_s = rate_bytes_per_s);
            return Ok(());
        }
        for host in [&self.a, &self.b] {
            let Some(rate) = rate_bytes_per_s else {
                // A missing qdisc is no error: the link is then as fast as possible already.
                let _ = host.run(&["tc", "qdisc", "del", "dev", MIGRATION_LINK, "root"]);
                continue;
            };
            // Bytes that may pass at once: a large segment, or the bytes of one timer tick.
            let burst = (rate / 100).max(128 << 10).to_string();
            let rate = format!("{}bit", rate.saturating_mul(8));
            host.run(&[
                "tc",
                "qdisc",
                "replace",
                "dev",
                MIGRATION_LINK,
                "root",
                "tbf",
                "rate",
                &rate,
                "burst",
                &burst,
                "latency",
                "50ms",
            ])?;
        }
        Ok(())
    }

    /// Cuts the migration link in one direction: packets vanish silently, without an error to the sender.
    pub fn cut(&self, direction: Direction) -> Result<()> {
        match &self.emulator {
            Some(emulator) => {
                emulator.cut(direction, true);
                Ok(())
            }
            None => drop_arriving(self.receiver(direction), MIGRATION_LINK),
        }
    }

    /// Cuts the migration link both ways.
    pub fn cut_both(&self) -> Result<()> {
        self.cut(Direction::AToB)?;
        self.cut(Direction::BToA)
    }

    /// Undoes all cuts of the migration link and of the links to the witness.
    pub fn heal(&self) -> Result<()> {
        if let Some(emulator) = &self.emulator {
            emulator.cut(Direction::AToB, false);
            emulator.cut(Direction::BToA, false);
        }
        // Adding it first makes deleting it possible whether or not there were cuts; one transaction.
        [&self.a, &self.b, &self.witness].into_iter().try_for_each(|host| {
            host.run(&["nft", &format!("add table netdev {CUTS}; delete table netdev {CUTS}")]).map(drop)
        })
    }

    /// Cuts a host (`a` or `b`) off from the witness, both ways.
    pub fn cut_witness(&self, host: &Host) -> Result<()> {
        drop_arriving(host, CONTROL_LINK)?;
        drop_arriving(&self.witness, host.name())
    }

    /// Returns the packets that a cut of the migration link has swallowed in a direction since it was made.
    pub fn packets_cut(&self, direction: Direction) -> Result<u64> {
        if let Some(emulator) = &self.emulator {
            return Ok(emulator.counts(direction).cut);
        }
        let rules = self.receiver(direction).run(&["nft", "list", "table", "netdev", CUTS])?;
        let count = rules.split("counter packets ").nth(1).and_then(|rest| rest.split(' ').next());
        count
            .and_then(|count| count.parse().ok())
            .ok_or_else(|| Error::Config(format!("the migration link is not cut: {rules}")))
    }

    /// Returns the bytes sent onto the migration link in a direction so far, with all headers.
    pub fn sent_bytes(&self, direction: Direction) -> Result<u64> {
        let sender = match direction {
            Direction::AToB => &self.a,
            Direction::BToA => &self.b,
        };
        Ok(traffic(sender)?.bytes)
    }

    fn receiver(&self, direction: Direction) -> &Host {
        match direction {
            Direction::AToB => &self.b,
            Direction::BToA => &self.a,
        }
    }

    fn handle(config: &LabConfig) -> Result<Self> {
        config.check()?;
        let prefix = &config.prefix;
        let host = |name, addresses: &[Ipv4Addr]| Host::new(prefix, name, &config.directory, addresses);
        Ok(Self {
            prefix: prefix.clone(),
            directory: config.directory.clone(),
            emulator: None,
            kept: false,
            a: host(HOSTS[0], &[MIGRATION[0], CONTROL[0]]),
            b: host(HOSTS[1], &[MIGRATION[1], CONTROL[1]]),
            witness: host(HOSTS[2], &[CONTROL[2], CONTROL[2]]),
            router: host(HOSTS[3], &[VM_GATEWAY]),
            client: host(HOSTS[4], &[CLIENT]),
        })
    }
}

/// Makes the namespace and the directory of a host.
fn make(host: &Host) -> Result<()> {
    fs::create_dir_all(host.directory()).context(|| format!("cannot make {}", host.directory().display()))?;
    run(Command::new("ip").args(["netns", "add", host.namespace()]))?;
    silence_ipv6(host)?;
    host.run(&["ip", "link", "set", "dev", "lo", "up"]).map(drop)
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !self.kept {
            let config = LabConfig {
                prefix: self.prefix.clone(),
                directory: self.directory.clone(),
                link: Link::default(),
            };
            // An error cannot be returned here; the next `up` or `down` with this prefix tries again.
            let _ = Self::down(&config);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_leads_nowhere_else() {
        for good in ["lab", "x", "x-2", "A-prefix-of-20-chars"] {
            assert!(LabConfig::new(good).check().is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "../lab", "/", "/etc", "a/b", "a b", "a*", "ä", "a-prefix-of-21-chars-"] {
            assert!(matches!(LabConfig::new(bad).check(), Err(Error::Prefix(_))), "{bad}");
        }
    }
}
