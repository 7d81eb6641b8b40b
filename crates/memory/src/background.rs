//! Threads that give way to guests.

use rustix::process::{getpriority_process, nice, setpriority_process};

/// By how much less the threads of the data plane get of a processor that is wanted by others: a third of an equal
/// share. What is moved in the background is not to be felt by the guests that run on the host, the moving one first of
/// all.
const NICE: i32 = 5;

/// This thread, and only it, gives way to others, until a guest waits for it.
#[derive(Debug)]
pub(crate) struct GivesWay {
    /// Its priority before; none if it is that again.
    before: Option<i32>,
}

impl GivesWay {
    /// From here on, more than the agent does already, where that was told to.
    pub(crate) fn begin() -> Self {
        let before = getpriority_process(None).ok();
        // Without leave to do so it works on as before.
        let _ = nice(NICE);
        Self { before }
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
            gives_way.end();
            (meanwhile, getpriority_process(None).unwrap())
        });
        let (meanwhile, after) = there.join().unwrap();
        assert_eq!(meanwhile, (before + NICE).min(19));
        if rustix::process::geteuid().is_root() {
            assert_eq!(after, before);
        }
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
