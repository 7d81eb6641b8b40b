//! Allocator of this process: control of the freed memory that it keeps.
//!
//! glibc creates an arena for each of a program's first threads (eight for each processor), and an arena keeps the
//! memory that was freed in it. An agent starts some twenty threads for a migration and passes buffers from one to
//! another; the memory kept by the arenas added up to a quarter of the agent's memory, and grew from migration to
//! migration.

use nix::libc;

/// Makes all threads of this process share one arena. Small allocations still use each thread's own cache, and the
/// owners of large ones reuse them, so no thread waits for another.
///
/// Must be called before the first thread is started: an existing arena is not removed.
pub fn share_one_arena() {
    // SAFETY: only sets a limit that the allocator reads when a thread allocates memory for the first time. The
    // result shows whether it knows the parameter; an allocator that does not stays unchanged, and only uses more
    // memory.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Returns memory that was freed but is still kept to the system: for the time between two migrations, in which an
/// agent should be small.
pub fn release_free_memory() {
    // SAFETY: acquires the allocator's own locks, and touches no memory that is in use.
    unsafe { libc::malloc_trim(0) };
}
