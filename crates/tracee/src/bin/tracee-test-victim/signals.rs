//! Thousands of signals, none lost and none delivered twice; masks and alternate stacks.

use std::cell::{Cell, UnsafeCell};
use std::mem::{MaybeUninit, zeroed};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use nix::libc;

use super::{Prepare, Round, fail};

pub(super) const WORKERS: &[(&str, Prepare)] = &[
    ("signals", receive::<0>),
    ("alternate-stack", receive::<1>),
    ("signals-while-computing", receive::<2>),
    ("sigsuspend", receive::<3>),
    ("process-signals", process_signals),
];

/// Number of threads that receive real-time signals. These are queued, each with a value: here
/// consecutive numbers.
const RECEIVERS: usize = 4;
static RECEIVED: [AtomicU64; RECEIVERS] = [const { AtomicU64::new(0) }; RECEIVERS];
static FOR_PROCESS: AtomicU64 = AtomicU64::new(0);
static STACK: [AtomicUsize; RECEIVERS] = [const { AtomicUsize::new(0) }; RECEIVERS];
const STACK_LEN: usize = 64 * 1024;

thread_local! {
    static RECEIVER: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn signal_number() -> i32 {
    libc::SIGRTMIN() + 2
}

/// Returns a set of all signals but one.
pub(super) fn all_but(signal: i32) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: writable for one set.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    // SAFETY: made valid by the line before.
    let mut set = unsafe { set.assume_init() };
    // SAFETY: a valid set.
    unsafe { libc::sigdelset(&raw mut set, signal) };
    set
}

fn change_mask(how: i32, signal: i32) {
    // SAFETY: zero is a valid, empty set.
    let mut set: libc::sigset_t = unsafe { zeroed() };
    // SAFETY: a valid set.
    unsafe { libc::sigaddset(&raw mut set, signal) };
    // SAFETY: a valid set; the old one is not requested.
    unsafe { libc::pthread_sigmask(how, &raw const set, null_mut()) };
}

/// Installs the handlers.
pub(super) fn prepare_process() {
    for (signal, handler) in [
        (signal_number(), on_numbered as *const () as usize),
        (libc::SIGUSR1, on_process as *const () as usize),
    ] {
        // SAFETY: zero is a valid value of every field.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: a handler of the right type, and a valid action.
        unsafe { libc::sigaction(signal, &raw const action, null_mut()) };
    }
    change_mask(libc::SIG_BLOCK, signal_number());
    change_mask(libc::SIG_BLOCK, libc::SIGUSR1);
}

/// Blocks all signals for this thread.
pub(super) fn block_all() {
    let set = all_but(libc::SIGKILL);
    // SAFETY: a valid set; the old one is not requested.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, null_mut()) };
}

/// Sets a signal mask for every thread that only the thread itself could have.
pub(super) fn prepare_thread() {
    change_mask(libc::SIG_BLOCK, libc::SIGWINCH);
    change_mask(libc::SIG_BLOCK, libc::SIGURG);
}

/// Signal mask and alternate stack of a thread.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Settings {
    mask: u64,
    stack: (usize, i32, usize),
}

impl Settings {
    pub(super) fn now() -> Self {
        let mut mask = 0u64;
        // SAFETY: writable for the eight bytes that the kernel's set has.
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, 0, null::<u64>(), &raw mut mask, 8) };
        // SAFETY: a plain structure.
        let mut stack: libc::stack_t = unsafe { zeroed() };
        // SAFETY: writable for one stack_t.
        unsafe { libc::sigaltstack(null(), &raw mut stack) };
        Self { mask, stack: (stack.ss_sp as usize, stack.ss_flags, stack.ss_size) }
    }

    pub(super) fn stack_differs(&self, other: &Self) -> bool {
        self.stack != other.stack
    }
}

extern "C" fn on_numbered(_: i32, info: *const libc::siginfo_t, _: *const libc::c_void) {
    let index = RECEIVER.get();
    // SAFETY: the kernel passes a valid siginfo_t, with a value because the signal was queued with
    // one.
    let info = unsafe { &*info };
    // SAFETY: as above.
    let number = unsafe { info.si_value() }.sival_ptr as u64;
    let here = std::ptr::from_ref(&number) as usize;
    let (Some(received), Some(stack)) = (RECEIVED.get(index), STACK.get(index)) else {
        fail("a signal came to a thread that it was not for")
    };
    let expected = received.load(Ordering::Relaxed);
    if number != expected {
        fail(&format!("signal {number} came to receiver {index}, expected {expected}"));
    }
    let stack = stack.load(Ordering::Relaxed);
    if stack != 0 && !(stack..stack + STACK_LEN).contains(&here) {
        fail("a handler did not run on the alternate stack");
    }
    received.store(expected + 1, Ordering::Release);
}

extern "C" fn on_process(_: i32, _: *const libc::siginfo_t, _: *const libc::c_void) {
    FOR_PROCESS.fetch_add(1, Ordering::Release);
}

/// Receives numbered signals from another thread; at most 16 are pending.
fn receive<const INDEX: usize>() -> Round {
    RECEIVER.set(INDEX);
    if INDEX == 1 {
        let memory = Box::leak(vec![0u8; STACK_LEN].into_boxed_slice());
        STACK[INDEX].store(memory.as_ptr() as usize, Ordering::Relaxed);
        let stack = libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK_LEN };
        // SAFETY: memory that is never freed.
        unsafe { libc::sigaltstack(&raw const stack, null_mut()) };
    }
    if INDEX != 3 {
        change_mask(libc::SIG_UNBLOCK, signal_number());
    }
    // SAFETY: the call has no arguments.
    let me = unsafe { libc::pthread_self() } as usize;
    thread::spawn(move || {
        for number in 0u64.. {
            while number - RECEIVED[INDEX].load(Ordering::Acquire) >= 16 {
                thread::yield_now();
            }
            let value = libc::sigval { sival_ptr: number as *mut libc::c_void };
            // SAFETY: that thread lives as long as the program.
            unsafe { libc::pthread_sigqueue(me as libc::pthread_t, signal_number(), value) };
            if number % 16 == 0 {
                thread::sleep(std::time::Duration::from_micros(200));
            }
        }
    });
    let mut before = 0;
    let scratch = UnsafeCell::new(0u64);
    Box::new(move || {
        match INDEX {
            // Waits in a call that signals interrupt and the kernel restarts.
            0 | 1 => {
                let sleep = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
                // SAFETY: a valid time.
                unsafe { libc::nanosleep(&raw const sleep, null_mut()) };
            }
            2 => {
                for i in 0..1000u64 {
                    // SAFETY: no other thread uses this cell.
                    unsafe { scratch.get().write_volatile(i) };
                }
            }
            _ => {
                let set = all_but(signal_number());
                // SAFETY: a valid set.
                let result = unsafe { libc::sigsuspend(&raw const set) };
                if result != -1 || RECEIVED[INDEX].load(Ordering::Acquire) == before {
                    return Err("sigsuspend ended without a signal".into());
                }
            }
        }
        let now = RECEIVED[INDEX].load(Ordering::Acquire);
        if now < before {
            return Err(format!("{now} signals after {before}"));
        }
        before = now;
        Ok(())
    })
}

/// Sends signals to the whole process, one at a time: only this thread receives them.
fn process_signals() -> Round {
    change_mask(libc::SIG_UNBLOCK, libc::SIGUSR1);
    Box::new(|| {
        let before = FOR_PROCESS.load(Ordering::Acquire);
        // SAFETY: a signal to this process, for which there is a handler.
        unsafe { libc::kill(std::process::id() as i32, libc::SIGUSR1) };
        while FOR_PROCESS.load(Ordering::Acquire) == before {
            thread::yield_now();
        }
        let after = FOR_PROCESS.load(Ordering::Acquire);
        if after == before + 1 { Ok(()) } else { Err(format!("{} signals for one", after - before)) }
    })
}
