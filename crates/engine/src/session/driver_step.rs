use std::collections::VecDeque;
use std::time::Duration;

use super::time::{Contact, Time};

/// Next step of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverStep<E> {
    /// Handle this event, which an effect has caused.
    Handle(E),
    /// Carry out a repetition, whose time has come, and schedule the next one.
    Repeat,
    /// Wait for an event from outside, until this time at the latest.
    Wait(Time),
    /// End: the handover is over.
    End,
}

/// Parts of a session that both roles have: the state, the events that effects have caused, the time of the next
/// repetition, and the contact with the peer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionCore<S, E> {
    pub(super) state: S,
    pub(super) contact: Contact,
    follow_ups: VecDeque<E>,
    repeat_at: Time,
}

impl<S, E> SessionCore<S, E> {
    /// Creates the common parts of a session in this state; a repetition is due.
    pub(super) fn new(state: S) -> Self {
        Self { state, contact: Contact::default(), follow_ups: VecDeque::new(), repeat_at: Time::default() }
    }

    /// Adds an event that an effect has caused.
    pub(super) fn follow_up(&mut self, event: E) {
        self.follow_ups.push_back(event);
    }

    /// Returns the next event that an effect has caused.
    pub(super) fn take_follow_up(&mut self) -> Option<E> {
        self.follow_ups.pop_front()
    }

    /// Schedules the next repetition.
    pub(super) fn repeat_after(&mut self, now: Time, retry: Duration) {
        self.repeat_at = now.after(retry);
    }

    /// Returns the next step: events that effects have caused come first, and are handled even if the handover is over.
    pub(super) fn next(&mut self, now: Time, is_over: bool) -> DriverStep<E> {
        if let Some(event) = self.take_follow_up() {
            DriverStep::Handle(event)
        } else if is_over {
            DriverStep::End
        } else if now >= self.repeat_at {
            DriverStep::Repeat
        } else {
            DriverStep::Wait(self.repeat_at)
        }
    }
}
