//! One thread of the other process, held for a moment.
//!
//! The order of steps is the whole point. At each of them this process may be killed, and then the
//! kernel lets the thread go as it is at that moment:
//!
//! 1. seize, interrupt, wait. *Let go here, the thread goes on by itself.*
//! 2. look: 64-bit, no debugger, no restartable sequence, no forbidding filter, the instructions.
//! 3. write the frame below the stack. *Nobody looks there.*
//! 4. set the registers: the thread is about to make the call. *Let go from here on, it makes the
//!    call, returns into `rt_sigreturn`, and the frame puts everything back, the mask too.*
//! 5. block its signals, so that no handler runs on top of the call.
//! 6. let it run to the entry and the exit of the call; set registers for the next call, and so on.
//! 7. put back the signal mask, then the registers. *Let go between both: as in 4.*
//! 8. put back the bytes below the stack, detach; the kernel now finishes or restarts the system
//!    call that was interrupted, exactly as it would have.
//!
//! A call that has not returned in time cannot be taken back, and a thread that runs cannot be put
//! back: it is left as it is, frame and all, and this process ends, which is the only way to let go of
//! it. When the call returns the frame does the rest. A thread that could not be given a frame is
//! waited for as long as it takes.
//!
//! Nothing between 1 and 8 allocates memory or takes a lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::libc;

use super::ptrace::{self, Errno, NoStop, Stop};
use super::seccomp::{self, MAX_FILTER};
use super::wire::Failure;
use crate::arch::{self, MAX_FRAME, MAX_XSTATE, Placement, Registers};

/// How long a thread may take to stop. It is longer only in an uninterruptible call.
const STOP_LIMIT: Duration = Duration::from_millis(500);
/// How long an injected call may take.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// As long as it takes.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);
/// Every signal that can be blocked.
const ALL_SIGNALS: u64 = u64::MAX;

static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Whether this process holds a thread of another one. While it does, it must not allocate; the
/// tests' allocator asks.
pub(super) fn is_attached() -> bool {
    ATTACHED.load(Ordering::Relaxed)
}

/// Memory that is made before a thread is held.
pub(super) struct Buffers {
    xstate: Vec<u8>,
    frame: Vec<u8>,
    /// What was where the frame was written.
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

/// Counts the steps of an operation; a test may ask to be killed at one of them.
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

/// What is known of the process and of the instructions in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) pid: i32,
    pub(super) gadget: u64,
    pub(super) sigreturn: Option<u64>,
}

/// Why a thread was not used.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// Another thread may do.
    TryAnother(Failure),
    /// No thread will do.
    GiveUp(Failure),
}

/// A thread that is stopped, with all that is needed to put it back.
pub(super) struct Held<'a> {
    thread: i32,
    target: Target,
    original: Registers,
    signal_mask: u64,
    frame: Option<Placement>,
    buffers: &'a mut Buffers,
    steps: &'a mut Steps,
    /// Whether the thread has been diverted from where it was.
    diverted: bool,
    /// Whether it is still in a call, and has to be left to its frame.
    left: bool,
    /// A signal that it has to get when it is let go.
    signal: i32,
}

impl<'a> Held<'a> {
    /// Stops a thread, wherever it is. Dropping the result lets it go on.
    ///
    /// `late` is set if the thread did not stop; then only the end of this process lets it go.
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
        // From here on every way out goes through `Drop`, which lets the thread go.
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
        held.settle().map_err(|no_stop| {
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

    /// Stops a thread and makes sure that it can make `calls` (numbers and arguments), if asked
    /// for only one that could restore itself; `late` as in [`Held::seize`].
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
        if ptrace::dispatches_calls(thread) {
            return Err(GiveUp(Failure::Dispatched));
        }
        if held.in_restartable_sequence() {
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

    /// Lets a thread that an earlier injector left before its call go on without that call; returns
    /// whether it was such a thread. All others are only stopped for a moment.
    pub(super) fn cancel(
        thread: i32,
        target: Target,
        buffers: &mut Buffers,
        steps: &mut Steps,
        late: &mut bool,
    ) -> bool {
        let Ok(held) = Held::seize(thread, target, buffers, steps, late) else { return false };
        let Some(sigreturn) = target.sigreturn else { return false };
        let after = target.gadget + arch::SYSCALL.len() as u64;
        let is_ours = |at: &Registers| {
            (at.instruction() == target.gadget || at.instruction() == after)
                && held.read_word(at.stack()) == Some(sigreturn)
        };
        if !is_ours(&held.original) || held.check_gadgets().is_err() {
            return false;
        }
        // It may have been diverted several times; the innermost frame leads to where it was.
        let mut innermost = held.original;
        let mut pending = innermost.instruction() == target.gadget;
        while let Some(outer) = innermost.interrupted(|address| held.read_word(address)).filter(is_ours) {
            innermost = outer;
            pending |= innermost.instruction() == target.gadget;
        }
        pending && ptrace::set_registers(thread, &innermost.returned_to(sigreturn)).is_ok()
    }

    /// Which thread it is.
    pub(super) fn thread(&self) -> i32 {
        self.thread
    }

    /// Whether it would restore itself.
    pub(super) fn is_self_restoring(&self) -> bool {
        self.frame.is_some()
    }

    /// Whether it is still in a call: then only the end of this process lets it go.
    pub(super) fn is_left(&self) -> bool {
        self.left
    }

    /// A point at which a test may end this process.
    pub(super) fn step(&mut self) {
        self.steps.step();
    }

    /// Makes the thread call `number`; returns what the kernel answered, errors as negative
    /// numbers.
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

    /// Waits for the stop that was asked for; signals that come first are passed on to the thread.
    fn settle(&mut self) -> Result<(), NoStop> {
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

    /// Lets the thread run to the next entry or exit of a system call.
    fn run_to_call(&mut self) -> Result<(), Failure> {
        let mut signal = 0;
        loop {
            ptrace::resume_to_call(self.thread, signal).map_err(|_| Failure::Gone)?;
            let limit = if self.is_self_restoring() { CALL_LIMIT } else { FOR_EVER };
            match ptrace::wait_stop(self.thread, limit) {
                Ok(Stop::Call) => return Ok(()),
                // The whole process is stopped, or continued, from elsewhere. The thread runs on
                // all the same; when it is let go the kernel makes it stop with the others.
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

    /// Whether the thread is in a restartable sequence. The kernel would look at where it is while
    /// it makes the injected call, find it outside, and not restart the sequence later.
    fn in_restartable_sequence(&self) -> bool {
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

    /// Makes sure that no filter kills the process for one of the calls, or refuses it.
    fn check_seccomp(&mut self, calls: &[(u64, [u64; 3])]) -> Result<(), Failure> {
        for index in 0.. {
            let len = match ptrace::seccomp_filter(self.thread, index, &mut self.buffers.filter) {
                Ok(len) => len,
                // No (more) filters.
                Err(libc::ENOENT) => break,
                // No filter at all: the mode is "off" or "strict". Or a kernel or a tracer to
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

    /// Makes sure that the instructions are where they were found: the process may have loaded
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

    /// Writes the frame with which the thread restores itself; returns whether it could.
    fn write_frame(&mut self) -> bool {
        let Some(sigreturn) = self.target.sigreturn else { return false };
        let Ok(len) = ptrace::xstate(self.thread, &mut self.buffers.xstate) else { return false };
        let Some(image) = self.buffers.xstate.get(..len) else { return false };
        let Some(goes_on) = self.goes_on() else { return false };
        let (pid, out) = (self.target.pid, &mut self.buffers.frame);
        let Some(placed) = arch::build_frame(out, &goes_on, image, self.signal_mask, sigreturn) else {
            return false;
        };
        let written = ptrace::read_memory(pid, placed.address, &mut self.buffers.below[..placed.len])
            && ptrace::write_memory(pid, placed.address, &out[..placed.len]);
        self.frame = written.then_some(placed);
        written
    }

    /// The registers with which the thread can go on without the kernel's memory of its call.
    fn goes_on(&self) -> Option<Registers> {
        if !self.original.continues_a_call() {
            return Some(self.original);
        }
        let mut code = [0; arch::BEFORE_NEXT];
        let before = self.original.instruction().checked_sub(code.len() as u64)?;
        let read = ptrace::read_memory(self.target.pid, before, &mut code);
        read.then(|| self.original.in_named_call(code)).flatten()
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.left {
            // Nobody waits for this process any more.
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

/// Whether a thread belongs to a process, without allocating.
fn is_thread_of(pid: i32, thread: i32) -> bool {
    // SAFETY: signal 0 is sent to nobody; the call only looks.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, 0) == 0 }
}

/// The seccomp mode of a thread, from its `status`, without allocating.
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
