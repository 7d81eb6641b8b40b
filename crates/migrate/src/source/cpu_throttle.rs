//! CPU throttle for a guest that writes to its memory faster than the link carries: the policy's observations, and the
//! application of the limit that it decides.

use std::io;
use std::time::{Duration, Instant};

use engine::pre_copy::RoundObservation;
use engine::throttle::processors::{CpuObservation, CpuSample, CpuThrottlePolicy, ThrottleDemand};
use engine::trace::TracedPolicy;
use tracee::{CpuLimit, CpuLimitError, Process, ProcessError};

use super::sending_rate::SendingRate;
use host::HelperProgram;
use host::{DismissOnDrop, SourceVm, ThrottleGuard, VmError};

/// Throttle of the guest's processors, which are in groups of their own.
#[derive(Debug)]
pub(crate) struct CpuThrottle {
    process: Process,
    threads: Vec<u32>,
    guarded: GuardedLimit<CpuLimit, DismissOnDrop>,
    policy: TracedPolicy<CpuThrottlePolicy>,
    /// CPU time of each processor at the last sample, and the sample's time.
    last: Option<(Vec<Duration>, Instant)>,
    sending_rate: SendingRate,
    /// Limit of each processor, in microseconds per second; none if unlimited.
    us_per_s: Option<u64>,
}

/// A limit, and the guard that lifts it if this process ends. Dropping them lifts the limit and dismisses the guard, in
/// the order of the fields: if the process ended in between, no guard would be left.
#[derive(Debug)]
struct GuardedLimit<L, G> {
    limit: L,
    _guard: G,
}

/// Error of throttling processors.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CpuThrottleError {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Limit(#[from] CpuLimitError),
    #[error("QEMU does not report the threads of its guest's processors")]
    NoThreads,
    #[error("the guard process that would remove the limit if this agent dies cannot be started")]
    ThrottleGuard(#[source] io::Error),
}

impl CpuThrottle {
    /// Puts the guest's processors into groups of their own, still without a limit. `helper` starts the guard that
    /// lifts a limit if this agent dies.
    pub(crate) fn begin(vm: &mut SourceVm, helper: &HelperProgram) -> Result<Self, CpuThrottleError> {
        // Groups that an agent before this one has left would contain this one's.
        CpuLimit::end_leftover(&vm.process)?;
        let threads = vm.processor_threads()?;
        let process = vm.process.try_clone()?;
        if threads.is_empty() {
            return Err(CpuThrottleError::NoThreads);
        }
        let limit = CpuLimit::begin(&process, &threads)?;
        // No guest is slowed down without a guard that ends this if the agent dies.
        let guard =
            ThrottleGuard::for_processors(helper, &process).map_err(CpuThrottleError::ThrottleGuard)?;
        Ok(Self {
            process,
            threads,
            guarded: GuardedLimit { limit, _guard: DismissOnDrop(Some(guard)) },
            policy: TracedPolicy::new(CpuThrottlePolicy::default()),
            last: None,
            sending_rate: SendingRate::default(),
            us_per_s: None,
        })
    }

    /// Returns true if the guest is held to a limit.
    pub(crate) fn is_holding(&self) -> bool {
        self.us_per_s.is_some()
    }

    /// Returns the policy that decides the limit.
    pub(crate) fn policy(&self) -> &TracedPolicy<CpuThrottlePolicy> {
        &self.policy
    }

    /// Samples the CPU time since the last call, and has the kernel apply the limit that follows from it and from the
    /// round, if the guest is to be slowed down. Returns the change.
    pub(crate) fn sample(
        &mut self,
        round: &RoundObservation,
        wish: ThrottleDemand,
    ) -> Result<Option<LimitChange>, CpuThrottleError> {
        let seen = self.measure_use(round)?;
        let us_per_s = self.policy.decide_on(CpuSample { wish, seen });
        if us_per_s == self.us_per_s {
            return Ok(None);
        }
        self.guarded.limit.set(us_per_s)?;
        let before = std::mem::replace(&mut self.us_per_s, us_per_s);
        let is_slower = us_per_s.unwrap_or(u64::MAX) < before.unwrap_or(u64::MAX);
        Ok(Some(LimitChange { percent: self.policy.policy().percent(), is_slower }))
    }

    /// Returns the CPU time since the last call, with the rates of the round; none as long as they are not known.
    fn measure_use(&mut self, round: &RoundObservation) -> Result<Option<CpuObservation>, CpuThrottleError> {
        let pages = round.pages_sent.saturating_sub(round.empty_pages);
        self.sending_rate.learn(pages, round.reduced_pages, round.duration_ns / 1000);
        let ran = self.threads.iter().map(|thread| self.process.thread_cpu_time(*thread));
        let ran = ran.collect::<Result<Vec<_>, _>>()?;
        let now = Instant::now();
        let Some((ran_before, then)) = self.last.replace((ran.clone(), now)) else { return Ok(None) };
        let Some(sent_bytes_per_s) = self.sending_rate.bytes_per_s() else { return Ok(None) };
        let since_s = (now - then).as_secs_f64().max(1e-6);
        let used_us_per_s = ran.iter().zip(&ran_before).map(|(ran, before)| {
            let used_s = ran.saturating_sub(*before).as_secs_f64();
            (used_s / since_s * 1e6) as u64
        });
        Ok(Some(CpuObservation {
            used_us_per_s: used_us_per_s.collect(),
            // Slower processors write less to disks, too, but those have a throttle of their own.
            dirtied_bytes_per_s: round.without_must_precopy().dirty_rate_bytes_per_s(),
            sent_bytes_per_s,
        }))
    }

    /// Lifts the limit until the next sample but one: because nothing is sent, or because a processor that waits for
    /// its share does not notice that it is to stop.
    pub(crate) fn lift(&mut self) -> Result<(), CpuThrottleError> {
        self.guarded.limit.set(None)?;
        (self.us_per_s, self.last) = (None, None);
        self.policy.reset();
        Ok(())
    }
}

/// A change of the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitChange {
    /// CPU time that the guest may use from now on, in percent of its usual use.
    pub(crate) percent: u64,
    /// True if that is less than before.
    pub(crate) is_slower: bool,
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Records its end.
    struct Part<'a>(&'static str, &'a RefCell<Vec<&'static str>>);

    impl Drop for Part<'_> {
        fn drop(&mut self) {
            self.1.borrow_mut().push(self.0);
        }
    }

    #[test]
    fn the_guard_outlives_the_limit() {
        let ends = RefCell::new(Vec::new());
        drop(GuardedLimit { limit: Part("limit", &ends), _guard: Part("guard", &ends) });
        assert_eq!(ends.into_inner(), ["limit", "guard"]);
    }
}
