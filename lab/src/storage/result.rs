//! Results as they are stored.

use serde::{Deserialize, Serialize};

use super::case::{DiskCase, Mover};
use super::io::IoTurn;
use super::overhead::overhead;
use super::player::FilmReport;
use super::sampler::Timeline;
use crate::bench::result::{Turn, pairs, spread};
use crate::bench::{Provenance, Spread};

/// Name and version of the document.
pub const SCHEMA: &str = "whimbrel.bench-disks/1";

const PAGE_BYTES: f64 = 4096.0;

/// All results of migrations with disks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskResults {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Case by case.
    pub cases: Vec<DiskCaseResult>,
}

/// Results of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskCaseResult {
    /// The case.
    pub case: DiskCase,
    /// Time and circumstances of the measurements.
    pub made: Provenance,
    /// Migrations in the order in which they were made, without the warm-up.
    pub runs: Vec<DiskRun>,
    /// I/O in all states of the driver, if that is the subject of the case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub io: Vec<IoTurn>,
}

/// One migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskRun {
    /// The way in which the guest was migrated.
    pub mover: Mover,
    /// The turn, from 1 on: runs of one turn were made one after the other.
    pub turn: u32,
    /// Measured values; absent where the guest was not migrated.
    pub measured: Option<DiskMeasured>,
    /// The reason if it was not migrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
    /// Observations during the migration.
    pub seen: ClientObservations,
    /// Values second by second; of one turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
}

/// Measured values of a migration that ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskMeasured {
    /// Time from the request to the end, the start of the destination's QEMU included, ms.
    pub total_ms: f64,
    /// The part of the total time in which the disk alone was copied, ms.
    pub disk_ms: f64,
    /// The part of the total time in which memory was copied, and the disk along with it, ms.
    pub memory_ms: f64,
    /// Time from QEMU's event STOP to its event RESUME, ms.
    pub downtime_ms: f64,
    /// Bytes of the disk that were resent because they were written during the migration; absent where that is not
    /// reported.
    pub resent_bytes: Option<u64>,
    /// Bytes sent over the link from source to destination, with all headers.
    pub sent_bytes: u64,
    /// Bytes sent without the headers of the network.
    pub payload_bytes: u64,
    /// Bytes sent over the link in the other direction, with all headers.
    pub received_bytes: u64,
    /// Content of the disk that arrived, without blocks of zeros, bytes; 0 for a disk that need not be sent.
    pub disk_content_bytes: u64,
    /// Content of the memory that arrived, without zero pages, bytes.
    pub memory_content_bytes: u64,
}

/// Observations of clients from the request until some time after the arrival, and the guest's writes until it stopped.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientObservations {
    /// The longest time in which no client received data, ms.
    pub disruption_ms: f64,
    /// The longest silence that touches the switchover or the second before or after it, ms.
    pub switchover_gap_ms: Option<f64>,
    /// Time from the start of that silence to the guest's stop, ms; negative if it began later.
    #[serde(default)]
    pub silent_before_stop_ms: Option<f64>,
    /// Time from the guest's resumption to the end of that silence, ms.
    #[serde(default)]
    pub silent_after_resume_ms: Option<f64>,
    /// The longest silence in the quarter of a minute before the request, ms.
    pub usual_gap_ms: f64,
    /// Complete answers per second.
    pub answers_per_s: f64,
    /// Complete answers per second before the request.
    pub usual_answers_per_s: f64,
    /// Median time of an answer, ms.
    pub median_answer_ms: Option<f64>,
    /// Longest time of an answer, ms.
    pub slowest_answer_ms: f64,
    /// Posts that were confirmed, all of which are stored in the end.
    pub posted: u64,
    /// Answers that were a refusal.
    pub refused: u64,
    /// Errors that broke connections.
    pub broken: Vec<String>,
    /// Observations of the film's viewer.
    pub film: Option<FilmReport>,
    /// The guest's writes to its disk from the request to its stop.
    pub writes: u64,
    /// Bytes of these writes.
    pub written_bytes: u64,
    /// Time from the request to the stop, seconds.
    pub written_s: f64,
}

impl Turn for DiskRun {
    type Who = Mover;

    fn who(&self) -> Mover {
        self.mover
    }

    fn turn(&self) -> u32 {
        self.turn
    }
}

/// A measured quantity of a migration. Less is better, except for answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskQuantity {
    /// Total time, s.
    Total,
    /// The part of the total time in which the disk alone was copied, s.
    Disk,
    /// The part of the total time in which memory was copied, s.
    Memory,
    /// Downtime, ms.
    Downtime,
    /// The longest silence, ms.
    Disruption,
    /// The longest silence at the switchover, ms.
    Switchover,
    /// Time from the start of that silence to the guest's stop, ms.
    BeforeStop,
    /// Time from the guest's resumption to the end of that silence, ms.
    AfterResume,
    /// The longest silence before the request, ms.
    UsualGap,
    /// Dirty pages of the disk that were resent.
    Deltas,
    /// Dirty pages of the disk that were resent per second.
    DeltaRate,
    /// The guest's writes per second.
    WriteRate,
    /// Bytes sent without headers.
    Sent,
    /// Share sent beyond the necessary bytes, in hundredths.
    Overhead,
    /// Complete answers per second, in hundredths of those before.
    Answers,
    /// The slowest answer, ms.
    SlowestAnswer,
    /// Late frames of the film.
    LateFrames,
    /// Times at which the film's player ran out of frames.
    Underruns,
}

impl DiskQuantity {
    /// Returns its value in a run; `None` if there is none, or the guest was not migrated.
    pub fn of(self, run: &DiskRun) -> Option<f64> {
        let measured = run.measured.as_ref()?;
        let seen = &run.seen;
        let deltas = measured.resent_bytes.map(|bytes| bytes as f64 / PAGE_BYTES);
        let has_answers = seen.usual_answers_per_s > 0.0;
        match self {
            Self::Total => Some(measured.total_ms / 1e3),
            Self::Disk => (measured.disk_ms > 0.0).then_some(measured.disk_ms / 1e3),
            Self::Memory => Some(measured.memory_ms / 1e3),
            Self::Downtime => Some(measured.downtime_ms),
            Self::Disruption => Some(seen.disruption_ms),
            Self::Switchover => seen.switchover_gap_ms,
            Self::BeforeStop => seen.silent_before_stop_ms,
            Self::AfterResume => seen.silent_after_resume_ms,
            Self::UsualGap => Some(seen.usual_gap_ms),
            Self::Deltas => deltas,
            Self::DeltaRate => deltas.map(|deltas| deltas / (measured.total_ms / 1e3).max(1e-3)),
            Self::WriteRate => (seen.written_s > 0.0).then(|| seen.writes as f64 / seen.written_s),
            Self::Sent => Some(measured.payload_bytes as f64),
            Self::Overhead => {
                let content_bytes = measured.disk_content_bytes + measured.memory_content_bytes;
                overhead(measured.payload_bytes, content_bytes).map(|share| share * 100.0)
            }
            Self::Answers => has_answers.then(|| seen.answers_per_s / seen.usual_answers_per_s * 100.0),
            Self::SlowestAnswer => has_answers.then_some(seen.slowest_answer_ms),
            Self::LateFrames => seen.film.map(|film| film.late_frames as f64),
            Self::Underruns => seen.film.map(|film| film.underruns as f64),
        }
    }
}

impl DiskCaseResult {
    /// Returns the movers, in a fixed order.
    pub fn movers(&self) -> Vec<Mover> {
        let mut movers: Vec<_> = self.runs.iter().map(|run| run.mover).collect();
        movers.sort_unstable();
        movers.dedup();
        movers
    }

    /// Returns the runs of a mover.
    pub fn runs_of(&self, mover: Mover) -> impl Iterator<Item = &DiskRun> {
        self.runs.iter().filter(move |run| run.mover == mover)
    }

    /// Returns the number of a mover's migrations that ended, and of all its migrations.
    pub fn ended(&self, mover: Mover) -> (usize, usize) {
        let ended = self.runs_of(mover).filter(|run| run.measured.is_some()).count();
        (ended, self.runs_of(mover).count())
    }

    /// Returns the spread of a quantity over all runs of a mover that ended.
    pub fn spread(&self, mover: Mover, quantity: DiskQuantity) -> Option<Spread> {
        spread(&self.runs, mover, |run| quantity.of(run))
    }

    /// Returns the differences of a quantity between a mover and another in the same turn.
    pub fn beyond(&self, mover: Mover, other: Mover, quantity: DiskQuantity) -> Option<Spread> {
        let pairs = pairs(&self.runs, mover, other, |run| quantity.of(run));
        Spread::of(pairs.into_iter().map(|(own, others)| own - others))
    }
}
