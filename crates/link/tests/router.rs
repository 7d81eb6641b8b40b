//! Routing of data streams to the routes that expect them.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::sync::mpsc;
use std::time::Instant;

use common::{control, data, host, migration, plain, soon};
use proto::{Generation, Purpose};
use whimbrel_link::{ConnectError, Connection, HandshakeError, Listener, ListenerHandle, Peer, Router};

/// A listener that passes data streams to the router, and the purposes of all other connections to the test.
fn routed(router: &Router) -> (ListenerHandle, Peer, mpsc::Receiver<Purpose>) {
    let (others, seen) = mpsc::channel();
    let others = std::sync::Mutex::new(others);
    let router = router.clone();
    let serving = Listener::bind(plain("host-b"), "127.0.0.1:0")
        .unwrap()
        .serve(move |arrival| {
            if let Some(other) = router.deliver(arrival.unwrap()) {
                others.lock().unwrap().send(other.purpose().clone()).unwrap();
                other.refuse("not here");
            }
        })
        .unwrap();
    let peer = Peer { host: host("host-b"), address: serving.address().to_string() };
    (serving, peer, seen)
}

fn connect(peer: &Peer, purpose: Purpose) -> Result<Connection, String> {
    match plain("host-a").connect(peer, purpose, soon()) {
        Ok(connection) => Ok(connection),
        Err(ConnectError::Handshake { source: HandshakeError::Refused { reason }, .. }) => Err(reason),
        Err(other) => unreachable!("{other:?}"),
    }
}

#[test]
fn streams_reach_those_who_expect_them() {
    let router = Router::default();
    let (_serving, peer, others) = routed(&router);
    let reason = connect(&peer, data(1, 0)).unwrap_err();
    assert!(reason.contains("vm#1 is expected"), "{reason}");

    let route = router.expect(migration(), Generation(1), 2);
    let _first = connect(&peer, data(1, 1)).unwrap();
    let _second = connect(&peer, data(1, 0)).unwrap();
    let mut streams = [route.next(soon()).unwrap().0, route.next(soon()).unwrap().0];
    streams.sort_unstable();
    assert_eq!(streams, [0, 1]);

    for (purpose, words) in [
        (data(1, 0), "already there"),
        (data(1, 2), "no stream 2"),
        (data(0, 0), "generation 1, not 0"),
        (data(2, 0), "generation 1, not 2"),
    ] {
        let reason = connect(&peer, purpose).unwrap_err();
        assert!(reason.contains(words), "{reason}");
    }
    assert!(route.next(Instant::now()).is_none());
    assert_eq!(connect(&peer, control()).unwrap_err(), "not here");
    assert_eq!(others.recv().unwrap(), control());

    drop(route);
    assert!(connect(&peer, data(1, 0)).unwrap_err().contains("is expected"));
}

#[test]
fn a_newer_generation_takes_the_place_of_the_older() {
    let router = Router::default();
    let (_serving, peer, _others) = routed(&router);
    let old = router.expect(migration(), Generation(1), 1);
    let new = router.expect(migration(), Generation(2), 1);
    // A thread that waits for the old route learns at once that nothing will arrive.
    assert!(old.next(soon()).is_none());
    assert!(connect(&peer, data(1, 0)).unwrap_err().contains("generation 2, not 1"));
    // The end of the old route does not affect the new one.
    drop(old);
    let _stream = connect(&peer, data(2, 0)).unwrap();
    assert_eq!(new.next(soon()).unwrap().0, 0);
}

/// An agent that starts over with the same generation.
#[test]
fn the_same_generation_can_be_expected_anew() {
    let router = Router::default();
    let (_serving, peer, _others) = routed(&router);
    let old = router.expect(migration(), Generation(1), 1);
    let _gone = connect(&peer, data(1, 0)).unwrap();
    let new = router.expect(migration(), Generation(1), 1);
    drop(old);
    let _stream = connect(&peer, data(1, 0)).unwrap();
    assert_eq!(new.next(soon()).unwrap().0, 0);
}
