//! Making another process run a system call.
//!
//! Two things can be done only from inside a process: making a userfaultfd for its memory, and
//! giving back anonymous memory. An [`Injector`] makes one of its threads do so, with ptrace, in
//! about 100 µs, and puts the thread back exactly as it was.
//!
//! **A process of its own.** Who traces a process and is killed in the middle leaves it in a
//! strange place. So the tracing is done by a tiny process that does nothing else, and that the
//! agent's end does not touch ([`injector_main`]). And should that one be killed, the thread
//! restores itself: see `arch` and `thread` for how. What remains:
//!
//! - Without an `rt_sigreturn` or a `syscall; ret` in the program (no C library has none), with a
//!   shadow stack (CET), or with a stack that has no room for a signal frame, the thread cannot
//!   restore itself. The injection works, but a SIGKILL of the injector within its 100 µs leaves
//!   the interrupted system call with a wrong result.
//! - `nanosleep`, `poll` and `futex` with a relative timeout begin their time anew if the injector
//!   was killed; otherwise not. If one was stopped before during the same wait, and its code does
//!   not show which call it was, its thread counts as one that cannot restore itself.
//! - Threads that cannot restore themselves are taken only if there are no others.
//! - System calls that the kernel never restarts after a stop (`epoll_wait`, `io_getevents`,
//!   `io_uring_enter`, `semop`, `sigtimedwait`, sockets with a timeout) return `EINTR`, as they do
//!   after SIGSTOP and SIGCONT. Threads in such calls are taken last; QEMU's main thread sits in
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

/// Whether the injector in this process holds a thread of another process at this moment. For
/// tests of the claim that it does not allocate while it does.
#[doc(hidden)]
pub fn holds_a_thread() -> bool {
    thread::is_attached()
}

/// Starts the injector when it is first needed, and speaks to it.
///
/// One injection runs at a time; several threads may share an `Injector`. An injector that ended
/// is started anew.
#[derive(Debug)]
pub struct Injector {
    program: PathBuf,
    arguments: Vec<OsString>,
    running: Mutex<Option<Running>>,
    /// What was found in the process that was worked on last: number, start time, addresses.
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
        // It ends by itself when its socket is closed; it may be in the middle of something.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// A userfaultfd of another process that was left open there.
#[derive(Debug)]
pub struct LeftUserfaultfd {
    /// The one here.
    pub here: OwnedFd,
    /// Number of the one there.
    pub there: i32,
}

impl Injector {
    /// An injector that is started as `program arguments…`; that program has to call
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

    /// Makes a userfaultfd for the memory of `process` and takes it over. Inside the process it is
    /// closed again at once: what is returned is the only reference, and whatever is registered
    /// with it ends when it is closed.
    pub fn take_userfaultfd(&self, process: &Process) -> Result<OwnedFd, InjectError> {
        let (_, descriptor) = self.inject(process, Operation::TakeUserfaultfd, &[USERFAULTFD_FLAGS])?;
        descriptor.ok_or_else(|| InjectError::Answer { program: self.program.clone() })
    }

    /// Makes a userfaultfd for the memory of `process` that reaches faults of the kernel, too, takes it over, and leaves
    /// it open inside the process: what is registered with it stays so when this agent dies.
    ///
    /// # Errors
    /// Where the process may not make one: it needs `CAP_SYS_PTRACE`, or `vm.unprivileged_userfaultfd`.
    pub fn leave_userfaultfd(&self, process: &Process) -> Result<LeftUserfaultfd, InjectError> {
        let (there, descriptor) = self.inject(process, Operation::LeaveUserfaultfd, &[])?;
        let not_understood = || InjectError::Answer { program: self.program.clone() };
        let there = i32::try_from(there).map_err(|_| not_understood())?;
        let here = descriptor.ok_or_else(not_understood)?;
        // Right now: one that is not in use yet is taken for a leftover.
        abi::uffd_api(&here, abi::MISSING_FEATURES).map_err(|source| InjectError::Call {
            pid: process.pid(),
            call: "userfaultfd",
            source,
        })?;
        Ok(LeftUserfaultfd { here, there })
    }

    /// Closes a userfaultfd that was left inside `process`.
    pub fn close_left(&self, process: &Process, there: i32) -> Result<(), InjectError> {
        let there = u64::try_from(there).unwrap_or(u64::MAX);
        self.inject(process, Operation::Close, &[there]).map(drop)
    }

    /// Closes the userfaultfds that an injector left inside `process` when it was killed between
    /// making and closing one; returns how many there were.
    ///
    /// A userfaultfd of the process itself is not touched, nor one that was
    /// [left](Self::leave_userfaultfd) there. They are told apart by the handshake `UFFDIO_API`: for
    /// tracking the agent does it only after the descriptor inside is closed, so a leftover never
    /// had it, while a program does it right after making the descriptor (QEMU makes one only for
    /// its own migration or snapshots). The kernel shows which is which in `/proc/PID/fdinfo`.
    /// Descriptors in `keep`, known from before, are left alone in any case.
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

    /// Finds threads that a killed injector diverted and that did not come to make their call yet,
    /// because they have not run since, and lets them go on without it. Otherwise their call would
    /// leave a userfaultfd after nobody looks any more; a stopped process may stay so for hours.
    fn cancel_pending(&self, process: &Process) -> Result<(), InjectError> {
        let mut runnable = Vec::new();
        for thread in process.threads()? {
            let stat = fs::read_to_string(process.path(&format!("task/{thread}/stat"))).unwrap_or_default();
            if stat.rsplit_once(')').is_some_and(|(_, fields)| choice::is_of_kernel(fields)) {
                continue;
            }
            let call =
                fs::read_to_string(process.path(&format!("task/{thread}/syscall"))).unwrap_or_default();
            let (number, _) = call.split_once([' ', '\n']).unwrap_or_default();
            // A thread that waits in another system call is not on the way to one of ours.
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

    /// Makes `process` give back memory: private anonymous pages in `ranges` read as zeros
    /// afterwards (`MADV_DONTNEED`).
    ///
    /// # Errors
    /// Ranges before the one that failed have been given back.
    pub fn discard(&self, process: &Process, ranges: &[AddressRange]) -> Result<(), InjectError> {
        for arguments in discards(ranges) {
            self.inject(process, Operation::Discard, &arguments)?;
        }
        Ok(())
    }

    /// For tests: makes `process` close these descriptors of its own.
    #[doc(hidden)]
    pub fn close_there(&self, process: &Process, descriptors: &[u64]) -> Result<(), InjectError> {
        self.inject(process, Operation::Close, descriptors).map(drop)
    }

    /// For tests: the injector kills itself at this step of each operation, counted from 1; 0 for
    /// never.
    #[doc(hidden)]
    pub fn die_at_step(&self, step: u64) {
        self.die_at.store(step, Ordering::Relaxed);
    }

    /// For tests: only this thread is used; 0 for any.
    #[doc(hidden)]
    pub fn use_only_thread(&self, thread: u32) {
        self.only_thread.store(u64::from(thread), Ordering::Relaxed);
    }

    /// For tests: how many steps the last operation took.
    #[doc(hidden)]
    pub fn steps_taken(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// For tests: the number of the injector's process, if it runs.
    #[doc(hidden)]
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
        let (reply, descriptor) = self.ask(&request)?;
        self.steps.store(reply.steps, Ordering::Relaxed);
        match reply.result {
            Ok(()) => Ok((reply.done, descriptor)),
            Err(failure) => {
                // The process may have loaded another program: look again next time.
                *self.found.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Err(self.explain(pid, &request, failure))
            }
        }
    }

    /// Looks for instructions to inject a call with, once for each process. The injector makes
    /// sure that they are still there.
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
    fn ask(&self, request: &Request) -> Result<(Reply, Option<OwnedFd>), InjectError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // One that has been killed since the last request is found out here, and replaced.
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
            // Said again when the injector has closed its own copy.
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
            Operation::TakeUserfaultfd | Operation::LeaveUserfaultfd => "userfaultfd",
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

/// The arguments of the calls that give ranges back, for one injection after the other. A thread of the process stands
/// still for each, so that none gives back more than 1 GiB.
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

/// Userfaultfds inside a process on which `UFFDIO_API` was never done.
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
