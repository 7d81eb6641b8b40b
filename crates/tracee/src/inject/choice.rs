//! Choice of the thread that a short stop disturbs least.

use std::fs;

use nix::libc;

use super::wire::MAX_THREADS;
use crate::{Process, ProcessError};

/// Returns the threads of a process, ordered by how little a stop disturbs them.
pub(super) fn best_threads(process: &Process) -> Result<Vec<i32>, ProcessError> {
    let mut threads: Vec<(u8, i32)> = Vec::new();
    for thread in process.threads()? {
        let rank = rank(process, thread);
        threads.extend(rank.map(|rank| (rank, thread as i32)));
    }
    // Stable: the main thread stays first among its equals.
    threads.sort_by_key(|&(rank, _)| rank);
    threads.truncate(MAX_THREADS);
    Ok(threads.into_iter().map(|(_, thread)| thread).collect())
}

/// Ranks the disturbance of a thread by a stop: 0 none, 1 it may see `EINTR`, 2 it may not stop.
/// `None`: it has ended, or belongs to the kernel.
fn rank(process: &Process, thread: u32) -> Option<u8> {
    let stat = fs::read_to_string(process.path(&format!("task/{thread}/stat"))).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    if is_kernel_thread(fields) {
        return None;
    }
    match fields.trim_start().chars().next()? {
        'Z' | 'X' => return None,
        'D' => return Some(2),
        _ => {}
    }
    let call = fs::read_to_string(process.path(&format!("task/{thread}/syscall"))).unwrap_or_default();
    let number = call.split(' ').next().and_then(|number| number.parse::<i64>().ok());
    Some(u8::from(number.is_some_and(|number| NEVER_RESTARTED.contains(&number))))
}

/// Returns true if a thread is the kernel's own, which serves a process (vhost, `io_uring`) and never returns to it:
/// `PF_IO_WORKER`, `PF_USER_WORKER` or `PF_KTHREAD`. `fields` are those of its `stat` from its state on.
pub(super) fn is_kernel_thread(fields: &str) -> bool {
    const KERNEL_FLAGS: u64 = 0x10 | 0x4000 | 0x20_0000;
    let flags = fields.split_whitespace().nth(6).and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & KERNEL_FLAGS != 0)
}

/// Calls that return `EINTR` after every stop, signal(7); those that wait on sockets do so only if
/// the socket has a timeout.
const NEVER_RESTARTED: [i64; 14] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_io_getevents,
    // io_pgetevents
    333,
    libc::SYS_io_uring_enter,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    // KVM_RUN; QEMU's virtual processors expect EINTR, but the main thread is the better choice.
    libc::SYS_ioctl,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_the_kernel_are_not_chosen() {
        // A virtual CPU's, and vhost's worker in Linux 6.12.
        assert!(!is_kernel_thread(" S 1 700 700 0 -1 4194368 0 0 0 0"));
        for flags in [0x40_4050_u64, 0x10, 0x20_8040] {
            assert!(is_kernel_thread(&format!(" S 1 700 700 0 -1 {flags} 0 0 0 0")), "{flags:x}");
        }
        let me = Process::open(std::process::id()).unwrap();
        assert!(!best_threads(&me).unwrap().is_empty());
    }
}
