//! Page requests at the source: the guest is stopped for good, so any page can be read at any time, and is sent as often
//! as it is requested.

use std::convert::Infallible;

use link::transport::{Incoming, MessageReceiver, MessageSender, TransportError};
use proto::limits::PAGE_BYTES;
use proto::message::{Message, PageRequest};
use proto::missing_pages::encode_page;

use super::remaining::{RecentWrites, RemainingPages};
use super::set::{BadPageSet, decode_set};
use crate::ram::RamError;
use crate::ram::zero::is_zero;
use crate::send::SourceRam;

/// End of a connection for page requests.
#[derive(Debug, thiserror::Error)]
pub enum RequestsEnd {
    /// End because the destination has all pages.
    #[error("the destination has all pages")]
    Complete,
    /// The connection has ended.
    #[error("the connection for page requests ended")]
    Connection(#[from] TransportError),
    /// A message that does not belong here.
    #[error("the destination sent an unexpected message on the connection for page requests")]
    Message,
    /// The list of missing pages names pages that do not exist.
    #[error("the destination's list of pages cannot be used")]
    Set(#[from] BadPageSet),
    /// The list of missing pages differs from its digest.
    #[error("the destination's list of pages was damaged on its way")]
    Digest,
    /// A requested page does not exist.
    #[error("the destination requested page {} of block {}, which does not exist", .0.page, .0.block)]
    Outside(PageRequest),
    /// The source's memory cannot be read.
    #[error("the guest's memory cannot be read")]
    Ram(#[from] RamError),
}

/// Receives the set of missing pages, which the destination sends first.
pub fn receive_missing_pages(
    reader: &mut dyn MessageReceiver,
    readers: &SourceRam,
    recency: &RecentWrites,
) -> Result<RemainingPages, RequestsEnd> {
    let Incoming::Message(Message::MissingPages { bytes, digest, round }) = reader.recv(None)? else {
        return Err(RequestsEnd::Message);
    };
    let mut set = Vec::new();
    while (set.len() as u64) < bytes {
        let Incoming::Blob(piece) = reader.recv(None)? else { return Err(RequestsEnd::Message) };
        set.extend_from_slice(&piece);
    }
    if blake3::hash(&set).to_hex().to_string() != digest {
        return Err(RequestsEnd::Digest);
    }
    let blocks = decode_set(&set, readers.iter().map(|reader| reader.bytes()))?;
    Ok(RemainingPages::of(blocks, round, recency))
}

/// Answers page requests until the connection ends. Each page that was sent is removed from `remaining`, and `sent` is
/// called.
pub fn answer_page_requests(
    reader: &mut dyn MessageReceiver,
    writer: &mut dyn MessageSender,
    readers: &SourceRam,
    remaining: &RemainingPages,
    sent: impl Fn(),
) -> Result<Infallible, RequestsEnd> {
    let mut bytes = vec![0; PAGE_BYTES as usize];
    loop {
        let pages = match reader.recv(None)? {
            Incoming::Message(Message::RequestPages { pages }) => pages,
            Incoming::Message(Message::PagesComplete) => return Err(RequestsEnd::Complete),
            _ => return Err(RequestsEnd::Message),
        };
        // Each requested page is sent, even if it was already sent: it is not known how long the transfer lasts.
        for &wanted in &pages {
            let page = readers
                .get(usize::from(wanted.block))
                .filter(|block| wanted.page < block.bytes() / PAGE_BYTES);
            let Some(block) = page else { return Err(RequestsEnd::Outside(wanted)) };
            block.read(wanted.page * PAGE_BYTES, &mut bytes)?;
            let content = if is_zero(&bytes) { &[] } else { &bytes[..] };
            writer.send_blob(&encode_page(wanted.block, wanted.page, content))?;
            sent();
        }
        remaining.remove_requested(&pages);
    }
}
