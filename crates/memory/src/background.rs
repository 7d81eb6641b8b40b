//! Threads that give way to guests.

/// By how much less the threads of the data plane get of a processor that is wanted by others: a third of an equal share.
/// What is moved in the background is not to be felt by the guests that run on the host, the moving one first of all.
const NICE: i32 = 5;

/// From here on this thread gives way to others.
pub(crate) fn give_way() {
    // Without leave to do so it works on as before.
    let _ = rustix::process::setpriority_process(None, NICE);
}
