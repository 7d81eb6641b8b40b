//! An arriving participant that only records what is asked of it: a third one needs no edit elsewhere.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use ::memory::Receiver;
use ::memory::ram::RamError;
use host::testing::{PATIENCE, Qemu, World, id, proposal};

use super::participant::OpenBlocks;
use super::*;

/// Steps of all fakes of a test, in their order.
pub(in crate::destination) type ArrivingSteps = Arc<Mutex<Vec<String>>>;

/// Participant with `blocks` blocks of one page.
pub(in crate::destination) struct ArrivingFake {
    pub(in crate::destination) profile: ArrivingProfile,
    pub(in crate::destination) steps: ArrivingSteps,
    pub(in crate::destination) blocks: usize,
    /// Place that it reports, and leaves behind until it was asked this often to remove it.
    pub(in crate::destination) place: Option<PathBuf>,
    pub(in crate::destination) failed_removals: u32,
    /// Returns what each step finds, which is recorded with it; empty if it is nothing special.
    pub(in crate::destination) observe: Box<dyn Fn() -> &'static str + Send>,
}

impl ArrivingFake {
    pub(in crate::destination) fn new(name: &'static str, steps: &ArrivingSteps) -> Self {
        Self {
            profile: ArrivingProfile { name, can_post_copy: false, irreversible: None },
            steps: Arc::clone(steps),
            blocks: 0,
            place: None,
            failed_removals: 0,
            observe: Box::new(|| ""),
        }
    }

    fn step(&self, step: &str) {
        record(&self.steps, self.profile.name, &format!("{step}{}", (self.observe)()));
    }
}

fn record(steps: &ArrivingSteps, name: &str, step: &str) {
    steps.lock().unwrap().push(format!("{name} {step}"));
}

/// Block that keeps nothing.
#[derive(Debug)]
struct Sink;

impl BlockWriter for Sink {
    fn name(&self) -> &'static str {
        "sink"
    }

    fn bytes(&self) -> u64 {
        proto::limits::PAGE_BYTES
    }

    fn is_ram(&self) -> bool {
        false
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), RamError> {
        into.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), RamError> {
        Ok(())
    }

    fn allow_direct_placement(&self, _: Range<u64>) -> bool {
        true
    }

    fn drop_pages(&self, _: Range<u64>) -> Result<(), RamError> {
        Ok(())
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

impl ArrivingParticipant for ArrivingFake {
    fn profile(&self) -> ArrivingProfile {
        self.profile
    }

    fn check(&mut self, _: &Proposal, _: &ArrivalPlan) -> Result<(), ArrivalError> {
        self.step("check");
        Ok(())
    }

    fn prepare(&mut self, _: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        self.step("prepare");
        Ok(())
    }

    fn open(&mut self, _: &mut ArrivingVm) -> Result<OpenBlocks, ArrivalError> {
        self.step("open");
        let writers = (0..self.blocks).map(|_| Box::new(Sink) as Box<dyn BlockWriter>).collect();
        let (steps, name) = (Arc::clone(&self.steps), self.profile.name);
        let after_round = move |round: &ReceivedRound, _: &ReceiverHandle| {
            record(&steps, name, &format!("round {}", round.ram_round));
        };
        Ok(OpenBlocks { writers, after_round: Box::new(after_round) })
    }

    fn learn(&mut self, message: &Message) {
        self.step(&format!("learn {message:?}"));
    }

    fn compare(
        &mut self,
        _: &mut ArrivingVm,
        block: usize,
        first_chunk: u64,
        theirs: &[String],
    ) -> Result<Vec<u64>, Incomparable> {
        self.step(&format!("compare {block} {first_chunk} {theirs:?}"));
        Ok(vec![first_chunk])
    }

    fn freeze(&mut self) -> Result<(), ArrivalError> {
        self.step("freeze");
        Ok(())
    }

    fn ready(&mut self, _: &mut ArrivingVm) -> Result<(), ArrivalError> {
        self.step("ready");
        Ok(())
    }

    fn before_cont(&mut self) {
        self.step("before_cont");
    }

    fn commit(&mut self, _: &mut ArrivingVm, runs_for: Option<Duration>) {
        self.step(if runs_for.is_some() { "commit running" } else { "commit paused" });
    }

    fn abandon(&mut self) {
        self.step("abandon");
    }

    fn undo(&mut self, _: &ArrivalArtifacts, execution: GuestRan) -> Option<Leftover> {
        self.step(&format!("undo {execution:?}"));
        let place = self.place.clone()?;
        let left = Mutex::new(self.failed_removals);
        let remove = move || {
            let mut left = left.lock().unwrap();
            let is_gone = *left == 0;
            *left = left.saturating_sub(1);
            is_gone
        };
        Some(Leftover { notice: format!("{} stays", place.display()), remove: Box::new(remove) })
    }

    fn places(&self) -> Vec<PathBuf> {
        self.place.iter().cloned().collect()
    }

    fn last_message(&mut self) -> Option<LastMessage> {
        self.step("last_message");
        Some(Box::new(|| Message::Pong))
    }

    fn finish(&mut self, _: Option<&ArrivingVm>) {
        self.step("finish");
    }
}

/// Returns the steps since the last call.
pub(in crate::destination) fn taken(steps: &ArrivingSteps) -> Vec<String> {
    std::mem::take(&mut steps.lock().unwrap())
}

fn boxed(fake: ArrivingFake) -> Box<dyn ArrivingParticipant> {
    Box::new(fake)
}

/// Returns a QEMU that waits for its guest, and the VM.
fn waiting(world: &World) -> (Qemu, ArrivingVm) {
    let mut artifacts = ArrivalArtifacts::plan(&world.context.config, &id(1));
    let qemu = Qemu::start(&artifacts.directory);
    artifacts.process = Some(qemu.process());
    (qemu, ArrivingVm::find(artifacts, PATIENCE).unwrap())
}

#[test]
fn a_step_that_cannot_be_undone_before_committed_is_refused() {
    let steps = ArrivingSteps::default();
    let mut fake = ArrivingFake::new("network", &steps);
    fake.profile.irreversible = Some("prepare");
    let mut participants = ArrivingParticipants::new(Faults::default(), vec![boxed(fake)]);
    let refused = participants.check(&proposal(), &ArrivalPlan::default()).unwrap_err().to_string();
    assert!(refused.contains("network cannot undo its step prepare"), "{refused}");
    assert!(taken(&steps).is_empty(), "nothing was asked of it");
}

#[test]
fn each_gets_its_own_blocks_by_its_own_numbers() {
    let world = World::new();
    let (_qemu, mut vm) = waiting(&world);
    let steps = ArrivingSteps::default();
    let (mut first, mut second) = (ArrivingFake::new("first", &steps), ArrivingFake::new("second", &steps));
    (first.blocks, first.profile.can_post_copy, second.blocks) = (2, true, 1);
    let mut participants = ArrivingParticipants::new(Faults::default(), vec![boxed(first), boxed(second)]);
    let AllBlocks { writers, post_copied, after_round } = participants.open(&mut vm).unwrap();
    assert_eq!((writers.len(), post_copied), (3, 2), "only the blocks of the first may follow the guest");
    assert_eq!(taken(&steps), ["first open", "second open"]);

    let hashes = ["a".to_owned()];
    assert_eq!(participants.compare(&mut vm, 1, 7, &hashes).unwrap(), [7]);
    participants.compare(&mut vm, 2, 8, &hashes).unwrap();
    assert_eq!(taken(&steps), [r#"first compare 1 7 ["a"]"#, r#"second compare 0 8 ["a"]"#]);
    let error = crate::chain(&participants.compare(&mut vm, 3, 0, &[]).unwrap_err());
    assert!(error.ends_with("the source has a part of block 3 that does not exist here"), "{error}");
    assert!(taken(&steps).is_empty());

    let receiver = Receiver::new(writers.into(), 1, |_, _| {});
    after_round(&ReceivedRound { ram_round: 4, took: Duration::ZERO }, &receiver.handle());
    assert_eq!(taken(&steps), ["second round 4", "first round 4"]);
}

#[test]
fn all_undo_even_if_one_leaves_something_behind() {
    let steps = ArrivingSteps::default();
    let mut participants = ArrivingParticipants::new(Faults::default(), Vec::new());
    assert_eq!(participants.places(), None);
    let place = Some("/stuck".into());
    participants.add(boxed(ArrivingFake { place, failed_removals: 1, ..ArrivingFake::new("stuck", &steps) }));
    participants.add(boxed(ArrivingFake::new("other", &steps)));
    assert_eq!(participants.places().unwrap(), "its stuck are /stuck");
    let left = participants.undo(&ArrivalArtifacts::default(), GuestRan::Never);
    assert_eq!(taken(&steps), ["stuck undo Never", "other undo Never"]);
    let [left] = &left[..] else { panic!("one leaves something behind") };
    assert_eq!(left.notice, "/stuck stays");
    assert_eq!([(left.remove)(), (left.remove)()], [false, true]);
}

/// The kill matrix of the end-to-end tests injures hosts at all points that an undisturbed migration reaches: when one
/// participant has done a step, and the next one has not.
#[test]
fn fault_points_follow_from_the_list() {
    let world = World::new();
    let (_qemu, mut vm) = waiting(&world);
    let (path, steps) = (world.folder.path().join("faults.sock"), ArrivingSteps::default());
    let seen = Arc::clone(&steps);
    let points = host::fault::observe(&path, move || taken(&seen));
    let fakes = ["first", "second"].map(|name| boxed(ArrivingFake::new(name, &steps)));
    let mut participants = ArrivingParticipants::new(Faults::new(Some(path)), fakes.into());
    let mut artifacts = ArrivalArtifacts::default();
    participants.check(&proposal(), &ArrivalPlan::default()).unwrap();
    participants.prepare(&mut artifacts).unwrap();
    drop(participants.open(&mut vm).unwrap());
    participants.learn(&Message::Claims { cards: Vec::new() });
    participants.freeze().unwrap();
    participants.ready(&mut vm).unwrap();
    participants.before_cont();
    participants.commit(&mut vm, None);
    participants.abandon();
    participants.undo(&artifacts, GuestRan::Possibly);
    participants.finish(Some(&vm));
    let with_points = [
        ("check", "check"),
        ("prepare", "prepare"),
        ("open", "open"),
        ("learn", "learn Claims { cards: [] }"),
        ("freeze", "freeze"),
        ("ready", "ready"),
        ("before-cont", "before_cont"),
        ("commit", "commit paused"),
        ("abandon", "abandon"),
        ("undo", "undo Possibly"),
        ("finish", "finish"),
    ];
    let of_both = |(step, recorded): (&str, &str)| {
        ["first", "second"]
            .map(|name| (format!("destination/{name}/{step}"), vec![format!("{name} {recorded}")]))
    };
    let expected: Vec<_> = with_points.into_iter().flat_map(of_both).collect();
    assert_eq!(points.try_iter().collect::<Vec<_>>(), expected);
}
