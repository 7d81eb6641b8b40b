//! The contract of every transport, over TCP with TLS and without, and over connections without sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod common;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{PATIENCE, both_endpoints, control, data, host, migration, soon};
use proto::frame::FrameKind;
use proto::{Generation, Message, Purpose};
use whimbrel_link::transport::fake::FakeTransport;
use whimbrel_link::transport::{
    Arrivals, ArrivedStream, BulkSettings, Channel, DataStream, ExpectedStreams, Incoming, TcpTransport,
    Transport, TransportError,
};
use whimbrel_link::{Endpoint, Listener, ListenerHandle, Peer, Router};

/// Accepts the next channel that the source opens.
type Accept = Box<dyn Fn() -> Channel>;

/// Two agents: the source connects, the destination expects.
struct Rig {
    name: &'static str,
    source: Box<dyn Transport>,
    destination: Box<dyn Transport>,
    peer: Peer,
    accept: Accept,
    _serving: Option<ListenerHandle>,
}

impl Rig {
    fn tcp(name: &'static str, near: Endpoint, far: Endpoint) -> Self {
        let router = Router::default();
        let destination = TcpTransport::new(far.clone(), router.clone());
        let peer_host = far.host().clone();
        let (arrived, arrivals) = std::sync::mpsc::channel();
        let arrived = std::sync::Mutex::new(arrived);
        let serving = Listener::bind(far, "127.0.0.1:0")
            .unwrap()
            .serve(move |arrival| {
                if let Some(arrival) = arrival.ok().and_then(|arrival| router.deliver(arrival)) {
                    drop(arrived.lock().unwrap().send(arrival.accept().unwrap()));
                }
            })
            .unwrap();
        let peer = Peer { host: peer_host, address: serving.address().to_string() };
        Self {
            name,
            source: Box::new(TcpTransport::new(near, Router::default())),
            destination: Box::new(destination),
            peer,
            accept: Box::new(move || arrivals.recv_timeout(PATIENCE).unwrap().into()),
            _serving: Some(serving),
        }
    }

    fn fake() -> Self {
        let [near, far] = FakeTransport::between([host("host-a"), host("host-b")]);
        let accepting = far.clone();
        Self {
            name: "fake",
            source: Box::new(near),
            destination: Box::new(far),
            peer: Peer { host: host("host-b"), address: String::new() },
            accept: Box::new(move || accepting.accept(soon()).unwrap().1),
            _serving: None,
        }
    }

    /// Returns one of each kind.
    fn all() -> [Self; 3] {
        let [tls, plain] = both_endpoints();
        [Self::tcp("tls", tls.0, tls.1), Self::tcp("plain", plain.0, plain.1), Self::fake()]
    }

    fn expect(&self, generation: u64, bulk: u16, page_requests: bool) -> Box<dyn Arrivals> {
        let expected = ExpectedStreams { bulk, page_requests };
        self.destination.expect(&migration(), Generation(generation), expected)
    }

    fn bulk(&self, purpose: Purpose) -> Result<DataStream, TransportError> {
        let settings = BulkSettings { stall: PATIENCE, limit: None };
        self.source.bulk(&self.peer, purpose, &settings, soon())
    }

    /// Returns both ends of a channel.
    fn channel(&self) -> (Channel, Channel) {
        let near = self.source.control(&self.peer, control(), soon()).unwrap();
        (near, (self.accept)())
    }

    /// Returns both ends of a data stream.
    fn stream(&self) -> (DataStream, DataStream) {
        let arrivals = self.expect(1, 1, false);
        let near = self.bulk(data(1, 0)).unwrap();
        match arrivals.next(soon()) {
            Some(ArrivedStream::Bulk { stream: 0, data }) => (near, data),
            other => panic!("{}: {other:?}", self.name),
        }
    }
}

#[test]
fn messages_and_blobs_arrive_in_order_and_then_the_end() {
    for rig in Rig::all() {
        let (mut near, mut far) = rig.channel();
        assert_eq!((near.peer(), far.peer()), (&host("host-b"), &host("host-a")), "{}", rig.name);
        near.send(&Message::Ping).unwrap();
        assert!(matches!(far.recv(Some(soon())), Ok(Incoming::Message(Message::Ping))), "{}", rig.name);
        far.send(&Message::Pong).unwrap();
        assert!(matches!(near.recv(Some(soon())), Ok(Incoming::Message(Message::Pong))), "{}", rig.name);
        let handle = near.handle();
        let (receiver, mut sender) = near.split();
        sender.send_blob(b"state").unwrap();
        sender.finish().unwrap();
        assert!(
            matches!(far.recv(Some(soon())), Ok(Incoming::Blob(bytes)) if bytes == b"state"),
            "{}",
            rig.name
        );
        assert!(matches!(far.recv(Some(soon())), Err(TransportError::PeerClosed(_))), "{}", rig.name);
        assert!(handle.sent_bytes() > 0 && handle.received_bytes() > 0, "{}", rig.name);
        drop((receiver, sender));
    }
}

#[test]
fn a_receiver_survives_its_deadline_and_a_sender_does_not() {
    for rig in Rig::all() {
        let (mut near, mut far) = rig.channel();
        let passed = Instant::now();
        assert!(matches!(far.recv(Some(passed)), Err(TransportError::Deadline(_))), "{}", rig.name);
        near.send(&Message::Ping).unwrap();
        assert!(matches!(far.recv(Some(soon())), Ok(Incoming::Message(Message::Ping))), "{}", rig.name);

        let (_receiver, mut sender) = near.split();
        sender.set_deadline(Some(passed));
        assert_eq!(sender.deadline(), Some(passed), "{}", rig.name);
        let blob = vec![0; proto::limits::BLOB_BYTES];
        // Until what lies between the two is full.
        let late = loop {
            if let Err(error) = sender.send_blob(&blob) {
                break error;
            }
        };
        assert!(matches!(late, TransportError::Deadline(_)), "{}: {late:?}", rig.name);
        sender.set_deadline(None);
        assert!(matches!(sender.send(&Message::Ping), Err(TransportError::Closed)), "{}", rig.name);
    }
}

/// Both halves of this side return from their waits, and the peer notices.
#[test]
fn a_handle_ends_waits_on_both_sides() {
    for rig in Rig::all() {
        let (near, mut far) = rig.stream();
        let DataStream { mut sink, mut source, handle } = near;
        let receiving = thread::spawn(move || source.receive(&mut Vec::new()));
        let sending = thread::spawn(move || {
            let payload = vec![0; 1 << 20];
            loop {
                if let Err(error) = sink.send(FrameKind::Pages, &[&payload]) {
                    return error;
                }
            }
        });
        // The sender is at work, and is not read any further.
        far.source.receive(&mut Vec::new()).unwrap();
        handle.shutdown();
        let received = receiving.join().unwrap();
        assert!(matches!(received, Err(TransportError::Closed)), "{}: {received:?}", rig.name);
        let sent = sending.join().unwrap();
        assert!(matches!(sent, TransportError::Closed), "{}: {sent:?}", rig.name);
        let end = loop {
            if let Err(error) = far.source.receive(&mut Vec::new()) {
                break error;
            }
        };
        assert!(end.is_transient(), "{}: {end:?}", rig.name);
    }
}

#[test]
fn frames_arrive_whole_and_a_frame_that_is_too_long_is_not_sent() {
    for rig in Rig::all() {
        let (mut near, mut far) = rig.stream();
        let long = vec![0; FrameKind::Ack.max_payload_bytes() + 1];
        let error = near.sink.send(FrameKind::Ack, &[&long]).unwrap_err();
        assert!(matches!(error, TransportError::Unsendable(_)), "{}: {error:?}", rig.name);
        near.sink.send(FrameKind::Pages, &[b"head", b"data"]).unwrap();
        near.sink.send(FrameKind::Ack, &[]).unwrap();
        near.sink.flush().unwrap();
        let mut payload = Vec::new();
        assert_eq!(far.source.receive(&mut payload).unwrap(), FrameKind::Pages, "{}", rig.name);
        assert_eq!(payload, b"headdata", "{}", rig.name);
        assert!(far.source.direct().is_none() && near.sink.direct().is_none(), "{}", rig.name);
        assert_eq!(far.source.receive(&mut payload).unwrap(), FrameKind::Ack, "{}", rig.name);
        assert!(payload.is_empty(), "{}", rig.name);
        drop(near);
        assert!(
            matches!(far.source.receive(&mut payload), Err(TransportError::PeerClosed(_))),
            "{}",
            rig.name
        );
        assert!(far.source.has_more(), "{}: the end counts", rig.name);
    }
}

#[test]
fn a_generation_gets_its_streams_once_and_ends_with_the_next() {
    for rig in Rig::all() {
        let first = rig.expect(1, 2, true);
        let _one = rig.bulk(data(1, 1)).unwrap();
        let again = rig.bulk(data(1, 1)).unwrap_err();
        assert!(matches!(again, TransportError::Refused(_)), "{}: {again:?}", rig.name);
        let other = rig.bulk(data(2, 0)).unwrap_err();
        assert!(matches!(other, TransportError::Refused(_)), "{}: {other:?}", rig.name);
        let arrived = first.next(soon());
        assert!(matches!(arrived, Some(ArrivedStream::Bulk { stream: 1, .. })), "{}: {arrived:?}", rig.name);

        let mut asking = rig.source.page_requests(&rig.peer, data(1, 2), PATIENCE, soon()).unwrap();
        let Some(ArrivedStream::PageRequests(mut asked)) = first.next(soon()) else { panic!("{}", rig.name) };
        asking.send(&Message::PagesComplete).unwrap();
        let received = asked.recv(Some(soon()));
        assert!(matches!(received, Ok(Incoming::Message(Message::PagesComplete))), "{}", rig.name);

        let second = rig.expect(2, 1, false);
        assert!(first.next(soon()).is_none(), "{}: the next generation replaces it at once", rig.name);
        let late = rig.bulk(data(1, 0)).unwrap_err();
        assert!(matches!(late, TransportError::Refused(_)), "{}: {late:?}", rig.name);
        let _new = rig.bulk(data(2, 0)).unwrap();
        assert!(second.next(soon()).is_some(), "{}", rig.name);
        assert!(second.next(Instant::now() + Duration::from_millis(1)).is_none(), "{}", rig.name);
    }
}

/// Page requests do not wait behind bulk that the peer does not read.
#[test]
fn page_requests_overtake_bulk() {
    for rig in Rig::all() {
        let arrivals = rig.expect(1, 1, true);
        let mut near = rig.bulk(data(1, 0)).unwrap();
        let mut requests = rig.source.page_requests(&rig.peer, data(1, 1), PATIENCE, soon()).unwrap();
        let _bulk = arrivals.next(soon()).unwrap();
        let Some(ArrivedStream::PageRequests(mut answers)) = arrivals.next(soon()) else {
            panic!("{}", rig.name)
        };
        near.sink.set_deadline(Some(Instant::now()));
        let payload = vec![0; 1 << 20];
        while near.sink.send(FrameKind::Pages, &[&payload]).is_ok() {}
        requests.send(&Message::Ping).unwrap();
        let received = answers.recv(Some(soon()));
        assert!(matches!(received, Ok(Incoming::Message(Message::Ping))), "{}: {received:?}", rig.name);
    }
}

#[test]
fn a_host_that_is_not_there_is_an_error_of_its_kind() {
    let [_, rig, _] = Rig::all();
    let absent = Peer { host: host("host-b"), address: "127.0.0.1:1".to_owned() };
    let error = rig.source.control(&absent, control(), soon()).unwrap_err();
    assert!(matches!(error, TransportError::Io(_)), "{error:?}");
    let other = Peer { host: host("host-c"), ..rig.peer.clone() };
    let error = rig.source.control(&other, control(), soon()).unwrap_err();
    assert!(matches!(error, TransportError::Refused(_)), "{error:?}");
    assert!(error.to_string().contains("host-c"), "{error}");
    // A transport is shared by all drivers of an agent.
    let shared: Arc<dyn Transport> = Arc::from(rig.source);
    drop(shared);
}
