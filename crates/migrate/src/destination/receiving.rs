//! Receiving memory: the data streams of one generation after the other, into the waiting QEMU's RAM.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{
    AcceptedReductions, BlockWriter, DataStream, DestinationRam, ReceiveError, Receiver, ReceiverEvent,
    ReceiverHandle, WriterSwitch, ZeroedRange,
};
use proto::message::Proposal;
use proto::{Generation, MigrationId};
use qemu::describe::VmDescription;
use tracee::{AddressRange, Injector, Process};
use tracing::{debug, info, warn};

use super::inbox::{Mailbox, Notice};
use host::ArrivalError;
use host::ArrivingVm;
use host::Context;
use host::disks::CopiedImages;
use host::pool::PoolWatch;
use host::templates::{AdvertisedTemplates, SharedImage, shared_images};

/// Memory that is being received.
pub(crate) struct MemoryReceiver {
    receiver: Arc<Mutex<Receiver>>,
    context: Arc<Context>,
    migration: MigrationId,
    streams: u16,
    /// True if there is a page stream, too.
    has_page_stream: bool,
    mailbox: Mailbox,
    /// The blocks that are written.
    ram: DestinationRam,
    /// Switches the writers to placement of pages, once the guest may run.
    switch: WriterSwitch,
    /// Templates to which the source may refer.
    advertised: Arc<AdvertisedTemplates>,
    /// Watch of the pool of the disks, until all of their content has arrived.
    watch: Mutex<Option<PoolWatch>>,
}

impl MemoryReceiver {
    /// Prepares for the first generation, with the number of streams of the proposal; deltas are received with hashes
    /// of the proposal's seed.
    pub(crate) fn new(
        context: &Arc<Context>,
        migration: MigrationId,
        proposal: &Proposal,
        vm: &ArrivingVm,
        images: &CopiedImages,
        mailbox: Mailbox,
    ) -> Result<Self, ArrivalError> {
        let switch = WriterSwitch::default();
        let ram = switch.before(host::ram::destination(&vm.process, &vm.blocks)?);
        let ram: DestinationRam = ram.into_iter().chain(images.writers()).collect();
        let releaser = MemoryReleaser::new(context, vm)?;
        let flushing = images.flushing();
        let notices = mailbox.clone();
        let patience = Duration::from_millis(context.config.timeouts.qmp_ms);
        let shared = shared_with_source(proposal);
        let advertised = Arc::new(AdvertisedTemplates::new(vm.artifacts.directory.clone(), patience, shared));
        let templates = Arc::clone(&advertised);
        let presumed = AcceptedReductions { templates: Some(templates), delta_seed: proposal.delta_seed };
        let (switched, streams) = (switch.clone(), proposal.streams);
        let referred = Arc::clone(&advertised);
        let corrupt = CorruptFrames::default();
        let observer = move |event, handle: &ReceiverHandle| match event {
            // All content of disks has arrived, and no memory is freed while the guest runs.
            ReceiverEvent::RoundEnded { .. } if switched.is_switched() => {}
            ReceiverEvent::RoundEnded { ram_round, took, referred: is_referred_to, .. } => {
                // A disk that fails is detected here, not only when the guest is stopped.
                let advertised = notices.clone();
                flushing.flush(move |error| {
                    advertised.put(Notice::StorageFailed { error });
                });
                // There are no references after all of memory has arrived: the servers of the templates end now, not
                // during the stop.
                if ram_round > 0 && !is_referred_to {
                    referred.close();
                }
                releaser.release_memory(ram_round, took, handle);
            }
            ReceiverEvent::Broken { generation, stream, cause } => {
                report_stream_end(&notices, &corrupt, generation, stream, &cause);
            }
        };
        let receiver = Receiver::with_reductions(Arc::clone(&ram), presumed, streams, observer);
        let (receiver, context) = (Arc::new(Mutex::new(receiver)), Arc::clone(context));
        let has_page_stream = proposal.post_copy;
        let watch = Mutex::new(watch_pool(&context, images, &mailbox)?);
        Ok(Self {
            receiver,
            context,
            migration,
            streams,
            has_page_stream,
            mailbox,
            ram,
            switch,
            advertised,
            watch,
        })
    }

    /// Prepares for the placement of pages in a guest that may run already.
    pub(super) fn placing(
        context: &Arc<Context>,
        migration: MigrationId,
        streams: u16,
        writers: Vec<Box<dyn BlockWriter>>,
        mailbox: Mailbox,
    ) -> Self {
        let (ram, notices): (DestinationRam, _) = (writers.into(), mailbox.clone());
        let corrupt = CorruptFrames::default();
        let observer = move |event, _: &ReceiverHandle| {
            if let ReceiverEvent::Broken { generation, stream, cause } = event {
                report_stream_end(&notices, &corrupt, generation, stream, &cause);
            }
        };
        let receiver = Arc::new(Mutex::new(Receiver::new(Arc::clone(&ram), streams, observer)));
        let advertised = Arc::new(AdvertisedTemplates::new(PathBuf::new(), Duration::ZERO, Vec::new()));
        let (context, switch) = (Arc::clone(context), WriterSwitch::default());
        let (has_page_stream, watch) = (true, Mutex::default());
        Self {
            receiver,
            context,
            migration,
            streams,
            has_page_stream,
            mailbox,
            ram,
            switch,
            advertised,
            watch,
        }
    }

    /// Returns the blocks that are written, disks last, and the switch to placement.
    pub(super) fn blocks(&self) -> (&[Box<dyn BlockWriter>], &WriterSwitch) {
        (&self.ram, &self.switch)
    }

    /// Lets go of the disks, because all of their content has arrived.
    pub(super) fn end_disks(&self) {
        self.ram.iter().filter(|block| !block.is_ram()).for_each(|block| block.end());
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns the newest round of which anything has arrived; 0 before the first.
    pub(super) fn newest_round(&self) -> u32 {
        self.lock().newest_round()
    }

    /// Ends and joins everything of older generations, and expects the streams of `generation`.
    pub(crate) fn begin(&self, generation: Generation) -> std::io::Result<()> {
        self.lock().begin(generation);
        let all_streams = self.streams + u16::from(self.has_page_stream);
        let route = self.context.router.expect(self.migration.clone(), generation, all_streams);
        let receiver = Arc::clone(&self.receiver);
        let patience = Duration::from_millis(self.context.config.timeouts.give_up_after_ms);
        let (streams, mailbox) = (self.streams, self.mailbox.clone());
        let gather = move || {
            let deadline = Instant::now() + patience;
            for _ in 0..all_streams {
                let Some((stream, connection)) = route.next(deadline) else { return };
                if stream == streams {
                    mailbox.put(Notice::PageStream { generation, connection: Box::new(connection) });
                    continue;
                }
                let stream_ends = DataStream::over(connection, None);
                let attached = receiver.lock().unwrap_or_else(PoisonError::into_inner).attach(
                    generation,
                    stream,
                    stream_ends,
                );
                if let Err(error) = attached {
                    mailbox.put(Notice::Broken { generation, error: crate::chain(&error) });
                    return;
                }
            }
        };
        thread::Builder::new().name("gather".to_owned()).spawn(gather).map(drop)
    }

    /// Returns the templates that were advertised to the source.
    pub(crate) fn advertised(&self) -> &Arc<AdvertisedTemplates> {
        &self.advertised
    }

    /// Refuses further writes: memory is complete, and from here on only QEMU writes to it.
    pub(crate) fn shut(&self) {
        self.lock().shut();
    }

    /// Ends all streams; afterwards they do not write to the guest's memory any more.
    pub(crate) fn end(self) {
        self.lock().end_and_join();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Receiver> {
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the migration when arriving disks would use more of the pool than allowed.
fn watch_pool(
    context: &Context,
    images: &CopiedImages,
    mailbox: &Mailbox,
) -> Result<Option<PoolWatch>, ArrivalError> {
    let Some(pool) = context.config.pool.as_ref().filter(|_| !images.is_empty()) else { return Ok(None) };
    let notices = mailbox.clone();
    let is_short = move |error| {
        notices.put(Notice::StorageFailed { error });
    };
    PoolWatch::start(pool, is_short).map_err(ArrivalError::Watch)
}

/// Returns the images that both hosts have, as far as this host knows them by now: copied disks have no layers here.
fn shared_with_source(proposal: &Proposal) -> Vec<SharedImage> {
    let described = serde_json::from_value::<VmDescription>(proposal.description.clone());
    described.map_or_else(|_| Vec::new(), |vm| shared_images(&vm.disks, |_| false))
}

/// Number of corrupt frames in a migration.
#[derive(Debug, Default)]
struct CorruptFrames(AtomicU32);

/// Number of corrupt frames that are attributed to the network, and sent again over new connections; any more are
/// attributed to the source.
const MOST_CORRUPT: u32 = 3;

impl CorruptFrames {
    /// True if the pages of one more corrupt frame are requested again.
    fn allows(&self, cause: &ReceiveError) -> bool {
        cause.is_corrupt() && self.0.fetch_add(1, Ordering::Relaxed) < MOST_CORRUPT
    }
}

fn report_stream_end(
    notices: &Mailbox,
    corrupt: &CorruptFrames,
    generation: Generation,
    stream: u16,
    cause: &ReceiveError,
) {
    if cause.is_connection() {
        debug!(stream, %cause, "a data stream ended");
    } else if corrupt.allows(cause) {
        warn!(
            stream,
            cause = crate::chain(cause),
            "received an invalid frame on a data stream; its pages will be sent again"
        );
    } else {
        notices.try_put(Notice::Broken { generation, error: crate::chain(cause) });
    }
}

/// Frees memory that was zeroed. Only QEMU itself can free anonymous memory, by an injected system call. It does so
/// after long rounds only: in a last round the guest would wait for it.
struct MemoryReleaser {
    process: Process,
    injector: Arc<Injector>,
    addresses: Vec<u64>,
}

/// Shortest round after which memory is freed. To free memory needs some milliseconds, which is negligible beside such
/// a round, even if the guest is stopped during it.
const LONG_ROUND: Duration = Duration::from_millis(250);

impl MemoryReleaser {
    fn new(context: &Context, vm: &ArrivingVm) -> Result<Self, ArrivalError> {
        Ok(Self {
            process: vm.process.try_clone()?,
            injector: Arc::clone(&context.injector),
            addresses: vm.blocks.iter().map(|block| block.host_address).collect(),
        })
    }

    fn release_memory(&self, round: u32, took: Duration, handle: &ReceiverHandle) {
        // It is not known here whether a round is the last; the first two are not. Before them there is no memory.
        if round == 0 || (round > 2 && took < LONG_ROUND) {
            return;
        }
        handle.discard_with(|discardable| {
            let ranges: Vec<_> = discardable.iter().filter_map(|part| self.address(part)).collect();
            if ranges.is_empty() {
                return;
            }
            match self.injector.discard(&self.process, &ranges) {
                Ok(()) => info!(round, ranges = ranges.len(), "released memory that the guest does not use"),
                // The memory reads as zeros in any case.
                Err(error) => warn!(round, error = crate::chain(&error), "zeroed memory stays allocated"),
            }
        });
    }

    fn address(&self, part: &ZeroedRange) -> Option<AddressRange> {
        let base = self.addresses.get(usize::from(part.block))?;
        Some(AddressRange::new(base + part.bytes.start, base + part.bytes.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_few_corrupt_frames_are_attributed_to_the_network() {
        let corrupt = CorruptFrames::default();
        let frame = ReceiveError::WrongSeq { expected: 3, found: 4 };
        assert!((0..MOST_CORRUPT).all(|_| corrupt.allows(&frame)));
        assert!(!corrupt.allows(&frame));
        // Sending again does not mend this.
        assert!(!CorruptFrames::default().allows(&ReceiveError::Shut));
    }
}
