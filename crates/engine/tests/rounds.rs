//! Rounds until the stop, over a link that is cut at any moment: generated migrations, carried out as a driver would.
//!
//! The link, the destination and the guest are simulated; they know what is true, and check each step against it.

#![allow(clippy::panic, reason = "a test may fail")]

extern crate whimbrel_engine as engine;

use std::time::Duration;

use engine::handover::source::{SourceEvent, SourceState};
use engine::pre_copy::{
    AnyPolicy, AvailableStrategies, FixedCost, HybridPolicy, OnLimit, PatternPolicy, PreCopyGoals, SlaPolicy,
    TracedStopPolicy,
};
use engine::session::{
    ConnectionFacts, PageSelection, ReconnectStep, Reconnection, RoundContext, RoundStep, Rounds, ScanResult,
    SentRound, SwitchoverKind, SwitchoverPlan, Time,
};
use proptest::prelude::*;
use proto::Generation;

const SECOND: Duration = Duration::from_secs(1);
/// Patience with a cut link.
const PATIENCE: Duration = Duration::from_secs(5);
/// More rounds than any of these policies wants.
const MOST_ROUNDS: u32 = 2000;
/// More attempts than fit into the patience.
const MOST_STEPS: u32 = 100;

/// Source of the events of a migration. When it is exhausted, nothing happens any more that would delay the end.
struct Choices(std::vec::IntoIter<u8>);

impl Choices {
    fn draw(&mut self) -> u8 {
        self.0.next().unwrap_or(0)
    }

    /// Returns true in one of `of` cases.
    fn happens(&mut self, of: u8) -> bool {
        self.draw() % of == of - 1
    }
}

/// End of a migration before the guest was stopped.
#[derive(Debug)]
struct GivenUp;

/// A source host, its link and its destination, as they are.
struct World {
    choices: Choices,
    now: Time,
    has_control: bool,
    /// Generation of the source's last connections.
    generation: Generation,
    /// Generation of the streams that the source has.
    streams: Generation,
    /// Generation that the destination receives; nothing of an earlier one is applied.
    received: Generation,
    /// True if page cache of the guest is deferred.
    has_deferred: bool,
    /// Generation in which pages were discarded, until a round sends memory.
    discarded: Option<Generation>,
    /// True if pages were discarded, or could not be, since the last dirty scan.
    has_tried_to_discard: bool,
    goals: PreCopyGoals,
}

impl World {
    fn new(choices: Vec<u8>, has_deferred: bool, goals: PreCopyGoals) -> Self {
        let first = Generation(1);
        Self {
            choices: Choices(choices.into_iter()),
            now: Time::default(),
            has_control: true,
            generation: first,
            streams: first,
            received: first,
            has_deferred,
            discarded: None,
            has_tried_to_discard: false,
            goals,
        }
    }

    fn connections(&self) -> ConnectionFacts {
        ConnectionFacts { has_control: self.has_control, generation: self.generation }
    }

    fn facts(&self) -> RoundContext {
        RoundContext {
            has_control: self.has_control,
            has_deferred: self.has_deferred,
            has_discarded: self.discarded == Some(self.generation),
        }
    }

    /// Lets time pass in which the control stream may be lost.
    fn handle_notices(&mut self) {
        self.has_control &= !self.choices.happens(6);
    }

    fn scan(&mut self) -> ScanResult {
        self.now = self.now.after(SECOND);
        let dirty_pages = u64::from(self.choices.draw()) << 12;
        let must_precopy_pages = if self.choices.happens(3) { dirty_pages / 2 } else { 0 };
        ScanResult {
            scanned_at: self.now,
            scan_ns: 1000,
            dirty_pages,
            must_precopy_pages,
            elapsed: self.now.from_origin(),
            goals: self.goals,
            ..ScanResult::default()
        }
    }

    fn discard(&mut self) {
        self.has_tried_to_discard = true;
        if self.has_control {
            self.discarded = Some(self.generation);
            self.handle_notices();
        }
    }

    /// Sends a round. Returns false if it was cut off; the connections are new then.
    fn send(&mut self, sends_memory: bool) -> Result<bool, GivenUp> {
        if sends_memory {
            self.discarded = None;
        }
        if !self.connections().can_carry_round(self.streams) {
            return self.reconnect().map(|()| false);
        }
        assert!(self.has_control, "the destination is not informed of the end of this round");
        assert_eq!(self.streams, self.received, "the destination applies nothing of this round");
        match self.choices.draw() % 8 {
            // Data streams may end before the control stream, or after it.
            6 => self.reconnect().map(|()| false),
            7 => {
                self.has_control = false;
                self.reconnect().map(|()| false)
            }
            _ => Ok(true),
        }
    }

    fn reconnect(&mut self) -> Result<(), GivenUp> {
        let began = self.now;
        let mut reconnection = Reconnection::begin(self.connections(), PATIENCE, SECOND, self.now);
        for _ in 0..MOST_STEPS {
            match reconnection.next_step() {
                ReconnectStep::AwaitReason(wait) => {
                    assert!(self.has_control, "no reason can arrive");
                    self.now = self.now.after(wait);
                    self.has_control = false;
                }
                ReconnectStep::Connect(generation) => {
                    assert!(!self.has_control, "the destination still has another control stream");
                    assert!(generation > self.generation.max(self.received), "a generation begins twice");
                    self.generation = generation;
                    let failure = match self.choices.draw() % 9 {
                        5 => SourceEvent::PeerLost,
                        6 | 7 => SourceEvent::PeerSilent,
                        8 => SourceEvent::Cancel,
                        _ => {
                            self.has_control = true;
                            (self.streams, self.received) = (generation, generation);
                            return Ok(());
                        }
                    };
                    if failure == SourceEvent::PeerSilent {
                        // Only the answer was lost.
                        (self.has_control, self.received) = (true, generation);
                    }
                    if !reconnection.tries_again(&failure, self.now) {
                        return Err(GivenUp);
                    }
                    assert!(self.now.since(began) < PATIENCE, "the patience is over");
                }
                ReconnectStep::Pause(pause) => {
                    self.has_control = false;
                    self.now = self.now.after(pause);
                }
            }
        }
        panic!("it does not end");
    }

    /// Checks that this is the time to stop the guest.
    fn check_stop(&self, ending: SwitchoverKind) {
        assert!(self.has_control, "a stopped guest waits for a link that is cut");
        assert_eq!((self.streams, self.received), (self.generation, self.generation));
        assert!(!self.has_deferred, "the guest is stopped without a part of its memory");
        assert!(
            ending == SwitchoverKind::StopAndCopy || self.has_tried_to_discard,
            "pages are discarded during the stop"
        );
    }
}

/// Sends rounds until the guest is to be stopped.
fn move_guest(world: &mut World, policy: &AnyPolicy) -> Result<SwitchoverKind, GivenUp> {
    let mut rounds = Rounds::new(TracedStopPolicy::new(policy.clone()));
    for _ in 0..MOST_ROUNDS {
        world.has_tried_to_discard = false;
        if rounds.is_first_pass() && world.choices.happens(4) {
            rounds.end_first_pass();
        }
        let passes = rounds.passes();
        let scan = world.scan();
        let decided = rounds.scanned(|| scan);
        assert!(decided.is_none_or(|decided| decided.observed.pass == passes));
        loop {
            match rounds.next_step(world.facts()) {
                RoundStep::Send => {
                    send_round(world, &mut rounds, scan)?;
                    break;
                }
                RoundStep::Discard => world.discard(),
                RoundStep::ReclaimDeferred => {
                    assert!(world.has_deferred, "there is nothing to give back");
                    world.has_deferred = false;
                    rounds.deferred_reclaimed(TracedStopPolicy::new(policy.clone()));
                    assert_eq!(rounds.passes(), passes, "passes are forgotten");
                }
                RoundStep::SendReclaimed => {
                    world.send(true)?;
                    break;
                }
                RoundStep::CheckControl => world.handle_notices(),
                RoundStep::Stop { ending, .. } => {
                    world.check_stop(ending);
                    return Ok(ending);
                }
                RoundStep::GiveUp { .. } => return Err(GivenUp),
            }
        }
    }
    panic!("it does not end");
}

fn send_round(world: &mut World, rounds: &mut Rounds, scan: ScanResult) -> Result<(), GivenUp> {
    world.handle_notices();
    let selection = rounds.select_pages(scan.dirty_pages, 1);
    let pages = match selection {
        PageSelection::Part { pages } => pages,
        PageSelection::MustPreCopy => scan.must_precopy_pages,
        PageSelection::FirstPass | PageSelection::All => scan.dirty_pages,
    };
    if !world.send(selection != PageSelection::MustPreCopy)? {
        rounds.cut();
        return Ok(());
    }
    let sent = SentRound {
        scanned_at: scan.scanned_at,
        pages_sent: pages,
        bytes_sent: pages * 4096,
        duration_ns: 1_000_000 + pages * 10_000,
        remaining_pages: scan.dirty_pages - pages,
        ..SentRound::default()
    };
    // When nothing delays it any more, the end of all pages is reached.
    let has_reached_end = !world.choices.happens(2);
    rounds.sent(sent, has_reached_end);
    Ok(())
}

fn any_policy() -> impl Strategy<Value = (AnyPolicy, PreCopyGoals)> {
    let on_limit = prop_oneof![Just(OnLimit::Stop), Just(OnLimit::PostCopy), Just(OnLimit::Abort)];
    let ways = (any::<bool>(), any::<bool>());
    (0..3_u8, on_limit, ways, 0..6_u32, 0..2_000_000_000_u64).prop_map(
        |(kind, on_limit, (slow_down, post_copy), passes, max_downtime_ns)| {
            let limits = PreCopyGoals { max_downtime_ns, max_passes: passes, max_total_ns: None };
            let timed = PreCopyGoals { max_total_ns: Some(20_000_000_000), ..limits };
            let ways = AvailableStrategies { slow_down, post_copy };
            let fixed = FixedCost::default();
            match kind {
                0 => (AnyPolicy::from(PatternPolicy::new(limits, on_limit, fixed)), limits),
                1 => (AnyPolicy::from(HybridPolicy::new(limits, passes, fixed)), limits),
                _ => (AnyPolicy::from(SlaPolicy::new(timed, ways, on_limit, fixed)), timed),
            }
        },
    )
}

proptest! {
    /// Property of rounds over a link that may be cut at any moment: none is sent over connections that have ended, the
    /// guest is stopped only while the destination can be reached and once it has given back what was deferred, and the
    /// migration ends.
    #[test]
    fn rounds_end_and_stop_only_what_can_continue(
        (policy, goals) in any_policy(),
        choices in prop::collection::vec(any::<u8>(), 0..300),
        has_deferred in any::<bool>(),
        (runs, must_compare) in (any::<bool>(), any::<bool>()),
    ) {
        let mut world = World::new(choices, has_deferred, goals);
        if let Ok(ending) = move_guest(&mut world, &policy) {
            let stopped = SourceState::Stopped { run: runs };
            let switchover = SwitchoverPlan::begin(ending, &stopped, must_compare);
            let is_post_copy = switchover.ending() == SwitchoverKind::PostCopy;
            prop_assert!(runs || !is_post_copy, "a paused guest needs both hosts");
            prop_assert_eq!(is_post_copy, runs && ending == SwitchoverKind::PostCopy);
            prop_assert_eq!(switchover.is_compared(), must_compare && !is_post_copy);
        }
    }
}

/// All kinds of ends are reached; otherwise the property would hold for nothing.
#[test]
fn generated_migrations_end_in_all_ways() {
    let goals = PreCopyGoals { max_downtime_ns: 50_000_000, max_passes: 3, max_total_ns: None };
    let fixed = FixedCost::default();
    let hybrid: AnyPolicy = HybridPolicy::new(goals, 1, fixed).into();
    let pattern: AnyPolicy = PatternPolicy::new(goals, OnLimit::Abort, fixed).into();
    let end = |policy: &AnyPolicy, choices: Vec<u8>| {
        let mut world = World::new(choices, true, goals);
        let end = move_guest(&mut world, policy).ok();
        (end, world.received > Generation(1))
    };
    assert_eq!(end(&pattern, vec![]), (Some(SwitchoverKind::StopAndCopy), false));
    // Pages are always dirty.
    assert_eq!(end(&hybrid, vec![72; 300]), (Some(SwitchoverKind::PostCopy), false));
    assert_eq!(end(&pattern, vec![72; 300]), (None, false));
    // Rounds are cut off for a while.
    assert_eq!(end(&pattern, vec![30; 300]), (Some(SwitchoverKind::StopAndCopy), true));
}
