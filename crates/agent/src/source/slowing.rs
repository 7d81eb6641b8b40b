//! Slowing the guest's processors down, where it writes to its memory faster than the link carries: what the policy is
//! shown, and who keeps the limit that it finds.

use std::io;
use std::time::{Duration, Instant};

use engine::precopy::RoundObservation;
use engine::throttle::processors::{CpuDrain, CpuLook, CpuObservation, Wish};
use engine::trace::Traced;
use tracee::{CpuLimit, CpuLimitError, Process, ProcessError};

use super::throttling::Drained;
use super::vm::{SourceVm, VmError};
use crate::daemon::HelperProgram;
use crate::guard::{Dismissed, Guard};

/// The guest's processors, in groups of their own.
#[derive(Debug)]
pub(crate) struct Slowing {
    process: Process,
    threads: Vec<u32>,
    limit: CpuLimit,
    /// Lifts it after this process's end. Behind it: it is dismissed when the limit is lifted.
    _guard: Dismissed,
    policy: Traced<CpuDrain>,
    /// How long each of the processors had run at the last look, and when that was.
    last: Option<(Vec<Duration>, Instant)>,
    drained: Drained,
    /// What each may use.
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
    #[error("nothing could be started that lifts the limit should this agent die")]
    Guard(#[source] io::Error),
}

impl Slowing {
    /// Puts the guest's processors into groups of their own. They are as fast as ever; `helper` sees that they are again
    /// should this agent die.
    pub(crate) fn begin(vm: &mut SourceVm, helper: &HelperProgram) -> Result<Self, SlowingError> {
        // What an agent before this one has left would be the home of this one's.
        CpuLimit::end_left(&vm.process)?;
        let threads = vm.processor_threads()?;
        let process = vm.process.try_clone()?;
        if threads.is_empty() {
            return Err(SlowingError::NoThreads);
        }
        let limit = CpuLimit::begin(&process, &threads)?;
        // Nobody is slowed down without somebody who ends that, should this agent die.
        let guard = Guard::of_processors(helper, &process).map_err(SlowingError::Guard)?;
        Ok(Self {
            process,
            threads,
            limit,
            _guard: Dismissed(Some(guard)),
            policy: Traced::new(CpuDrain::default()),
            last: None,
            drained: Drained::default(),
            us_per_s: None,
        })
    }

    /// Whether the guest is held to a limit.
    pub(crate) fn is_holding(&self) -> bool {
        self.us_per_s.is_some()
    }

    /// Who says how fast it may be.
    pub(crate) fn policy(&self) -> &Traced<CpuDrain> {
        &self.policy
    }

    /// Looks at what the guest used since the last time, and where it is to be slow has the kernel keep what follows from
    /// that and from the round. Returns what has changed.
    pub(crate) fn look(
        &mut self,
        round: &RoundObservation,
        wish: Wish,
    ) -> Result<Option<Change>, SlowingError> {
        let seen = self.see(round)?;
        let us_per_s = self.policy.decide_on(CpuLook { wish, seen });
        if us_per_s == self.us_per_s {
            return Ok(None);
        }
        self.limit.set(us_per_s)?;
        let before = std::mem::replace(&mut self.us_per_s, us_per_s);
        let is_slower = us_per_s.unwrap_or(u64::MAX) < before.unwrap_or(u64::MAX);
        Ok(Some(Change { percent: self.policy.policy().percent(), is_slower }))
    }

    /// What the guest used since the last time, and what the round says of it; none as long as that is not known.
    fn see(&mut self, round: &RoundObservation) -> Result<Option<CpuObservation>, SlowingError> {
        let pages = round.pages_sent.saturating_sub(round.empty_pages);
        self.drained.learn(pages, round.spared_pages, round.duration_ns / 1000);
        let ran = self.threads.iter().map(|thread| self.process.thread_cpu_time(*thread));
        let ran = ran.collect::<Result<Vec<_>, _>>()?;
        let now = Instant::now();
        let Some((ran_before, then)) = self.last.replace((ran.clone(), now)) else { return Ok(None) };
        let Some(drained_bytes_per_s) = self.drained.bytes_per_s() else { return Ok(None) };
        let since_s = (now - then).as_secs_f64().max(1e-6);
        let used_us_per_s = ran.iter().zip(&ran_before).map(|(ran, before)| {
            let used_s = ran.saturating_sub(*before).as_secs_f64();
            (used_s / since_s * 1e6) as u64
        });
        Ok(Some(CpuObservation {
            used_us_per_s: used_us_per_s.collect(),
            // Slower processors write less to disks, too, but those have a throttle of their own.
            dirtied_bytes_per_s: round.of_memory().dirty_rate_bytes_per_s(),
            drained_bytes_per_s,
        }))
    }

    /// Lets the processors be as fast as ever, until the next look but one: while nothing is sent, or because one that
    /// waits for its time does not hear that it is to stop.
    pub(crate) fn lift(&mut self) -> Result<(), SlowingError> {
        self.limit.set(None)?;
        (self.us_per_s, self.last) = (None, None);
        self.policy.begin_anew();
        Ok(())
    }
}

/// Another speed than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// What the guest may use from now on, in hundredths of what it usually does.
    pub(crate) percent: u64,
    /// Whether that is less than before.
    pub(crate) is_slower: bool,
}
