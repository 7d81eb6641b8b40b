//! A bandwidth limit that all streams of a migration share and that can be changed while they run.
//!
//! `TokenBucket` is the algorithm, without a clock: its input is the time, its output a grant or a waiting time.
//! [`RateLimit`] puts threads to sleep by it.
//!
//! The limit counts the bytes written to the sockets: frames with their headers and, with TLS, its records. The headers
//! of TCP, IP and Ethernet are not counted (about 4% more with packets of 1,500 bytes).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::LinkError;

const NS_PER_S: u128 = 1_000_000_000;

/// Burst, as time: sending that may be made up for after a pause. A thread that the scheduler wakes late within this
/// span loses nothing of the rate.
const BURST: Duration = Duration::from_millis(50);

/// Burst, as time, on a link that is to be kept free of queues: other traffic waits behind a burst.
const PACED_BURST: Duration = Duration::from_millis(3);

/// Minimum burst, in bytes.
const MIN_BURST_BYTES: u64 = 16 << 10;

/// Maximum grant, in bytes, so that streams take turns.
const GRANT_BYTES: u64 = 256 << 10;

/// A token bucket: over any span of time, grants sum up to at most rate × time + burst.
#[derive(Clone, Debug)]
struct TokenBucket {
    /// None for no limit.
    rate_bytes_per_s: Option<u64>,
    burst: Duration,
    /// Tokens in the bucket, in bytes × 10⁹, so that no rounding adds up.
    level: u128,
    /// Time at which the level was correct, counted from any fixed point.
    at: Duration,
}

impl TokenBucket {
    /// Creates a full bucket. A rate of None or 0 is no limit.
    fn new(rate_bytes_per_s: Option<u64>, now: Duration) -> Self {
        let mut bucket = Self {
            rate_bytes_per_s: rate_bytes_per_s.filter(|rate| *rate > 0),
            burst: BURST,
            level: 0,
            at: now,
        };
        bucket.level = bucket.capacity();
        bucket
    }

    /// The rate, in bytes per second; None for no limit.
    #[cfg(test)]
    fn rate_bytes_per_s(&self) -> Option<u64> {
        self.rate_bytes_per_s
    }

    /// Maximum number of bytes that are granted without any time passing.
    fn burst_bytes(&self) -> u64 {
        self.rate_bytes_per_s.map_or(0, |rate| {
            let burst = u128::from(rate) * self.burst.as_nanos() / NS_PER_S;
            u64::try_from(burst).unwrap_or(u64::MAX).max(MIN_BURST_BYTES)
        })
    }

    /// Changes the rate from now on. Saved tokens stay, up to the new burst; none are added.
    fn set_rate(&mut self, rate_bytes_per_s: Option<u64>, now: Duration) {
        self.refill(now);
        self.rate_bytes_per_s = rate_bytes_per_s.filter(|rate| *rate > 0);
        self.level = self.level.min(self.capacity());
    }

    /// Changes the burst, as time, from now on.
    fn set_burst(&mut self, burst: Duration, now: Duration) {
        self.refill(now);
        self.burst = burst;
        self.level = self.level.min(self.capacity());
    }

    /// Requests permission to send `bytes`. Grants some or all of them (at least one, unless none were requested), or
    /// returns the time to wait before the next request.
    fn take(&mut self, bytes: u64, now: Duration) -> Result<u64, Duration> {
        let Some(rate) = self.rate_bytes_per_s else { return Ok(bytes) };
        self.refill(now);
        let grant = bytes.min(GRANT_BYTES).min(self.burst_bytes());
        let cost = u128::from(grant) * NS_PER_S;
        if let Some(rest) = self.level.checked_sub(cost) {
            self.level = rest;
            return Ok(grant);
        }
        let wait_ns = (cost - self.level).div_ceil(u128::from(rate));
        Err(Duration::from_nanos(u64::try_from(wait_ns).unwrap_or(u64::MAX)))
    }

    fn capacity(&self) -> u128 {
        u128::from(self.burst_bytes()) * NS_PER_S
    }

    fn refill(&mut self, now: Duration) {
        // Threads read the clock before they get here, so that it can seem to go back a little.
        let passed = now.saturating_sub(self.at);
        let rate = u128::from(self.rate_bytes_per_s.unwrap_or(0));
        self.level = self.level.saturating_add(passed.as_nanos().saturating_mul(rate)).min(self.capacity());
        self.at = self.at.max(now);
    }
}

/// A limit for threads, which wait while the bucket is empty.
#[derive(Debug)]
pub struct RateLimit {
    state: Mutex<LimitState>,
    changed: Condvar,
    origin: Instant,
}

#[derive(Debug)]
struct LimitState {
    bucket: TokenBucket,
    /// Limit set by the user, in bytes per second.
    limit: Option<u64>,
    /// Rate that the link carries without a queue, in bytes per second.
    pace: Option<u64>,
}

impl LimitState {
    fn update(&mut self, now: Duration) {
        let rate = self.limit.into_iter().chain(self.pace).min();
        self.bucket.set_burst(if self.pace.is_some() { PACED_BURST } else { BURST }, now);
        self.bucket.set_rate(rate, now);
    }
}

impl RateLimit {
    /// Creates a limit in bytes per second; None or 0 for none.
    pub fn new(rate_bytes_per_s: Option<u64>) -> Self {
        let limit = rate_bytes_per_s.filter(|rate| *rate > 0);
        let bucket = TokenBucket::new(limit, Duration::ZERO);
        Self {
            state: Mutex::new(LimitState { bucket, limit, pace: None }),
            changed: Condvar::new(),
            origin: Instant::now(),
        }
    }

    /// Returns the limit in bytes per second; None for none.
    pub fn rate_bytes_per_s(&self) -> Option<u64> {
        self.lock().limit
    }

    /// Changes the limit. Threads that wait under the old limit follow the new one at once.
    pub fn set_rate(&self, rate_bytes_per_s: Option<u64>) {
        self.change(|state| state.limit = rate_bytes_per_s.filter(|rate| *rate > 0));
    }

    /// Adds a pace, in bytes per second, with smaller bursts, so that the traffic of other streams does not wait behind
    /// that of these. None removes the pace.
    pub fn set_pace(&self, pace_bytes_per_s: Option<u64>) {
        self.change(|state| state.pace = pace_bytes_per_s.filter(|rate| *rate > 0));
    }

    fn change(&self, change: impl FnOnce(&mut LimitState)) {
        let mut state = self.lock();
        change(&mut state);
        state.update(self.origin.elapsed());
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until `bytes` may be sent. Gives up at the deadline, or when `is_cancelled` is set and [`RateLimit::wake`]
    /// is called after that.
    pub(crate) fn take_or_cancel(
        &self,
        bytes: u64,
        is_cancelled: &AtomicBool,
        deadline: Option<Instant>,
    ) -> Result<(), LinkError> {
        let mut left = bytes;
        let mut state = self.lock();
        loop {
            if is_cancelled.load(Ordering::Acquire) {
                return Err(LinkError::Closed);
            }
            match state.bucket.take(left, self.origin.elapsed()) {
                Ok(grant) if grant >= left => return Ok(()),
                Ok(grant) => left -= grant,
                Err(mut wait) => {
                    if let Some(deadline) = deadline {
                        let rest = deadline.saturating_duration_since(Instant::now());
                        if rest.is_zero() {
                            return Err(LinkError::TimedOut);
                        }
                        wait = wait.min(rest);
                    }
                    state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Wakes every waiting thread, so that it checks its condition again.
    pub(crate) fn wake(&self) {
        // Under the lock, so that no thread is between its check and falling asleep.
        let _state = self.lock();
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, LimitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// A step of a bucket's life.
    #[derive(Clone, Debug)]
    enum Step {
        Pass(Duration),
        Take(u64),
        SetRate(Option<u64>),
    }

    /// Rates of all magnitudes.
    fn rate() -> impl Strategy<Value = u64> {
        (0_u32..35, 1.0..2.0).prop_map(|(bits, more)| (more * f64::from(2_u32).powi(bits as i32)) as u64)
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0_u64..200_000_000).prop_map(|ns| Step::Pass(Duration::from_nanos(ns))),
            1 => (0_u64..20).prop_map(|s| Step::Pass(Duration::from_secs(s))),
            12 => (1_u64..1 << 22).prop_map(Step::Take),
            1 => prop::option::of(rate()).prop_map(Step::SetRate),
        ];
        prop::collection::vec(step, 1..120)
    }

    proptest! {
        /// Slow and obvious: checks every window that begins and ends at a step.
        #[test]
        fn no_window_gets_more_than_its_rate_and_one_burst(steps in steps(), rate in rate()) {
            let mut now = Duration::ZERO;
            let mut bucket = TokenBucket::new(Some(rate), now);
            // For each step: the burst before it, the allowance that it adds (bytes × 10⁹), and the granted bytes (×
            // 10⁹).
            let mut past: Vec<(u128, u128, u128)> = Vec::new();
            for step in steps {
                let burst = u128::from(bucket.burst_bytes()) * NS_PER_S;
                let limited = bucket.rate_bytes_per_s();
                match step {
                    Step::Pass(time) => {
                        now += time;
                        past.push((burst, time.as_nanos() * u128::from(limited.unwrap_or(0)), 0));
                    }
                    Step::Take(bytes) => {
                        let granted = bucket.take(bytes, now);
                        if limited.is_none() {
                            prop_assert_eq!(granted, Ok(bytes));
                        } else if let Ok(granted) = granted {
                            prop_assert!((1..=bytes).contains(&granted));
                            past.push((burst, 0, u128::from(granted) * NS_PER_S));
                        }
                    }
                    Step::SetRate(rate) => bucket.set_rate(rate, now),
                }
            }
            for begin in 0..past.len() {
                let mut allowed = past[begin].0;
                let mut granted = 0;
                for (_, allows, grants) in &past[begin..] {
                    allowed += allows;
                    granted += grants;
                    prop_assert!(granted <= allowed, "window from step {}: {} of {}", begin, granted, allowed);
                }
            }
        }

        #[test]
        fn a_wait_is_long_enough_and_no_longer(rate in rate(), bytes in 1_u64..1 << 22) {
            let mut bucket = TokenBucket::new(Some(rate), Duration::ZERO);
            let wait = loop {
                if let Err(wait) = bucket.take(bytes, Duration::ZERO) {
                    break wait;
                }
            };
            prop_assert!(wait > Duration::ZERO);
            let too_early = wait.saturating_sub(Duration::from_nanos(1));
            prop_assert!(bucket.clone().take(bytes, too_early).is_err());
            prop_assert!(bucket.take(bytes, wait).is_ok());
        }

        /// A sender that is always woken late, by up to 20 ms, uses 1 Gb/s well.
        #[test]
        fn late_wakeups_cost_little(late_ms in prop::collection::vec(0_u64..20, 64)) {
            let rate = 125_000_000;
            let mut bucket = TokenBucket::new(Some(rate), Duration::ZERO);
            let (mut now, mut sent) = (Duration::ZERO, 0);
            let mut late = late_ms.iter().cycle();
            while now < Duration::from_secs(4) {
                match bucket.take(256 << 10, now) {
                    Ok(granted) => sent += granted,
                    Err(wait) => now += wait + Duration::from_millis(*late.next().unwrap()),
                }
            }
            let allowed = now.as_nanos() * u128::from(rate) / NS_PER_S;
            prop_assert!(u128::from(sent) * 100 >= allowed * 95, "{} of {}", sent, allowed);
        }
    }

    #[test]
    fn a_clock_that_seems_to_go_back_gives_nothing() {
        let mut bucket = TokenBucket::new(Some(1_000_000), Duration::from_secs(5));
        while bucket.take(1_000, Duration::from_secs(5)).is_ok() {}
        assert!(bucket.take(1_000, Duration::from_secs(1)).is_err());
        assert!(bucket.take(1_000, Duration::from_secs(5)).is_err());
        assert!(bucket.take(1_000, Duration::from_secs(6)).is_ok());
    }

    #[test]
    fn a_pace_is_kept_beside_a_limit() {
        let rate = |limit: &RateLimit| {
            let state = limit.lock();
            (state.bucket.rate_bytes_per_s(), state.bucket.burst)
        };
        let limit = RateLimit::new(Some(1_000));
        limit.set_pace(Some(2_000));
        assert_eq!((rate(&limit), limit.rate_bytes_per_s()), ((Some(1_000), PACED_BURST), Some(1_000)));
        limit.set_rate(None);
        assert_eq!((rate(&limit), limit.rate_bytes_per_s()), ((Some(2_000), PACED_BURST), None));
        limit.set_rate(Some(3_000));
        assert_eq!(rate(&limit), (Some(2_000), PACED_BURST));
        limit.set_pace(None);
        assert_eq!(rate(&limit), (Some(3_000), BURST));
    }

    #[test]
    fn zero_is_no_limit() {
        assert_eq!(RateLimit::new(Some(0)).rate_bytes_per_s(), None);
        assert!(take(&RateLimit::new(Some(0)), u64::MAX));
        assert!(take(&RateLimit::new(None), u64::MAX));
    }

    /// Waits until these bytes may be sent.
    fn take(limit: &RateLimit, bytes: u64) -> bool {
        limit.take_or_cancel(bytes, &AtomicBool::new(false), None).is_ok()
    }

    /// Threads that would wait for a year. Each of these ends them, whether they already sleep or not yet.
    #[test]
    fn waiting_threads_notice() {
        type End = fn(&RateLimit, &AtomicBool);
        let ends: [(End, bool); 3] = [
            (|limit, _| limit.set_rate(None), true),
            (|limit, _| limit.set_rate(Some(u64::MAX)), true),
            (
                |limit, is_cancelled| {
                    is_cancelled.store(true, Ordering::Release);
                    limit.wake();
                },
                false,
            ),
        ];
        for (end, given) in ends {
            let (limit, is_cancelled) = (RateLimit::new(Some(1)), AtomicBool::new(false));
            thread::scope(|scope| {
                let waiting: Vec<_> = (0..4)
                    .map(|_| scope.spawn(|| limit.take_or_cancel(1 << 25, &is_cancelled, None).is_ok()))
                    .collect();
                // One thread has received the burst, so that another waits for more.
                while limit.lock().bucket.level >= u128::from(MIN_BURST_BYTES) * NS_PER_S {
                    thread::yield_now();
                }
                end(&limit, &is_cancelled);
                for thread in waiting {
                    assert_eq!(thread.join().unwrap(), given);
                }
            });
        }
    }

    /// Several streams get no more than one would.
    #[test]
    fn streams_share_the_limit() {
        let rate = 50_000_000_u64;
        let limit = Arc::new(RateLimit::new(Some(rate)));
        let (burst, begin, sent) = (limit.lock().bucket.burst_bytes(), Instant::now(), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        assert!(take(&limit, 100_000));
                        // The time is read after the sum, so that it can only be too long.
                        let sum = sent.fetch_add(100_000, Ordering::SeqCst) + 100_000;
                        let allowed = begin.elapsed().as_nanos() * u128::from(rate) / NS_PER_S;
                        assert!(u128::from(sum) <= allowed + u128::from(burst));
                    }
                });
            }
        });
    }
}
