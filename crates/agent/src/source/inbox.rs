//! Everything that happens to a migration from outside, in one row.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::memory::SenderHandle;
use engine::handover::source::SourceEvent;
use proto::{Epoch, Generation, Message};

/// Most notices that wait to be read. Whoever has more to say waits too.
const WAITING: usize = 1024;

/// Where the answer to a question goes.
pub(crate) type Reply = SyncSender<Message>;

/// Something that happened.
#[derive(Debug)]
pub(crate) enum Notice {
    /// An event that needs no explanation: a user's word, QEMU's end, the register's answer.
    Event(SourceEvent),
    /// The destination asks on a connection of its own.
    Asked {
        /// About which epoch.
        epoch: Epoch,
        /// Where the answer goes.
        reply: Reply,
    },
    /// A message of the destination.
    Message {
        /// On which connection, by the inbox's own count; none for one that the destination opened.
        link: Option<u64>,
        /// What it says.
        message: Message,
    },
    /// Pages that are left can no longer be sent over these connections.
    ServingEnded {
        /// Which set of connections.
        generation: Generation,
        /// Why.
        error: String,
    },
    /// A connection to the destination ended.
    Lost {
        /// Which one.
        link: u64,
        /// Why; none if this side ended it.
        error: Option<String>,
    },
}

/// The end at which notices are put in. Putting one in interrupts a round that is being sent.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox {
    notices: SyncSender<Notice>,
    round: Arc<Mutex<Option<SenderHandle>>>,
    links: Arc<AtomicU64>,
}

impl Mailbox {
    /// Puts a notice in. Says whether somebody is there to read it.
    pub(crate) fn put(&self, notice: Notice) -> bool {
        let interrupts = self.interrupts(&notice);
        let there = self.notices.send(notice).is_ok();
        if interrupts && let Some(round) = self.round.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
        {
            round.cancel();
        }
        there
    }

    /// Puts a notice in unless too many wait. For threads that the driver may be waiting for.
    pub(crate) fn try_put(&self, notice: Notice) {
        let interrupts = self.interrupts(&notice);
        if self.notices.try_send(notice).is_ok()
            && interrupts
            && let Some(round) = self.round.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
        {
            round.cancel();
        }
    }

    /// Whether a round has to end for it.
    fn interrupts(&self, notice: &Notice) -> bool {
        match notice {
            // What is told of templates comes before the first round, or late, and then it is of no use.
            // For what is taken away the driver waits between two rounds.
            Notice::Message {
                message: Message::Ping | Message::Pong | Message::Known { .. } | Message::TakenAway { .. },
                ..
            }
            | Notice::Event(SourceEvent::Repeat) => false,
            // A connection that has been replaced has no say any more.
            Notice::Message { link: Some(link), .. } | Notice::Lost { link, .. } => {
                *link == self.links.load(Ordering::Acquire)
            }
            _ => true,
        }
    }
}

/// The end at which notices are taken out.
#[derive(Debug)]
pub(crate) struct Inbox {
    notices: Receiver<Notice>,
    mailbox: Mailbox,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        let (sender, notices) = mpsc::sync_channel(WAITING);
        Self { notices, mailbox: Mailbox { notices: sender, round: Arc::default(), links: Arc::default() } }
    }

    pub(crate) fn mailbox(&self) -> Mailbox {
        self.mailbox.clone()
    }

    /// A number for a connection that takes the place of all earlier ones.
    pub(crate) fn next_link(&self) -> u64 {
        self.mailbox.links.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// From now on a notice interrupts this sender's rounds. What came in before is found by [`Inbox::waiting`], which
    /// therefore has to be asked after this.
    pub(crate) fn interrupts(&self, round: Option<SenderHandle>) {
        *self.mailbox.round.lock().unwrap_or_else(PoisonError::into_inner) = round;
    }

    /// A notice that is there already.
    pub(crate) fn waiting(&self) -> Option<Notice> {
        self.notices.try_recv().ok()
    }

    /// Waits for a notice until the deadline.
    pub(crate) fn wait(&self, deadline: Instant) -> Option<Notice> {
        let left = deadline.saturating_duration_since(Instant::now());
        // The inbox holds a mailbox itself, so that the row is never abandoned.
        self.notices.recv_timeout(left.max(Duration::from_micros(1))).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_connection_that_was_replaced_interrupts_no_round() {
        let inbox = Inbox::new();
        let mailbox = inbox.mailbox();
        let (old, new) = (inbox.next_link(), inbox.next_link());
        for (link, interrupts) in [(old, false), (new, true)] {
            assert_eq!(mailbox.interrupts(&Notice::Lost { link, error: None }), interrupts);
            let late = Notice::Message { link: Some(link), message: Message::Resumed };
            assert_eq!(mailbox.interrupts(&late), interrupts);
        }
        let refused = Message::Refused { epoch: Epoch(1), reason: String::new() };
        assert!(mailbox.interrupts(&Notice::Message { link: None, message: refused }));
    }
}
