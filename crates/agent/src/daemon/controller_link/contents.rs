//! Contents of this host: everything that keeps it from being empty. What cannot be read is not taken for absent.

mod services;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::evacuation::{HostContents, QemuOnHost};
use engine::handover::source::SourceState;
use qemu::find::{QemuProcess, QemuSurvey};
use store::journal::{JournalError, MigrationRecord, State, VmRecord};

use api::progress::{Phase, Standing};

use crate::daemon::Daemon;

/// Time for which the processes are known that run virtual machines and are no QEMUs: all descriptors of all processes
/// are read to find them.
const KVM_AGE: Duration = Duration::from_secs(5);

/// Returns the contents of this host. With `namespaces_are_hosts`, only processes in the network namespace of this agent
/// are on this host.
pub(super) fn contents(daemon: &Arc<Daemon>, namespaces_are_hosts: bool) -> HostContents {
    let context = &daemon.context;
    let mut unknown = Vec::new();
    let services = services::services(context.config.role, namespaces_are_hosts, &mut unknown);
    let mut contents = HostContents {
        host: context.config.host.to_string(),
        qemus: Vec::new(),
        pages_to_serve: Vec::new(),
        held: Vec::new(),
        in_doubt: Vec::new(),
        redirections: Vec::new(),
        arrivals: Vec::new(),
        services,
        unknown,
    };
    if let Err(error) = add_migrations(daemon, &mut contents) {
        contents.unknown.push(format!("migrations: {}", crate::chain(&error)));
    }
    match context.journal.vms() {
        Ok(vms) => {
            let is_here = |pid: u32| !namespaces_are_hosts || is_in_own_namespace(pid);
            let lives = |vm: &VmRecord| vm.process(&context.boot_id).is_ok();
            match qemu::find::survey() {
                Ok(survey) => add_qemus(&mut contents, survey, &vms, is_here, lives),
                Err(error) => contents.unknown.push(format!("QEMUs: {error}")),
            }
            let mut others = other_kvm_processes();
            others.retain(|pid| is_here(*pid) && !contents.qemus.iter().any(|qemu| qemu.pid == *pid));
            contents.qemus.extend(others.into_iter().map(|pid| QemuOnHost { vm: None, pid }));
        }
        Err(error) => contents.unknown.push(format!("QEMUs: {}", crate::chain(&error))),
    }
    match context.redirections.records() {
        Ok(records) => {
            contents.redirections = records.into_iter().map(|record| record.redirection.migration).collect();
        }
        Err(error) => contents.unknown.push(format!("redirections: {}", crate::chain(&error))),
    }
    contents
}

/// Adds the QEMUs that were found, and those of the journal's VMs that live and were not found.
fn add_qemus(
    contents: &mut HostContents,
    survey: QemuSurvey,
    vms: &[VmRecord],
    is_here: impl Fn(u32) -> bool,
    lives: impl Fn(&VmRecord) -> bool,
) {
    let QemuSurvey { found, unknown } = survey;
    let found: Vec<_> = found.into_iter().filter(|process| is_here(process.pid)).collect();
    let is_of = |vm: &VmRecord, process: &QemuProcess| {
        (vm.pid, vm.start_time_ticks) == (process.pid, process.start_time_ticks)
    };
    contents.qemus.extend(found.iter().map(|process| {
        let vm = vms.iter().find(|vm| is_of(vm, process));
        QemuOnHost { vm: vm.map(|vm| vm.vm.to_string()), pid: process.pid }
    }));
    let is_found = |vm: &VmRecord| found.iter().any(|process| is_of(vm, process));
    let missing = vms.iter().filter(|vm| !is_found(vm) && lives(vm));
    contents.qemus.extend(missing.map(|vm| QemuOnHost { vm: Some(vm.vm.to_string()), pid: vm.pid }));
    // One for all: the list of processes changes all the time.
    if let Some((_, error)) = unknown.iter().find(|(pid, _)| is_here(*pid)) {
        contents.unknown.push(format!("QEMUs: the agent may not examine all processes: {error}"));
    }
}

/// Returns the processes that run virtual machines by KVM and are no QEMUs.
fn other_kvm_processes() -> Vec<u32> {
    static LAST: Mutex<Option<(Instant, Vec<u32>)>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let found = match last.take().filter(|(at, _)| at.elapsed() < KVM_AGE) {
        Some(recent) => recent,
        None => (Instant::now(), qemu::find::other_kvm_processes()),
    };
    let pids = found.1.clone();
    *last = Some(found);
    pids
}

/// Adds what open migrations leave on this host.
fn add_migrations(daemon: &Arc<Daemon>, contents: &mut HostContents) -> Result<(), JournalError> {
    for record in daemon.context.journal.open_migrations()? {
        let vm = record.id().vm.to_string();
        if daemon.standing_of(&record) == Standing::InDoubt {
            contents.in_doubt.push(vm);
            continue;
        }
        match &record.state {
            State::Source(SourceState::Committed { .. }) if serves_pages(daemon, &record) => {
                contents.pages_to_serve.push(vm);
            }
            State::Source(
                SourceState::Committed { .. } | SourceState::QemuLost { .. } | SourceState::Reclaiming { .. },
            ) => contents.held.push(vm),
            State::Source(_) => {}
            State::Destination(state) if state.is_final() => {}
            State::Destination(_) => contents.arrivals.push(vm),
        }
    }
    Ok(())
}

/// Returns true if the guest runs at the destination, and pages of it are still here.
fn serves_pages(daemon: &Arc<Daemon>, record: &MigrationRecord) -> bool {
    let has_run = matches!(record.state, State::Source(SourceState::Committed { has_run: true, .. }));
    let driven = daemon.drivers().get(record.id()).map(|driven| driven.publisher.now());
    has_run || driven.is_some_and(|progress| progress.phase == Phase::PostCopy)
}

/// Returns true if a process is in the network namespace of this agent.
fn is_in_own_namespace(pid: u32) -> bool {
    let id = |path: String| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    id(format!("/proc/{pid}/ns/net")) == id("/proc/self/ns/net".to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use host::testing::{Qemu, World};

    use super::*;

    fn process(pid: u32) -> QemuProcess {
        QemuProcess {
            pid,
            start_time_ticks: 1,
            binary: PathBuf::new(),
            arguments: Vec::new(),
            working_dir: PathBuf::new(),
            name: None,
            monitors: Vec::new(),
            unit: None,
            unit_of_user: None,
        }
    }

    #[test]
    fn a_vm_whose_process_lives_remains() {
        let world = World::new();
        let qemu = Qemu::start(&world.folder.path().join("vm"));
        let vms = [qemu.record()];
        for (lives, expected) in [(true, 2), (false, 1)] {
            let mut contents = HostContents::of_an_empty_host("a");
            let survey = QemuSurvey { found: vec![process(7)], unknown: Vec::new() };
            add_qemus(&mut contents, survey, &vms, |_| true, |_| lives);
            assert_eq!(contents.qemus.len(), expected);
            assert_eq!(contents.qemus[0], QemuOnHost { vm: None, pid: 7 });
        }
    }

    #[test]
    fn a_process_that_cannot_be_examined_may_be_a_qemu() {
        let denied = || (7, std::io::Error::from(std::io::ErrorKind::PermissionDenied));
        for (is_here, expected) in [(true, 1), (false, 0)] {
            let mut contents = HostContents::of_an_empty_host("a");
            let survey = QemuSurvey { found: Vec::new(), unknown: vec![denied()] };
            add_qemus(&mut contents, survey, &[], |_| is_here, |_| false);
            assert_eq!(contents.unknown.len(), expected);
            assert_eq!(contents.is_empty(), !is_here);
        }
    }

    #[test]
    fn this_process_is_in_its_own_namespace() {
        assert!(is_in_own_namespace(std::process::id()));
        assert!(!is_in_own_namespace(u32::MAX));
    }
}
