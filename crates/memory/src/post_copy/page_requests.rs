//! Page requests at the destination: one thread requests the pages that threads of the guest wait for, another places
//! the pages that arrive. Neither needs the caller, which may itself wait for the guest.

use std::error::Error;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use link::transport::{Channel, ConnectionHandle, Incoming, MessageReceiver, MessageSender, TransportError};
use proto::limits::{BLOB_BYTES, PAGE_BYTES, REQUESTED_PAGES};
use proto::message::{Message, PageRequest};
use proto::missing_pages::{BadMissingPages, decode_page};
use tracee::{PageFaultError, PageFaultHandler};
use tracing::warn;

use super::missing_pages::{MissingPages, Placer};
use super::set::encode_set;
use crate::lock;
use crate::ram::{BlockWriter, RamError};

/// Delay before the placement of a zero page is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Reports threads that wait for pages.
pub trait FaultReader: Placer {
    /// Waits until threads wait for pages, and appends the pages' addresses. Returns false once the peer of `end` has
    /// closed it.
    fn wait(&self, end: &UnixStream, found: &mut Vec<u64>) -> Result<bool, PageFaultError>;

    /// Lets a thread that waits at this address be reported again.
    fn report_again(&self, address: u64);
}

impl FaultReader for PageFaultHandler {
    fn wait(&self, end: &UnixStream, found: &mut Vec<u64>) -> Result<bool, PageFaultError> {
        Self::wait(self, end, found)
    }

    fn report_again(&self, address: u64) {
        Self::report_again(self, address);
    }
}

/// Requests of missing pages, over one connection after the other.
pub struct PageRequests<P> {
    pages: Arc<MissingPages<P>>,
    connection: Arc<RequestConnection>,
    /// The thread that reads page faults; it ends when this socket closes.
    fault_reader: Option<(UnixStream, JoinHandle<()>)>,
}

/// Reason for which no more pages arrive over a connection for page requests.
#[derive(Debug, thiserror::Error)]
pub enum PageArrivalError {
    /// The connection has ended.
    #[error("the connection for page requests failed")]
    Connection(#[from] TransportError),
    /// The bytes are not those of a page.
    #[error("received something other than a page on the connection for page requests")]
    Bad(#[from] BadMissingPages),
    /// The page is outside of its block, or the block does not exist.
    #[error("received page {page} of block {block}, which does not exist")]
    Outside {
        /// Index of the block.
        block: u16,
        /// The page.
        page: u64,
    },
    /// A message has arrived.
    #[error("received a message instead of a page")]
    Message,
    /// The page cannot be placed.
    #[error("cannot place a page")]
    Ram(#[from] RamError),
}

impl<P: FaultReader + 'static> PageRequests<P> {
    /// Starts the thread that reads page faults. Requests are sent once there is a connection.
    pub fn begin(pages: Arc<MissingPages<P>>) -> io::Result<Self> {
        let connection = Arc::new(RequestConnection::default());
        let (end, ended) = UnixStream::pair()?;
        let (missing, requests) = (Arc::clone(&pages), Arc::clone(&connection));
        let read = move || {
            if let Err(error) = read_faults(&missing, &requests, &ended) {
                warn!(error = &error as &dyn Error, "page faults of the guest are not handled any more");
            }
        };
        let thread = thread::Builder::new().name("page-faults".to_owned()).spawn(read)?;
        Ok(Self { pages, connection, fault_reader: Some((end, thread)) })
    }

    /// Sends requests over this connection from now on, and places the pages that arrive on it. First sends the set of
    /// missing pages, before which the source sends nothing; `round` is the last round that was received. `ended` is
    /// called with the reason if the connection ends by itself.
    pub fn attach(
        &self,
        channel: Channel,
        round: u32,
        ended: impl FnOnce(PageArrivalError) + Send + 'static,
    ) -> Result<(), TransportError> {
        let handle = channel.handle();
        let (reader, mut writer) = channel.split();
        let set = encode_set(&self.pages.set());
        let digest = blake3::hash(&set).to_hex().to_string();
        writer.send(&Message::MissingPages { bytes: set.len() as u64, digest, round })?;
        set.chunks(BLOB_BYTES).try_for_each(|piece| writer.send_blob(piece))?;
        let (writers, hang_up) = (self.pages.writers(), Arc::clone(&handle));
        let place = move || {
            if let Err(error) = place_all(reader, &writers) {
                hang_up.shutdown();
                ended(error);
            }
        };
        let placing =
            thread::Builder::new().name("place".to_owned()).spawn(place).map_err(TransportError::local)?;
        self.connection.replace(Some(Connected { writer, handle, placing }));
        self.connection.request(&self.pages.requested());
        Ok(())
    }
}

impl<P> PageRequests<P> {
    /// Informs the source that all pages are present, before the connection is closed: that is no loss.
    pub fn report_complete(&self) {
        self.connection.send(&Message::PagesComplete);
    }

    /// Ends the threads and the connection. Threads that wait for pages keep waiting.
    pub fn hang_up(&mut self) {
        self.connection.replace(None);
        if let Some((end, thread)) = self.fault_reader.take() {
            drop(end);
            drop(thread.join());
        }
    }
}

/// Requests pages that threads wait for, until the other end of `ended` is closed.
fn read_faults<P: FaultReader>(
    pages: &MissingPages<P>,
    connection: &RequestConnection,
    ended: &UnixStream,
) -> Result<(), PageFaultError> {
    let mut found = Vec::new();
    while pages.placer().wait(ended, &mut found)? {
        let (mut wanted, mut unresolved) = (Vec::new(), Vec::new());
        for address in found.drain(..) {
            match pages.handle_fault(address) {
                Ok(page) => wanted.extend(page),
                Err(PageFaultError::Ended) => return Ok(()),
                Err(error) => {
                    // The thread waits on, and its fault is reported again: there may be memory then.
                    warn!(error = &error as &dyn Error, "cannot request a page for a waiting thread");
                    unresolved.push(address);
                }
            }
        }
        connection.request(&wanted);
        if !unresolved.is_empty() {
            thread::sleep(RETRY_DELAY);
            for address in unresolved {
                pages.placer().report_again(address);
            }
        }
    }
    Ok(())
}

/// Places the pages that arrive until the connection ends.
fn place_all(
    mut reader: Box<dyn MessageReceiver>,
    writers: &[Box<dyn BlockWriter>],
) -> Result<(), PageArrivalError> {
    loop {
        let Incoming::Blob(blob) = reader.recv(None)? else { return Err(PageArrivalError::Message) };
        let (block, page, bytes) = decode_page(&blob)?;
        let outside = PageArrivalError::Outside { block, page };
        let Some(writer) = writers.get(usize::from(block)) else { return Err(outside) };
        if page >= writer.bytes() / PAGE_BYTES {
            return Err(outside);
        }
        let offset = page * PAGE_BYTES;
        if bytes.is_empty() {
            writer.drop_pages(offset..offset + PAGE_BYTES)?;
        } else {
            writer.write(offset, bytes)?;
        }
    }
}

/// The present connection, if there is one.
#[derive(Default)]
struct RequestConnection(Mutex<Option<Connected>>);

struct Connected {
    writer: Box<dyn MessageSender>,
    handle: Arc<dyn ConnectionHandle>,
    /// The thread that places the pages that arrive.
    placing: JoinHandle<()>,
}

impl RequestConnection {
    /// Sends page requests; requests that are lost are sent again on the next connection.
    fn request(&self, wanted: &[PageRequest]) {
        for pages in wanted.chunks(REQUESTED_PAGES) {
            self.send(&Message::RequestPages { pages: pages.to_vec() });
        }
    }

    /// Sends a message if there is a connection.
    fn send(&self, message: &Message) {
        let mut connection = lock(&self.0);
        if let Some(connected) = &mut *connection
            && connected.writer.send(message).is_err()
        {
            connected.handle.shutdown();
        }
    }

    /// Replaces the present connection, and waits until no more of its pages are placed.
    fn replace(&self, new: Option<Connected>) {
        let old = std::mem::replace(&mut *lock(&self.0), new);
        if let Some(Connected { handle, placing, .. }) = old {
            handle.shutdown();
            drop(placing.join());
        }
    }
}

#[cfg(test)]
mod tests;
