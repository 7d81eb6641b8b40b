//! The laboratory's networks: reachability, cuts that swallow packets, an emulator that keeps its settings, and a
//! complete cleanup. Needs root.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use whimbrel_lab as lab;

use lab::{Direction, Host, Lab, LabConfig, Link, Settings, run};

/// Opens a UDP socket in a host. A read fails after a time that is longer than any packet needs.
fn socket(host: &Host, address: Ipv4Addr) -> UdpSocket {
    let socket = host.within(|| UdpSocket::bind((address, 9000))).unwrap().unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket
}

/// Sends a datagram and waits for it: the next one that arrives has to be this one.
fn passes(from: &UdpSocket, to: &UdpSocket) -> bool {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Relaxed).to_be_bytes();
    from.send_to(&number, to.local_addr().unwrap()).unwrap();
    let mut buffer = [0; 16];
    loop {
        match to.recv_from(&mut buffer) {
            Ok((n, _)) if buffer[..n] == number => return true,
            // An end marker of `numbers` that was sent again because the first was late.
            Ok((4, _)) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            other => {
                println!("expected {number:?}, got {other:?} {buffer:?}");
                return false;
            }
        }
    }
}

#[test]
fn hosts_witness_and_client_reach_each_other() {
    let lab = Lab::up(&LabConfig::for_test()).unwrap();
    let (a, b) = (socket(&lab.a, lab.a.address()), socket(&lab.b, lab.b.address()));
    assert!(passes(&a, &b) && passes(&b, &a));

    let witness = socket(&lab.witness, lab.witness.address());
    for host in [&lab.a, &lab.b] {
        let host = socket(host, host.control_address().unwrap());
        assert!(passes(&host, &witness) && passes(&witness, &host));
    }

    // A VM's address: on the bridge of a host. It is one hop further than the router.
    lab.a.run(&["ip", "addr", "add", "10.92.0.7/24", "dev", lab::lab::VM_BRIDGE]).unwrap();
    lab.a.run(&["ip", "route", "add", "default", "via", "10.92.0.254"]).unwrap();
    let vm = socket(&lab.a, lab::vm_address(7));
    let client = socket(&lab.client, lab.client.address());
    assert!(passes(&client, &vm) && passes(&vm, &client));
}

#[test]
fn a_cut_is_silent_one_way_and_heals() {
    let lab = Lab::up(&LabConfig::for_test()).unwrap();
    let (a, b) = (socket(&lab.a, lab.a.address()), socket(&lab.b, lab.b.address()));
    assert!(passes(&a, &b), "and now both know each other's hardware address");
    assert!(passes(&b, &a));

    lab.cut(Direction::AToB).unwrap();
    // The sender receives no error.
    for _ in 0..5 {
        a.send_to(b"is lost", b.local_addr().unwrap()).unwrap();
    }
    // The next datagram arrives, which proves that the earlier ones are gone: the other direction still passes.
    assert!(passes(&b, &a));
    // Address resolution may have lost a packet too.
    assert!(lab.packets_cut(Direction::AToB).unwrap() >= 5);
    assert!(lab.packets_cut(Direction::BToA).is_err(), "not cut");

    lab.cut_both().unwrap();
    b.send_to(b"is lost", a.local_addr().unwrap()).unwrap();
    assert!(lab.packets_cut(Direction::BToA).unwrap() >= 1);

    lab.heal().unwrap();
    lab.heal().unwrap();
    assert!(passes(&a, &b) && passes(&b, &a), "nothing of what was lost arrives late");
}

#[test]
fn a_host_can_be_cut_off_from_the_witness() {
    let lab = Lab::up(&LabConfig::for_test()).unwrap();
    let witness = socket(&lab.witness, lab.witness.address());
    let (a, b) = [&lab.a, &lab.b].map(|host| socket(host, host.control_address().unwrap())).into();
    assert!(passes(&a, &witness) && passes(&b, &witness));
    lab.cut_witness(&lab.a).unwrap();
    a.send_to(b"is lost", witness.local_addr().unwrap()).unwrap();
    assert!(passes(&b, &witness), "the other host still reaches it, and the lost one did not arrive before");
    lab.heal().unwrap();
    assert!(passes(&a, &witness));
}

#[test]
fn the_rate_of_a_limited_link_is_what_was_asked() {
    let lab = Lab::up(&LabConfig::for_test().link(Link::Limited { rate_bytes_per_s: 1_000_000 })).unwrap();
    let rate = |host: &Host| host.run(&["tc", "qdisc", "show", "dev", lab::lab::MIGRATION_LINK]).unwrap();
    assert!(rate(&lab.a).contains("tbf") && rate(&lab.b).contains("rate 8Mbit"), "{}", rate(&lab.a));
    lab.set_rate(Some(500_000)).unwrap();
    assert!(rate(&lab.a).contains("rate 4Mbit"));
    lab.set_rate(None).unwrap();
    assert!(!rate(&lab.a).contains("tbf"));
}

fn emulated(settings: Settings) -> (Lab, UdpSocket, UdpSocket) {
    let lab = Lab::up(&LabConfig::for_test().link(Link::Emulated(settings))).unwrap();
    let (a, b) = (socket(&lab.a, lab.a.address()), socket(&lab.b, lab.b.address()));
    (lab, a, b)
}

/// Sends numbered datagrams, the last one until it arrives, and returns the numbers received, in the order of their
/// arrival.
fn numbers(from: &UdpSocket, to: &UdpSocket, count: u32) -> Vec<u32> {
    let address: SocketAddr = to.local_addr().unwrap();
    let mut received = Vec::new();
    let mut buffer = [0; 16];
    // At most as many at once as the receiving socket can surely hold.
    for n in 0..count {
        from.send_to(&n.to_be_bytes(), address).unwrap();
    }
    to.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    loop {
        match to.recv_from(&mut buffer) {
            Ok((4, _)) => {
                let n = u32::from_be_bytes(buffer[..4].try_into().unwrap());
                if n == u32::MAX {
                    return received;
                }
                received.push(n);
            }
            _ => {
                from.send_to(&u32::MAX.to_be_bytes(), address).unwrap();
            }
        }
    }
}

#[test]
fn the_emulator_delays_and_keeps_the_order() {
    let delay = Duration::from_millis(30);
    let (lab, a, b) = emulated(Settings { delay, jitter: Duration::from_millis(20), ..Settings::default() });
    assert!(passes(&a, &b) && passes(&b, &a));
    let start = Instant::now();
    assert!(passes(&a, &b));
    // Not earlier; later it may always be.
    assert!(start.elapsed() >= delay, "{:?}", start.elapsed());
    let received = numbers(&a, &b, 100);
    assert_eq!(received, (0..100).collect::<Vec<_>>());
    let counts = lab.emulator().unwrap().counts(Direction::AToB);
    assert!(counts.delivered >= 100 && counts.lost == 0 && counts.dropped == 0, "{counts:?}");
}

#[test]
fn the_emulator_limits_the_rate() {
    let (lab, a, b) = emulated(Settings { rate_bytes_per_s: Some(100_000), ..Settings::default() });
    assert!(passes(&a, &b));
    let start = Instant::now();
    let before = lab.emulator().unwrap().counts(Direction::AToB).delivered_bytes;
    for _ in 0..20 {
        a.send_to(&[0; 1000], b.local_addr().unwrap()).unwrap();
    }
    let mut buffer = [0; 2000];
    for _ in 0..20 {
        assert_eq!(b.recv_from(&mut buffer).unwrap().0, 1000);
    }
    let bytes = lab.emulator().unwrap().counts(Direction::AToB).delivered_bytes - before;
    assert!(bytes >= 20_000);
    // 20,000 bytes at 100,000 a second.
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    lab.set_rate(None).unwrap();
    assert!(passes(&a, &b));
}

#[test]
fn the_emulator_loses_what_its_seed_says_and_can_be_cut() {
    let settings = Settings { seed: 7, ..Settings::default() };
    let (lab, a, b) = emulated(settings);
    let emulator = lab.emulator().unwrap();
    assert!(passes(&a, &b) && passes(&b, &a));

    emulator.change(|settings| settings.loss = 0.5);
    let received = numbers(&a, &b, 400);
    let lost = emulator.counts(Direction::AToB).lost;
    assert!((120..280).contains(&received.len()), "{} of 400 arrived", received.len());
    assert!(lost >= 400 - received.len() as u64, "what did not arrive was lost by decision: {lost}");

    emulator.change(|settings| settings.loss = 0.0);
    lab.cut(Direction::AToB).unwrap();
    let before = lab.packets_cut(Direction::AToB).unwrap();
    for _ in 0..5 {
        a.send_to(b"is lost", b.local_addr().unwrap()).unwrap();
    }
    assert!(passes(&b, &a));
    while lab.packets_cut(Direction::AToB).unwrap() < before + 5 {
        std::thread::yield_now();
    }
    lab.heal().unwrap();
    assert!(passes(&a, &b));
}

fn inode(path: &str) -> Option<u64> {
    std::fs::metadata(path).ok().map(|it| it.ino())
}

#[test]
fn down_leaves_nothing_also_after_a_crash() {
    let config = LabConfig::for_test();
    let mut lab = Lab::up(&config).unwrap();
    let namespaces: Vec<_> = lab.hosts().map(Host::namespace_path).into();
    let inodes: Vec<_> = namespaces.iter().map(|it| inode(it.to_str().unwrap()).unwrap()).collect();
    // A process that runs there and ignores SIGTERM.
    let daemon =
        lab.b.spawn("deaf", &["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]).unwrap();
    daemon.follow().unwrap().wait_for_text("ready").unwrap();
    let pid = daemon.release();
    lab.a.tap("vm1").unwrap();
    lab.a.tap("vm1").unwrap();
    // As if this process had been killed: nothing is cleaned up.
    lab.keep();
    drop(lab);
    assert!(Lab::attach(&config).unwrap().b.processes().unwrap().contains(&pid));

    Lab::down(&config).unwrap();
    Lab::down(&config).unwrap();
    assert!(Lab::attach(&config).is_err());
    assert!(namespaces.iter().all(|path| !path.exists()));
    assert!(!config.directory.exists());
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z"), "still runs: {state}");
    let left: Vec<_> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| inode(entry.ok()?.path().join("ns/net").to_str()?))
        .filter(|inode| inodes.contains(inode))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn up_clears_what_a_crashed_laboratory_left() {
    let config = LabConfig::for_test();
    Lab::up(&config).unwrap().keep();
    let lab = Lab::up(&config).unwrap();
    let (a, b) = (socket(&lab.a, lab.a.address()), socket(&lab.b, lab.b.address()));
    assert!(passes(&a, &b));
}

#[test]
fn a_bad_prefix_and_a_failing_command_are_clear_errors() {
    let error = Lab::up(&LabConfig::new("no/slash")).unwrap_err().to_string();
    assert!(error.contains("no/slash") && error.contains("letters"), "{error}");
    let error = run(std::process::Command::new("ip").args(["link", "show", "dev", "nonesuch"])).unwrap_err();
    assert!(error.to_string().contains("nonesuch"), "{error}");
    assert!(Path::new("/proc/self/ns/net").exists());
}
