//! Injection of system calls into another process.
//!
//! Two operations are possible only from inside a process: the creation of a userfaultfd for its
//! memory, and the release of anonymous memory. An [`Injector`] makes one of its threads do so,
//! with ptrace, in about 100 µs, and restores the thread exactly as it was.
//!
//! **A separate process.** A tracer that is killed in the middle leaves the traced process in an
//! inconsistent state. So a tiny process that does nothing else does the tracing, and the agent's
//! end does not affect it ([`injector_main`]). If that process is killed, the thread restores
//! itself: see `arch` and `thread` for details. Remaining limits:
//!
//! - Without an `rt_sigreturn` or a `syscall; ret` in the program (no C library has none), with a
//!   shadow stack (CET), or with a stack that has no room for a signal frame, the thread cannot
//!   restore itself. The injection works, but a SIGKILL of the injector within its 100 µs leaves
//!   the interrupted system call with a wrong result.
//! - `nanosleep`, `poll` and `futex` with a relative timeout begin their time anew if the injector
//!   was killed; otherwise not. If one was stopped before during the same wait, and its code does
//!   not show which call it was, its thread counts as one that cannot restore itself.
//! - Threads that cannot restore themselves are used only if there are no others.
//! - System calls that the kernel never restarts after a stop (`epoll_wait`, `io_getevents`,
//!   `io_uring_enter`, `semop`, `sigtimedwait`, sockets with a timeout) return `EINTR`, as they do
//!   after SIGSTOP and SIGCONT. Threads in such calls are used last; QEMU's main thread waits in
//!   `ppoll`, which is restarted.
//! - A userfaultfd that the injector could not close any more stays inside;
//!   [`Injector::close_leftovers`] closes it.

mod child;
mod choice;
mod error;
mod gadgets;
mod ptrace;
mod seccomp;
mod thread;
mod wire;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::libc;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags, SocketType,
    recvmsg, send, socketpair,
};

use crate::{AddressRange, Process, ProcessError, abi};
use choice::best_threads;
use error::{seccomp_action, traced};
use gadgets::Gadgets;
use wire::{Failure, MAX_ARGUMENTS, MAX_THREADS, Operation, REPLY_BYTES, Reply, Request, USERFAULTFD_FLAGS};

pub use child::injector_main;
pub use error::InjectError;

/// Returns true if the injector in this process currently holds a thread of another process. For
/// tests of the claim that it does not allocate in that state.
#[doc(hidden)]
pub fn is_holding_thread() -> bool {
    thread::is_attached()
}

/// Connection to the injector, which is started when it is first needed.
///
/// One injection runs at a time; several threads may share an `Injector`. An injector that ended is
/// started anew.
#[derive(Debug)]
pub struct Injector {
    program: PathBuf,
    arguments: Vec<OsString>,
    running: Mutex<Option<Running>>,
    /// Process id, start time and addresses of the process of the last injection.
    found: Mutex<Option<(u32, u64, Gadgets)>>,
    die_at: AtomicU64,
    only_thread: AtomicU64,
    steps: AtomicU64,
}

#[derive(Debug)]
struct Running {
    child: Child,
    socket: OwnedFd,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It ends by itself when its socket is closed; it may be in the middle of an operation.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// A userfaultfd of another process that was left open there.
#[derive(Debug)]
pub struct LastingUserfaultfd {
    /// Duplicate in this process.
    pub here: OwnedFd,
    /// Number of the descriptor in the other process.
    pub there: i32,
}

impl Injector {
    /// Creates an injector that is started as `program arguments…`; that program has to call
    /// [`injector_main`]. Usually the running program itself with a hidden subcommand.
    pub fn new(program: PathBuf, arguments: Vec<OsString>) -> Self {
        Self {
            program,
            arguments,
            running: Mutex::new(None),
            found: Mutex::new(None),
            die_at: AtomicU64::new(0),
            only_thread: AtomicU64::new(0),
            steps: AtomicU64::new(0),
        }
    }

    /// Creates a userfaultfd for the memory of `process` and duplicates it here. Inside the process
    /// it is closed again at once: the returned descriptor is the only reference, and all
    /// registrations with it end when it is closed.
    pub fn create_userfaultfd(&self, process: &Process) -> Result<OwnedFd, InjectError> {
        let (_, descriptor) = self.inject(process, Operation::CreateUserfaultfd, &[USERFAULTFD_FLAGS])?;
        descriptor.ok_or_else(|| InjectError::Answer { program: self.program.clone() })
    }

    /// Creates a userfaultfd for the memory of `process` that also covers page faults of the kernel, duplicates it
    /// here, and leaves it open inside the process: its registrations stay when this agent dies.
    ///
    /// # Errors
    /// If the process may not create one: it needs `CAP_SYS_PTRACE`, or `vm.unprivileged_userfaultfd`.
    pub fn create_lasting_userfaultfd(&self, process: &Process) -> Result<LastingUserfaultfd, InjectError> {
        let (there, descriptor) = self.inject(process, Operation::CreateLastingUserfaultfd, &[])?;
        let not_understood = || InjectError::Answer { program: self.program.clone() };
        let there = i32::try_from(there).map_err(|_| not_understood())?;
        let here = descriptor.ok_or_else(not_understood)?;
        // At once: one that is not in use yet counts as a leftover.
        abi::uffd_api(&here, abi::MISSING_FEATURES).map_err(|source| InjectError::Call {
            pid: process.pid(),
            call: "userfaultfd",
            source,
        })?;
        Ok(LastingUserfaultfd { here, there })
    }

    /// Closes a userfaultfd that was left inside `process`.
    pub fn close_lasting(&self, process: &Process, there: i32) -> Result<(), InjectError> {
        let there = u64::try_from(there).unwrap_or(u64::MAX);
        self.inject(process, Operation::Close, &[there]).map(drop)
    }

    /// Closes the userfaultfds that an injector left inside `process` when it was killed between
    /// creating and closing one; returns their number.
    ///
    /// A userfaultfd of the process itself is not touched, nor one that was left there by
    /// [`Injector::create_lasting_userfaultfd`]. They are distinguished by the handshake `UFFDIO_API`: for
    /// tracking the agent does it only after the descriptor inside is closed, so a leftover never
    /// had it, while a program does it right after creating the descriptor (QEMU creates one only
    /// for its own migration or snapshots). The kernel shows the state in `/proc/PID/fdinfo`.
    /// Descriptors in `keep`, known from before, are not closed in any case.
    pub fn close_leftovers(&self, process: &Process, keep: &[i32]) -> Result<usize, InjectError> {
        self.cancel_pending(process)?;
        let leftovers: Vec<u64> = unused_userfaultfds(process)?
            .into_iter()
            .filter(|fd| !keep.contains(fd))
            .filter_map(|fd| u64::try_from(fd).ok())
            .collect();
        for some in leftovers.chunks(MAX_ARGUMENTS) {
            self.inject(process, Operation::Close, some)?;
        }
        Ok(leftovers.len())
    }

    /// Finds threads that a killed injector diverted and that have not made their call yet, because
    /// they have not run since, and resumes them without it. Otherwise their call would leave a
    /// userfaultfd after the last check; a stopped process may stay so for hours.
    fn cancel_pending(&self, process: &Process) -> Result<(), InjectError> {
        let mut runnable = Vec::new();
        for thread in process.threads()? {
            let stat = fs::read_to_string(process.path(&format!("task/{thread}/stat"))).unwrap_or_default();
            if stat.rsplit_once(')').is_some_and(|(_, fields)| choice::is_kernel_thread(fields)) {
                continue;
            }
            let call =
                fs::read_to_string(process.path(&format!("task/{thread}/syscall"))).unwrap_or_default();
            let (number, _) = call.split_once([' ', '\n']).unwrap_or_default();
            // A thread that waits in another system call is not about to make one of ours.
            let on_the_way = ["running", "-1"].contains(&number)
                || [libc::SYS_userfaultfd, libc::SYS_close, libc::SYS_madvise]
                    .iter()
                    .any(|ours| number == ours.to_string());
            if on_the_way {
                runnable.push(thread as i32);
            }
        }
        for some in runnable.chunks(MAX_THREADS) {
            self.inject_into(process, Operation::Cancel, &[], some)?;
        }
        Ok(())
    }

    /// Makes `process` discard memory: private anonymous pages in `ranges` read as zeros afterwards
    /// (`MADV_DONTNEED`).
    ///
    /// # Errors
    /// Ranges before the one that failed have been discarded.
    pub fn discard(&self, process: &Process, ranges: &[AddressRange]) -> Result<(), InjectError> {
        for arguments in discards(ranges) {
            self.inject(process, Operation::Discard, &arguments)?;
        }
        Ok(())
    }

    /// Makes `process` close these descriptors of its own.
    #[cfg(feature = "testing")]
    pub fn close_there(&self, process: &Process, descriptors: &[u64]) -> Result<(), InjectError> {
        self.inject(process, Operation::Close, descriptors).map(drop)
    }

    /// Makes the injector kill itself at this step of each operation, counted from 1; 0 for
    /// never.
    #[cfg(feature = "testing")]
    pub fn die_at_step(&self, step: u64) {
        self.die_at.store(step, Ordering::Relaxed);
    }

    /// Restricts injection to this thread; 0 for any.
    #[cfg(feature = "testing")]
    pub fn use_only_thread(&self, thread: u32) {
        self.only_thread.store(u64::from(thread), Ordering::Relaxed);
    }

    /// Returns the number of steps of the last operation.
    #[cfg(feature = "testing")]
    pub fn steps_taken(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Returns the process id of the injector, if it runs.
    #[cfg(feature = "testing")]
    pub fn injector_pid(&self) -> Option<u32> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|running| running.child.id())
    }

    fn inject(
        &self,
        process: &Process,
        operation: Operation,
        arguments: &[u64],
    ) -> Result<(u64, Option<OwnedFd>), InjectError> {
        let only = self.only_thread.load(Ordering::Relaxed) as i32;
        let threads = if only == 0 { best_threads(process)? } else { vec![only] };
        self.inject_into(process, operation, arguments, &threads)
    }

    fn inject_into(
        &self,
        process: &Process,
        operation: Operation,
        arguments: &[u64],
        threads: &[i32],
    ) -> Result<(u64, Option<OwnedFd>), InjectError> {
        let pid = process.pid();
        let status = process.status()?;
        if let Some(tracer) = status.tracer {
            return Err(traced(pid, tracer));
        }
        let gadgets = self.gadgets(process)?;
        let sigreturn = gadgets.sigreturn.filter(|_| !status.shadow_stack);
        let request = Request {
            operation,
            pid: pid as i32,
            start_time: process.start_time(),
            gadget: gadgets.call,
            sigreturn: sigreturn.unwrap_or(0),
            die_at: self.die_at.load(Ordering::Relaxed),
            threads: threads.to_vec(),
            arguments: arguments.to_vec(),
        };
        let (reply, descriptor) = self.exchange(&request)?;
        self.steps.store(reply.steps, Ordering::Relaxed);
        match reply.result {
            Ok(()) => Ok((reply.done, descriptor)),
            Err(failure) => {
                // The process may have loaded another program: the next injection searches again.
                *self.found.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Err(self.explain(pid, &request, failure))
            }
        }
    }

    /// Finds instructions with which to inject a call, once for each process. The injector verifies
    /// that they are still there.
    fn gadgets(&self, process: &Process) -> Result<Gadgets, InjectError> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let (pid, start_time) = (process.pid(), process.start_time());
        if let Some((known_pid, known_time, gadgets)) = *found
            && (known_pid, known_time) == (pid, start_time)
        {
            return Ok(gadgets);
        }
        let gadgets = gadgets::find(process)?.ok_or(InjectError::NoGadget { pid })?;
        *found = Some((pid, start_time, gadgets));
        Ok(gadgets)
    }

    /// Sends a request and waits for the answer.
    fn exchange(&self, request: &Request) -> Result<(Reply, Option<OwnedFd>), InjectError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // An injector that was killed since the last request is detected here, and replaced.
        if running.as_mut().is_some_and(|running| !matches!(running.child.try_wait(), Ok(None))) {
            *running = None;
        }
        let this = match running.take() {
            Some(this) => this,
            None => self.start()?,
        };
        let killed = || InjectError::Killed { program: self.program.clone() };
        send(&this.socket, &request.encode(), SendFlags::NOSIGNAL).map_err(|_| killed())?;
        let (mut reply, descriptor) = self.receive(&this.socket)?;
        if descriptor.is_some() {
            // The injector sends the reply again when it has closed its own copy.
            reply = self.receive(&this.socket)?.0;
        }
        if reply.ends {
            // Waits for its end.
            drop(this);
        } else {
            *running = Some(this);
        }
        Ok((reply, descriptor))
    }

    /// Waits for one message of the injector.
    fn receive(&self, socket: &OwnedFd) -> Result<(Reply, Option<OwnedFd>), InjectError> {
        let killed = || InjectError::Killed { program: self.program.clone() };
        let mut bytes = [0; REPLY_BYTES];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut pieces = [IoSliceMut::new(&mut bytes)];
            match recvmsg(socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                received => break received.map_err(|_| killed())?,
            }
        };
        if received.bytes == 0 {
            return Err(killed());
        }
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let reply = Reply::decode(&bytes[..received.bytes]);
        let reply = reply.ok_or_else(|| InjectError::Answer { program: self.program.clone() })?;
        Ok((reply, descriptor))
    }

    fn start(&self) -> Result<Running, InjectError> {
        let failed = |action, source| InjectError::Injector { action, program: self.program.clone(), source };
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|error| failed("make a socket for", error.into()))?;
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(theirs)
            .stdout(Stdio::null())
            .spawn()
            .map_err(|source| failed("start", source))?;
        Ok(Running { child, socket: ours })
    }

    fn explain(&self, pid: u32, request: &Request, failure: Failure) -> InjectError {
        let error = |number: u64| io::Error::from_raw_os_error(number as i32);
        let call = match request.operation {
            Operation::CreateUserfaultfd | Operation::CreateLastingUserfaultfd => "userfaultfd",
            Operation::Close => "close",
            Operation::Discard => "madvise",
            Operation::Cancel => "none",
        };
        match failure {
            Failure::Gone => ProcessError::Gone { pid }.into(),
            Failure::Traced(tracer) => traced(pid, tracer as u32),
            Failure::NotPermitted => InjectError::NotPermitted { pid },
            Failure::Uninterruptible => InjectError::Uninterruptible { pid },
            Failure::Seccomp(answer) => InjectError::Seccomp { pid, action: seccomp_action(answer as u32) },
            Failure::SeccompUnknown(number) => InjectError::SeccompUnknown { pid, source: error(number) },
            Failure::Not64Bit => InjectError::Not64Bit { pid },
            Failure::Dispatched => InjectError::Dispatched { pid },
            Failure::Moved | Failure::Busy => InjectError::Changed { pid },
            Failure::Call(number) => InjectError::Call { pid, call, source: error(number) },
            Failure::Late => InjectError::Late { pid, call },
            Failure::Signal(signal) => InjectError::Signal { pid, signal },
            Failure::Kernel(number) => InjectError::Injector {
                action: "trace with",
                program: self.program.clone(),
                source: error(number),
            },
            Failure::Request => InjectError::Answer { program: self.program.clone() },
        }
    }
}

/// Returns the arguments of the calls that discard ranges, one list for each injection. A thread of the process stands
/// still for each, so none discards more than 1 GiB.
fn discards(ranges: &[AddressRange]) -> Vec<Vec<u64>> {
    const BYTES: u64 = 1 << 30;
    let mut all: Vec<Vec<u64>> = Vec::new();
    let mut room = 0;
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            if room == 0 || all.last().is_none_or(|last| last.len() + 2 > MAX_ARGUMENTS) {
                all.push(Vec::new());
                room = BYTES;
            }
            let len = room.min(range.end - at);
            if let Some(last) = all.last_mut() {
                last.extend([at, len]);
            }
            (at, room) = (at + len, room - len);
        }
    }
    all
}

/// Returns the userfaultfds inside a process on which `UFFDIO_API` was never done.
fn unused_userfaultfds(process: &Process) -> Result<Vec<i32>, ProcessError> {
    let all = process.descriptors()?.into_iter();
    let userfaultfds = all.filter(|(_, target)| target == Path::new("anon_inode:[userfaultfd]"));
    let unused = userfaultfds.filter(|(fd, _)| {
        let info = fs::read_to_string(process.path(&format!("fdinfo/{fd}"))).unwrap_or_default();
        // "API:\taa:FEATURES:KNOWN"; once in use, a bit of the kernel's own is among the features.
        info.lines()
            .any(|line| line.strip_prefix("API:\t").and_then(|api| api.split(':').nth(1)) == Some("0"))
    });
    let found = unused.map(|(fd, _)| fd).collect();
    process.check_alive()?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_injection_gives_back_more_than_a_gib() {
        const GIB: u64 = 1 << 30;
        const MIB: u64 = 1 << 20;
        assert!(discards(&[]).is_empty());
        let range = |start, len| AddressRange::with_len(start, len);
        assert_eq!(discards(&[range(0, 5), range(7, 2)]), [[0, 5, 7, 2]]);
        let large = discards(&[range(MIB, MIB), range(GIB, 2 * GIB), range(9 * GIB, MIB)]);
        assert_eq!(
            large,
            [
                vec![MIB, MIB, GIB, GIB - MIB],
                vec![2 * GIB - MIB, GIB],
                vec![3 * GIB - MIB, MIB, 9 * GIB, MIB]
            ]
        );
        let many: Vec<_> = (0..MAX_ARGUMENTS as u64).map(|n| range(n * 3, 1)).collect();
        let lengths: Vec<_> = discards(&many).iter().map(Vec::len).collect();
        assert_eq!(lengths, [MAX_ARGUMENTS, MAX_ARGUMENTS]);
    }
}
