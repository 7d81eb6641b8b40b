//! Threads that give way to guests.

use rustix::process::{getpriority_process, setpriority_process};

/// By how much less the threads of the data plane get of a processor that is wanted by others: a third of an equal
/// share. What is moved in the background is not to be felt by the guests that run on the host, the moving one first of
/// all.
pub(crate) const NICE: u8 = 5;

/// This thread, and only it, gives way to others, until a guest waits for it.
#[derive(Debug)]
pub(crate) struct GivesWay {
    /// Its priority before; none if it is that again.
    before: Option<i32>,
    nice: u8,
    /// To give way by less than a moment ago takes a privilege.
    may_return: bool,
}

impl GivesWay {
    /// From here on, more than the agent does already, where that was told to.
    pub(crate) fn begin() -> Self {
        let mut gives_way = Self { before: getpriority_process(None).ok(), nice: 0, may_return: true };
        gives_way.by(NICE);
        gives_way.may_return = gives_way.before.is_some_and(|before| {
            let returned = setpriority_process(None, before).is_ok();
            returned && setpriority_process(None, before + i32::from(NICE)).is_ok()
        });
        gives_way
    }

    /// From here on by so much more than the agent does (`nice(2)`), unless it has ended. Nothing changes where there would
    /// be no way back.
    pub(crate) fn by(&mut self, nice: u8) {
        let Some(before) = self.before.filter(|_| nice != self.nice && self.may_return) else { return };
        self.nice = nice;
        // Without leave to do so it works on as before.
        let _ = setpriority_process(None, before + i32::from(nice));
    }

    /// A guest stands still, or soon may: others have no precedence any more.
    pub(crate) fn end(&mut self) {
        if let Some(before) = self.before.take() {
            // It takes a privilege. Without it the thread goes on giving way.
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
            let mut gives_way = GivesWay::begin();
            let meanwhile = getpriority_process(None).unwrap();
            gives_way.by(9);
            let more = getpriority_process(None).unwrap();
            gives_way.end();
            gives_way.by(7);
            (meanwhile, more, getpriority_process(None).unwrap())
        });
        let (meanwhile, more, after) = there.join().unwrap();
        assert_eq!(meanwhile, (before + i32::from(NICE)).min(19));
        assert_eq!(more, if rustix::process::geteuid().is_root() { (before + 9).min(19) } else { meanwhile });
        if rustix::process::geteuid().is_root() {
            assert_eq!(after, before);
        }
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
