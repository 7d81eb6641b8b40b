//! Slowing the guest's processors down, where it writes to its memory faster than the link carries: what the policy is
//! shown, and who keeps the limit that it finds.

use std::time::{Duration, Instant};

use engine::precopy::RoundObservation;
use engine::throttle::processors::{CpuDrain, CpuObservation};
use proto::limits::PAGE_BYTES;
use tracee::{CpuLimit, CpuLimitError, Process, ProcessError};

use super::vm::{SourceVm, VmError};

/// The guest's processors, in groups of their own.
#[derive(Debug)]
pub(crate) struct Slowing {
    process: Process,
    threads: Vec<u32>,
    limit: CpuLimit,
    policy: CpuDrain,
    /// How long the processors had run at the last look, and when that was.
    last: Option<(Duration, Instant)>,
    us_per_s: Option<u64>,
}

/// Why processors cannot be slowed down.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SlowingError {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Limit(#[from] CpuLimitError),
    #[error("QEMU does not say in which threads its guest's processors run")]
    NoThreads,
}

impl Slowing {
    /// Puts the guest's processors into groups of their own. They are as fast as ever.
    pub(crate) fn begin(vm: &mut SourceVm) -> Result<Self, SlowingError> {
        // What an agent before this one has left would be the home of this one's.
        CpuLimit::end_left(&vm.process)?;
        let own = vm.cpu_threads()?;
        let process = vm.process.try_clone()?;
        let mut threads = Vec::new();
        for thread in process.threads()? {
            // One that ends meanwhile is no processor.
            if process.own_number(thread).is_ok_and(|number| own.contains(&number)) {
                threads.push(thread);
            }
        }
        if threads.is_empty() {
            return Err(SlowingError::NoThreads);
        }
        let limit = CpuLimit::begin(&process, &threads)?;
        let policy = CpuDrain::default();
        Ok(Self { process, threads, limit, policy, last: None, us_per_s: None })
    }

    /// Looks at what the guest used since the last time, and has the kernel keep what follows from that and from the
    /// round. Returns what it may use from now on, in hundredths of what it usually does, where that has changed.
    pub(crate) fn look(&mut self, round: &RoundObservation) -> Result<Option<u64>, SlowingError> {
        let mut ran = Duration::ZERO;
        for thread in &self.threads {
            ran += self.process.thread_cpu_time(*thread)?;
        }
        let now = Instant::now();
        let Some((ran_before, then)) = self.last.replace((ran, now)) else { return Ok(None) };
        let per_s = |amount: u128, ns: u128| {
            (amount * 1_000_000_000).checked_div(ns).map_or(0, |rate| u64::try_from(rate).unwrap_or(u64::MAX))
        };
        let us_per_s = self.policy.decide(&CpuObservation {
            used_us_per_s: per_s(ran.saturating_sub(ran_before).as_micros(), (now - then).as_nanos()),
            dirtied_bytes_per_s: round.dirty_rate_bytes_per_s(),
            drained_bytes_per_s: per_s(
                u128::from(round.pages_sent) * u128::from(PAGE_BYTES),
                round.duration_ns.into(),
            ),
        });
        if us_per_s == self.us_per_s {
            return Ok(None);
        }
        self.limit.set(us_per_s)?;
        self.us_per_s = us_per_s;
        Ok(Some(self.policy.percent()))
    }

    /// Lets the processors be as fast as ever: one that waits for its time does not hear that it is to stop.
    pub(crate) fn lift(&mut self) -> Result<(), SlowingError> {
        if self.us_per_s.take().is_some() {
            self.limit.set(None)?;
        }
        Ok(())
    }
}
