//! Frames that are held at real taps: needs root, and a kernel with netfilter's egress hook.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::cell::RefCell;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use lab::{Host, Lab, LabConfig, until};
use net::ethernet::compose;
use net::{Diversion, HeldFrame, Holder, Mac, Merger};
use tracee::{PacketSocket, Tap, VIRTIO_HEADER_BYTES};
use whimbrel_net as net;

const GUEST: Mac = Mac([0x52, 0x54, 0, 0, 0, 7]);
const OTHER: Mac = Mac([0x52, 0x54, 0, 0, 0, 8]);
const TAP: &str = "tap0";
const NAME: &str = "web@3";
/// Bytes of a header as a virtio device with merged buffers has it.
const HEADER_BYTES: usize = 12;

/// A guest behind a tap that is in no bridge, and the host that sends to it.
struct Guest {
    lab: Lab,
    tap: Tap,
    sender: PacketSocket,
    header_bytes: usize,
}

impl Guest {
    fn new() -> Self {
        Self::with_header(HEADER_BYTES)
    }

    /// A guest whose frames have a header of this length; if it is zero, its card has no offloads.
    fn with_header(header_bytes: usize) -> Self {
        let lab = Lab::up(&LabConfig::for_test()).unwrap();
        lab.a.run(&["ip", "tuntap", "add", "dev", TAP, "mode", "tap"]).unwrap();
        lab.a.run(&["ip", "link", "set", "dev", TAP, "up"]).unwrap();
        let tap = lab.a.within(|| Tap::open(TAP, header_bytes as i32)).unwrap().unwrap();
        let sender = lab.a.within(|| PacketSocket::sender(TAP, 0)).unwrap().unwrap();
        let guest = Self { lab, tap, sender, header_bytes };
        until("the tap is up", || {
            guest.sends(0);
            !guest.received().is_empty()
        });
        guest
    }

    fn host(&self) -> &Host {
        &self.lab.a
    }

    fn divert(&self) -> Diversion {
        self.host().within(|| Diversion::start(NAME, &[(TAP, GUEST)])).unwrap().unwrap()
    }

    /// The host sends a numbered frame to the guest.
    fn sends(&self, number: u8) {
        self.sends_frame(&frame(GUEST, OTHER, number));
    }

    /// The kernel reports a frame that was diverted on its way as one that was not sent.
    fn sends_frame(&self, frame: &[u8]) {
        self.sends_unfinished([0; VIRTIO_HEADER_BYTES], frame);
    }

    fn sends_unfinished(&self, header: [u8; VIRTIO_HEADER_BYTES], frame: &[u8]) {
        let sent = self.sender.send(header, frame);
        assert!(sent.as_ref().err().is_none_or(|error| error.raw_os_error() == Some(105)), "{sent:?}");
    }

    /// Returns the numbers of the frames that wait for the guest.
    fn received(&self) -> Vec<u8> {
        self.received_frames().iter().map(|frame| frame[14]).collect()
    }

    /// Returns the IPv4 frames that wait for the guest.
    fn received_frames(&self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut buffer = [0; 8192];
        while let Some(bytes) = self.tap.take(&mut buffer).unwrap() {
            let frame = &buffer[self.header_bytes..bytes];
            if frame.get(12..14) == Some(&[8, 0]) {
                frames.push(frame.to_vec());
            }
        }
        frames
    }

    /// Waits until the guest has received frames of which `are_all` is true, and returns them.
    fn receives(&self, are_all: impl Fn(&[Vec<u8>]) -> bool) -> Vec<Vec<u8>> {
        let frames = RefCell::new(Vec::new());
        until("the guest has all frames", || {
            frames.borrow_mut().extend(self.received_frames());
            are_all(&frames.borrow())
        });
        frames.into_inner()
    }

    /// Sets an attribute of the guest's tap.
    fn set(&self, attribute: &str, value: &str) {
        self.host().run(&["ip", "link", "set", "dev", TAP, attribute, value]).unwrap();
    }

    /// Returns all tables of netfilter.
    fn tables(&self) -> String {
        self.host().run(&["nft", "list", "tables"]).unwrap()
    }

    fn devices(&self) -> String {
        self.host().run(&["ip", "-o", "link"]).unwrap()
    }

    #[track_caller]
    fn assert_nothing_is_left(&self) {
        until("no table is left", || self.tables().is_empty());
        until("no device is left", || !self.devices().contains("whimbrel"));
    }
}

fn frame(destination: Mac, source: Mac, number: u8) -> Vec<u8> {
    compose(destination, source, None, 0x0800, &[number; 60])
}

fn held(number: u8) -> HeldFrame {
    HeldFrame { card: GUEST, header: [0; VIRTIO_HEADER_BYTES], frame: frame(GUEST, OTHER, number) }
}

fn numbers(frames: &[HeldFrame]) -> Vec<u8> {
    frames.iter().map(|frame| frame.frame[14]).collect()
}

#[test]
fn frames_are_diverted_until_the_rules_go() {
    let guest = Guest::new();
    let diversion = guest.divert();
    assert!(guest.tables().contains("table netdev whimbrel-web@3"), "{}", guest.tables());
    assert!(guest.devices().contains("whimbrel0"), "{}", guest.devices());
    guest.sends(1);
    guest.sends_frame(&frame(Mac::BROADCAST, GUEST, 2));
    guest.sends(3);
    let mut taken = Vec::new();
    until("they are diverted", || !diversion.taps().next().unwrap().is_empty().unwrap());
    taken.extend(diversion.take().unwrap());
    // The guest's own frame, flooded back, is not held.
    assert_eq!(numbers(&taken), [1, 3]);
    assert!(guest.received().is_empty());
    // Ours pass.
    diversion.send(&taken[1]).unwrap();
    until("it is there", || !guest.tap.is_empty().unwrap());
    assert_eq!(guest.received(), [3]);
    diversion.stop().unwrap();
    guest.sends(4);
    until("it is there", || !guest.tap.is_empty().unwrap());
    assert_eq!(guest.received(), [4]);
    assert!(diversion.take().unwrap().is_empty());
    drop(diversion);
    guest.assert_nothing_is_left();
}

/// The name is in use, or there is no such tap.
#[test]
fn a_diversion_that_fails_leaves_nothing() {
    let guest = Guest::new();
    let first = guest.divert();
    guest.host().within(|| Diversion::start(NAME, &[(TAP, GUEST)])).unwrap().unwrap_err();
    guest.host().within(|| Diversion::start("other", &[("tap9", GUEST)])).unwrap().unwrap_err();
    assert!(!guest.devices().contains("whimbrel1"), "{}", guest.devices());
    drop(first);
    guest.assert_nothing_is_left();
}

/// Runs in a process of its own, in the namespace of the next test's host.
#[test]
#[ignore = "what the next test starts"]
fn diverting_process() {
    let _diversion = Diversion::start(NAME, &[(TAP, GUEST)]).unwrap();
    println!("diverted");
    std::thread::park();
}

/// An agent that dies leaves no guest cut off.
#[test]
fn the_rules_end_with_their_process() {
    let guest = Guest::new();
    let test = std::env::current_exe().unwrap();
    let mut process = guest
        .host()
        .command(test)
        .args(["--exact", "--ignored", "--nocapture", "--test-threads=1", "diverting_process"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("it diverts", || guest.tables().contains("whimbrel-web@3"));
    until("all is set up", || guest.devices().contains("whimbrel0"));
    guest.sends(1);
    assert!(guest.received().is_empty());
    // As the kernel ends a process: without any chance to tidy up.
    Command::new("kill").args(["-KILL", &process.id().to_string()]).status().unwrap();
    process.wait().unwrap();
    guest.assert_nothing_is_left();
    guest.sends(2);
    until("it is there", || !guest.tap.is_empty().unwrap());
    assert_eq!(guest.received(), [2]);
}

#[test]
fn held_frames_are_passed_on_and_delivered_back_in_order() {
    let guest = Guest::new();
    let passed = Arc::<Mutex<Vec<HeldFrame>>>::default();
    let into = Arc::clone(&passed);
    let holder = Holder::start(guest.divert(), move |frames| {
        into.lock().unwrap().extend_from_slice(frames);
        into.lock().unwrap().len() < 20
    })
    .unwrap();
    for number in 1..=50 {
        guest.sends(number);
    }
    until("they are held", || holder.count() == 50);
    let passed = numbers(&passed.lock().unwrap());
    assert_eq!(passed, (1..=passed.len() as u8).collect::<Vec<_>>());
    assert!(passed.len() >= 20, "it passes on until it cannot");
    assert!(guest.received().is_empty());
    guest.sends(51);
    assert_eq!(holder.deliver_back().unwrap(), 51);
    until("it is there", || !guest.tap.is_empty().unwrap());
    assert_eq!(guest.received(), (1..=51).collect::<Vec<_>>());
    guest.assert_nothing_is_left();
    guest.sends(52);
    until("it is there", || !guest.tap.is_empty().unwrap());
    assert_eq!(guest.received(), [52]);
}

#[test]
fn frames_of_the_source_precede_those_that_came_directly() {
    let guest = Guest::new();
    let merger = Merger::start(guest.divert()).unwrap();
    let source = merger.handle();
    guest.sends(1);
    source.deliver(vec![held(10)]);
    merger.announced().unwrap();
    guest.sends(20);
    source.deliver(vec![held(11), held(12)]);
    merger.guest_runs();
    until("the rules are gone", || guest.tables().is_empty());
    until("the guest has all of them", || source.delivered() == 4);
    guest.sends(21);
    assert_eq!(guest.received(), [10, 11, 12, 20, 21]);
    // One that was under way for long.
    source.deliver(vec![held(13)]);
    until("it is there", || !guest.tap.is_empty().unwrap());
    assert_eq!(guest.received(), [13]);
    drop(source);
    guest.assert_nothing_is_left();
}

#[test]
fn a_guest_that_does_not_arrive_leaves_nothing() {
    let guest = Guest::new();
    let merger = Merger::start(guest.divert()).unwrap();
    merger.announced().unwrap();
    guest.sends(1);
    drop(merger);
    guest.assert_nothing_is_left();
    assert!(guest.received().is_empty());
}

/// Returns the sum of the 16-bit words of `bytes`.
fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low))).sum()
}

fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Returns the sum of the pseudo header of a TCP segment in an IPv4 packet.
fn pseudo_sum(packet: &[u8]) -> u32 {
    sum(&packet[12..20]) + 6 + (packet.len() - 20) as u32
}

/// Composes a TCP segment of `payload` bytes that the kernel has not divided, with its header: pieces of `piece` bytes
/// are to be sent, and their checksums are missing.
fn undivided(payload: usize, piece: u16) -> ([u8; VIRTIO_HEADER_BYTES], Vec<u8>) {
    let mut packet = vec![0x45, 0];
    packet.extend(((40 + payload) as u16).to_be_bytes());
    packet.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 7]);
    let checksum = !folded(sum(&packet));
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    // Ports, sequence number 1, acknowledgement, length and flags, window.
    packet.extend([0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 9, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
    packet.extend((0..payload).map(|byte| (byte % 251) as u8));
    let partial = folded(pseudo_sum(&packet)).to_be_bytes();
    packet[36..38].copy_from_slice(&partial);
    let mut header = [0; VIRTIO_HEADER_BYTES];
    // The checksum is missing; TCP over IPv4.
    header[..2].copy_from_slice(&[1, 1]);
    for (place, number) in [(2, 54), (4, piece), (6, 34), (8, 16)] {
        header[place..place + 2].copy_from_slice(&number.to_ne_bytes());
    }
    (header, compose(GUEST, OTHER, None, 0x0800, &packet))
}

/// A card without offloads gets no frames that only a virtio card could take.
#[test]
fn tcp_is_divided_for_a_card_without_offloads() {
    let guest = Guest::with_header(0);
    let merger = Merger::start(guest.divert()).unwrap();
    merger.announced().unwrap();
    let (header, frame) = undivided(4000, 1000);
    guest.sends_unfinished(header, &frame);
    merger.guest_runs();
    let received =
        guest.receives(|frames| frames.iter().map(|frame| frame.len() - 54).sum::<usize>() >= 4000);
    let data: Vec<_> = received.iter().flat_map(|frame| &frame[54..]).copied().collect();
    assert_eq!((received.len(), data), (4, frame[54..].to_vec()));
    for frame in &received {
        assert_eq!(folded(sum(&frame[14..34])), 0xffff, "the checksum of IP");
        assert_eq!(folded(pseudo_sum(&frame[14..]) + sum(&frame[34..])), 0xffff, "the checksum of TCP");
    }
}

/// It is longer than the tap allows, for instance.
#[test]
fn a_frame_that_cannot_be_sent_keeps_no_other_back() {
    let guest = Guest::new();
    let long = |number| compose(GUEST, OTHER, None, 0x0800, &[number; 1400]);
    let holder = Holder::start(guest.divert(), |_| true).unwrap();
    guest.sends(1);
    guest.sends_frame(&long(2));
    guest.sends(3);
    until("they are held", || holder.count() == 3);
    assert_eq!(holder.passed_on(), 3);
    guest.set("mtu", "1000");
    assert_eq!(holder.deliver_back().unwrap(), 2);
    until("they are there", || !guest.tap.is_empty().unwrap());
    assert_eq!(guest.received(), [1, 3]);
    let merger = Merger::start(guest.divert()).unwrap();
    let source = merger.handle();
    // The guest has changed its address, which this host does not know.
    let changed = HeldFrame { card: OTHER, ..held(12) };
    source.deliver(vec![held(10), HeldFrame { frame: long(11), ..held(11) }, changed]);
    merger.announced().unwrap();
    merger.guest_runs();
    until("they are there", || source.delivered() == 2);
    assert_eq!(guest.received(), [10, 12]);
}

#[test]
fn frames_wait_for_room_in_the_guests_tap() {
    let guest = Guest::new();
    guest.set("txqueuelen", "4");
    let merger = Merger::start(guest.divert()).unwrap();
    let source = merger.handle();
    source.deliver((1..=20).map(held).collect());
    merger.announced().unwrap();
    guest.sends(21);
    merger.guest_runs();
    let mut received = guest.receives(|frames| frames.len() >= 21);
    until("the rules are gone", || guest.tables().is_empty());
    std::thread::scope(|scope| {
        scope.spawn(|| source.deliver((22..=40).map(held).collect()));
        received.extend(guest.receives(|frames| frames.len() >= 19));
    });
    let numbers: Vec<_> = received.iter().map(|frame| frame[14]).collect();
    assert_eq!(numbers, (1..=40).collect::<Vec<_>>());
}

/// Its user has paused it.
#[test]
fn a_guest_that_reads_nothing_keeps_no_rules() {
    let guest = Guest::new();
    guest.set("txqueuelen", "4");
    let merger = Merger::start(guest.divert()).unwrap();
    let source = merger.handle();
    merger.announced().unwrap();
    source.deliver((1..=20).map(held).collect());
    merger.guest_runs();
    until("the rules are gone", || guest.tables().is_empty());
    assert_eq!(guest.received().len(), source.delivered());
}
