//! Everything that happens to an arriving VM from outside, in one row.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::destination::DestinationEvent;
use link::{Connection, Handle, Incoming, Writer};
use proto::{Generation, Message};

/// Most notices that wait to be read. Whoever has more to say waits too.
const WAITING: usize = 256;

/// Something that happened.
#[derive(Debug)]
pub(crate) enum Notice {
    /// An event that needs no explanation.
    Event(DestinationEvent),
    /// The source has connected.
    Connected {
        /// Which connection, by the inbox's own count.
        link: u64,
        /// For answers.
        writer: Writer,
        /// To end it.
        handle: Handle,
        /// The set of connections, for a control stream; none for questions.
        generation: Option<Generation>,
    },
    /// A message came.
    Message {
        /// On which connection.
        link: u64,
        /// What it says.
        message: Message,
    },
    /// An answer to the source is there.
    Say(Box<Message>),
    /// A piece of device state came.
    Blob {
        /// On which connection.
        link: u64,
        /// The piece.
        bytes: Vec<u8>,
    },
    /// A connection ended.
    Lost {
        /// Which one.
        link: u64,
        /// Why.
        error: String,
    },
    /// What was written to an image is not on stable storage.
    StorageFailed {
        /// Why.
        error: String,
    },
    /// The source's page stream has come.
    PageStream {
        /// Of which set of connections.
        generation: Generation,
        /// The stream.
        connection: Box<Connection>,
    },
    /// The page stream has ended.
    PageStreamLost {
        /// Why.
        error: String,
    },
    /// The last page that was to come is there, or one was there before it came.
    Awaited,
    /// A data stream of a generation ended in a way that new connections do not mend.
    Broken {
        /// Which generation.
        generation: Generation,
        /// Why.
        error: String,
    },
}

/// The end at which notices are put in.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox {
    notices: SyncSender<Notice>,
    links: Arc<AtomicU64>,
}

impl Mailbox {
    /// Puts a notice in. Says whether somebody is there to read it.
    pub(crate) fn put(&self, notice: Notice) -> bool {
        self.notices.send(notice).is_ok()
    }

    /// Puts a notice in unless too many wait. For threads that the driver may be waiting for.
    pub(crate) fn try_put(&self, notice: Notice) {
        drop(self.notices.try_send(notice));
    }

    /// Reads a connection of the source into the inbox until it ends. Returns at once.
    pub(crate) fn connected(
        &self,
        connection: Connection,
        generation: Option<Generation>,
    ) -> std::io::Result<()> {
        let link = self.links.fetch_add(1, Ordering::Relaxed);
        let handle = connection.handle();
        let (mut reader, writer) = connection.split();
        let mailbox = self.clone();
        if !mailbox.put(Notice::Connected { link, writer, handle, generation }) {
            return Ok(());
        }
        let read = move || loop {
            let notice = match reader.recv(None) {
                Ok(Incoming::Message(message)) => Notice::Message { link, message },
                Ok(Incoming::Blob(bytes)) => Notice::Blob { link, bytes },
                Err(error) => Notice::Lost { link, error: crate::chain(&error) },
            };
            let last = matches!(notice, Notice::Lost { .. });
            if !mailbox.put(notice) || last {
                return;
            }
        };
        thread::Builder::new().name("control".to_owned()).spawn(read).map(drop)
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
        Self { notices, mailbox: Mailbox { notices: sender, links: Arc::default() } }
    }

    pub(crate) fn mailbox(&self) -> Mailbox {
        self.mailbox.clone()
    }

    /// Waits for a notice until the deadline.
    pub(crate) fn wait(&self, deadline: Instant) -> Option<Notice> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.notices.recv_timeout(left.max(Duration::from_micros(1))).ok()
    }
}
