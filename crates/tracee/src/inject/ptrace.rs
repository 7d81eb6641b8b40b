//! Bare calls on a traced thread. None of them allocates.

use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use nix::libc;

use crate::arch::{NT_X86_XSTATE, Registers};

/// An error number of the kernel.
pub(super) type Errno = i32;

const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;
const PTRACE_SECCOMP_GET_FILTER: libc::c_uint = 0x420c;
const PTRACE_EVENT_STOP: i32 = 128;
/// Set in the signal number of stops at a system call, because of `PTRACE_O_TRACESYSGOOD`.
const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;
const NT_PRSTATUS: usize = 1;

/// Reason why a thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// At the entry or the exit of a system call.
    Call,
    /// On request, or because its whole process is stopped.
    Interrupted,
    /// At the delivery of this signal.
    Signal(i32),
}

/// Reason why waiting for a stop ended without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoStop {
    /// The thread has ended.
    Ended,
    /// The thread did not stop in time.
    Late,
}

/// Returns the last error of the kernel in this thread.
pub(super) fn errno() -> Errno {
    io::Error::last_os_error().raw_os_error().unwrap_or_default()
}

fn request(request: libc::c_uint, thread: i32, address: usize, data: usize) -> Result<i64, Errno> {
    // SAFETY: every caller in this module passes the arguments that `request` expects; pointers
    // among them refer to memory of this process that outlives the call and has the length that
    // belongs to it.
    let result = unsafe { libc::ptrace(request, thread, address, data) };
    if result < 0 { Err(errno()) } else { Ok(result) }
}

/// Begins to trace without stopping the thread. When the tracer ends, the thread continues.
pub(super) fn seize(thread: i32) -> Result<(), Errno> {
    request(libc::PTRACE_SEIZE, thread, 0, libc::PTRACE_O_TRACESYSGOOD as usize).map(drop)
}

/// Asks the thread to stop.
pub(super) fn interrupt(thread: i32) -> Result<(), Errno> {
    request(libc::PTRACE_INTERRUPT, thread, 0, 0).map(drop)
}

/// Resumes the thread, with a signal if not 0.
pub(super) fn resume(thread: i32, signal: i32) -> Result<(), Errno> {
    request(libc::PTRACE_CONT, thread, 0, signal as usize).map(drop)
}

/// Resumes the thread until the next entry or exit of a system call, with a signal if not 0.
pub(super) fn resume_to_call(thread: i32, signal: i32) -> Result<(), Errno> {
    request(libc::PTRACE_SYSCALL, thread, 0, signal as usize).map(drop)
}

/// Releases the thread from tracing, with a signal if not 0.
pub(super) fn detach(thread: i32, signal: i32) -> Result<(), Errno> {
    request(libc::PTRACE_DETACH, thread, 0, signal as usize).map(drop)
}

/// Reads its general registers; `None` if it runs 32-bit code.
pub(super) fn registers(thread: i32) -> Result<Option<Registers>, Errno> {
    let mut registers = Registers::zeroed();
    let expected = size_of::<libc::user_regs_struct>();
    let got = register_set(thread, NT_PRSTATUS, std::ptr::from_mut(registers.raw()).cast(), expected)?;
    Ok((got == expected && registers.is_64_bit()).then_some(registers))
}

/// Sets its general registers.
pub(super) fn set_registers(thread: i32, registers: &Registers) -> Result<(), Errno> {
    let mut registers = *registers;
    request(libc::PTRACE_SETREGS, thread, 0, std::ptr::from_mut(registers.raw()) as usize).map(drop)
}

/// Fills `buffer` with its XSAVE image; returns the image's length in bytes.
pub(super) fn xstate(thread: i32, buffer: &mut [u8]) -> Result<usize, Errno> {
    register_set(thread, NT_X86_XSTATE, buffer.as_mut_ptr(), buffer.len())
}

fn register_set(thread: i32, set: usize, base: *mut u8, len: usize) -> Result<usize, Errno> {
    let mut piece = libc::iovec { iov_base: base.cast(), iov_len: len };
    request(libc::PTRACE_GETREGSET, thread, set, &raw mut piece as usize)?;
    Ok(piece.iov_len)
}

/// Returns its signal mask: the one that it has outside of calls that change it for their duration.
pub(super) fn signal_mask(thread: i32) -> Result<u64, Errno> {
    let mut mask = 0u64;
    request(libc::PTRACE_GETSIGMASK, thread, size_of::<u64>(), &raw mut mask as usize)?;
    Ok(mask)
}

/// Sets its signal mask.
pub(super) fn set_signal_mask(thread: i32, mut mask: u64) -> Result<(), Errno> {
    request(libc::PTRACE_SETSIGMASK, thread, size_of::<u64>(), &raw mut mask as usize).map(drop)
}

/// Returns true if its own instruction caused the signal that is about to be delivered (a fault).
pub(super) fn is_fault(thread: i32) -> bool {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    if request(libc::PTRACE_GETSIGINFO, thread, 0, info.as_mut_ptr() as usize).is_err() {
        return false;
    }
    // SAFETY: a plain structure, zeroed and then filled by the kernel.
    let info = unsafe { info.assume_init() };
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
    info.si_code > 0 && faults.contains(&info.si_signo)
}

/// Returns the address of the thread's `struct rseq`, if it has one.
pub(super) fn rseq_address(thread: i32) -> Option<u64> {
    // Address, size, signature, flags, padding.
    let mut configuration = [0u64; 3];
    let size = size_of_val(&configuration);
    request(PTRACE_GET_RSEQ_CONFIGURATION, thread, size, configuration.as_mut_ptr() as usize).ok()?;
    (configuration[0] != 0).then_some(configuration[0])
}

/// Returns true if the thread dispatches its system calls to a handler of its own
/// (`PR_SET_SYSCALL_USER_DISPATCH`).
pub(super) fn has_syscall_dispatch(thread: i32) -> bool {
    // Mode, selector, offset, length.
    let mut configuration = [0u64; 4];
    let size = size_of_val(&configuration);
    let known =
        request(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, thread, size, configuration.as_mut_ptr() as usize);
    known.is_ok() && configuration[0] != 0
}

/// Fills `filter` with the thread's seccomp filter number `index`, the newest first; returns its
/// length in instructions, or `ENOENT` if there are no more.
pub(super) fn seccomp_filter(
    thread: i32,
    index: usize,
    filter: &mut [libc::sock_filter],
) -> Result<usize, Errno> {
    // The first call only queries the length.
    let len = request(PTRACE_SECCOMP_GET_FILTER, thread, index, 0)? as usize;
    if len > filter.len() {
        return Err(libc::E2BIG);
    }
    request(PTRACE_SECCOMP_GET_FILTER, thread, index, filter.as_mut_ptr() as usize).map(|len| len as usize)
}

/// Waits until the thread stops, at most `limit`.
///
/// The stop is inspected, not consumed: consuming it would make the kernel forget a signal that is
/// about to be delivered, should this process be killed now.
pub(super) fn wait_stop(thread: i32, limit: Duration) -> Result<Stop, NoStop> {
    let deadline = Instant::now() + limit;
    loop {
        match peek(thread) {
            Some(Ok(stop)) => return Ok(stop),
            Some(Err(())) => return Err(NoStop::Ended),
            None => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NoStop::Late);
        }
        wait_child_signal(left.min(Duration::from_millis(10)));
    }
}

/// Returns the stop that the thread is in (`Ok`), its end (`Err`), or nothing yet.
fn peek(thread: i32) -> Option<Result<Stop, ()>> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WSTOPPED | libc::WEXITED | libc::WNOHANG | libc::__WALL;
    // SAFETY: `info` is writable for one siginfo_t.
    let result = unsafe {
        libc::waitid(libc::P_PID, thread as libc::id_t, info.as_mut_ptr(), options | libc::WNOWAIT)
    };
    if result < 0 {
        // No longer ours: it ended, and was waited for.
        return (errno() != libc::EINTR).then_some(Err(()));
    }
    // SAFETY: a plain structure, zeroed and then filled by the kernel.
    let info = unsafe { info.assume_init() };
    // SAFETY: waitid fills this field, or leaves it zero.
    let pid = unsafe { info.si_pid() };
    // SAFETY: as above.
    let status = unsafe { info.si_status() };
    if pid == 0 {
        return None;
    }
    if info.si_code != libc::CLD_TRAPPED && info.si_code != libc::CLD_STOPPED {
        // The kernel keeps the end of a thread for its tracer; consume it, so that it does not stay
        // a zombie. SAFETY: as above, without a place for the answer.
        unsafe { libc::waitid(libc::P_PID, thread as libc::id_t, std::ptr::null_mut(), options) };
        return Some(Err(()));
    }
    Some(Ok(match (status >> 8, status & 0xff) {
        (PTRACE_EVENT_STOP, _) => Stop::Interrupted,
        (0, SYSCALL_STOP) => Stop::Call,
        (0, signal) => Stop::Signal(signal),
        _ => Stop::Interrupted,
    }))
}

/// Waits for the signal that reports a change of a traced thread. It is blocked, so none is lost.
fn wait_child_signal(limit: Duration) {
    let timeout = libc::timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `set` is writable for one sigset_t.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: as above; it was made a valid set by the line before.
    unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD) };
    // SAFETY: a valid set and a valid time; the answer is not requested.
    unsafe { libc::sigtimedwait(set.as_ptr(), std::ptr::null_mut(), &raw const timeout) };
}

/// Reads memory of the process; returns true if all of it could be read.
pub(super) fn read_memory(process: i32, address: u64, buffer: &mut [u8]) -> bool {
    let here = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: buffer.len() };
    // SAFETY: `here` describes a buffer that is ours to write; the kernel checks the remote
    // address.
    let moved = unsafe { libc::process_vm_readv(process, &raw const here, 1, &raw const there, 1, 0) };
    moved == buffer.len() as isize
}

/// Writes memory of the process, where it is writable to the process itself; returns true if all of
/// it could be written.
pub(super) fn write_memory(process: i32, address: u64, data: &[u8]) -> bool {
    let here = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
    let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: data.len() };
    // SAFETY: `here` describes data that are only read; the kernel checks the remote address.
    let moved = unsafe { libc::process_vm_writev(process, &raw const here, 1, &raw const there, 1, 0) };
    moved == data.len() as isize
}
