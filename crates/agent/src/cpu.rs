//! The agent's own CPU time.

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

fn now_us() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}
