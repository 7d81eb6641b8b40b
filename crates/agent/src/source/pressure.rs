//! What copying costs the guest on a busy host, and how far it gives way for that.

use ::memory::SenderHandle;
use engine::pressure::{Pressure, Waited};
use tracee::{Process, ProcessError};

use super::vm::{SourceVm, VmError};
use crate::report::Waiting;

/// Looks at how long the guest's processors wait for processors of the host.
#[derive(Debug)]
pub(crate) struct Watch {
    process: Process,
    /// The guest's processors.
    threads: Vec<u32>,
    /// All that they did until the last look.
    last: Waited,
    allowed_permille: u64,
    /// None before anything was copied.
    policy: Option<Pressure>,
    waiting: Waiting,
    since: Waited,
}

/// Why nobody can look.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WatchError {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Process(#[from] ProcessError),
}

impl Watch {
    /// From here on; copying may make the guest wait for so much more of the time than it does now, in thousandths.
    pub(crate) fn begin(vm: &mut SourceVm, allowed_permille: u64) -> Result<Self, WatchError> {
        let threads = vm.processor_threads()?;
        let process = vm.process.try_clone()?;
        let mut watch = Self {
            process,
            threads,
            last: Waited::default(),
            allowed_permille,
            policy: None,
            waiting: Waiting::default(),
            since: Waited::default(),
        };
        watch.last = watch.now()?;
        Ok(watch)
    }

    /// Copying begins here, if it has not: until now the guest waited for others.
    pub(crate) fn copying(&mut self) {
        if self.policy.is_some() {
            return;
        }
        let Ok(now) = self.now() else { return };
        let before = between(self.last, now);
        self.policy = Some(Pressure::new(self.allowed_permille, before));
        self.waiting.before_permille = before.permille();
        (self.last, self.since) = (now, now);
    }

    /// Something was copied: has the sender give way by as much as follows. What it cost the guest so far is returned.
    pub(crate) fn look(&mut self, sender: &SenderHandle) -> Option<Waiting> {
        let now = self.now().ok()?;
        let (last, since) = (between(self.last, now), between(self.since, now));
        let policy = self.policy.as_mut()?;
        let nice = if self.allowed_permille > 0 { policy.decide(last) } else { policy.nice() };
        sender.gives_way_by(nice);
        self.last = now;
        self.waiting.permille = since.permille();
        self.waiting.most_permille = self.waiting.most_permille.max(last.permille());
        self.waiting.nicest = self.waiting.nicest.max(nice);
        Some(self.waiting)
    }

    /// All that the guest's processors did so far.
    fn now(&self) -> Result<Waited, ProcessError> {
        let mut all = Waited::default();
        for thread in &self.threads {
            let times = self.process.thread_times(*thread)?;
            all.ran_ns += times.ran.as_nanos() as u64;
            all.waited_ns += times.waited.as_nanos() as u64;
        }
        Ok(all)
    }
}

fn between(before: Waited, now: Waited) -> Waited {
    Waited {
        ran_ns: now.ran_ns.saturating_sub(before.ran_ns),
        waited_ns: now.waited_ns.saturating_sub(before.waited_ns),
    }
}
