//! Page requests over connections without sockets.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::sync::mpsc;
use std::time::Instant;

use link::transport::fake;
use proto::HostId;
use proto::missing_pages::encode_page;
use rustix::event::{PollFd, PollFlags, poll};
use tracee::AddressRange;

use super::*;
use crate::page_set::PageSet;
use crate::post_copy::set::decode_set;
use crate::ram::RamRegion;

const PAGE: usize = PAGE_BYTES as usize;
const BASE: u64 = 1 << 30;
const PAGES: u64 = 8;
/// Longest wait for an expected event.
const PATIENCE: Duration = Duration::from_mins(1);

/// Memory whose page faults the test reports by their addresses.
struct Faults {
    placed: Mutex<BTreeMap<u64, Vec<u8>>>,
    reported: UnixStream,
}

impl Placer for Faults {
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, PageFaultError> {
        lock(&self.placed).insert(address, pages.to_vec());
        Ok((pages.len() / PAGE) as u64)
    }

    fn place_zeros(&self, range: AddressRange) -> Result<u64, PageFaultError> {
        self.place(range.start, &vec![0; range.len() as usize])
    }
}

impl FaultReader for Faults {
    fn wait(&self, end: &UnixStream, found: &mut Vec<u64>) -> Result<bool, PageFaultError> {
        let mut both = [PollFd::new(&self.reported, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
        poll(&mut both, None).unwrap();
        if !both[1].revents().is_empty() {
            return Ok(false);
        }
        let mut address = [0; 8];
        (&self.reported).read_exact(&mut address).unwrap();
        found.push(u64::from_le_bytes(address));
        Ok(true)
    }

    fn report_again(&self, _: u64) {}
}

/// Returns requests of a block in which pages 1, 2 and 5 are missing, and the way to report page faults.
fn requests() -> (PageRequests<Faults>, UnixStream) {
    let (faults, reported) = UnixStream::pair().unwrap();
    let mut missing = PageSet::new(PAGES * PAGE_BYTES);
    missing.set(1..3);
    missing.set(5..6);
    let region = RamRegion {
        name: "ram".to_owned(),
        bytes: PAGES * PAGE_BYTES,
        page_bytes: PAGE_BYTES,
        address: BASE,
    };
    let placer = Faults { placed: Mutex::default(), reported };
    let pages = Arc::new(MissingPages::new(placer, vec![region], vec![missing], || ()));
    (PageRequests::begin(pages).unwrap(), faults)
}

/// The source's end of a connection.
struct Source {
    reader: Box<dyn MessageReceiver>,
    writer: Box<dyn MessageSender>,
    handle: Arc<dyn ConnectionHandle>,
    /// The reason for which the destination's end has ended.
    end: mpsc::Receiver<PageArrivalError>,
}

impl Source {
    /// Attaches a connection.
    fn attach(requests: &PageRequests<Faults>) -> Self {
        let (near, far) = fake::connection();
        let host = |name| HostId::new(name).unwrap();
        let (ended, end) = mpsc::channel();
        requests.attach(near.into_channel(host("a")), 7, move |error| drop(ended.send(error))).unwrap();
        let channel = far.into_channel(host("b"));
        let handle = channel.handle();
        let (reader, writer) = channel.split();
        Self { reader, writer, handle, end }
    }

    fn receive(&mut self) -> Result<Incoming, TransportError> {
        self.reader.recv(Some(Instant::now() + PATIENCE))
    }

    /// Receives the list of missing pages.
    fn receive_list(&mut self) -> Vec<u64> {
        let Incoming::Message(Message::MissingPages { round: 7, .. }) = self.receive().unwrap() else {
            panic!("no list")
        };
        let Incoming::Blob(set) = self.receive().unwrap() else { panic!("no pages") };
        let blocks = decode_set(&set, [PAGES * PAGE_BYTES]).unwrap();
        blocks[0].runs().flatten().collect()
    }

    fn receive_requests(&mut self) -> Vec<u64> {
        let Incoming::Message(Message::RequestPages { pages }) = self.receive().unwrap() else {
            panic!("no requests")
        };
        pages.iter().map(|page| page.page).collect()
    }
}

fn report(mut faults: &UnixStream, page: u64) {
    faults.write_all(&(BASE + page * PAGE_BYTES).to_le_bytes()).unwrap();
}

#[test]
fn a_page_that_a_thread_waits_for_is_requested_and_placed() {
    let (mut requests, faults) = requests();
    let mut source = Source::attach(&requests);
    assert_eq!(source.receive_list(), [1, 2, 5]);
    report(&faults, 5);
    assert_eq!(source.receive_requests(), [5]);
    source.writer.send_blob(&encode_page(0, 5, &[9; PAGE])).unwrap();
    while requests.pages.pages() == 3 {
        thread::yield_now();
    }
    assert_eq!(lock(&requests.pages.placer().placed)[&(BASE + 5 * PAGE_BYTES)], [9; PAGE]);
    requests.report_complete();
    assert!(matches!(source.receive().unwrap(), Incoming::Message(Message::PagesComplete)));
    requests.hang_up();
    assert!(matches!(source.receive(), Err(TransportError::PeerClosed(_))));
}

#[test]
fn requests_of_a_lost_connection_are_sent_over_the_next_one() {
    let (mut requests, faults) = requests();
    report(&faults, 2);
    while requests.pages.requested().is_empty() {
        thread::yield_now();
    }
    for _ in 0..2 {
        let mut source = Source::attach(&requests);
        assert_eq!(source.receive_list(), [1, 2, 5]);
        assert_eq!(source.receive_requests(), [2]);
        source.handle.shutdown();
        assert!(matches!(source.end.recv_timeout(PATIENCE).unwrap(), PageArrivalError::Connection(_)));
    }
    requests.hang_up();
}

#[test]
fn a_page_that_does_not_exist_ends_the_connection() {
    let (mut requests, _faults) = requests();
    let mut source = Source::attach(&requests);
    assert_eq!(source.receive_list(), [1, 2, 5]);
    source.writer.send_blob(&encode_page(0, PAGES, &[])).unwrap();
    assert!(matches!(
        source.end.recv_timeout(PATIENCE).unwrap(),
        PageArrivalError::Outside { block: 0, page: PAGES }
    ));
    assert!(matches!(source.receive(), Err(TransportError::PeerClosed(_))));
    requests.hang_up();
    assert_eq!(requests.pages.pages(), 3);
}

/// The guest's threads wait on: another agent may place their pages.
#[test]
fn a_reader_of_page_faults_ends_without_a_page() {
    let (mut requests, faults) = requests();
    requests.hang_up();
    report(&faults, 1);
    assert!(requests.pages.requested().is_empty());
}
