//! Measurement of wall time and processor time.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// Duration of an action, in nanoseconds.
pub(crate) struct Elapsed {
    wall_ns: u64,
    pub(crate) cpu_ns: u64,
}

/// Runs an action. Returns also the time for which it waited instead of using a processor.
pub(crate) fn waited<T>(run: impl FnOnce() -> T) -> (T, Duration) {
    let (done, took) = measure(run);
    (done, Duration::from_nanos(took.wall_ns.saturating_sub(took.cpu_ns)))
}

/// Runs an action and measures its duration.
pub(crate) fn measure<T>(run: impl FnOnce() -> T) -> (T, Elapsed) {
    let (began, cpu_began) = (Instant::now(), cpu_ns());
    let done = run();
    let cpu_ns = cpu_ns().saturating_sub(cpu_began);
    (done, Elapsed { wall_ns: began.elapsed().as_nanos() as u64, cpu_ns })
}

/// Processor time of this thread, in nanoseconds. Read through the C library, because valgrind does not provide the
/// kernel's own page (vDSO) for it.
pub(crate) fn cpu_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
