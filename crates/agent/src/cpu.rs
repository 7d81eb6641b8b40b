//! Processor time: the agent's own, and what nobody uses.

use std::fs;

use rustix::time::{ClockId, clock_gettime};

/// What the agent's CPU time was at a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuTime {
    since_us: u64,
}

impl CpuTime {
    /// From now on.
    pub(crate) fn start() -> Self {
        Self { since_us: now_us() }
    }

    /// CPU time, of the program and of the kernel for it, that all threads of the agent have used since, in
    /// microseconds. Whatever else it did at the same time is in it too.
    pub(crate) fn used_us(self) -> u64 {
        now_us().saturating_sub(self.since_us)
    }
}

/// Nanoseconds of one unit in /proc/stat, a hundredth of a second on all architectures.
const TICK_NS: u64 = 10_000_000;

/// Time of this host's processors that nobody has used since it was started, in nanoseconds; 0 if it does not tell.
pub(crate) fn idle_ns() -> u64 {
    fs::read_to_string("/proc/stat").ok().and_then(|text| idle_ticks(&text)).unwrap_or(0) * TICK_NS
}

/// Idle, and idle while something is waited for.
fn idle_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().skip(3);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

fn now_us() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_found_in_what_the_kernel_tells() {
        let stat = "cpu  100 2 30 4000 500 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(idle_ticks(stat), Some(4500));
        assert_eq!((idle_ticks(""), idle_ticks("cpu  1 2 3"), idle_ticks("intr 5")), (None, None, None));
        assert!(idle_ns() > 0);
    }
}
