//! Results as they are stored, and their statistics: medians, spreads, ratios.

use std::fmt;
use std::process::Command;
use std::sync::LazyLock;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::case::Case;
use super::contender::Contender;
use super::machine::machine;
use super::program::{Disturbance, UNDISTURBED};
use super::program_run::ProgramResult;
use super::statistics::{
    ClientObservation, CompressionStats, DowntimeParts, Noise, Noises, StopCircumstances,
};
use crate::environment::{Environment, QemuVersion};
use crate::error::Result;
use crate::run::run;

/// Name and version of the document.
pub const SCHEMA: &str = "whimbrel.bench/1";

/// All results of a bench.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Case by case.
    pub cases: Vec<CaseResult>,
}

/// Results of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseResult {
    /// The case.
    pub case: Case,
    /// Time and circumstances of the measurements.
    pub made: Provenance,
    /// Measurements in the order in which they were made, without the warm-up.
    pub runs: Vec<Run>,
}

/// Time and circumstances of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// Seconds since 1970.
    pub unix_s: u64,
    /// The machine, in a few words.
    pub machine: String,
    /// QEMU's own version text.
    pub qemu: String,
    /// The commit of the sources when this program first requested it, if they are at hand; with a `+` if they were
    /// changed since.
    pub commit: Option<String>,
}

impl Provenance {
    /// Returns the provenance of measurements made now.
    pub(crate) fn now(environment: &Environment, qemu: QemuVersion) -> Result<Self> {
        let qemu = run(Command::new(environment.qemu(qemu)?.program).arg("--version"))?;
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            unix_s: since_1970.as_secs(),
            machine: machine(),
            qemu: qemu.lines().next().unwrap_or_default().to_owned(),
            commit: COMMIT.clone(),
        })
    }
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { machine, qemu, commit, .. } = self;
        let commit = commit.as_ref().map_or(String::new(), |commit| format!(", commit {commit}"));
        write!(f, "{qemu}{commit}; {machine}")
    }
}

/// Requested once: a bench needs hours, and changes to the sources in the meantime do not change the measured program.
static COMMIT: LazyLock<Option<String>> = LazyLock::new(|| {
    let git = |arguments: &[&str]| run(Command::new("git").args(arguments)).ok();
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    // Results that were written before do not change the measured program.
    let sources = ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs"];
    let changed = git(&sources).is_none_or(|text| !text.is_empty());
    Some(format!("{}{}", commit.trim(), if changed { "+" } else { "" }))
});

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The way in which the guest was migrated.
    pub contender: Contender,
    /// The turn, from 1 on: runs of one turn were made one after the other.
    pub turn: u32,
    /// Measured values; absent where the migration did not end in time.
    pub measured: Option<Measured>,
    /// Effects on the guest's program, if it records them.
    pub disturbance: Option<Disturbance>,
    /// Run time of the guest's program, if it comes to an end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramResult>,
    /// Noise for other guests, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noises: Option<Noises>,
    /// Observations of the guest's client, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientObservation>,
}

impl Run {
    /// Returns a run without measured values.
    pub fn new(contender: Contender, turn: u32) -> Self {
        Self { contender, turn, measured: None, disturbance: None, program: None, noises: None, client: None }
    }
}

/// Measured values of one migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Time from the request to the end, the start of the destination's QEMU included, ms.
    pub total_ms: f64,
    /// Time of the start of the destination's QEMU and of all before it, ms.
    pub start_ms: f64,
    /// Time from the stop of the guest until it resumes, ms: with Whimbrel from before `stop` to the return of `cont`,
    /// with QEMU from its event STOP to its event RESUME.
    pub downtime_ms: f64,
    /// Time from QEMU's event STOP to its event RESUME, with every contender, ms. Absent in measurements made before
    /// Whimbrel reported it.
    #[serde(default)]
    pub events_ms: Option<f64>,
    /// Parts of the downtime, where they are known.
    pub parts: Option<DowntimeParts>,
    /// Duration of both dirty scans while the guest was stopped, where they are known, ms.
    #[serde(default)]
    pub last_scans_ms: Option<f64>,
    /// Bytes sent over the link from source to destination, with all headers.
    pub sent_bytes: u64,
    /// Bytes sent over the link in the other direction.
    pub received_bytes: u64,
    /// Processor time of both QEMUs and both agents, from the request to the end, ms.
    pub cpu_ms: f64,
    /// The part of the processor time that the agents used, ms.
    pub agents_cpu_ms: f64,
    /// Peak memory of the source's agent and its injector, bytes.
    pub source_agent_peak_bytes: u64,
    /// Peak memory of the destination's agent and its injector, bytes.
    pub destination_agent_peak_bytes: u64,
    /// Passes over the guest's memory.
    pub rounds: u64,
    /// Observations of Whimbrel's policy, where it reported any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopCircumstances>,
    /// Post-copy: true if the guest resumed before all of its memory had arrived; absent for other ways, and where it
    /// was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub has_switched_to_post_copy: Option<bool>,
    /// Statistics of compression, where Whimbrel reported them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packing: Option<CompressionStats>,
    /// The sending rate of the first pass, with all headers, where it is known, bytes per second.
    pub first_round_bytes_per_s: Option<f64>,
}

/// A median with the least and the most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The most.
    pub most: f64,
}

impl Spread {
    /// Computes the spread of numbers; `None` if there are none.
    pub fn of(numbers: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut numbers: Vec<f64> = numbers.into_iter().collect();
        numbers.sort_by(f64::total_cmp);
        let (least, most) = (*numbers.first()?, *numbers.last()?);
        let middle = numbers.len() / 2;
        let median = if numbers.len() % 2 == 1 {
            numbers[middle]
        } else {
            f64::midpoint(numbers[middle - 1], numbers[middle])
        };
        Some(Self { median, least, most })
    }

    /// Returns median, least and most in units of `one`, for a table.
    pub(crate) fn cell(self, one: f64) -> String {
        let number = |value: f64| {
            let value = value / one;
            if value.abs() < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
        };
        format!("**{}** ({}–{})", number(self.median), number(self.least), number(self.most))
    }
}

/// A measured quantity of a migration. Less is better, except for a pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Total time, ms.
    Total,
    /// The part of the total time after the start of the destination's QEMU, ms.
    Moving,
    /// Downtime from QEMU's event STOP to its event RESUME, ms.
    Downtime,
    /// Downtime from before `stop` to the return of `cont`, ms. QEMU reports no such time for its own migration.
    Standstill,
    /// Processor time, ms.
    Cpu,
    /// Bytes sent.
    Sent,
    /// Bytes sent back.
    Received,
    /// Peak memory of an agent, bytes. Only Whimbrel has agents.
    AgentPeak,
    /// The longest stall of the guest's program, ms.
    Stall,
    /// The work that the guest's program lost, ms.
    Lost,
    /// Brownout, ms; for a program that never was back at full speed, the whole time for which it was watched.
    Brownout,
    /// Run time of the guest's program, ms, where it comes to an end.
    RunTime,
    /// The work that the guest that stays at the source lost, ms.
    LostAtSource,
    /// The work that the guest at the destination lost, ms.
    LostAtDestination,
    /// The work of the guest that stays at the source during the migration, as a share of its usual work, percent.
    PaceAtSource,
    /// The work of the guest at the destination during the migration, as a share of its usual work, percent.
    PaceAtDestination,
    /// The longest time for which the guest's client got no answer, ms.
    Silence,
    /// The longest silence minus [`Measured::downtime_ms`], ms.
    SilenceBeyondDowntime,
}

impl Quantity {
    /// Returns its value in a run.
    pub fn of(self, run: &Run) -> Option<f64> {
        let measured = run.measured.as_ref();
        let disturbance = run.disturbance.as_ref();
        let noises = run.noises.as_ref();
        let pace = |noise: &Noise| 100.0 * (1.0 - noise.lost_work_ms / noise.span_ms.max(1.0));
        match self {
            Self::Total => measured.map(|m| m.total_ms),
            Self::Moving => measured.map(|m| m.total_ms - m.start_ms),
            Self::Downtime => measured.map(|m| m.events_ms.unwrap_or(m.downtime_ms)),
            Self::Standstill => measured.filter(|_| is_whimbrel(run)).map(|m| m.downtime_ms),
            Self::Cpu => measured.map(|m| m.cpu_ms),
            Self::Sent => measured.map(|m| m.sent_bytes as f64),
            Self::Received => measured.map(|m| m.received_bytes as f64),
            Self::AgentPeak => measured
                .map(|m| m.source_agent_peak_bytes.max(m.destination_agent_peak_bytes))
                .filter(|_| is_whimbrel(run))
                .map(|bytes| bytes as f64),
            Self::Stall => disturbance.map(|d| d.longest_stall_ms),
            Self::Lost => disturbance.map(|d| d.lost_work_ms),
            Self::RunTime => run.program.map(|program| program.ms),
            Self::LostAtSource => noises.map(|both| both.source.lost_work_ms),
            Self::LostAtDestination => noises.map(|both| both.destination.lost_work_ms),
            Self::PaceAtSource => noises.map(|both| pace(&both.source)),
            Self::PaceAtDestination => noises.map(|both| pace(&both.destination)),
            Self::Silence => run.client.map(|client| client.longest_silence_ms),
            Self::SilenceBeyondDowntime => Some(run.client?.longest_silence_ms - measured?.downtime_ms),
            Self::Brownout => disturbance.map(|d| d.brownout_ms.unwrap_or(UNDISTURBED.as_secs_f64() * 1e3)),
        }
    }
}

fn is_whimbrel(run: &Run) -> bool {
    run.contender.is_whimbrel()
}

impl Quantity {
    /// Returns true if more is better.
    fn is_pace(self) -> bool {
        matches!(self, Self::PaceAtSource | Self::PaceAtDestination)
    }

    /// Returns true if it is compared by its ratio. A quantity that can be zero or negative is compared by the
    /// difference.
    pub fn has_ratio(self) -> bool {
        use Quantity::{
            Brownout, Lost, LostAtDestination, LostAtSource, PaceAtDestination, PaceAtSource,
            SilenceBeyondDowntime, Stall,
        };
        let has_none = [
            Stall,
            Lost,
            Brownout,
            LostAtSource,
            LostAtDestination,
            PaceAtSource,
            PaceAtDestination,
            SilenceBeyondDowntime,
        ];
        !has_none.contains(&self)
    }
}

impl CaseResult {
    /// Returns the contenders, in a fixed order.
    pub fn contenders(&self) -> Vec<Contender> {
        let mut contenders: Vec<_> = self.runs.iter().map(|run| run.contender).collect();
        contenders.sort_unstable();
        contenders.dedup();
        contenders
    }

    /// Returns the runs of a contender.
    pub fn runs_of(&self, contender: Contender) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| run.contender == contender)
    }

    /// Returns the number of a contender's migrations that ended in time, and of all its migrations.
    pub fn ended(&self, contender: Contender) -> (usize, usize) {
        let ended = self.runs_of(contender).filter(|run| run.measured.is_some()).count();
        (ended, self.runs_of(contender).count())
    }

    /// Returns the spread of a quantity over all runs of a contender that ended.
    pub fn spread(&self, contender: Contender, quantity: Quantity) -> Option<Spread> {
        spread(&self.runs, contender, |run| quantity.of(run))
    }

    /// Returns QEMU's way with the least median, or the highest pace, among those that always ended.
    pub fn best_of_qemu(&self, quantity: Quantity) -> Option<(Contender, f64)> {
        self.contenders()
            .into_iter()
            .filter(|one| one.is_qemu() && self.ended(*one).0 == self.ended(*one).1)
            .filter_map(|one| Some((one, self.spread(one, quantity)?.median)))
            .min_by(|(_, a), (_, b)| if quantity.is_pace() { b.total_cmp(a) } else { a.total_cmp(b) })
    }

    /// Returns the ratio of medians of a quantity: a contender's to another's.
    pub fn ratio(&self, contender: Contender, other: Contender, quantity: Quantity) -> Option<f64> {
        let (own, others) = (self.spread(contender, quantity)?, self.spread(other, quantity)?);
        (others.median > 0.0).then_some(own.median / others.median)
    }

    /// Returns the ratios of a quantity turn by turn: a contender's to another's in the same turn.
    pub fn paired(&self, contender: Contender, other: Contender, quantity: Quantity) -> Option<Spread> {
        let pairs = pairs(&self.runs, contender, other, |run| quantity.of(run));
        Spread::of(pairs.into_iter().filter(|(_, others)| *others > 0.0).map(|(own, others)| own / others))
    }

    /// Returns the differences of a quantity turn by turn: a contender's minus another's in the same turn.
    pub fn beyond(&self, contender: Contender, other: Contender, quantity: Quantity) -> Option<Spread> {
        Spread::of(self.differences(contender, other, quantity))
    }

    /// Returns the differences one by one.
    pub fn differences(&self, contender: Contender, other: Contender, quantity: Quantity) -> Vec<f64> {
        let pairs = pairs(&self.runs, contender, other, |run| quantity.of(run));
        pairs.into_iter().map(|(own, others)| own - others).collect()
    }
}

/// A measurement that is compared with others of the same turn.
pub(crate) trait Turn {
    /// Type of the measured contender.
    type Who: PartialEq + Copy;
    /// Returns the measured contender.
    fn who(&self) -> Self::Who;
    /// Returns the turn.
    fn turn(&self) -> u32;
}

impl Turn for Run {
    type Who = Contender;

    fn who(&self) -> Contender {
        self.contender
    }

    fn turn(&self) -> u32 {
        self.turn
    }
}

/// Returns the spread of a value over all measurements of a contender for which it is known.
pub(crate) fn spread<R: Turn>(runs: &[R], who: R::Who, of: impl Fn(&R) -> Option<f64>) -> Option<Spread> {
    Spread::of(runs.iter().filter(|run| run.who() == who).filter_map(of))
}

/// Returns pairs of a contender's value and another's value in the same turn.
pub(crate) fn pairs<R: Turn>(
    runs: &[R],
    who: R::Who,
    other: R::Who,
    of: impl Fn(&R) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let pair = |run: &R| {
        let pair = runs.iter().find(|pair| pair.who() == other && pair.turn() == run.turn())?;
        Some((of(run)?, of(pair)?))
    };
    runs.iter().filter(|run| run.who() == who).filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::super::contender::QemuMode;
    use super::*;

    fn run(contender: Contender, turn: u32, total_ms: Option<f64>) -> Run {
        let measured = total_ms.map(|total_ms| Measured { total_ms, ..Measured::default() });
        Run { measured, ..Run::new(contender, turn) }
    }

    #[test]
    fn the_best_is_among_those_that_end_and_ratios_are_paired() {
        let ours = Contender::Whimbrel(None);
        let (default, multifd) = (Contender::Qemu(QemuMode::Default), Contender::Qemu(QemuMode::Multifd(2)));
        let runs = vec![
            run(ours, 1, Some(10.0)),
            run(default, 1, Some(20.0)),
            run(multifd, 1, Some(5.0)),
            run(ours, 2, Some(12.0)),
            run(default, 2, Some(30.0)),
            run(multifd, 2, None),
            run(ours, 3, Some(11.0)),
            run(default, 3, Some(10.0)),
            run(multifd, 3, Some(5.0)),
        ];
        let result =
            CaseResult { case: Case::idle("x", QemuVersion::Newer), made: Provenance::default(), runs };
        assert_eq!(result.best_of_qemu(Quantity::Total), Some((default, 20.0)));
        assert_eq!(result.ended(multifd), (2, 3));
        assert_eq!(result.ratio(ours, default, Quantity::Total), Some(0.55));
        let paired = result.paired(ours, default, Quantity::Total).unwrap();
        assert_eq!(paired, Spread { median: 0.5, least: 0.4, most: 1.1 });
        let beyond = result.beyond(ours, default, Quantity::Total).unwrap();
        assert_eq!(beyond, Spread { median: -10.0, least: -18.0, most: 1.0 });
        let spread = Spread { median: 3.0, least: 1.0, most: 9.0 };
        assert_eq!(Spread::of([4.0, 1.0, 9.0, 2.0]), Some(spread));
        assert_eq!(Spread::of([]), None);
    }
}
