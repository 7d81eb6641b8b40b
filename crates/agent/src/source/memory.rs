//! The guest's memory at the source, in the hands of a migration: readers, the log of its writes, and what the policy
//! is shown of the rounds.

use std::time::Instant;

use ::memory::ram::RamError;
use ::memory::{DirtyLog, Owed, RoundStats, ScanStats, SourceRam, TrackedRam};
use engine::precopy::{Aim, FixedCost, OnLimit, RoundObservation, StopTime, Traced};
use tracee::{InjectError, TrackerStart};

use super::Aims;
use super::vm::SourceVm;
use crate::api;
use crate::context::Context;
use crate::ram;
use crate::report::Round;

/// Why the guest's writes cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrackError {
    /// QEMU could not be made to open a userfaultfd.
    #[error("QEMU could not be made to open a userfaultfd")]
    Inject(#[from] InjectError),
    /// Its memory cannot be reached.
    #[error("the guest's memory cannot be reached")]
    Access(#[from] RamError),
    /// The kernel does not track it.
    #[error("the kernel does not track writes to it")]
    Track(#[from] ::memory::LogError),
}

/// Tracking that begins. Dropping it undoes what was done.
pub(crate) struct Tracking {
    ram: SourceRam,
    start: TrackerStart,
}

impl Tracking {
    pub(crate) fn begin(context: &Context, vm: &SourceVm) -> Result<Self, TrackError> {
        let ram = ram::source(&vm.process, &vm.blocks)?;
        let userfaultfd = context.injector.take_userfaultfd(&vm.process)?;
        Ok(Self { ram, start: ram::begin_tracking(&vm.process, userfaultfd, &vm.blocks)? })
    }

    /// Does the next step, which does not take long; returns whether more are left.
    pub(crate) fn step(&mut self) -> Result<bool, TrackError> {
        Ok(self.start.step().map_err(::memory::LogError::from)?)
    }

    /// From here on every write is seen. All of memory has to be sent once.
    pub(crate) fn finish(self, vm: &SourceVm) -> Result<Tracked, TrackError> {
        let log = ram::tracked(self.start, &vm.process, &vm.blocks)?;
        let block_bytes = vm.blocks.iter().map(|block| block.used_bytes).collect();
        Ok(Tracked { ram: self.ram, log, block_bytes })
    }
}

/// Guest memory whose writes are seen, until it is dropped.
pub(crate) struct Tracked {
    ram: SourceRam,
    log: TrackedRam,
    block_bytes: Vec<u64>,
}

impl Tracked {
    pub(crate) fn ram(&self) -> SourceRam {
        SourceRam::clone(&self.ram)
    }

    /// The guest has stopped and will be compared: the next scan looks for pages that were given back and read again.
    pub(crate) fn will_be_compared(&mut self) {
        self.log.will_be_compared();
    }

    pub(crate) fn log(&mut self) -> &mut dyn DirtyLog {
        &mut self.log
    }

    pub(crate) fn everything(&self) -> Owed {
        Owed::everything(self.block_bytes.iter().copied())
    }
}

/// The policy that decides when to stop.
pub(crate) fn policy(aims: &Aims, fixed: FixedCost) -> Traced {
    let on_limit = match aims.on_limit {
        api::OnLimit::Stop => OnLimit::Stop,
        api::OnLimit::Abort => OnLimit::Abort,
    };
    Traced::new(StopTime::new(aim(aims), on_limit, fixed))
}

/// What is aimed at now.
pub(crate) fn aim(aims: &Aims) -> Aim {
    Aim { max_downtime_ns: aims.max_downtime_ms.saturating_mul(1_000_000), max_rounds: aims.max_rounds }
}

/// A round that was sent, and when the scan before it was made.
pub(crate) struct SentRound {
    pub(crate) stats: RoundStats,
    pub(crate) scanned_at: Instant,
}

/// What the policy is shown after a round and the scan that followed it.
pub(crate) fn observe(
    sent: &SentRound,
    scan: ScanStats,
    dirty_pages: u64,
    scanned_at: Instant,
) -> RoundObservation {
    let stats = &sent.stats;
    RoundObservation {
        round: stats.round,
        dirty_pages,
        pages_sent: stats.contents.pages(),
        bytes_sent: stats.wire_bytes,
        duration_ns: stats.duration_us.saturating_mul(1000),
        interval_ns: scanned_at.duration_since(sent.scanned_at).as_nanos() as u64,
        scan_ns: scan.duration_us.saturating_mul(1000),
    }
}

/// A round as the report has it; what the sender does not know is left empty.
pub(crate) fn round_report(stats: &RoundStats) -> Round {
    let rate = stats.wire_bytes.saturating_mul(1_000_000).checked_div(stats.duration_us).unwrap_or(0);
    Round {
        round: stats.round,
        data_pages: stats.contents.data,
        zero_pages: stats.contents.zero,
        hole_pages: stats.contents.hole,
        sent_bytes: stats.wire_bytes,
        duration_us: stats.duration_us,
        rate_bytes_per_s: rate,
        ..Round::default()
    }
}
