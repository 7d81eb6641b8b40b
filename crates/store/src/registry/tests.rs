use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use link::{ConnectedPeer, Endpoint, Incoming, Listener, ListenerHandle, Peer, Security};
use proto::Purpose;
use proto::message::{Message, RegistryReply};

use super::*;

/// Far longer than any step of these tests.
const LONG: Duration = Duration::from_mins(1);

fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn owned(epoch: u64, owner: &str) -> Ownership {
    Ownership { epoch: Epoch(epoch), owner: host(owner), offer: None, released: false }
}

/// Returns the request that enters a VM, which the registry does not know yet, with its owner.
fn enrol(vm: VmName, epoch: Epoch, owner: HostId) -> RegistryRequest {
    RegistryRequest::CompareAndSet {
        vm,
        expected: None,
        new: Ownership { epoch, owner, offer: None, released: false },
    }
}

fn record_of(epoch: u64, owner: &str) -> RegistryAnswer {
    RegistryAnswer::Record(Some(owned(epoch, owner)))
}

fn endpoint(name: &str) -> Endpoint {
    Endpoint::new(host(name), Security::Plain)
}

/// Starts a witness on a port of its own; the test defines how it handles an arrival.
fn witness(handler: impl Fn(ConnectedPeer) + Send + Sync + 'static) -> (ListenerHandle, Peer) {
    let listener = Listener::bind(endpoint("witness"), "127.0.0.1:0").unwrap();
    let peer = Peer { host: host("witness"), address: listener.address().to_string() };
    let serving = listener.serve(move |arrival| handler(arrival.unwrap())).unwrap();
    (serving, peer)
}

fn client(name: &str, witness: &Peer) -> WitnessClient {
    WitnessClient::new(endpoint(name), witness.clone(), LONG, LONG)
}

#[test]
fn a_record_is_compared_before_it_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let registry = SqliteRegistry::open(folder.path()).unwrap();
    assert_eq!(registry.read(&web()), RegistryAnswer::Record(None));
    assert_eq!(registry.ask(&enrol(web(), Epoch(1), host("alpha"))), record_of(1, "alpha"));
    let from_alpha = Some((Epoch(1), host("alpha")));
    assert_eq!(
        registry.compare_and_set(&web(), None, owned(2, "beta")),
        record_of(1, "alpha"),
        "not compared"
    );
    assert_eq!(registry.compare_and_set(&web(), from_alpha.clone(), owned(2, "beta")), record_of(2, "beta"));
    assert_eq!(registry.compare_and_set(&web(), from_alpha, owned(2, "alpha")), record_of(2, "beta"), "late");
    drop(registry);
    let registry = SqliteRegistry::open(folder.path()).unwrap();
    assert_eq!(registry.read(&web()), record_of(2, "beta"));
    assert_eq!(registry.all().unwrap(), vec![(web(), owned(2, "beta"))]);
}

#[test]
fn one_of_many_claimants_becomes_owner() {
    let folder = tempfile::tempdir().unwrap();
    // Two connections to one database, as two processes would have.
    let registries = [0, 1].map(|_| SqliteRegistry::open(folder.path()).unwrap());
    registries[0].ask(&enrol(web(), Epoch(0), host("h0")));
    let winners = Mutex::new(Vec::new());
    for epoch in 0..20 {
        let owner = match registries[0].read(&web()) {
            RegistryAnswer::Record(Some(record)) => record.owner,
            other => panic!("{other:?}"),
        };
        let start = Barrier::new(8);
        thread::scope(|scope| {
            for n in 0..8 {
                let (door, start, winners, owner) = (&registries[n % 2], &start, &winners, owner.clone());
                scope.spawn(move || {
                    let me = format!("h{n}");
                    start.wait();
                    let request = RegistryRequest::CompareAndSet {
                        vm: web(),
                        expected: Some((Epoch(epoch), owner)),
                        new: owned(epoch + 1, &me),
                    };
                    if door.apply(&request).unwrap() == RegistryReply::Set {
                        winners.lock().unwrap().push((epoch, me));
                    }
                });
            }
        });
        let won: Vec<_> = winners.lock().unwrap().iter().filter(|(e, _)| *e == epoch).cloned().collect();
        assert_eq!(won.len(), 1, "in epoch {epoch}: {won:?}");
        assert_eq!(registries[1].read(&web()), record_of(epoch + 1, &won[0].1));
    }
}

/// Not a test of its own: [`a_killed_registry_keeps_what_it_has_answered`] runs it as another process and kills that.
#[test]
fn victim_that_sets_until_it_is_killed() {
    let Ok(directory) = std::env::var("WHIMBREL_TEST_REGISTER") else { return };
    let registry = SqliteRegistry::open(Path::new(&directory)).unwrap();
    let mut record = match registry.read(&web()) {
        RegistryAnswer::Record(Some(record)) => record,
        _ => owned(0, "alpha"),
    };
    registry.ask(&enrol(web(), record.epoch, record.owner.clone()));
    loop {
        let new = owned(record.epoch.0 + 1, "alpha");
        let request = RegistryRequest::CompareAndSet {
            vm: web(),
            expected: Some((record.epoch, record.owner.clone())),
            new: new.clone(),
        };
        assert_eq!(registry.apply(&request).unwrap(), RegistryReply::Set);
        println!("set {}", new.epoch);
        record = new;
    }
}

#[test]
fn a_killed_registry_keeps_what_it_has_answered() {
    let folder = tempfile::tempdir().unwrap();
    for wanted in [1, 10, 50] {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "registry::tests::victim_that_sets_until_it_is_killed", "--nocapture"])
            .env("WHIMBREL_TEST_REGISTER", folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map_while(Result::ok);
        let number = |line: String| line.strip_prefix("set ").and_then(|n| n.parse::<u64>().ok());
        let reached = lines.by_ref().filter_map(number).find(|n| *n >= wanted).unwrap();
        victim.kill().unwrap();
        victim.wait().unwrap();
        let last = lines.filter_map(number).last().unwrap_or(reached);

        let registry = SqliteRegistry::open(folder.path()).unwrap();
        let RegistryAnswer::Record(Some(record)) = registry.read(&web()) else {
            panic!("the record is lost")
        };
        assert!(record.epoch.0 == last || record.epoch.0 == last + 1, "{} after {last}", record.epoch);
    }
}

#[test]
fn a_witness_lets_hosts_change_only_their_own_records() {
    let folder = tempfile::tempdir().unwrap();
    let server = WitnessServer::new(Arc::new(SqliteRegistry::open(folder.path()).unwrap()));
    let connections = Arc::new(Mutex::new(Vec::new()));
    let counted = Arc::clone(&connections);
    let (_serving, peer) = witness(move |arrival| {
        counted.lock().unwrap().push(arrival.host().clone());
        server.serve(arrival);
    });
    let (alpha, beta, other) = (client("alpha", &peer), client("beta", &peer), client("other", &peer));
    assert_eq!(alpha.ask(&enrol(web(), Epoch(1), host("alpha"))), record_of(1, "alpha"));
    let expected = Some((Epoch(1), host("alpha")));
    assert_eq!(
        other.compare_and_set(&web(), expected.clone(), owned(2, "beta")),
        RegistryAnswer::Unreachable,
        "a third host gives what is not its own"
    );
    assert_eq!(beta.compare_and_set(&web(), expected, owned(2, "beta")), record_of(2, "beta"));
    assert_eq!(alpha.read(&web()), record_of(2, "beta"));
    let connected: Vec<_> = connections.lock().unwrap().iter().map(|host| host.as_str().to_owned()).collect();
    assert_eq!(connected, ["alpha", "other", "beta"], "connections are kept");
}

#[test]
fn an_unsent_request_is_distinguished_from_an_unanswered_one() {
    // No server: certainly not carried out.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable_peer = Peer { host: host("witness"), address: closed.to_string() };
    assert_eq!(client("alpha", &unreachable_peer).read(&web()), RegistryAnswer::Unreachable);

    // Carried out, and the answer is lost.
    let folder = tempfile::tempdir().unwrap();
    let registry = Arc::new(SqliteRegistry::open(folder.path()).unwrap());
    let behind = Arc::clone(&registry);
    let (_serving, peer) = witness(move |arrival| {
        let mut connection = arrival.accept().unwrap();
        if let Ok(Incoming::Message(Message::RegistryRequest(request))) = connection.recv(None) {
            behind.apply(&request).unwrap();
        }
    });
    assert_eq!(client("alpha", &peer).ask(&enrol(web(), Epoch(1), host("alpha"))), RegistryAnswer::Unknown);
    assert_eq!(registry.read(&web()), record_of(1, "alpha"), "it had been carried out");

    // Received, not carried out, no answer: the client cannot distinguish this from the case before.
    let (_serving, peer) = witness(|arrival| drop(arrival.accept().unwrap().recv(None)));
    assert_eq!(client("beta", &peer).read(&web()), RegistryAnswer::Unknown);
}

#[test]
fn an_answer_that_comes_too_late_is_not_taken_for_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Arc::new(SqliteRegistry::open(folder.path()).unwrap());
    registry.ask(&enrol(web(), Epoch(1), host("alpha")));
    let server = WitnessServer::new(Arc::clone(&registry));
    let first = Mutex::new(true);
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Mutex::new(held);
    let (_serving, peer) = witness(move |arrival| {
        if !std::mem::take(&mut *first.lock().unwrap()) {
            return server.serve(arrival);
        }
        let mut connection = arrival.accept().unwrap();
        let _ = connection.recv(None);
        // Answers the first request only when the client has given it up.
        let _ = held.lock().unwrap().recv();
        let _ = connection.send(&Message::RegistryReply(RegistryReply::Set));
    });
    let hasty = WitnessClient::new(endpoint("beta"), peer.clone(), LONG, Duration::from_millis(50));
    let take = |epoch| hasty.compare_and_set(&web(), Some((Epoch(epoch), host("alpha"))), owned(9, "beta"));
    assert_eq!(take(1), RegistryAnswer::Unknown);
    release.send(()).unwrap();
    let patient = client("beta", &peer);
    assert_eq!(patient.read(&web()), record_of(1, "alpha"));
    let answer = take(7);
    assert!(matches!(answer, RegistryAnswer::Unknown) || answer == record_of(1, "alpha"), "{answer:?}");
}

#[test]
fn a_witness_that_came_back_is_reached_again() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Arc::new(SqliteRegistry::open(folder.path()).unwrap());
    // Each connection serves one request and ends, like a witness that is restarted all the time.
    let asked = Arc::new(Mutex::new(BTreeSet::new()));
    let (behind, seen) = (Arc::clone(&registry), Arc::clone(&asked));
    let (_serving, peer) = witness(move |arrival| {
        let mut connection = arrival.accept().unwrap();
        if let Ok(Incoming::Message(Message::RegistryRequest(request))) = connection.recv(None) {
            seen.lock().unwrap().insert(format!("{request:?}"));
            let _ = connection.send(&Message::RegistryReply(behind.apply(&request).unwrap()));
        }
    });
    let alpha = client("alpha", &peer);
    assert_eq!(alpha.ask(&enrol(web(), Epoch(1), host("alpha"))), record_of(1, "alpha"));
    // Requests on the dead connection may fail, but soon an answer arrives.
    let deadline = Instant::now() + LONG;
    while alpha.read(&web()) != record_of(1, "alpha") {
        assert!(Instant::now() < deadline, "the registry is never reached again");
    }
}

#[test]
fn other_purposes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = WitnessServer::new(Arc::new(SqliteRegistry::open(folder.path()).unwrap()));
    let (_serving, peer) = witness(move |arrival| server.serve(arrival));
    let purpose = Purpose::Handover { migration: proto::MigrationId { vm: web(), epoch: Epoch(1) } };
    let error = endpoint("alpha").connect(&peer, purpose, Instant::now() + LONG).unwrap_err();
    assert!(api::with_causes(&error).contains("witness"), "{error}");
}
