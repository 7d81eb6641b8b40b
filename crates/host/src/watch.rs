//! Detection of QEMU's exit.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use tracee::Process;
use tracing::warn;

/// A thread that waits for a process's exit. Dropping this ends the thread, so that attempts to move a VM that lives
/// for years leave none behind.
#[derive(Debug)]
pub(crate) struct ExitWatch {
    /// The thread has the other end, and detects that this one closes.
    end: UnixStream,
}

impl ExitWatch {
    /// Calls `ended` when a process has exited. Returns none if the system has no more threads or descriptors: QEMU's
    /// exit is then detected later, by the next command to it.
    pub(crate) fn start(process: &Process, ended: impl FnOnce() + Send + 'static) -> Option<Self> {
        let started = (|| {
            let process = process.try_clone().map_err(std::io::Error::other)?;
            let (end, dropped) = UnixStream::pair()?;
            let watch = move || {
                if has_ended(&process, &dropped) {
                    ended();
                }
            };
            thread::Builder::new().name("qemu-watch".to_owned()).spawn(watch)?;
            Ok::<_, std::io::Error>(Self { end })
        })();
        started.inspect_err(|error| warn!(%error, "cannot watch QEMU")).ok()
    }
}

impl Drop for ExitWatch {
    /// Shuts the socket down. Closing alone would not suffice: a child that is being started holds every descriptor of
    /// ours until it has become its program.
    fn drop(&mut self) {
        let _ = self.end.shutdown(Shutdown::Both);
    }
}

/// Waits until the process has exited, or `dropped` is closed. Returns true if it has exited.
fn has_ended(process: &Process, dropped: &UnixStream) -> bool {
    loop {
        let mut both = [PollFd::new(process, PollFlags::IN), PollFd::new(dropped, PollFlags::IN)];
        match poll(&mut both, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                warn!(%error, "stopped watching QEMU");
                return false;
            }
            Ok(_) => return both[1].revents().is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn the_exit_is_reported_and_a_dropped_watch_is_silent() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        let (sender, received) = mpsc::channel();
        let watch = |word: &'static str| {
            let sender = sender.clone();
            ExitWatch::start(&process, move || sender.send(word).unwrap()).unwrap()
        };
        let (dropped, kept) = (watch("dropped"), watch("kept"));
        // As a child has it that another thread has just forked.
        let inherited = dropped.end.try_clone().unwrap();
        drop(dropped);
        drop(sender);
        child.kill().unwrap();
        child.wait().unwrap();
        // The channel ends when both threads have ended.
        assert_eq!(received.iter().collect::<Vec<_>>(), ["kept"]);
        drop((kept, inherited));
    }
}
