//! Groups of version two, in the kernel of a guest.

use std::fs;
use std::path::{Path, PathBuf};

use whimbrel_tracee::{CpuLimit, CpuLimitError};

use crate::{directory, group_of, guest, limited, victim};

/// Returns the content of a group's file.
fn read_file(group: &Path, file: &str) -> String {
    fs::read_to_string(group.join(file)).unwrap().trim_end().to_owned()
}

/// Returns the group of the victims; none outside the guest.
fn home() -> Option<PathBuf> {
    guest::is_this_one().then(|| PathBuf::from(guest::SLICE).join("vm.scope"))
}

fn write_file(group: &Path, file: &str, text: &str) {
    fs::write(group.join(file), text).unwrap();
}

/// A group of another program, removed when it has no threads any more.
struct Others(PathBuf);

impl Others {
    fn make(path: PathBuf) -> Self {
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        fs::remove_dir(&self.0).unwrap();
    }
}

/// The group of the victim is restored when the limit ends.
#[test]
fn the_group_is_as_it_was() {
    let Some(home) = home() else { return };
    let looks = || ["cgroup.type", "cgroup.subtree_control", "cpu.max"].map(|file| read_file(&home, file));
    write_file(&home, "cpu.max", "70000 100000");
    let before = looks();
    assert_eq!(before, ["domain", "", "70000 100000"]);
    let (mut victim, threads, limit) = limited().unwrap();
    let group = directory(&victim.process, threads[0]);
    assert_eq!((group.parent(), read_file(&group, "cpu.max").as_str()), (Some(&*home), "max 100000"));
    limit.set(Some(250_000)).unwrap();
    assert_eq!(read_file(&group, "cpu.max"), "6000 24000");
    // The limit of the group itself applies as well.
    limit.set(Some(64_000_000)).unwrap();
    assert_eq!(read_file(&group, "cpu.max"), "1536000 24000");
    assert_eq!(looks(), ["domain threaded", "cpu", "70000 100000"]);
    victim.assert_goes_on();
    drop(limit);
    assert_eq!(looks(), before);
    write_file(&home, "cpu.max", "max");
    victim.assert_well();
}

/// Two guests in one group: the last of them disables the controller that the first has enabled.
#[test]
fn the_end_of_a_limit_keeps_that_of_another_guest() {
    let Some(home) = home() else { return };
    let (mut first, _, first_limit) = limited().unwrap();
    let (mut second, threads, second_limit) = limited().unwrap();
    let group = directory(&second.process, threads[0]);
    second_limit.set(Some(250_000)).unwrap();
    drop(first_limit);
    assert_eq!(read_file(&home, "cgroup.subtree_control"), "cpu");
    assert_eq!(read_file(&group, "cpu.max"), "6000 24000");
    drop(second_limit);
    assert_eq!(read_file(&home, "cgroup.subtree_control"), "");
    for victim in [&mut first, &mut second] {
        victim.assert_goes_on();
    }
}

/// Groups as with libvirt: each thread in a group of its own, with its own limit.
#[test]
fn threads_in_groups_of_their_own_go_back_to_them() {
    let Some(home) = home() else { return };
    let mut victim = victim();
    let threads: Vec<u32> = victim.threads.values().copied().take(2).collect();
    let groups: Vec<Others> =
        threads.iter().map(|thread| Others::make(home.join(format!("vcpu{thread}")))).collect();
    for group in &groups {
        write_file(&group.0, "cgroup.type", "threaded");
    }
    write_file(&home, "cgroup.subtree_control", "+cpu");
    for (group, thread) in groups.iter().zip(&threads) {
        write_file(&group.0, "cpu.max", "70000 100000");
        write_file(&group.0, "cgroup.threads", &thread.to_string());
    }
    let before: Vec<_> = threads.iter().map(|thread| group_of(&victim.process, *thread)).collect();
    let limit = CpuLimit::begin(&victim.process, &threads).unwrap();
    limit.set(Some(250_000)).unwrap();
    for (group, thread) in groups.iter().zip(&threads) {
        let limited = directory(&victim.process, *thread);
        assert_eq!(
            (limited.parent(), read_file(&limited, "cpu.max").as_str()),
            (Some(&*group.0), "6000 24000")
        );
    }
    victim.assert_goes_on();
    // As if this process had been killed.
    std::mem::forget(limit);
    assert!(CpuLimit::end_leftover(&victim.process).unwrap());
    let after: Vec<_> = threads.iter().map(|thread| group_of(&victim.process, *thread)).collect();
    assert_eq!(after, before);
    for group in &groups {
        assert_eq!(read_file(&group.0, "cpu.max"), "70000 100000");
        assert_eq!(read_file(&group.0, "cgroup.subtree_control"), "");
    }
    // The controller was enabled before.
    assert_eq!(read_file(&home, "cgroup.subtree_control"), "cpu");
    for thread in &threads {
        write_file(&home, "cgroup.threads", &thread.to_string());
    }
    victim.assert_well();
    drop(groups);
    write_file(&home, "cgroup.subtree_control", "-cpu");
}

/// The error names the group if the groups above do not delegate the controller, as without a `CPUWeight=`.
#[test]
fn a_group_without_the_controller_is_named() {
    if !guest::is_this_one() {
        return;
    }
    let slice = Others::make(PathBuf::from(guest::ROOT).join("others.slice"));
    let scope = Others::make(slice.0.join("vm.scope"));
    let victim = victim();
    let threads: Vec<u32> = victim.threads.values().copied().collect();
    write_file(&scope.0, "cgroup.procs", &victim.process.pid().to_string());
    let before = group_of(&victim.process, threads[0]);
    match CpuLimit::begin(&victim.process, &threads) {
        Err(CpuLimitError::NoController { group }) => assert_eq!(group, scope.0),
        other => panic!("{other:?}"),
    }
    assert_eq!(group_of(&victim.process, threads[0]), before);
    drop(victim);
    drop(scope);
    drop(slice);
}
