//! The rack: whole Debian machines as hosts, each with its own kernel, systemd, KVM and QEMU, emulated by a QEMU on
//! this machine. They have what the namespaces of one kernel do not: KVM that runs stock guests, vhost-net, device
//! mapper, NFS, other kernels, a power that can fail. It shows that something works or does not, never how fast.
//!
//! ```text
//!          clients: this namespace, 10.92.0.254, 10.93.0.254
//!     ┌──────────────── switch: a bridge ─────────────────┐
//!     │ cable                                             │ cable
//!  ┌──┴─ alpha ─────────────────┐         ┌───────────────┴─ beta ─┐
//!  │ eth1 ─┬─ bridge vms        │         │                        │
//!  │       │  10.93.0.1 (host)  │         │  10.93.0.2             │
//!  │       └─ taps of guests    │         │                        │
//!  └────────────────────────────┘         └────────────────────────┘
//! ```
//!
//! A machine boots once in a minute; its state is kept in the cache ([`booted`]), and hosts start from it in seconds.
//! Each starts from the same state and shares nothing with earlier ones.

mod agents;
mod booted;
mod host;
mod machine;
mod snapshot;
mod tools;
pub mod tried;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::environment::Environment;
use crate::error::{Context, Error, Result};
use crate::host::{Host, remove_namespace};
use crate::lab::LabConfig;
pub use agents::WITNESS;
use booted::booted_state;
pub use host::{RackHost, RackSerial};
use machine::Parts;
pub use machine::{GuestQemu, HostSpec, Kernel};
pub use tools::Tools;

/// The bridge in the rack's namespace that joins the hosts.
const SWITCH: &str = "switch";
/// The host of the namespace, in its name.
const NAMESPACE: &str = "rack";
/// The size of the disk with what a run brings along. A state can be loaded only with disks of the same sizes.
const TOOLS_BYTES: u64 = 256 << 20;

/// Racks share two processors, and would wait for each other anyway.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Hosts that are up. Their power fails when this is dropped; if the test is failing, their logs and states are left in
/// a directory that is printed.
#[derive(Debug)]
pub struct Rack {
    /// The hosts, in the order in which they were asked for.
    pub hosts: Vec<RackHost>,
    /// The namespace with the switch, in which clients run.
    pub switch: Host,
    environment: Environment,
    directory: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Rack {
    /// Checks that this machine has what a rack needs.
    pub fn check(environment: &Environment) -> Result<()> {
        Parts::discover(environment).map(drop)
    }

    /// Starts hosts. Waits for other racks of this process to end.
    pub fn up(environment: &Environment, tools: &Tools, specs: &[HostSpec]) -> Result<Self> {
        let parts = Parts::discover(environment)?;
        let mut rack = Self::empty(environment, |directory| fs::create_dir_all(directory))?;
        let image = rack.tools();
        let brings_qemu = specs.iter().any(|spec| spec.qemu == GuestQemu::OfThisMachine);
        tools.write(environment, &image, brings_qemu)?;
        for (number, spec) in (1..).zip(specs) {
            rack.hosts.push(RackHost::new(spec, number, &rack.switch, &image, &parts));
        }
        if let Err(error) = rack.start(&parts) {
            let place =
                rack.preserve().map_or_else(|lost| lost.to_string(), |place| place.display().to_string());
            return Err(Error::Config(format!("{error}; see {place}")));
        }
        Ok(rack)
    }

    /// Starts the hosts that a failing test left in a directory, from their states at its failure.
    pub fn resume(environment: &Environment, preserved: &Path) -> Result<Self> {
        let parts = Parts::discover(environment)?;
        let from = fs::canonicalize(preserved).context(|| format!("cannot find {}", preserved.display()))?;
        // Paths of sockets are short.
        let mut rack = Self::empty(environment, |directory| std::os::unix::fs::symlink(&from, directory))?;
        let hosts = rack.switch.directory().to_owned();
        let context = || format!("{} has no hosts of a rack", hosts.display());
        for entry in fs::read_dir(&hosts).context(context)? {
            // Others are not hosts: certificates, the machine whose state is written.
            let Ok(text) = fs::read_to_string(entry.context(context)?.path().join(host::SPEC)) else {
                continue;
            };
            let (number, spec): (u8, HostSpec) =
                serde_json::from_str(&text).map_err(std::io::Error::from).context(context)?;
            rack.hosts.push(RackHost::new(&spec, number, &rack.switch, &rack.tools(), &parts));
        }
        rack.hosts.iter_mut().try_for_each(RackHost::resume)?;
        Ok(rack)
    }

    /// Returns a rack without hosts, in a new directory, which `make` makes.
    fn empty(environment: &Environment, make: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<Self> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let LabConfig { prefix, directory, .. } = LabConfig::for_test();
        let parent = directory.parent().unwrap_or(&directory);
        fs::create_dir_all(parent)
            .and_then(|()| make(&directory))
            .and_then(|()| fs::create_dir_all(directory.join(NAMESPACE)))
            .context(|| format!("cannot make {}", directory.display()))?;
        let switch = Host::new(&prefix, NAMESPACE, &directory, &[crate::addresses::VM_GATEWAY]);
        let environment = environment.clone();
        let rack = Self { hosts: Vec::new(), switch, environment, directory, _turn: turn };
        rack.make_switch()?;
        Ok(rack)
    }

    /// Returns the disk with what the run brings along.
    fn tools(&self) -> PathBuf {
        self.directory.join("tools.img")
    }

    fn start(&mut self, parts: &Parts) -> Result<()> {
        let of = |host: &RackHost| booted_state(host.spec(), &self.environment, parts, &self.switch);
        let snapshots = self.hosts.iter().map(of).collect::<Result<Vec<_>>>()?;
        thread::scope(|scope| {
            let hosts = self.hosts.iter_mut().zip(&snapshots);
            let starts: Vec<_> = hosts.map(|(host, from)| scope.spawn(move || host.restore(from))).collect();
            let mut ends = starts.into_iter().map(thread::ScopedJoinHandle::join);
            ends.try_for_each(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Returns the environment that the hosts have, too: its kernel and tiny guest are at the same paths.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }

    fn make_switch(&self) -> Result<()> {
        crate::run(std::process::Command::new("ip").args(["netns", "add", self.switch.namespace()]))?;
        crate::lab::silence_ipv6(&self.switch)?;
        let run = |words: &str| self.switch.run(&words.split(' ').collect::<Vec<_>>()).map(drop);
        run("ip link set dev lo up")?;
        run(&format!("ip link add name {SWITCH} type bridge forward_delay 0"))?;
        run(&format!("ip link set dev {SWITCH} up"))?;
        for network in [92, 93] {
            run(&format!("ip addr add 10.{network}.0.254/24 dev {SWITCH}"))?;
        }
        Ok(())
    }

    /// Leaves logs and states of the hosts in a directory, and returns it. An earlier one of the same test is removed.
    fn preserve(&mut self) -> std::io::Result<PathBuf> {
        for host in &mut self.hosts {
            if host.has_ended() {
                eprintln!(
                    "the machine of {} was reset, which is a fault of the emulation: run the test again",
                    host.name()
                );
            }
            host.preserve();
        }
        let test = thread::current().name().unwrap_or("main").replace("::", "-");
        let to = Path::new("/var/tmp/whimbrel-lab/failed-racks").join(test);
        let _ = fs::remove_dir_all(&to);
        fs::create_dir_all(to.parent().unwrap_or(&to))?;
        fs::rename(&self.directory, &to)?;
        Ok(to)
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        if thread::panicking() {
            match self.preserve() {
                Ok(place) => eprintln!("logs and states of the rack's hosts are in {}", place.display()),
                Err(error) => eprintln!("logs and states of the rack's hosts could not be kept: {error}"),
            }
        }
        self.hosts.clear();
        // Errors cannot be returned here.
        let _ = remove_namespace(self.switch.namespace());
        let _ = fs::remove_dir_all(&self.directory);
    }
}
