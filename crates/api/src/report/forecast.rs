//! Forecast of a migration beside its outcome, and facts for the forecasts of later ones.

use std::fmt::{self, Write as _};

use engine::forecast::calibration::{CalibrationClass, CalibrationRecord, MigrationOutcome};
use engine::forecast::history::PathSample;
use engine::forecast::{Estimate, MigrationEnd, MigrationForecast, ShownDuration};
use engine::pre_copy::{Decision, PolicyEvent, RoundObservation};
use serde::{Deserialize, Serialize};

use super::numbers::bytes;
use super::{Outcome, Report, Round};

/// Forecast of a migration, made when both hosts had agreed, from facts that were known before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedForecast {
    /// Time of the measurement of the VM's writes (RFC 3339, UTC).
    pub measured: String,
    /// Kind of the VM, by which earlier outcomes were chosen.
    pub kind: CalibrationClass,
    /// The forecast as it was simulated.
    pub simulated: MigrationForecast,
    /// The forecast as earlier outcomes correct it.
    pub shown: MigrationForecast,
    /// Outcome; absent until the migration has ended, and if it ended for a reason that no forecast covers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<MigrationOutcome>,
}

/// Shortest round that shows the rate of the link, in microseconds.
const LEAST_ROUND_US: u64 = 50_000;
/// Fewest bytes of a round that shows the rate of the link.
const LEAST_ROUND_BYTES: u64 = 1 << 20;

impl Report {
    /// Records the outcome beside the forecast, if there is one.
    pub fn record_outcome(&mut self) {
        let outcome = self.migration_outcome();
        if let Some(forecast) = &mut self.forecast {
            forecast.outcome = outcome;
        }
    }

    /// Returns forecast and outcome for the record; none if a lost link has changed the outcome.
    pub fn calibration_record(&self) -> Option<CalibrationRecord> {
        let forecast = self.forecast.as_ref()?;
        let ReportedForecast { kind, simulated, shown, outcome, .. } = forecast.clone();
        let outcome = outcome.filter(|_| self.reconnections == 0)?;
        Some(CalibrationRecord { kind, simulated, shown, outcome })
    }

    /// Returns the outcome of a migration that a forecast covers: the VM was moved, or the policy gave up. The comparison
    /// of both sides is not a part of it.
    fn migration_outcome(&self) -> Option<MigrationOutcome> {
        let ns = |us: u64| us.saturating_mul(1000);
        let (bytes, total_us) = (self.sent_bytes, self.total_us);
        match (self.outcome, &self.downtime) {
            (Outcome::Moved, Some(downtime)) => {
                let downtime_us = downtime.total_us.saturating_sub(downtime.verify_us);
                let is_within = downtime_us <= self.settings.max_downtime_ms.saturating_mul(1000);
                Some(MigrationOutcome {
                    total_ns: ns(total_us.saturating_sub(downtime.verify_us)),
                    downtime_ns: ns(downtime_us),
                    bytes,
                    converged: is_within && self.post_copy.is_none(),
                })
            }
            (Outcome::Aborted, _) if self.gave_up() => {
                Some(MigrationOutcome { total_ns: ns(total_us), downtime_ns: 0, bytes, converged: false })
            }
            _ => None,
        }
    }

    /// Returns true if the last decision of the policy was to give up.
    fn gave_up(&self) -> bool {
        let decisions = self.traces.stop.last().into_iter().flat_map(engine::trace::Trace::decisions);
        matches!(decisions.flatten().last(), Some(Decision::GiveUp { .. }))
    }

    /// Returns the facts about the path and the hosts that this migration has shown; none if it has sent no memory, or if
    /// the link was lost.
    pub fn path_sample(&self) -> Option<PathSample> {
        let rounds: Vec<_> = self.rounds.iter().filter(|round| !round.stopped && round.pass > 0).collect();
        if rounds.is_empty() || self.reconnections > 0 {
            return None;
        }
        let shows_link =
            |round: &&&Round| round.duration_us >= LEAST_ROUND_US && round.sent_bytes >= LEAST_ROUND_BYTES;
        let fastest = rounds.iter().filter(shows_link).map(|round| round.rate_bytes_per_s).max();
        let median = |of: fn(&Round) -> u64| {
            let mut values: Vec<_> = rounds.iter().map(|round| of(round)).collect();
            values.sort_unstable();
            values.get(values.len() / 2).map(|us| us.saturating_mul(1000))
        };
        let [first, last] = self.observed_ends();
        let setup_ns = first.map(|first| first.elapsed_ns.saturating_sub(first.interval_ns));
        let is_whole = self.outcome == Outcome::Moved && self.post_copy.is_none();
        let finish_ns = last.zip(self.downtime).filter(|_| is_whole).map(|(last, downtime)| {
            let stopped_ns = last.elapsed_ns + downtime.total_us.saturating_mul(1000);
            self.total_us.saturating_mul(1000).saturating_sub(stopped_ns)
        });
        Some(PathSample {
            unix_ms: self.ended_unix_ms.unwrap_or(self.started_unix_ms),
            link_bytes_per_s: fastest.filter(|_| self.settings.bandwidth_bytes_per_s == 0),
            scan_ns: median(|round| round.scan_us),
            drain_ns: median(|round| round.drain_us),
            // Rounds of disks alone precede the first observation.
            setup_ns: setup_ns.filter(|_| self.disks.is_empty()),
            finish_ns,
        })
    }

    /// Returns the first observation of the stop policy, and the last one.
    fn observed_ends(&self) -> [Option<RoundObservation>; 2] {
        let observed = || {
            let entries = self.traces.stop.iter().flat_map(|trace| &trace.entries);
            entries.filter_map(|entry| match entry.observed {
                PolicyEvent::Round { observed } => Some(observed),
                _ => None,
            })
        };
        [observed().next(), observed().next_back()]
    }
}

/// Writes the lines about forecast and outcome, for people.
pub(super) fn write(report: &Report, out: &mut String) -> fmt::Result {
    let Some(ReportedForecast { shown, outcome, .. }) = &report.forecast else { return Ok(()) };
    let ending = match shown.end {
        MigrationEnd::StopAndCopy if shown.converges => "will converge",
        MigrationEnd::StopAndCopy => "will not converge",
        MigrationEnd::PostCopy => "will end in post-copy",
        MigrationEnd::GivesUp { .. } => "will give up",
        MigrationEnd::Endless => "will not end",
    };
    let words = |estimate: Estimate| {
        let [expected, low, high] = [estimate.expected, estimate.low, estimate.high].map(ShownDuration);
        format!("{expected} ({low} to {high})")
    };
    let (total, downtime) = (words(shown.total_ns), words(shown.downtime_ns));
    writeln!(out, "  forecast    {ending}: {total}, downtime {downtime}, {}", bytes(shown.bytes.expected))?;
    let Some(outcome) = outcome else { return Ok(()) };
    let [total, downtime] = [outcome.total_ns, outcome.downtime_ns].map(ShownDuration);
    let is_inside =
        |estimate: Estimate, outcome: u64| if estimate.contains(outcome) { "" } else { ", outside" };
    writeln!(
        out,
        "  outcome     {}: {total}{}, downtime {downtime}{}, {}",
        if outcome.converged { "converged" } else { "did not converge" },
        is_inside(shown.total_ns, outcome.total_ns),
        is_inside(shown.downtime_ns, outcome.downtime_ns),
        bytes(outcome.bytes)
    )
}

#[cfg(test)]
mod tests {
    use engine::forecast::calibration::WriteHeat;
    use engine::pre_copy::{GiveUp, Limit, OnLimit, PatternPolicy, PreCopyGoals, StopTrace};
    use engine::trace::TraceEntry;
    use proto::{Epoch, HostId, VmName};

    use super::*;
    use crate::options::MigrationSettings;
    use crate::report::{Downtime, Measured};

    const SECOND: u64 = 1_000_000_000;

    fn forecast() -> ReportedForecast {
        let estimate = |expected| Estimate { expected, low: expected / 2, high: expected * 2 };
        let shown = MigrationForecast {
            end: MigrationEnd::StopAndCopy,
            converges: true,
            converging_percent: 100,
            total_ns: estimate(4 * SECOND),
            downtime_ns: estimate(20_000_000),
            bytes: Estimate::certain(1 << 30),
            rounds: 5,
            writes_bytes_per_s: 1 << 20,
            sends_bytes_per_s: 1 << 27,
            is_slowed: false,
        };
        let kind = CalibrationClass { policy: "pattern".into(), memory_octave: 10, heat: WriteHeat::Warm };
        ReportedForecast { measured: String::new(), kind, simulated: shown, shown, outcome: None }
    }

    /// Returns the report of a migration that has made two decisions, the second of which is `last`.
    fn report(last: Decision) -> Report {
        let id = proto::MigrationId { vm: VmName::new("web1").unwrap(), epoch: Epoch(7) };
        let [from, to] = ["alpha", "beta"].map(|name| HostId::new(name).unwrap());
        let mut report = Report::begin(id, from, to, MigrationSettings::default());
        let policy = PatternPolicy::new(PreCopyGoals::default(), OnLimit::Abort, <_>::default());
        let mut trace = StopTrace::new(policy.into());
        for (elapsed_ns, decision) in [(SECOND, None), (3 * SECOND, Some(last))] {
            let observed = RoundObservation { elapsed_ns, interval_ns: SECOND / 2, ..<_>::default() };
            let observed = PolicyEvent::Round { observed };
            trace.entries.push(TraceEntry { is_reset: false, observed, decision });
        }
        report.traces.stop.push(trace);
        report.forecast = Some(forecast());
        report.rounds = [(1, 60_000, 100), (1, 900, 5000), (2, 500_000, 200), (0, 500_000, 900)]
            .map(|(pass, duration_us, rate)| Round {
                pass,
                duration_us,
                rate_bytes_per_s: rate,
                sent_bytes: 2 << 20,
                scan_us: 3,
                stopped: pass == 0,
                ..Round::default()
            })
            .into();
        report
    }

    fn moved() -> Report {
        let mut report = report(Decision::StopAndCopy { expected_downtime_ns: 7, pattern: None });
        let measured = Measured { total_us: 130_000, verify_us: 100_000, ..Measured::default() };
        report.downtime = Some(Downtime::from_measured(measured));
        report.end(Outcome::Moved, None, 3_400_000);
        report.sent_bytes = 9 << 20;
        report.record_outcome();
        report
    }

    #[test]
    fn the_outcome_of_a_moved_vm_is_without_the_comparison() {
        let report = moved();
        let outcome = report.forecast.as_ref().unwrap().outcome.unwrap();
        assert_eq!((outcome.total_ns, outcome.downtime_ns), (3_300_000_000, 30_000_000));
        assert!(outcome.converged && outcome.bytes == 9 << 20);
        assert_eq!(report.calibration_record().unwrap().outcome, outcome);
        assert!(Report { reconnections: 1, ..report.clone() }.calibration_record().is_none());
        let mut text = String::new();
        write(&report, &mut text).unwrap();
        assert_eq!(
            text,
            "  forecast    will converge: 4.0 s (2.0 s to 8.0 s), downtime 20 ms (10 ms to 40 ms), 1.0 GiB\n  \
             outcome     converged: 3.3 s, downtime 30 ms, 9.0 MiB\n"
        );
    }

    #[test]
    fn policies_that_give_up_have_an_outcome_others_none() {
        let reason =
            GiveUp { limit: Limit::NotShrinking, expected_downtime_ns: 1, fixed_ns: 1, max_downtime_ns: 1 };
        for (last, is_covered) in [
            (Decision::GiveUp { reason }, true),
            (Decision::StopAndCopy { expected_downtime_ns: 7, pattern: None }, false),
        ] {
            let mut report = report(last);
            report.end(Outcome::Aborted, None, 3_400_000);
            report.record_outcome();
            let outcome = report.forecast.unwrap().outcome;
            assert_eq!(outcome.map(|outcome| outcome.converged), is_covered.then_some(false));
        }
    }

    #[test]
    fn a_migration_shows_its_path() {
        let report = moved();
        let sample = report.path_sample().unwrap();
        assert_eq!(sample.link_bytes_per_s, Some(200), "neither the short round nor the last one counts");
        assert_eq!((sample.scan_ns, sample.drain_ns), (Some(3000), Some(0)));
        assert_eq!((sample.setup_ns, sample.finish_ns), (Some(SECOND / 2), Some(270_000_000)));
        let mut capped = report.clone();
        capped.settings.bandwidth_bytes_per_s = 200;
        assert_eq!(capped.path_sample().unwrap().link_bytes_per_s, None);
        assert_eq!(Report { reconnections: 1, ..report.clone() }.path_sample(), None);
        assert_eq!(Report { rounds: Vec::new(), ..report }.path_sample(), None);
    }
}
