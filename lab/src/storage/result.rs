//! What was measured, as it is kept.

use serde::{Deserialize, Serialize};

use super::case::{Case, Mover};
use super::io::IoTurn;
use super::overhead::overhead;
use super::player::Viewed;
use super::sampler::Timeline;
use crate::bench::result::{Turn, pairs, spread};
use crate::bench::{Provenance, Spread};

/// Name and version of the document.
pub const SCHEMA: &str = "whimbrel.bench-disks/1";

const PAGE_BYTES: f64 = 4096.0;

/// All that was measured of moving disks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Case by case.
    pub cases: Vec<CaseResult>,
}

/// What was measured of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseResult {
    /// The case.
    pub case: Case,
    /// When and with what it was measured.
    pub made: Provenance,
    /// Migrations in the order in which they were made, the warm-up not among them.
    pub runs: Vec<Run>,
    /// I/O in all states of the driver, where that is what the case is about.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub io: Vec<IoTurn>,
}

/// One migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Who moved the guest.
    pub mover: Mover,
    /// Which turn, from 1 on: runs of one turn were made one after the other.
    pub turn: u32,
    /// What was measured; absent where the guest was not moved.
    pub measured: Option<Measured>,
    /// Why it was not moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
    /// What was seen meanwhile.
    pub seen: Seen,
    /// Second by second; of one turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
}

/// What was measured of a migration that ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// From the request to the end, the start of the destination's QEMU included, ms.
    pub total_ms: f64,
    /// The part of it in which the disk alone was copied, ms.
    pub disk_ms: f64,
    /// The part of it in which memory was copied, and the disk along with it, ms.
    pub memory_ms: f64,
    /// From QEMU's event STOP to its event RESUME, ms.
    pub downtime_ms: f64,
    /// What of the disk was sent again because it was written meanwhile, bytes; absent where nobody tells.
    pub resent_bytes: Option<u64>,
    /// Over the link from source to destination, with all headers, bytes.
    pub sent_bytes: u64,
    /// The same without the headers of the network, bytes.
    pub payload_bytes: u64,
    /// Over the link back, with all headers, bytes.
    pub received_bytes: u64,
    /// What the disk that arrived holds, blocks of zeros apart, bytes; nothing of one that need not be sent.
    pub disk_content_bytes: u64,
    /// What the memory that arrived holds, pages of zeros apart, bytes.
    pub memory_content_bytes: u64,
}

/// What clients saw from the request until some time after the arrival, and what the guest wrote until it stopped.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// The longest time in which no client got anything, ms.
    pub disruption_ms: f64,
    /// The longest of those that touch the switch-over or the second before or after it, ms.
    pub switchover_gap_ms: Option<f64>,
    /// How long before the guest's stop that one began, ms; less than nothing if it began later.
    #[serde(default)]
    pub silent_before_stop_ms: Option<f64>,
    /// How long after the guest went on it ended, ms.
    #[serde(default)]
    pub silent_after_resume_ms: Option<f64>,
    /// The longest in the quarter of a minute before the request, ms.
    pub usual_gap_ms: f64,
    /// Whole answers in a second.
    pub answers_per_s: f64,
    /// The same before the request.
    pub usual_answers_per_s: f64,
    /// What half of the answers took at most, ms.
    pub median_answer_ms: Option<f64>,
    /// The slowest of them, ms.
    pub slowest_answer_ms: f64,
    /// Posts that were confirmed, all of which are there in the end.
    pub posted: u64,
    /// Answers that were a refusal.
    pub refused: u64,
    /// What broke connections.
    pub broken: Vec<String>,
    /// What somebody saw of the film.
    pub film: Option<Viewed>,
    /// The guest's writes to its disk from the request to its stop.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// How long that was, seconds.
    pub written_s: f64,
}

impl Turn for Run {
    type Who = Mover;

    fn who(&self) -> Mover {
        self.mover
    }

    fn turn(&self) -> u32 {
        self.turn
    }
}

/// Something that is measured of a migration. Less is better, but of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Total time, s.
    Total,
    /// The part of it in which the disk alone was copied, s.
    Disk,
    /// The part of it in which memory was copied, s.
    Memory,
    /// Downtime, ms.
    Downtime,
    /// The longest silence, ms.
    Disruption,
    /// The longest silence at the switch-over, ms.
    Switchover,
    /// How long before the guest's stop that one began, ms.
    BeforeStop,
    /// How long after the guest went on it ended, ms.
    AfterResume,
    /// The longest silence before the request, ms.
    UsualGap,
    /// Dirty pages of the disk that were sent again.
    Deltas,
    /// The same in a second.
    DeltaRate,
    /// The guest's writes in a second.
    WriteRate,
    /// Sent without headers, bytes.
    Sent,
    /// By how much more was sent than had to be, in hundredths.
    Overhead,
    /// Whole answers in a second, in hundredths of those before.
    Answers,
    /// The slowest answer, ms.
    SlowestAnswer,
    /// Late frames of the film.
    LateFrames,
    /// Times at which the film's player ran out of frames.
    Underruns,
}

impl Quantity {
    /// Its value in a run; none where there is none, or the guest was not moved.
    pub fn of(self, run: &Run) -> Option<f64> {
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

impl CaseResult {
    /// Who took part, in a fixed order.
    pub fn movers(&self) -> Vec<Mover> {
        let mut movers: Vec<_> = self.runs.iter().map(|run| run.mover).collect();
        movers.sort_unstable();
        movers.dedup();
        movers
    }

    /// The runs of a mover.
    pub fn runs_of(&self, mover: Mover) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| run.mover == mover)
    }

    /// How many of a mover's migrations ended, and how many there were.
    pub fn ended(&self, mover: Mover) -> (usize, usize) {
        let ended = self.runs_of(mover).filter(|run| run.measured.is_some()).count();
        (ended, self.runs_of(mover).count())
    }

    /// A quantity over all runs of a mover that ended.
    pub fn spread(&self, mover: Mover, quantity: Quantity) -> Option<Spread> {
        spread(&self.runs, mover, |run| quantity.of(run))
    }

    /// By how much a mover's is more than another's in the same turn.
    pub fn beyond(&self, mover: Mover, other: Mover, quantity: Quantity) -> Option<Spread> {
        let pairs = pairs(&self.runs, mover, other, |run| quantity.of(run));
        Spread::of(pairs.into_iter().map(|(own, others)| own - others))
    }
}
