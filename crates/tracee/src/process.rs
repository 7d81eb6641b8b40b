//! Which process is meant, and what the kernel says of it.
//!
//! A process identifier alone names nothing for long: it is given out again. A [`Process`] holds
//! the identifier, the time at which that process was started and a pidfd. The pidfd stays with the
//! process, so signals never go to a stranger, and everything read from
//! `/proc/PID` is followed by a look at the pidfd: as long as the process lives, its number is not given to another.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};

use crate::{AddressRange, abi};

pub use rustix::process::Signal;

/// Why a process could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No process has this number, or it has ended.
    #[error("no process {pid} (it has ended, or never was)")]
    Gone {
        /// The number that was asked for.
        pid: u32,
    },
    /// The number belongs to another process by now.
    #[error(
        "process {pid} is another one by now: started at {found} clock ticks after boot, not at {expected}"
    )]
    Replaced {
        /// The number.
        pid: u32,
        /// Start time that was expected, in clock ticks after boot.
        expected: u64,
        /// Start time that was found.
        found: u64,
    },
    /// The kernel does not let us look.
    #[error("not permitted to look at process {pid}: run as root or as the process's own user")]
    NotPermitted {
        /// The number.
        pid: u32,
    },
    /// The kernel wrote something into /proc that is not understood.
    #[error("/proc/{pid}/{file} is not understood")]
    Malformed {
        /// The number.
        pid: u32,
        /// The file below `/proc/PID`.
        file: &'static str,
    },
    /// Any other error.
    #[error("cannot {action} process {pid}")]
    Io {
        /// The number.
        pid: u32,
        /// What was tried.
        action: &'static str,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
}

/// What `/proc/PID/status` says, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// State letter: `R` running, `S` sleeping, `D` uninterruptible, `T` stopped, `t` traced, `Z`
    /// zombie.
    pub state: char,
    /// The process that traces this one (a debugger), if any.
    pub tracer: Option<u32>,
    /// Seccomp mode: 0 off, 1 strict, 2 filter.
    pub seccomp: u8,
    /// Whether the process has a shadow stack (CET), which forbids to return where nothing was
    /// called.
    pub shadow_stack: bool,
}

/// What a thread has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// For how long it ran.
    pub ran: Duration,
    /// For how long it could have run, and waited for a processor.
    pub waited: Duration,
}

/// One process, recognised for as long as this value lives.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    start_time: u64,
    pidfd: OwnedFd,
}

impl Process {
    /// Finds the process with this number.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] if there is none or it has ended, [`ProcessError::NotPermitted`] and
    /// others if it cannot be looked at.
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

    /// Finds the process with this number and start time, as another [`Process`] told them earlier.
    ///
    /// # Errors
    /// [`ProcessError::Replaced`] if the number was given to another process since; otherwise as
    /// [`Process::open`].
    pub fn open_exact(pid: u32, start_time: u64) -> Result<Self, ProcessError> {
        let process = Self::open(pid)?;
        if process.start_time == start_time {
            Ok(process)
        } else {
            Err(ProcessError::Replaced { pid, expected: start_time, found: process.start_time })
        }
    }

    /// The same process, held a second time.
    ///
    /// # Errors
    /// If this process has no more descriptors.
    pub fn try_clone(&self) -> Result<Self, ProcessError> {
        let pidfd = self.pidfd.try_clone().map_err(|source| self.io("open", source))?;
        Ok(Self { pidfd, ..*self })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// When it was started, in clock ticks after boot (field 22 of `/proc/PID/stat`). With the
    /// host's boot id it names the process for ever.
    pub fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Whether it still runs. A process that has ended but was not waited for yet does not.
    pub fn is_alive(&self) -> bool {
        !self.exited_within(Some(Duration::ZERO)).unwrap_or(false)
    }

    /// Fails if the process has ended.
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

    /// Asks the kernel to page out a range of its memory now, as a host does that is short of memory. What it holds
    /// stays the same; pages that are in use, or that other processes have mapped too, stay where they are.
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

    /// Waits until it has ended, at most `timeout` (`None`: for ever). Returns whether it has.
    pub fn wait_exit(&self, timeout: Option<Duration>) -> Result<bool, ProcessError> {
        self.exited_within(timeout).map_err(|source| self.io("wait for", source))
    }

    /// Reads a text file below `/proc/PID`; what is returned belongs to this process.
    pub fn read(&self, file: &'static str) -> Result<String, ProcessError> {
        Ok(String::from_utf8_lossy(&self.read_bytes(file)?).into_owned())
    }

    /// Reads a file below `/proc/PID` as it is; names in it may not be text.
    pub(crate) fn read_bytes(&self, file: &'static str) -> Result<Vec<u8>, ProcessError> {
        let bytes = fs::read(self.path(file)).map_err(|source| self.explain("read", source))?;
        self.check_alive()?;
        Ok(bytes)
    }

    /// A path below `/proc/PID`. Whoever uses it checks with [`Process::check_alive`] afterwards
    /// that it was this process's.
    pub fn path(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid))
    }

    /// The name of its program, as the kernel keeps it: at most 15 bytes.
    pub fn comm(&self) -> Result<String, ProcessError> {
        Ok(self.read("comm")?.trim_end().to_owned())
    }

    /// What `/proc/PID/status` says of it now.
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

    /// Its open descriptors, each with what it refers to, as the link in `/proc/PID/fd` reads.
    pub fn descriptors(&self) -> Result<Vec<(i32, PathBuf)>, ProcessError> {
        let mut found = Vec::new();
        for entry in
            fs::read_dir(self.path("fd")).map_err(|source| self.explain("list the descriptors of", source))?
        {
            let entry = entry.map_err(|source| self.explain("list the descriptors of", source))?;
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // One that was closed in between is not there any more, which is no error.
            if let Ok(target) = fs::read_link(entry.path()) {
                found.push((number, target));
            }
        }
        self.check_alive()?;
        Ok(found)
    }

    /// The numbers of its threads, the first one first.
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

    /// The number that a thread of it has for itself, which is another one in a namespace of processes.
    pub fn own_number(&self, thread: u32) -> Result<u32, ProcessError> {
        let status = self.read_of_thread(thread, "status")?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        // Absent in kernels without such namespaces.
        Ok(numbers.and_then(|all| all.split_whitespace().last()?.parse().ok()).unwrap_or(thread))
    }

    /// How long a thread of it has run so far.
    pub fn thread_cpu_time(&self, thread: u32) -> Result<Duration, ProcessError> {
        Ok(self.thread_times(thread)?.ran)
    }

    /// How long a thread of it has run so far, and how long it has waited until a processor was free.
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

    /// What an error of the kernel means when it comes from a file of this process.
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

/// Field 22 of a `stat` line. The name of the program, in brackets, may itself hold brackets and
/// blanks.
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
    fn a_process_that_has_ended_is_gone_and_its_number_means_nothing() {
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
