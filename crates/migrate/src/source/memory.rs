//! The guest's memory and disks at the source during a migration: readers, dirty logs, and the observations of rounds
//! for the policy.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::ram::RamError;
use ::memory::{
    CompressionState, ContentIndex, Deltas, DirtyBitmap, DirtyLog, HintedPages, Owed, Reductions, RoundStats,
    ScanError, ScanStats, SourceRam, TrackedRam,
};
use block::nbd::NbdError;
use engine::precopy::{
    AvailableStrategies, FixedCost, HybridPolicy, OnLimit, PatternPolicy, PrecopyGoals, RoundCountPolicy,
    RoundObservation, SlaPolicy, TargetPolicy, TracedPolicy,
};
use engine::throttle::Cap;
use qemu::qmp::{Qmp, QmpError};
use qemu::recording::RecordError;
use tracee::{InjectError, TrackerStart};

use super::Goals;
use super::telemetry::DeferredPages;
use super::write_throttle::DiskWriteThrottle;
use api::report::Round;
use api::{self, StopPolicy, ThrottleWrites};
use host::Context;
use host::disks::{DiskLog, LeavingDisk, first_pages};
use host::ram;
use host::{SourceVm, VmError};

/// Error of tracking the guest's writes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrackError {
    /// QEMU could not open a userfaultfd for the agent.
    #[error("QEMU could not be made to open a userfaultfd")]
    Inject(#[from] InjectError),
    /// The kernel does not track writes to the memory.
    #[error("the kernel cannot track writes to it")]
    Track(#[from] ::memory::LogError),
}

/// Write tracking that is being set up. Dropping it undoes the steps that were done.
pub(crate) struct Tracking(TrackerStart);

impl Tracking {
    pub(crate) fn begin(context: &Context, vm: &SourceVm) -> Result<Self, TrackError> {
        let userfaultfd = context.injector.create_userfaultfd(&vm.process)?;
        Ok(Self(ram::begin_tracking(&vm.process, userfaultfd, &vm.blocks)?))
    }

    /// Performs the next step, which is short; returns true if more steps remain.
    pub(crate) fn step(&mut self) -> Result<bool, TrackError> {
        Ok(self.0.step().map_err(::memory::LogError::from)?)
    }

    /// Completes the setup. From here on every write is recorded. All of memory has to be sent once.
    pub(crate) fn finish(self, vm: &SourceVm) -> Result<TrackedRam, TrackError> {
        Ok(ram::tracked(self.0, &vm.process, &vm.blocks)?)
    }
}

/// Migration state that the data streams send: the guest's memory, and after it the copied disks.
pub(crate) struct Payload {
    readers: SourceRam,
    /// Lengths of the RAM blocks, in bytes. The disks follow them in the order of blocks.
    ram_bytes: Vec<u64>,
    /// Pages of each disk that the first pass has to send.
    first_of_disks: Vec<DirtyBitmap>,
    /// Dirty log of memory, from the start of write tracking until this is dropped.
    ram: Option<TrackedRam>,
    /// Dirty log of the disks, if any are copied.
    disks: Option<DiskLog>,
    /// Throttle of writes to the disks, if they are to be capped.
    write_throttle: Option<DiskWriteThrottle>,
    /// Reductions of the data that is sent.
    saving: Reductions,
}

impl Payload {
    /// Prepares the readers without changing the guest; if disks are copied, their writes are recorded already. The
    /// flag of each disk is true if its zeros have to be sent, too.
    pub(crate) fn new(
        vm: &SourceVm,
        disks: Option<(DiskLog, Vec<(LeavingDisk, bool)>)>,
        write_throttle: Option<DiskWriteThrottle>,
    ) -> Result<Self, PayloadError> {
        let mut readers = ram::source(&vm.process, &vm.blocks)?;
        let (log, disks) = disks.unzip();
        let mut first_of_disks = Vec::new();
        for (disk, send_zeros) in disks.into_iter().flatten() {
            first_of_disks.push(first_pages(&disk, send_zeros)?);
            readers.push(Box::new(disk));
        }
        let ram_bytes = vm.blocks.iter().map(|block| block.used_bytes).collect();
        Ok(Self {
            readers: readers.into(),
            ram_bytes,
            first_of_disks,
            ram: None,
            disks: log,
            write_throttle,
            saving: Reductions::default(),
        })
    }

    pub(crate) fn readers(&self) -> SourceRam {
        SourceRam::clone(&self.readers)
    }

    /// Sends page references from here on for content that the destination already has.
    pub(crate) fn enable_references(&mut self, known: ContentIndex) {
        self.saving.known = Some(Arc::new(known));
    }

    /// Returns the index of content that the destination is known to have.
    pub(crate) fn known(&self) -> Option<Arc<ContentIndex>> {
        self.saving.known.clone()
    }

    /// Ends page references. The caller calls this after all of memory was sent once: pages written later are on no
    /// disk, and the speed of references does not predict the speed of pages.
    pub(crate) fn end_references(&self) {
        if let Some(known) = &self.saving.known {
            known.end();
        }
    }

    /// Lets data that is sent from here on be compressed.
    pub(crate) fn enable_compression(&mut self, packing: Arc<CompressionState>) {
        self.saving.packing = Some(packing);
    }

    /// Sends pages again as deltas, if the version that was sent is known.
    pub(crate) fn enable_deltas(&mut self, deltas: Arc<Deltas>) {
        self.saving.deltas = Some(deltas);
    }

    /// Ends deltas: from here on all pages are sent in full, because a delta that the destination rejects in the last
    /// round would be a missing page.
    pub(crate) fn end_deltas(&self) {
        if let Some(deltas) = &self.saving.deltas {
            deltas.end();
        }
    }

    /// Forgets the known versions of these pages of memory at the destination.
    pub(crate) fn forget_versions(&self, pages: &[::memory::DirtyBitmap]) {
        if let Some(deltas) = &self.saving.deltas {
            deltas.forget_discarded(pages);
        }
    }

    /// Keeps the known versions of these pages: they wait for a later round.
    pub(crate) fn keep_versions(&self, later: &Owed) {
        if let Some(deltas) = &self.saving.deltas {
            deltas.keep(later.blocks(), later.round() + 1);
        }
    }

    /// Returns how many of these pages are known to have no version that a delta could use.
    pub(crate) fn full_pages(&self, owed: &Owed) -> u64 {
        self.saving.deltas.as_ref().map_or_else(|| owed.pages(), |deltas| deltas.unknown(owed.blocks()))
    }

    /// Leaves out pages from here on that the guest reports as unused. The caller calls this before memory is added,
    /// because the log of memory has to report which of these pages are used again.
    pub(crate) fn set_free_page_hints(&mut self, hinted: Arc<HintedPages>) {
        debug_assert!(self.ram.is_none(), "its log tells nobody");
        self.saving.hinted = Some(hinted);
    }

    /// Returns the guest's free page hints, if pages may be left out.
    pub(crate) fn hinted(&self) -> Option<Arc<HintedPages>> {
        self.saving.hinted.clone()
    }

    /// Ends free page hints: from here on everything is sent.
    pub(crate) fn end_free_page_hints(&self) {
        if let Some(hinted) = &self.saving.hinted {
            hinted.end();
        }
    }

    /// Returns, for each block of memory, the pages that are zeros at the destination because the guest did not use
    /// them.
    pub(crate) fn left_out(&self) -> Vec<DirtyBitmap> {
        self.saving.hinted.as_ref().map_or_else(Vec::new, |hinted| hinted.left_out())
    }

    pub(crate) fn saving(&self) -> Reductions {
        self.saving.clone()
    }

    /// Pages of each disk that the first pass has to send.
    pub(crate) fn first_of_disks(&self) -> &[DirtyBitmap] {
        &self.first_of_disks
    }

    pub(crate) fn has_disks(&self) -> bool {
        self.disks.is_some()
    }

    /// Returns the lengths of the RAM blocks, in bytes.
    pub(crate) fn ram_bytes(&self) -> &[u64] {
        &self.ram_bytes
    }

    pub(crate) fn total_ram_bytes(&self) -> u64 {
        self.ram_bytes.iter().sum()
    }

    /// Returns the disks whose writes are to be throttled but keep caps that another program has set.
    pub(crate) fn externally_throttled(&self) -> Vec<String> {
        let disks = self.disks.as_ref().filter(|_| self.write_throttle.is_some());
        disks.into_iter().flat_map(DiskLog::throttled_by_others).map(str::to_owned).collect()
    }

    pub(crate) fn write_throttle(&self) -> Option<&DiskWriteThrottle> {
        self.write_throttle.as_ref()
    }

    /// Records a round, or a part of one, that was sent; none if it was cut off.
    pub(crate) fn record_sent(&mut self, stats: Option<&RoundStats>) {
        if let Some((write_throttle, stats)) = self.write_throttle.as_mut().zip(stats) {
            write_throttle.record_sent(stats);
        }
    }

    /// Caps the guest's writes to its disks as the policy decides, if one was chosen; returns a new cap.
    pub(crate) fn throttle(&mut self, qmp: &mut Qmp) -> Result<Option<Cap>, QmpError> {
        match (&mut self.write_throttle, &mut self.disks) {
            (Some(write_throttle), Some(disks)) => write_throttle.sample(disks, qmp),
            _ => Ok(None),
        }
    }

    pub(crate) fn ram_blocks(&self) -> usize {
        self.ram_bytes.len()
    }

    /// Returns the names of the disks, in their order.
    pub(crate) fn disk_names(&self) -> &[String] {
        self.disks.as_ref().map_or(&[], DiskLog::names)
    }

    /// Returns the disks' names and lengths, in bytes.
    pub(crate) fn disks(&self) -> impl Iterator<Item = (String, u64)> {
        let lengths = self.readers.iter().skip(self.ram_bytes.len()).map(|disk| disk.bytes());
        self.disk_names().iter().cloned().zip(lengths)
    }

    /// Returns the first pass's pages of the disks, without any of memory.
    pub(crate) fn disks_alone(&self) -> Owed {
        let ram = self.ram_bytes.iter().map(|bytes| DirtyBitmap::new(*bytes));
        Owed::of(ram.chain(self.first_of_disks.iter().cloned()).collect())
    }

    /// Makes memory part of every round from here on; all of memory is owed.
    pub(crate) fn add_memory(&mut self, mut tracked: TrackedRam, owed: &mut Owed) {
        if let Some(hinted) = &self.saving.hinted {
            tracked.report_to(Arc::clone(hinted));
        }
        self.ram = Some(tracked);
        owed.add_all(0..self.ram_bytes.len());
    }

    /// Announces that the stopped guest will be compared: the next scan also finds pages that were given back and read
    /// again.
    pub(crate) fn announce_comparison(&mut self) {
        if let Some(ram) = &mut self.ram {
            ram.announce_comparison();
        }
    }

    /// Returns how many pages of disks are owed.
    pub(crate) fn disk_pages(&self, owed: &Owed) -> u64 {
        owed.blocks().iter().skip(self.ram_bytes.len()).map(DirtyBitmap::count).sum()
    }

    /// Returns the counts of pages that wait for a later round, for the progress display.
    pub(crate) fn waiting(&self, later: &Owed) -> DeferredPages {
        let of_disks = later.blocks().iter().skip(self.ram_bytes.len()).map(DirtyBitmap::count);
        DeferredPages { pages: later.pages(), of_disks: of_disks.collect() }
    }

    /// Returns the dirty log of memory and disks; the disks' part is requested from QEMU.
    pub(crate) fn log<'a>(&'a mut self, qmp: &'a mut Qmp) -> impl DirtyLog + 'a {
        Log {
            ram: self.ram.as_mut(),
            ram_blocks: self.ram_bytes.len(),
            disks: self.disks.as_mut().zip(Some(qmp)),
        }
    }

    /// Returns the dirty log of memory alone, which needs no request to QEMU.
    pub(crate) fn ram_log(&mut self) -> impl DirtyLog + '_ {
        Log { ram: self.ram.as_mut(), ram_blocks: self.ram_bytes.len(), disks: None }
    }

    /// Adds the pages of disks that were written.
    pub(crate) fn scan_disks(&mut self, qmp: &mut Qmp, owed: &mut Owed) -> Result<(), ScanError> {
        let Some(disks) = &mut self.disks else { return Ok(()) };
        owed.add_from(self.ram_bytes.len(), |into| disks.take(qmp, into)).map(drop)
    }

    /// Releases QEMU's frozen bitmaps. The caller calls this after a scan of the disks, when there is time.
    pub(crate) fn tidy(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.disks.as_mut().map_or(Ok(()), |disks| disks.tidy(qmp))
    }

    /// Ends the tracking of memory, and returns the log of the disks, which QEMU has to end.
    pub(crate) fn into_disks(self) -> Option<DiskLog> {
        self.disks
    }
}

/// Error of preparing the data for sending.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PayloadError {
    /// The guest's memory cannot be reached.
    #[error("the guest's memory cannot be reached")]
    Ram(#[from] RamError),
    /// A disk cannot be read.
    #[error("a disk cannot be read")]
    Disk(#[from] NbdError),
    /// Writes to the disks are not recorded.
    #[error("writes to the disks cannot be recorded")]
    Record(#[from] RecordError),
    /// The socket for QEMU could not be made.
    #[error("cannot create the socket {path}, over which disks are read", path = path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// No guard could be started that would lift the throttle of writes if this agent died.
    #[error(
        "writes cannot be throttled: the guard process that would remove the throttle if this agent dies \
         cannot be started"
    )]
    ThrottleGuard(#[source] std::io::Error),
    /// The monitor failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The destination requests a disk that was not proposed for copying, or one twice.
    #[error(
        "the destination requested a copy of disk {0:?} that was not proposed to it, or requested it twice"
    )]
    Unknown(String),
}

/// Combined dirty log of memory and disks.
struct Log<'a> {
    ram: Option<&'a mut TrackedRam>,
    ram_blocks: usize,
    disks: Option<(&'a mut DiskLog, &'a mut Qmp)>,
}

impl DirtyLog for Log<'_> {
    fn take(&mut self, into: &mut [DirtyBitmap]) -> Result<ScanStats, ScanError> {
        let (ram, disks) = into.split_at_mut(self.ram_blocks.min(into.len()));
        let mut stats = ScanStats::default();
        // Disks first: QEMU has to answer a request, which needs time.
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

/// Returns the policy that decides when to stop the guest, for the actions (slowing down, post-copy) that are possible
/// with it.
pub(crate) fn policy(goals: &Goals, ways: AvailableStrategies, fixed: FixedCost) -> TracedPolicy {
    let goal = precopy_goals(goals);
    let on_limit = match goals.settings.on_limit {
        api::OnLimit::Stop => OnLimit::Stop,
        api::OnLimit::PostCopy => OnLimit::PostCopy,
        api::OnLimit::Abort => OnLimit::Abort,
    };
    match goals.settings.policy {
        StopPolicy::Pattern => {
            let policy = PatternPolicy::new(goal, on_limit, fixed).sampling(goals.sampling);
            // With throttled writes, a guest may write less the longer the migration lasts.
            let is_throttled = goals.settings.throttle_writes != ThrottleWrites::Off;
            TracedPolicy::new(if is_throttled { policy.with_write_throttle() } else { policy })
        }
        StopPolicy::Target => TracedPolicy::new(TargetPolicy::new(goal, on_limit)),
        StopPolicy::Rounds => TracedPolicy::new(RoundCountPolicy::default()),
        StopPolicy::Hybrid => TracedPolicy::new(HybridPolicy::new(goal, goals.settings.hybrid_passes, fixed)),
        StopPolicy::Sla => {
            TracedPolicy::new(SlaPolicy::new(goal, ways, on_limit, fixed).sampling(goals.sampling))
        }
    }
}

/// Returns the policy's present goals.
pub(crate) fn precopy_goals(goals: &Goals) -> PrecopyGoals {
    let ns = |ms: u64| ms.saturating_mul(1_000_000);
    PrecopyGoals {
        max_downtime_ns: ns(goals.settings.max_downtime_ms),
        max_rounds: goals.settings.max_rounds,
        max_total_ns: goals.max_total_ms().map(ns),
    }
}

/// A round that was sent, with the time of the scan before it.
pub(crate) struct SentRound {
    pub(crate) stats: RoundStats,
    pub(crate) scanned_at: Instant,
    /// Number of passes over the dirty pages, including this round's.
    pub(crate) pass: u32,
    /// Dirty pages that the round left to the next.
    pub(crate) remaining_pages: u64,
    /// Dirty pages of disks among `remaining_pages`.
    pub(crate) remaining_disk_pages: u64,
    /// Pages of the round that were sent shortly before, too.
    pub(crate) resent_pages: u64,
}

/// Pages that are dirty after a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirtyCounts {
    pub(crate) pages: u64,
    /// Dirty pages without any knowledge that would save the link a part of them.
    pub(crate) unknown: u64,
    pub(crate) of_disks: u64,
}

/// Returns the policy's observation of a round and of the scan that followed it; `elapsed` is the time since the
/// migration was requested.
pub(crate) fn observe(
    sent: &SentRound,
    scan: ScanStats,
    dirty: DirtyCounts,
    scanned_at: Instant,
    elapsed: Duration,
) -> RoundObservation {
    let stats = &sent.stats;
    RoundObservation {
        round: sent.pass,
        dirty_pages: dirty.pages,
        full_pages: dirty.unknown,
        disk_pages: dirty.of_disks,
        pages_sent: stats.contents.pages(),
        empty_pages: stats.contents.empty(),
        reduced_pages: stats.contents.delta + stats.contents.reference + stats.contents.hinted,
        remaining_pages: sent.remaining_pages,
        remaining_disk_pages: sent.remaining_disk_pages,
        resent_pages: sent.resent_pages,
        bytes_sent: stats.wire_bytes,
        duration_ns: stats.duration_us.saturating_mul(1000),
        interval_ns: scanned_at.duration_since(sent.scanned_at).as_nanos() as u64,
        scan_ns: scan.duration_us.saturating_mul(1000),
        elapsed_ns: elapsed.as_nanos() as u64,
    }
}

/// Converts a round's statistics for the report; fields that the sender does not know stay empty.
pub(crate) fn round_report(stats: &RoundStats) -> Round {
    let rate = stats.wire_bytes.saturating_mul(1_000_000).checked_div(stats.duration_us).unwrap_or(0);
    Round {
        round: stats.round,
        data_pages: stats.contents.data,
        zero_pages: stats.contents.zero,
        hole_pages: stats.contents.hole,
        filled_pages: stats.contents.filled,
        hinted_pages: stats.contents.hinted,
        reference_pages: stats.contents.reference,
        delta_pages: stats.contents.delta,
        refused_pages: stats.refused_pages,
        sent_bytes: stats.wire_bytes,
        duration_us: stats.duration_us,
        rate_bytes_per_s: rate,
        ..Round::default()
    }
}
