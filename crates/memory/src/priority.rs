//! Lower scheduling priority for the threads of the data plane.

use rustix::process::{getpriority_process, setpriority_process};

/// Niceness of the threads of the data plane: with it they get a third of an equal share of a contended processor.
/// Background transfer must not be felt by the guests that run on the host, above all the one that is moved.
pub(crate) const NICE: u8 = 5;

/// Lowered priority of this thread, and only this one, until a guest waits for it.
#[derive(Debug)]
pub(crate) struct Niceness {
    /// Priority before; None once it is restored.
    before: Option<i32>,
    nice: u8,
    /// False if the thread lacks the privilege to raise its priority again.
    can_restore: bool,
}

impl Niceness {
    /// Lowers this thread's priority, on top of a niceness that was configured for the agent.
    pub(crate) fn begin() -> Self {
        let mut niceness = Self { before: getpriority_process(None).ok(), nice: 0, can_restore: true };
        niceness.set(NICE);
        niceness.can_restore = niceness.before.is_some_and(|before| {
            let returned = setpriority_process(None, before).is_ok();
            returned && setpriority_process(None, before + i32::from(NICE)).is_ok()
        });
        niceness
    }

    /// Sets the niceness of this thread relative to the agent's (`nice(2)`), unless it has ended. Nothing changes if
    /// there would be no way back.
    pub(crate) fn set(&mut self, nice: u8) {
        let Some(before) = self.before.filter(|_| nice != self.nice && self.can_restore) else { return };
        self.nice = nice;
        // Without the privilege the thread continues as before.
        let _ = setpriority_process(None, before + i32::from(nice));
    }

    /// Restores the priority, because a guest is stopped or soon may be.
    pub(crate) fn end(&mut self) {
        if let Some(before) = self.before.take() {
            // This needs a privilege. Without it the thread keeps its lowered priority.
            let _ = setpriority_process(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_gives_way_and_the_others_do_not() {
        let before = getpriority_process(None).unwrap();
        let there = std::thread::spawn(|| {
            let mut niceness = Niceness::begin();
            let lowered = getpriority_process(None).unwrap();
            niceness.set(9);
            let more = getpriority_process(None).unwrap();
            niceness.end();
            niceness.set(7);
            (lowered, more, getpriority_process(None).unwrap())
        });
        let (lowered, more, after) = there.join().unwrap();
        assert_eq!(lowered, (before + i32::from(NICE)).min(19));
        assert_eq!(more, if rustix::process::geteuid().is_root() { (before + 9).min(19) } else { lowered });
        if rustix::process::geteuid().is_root() {
            assert_eq!(after, before);
        }
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
