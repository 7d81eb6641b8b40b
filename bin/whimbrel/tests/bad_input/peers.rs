//! Peers that cannot be trusted.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::thread;

use crate::common::{Cluster, Guest, Setup};
use crate::noise::noise;
use crate::stranger::{Stranger, configure, tls};
use crate::watched::{WatchedGuest, assert_nothing_left, bare};
use crate::{assert_fails, eventually};

/// Answers every connection in a way that no agent does, for as long as the test runs.
pub(crate) fn impostor(host: &lab::Host, port: u16, answer: &'static [u8]) -> SocketAddr {
    let address = SocketAddr::from((host.address(), port));
    let listener = host.within(|| TcpListener::bind(address)).unwrap().unwrap();
    thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.write_all(answer);
            // Open for ever: the end of the connection must not be the signal.
            kept.push(stream);
        }
    });
    address
}

#[test]
fn peers_that_cannot_be_trusted() {
    let mut cluster = Cluster::with(&Setup::impatient());
    let (host_a, host_b) = (cluster.lab.a.clone(), cluster.lab.b.clone());
    let pki = |name: &str| lab::Pki::new(&cluster.lab.shared_directory().unwrap().join(name)).unwrap();
    let foreign = pki("foreign").issue("foreign", &[host_b.address().into()]).unwrap();
    let intruder = pki("intruder").issue("intruder", &[host_a.address().into()]).unwrap();
    let to_b = format!("[hosts.b]\naddress = \"{}:7740\"", host_b.address());
    let plain = "[tls]\nplain = true";
    let _foreign = Stranger::start(&host_b, "foreign", 7741, &tls(&foreign), "");
    let _open = Stranger::start(&host_b, "open", 7742, plain, "");
    impostor(&host_b, 7743, b"HTTP/1.1 400 Bad Request\r\n\r\n");
    impostor(&host_b, 7744, b"");
    let peers = [
        ("foreign", 7741),
        ("open", 7742),
        ("web", 7743),
        ("mute", 7744),
        ("nobody", 7749),
        // The second host under a wrong name.
        ("other", 7740),
    ];
    configure(&mut cluster.a, |text| {
        let hosts =
            peers.map(|(name, port)| format!("[hosts.{name}]\naddress = \"{}:{port}\"\n", host_b.address()));
        text + &hosts.concat()
    });
    let mut vm = WatchedGuest::new(&cluster, "vm1");
    let words: [&[&str]; 6] = [
        &["foreign", "certificate", "not signed by the authority"],
        &["open", "does not use TLS", "configure both for plain"],
        &["web", "not a Whimbrel agent", "check address and port"],
        &["mute", "did not finish the handshake in time"],
        &["cannot reach nobody", "is the agent running there"],
        &["certificate is for", "correct the host's name"],
    ];
    for ((to, _), words) in peers.iter().zip(words) {
        let check = cluster.a.cli(&["migrate", "vm1", "--to", to, "--check"]);
        assert_fails(&check, 1, words);
        assert_eq!(check.json()["kind"], "unavailable", "{check:?}");
        let failed = cluster.a.cli(&["migrate", "vm1", "--to", to]);
        assert_fails(&failed, 1, words);
        assert_eq!(failed.last_json()["outcome"], "aborted", "{failed:?}");
        vm.assert_unharmed(&cluster, to);
    }

    // And in the other direction: strangers that try to migrate a VM of theirs to this host.
    let theirs = Guest::start(&host_a, &cluster.environment, &bare("theirs")).unwrap();
    let pid = theirs.pid().to_string();
    let intruder = Stranger::start(&host_a, "intruder", 7741, &tls(&intruder), &to_b);
    let naked = Stranger::start(&host_a, "naked", 7742, plain, &to_b);
    let words: [&[&str]; 2] = [&["certificate", "not signed"], &["requires TLS", "certificates"]];
    for (stranger, words) in [&intruder, &naked].into_iter().zip(words) {
        stranger.cli(&["vm", "adopt", "--pid", &pid]).ok();
        assert_fails(&stranger.cli(&["migrate", "theirs", "--to", "b"]), 1, words);
        assert_eq!(stranger.cli(&["vm", "list"]).ok().json()[0]["state"], "running");
        assert_nothing_left(&cluster, "a stranger's migration");
    }
    let log = cluster.b.log();
    assert!(log.contains("a connection was refused") && log.contains("does not use TLS"), "{log}");

    // No certificate at all, by a client with a correct TLS implementation.
    let address = format!("{}:7740", host_b.address());
    let tool = host_a
        .command("openssl")
        .args(["s_client", "-connect", &address, "-tls1_3"])
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    if tool.status.code() == Some(127) {
        lab::not_tried("a client without certificate: no openssl");
    } else {
        eventually("a client without a certificate", || {
            let log = cluster.b.log();
            if log.contains("sent no certificate") { Ok(()) } else { Err(log) }
        });
    }
    noise(&host_a, SocketAddr::from((host_b.address(), 7740)));
    vm.assert_unharmed(&cluster, "strangers");
    vm.assert_counts();
    vm.migrate_whole(&cluster);
}

/// Each of two hosts wins at a witness of its own: both would run the VM.
#[test]
fn two_hosts_that_ask_different_registries() {
    let mut cluster = Cluster::with(&Setup { witness: true, ..Setup::impatient() });
    let address = cluster.lab.witness.address();
    configure(&mut cluster.b, |text| {
        let other = format!("[hosts.v]\naddress = \"{address}:7741\"\n[registry]\nhost = \"v\"");
        assert!(text.contains("[registry]\nhost = \"w\""), "{text}");
        text.replace("[registry]\nhost = \"w\"", &other)
    });
    let vm = WatchedGuest::new(&cluster, "vm1");
    let words = ["the source uses the ownership registry at w, this host the one at v", "the same witness"];
    assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]), 1, &words);
    assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", "b"]), 1, &words[..1]);
    vm.assert_unharmed(&cluster, "another registry");
}
