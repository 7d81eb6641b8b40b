//! Open connections over real TCP, with TLS and without.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod common;

use std::io::{IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::{both_endpoints, both_kinds, connected, control, host, plain, soon};
use proto::Message;
use proto::frame::{BadHeader, FrameKind, Header};
use whimbrel_link::{Connection, Incoming, LinkError, Peer, RateLimit, Settings};

#[test]
fn messages_and_blobs_arrive_as_they_were_sent() {
    for (kind, mut a, mut b) in both_kinds() {
        assert_eq!((a.peer(), b.peer()), (&host("host-b"), &host("host-a")), "{kind}");
        let blob: Vec<u8> = (0..=255).cycle().take(proto::limits::BLOB_BYTES).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                a.send(&Message::Ping).unwrap();
                a.send_blob(&blob).unwrap();
                a.send_blob(&[]).unwrap();
            });
            assert!(matches!(b.recv(Some(soon())), Ok(Incoming::Message(Message::Ping))), "{kind}");
            assert!(matches!(b.recv(Some(soon())), Ok(Incoming::Blob(bytes)) if bytes == blob), "{kind}");
            assert!(matches!(b.recv(Some(soon())), Ok(Incoming::Blob(bytes)) if bytes.is_empty()), "{kind}");
        });
        b.send(&Message::Pong).unwrap();
        assert!(matches!(a.recv(Some(soon())), Ok(Incoming::Message(Message::Pong))), "{kind}");
        drop(b);
        let error = a.recv(Some(soon())).unwrap_err();
        assert!(matches!(error, LinkError::Ended), "{kind}: {error:?}");
    }
}

/// A connection whose peer is the test itself, byte for byte.
fn raw() -> (Connection, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = Peer { host: host("host-b"), address: listener.local_addr().unwrap().to_string() };
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| plain("host-a").connect(&peer, control(), soon()).unwrap());
        let (mut stream, _) = listener.accept().unwrap();
        let mut header = [0; 8];
        stream.read_exact(&mut header).unwrap();
        let hello = Header::decode(header).unwrap();
        stream.read_exact(&mut vec![0; hello.payload_bytes as usize]).unwrap();
        let welcome = br#"{"answer":"accepted","version":1,"host":"host-b"}"#;
        stream.write_all(&Header::new(FrameKind::Message, welcome.len()).unwrap().encode()).unwrap();
        stream.write_all(welcome).unwrap();
        (connecting.join().unwrap(), stream)
    })
}

fn header(kind: FrameKind, bytes: usize) -> [u8; 8] {
    Header::new(kind, bytes).unwrap().encode()
}

/// Sends these bytes and then the end; returns the result of receiving them.
fn received(bytes: &[u8]) -> Result<Incoming, LinkError> {
    let (mut connection, mut stream) = raw();
    stream.write_all(bytes).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    connection.recv(Some(soon()))
}

#[test]
fn what_is_no_frame_ends_the_connection() {
    assert!(matches!(received(&[]), Err(LinkError::Ended)));
    for cut in 1..8 {
        assert!(matches!(received(&header(FrameKind::Blob, 4)[..cut]), Err(LinkError::Truncated)), "{cut}");
    }
    assert!(matches!(received(&header(FrameKind::Blob, 4)), Err(LinkError::Truncated)));
    let mut cut = header(FrameKind::Blob, 1 << 20).to_vec();
    cut.extend([0; 1000]);
    assert!(matches!(received(&cut), Err(LinkError::Truncated)));

    let oversized = [1, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f];
    let bad = received(&oversized);
    assert!(matches!(bad, Err(LinkError::Header(BadHeader::TooLong { bytes: 0x7fff_ffff, .. }))), "{bad:?}");
    assert!(matches!(received(&[9, 0, 0, 0, 0, 0, 0, 0]), Err(LinkError::Header(BadHeader::FrameKind(9)))));
    assert!(matches!(received(&[1, 0, 7, 0, 0, 0, 0, 0]), Err(LinkError::Header(BadHeader::Reserved))));

    let ack = [&header(FrameKind::Ack, 8)[..], &[0; 8]].concat();
    assert!(matches!(received(&ack), Err(LinkError::NotExpected(FrameKind::Ack))));
    let unknown = br#"{"type":"from-the-future"}"#;
    let unknown = [&header(FrameKind::Message, unknown.len())[..], unknown].concat();
    assert!(matches!(received(&unknown), Err(LinkError::Message(_))));
    let invalid = br#"{"type":"verified","different_chunks":[18446744073709551615]}"#;
    let invalid = [&header(FrameKind::Message, invalid.len())[..], invalid].concat();
    assert!(matches!(received(&invalid), Err(LinkError::Invalid(_))));
}

#[test]
fn after_a_bad_frame_the_peer_and_the_other_half_notice() {
    let (connection, mut stream) = raw();
    let (mut reader, mut writer) = connection.split();
    stream.write_all(&[9; 8]).unwrap();
    assert!(matches!(reader.recv(None), Err(LinkError::Header(_))));
    assert!(matches!(writer.send(&Message::Ping), Err(LinkError::Closed)));
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn what_does_not_fit_is_not_sent() {
    for (kind, mut a, mut b) in both_kinds() {
        let error = a.send_blob(&vec![0; proto::limits::BLOB_BYTES + 1]).unwrap_err();
        assert!(matches!(error, LinkError::TooLong(_)), "{kind}: {error:?}");
        let reason = "x".repeat(proto::limits::MESSAGE_BYTES);
        let error = a.send(&Message::Abort { epoch: proto::Epoch(1), reason }).unwrap_err();
        assert!(matches!(error, LinkError::TooLong(_)), "{kind}: {error:?}");
        // Nothing was sent, and the connection is as good as before.
        a.send(&Message::Ping).unwrap();
        assert!(matches!(b.recv(Some(soon())), Ok(Incoming::Message(Message::Ping))), "{kind}");

        let (_reader, mut writer) = a.split();
        let header = Header::new(FrameKind::Pages, 5).unwrap();
        let error = writer.write_frame(header, &[IoSlice::new(&[0; 2]), IoSlice::new(&[0; 4])]).unwrap_err();
        assert!(matches!(error, LinkError::WrongLength { announced: 5, given: 6 }), "{kind}: {error:?}");
    }
}

#[test]
fn a_deadline_within_a_frame_loses_nothing() {
    let (mut connection, mut stream) = raw();
    let ping = br#"{"type":"ping"}"#;
    let frame = [&header(FrameKind::Message, ping.len())[..], ping].concat();
    // The frame arrives in three parts, of which the first two end within header and payload.
    for part in [&frame[..3], &frame[3..12]] {
        stream.write_all(part).unwrap();
        while !connection.has_more() {
            std::thread::yield_now();
        }
        let error = connection.recv(Some(Instant::now())).unwrap_err();
        assert!(matches!(error, LinkError::TimedOut), "{error:?}");
    }
    stream.write_all(&frame[12..]).unwrap();
    assert!(matches!(connection.recv(Some(soon())), Ok(Incoming::Message(Message::Ping))));

    // `read_frame` may finish a frame that `recv` has begun.
    stream.write_all(&frame[..8]).unwrap();
    assert!(matches!(connection.recv(Some(Instant::now())), Err(LinkError::TimedOut)));
    stream.write_all(&frame[8..]).unwrap();
    let (mut reader, _writer) = connection.split();
    let mut payload = vec![1; 100];
    assert_eq!(
        reader.read_frame(&mut payload).unwrap(),
        Header::new(FrameKind::Message, ping.len()).unwrap()
    );
    assert_eq!(payload, ping);
}

#[test]
fn a_reader_tells_whether_more_has_arrived() {
    for (kind, a, b) in both_kinds() {
        let (mut reader, _keep) = b.split();
        let (_keep, mut writer) = a.split();
        assert!(!reader.has_more(), "{kind}");
        for _ in 0..2 {
            writer.send(&Message::Ping).unwrap();
        }
        while !reader.has_more() {
            std::thread::yield_now();
        }
        let mut payload = Vec::new();
        reader.read_frame(&mut payload).unwrap();
        reader.read_frame(&mut payload).unwrap();
        assert!(!reader.has_more(), "{kind}");
        writer.finish().unwrap();
        while !reader.has_more() {
            std::thread::yield_now();
        }
        assert!(matches!(reader.read_frame(&mut payload), Err(LinkError::Ended)), "{kind}");
    }
}

/// Bytes that differ by their position.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (((at + seed) * 31) >> 3) as u8).collect()
}

#[test]
fn frames_of_many_parts_arrive_whole() {
    for (kind, a, b) in both_kinds() {
        let (_keep, mut writer) = a.split();
        let (mut reader, _keep) = b.split();
        let bytes = pattern(1, 2 << 20);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Single bytes, more parts than one system call accepts, empty parts, parts beyond a piece.
                for part_bytes in [1, 700, 4096, 300_000, 2 << 20] {
                    let len = if part_bytes == 1 { 3000 } else { bytes.len() };
                    let parts: Vec<_> = bytes[..len]
                        .chunks(part_bytes)
                        .flat_map(|part| [IoSlice::new(part), IoSlice::new(&[])])
                        .collect();
                    writer.write_frame(Header::new(FrameKind::Pages, len).unwrap(), &parts).unwrap();
                }
                writer.finish().unwrap();
            });
            let mut payload = Vec::new();
            for len in [3000, bytes.len(), bytes.len(), bytes.len(), bytes.len()] {
                let header = reader.read_frame(&mut payload).unwrap();
                assert_eq!((header.kind, payload.len()), (FrameKind::Pages, len), "{kind}");
                assert!(payload == bytes[..len], "{kind}: other bytes have arrived");
            }
            assert!(matches!(reader.read_frame(&mut payload), Err(LinkError::Ended)), "{kind}");
        });
    }
}

/// Both sides write until all buffers are full and only then read: neither direction may wait for the other.
#[test]
fn both_directions_full_at_once() {
    const FRAMES: usize = 24;
    const BYTES: usize = 1 << 20;
    for (kind, a, b) in both_kinds() {
        let handles = [a.handle(), b.handle()];
        std::thread::scope(|scope| {
            for (seed, connection) in [(1, a), (2, b)] {
                let (mut reader, mut writer) = connection.split();
                scope.spawn(move || {
                    let bytes = pattern(seed, BYTES);
                    for _ in 0..FRAMES {
                        writer
                            .write_frame(
                                Header::new(FrameKind::Pages, BYTES).unwrap(),
                                &[IoSlice::new(&bytes)],
                            )
                            .unwrap();
                    }
                });
                let handles = &handles;
                scope.spawn(move || {
                    // Not before both directions are stuck or nearly so.
                    while handles.iter().any(|handle| handle.sent_bytes() < 1 << 18) {
                        std::thread::yield_now();
                    }
                    let (expected, mut payload) = (pattern(3 - seed, BYTES), Vec::new());
                    for _ in 0..FRAMES {
                        reader.read_frame(&mut payload).unwrap();
                        assert!(payload == expected, "{kind}: other bytes have arrived");
                    }
                });
            }
        });
        let least = (FRAMES * BYTES) as u64;
        for (one, other) in [(0, 1), (1, 0)] {
            assert_eq!(handles[one].sent_bytes(), handles[other].received_bytes(), "{kind}");
            assert!(handles[one].sent_bytes() > least, "{kind}");
        }
    }
}

/// Returns true if the system has put a thread of this process to sleep.
fn sleeps(thread: rustix::thread::Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", thread.as_raw_nonzero())).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('S')
}

fn wait_until_asleep(thread: rustix::thread::Pid) {
    while !sleeps(thread) {
        std::thread::yield_now();
    }
}

#[test]
fn shutdown_ends_whatever_waits() {
    for (kind, a, b) in both_kinds() {
        let handle = a.handle();
        let (mut reader, mut writer) = a.split();
        std::thread::scope(|scope| {
            let (tell, known) = mpsc::channel();
            let tell_reader = tell.clone();
            let reading = scope.spawn(move || {
                tell_reader.send(rustix::thread::gettid()).unwrap();
                reader.read_frame(&mut Vec::new()).unwrap_err()
            });
            let writing = scope.spawn(move || {
                tell.send(rustix::thread::gettid()).unwrap();
                let bytes = vec![0; 1 << 20];
                loop {
                    if let Err(error) = writer
                        .write_frame(Header::new(FrameKind::Pages, 1 << 20).unwrap(), &[IoSlice::new(&bytes)])
                    {
                        return error;
                    }
                }
            });
            // Both have to wait, the writer for a buffer that is full.
            let waiting = [known.recv().unwrap(), known.recv().unwrap()];
            while handle.sent_bytes() < 1 << 20 || !waiting.iter().all(|&thread| sleeps(thread)) {
                std::thread::yield_now();
            }
            handle.shutdown();
            for thread in [reading, writing] {
                let error = thread.join().unwrap();
                assert!(matches!(error, LinkError::Closed), "{kind}: {error:?}");
            }
        });
        drop(b);
        // Once more, and after the end.
        handle.shutdown();
    }
}

#[test]
fn shutdown_reaches_a_writer_that_waits_for_its_rate() {
    for (kind, a, _b) in both_kinds() {
        let handle = a.handle();
        let (_keep, mut writer) = a.split();
        let limit = Arc::new(RateLimit::new(Some(1)));
        writer.set_rate_limit(Some(Arc::clone(&limit)));
        std::thread::scope(|scope| {
            let (tell, known) = mpsc::channel();
            let writing = scope.spawn(move || {
                tell.send(rustix::thread::gettid()).unwrap();
                writer.send_blob(&vec![0; 1 << 20]).unwrap_err()
            });
            wait_until_asleep(known.recv().unwrap());
            handle.shutdown();
            assert!(matches!(writing.join().unwrap(), LinkError::Closed), "{kind}");
        });
    }
}

/// Each of these calls would wait for ever otherwise.
#[test]
fn write_deadline_covers_the_peer_and_the_rate_limit() {
    for (kind, a, _silent) in both_kinds() {
        let (mut reader, mut writer) = a.split();
        writer.set_deadline(Some(Instant::now() + Duration::from_millis(10)));
        let error = (0..1 << 16).find_map(|_| writer.send_blob(&vec![0; 1 << 20]).err());
        assert!(matches!(error, Some(LinkError::TimedOut)), "{kind}: {error:?}");
        assert!(
            matches!(reader.recv(None), Err(LinkError::Closed)),
            "{kind}: a part of it may be on its way"
        );
    }
    for (kind, a, mut other) in both_kinds() {
        let (mut reader, mut writer) = a.split();
        writer.set_rate_limit(Some(Arc::new(RateLimit::new(Some(1)))));
        writer.set_deadline(Some(Instant::now() + Duration::from_millis(10)));
        let error = writer.send_blob(&vec![0; 1 << 20]).unwrap_err();
        assert!(matches!(error, LinkError::TimedOut), "{kind}: {error:?}");
        assert!(matches!(reader.recv(None), Err(LinkError::Closed)), "{kind}");
        // A frame that ends in the middle: the peer must not take the bytes that follow for its remainder.
        assert!(matches!(other.recv(None), Err(LinkError::Ended)), "{kind}");
    }
}

#[test]
fn a_limit_can_be_lifted_while_a_writer_waits() {
    for (kind, a, mut b) in both_kinds() {
        let (_keep, mut writer) = a.split();
        let limit = Arc::new(RateLimit::new(Some(1)));
        writer.set_rate_limit(Some(Arc::clone(&limit)));
        std::thread::scope(|scope| {
            let (tell, known) = mpsc::channel();
            let writing = scope.spawn(move || {
                tell.send(rustix::thread::gettid()).unwrap();
                writer.send_blob(&vec![5; 1 << 20]).map(|()| writer)
            });
            wait_until_asleep(known.recv().unwrap());
            limit.set_rate(None);
            assert!(
                matches!(b.recv(Some(soon())), Ok(Incoming::Blob(bytes)) if bytes == vec![5; 1 << 20]),
                "{kind}"
            );
            writing.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_peer_that_takes_nothing_is_lost() {
    let settings = Settings { silence: Duration::from_millis(300), ..Settings::default() };
    for (client, server) in both_endpoints() {
        let (a, _b) = connected(&client.with_settings(settings), server);
        let (_keep, mut writer) = a.split();
        let error = loop {
            if let Err(error) = writer.send_blob(&vec![0; 1 << 20]) {
                break error;
            }
        };
        assert!(
            matches!(&error, LinkError::Lost(source) if source.kind() == std::io::ErrorKind::TimedOut),
            "{error:?}"
        );
    }
}

#[test]
fn what_was_sent_before_the_end_arrives() {
    for (kind, a, mut b) in both_kinds() {
        let (reader, mut writer) = a.split();
        drop(reader);
        writer.send(&Message::Ping).unwrap();
        drop(writer);
        assert!(matches!(b.recv(Some(soon())), Ok(Incoming::Message(Message::Ping))), "{kind}");
        assert!(matches!(b.recv(Some(soon())), Err(LinkError::Ended)), "{kind}");
    }
}

/// A handle alone does not keep a connection open.
#[test]
fn the_connection_ends_with_its_halves() {
    for (kind, a, mut b) in both_kinds() {
        let handle = a.handle();
        drop(a);
        assert!(matches!(b.recv(Some(soon())), Err(LinkError::Ended)), "{kind}");
        assert!(handle.sent_bytes() > 0 && handle.received_bytes() > 0, "{kind}");
    }
}

/// TLS delivers only the bytes that were encrypted: a changed byte on the way ends the connection.
#[test]
fn a_changed_byte_is_noticed() {
    let [(client, server), _] = both_endpoints();
    let server = common::Server::new(server);
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = Peer { address: between.local_addr().unwrap().to_string(), ..server.peer() };
    let spoil = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (client, _) = between.accept().unwrap();
            let server = TcpStream::connect(server.peer().address).unwrap();
            let (mut back, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            scope.spawn(move || std::io::copy(&mut back, &mut to_client));
            forward(client, server, &spoil);
        });
        let connecting = scope.spawn(|| client.connect(&peer, control(), soon()).unwrap());
        let mut b = server.accept();
        let mut a = connecting.join().unwrap();
        a.send(&Message::Ping).unwrap();
        assert!(matches!(b.recv(Some(soon())), Ok(Incoming::Message(Message::Ping))));
        spoil.store(true, Ordering::SeqCst);
        a.send(&Message::Ping).unwrap();
        let error = b.recv(Some(soon())).unwrap_err();
        assert!(matches!(error, LinkError::Tls(rustls::Error::DecryptError)), "{error:?}");
        let error = a.recv(Some(soon())).unwrap_err();
        assert!(matches!(error, LinkError::Tls(rustls::Error::AlertReceived(_))), "{error:?}");
    });
}

fn forward(mut from: TcpStream, mut to: TcpStream, spoil: &AtomicBool) {
    let mut bytes = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        if spoil.load(Ordering::SeqCst) {
            bytes[len - 1] ^= 1;
        }
        if to.write_all(&bytes[..len]).is_err() {
            return;
        }
    }
    to.shutdown(Shutdown::Both).unwrap_or(());
}
