//! Frames that are held at real taps: needs root, and a kernel with netfilter's egress hook.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

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

/// A guest behind a tap that is in no bridge, and the host that sends to it.
struct Guest {
    lab: Lab,
    tap: Tap,
    sender: PacketSocket,
}

impl Guest {
    fn new() -> Self {
        let lab = Lab::up(&LabConfig::for_test()).unwrap();
        lab.a.run(&["ip", "tuntap", "add", "dev", TAP, "mode", "tap"]).unwrap();
        lab.a.run(&["ip", "link", "set", "dev", TAP, "up"]).unwrap();
        let tap = lab.a.within(|| Tap::open(TAP, 12)).unwrap().unwrap();
        let sender = lab.a.within(|| PacketSocket::sender(TAP, 0)).unwrap().unwrap();
        let guest = Self { lab, tap, sender };
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
        let sent = self.sender.send([0; VIRTIO_HEADER_BYTES], frame);
        assert!(sent.as_ref().err().is_none_or(|error| error.raw_os_error() == Some(105)), "{sent:?}");
    }

    /// Returns the numbers of the frames that wait for the guest.
    fn received(&self) -> Vec<u8> {
        let mut numbers = Vec::new();
        let mut buffer = [0; 2048];
        while let Some(bytes) = self.tap.take(&mut buffer).unwrap() {
            if buffer[12..bytes].get(12..14) == Some(&[8, 0]) {
                numbers.push(buffer[12 + 14]);
            }
        }
        numbers
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
    let source = merger.input();
    guest.sends(1);
    source.deliver(vec![held(10)]).unwrap();
    merger.announced().unwrap();
    guest.sends(20);
    source.deliver(vec![held(11), held(12)]).unwrap();
    merger.guest_runs();
    drop(merger);
    until("the rules are gone", || guest.tables().is_empty());
    until("the guest has all of them", || source.delivered() == 3);
    guest.sends(21);
    assert_eq!(guest.received(), [10, 11, 12, 20, 21]);
    // One that was under way for long.
    source.deliver(vec![held(13)]).unwrap();
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
