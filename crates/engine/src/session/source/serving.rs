//! New connections for the pages of a guest that runs at the destination. A cut is mended for as long as the destination
//! may need pages of this host, however long that is: only the source has them.

use std::time::Duration;

use proto::Generation;

use super::SourceSession;
use crate::session::time::Time;

/// Facts on which the next step of an attempt depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServingContext {
    /// True if pages can be sent, which the destination may need.
    pub has_server: bool,
    /// True if the attempt's control stream exists.
    pub has_control: bool,
}

/// Step of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServingStep {
    /// Handle notices until this time: all but RESUMED have their usual meaning.
    AwaitResumed(Time),
    /// Open the streams: the destination receives in this generation.
    OpenStreams,
    /// End the attempt, and keep the control stream: the destination has reported that it needs no pages, or this host
    /// has the guest again.
    Unneeded,
    /// End the attempt: the control stream is lost.
    ControlLost,
    /// End the attempt: the destination does not answer.
    Silent,
}

/// Attempt to make new connections for pages. Each repetition of the handover has one, so that events that arrive in
/// between are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServingAttempt {
    generation: Generation,
    resumed_by: Time,
    is_resumed: bool,
}

impl SourceSession {
    /// Begins an attempt if the destination may need pages of this host and no thread sends them (`is_cut`). `last` is
    /// the last generation of connections.
    pub fn reconnect_serving(&self, is_cut: bool, last: Generation) -> Option<ServingAttempt> {
        let attempt =
            ServingAttempt { generation: last.next(), resumed_by: Time::default(), is_resumed: false };
        (is_cut && self.may_be_needed()).then_some(attempt)
    }
}

impl ServingAttempt {
    /// Returns the generation of the new connections. Each attempt has one of its own.
    pub fn generation(self) -> Generation {
        self.generation
    }

    /// Records that the destination is asked to receive, and has to answer within `patience`.
    pub fn asked(&mut self, now: Time, patience: Duration) {
        self.resumed_by = now.after(patience);
    }

    /// Records that RESUMED has arrived on the attempt's control stream.
    pub fn resumed(&mut self) {
        self.is_resumed = true;
    }

    /// Returns the next step.
    pub fn next_step(self, facts: ServingContext, now: Time) -> ServingStep {
        if !facts.has_server {
            // The control stream may be lost, too, because its work is done.
            ServingStep::Unneeded
        } else if !facts.has_control {
            ServingStep::ControlLost
        } else if self.is_resumed {
            ServingStep::OpenStreams
        } else if now >= self.resumed_by {
            ServingStep::Silent
        } else {
            ServingStep::AwaitResumed(self.resumed_by)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::source::SourceState;
    use proto::Incarnation;

    const PATIENCE: Duration = Duration::from_secs(3);
    const OPEN: ServingContext = ServingContext { has_server: true, has_control: true };

    fn time(seconds: u64) -> Time {
        Time::since_origin(Duration::from_secs(seconds))
    }

    fn committed() -> SourceState {
        let incarnation =
            Incarnation { boot_id: "b".to_owned(), pid: 7, start_time_ticks: 9, generation: Generation(1) };
        SourceState::Committed { incarnation, run: true, has_run: true }
    }

    fn begin(state: SourceState, is_cut: bool) -> Option<ServingAttempt> {
        SourceSession::new(state).reconnect_serving(is_cut, Generation(4))
    }

    fn asked() -> ServingAttempt {
        let mut attempt = begin(committed(), true).unwrap();
        attempt.asked(time(10), PATIENCE);
        attempt
    }

    #[test]
    fn only_pages_that_may_be_needed_get_new_connections() {
        assert_eq!(begin(committed(), true).unwrap().generation(), Generation(5));
        assert_eq!(begin(committed(), false), None);
        let done = SourceState::Done { run: true, incarnation: None };
        for state in [done, SourceState::Returned, SourceState::Aborting] {
            assert_eq!(begin(state, true), None);
        }
    }

    #[test]
    fn streams_are_opened_once_the_destination_receives() {
        let mut attempt = asked();
        assert_eq!(attempt.next_step(OPEN, time(12)), ServingStep::AwaitResumed(time(13)));
        assert_eq!(attempt.next_step(OPEN, time(13)), ServingStep::Silent);
        let lost = ServingContext { has_control: false, ..OPEN };
        assert_eq!(attempt.next_step(lost, time(12)), ServingStep::ControlLost);
        attempt.resumed();
        assert_eq!(attempt.next_step(OPEN, time(99)), ServingStep::OpenStreams);
        assert_eq!(attempt.next_step(lost, time(12)), ServingStep::ControlLost);
    }

    /// RUNNING may arrive on any connection, also while the destination is asked to resume.
    #[test]
    fn the_end_of_the_need_for_pages_is_no_failure() {
        let mut attempt = asked();
        for has_control in [true, false] {
            let unneeded = ServingContext { has_server: false, has_control };
            assert_eq!(attempt.next_step(unneeded, time(99)), ServingStep::Unneeded);
        }
        attempt.resumed();
        let unneeded = ServingContext { has_server: false, ..OPEN };
        assert_eq!(attempt.next_step(unneeded, time(12)), ServingStep::Unneeded);
    }
}
