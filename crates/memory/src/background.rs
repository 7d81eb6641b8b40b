//! Threads that give way to guests.

/// By how much less the threads of the data plane get of a processor that is wanted by others: a third of an equal share.
/// What is moved in the background is not to be felt by the guests that run on the host, the moving one first of all.
const NICE: i32 = 5;

/// From here on this thread, and only it, gives way to others; more than the agent does already, where that was told to.
pub(crate) fn give_way() {
    // Without leave to do so it works on as before.
    let _ = rustix::process::nice(NICE);
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[test]
    fn one_thread_gives_way_and_the_others_do_not() {
        let before = getpriority_process(None).unwrap();
        let there = std::thread::spawn(|| {
            give_way();
            getpriority_process(None).unwrap()
        });
        assert_eq!(there.join().unwrap(), (before + NICE).min(19));
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
