use proptest::prelude::*;
use proto::packed::CompressionTrial;

use super::*;
use crate::compression::{CompressionObservation, CompressionPolicy, WAYS};
use crate::disks_first::{DiskRound, DisksFirstPolicy};
use crate::pre_copy::{
    AnyPolicy, PolicyEvent, PreCopyGoals, RoundCountPolicy, RoundObservation, ThrottleChange,
};
use crate::pressure::{RestraintPolicy, SchedulingTimes};
use crate::push::{PushPolicy, PushedPart};
use crate::references::{ReferenceObservation, ReferencePolicy};
use crate::throttle::processors::{CpuObservation, CpuSample, CpuThrottlePolicy, ThrottleDemand};
use crate::throttle::{Drain, Threshold, WriteObservation, WriteThrottle};
use crate::traces::{OtherTraces, Replayed, Traces};

/// Numbers of a realistic size: no counter reaches more.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0..1000_u64, 0..1_u64 << 40]
}

fn several<T: Debug>(of: impl Strategy<Value = T>) -> impl Strategy<Value = Vec<T>> {
    prop::collection::vec(of, 0..40)
}

/// Shows the observations to a policy, which is reset before those in `forgets`. Returns its trace.
fn traced<P: Decider>(policy: P, seen: Vec<P::Observed>, forgets: &[usize]) -> Trace<P> {
    let mut traced = TracedPolicy::new(policy);
    let mut reported = None;
    for (number, observed) in seen.into_iter().enumerate() {
        if forgets.contains(&number) {
            traced.reset();
        }
        traced.decide_on(observed);
        traced.update_report(&mut reported);
    }
    traced.update_report(&mut reported);
    assert_eq!(reported.as_ref(), Some(traced.trace()), "who was told look by look knows as much");
    traced.trace().clone()
}

/// Asserts that a replay makes the same decisions, also after a round trip through a report.
fn is_replayed<P: Decider>(trace: &Trace<P>) {
    let text = serde_json::to_string(trace).unwrap();
    let read: Trace<P> = serde_json::from_str(&text).unwrap();
    assert_eq!(read, *trace, "{text}");
    assert_eq!(read.replay(), read, "{text}");
}

fn any_observation() -> impl Strategy<Value = CompressionObservation> {
    let trial = (0..WAYS.len(), number(), number(), number()).prop_map(
        |(way, data_bytes, compressed_bytes, pack_ns)| CompressionTrial {
            way: WAYS[way],
            data_bytes,
            compressed_bytes,
            pack_ns,
        },
    );
    let counted = (number(), number(), number(), number(), number(), number(), number(), number());
    (counted, 0..8_u32, prop::collection::vec(trial, 0..5)).prop_map(
        |(
            (interval_ns, data_bytes, wire_bytes, pack_ns, cpu_ns, blocked_ns, peer_waited_ns, idle_ns),
            workers,
            trials,
        )| CompressionObservation {
            interval_ns,
            workers,
            data_bytes,
            wire_bytes,
            pack_ns,
            cpu_ns,
            blocked_ns,
            peer_waited_ns,
            idle_ns,
            trials,
        },
    )
}

proptest! {
    #[test]
    fn of_disks_ahead(memory_bytes in number(), seen in several((number(), number()))) {
        let of = |(dirty_bytes, sent_bytes)| DiskRound { dirty_bytes, sent_bytes };
        is_replayed(&traced(DisksFirstPolicy { memory_bytes }, seen.into_iter().map(of).collect(), &[]));
    }

    #[test]
    fn of_writes(
        is_drain in any::<bool>(),
        seen in several((number(), number(), number(), prop::option::of(number()))),
    ) {
        let policy = if is_drain {
            WriteThrottle::Drain(Drain::default())
        } else {
            WriteThrottle::Threshold(Threshold::default())
        };
        let of = |(writes, written_bytes_per_s, dirtied_bytes_per_s, sent_bytes_per_s)| WriteObservation {
            writes, written_bytes_per_s, dirtied_bytes_per_s, sent_bytes_per_s,
        };
        is_replayed(&traced(policy, seen.into_iter().map(of).collect(), &[]));
    }

    #[test]
    fn of_slower_processors(
        seen in several((
            (any::<bool>(), any::<bool>(), 0..3_u32, number(), number()),
            prop::option::of((prop::collection::vec(number(), 0..4), number(), number())),
        )),
        lifted in several(0..40_usize),
    ) {
        let of = |((is_chosen, is_requested, passes, expected_downtime_ns, max_downtime_ns), seen)| CpuSample {
            wish: ThrottleDemand { is_chosen, is_requested, passes, expected_downtime_ns, max_downtime_ns },
            seen: Option::map(seen, |(used_us_per_s, dirtied_bytes_per_s, sent_bytes_per_s)| {
                CpuObservation { used_us_per_s, dirtied_bytes_per_s, sent_bytes_per_s }
            }),
        };
        is_replayed(&traced(CpuThrottlePolicy::default(), seen.into_iter().map(of).collect(), &lifted));
    }

    #[test]
    fn of_pressure(allowed in 0..1000_u64, before in number(), seen in several((number(), number()))) {
        let of = |(ran_ns, waited_ns)| SchedulingTimes { ran_ns, waited_ns };
        let policy = RestraintPolicy::new(allowed, of((before, before / 3)), 4);
        is_replayed(&traced(policy, seen.into_iter().map(of).collect(), &[]));
    }

    #[test]
    fn of_compression(seen in several(any_observation())) {
        is_replayed(&traced(CompressionPolicy::default(), seen, &[]));
    }

    #[test]
    fn of_references(
        seen in several((number(), number(), number(), number(), any::<bool>(), prop::option::of(number()))),
        cuts in several(0..40_usize),
    ) {
        let of = |(interval_ns, data_bytes, referred_bytes, refused_bytes, is_awaited, link_bytes_per_s)| ReferenceObservation {
            interval_ns, data_bytes, referred_bytes, refused_bytes, is_awaited, link_bytes_per_s,
            peer_is_busy: data_bytes % 2 == 0,
        };
        is_replayed(&traced(ReferencePolicy::default(), seen.into_iter().map(of).collect(), &cuts));
    }

    #[test]
    fn of_what_is_pushed(
        seen in several((1..1_u64 << 18, number(), number(), number())),
        cuts in several(0..40_usize),
    ) {
        let of = |(pages, data, wire_bytes, duration_ns)| {
            PushedPart { pages, data_pages: u64::min(data, pages), wire_bytes, duration_ns }
        };
        is_replayed(&traced(PushPolicy::default(), seen.into_iter().map(of).collect(), &cuts));
    }
}

/// Leaving out the last entries does not change the decisions before them, and the replay does not attribute later
/// decisions to the entries that are there.
#[test]
fn a_long_trace_says_how_much_of_it_is_missing() {
    let more = 7;
    let seen = (0..RestraintPolicy::MAX_ENTRIES as u64 + more)
        .map(|n| SchedulingTimes { ran_ns: 9 << 20, waited_ns: n << 20 });
    let trace = traced(
        RestraintPolicy::new(50, SchedulingTimes::default(), 4),
        seen.collect(),
        &[2, RestraintPolicy::MAX_ENTRIES + 2],
    );
    assert_eq!((trace.entries.len(), trace.left_out), (RestraintPolicy::MAX_ENTRIES, more));
    assert_eq!(trace.entries.iter().filter(|entry| entry.is_reset).count(), 1);
    is_replayed(&trace);
    let traces = Traces {
        others: OtherTraces { pressure: Some(trace), ..OtherTraces::default() },
        ..Traces::default()
    };
    let [replayed] = &traces.compare()[..] else { panic!("{:?}", traces.compare()) };
    assert_eq!((replayed.decisions, replayed.left_out), (RestraintPolicy::MAX_ENTRIES, more));
    assert_eq!(replayed.differences, []);
}

/// A reset before an observation is repeated in the replay.
#[test]
fn a_reset_is_replayed() {
    let fast = CpuSample {
        wish: ThrottleDemand { is_chosen: true, ..ThrottleDemand::default() },
        seen: Some(CpuObservation {
            used_us_per_s: vec![1_000_000],
            dirtied_bytes_per_s: 200 << 20,
            sent_bytes_per_s: 100 << 20,
        }),
    };
    let mut trace =
        traced(CpuThrottlePolicy::default(), vec![fast.clone(), CpuSample::default(), fast], &[1]);
    assert_eq!(trace.decisions().copied().collect::<Vec<_>>(), [Some(250_000), None, Some(250_000)]);
    is_replayed(&trace);
    trace.entries[1].is_reset = false;
    assert_eq!(trace.replay().entries[1].decision, Some(250_000));
}

#[test]
fn a_changed_decision_is_reported() {
    let looks =
        |n| PolicyEvent::Round { observed: RoundObservation { pass: n, ..RoundObservation::default() } };
    let seen = vec![
        PolicyEvent::Goals(PreCopyGoals::default()),
        looks(0),
        PolicyEvent::ThrottleChanged { change: ThrottleChange::Slower },
        looks(1),
    ];
    let stop = traced(AnyPolicy::from(RoundCountPolicy::default()), seen, &[]);
    is_replayed(&stop);
    let push = traced(
        PushPolicy::default(),
        vec![PushedPart { pages: 64, data_pages: 64, wire_bytes: 9, duration_ns: 9 }; 3],
        &[],
    );
    let others = OtherTraces { push: Some(push), ..OtherTraces::default() };
    let mut traces = Traces { stop: vec![stop], others };
    assert_eq!(traces.replay(), traces);
    let counts = |traces: &Traces| {
        let count = |one: &Replayed| (one.policy.clone(), one.decisions, one.differences.len());
        traces.compare().iter().map(count).collect::<Vec<_>>()
    };
    // An event that changes the goals has no decision.
    assert_eq!(counts(&traces), [("stop (rounds)".to_owned(), 2, 0), ("push".to_owned(), 3, 0)]);

    traces.stop[0].entries[3].decision = None;
    let push = traces.others.push.as_mut().unwrap();
    push.entries[1].decision.pages += 1;
    assert_eq!(counts(&traces), [("stop (rounds)".to_owned(), 2, 1), ("push".to_owned(), 3, 1)]);
    let [stop, push] = &traces.compare()[..] else { panic!() };
    assert_eq!((stop.differences[0].decision, push.differences[0].decision), (2, 2));
    assert!(stop.differences[0].to_string().starts_with("decision 2: was None, now Some(StopAndCopy"));
}

/// A report from before other traces existed, and before a trace had a limited length.
#[test]
fn traces_of_old_reports_are_readable() {
    let text = r#"{ "total_us": 1, "traces": [{
        "policy": { "policy": "rounds" },
        "entries": [
            { "what": "goals", "max_downtime_ns": 1, "max_passes": 30 },
            { "what": "throttle-changed", "change": "slower" },
            { "what": "round",
              "observed": { "pass": 1, "dirty_pages": 1, "pages_sent": 1, "bytes_sent": 1,
                            "duration_ns": 4096, "interval_ns": 1, "scan_ns": 1 },
              "decision": { "decision": "stop-and-copy", "expected_downtime_ns": 16777258 } }
        ] }] }"#;
    let traces: Traces = serde_json::from_str(text).unwrap();
    assert_eq!(traces.replay(), traces);
    assert_eq!(traces.compare()[0].decisions, 1);
}
