//! The handover under a model checker: the engine's own functions, with all possible faults around them.
//!
//! One VM, two agents with journals, the registry, and a network. Between any two effects an agent may die; it then
//! loses its memory but not its journal (entries that were not synced are lost when the host crashes). Packets are
//! delayed, reordered, lost and doubled. The bounds of each run are in its [`Budget`]; `WHIMBREL_SOAK=1` selects
//! larger ones.
//!
//! Progress is stated as an invariant: from each reached state, when all crashed parts restart, all packets arrive,
//! and no further fault occurs, the VM ends up running on exactly one host ([`heal`]).
//!
//! The second half plants errors ([`mutation`]) and shows that each is found.

#![allow(clippy::expect_used, reason = "a test's helpers may panic")]
#![allow(clippy::disallowed_methods, reason = "how long it searches, and where it writes what it took")]

extern crate whimbrel_engine as engine;

mod handover;
mod heal;
mod mutation;
mod overrides;
mod planted;
mod world;

use std::collections::BTreeSet;
use std::fs;
use std::sync::Mutex;

use engine::handover::destination::destination;
use engine::handover::source::source;
use engine::handover::{Role, Step, table};
use stateright::{Checker, HasDiscoveries, Model};

use handover::{Handover, MOST_EFFECTS, THREW_AWAY};
use mutation::{CORRECT, Rules};
use overrides::OVERRIDES;
use world::Budget;

// ---- runs

const NONE: Budget = Budget {
    agent_crashes: 0,
    host_crashes: 0,
    hosts_gone: 0,
    duplicates: 0,
    qemu_deaths: 0,
    journal_failures: 0,
    cont_failures: 0,
    troubles: 0,
    foreign_conts: 0,
    decisions: 0,
    overrides: 0,
    registers_lost: 0,
    post_copy: false,
    attempts: 1,
    in_flight: 3,
};

fn soak() -> bool {
    std::env::var_os("WHIMBREL_SOAK").is_some()
}

/// Runs to the end of the bounds, and asserts that every property holds.
fn holds(name: &str, budget: Budget, registry: bool) {
    let checker = Handover { rules: CORRECT, budget, registry }.checker().threads(2).spawn_bfs().join();
    println!(
        "{name}: {} states, depth {}, registry {registry}, {budget:?}",
        checker.unique_state_count(),
        checker.max_depth()
    );
    checker.assert_properties();
}

/// Asserts that a violation of one of the expected properties is found.
fn found(rules: Rules, budget: Budget, registry: bool, expected: &[&'static str]) {
    let checker = Handover { rules, budget, registry }
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyOf(expected.iter().copied().collect()))
        .spawn_bfs()
        .join();
    let violated: Vec<&str> =
        checker.discoveries().into_keys().filter(|name| expected.contains(name)).collect();
    println!("{} states until {violated:?}", checker.unique_state_count());
    assert!(!violated.is_empty(), "the planted error was not found");
}

/// Runs with a registry and without; in the long run also with one more death of an agent.
fn both(name: &str, budget: Budget) {
    for registry in [false, true] {
        holds(name, budget, registry);
    }
    if soak() {
        let budget = Budget { agent_crashes: budget.agent_crashes + 1, ..budget };
        for registry in [false, true] {
            holds(&format!("{name}, soak"), budget, registry);
        }
    }
}

#[test]
fn agents_die_and_packets_are_doubled() {
    both("agents die, packets are doubled", Budget { agent_crashes: 1, duplicates: 1, troubles: 1, ..NONE });
}

#[test]
fn qemus_die_and_do_not_continue() {
    both("QEMUs die", Budget { agent_crashes: 1, qemu_deaths: 1, cont_failures: 1, ..NONE });
}

#[test]
fn journals_fail() {
    both("journals fail", Budget { journal_failures: 1, agent_crashes: 1, troubles: 1, ..NONE });
    both(
        "journals fail, QEMUs die",
        Budget { journal_failures: 1, qemu_deaths: 1, cont_failures: 1, ..NONE },
    );
    both(
        "journals fail twice, QEMUs die",
        Budget { journal_failures: 2, qemu_deaths: 1, in_flight: 2, ..NONE },
    );
    both(
        "journals fail, post-copy",
        Budget { journal_failures: 1, agent_crashes: 1, post_copy: true, ..NONE },
    );
}

#[test]
fn contact_is_given_up() {
    both("troubles", Budget { qemu_deaths: 1, troubles: 2, ..NONE });
}

#[test]
fn hosts_crash() {
    both("hosts crash", Budget { host_crashes: 1, agent_crashes: 1, ..NONE });
    both("hosts crash twice", Budget { host_crashes: 2, troubles: 1, in_flight: 2, ..NONE });
}

#[test]
fn hosts_are_gone_for_good() {
    both("hosts are gone", Budget { hosts_gone: 1, agent_crashes: 1, ..NONE });
}

const TWO_ATTEMPTS_AND_A_CRASH: Budget =
    Budget { attempts: 2, host_crashes: 1, troubles: 1, in_flight: 2, ..NONE };

#[test]
fn a_second_attempt_follows() {
    both("second attempt", Budget { attempts: 2, duplicates: 1, troubles: 1, in_flight: 2, ..NONE });
    both("second attempt, hosts crash", TWO_ATTEMPTS_AND_A_CRASH);
}

#[test]
fn another_program_continues_the_source() {
    both("foreign cont", Budget { agent_crashes: 1, foreign_conts: 1, ..NONE });
    both("foreign cont, QEMU lost", Budget { agent_crashes: 1, foreign_conts: 1, qemu_deaths: 1, ..NONE });
    both("foreign cont, host lost", Budget { foreign_conts: 1, host_crashes: 1, ..NONE });
}

/// With a registry any decision of the source's operator, at any time, is safe. (Progress is up to the operator, and
/// so is the risk at a destination in doubt, which no registry can remove: a source that has not committed does not
/// ask it before it continues the guest.)
#[test]
fn operators_decide() {
    holds("operators decide", Budget { agent_crashes: 1, troubles: 1, decisions: 2, ..NONE }, true);
}

/// Without a registry an operator can be wrong: the source may continue the guest although it runs at the destination.
/// Whatever the operator decides, and whatever that host forgets in a reboot: the images that were written there stay.
#[test]
fn no_operator_makes_images_of_a_guest_that_has_run_be_removed() {
    let budget = Budget { host_crashes: 1, decisions: 1, troubles: 1, in_flight: 2, ..NONE };
    for post_copy in [false, true] {
        let model = Handover { rules: CORRECT, budget: Budget { post_copy, ..budget }, registry: false };
        let checker = model.checker().threads(2).finish_when(HasDiscoveries::All).spawn_bfs().join();
        println!("{} states", checker.unique_state_count());
        assert!(checker.discovery(THREW_AWAY).is_none(), "{:?}", checker.discovery(THREW_AWAY));
    }
}

/// Pages arrive when the guest runs at the destination already: whatever fails, the source keeps the pages that it
/// needs.
#[test]
fn pages_come_after_the_guest() {
    let post_copy = Budget { post_copy: true, ..NONE };
    both("post-copy", Budget { agent_crashes: 1, duplicates: 1, troubles: 1, ..post_copy });
    both("post-copy, QEMUs die", Budget { agent_crashes: 1, qemu_deaths: 1, cont_failures: 1, ..post_copy });
    both("post-copy, hosts crash", Budget { host_crashes: 1, agent_crashes: 1, in_flight: 2, ..post_copy });
    both("post-copy, twice", Budget { attempts: 2, troubles: 1, in_flight: 2, ..post_copy });
}

/// One of each kind of fault that agents and QEMUs have, in any order.
#[test]
fn all_at_once() {
    let in_flight = if soak() { 3 } else { 2 };
    let faults =
        Budget { agent_crashes: 1, duplicates: 1, qemu_deaths: 1, cont_failures: 1, troubles: 1, ..NONE };
    both("all at once", Budget { in_flight, ..faults });
}

/// The largest run, with crashes of hosts.
#[test]
fn all_at_once_with_hosts() {
    if soak() {
        let budget =
            Budget { agent_crashes: 1, host_crashes: 1, qemu_deaths: 1, troubles: 1, in_flight: 2, ..NONE };
        for registry in [false, true] {
            holds("all at once, with hosts", budget, registry);
            holds(
                "all at once, with hosts, twice",
                Budget { agent_crashes: 0, attempts: 2, ..budget },
                registry,
            );
        }
    }
}

// ---- coverage of the model

static TAKEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn take(name: impl Fn() -> String) {
    TAKEN.lock().expect("no test panics with it").insert(name());
}

/// The engine's functions, with a note of every transition that is taken.
const NOTED: Rules = Rules {
    source: |terms, state, event| {
        let step = source(terms, state, event);
        if let Ok(Step::Transition(moved)) = &step {
            take(|| moved.name(Role::Source, state.name(), event.name()));
        }
        step
    },
    destination: |terms, state, event| {
        let step = destination(terms, state, event);
        if let Ok(Step::Transition(moved)) = &step {
            take(|| moved.name(Role::Destination, state.name(), event.name()));
        }
        step
    },
    ..CORRECT
};

/// A model that never reaches a transition proves nothing about it: every transition of the table is taken in some
/// run, except for those that are left out for a reason.
#[test]
fn the_model_takes_the_table() {
    let runs = [
        Budget { agent_crashes: 1, qemu_deaths: 1, cont_failures: 1, troubles: 1, in_flight: 2, ..NONE },
        Budget { host_crashes: 1, agent_crashes: 1, in_flight: 2, ..NONE },
        Budget { host_crashes: 1, qemu_deaths: 1, troubles: 1, in_flight: 2, ..NONE },
        Budget { host_crashes: 2, in_flight: 2, ..NONE },
        Budget { agent_crashes: 1, qemu_deaths: 1, troubles: 1, in_flight: 2, post_copy: true, ..NONE },
        Budget { host_crashes: 1, troubles: 1, in_flight: 2, post_copy: true, ..NONE },
    ];
    // Decisions of operators need the registry.
    let with_decisions = [
        Budget { agent_crashes: 1, troubles: 1, decisions: 2, in_flight: 2, ..NONE },
        Budget { troubles: 1, ..OVERRIDES },
        Budget { qemu_deaths: 1, ..OVERRIDES },
        Budget { host_crashes: 1, ..OVERRIDES },
    ];
    let with_and_without = runs.into_iter().flat_map(|budget| [(budget, false), (budget, true)]);
    for (budget, registry) in with_and_without.chain(with_decisions.map(|budget| (budget, true))) {
        Handover { rules: NOTED, budget, registry }.checker().threads(2).spawn_bfs().join();
    }
    let taken = TAKEN.lock().expect("no test panics with it");
    let all = table::transitions();
    let most = all.iter().map(|transition| transition.effects.len()).max();
    assert_eq!(most, Some(MOST_EFFECTS), "agents die between all effects");
    let missed: Vec<_> = all.iter().filter(|transition| !taken.contains(&transition.name())).collect();
    println!("{} of {} transitions taken", all.len() - missed.len(), all.len());
    let explains = |(part, why): &(&str, &str), transition: &table::TransitionRow| {
        transition.name().contains(part) && (*why != DOES_NOTHING || transition.effects.is_empty())
    };
    let unexplained: Vec<_> = missed
        .iter()
        .filter(|transition| !LEFT_OUT.iter().any(|left_out| explains(left_out, transition)))
        .map(|transition| transition.name())
        .collect();
    assert!(unexplained.is_empty(), "never taken: {unexplained:#?}");
    let is_idle = |left_out: &&(_, _)| !missed.iter().any(|transition| explains(left_out, transition));
    let idle: Vec<_> = LEFT_OUT.iter().filter(is_idle).collect();
    assert!(idle.is_empty(), "nothing is left out by {idle:?}");

    // The kill matrix uses this list: a transition that it leaves to the model has to be in it.
    let text: String = all
        .iter()
        .map(table::TransitionRow::name)
        .filter(|name| taken.contains(name))
        .fold(TAKEN_IS.to_owned(), |text, name| text + &name + "\n");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/model/taken.txt");
    if std::env::var_os("BLESS").is_some() {
        fs::write(path, &text).expect("the source tree can be written to");
    }
    let listed = fs::read_to_string(path).unwrap_or_default();
    assert!(listed == text, "{path} is not what the model takes; with BLESS=1 this test writes it anew");
}

const TAKEN_IS: &str = "\
# The transitions that the model takes, in the order of the table. Written by `the_model_takes_the_table` in main.rs
# beside this, with BLESS=1.

";

/// A reason that is checked: transitions with effects are not left out by it.
const DOES_NOTHING: &str = "does nothing";

/// Transitions that the model does not take, by a part of their names, with the reason.
const LEFT_OUT: [(&str, &str); 22] = [
    ("operator-decided", "operators say only what is right, and only where there is or was a registry"),
    ("paused]", "all guests run; what becomes of paused ones is in the engine's own tests"),
    ("foreign", "no other program writes to the registry"),
    ("unreachable", "does nothing; a request that is lost comes to the same"),
    ("peer-silent", "does what peer-lost does"),
    ("prepared/failed", "does what peer-lost does"),
    ("stopped/failed", "does what peer-lost does"),
    ("/failed", DOES_NOTHING),
    ("prepared/repeat", "the session repeats nothing before READY"),
    ("starting/repeat[first]", "the session asks QEMU for the outcome of `cont` instead"),
    ("aborting/running", "a contradiction: to be seen is an error"),
    ("returning/running", "a contradiction"),
    ("returned/running", "a contradiction"),
    ("aborting/incomplete", "a contradiction"),
    ("aborted/incomplete", "a contradiction"),
    ("returning/incomplete", "a contradiction"),
    ("returned/incomplete", "a contradiction"),
    ("other-incarnation", "an attempt has one incarnation"),
    ("destination-owns,qemu-lost", "only after an operator's decision"),
    ("starting/registry-answered[source-owns]", "only after an operator's decision"),
    ("prepared/source-answered", "no host asks before READY"),
    ("idle/go", "PREPARED is synced, so a destination that gets GO knows of it; refused all the same"),
];
