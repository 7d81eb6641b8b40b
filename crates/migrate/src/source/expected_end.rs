//! Expected end of a migration, for users who watch it: forecast after rounds, in a thread of its own. The driver never
//! waits for it.

use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use engine::forecast::RestForecaster;
use engine::pre_copy::{AnyPolicy, PreCopyGoals, RoundObservation};

use api::progress::{ExpectedEnd, Publisher};

/// Pause between two forecasts: people cannot read them faster.
const PAUSE: Duration = Duration::from_millis(500);

/// Forecasts the end of a migration after its rounds.
#[derive(Debug)]
pub(super) struct EndForecaster {
    rest: RestForecaster,
    tasks: SyncSender<Task>,
}

/// A forecast to be made.
#[derive(Debug)]
struct Task {
    rest: RestForecaster,
    policy: AnyPolicy,
    goals: PreCopyGoals,
    observed: RoundObservation,
}

impl EndForecaster {
    /// Starts the thread, which ends when this is dropped. None if the system provides none: nothing else depends on it.
    pub(super) fn start(rest: RestForecaster, publisher: Publisher) -> Option<Self> {
        let (tasks, given) = mpsc::sync_channel(1);
        let run = move || forecast(&given, &publisher);
        thread::Builder::new().name("forecast".to_owned()).spawn(run).ok()?;
        Some(Self { rest, tasks })
    }

    /// Learns from a round after which another one follows. `policy` is as it was before it decided. The forecast is left
    /// out if the last one is not done yet.
    pub(super) fn observe(&mut self, policy: AnyPolicy, goals: PreCopyGoals, observed: &RoundObservation) {
        self.rest.observe(observed);
        let task = Task { rest: self.rest.clone(), policy, goals, observed: *observed };
        drop(self.tasks.try_send(task));
    }
}

fn forecast(given: &Receiver<Task>, publisher: &Publisher) {
    let mut next = Instant::now();
    while let Ok(Task { rest, policy, goals, observed }) = given.recv() {
        if Instant::now() < next {
            continue;
        }
        if let Some(found) = rest.forecast(&policy, goals, &observed) {
            publisher.update(|progress| progress.expected_end = Some(ExpectedEnd::of(&found)));
            next = Instant::now() + PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::forecast::facts::{GuestFacts, MigrationFacts};
    use engine::pre_copy::{FixedCost, OnLimit, PatternPolicy};

    use super::*;

    #[test]
    fn a_round_shows_the_end() {
        let publisher = Publisher::new();
        let (memory_bytes, used_bytes) = (1 << 30, 1 << 30);
        let guest = GuestFacts { memory_bytes, used_bytes, ..GuestFacts::default() };
        let rest = RestForecaster::new(MigrationFacts { guest, ..MigrationFacts::default() }, true);
        let mut watcher = publisher.watch();
        let mut end = EndForecaster::start(rest, publisher).unwrap();
        let goals = PreCopyGoals::default();
        let policy = PatternPolicy::new(goals, OnLimit::Abort, FixedCost::default());
        let observed = RoundObservation {
            dirty_pages: 200_000,
            full_pages: 200_000,
            remaining_pages: 200_000,
            pages_sent: 60_000,
            bytes_sent: 60_000 * 4096,
            duration_ns: 1_000_000_000,
            interval_ns: 1_000_000_000,
            elapsed_ns: 1_500_000_000,
            ..RoundObservation::default()
        };
        end.observe(policy.into(), goals, &observed);
        // The thread ends after it has forecast.
        drop(end);
        while watcher.has_changed().is_ok() {
            thread::yield_now();
        }
        let expected = watcher.borrow_and_update().expected_end.unwrap();
        assert!(expected.arrives && expected.total_us > 1_500_000, "{expected:?}");
        assert!((expected.low_us..=expected.high_us).contains(&expected.total_us));
    }
}
