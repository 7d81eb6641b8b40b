//! Processor time: the agent's own, and that of idle processors.

use std::fs;

use rustix::time::{ClockId, clock_gettime};

/// The agent's CPU time at a moment.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime {
    since_us: u64,
}

impl CpuTime {
    /// Starts to count now.
    pub fn start() -> Self {
        Self { since_us: now_us() }
    }

    /// Returns the CPU time, in user mode and in the kernel, that all threads of the agent have used since the start,
    /// in microseconds. It includes all concurrent work.
    pub fn used_us(self) -> u64 {
        now_us().saturating_sub(self.since_us)
    }
}

/// Nanoseconds of one unit in /proc/stat, a hundredth of a second on all architectures.
const TICK_NS: u64 = 10_000_000;

/// Returns the idle time of this host's processors since boot, in nanoseconds; 0 if the kernel does not report it.
pub fn idle_ns() -> u64 {
    fs::read_to_string("/proc/stat").ok().and_then(|text| idle_ticks(&text)).unwrap_or(0) * TICK_NS
}

/// Returns idle ticks, including those while waiting for I/O.
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
