//! One thread of the other process, held for a moment.
//!
//! The order of steps is essential. At each of them this process may be killed, and then the kernel
//! releases the thread in its state at that moment:
//!
//! 1. seize, interrupt, wait. *Released here, the thread continues by itself.*
//! 2. check: 64-bit, no debugger, no restartable sequence, no forbidding filter, the instructions.
//! 3. write the frame below the stack. *No code reads there.*
//! 4. set the registers: the thread is about to make the call. *Released from here on, it makes the
//!    call, returns into `rt_sigreturn`, and the frame restores everything, the mask too.*
//! 5. block its signals, so that no handler runs on top of the call.
//! 6. run it to the entry and the exit of the call; set registers for the next call, and so on.
//! 7. restore the signal mask, then the registers. *Released between both: as in 4.*
//! 8. restore the bytes below the stack, detach; the kernel now finishes or restarts the system call
//!    that was interrupted, exactly as it would have.
//!
//! A call that has not returned in time cannot be undone, and a running thread cannot be restored: it
//! is left as it is, with its frame, and this process ends, which is the only way to release it. When
//! the call returns, the frame does the rest. For a thread without a frame this process waits as long
//! as necessary.
//!
//! This process allocates no memory and acquires no lock between steps 1 and 8.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::libc;

use super::ptrace::{self, Errno, NoStop, Stop};
use super::seccomp::{self, MAX_FILTER};
use super::wire::Failure;
use crate::arch::{self, MAX_FRAME, MAX_XSTATE, Placement, Registers};

/// Time limit for a thread to stop. Only an uninterruptible call needs longer.
const STOP_LIMIT: Duration = Duration::from_millis(500);
/// Time limit for an injected call.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// No time limit.
const NO_LIMIT: Duration = Duration::from_secs(u32::MAX as u64);
/// Every signal that can be blocked.
const ALL_SIGNALS: u64 = u64::MAX;

static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Returns true if this process holds a thread of another one. In that state it must not allocate;
/// the tests' allocator checks it.
pub(super) fn is_attached() -> bool {
    ATTACHED.load(Ordering::Relaxed)
}

/// Memory that is allocated before a thread is held.
pub(super) struct Buffers {
    xstate: Vec<u8>,
    frame: Vec<u8>,
    /// Original content of the memory at the frame.
    below: Vec<u8>,
    filter: Vec<libc::sock_filter>,
}

impl Buffers {
    pub(super) fn new() -> Self {
        let nothing = libc::sock_filter { code: 0, jt: 0, jf: 0, k: 0 };
        Self {
            xstate: vec![0; MAX_XSTATE],
            frame: vec![0; MAX_FRAME],
            below: vec![0; MAX_FRAME],
            filter: vec![nothing; MAX_FILTER],
        }
    }
}

/// Counter of the steps of an operation; a test may request a kill at one of them.
#[derive(Debug)]
pub(super) struct Steps {
    pub(super) taken: u64,
    pub(super) die_at: u64,
}

impl Steps {
    pub(super) fn step(&mut self) {
        self.taken += 1;
        if self.taken == self.die_at {
            // SAFETY: a signal to this process itself.
            unsafe { libc::raise(libc::SIGKILL) };
        }
    }
}

/// Facts of the process and of the instructions in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) pid: i32,
    pub(super) gadget: u64,
    pub(super) sigreturn: Option<u64>,
}

/// Reason why a thread was not used.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// Another thread may work.
    TryAnother(Failure),
    /// No thread will work.
    GiveUp(Failure),
}

/// A stopped thread, with all that is needed to restore it.
pub(super) struct HeldThread<'a> {
    thread: i32,
    target: Target,
    original: Registers,
    signal_mask: u64,
    frame: Option<Placement>,
    buffers: &'a mut Buffers,
    steps: &'a mut Steps,
    /// True if the thread has been diverted from its original place.
    diverted: bool,
    /// True if the thread is still in a call, and has to be left to its frame.
    left: bool,
    /// Signal to deliver when the thread is released.
    signal: i32,
}

impl<'a> HeldThread<'a> {
    /// Stops a thread, wherever it is. Dropping the result resumes it.
    ///
    /// `late` is set if the thread did not stop; then only the end of this process releases it.
    fn seize(
        thread: i32,
        target: Target,
        buffers: &'a mut Buffers,
        steps: &'a mut Steps,
        late: &mut bool,
    ) -> Result<Self, Refusal> {
        use Refusal::{GiveUp, TryAnother};
        ptrace::seize(thread).map_err(|error| match error {
            libc::ESRCH => TryAnother(Failure::Gone),
            libc::EPERM => GiveUp(Failure::NotPermitted),
            error => TryAnother(Failure::Kernel(error as u64)),
        })?;
        ATTACHED.store(true, Ordering::Relaxed);
        // From here on every exit path runs `Drop`, which releases the thread.
        let mut held = Self {
            thread,
            target,
            original: Registers::zeroed(),
            signal_mask: 0,
            frame: None,
            buffers,
            steps,
            diverted: false,
            left: false,
            signal: 0,
        };
        held.steps.step();
        let failed = |error: Errno| TryAnother(Failure::Kernel(error as u64));
        ptrace::interrupt(thread).map_err(failed)?;
        held.steps.step();
        held.wait_requested_stop().map_err(|no_stop| {
            *late |= no_stop == NoStop::Late;
            TryAnother(if no_stop == NoStop::Late { Failure::Uninterruptible } else { Failure::Gone })
        })?;
        held.steps.step();
        held.original = ptrace::registers(thread).map_err(failed)?.ok_or(GiveUp(Failure::Not64Bit))?;
        if !is_thread_of(target.pid, thread) {
            return Err(TryAnother(Failure::Gone));
        }
        Ok(held)
    }

    /// Stops a thread and verifies that it can make `calls` (numbers and arguments), on request
    /// only one that could restore itself; `late` as in [`HeldThread::seize`].
    pub(super) fn stop(
        thread: i32,
        target: Target,
        calls: &[(u64, [u64; 3])],
        only_self_restoring: bool,
        buffers: &'a mut Buffers,
        steps: &'a mut Steps,
        late: &mut bool,
    ) -> Result<Self, Refusal> {
        use Refusal::{GiveUp, TryAnother};
        let failed = |error: Errno| TryAnother(Failure::Kernel(error as u64));
        let mut held = Self::seize(thread, target, buffers, steps, late)?;
        if ptrace::has_syscall_dispatch(thread) {
            return Err(GiveUp(Failure::Dispatched));
        }
        if held.is_in_restartable_sequence() {
            return Err(TryAnother(Failure::Busy));
        }
        held.check_seccomp(calls).map_err(GiveUp)?;
        held.check_gadgets().map_err(GiveUp)?;
        held.signal_mask = ptrace::signal_mask(thread).map_err(failed)?;
        if !held.write_frame() && only_self_restoring {
            return Err(TryAnother(Failure::Busy));
        }
        held.steps.step();
        Ok(held)
    }

    /// Resumes a thread that an earlier injector left before its call without that call; returns
    /// true if it was such a thread. All others are only stopped for a moment.
    pub(super) fn cancel(
        thread: i32,
        target: Target,
        buffers: &mut Buffers,
        steps: &mut Steps,
        late: &mut bool,
    ) -> bool {
        let Ok(held) = HeldThread::seize(thread, target, buffers, steps, late) else { return false };
        let Some(sigreturn) = target.sigreturn else { return false };
        let after = target.gadget + arch::SYSCALL.len() as u64;
        let is_ours = |at: &Registers| {
            (at.instruction() == target.gadget || at.instruction() == after)
                && held.read_word(at.stack()) == Some(sigreturn)
        };
        if !is_ours(&held.original) || held.check_gadgets().is_err() {
            return false;
        }
        // It may have been diverted several times; the innermost frame leads to its original place.
        let mut innermost = held.original;
        let mut pending = innermost.instruction() == target.gadget;
        while let Some(outer) = innermost.interrupted(|address| held.read_word(address)).filter(is_ours) {
            innermost = outer;
            pending |= innermost.instruction() == target.gadget;
        }
        pending && ptrace::set_registers(thread, &innermost.returned_to(sigreturn)).is_ok()
    }

    /// Returns the thread's id.
    pub(super) fn thread(&self) -> i32 {
        self.thread
    }

    /// Returns true if the thread would restore itself.
    pub(super) fn is_self_restoring(&self) -> bool {
        self.frame.is_some()
    }

    /// Returns true if the thread is still in a call: then only the end of this process releases it.
    pub(super) fn is_in_call(&self) -> bool {
        self.left
    }

    /// Marks a point at which a test may end this process.
    pub(super) fn step(&mut self) {
        self.steps.step();
    }

    /// Makes the thread call `number`; returns the kernel's result, errors as negative numbers.
    pub(super) fn call(&mut self, number: u64, arguments: [u64; 3]) -> Result<i64, Failure> {
        let kernel = |error: Errno| match error {
            libc::ESRCH => Failure::Gone,
            error => Failure::Kernel(error as u64),
        };
        let stack = self.frame.map(|frame| frame.address);
        let registers = self.original.calling(self.target.gadget, stack, number, arguments);
        ptrace::set_registers(self.thread, &registers).map_err(kernel)?;
        let first = !std::mem::replace(&mut self.diverted, true);
        self.steps.step();
        if first {
            ptrace::set_signal_mask(self.thread, ALL_SIGNALS).map_err(kernel)?;
            self.steps.step();
        }
        self.run_to_call()?;
        self.steps.step();
        self.run_to_call()?;
        self.steps.step();
        let after = ptrace::registers(self.thread).map_err(kernel)?.ok_or(Failure::Not64Bit)?;
        if after.call_number() != number {
            return Err(Failure::Moved);
        }
        Ok(after.result())
    }

    /// Waits for the requested stop; signals that arrive first are passed on to the thread.
    fn wait_requested_stop(&mut self) -> Result<(), NoStop> {
        loop {
            match ptrace::wait_stop(self.thread, STOP_LIMIT)? {
                Stop::Interrupted => return Ok(()),
                Stop::Signal(signal) => {
                    self.steps.step();
                    ptrace::resume(self.thread, signal).map_err(|_| NoStop::Ended)?;
                }
                Stop::Call => ptrace::resume(self.thread, 0).map_err(|_| NoStop::Ended)?,
            }
        }
    }

    /// Runs the thread to the next entry or exit of a system call.
    fn run_to_call(&mut self) -> Result<(), Failure> {
        let mut signal = 0;
        loop {
            ptrace::resume_to_call(self.thread, signal).map_err(|_| Failure::Gone)?;
            let limit = if self.is_self_restoring() { CALL_LIMIT } else { NO_LIMIT };
            match ptrace::wait_stop(self.thread, limit) {
                Ok(Stop::Call) => return Ok(()),
                // Another process stops or continues the whole process. The thread runs on all the
                // same; when it is released the kernel makes it stop with the others.
                Ok(Stop::Interrupted) => signal = 0,
                // SIGSTOP cannot be blocked.
                Ok(Stop::Signal(libc::SIGSTOP)) => signal = libc::SIGSTOP,
                Ok(Stop::Signal(other)) => {
                    if !ptrace::is_fault(self.thread) {
                        self.signal = other;
                    }
                    return Err(Failure::Signal(other as u64));
                }
                Err(NoStop::Ended) => return Err(Failure::Gone),
                Err(NoStop::Late) => {
                    self.left = true;
                    return Err(Failure::Late);
                }
            }
        }
    }

    /// Returns true if the thread is in a restartable sequence. The kernel would check its place
    /// during the injected call, find it outside, and not restart the sequence later.
    fn is_in_restartable_sequence(&self) -> bool {
        let Some(address) = ptrace::rseq_address(self.thread) else { return false };
        let Some(sequence) = self.read_word(address + 8).filter(|&sequence| sequence != 0) else {
            return false;
        };
        let (Some(start), Some(len)) = (self.read_word(sequence + 8), self.read_word(sequence + 16)) else {
            return true;
        };
        self.original.instruction().wrapping_sub(start) < len
    }

    fn read_word(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        ptrace::read_memory(self.target.pid, address, &mut word).then(|| u64::from_le_bytes(word))
    }

    /// Verifies that no filter kills the process for one of the calls, or refuses it.
    fn check_seccomp(&mut self, calls: &[(u64, [u64; 3])]) -> Result<(), Failure> {
        for index in 0.. {
            let len = match ptrace::seccomp_filter(self.thread, index, &mut self.buffers.filter) {
                Ok(len) => len,
                // No (more) filters.
                Err(libc::ENOENT) => break,
                // No filter at all: the mode is "off" or "strict". Or a kernel or a tracer for
                // which filters are not shown.
                Err(error) => match seccomp_mode(self.target.pid, self.thread) {
                    Some(0) => break,
                    Some(1) => return Err(Failure::Seccomp(u64::from(libc::SECCOMP_RET_KILL_THREAD))),
                    _ => return Err(Failure::SeccompUnknown(error as u64)),
                },
            };
            let sigreturn = (libc::SYS_rt_sigreturn as u64, [0; 3]);
            for &(number, arguments) in calls.iter().chain(self.target.sigreturn.map(|_| &sigreturn)) {
                let number = number as u32;
                let instruction = self.target.gadget + arch::SYSCALL.len() as u64;
                let call = seccomp::Call { number, instruction, arguments };
                match seccomp::run(&self.buffers.filter[..len], &call) {
                    Some(answer) if seccomp::allows(answer) => {}
                    Some(answer) => return Err(Failure::Seccomp(u64::from(answer))),
                    None => return Err(Failure::SeccompUnknown(0)),
                }
            }
        }
        Ok(())
    }

    /// Verifies that the instructions are where they were found: the process may have loaded
    /// another program since.
    fn check_gadgets(&self) -> Result<(), Failure> {
        let expected = if self.target.sigreturn.is_some() { arch::SYSCALL_RETURN } else { arch::SYSCALL };
        let mut code = [0; 16];
        let call = &mut code[..expected.len()];
        if !ptrace::read_memory(self.target.pid, self.target.gadget, call) || call != expected {
            return Err(Failure::Moved);
        }
        if let Some(address) = self.target.sigreturn {
            let matches = arch::SIGRETURN.iter().any(|form| {
                let code = &mut code[..form.len()];
                ptrace::read_memory(self.target.pid, address, code) && code == *form
            });
            if !matches {
                return Err(Failure::Moved);
            }
        }
        Ok(())
    }

    /// Writes the frame with which the thread restores itself; returns true if it could.
    fn write_frame(&mut self) -> bool {
        let Some(sigreturn) = self.target.sigreturn else { return false };
        let Ok(len) = ptrace::xstate(self.thread, &mut self.buffers.xstate) else { return false };
        let Some(image) = self.buffers.xstate.get(..len) else { return false };
        let Some(resume_registers) = self.resume_registers() else { return false };
        let (pid, out) = (self.target.pid, &mut self.buffers.frame);
        let Some(placed) = arch::build_frame(out, &resume_registers, image, self.signal_mask, sigreturn)
        else {
            return false;
        };
        let written = ptrace::read_memory(pid, placed.address, &mut self.buffers.below[..placed.len])
            && ptrace::write_memory(pid, placed.address, &out[..placed.len]);
        self.frame = written.then_some(placed);
        written
    }

    /// Returns the registers with which the thread can continue without the kernel's memory of its
    /// call.
    fn resume_registers(&self) -> Option<Registers> {
        if !self.original.is_continuing_call() {
            return Some(self.original);
        }
        let mut code = [0; arch::BEFORE_NEXT];
        let before = self.original.instruction().checked_sub(code.len() as u64)?;
        let read = ptrace::read_memory(self.target.pid, before, &mut code);
        read.then(|| self.original.in_named_call(code)).flatten()
    }
}

impl Drop for HeldThread<'_> {
    fn drop(&mut self) {
        if self.left {
            // No process waits for this one any more.
            ATTACHED.store(false, Ordering::Relaxed);
            return;
        }
        // Errors mean that the thread has ended.
        if self.diverted {
            let _ = ptrace::set_signal_mask(self.thread, self.signal_mask);
            self.steps.step();
            let _ = ptrace::set_registers(self.thread, &self.original);
            self.steps.step();
        }
        if let Some(frame) = self.frame {
            ptrace::write_memory(self.target.pid, frame.address, &self.buffers.below[..frame.len]);
            self.steps.step();
        }
        let _ = ptrace::detach(self.thread, self.signal);
        ATTACHED.store(false, Ordering::Relaxed);
        self.steps.step();
    }
}

/// Returns true if a thread belongs to a process, without allocating.
fn is_thread_of(pid: i32, thread: i32) -> bool {
    // SAFETY: signal 0 is never delivered; the call only checks.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, 0) == 0 }
}

/// Returns the seccomp mode of a thread, from its `status`, without allocating.
fn seccomp_mode(pid: i32, thread: i32) -> Option<u8> {
    use std::io::{Read, Write};
    let mut path = [0u8; 64];
    let mut rest = &mut path[..];
    write!(rest, "/proc/{pid}/task/{thread}/status").ok()?;
    let len = 64 - rest.len();
    let mut text = [0u8; 4096];
    // Paths of less than some hundred bytes are passed on the stack.
    let mut file = std::fs::File::open(std::str::from_utf8(&path[..len]).ok()?).ok()?;
    let len = file.read(&mut text).ok()?;
    let key = b"Seccomp:\t";
    let at = text[..len].windows(key.len()).position(|window| window == key)?;
    text.get(at + key.len())?.checked_sub(b'0')
}
