//! The inbox of an arriving VM: all external events, in one queue.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::destination::DestinationEvent;
use link::transport::{Channel, ConnectionHandle, Incoming, MessageSender};
use net::conntrack_installer::InstallResult;
use net::conntrack_sync::EntryChange;
use net::{ConntrackInstaller, MergerHandle};
use proto::message::FailedFlow;
use proto::{Generation, Message, limits};
use tracing::warn;

use super::held_flows::HeldFlows;

/// Capacity of the queue. A sender waits while the queue is full.
const INBOX_CAPACITY: usize = 256;

/// An external event.
#[derive(Debug)]
pub enum DestinationNotice {
    /// An event for the engine.
    Event(DestinationEvent),
    /// The source's reply to the driver's question, or its silence.
    SourceReplied(DestinationEvent),
    /// The source has connected.
    Connected {
        /// Number of the connection, by the inbox's own count.
        connection_id: u64,
        /// Writer for answers.
        writer: Box<dyn MessageSender>,
        /// Handle that closes the connection.
        handle: Arc<dyn ConnectionHandle>,
        /// Generation of a control stream; none for a connection for questions.
        generation: Option<Generation>,
    },
    /// A message arrived.
    Message {
        /// Number of the connection.
        connection_id: u64,
        /// The message.
        message: Message,
    },
    /// An answer to the source is ready to be sent.
    Reply(Box<Message>),
    /// A piece of device state, or of a list of pages, arrived.
    Blob {
        /// Number of the connection.
        connection_id: u64,
        /// The piece.
        bytes: Vec<u8>,
    },
    /// A connection ended.
    Lost {
        /// Number of the connection.
        connection_id: u64,
        /// Error of the connection.
        error: String,
    },
    /// A participant cannot receive any more, for example because its storage fails.
    ParticipantFailed {
        /// Error with its causes.
        error: String,
    },
    /// The source's page stream has connected.
    PageStream {
        /// Generation of the stream.
        generation: Generation,
        /// The stream.
        connection: Channel,
    },
    /// The page stream has ended.
    PageStreamLost {
        /// Error of the stream.
        error: String,
    },
    /// The last missing page was placed, or a page was present before it arrived.
    MissingPages,
    /// A data stream of a generation failed in a way that new connections do not mend.
    Broken {
        /// The generation.
        generation: Generation,
        /// Error of the stream.
        error: String,
    },
}

/// Sending end of the inbox.
#[derive(Clone, Debug)]
pub struct DestinationMailbox {
    notices: SyncSender<DestinationNotice>,
    connection_count: Arc<AtomicU64>,
    /// Receiver of frames for the guest, with what installs their flows; not set where they cannot be delivered.
    frames: Arc<OnceLock<(MergerHandle, Option<HeldFlows>)>>,
    /// Installs conntrack entries of the guest; not set where that is impossible.
    conntrack: Arc<OnceLock<ConntrackInstaller>>,
}

impl DestinationMailbox {
    /// Sends a notice. Returns false if the inbox is gone.
    pub fn put(&self, notice: DestinationNotice) -> bool {
        self.notices.send(notice).is_ok()
    }

    /// Returns the function that sends the notice of QEMU's exit.
    pub(crate) fn qemu_exit(self) -> impl FnOnce() + Send + 'static {
        move || {
            self.put(DestinationNotice::Event(DestinationEvent::QemuDied));
        }
    }

    /// Sends a notice unless the queue is full. For threads that the driver may wait for.
    pub(crate) fn try_put(&self, notice: DestinationNotice) {
        drop(self.notices.try_send(notice));
    }

    /// Sets where frames for the guest go, and what installs their flows.
    pub(super) fn pass_frames_to(&self, input: MergerHandle, flows: Option<HeldFlows>) {
        // A second VM does not arrive in the same migration.
        drop(self.frames.set((input, flows)));
    }

    /// Returns true if frames for the guest can be delivered.
    pub(crate) fn takes_frames(&self) -> bool {
        self.frames.get().is_some()
    }

    /// Passes frames of the source to the guest until the connection ends, past the inbox: they arrive while the driver
    /// works, and after it has ended. Returns at once.
    pub fn receive_frames(&self, mut connection: Channel) -> std::io::Result<()> {
        let Some((input, mut flows)) = self.frames.get().cloned() else { return Ok(()) };
        let receive = move || {
            while let Ok(Incoming::Blob(bytes)) = connection.recv(None) {
                match net::held::decode(&bytes) {
                    Ok(frames) => {
                        if let Some(flows) = flows.as_mut() {
                            flows.install(&frames);
                        }
                        input.deliver(frames);
                    }
                    Err(error) => return warn!(%error, "frames of the source do not reach the guest"),
                }
            }
        };
        thread::Builder::new().name("frames".to_owned()).spawn(receive).map(drop)
    }

    /// Sets where conntrack entries of the guest are installed.
    pub(crate) fn pass_flows_to(&self, installer: ConntrackInstaller) {
        drop(self.conntrack.set(installer));
    }

    /// Returns true if conntrack entries of the guest can be installed.
    pub(crate) fn takes_flows(&self) -> bool {
        self.conntrack.get().is_some()
    }

    /// Installs conntrack entries that the source sends, until its connection ends, past the inbox: the driver has
    /// other work at that time. Returns at once.
    pub fn receive_flows(&self, mut connection: Channel) -> std::io::Result<()> {
        let Some(installer) = self.conntrack.get().cloned() else { return Ok(()) };
        let receive = move || {
            if let Err(error) = install_flows(&mut connection, &installer) {
                warn!(error, "tracked connections of the guest are not installed any more");
            }
        };
        thread::Builder::new().name("flows".to_owned()).spawn(receive).map(drop)
    }

    /// Reads a connection of the source into the inbox until it ends. Returns at once.
    pub fn connected(&self, connection: Channel, generation: Option<Generation>) -> std::io::Result<()> {
        let connection_id = self.connection_count.fetch_add(1, Ordering::Relaxed);
        let handle = connection.handle();
        let (mut reader, writer) = connection.split();
        let mailbox = self.clone();
        if !mailbox.put(DestinationNotice::Connected { connection_id, writer, handle, generation }) {
            return Ok(());
        }
        let read = move || loop {
            let notice = match reader.recv(None) {
                Ok(Incoming::Message(message)) => DestinationNotice::Message { connection_id, message },
                Ok(Incoming::Blob(bytes)) => DestinationNotice::Blob { connection_id, bytes },
                Err(error) => DestinationNotice::Lost { connection_id, error: crate::chain(&error) },
            };
            let last = matches!(notice, DestinationNotice::Lost { .. });
            if !mailbox.put(notice) || last {
                return;
            }
        };
        thread::Builder::new().name("control".to_owned()).spawn(read).map(drop)
    }
}

/// Receiving end of the inbox.
#[derive(Debug)]
pub struct DestinationInbox {
    notices: Receiver<DestinationNotice>,
    mailbox: DestinationMailbox,
}

impl Default for DestinationInbox {
    fn default() -> Self {
        Self::new()
    }
}

impl DestinationInbox {
    /// Creates an empty inbox.
    pub fn new() -> Self {
        let (sender, notices) = mpsc::sync_channel(INBOX_CAPACITY);
        Self {
            notices,
            mailbox: DestinationMailbox {
                notices: sender,
                connection_count: Arc::default(),
                frames: Arc::default(),
                conntrack: Arc::default(),
            },
        }
    }

    /// Returns a sending half.
    pub fn mailbox(&self) -> DestinationMailbox {
        self.mailbox.clone()
    }

    /// Waits for a notice until the deadline.
    pub(crate) fn wait(&self, deadline: Instant) -> Option<DestinationNotice> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.notices.recv_timeout(left.max(Duration::from_micros(1))).ok()
    }
}

/// Makes the changes that arrive on a connection, and answers each list of them.
fn install_flows(connection: &mut Channel, installer: &ConntrackInstaller) -> Result<(), String> {
    while let Ok(Incoming::Message(Message::Flows { bytes })) = connection.recv(None) {
        let mut changes = Vec::new();
        while (changes.len() as u64) < bytes {
            match connection.recv(None) {
                Ok(Incoming::Blob(piece)) => changes.extend(piece),
                Ok(Incoming::Message(_)) => return Err("a list was cut off by a message".to_owned()),
                // The source may have given up.
                Err(_) => return Ok(()),
            }
        }
        if changes.len() as u64 > bytes {
            return Err("a list is longer than it was announced".to_owned());
        }
        let changes = EntryChange::decode_all(&changes).map_err(|error| error.to_string())?;
        let result = installer.apply(changes).map_err(|error| error.to_string())?;
        if connection.send(&answer(result)).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Composes the answer to a list of changes, with as many entries as a message may name.
fn answer(result: InstallResult) -> Message {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let more_failed = count(result.failed.len().saturating_sub(limits::FAILED_FLOWS));
    let failed = result.failed.into_iter().take(limits::FAILED_FLOWS);
    let failed = failed.map(|(flow, reason)| FailedFlow { flow, reason }).collect();
    Message::FlowsInstalled { installed: count(result.installed), failed, more_failed }
}
