//! The project's own targets ("bars") for disks, and the check whether the results meet them.

use super::case::{Mover, Workload};
use super::io::DriverState;
use super::result::{DiskCaseResult, DiskQuantity, DiskResults};
use crate::bench::{Bar, Spread};

/// Bytes sent beyond the necessary ones, in hundredths.
const STATIC_OVERHEAD: f64 = 3.0;
const DYNAMIC_OVERHEAD: f64 = 15.0;
/// Addition of a disk to the disruption, ms.
const DISRUPTION_MS: f64 = 20.0;
/// Total time of a guest that writes faster than the link carries, in multiples of its disk's transfer time.
const DIABOLICAL: f64 = 2.0;
/// Cost of recording the guest's writes, in hundredths.
const RECORDING: f64 = 5.0;
/// Cost of adoption for the guest's writes: not measurable.
const ADOPTED: f64 = 1.0;

/// Returns all bars for which there are results.
pub fn bars(results: &DiskResults) -> Vec<Bar> {
    results.cases.iter().flat_map(of_case).collect()
}

fn of_case(result: &DiskCaseResult) -> Vec<Bar> {
    let bars = match result.case.workload {
        Workload::Static => vec![overhead(result, STATIC_OVERHEAD), disruption(result)],
        Workload::Board => vec![overhead(result, DYNAMIC_OVERHEAD), disruption(result)],
        Workload::Video => vec![disruption(result)],
        Workload::Writer => vec![
            in_time(result, Mover::WhimbrelThreshold),
            in_time(result, Mover::WhimbrelDrain),
            never_ends(result),
        ],
        Workload::Io => vec![
            excess(result, DriverState::Adopted, "not migrating", ADOPTED),
            excess(result, DriverState::Recording, "recording", RECORDING),
        ],
    };
    bars.into_iter().flatten().collect()
}

fn overhead(result: &DiskCaseResult, most: f64) -> Option<Bar> {
    // Plain: with reductions, resent bytes would not show.
    let found = result.spread(Mover::WhimbrelPlain, DiskQuantity::Overhead)?.median;
    Some(Bar {
        what: format!("{}: sent beyond what had to be", result.case.name),
        wanted: format!("≤ {most}%"),
        found: format!("{found:.1}%"),
        held: found <= most,
    })
}

fn disruption(result: &DiskCaseResult) -> Option<Bar> {
    let beyond = result.beyond(Mover::Whimbrel, Mover::MemoryOnly, DiskQuantity::Disruption)?;
    Some(Bar {
        what: format!("{}: disruption, beyond that of moving memory alone", result.case.name),
        wanted: format!("≤ {DISRUPTION_MS} ms"),
        found: format!("{:+.1} ms ({:+.1} to {:+.1})", beyond.median, beyond.least, beyond.most),
        held: beyond.median <= DISRUPTION_MS,
    })
}

fn in_time(result: &DiskCaseResult, mover: Mover) -> Option<Bar> {
    let (ended, all) = result.ended(mover);
    if all == 0 {
        return None;
    }
    let rate = result.case.link_bytes_per_s as f64;
    let times = result.runs_of(mover).filter_map(|run| {
        let measured = run.measured.as_ref()?;
        Some(measured.total_ms / 1e3 / (measured.disk_content_bytes as f64 / rate))
    });
    let found = Spread::of(times).map(|spread| spread.median).filter(|_| ended == all);
    Some(Bar {
        what: format!("{}, {mover}: total, to what the disk holds at the link's rate", result.case.name),
        wanted: format!("≤ {DIABOLICAL}"),
        found: found.map_or_else(|| format!("{ended} of {all} ended"), |found| format!("{found:.2}")),
        held: found.is_some_and(|found| found <= DIABOLICAL),
    })
}

fn never_ends(result: &DiskCaseResult) -> Option<Bar> {
    let (ended, all) = result.ended(Mover::Whimbrel);
    (all > 0).then(|| Bar {
        what: format!("{}: without throttling it does not end", result.case.name),
        wanted: "none ended".to_owned(),
        found: format!("{ended} of {all} ended"),
        held: ended == 0,
    })
}

fn excess(result: &DiskCaseResult, state: DriverState, word: &str, most: f64) -> Option<Bar> {
    let found = Spread::of(result.io.iter().filter_map(|turn| Some(turn.excess(state)? * 100.0)))?;
    Some(Bar {
        what: format!("{}: a write takes longer while {word}", result.case.name),
        wanted: format!("≤ {most}%"),
        found: format!("{:+.1}% ({:+.1} to {:+.1})", found.median, found.least, found.most),
        held: found.median <= most,
    })
}

#[cfg(test)]
mod tests {
    use super::super::case::cases;
    use super::super::io::{IoRate, IoTurn, StateRates};
    use super::super::result::{ClientObservations, DiskMeasured, DiskRun, SCHEMA};
    use super::*;
    use crate::bench::Provenance;

    fn result(name: &str, runs: Vec<DiskRun>) -> DiskCaseResult {
        let (case, _) = cases().into_iter().find(|(case, _)| case.name == name).unwrap();
        let made = Provenance::default();
        DiskCaseResult { case, made, runs, io: Vec::new() }
    }

    fn run(mover: Mover, turn: u32, measured: Option<DiskMeasured>, disruption_ms: f64) -> DiskRun {
        let seen = ClientObservations { disruption_ms, ..ClientObservations::default() };
        DiskRun { mover, turn, measured, given_up: None, seen, timeline: None }
    }

    fn held(results: Vec<DiskCaseResult>) -> Vec<bool> {
        bars(&DiskResults { schema: SCHEMA.to_owned(), cases: results }).iter().map(|bar| bar.held).collect()
    }

    #[test]
    fn what_was_not_measured_is_no_bar() {
        let empty = ["static", "dynamic", "video", "diabolical", "io"].map(|name| result(name, Vec::new()));
        assert_eq!(held(empty.to_vec()), [false; 0]);
    }

    #[test]
    fn disruption_pairs_turns_and_overhead_counts_needed_bytes() {
        let sent = |payload_bytes| {
            Some(DiskMeasured { payload_bytes, disk_content_bytes: 1000, ..DiskMeasured::default() })
        };
        let runs = |more_ms: f64, bytes| {
            (1..=3)
                .flat_map(|turn| {
                    let usual_ms = f64::from(turn) * 100.0;
                    let alone = run(Mover::MemoryOnly, turn, sent(0), usual_ms);
                    let plain = run(Mover::WhimbrelPlain, turn, sent(bytes), usual_ms);
                    [alone, run(Mover::Whimbrel, turn, sent(bytes / 2), usual_ms + more_ms), plain]
                })
                .collect()
        };
        assert_eq!(held(vec![result("static", runs(19.0, 1029))]), [true, true]);
        assert_eq!(held(vec![result("static", runs(21.0, 1031))]), [false, false]);
        assert_eq!(held(vec![result("dynamic", runs(-5.0, 1031))]), [true, true]);
    }

    #[test]
    fn a_diabolical_guest_ends_in_time_only_when_it_is_throttled() {
        // The content of the disk needs 10 s over the link.
        let took = |s: f64| {
            let disk_content_bytes = 10 * 12_500_000;
            Some(DiskMeasured { total_ms: s * 1e3, disk_content_bytes, ..DiskMeasured::default() })
        };
        let runs = |drain, alone| {
            vec![
                run(Mover::Whimbrel, 1, alone, 0.0),
                run(Mover::WhimbrelThreshold, 1, None, 0.0),
                run(Mover::WhimbrelDrain, 1, drain, 0.0),
            ]
        };
        assert_eq!(held(vec![result("diabolical", runs(took(19.0), None))]), [false, true, true]);
        assert_eq!(held(vec![result("diabolical", runs(took(21.0), took(9.0)))]), [false, false, false]);
    }

    #[test]
    fn recording_may_cost_a_little_and_an_agent_nothing() {
        let turn = |adopted: f64, recording: f64| {
            let states = [
                (DriverState::Alone, 1000.0),
                (DriverState::Adopted, adopted),
                (DriverState::Recording, recording),
            ];
            let states = states.map(|(state, writes_per_s)| StateRates {
                state,
                link_bytes_per_s: 0.0,
                samples: vec![IoRate { writes_per_s, ..IoRate::default() }],
            });
            IoTurn { turn: 1, states: states.to_vec() }
        };
        let with = |io| DiskCaseResult { io: vec![io], ..result("io", Vec::new()) };
        assert_eq!(held(vec![with(turn(1001.0, 960.0))]), [true, true]);
        assert_eq!(held(vec![with(turn(900.0, 900.0))]), [false, false]);
    }
}
