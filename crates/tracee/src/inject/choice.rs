//! Which thread is disturbed least by being stopped for a moment.

use std::fs;

use nix::libc;

use super::wire::MAX_THREADS;
use crate::{Process, ProcessError};

/// The threads of a process, those first that a stop disturbs least.
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

/// How much a stop would disturb a thread: 0 not at all, 1 it may see `EINTR`, 2 it may not stop.
/// `None`: it has ended.
fn rank(process: &Process, thread: u32) -> Option<u8> {
    let stat = fs::read_to_string(process.path(&format!("task/{thread}/stat"))).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    match fields.trim_start().chars().next()? {
        'Z' | 'X' => return None,
        'D' => return Some(2),
        _ => {}
    }
    let call = fs::read_to_string(process.path(&format!("task/{thread}/syscall"))).unwrap_or_default();
    let number = call.split(' ').next().and_then(|number| number.parse::<i64>().ok());
    Some(u8::from(number.is_some_and(|number| NEVER_RESTARTED.contains(&number))))
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
