//! Limit on the threads of a sender that copy at the same time.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::lock;

/// Turns, of which only a limited number is taken at the same time. Threads get them in the order of their requests, so
/// that no stream's chunks wait until all those of another have been sent.
#[derive(Debug)]
pub(super) struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

#[derive(Debug)]
struct TurnState {
    most: u16,
    taken: u16,
    /// Streams whose threads wait, in the order of their requests.
    waiting: VecDeque<u16>,
}

/// Permission to copy, until this is dropped.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Creates turns without a limit.
    pub(super) fn new() -> Self {
        let state = TurnState { most: u16::MAX, taken: 0, waiting: VecDeque::new() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Sets the number of turns that are taken at the same time, at least one.
    pub(super) fn set_most(&self, most: u16) {
        lock(&self.state).most = most.max(1);
        self.changed.notify_all();
    }

    /// Waits until the thread of a stream may copy.
    pub(super) fn take(&self, stream: u16) -> Turn<'_> {
        let mut state = lock(&self.state);
        state.waiting.push_back(stream);
        while state.taken >= state.most || state.waiting.front() != Some(&stream) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.pop_front();
        state.taken += 1;
        if !state.waiting.is_empty() {
            // The next thread may get a turn, too.
            self.changed.notify_all();
        }
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.taken -= 1;
        if !state.waiting.is_empty() {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_returned_turn_is_granted_to_waiting_threads_first() {
        let turns = Turns::new();
        turns.set_most(1);
        let (tell, order) = mpsc::channel();
        thread::scope(|scope| {
            let turn = turns.take(0);
            for (others, stream) in [(0, 2), (1, 1)] {
                let (turns, tell) = (&turns, tell.clone());
                scope.spawn(move || {
                    let turn = turns.take(stream);
                    tell.send(stream).unwrap();
                    drop(turn);
                });
                while lock(&turns.state).waiting.len() == others {
                    thread::yield_now();
                }
            }
            drop(turn);
            let _turn = turns.take(0);
            tell.send(0).unwrap();
        });
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [2, 1, 0]);
    }

    #[test]
    fn additional_turns_are_granted_to_waiting_threads_at_once() {
        let turns = Turns::new();
        turns.set_most(0);
        let (tell, order) = mpsc::channel();
        let (let_go, end) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let turn = turns.take(0);
            let (here, tell) = (&turns, &tell);
            scope.spawn(move || {
                let _turn = here.take(1);
                tell.send(1).unwrap();
                end.recv().unwrap();
            });
            scope.spawn(move || {
                let _turn = here.take(2);
                tell.send(2).unwrap();
            });
            turns.set_most(3);
            let mut came: Vec<_> = order.iter().take(2).collect();
            came.sort_unstable();
            assert_eq!(came, [1, 2], "nobody has given one back");
            let_go.send(()).unwrap();
            drop(turn);
        });
    }
}
