//! Errors of an injection, with advice.

use std::fs;
use std::io;
use std::path::PathBuf;

use nix::libc;

use crate::ProcessError;

/// Error: nothing could be injected. Unless noted otherwise the process is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The process could not be inspected.
    #[error("cannot inject a system call")]
    Process(#[from] ProcessError),
    /// A debugger is attached.
    #[error("process {pid} is traced by process {tracer} ({comm}): detach that debugger first")]
    Traced {
        /// Process id.
        pid: u32,
        /// Process that traces it.
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
        /// Process id.
        pid: u32,
    },
    /// No thread stopped in time.
    #[error(
        "no thread of process {pid} can be stopped: all are in uninterruptible calls (a disk or NFS that does not answer?)"
    )]
    Uninterruptible {
        /// Process id.
        pid: u32,
    },
    /// A seccomp filter forbids the call; it was not made.
    #[error(
        "a seccomp filter of process {pid} responds to the call with {action}: permit userfaultfd, close and madvise"
    )]
    Seccomp {
        /// Process id.
        pid: u32,
        /// Action of the filter.
        action: String,
    },
    /// There is a seccomp filter that cannot be read, so the call was not risked.
    #[error(
        "process {pid} has a seccomp filter that cannot be read: run as root on a kernel with CONFIG_CHECKPOINT_RESTORE"
    )]
    SeccompUnknown {
        /// Process id.
        pid: u32,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The process runs 32-bit code.
    #[error("process {pid} is a 32-bit one, which is not supported")]
    Not64Bit {
        /// Process id.
        pid: u32,
    },
    /// The process dispatches its system calls to itself.
    #[error(
        "process {pid} uses Syscall User Dispatch (PR_SET_SYSCALL_USER_DISPATCH), which is not supported"
    )]
    Dispatched {
        /// Process id.
        pid: u32,
    },
    /// There is no instruction with which to make a system call.
    #[error("process {pid} has no syscall instruction in its memory")]
    NoGadget {
        /// Process id.
        pid: u32,
    },
    /// The process changed during the inspection; the next attempt may succeed.
    #[error("process {pid} changed while it was inspected: try again")]
    Changed {
        /// Process id.
        pid: u32,
    },
    /// The call was made and failed.
    #[error("the kernel refused the call {call} of process {pid}")]
    Call {
        /// Process id.
        pid: u32,
        /// Name of the call.
        call: &'static str,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The call was made and has not returned in time. The thread continues by itself as soon as it
    /// does.
    #[error(
        "the call {call} injected into process {pid} takes too long; its thread continues when the call \
         returns"
    )]
    Late {
        /// Process id.
        pid: u32,
        /// Name of the call.
        call: &'static str,
    },
    /// The injected call ended in a signal, which was not delivered to the process if it was a fault.
    #[error("the injected call in process {pid} ended in signal {signal}")]
    Signal {
        /// Process id.
        pid: u32,
        /// Number of the signal.
        signal: u64,
    },
    /// The injector could not be started, or the connection to it failed.
    #[error("cannot {action} the injector {program}")]
    Injector {
        /// Attempted action.
        action: &'static str,
        /// Path of its program.
        program: PathBuf,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The injector ended before it answered. The process restores itself, but it may still have a
    /// userfaultfd: [`crate::Injector::close_leftovers`].
    #[error("the injector {program} was killed before it answered")]
    Killed {
        /// Path of its program.
        program: PathBuf,
    },
    /// The injector's answer could not be parsed: another version of the program?
    #[error("the injector {program} sent an invalid answer")]
    Answer {
        /// Path of its program.
        program: PathBuf,
    },
}

/// Returns the error that names a tracer, of which the kernel reports the thread.
pub(super) fn traced(pid: u32, thread: u32) -> InjectError {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    let tracer = process.unwrap_or(thread);
    let comm = fs::read_to_string(format!("/proc/{tracer}/comm")).unwrap_or_default();
    InjectError::Traced { pid, tracer, comm: comm.trim_end().to_owned() }
}

/// Describes the answer of a seccomp filter.
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
