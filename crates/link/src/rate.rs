//! A cap on bandwidth that all streams of a migration share and that can be changed while they run.
//!
//! [`Bucket`] is the rule, without a clock: time goes in, a grant or a wait comes out. [`RateLimit`] puts threads to
//! sleep by it.
//!
//! What counts is what is given to the sockets: frames with their headers and, where there is TLS, its records. The
//! headers of TCP, IP and Ethernet below come on top (about 4% with packets of 1,500 bytes).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const NS_PER_S: u128 = 1_000_000_000;

/// How much may be made up for after a pause, as time. A thread that the scheduler wakes late within this span loses
/// nothing of the rate.
const BURST: Duration = Duration::from_millis(50);

/// Least burst, in bytes.
const MIN_BURST_BYTES: u64 = 16 << 10;

/// Most bytes granted at once, so that streams take turns.
const GRANT_BYTES: u64 = 256 << 10;

/// A token bucket: over any span of time, grants sum up to at most rate × time + burst.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// None: no limit.
    rate_bytes_per_s: Option<u64>,
    /// What is in the bucket, in bytes × 10⁹, so that no rounding adds up.
    level: u128,
    /// When the level was right, counted from any fixed point.
    at: Duration,
}

impl Bucket {
    /// A full bucket. A rate of None or 0 is no limit.
    pub fn new(rate_bytes_per_s: Option<u64>, now: Duration) -> Self {
        let mut bucket =
            Self { rate_bytes_per_s: rate_bytes_per_s.filter(|rate| *rate > 0), level: 0, at: now };
        bucket.level = bucket.capacity();
        bucket
    }

    /// The rate, in bytes per second; None for no limit.
    pub fn rate_bytes_per_s(&self) -> Option<u64> {
        self.rate_bytes_per_s
    }

    /// Most bytes that are granted without any time passing.
    pub fn burst_bytes(&self) -> u64 {
        self.rate_bytes_per_s.map_or(0, |rate| {
            let burst = u128::from(rate) * BURST.as_nanos() / NS_PER_S;
            u64::try_from(burst).unwrap_or(u64::MAX).max(MIN_BURST_BYTES)
        })
    }

    /// Changes the rate from now on. What was saved up stays, as far as the new burst allows; nothing is given.
    pub fn set_rate(&mut self, rate_bytes_per_s: Option<u64>, now: Duration) {
        self.refill(now);
        self.rate_bytes_per_s = rate_bytes_per_s.filter(|rate| *rate > 0);
        self.level = self.level.min(self.capacity());
    }

    /// Asks for leave to send `bytes`. Grants some or all of them (at least one, unless none were asked for), or says
    /// how long to wait before asking again.
    pub fn take(&mut self, bytes: u64, now: Duration) -> Result<u64, Duration> {
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

/// A [`Bucket`] for threads.
#[derive(Debug)]
pub struct RateLimit {
    state: Mutex<State>,
    changed: Condvar,
    origin: Instant,
}

#[derive(Debug)]
struct State {
    bucket: Bucket,
    closed: bool,
}

impl RateLimit {
    /// A limit in bytes per second; None or 0 for none.
    pub fn new(rate_bytes_per_s: Option<u64>) -> Self {
        let bucket = Bucket::new(rate_bytes_per_s, Duration::ZERO);
        Self {
            state: Mutex::new(State { bucket, closed: false }),
            changed: Condvar::new(),
            origin: Instant::now(),
        }
    }

    /// The limit in bytes per second; None for none.
    pub fn rate_bytes_per_s(&self) -> Option<u64> {
        self.lock().bucket.rate_bytes_per_s()
    }

    /// Changes the limit. Threads that wait under the old one go by the new one at once.
    pub fn set_rate(&self, rate_bytes_per_s: Option<u64>) {
        self.lock().bucket.set_rate(rate_bytes_per_s, self.origin.elapsed());
        self.changed.notify_all();
    }

    /// Waits until `bytes` may be sent. False if the limit was closed instead.
    pub fn take(&self, bytes: u64) -> bool {
        self.take_unless(bytes, &AtomicBool::new(false))
    }

    /// Nobody waits here any more, now and later.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// As [`RateLimit::take`]; also gives up when `given_up` is set and [`RateLimit::wake`] called after that.
    pub(crate) fn take_unless(&self, bytes: u64, given_up: &AtomicBool) -> bool {
        let mut left = bytes;
        let mut state = self.lock();
        loop {
            if state.closed || given_up.load(Ordering::Acquire) {
                return false;
            }
            match state.bucket.take(left, self.origin.elapsed()) {
                Ok(grant) if grant >= left => return true,
                Ok(grant) => left -= grant,
                Err(wait) => {
                    state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Lets every waiting thread look again.
    pub(crate) fn wake(&self) {
        // Under the lock, so that nobody is between looking and falling asleep.
        let _state = self.lock();
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
