//! All outside events of a migration, in one queue.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::memory::SenderHandle;
use engine::handover::source::SourceEvent;
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
        link: Option<u64>,
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
        link: u64,
        /// Cause; none if the source ended the connection.
        error: Option<String>,
    },
}

/// Sending half of the inbox. A notice interrupts a round that is being sent.
#[derive(Clone, Debug)]
pub struct SourceMailbox {
    notices: SyncSender<SourceNotice>,
    round: Arc<Mutex<Option<SenderHandle>>>,
    links: Arc<AtomicU64>,
}

impl SourceMailbox {
    /// Puts a notice into the queue. Returns true if the inbox still exists.
    pub fn put(&self, notice: SourceNotice) -> bool {
        let interrupts = self.interrupts(&notice);
        let there = self.notices.send(notice).is_ok();
        if interrupts && let Some(round) = self.round.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
        {
            round.cancel();
        }
        there
    }

    /// Returns the function that puts the notice of QEMU's exit into the queue.
    pub fn qemu_exit(self) -> impl FnOnce() + Send + 'static {
        move || {
            self.put(SourceNotice::Event(SourceEvent::QemuDied));
        }
    }

    /// Puts a notice into the queue unless the queue is full. For threads that the driver may be waiting for.
    pub(crate) fn try_put(&self, notice: SourceNotice) {
        let interrupts = self.interrupts(&notice);
        if self.notices.try_send(notice).is_ok()
            && interrupts
            && let Some(round) = self.round.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
        {
            round.cancel();
        }
    }

    fn interrupts(&self, notice: &SourceNotice) -> bool {
        interrupts(self.links.load(Ordering::Acquire), notice)
    }
}

/// Returns true if a round has to end for this notice. A connection that was replaced by the newest one does not count.
fn interrupts(newest_link: u64, notice: &SourceNotice) -> bool {
    match notice {
        // Answers about templates arrive before the first round, or late, and then they are useless. The driver waits
        // for the answers to discards between two rounds.
        SourceNotice::Message {
            message: Message::Ping | Message::Pong | Message::TemplatePages { .. } | Message::Discarded { .. },
            ..
        }
        | SourceNotice::OfferEnded
        | SourceNotice::Event(SourceEvent::Repeat) => false,
        SourceNotice::Message { link: Some(link), .. } | SourceNotice::Lost { link, .. } => {
            *link == newest_link
        }
        SourceNotice::Message { link: None, .. }
        | SourceNotice::Event(_)
        | SourceNotice::Asked { .. }
        | SourceNotice::ServingEnded { .. } => true,
    }
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
            mailbox: SourceMailbox { notices: sender, round: Arc::default(), links: Arc::default() },
        }
    }

    /// Returns a sending half.
    pub fn mailbox(&self) -> SourceMailbox {
        self.mailbox.clone()
    }

    /// Returns a number for a connection that replaces all earlier ones.
    pub(crate) fn next_link(&self) -> u64 {
        self.mailbox.links.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Lets notices interrupt this sender's rounds from now on. Notices that arrived before are found by
    /// [`SourceInbox::waiting`], which the caller must therefore call after this.
    pub(crate) fn interrupts(&self, round: Option<SenderHandle>) {
        *self.mailbox.round.lock().unwrap_or_else(PoisonError::into_inner) = round;
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

    #[test]
    fn only_notices_that_end_a_round_interrupt_it() {
        let (old, newest) = (1, 2);
        let message = |link, message| SourceNotice::Message { link, message };
        let lost = |link| SourceNotice::Lost { link, error: None };
        let refused = || Message::Refused { epoch: Epoch(1), reason: String::new() };
        let template_pages = Message::TemplatePages { template: 0, runs: vec![], last: true };
        let ended = SourceNotice::ServingEnded { generation: Generation(1), error: None };
        let asked = SourceNotice::Asked { epoch: Epoch(1), reply: mpsc::sync_channel(1).0 };
        let table = [
            (message(Some(newest), Message::Ping), false),
            (message(Some(newest), Message::Pong), false),
            (message(Some(newest), template_pages), false),
            (message(Some(newest), Message::Discarded { duration_us: 0 }), false),
            (SourceNotice::Event(SourceEvent::Repeat), false),
            (SourceNotice::OfferEnded, false),
            (message(Some(old), refused()), false),
            (lost(old), false),
            (message(Some(newest), refused()), true),
            (lost(newest), true),
            (message(None, refused()), true),
            (SourceNotice::Event(SourceEvent::Cancel), true),
            (SourceNotice::Event(SourceEvent::QemuDied), true),
            (ended, true),
            (asked, true),
        ];
        for (notice, expected) in table {
            assert_eq!(interrupts(newest, &notice), expected, "{notice:?}");
        }
    }

    #[test]
    fn the_next_connection_replaces_all_earlier_ones() {
        let inbox = SourceInbox::new();
        let mailbox = inbox.mailbox();
        let (old, new) = (inbox.next_link(), inbox.next_link());
        for (link, interrupts) in [(old, false), (new, true)] {
            assert_eq!(mailbox.interrupts(&SourceNotice::Lost { link, error: None }), interrupts);
        }
    }
}
