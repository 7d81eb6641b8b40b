//! The kill matrix: at the fault points of the handover, agents and QEMUs are killed and links cut. Afterwards, with
//! agents restarted and the link healed, the guest runs on exactly one side, whole; nothing is left behind; and it can
//! be migrated again. Needs root.
//!
//! Fault points are generated from the engine's transition table. `fault_points.txt` names for each transition the
//! scenario that reaches it, or states that only the model does; a transition without a line there fails the test. A
//! seeded sample is run here, all of it with `WHIMBREL_SOAK=1` (`make soak`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]
#![allow(unreachable_pub, missing_docs, reason = "what the modules of a test share is seen by them alone")]

mod arena;
#[path = "../common/mod.rs"]
mod common;
mod plan;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};

use std::time::{Duration, Instant};

use common::DEADLINE;
use common::draw::{Generator, seed};
use engine::handover::table::{fault_points, transitions};
use lab::Direction;
use store::registry::SqliteRegistry;

use arena::Arena;
use plan::{INJURIES, Injury, InjuryPlan};

fn soak() -> bool {
    std::env::var_os("WHIMBREL_SOAK").is_some()
}

/// Returns true for a step of a participant of the migration: these points follow from the list of participants, and
/// not from the table, whose points have a place in a transition behind a colon.
fn is_of_participant(point: &str) -> bool {
    !point.contains(':')
}

/// Returns the points of an undisturbed migration, in the order of the table; those of the participants follow them.
fn points_of(arena: &mut Arena) -> Vec<String> {
    arena.retry();
    arena.cluster.a.wait_settled();
    arena.cluster.b.wait_settled();
    let seen = arena.faults().seen();
    let all: Vec<_> = fault_points().iter().map(ToString::to_string).collect();
    let (of_participants, of_table): (Vec<_>, Vec<_>) =
        seen.keys().partition(|point| is_of_participant(point));
    for point in of_table {
        assert!(all.contains(point), "{point} is not in the table");
    }
    let of_participants: Vec<_> = of_participants.into_iter().cloned().collect();
    all.into_iter().filter(|point| seen.contains_key(point)).chain(of_participants).collect()
}

/// Runs a sample of the cells that every migration passes; each must be reached. Additional points of a migration on a
/// busy host (a registry that was asked twice, because the first answer was late) may not occur in the next one.
fn sample(arena: fn() -> Arena, usual_seed: u64, cells: usize) {
    let seed = seed(usual_seed);
    let mut arena = arena();
    let list = List::read();
    let is_on_every_way =
        |point: &String| point.split_once(':').is_none_or(|(name, _)| list.word(name) == "undisturbed");
    let points: Vec<_> = points_of(&mut arena).into_iter().filter(is_on_every_way).collect();
    print_past_harness(&format!(
        "{} fault points in the table, {} on the way of an undisturbed migration",
        fault_points().len(),
        points.len()
    ));
    let nothing = InjuryPlan(Vec::new());
    let mut all: Vec<_> =
        points.iter().flat_map(|point| INJURIES.map(|injury| nothing.and(point, injury))).collect();
    let mut draw = Generator(seed);
    let mut ways: Vec<_> = (0..cells).map(|_| all.swap_remove(draw.below(all.len()))).collect();
    print_past_harness(&format!("{cells} cells drawn with WHIMBREL_SEED={seed}"));
    // One cell again and again, for debugging:
    // WHIMBREL_CELL="CutBoth at destination/starting/continued:before-effects".
    if let Ok(cell) = std::env::var("WHIMBREL_CELL") {
        ways = vec![InjuryPlan::parse(&cell); 10];
    }
    for (turn, plan) in ways.iter().enumerate() {
        // On a busy host a migration may take another path than usual.
        assert!((0..5).any(|_| arena.run(plan)), "{plan} was not reached");
        if turn % 4 == 3 || turn + 1 == ways.len() {
            arena.retry();
        }
    }
}

/// Runs the whole matrix: each injury at each point of an undisturbed migration; then at each point that only an injury
/// led to; and so on, until no new point is found or a cell has three injuries. Failed cells are reported together at
/// the end.
fn whole(new_arena: fn() -> Arena) {
    const MOST_INJURIES: usize = 3;
    let mut arena = new_arena();
    let points = points_of(&mut arena);
    let mut known: BTreeSet<String> = points.iter().cloned().collect();
    let mut open: VecDeque<_> = points.into_iter().map(|point| (InjuryPlan(Vec::new()), point)).collect();
    let (mut done, mut failed, mut unreached) = (0, Vec::new(), Vec::new());
    let mut injured = BTreeSet::new();
    while let Some((before, point)) = open.pop_front() {
        for injury in INJURIES {
            let plan = before.and(&point, injury);
            let seen_before = arena.faults().seen();
            let cell = catch_unwind(AssertUnwindSafe(|| {
                let reached = arena.run(&plan);
                arena.retry();
                reached
            }));
            let seen = arena.faults().seen();
            if let Ok(reached) = cell {
                done += 1;
                if reached {
                    injured.insert(point.clone());
                } else {
                    unreached.push(plan.to_string());
                }
            } else {
                failed.push(plan.to_string());
                eprintln!("FAILED: {plan}");
                arena = new_arena();
            }
            let is_new = |name: &&String| seen_before.get(*name) != seen.get(*name) && !known.contains(*name);
            let new: Vec<_> = seen.keys().filter(is_new).cloned().collect();
            for point in new {
                known.insert(point.clone());
                if plan.0.len() < MOST_INJURIES {
                    open.push_back((plan.clone(), point));
                }
            }
        }
    }
    let all = fault_points();
    print_past_harness(&format!(
        "{done} cells, {} of {} fault points injured, {} seen",
        injured.len(),
        all.len(),
        known.len()
    ));
    println!("not reached a second time: {unreached:#?}");
    let transitions: BTreeSet<_> =
        injured.iter().filter_map(|point| Some(point.split_once(':')?.0.to_owned())).collect();
    println!("injured transitions: {transitions:#?}");
    assert!(failed.is_empty(), "{} cells failed: {failed:#?}", failed.len());
    let list = List::read();
    let called_otherwise = |name: &&String| !["undisturbed", "injured"].contains(&list.word(name));
    let wrong: Vec<_> = transitions.iter().filter(called_otherwise).collect();
    assert!(wrong.is_empty(), "injured, and {FAULT_POINTS} says otherwise: {wrong:#?}");
}

/// Prints past the harness, which keeps the output of passing tests.
fn print_past_harness(what: &str) {
    drop(writeln!(std::io::stderr(), "{what}"));
}

fn matrix(arena: fn() -> Arena, usual_seed: u64, cells: usize) {
    if soak() { whole(arena) } else { sample(arena, usual_seed, cells) }
}

#[test]
fn a_sample_of_the_matrix() {
    matrix(|| Arena::new(false), 0x5eed, 8);
}

#[test]
fn a_sample_of_the_matrix_with_a_registry() {
    matrix(|| Arena::new(true), 0x5eee, 6);
}

#[test]
fn a_sample_of_the_matrix_with_a_disk_that_is_copied() {
    matrix(Arena::with_copied_disk, 0x5eef, 5);
}

/// A host that is gone for good after COMMITTED: the peer takes over, by the registry.
#[test]
fn with_a_registry_the_other_side_takes_over() {
    // The destination is lost with its host: the source takes the VM back.
    let mut arena = Arena::new(true);
    hold(&mut arena, "source/stopped/ready[registry]:after-1-journal", |arena| {
        arena.cluster.b.kill();
        arena.injure(Injury::DestinationQemu);
    });
    arena.cluster.a.wait_settled();
    assert_eq!(arena.cluster.a.vm("vm1").unwrap()["state"], "running", "{}", arena.cluster.a.log());
    arena.check_guest("taken back");
    arena.cluster.b.start();
    arena.cluster.b.wait_settled();
    arena.retry();

    // The source is lost with its host before GO gets through: the destination finds COMMITTED in the registry.
    let mut arena = Arena::new(true);
    hold(&mut arena, "source/stopped/ready[registry]:after-1-journal", |arena| {
        arena.cluster.lab.cut(Direction::AToB).unwrap();
    });
    // Offered again and again until the registry has it.
    wait_for_offer(&arena);
    arena.cluster.a.kill();
    for pid in arena.qemus("a") {
        lab::kill_pid(pid).unwrap();
    }
    arena.cluster.b.wait_settled();
    assert_eq!(arena.cluster.b.vm("vm1").unwrap()["state"], "running", "{}", arena.cluster.b.log());
    arena.at = "b";
    arena.check_guest("taken over");
}

/// Continues a paused guest over a monitor, as an HA manager does.
fn foreign_cont(arena: &Arena, host: &str) -> UnixStream {
    let vms = arena.cluster.agent(host).directory.join("run/vms");
    let [vm] = &common::entries(&vms)[..] else { panic!("not one VM in {}", vms.display()) };
    let mut monitor = UnixStream::connect(vms.join(vm).join("lab.sock")).unwrap();
    monitor.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"cont\"}\n").unwrap();
    monitor
}

/// Only its agent can run a copy that is ready, against all other programs; and a restarted agent does not pass on
/// commands that were sent to it in the meantime.
#[test]
fn nobody_else_starts_a_copy_in_doubt() {
    let mut arena = Arena::new(false);
    hold(&mut arena, "source/stopped/ready[no-registry]:before-effects", |arena| {
        arena.cluster.a.kill();
        let [pid] = arena.qemus("b")[..] else { panic!("not one copy") };
        assert!(common::is_stopped(pid));
        let _cont = foreign_cont(arena, "b");
        arena.cluster.b.kill();
        arena.cluster.b.start();
        assert!(common::is_stopped(pid));
        arena.cluster.a.start();
        arena.cluster.a.wait_settled();
        arena.cluster.b.wait_settled();
    });
    arena.check("in doubt");
    assert_eq!(arena.at, "a");
    arena.retry();
}

/// An agent that hangs on a working host keeps its connections; the guest is not stopped for it.
#[test]
fn a_guest_does_not_stand_still_for_an_agent_that_hangs() {
    let mut arena = Arena::new(false);
    hold(&mut arena, "destination/prepared/loaded:before-effects", |arena| arena.cluster.b.freeze());
    arena.cluster.a.wait_settled();
    assert_eq!(arena.cluster.a.vm("vm1").unwrap()["state"], "running", "{}", arena.cluster.a.log());
    arena.check_guest("while the destination hangs");
    arena.cluster.b.thaw();
    arena.cluster.b.wait_settled();
    arena.check("the destination goes on");
    assert_eq!(arena.at, "a");
    arena.retry();
}

fn hold(arena: &mut Arena, point: &str, then: impl FnOnce(&mut Arena)) {
    arena.faults().want(point);
    let mut migration = arena.migrate();
    let held = arena.faults().held(DEADLINE).unwrap();
    then(arena);
    held.release();
    let _ = migration.kill();
    let _ = migration.wait();
}

/// Waits for the offer, which is sent to the witness asynchronously; the destination may have answered it before the
/// check.
fn wait_for_offer(arena: &Arena) {
    let path = arena.cluster.witness.as_ref().unwrap().directory.join("state");
    let registry = SqliteRegistry::open(&path).unwrap();
    let deadline = Instant::now() + DEADLINE;
    let is_made = |record: &proto::message::Ownership| record.offer.is_some() || record.owner.as_str() == "b";
    while !registry.all().unwrap().iter().any(|(_, record)| is_made(record)) {
        assert!(Instant::now() < deadline, "no offer in the registry\n{}", arena.cluster.a.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

const FAULT_POINTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/fault_points.txt");

/// Returns the lines of a file that are no comments.
fn lines_of(path: &str) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines.map(str::to_owned).collect()
}

/// The scenario that reaches each transition, by `fault_points.txt`.
struct List(BTreeMap<String, String>);

impl List {
    fn read() -> Self {
        let lines = lines_of(FAULT_POINTS);
        let pair =
            |line: &String| line.split_once(' ').map(|(name, word)| (name.to_owned(), word.to_owned()));
        let list: BTreeMap<_, _> = lines.iter().filter_map(pair).collect();
        assert_eq!(
            list.len(),
            lines.len(),
            "a transition has two lines, or none of a word, in {FAULT_POINTS}"
        );
        Self(list)
    }

    fn word(&self, transition: &str) -> &str {
        self.0.get(transition).map_or("", String::as_str)
    }
}

/// A transition without a test fails this, and one that is wrongly marked as the model's. The whole kill matrix asserts
/// that its own transitions are marked so.
#[test]
fn every_transition_has_its_line() {
    const TAKEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/engine/tests/model/taken.txt");
    let list = List::read().0;
    let taken: BTreeSet<_> = lines_of(TAKEN).into_iter().collect();
    let is_wrong = |(name, word): &(&String, &String)| match word.as_str() {
        "undisturbed" | "injured" | "recover" | "post-copy" => false,
        "model" => !taken.contains(*name),
        "unreached" => taken.contains(*name),
        _ => true,
    };
    let wrong: Vec<_> = list.iter().filter(is_wrong).collect();
    assert!(wrong.is_empty(), "not so, or no such word: {wrong:#?}; the model takes what {TAKEN} lists");
    let table: BTreeSet<String> = transitions()
        .iter()
        .filter(|transition| !transition.effects.is_empty())
        .map(engine::handover::table::TransitionRow::name)
        .collect();
    let missing: Vec<_> = table.iter().filter(|name| !list.contains_key(*name)).collect();
    let surplus: Vec<_> = list.keys().filter(|name| !table.contains(*name)).collect();
    let count = |word: &str| list.values().filter(|other| *other == word).count();
    print_past_harness(&format!(
        "{} fault points in {} transitions: {} undisturbed, {} injured, {} by an operator, {} in post-copy, {} \
         in the model alone, {} unreached",
        fault_points().len(),
        table.len(),
        count("undisturbed"),
        count("injured"),
        count("recover"),
        count("post-copy"),
        count("model"),
        count("unreached")
    ));
    assert!(missing.is_empty(), "without a line in {FAULT_POINTS}: {missing:#?}");
    assert!(surplus.is_empty(), "no such transition any more: {surplus:#?}");
}
