//! Receiving memory: the data streams of one generation after the other, into the waiting QEMU's RAM.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{
    BlockWriter, DataStream, DestinationRam, Discardable, Presumed, ReceiveError, Receiver, ReceiverEvent,
    ReceiverHandle, Switch,
};
use proto::message::Proposal;
use proto::{Generation, MigrationId};
use qemu::describe::VmDescription;
use tracee::{AddressRange, Injector, Process};
use tracing::{debug, info, warn};

use super::arriving::Arriving;
use super::error::ArriveError;
use super::inbox::{Mailbox, Notice};
use crate::context::Context;
use crate::disks::Images;
use crate::pool::PoolWatch;
use crate::templates::{SharedImage, Told, shared_images};

/// Memory on its way in.
pub(crate) struct Receiving {
    receiver: Arc<Mutex<Receiver>>,
    context: Arc<Context>,
    migration: MigrationId,
    streams: u16,
    /// Whether there is a page stream, too.
    has_page_stream: bool,
    mailbox: Mailbox,
    /// What is written to.
    ram: DestinationRam,
    /// Has pages placed instead, from when the guest may run on.
    switch: Switch,
    /// Templates to which the source may refer.
    told: Arc<Told>,
    /// Watches the pool of the disks until all of them has arrived.
    watch: Mutex<Option<PoolWatch>>,
}

impl Receiving {
    /// Prepares for the first generation, which has so many streams; where what changed of pages comes, with hashes of
    /// this seed.
    pub(crate) fn new(
        context: &Arc<Context>,
        migration: MigrationId,
        proposal: &Proposal,
        vm: &Arriving,
        images: &Images,
        mailbox: Mailbox,
    ) -> Result<Self, ArriveError> {
        let switch = Switch::default();
        let ram = switch.before(crate::ram::destination(&vm.process, &vm.blocks)?);
        let ram: DestinationRam = ram.into_iter().chain(images.writers()).collect();
        let giver = Giver::new(context, vm)?;
        let flushing = images.flushing();
        let notices = mailbox.clone();
        let patience = Duration::from_millis(context.config.timeouts.qmp_ms);
        let shared = shared_with_source(proposal);
        let told = Arc::new(Told::new(vm.traces.directory.clone(), patience, shared));
        let templates = Arc::clone(&told);
        let presumed = Presumed { templates: Some(templates), delta_seed: proposal.delta_seed };
        let (switched, streams) = (switch.clone(), proposal.streams);
        let referred = Arc::clone(&told);
        let corrupt = CorruptFrames::default();
        let observer = move |event, handle: &ReceiverHandle| match event {
            // All of the disks has come, and nothing is given back while the guest runs.
            ReceiverEvent::RoundEnded { .. } if switched.is_switched() => {}
            ReceiverEvent::RoundEnded { ram_round, took, referred: is_referred_to, .. } => {
                // A disk that fails is not found out about when the guest stands still already.
                let told = notices.clone();
                flushing.flush(move |error| {
                    told.put(Notice::StorageFailed { error });
                });
                // Nothing is referred to once all of memory has come: what ends their servers is not left for the stop.
                if ram_round > 0 && !is_referred_to {
                    referred.close();
                }
                giver.give_back(ram_round, took, handle);
            }
            ReceiverEvent::Broken { generation, stream, cause } => {
                tell_of_end(&notices, &corrupt, generation, stream, &cause);
            }
        };
        let receiver = Receiver::presuming(Arc::clone(&ram), presumed, streams, observer);
        let (receiver, context) = (Arc::new(Mutex::new(receiver)), Arc::clone(context));
        let has_page_stream = proposal.post_copy;
        let watch = Mutex::new(watch_pool(&context, images, &mailbox)?);
        Ok(Self { receiver, context, migration, streams, has_page_stream, mailbox, ram, switch, told, watch })
    }

    /// Prepares to have pages placed in a guest that may run already.
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
                tell_of_end(&notices, &corrupt, generation, stream, &cause);
            }
        };
        let receiver = Arc::new(Mutex::new(Receiver::new(Arc::clone(&ram), streams, observer)));
        let told = Arc::new(Told::new(PathBuf::new(), Duration::ZERO, Vec::new()));
        let (context, switch) = (Arc::clone(context), Switch::default());
        let (has_page_stream, watch) = (true, Mutex::default());
        Self { receiver, context, migration, streams, has_page_stream, mailbox, ram, switch, told, watch }
    }

    /// Blocks that are written to, the disks last; and what has pages placed in the others instead.
    pub(super) fn blocks(&self) -> (&[Box<dyn BlockWriter>], &Switch) {
        (&self.ram, &self.switch)
    }

    /// All of the disks has come: lets go of them, whatever else is to come.
    pub(super) fn end_disks(&self) {
        self.ram.iter().filter(|block| !block.is_ram()).for_each(|block| block.end());
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The last round of which anything has come to its end.
    pub(super) fn newest_round(&self) -> u32 {
        self.lock().newest_round()
    }

    /// Ends and joins everything of older generations and lets the streams of this one come.
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

    /// The templates of which the source was told.
    pub(crate) fn told(&self) -> &Arc<Told> {
        &self.told
    }

    /// Memory is complete: from here on nothing but QEMU writes to it.
    pub(crate) fn shut(&self) {
        self.lock().shut();
    }

    /// Ends all streams; afterwards nothing writes to the guest's memory any more.
    pub(crate) fn end(self) {
        self.lock().end_and_join();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Receiver> {
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the migration when disks that come would take more of the pool than may be taken.
fn watch_pool(
    context: &Context,
    images: &Images,
    mailbox: &Mailbox,
) -> Result<Option<PoolWatch>, ArriveError> {
    let Some(pool) = context.config.pool.as_ref().filter(|_| !images.is_empty()) else { return Ok(None) };
    let notices = mailbox.clone();
    let is_short = move |error| {
        notices.put(Notice::StorageFailed { error });
    };
    PoolWatch::start(pool, is_short).map_err(ArriveError::Watch)
}

/// The images that both hosts have, as this one knows them by now: those that are copied have no layers here.
fn shared_with_source(proposal: &Proposal) -> Vec<SharedImage> {
    let described = serde_json::from_value::<VmDescription>(proposal.description.clone());
    described.map_or_else(|_| Vec::new(), |vm| shared_images(&vm.disks, |_| false))
}

/// How many corrupt frames there were in a migration.
#[derive(Debug, Default)]
struct CorruptFrames(AtomicU32);

/// So many are taken for the network's, and are sent again over new connections; any more for the source's.
const MOST_CORRUPT: u32 = 3;

impl CorruptFrames {
    /// Whether one more is sent again.
    fn allows(&self, cause: &ReceiveError) -> bool {
        cause.is_corrupt() && self.0.fetch_add(1, Ordering::Relaxed) < MOST_CORRUPT
    }
}

fn tell_of_end(
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
            "a data stream brought what is no frame; its pages are sent again"
        );
    } else {
        notices.try_put(Notice::Broken { generation, error: crate::chain(cause) });
    }
}

/// Gives memory back that was zeroed: anonymous memory only QEMU itself can give back, by an injected call. Long rounds
/// only: the guest would wait for it in a last one.
struct Giver {
    process: Process,
    injector: Arc<Injector>,
    addresses: Vec<u64>,
}

/// To give memory back takes some milliseconds: next to nothing beside a round that took so long, even if the guest
/// stands still for it.
const LONG_ROUND: Duration = Duration::from_millis(250);

impl Giver {
    fn new(context: &Context, vm: &Arriving) -> Result<Self, ArriveError> {
        Ok(Self {
            process: vm.process.try_clone()?,
            injector: Arc::clone(&context.injector),
            addresses: vm.blocks.iter().map(|block| block.host_address).collect(),
        })
    }

    fn give_back(&self, round: u32, took: Duration, handle: &ReceiverHandle) {
        // Whether it is the last is not known here; the first two are not. Before them there is no memory.
        if round == 0 || (round > 2 && took < LONG_ROUND) {
            return;
        }
        handle.discard_with(|discardable| {
            let ranges: Vec<_> = discardable.iter().filter_map(|part| self.address(part)).collect();
            if ranges.is_empty() {
                return;
            }
            match self.injector.discard(&self.process, &ranges) {
                Ok(()) => info!(
                    round,
                    ranges = ranges.len(),
                    "memory that the guest gave back was given back here too"
                ),
                // It reads as zeros in any case.
                Err(error) => warn!(round, error = crate::chain(&error), "zeroed memory stays allocated"),
            }
        });
    }

    fn address(&self, part: &Discardable) -> Option<AddressRange> {
        let base = self.addresses.get(usize::from(part.block))?;
        Some(AddressRange::new(base + part.bytes.start, base + part.bytes.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_corrupt_frames_are_the_networks_and_more_are_the_sources() {
        let corrupt = CorruptFrames::default();
        let frame = ReceiveError::WrongSeq { expected: 3, found: 4 };
        assert!((0..MOST_CORRUPT).all(|_| corrupt.allows(&frame)));
        assert!(!corrupt.allows(&frame));
        // Nothing is mended by sending it again.
        assert!(!CorruptFrames::default().allows(&ReceiveError::Shut));
    }
}
