//! A guest that answers from outside while it is migrated: frames for it are neither lost nor doubled, and nothing of
//! the network's is left on either host. Needs root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket};
use std::ops::Range;
use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::faults::HeldAgent;
use common::{Agent, Cluster, DEADLINE, Device, GuestSpec, Load, Setup, until};
use lab::lab::VM_BRIDGE;
use lab::{Boot, Host, Net, vm_address};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto};
use serde_json::{Value, json};

const VM: &str = "vm1";
/// Port of the guest that echoes.
const SERVICE: u16 = 7000;
/// Closed port of the guest.
const CLOSED: u16 = 9;
/// Closed port of the guest, to which packets go with their sender's own address.
const ASKED: u16 = 10;
/// Ports that hosts give to clients of the service.
const TRANSLATED: Range<u16> = 40_000..50_000;
/// Pause between two requests.
const PAUSE: Duration = Duration::from_millis(4);

/// Bytes of the messages: ICMP's header, and a number.
const MESSAGE_BYTES: usize = 12;
/// Bytes of the header before an answer.
const IP_BYTES: usize = 20;
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
const IDENTIFIER: u16 = 0x5748;

/// Composes a numbered echo request.
fn request(number: u32) -> [u8; MESSAGE_BYTES] {
    let mut message = [0; MESSAGE_BYTES];
    message[0] = ECHO_REQUEST;
    message[4..6].copy_from_slice(&IDENTIFIER.to_be_bytes());
    message[6..8].copy_from_slice(&(number as u16).to_be_bytes());
    message[8..].copy_from_slice(&number.to_be_bytes());
    let words = message.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum = words.sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    message[2..4].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    message
}

/// Returns the number of an answer to one of our requests.
fn answered(packet: &[u8]) -> Option<u32> {
    let message = packet.get(IP_BYTES..)?;
    let is_ours =
        message.first() == Some(&ECHO_REPLY) && message.get(4..6) == Some(&IDENTIFIER.to_be_bytes());
    let number = message.get(8..MESSAGE_BYTES).filter(|_| is_ours)?;
    Some(u32::from_be_bytes(number.try_into().ok()?))
}

/// Numbered requests to a guest, and how often each was answered.
struct Echo {
    sent: u32,
    answers: BTreeMap<u32, u32>,
}

impl Echo {
    fn receive(&mut self, socket: &impl std::os::fd::AsFd) {
        let mut buffer = [0; 256];
        while let Ok((bytes, _)) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::DONTWAIT) {
            if let Some(number) = answered(&buffer[..bytes]) {
                *self.answers.entry(number).or_default() += 1;
            }
        }
    }

    /// Sends requests from a host to `address` until `end`, and waits for the answers.
    fn run(host: &Host, address: Ipv4Addr, end: &AtomicBool, first_answer: &mpsc::Sender<()>) -> Self {
        let open = || {
            let (family, kind) = (AddressFamily::INET, SocketType::RAW);
            rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, Some(ipproto::ICMP)).unwrap()
        };
        let socket = host.within(open).unwrap();
        let to = SocketAddrV4::new(address, 0);
        let mut this = Self { sent: 0, answers: BTreeMap::new() };
        while !end.load(Ordering::Relaxed) {
            rustix::net::sendto(&socket, &request(this.sent), SendFlags::empty(), &to).unwrap();
            this.sent += 1;
            std::thread::sleep(PAUSE);
            this.receive(&socket);
            if !this.answers.is_empty() {
                // The receiver may have gone on.
                let _ = first_answer.send(());
            }
        }
        let deadline = Instant::now() + DEADLINE;
        while this.answers.len() < this.sent as usize && Instant::now() < deadline {
            std::thread::sleep(PAUSE);
            this.receive(&socket);
        }
        this
    }
}

/// Ends the requests of a test that fails, too.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns all that a host's kernel knows of networks, but for counters and states of links that settle: links,
/// addresses, VLANs, routes, routing rules and netfilter.
fn network_of(host: &Host) -> String {
    let mut all = common::networks::links(host);
    for words in [
        &["bridge", "vlan"][..],
        &["ip", "route", "show", "table", "all"],
        &["ip", "-4", "rule"],
        &["ip", "-6", "rule"],
        &["nft", "list", "ruleset"],
    ] {
        all.push(host.run(words).unwrap());
    }
    all.join("\n")
}

/// Returns what `whimbrel net show` lists.
fn items(agent: &Agent) -> Vec<Value> {
    let state = agent.cli(&["net", "show"]).ok().json();
    assert_eq!(state["unread"], Value::Null, "{state:#}");
    state["items"].as_array().unwrap().clone()
}

/// Asserts that both hosts become as before, and that no agent lists anything.
#[track_caller]
fn assert_as_before(cluster: &Cluster, before: &[String; 2]) {
    for (agent, before) in [&cluster.a, &cluster.b].into_iter().zip(before) {
        assert_host_as_before(cluster, agent.name, before);
        assert_eq!(items(agent), Vec::<Value>::new(), "{}", agent.name);
    }
}

#[track_caller]
fn assert_host_as_before(cluster: &Cluster, name: &str, before: &str) {
    let host = if name == "a" { &cluster.lab.a } else { &cluster.lab.b };
    until("the network is as before", || network_of(host) == before);
}

fn answering_guest(cluster: &Cluster) -> lab::Guest {
    let load = Load { fill_mib: 32, wss_mib: 8, rate_mib_per_s: 5, ..Load::default() };
    let mut spec = GuestSpec::tiny(VM, load);
    spec.devices.push(Device::Net(Net::new(1)));
    if let Boot::Tiny(load) = &mut spec.boot {
        (load.address, load.port) = (Some(vm_address(1)), SERVICE);
    }
    cluster.lab.b.tap(&Net::new(1).tap).unwrap();
    cluster.guest(&spec)
}

fn events(report: &Value, what: &str) -> Vec<String> {
    let events = report["events"].as_array().unwrap().iter().filter(|event| event["what"] == what);
    events.map(|event| event["detail"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn frames_for_a_guest_are_neither_lost_nor_doubled() {
    let cluster = Cluster::new();
    let _guest = answering_guest(&cluster);
    let before = [&cluster.lab.a, &cluster.lab.b].map(network_of);
    let end = AtomicBool::new(false);
    let (first_answer, first_answers) = mpsc::channel();
    let echo = std::thread::scope(|scope| {
        let requests = scope.spawn(|| Echo::run(&cluster.lab.router, vm_address(1), &end, &first_answer));
        let ended = EndOnDrop(&end);
        first_answers.recv().unwrap();
        for (from, to) in [("a", "b"), ("b", "a")] {
            let report = cluster.migrate(VM, from, to, &[]);
            let network = &report["network"][0];
            assert_eq!(network["interface"], Net::new(1).tap, "{report:#}");
            assert!(network["first_in_us"].is_u64() && network["first_out_us"].is_u64(), "{network}");
            assert_eq!(events(&report, "frames-held").len(), 1, "{report:#}");
            assert_eq!(events(&report, "frames-not-held"), Vec::<String>::new());
        }
        drop(ended);
        requests.join().unwrap()
    });
    cluster.assert_guest_whole("a", VM);
    let lost: Vec<_> = (0..echo.sent).filter(|number| !echo.answers.contains_key(number)).collect();
    assert!(lost.is_empty(), "{lost:?} of {} are lost", echo.sent);
    let doubled: Vec<_> = echo.answers.iter().filter(|(_, times)| **times > 1).collect();
    assert!(doubled.is_empty(), "{doubled:?} were answered more than once");
    let report = cluster.migrate(VM, "a", "b", &["--packets-at-stop", "drop"]);
    for what in ["frames-held", "frames-not-held"] {
        assert_eq!(events(&report, what), Vec::<String>::new());
    }
    assert_as_before(&cluster, &before);
}

/// Begins to migrate the guest, and holds its source when both hosts divert its frames.
#[track_caller]
fn hold(cluster: &Cluster) -> (Child, HeldAgent) {
    let faults = cluster.faults.as_ref().unwrap();
    faults.want("source/network/before-stop");
    let migration = cluster.a.begin(&["migrate", VM, "--to", "b"]);
    let held = faults.held(DEADLINE).unwrap();
    for agent in [&cluster.a, &cluster.b] {
        let items = items(agent);
        let kinds: Vec<_> = items.iter().map(|item| &item["kind"]).collect();
        assert_eq!(kinds, ["table", "device"], "{items:#?}");
        assert_eq!(items[0]["interfaces"], json!([Net::new(1).tap]));
        for item in &items {
            assert_eq!((&item["migration"]["vm"], &item["standing"]), (&json!(VM), &json!("in-use")));
            assert!(item["age_s"].is_u64() && item["begun"].is_string(), "{item}");
        }
    }
    (migration, held)
}

/// Kills the QEMUs of a host.
fn kill_qemus(host: &Host) {
    for pid in host.processes().unwrap() {
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        if program.to_string_lossy().contains("qemu-system") {
            lab::kill_pid(pid).unwrap();
        }
    }
}

#[test]
fn nothing_is_left_after_failures_and_deaths_of_agents() {
    let mut cluster = Cluster::with(&Setup { fault_harness: true, ..Setup::default() });
    let _guest = answering_guest(&cluster);
    let before = [&cluster.lab.a, &cluster.lab.b].map(network_of);
    let ended = |mut migration: Child| assert!(!migration.wait().unwrap().success());

    // The migration fails.
    let (migration, held) = hold(&cluster);
    kill_qemus(&cluster.lab.b);
    held.release();
    ended(migration);
    cluster.b.wait_settled();
    assert_as_before(&cluster, &before);

    // The source's agent dies: the kernel removes what it had, at once.
    let (migration, held) = hold(&cluster);
    cluster.a.kill();
    assert_host_as_before(&cluster, "a", &before[0]);
    ended(migration);
    drop(held);
    cluster.a.start();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_as_before(&cluster, &before);

    // The destination's agent dies.
    let (migration, held) = hold(&cluster);
    cluster.b.kill();
    assert_host_as_before(&cluster, "b", &before[1]);
    cluster.b.start();
    held.release();
    ended(migration);
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_as_before(&cluster, &before);
    cluster.assert_guest_whole("a", VM);
    assert_left_over_is_listed(&cluster);
}

/// Makes a device in the name of the first migration, which has ended, and one in the name of no known migration.
#[track_caller]
fn assert_left_over_is_listed(cluster: &Cluster) {
    for (device, alias) in [("whimbrel7", "vm1#1"), ("whimbrel8", "vm9#1")] {
        cluster.lab.a.run(&["ip", "tuntap", "add", "dev", device, "mode", "tap"]).unwrap();
        cluster.lab.a.run(&["ip", "link", "set", "dev", device, "alias", alias]).unwrap();
    }
    let standings = || items(&cluster.a).iter().map(|item| item["standing"].clone()).collect::<Vec<_>>();
    until("the first one is left over", || standings() == ["left-over", "unknown"]);
    let text = cluster.a.text(&["net", "show"]).stdout;
    for words in ["vm1#1", "left over", "ip link delete dev whimbrel7", "vm9#1", "unknown"] {
        assert!(text.contains(words), "{words} is missing in {text}");
    }
}

/// Returns true if this kernel lists tracked connections, and shows bridged packets to firewalls.
fn has_connection_tracking(host: &Host) -> bool {
    const FILES: [&str; 2] = ["/proc/sys/net/bridge/bridge-nf-call-iptables", "/proc/net/nf_conntrack"];
    let missing = host.within(|| FILES.into_iter().find(|file| !Path::new(file).exists())).unwrap();
    if let Some(missing) = missing {
        lab::not_tried(format!("tracked connections: there is no {missing}"));
    }
    missing.is_none()
}

/// Makes a host strict: packets of the service pass as parts of connections whose beginning the host has seen, and the
/// client's port is another one for the guest.
fn begin_firewall(host: &Host) {
    let (vm, client, Range { start, end }) = (vm_address(1), lab::lab::VM_GATEWAY, TRANSLATED);
    let set = |name: &'static str, value: &'static str| host.within(move || fs::write(name, value)).unwrap();
    set("/proc/sys/net/bridge/bridge-nf-call-iptables", "1").unwrap();
    let rules = format!(
        "table ip strict {{ \
           chain pass {{ type filter hook forward priority 0; ct state established,related accept; \
             tcp flags & (syn | ack) == syn accept; tcp dport {SERVICE} drop; tcp sport {SERVICE} drop; }}; \
           chain translate {{ type nat hook postrouting priority 100; \
             ip daddr {vm} tcp dport {SERVICE} snat to {client}:{start}-{last} random; \
             ip daddr {vm} udp dport {CLOSED} snat to {client}:{start}-{last} random; }}; }}",
        last = end - 1,
    );
    host.run(&["nft", &rules]).unwrap();
    set("/proc/sys/net/netfilter/nf_conntrack_tcp_loose", "0").unwrap();
}

/// Returns the clients' ports, as the guest sees them, of the connections to the service that a host tracks.
fn tracked(host: &Host) -> Vec<u16> {
    let entries = host.run(&["cat", "/proc/net/nf_conntrack"]).unwrap();
    let service = format!(" dport={SERVICE} ");
    let of_service = entries.lines().filter(|line| line.contains(&service) && line.contains("ESTABLISHED"));
    let port = |line: &str| line.rsplit(" dport=").next()?.split(' ').next()?.parse().ok();
    of_service.map(|line| port(line).unwrap()).collect()
}

/// Sends packets to the guest from more and more addresses until `end`: to answer it has to ask for each, and claims
/// its own address in this way.
fn make_guest_ask(router: &Host, end: &AtomicBool) {
    for number in 100..=250 {
        if end.load(Ordering::Relaxed) {
            return;
        }
        let address = vm_address(number);
        router.run(&["ip", "addr", "add", &format!("{address}/24"), "dev", VM_BRIDGE]).unwrap();
        let send = || UdpSocket::bind((address, 0))?.send_to(b"?", (vm_address(1), ASKED));
        router.within(send).unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A firewall at each host knows only its own connections, unless their entries move along.
#[test]
fn tracked_connections_follow_the_guest() {
    let cluster = Cluster::new();
    let _guest = answering_guest(&cluster);
    let (a, b, router) = (&cluster.lab.a, &cluster.lab.b, &cluster.lab.router);
    if !has_connection_tracking(a) {
        return;
    }
    [a, b].into_iter().for_each(begin_firewall);
    let client = RefCell::new(None);
    let service = SocketAddr::from((vm_address(1), SERVICE));
    until("the guest serves", || {
        let connected = router.within(|| TcpStream::connect_timeout(&service, DEADLINE)).unwrap();
        *client.borrow_mut() = connected.ok();
        client.borrow().is_some()
    });
    let mut client = client.into_inner().unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut exchange = |text: &[u8; 5]| {
        let mut answer = [0; 5];
        client.write_all(text).unwrap();
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *text);
    };
    exchange(b"first");
    let ports = tracked(a);
    assert!(matches!(ports[..], [port] if TRANSLATED.contains(&port)), "{ports:?}");
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| make_guest_ask(router, &end));
        let _ended = EndOnDrop(&end);
        for (from, to, hosts) in [("a", "b", [a, b]), ("b", "a", [b, a])] {
            let report = cluster.migrate(VM, from, to, &[]);
            exchange(b"again");
            assert_eq!(tracked(hosts[1]), ports, "{report:#}");
            let connections = &report["connections"];
            assert!(connections["carried"].as_u64().is_some_and(|carried| carried > 0), "{report:#}");
            assert_eq!(connections["failed"], Value::Null, "{report:#}");
            assert_eq!(events(&report, "connections-not-carried"), Vec::<String>::new());
            until("the host that it has left forgets the connection", || tracked(hosts[0]).is_empty());
        }
    });
    cluster.assert_guest_whole("a", VM);
}

/// The stopped guest does not wait for all of them: they are there before, and the report says how many.
#[test]
fn thousands_of_tracked_connections_follow_the_guest() {
    const FLOWS: u16 = 8_000;
    let cluster = Cluster::new();
    let _guest = answering_guest(&cluster);
    let (a, b, router) = (&cluster.lab.a, &cluster.lab.b, &cluster.lab.router);
    if !has_connection_tracking(a) {
        return;
    }
    [a, b].into_iter().for_each(begin_firewall);
    let send = || {
        (10_000..10_000 + FLOWS).all(|port| {
            let sent = UdpSocket::bind((lab::lab::VM_GATEWAY, port))
                .and_then(|socket| socket.send_to(b"?", (vm_address(1), CLOSED)));
            sent.is_ok()
        })
    };
    let translated = |host: &Host| {
        let entries = host.run(&["cat", "/proc/net/nf_conntrack"]).unwrap();
        let to_closed = entries.lines().filter(|line| line.contains(" udp ") && line.contains(" dport=9 "));
        let ports = |line: &str| {
            let of = |name: &str, index: usize| line.split(name).nth(index)?.split(' ').next()?.parse().ok();
            Some((of(" sport=", 1)?, of(" dport=", 2)?))
        };
        to_closed.map(|line| ports(line).unwrap()).collect::<BTreeMap<u16, u16>>()
    };
    assert!(router.within(send).unwrap());
    let before = translated(a);
    // Where the kernel finds no free port at random, it drops the packet.
    assert!(before.len() >= usize::from(FLOWS / 10 * 9), "{}", before.len());
    assert!(before.values().all(|port| TRANSLATED.contains(port)));
    // It hardly sends: the agent has to ask it for its address.
    let report = cluster.migrate(VM, "a", "b", &[]);
    let carried = report["connections"]["carried"].as_u64().unwrap();
    assert!(carried >= before.len() as u64, "{report:#}");
    let after = translated(b);
    let lost: Vec<_> = before.iter().filter(|(client, port)| after.get(*client) != Some(*port)).collect();
    assert!(lost.is_empty(), "{} of {} are not the same: {lost:?}", lost.len(), before.len());
    println!(
        "{carried} tracked connections: {} {:?}",
        report["downtime"],
        events(&report, "connections-late")
    );
}

/// The destination may have announced it there, and an agent that was restarted does not know if it has.
#[test]
fn a_guest_that_stays_is_announced_here_again() {
    let mut cluster = Cluster::new();
    let _guest = answering_guest(&cluster);
    let mac = Net::new(1).mac;
    let mut migration = cluster.migrate_slowly(VM, "2M");
    cluster.wait_for_sent(1 << 20);
    cluster.a.kill();
    migration.wait().unwrap();
    let entry = ["bridge", "fdb", "replace", &mac, "dev", "b", "master", "dynamic"];
    cluster.lab.router.run(&entry).unwrap();
    cluster.a.start();
    let ports = || cluster.lab.router.run(&["bridge", "fdb", "show", "br", VM_BRIDGE]).unwrap();
    until("the switch knows its place", || ports().contains(&format!("{mac} dev a ")));
    cluster.a.wait_settled();
    cluster.assert_guest_whole("a", VM);
}
