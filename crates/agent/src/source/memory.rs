//! The guest's memory and disks at the source, in the hands of a migration: readers, the logs of writes, and what the
//! policy is shown of the rounds.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::ram::RamError;
use ::memory::{
    Deltas, DirtyBitmap, DirtyLog, Known, Owed, Packing, RoundStats, Saving, ScanError, ScanStats, Soft,
    SourceRam, TrackedRam,
};
use block::nbd::NbdError;
use engine::precopy::{
    Aim, ByHybrid, ByPattern, ByRounds, BySla, ByTarget, FixedCost, OnLimit, RoundObservation, Traced, Ways,
};
use engine::throttle::Cap;
use qemu::qmp::{Qmp, QmpError};
use qemu::recording::RecordError;
use tracee::{InjectError, TrackerStart};

use super::Aims;
use super::telemetry::Later;
use super::throttling::Throttling;
use super::vm::{SourceVm, VmError};
use crate::api::{self, StopPolicy, ThrottleWrites};
use crate::context::Context;
use crate::disks::{DiskLog, LeavingDisk, first_pages};
use crate::ram;
use crate::report::Round;

/// Why the guest's writes cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrackError {
    /// QEMU could not be made to open a userfaultfd.
    #[error("QEMU could not be made to open a userfaultfd")]
    Inject(#[from] InjectError),
    /// The kernel does not track it.
    #[error("the kernel does not track writes to it")]
    Track(#[from] ::memory::LogError),
}

/// Tracking that begins. Dropping it undoes what was done.
pub(crate) struct Tracking(TrackerStart);

impl Tracking {
    pub(crate) fn begin(context: &Context, vm: &SourceVm) -> Result<Self, TrackError> {
        let userfaultfd = context.injector.take_userfaultfd(&vm.process)?;
        Ok(Self(ram::begin_tracking(&vm.process, userfaultfd, &vm.blocks)?))
    }

    /// Does the next step, which does not take long; returns whether more are left.
    pub(crate) fn step(&mut self) -> Result<bool, TrackError> {
        Ok(self.0.step().map_err(::memory::LogError::from)?)
    }

    /// From here on every write is seen. All of memory has to be sent once.
    pub(crate) fn finish(self, vm: &SourceVm) -> Result<TrackedRam, TrackError> {
        Ok(ram::tracked(self.0, &vm.process, &vm.blocks)?)
    }
}

/// All that goes over the streams: the guest's memory, and after it the disks that are copied.
pub(crate) struct Cargo {
    readers: SourceRam,
    /// Lengths of the RAM blocks, in bytes. The disks are behind them.
    ram_bytes: Vec<u64>,
    /// What has to be sent first of each disk.
    first_of_disks: Vec<DirtyBitmap>,
    /// The log of memory, from when its writes are seen on, until this is dropped.
    ram: Option<TrackedRam>,
    /// The log of the disks, if there are any.
    disks: Option<DiskLog>,
    /// Where writes to them are to be capped.
    throttling: Option<Throttling>,
    /// How less of it is sent.
    saving: Saving,
}

impl Cargo {
    /// Nothing is done to the guest yet; where there are disks, their writes are recorded already. Of each is said
    /// whether its zeros have to be sent, too.
    pub(crate) fn new(
        vm: &SourceVm,
        disks: Option<(DiskLog, Vec<(LeavingDisk, bool)>)>,
        throttling: Option<Throttling>,
    ) -> Result<Self, CargoError> {
        let mut readers = ram::source(&vm.process, &vm.blocks)?;
        let (log, disks) = disks.unzip();
        let mut first_of_disks = Vec::new();
        for (disk, zeros_too) in disks.into_iter().flatten() {
            first_of_disks.push(first_pages(&disk, zeros_too)?);
            readers.push(Box::new(disk));
        }
        let ram_bytes = vm.blocks.iter().map(|block| block.used_bytes).collect();
        Ok(Self {
            readers: readers.into(),
            ram_bytes,
            first_of_disks,
            ram: None,
            disks: log,
            throttling,
            saving: Saving::default(),
        })
    }

    pub(crate) fn readers(&self) -> SourceRam {
        SourceRam::clone(&self.readers)
    }

    /// What the destination has already is not sent from here on.
    pub(crate) fn refer_to(&mut self, known: Known) {
        self.saving.known = Some(Arc::new(known));
    }

    /// What it has, as far as it is known.
    pub(crate) fn known(&self) -> Option<Arc<Known>> {
        self.saving.known.clone()
    }

    /// From here on nothing is referred to. To be called when all of memory was sent once: what is written after that
    /// is on no disk, and how fast references go says nothing of how fast pages will.
    pub(crate) fn end_references(&self) {
        if let Some(known) = &self.saving.known {
            known.end();
        }
    }

    /// What is sent from here on may be compressed.
    pub(crate) fn pack(&mut self, packing: Arc<Packing>) {
        self.saving.packing = Some(packing);
    }

    /// Of pages that are sent again what changed is sent, where that is known.
    pub(crate) fn send_deltas(&mut self, deltas: Arc<Deltas>) {
        self.saving.deltas = Some(deltas);
    }

    /// From here on all pages are sent in full: what the other side does not take of the last round would be missing.
    pub(crate) fn end_deltas(&self) {
        if let Some(deltas) = &self.saving.deltas {
            deltas.end();
        }
    }

    /// Nothing is known any more of what the destination has of these pages of memory.
    pub(crate) fn withdraw_marks(&self, pages: &[::memory::DirtyBitmap]) {
        if let Some(deltas) = &self.saving.deltas {
            deltas.withdraw(pages);
        }
    }

    /// What is marked of these pages stays so: they wait for a later round.
    pub(crate) fn keep_marks(&self, later: &Owed) {
        if let Some(deltas) = &self.saving.deltas {
            deltas.keep(later.blocks(), later.round() + 1);
        }
    }

    /// How many of these pages would have to be sent in full, as far as is known.
    pub(crate) fn unknown_pages(&self, owed: &Owed) -> u64 {
        self.saving.deltas.as_ref().map_or_else(|| owed.pages(), |deltas| deltas.unknown(owed.blocks()))
    }

    /// What the guest does not use is left out from here on, as far as somebody says what that is. To be called before
    /// memory is added, whose log has to tell what of it is used again.
    pub(crate) fn leave_out(&mut self, soft: Arc<Soft>) {
        debug_assert!(self.ram.is_none(), "its log tells nobody");
        self.saving.soft = Some(soft);
    }

    /// What the guest does not use, where it may be left out.
    pub(crate) fn soft(&self) -> Option<Arc<Soft>> {
        self.saving.soft.clone()
    }

    /// From here on everything is sent.
    pub(crate) fn end_leaving_out(&self) {
        if let Some(soft) = &self.saving.soft {
            soft.end();
        }
    }

    /// What the destination has as zeros because the guest did not use it, in each block of memory.
    pub(crate) fn left_out(&self) -> Vec<DirtyBitmap> {
        self.saving.soft.as_ref().map_or_else(Vec::new, |soft| soft.left_out())
    }

    pub(crate) fn saving(&self) -> Saving {
        self.saving.clone()
    }

    /// What has to be sent first of each disk.
    pub(crate) fn first_of_disks(&self) -> &[DirtyBitmap] {
        &self.first_of_disks
    }

    pub(crate) fn has_disks(&self) -> bool {
        self.disks.is_some()
    }

    /// Lengths of the RAM blocks, in bytes.
    pub(crate) fn ram_bytes(&self) -> &[u64] {
        &self.ram_bytes
    }

    pub(crate) fn total_ram_bytes(&self) -> u64 {
        self.ram_bytes.iter().sum()
    }

    /// Disks whose writes are to be throttled and that keep somebody else's caps.
    pub(crate) fn not_throttled(&self) -> Vec<String> {
        let disks = self.disks.as_ref().filter(|_| self.throttling.is_some());
        disks.into_iter().flat_map(DiskLog::throttled_by_others).map(str::to_owned).collect()
    }

    pub(crate) fn throttling(&self) -> Option<&Throttling> {
        self.throttling.as_ref()
    }

    /// A round was sent, or a part of one; none if it was cut off.
    pub(crate) fn drained(&mut self, stats: Option<&RoundStats>) {
        if let Some((throttling, stats)) = self.throttling.as_mut().zip(stats) {
            throttling.drained(stats);
        }
    }

    /// Caps the guest's writes to its disks as the policy says, where one was chosen; returns a new cap.
    pub(crate) fn throttle(&mut self, qmp: &mut Qmp) -> Result<Option<Cap>, QmpError> {
        match (&mut self.throttling, &mut self.disks) {
            (Some(throttling), Some(disks)) => throttling.look(disks, qmp),
            _ => Ok(None),
        }
    }

    pub(crate) fn ram_blocks(&self) -> usize {
        self.ram_bytes.len()
    }

    /// The disks, in their order.
    pub(crate) fn disk_names(&self) -> &[String] {
        self.disks.as_ref().map_or(&[], DiskLog::names)
    }

    /// The disks' names and lengths, in bytes.
    pub(crate) fn disks(&self) -> impl Iterator<Item = (String, u64)> {
        let lengths = self.readers.iter().skip(self.ram_bytes.len()).map(|disk| disk.bytes());
        self.disk_names().iter().cloned().zip(lengths)
    }

    /// What has to be sent of the disks, and nothing of memory.
    pub(crate) fn disks_alone(&self) -> Owed {
        let ram = self.ram_bytes.iter().map(|bytes| DirtyBitmap::new(*bytes));
        Owed::of(ram.chain(self.first_of_disks.iter().cloned()).collect())
    }

    /// From here on memory is part of every round; all of it is owed.
    pub(crate) fn add_memory(&mut self, mut tracked: TrackedRam, owed: &mut Owed) {
        if let Some(soft) = &self.saving.soft {
            tracked.tell(Arc::clone(soft));
        }
        self.ram = Some(tracked);
        owed.add_all(0..self.ram_bytes.len());
    }

    /// The guest has stopped and will be compared: the next scan looks for pages that were given back and read again.
    pub(crate) fn will_be_compared(&mut self) {
        if let Some(ram) = &mut self.ram {
            ram.will_be_compared();
        }
    }

    /// How many pages of disks are owed.
    pub(crate) fn disk_pages(&self, owed: &Owed) -> u64 {
        owed.blocks().iter().skip(self.ram_bytes.len()).map(DirtyBitmap::count).sum()
    }

    /// What waits for a later round, for people.
    pub(crate) fn waiting(&self, later: &Owed) -> Later {
        let of_disks = later.blocks().iter().skip(self.ram_bytes.len()).map(DirtyBitmap::count);
        Later { pages: later.pages(), of_disks: of_disks.collect() }
    }

    /// The log of all of it; disks are asked of QEMU.
    pub(crate) fn log<'a>(&'a mut self, qmp: &'a mut Qmp) -> impl DirtyLog + 'a {
        Log {
            ram: self.ram.as_mut(),
            ram_blocks: self.ram_bytes.len(),
            disks: self.disks.as_mut().zip(Some(qmp)),
        }
    }

    /// The log of memory alone, for which QEMU is not asked.
    pub(crate) fn ram_log(&mut self) -> impl DirtyLog + '_ {
        Log { ram: self.ram.as_mut(), ram_blocks: self.ram_bytes.len(), disks: None }
    }

    /// Adds what was written to the disks.
    pub(crate) fn look_at_disks(&mut self, qmp: &mut Qmp, owed: &mut Owed) -> Result<(), ScanError> {
        let Some(disks) = &mut self.disks else { return Ok(()) };
        owed.add_from(self.ram_bytes.len(), |into| disks.take(qmp, into)).map(drop)
    }

    /// To be called when there is time after a look at the disks.
    pub(crate) fn tidy(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.disks.as_mut().map_or(Ok(()), |disks| disks.tidy(qmp))
    }

    /// Memory is not tracked any more; what is left is to be ended by QEMU.
    pub(crate) fn into_disks(self) -> Option<DiskLog> {
        self.disks
    }
}

/// Why something cannot be sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CargoError {
    /// The guest's memory cannot be reached.
    #[error("the guest's memory cannot be reached")]
    Ram(#[from] RamError),
    /// A disk cannot be read.
    #[error("a disk cannot be read")]
    Disk(#[from] NbdError),
    /// Writes to the disks are not recorded.
    #[error("writes to the disks cannot be recorded")]
    Record(#[from] RecordError),
    /// QEMU could not be given the socket.
    #[error("no socket to read the disks over, {path}", path = path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Writes to the disks could not be made as fast as ever should this agent die.
    #[error(
        "writes cannot be throttled: nothing could be started that lifts the throttle should this agent die"
    )]
    Guard(#[source] std::io::Error),
    /// The monitor failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The other side wants a disk that was not proposed for copying, or one twice.
    #[error("the destination wants a copy of disk {0:?}, which was not proposed to it, or twice")]
    Unknown(String),
}

/// One log of what has several.
struct Log<'a> {
    ram: Option<&'a mut TrackedRam>,
    ram_blocks: usize,
    disks: Option<(&'a mut DiskLog, &'a mut Qmp)>,
}

impl DirtyLog for Log<'_> {
    fn take(&mut self, into: &mut [DirtyBitmap]) -> Result<ScanStats, ScanError> {
        let (ram, disks) = into.split_at_mut(self.ram_blocks.min(into.len()));
        let mut stats = ScanStats::default();
        // Disks first: QEMU is asked, and takes its time.
        if let Some((log, qmp)) = &mut self.disks {
            stats = log.take(qmp, disks)?;
        }
        if let Some(log) = &mut self.ram {
            let scan = log.take(ram)?;
            stats = ScanStats {
                pages: stats.pages + scan.pages,
                duration_us: stats.duration_us + scan.duration_us,
            };
        }
        Ok(stats)
    }
}

/// The policy that decides when to stop, for a guest to which so much can be done.
pub(crate) fn policy(aims: &Aims, ways: Ways, fixed: FixedCost) -> Traced {
    let goal = aim(aims);
    let on_limit = match aims.on_limit {
        api::OnLimit::Stop => OnLimit::Stop,
        api::OnLimit::PostCopy => OnLimit::PostCopy,
        api::OnLimit::Abort => OnLimit::Abort,
    };
    match aims.policy {
        StopPolicy::Pattern => {
            let policy = ByPattern::new(goal, on_limit, fixed).sampling(aims.sampling);
            // The longer it takes the less a guest may write whose writes are throttled.
            let is_throttled = aims.throttle_writes != ThrottleWrites::Off;
            Traced::new(if is_throttled { policy.throttling_writes() } else { policy })
        }
        StopPolicy::Target => Traced::new(ByTarget::new(goal, on_limit)),
        StopPolicy::Rounds => Traced::new(ByRounds::default()),
        StopPolicy::Hybrid => Traced::new(ByHybrid::new(goal, aims.hybrid_passes, fixed)),
        StopPolicy::Sla => Traced::new(BySla::new(goal, ways, on_limit, fixed).sampling(aims.sampling)),
    }
}

/// What is aimed at now.
pub(crate) fn aim(aims: &Aims) -> Aim {
    let ns = |ms: u64| ms.saturating_mul(1_000_000);
    Aim {
        max_downtime_ns: ns(aims.max_downtime_ms),
        max_rounds: aims.max_rounds,
        max_total_ns: aims.max_total_ms.map(ns),
    }
}

/// A round that was sent, and when the scan before it was made.
pub(crate) struct SentRound {
    pub(crate) stats: RoundStats,
    pub(crate) scanned_at: Instant,
    /// How often all that was dirty has been sent, this round included.
    pub(crate) pass: u32,
    /// Dirty pages that it left to the next.
    pub(crate) left_pages: u64,
    /// Those of them that are of disks.
    pub(crate) left_of_disks: u64,
    /// Pages of it that were sent shortly before, too.
    pub(crate) resent_pages: u64,
}

/// Pages that are dirty after a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dirty {
    pub(crate) pages: u64,
    /// Those of which nothing is known that would spare the link a part of them.
    pub(crate) unknown: u64,
    pub(crate) of_disks: u64,
}

/// What the policy is shown after a round and the scan that followed it, which found so many dirty pages, so long after
/// the migration was asked for.
pub(crate) fn observe(
    sent: &SentRound,
    scan: ScanStats,
    dirty: Dirty,
    scanned_at: Instant,
    elapsed: Duration,
) -> RoundObservation {
    let stats = &sent.stats;
    RoundObservation {
        round: sent.pass,
        dirty_pages: dirty.pages,
        unknown_pages: dirty.unknown,
        disk_pages: dirty.of_disks,
        pages_sent: stats.contents.pages(),
        empty_pages: stats.contents.empty(),
        spared_pages: stats.contents.delta + stats.contents.reference + stats.contents.soft,
        left_pages: sent.left_pages,
        left_of_disks: sent.left_of_disks,
        resent_pages: sent.resent_pages,
        bytes_sent: stats.wire_bytes,
        duration_ns: stats.duration_us.saturating_mul(1000),
        interval_ns: scanned_at.duration_since(sent.scanned_at).as_nanos() as u64,
        scan_ns: scan.duration_us.saturating_mul(1000),
        elapsed_ns: elapsed.as_nanos() as u64,
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
        filled_pages: stats.contents.filled,
        soft_pages: stats.contents.soft,
        reference_pages: stats.contents.reference,
        delta_pages: stats.contents.delta,
        refused_pages: stats.refused_pages,
        sent_bytes: stats.wire_bytes,
        duration_us: stats.duration_us,
        rate_bytes_per_s: rate,
        ..Round::default()
    }
}
