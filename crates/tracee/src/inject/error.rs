//! Why an injection failed, and what a user can do about it.

use std::fs;
use std::io;
use std::path::PathBuf;

use nix::libc;

use crate::ProcessError;

/// Why nothing could be injected. Unless said otherwise the process is as it was.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The process could not be looked at.
    #[error("cannot inject a system call")]
    Process(#[from] ProcessError),
    /// A debugger is attached.
    #[error("process {pid} is traced by process {tracer} ({comm}): detach that debugger first")]
    Traced {
        /// The process.
        pid: u32,
        /// Who traces it.
        tracer: u32,
        /// Name of the tracer's program.
        comm: String,
    },
    /// Tracing is not permitted.
    #[error(
        "not permitted to trace process {pid}: run as root, or as its user with kernel.yama.ptrace_scope=0 and the \
         process dumpable"
    )]
    NotPermitted {
        /// The process.
        pid: u32,
    },
    /// No thread stopped in time.
    #[error(
        "no thread of process {pid} can be stopped: all are in uninterruptible calls (a disk or NFS that does not answer?)"
    )]
    Uninterruptible {
        /// The process.
        pid: u32,
    },
    /// A seccomp filter forbids the call; it was not made.
    #[error(
        "a seccomp filter of process {pid} answers {action} to the call: permit userfaultfd, close and madvise"
    )]
    Seccomp {
        /// The process.
        pid: u32,
        /// What the filter would do.
        action: String,
    },
    /// There is a seccomp filter that cannot be read, so the call was not risked.
    #[error(
        "process {pid} has a seccomp filter that cannot be read: run as root on a kernel with CONFIG_CHECKPOINT_RESTORE"
    )]
    SeccompUnknown {
        /// The process.
        pid: u32,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
    /// The process runs 32-bit code.
    #[error("process {pid} is a 32-bit one, which is not supported")]
    Not64Bit {
        /// The process.
        pid: u32,
    },
    /// The process has its system calls handed to itself.
    #[error(
        "process {pid} dispatches its system calls to itself (PR_SET_SYSCALL_USER_DISPATCH), which is not supported"
    )]
    Dispatched {
        /// The process.
        pid: u32,
    },
    /// There is no instruction to make a system call with.
    #[error("process {pid} has no syscall instruction in its memory")]
    NoGadget {
        /// The process.
        pid: u32,
    },
    /// The process changed while it was looked at; the next try may succeed.
    #[error("process {pid} changed while it was looked at: try again")]
    Changed {
        /// The process.
        pid: u32,
    },
    /// The call was made and failed.
    #[error("process {pid} was refused the call {call}")]
    Call {
        /// The process.
        pid: u32,
        /// Name of the call.
        call: &'static str,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
    /// The call was made and has not returned in time. The thread goes on by itself as soon as it does.
    #[error(
        "the call {call} that process {pid} was made to do takes too long; its thread goes on when it returns"
    )]
    Late {
        /// The process.
        pid: u32,
        /// Name of the call.
        call: &'static str,
    },
    /// The injected call ended in a signal, which the process did not get to see if it was a fault.
    #[error("the injected call in process {pid} ended in signal {signal}")]
    Signal {
        /// The process.
        pid: u32,
        /// Number of the signal.
        signal: u64,
    },
    /// The injector could not be started or spoken to.
    #[error("cannot {action} the injector {program}")]
    Injector {
        /// What was tried.
        action: &'static str,
        /// Its program.
        program: PathBuf,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
    /// The injector ended before it answered. The process restores itself, but it may hold a
    /// userfaultfd: [`crate::Injector::close_leftovers`].
    #[error("the injector {program} was killed before it answered")]
    Killed {
        /// Its program.
        program: PathBuf,
    },
    /// The injector answered something that is not understood: another version of the program?
    #[error("the injector {program} gave an answer that is not understood")]
    Answer {
        /// Its program.
        program: PathBuf,
    },
}

/// Names a tracer, of which the kernel tells the thread.
pub(super) fn traced(pid: u32, thread: u32) -> InjectError {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    let tracer = process.unwrap_or(thread);
    let comm = fs::read_to_string(format!("/proc/{tracer}/comm")).unwrap_or_default();
    InjectError::Traced { pid, tracer, comm: comm.trim_end().to_owned() }
}

/// The answer of a seccomp filter in words.
pub(super) fn seccomp_action(answer: u32) -> String {
    match answer & libc::SECCOMP_RET_ACTION_FULL {
        libc::SECCOMP_RET_KILL_PROCESS => "\"kill the process\"".into(),
        libc::SECCOMP_RET_KILL_THREAD => "\"kill the thread\"".into(),
        libc::SECCOMP_RET_TRAP => "SIGSYS".into(),
        libc::SECCOMP_RET_ERRNO => {
            io::Error::from_raw_os_error((answer & libc::SECCOMP_RET_DATA) as i32).to_string()
        }
        other => format!("{other:#x}"),
    }
}
