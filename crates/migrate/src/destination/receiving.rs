//! Receiving pages: the data streams of one generation after the other, into the blocks of all participants.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{
    AcceptedReductions, BlockWriter, DestinationRam, ReceiveError, Receiver, ReceiverEvent, ReceiverHandle,
    WriterSwitch,
};
use link::transport::{ArrivedStream, ExpectedStreams};
use proto::message::Proposal;
use proto::{Generation, MigrationId};
use tracing::{debug, warn};

use super::inbox::{DestinationMailbox, DestinationNotice};
use super::participants::{AllBlocks, ReceivedRound};
use super::references;
use host::ArrivingVm;
use host::Context;
use host::templates::AdvertisedTemplates;

/// Pages that are being received.
pub(crate) struct PageReceiver {
    receiver: Arc<Mutex<Receiver>>,
    context: Arc<Context>,
    migration: MigrationId,
    streams: u16,
    /// True if there is a page stream, too.
    has_page_stream: bool,
    mailbox: DestinationMailbox,
    /// The blocks that are written.
    ram: DestinationRam,
    /// Number of blocks, the first ones, whose pages may arrive after the guest runs.
    post_copied: usize,
    /// Switches the writers to placement of pages, once the guest may run.
    switch: WriterSwitch,
    /// Templates to which the source may refer.
    advertised: Arc<AdvertisedTemplates>,
}

impl PageReceiver {
    /// Prepares for the first generation, with the number of streams of the proposal; deltas are received with hashes
    /// of the proposal's seed.
    pub(crate) fn new(
        context: &Arc<Context>,
        migration: MigrationId,
        proposal: &Proposal,
        vm: &ArrivingVm,
        blocks: AllBlocks,
        mailbox: DestinationMailbox,
    ) -> Self {
        let AllBlocks { mut writers, post_copied, after_round } = blocks;
        let switch = WriterSwitch::default();
        let complete = writers.split_off(post_copied);
        let ram: DestinationRam = switch.before(writers).into_iter().chain(complete).collect();
        let notices = mailbox.clone();
        let advertised = Arc::new(references::advertised(context, proposal, vm));
        let templates = Arc::clone(&advertised);
        let presumed = AcceptedReductions { templates: Some(templates), delta_seed: proposal.delta_seed };
        let (switched, streams) = (switch.clone(), proposal.streams);
        let referred = Arc::clone(&advertised);
        let corrupt = CorruptFrames::default();
        let observer = move |event, handle: &ReceiverHandle| match event {
            // No participant has anything to do while the guest runs.
            ReceiverEvent::RoundEnded { .. } if switched.is_switched() => {}
            ReceiverEvent::RoundEnded { ram_round, took, referred: is_referred_to, .. } => {
                after_round(&ReceivedRound { ram_round, took }, handle);
                // There are no references after all of memory has arrived: the servers of the templates end now, not
                // during the stop.
                if ram_round > 0 && !is_referred_to {
                    referred.close();
                }
            }
            ReceiverEvent::Broken { generation, stream, cause } => {
                report_stream_end(&notices, &corrupt, generation, stream, &cause);
            }
        };
        let receiver = Receiver::with_reductions(Arc::clone(&ram), presumed, streams, observer);
        let (receiver, context) = (Arc::new(Mutex::new(receiver)), Arc::clone(context));
        let has_page_stream = proposal.post_copy;
        Self {
            receiver,
            context,
            migration,
            streams,
            has_page_stream,
            mailbox,
            ram,
            post_copied,
            switch,
            advertised,
        }
    }

    /// Prepares for the placement of pages in a guest that may run already.
    pub(super) fn placing(
        context: &Arc<Context>,
        migration: MigrationId,
        streams: u16,
        writers: Vec<Box<dyn BlockWriter>>,
        mailbox: DestinationMailbox,
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
        let (has_page_stream, post_copied) = (true, ram.len());
        Self {
            receiver,
            context,
            migration,
            streams,
            has_page_stream,
            mailbox,
            ram,
            post_copied,
            switch,
            advertised,
        }
    }

    /// Returns the blocks whose pages may arrive after the guest runs, and the switch to placement.
    pub(super) fn post_copied(&self) -> (&[Box<dyn BlockWriter>], &WriterSwitch) {
        (&self.ram[..self.post_copied], &self.switch)
    }

    /// Closes the other blocks, because all of their content has arrived.
    pub(super) fn end_complete_blocks(&self) {
        self.ram[self.post_copied..].iter().for_each(|block| block.end());
    }

    /// Returns the newest round of which anything has arrived; 0 before the first.
    pub(super) fn newest_round(&self) -> u32 {
        self.lock().newest_round()
    }

    /// Ends and joins everything of older generations, and expects the streams of `generation`.
    pub(crate) fn begin(&self, generation: Generation) -> std::io::Result<()> {
        self.lock().begin(generation);
        let expected = ExpectedStreams { bulk: self.streams, page_requests: self.has_page_stream };
        let arrivals = self.context.transport.connections.expect(&self.migration, generation, expected);
        // Streams that never come must not keep the guest's memory open after the end of the migration.
        let receiver = Arc::downgrade(&self.receiver);
        let patience = Duration::from_millis(self.context.config.timeouts.give_up_after_ms);
        let mailbox = self.mailbox.clone();
        let gather = move || {
            let deadline = Instant::now() + patience;
            for _ in 0..expected.count() {
                let Some(arrived) = arrivals.next(deadline) else { return };
                let (stream, data) = match arrived {
                    ArrivedStream::Bulk { stream, data } => (stream, data),
                    ArrivedStream::PageRequests(connection) => {
                        mailbox.put(DestinationNotice::PageStream { generation, connection });
                        continue;
                    }
                };
                let Some(receiver) = receiver.upgrade() else { return };
                let attached =
                    receiver.lock().unwrap_or_else(PoisonError::into_inner).attach(generation, stream, data);
                if let Err(error) = attached {
                    mailbox.put(DestinationNotice::Broken { generation, error: crate::chain(&error) });
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
    notices: &DestinationMailbox,
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
        notices.try_put(DestinationNotice::Broken { generation, error: crate::chain(cause) });
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
