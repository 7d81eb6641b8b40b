//! Refused connections, and the errors that both sides report.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use common::{
    Authority, PATIENCE, Server, both_endpoints, connected, control, error_chain, host, plain, soon,
};
use proto::Versions;
use proto::frame::{FrameKind, Header};
use whimbrel_link::{
    ConnectError, Connection, Endpoint, HandshakeError, Identity, LinkError, Listener, Peer, Security,
    Settings, TlsFiles,
};

fn handshake(result: Result<Connection, ConnectError>) -> HandshakeError {
    match result {
        Err(ConnectError::Handshake { source, .. }) => source,
        other => panic!("no refusal in the handshake: {other:?}"),
    }
}

/// Connects `client` to `server`, expects both to fail, and returns why: the client's reason and the server's.
fn refused(client: &Endpoint, server: Endpoint) -> (HandshakeError, HandshakeError) {
    let server = Server::new(server);
    let on_client = handshake(client.connect(&server.peer(), control(), soon()));
    let on_server = server.arrival().expect_err("let in").source;
    (on_client, on_server)
}

/// Checks that both texts contain the words, and that neither repeats its source.
fn assert_messages(case: &str, (client, server): &(HandshakeError, HandshakeError), words: [&[&str]; 2]) {
    for (side, error, words) in [("client", client, words[0]), ("server", server, words[1])] {
        let text = error_chain(error);
        for word in words {
            assert!(text.contains(word), "{case}, {side}: {word:?} is missing in {text:?}");
        }
    }
}

#[test]
fn a_plain_client_at_a_tls_server() {
    let errors = refused(&plain("host-a"), Authority::default().endpoint("host-b"));
    assert!(matches!(errors, (HandshakeError::Refused { .. }, HandshakeError::PeerIsPlain)), "{errors:?}");
    assert_messages(
        "plain at TLS",
        &errors,
        [&["requires TLS", "certificates"], &["does not use TLS", "certificates"]],
    );
}

#[test]
fn a_tls_client_at_a_plain_server() {
    let errors = refused(&Authority::default().endpoint("host-a"), plain("host-b"));
    assert!(matches!(errors, (HandshakeError::PeerIsPlain, HandshakeError::PeerIsTls)), "{errors:?}");
    assert_messages(
        "TLS at plain",
        &errors,
        [&["does not use TLS", "certificates"], &["uses TLS", "certificates"]],
    );
}

#[test]
fn a_foreign_authority() {
    // An authority with another name, and one that was made anew with the same name.
    for name in ["another authority", "authority"] {
        let (ours, foreign) = (Authority::named("authority"), Authority::named(name));
        let errors = refused(&foreign.endpoint("host-a"), ours.endpoint("host-b"));
        // The client checks first, so that it is the one to refuse; the server learns of the refusal from the alert.
        assert!(
            matches!(errors, (HandshakeError::PeerCertificate(_), HandshakeError::OwnCertificate(_))),
            "{errors:?}"
        );
        assert_messages(name, &errors, [&["not signed by the authority"], &["not signed by the authority"]]);
    }
}

/// A client that trusts the server, with a certificate that the server does not trust.
fn mixed(trusted: &Authority, other: &Authority, at: &std::path::Path) -> Endpoint {
    let foreign = other.files(at, &["host-a"], |_| ());
    let files = TlsFiles { ca: trusted.files(at, &["host-a"], |_| ()).ca, ..foreign };
    Endpoint::new(host("host-a"), Security::Tls(Identity::load(&files).unwrap()))
}

#[test]
fn a_client_of_a_foreign_authority_at_a_server_that_it_trusts() {
    let (ours, foreign) = (Authority::default(), Authority::default());
    let at = tempfile::tempdir().unwrap();
    let errors = refused(&mixed(&ours, &foreign, at.path()), ours.endpoint("host-b"));
    assert!(
        matches!(errors, (HandshakeError::OwnCertificate(_), HandshakeError::PeerCertificate(_))),
        "{errors:?}"
    );
    assert_messages(
        "foreign client",
        &errors,
        [&["does not accept this agent's certificate"], &["not signed"]],
    );
}

#[test]
fn expired_certificates() {
    let authority = Authority::default();
    let expired = |name: &str| {
        let identity = authority.spoilt_identity(&[name], |params| {
            params.not_before = rcgen::date_time_ymd(2001, 1, 1);
            params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        });
        Endpoint::new(host(name), Security::Tls(identity))
    };
    let errors = refused(&expired("host-a"), authority.endpoint("host-b"));
    assert_messages("client's", &errors, [&["certificate", "has expired"], &["certificate", "has expired"]]);
    let errors = refused(&authority.endpoint("host-a"), expired("host-b"));
    assert_messages("server's", &errors, [&["certificate", "has expired"], &["certificate", "has expired"]]);
}

#[test]
fn wrong_names_are_named() {
    let authority = Authority::default();
    let called = |name: &str, certified: &str| {
        Endpoint::new(host(name), Security::Tls(authority.identity(&[certified])))
    };
    let errors = refused(&called("host-a", "host-x"), authority.endpoint("host-b"));
    assert!(
        matches!(errors, (HandshakeError::Refused { .. }, HandshakeError::WrongName { .. })),
        "{errors:?}"
    );
    assert_messages("client's", &errors, [&["'host-a'", "'host-x'"], &["'host-a'", "'host-x'"]]);

    let errors = refused(&authority.endpoint("host-a"), called("host-b", "host-x"));
    assert!(
        matches!(errors, (HandshakeError::WrongName { .. }, HandshakeError::OwnCertificate(_))),
        "{errors:?}"
    );
    assert_messages("server's", &errors, [&["'host-b'", "'host-x'"], &["names"]]);
}

#[test]
fn one_of_several_names_is_enough() {
    let authority = Authority::default();
    let many = Endpoint::new(host("host-a"), Security::Tls(authority.identity(&["host-x", "host-a"])));
    let (_a, b) = connected(&many, authority.endpoint("host-b"));
    assert_eq!(b.peer(), &host("host-a"));
}

#[test]
fn another_host_at_the_address() {
    // With TLS this is a wrong name; without, the greeting shows it.
    let server = Server::new(plain("host-c"));
    let peer = Peer { host: host("host-b"), ..server.peer() };
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| plain("host-a").connect(&peer, control(), soon()));
        let _connection = server.accept();
        let error = handshake(connecting.join().unwrap());
        assert!(matches!(error, HandshakeError::WrongHost { .. }), "{error:?}");
        assert!(
            error_chain(&error).contains("'host-c'") && error_chain(&error).contains("'host-b'"),
            "{error}"
        );
    });
}

#[test]
fn a_client_without_a_certificate() {
    let authority = Authority::default();
    let at = tempfile::tempdir().unwrap();
    let files = authority.files(at.path(), &["host-a"], |_| ());
    let server = Server::new(authority.endpoint("host-b"));

    let mut roots = rustls::RootCertStore::empty();
    let pem = std::fs::read(&files.ca).unwrap();
    let ca =
        <rustls::pki_types::CertificateDer<'_> as rustls::pki_types::pem::PemObject>::from_pem_slice(&pem);
    roots.add(ca.unwrap()).unwrap();
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let config = rustls::ClientConfig::builder_with_provider(provider.into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let session = rustls::ClientConnection::new(config.into(), "host-b".try_into().unwrap()).unwrap();
    let mut stream = rustls::StreamOwned::new(session, TcpStream::connect(server.serving.address()).unwrap());
    // With so much unread, closing the socket at once would wipe out the alert on its way.
    stream.write_all(&vec![0; 2 << 20]).unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert!(error.to_string().contains("CertificateRequired"), "{error}");

    let error = server.arrival().unwrap_err();
    assert!(matches!(error.source, HandshakeError::NoCertificate), "{error:?}");
    assert!(error_chain(&error).contains("sent no certificate"), "{}", error_chain(&error));
}

/// Two programs of which one speaks older versions than the other.
#[test]
fn versions_are_agreed_on_or_refused_in_both_directions() {
    let speaking = |name: &str, oldest, newest| plain(name).with_versions(Versions { oldest, newest });
    let cases = [
        // client, server, agreed
        ((1, 1), (1, 1), Some(1)),
        ((1, 1), (1, 3), Some(1)),
        ((1, 3), (1, 1), Some(1)),
        ((2, 5), (3, 9), Some(5)),
        ((1, 1), (2, 3), None),
        ((2, 3), (1, 1), None),
    ];
    for ((a, b), (c, d), agreed) in cases {
        let (client, server) = (speaking("host-a", a, b), speaking("host-b", c, d));
        if let Some(version) = agreed {
            let (client, server) = connected(&client, server);
            assert_eq!((client.version(), server.version()), (version, version));
        } else {
            let errors = refused(&client, server);
            assert!(
                matches!(errors, (HandshakeError::Refused { .. }, HandshakeError::Version { .. })),
                "{errors:?}"
            );
            let (client, server) = (
                Versions { oldest: a, newest: b }.to_string(),
                Versions { oldest: c, newest: d }.to_string(),
            );
            let words: &[&str] = &[&client, &server, "install"];
            assert_messages("version", &errors, [words, words]);
        }
    }
}

/// A server that answers any input with these bytes.
fn answering(bytes: Vec<u8>) -> Peer {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // Until the client has read it and closes the connection.
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap_or(0);
    });
    Peer { host: host("host-b"), address }
}

fn greeting(json: &str) -> Vec<u8> {
    let mut frame = Header::new(FrameKind::Message, json.len()).unwrap().encode().to_vec();
    frame.extend_from_slice(json.as_bytes());
    frame
}

#[test]
fn servers_that_are_no_agents_or_no_good_ones() {
    let tls = Authority::default().endpoint("host-a");
    let http = b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec();
    for client in [&tls, &plain("host-a")] {
        let error = handshake(client.connect(&answering(http.clone()), control(), soon()));
        assert!(matches!(error, HandshakeError::NotAnAgent(b'H')), "{error:?}");
    }
    let connect = |answer: Vec<u8>| handshake(plain("host-a").connect(&answering(answer), control(), soon()));

    let error = connect(greeting(r#"{"answer":"accepted","version":9,"host":"host-b"}"#));
    assert!(
        matches!(error, HandshakeError::Version { .. }) && error_chain(&error).contains("version 9"),
        "{error:?}"
    );
    let error = connect(greeting(r#"{"answer":"perhaps"}"#));
    assert!(matches!(error, HandshakeError::Greeting(_)), "{error:?}");
    let error = connect(greeting("not json"));
    assert!(matches!(error, HandshakeError::Greeting(_)), "{error:?}");
    let error = connect(greeting("[]")[..9].to_vec());
    assert!(matches!(error, HandshakeError::Link(LinkError::Truncated)), "{error:?}");
    let error = connect(Vec::new());
    assert!(matches!(error, HandshakeError::Link(LinkError::Ended)), "{error:?}");
    let error = connect(vec![1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    assert!(matches!(error, HandshakeError::Link(LinkError::Header(_))), "{error:?}");
    let long = Header::new(FrameKind::Message, proto::limits::GREETING_BYTES + 1).unwrap().encode();
    let error = connect(long.to_vec());
    assert!(matches!(error, HandshakeError::Link(LinkError::TooMuch { .. })), "{error:?}");
    let ack = Header::new(FrameKind::Ack, 0).unwrap().encode();
    let error = connect(ack.to_vec());
    assert!(matches!(error, HandshakeError::Link(LinkError::NotExpected(FrameKind::Ack))), "{error:?}");
}

/// A closing notice in the middle of the negotiation, with unwanted bytes behind it.
#[test]
fn a_closing_notice_in_the_handshake_is_an_error() {
    let notice = [21, 3, 3, 0, 2, 1, 0];
    let connect = |more: &[u8]| {
        let peer = answering([&notice, more].concat());
        handshake(Authority::default().endpoint("host-a").connect(&peer, control(), soon()))
    };
    let error = connect(&[]);
    assert!(matches!(error, HandshakeError::Link(LinkError::Truncated)), "{error:?}");
    let error = connect(&[1; 10_000]);
    assert!(matches!(error, HandshakeError::Tls(_)), "{error:?}");
}

#[test]
fn clients_that_are_no_agents() {
    for endpoint in [Authority::default().endpoint("host-b"), plain("host-b")] {
        let server = Server::new(endpoint);
        let say = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(server.serving.address()).unwrap();
            stream.write_all(bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            server.arrival().unwrap_err().source
        };
        let error = say(b"GET / HTTP/1.1\r\n\r\n");
        assert!(matches!(error, HandshakeError::NotAnAgent(b'G')), "{error:?}");
        let error = say(b"");
        assert!(matches!(error, HandshakeError::Link(LinkError::Ended)), "{error:?}");
        let error = say(&[22, 3, 1, 0, 5, 9, 9, 9, 9, 9]);
        assert!(matches!(error, HandshakeError::Tls(_) | HandshakeError::PeerIsTls), "{error:?}");
    }
}

#[test]
fn a_peer_that_hangs_in_the_handshake() {
    // Long enough for the client that does not hang.
    let settings = Settings { handshake: Duration::from_secs(2), handshakes: 1, ..Settings::default() };
    for ((client, server), beginning) in both_endpoints().into_iter().zip([[22, 3, 1], [1, 0, 0]]) {
        let server = Server::new(server.with_settings(settings));
        // The only slot is taken by a client that sends nothing, then by one that stops in the middle.
        let silent = TcpStream::connect(server.serving.address()).unwrap();
        let mut halting = TcpStream::connect(server.serving.address()).unwrap();
        halting.write_all(&beginning).unwrap();
        for _ in 0..2 {
            let error = server.arrival().unwrap_err().source;
            assert!(matches!(error, HandshakeError::TimedOut), "{error:?}");
        }
        // Then the next client gets the slot.
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| client.connect(&server.peer(), control(), soon()));
            drop(server.accept());
            connecting.join().unwrap().unwrap();
        });
        drop((silent, halting));
    }

    // The same on the connecting side.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = Peer { host: host("host-b"), address: silent.local_addr().unwrap().to_string() };
    for client in [Authority::default().endpoint("host-a"), plain("host-a")] {
        let deadline = std::time::Instant::now() + Duration::from_millis(200);
        let error = handshake(client.connect(&peer, control(), deadline));
        assert!(matches!(error, HandshakeError::TimedOut), "{error:?}");
    }
}

/// Handshakes are limited in number: the next client gets no answer until one of them has ended.
#[test]
fn handshakes_beyond_the_limit_wait() {
    let settings = Settings { handshake: PATIENCE, handshakes: 1, ..Settings::default() };
    let server = Server::new(plain("host-b").with_settings(settings));
    let silent = TcpStream::connect(server.serving.address()).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_millis(300);
    let error = handshake(plain("host-a").connect(&server.peer(), control(), deadline));
    assert!(matches!(error, HandshakeError::TimedOut), "{error:?}");
    assert!(server.has_no_arrival());
    drop(silent);
    // The silent client, and the one that did not wait: its greeting is still there, but no one reads the answer.
    let both =
        [server.arrival(), server.arrival()].map(|arrival| arrival.map_err(|rejected| rejected.source));
    assert!(
        both.iter().any(|arrival| matches!(arrival, Err(HandshakeError::Link(LinkError::Ended)))),
        "{both:?}"
    );
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| plain("host-a").connect(&server.peer(), control(), soon()));
        let _connection = server.accept();
        connecting.join().unwrap().unwrap();
    });
}

#[test]
fn an_agent_can_refuse_with_a_reason() {
    for (client, server) in both_endpoints() {
        let server = Server::new(server);
        let peer = server.peer();
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| client.connect(&peer, control(), soon()));
            let arrival = server.arrival().unwrap();
            assert_eq!((arrival.host(), arrival.purpose()), (&host("host-a"), &control()));
            arrival.refuse("the VM is already in migration");
            let error = handshake(connecting.join().unwrap());
            assert!(
                matches!(&error, HandshakeError::Refused { reason } if reason == "the VM is already in migration"),
                "{error:?}"
            );
        });
    }
}

#[test]
fn addresses_that_lead_nowhere() {
    let unused_address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let connect = |address: &str| {
        let peer = Peer { host: host("host-b"), address: address.to_owned() };
        plain("host-a").connect(&peer, control(), soon()).unwrap_err()
    };
    let error = connect(&unused_address.to_string());
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error:?}");
    assert!(
        error_chain(&error).contains("host-b") && error_chain(&error).contains(&unused_address.to_string()),
        "{}",
        error_chain(&error)
    );
    for address in ["no port", "127.0.0.1", "127.0.0.1:http:1", ""] {
        let error = connect(address);
        assert!(matches!(error, ConnectError::Resolve { .. }), "{address:?}: {error:?}");
        let error = Listener::bind(plain("host-b"), address).unwrap_err();
        assert!(error_chain(&error).contains(&format!("{address:?}")), "{}", error_chain(&error));
    }
}

#[test]
fn an_address_that_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = Listener::bind(plain("host-b"), &address).unwrap_err();
    assert!(
        error_chain(&error).contains(&address) && error_chain(&error).contains("another agent"),
        "{}",
        error_chain(&error)
    );
}

#[test]
fn a_listener_stops_while_somebody_hangs_in_its_only_place() {
    let settings = Settings { handshake: PATIENCE, handshakes: 1, ..Settings::default() };
    let server = Server::new(plain("host-b").with_settings(settings));
    let silent = TcpStream::connect(server.serving.address()).unwrap();
    let address = server.serving.address();
    server.serving.stop();
    drop(silent);
    // The port is free again as soon as the last thread has released it.
    while TcpListener::bind(address).is_err() {
        std::thread::yield_now();
    }
}
