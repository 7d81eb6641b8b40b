//! Noise at the port: data that no agent sends.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use serde_json::{Value, json};

use crate::assert_fails;
use crate::common::{Cluster, DEADLINE, Setup};
use crate::peers::impostor;
use crate::stranger::configure;
use crate::watched::{WatchedGuest, assert_nothing_left};

/// Sends data that no agent sends, complete and truncated. The agent may hang up at any moment, but must not answer.
pub(crate) fn noise(from: &lab::Host, to: SocketAddr) {
    let mut random = vec![0_u8; 64 << 10];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for byte in &mut random {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state as u8;
    }
    let oversized = [&[0x16, 3, 1, 0xff, 0xff][..], &random].concat();
    let truncated = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    for bytes in [&random[..], &oversized, &truncated, b"GET / HTTP/1.1\r\n\r\n", b"", &[0; 4096]] {
        let mut stream = from.within(|| TcpStream::connect(to)).unwrap().unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        read_until_hangup(stream);
    }
}

/// Waits for the agent to hang up, and returns the bytes that it sent before.
fn read_until_hangup(mut stream: TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it does not hang up"),
    }
    answer
}

/// Returns a frame of the protocol, with any claimed length.
fn frame(kind: u8, claimed: usize, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend((claimed as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn message(value: &Value) -> Vec<u8> {
    let text = value.to_string();
    frame(1, text.len(), text.as_bytes())
}

fn hello(version: u16, purpose: Value) -> Vec<u8> {
    message(&json!({ "oldest": version, "newest": version, "host": "stranger", "purpose": purpose }))
}

/// Returns the first frame of the answer.
#[track_caller]
fn answer(stream: &mut TcpStream, to: &str) -> Value {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut header = [0; 8];
    stream.read_exact(&mut header).unwrap_or_else(|error| panic!("no answer to {to}: {error}"));
    let mut payload = vec![0; u32::from_le_bytes(header[4..].try_into().unwrap()) as usize];
    stream.read_exact(&mut payload).unwrap();
    serde_json::from_slice(&payload).unwrap()
}

#[test]
#[expect(clippy::too_many_lines, reason = "one cluster for all kinds of noise")]
fn noise_at_the_port_of_an_agent_without_tls() {
    let mut cluster = Cluster::with(&Setup { plain: true, ..Setup::impatient() });
    let (host_a, host_b) = (cluster.lab.a.clone(), cluster.lab.b.clone());
    let address = SocketAddr::from((host_b.address(), 7740));
    let connect = |first: &[u8]| {
        let mut stream = host_a.within(|| TcpStream::connect(address)).unwrap().unwrap();
        stream.write_all(first).unwrap();
        stream
    };
    let migration = json!({ "vm": "ghost", "epoch": 1 });
    let control = json!({ "for": "control", "migration": migration, "generation": 1 });

    // Peers that send nothing, before and after the greeting, all the time.
    let _mute = [connect(b""), connect(&hello(1, control.clone())), connect(&frame(1, 100, b"{"))];
    noise(&host_a, address);

    // Other versions, other purposes: a refusal with its reason.
    let elsewhere = json!({ "vm": "../../etc", "epoch": 1 });
    let refusals = [
        (hello(9, control.clone()), "install releases"),
        (hello(0, control.clone()), "install releases"),
        (hello(1, json!({ "for": "registry" })), "not a witness"),
        (
            hello(1, json!({ "for": "data", "migration": migration, "generation": 1, "stream": 0 })),
            "no data stream",
        ),
        (
            hello(1, json!({ "for": "control", "migration": migration, "generation": 7 })),
            "no longer under way",
        ),
    ];
    for (bytes, reason) in refusals {
        let answer = answer(&mut connect(&bytes), reason);
        assert_eq!(answer["answer"], "refused", "{answer}");
        assert!(answer["reason"].as_str().unwrap().contains(reason), "{reason:?} is missing: {answer}");
    }
    // Invalid greetings: the agent hangs up, with any claimed length.
    for bytes in [
        frame(1, 1 << 20, b"{"),
        frame(1, u32::MAX as usize, b"{"),
        frame(9, 2, b"{}"),
        frame(3, 2, b"{}"),
        frame(1, 2, b"{}"),
        hello(1, json!({ "for": "control", "migration": elsewhere, "generation": 1 })),
        vec![1, 0xff, 0, 0, 2, 0, 0, 0, b'{', b'}'],
    ] {
        let received = read_until_hangup(connect(&bytes));
        assert!(!String::from_utf8_lossy(&received).contains("accepted"), "{received:?}");
    }
    // Truncated in the middle.
    let whole = hello(1, control.clone());
    for length in [1, 7, 8, 9, whole.len() - 1] {
        let stream = connect(&whole[..length]);
        stream.shutdown(Shutdown::Write).unwrap();
        read_until_hangup(stream);
    }
    // A valid greeting, followed by invalid data.
    let rubbish = json!({ "type": "propose", "reply_to": "x:1", "streams": 4, "ram": [{ "name": "pc.ram", "bytes": 2097152, "page_bytes": 4096 }], "facts": {}, "description": {}, "check_only": false });
    let endless = json!({ "type": "propose", "reply_to": "x:1", "streams": 65, "ram": [{ "name": "pc.ram", "bytes": u64::MAX, "page_bytes": 4096 }], "facts": {}, "description": {}, "check_only": false });
    for (bytes, word) in [
        (frame(1, (4 << 20) + 1, b"{"), None),
        (frame(2, 4, b"blob"), None),
        (frame(3, 1 << 30, b""), None),
        (message(&json!({ "type": "fly" })), None),
        (message(&json!({ "type": "go", "epoch": 1 })), None),
        (frame(1, 4, b"\xff\xff\xff\xff"), None),
        (message(&rubbish), Some("reject")),
        (message(&endless), None),
    ] {
        let mut stream = connect(&hello(1, control.clone()));
        assert_eq!(answer(&mut stream, "a greeting")["answer"], "accepted");
        let _ = stream.write_all(&bytes);
        if let Some(word) = word {
            let reply = answer(&mut stream, word);
            assert_eq!(reply["type"], word, "{reply}");
            assert!(!reply["findings"][0]["advice"].as_str().unwrap().is_empty(), "{reply}");
        }
        let received = read_until_hangup(stream);
        assert!(!String::from_utf8_lossy(&received).contains("accept"), "{received:?}");
    }
    assert_nothing_left(&cluster, "noise");
    assert_eq!(cluster.b.cli(&["migrations"]).ok().json(), json!([]), "no migration is remembered");
    assert!(!cluster.b.log().contains("panicked"), "{}", cluster.b.log());

    // Roles reversed: an agent of another version, and one that accepts and sends invalid data.
    let newer = message(&json!({ "answer": "accepted", "version": 9, "host": "newer" }));
    let babble =
        [message(&json!({ "answer": "accepted", "version": 1, "host": "babble" })), frame(1, 1 << 30, b"{")]
            .concat();
    let wide = message(&json!({ "answer": "accepted", "version": 1, "host": "b" }));
    let peers: [(&str, u16, Vec<u8>, &[&str]); 3] = [
        ("newer", 7745, newer, &["newer", "install releases"]),
        ("babble", 7746, babble, &["babble", "protocol"]),
        ("wrong", 7747, wide, &["correct the address or the name"]),
    ];
    configure(&mut cluster.a, |text| {
        let hosts = peers
            .clone()
            .map(|(name, port, ..)| format!("[hosts.{name}]\naddress = \"{}:{port}\"\n", host_b.address()));
        text + &hosts.concat()
    });
    let vm = WatchedGuest::new(&cluster, "vm1");
    for (name, port, bytes, words) in peers {
        impostor(&host_b, port, bytes.leak());
        assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", name, "--check"]), 1, words);
        assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", name]), 1, words);
        vm.assert_unharmed(&cluster, name);
    }
    vm.migrate_whole(&cluster);
}
