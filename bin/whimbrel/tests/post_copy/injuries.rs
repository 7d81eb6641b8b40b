//! Links that are cut, and agents that are killed, while pages are missing.

use std::thread;
use std::time::Duration;

use engine::handover::table::fault_points;
use lab::Direction;

use super::common::draw::{Generator, seed};
use super::common::{Cluster, DEADLINE, Setup, has_event, until};
use super::{HOT_MIB, HYBRID, assert_post_copy, assert_whole_and_movable, stage, stage_of, stage_with};

/// An agent is killed, or the link cut, while pages are missing.
#[derive(Clone, Copy, Debug)]
enum Injury {
    Cut,
    KillSource,
    KillDestination,
    KillBoth,
}

const INJURIES: [Injury; 4] = [Injury::Cut, Injury::KillSource, Injury::KillDestination, Injury::KillBoth];

impl Injury {
    /// Inflicts the injury for `length`.
    fn inflict(self, cluster: &mut Cluster, length: Duration) {
        self.inflict_while(cluster, length, || {});
    }

    /// Inflicts the injury for `length`, and runs `something` at its beginning.
    fn inflict_while(self, cluster: &mut Cluster, length: Duration, something: impl FnOnce()) {
        let (source, destination) = match self {
            Self::Cut => (false, false),
            Self::KillSource => (true, false),
            Self::KillDestination => (false, true),
            Self::KillBoth => (true, true),
        };
        for (name, is_hurt) in [("a", source), ("b", destination)] {
            if is_hurt {
                cluster.agent_mut(name).kill();
            }
        }
        if matches!(self, Self::Cut) {
            cluster.lab.cut_both().unwrap();
        }
        something();
        // Duration of a fault; there is no event to wait for.
        thread::sleep(length);
        if matches!(self, Self::Cut) {
            cluster.lab.heal().unwrap();
        }
        for (name, is_hurt) in [("a", source), ("b", destination)] {
            if is_hurt {
                cluster.agent_mut(name).start();
            }
        }
    }
}

/// Migrates the guest, into memory of either kind, with an injury after this many bytes of the rest.
fn moves_through(cluster: &mut Cluster, ram: &str, injury: Injury, rest_bytes: u64, length: Duration) {
    let migration = cluster.a.begin(&[&HYBRID[..], &["--ram", ram]].concat());
    cluster
        .wait_for_progress(|progress| progress["phase"] == "post-copy" && progress["downtime_us"].is_u64());
    let before = cluster.lab.sent_bytes(Direction::AToB).unwrap();
    let is_underway = || cluster.a.cli(&["migrations"]).ok().json()[0]["standing"] == "underway";
    let is_time = || {
        let sent = cluster.lab.sent_bytes(Direction::AToB).unwrap() - before;
        sent >= rest_bytes || !is_underway()
    };
    until("some of the rest has come", is_time);
    assert!(is_underway(), "it was over before it was hurt: {}", cluster.a.log());
    injury.inflict(cluster, length);
    drop(migration.wait_with_output().unwrap());
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    println!("{injury:?} for {length:?} after {rest_bytes} bytes: {} reconnections", report["reconnections"]);
    assert_eq!(report["destination"]["ram_kind"], ram, "{report:#}");
    assert_post_copy(&report);
}

#[test]
fn a_cut_during_post_copy_is_healed() {
    let (mut cluster, _guest) = stage();
    moves_through(&mut cluster, "anonymous", Injury::Cut, 1 << 20, Duration::from_secs(2));
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert!(has_event(&report, "reconnected"), "{report:#}");
    assert_whole_and_movable(&cluster);
}

/// A cut longer than all patience: no user is offered to run the guest at the source, a request to do so fails, and the
/// migration is not in doubt on either side when the link is healed.
#[test]
fn a_long_cut_never_runs_the_guest_at_the_source() {
    let (cluster, _guest) = stage_with(Setup::impatient());
    let migration = cluster.a.begin(&HYBRID);
    // The source has the report that it runs there.
    cluster
        .wait_for_progress(|progress| progress["phase"] == "post-copy" && progress["downtime_us"].is_u64());
    cluster.lab.cut_both().unwrap();
    let status = || cluster.a.cli(&["migrations"]).ok().json()[0].clone();
    until("it says that the other side is needed", || {
        status()["progress"]["message"]
            .as_str()
            .is_some_and(|output| output.contains("which cannot be reached"))
    });
    assert_eq!(status()["standing"], "underway", "{:#}", status());
    for words in [&["recover", "vm1"][..], &["recover", "vm1", "--run-here", "--accept-risk"]] {
        let output = cluster.a.text(words);
        assert!(output.stdout.contains("the guest has been running on b"), "{output:?}");
        assert!(!output.stdout.contains("continues here"), "{output:?}");
    }
    cluster.lab.heal().unwrap();
    let out = migration.wait_with_output().unwrap();
    assert!(out.status.success(), "{out:?}\n{}", cluster.a.log());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_post_copy(&report);
    assert!(has_event(&report, "reconnected"), "{report:#}");
    cluster.b.wait_settled();
    assert_whole_and_movable(&cluster);
}

#[test]
fn killed_agents_during_post_copy_lose_no_page() {
    let ways = [
        (Injury::KillSource, "anonymous"),
        (Injury::KillDestination, "memfd"),
        (Injury::KillDestination, "anonymous"),
        (Injury::KillBoth, "memfd"),
    ];
    for (injury, ram) in ways {
        let (mut cluster, _guest) = stage();
        moves_through(&mut cluster, ram, injury, 1 << 20, Duration::from_secs(1));
        assert_whole_and_movable(&cluster);
    }
}

/// Transitions of the handover that exist only with post-copy, in an undisturbed migration.
const TRANSITIONS: [&str; 4] = [
    "destination/starting/continued[missing]",
    "source/committed/incomplete",
    "source/committed/running[has-run]",
    "destination/completing/completed",
];

/// An agent is killed at a point: at three of these points, drawn at random, and at all of them in a soak.
#[test]
fn an_agent_that_dies_at_any_point_of_it_is_no_harm() {
    let is_one = |point: &String| TRANSITIONS.iter().any(|name| point.starts_with(&format!("{name}:")));
    let mut points: Vec<_> = fault_points().iter().map(ToString::to_string).filter(is_one).collect();
    assert!(points.len() >= TRANSITIONS.len(), "{points:?}");
    if std::env::var_os("WHIMBREL_SOAK").is_none() {
        let mut draw = Generator(seed(23));
        points = (0..3).map(|_| points.swap_remove(draw.below(points.len()))).collect();
    }
    for point in points {
        println!("killed at {point}");
        let (mut cluster, _guest) = stage_with(Setup { fault_harness: true, ..Setup::default() });
        cluster.faults.as_ref().unwrap().want(&point);
        let migration = cluster.a.begin(&HYBRID);
        // A destination that needs no repeated message does not reach each of them.
        let Some(held) = cluster.faults.as_ref().unwrap().held(DEADLINE) else {
            panic!("{point} was not reached\n{}\n---\n{}", cluster.a.log(), cluster.b.log())
        };
        cluster.agent_mut(held.agent).kill();
        cluster.agent_mut(held.agent).start();
        drop(migration.wait_with_output().unwrap());
        // The source's report is complete after the destination has all pages.
        cluster.b.wait_settled();
        cluster.a.wait_settled();
        let report = cluster.a.cli(&["report", "vm1"]).ok().json();
        assert_post_copy(&report);
        assert_whole_and_movable(&cluster);
    }
}

/// Transitions between the first discard of pages, while the guest still runs here, and the moment at which it is to
/// run there.
const BEFORE_IT_RUNS: [&str; 3] = [
    "destination/prepared/loaded",
    "source/stopped/ready[no-registry]",
    "destination/ready/go[no-registry,run]",
];

/// An agent is killed there, or the link cut: the VM is whole, on either side.
#[test]
fn injuries_before_the_resumption_leave_one_guest() {
    let is_one = |point: &String| BEFORE_IT_RUNS.iter().any(|name| point.starts_with(&format!("{name}:")));
    let of_table: Vec<_> = fault_points().iter().map(ToString::to_string).filter(is_one).collect();
    assert!(of_table.len() >= BEFORE_IT_RUNS.len(), "{of_table:?}");
    let named =
        ["source/discarded", "destination/discarded", "source/missing-pages", "destination/missing-pages"];
    let named = named.map(str::to_owned);
    let ways = |point: String| {
        [Injury::Cut, Injury::KillSource, Injury::KillDestination].map(|injury| (point.clone(), injury))
    };
    let [mut named, mut of_table] =
        [named.to_vec(), of_table].map(|points| points.into_iter().flat_map(ways).collect::<Vec<_>>());
    if std::env::var_os("WHIMBREL_SOAK").is_none() {
        let seed = seed(61);
        println!("drawn with WHIMBREL_SEED={seed}");
        let mut draw = Generator(seed);
        named = (0..2).map(|_| named.swap_remove(draw.below(named.len()))).collect();
        of_table = (0..2).map(|_| of_table.swap_remove(draw.below(of_table.len()))).collect();
    }
    for (point, injury) in named.into_iter().chain(of_table) {
        let (mut cluster, mut guest) = stage_with(Setup { fault_harness: true, ..Setup::default() });
        cluster.faults.as_ref().unwrap().want(&point);
        let migration = cluster.a.begin(&HYBRID);
        let Some(held) = cluster.faults.as_ref().unwrap().held(DEADLINE) else {
            panic!("{point} was not reached\n{}\n---\n{}", cluster.a.log(), cluster.b.log())
        };
        // The agent held at the point continues when the other one is killed, or the link is cut.
        let (is_held_killed, length) = match injury {
            Injury::KillSource => (held.agent == "a", Duration::ZERO),
            Injury::KillDestination => (held.agent == "b", Duration::ZERO),
            _ => (false, Duration::from_secs(3)),
        };
        if is_held_killed {
            injury.inflict(&mut cluster, length);
        } else {
            injury.inflict_while(&mut cluster, length, || held.release());
        }
        drop(migration.wait_with_output().unwrap());
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        let report = cluster.a.cli(&["report", "vm1"]).ok().json();
        println!("{injury:?} at {point}: {}", report["outcome"]);
        let has_moved = report["outcome"] == "moved";
        assert_eq!(cluster.a.vm("vm1").is_some(), !has_moved, "{report:#}");
        assert_eq!(cluster.b.vm("vm1").is_some(), has_moved, "{report:#}");
        assert_eq!(guest.is_running(), !has_moved, "{report:#}");
        let here = if has_moved { "b" } else { "a" };
        assert_eq!(cluster.agent(here).vm("vm1").unwrap()["state"], "running", "{report:#}");
        cluster.assert_guest_whole(here, "vm1");
    }
}

/// Any of these at any time: three migrations, one of them with a cut, and many more in a soak.
#[test]
fn injuries_during_post_copy_leave_the_guest_whole() {
    let seed = seed(41);
    println!("drawn with WHIMBREL_SEED={seed}");
    let mut draw = Generator(seed);
    let moves = if std::env::var_os("WHIMBREL_SOAK").is_some() { 50 } else { 3 };
    for number in 0..moves {
        let (ram, vcpus) = (["anonymous", "memfd"][draw.below(2)], 1 + draw.below(2) as u32);
        let (mut cluster, _guest) = stage_of(Setup::default(), vcpus);
        let injury = if number == 0 { Injury::Cut } else { INJURIES[draw.below(INJURIES.len())] };
        // Later bytes arrive too quickly for an injury.
        let rest_bytes = draw.below((HOT_MIB << 20) as usize * 3 / 4) as u64;
        let length = Duration::from_millis(1000 + draw.below(2500) as u64);
        moves_through(&mut cluster, ram, injury, rest_bytes, length);
        assert_whole_and_movable(&cluster);
    }
}
