//! The injector for this crate's tests: the product re-executes itself instead.
//!
//! Its allocator ends the process if memory is asked for while a thread of another is held.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;

struct NotWhileHolding;

fn check() {
    if whimbrel_tracee::holds_a_thread() {
        std::process::abort();
    }
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for NotWhileHolding {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check();
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        check();
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: NotWhileHolding = NotWhileHolding;

fn main() -> ExitCode {
    whimbrel_tracee::injector_main()
}
