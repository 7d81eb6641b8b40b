mod arrival;

use std::collections::VecDeque;
use std::time::Duration;

pub use arrival::{Admission, ControlGeneration, MessageContext, NotReady, PayloadKind, RefusedPayload};

use super::driver_step::{DriverStep, SessionCore};
use super::time::Time;
use crate::handover::destination::{DestinationEvent, DestinationState};

/// Session of a destination: the state of its handover, and all that decides what its driver does next.
///
/// The driver asks for a [`DriverStep`], carries it out by [`destination`](crate::handover::destination::destination), and
/// reports what became of it. An event that an effect caused is handled
/// first, then a repetition that is due, then an event from outside.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationSession {
    core: SessionCore<DestinationState, DestinationEvent>,
    /// Facts of this host in the order in which they occurred: the first one was not accepted by the journal, and the
    /// others wait behind it.
    unrecorded: VecDeque<DestinationEvent>,
    must_find_qemu: bool,
    stop_again_at: Option<Time>,
}

/// Limits on the time without a sign of life of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SilenceLimits {
    /// Limit up to READY, without a control stream.
    pub give_up_after: Duration,
    /// Limit after READY.
    pub reclaim_after: Duration,
}

/// Facts on which a repetition depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepetitionContext {
    /// True if the source's control stream is open. While it exists, the link itself detects the loss of the source.
    pub has_control: bool,
    /// True if QEMU has not answered `cont` yet.
    pub is_cont_pending: bool,
}

/// Content of a destination's repetition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationRepetition {
    /// This event is handled.
    Feed(DestinationEvent),
    /// QEMU is looked for, and what is found is handled as after a restart.
    FindQemu,
    /// QEMU is asked for the outcome of `cont`.
    CheckCont,
    /// No action.
    Nothing,
}

impl DestinationSession {
    /// Creates the session of a migration in this state.
    pub fn new(state: DestinationState) -> Self {
        Self {
            core: SessionCore::new(state),
            unrecorded: VecDeque::new(),
            must_find_qemu: false,
            stop_again_at: None,
        }
    }

    /// Returns the state of the handover.
    pub fn state(&self) -> &DestinationState {
        &self.core.state
    }

    /// Enters a state, once its journal entry is made or without one.
    pub fn enter(&mut self, state: DestinationState) {
        self.core.state = state;
    }

    /// Adds an event that an effect has caused. It is handled before any event from outside.
    pub fn follow_up(&mut self, event: DestinationEvent) {
        self.core.follow_up(event);
    }

    /// Records a sign of life of the source. Until this host is ready only the control stream counts, because the VM
    /// arrives there or not at all: a source that only asks will not send the remaining state. After that every sign
    /// counts.
    pub fn record_contact(&mut self, is_on_control: bool, now: Time) {
        if is_on_control || self.core.state != DestinationState::Prepared {
            self.core.contact.record(now);
        }
    }

    /// Records the loss of the control stream. Returns the event that follows at once: a host in doubt asks.
    pub fn control_lost(&mut self, now: Time) -> Option<DestinationEvent> {
        self.core.contact.record(now);
        self.core.state.is_in_doubt().then_some(DestinationEvent::Repeat)
    }

    /// Returns the next event that an effect has caused.
    pub fn take_follow_up(&mut self) -> Option<DestinationEvent> {
        self.core.take_follow_up()
    }

    /// Returns true if `event` is handled now. While a fact waits for the journal, the state is the one before it, in
    /// which later events would be misunderstood: a later fact waits behind it, and a statement is dropped.
    pub fn admit(&mut self, event: &DestinationEvent) -> bool {
        let is_next = self.unrecorded.front().is_none_or(|first| first == event);
        if !is_next {
            self.keep_fact(event);
        }
        is_next
    }

    /// Records that `event` was handled: all of its effects were performed, or it has none in this state.
    pub fn handled(&mut self, event: &DestinationEvent) {
        if self.unrecorded.front() == Some(event) {
            self.unrecorded.pop_front();
        }
    }

    /// Returns the driver's next step. The handover is not over before all facts are handled.
    pub fn next_step(&mut self, now: Time) -> DriverStep<DestinationEvent> {
        let is_over = self.core.state.is_final() && self.unrecorded.is_empty();
        self.core.next(now, is_over)
    }

    /// Schedules the next repetition. Events from outside do not move it: a peer that repeats a message again and again
    /// must not delay it.
    pub fn repeat_after(&mut self, now: Time, retry: Duration) {
        self.core.repeat_after(now, retry);
    }

    /// Returns the content of a repetition.
    pub fn repetition(
        &mut self,
        now: Time,
        facts: RepetitionContext,
        limits: SilenceLimits,
    ) -> DestinationRepetition {
        if let Some(event) = self.unrecorded.front() {
            return DestinationRepetition::Feed(event.clone());
        }
        if facts.is_cont_pending {
            return DestinationRepetition::CheckCont;
        }
        if std::mem::take(&mut self.must_find_qemu) {
            return DestinationRepetition::FindQemu;
        }
        if self.core.state == DestinationState::Prepared {
            let is_lost = !facts.has_control && self.core.contact.silence(now) >= limits.give_up_after;
            return if is_lost {
                DestinationRepetition::Feed(DestinationEvent::PeerLost)
            } else {
                DestinationRepetition::Nothing
            };
        }
        if self.core.contact.take_contact_loss(limits.reclaim_after, now) {
            return DestinationRepetition::Feed(DestinationEvent::ContactLostForGood);
        }
        DestinationRepetition::Feed(DestinationEvent::Repeat)
    }

    /// Records that an effect of `event` failed, so that those after it were not performed. Returns the event that
    /// follows at once: a migration that cannot be journalled is not begun.
    ///
    /// An event that happened cannot be dropped: it is handled again until the journal accepts it, and before any later
    /// one ([`admit`](Self::admit)). A statement of another party is dropped ([`DestinationEvent::is_statement`]).
    pub fn effect_failed(&mut self, event: &DestinationEvent) -> Option<DestinationEvent> {
        if self.core.state == DestinationState::Prepared && *event != DestinationEvent::Failed {
            return Some(DestinationEvent::Failed);
        }
        self.keep_fact(event);
        None
    }

    /// Keeps a fact behind those that wait already.
    fn keep_fact(&mut self, event: &DestinationEvent) {
        if !event.is_statement() && !self.unrecorded.contains(event) {
            self.unrecorded.push_back(event.clone());
        }
    }

    /// Returns true if `state` is entered although the journal did not accept its entry: an agent that is started anew
    /// destroys a copy that was only PREPARED.
    pub fn is_entered_unjournalled(state: &DestinationState) -> bool {
        matches!(state, DestinationState::CopyDestroyed)
    }

    /// Records that QEMU did not answer `cont`, so that it is not known whether the guest ran: QEMU is looked for as
    /// after a restart.
    pub fn cont_not_answered(&mut self) {
        self.must_find_qemu = true;
    }

    /// Returns true if a guest that must not go on may be stopped now: not before the next attempt is due.
    pub fn may_stop_guest(&self, now: Time) -> bool {
        self.stop_again_at.is_none_or(|at| now >= at)
    }

    /// Schedules the next attempt to stop a guest, after one that failed.
    pub fn stop_again_after(&mut self, now: Time, retry: Duration) {
        self.stop_again_at = Some(now.after(retry));
    }
}

#[cfg(test)]
mod tests {
    use proto::{Epoch, Generation, Incarnation};

    use super::*;

    const LIMITS: SilenceLimits =
        SilenceLimits { give_up_after: Duration::from_millis(50), reclaim_after: Duration::from_millis(350) };
    const OPEN: RepetitionContext = RepetitionContext { has_control: true, is_cont_pending: false };
    const CUT: RepetitionContext = RepetitionContext { has_control: false, ..OPEN };

    fn time(ms: u64) -> Time {
        Time::since_origin(Duration::from_millis(ms))
    }

    fn ready() -> DestinationState {
        let incarnation =
            Incarnation { boot_id: "b".to_owned(), pid: 7, start_time_ticks: 9, generation: Generation(1) };
        DestinationState::Ready { incarnation, run: true }
    }

    #[test]
    fn follow_ups_come_first_and_a_final_state_ends_the_steps() {
        let mut session = DestinationSession::new(DestinationState::Prepared);
        session.repeat_after(time(0), Duration::from_millis(100));
        session.follow_up(DestinationEvent::QemuDied);
        assert_eq!(session.next_step(time(200)), DriverStep::Handle(DestinationEvent::QemuDied));
        assert_eq!(session.next_step(time(99)), DriverStep::Wait(time(100)));
        assert_eq!(session.next_step(time(100)), DriverStep::Repeat);
        session.enter(DestinationState::CopyDestroyed);
        assert_eq!(session.next_step(time(100)), DriverStep::End);
    }

    #[test]
    fn before_ready_only_the_control_stream_counts() {
        let mut session = DestinationSession::new(DestinationState::Prepared);
        session.record_contact(true, time(10));
        session.record_contact(false, time(55));
        assert_eq!(session.repetition(time(59), CUT, LIMITS), DestinationRepetition::Nothing);
        assert_eq!(session.repetition(time(60), OPEN, LIMITS), DestinationRepetition::Nothing);
        assert_eq!(
            session.repetition(time(60), CUT, LIMITS),
            DestinationRepetition::Feed(DestinationEvent::PeerLost)
        );
        session.enter(ready());
        session.record_contact(false, time(60));
        let repeat = DestinationRepetition::Feed(DestinationEvent::Repeat);
        assert_eq!(session.repetition(time(409), CUT, LIMITS), repeat);
        let lost = DestinationRepetition::Feed(DestinationEvent::ContactLostForGood);
        assert_eq!(session.repetition(time(410), OPEN, LIMITS), lost);
    }

    #[test]
    fn a_lost_control_stream_makes_a_host_in_doubt_ask_at_once() {
        let mut session = DestinationSession::new(DestinationState::Prepared);
        assert_eq!(session.control_lost(time(40)), None);
        assert_eq!(session.repetition(time(89), CUT, LIMITS), DestinationRepetition::Nothing);
        session.enter(ready());
        assert_eq!(session.control_lost(time(90)), Some(DestinationEvent::Repeat));
    }

    #[test]
    fn facts_are_handled_again_and_statements_are_not() {
        let mut session = DestinationSession::new(ready());
        assert_eq!(session.effect_failed(&DestinationEvent::Asked { epoch: Epoch(1) }), None);
        assert_eq!(
            session.repetition(time(0), OPEN, LIMITS),
            DestinationRepetition::Feed(DestinationEvent::Repeat)
        );
        assert_eq!(session.effect_failed(&DestinationEvent::QemuDied), None);
        session.cont_not_answered();
        let pending = RepetitionContext { is_cont_pending: true, ..OPEN };
        assert_eq!(
            session.repetition(time(0), pending, LIMITS),
            DestinationRepetition::Feed(DestinationEvent::QemuDied)
        );
        session.handled(&DestinationEvent::QemuDied);
        assert_eq!(session.repetition(time(0), pending, LIMITS), DestinationRepetition::CheckCont);
        assert_eq!(session.repetition(time(0), OPEN, LIMITS), DestinationRepetition::FindQemu);
        assert_eq!(
            session.repetition(time(0), OPEN, LIMITS),
            DestinationRepetition::Feed(DestinationEvent::Repeat)
        );
    }

    /// Feeds the facts that wait, of which the journal accepts each, and asserts that they are these.
    fn assert_facts(session: &mut DestinationSession, facts: &[DestinationEvent]) {
        for fact in facts {
            let repetition = session.repetition(time(0), OPEN, LIMITS);
            assert_eq!(repetition, DestinationRepetition::Feed(fact.clone()));
            assert!(session.admit(fact));
            session.handled(fact);
        }
        let repeat = DestinationRepetition::Feed(DestinationEvent::Repeat);
        assert_eq!(session.repetition(time(0), OPEN, LIMITS), repeat);
    }

    #[test]
    fn facts_keep_their_order_while_the_journal_refuses_them() {
        let mut session = DestinationSession::new(ready());
        let facts = [DestinationEvent::Continued { missing: false }, DestinationEvent::QemuDied];
        let [first, second] = &facts;
        assert!(session.admit(first));
        assert_eq!(session.effect_failed(first), None);
        for _ in 0..2 {
            assert!(!session.admit(second), "the state does not show yet what precedes it");
            let repetition = session.repetition(time(0), OPEN, LIMITS);
            assert_eq!(repetition, DestinationRepetition::Feed(first.clone()));
            assert!(session.admit(first));
            assert_eq!(session.effect_failed(first), None);
        }
        assert_facts(&mut session, &facts);
    }

    /// A statement may be outdated by the time at which the journal has the fact.
    #[test]
    fn statements_are_dropped_while_facts_wait() {
        let mut session = DestinationSession::new(ready());
        let asked = DestinationEvent::Asked { epoch: Epoch(1) };
        assert!(session.admit(&asked));
        assert_eq!(session.effect_failed(&DestinationEvent::QemuDied), None);
        assert!(!session.admit(&asked));
        session.handled(&asked);
        assert_facts(&mut session, &[DestinationEvent::QemuDied]);
        assert!(session.admit(&asked));
    }

    #[test]
    fn the_handover_is_not_over_before_all_facts_are_handled() {
        let mut session = DestinationSession::new(ready());
        let continued = DestinationEvent::Continued { missing: false };
        session.effect_failed(&continued);
        assert!(!session.admit(&DestinationEvent::QemuDied));
        let DestinationState::Ready { incarnation, .. } = ready() else { unreachable!() };
        session.enter(DestinationState::Active { incarnation });
        session.handled(&continued);
        assert_eq!(session.next_step(time(0)), DriverStep::Repeat);
        assert_facts(&mut session, &[DestinationEvent::QemuDied]);
        assert_eq!(session.next_step(time(0)), DriverStep::End);
    }

    #[test]
    fn a_migration_that_cannot_be_journalled_is_not_begun() {
        let mut session = DestinationSession::new(DestinationState::Prepared);
        let failed = Some(DestinationEvent::Failed);
        assert_eq!(session.effect_failed(&DestinationEvent::QemuDied), failed);
        assert_eq!(session.effect_failed(&DestinationEvent::Failed), None);
        assert_eq!(
            session.repetition(time(0), OPEN, LIMITS),
            DestinationRepetition::Feed(DestinationEvent::Failed)
        );
    }

    #[test]
    fn a_guest_is_stopped_again_when_the_time_has_come() {
        let mut session = DestinationSession::new(ready());
        assert!(session.may_stop_guest(time(0)));
        session.stop_again_after(time(10), Duration::from_millis(5));
        assert!(!session.may_stop_guest(time(14)));
        assert!(session.may_stop_guest(time(15)));
    }
}
