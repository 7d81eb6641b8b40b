//! Tests of internals: keys that wear out, and the kernel's settings of a socket.

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use proto::frame::{FrameKind, Header};
use rustix::net::sockopt;

use crate::identity::Identity;
use crate::socket::Socket;
use crate::{Endpoint, LinkError, Peer, Security};

/// Lets both directions write at once, with keys that last for `records` records. Returns the bytes sent by one side.
fn exchange(records: u64) -> u64 {
    const FRAMES: usize = 40;
    const BYTES: usize = 300_000;
    let authority = common::Authority::default();
    let at = tempfile::tempdir().unwrap();
    let endpoint = |name: &str| {
        let files = authority.files(at.path(), &[name], |_| ());
        Endpoint::new(
            common::host(name),
            Security::Tls(Identity::load_with_short_lived_keys(&files, records)),
        )
    };
    let (a, b) = common::connected(&endpoint("host-a"), endpoint("host-b"));
    let handle = a.handle();
    std::thread::scope(|scope| {
        for (seed, connection) in [(1_u8, a), (2, b)] {
            let (mut reader, mut writer) = connection.split();
            scope.spawn(move || {
                let (header, bytes) = (Header::new(FrameKind::Pages, BYTES).unwrap(), vec![seed; BYTES]);
                for _ in 0..FRAMES {
                    writer.write_frame(header, &[IoSlice::new(&bytes)]).unwrap();
                }
                writer.finish().unwrap();
            });
            scope.spawn(move || {
                let mut payload = Vec::new();
                for _ in 0..FRAMES {
                    reader.read_frame(&mut payload).unwrap();
                    assert_eq!(payload, vec![3 - seed; BYTES]);
                }
                assert!(matches!(reader.read_frame(&mut payload), Err(LinkError::Ended)));
            });
        }
    });
    handle.sent_bytes()
}

/// Each side changes its keys every few records, and its answer to the peer's change leaves between its own records.
#[test]
fn keys_that_wear_out_are_changed_under_way() {
    // A change of keys is one more record.
    assert!(exchange(20) > exchange(1 << 24));
}

/// A peer that sends its closing notice and then continues to send, unasked, is neither read nor waited for.
#[test]
fn what_comes_after_the_closing_notice_is_dropped() {
    let authority = common::Authority::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = Peer { host: common::host("host-b"), address: listener.local_addr().unwrap().to_string() };
    std::thread::scope(|scope| {
        let client = authority.endpoint("host-a");
        let connecting =
            scope.spawn(move || client.connect(&peer, common::control(), common::soon()).unwrap());
        let rustls::Connection::Server(session) = authority.identity(&["host-b"]).server().unwrap() else {
            unreachable!("a server's session");
        };
        let mut stream = rustls::StreamOwned::new(session, listener.accept().unwrap().0);
        let mut header = [0; 8];
        stream.read_exact(&mut header).unwrap();
        stream.read_exact(&mut vec![0; Header::decode(header).unwrap().payload_bytes as usize]).unwrap();
        let welcome = br#"{"answer":"accepted","version":1,"host":"host-b"}"#;
        stream.write_all(&Header::new(FrameKind::Message, welcome.len()).unwrap().encode()).unwrap();
        stream.write_all(welcome).unwrap();
        stream.conn.send_close_notify();
        stream.flush().unwrap();
        stream.sock.write_all(&vec![23; 100_000]).unwrap();

        let mut connection = connecting.join().unwrap();
        while !connection.has_more() {
            std::thread::yield_now();
        }
        assert!(matches!(connection.recv(None), Err(LinkError::Ended)));
        assert!(connection.has_more());
    });
}

#[test]
fn the_kernel_watches_silent_connections() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (silence_ms, probe_s) in [(5_000, 1), (20_000, 5), (100, 1)] {
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let same = stream.try_clone().unwrap();
        let socket = Socket::new(stream, Duration::from_millis(silence_ms)).unwrap();
        assert!(sockopt::tcp_nodelay(&same).unwrap());
        assert!(sockopt::socket_keepalive(&same).unwrap());
        assert_eq!(u64::from(sockopt::tcp_user_timeout(&same).unwrap()), silence_ms);
        assert_eq!(sockopt::tcp_keepidle(&same).unwrap(), Duration::from_secs(probe_s));
        assert_eq!(sockopt::tcp_keepintvl(&same).unwrap(), Duration::from_secs(probe_s));
        socket.set_stall_limit(Duration::from_millis(60_500)).unwrap();
        assert_eq!(sockopt::tcp_user_timeout(&same).unwrap(), 60_500);
    }
}
