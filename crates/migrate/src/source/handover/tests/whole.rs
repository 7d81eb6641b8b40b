//! Migrations of a fake participant through all phases of the driver, to a peer that receives its pages.

use std::ops::Range;

use ::memory::{BlockWriter, RamError, Receiver};
use host::fault::Faults;
use link::transport::{DataStream, Incoming};
use proto::limits::PAGE_BYTES;

use super::*;
use crate::source::participants::Participants;
use crate::source::participants::tests::{Fake, Steps, taken};

/// Number of pages of the participant.
const PAGES: u64 = 4;

/// Block that keeps nothing.
struct Sink;

impl BlockWriter for Sink {
    fn name(&self) -> &'static str {
        "sink"
    }

    fn bytes(&self) -> u64 {
        PAGES * PAGE_BYTES
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), RamError> {
        into.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), RamError> {
        Ok(())
    }

    fn allow_direct_placement(&self, _: Range<u64>) -> bool {
        false
    }

    fn drop_pages(&self, _: Range<u64>) -> Result<(), RamError> {
        Ok(())
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

/// Begins a migration of this participant alone, of a guest that runs.
fn begin(world: &World, qemu: &Qemu, steps: &Steps) -> thread::JoinHandle<SourceState> {
    qemu.monitor().running = true;
    let (mut driver, ..) = new_driver(world, terms("a", "b"), SourceState::Idle, None);
    driver.resources.vm = Some(qemu.source_vm(&world.context));
    let mut fake = Fake::new("only", steps);
    (fake.pages, fake.profile.can_post_copy) = (PAGES, true);
    driver.resources.participants = Participants::new(Faults::default(), vec![Box::new(fake)]);
    driver.begin(host::testing::proposal()).unwrap();
    thread::spawn(move || driver.run())
}

/// Receives all up to FROZEN. Returns the control stream, and the digest of the device state.
fn receive(world: &World) -> (Peer, Receiver, String) {
    let mut control = world.accept();
    control.receive_until(|message| matches!(message, Message::Propose(_)));
    control.send_message(&Message::Accept(host::testing::acceptance()));
    let Peer(data) = world.accept();
    let writers: Vec<Box<dyn BlockWriter>> = vec![Box::new(Sink)];
    let mut receiver = Receiver::new(writers.into(), 1, |_, _| {});
    receiver.begin(Generation(1));
    receiver.attach(Generation(1), 0, DataStream::over(data, None)).unwrap();
    let mut loaded = String::new();
    loop {
        match control.0.recv(Some(Instant::now() + host::testing::PATIENCE)).unwrap() {
            Incoming::Message(Message::DeviceState { digest, .. }) => loaded = digest,
            Incoming::Message(Message::Frozen { .. }) => return (control, receiver, loaded),
            Incoming::Message(_) | Incoming::Blob(_) => {}
        }
    }
}

/// Returns the steps between rounds, and the others.
fn apart(steps: &Steps) -> (Vec<String>, Vec<String>) {
    let of_rounds = ["only scan with QEMU", "only after_scan", "only before_round", "only after_round"];
    taken(steps).into_iter().partition(|step| of_rounds.iter().any(|of_round| step.starts_with(of_round)))
}

/// The steps up to FROZEN: those before the first round, and those while the guest is stopped. QEMU saves its devices
/// between the last two scans.
const UP_TO_HELD: [&str; 8] = [
    "only report",
    "only check",
    "only prepare",
    "only before_stop",
    "only freeze",
    "only scan",
    "only scan",
    "only ready",
];

#[test]
fn each_phase_lets_the_participants_take_part() {
    let (world, steps) = (World::new(), Steps::default());
    let qemu = Qemu::start(world.folder.path());
    let end_state = begin(&world, &qemu, &steps);
    let (mut control, _receiver, digest) = receive(&world);
    control.send_message(&Message::Ready { epoch: Epoch(1), incarnation: incarnation(), digest, load_us: 0 });
    control.receive_until(|message| matches!(message, Message::Go { .. }));
    control.send_message(&running());
    assert!(matches!(end_state.join().unwrap(), SourceState::Done { .. }));
    let (rounds, others) = apart(&steps);
    let first = ["only scan with QEMU", "only after_scan", "only before_round", "only after_round 4"];
    assert_eq!(rounds[..4], first);
    assert_eq!(
        others,
        [&UP_TO_HELD[..], &["only commit", "only running", "only finish", "zeros end"]].concat()
    );
}

#[test]
fn a_destination_that_refuses_the_guest_lets_them_undo() {
    let (world, steps) = (World::new(), Steps::default());
    let qemu = Qemu::start(world.folder.path());
    let end_state = begin(&world, &qemu, &steps);
    let (mut control, _receiver, _digest) = receive(&world);
    assert!(qemu.is_frozen());
    control.send_message(&Message::Refused { epoch: Epoch(1), reason: "not today".to_owned() });
    assert_eq!(end_state.join().unwrap(), SourceState::Aborted);
    assert!(qemu.monitor().running && !qemu.is_frozen(), "the guest continues");
    assert_eq!(apart(&steps).1, [&UP_TO_HELD[..], &["zeros end", "only undo"]].concat());
}
