//! Limits on the processor time of another process's threads, by the kernel's own control groups. Needs root.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod guest;
mod version_two;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Victim;
use whimbrel_tracee::{CpuLimit, CpuLimitError, Process};

/// Returns the group of a thread, as the kernel reports it.
fn group_of(process: &Process, thread: u32) -> String {
    fs::read_to_string(process.path(&format!("task/{thread}/cgroup"))).unwrap()
}

/// Returns the directory of our group of a thread, of either version.
fn directory(process: &Process, thread: u32) -> PathBuf {
    let text = group_of(process, thread);
    let group = text.lines().find(|line| line.contains("/whimbrel-cpu-")).unwrap();
    let group = group.splitn(3, ':').nth(2).unwrap();
    let roots = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];
    roots.map(|root| PathBuf::from(format!("{root}{group}"))).into_iter().find(|path| path.exists()).unwrap()
}

/// Returns how many times the kernel has throttled the group's threads.
fn waits(group: &Path) -> u64 {
    let counts = fs::read_to_string(group.join("cpu.stat")).unwrap();
    counts.lines().find_map(|line| line.strip_prefix("nr_throttled ")?.parse().ok()).unwrap()
}

/// Starts a victim with threads that tolerate any slowness.
fn victim() -> Victim {
    Victim::start(&["general-registers", "nanosleep", "pipe", "plain-calls"])
}

/// Starts a victim whose threads are limited; none if no control group limits processors.
fn limited() -> Option<(Victim, Vec<u32>, CpuLimit)> {
    let victim = victim();
    let main = victim.process.pid();
    let threads: Vec<u32> = victim.threads.values().copied().filter(|thread| *thread != main).collect();
    match CpuLimit::begin(&victim.process, &threads) {
        Ok(limit) => Some((victim, threads, limit)),
        Err(CpuLimitError::Unsupported) if !guest::is_this_one() => {
            println!("no control group limits processors here");
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn threads_are_limited_and_put_back_where_they_were() {
    let Some((mut victim, threads, limit)) = limited() else { return };
    let main = victim.process.pid();
    let before = group_of(&victim.process, main);
    for thread in &threads {
        assert!(group_of(&victim.process, *thread).contains("/whimbrel-cpu-"));
    }
    assert_eq!(group_of(&victim.process, main), before, "the others are where they were");
    for us_per_s in [Some(100_000), Some(1), Some(64_000_000), None] {
        limit.set(us_per_s).unwrap();
        victim.assert_goes_on();
    }
    let group = directory(&victim.process, threads[0]);
    if group.join("cpu.cfs_quota_us").exists() {
        let quota = || fs::read_to_string(group.join("cpu.cfs_quota_us")).unwrap();
        assert_eq!(fs::read_to_string(group.join("cpu.cfs_period_us")).unwrap(), "24000\n");
        assert_eq!(quota(), "-1\n");
        limit.set(Some(250_000)).unwrap();
        assert_eq!(quota(), "6000\n");
        limit.set(Some(0)).unwrap();
        assert_eq!(quota(), "1000\n");
    }
    let groups: BTreeSet<_> = threads.iter().map(|thread| directory(&victim.process, *thread)).collect();
    assert_eq!(groups.len(), threads.len(), "each is held by itself");
    drop(limit);
    for thread in &threads {
        assert_eq!(group_of(&victim.process, *thread), before);
    }
    assert!(groups.iter().all(|group| !group.exists()));
    assert!(!CpuLimit::end_leftover(&victim.process).unwrap());
    victim.assert_goes_on();
    victim.assert_well();
}

#[test]
fn limits_of_a_dead_process_are_ended() {
    let Some((mut victim, threads, limit)) = limited() else { return };
    limit.set(Some(50_000)).unwrap();
    let group = directory(&victim.process, threads[0]);
    // As if this process had been killed; and as if that had been before a thread was moved to its group.
    std::mem::forget(limit);
    let name = group.file_name().unwrap().to_str().unwrap();
    let empty = group.with_file_name(name.replace(&format!("-{}", threads[0]), "-1"));
    fs::create_dir(&empty).unwrap();
    assert!(CpuLimit::end_leftover(&victim.process).unwrap());
    for thread in &threads {
        assert!(!group_of(&victim.process, *thread).contains("whimbrel"));
    }
    assert!(!group.exists() && !empty.exists());
    victim.assert_goes_on();
    victim.assert_well();
}

/// The next agent and the one that waited for the end of the last one may do so at the same time.
#[test]
fn two_can_end_leftover_limits_at_once() {
    // To start a victim needs seconds if there is only an emulated processor.
    let times = if guest::is_this_one() { 3 } else { 20 };
    for _ in 0..times {
        let Some((mut victim, threads, limit)) = limited() else { return };
        limit.set(Some(50_000)).unwrap();
        let group = directory(&victim.process, threads[0]);
        std::mem::forget(limit);
        let (process, begin) = (&victim.process, std::sync::Barrier::new(2));
        let end = || {
            begin.wait();
            CpuLimit::end_leftover(process).unwrap()
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(end);
            }
        });
        assert!(!group.exists());
        victim.assert_goes_on();
    }
}

/// A group of another program, with its own limit on the threads in it; removed when it has no threads any more.
struct Others(PathBuf);

impl Drop for Others {
    fn drop(&mut self) {
        fs::remove_dir(&self.0).unwrap();
    }
}

/// The limit of another program applies as before, while ours is set and after it is lifted.
#[test]
fn the_limit_of_another_program_stays() {
    let Some((mut victim, threads, limit)) = limited() else { return };
    let group = directory(&victim.process, threads[0]);
    drop(limit);
    let Some(home) = group.parent().filter(|home| home.join("cpu.cfs_quota_us").exists()) else {
        // Groups of version two have a test of their own.
        return;
    };
    let others = Others(home.join(format!("others-{}", victim.process.pid())));
    fs::create_dir(&others.0).unwrap();
    let quota = || fs::read_to_string(others.0.join("cpu.cfs_quota_us")).unwrap();
    fs::write(others.0.join("cpu.cfs_quota_us"), "70000").unwrap();
    for thread in &threads {
        fs::write(others.0.join("tasks"), thread.to_string()).unwrap();
    }
    let before = group_of(&victim.process, threads[0]);
    let limit = CpuLimit::begin(&victim.process, &threads).unwrap();
    limit.set(Some(250_000)).unwrap();
    assert_eq!(quota(), "70000\n");
    std::mem::forget(limit);
    assert!(CpuLimit::end_leftover(&victim.process).unwrap());
    assert_eq!(quota(), "70000\n");
    for thread in &threads {
        assert_eq!(group_of(&victim.process, *thread), before);
    }
    victim.assert_goes_on();
    for thread in &threads {
        fs::write(home.join("tasks"), thread.to_string()).unwrap();
    }
    victim.assert_well();
}

/// The process ends while it is limited: nothing remains.
#[test]
fn a_group_is_removed_with_its_process() {
    let Some((victim, threads, limit)) = limited() else { return };
    let group = directory(&victim.process, threads[0]);
    drop(victim);
    drop(limit);
    assert!(!group.exists());
}

/// Threads that cannot be limited are in their original groups.
#[test]
fn a_missing_thread_is_an_error_that_changes_nothing() {
    let Some((victim, threads, limit)) = limited() else { return };
    drop(limit);
    let with_missing_thread = [threads[0], u32::MAX - 1];
    assert!(CpuLimit::begin(&victim.process, &with_missing_thread).is_err());
    assert!(!group_of(&victim.process, threads[0]).contains("whimbrel"));
    victim.assert_well();
}

/// A process that does nothing but use its processor has to wait.
#[test]
fn threads_above_their_limit_wait() {
    let mut busy = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let process = Process::open(busy.id()).unwrap();
    match CpuLimit::begin(&process, &[busy.id()]) {
        Ok(limit) => {
            let group = directory(&process, busy.id());
            limit.set(Some(100_000)).unwrap();
            while waits(&group) < 5 {
                std::thread::yield_now();
            }
        }
        Err(CpuLimitError::Unsupported) if !guest::is_this_one() => {
            println!("no control group limits processors here");
        }
        Err(error) => panic!("{error:?}"),
    }
    busy.kill().unwrap();
    busy.wait().unwrap();
}
