//! Work that a thread repeats until its owner ends it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Thread that works until this is dropped, or its work is done.
#[derive(Debug)]
pub(crate) struct LoopThread {
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl LoopThread {
    /// Starts the thread. Its work pauses by [`Pause`], which knows when to end.
    pub(crate) fn start(name: &str, work: impl FnOnce(&Pause) + Send + 'static) -> io::Result<Self> {
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let pause = Pause(Arc::clone(&end));
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || work(&pause))?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Drop for LoopThread {
    fn drop(&mut self) {
        // The counter of a new descriptor has room.
        let _ = rustix::io::write(&*self.end, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Pauses of a loop's work.
pub(crate) struct Pause(Arc<OwnedFd>);

impl Pause {
    /// Waits for this time. Returns false if the work is to end.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let timeout = Timespec::try_from(time).ok();
        let waited = poll(&mut [PollFd::new(&*self.0, PollFlags::IN)], timeout.as_ref());
        if waited.is_err() {
            thread::sleep(time);
        }
        !waited.is_ok_and(|ready| ready > 0)
    }
}
