//! Announcements, claims and first frames at real taps, between hosts with bridges: needs root.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use lab::{DEADLINE, Host, Lab, LabConfig, until};
use net::announcer::Card;
use net::ethernet::{ARP, Frame, RARP, compose};
use net::{Announcer, Claim, ClaimSnooper, FirstFramesWatch, Mac, announcement, filter};
use tracee::{PacketSocket, Process, Tap, VIRTIO_HEADER_BYTES};
use whimbrel_net as net;

const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 7]);
const OTHER: Mac = Mac([0x52, 0x54, 0, 0, 0, 8]);
const TAP: &str = "tap0";
/// A kind of frames for experiments: where bridges call netfilter, it drops malformed packets.
const UNKNOWN_KIND: u16 = 0x88b5;

/// Bytes of a header as a virtio device with merged buffers has it.
const HEADER_BYTES: i32 = 12;

fn up() -> Lab {
    let lab = Lab::up(&LabConfig::for_test()).unwrap();
    for host in [&lab.a, &lab.b] {
        host.tap(TAP).unwrap();
    }
    lab
}

/// Opens the tap of a host, as its QEMU does, and waits until the host's bridge uses it.
fn open(host: &Host) -> Tap {
    let tap = host.within(|| Tap::open(TAP, HEADER_BYTES)).unwrap().unwrap();
    let state = || host.run(&["bridge", "link", "show", "dev", TAP]).unwrap();
    until("the bridge forwards", || state().contains("state forwarding"));
    tap
}

fn announcer(tap: Tap, claims: &[Claim]) -> Announcer {
    let mut announcer = Announcer::new(vec![Card { mac: GUEST, taps: vec![tap] }]);
    announcer.set_claims(GUEST, claims);
    announcer
}

fn claim(vlan: Option<u16>, address: &str) -> Claim {
    Claim { vlan, address: address.parse().unwrap(), is_router: false }
}

/// Returns the port of the router's bridge behind which a MAC address is.
fn port(lab: &Lab, mac: Mac) -> Option<String> {
    let table = lab.router.run(&["bridge", "fdb", "show", "br", lab::lab::VM_BRIDGE]).unwrap();
    let line = table.lines().find(|line| line.starts_with(&mac.to_string()))?;
    Some(line.split(' ').nth(2)?.to_owned())
}

fn neighbour(lab: &Lab, address: IpAddr) -> String {
    lab.router.run(&["ip", "neigh", "show", &address.to_string()]).unwrap()
}

#[test]
fn an_announcement_moves_a_guest_to_its_new_place() {
    let lab = up();
    let claims = [claim(None, "10.92.0.7"), claim(Some(5), "10.95.0.7")];
    let address = claims[0].address;
    let (old, new) = (announcer(open(&lab.a), &claims), announcer(open(&lab.b), &claims));
    // The router knows the address with another MAC address.
    let text = address.to_string();
    let other = OTHER.to_string();
    let entry = ["ip", "neigh", "add", &text, "lladdr", &other, "dev", lab::lab::VM_BRIDGE, "nud", "stale"];
    lab.router.run(&entry).unwrap();
    assert_eq!(old.announce(), 4);
    until("the bridge knows the guest at its source", || port(&lab, GUEST).as_deref() == Some("a"));
    until("the router knows the guest's address", || neighbour(&lab, address).contains(&GUEST.to_string()));
    // What arrives at the router, in the kernel's order.
    let arriving =
        lab.router.within(|| PacketSocket::listen("b", &filter::ether_host(GUEST))).unwrap().unwrap();
    assert_eq!(new.announce(), 4);
    until("the bridge knows the guest at its destination", || port(&lab, GUEST).as_deref() == Some("b"));
    let mut buffer = [0; filter::FRAME_BYTES];
    let mut arrived = Vec::new();
    while let Some(received) = arriving.receive(&mut buffer).unwrap() {
        let frame = Frame::parse(&buffer[..received.bytes], received.vlan).unwrap();
        assert!(announcement::is_announcement(&frame) && !received.is_outgoing);
        arrived.push((frame.kind, frame.vlan));
    }
    assert_eq!(arrived, [(RARP, None), (RARP, Some(5)), (ARP, None), (ARP, Some(5))]);
}

#[test]
fn claims_are_observed_at_a_tap() {
    let lab = up();
    let claims = [claim(None, "10.92.0.7"), claim(Some(5), "10.95.0.7"), claim(Some(5), "fd00::7")];
    let (guest, other) = (announcer(open(&lab.a), &claims), open(&lab.b));
    let snooper = lab.a.within(|| ClaimSnooper::start([(TAP, GUEST)])).unwrap().unwrap();
    let known = || snooper.claims()[0].all();
    assert_eq!(known(), []);
    guest.announce();
    until("all claims are known", || known() == claims);
    // Another host's guest has one of the addresses now; its announcement is flooded.
    for frame in announcement::frames(OTHER, &claims[1..2]) {
        other.send(&frame).unwrap();
    }
    until("a claim is lost", || known() == [claims[0], claims[2]]);
}

#[test]
fn frames_reach_the_reader_of_a_tap() {
    let lab = up();
    let guest = open(&lab.a);
    // Another process's descriptors are found like this process's own.
    let process = Process::open(std::process::id()).unwrap();
    let found = Tap::of_process(&process).unwrap();
    assert!(found.iter().any(|(_, tap)| tap.interface() == TAP && tap.header_bytes().unwrap() == 12));
    drop(found);
    let sender = lab.a.within(|| PacketSocket::sender(TAP, 7)).unwrap().unwrap();
    let frame = compose(GUEST, OTHER, None, 0x0800, &[9; 600]);
    assert!(guest.is_empty().unwrap());
    sender.send([0; VIRTIO_HEADER_BYTES], &frame).unwrap();
    until("the frame is there", || !guest.is_empty().unwrap());
    let mut buffer = [0; 2048];
    let bytes = guest.take(&mut buffer).unwrap().unwrap();
    assert_eq!(&buffer[HEADER_BYTES as usize..bytes], frame);
    assert_eq!(guest.take(&mut buffer).unwrap(), None);
}

#[test]
fn the_first_frames_of_a_guest_are_measured() {
    let lab = up();
    let (guest, other) = (open(&lab.a), open(&lab.b));
    let watch =
        || lab.a.within(|| FirstFramesWatch::start([(TAP, GUEST), ("trunk", GUEST)])).unwrap().unwrap();
    let started = SystemTime::now();
    let silent = watch();
    for frame in announcement::frames(GUEST, &[]) {
        guest.send(&frame).unwrap();
    }
    let first = silent.measure(started, started, Duration::ZERO);
    assert_eq!((first[0].first_in, first[0].first_out, first.len()), (None, None, 1));
    let (too_early, watch) = (watch(), watch());
    let ran = SystemTime::now();
    other.send(&compose(GUEST, OTHER, None, UNKNOWN_KIND, &[9; 600])).unwrap();
    guest.send(&compose(OTHER, GUEST, None, UNKNOWN_KIND, &[9; 600])).unwrap();
    let first = watch.measure(ran, ran, DEADLINE);
    assert!(first[0].is_complete(), "{first:?}");
    // The same frames were sent before the guest was announced.
    let first = too_early.measure(SystemTime::now(), ran, Duration::ZERO);
    assert_eq!((first[0].first_in, first[0].first_out), (None, None));
}
