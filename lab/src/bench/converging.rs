//! Bars of guests that write faster than the link carries.
//!
//! Each turn counts where a bound is absolute: two turns within the bound do not make up for one beyond it.

use super::bar::Bar;
use super::contender::{Contender, Policy};
use super::result::{CaseResult, Measured, Quantity, Run, Spread};

const PATTERN: Contender = Contender::Policy(Policy::Pattern);
const HYBRID: Contender = Contender::Policy(Policy::Hybrid);
const DRAIN: Contender = Contender::Policy(Policy::Drain);

/// Returns all of these bars, for a guest that writes faster than the link carries.
pub(super) fn bars(result: &CaseResult) -> Vec<Bar> {
    let all = [
        ended(result, PATTERN),
        ended(result, HYBRID),
        ended(result, DRAIN),
        intervals(result),
        left(result),
        downtime(result),
        total(result),
        stall_beyond(result, HYBRID),
        stall(result, DRAIN),
        better_than_qemu(result, Quantity::Total, "total"),
        better_than_qemu(result, Quantity::Stall, "longest stall"),
    ];
    all.into_iter().flatten().collect()
}

/// Returns the bars of a guest with scattered writes, which another policy may well migrate: the bars that do not
/// depend on the pattern of writes.
pub(super) fn bars_here_and_there(result: &CaseResult) -> Vec<Bar> {
    let all = [ended(result, HYBRID), downtime(result), total(result), stall_beyond(result, HYBRID)];
    all.into_iter().flatten().collect()
}

fn measured(result: &CaseResult, of: Contender) -> impl Iterator<Item = &Measured> {
    result.runs_of(of).filter_map(|run| run.measured.as_ref())
}

/// Checks that each turn migrated the guest, by post-copy where that is the policy. Otherwise a policy that migrates
/// nothing would miss no bar.
fn ended(result: &CaseResult, of: Contender) -> Option<Bar> {
    let has_ended = |run: &&Run| {
        run.measured
            .as_ref()
            .is_some_and(|measured| of != HYBRID || measured.has_switched_to_post_copy == Some(true))
    };
    let (all, ended) = (result.runs_of(of).count(), result.runs_of(of).filter(has_ended).count());
    (all > 0).then(|| Bar {
        what: format!("{}: moved by {of}", result.case.name),
        wanted: "always".to_owned(),
        found: format!("{ended}/{all}"),
        held: ended == all,
    })
}

/// Compares the worst turn with a limit.
fn at_most(what: String, found: impl Iterator<Item = f64>, most: f64, unit: &str) -> Option<Bar> {
    let found = Spread::of(found)?;
    let digits = if most < 3.0 { 2 } else { 1 };
    Some(Bar {
        what,
        wanted: format!("≤ {most}{unit}"),
        found: format!("{:.digits$}{unit}, at most {:.digits$}{unit}", found.median, found.most),
        held: found.most <= most,
    })
}

fn intervals(result: &CaseResult) -> Option<Bar> {
    let what =
        format!("{}: sampling intervals after all of memory was sent, policy `pattern`", result.case.name);
    let stops = measured(result, PATTERN).filter_map(|measured| measured.stop.as_ref());
    at_most(what, stops.map(|stop| stop.intervals as f64), 3.0, "")
}

/// Checks that the downtime is little more than the time to send the remaining pages.
fn left(result: &CaseResult) -> Option<Bar> {
    let rate = result.case.link_bytes_per_s?;
    let what =
        format!("{}: downtime, to what was left at the link's rate, policy `pattern`", result.case.name);
    let ratios = measured(result, PATTERN).filter_map(|measured| {
        let remaining_pages = measured.stop.as_ref()?.remaining_pages;
        (remaining_pages > 0).then(|| measured.downtime_ms / needed_ms(remaining_pages, rate))
    });
    at_most(what, ratios, 1.2, "")
}

fn downtime(result: &CaseResult) -> Option<Bar> {
    let what = format!("{}: downtime, policy `hybrid`", result.case.name);
    at_most(what, measured(result, HYBRID).map(|measured| measured.downtime_ms), 15.0, " ms")
}

/// Checks the total time: each page is sent once, and once more if it was written after that; wasted sends count
/// against the policy.
fn total(result: &CaseResult) -> Option<Bar> {
    let rate = result.case.link_bytes_per_s?;
    let what = format!(
        "{}: total, to distinct pages and those written after they were sent, at the link's rate, policy `hybrid`",
        result.case.name
    );
    let ratios = measured(result, HYBRID).filter_map(|measured| {
        let needed_pages = measured.stop.as_ref()?.needed_pages?;
        (needed_pages > 0).then(|| measured.total_ms / needed_ms(needed_pages, rate))
    });
    at_most(what, ratios, 1.1, "")
}

fn needed_ms(pages: u64, rate_bytes_per_s: u64) -> f64 {
    pages as f64 * 4096.0 / rate_bytes_per_s as f64 * 1e3
}

fn stall_beyond(result: &CaseResult, of: Contender) -> Option<Bar> {
    let what = format!("{}: longest stall with {of}, beyond what it has unmoved", result.case.name);
    let beyond = result.differences(of, Contender::NoMigration, Quantity::Stall);
    at_most(what, beyond.into_iter(), 50.0, " ms")
}

fn stall(result: &CaseResult, of: Contender) -> Option<Bar> {
    let what = format!("{}: longest stall with {of}", result.case.name);
    at_most(what, result.runs_of(of).filter_map(|run| Quantity::Stall.of(run)), 50.0, " ms")
}

fn better_than_qemu(result: &CaseResult, quantity: Quantity, word: &str) -> Option<Bar> {
    let (best, _) = result.best_of_qemu(quantity)?;
    let ratio = result.ratio(HYBRID, best, quantity)?;
    Some(Bar {
        what: format!("{}: {word}, policy `hybrid`, ratio to QEMU's best", result.case.name),
        wanted: "≤ 1".to_owned(),
        found: format!("{ratio:.2} (of {best})"),
        held: ratio <= 1.0,
    })
}

#[cfg(test)]
mod tests {
    use super::super::case::Case;
    use super::super::contender::QemuMode;
    use super::super::program::Disturbance;
    use super::super::result::Provenance;
    use super::super::statistics::StopCircumstances;
    use super::*;
    use crate::environment::QemuVersion;

    const POST_COPY: Contender = Contender::Qemu(QemuMode::PostCopy);

    /// Returns a run with this total time and longest stall.
    fn run(contender: Contender, turn: u32, total_ms: f64, longest_stall_ms: f64) -> Run {
        let stop = StopCircumstances {
            intervals: 2,
            remaining_pages: 10_000,
            needed_pages: Some(120_000),
            ..StopCircumstances::default()
        };
        let measured = Measured {
            total_ms,
            downtime_ms: 12.0,
            stop: Some(stop),
            has_switched_to_post_copy: (contender == HYBRID).then_some(true),
            ..Measured::default()
        };
        let disturbance = Some(Disturbance { longest_stall_ms, ..Disturbance::default() });
        Run { measured: Some(measured), disturbance, ..Run::new(contender, turn) }
    }

    fn result() -> CaseResult {
        let case = Case { link_bytes_per_s: Some(125_000_000), ..Case::idle("x", QemuVersion::Newer) };
        let runs = (1..4).flat_map(|turn| {
            [
                Run { measured: None, ..run(Contender::NoMigration, turn, 0.0, 5.0) },
                run(PATTERN, turn, 6000.0, 9.0),
                run(HYBRID, turn, 4200.0, 25.0),
                run(DRAIN, turn, 5800.0, 38.0),
                run(POST_COPY, turn, 5500.0, 110.0),
            ]
        });
        CaseResult { case, made: Provenance::default(), runs: runs.collect() }
    }

    fn missed(result: &CaseResult) -> Vec<String> {
        bars(result).into_iter().filter(|bar| !bar.held).map(|bar| bar.what).collect()
    }

    #[test]
    fn every_bar_is_held_or_missed() {
        assert_eq!(bars(&result()).len(), 11);
        assert_eq!(missed(&result()), Vec::<String>::new());
        let spoilt = |of: Contender, spoil: fn(&mut Run)| {
            let mut result = result();
            // In one turn of three.
            spoil(result.runs.iter_mut().find(|run| run.contender == of).unwrap());
            missed(&result)
        };
        let of_measured = |run: &mut Run, change: fn(&mut Measured)| change(run.measured.as_mut().unwrap());
        assert_eq!(spoilt(DRAIN, |run| run.measured = None), ["x: moved by whimbrel-drain"]);
        let before_it_ran =
            spoilt(HYBRID, |run| run.measured.as_mut().unwrap().has_switched_to_post_copy = Some(false));
        assert_eq!(before_it_ran, ["x: moved by whimbrel-hybrid"]);
        let late = spoilt(PATTERN, |run| {
            run.measured.as_mut().unwrap().stop.as_mut().unwrap().intervals = 4;
        });
        assert_eq!(late.len(), 1, "{late:?}");
        let long = spoilt(PATTERN, |run| run.measured.as_mut().unwrap().downtime_ms = 400.0);
        assert!(long.len() == 1 && long[0].contains("what was left"), "{long:?}");
        let long = spoilt(HYBRID, |run| run.measured.as_mut().unwrap().downtime_ms = 16.0);
        assert!(long.len() == 1 && long[0].contains("downtime, policy `hybrid`"), "{long:?}");
        let twice = spoilt(HYBRID, |run| run.measured.as_mut().unwrap().total_ms = 4400.0);
        assert!(twice.len() == 1 && twice[0].contains("distinct pages"), "{twice:?}");
        let stalled = spoilt(HYBRID, |run| run.disturbance.as_mut().unwrap().longest_stall_ms = 56.0);
        assert!(stalled.len() == 1 && stalled[0].contains("beyond"), "{stalled:?}");
        assert_eq!(
            spoilt(DRAIN, |run| run.disturbance.as_mut().unwrap().longest_stall_ms = 51.0),
            ["x: longest stall with whimbrel-drain"]
        );
        let mut slower = result();
        for run in slower.runs.iter_mut().filter(|run| run.contender == POST_COPY) {
            of_measured(run, |measured| measured.total_ms = 4100.0);
            run.disturbance.as_mut().unwrap().longest_stall_ms = 20.0;
        }
        assert_eq!(missed(&slower).len(), 2, "QEMU is better");
    }

    #[test]
    fn what_was_not_measured_has_no_bar() {
        let mut nothing = result();
        nothing.runs.clear();
        assert!(bars(&nothing).is_empty() && bars_here_and_there(&nothing).is_empty());
        assert_eq!(bars_here_and_there(&result()).len(), 4);
    }
}
