//! All outside events of a migration, in one queue.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::memory::SenderHandle;
use engine::handover::source::SourceEvent;
use engine::session::{InterruptContext, MessageOrigin, PhaseNotice, interrupts_round};
use proto::{Epoch, Generation, Message};

/// Maximum number of notices in the queue. Further senders wait.
const QUEUE_LENGTH: usize = 1024;

/// Channel for the answer to a question.
pub(crate) type Reply = SyncSender<Message>;

/// An outside event of a migration.
#[derive(Debug)]
pub enum SourceNotice {
    /// An event without further data: a user's command, QEMU's end, the registry's answer.
    Event(SourceEvent),
    /// A question that the destination asks on a connection of its own.
    Asked {
        /// Epoch that the question concerns.
        epoch: Epoch,
        /// Channel for the answer.
        reply: Reply,
    },
    /// A message from the destination.
    Message {
        /// Number of the connection, counted by the inbox; none for a connection that the destination opened.
        connection_id: Option<u64>,
        /// The message.
        message: Message,
    },
    /// The end of post-copy over a set of connections.
    ServingEnded {
        /// Generation of the connections.
        generation: Generation,
        /// Cause; none if the destination has all pages.
        error: Option<String>,
    },
    /// The end of an offer to the ownership registry, whatever its result.
    OfferEnded,
    /// The end of a connection to the destination.
    Lost {
        /// Number of the connection.
        connection_id: u64,
        /// Cause; none if the source ended the connection.
        error: Option<String>,
    },
}

impl SourceNotice {
    /// Returns the notice as decisions before the handover see it. `is_control` is true for the number of the control
    /// connection.
    pub(super) fn in_phases(&self, is_control: impl Fn(u64) -> bool) -> PhaseNotice<'_> {
        match self {
            Self::Message { connection_id, message } => {
                let origin = match connection_id {
                    Some(connection_id) if is_control(*connection_id) => MessageOrigin::Control,
                    Some(_) => MessageOrigin::Replaced,
                    None => MessageOrigin::Destination,
                };
                PhaseNotice::Message { origin, message }
            }
            Self::Asked { epoch, .. } => PhaseNotice::Asked { epoch: *epoch },
            Self::Lost { connection_id, .. } => PhaseNotice::Lost { is_control: is_control(*connection_id) },
            Self::ServingEnded { generation, .. } => PhaseNotice::ServingEnded { generation: *generation },
            Self::OfferEnded => PhaseNotice::OfferEnded,
            Self::Event(event) => PhaseNotice::Event(event),
        }
    }
}

/// Sending half of the inbox. A notice interrupts a round that is being sent, if it ends the round.
#[derive(Clone, Debug)]
pub struct SourceMailbox {
    notices: SyncSender<SourceNotice>,
    round: Arc<Mutex<Option<InterruptibleRounds>>>,
    connection_count: Arc<AtomicU64>,
}

/// Sender whose rounds notices may interrupt.
#[derive(Debug)]
struct InterruptibleRounds {
    sender: SenderHandle,
    facts: InterruptContext,
}

/// Result of an attempt to put a notice into the queue.
enum PutResult {
    Done,
    /// The queue has no room for this notice.
    Full(Box<SourceNotice>),
    NoInbox,
}

impl SourceMailbox {
    /// Puts a notice into the queue. Returns true if the inbox still exists.
    pub fn put(&self, notice: SourceNotice) -> bool {
        match self.try_to_put(notice) {
            PutResult::Done => true,
            PutResult::NoInbox => false,
            PutResult::Full(notice) => {
                let interrupts = self.interrupts(&notice);
                let there = self.notices.send(*notice).is_ok();
                if interrupts && let Some(round) = lock(&self.round).as_ref() {
                    round.sender.cancel();
                }
                there
            }
        }
    }

    /// Returns the function that puts the notice of QEMU's exit into the queue.
    pub fn qemu_exit(self) -> impl FnOnce() + Send + 'static {
        move || {
            self.put(SourceNotice::Event(SourceEvent::QemuDied));
        }
    }

    /// Puts a notice into the queue unless the queue is full. For threads that the driver may be waiting for.
    pub(crate) fn try_put(&self, notice: SourceNotice) {
        drop(self.try_to_put(notice));
    }

    /// Puts a notice into the queue unless the queue is full, and interrupts the rounds that are sent at this moment: a
    /// driver that handles the notice at once cannot begin other rounds before that, which would be interrupted instead.
    fn try_to_put(&self, notice: SourceNotice) -> PutResult {
        let round = lock(&self.round);
        let interrupted = round.as_ref().filter(|round| self.ends(&notice, round.facts));
        match self.notices.try_send(notice) {
            Ok(()) => {
                if let Some(round) = interrupted {
                    round.sender.cancel();
                }
                PutResult::Done
            }
            Err(TrySendError::Full(notice)) => PutResult::Full(Box::new(notice)),
            Err(TrySendError::Disconnected(_)) => PutResult::NoInbox,
        }
    }

    /// Returns true if a notice interrupts the present rounds.
    fn interrupts(&self, notice: &SourceNotice) -> bool {
        lock(&self.round).as_ref().is_some_and(|round| self.ends(notice, round.facts))
    }

    /// Returns true if a notice ends a round of which these are the facts. A connection that was replaced by the newest
    /// one does not count.
    fn ends(&self, notice: &SourceNotice, facts: InterruptContext) -> bool {
        let newest = self.connection_count.load(Ordering::Acquire);
        interrupts_round(notice.in_phases(|connection_id| connection_id == newest), facts)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Receiving half of the inbox.
#[derive(Debug)]
pub struct SourceInbox {
    notices: Receiver<SourceNotice>,
    mailbox: SourceMailbox,
}

impl Default for SourceInbox {
    fn default() -> Self {
        Self::new()
    }
}

impl SourceInbox {
    /// Creates an empty inbox.
    pub fn new() -> Self {
        let (sender, notices) = mpsc::sync_channel(QUEUE_LENGTH);
        Self {
            notices,
            mailbox: SourceMailbox {
                notices: sender,
                round: Arc::default(),
                connection_count: Arc::default(),
            },
        }
    }

    /// Returns a sending half.
    pub fn mailbox(&self) -> SourceMailbox {
        self.mailbox.clone()
    }

    /// Returns a number for a connection that replaces all earlier ones.
    pub(crate) fn next_connection_id(&self) -> u64 {
        self.mailbox.connection_count.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Lets notices interrupt this sender's rounds from now on. Notices that arrived before are found by
    /// [`SourceInbox::waiting`], which the caller must therefore call after this.
    pub(crate) fn interrupt_rounds(&self, sender: SenderHandle, facts: InterruptContext) {
        *lock(&self.mailbox.round) = Some(InterruptibleRounds { sender, facts });
    }

    /// Lets notices interrupt no rounds from now on.
    pub(crate) fn interrupt_nothing(&self) {
        *lock(&self.mailbox.round) = None;
    }

    /// Lets notices interrupt only what they end while the guest is stopped.
    pub(crate) fn guest_stops(&self) {
        if let Some(round) = lock(&self.mailbox.round).as_mut() {
            round.facts.is_stopped = true;
        }
    }

    /// Returns a notice that is already in the queue.
    pub(crate) fn waiting(&self) -> Option<SourceNotice> {
        self.notices.try_recv().ok()
    }

    /// Waits for a notice until the deadline.
    pub(crate) fn wait(&self, deadline: Instant) -> Option<SourceNotice> {
        let left = deadline.saturating_duration_since(Instant::now());
        // The inbox owns a mailbox itself, so that the channel never disconnects.
        self.notices.recv_timeout(left.max(Duration::from_micros(1))).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: InterruptContext =
        InterruptContext { epoch: Epoch(1), generation: Generation(1), is_stopped: false };

    #[test]
    fn the_next_connection_replaces_all_earlier_ones() {
        let inbox = SourceInbox::new();
        let mailbox = inbox.mailbox();
        let (old, new) = (inbox.next_connection_id(), inbox.next_connection_id());
        for (connection_id, ends) in [(old, false), (new, true)] {
            assert_eq!(mailbox.ends(&SourceNotice::Lost { connection_id, error: None }, FACTS), ends);
        }
    }

    /// A round that is cut for it would be taken for a lost link, which ends the migration of a stopped guest.
    #[test]
    fn a_question_that_ends_nothing_interrupts_no_round() {
        let mailbox = SourceInbox::new().mailbox();
        for (epoch, is_stopped, ends) in
            [(1, false, true), (1, true, false), (2, false, false), (2, true, false)]
        {
            let asked = SourceNotice::Asked { epoch: Epoch(epoch), reply: mpsc::sync_channel(1).0 };
            assert_eq!(mailbox.ends(&asked, InterruptContext { is_stopped, ..FACTS }), ends);
        }
    }
}
