//! A participant that only records what is asked of it: a third one needs no edit elsewhere.

use std::sync::{Arc, Mutex};

use super::*;
use crate::source::failure::Failure;
use ::memory::{BlockReader, PageCounts, RamError, ScanError, ScanStats};

/// Steps of all fakes of a test, in their order.
pub(in crate::source) type Steps = Arc<Mutex<Vec<String>>>;

/// Participant of one block of `pages` pages, of which `written` were written since each scan.
pub(in crate::source) struct Fake {
    pub(in crate::source) profile: Profile,
    pub(in crate::source) steps: Steps,
    pub(in crate::source) pages: u64,
    pub(in crate::source) written: Range<u64>,
    /// Number of steps of its preparation, and of attempts to undo that fail: its name is the text for users then.
    pub(in crate::source) steps_left: u32,
    pub(in crate::source) failed_undos: u32,
    /// Returns what each step finds, which is recorded with it; empty if it is nothing special.
    pub(in crate::source) observe: Box<dyn Fn() -> &'static str + Send>,
}

impl Fake {
    pub(in crate::source) fn new(name: &'static str, steps: &Steps) -> Self {
        Self {
            profile: Profile { name, can_post_copy: false, is_sent_first: false, irreversible: None },
            steps: Arc::clone(steps),
            pages: 0,
            written: 0..0,
            steps_left: 0,
            failed_undos: 0,
            observe: Box::new(|| ""),
        }
    }

    fn step(&self, step: &str) {
        let found = (self.observe)();
        self.steps.lock().unwrap().push(format!("{} {step}{found}", self.profile.name));
    }
}

/// Block that holds zeros, and records its end.
pub(in crate::source) struct Zeros {
    pub(in crate::source) bytes: u64,
    pub(in crate::source) steps: Steps,
}

impl Drop for Zeros {
    fn drop(&mut self) {
        self.steps.lock().unwrap().push("zeros end".to_owned());
    }
}

impl BlockReader for Zeros {
    fn name(&self) -> &'static str {
        "zeros"
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), RamError> {
        into.fill(0);
        Ok(())
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        Ok(range.end)
    }
}

impl Participant for Fake {
    fn profile(&self) -> Profile {
        self.profile
    }

    fn report(&self, _: &Agreed<'_>, _: &mut Report) {
        self.step("report");
    }

    fn check(&mut self, _: &Agreed<'_>) -> Result<(), Failure> {
        self.step("check");
        Ok(())
    }

    fn prepare(&mut self, _: &mut SourceVm, _: &Reductions) -> Result<PrepareProgress, Failure> {
        self.step("prepare");
        let Some(left) = self.steps_left.checked_sub(1) else { return Ok(PrepareProgress::Done) };
        self.steps_left = left;
        Ok(PrepareProgress::Unfinished)
    }

    fn blocks(&mut self, _: &SourceVm) -> Result<Vec<Block>, Failure> {
        let bytes = self.pages * PAGE_BYTES;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let reader = Box::new(Zeros { bytes, steps: Arc::clone(&self.steps) });
        Ok(vec![Block { reader, first: PageSet::full(bytes) }])
    }

    fn progress(&self) -> Vec<ShownBlock> {
        let (name, bytes) = (self.profile.name.to_owned(), self.pages * PAGE_BYTES);
        let block = ShownBlock { number: 0, kind: "fake", name, bytes };
        if bytes == 0 { Vec::new() } else { vec![block] }
    }

    fn before_round(&mut self, _: &mut SourceVm, pages: u64) -> Result<u64, Failure> {
        self.step("before_round");
        Ok(pages / 2)
    }

    fn after_round(&mut self, stats: &RoundStats) {
        self.step(&format!("after_round {}", stats.contents.pages()));
    }

    fn scan(&mut self, qmp: Option<&mut Qmp>, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        self.step(if qmp.is_some() { "scan with QEMU" } else { "scan" });
        for block in into.iter_mut() {
            block.set(self.written.clone());
        }
        Ok(ScanStats { pages: self.written.end - self.written.start, duration_us: 1 })
    }

    fn after_scan(&mut self, _: &mut Qmp) -> Result<(), Failure> {
        self.step("after_scan");
        Ok(())
    }

    fn before_stop(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        self.step("before_stop");
        Ok(())
    }

    fn message(&mut self) -> Option<Message> {
        None
    }

    fn freeze(&mut self, _: &mut SourceVm, _: Comparison, _: &mut [PageSet]) -> Result<(), Failure> {
        self.step("freeze");
        Ok(())
    }

    fn hash(
        &mut self,
        _: &mut SourceVm,
        first_block: usize,
        _: &[PageSet],
        _: &mut BlockHashes,
    ) -> Result<(), Failure> {
        self.step(&format!("hash {first_block}"));
        Ok(())
    }

    fn ready(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        self.step("ready");
        Ok(())
    }

    fn commit(&mut self) {
        self.step("commit");
    }

    fn undo(&mut self, vm: Option<&mut SourceVm>) -> UndoResult {
        self.step(if vm.is_some() { "undo" } else { "undo without QEMU" });
        let Some(left) = self.failed_undos.checked_sub(1) else { return UndoResult::Done };
        self.failed_undos = left;
        UndoResult::Retry(self.profile.name)
    }

    fn running(&mut self) {
        self.step("running");
    }

    fn finish(&mut self) {
        self.step("finish");
    }

    fn expects_message(&self) -> bool {
        false
    }

    fn learn(&mut self, _: &Message) {
        self.step("learn");
    }
}

/// Returns the steps since the last call.
pub(in crate::source) fn taken(steps: &Steps) -> Vec<String> {
    std::mem::take(&mut steps.lock().unwrap())
}

fn boxed(fake: Fake) -> Box<dyn Participant> {
    Box::new(fake)
}

/// Lets the participants check what a destination accepts that can do nothing special.
fn check(participants: &mut Participants) -> Result<(), Failure> {
    let agreed = Agreed { proposal: None, acceptance: &host::testing::acceptance(), redirection: None };
    participants.check(&agreed)
}

#[test]
fn a_step_that_cannot_be_undone_before_committed_is_refused() {
    let steps = Steps::default();
    let mut fake = Fake::new("network", &steps);
    fake.profile.irreversible = Some("freeze");
    let mut participants = Participants::new(Faults::default(), vec![boxed(fake)]);
    let failure = check(&mut participants).unwrap_err();
    assert!(failure.reason.contains("network cannot undo its step freeze"), "{}", failure.reason);
    assert!(taken(&steps).is_empty(), "nothing was asked of it");
}

#[test]
fn each_scans_its_own_blocks_and_the_last_one_first() {
    let world = host::testing::World::new();
    let qemu = host::testing::Qemu::start(world.folder.path());
    let mut vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
    let steps = Steps::default();
    let (mut first, mut early) = (Fake::new("first", &steps), Fake::new("early", &steps));
    (first.pages, first.written, first.profile.can_post_copy, first.steps_left) = (8, 1..2, true, 1);
    (early.pages, early.written, early.profile.is_sent_first) = (4, 2..4, true);
    let mut participants = Participants::new(Faults::default(), vec![boxed(first), boxed(early)]);
    check(&mut participants).unwrap();
    let payload = participants.open(&mut vm).unwrap();
    assert_eq!(payload.ram_bytes(), [8 * PAGE_BYTES], "only blocks that may follow the guest");
    let shown = |(number, name, pages): (usize, &str, u64)| {
        let (name, bytes) = (name.to_owned(), pages * PAGE_BYTES);
        ShownBlock { number, kind: "fake", name, bytes }
    };
    assert_eq!(participants.progress(), [(0, "first", 8), (1, "early", 4)].map(shown));
    assert_eq!(taken(&steps), ["first check", "early check", "early prepare"]);
    let mut owed = participants.first_pages();
    assert_eq!(owed.pages(), 4, "memory waits");
    let by_name = |pages: &[(&str, u64)]| -> BTreeMap<String, u64> {
        pages.iter().map(|(name, pages)| ((*name).to_owned(), *pages)).collect()
    };
    assert_eq!(participants.pages_by_name(&owed), by_name(&[("early", 4)]));
    assert_eq!((participants.is_any_sent_first(), participants.waiting_bytes()), (true, 8 * PAGE_BYTES));
    // Only what is prepared is scanned.
    participants.log(None).scan_dirty(owed.blocks_mut(0..2).unwrap()).unwrap();
    assert_eq!(taken(&steps), ["early scan"]);
    while participants.prepare(&mut vm, &Reductions::default(), &mut owed).unwrap()
        == PrepareProgress::Unfinished
    {}
    assert_eq!(taken(&steps), ["first prepare", "first prepare"]);
    assert_eq!(owed.pages(), 12);
    assert_eq!(participants.pages_by_name(&owed), by_name(&[("early", 4), ("first", 8)]));
    let mut found = [PageSet::new(8 * PAGE_BYTES), PageSet::new(4 * PAGE_BYTES)];
    let scan = participants.log(None).scan_dirty(&mut found).unwrap();
    assert_eq!((scan.pages, scan.duration_us), (3, 2));
    assert_eq!(taken(&steps), ["early scan", "first scan"]);
    let found_pages = found.map(|block| block.runs().flatten().collect::<Vec<_>>());
    assert_eq!(found_pages, [vec![1], vec![2, 3]]);
    participants.hashes(&mut vm, &[]).unwrap();
    assert_eq!(taken(&steps), ["first hash 0", "early hash 1"]);
    assert_eq!(participants.before_round(&mut vm, 20).unwrap(), 10);
    let contents = PageCounts { data: 7, ..PageCounts::default() };
    participants.after_round(Some(&RoundStats { contents, ..RoundStats::default() }));
    participants.after_round(None);
    let rounds = ["first before_round", "early before_round", "first after_round 7", "early after_round 7"];
    assert_eq!(taken(&steps), rounds);
}

#[test]
fn pages_are_never_lost_for_lack_of_room() {
    let world = host::testing::World::new();
    let qemu = host::testing::Qemu::start(world.folder.path());
    let mut vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
    let steps = Steps::default();
    let mut fake = Fake::new("network", &steps);
    (fake.pages, fake.profile.is_sent_first) = (4, true);
    let mut participants = Participants::new(Faults::default(), vec![boxed(fake)]);
    participants.open(&mut vm).unwrap();
    taken(&steps);
    participants.log(None).scan_dirty(&mut []).unwrap_err();
    participants.freeze(&mut vm, Comparison::NotCompared, &mut OwedPages::of(vec![])).unwrap_err();
    assert!(taken(&steps).is_empty(), "its log keeps its pages");
}

#[test]
fn all_undo_even_if_one_has_to_try_again() {
    let steps = Steps::default();
    let stuck = |name, failed_undos| boxed(Fake { failed_undos, ..Fake::new(name, &steps) });
    let members = vec![stuck("stuck", 2), stuck("late", 1), stuck("other", 0)];
    let mut participants = Participants::new(Faults::default(), members);
    assert_eq!(participants.undo(None), ["late", "stuck"], "no text replaces another");
    // The guest runs, and must not wait for its frames until disks have answered.
    let order = ["other undo without QEMU", "late undo without QEMU", "stuck undo without QEMU"];
    assert_eq!(taken(&steps), order);
    assert_eq!(participants.undo(None), ["stuck"]);
    assert!(participants.undo(None).is_empty());
}

/// Steps that have fault points, in the order of a migration, and what a fake records of each.
const STEPS: [(&str, &str); 10] = [
    ("check", "check"),
    ("prepare-first", ""),
    ("prepare", "prepare"),
    ("before-stop", "before_stop"),
    ("freeze", "freeze"),
    ("ready", "ready"),
    ("commit", "commit"),
    ("undo", "undo without QEMU"),
    ("running", "running"),
    ("finish", "finish"),
];

/// The kill matrix of the end-to-end tests injures hosts at all points that an undisturbed migration reaches: when one
/// participant has done a step, and the next one has not.
#[test]
fn a_host_can_die_between_any_two_participants() {
    let world = host::testing::World::new();
    let qemu = host::testing::Qemu::start(world.folder.path());
    let mut vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
    let (path, steps) = (world.folder.path().join("faults.sock"), Steps::default());
    let seen = Arc::clone(&steps);
    let points = host::fault::observe(&path, move || taken(&seen));
    let fakes = ["first", "second"].map(|name| boxed(Fake::new(name, &steps)));
    let mut participants = Participants::new(Faults::new(Some(path)), fakes.into());
    let mut owed = OwedPages::of(vec![]);
    check(&mut participants).unwrap();
    participants.open(&mut vm).unwrap();
    while participants.prepare(&mut vm, &Reductions::default(), &mut owed).unwrap()
        == PrepareProgress::Unfinished
    {}
    participants.before_stop(&mut vm).unwrap();
    participants.freeze(&mut vm, Comparison::NotCompared, &mut owed).unwrap();
    participants.ready(&mut vm).unwrap();
    participants.commit();
    participants.undo(None);
    participants.running();
    participants.finish();
    let expected: Vec<_> = STEPS
        .iter()
        .flat_map(|(step, recorded)| {
            let names = if *step == "undo" { ["second", "first"] } else { ["first", "second"] };
            names.map(|name| {
                let of_it = if recorded.is_empty() { vec![] } else { vec![format!("{name} {recorded}")] };
                (format!("source/{name}/{step}"), of_it)
            })
        })
        .collect();
    assert_eq!(points.try_iter().collect::<Vec<_>>(), expected);
}
