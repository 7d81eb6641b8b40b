//! Environment of the matrix's cells: two hosts, a guest that migrates to and fro, and the assertions after each
//! injury.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use lab::{Device, Direction, Disk, disk};
use proto::HostId;
use proto::message::{Ownership, RegistryRequest};
use serde_json::Value;
use store::registry::SqliteRegistry;

use crate::common::faults::{FaultServer, HeldAgent};
use crate::common::{self, Cluster, Guest, GuestSpec, Load, Setup};
use crate::plan::{Injury, InjuryPlan};

/// A cluster with one guest, on its present host.
pub struct Arena {
    pub cluster: Cluster,
    guest: Option<Guest>,
    /// The host of the guest.
    pub at: &'static str,
    /// Effect of the present cell on the source's QEMU.
    source_qemu: SourceQemu,
    /// Injuries of this cell so far.
    dealt: Vec<Injury>,
    /// True if neither agents nor links are injured.
    undisturbed: bool,
    /// The guest's disk: on storage that both hosts share, or copied with each migration.
    disk: GuestDisk,
    /// Its present image.
    image: PathBuf,
}

/// Kind of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestDisk {
    Shared,
    Copied,
}

/// Effect of an injury on the source's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceQemu {
    NotKilled,
    /// Killed with the only copy, or with one that the source was just about to run.
    OnlyCopyLost,
    /// Killed when the destination had all of the guest.
    CopyIsThere,
}

impl Arena {
    pub fn new(witness: bool) -> Self {
        Self::with(witness, GuestDisk::Shared)
    }

    /// Returns an arena whose guest migrates with its disk.
    pub fn with_copied_disk() -> Self {
        Self::with(false, GuestDisk::Copied)
    }

    fn with(witness: bool, disk: GuestDisk) -> Self {
        let pool = disk == GuestDisk::Copied;
        let cluster = Cluster::with(&Setup { witness, fault_harness: true, pool, ..Setup::impatient() });
        let image = cluster.lab.shared_directory().unwrap().join("disk.qcow2");
        let mut arena = Self {
            cluster,
            guest: None,
            at: "a",
            source_qemu: SourceQemu::NotKilled,
            dealt: Vec::new(),
            undisturbed: true,
            disk,
            image,
        };
        arena.start_guest();
        arena
    }

    fn start_guest(&mut self) {
        let qemu = self.cluster.environment.qemu(lab::QemuVersion::Installed).unwrap();
        if self.guest.take().is_some() {
            disk::is_sound(&qemu, &self.image).unwrap();
        }
        self.image = self.cluster.lab.shared_directory().unwrap().join("disk.qcow2");
        self.clear_pools();
        let image = self.image.clone();
        disk::known_content(&qemu, &image, "qcow2", 4).unwrap();
        let load = Load { fill_mib: 16, wss_mib: 8, rate_mib_per_s: 10, disk_writers: 1, ..Load::default() };
        // The log of an earlier guest would contain ticks that this one has not made yet.
        let _ = fs::remove_dir_all(self.cluster.lab.a.directory().join("vm1"));
        let mut spec = GuestSpec { second_monitor: true, ..GuestSpec::tiny("vm1", load) };
        spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
        self.guest = Some(self.cluster.guest(&spec));
        self.at = "a";
        self.enter_in_registry();
    }

    /// Enters the first host as owner of a restarted guest, after the loss of the one before on any host.
    fn enter_in_registry(&self) {
        let Some(witness) = &self.cluster.witness else { return };
        let registry = SqliteRegistry::open(&witness.directory.join("state")).unwrap();
        for (vm, record) in registry.all().unwrap() {
            let expected = Some((record.epoch, record.owner));
            let new = Ownership {
                epoch: record.epoch,
                owner: HostId::new("a").unwrap(),
                offer: None,
                released: false,
            };
            registry.apply(&RegistryRequest::CompareAndSet { vm, expected, new }).unwrap();
        }
    }

    /// Returns all images that were made for the guest's disk.
    fn copies(&self) -> Vec<PathBuf> {
        let pool = |host: &lab::Host| host.directory().join("images");
        let files = |pool: PathBuf| common::entries(&pool).into_iter().map(move |name| pool.join(name));
        [&self.cluster.lab.a, &self.cluster.lab.b].into_iter().map(pool).flat_map(files).collect()
    }

    /// Removes images that the guest has left, as an administrator would.
    fn clear_pools(&self) {
        for copy in self.copies().into_iter().filter(|copy| *copy != self.image) {
            fs::remove_file(copy).unwrap();
        }
    }

    /// Finds the guest's disk, which it writes to all the time. Of copies there are its present one and the one that it
    /// has left; one that may have run elsewhere and crashed there is kept, too.
    fn find_disk(&mut self, what: &str) {
        if self.disk == GuestDisk::Shared {
            return;
        }
        let shown = self.cluster.agent(self.at).cli(&["vm", "show", "vm1"]).ok().json();
        let now = PathBuf::from(shown["description"]["disks"][0]["file"].as_str().unwrap());
        let is_known = |copy: &PathBuf| *copy == now || *copy == self.image;
        let strange: Vec<_> = self.copies().into_iter().filter(|copy| !is_known(copy)).collect();
        let may_have_crashed = usize::from(self.dealt.contains(&Injury::DestinationQemu));
        assert!(strange.len() <= may_have_crashed, "{what}: {strange:?} are left");
        self.image = now;
        self.clear_pools();
    }

    fn other(&self) -> &'static str {
        if self.at == "a" { "b" } else { "a" }
    }

    fn host(&self, name: &str) -> &lab::Host {
        if name == "a" { &self.cluster.lab.a } else { &self.cluster.lab.b }
    }

    /// Returns the QEMUs of the VM on a host.
    pub fn qemus(&self, name: &str) -> Vec<u32> {
        let is_qemu = |pid: &u32| {
            let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let zombie = state.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'));
            let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            !zombie && exe.to_string_lossy().contains("qemu-system")
        };
        self.host(name).processes().unwrap().into_iter().filter(is_qemu).collect()
    }

    pub fn migrate(&self) -> Child {
        let mut words = vec!["migrate", "vm1", "--to", self.other(), "--verify", "--on-limit", "stop"];
        words.extend(self.disks());
        let mut command = self.cluster.agent(self.at).command(&words);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap()
    }

    fn disks(&self) -> &'static [&'static str] {
        match self.disk {
            GuestDisk::Shared => &[],
            GuestDisk::Copied => &["--disks", "copy"],
        }
    }

    /// Returns the status of the last migration from a host's agent.
    fn last(&self, host: &str) -> Value {
        self.cluster.agent(host).cli(&["migrations"]).ok().json()[0].clone()
    }

    /// Returns the effect of killing the source's QEMU while an agent is at this point.
    fn worth_of_source_qemu(&self, point: &str) -> SourceQemu {
        let (source, destination) = (self.last(self.at), self.last(self.other()));
        let same = source["epoch"] == destination["epoch"];
        let has_all =
            ["ready", "acquiring", "starting", "active"].iter().any(|word| destination["state"] == *word);
        // Everything has arrived, and the state is just being journaled.
        let is_loaded = point.starts_with("destination/prepared/loaded");
        let waits = ["stopped", "qemu-lost", "committed", "done"].iter().any(|word| source["state"] == *word);
        if waits && same && (has_all || is_loaded) {
            SourceQemu::CopyIsThere
        } else {
            SourceQemu::OnlyCopyLost
        }
    }

    pub fn injure(&mut self, injury: Injury) {
        let (source, destination) = (self.at, self.other());
        let towards = if source == "a" { Direction::AToB } else { Direction::BToA };
        let back = if source == "a" { Direction::BToA } else { Direction::AToB };
        match injury {
            Injury::SourceAgent => self.cluster.agent_mut(source).kill(),
            Injury::DestinationAgent => self.cluster.agent_mut(destination).kill(),
            Injury::SourceQemu => self.kill_qemus(source),
            Injury::DestinationQemu => self.kill_qemus(destination),
            Injury::CutToDestination => self.cluster.lab.cut(towards).unwrap(),
            Injury::CutToSource => self.cluster.lab.cut(back).unwrap(),
            Injury::CutBoth => self.cluster.lab.cut_both().unwrap(),
            Injury::FrozenDestination => self.cluster.agent(destination).freeze(),
        }
    }

    fn kill_qemus(&self, host: &str) {
        for pid in self.qemus(host) {
            lab::kill_pid(pid).unwrap();
        }
    }

    /// Restarts agents, heals links, and lets open migrations end.
    fn mend(&mut self) {
        self.heal_and_restart();
        self.decide_after_a_crash();
        self.cluster.a.wait_settled();
        self.cluster.b.wait_settled();
        self.let_the_proposal_end();
        self.cluster.b.wait_settled();
        self.cluster.a.wait_settled();
    }

    /// Waits for a proposal's end. A destination examines a proposal, and may start a QEMU for it, before it learns
    /// that the migration has failed: it has no migration yet, or none any longer, and is not done.
    fn let_the_proposal_end(&self) {
        let source = self.last(self.at);
        let id = format!("migration=vm1#{}", source["epoch"]);
        let report = self.cluster.agent(self.at).cli(&["report", "vm1"]);
        // The proposal arrives, if only the source's QEMU was injured.
        let arrives = self.source_qemu == SourceQemu::OnlyCopyLost
            && self.undisturbed
            && report.code == 0
            && report.json()["sent_bytes"].as_u64() > Some(0);
        let destination = self.cluster.agent(self.other());
        common::until("the destination is done with what was proposed", || {
            let log = destination.log();
            let Some(at) = log.find(&format!(" received a proposal {id} ")) else { return !arrives };
            // An agent that has died since has reported nothing.
            let after = &log[at..];
            let ends = [
                "report",
                "answered",
                "cannot send the answer to the source",
                "the migration cannot be received",
                "the VM cannot be received",
            ];
            let ended = |line: &str| line.contains(&id) && ends.iter().any(|end| line.contains(end));
            after.lines().any(ended) || after.contains(" ready address=")
        });
    }

    /// Decides about a QEMU of the destination that died after `cont` may have been sent. It may have run: only an
    /// operator can settle that. It may have written to its disk, so that the source's copy is outdated: no host shall
    /// run it (for the other decision see recover.rs beside this).
    fn decide_after_a_crash(&self) {
        let (source, destination) = (self.cluster.agent(self.at), self.cluster.agent(self.other()));
        let undecided =
            || self.last(self.at)["standing"] == "in-doubt" && self.last(self.other())["state"] == "crashed";
        common::until("the migration is over, or an operator has to decide", || {
            source.is_settled() && destination.is_settled() || undecided()
        });
        if undecided() {
            source.cli(&["recover", "vm1", "--discard-copy", "--accept-risk"]).ok();
        }
    }

    fn heal_and_restart(&mut self) {
        self.cluster.lab.heal().unwrap();
        for name in ["a", "b"] {
            self.cluster.agent(name).thaw();
            if !self.cluster.agent_mut(name).is_running() {
                self.cluster.agent_mut(name).kill();
                self.cluster.agent_mut(name).start();
            }
        }
    }

    /// Leaves a link cut, or an agent frozen, until it has an effect: until the migration waits, or has ended, or
    /// (`next`) an agent is held at the next wanted point. Where nothing more has to be sent a cut never has an effect,
    /// so the patience has an end; nothing is asserted about it.
    fn wait_for_effect(&self, next: bool) {
        let until = Instant::now() + Duration::from_secs(8);
        while Instant::now() < until && (!next || self.faults().is_wanted()) {
            let list = self.cluster.agent(self.at).cli(&["migrations"]);
            if list.code == 0 {
                let phase = list.json()[0]["progress"]["phase"].clone();
                if phase.is_null() || phase == "reconnecting" || phase == "in-doubt" {
                    return;
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Checks a lost guest. That is right where the only copy was killed, and has to be reported.
    fn check_lost(&mut self, what: &str, logs: &str) {
        let (source, destination) = (self.last(self.at), self.last(self.other()));
        let states = format!("{source:#} / {destination:#}\n{logs}");
        if self.source_qemu == SourceQemu::OnlyCopyLost {
            assert!(["vm-ended", "failed"].iter().any(|is| source["standing"] == *is), "{what}: {states}");
            assert!(source["message"].to_string().contains("QEMU"), "{what}: it is not said: {states}");
            let of_it = destination["epoch"] == source["epoch"];
            assert!(!of_it || destination["standing"] == "failed", "{what}: {states}");
        } else {
            // Killed after `cont` was sent: the VM crashed, as it may on any host.
            assert!(self.dealt.contains(&Injury::DestinationQemu), "{what}: no guest is left\n{states}");
            let ran = ["crashed", "active"].iter().any(|word| destination["state"] == *word);
            // Or both copies were killed, one after the other.
            let both = self.dealt.contains(&Injury::SourceQemu);
            assert!(ran || both, "{what}: lost without having run: {states}");
        }
        for name in ["a", "b"] {
            let agent = self.cluster.agent(name);
            if let Some(vm) = agent.vm("vm1") {
                assert_ne!(vm["state"], "running", "{what}: {vm}\n{states}");
                agent.cli(&["vm", "forget", "vm1"]).ok();
            }
            let left = common::entries(&agent.directory.join("run/vms"));
            let its_own = name == self.at && self.source_qemu != SourceQemu::NotKilled;
            assert!(left.len() <= usize::from(its_own), "{what}: {left:?} is left at {name}");
        }
        self.start_guest();
    }

    /// Asserts that the guest runs on exactly one side, whole, and that nothing is left behind.
    pub fn check(&mut self, what: &str) {
        let (a, b) = (self.qemus("a"), self.qemus("b"));
        let logs =
            || format!("--- a\n{}\n--- b\n{}", tail(&self.cluster.a.log()), tail(&self.cluster.b.log()));
        if a.is_empty() && b.is_empty() {
            return self.check_lost(what, &logs());
        }
        assert_eq!(a.len() + b.len(), 1, "{what}: {a:?} and {b:?} are there\n{}", logs());
        self.at = if a.is_empty() { "b" } else { "a" };
        let (here, there) = (self.cluster.agent(self.at), self.cluster.agent(self.other()));
        let vm =
            here.vm("vm1").unwrap_or_else(|| panic!("{what}: {} does not know its VM\n{}", self.at, logs()));
        assert_eq!(vm["state"], "running", "{what}: {vm}\n{}", logs());
        assert!(there.vm("vm1").is_none(), "{what}: both have it\n{}", logs());
        self.check_guest(what);
        self.find_disk(what);
        let (here, there) = (self.cluster.agent(self.at), self.cluster.agent(self.other()));
        let pid = a.iter().chain(&b).next().unwrap();
        let holders = holders(&self.image);
        let names: Vec<_> = holders.iter().map(|pid| (pid, status_of(*pid))).collect();
        assert_eq!(holders, [*pid], "{what}: these have the guest's disk open: {names:?}");
        assert!(is_locked(&self.image), "{what}: the guest's disk is not locked");
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("TracerPid:\t0"), "{what}: still traced");
        for descriptor in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            let target = fs::read_link(descriptor.unwrap().path()).unwrap_or_default();
            assert!(
                !target.to_string_lossy().contains("userfaultfd"),
                "{what}: a descriptor is left in QEMU"
            );
        }
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let tracked =
            smaps.lines().filter(|line| line.starts_with("VmFlags:")).any(|line| line.contains(" uw"));
        assert!(!tracked, "{what}: ranges are still tracked");
        let left = common::entries(&there.directory.join("run/vms"));
        assert!(left.is_empty(), "{what}: {left:?} is left at {}", there.name);
        assert!(
            common::entries(&here.directory.join("run/vms")).len() <= 1,
            "{what}: leavings at {}",
            here.name
        );
    }

    pub fn check_guest(&self, what: &str) {
        let serial =
            if self.at == "a" && self.guest.as_ref().is_some_and(|guest| self.qemus("a") == [guest.pid()]) {
                self.guest.as_ref().unwrap().serial().check()
            } else {
                self.cluster.serial(self.at, "vm1").check()
            };
        let check = serial.unwrap_or_else(|error| {
            let logs = ["a", "b"].map(|name| tail(&self.cluster.agent(name).log()));
            let qemu_state = self.cluster.describe_qemu(self.at, "vm1");
            panic!(
                "{what}: the guest at {} does not answer: {error}\n{qemu_state}\n{}\n---\n{}",
                self.at, logs[0], logs[1]
            )
        });
        assert!(check.ok && check.wrong == 0, "{what}: {check:?}");
    }

    pub fn faults(&self) -> &FaultServer {
        self.cluster.faults.as_ref().unwrap()
    }

    /// Returns the agent held at the wanted point; `None` if the migration ends without one.
    fn held_unless_ended(&self, migration: &mut Child) -> Option<HeldAgent> {
        let has_ended = |migration: &mut Child| matches!(migration.try_wait(), Ok(Some(_)));
        let deadline = Instant::now() + common::DEADLINE;
        while Instant::now() < deadline && !has_ended(migration) {
            if let Some(held) = self.faults().held(Duration::from_secs(1)) {
                return Some(held);
            }
        }
        // Agents may still be working.
        self.faults().held(Duration::from_secs(20))
    }

    /// Runs one cell of the matrix: a migration, injured at each step and healed after it, comes to its end. Returns
    /// true if all points were reached.
    pub fn run(&mut self, plan: &InjuryPlan) -> bool {
        let what = format!("{plan}, from {}", self.at);
        self.source_qemu = SourceQemu::NotKilled;
        self.dealt.clear();
        self.undisturbed = plan.0.iter().all(|step| step.injury == Injury::SourceQemu);
        self.faults().want(&plan.0[0].point);
        let mut migration = self.migrate();
        let mut reached = true;
        for (index, step) in plan.0.iter().enumerate() {
            let Some(held) = self.held_unless_ended(&mut migration) else {
                reached = false;
                break;
            };
            self.dealt.push(step.injury);
            // A dead QEMU cannot be killed again.
            if step.injury == Injury::SourceQemu && self.source_qemu == SourceQemu::NotKilled {
                self.source_qemu = self.worth_of_source_qemu(&step.point);
            }
            self.injure(step.injury);
            let next = plan.0.get(index + 1);
            if let Some(next) = next {
                self.faults().want(&next.point);
            }
            held.release();
            if step.injury.is_delayed() {
                self.wait_for_effect(next.is_some());
            }
            self.heal_and_restart();
        }
        self.faults().forget();
        self.mend();
        let _ = migration.kill();
        let _ = migration.wait();
        self.check(&what);
        eprintln!("{}: {what}; now at {}", if reached { "done" } else { "not reached" }, self.at);
        reached
    }

    /// Migrates the guest once with all of memory compared: earlier injuries have left nothing in the way.
    pub fn retry(&mut self) {
        let to = self.other();
        self.cluster.migrate("vm1", self.at, to, self.disks());
        self.at = to;
        self.check_guest("a retry");
        self.find_disk("a retry");
    }
}

/// Returns the processes that have a file open.
fn holders(path: &Path) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap();
    let has_it = |pid: &u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors.map(|entry| entry.path()).any(|fd| fs::read_link(fd).is_ok_and(|to| to == path))
    };
    // A process that ends gives back its memory first, then its files: it runs nothing any more.
    let runs = |pid: &u32| fs::read(format!("/proc/{pid}/maps")).is_ok_and(|maps| !maps.is_empty());
    let processes = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(has_it).filter(runs).collect()
}

/// Returns the name and the state of a process, for a message.
fn status_of(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().take(3).collect::<Vec<_>>().join(", ")
}

/// Returns true if a file is locked.
fn is_locked(path: &Path) -> bool {
    let file = fs::metadata(path).unwrap();
    let device = file.dev();
    // In the kernel's packing.
    let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xf_ff00);
    let name = format!(" {major:02x}:{minor:02x}:{} ", file.ino());
    fs::read_to_string("/proc/locks").unwrap().contains(&name)
}

fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}
