//! Open connections over real TCP, with TLS and without.

mod common;

use common::{both_kinds, host, soon};
use proto::Message;
use whimbrel_link::{Incoming, LinkError};

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
