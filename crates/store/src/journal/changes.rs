//! A counter of changes, for whoever reports what the journal has.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Counter of the journal's changes. Whoever waits for a change never delays one.
#[derive(Debug, Default)]
pub(super) struct ChangeCounter {
    count: Mutex<u64>,
    changed: Condvar,
}

impl ChangeCounter {
    /// Counts a change.
    pub(super) fn advance(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// Waits until the count differs from `seen`, or for `patience`. Returns the count.
    pub(super) fn wait(&self, seen: u64, patience: Duration) -> u64 {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(count, patience, |count| *count == seen);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_change_ends_the_wait() {
        let counter = Arc::new(ChangeCounter::default());
        assert_eq!(counter.wait(0, Duration::ZERO), 0);
        let other = Arc::clone(&counter);
        let waiting = std::thread::spawn(move || other.wait(0, Duration::from_hours(1)));
        counter.advance();
        assert_eq!(waiting.join().unwrap(), 1);
        assert_eq!(counter.wait(0, Duration::from_hours(1)), 1, "it has changed already");
    }
}
