//! The kill matrix: at the fault points of the handover, agents and QEMUs are killed and links cut. Afterwards, with
//! agents restarted and the link healed, the guest runs on exactly one side, whole; nothing is left behind; and it can
//! be moved again. Needs root.
//!
//! Fault points are generated from the engine's transition table. `tests/fault_points.txt` says of each transition which
//! scenario reaches it, or that only the model does; a transition without a line there fails the test. A seeded sample
//! is run here, all of it with `WHIMBREL_SOAK=1` (`make soak`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use common::{Cluster, DEADLINE, Guest, GuestSpec, Load, Setup};
use engine::handover::table::{fault_points, transitions};
use lab::Direction;

/// What is done at a fault point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Injury {
    SourceAgent,
    DestinationAgent,
    DestinationQemu,
    CutToDestination,
    CutToSource,
    CutBoth,
}

const INJURIES: [Injury; 6] = [
    Injury::SourceAgent,
    Injury::DestinationAgent,
    Injury::DestinationQemu,
    Injury::CutToDestination,
    Injury::CutToSource,
    Injury::CutBoth,
];

/// A cluster with one guest, wherever it is at the moment.
struct Arena {
    cluster: Cluster,
    guest: Option<Guest>,
    at: &'static str,
}

impl Arena {
    fn new(witness: bool) -> Self {
        let cluster = Cluster::with(&Setup { witness, fault_harness: true, ..Setup::default() });
        let mut arena = Self { cluster, guest: None, at: "a" };
        arena.start_guest();
        arena
    }

    fn start_guest(&mut self) {
        let load = Load { fill_mib: 16, wss_mib: 8, rate_mib_per_s: 10, ..Load::default() };
        self.guest = None;
        // The log of an earlier guest would tell of ticks that this one has not made yet.
        let _ = fs::remove_dir_all(self.cluster.lab.a.directory().join("vm1"));
        self.guest = Some(self.cluster.guest(&GuestSpec::tiny("vm1", load)));
        self.at = "a";
    }

    fn other(&self) -> &'static str {
        if self.at == "a" { "b" } else { "a" }
    }

    fn host(&self, name: &str) -> &lab::Host {
        if name == "a" { &self.cluster.lab.a } else { &self.cluster.lab.b }
    }

    /// QEMUs of the VM on a host.
    fn qemus(&self, name: &str) -> Vec<u32> {
        let is_qemu = |pid: &u32| {
            let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let zombie = state.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'));
            let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            !zombie && exe.to_string_lossy().contains("qemu-system")
        };
        self.host(name).processes().unwrap().into_iter().filter(is_qemu).collect()
    }

    fn migrate(&self) -> Child {
        let words = ["migrate", "vm1", "--to", self.other(), "--on-limit", "stop"];
        let mut command = self.cluster.agent(self.at).command(&words);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap()
    }

    fn injure(&mut self, injury: Injury) {
        let (source, destination) = (self.at, self.other());
        let towards = if source == "a" { Direction::AToB } else { Direction::BToA };
        let back = if source == "a" { Direction::BToA } else { Direction::AToB };
        match injury {
            Injury::SourceAgent => self.cluster.agent_mut(source).kill(),
            Injury::DestinationAgent => self.cluster.agent_mut(destination).kill(),
            Injury::DestinationQemu => {
                for pid in self.qemus(destination) {
                    lab::kill_pid(pid).unwrap();
                }
            }
            Injury::CutToDestination => self.cluster.lab.cut(towards).unwrap(),
            Injury::CutToSource => self.cluster.lab.cut(back).unwrap(),
            Injury::CutBoth => self.cluster.lab.cut_both().unwrap(),
        }
    }

    /// Agents run again, links are whole, and what was begun comes to its end.
    fn mend(&mut self) {
        self.cluster.lab.heal().unwrap();
        for name in ["a", "b"] {
            if !self.cluster.agent_mut(name).is_running() {
                self.cluster.agent_mut(name).kill();
                self.cluster.agent_mut(name).start();
            }
        }
        self.cluster.a.wait_settled();
        self.cluster.b.wait_settled();
    }

    /// Waits until the cut is felt: until the migration waits for something, or is over. That may also never be, where
    /// nothing more had to be said.
    fn let_it_be_felt(&self) {
        let until = Instant::now() + Duration::from_secs(4);
        while Instant::now() < until {
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

    /// The guest runs on exactly one side, whole; nothing is left behind.
    fn check(&mut self, what: &str, injury: Injury) {
        let (a, b) = (self.qemus("a"), self.qemus("b"));
        let logs =
            || format!("--- a\n{}\n--- b\n{}", tail(&self.cluster.a.log()), tail(&self.cluster.b.log()));
        if a.is_empty() && b.is_empty() {
            // Killed after `cont` was sent: the VM crashed, as it may on any host.
            assert_eq!(injury, Injury::DestinationQemu, "{what}: no guest is left\n{}", logs());
            let state =
                |agent: &str| self.cluster.agent(agent).cli(&["migrations"]).ok().json()[0]["state"].clone();
            assert!(
                ["crashed", "active"].iter().any(|word| state(self.other()) == *word),
                "{what}: lost without having run: {} / {}\n{}",
                state(self.at),
                state(self.other()),
                logs()
            );
            for agent in ["a", "b"] {
                if self.cluster.agent(agent).vm("vm1").is_some() {
                    self.cluster.agent(agent).cli(&["vm", "forget", "vm1"]).ok();
                }
            }
            self.start_guest();
            return;
        }
        assert_eq!(a.len() + b.len(), 1, "{what}: {a:?} and {b:?} are there\n{}", logs());
        self.at = if a.is_empty() { "b" } else { "a" };
        let (here, there) = (self.cluster.agent(self.at), self.cluster.agent(self.other()));
        let vm =
            here.vm("vm1").unwrap_or_else(|| panic!("{what}: {} does not know its VM\n{}", self.at, logs()));
        assert_eq!(vm["state"], "running", "{what}: {vm}\n{}", logs());
        assert!(there.vm("vm1").is_none(), "{what}: both have it\n{}", logs());
        self.check_guest(what);
        let pid = a.iter().chain(&b).next().unwrap();
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

    /// What QEMU says of a guest that says nothing itself, twice, to see whether it moves.
    fn registers(&self) -> String {
        let shown = self.cluster.agent(self.at).cli(&["vm", "show", "vm1"]);
        let Ok(shown) = serde_json::from_str::<serde_json::Value>(&shown.stdout) else { return shown.stderr };
        let ask = || {
            let mut monitor = lab::Monitor::connect(std::path::Path::new(shown["qmp"].as_str()?)).ok()?;
            let status = monitor.command("query-status", &serde_json::json!({})).ok()?;
            let line = serde_json::json!({ "command-line": "info registers" });
            let registers = monitor.command("human-monitor-command", &line).ok()?;
            Some(format!("{status} {}", registers.as_str()?.lines().take(6).collect::<Vec<_>>().join(" ")))
        };
        format!("{:?}\n{:?}", ask(), ask())
    }

    fn check_guest(&self, what: &str) {
        let serial =
            if self.at == "a" && self.guest.as_ref().is_some_and(|guest| self.qemus("a") == [guest.pid()]) {
                self.guest.as_ref().unwrap().serial().check()
            } else {
                self.cluster.serial(self.at, "vm1").check()
            };
        let check = serial.unwrap_or_else(|error| {
            let logs = ["a", "b"].map(|name| tail(&self.cluster.agent(name).log()));
            let registers = self.registers();
            panic!(
                "{what}: the guest at {} does not answer: {error}\n{registers}\n{}\n---\n{}",
                self.at, logs[0], logs[1]
            )
        });
        assert!(check.ok && check.wrong == 0, "{what}: {check:?}");
    }

    /// One cell of the matrix. Says whether the point was reached.
    fn run(&mut self, point: &str, injury: Injury) -> bool {
        let what = format!("{injury:?} at {point}, from {}", self.at);
        self.cluster.faults.as_ref().unwrap().want(point);
        let mut migration = self.migrate();
        let held = self.cluster.faults.as_ref().unwrap().held(Duration::from_secs(20));
        let reached = held.is_some();
        if let Some(held) = held {
            self.injure(injury);
            held.release();
            if matches!(injury, Injury::CutToDestination | Injury::CutToSource | Injury::CutBoth) {
                self.let_it_be_felt();
            }
        }
        self.cluster.faults.as_ref().unwrap().forget();
        self.mend();
        let _ = migration.kill();
        let _ = migration.wait();
        self.check(&what, injury);
        if reached {
            eprintln!("held: {what}; now at {}", self.at);
        }
        reached
    }

    /// Moves the guest once with all of memory compared: what was injured before has left nothing in the way.
    fn retry(&mut self) {
        let to = self.other();
        self.cluster.migrate("vm1", self.at, to, &[]);
        self.at = to;
        self.check_guest("a retry");
    }
}

fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}

/// A small generator, so that a sample can be drawn again from its seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

fn soak() -> bool {
    std::env::var_os("WHIMBREL_SOAK").is_some()
}

/// The points of an undisturbed migration, in the order of the table.
fn points_of(arena: &mut Arena) -> Vec<String> {
    arena.retry();
    arena.cluster.a.wait_settled();
    arena.cluster.b.wait_settled();
    let seen = arena.cluster.faults.as_ref().unwrap().seen();
    let all: Vec<_> = fault_points().iter().map(ToString::to_string).collect();
    for point in seen.keys() {
        assert!(all.contains(point), "{point} is not in the table");
    }
    all.into_iter().filter(|point| seen.contains_key(point)).collect()
}

fn matrix(witness: bool, sample: usize) {
    let seed = std::env::var("WHIMBREL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(0x5eed + u64::from(witness));
    let mut arena = Arena::new(witness);
    let points = points_of(&mut arena);
    eprintln!(
        "{} fault points in the table, {} on the way of an undisturbed migration",
        fault_points().len(),
        points.len()
    );
    let mut cells: Vec<_> =
        points.iter().flat_map(|point| INJURIES.map(|injury| (point.clone(), injury))).collect();
    if !soak() {
        let mut draw = Draw(seed);
        cells = (0..sample).map(|_| cells.swap_remove(draw.below(cells.len()))).collect();
        eprintln!("{sample} cells drawn with WHIMBREL_SEED={seed}");
    }
    // One cell again and again, to look into it: WHIMBREL_CELL="CutBoth at destination/starting/contd:before-effects".
    if let Ok(cell) = std::env::var("WHIMBREL_CELL") {
        let (injury, point) = cell.split_once(" at ").unwrap();
        let injury = INJURIES.into_iter().find(|known| format!("{known:?}") == injury).unwrap();
        cells = vec![(point.to_owned(), injury); 10];
    }
    for (turn, (point, injury)) in cells.iter().enumerate() {
        assert!(arena.run(point, *injury), "{point} was not reached");
        if soak() || turn % 4 == 3 || turn + 1 == cells.len() {
            arena.retry();
        }
    }
    if soak() {
        second_faults(&mut arena, &points);
    }
    let seen = arena.cluster.faults.as_ref().unwrap().seen();
    eprintln!("{} fault points reached", seen.len());
    // For the lines of fault_points.txt.
    if let Ok(path) = std::env::var("WHIMBREL_SEEN") {
        let transitions: BTreeSet<_> =
            seen.keys().filter_map(|point| Some(point.split_once(':')?.0)).collect();
        let lines: Vec<_> = transitions.into_iter().collect();
        fs::write(format!("{path}-{}", if witness { "register" } else { "plain" }), lines.join("\n"))
            .unwrap();
    }
}

/// Points that only lie on the way after a first injury: reached by repeating that injury, and injured there.
fn second_faults(arena: &mut Arena, first: &[String]) {
    let mut known: BTreeSet<String> = first.iter().cloned().collect();
    for point in first {
        for injury in INJURIES {
            let before = arena.cluster.faults.as_ref().unwrap().seen();
            if !arena.run(point, injury) {
                continue;
            }
            let after = arena.cluster.faults.as_ref().unwrap().seen();
            let new: Vec<_> = after
                .iter()
                .filter(|(name, count)| {
                    **count > before.get(*name).copied().unwrap_or(0) && !known.contains(*name)
                })
                .map(|(name, _)| name.clone())
                .collect();
            for second in new {
                known.insert(second.clone());
                arena.run_twice(point, injury, &second);
            }
        }
    }
}

impl Arena {
    /// A first injury, and the agent that gets to the second point killed there.
    fn run_twice(&mut self, point: &str, injury: Injury, second: &str) {
        let what = format!("{injury:?} at {point}, then the agent killed at {second}, from {}", self.at);
        self.cluster.faults.as_ref().unwrap().want(point);
        let mut migration = self.migrate();
        if let Some(held) = self.cluster.faults.as_ref().unwrap().held(Duration::from_secs(20)) {
            self.injure(injury);
            self.cluster.faults.as_ref().unwrap().want(second);
            held.release();
            self.restart_dead();
            self.cluster.lab.heal().unwrap();
            if let Some(held) = self.cluster.faults.as_ref().unwrap().held(Duration::from_secs(20)) {
                self.cluster.agent_mut(held.agent).kill();
                held.release();
            }
        }
        self.cluster.faults.as_ref().unwrap().forget();
        self.mend();
        let _ = migration.kill();
        let _ = migration.wait();
        eprintln!("held: {what}; now at {}", self.at);
        self.check(&what, injury);
    }

    fn restart_dead(&mut self) {
        for name in ["a", "b"] {
            if !self.cluster.agent_mut(name).is_running() {
                self.cluster.agent_mut(name).kill();
                self.cluster.agent_mut(name).start();
            }
        }
    }
}

#[test]
fn a_sample_of_the_matrix() {
    matrix(false, 8);
}

#[test]
fn a_sample_of_the_matrix_with_a_register() {
    matrix(true, 6);
}

/// A host that is gone for good after COMMITTED: the other side takes over, by the register.
#[test]
fn with_a_register_the_other_side_takes_over() {
    // The destination is lost with its host: the source takes the VM back.
    let mut arena = Arena::new(true);
    hold(&mut arena, "source/stopped/ready[register]:after-1-journal", |arena| {
        arena.cluster.b.kill();
        arena.injure(Injury::DestinationQemu);
    });
    arena.cluster.a.wait_settled();
    assert_eq!(arena.cluster.a.vm("vm1").unwrap()["state"], "running", "{}", arena.cluster.a.log());
    arena.check_guest("taken back");
    arena.cluster.b.start();
    arena.cluster.b.wait_settled();
    arena.retry();

    // The source is lost with its host before GO gets through: the destination finds COMMITTED in the register.
    let mut arena = Arena::new(true);
    let point = "source/stopped/ready[register]:after-effects";
    hold(&mut arena, "source/stopped/ready[register]:after-1-journal", |arena| {
        arena.cluster.lab.cut(Direction::AToB).unwrap();
        arena.cluster.faults.as_ref().unwrap().want(point);
    });
    let held = arena.cluster.faults.as_ref().unwrap().held(DEADLINE).unwrap();
    wait_for_offer(&arena);
    arena.cluster.a.kill();
    for pid in arena.qemus("a") {
        lab::kill_pid(pid).unwrap();
    }
    held.release();
    arena.cluster.b.wait_settled();
    assert_eq!(arena.cluster.b.vm("vm1").unwrap()["state"], "running", "{}", arena.cluster.b.log());
    arena.at = "b";
    arena.check_guest("taken over");
}

fn hold(arena: &mut Arena, point: &str, then: impl FnOnce(&mut Arena)) {
    arena.cluster.faults.as_ref().unwrap().want(point);
    let mut migration = arena.migrate();
    let held = arena.cluster.faults.as_ref().unwrap().held(DEADLINE).unwrap();
    then(arena);
    held.release();
    let _ = migration.kill();
    let _ = migration.wait();
}

/// The offer goes to the witness without being waited for.
fn wait_for_offer(arena: &Arena) {
    let path = arena.cluster.witness.as_ref().unwrap().directory.join("state");
    let deadline = Instant::now() + DEADLINE;
    let has_offer =
        |name: &str| fs::read(path.join(name)).is_ok_and(|bytes| contains(&bytes, b"incarnation"));
    while !common::entries(&path).iter().any(|name| has_offer(name)) {
        assert!(Instant::now() < deadline, "no offer in the register");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

/// A transition that nobody has thought of testing fails this.
#[test]
fn every_transition_has_its_line() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fault_points.txt");
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: BTreeMap<_, _> = text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
        .map(|line| line.split_once(' ').unwrap_or((line, "")))
        .collect();
    let table: BTreeSet<String> = transitions()
        .iter()
        .filter(|transition| !transition.effects.is_empty())
        .map(engine::handover::table::Transition::name)
        .collect();
    let missing: Vec<_> = table.iter().filter(|name| !lines.contains_key(name.as_str())).collect();
    let surplus: Vec<_> = lines.keys().filter(|name| !table.contains(**name)).collect();
    println!("{} fault points in {} transitions", fault_points().len(), table.len());
    assert!(missing.is_empty(), "without a line in {path}: {missing:#?}");
    assert!(surplus.is_empty(), "no such transition any more: {surplus:#?}");
}
