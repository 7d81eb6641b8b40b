//! Cost of copying for the guest on a busy host, and the restraint that limits it.

use ::memory::SenderHandle;
use engine::pressure::{Restraint, RestraintPolicy, SchedulingTimes};
use engine::trace::TracedPolicy;
use tracee::{Process, ProcessError};

use api::report::Waiting;
use host::{SourceVm, VmError};

/// Measurement of how long the guest's processors wait for processors of the host.
#[derive(Debug)]
pub(crate) struct PressureMeter {
    process: Process,
    /// Threads of the guest's processors.
    threads: Vec<u32>,
    /// Their running and waiting times until the last sample.
    last: SchedulingTimes,
    allowed_permille: u64,
    #[cfg(feature = "comparison")]
    niceness_only: bool,
    /// The policy; none before anything was copied.
    policy: Option<TracedPolicy<RestraintPolicy>>,
    waiting: Waiting,
    /// Running and waiting times while the guest was copied and not held to a limit.
    since: SchedulingTimes,
    was_held: bool,
}

/// Error of the measurement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PressureError {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Process(#[from] ProcessError),
}

impl PressureMeter {
    /// Starts the measurement. Copying may make the guest wait for `allowed_permille` thousandths of the time more than
    /// now.
    pub(crate) fn begin(vm: &mut SourceVm, allowed_permille: u64) -> Result<Self, PressureError> {
        let threads = vm.processor_threads()?;
        let process = vm.process.try_clone()?;
        let mut watch = Self {
            process,
            threads,
            last: SchedulingTimes::default(),
            allowed_permille,
            #[cfg(feature = "comparison")]
            niceness_only: false,
            policy: None,
            waiting: Waiting::default(),
            since: SchedulingTimes::default(),
            was_held: false,
        };
        watch.last = watch.now();
        Ok(watch)
    }

    /// Selects the ways in which copying restrains itself.
    #[cfg(feature = "comparison")]
    pub(crate) fn restrained_by(self, restraints: api::Restraints) -> Self {
        match restraints {
            api::Restraints::None => Self { allowed_permille: 0, ..self },
            api::Restraints::Niceness => Self { niceness_only: true, ..self },
            api::Restraints::All => self,
        }
    }

    /// Returns the policy that restrains copying; none before anything was copied.
    pub(crate) fn policy(&self) -> Option<&TracedPolicy<RestraintPolicy>> {
        self.policy.as_ref()
    }

    /// Restrains a sender that copies now, and may have new connections, as far as the observations require. Waiting
    /// times before the first call had other causes.
    pub(crate) fn restrain(&mut self, sender: &SenderHandle) {
        let now = self.now();
        let policy = self.policy.get_or_insert_with(|| {
            let before = between(self.last, now);
            self.waiting.before_permille = before.permille();
            self.last = now;
            let policy = RestraintPolicy::new(self.allowed_permille, before, sender.threads());
            #[cfg(feature = "comparison")]
            let policy = if self.niceness_only { policy.niceness_only() } else { policy };
            TracedPolicy::new(policy)
        });
        let Restraint { nice, threads, interval_factor: _ } = policy.policy().restraint();
        sender.set_niceness(nice);
        sender.limit_copying_threads(threads);
    }

    /// Returns the factor by which the interval between two dirty scans is longer than usual.
    pub(crate) fn interval_factor(&self) -> u32 {
        self.policy.as_ref().map_or(1, |policy| policy.policy().restraint().interval_factor)
    }

    /// Samples the waiting times after something was copied; the new restraint holds from the next time on. Returns the
    /// cost for the guest until now. While the guest is held to a limit it waits for that, too: the kernel does not
    /// distinguish the two.
    pub(crate) fn sample(&mut self, is_held: bool) -> Option<Waiting> {
        let now = self.now();
        let last = between(self.last, now);
        let policy = self.policy.as_mut()?;
        if is_held || self.was_held {
            (self.was_held, self.last) = (is_held, now);
            return None;
        }
        if last.ran_ns + last.waited_ns >= LEAST_NS {
            let restraint =
                if self.allowed_permille > 0 { policy.decide_on(last) } else { policy.policy().restraint() };
            self.last = now;
            self.since.ran_ns += last.ran_ns;
            self.since.waited_ns += last.waited_ns;
            self.waiting.permille = self.since.permille();
            self.waiting.most_permille = self.waiting.most_permille.max(last.permille());
            self.waiting.reached(restraint);
        }
        Some(self.waiting)
    }

    /// Returns the sum of the processors' running and waiting times. A processor that was unplugged counts as zero.
    fn now(&self) -> SchedulingTimes {
        let mut all = SchedulingTimes::default();
        for times in self.threads.iter().filter_map(|thread| self.process.thread_times(*thread).ok()) {
            all.ran_ns += times.ran.as_nanos() as u64;
            all.waited_ns += times.waited.as_nanos() as u64;
        }
        all
    }
}

/// Minimum duration of a sample: a shorter one is chance, because a turn of the scheduler lasts some milliseconds.
const LEAST_NS: u64 = 100_000_000;

fn between(before: SchedulingTimes, now: SchedulingTimes) -> SchedulingTimes {
    SchedulingTimes {
        ran_ns: now.ran_ns.saturating_sub(before.ran_ns),
        waited_ns: now.waited_ns.saturating_sub(before.waited_ns),
    }
}
