//! The post-copy server over connections without sockets.

use std::ops::Range;
use std::thread;

use ::memory::{BlockReader, PageSet, RamError, encode_set};
use link::transport::{Incoming, MessageReceiver, MessageSender, TransportError, fake};
use proto::HostId;
use proto::limits::PAGE_BYTES;
use proto::message::{Message, PageRequest};
use proto::missing_pages::decode_page;

use super::*;
use crate::source::telemetry::Telemetry;
use api::progress::Publisher;

const PAGES: u64 = 1024;

/// A block whose pages are filled with their numbers; page 256 is zero.
struct Numbered;

impl BlockReader for Numbered {
    fn name(&self) -> &'static str {
        "numbered"
    }

    fn bytes(&self) -> u64 {
        PAGES * PAGE_BYTES
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        for (page, bytes) in (offset / PAGE_BYTES..).zip(into.chunks_exact_mut(PAGE_BYTES as usize)) {
            bytes.fill(page as u8);
            // No filling of a few bytes.
            bytes[..2].fill(0);
        }
        Ok(())
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        Ok(range.start)
    }
}

/// A server of all pages over a data stream that is not read: the end of its page stream at the destination, and the
/// data stream's.
fn server() -> (JoinHandle<ServingEnd>, Channel, fake::End) {
    let readers: SourceRam = [Box::new(Numbered) as Box<dyn BlockReader>].into();
    let (near, data) = fake::connection();
    let sender = Sender::start(readers.clone(), vec![near.into_stream()]).unwrap();
    let (near, requests) = fake::connection();
    let host = |name| HostId::new(name).unwrap();
    let page_stream = near.into_channel(host("b"));
    let rate = Arc::new(RateLimit::new(None));
    let telemetry = Telemetry::new(Publisher::new(), Instant::now());
    let server = PostCopyServer::new(
        readers.clone(),
        RecentWrites::default(),
        telemetry.remaining(),
        Arc::clone(&rate),
    );
    let counted = Arc::clone(&server.counted);
    let serving = thread::spawn(move || {
        run_page_stream(&readers, &RecentWrites::default(), sender, page_stream, &counted, &rate)
    });
    (serving, requests.into_channel(host("a")), data)
}

/// Reports all pages as missing.
fn report_missing(requests: Channel) -> (Box<dyn MessageReceiver>, Box<dyn MessageSender>) {
    let (receiver, mut sender) = requests.split();
    let set = encode_set(&[PageSet::full(PAGES * PAGE_BYTES)]);
    let digest = blake3::hash(&set).to_hex().to_string();
    sender.send(&Message::MissingPages { bytes: set.len() as u64, digest, round: 1 }).unwrap();
    sender.send_blob(&set).unwrap();
    (receiver, sender)
}

fn request(sender: &mut dyn MessageSender, pages: &[u64]) {
    let pages = pages.iter().map(|page| PageRequest { block: 0, page: *page }).collect();
    sender.send(&Message::RequestPages { pages }).unwrap();
}

#[test]
fn requests_are_answered_while_bulk_stands_still() {
    let (serving, requests, data) = server();
    let (mut receiver, mut sender) = report_missing(requests);
    // Pushing has begun, and is read no further.
    assert_eq!(data.raw().read(&mut [0]).unwrap(), 1);
    request(&mut *sender, &[700, 256]);
    request(&mut *sender, &[3]);
    for page in [700_u64, 256, 3] {
        let Incoming::Blob(blob) = receiver.recv(None).unwrap() else { panic!("no page") };
        let (block, found, bytes) = decode_page(&blob).unwrap();
        assert_eq!((block, found), (0, page));
        match page {
            256 => assert!(bytes.is_empty(), "a page of zeros has no bytes"),
            page => assert_eq!(bytes[100], page as u8),
        }
    }
    sender.send(&Message::PagesComplete).unwrap();
    assert!(matches!(serving.join().unwrap(), ServingEnd::Requests(RequestsEnd::Complete)));
}

#[test]
fn pages_that_do_not_exist_end_the_page_stream() {
    let (serving, requests, _data) = server();
    let (mut receiver, mut sender) = report_missing(requests);
    request(&mut *sender, &[PAGES]);
    let ended = serving.join().unwrap();
    assert!(
        matches!(ended, ServingEnd::Requests(RequestsEnd::Outside(PageRequest { block: 0, page: PAGES }))),
        "{ended:?}"
    );
    assert!(matches!(receiver.recv(None), Err(TransportError::PeerClosed(_))));
}

#[test]
fn a_lost_page_stream_ends_pushing_too() {
    let (serving, requests, data) = server();
    let handle = requests.handle();
    let halves = report_missing(requests);
    assert_eq!(data.raw().read(&mut [0]).unwrap(), 1);
    handle.shutdown();
    let ended = serving.join().unwrap();
    assert!(
        matches!(ended, ServingEnd::Requests(RequestsEnd::Connection(TransportError::PeerClosed(_)))),
        "{ended:?}"
    );
    drop(halves);
}
