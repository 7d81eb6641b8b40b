use std::fmt;

use proptest::prelude::*;
use proto::message::{Ownership, RegistryReply, RegistryRequest, Verdict};
use proto::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};

use super::destination::{DestinationEffect, DestinationEvent, DestinationState, destination};
use super::recover::{Choice, OperatorDecision, advise_destination, advise_source};
use super::registry::{RecordMeaning, RegistryAnswer, apply};
use super::source::{SourceEffect, SourceEvent, SourceState, source};
use super::*;

const EPOCH: Epoch = Epoch(7);

fn terms(registry: Option<Epoch>) -> MigrationTerms {
    MigrationTerms {
        migration: MigrationId { vm: VmName::new("vm").unwrap(), epoch: EPOCH },
        source: HostId::new("a").unwrap(),
        destination: HostId::new("b").unwrap(),
        registry,
        witness: None,
    }
}

fn incarnation(generation: u64) -> Incarnation {
    Incarnation {
        boot_id: "boot".to_owned(),
        pid: 1,
        start_time_ticks: 2,
        generation: Generation(generation),
    }
}

fn moved<S: fmt::Debug, E: fmt::Debug>(step: Result<Step<S, E>, Illegal>) -> Transition<S, E> {
    match step {
        Ok(Step::Transition(moved)) => moved,
        other => panic!("{other:?}"),
    }
}

/// Feeds a sequence of events to the source, and returns the names of all effects.
fn walk_source(terms: &MigrationTerms, events: Vec<SourceEvent>) -> (SourceState, Vec<&'static str>) {
    let start = (SourceState::Idle, vec![]);
    events.into_iter().fold(start, |(state, mut names), event| {
        let step = moved(source(terms, &state, &event));
        names.extend(step.effects.iter().map(SourceEffect::name));
        (step.to, names)
    })
}

fn walk_destination(
    terms: &MigrationTerms,
    events: Vec<DestinationEvent>,
) -> (DestinationState, Vec<&'static str>) {
    let start = (DestinationState::Idle, vec![]);
    events.into_iter().fold(start, |(state, mut names), event| {
        let step = moved(destination(terms, &state, &event));
        names.extend(step.effects.iter().map(DestinationEffect::name));
        (step.to, names)
    })
}

/// The designed sequence, without a fault. No entry between stop and GO is synced.
#[test]
fn a_guest_moves() {
    let terms = terms(None);
    let events = vec![
        SourceEvent::Begin { run: true },
        SourceEvent::Stop { run: true },
        SourceEvent::Ready { epoch: EPOCH, incarnation: incarnation(1) },
        SourceEvent::Running { epoch: EPOCH },
    ];
    let (state, effects) = walk_source(&terms, events);
    assert_eq!(state.name(), "done");
    let expected = "journal-sync journal stop-vm journal commit-participants freeze-qemu send-go journal \
                    notify-running quit-qemu report";
    assert_eq!(effects.join(" "), expected);

    let events = vec![
        DestinationEvent::Prepare,
        DestinationEvent::Loaded { incarnation: incarnation(1), run: true },
        DestinationEvent::Go { epoch: EPOCH, incarnation: incarnation(1), run: true },
        DestinationEvent::Continued { missing: false },
    ];
    let (state, effects) = walk_destination(&terms, events);
    assert_eq!(state.name(), "active");
    let expected = "journal-sync journal send-ready journal cont journal thaw-qemu commit-participants announce \
                    send-running report";
    assert_eq!(effects.join(" "), expected);
}

/// Trap 17: a guest that its user had paused is never continued, whatever happens to the migration.
#[test]
fn a_paused_guest_stays_paused() {
    use SourceEvent as On;
    let ready = || On::Ready { epoch: EPOCH, incarnation: incarnation(1) };
    let stop = || On::Stop { run: false };
    // The user paused it during pre-copy.
    let begin = || On::Begin { run: true };
    for registry in [None, Some(Epoch(3))] {
        let terms = terms(registry);
        let source_owns =
            Ownership { epoch: EPOCH, owner: terms.source.clone(), offer: None, released: false };
        let returned = On::RegistryAnswered(RegistryAnswer::Record(Some(source_owns)));
        let mut ends = vec![
            vec![begin(), On::Cancel],
            vec![begin(), stop(), On::PeerLost],
            vec![begin(), stop(), On::Restarted(QemuAtStart::Paused)],
            vec![begin(), stop(), ready(), On::Refused { epoch: EPOCH }],
            vec![begin(), stop(), ready(), On::Running { epoch: EPOCH }],
        ];
        if registry.is_some() {
            ends[3].push(returned);
        }
        for events in ends {
            let (state, effects) = walk_source(&terms, events);
            assert!(state.is_final(), "{state:?}");
            assert!(!effects.contains(&"continue-vm"), "{effects:?}");
        }
        let mut events = vec![
            DestinationEvent::Prepare,
            DestinationEvent::Loaded { incarnation: incarnation(1), run: true },
            DestinationEvent::Go { epoch: EPOCH, incarnation: incarnation(1), run: false },
        ];
        if registry.is_some() {
            let owned =
                Ownership { epoch: EPOCH, owner: terms.destination.clone(), offer: None, released: false };
            events.push(DestinationEvent::RegistryAnswered(RegistryAnswer::Record(Some(owned))));
        }
        let (state, effects) = walk_destination(&terms, events);
        assert_eq!(state.name(), "active");
        assert!(!effects.contains(&"cont"), "{effects:?}");
        assert!(effects.contains(&"send-running"), "{effects:?}");
    }
}

#[test]
fn what_is_stale_is_ignored_and_what_is_impossible_is_illegal() {
    let terms = terms(None);
    let committed = SourceState::Committed { incarnation: incarnation(2), run: true, has_run: false };
    let old = SourceEvent::Refused { epoch: Epoch(6) };
    assert_eq!(source(&terms, &committed, &old), Ok(Step::Ignored(Ignored::OtherEpoch)));
    let other = SourceEvent::Ready { epoch: EPOCH, incarnation: incarnation(1) };
    assert_eq!(source(&terms, &committed, &other), Ok(Step::Ignored(Ignored::OtherIncarnation)));
    let illegal =
        source(&terms, &SourceState::Prepared { run: true }, &SourceEvent::Running { epoch: EPOCH });
    assert_eq!(
        illegal.unwrap_err().to_string(),
        "the source of a handover cannot process the event `running` in the state `prepared`"
    );

    // GO of another generation of connections starts nothing, and is answered with the present incarnation.
    let ready = DestinationState::Ready { incarnation: incarnation(2), run: true };
    let go = DestinationEvent::Go { epoch: EPOCH, incarnation: incarnation(1), run: true };
    let step = moved(destination(&terms, &ready, &go));
    assert_eq!(step.to, ready);
    assert_eq!(step.effects, [DestinationEffect::SendReady { incarnation: incarnation(2) }]);
    // GO of an unknown attempt is refused for ever.
    let step = moved(destination(&terms, &DestinationState::Idle, &go));
    assert_eq!(step.to, DestinationState::Refused);
}

#[test]
fn a_repeated_go_is_answered() {
    let terms = terms(None);
    let go = DestinationEvent::Go { epoch: EPOCH, incarnation: incarnation(1), run: true };
    let active = DestinationState::Active { incarnation: incarnation(1) };
    assert_eq!(moved(destination(&terms, &active, &go)).effects, [DestinationEffect::SendRunning]);
    for state in [DestinationState::Refused, DestinationState::CopyDestroyed] {
        assert_eq!(moved(destination(&terms, &state, &go)).effects, [DestinationEffect::SendRefused]);
    }
}

/// The journal keeps states and terms: they survive serialization unchanged.
#[test]
fn states_survive_the_journal() {
    let there_and_back = |state: &SourceState| {
        let text = serde_json::to_string(state).unwrap();
        assert_eq!(serde_json::from_str::<SourceState>(&text).unwrap(), *state, "{text}");
    };
    there_and_back(&SourceState::Stopped { run: true });
    there_and_back(&SourceState::Reclaiming { incarnation: None, run: true, force: false });
    there_and_back(&SourceState::Committed { incarnation: incarnation(1), run: false, has_run: true });
    let state = DestinationState::Starting { incarnation: incarnation(1), again: true };
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<DestinationState>(&text).unwrap(), state, "{text}");
}

#[test]
fn advice_names_the_risk() {
    let committed = SourceState::Committed { incarnation: incarnation(1), run: true, has_run: false };
    let without = advise_source(&terms(None), &committed);
    let run_here = OperatorDecision::RunHere { force: false };
    let choice = without.choices.iter().find(|choice| choice.decision == run_here).unwrap();
    assert!(choice.risk.contains("two copies write to the same disks"), "{choice:?}");
    let with = advise_source(&terms(Some(Epoch(3))), &committed);
    let choice = with.choices.iter().find(|choice| choice.decision == run_here).unwrap();
    assert!(choice.risk.contains("exactly one side succeeds"), "{choice:?}");

    let ready = DestinationState::Ready { incarnation: incarnation(1), run: true };
    assert_eq!(advise_destination(&terms(None), &ready).choices.len(), 2);
    let active = DestinationState::Active { incarnation: incarnation(1) };
    assert!(advise_destination(&terms(None), &active).choices.is_empty());
}

/// After INCOMPLETE the guest has run at the destination: from then on no operator is offered to run it at the source,
/// and a request for that is refused, with a registry or without.
#[test]
fn a_guest_that_has_run_there_is_never_run_here() {
    for registry in [None, Some(Epoch(3))] {
        let terms = terms(registry);
        let committed = SourceState::Committed { incarnation: incarnation(1), run: true, has_run: false };
        let reclaiming =
            SourceState::Reclaiming { incarnation: Some(incarnation(1)), run: true, force: true };
        for before in std::iter::once(committed).chain(registry.map(|_| reclaiming)) {
            let step = moved(source(&terms, &before, &SourceEvent::Incomplete { epoch: EPOCH }));
            let serving = step.to;
            assert_eq!(
                serving,
                SourceState::Committed { incarnation: incarnation(1), run: true, has_run: true }
            );
            assert!(
                matches!(&step.effects[0], SourceEffect::Journal { state, .. } if *state == serving),
                "{:?}",
                step.effects
            );
            let choices = advise_source(&terms, &serving).choices;
            assert_eq!(
                choices.iter().map(|choice| choice.decision).collect::<Vec<_>>(),
                [OperatorDecision::DiscardCopy]
            );
            let owned = Ownership { epoch: EPOCH, owner: terms.source.clone(), offer: None, released: false };
            for event in [
                SourceEvent::OperatorDecided(OperatorDecision::RunHere { force: true }),
                SourceEvent::OperatorDecided(OperatorDecision::WithoutRegistry { run_here: true }),
                SourceEvent::ContactLostForGood,
                SourceEvent::RegistryAnswered(RegistryAnswer::Record(Some(owned))),
                SourceEvent::Restarted(QemuAtStart::Paused),
                SourceEvent::QemuDied,
                SourceEvent::Repeat,
            ] {
                assert_eq!(moved(source(&terms, &serving, &event)).to, serving, "{event:?}");
            }
            for event in [SourceEvent::Refused { epoch: EPOCH }, SourceEvent::Crashed { epoch: EPOCH }] {
                assert_eq!(source(&terms, &serving, &event), Ok(Step::Ignored(Ignored::TooLate)));
            }
            let done = moved(source(&terms, &serving, &SourceEvent::Running { epoch: EPOCH })).to;
            assert_eq!(done.name(), "done");
        }
    }
}

/// The functions accept every decision that the advice offers.
#[test]
fn every_advised_decision_is_legal() {
    for registry in [None, Some(Epoch(3))] {
        let terms = terms(registry);
        let committed = SourceState::Committed { incarnation: incarnation(1), run: true, has_run: false };
        let qemu_lost = SourceState::QemuLost { incarnation: None, run: true };
        let mut states = vec![committed, qemu_lost];
        if registry.is_some() {
            let incarnation = Some(incarnation(1));
            states.push(SourceState::Reclaiming { incarnation, run: true, force: false });
        }
        for state in states {
            for choice in advise_source(&terms, &state).choices {
                let step = moved(source(&terms, &state, &SourceEvent::OperatorDecided(choice.decision)));
                assert_ne!(step.to, state, "{choice:?}");
            }
        }
        let ready = DestinationState::Ready { incarnation: incarnation(1), run: true };
        let again = DestinationState::Starting { incarnation: incarnation(1), again: true };
        let mut states = vec![ready, again, DestinationState::QemuLost];
        if registry.is_some() {
            let acquiring = DestinationState::Acquiring { incarnation: incarnation(1), run: true };
            states.extend([acquiring, DestinationState::Refusing]);
        }
        for state in states {
            for choice in advise_destination(&terms, &state).choices {
                let event = DestinationEvent::OperatorDecided(choice.decision);
                let step = moved(destination(&terms, &state, &event));
                let conts = step.effects.contains(&DestinationEffect::Cont);
                assert!(step.to != state || conts, "{choice:?}");
            }
        }
    }
}

/// Wherever a state waits for the registry, the operator can decide without it; where there is no registry, no such
/// decision is offered.
#[test]
fn a_registry_that_is_lost_leaves_a_way_out() {
    let without = |choices: Vec<Choice>| {
        choices.iter().any(|choice| matches!(choice.decision, OperatorDecision::WithoutRegistry { .. }))
    };
    let one = || incarnation(1);
    for (registry, expected) in [(Some(Epoch(3)), true), (None, false)] {
        let terms = terms(registry);
        let mut sources = vec![
            SourceState::Committed { incarnation: one(), run: true, has_run: false },
            SourceState::QemuLost { incarnation: None, run: true },
        ];
        let mut destinations = vec![
            DestinationState::Ready { incarnation: one(), run: true },
            DestinationState::Starting { incarnation: one(), again: true },
        ];
        if expected {
            let reclaiming = |force| SourceState::Reclaiming { incarnation: Some(one()), run: true, force };
            sources.extend([reclaiming(false), reclaiming(true)]);
            destinations.push(DestinationState::Acquiring { incarnation: one(), run: true });
            destinations.extend([DestinationState::Refusing, DestinationState::QemuLost]);
        }
        for state in sources {
            assert_eq!(without(advise_source(&terms, &state).choices), expected, "{state:?}");
        }
        for state in destinations {
            assert_eq!(without(advise_destination(&terms, &state).choices), expected, "{state:?}");
        }
    }
}

/// A rebooted host without a registry waits for the source's answer before it removes a half-made image.
#[test]
fn a_rebooted_destination_discards_if_the_source_has_aborted() {
    let terms = terms(None);
    let ready = DestinationState::Ready { incarnation: incarnation(1), run: true };
    for before in [DestinationState::Prepared, ready] {
        let booted = moved(destination(&terms, &before, &DestinationEvent::Restarted(QemuAtStart::Rebooted)));
        assert_eq!(booted.to, DestinationState::QemuLost);
        assert!(booted.effects.contains(&DestinationEffect::AskSource));
    }
    let qemu_lost = DestinationState::QemuLost;
    let response = |verdict| DestinationEvent::SourceAnswered { epoch: EPOCH, verdict };
    let kept = moved(destination(&terms, &qemu_lost, &response(Verdict::Aborted)));
    assert_eq!(kept.to, DestinationState::CopyDestroyed);
    assert!(kept.effects.contains(&DestinationEffect::DestroyCopy));
    // The copy may have run, and its disks may be the only valid ones: nothing is removed.
    let committed = Verdict::Committed { incarnation: incarnation(1), run: true };
    for (verdict, to) in [
        (Verdict::Undecided, DestinationState::QemuLost),
        (committed, DestinationState::Crashed { has_run: false }),
        (Verdict::Returned, DestinationState::Crashed { has_run: false }),
    ] {
        let transition = moved(destination(&terms, &qemu_lost, &response(verdict)));
        assert_eq!(transition.to, to);
        assert!(!transition.effects.contains(&DestinationEffect::DestroyCopy));
    }
}

#[test]
fn the_registry_does_not_go_back() {
    let terms = terms(Some(Epoch(3)));
    let owned =
        |epoch, owner: &HostId| Ownership { epoch, owner: owner.clone(), offer: None, released: false };
    let enrol = RegistryRequest::CompareAndSet {
        vm: terms.migration.vm.clone(),
        expected: None,
        new: owned(Epoch(3), &terms.source),
    };
    let (reply, first) = apply(&enrol, None);
    assert_eq!((reply, first.clone()), (RegistryReply::Set, Some(owned(Epoch(3), &terms.source))));
    // A VM that has a record is not entered again.
    let (reply, none) = apply(&enrol, first.as_ref());
    assert_eq!((reply, none), (RegistryReply::Record { record: first.clone() }, None));
    let take = registry::acquire_by_destination(&terms, Epoch(3));
    let (reply, second) = apply(&take, first.as_ref());
    assert_eq!((reply, second), (RegistryReply::Set, Some(owned(EPOCH, &terms.destination))));
    let backwards = RegistryRequest::CompareAndSet {
        vm: terms.migration.vm.clone(),
        expected: Some((EPOCH, terms.destination.clone())),
        new: owned(Epoch(6), &terms.source),
    };
    let (reply, none) = apply(&backwards, Some(&owned(EPOCH, &terms.destination)));
    assert!(matches!(reply, RegistryReply::Failed { .. }), "{reply:?}");
    assert_eq!(none, None);
}

/// Any host with a certificate can claim a VM in the registry: no agent discards a copy for that reason.
#[test]
fn a_third_host_in_the_registry_decides_nothing() {
    let terms = terms(Some(Epoch(3)));
    let record =
        Ownership { epoch: Epoch(8), owner: HostId::new("c").unwrap(), offer: None, released: false };
    assert_eq!(registry::interpret_record(&terms, Some(&record)), RecordMeaning::Foreign);
    let response = RegistryAnswer::Record(Some(record));
    let states = [
        DestinationState::Ready { incarnation: incarnation(1), run: true },
        DestinationState::Acquiring { incarnation: incarnation(1), run: true },
        DestinationState::Starting { incarnation: incarnation(1), again: true },
    ];
    for state in states {
        let step = moved(destination(&terms, &state, &DestinationEvent::RegistryAnswered(response.clone())));
        assert_eq!(step.to, state);
        assert!(!step.effects.contains(&DestinationEffect::DestroyCopy), "{step:?}");
    }
}

/// The destination of an older attempt, after a reboot, rules out acquisition for its own epoch only.
#[test]
fn an_older_attempt_s_end_does_not_stop_this_one() {
    let terms = terms(Some(Epoch(3)));
    let moved_on = Ownership { epoch: Epoch(5), owner: terms.source.clone(), offer: None, released: false };
    let response = RegistryAnswer::Record(Some(moved_on.clone()));
    let acquiring = DestinationState::Acquiring { incarnation: incarnation(1), run: true };
    let step = moved(destination(&terms, &acquiring, &DestinationEvent::RegistryAnswered(response)));
    let [DestinationEffect::Registry { request, .. }] = &step.effects[..] else { panic!("{step:?}") };
    let (reply, record) = apply(request, Some(&moved_on));
    assert_eq!(reply, RegistryReply::Set);
    assert_eq!(registry::interpret_record(&terms, record.as_ref()), RecordMeaning::Destination);
}

proptest! {
    /// Requests of both hosts in any order, any number of times: once the source has the epoch, the destination never
    /// has it again; and a host that does not own the VM does not acquire it by a late request.
    #[test]
    fn exactly_one_side_wins(picks in prop::collection::vec(0..4_usize, 0..24)) {
        let terms = terms(Some(Epoch(3)));
        let requests = [
            registry::acquire_by_destination(&terms, Epoch(3)),
            registry::acquire_by_source(&terms, Epoch(3)),
            registry::return_to_source(&terms),
            registry::offer(&terms, Epoch(3), &incarnation(1), true),
        ];
        let mut record = Ownership { epoch: Epoch(3), owner: terms.source.clone(), offer: None, released: false };
        let mut source_has_it = false;
        for pick in picks {
            let before = record.clone();
            let (reply, new) = apply(&requests[pick], Some(&record));
            let answer = RegistryAnswer::from_reply(&requests[pick], reply);
            record = new.unwrap_or(record);
            prop_assert_eq!(answer, RegistryAnswer::Record(Some(record.clone())));
            let now = registry::interpret_record(&terms, Some(&record));
            prop_assert!(!source_has_it || now == RecordMeaning::Source);
            prop_assert!(record.epoch >= before.epoch);
            source_has_it = now == RecordMeaning::Source;
        }
    }

    /// Messages of a peer are answered or refused, never a panic: any verdict in any state.
    #[test]
    fn no_verdict_panics(generation in 0..3_u64, run in any::<bool>(), which in 0..4_usize, state in 0..11_usize) {
        let terms = terms(Some(Epoch(3)));
        let one = || incarnation(1);
        let verdict = [
            Verdict::Committed { incarnation: incarnation(generation), run },
            Verdict::Aborted,
            Verdict::Returned,
            Verdict::Undecided,
        ][which].clone();
        let state = [
            DestinationState::Idle,
            DestinationState::Prepared,
            DestinationState::Ready { incarnation: one(), run: true },
            DestinationState::Acquiring { incarnation: one(), run },
            DestinationState::Starting { incarnation: one(), again: run },
            DestinationState::Active { incarnation: one() },
            DestinationState::Refusing,
            DestinationState::Refused,
            DestinationState::CopyDestroyed,
            DestinationState::QemuLost,
            DestinationState::Crashed { has_run: run },
        ][state].clone();
        let step = destination(&terms, &state, &DestinationEvent::SourceAnswered { epoch: EPOCH, verdict });
        if let Ok(Step::Transition(step)) = step {
            let cont = step.effects.contains(&DestinationEffect::Cont);
            prop_assert!(!cont, "no cont without the registry");
        }
    }
}

/// Trap 17, where only an operator can decide: the source is gone.
#[test]
fn an_operator_leaves_a_paused_guest_paused() {
    let decide = |registry, run, decision| {
        let terms = terms(registry);
        let loaded = DestinationEvent::Loaded { incarnation: incarnation(1), run };
        let ready = moved(destination(&terms, &DestinationState::Prepared, &loaded)).to;
        moved(destination(&terms, &ready, &DestinationEvent::OperatorDecided(decision)))
    };
    let here = OperatorDecision::RunHere { force: false };
    let unregistered = OperatorDecision::WithoutRegistry { run_here: true };
    for run in [true, false] {
        for (registry, decision) in [(None, here), (Some(Epoch(3)), unregistered)] {
            let step = decide(registry, run, decision);
            assert_eq!(step.effects.contains(&DestinationEffect::Cont), run);
            assert_eq!(matches!(step.to, DestinationState::Active { .. }), !run);
        }
        let step = decide(Some(Epoch(3)), run, here);
        assert_eq!(step.to, DestinationState::Acquiring { incarnation: incarnation(1), run });
    }
}

#[test]
fn an_entry_without_a_run_flag_means_a_running_guest() {
    let ready = DestinationState::Ready { incarnation: incarnation(1), run: true };
    let mut entry = serde_json::to_value(&ready).unwrap();
    entry.as_object_mut().unwrap().remove("run").unwrap();
    assert_eq!(serde_json::from_value::<DestinationState>(entry).unwrap(), ready);
}
