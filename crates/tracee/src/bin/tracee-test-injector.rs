//! Injector for this crate's tests: the product re-executes itself instead.
//!
//! Its allocator ends the process if memory is allocated while a thread of another process is held.
//!
//! With the arguments `track PID START LEN` it is an agent: it tracks writes to that memory with an
//! injector of its own, prints `ready`, and stays until its input ends.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Read;
use std::process::ExitCode;

use whimbrel_tracee::{AddressRange, Injector, Process, WriteTracker};

struct NotWhileHolding;

fn check() {
    if whimbrel_tracee::is_holding_thread() {
        std::process::abort();
    }
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for NotWhileHolding {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check();
        // SAFETY: the caller guarantees the requirements.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        check();
        // SAFETY: the caller guarantees the requirements.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: NotWhileHolding = NotWhileHolding;

/// Tracks writes until the input ends.
fn track(arguments: &[u64]) -> Option<()> {
    let &[pid, start, len] = arguments else { return None };
    let process = Process::open(pid as u32).ok()?;
    let injector = Injector::new(std::env::current_exe().ok()?, Vec::new());
    let uffd = injector.create_userfaultfd(&process).ok()?;
    let _tracker = WriteTracker::start(&process, uffd, &[AddressRange::with_len(start, len)]).ok()?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new()).ok().map(drop)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|one| one == "track") {
        let numbers: Vec<u64> = arguments.iter().skip(1).filter_map(|one| one.parse().ok()).collect();
        return if track(&numbers).is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    whimbrel_tracee::injector_main()
}
