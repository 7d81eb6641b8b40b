//! The one thing here that is done to this very process: how its allocator keeps what was freed.
//!
//! glibc gives each of a program's first threads (eight for each processor) an arena of its own, and an arena keeps
//! what was freed in it. An agent starts some twenty threads for a migration and hands buffers from one to another;
//! what each arena kept came to a quarter of the agent's memory, and grew from migration to migration.

use nix::libc;

/// Makes all threads that this process will have share one arena. Small pieces come from each thread's own cache all
/// the same, and large ones are used again by those who have them, so no thread waits for another.
///
/// To be called before the first thread is started: an arena that is there is not given up.
pub fn share_one_arena() {
    // SAFETY: only sets a limit that the allocator reads when a thread asks for memory for the first time. It tells
    // whether it knows the parameter; one that does not goes on as it was, and only takes more memory.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Gives back to the system what was freed and is still kept: for the time between two migrations, in which an agent
/// should be small.
pub fn give_back_what_is_free() {
    // SAFETY: takes the allocator's own locks, and touches no memory that is in use.
    unsafe { libc::malloc_trim(0) };
}
