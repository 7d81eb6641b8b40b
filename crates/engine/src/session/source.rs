mod agreement;
mod connections;
mod disk_rounds;
mod notices;
mod passes;
mod pre_stop_discards;
mod rounds;
mod serving;
mod switchover;

use std::time::Duration;

pub use agreement::{
    AcceptedTerms, PostCopyRequirement, UnmetRequirement, check_acceptance, is_plausible_epoch,
};
pub use connections::{ConnectionFacts, ReconnectStep, Reconnection};
pub use disk_rounds::{DiskRounds, StartOrder};
pub use notices::{
    InterruptContext, MessageOrigin, NoticeContext, NoticeMeaning, PhaseNotice, SourceWait, interrupts_round,
};
pub use passes::PageSelection;
pub use pre_stop_discards::{FailedDiscard, PreStopDiscards};
pub use rounds::{DecidedRound, RoundContext, RoundStep, Rounds, ScanResult, SentRound, SwitchoverKind};
pub use serving::{ServingAttempt, ServingContext, ServingStep};
pub use switchover::SwitchoverPlan;

use super::driver_step::{DriverStep, SessionCore};
use super::time::Time;
use crate::handover::source::{SourceEvent, SourceState};

/// Session of a source: the state of its handover, and all that decides what its driver does next once the phases of
/// the migration have ended.
///
/// The driver asks for a [`DriverStep`], carries it out by [`source`](crate::handover::source::source), and reports what
/// became of it. An event that an effect caused is handled first, then a repetition that is due, then an event from
/// outside.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceSession {
    core: SessionCore<SourceState, SourceEvent>,
    has_failed_effects: bool,
    unjournalled: Option<SourceState>,
    destination_may_be_complete: bool,
}

/// Content of a source's repetition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceRepetition {
    /// This event is handled.
    Feed(SourceEvent),
    /// QEMU is looked for, and what is found is handled as after a restart.
    FindQemu,
}

impl SourceSession {
    /// Creates the session of a migration in this state.
    pub fn new(state: SourceState) -> Self {
        Self {
            core: SessionCore::new(state),
            has_failed_effects: false,
            unjournalled: None,
            destination_may_be_complete: false,
        }
    }

    /// Returns the state of the handover.
    pub fn state(&self) -> &SourceState {
        &self.core.state
    }

    /// Enters a state, once its journal entry is made or without one.
    pub fn enter(&mut self, state: SourceState) {
        self.core.state = state;
    }

    /// Adds an event that an effect has caused. It is handled before any event from outside.
    pub fn follow_up(&mut self, event: SourceEvent) {
        self.core.follow_up(event);
    }

    /// Records a sign of life of the destination.
    pub fn record_contact(&mut self, now: Time) {
        self.core.contact.record(now);
    }

    /// Records whether the destination may have all that it needs without this host: the source has sent FROZEN, and no
    /// pages follow by post-copy.
    pub fn set_destination_may_be_complete(&mut self, destination_may_be_complete: bool) {
        self.destination_may_be_complete = destination_may_be_complete;
    }

    /// Begins the steps: contact counts from now on, and the first repetition comes after `retry`.
    pub fn begin_steps(&mut self, now: Time, retry: Duration) {
        self.core.contact.record(now);
        self.repeat_after(now, retry);
    }

    /// Returns the driver's next step.
    pub fn next_step(&mut self, now: Time) -> DriverStep<SourceEvent> {
        let is_over = self.core.state.is_final() || self.core.state == SourceState::Idle;
        self.core.next(now, is_over)
    }

    /// Schedules the next repetition. Events from outside do not move it: a peer that repeats a message again and again
    /// must not delay it.
    pub fn repeat_after(&mut self, now: Time, retry: Duration) {
        self.core.repeat_after(now, retry);
    }

    /// Returns the content of a repetition. Contact is lost for good after `reclaim_after` without a sign of life.
    pub fn repetition(&mut self, now: Time, reclaim_after: Duration) -> SourceRepetition {
        if self.core.contact.take_contact_loss(reclaim_after, now) {
            SourceRepetition::Feed(SourceEvent::ContactLostForGood)
        } else if std::mem::take(&mut self.has_failed_effects) {
            // As after a restart: QEMU is frozen before GO is sent.
            SourceRepetition::FindQemu
        } else {
            SourceRepetition::Feed(SourceEvent::Repeat)
        }
    }

    /// Returns the event that follows the one that ended the phases, if there is one: nothing more is sent.
    pub fn after_phases(&self) -> Option<SourceEvent> {
        // A stopped guest must not wait for nothing. Nor must a destination that lacks parts of a guest that is gone at
        // the source: it has no reason to give up while the source asks it again and again.
        let waits_for_nothing = self.precedes_commit() || self.is_lost_everywhere();
        waits_for_nothing.then_some(SourceEvent::Failed)
    }

    /// Returns the event that follows `Restarted`, if there is one.
    pub fn after_restart(&self) -> Option<SourceEvent> {
        self.is_lost_everywhere().then_some(SourceEvent::Failed)
    }

    /// Returns true if the guest is gone at the source, and the destination cannot have all of its state either.
    fn is_lost_everywhere(&self) -> bool {
        matches!(self.core.state, SourceState::QemuLost { incarnation: None, .. })
            && !self.destination_may_be_complete
    }

    /// Returns true if the guest is to run after the handover; false if its user had paused it.
    pub fn runs_afterwards(&self) -> bool {
        switchover::runs_afterwards(&self.core.state)
    }

    /// Returns true if the source may still give up by itself.
    pub fn precedes_commit(&self) -> bool {
        matches!(self.core.state, SourceState::Prepared { .. } | SourceState::Stopped { .. })
    }

    /// Returns true if the destination may need pages that only the source has. To read them does no harm, no matter
    /// which host owns the guest in the end.
    pub fn may_be_needed(&self) -> bool {
        matches!(
            self.core.state,
            SourceState::Committed { .. }
                | SourceState::Reclaiming { .. }
                | SourceState::QemuLost { incarnation: Some(_), .. }
        )
    }

    /// Records that an effect of `event` failed, so that those after it were not performed. Returns the event that
    /// follows at once: if the state is not COMMITTED, because that could not be journalled or was never tried, the
    /// guest continues at the source.
    pub fn effect_failed(&mut self, event: &SourceEvent) -> Option<SourceEvent> {
        self.has_failed_effects = true;
        (self.precedes_commit() && *event != SourceEvent::Failed).then_some(SourceEvent::Failed)
    }

    /// Records that the journal has this state.
    pub fn entry_made(&mut self) {
        // The entry supersedes one that could not be made before.
        self.unjournalled = None;
    }

    /// Records that the journal does not accept the entry for `state`. Returns true if the state is entered all the
    /// same.
    ///
    /// Space for the entry was reserved, so the cause is not a full disk but a broken one. Without ABORTED in the
    /// journal a restart aborts, too: to continue without the entry risks nothing unless the host fails before the
    /// entry can be made. A guest that is stopped for ever is worse.
    pub fn entry_failed(&mut self, state: &SourceState) -> bool {
        let may_be_late = matches!(state, SourceState::Aborting | SourceState::Aborted);
        if may_be_late {
            self.unjournalled = Some(state.clone());
        }
        may_be_late
    }

    /// Returns the state whose entry has to be made before the end, if there is one.
    pub fn take_unjournalled(&mut self) -> Option<SourceState> {
        self.unjournalled.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: Duration = Duration::from_millis(100);
    const RECLAIM_AFTER: Duration = Duration::from_millis(350);

    fn time(ms: u64) -> Time {
        Time::since_origin(Duration::from_millis(ms))
    }

    fn session(state: SourceState) -> SourceSession {
        let mut session = SourceSession::new(state);
        session.begin_steps(time(0), RETRY);
        session
    }

    #[test]
    fn follow_ups_come_first_and_a_final_state_ends_the_steps() {
        let mut session = session(SourceState::Aborting);
        session.follow_up(SourceEvent::Continued);
        assert_eq!(session.next_step(time(200)), DriverStep::Handle(SourceEvent::Continued));
        assert_eq!(session.next_step(time(99)), DriverStep::Wait(time(100)));
        assert_eq!(session.next_step(time(100)), DriverStep::Repeat);
        session.repeat_after(time(130), RETRY);
        assert_eq!(session.next_step(time(229)), DriverStep::Wait(time(230)));
        session.enter(SourceState::Aborted);
        assert_eq!(session.next_step(time(500)), DriverStep::End);
        session.follow_up(SourceEvent::QemuDied);
        assert_eq!(session.next_step(time(500)), DriverStep::Handle(SourceEvent::QemuDied));
    }

    #[test]
    fn silence_is_reported_once_whenever_the_limit_has_passed() {
        let mut session = session(SourceState::Returning);
        let repeat = SourceRepetition::Feed(SourceEvent::Repeat);
        let lost = SourceRepetition::Feed(SourceEvent::ContactLostForGood);
        assert_eq!(session.repetition(time(100), RECLAIM_AFTER), repeat);
        session.record_contact(time(120));
        assert_eq!(session.repetition(time(400), RECLAIM_AFTER), repeat);
        assert_eq!(session.repetition(time(470), RECLAIM_AFTER), lost);
        assert_eq!(session.repetition(time(570), RECLAIM_AFTER), repeat);
    }

    #[test]
    fn a_failed_effect_makes_the_next_repetition_a_restart() {
        let mut session = session(SourceState::Returning);
        assert_eq!(session.effect_failed(&SourceEvent::Continued), None);
        assert_eq!(session.repetition(time(100), RECLAIM_AFTER), SourceRepetition::FindQemu);
        assert_eq!(session.repetition(time(200), RECLAIM_AFTER), SourceRepetition::Feed(SourceEvent::Repeat));
    }

    #[test]
    fn before_commit_a_failed_effect_ends_the_migration_once() {
        let mut session = session(SourceState::Prepared { run: true });
        let stop = SourceEvent::Stop { run: true };
        assert_eq!(session.effect_failed(&stop), Some(SourceEvent::Failed));
        assert_eq!(session.effect_failed(&SourceEvent::Failed), None);
    }

    #[test]
    fn only_an_abort_is_entered_before_its_journal_entry() {
        let mut session = session(SourceState::Stopped { run: true });
        assert!(!session.entry_failed(&SourceState::Returned));
        assert_eq!(session.take_unjournalled(), None);
        assert!(session.entry_failed(&SourceState::Aborting));
        assert!(session.entry_failed(&SourceState::Aborted));
        assert_eq!(session.take_unjournalled(), Some(SourceState::Aborted));
        assert!(session.entry_failed(&SourceState::Aborting));
        session.entry_made();
        assert_eq!(session.take_unjournalled(), None);
    }

    #[test]
    fn a_guest_that_is_lost_everywhere_ends_the_migration() {
        let lost = SourceState::QemuLost { incarnation: None, run: true };
        let mut session = session(lost);
        assert_eq!(session.after_phases(), Some(SourceEvent::Failed));
        assert_eq!(session.after_restart(), Some(SourceEvent::Failed));
        session.set_destination_may_be_complete(true);
        assert_eq!(session.after_phases(), None);
        assert_eq!(session.after_restart(), None);
        // The engine decides from `Restarted` itself that a guest which was stopped continues.
        session.enter(SourceState::Stopped { run: true });
        assert_eq!(session.after_phases(), Some(SourceEvent::Failed));
        assert_eq!(session.after_restart(), None);
    }
}
