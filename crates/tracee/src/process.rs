//! Identity of a process, and its state as the kernel reports it.
//!
//! A process id alone identifies nothing for long: it is reused. A [`Process`] holds the id, the start time of that
//! process and a pidfd. The pidfd stays with the process, so signals never reach another process, and each read from
//! `/proc/PID` is followed by a check of the pidfd: as long as the process lives, its id is not reused.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};

use crate::{AddressRange, abi};

pub use rustix::process::Signal;

/// Error: a process could not be inspected.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No process has this number, or it has ended.
    #[error("no process {pid} (it has ended, or never existed)")]
    Gone {
        /// Process id of the request.
        pid: u32,
    },
    /// The id belongs to another process by now.
    #[error(
        "process {pid} is now a different one: started at {found} clock ticks after boot, not at {expected}"
    )]
    Replaced {
        /// Process id.
        pid: u32,
        /// Start time that was expected, in clock ticks after boot.
        expected: u64,
        /// Start time that was found.
        found: u64,
    },
    /// The kernel does not permit the inspection.
    #[error("not permitted to inspect process {pid}: run as root or as the process's own user")]
    NotPermitted {
        /// Process id.
        pid: u32,
    },
    /// A file in /proc could not be parsed.
    #[error("/proc/{pid}/{file} has an unexpected format")]
    Malformed {
        /// Process id.
        pid: u32,
        /// Name of the file below `/proc/PID`.
        file: &'static str,
    },
    /// Any other error.
    #[error("cannot {action} process {pid}")]
    Io {
        /// Process id.
        pid: u32,
        /// Attempted action.
        action: &'static str,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Fields of `/proc/PID/status` that are needed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// State letter: `R` running, `S` sleeping, `D` uninterruptible, `T` stopped, `t` traced, `Z`
    /// zombie.
    pub state: char,
    /// Process that traces this one (a debugger), if any.
    pub tracer: Option<u32>,
    /// Seccomp mode: 0 off, 1 strict, 2 filter.
    pub seccomp: u8,
    /// True if the process has a shadow stack (CET), which forbids a return without a call.
    pub shadow_stack: bool,
}

/// Times of a thread since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// Time for which it ran.
    pub ran: Duration,
    /// Time for which it was runnable, but waited for a processor.
    pub waited: Duration,
}

/// One process, identified for as long as this value lives.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    start_time: u64,
    pidfd: OwnedFd,
}

impl Process {
    /// Finds the process with this id.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] if there is none or it has ended, [`ProcessError::NotPermitted`] and
    /// others if it cannot be inspected.
    pub fn open(pid: u32) -> Result<Self, ProcessError> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ProcessError::Gone { pid })?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|error| match error {
            // EINVAL: a thread, not a process. ENOENT: since Linux 6.15 for a thread.
            rustix::io::Errno::SRCH | rustix::io::Errno::INVAL | rustix::io::Errno::NOENT => {
                ProcessError::Gone { pid }
            }
            error => ProcessError::Io { pid, action: "open", source: error.into() },
        })?;
        let mut process = Self { pid, start_time: 0, pidfd };
        process.start_time =
            start_time(&process.read("stat")?).ok_or(ProcessError::Malformed { pid, file: "stat" })?;
        Ok(process)
    }

    /// Finds the process with this id and start time, as an earlier [`Process`] reported them.
    ///
    /// # Errors
    /// [`ProcessError::Replaced`] if the id was reused since; otherwise as [`Process::open`].
    pub fn open_exact(pid: u32, start_time: u64) -> Result<Self, ProcessError> {
        let process = Self::open(pid)?;
        if process.start_time == start_time {
            Ok(process)
        } else {
            Err(ProcessError::Replaced { pid, expected: start_time, found: process.start_time })
        }
    }

    /// Duplicates the handle of the same process.
    ///
    /// # Errors
    /// If no more descriptors are available to this process.
    pub fn try_clone(&self) -> Result<Self, ProcessError> {
        let pidfd = self.pidfd.try_clone().map_err(|source| self.io("open", source))?;
        Ok(Self { pidfd, ..*self })
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the start time, in clock ticks after boot (field 22 of `/proc/PID/stat`). Together
    /// with the host's boot id it identifies the process permanently.
    pub fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Returns true if it still runs. A process that has ended but was not waited for yet does not.
    pub fn is_alive(&self) -> bool {
        !self.exited_within(Some(Duration::ZERO)).unwrap_or(false)
    }

    /// Returns an error if the process has ended.
    pub fn check_alive(&self) -> Result<(), ProcessError> {
        if self.is_alive() { Ok(()) } else { Err(ProcessError::Gone { pid: self.pid }) }
    }

    /// Sends a signal to it, and to no other.
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        pidfd_send_signal(&self.pidfd, signal).map_err(|error| match error {
            rustix::io::Errno::SRCH => ProcessError::Gone { pid: self.pid },
            rustix::io::Errno::PERM => ProcessError::NotPermitted { pid: self.pid },
            error => self.io("signal", error.into()),
        })
    }

    /// Asks the kernel to page out a range of its memory now, as a host does that is short of memory. The contents
    /// do not change; pages that are in use, or that other processes have mapped too, stay in memory.
    ///
    /// # Errors
    /// If a part of the range is not mapped, or cannot be paged out (huge pages of hugetlbfs).
    pub fn page_out(&self, range: AddressRange) -> Result<(), ProcessError> {
        let mut at = range.start;
        while at < range.end {
            match abi::page_out(&self.pidfd, at, range.end - at) {
                Ok(0) => return Err(self.io("page out", io::ErrorKind::UnexpectedEof.into())),
                Ok(done) => at += done,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.explain("page out", error)),
            }
        }
        Ok(())
    }

    /// Waits until it has ended, at most `timeout` (`None`: for ever). Returns true if it has.
    pub fn wait_exit(&self, timeout: Option<Duration>) -> Result<bool, ProcessError> {
        self.exited_within(timeout).map_err(|source| self.io("wait for", source))
    }

    /// Reads a text file below `/proc/PID`; the result belongs to this process.
    pub fn read(&self, file: &'static str) -> Result<String, ProcessError> {
        Ok(String::from_utf8_lossy(&self.read_bytes(file)?).into_owned())
    }

    /// Reads a file below `/proc/PID` as bytes, because names in it may not be text.
    pub(crate) fn read_bytes(&self, file: &'static str) -> Result<Vec<u8>, ProcessError> {
        let bytes = fs::read(self.path(file)).map_err(|source| self.explain("read", source))?;
        self.check_alive()?;
        Ok(bytes)
    }

    /// Returns a path below `/proc/PID`. The caller has to verify afterwards with
    /// [`Process::check_alive`] that it was this process's.
    pub fn path(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid))
    }

    /// Returns the name of its program, as the kernel keeps it: at most 15 bytes.
    pub fn comm(&self) -> Result<String, ProcessError> {
        Ok(self.read("comm")?.trim_end().to_owned())
    }

    /// Returns the current fields of `/proc/PID/status`.
    pub fn status(&self) -> Result<Status, ProcessError> {
        let text = self.read("status")?;
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let malformed = ProcessError::Malformed { pid: self.pid, file: "status" };
        let (Some(state), Some(tracer)) = (field("State"), field("TracerPid")) else { return Err(malformed) };
        let (Some(state), Ok(tracer)) = (state.chars().next(), tracer.parse::<u32>()) else {
            return Err(malformed);
        };
        Ok(Status {
            state,
            tracer: (tracer != 0).then_some(tracer),
            // Absent in kernels without seccomp.
            seccomp: field("Seccomp").and_then(|mode| mode.parse().ok()).unwrap_or(0),
            shadow_stack: field("x86_Thread_features")
                .is_some_and(|all| all.split_whitespace().any(|one| one == "shstk")),
        })
    }

    /// Returns its open descriptors, each with the target of its link in `/proc/PID/fd`.
    pub fn descriptors(&self) -> Result<Vec<(i32, PathBuf)>, ProcessError> {
        let mut found = Vec::new();
        for entry in
            fs::read_dir(self.path("fd")).map_err(|source| self.explain("list the descriptors of", source))?
        {
            let entry = entry.map_err(|source| self.explain("list the descriptors of", source))?;
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A descriptor that was closed in between is absent, which is no error.
            if let Ok(target) = fs::read_link(entry.path()) {
                found.push((number, target));
            }
        }
        self.check_alive()?;
        Ok(found)
    }

    /// Returns the ids of its threads, the main thread first.
    pub fn threads(&self) -> Result<Vec<u32>, ProcessError> {
        let mut found = Vec::new();
        for entry in
            fs::read_dir(self.path("task")).map_err(|source| self.explain("list the threads of", source))?
        {
            let entry = entry.map_err(|source| self.explain("list the threads of", source))?;
            found.extend(entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
        }
        self.check_alive()?;
        found.sort_unstable_by_key(|&thread| (thread != self.pid, thread));
        Ok(found)
    }

    /// Returns the id that a thread has in its own PID namespace.
    pub fn namespace_id(&self, thread: u32) -> Result<u32, ProcessError> {
        let status = self.read_of_thread(thread, "status")?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        // Absent in kernels without such namespaces.
        Ok(numbers.and_then(|all| all.split_whitespace().last()?.parse().ok()).unwrap_or(thread))
    }

    /// Returns the time for which one of its threads has run so far.
    pub fn thread_cpu_time(&self, thread: u32) -> Result<Duration, ProcessError> {
        Ok(self.thread_times(thread)?.ran)
    }

    /// Returns the times for which one of its threads has run, and has waited for a processor, so far.
    pub fn thread_times(&self, thread: u32) -> Result<ThreadTimes, ProcessError> {
        let malformed = ProcessError::Malformed { pid: self.pid, file: "task/THREAD/schedstat" };
        let text = self.read_of_thread(thread, "schedstat")?;
        let mut times = text.split_whitespace().map_while(|ns| ns.parse().ok().map(Duration::from_nanos));
        match (times.next(), times.next()) {
            (Some(ran), Some(waited)) => Ok(ThreadTimes { ran, waited }),
            _ => Err(malformed),
        }
    }

    fn read_of_thread(&self, thread: u32, file: &str) -> Result<String, ProcessError> {
        let read = fs::read_to_string(self.path(&format!("task/{thread}/{file}")));
        let text = read.map_err(|source| self.explain("read of a thread of", source))?;
        self.check_alive()?;
        Ok(text)
    }

    /// Converts an error of the kernel for a file of this process.
    pub(crate) fn explain(&self, action: &'static str, source: io::Error) -> ProcessError {
        match source.raw_os_error() {
            _ if !self.is_alive() => ProcessError::Gone { pid: self.pid },
            Some(nix::libc::ENOENT | nix::libc::ESRCH) => ProcessError::Gone { pid: self.pid },
            Some(nix::libc::EACCES | nix::libc::EPERM) => ProcessError::NotPermitted { pid: self.pid },
            _ => self.io(action, source),
        }
    }

    fn io(&self, action: &'static str, source: io::Error) -> ProcessError {
        ProcessError::Io { pid: self.pid, action, source }
    }

    fn exited_within(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Returns field 22 of a `stat` line. The name of the program, in brackets, may itself contain
/// brackets and spaces.
pub(crate) fn start_time(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn start_time_is_found_behind_a_hostile_name() {
        let stat = "12 (a) b ( 1 2) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(start_time(stat), Some(4711));
        assert_eq!(start_time("12 (a"), None);
    }

    #[test]
    fn a_process_that_has_ended_is_reported_as_gone() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(process.is_alive());
        assert_eq!(process.comm().unwrap(), "sleep");
        assert_eq!(process.status().unwrap().tracer, None);
        assert_eq!(process.threads().unwrap(), [child.id()]);
        assert!(!process.wait_exit(Some(Duration::from_millis(1))).unwrap());
        let other = Process::open_exact(child.id(), process.start_time() + 1);
        assert!(matches!(other, Err(ProcessError::Replaced { .. })));

        process.signal(Signal::KILL).unwrap();
        assert!(process.wait_exit(None).unwrap());
        // Not waited for yet: the number still exists, but the process does not run.
        assert!(!process.is_alive());
        assert!(matches!(process.read("maps"), Err(ProcessError::Gone { .. })));
        child.wait().unwrap();
        assert!(matches!(process.signal(Signal::CONT), Err(ProcessError::Gone { .. })));
        assert!(matches!(Process::open(child.id()), Err(ProcessError::Gone { .. })));
        assert!(matches!(Process::open(0), Err(ProcessError::Gone { .. })));
        assert!(matches!(Process::open(u32::MAX), Err(ProcessError::Gone { .. })));
    }
}
