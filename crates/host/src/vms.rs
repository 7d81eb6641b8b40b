//! VMs that the agent has adopted: adopting a running QEMU, starting one from a file, and describing them.

mod claim;
mod second_copy;

use std::path::Path;
use std::time::{Duration, Instant};

use proto::VmName;
use proto::message::{Finding, Severity};
use qemu::command::QMP_FILE;
use qemu::describe::VmDescription;
use qemu::find::{self, QemuProcess, Selector};
use qemu::qmp::Qmp;
use qemu::restart_units;
use qemu::vmfile::VmFile;
use tracee::Process;
use tracing::{info, warn};

use crate::Context;
use crate::find_by_monitor;
use crate::logs;
use crate::ownership;
use crate::preflight;
use api::progress::Standing;
use api::report::rfc3339;
use api::{AdoptRequest, Forgotten, Problem, ProblemKind, RunRequest, VmDetail, VmSummary};
pub use claim::claim;
use second_copy::SecondCopy;
use store::journal::{JournalError, MigrationRecord, State, VmRecord};

/// Timeout for a monitor's greeting when a VM is only queried.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the advice for a VM whose QEMU does not answer.
pub fn advice(vm: &VmName) -> String {
    format!(
        "if another program holds its QMP socket, close it there; if QEMU has ended, run `whimbrel vm forget \
         {vm}`"
    )
}

/// Adopts a running QEMU. Changes nothing in it.
pub fn adopt(context: &Context, request: &AdoptRequest) -> Result<(VmRecord, Vec<Finding>), Problem> {
    let selector = selector(request)?;
    let process = find::find(&selector).map_err(|error| {
        Problem::caused_by(
            ProblemKind::NotFound,
            &error,
            "`ps -C qemu-system-x86_64` lists running QEMUs; give --pid or --qmp",
        )
    })?;
    let mut qmp = connect(&process, &selector)?;
    let name = match &request.name {
        Some(name) => name.clone(),
        None => own_name(&process)?,
    };
    let _exclusive = context.names.exclusive(&name);
    record_vm(context, name, &process, &mut qmp, &request.allow_options)
}

/// Returns the name that a QEMU was given.
fn own_name(process: &QemuProcess) -> Result<VmName, Problem> {
    let name = process.name.clone().ok_or_else(|| {
        let error = format!("the QEMU of process {} has no name", process.pid);
        Problem::new(ProblemKind::BadRequest, error, "give it one with --as")
    })?;
    VmName::new(name).map_err(|error| {
        Problem::caused_by(ProblemKind::BadRequest, &error, "give it a different name with --as")
    })
}

fn selector(request: &AdoptRequest) -> Result<Selector, Problem> {
    let given = [
        request.pid.map(Selector::Pid),
        request.qmp.clone().map(Selector::Socket),
        request.qemu_name.clone().map(Selector::Name),
    ];
    let mut given = given.into_iter().flatten();
    match (given.next(), given.next()) {
        (Some(selector), None) => Ok(selector),
        _ => Err(Problem::new(
            ProblemKind::BadRequest,
            "it is not clear which QEMU is meant",
            "give exactly one of its process id, its QMP socket, or its name",
        )),
    }
}

/// Connects to the requested socket, or to the first that is free.
fn connect(process: &QemuProcess, selector: &Selector) -> Result<Qmp, Problem> {
    if let Selector::Socket(path) = selector {
        return find::connect_at(process.pid, path, QUERY_TIMEOUT).map_err(|error| {
            Problem::caused_by(ProblemKind::Unavailable, &error, "close the program that holds the socket")
        });
    }
    find::connect(process, QUERY_TIMEOUT)
        .map_err(|error| Problem::caused_by(ProblemKind::Unavailable, &error, ""))
}

/// Records a QEMU under a name, which the caller has locked.
fn record_vm(
    context: &Context,
    name: VmName,
    process: &QemuProcess,
    qmp: &mut Qmp,
    allowed: &[String],
) -> Result<(VmRecord, Vec<Finding>), Problem> {
    if let Some(same) = recorded_vm(context, &name, process)? {
        return Ok((same, Vec::new()));
    }
    check_no_open_migration(context, &name)?;
    let described = qemu::describe::describe(qmp, &process.start_command())
        .map_err(|error| Problem::caused_by(ProblemKind::Unavailable, &error, advice(&name)))?;
    let mut findings = preflight::description_findings(&described, allowed);
    // Adopting risks nothing: a blocker of a migration is only a warning here.
    for finding in &mut findings {
        finding.severity = finding.severity.min(Severity::Warning);
    }
    findings.extend(starts_again(process));
    let description = serde_json::to_value(&described)
        .map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log"))?;
    let record = VmRecord::new(
        name,
        description,
        (process.pid, process.start_time_ticks),
        &context.boot_id,
        qmp.path().to_owned(),
    );
    // Not locked while QEMU is queried, which may not answer. In between it may have been recorded under another name.
    let _adoption_lock = context.names.adoption_lock();
    if let Some(same) = recorded_vm(context, &record.vm, process)? {
        return Ok((same, Vec::new()));
    }
    context
        .journal
        .put_vm(&record)
        .map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log"))?;
    info!(vm = %record.vm, pid = record.pid, "adopted");
    Ok((record, findings))
}

/// Returns the agent's record of this QEMU under this name; none if neither is known here.
fn recorded_vm(context: &Context, name: &VmName, process: &QemuProcess) -> Result<Option<VmRecord>, Problem> {
    let known = context
        .journal
        .vms()
        .map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log"))?;
    if let Some(same) = known.iter().find(|known| same_process(context, known, process)) {
        if same.vm == *name {
            return Ok(Some(same.clone()));
        }
        let error = format!("process {} is already adopted, as {}", process.pid, same.vm);
        return Err(Problem::new(
            ProblemKind::Conflict,
            error,
            format!("run `whimbrel vm forget {}` first", same.vm),
        ));
    }
    if let Some(other) = known.iter().find(|known| known.vm == *name)
        && other.process(&context.boot_id).is_ok()
    {
        let error = format!("this host already has a VM named {name} (process {})", other.pid);
        return Err(Problem::new(ProblemKind::Conflict, error, "give this one another name with --as"));
    }
    Ok(None)
}

/// Refuses the name of a VM that is between two hosts, or in doubt: its record must not be replaced.
fn check_no_open_migration(context: &Context, name: &VmName) -> Result<(), Problem> {
    let latest = context.journal.latest(name);
    let latest =
        latest.map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log"))?;
    latest.filter(|migration| migration.open).map_or(Ok(()), |migration| {
        let error = format!("{name} is in a migration, {}", migration.id());
        Err(Problem::new(
            ProblemKind::Conflict,
            error,
            format!("wait until it ends, or see `whimbrel recover {name}`"),
        ))
    })
}

fn same_process(context: &Context, record: &VmRecord, process: &QemuProcess) -> bool {
    let this_boot = record.boot_id.is_empty() || record.boot_id == context.boot_id;
    this_boot && (record.pid, record.start_time_ticks) == (process.pid, process.start_time_ticks)
}

/// Returns findings about units that would start the VM a second time after it has moved away: a migration is refused
/// because of them.
fn starts_again(process: &QemuProcess) -> impl Iterator<Item = Finding> {
    restart_units::starts_again(process).into_iter().map(|risk| Finding {
        severity: Severity::Warning,
        code: risk.when.code().to_owned(),
        what: risk.what,
        advice: risk.advice,
    })
}

/// Starts a QEMU from a VM file and adopts it. After an error nothing remains.
pub fn run(context: &Context, request: &RunRequest) -> Result<(VmRecord, Vec<Finding>), Problem> {
    let file = VmFile::parse(&request.text, &request.path).map_err(|error| {
        Problem::caused_by(ProblemKind::BadRequest, &error, "docs/vm.example.toml has every key of a VM file")
    })?;
    let name = VmName::new(file.name.clone())
        .map_err(|error| Problem::caused_by(ProblemKind::BadRequest, &error, "change `name` in the file"))?;
    let _exclusive = context.names.exclusive(&name);
    let known = context.journal.vm(&name);
    let known =
        known.map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log"))?;
    if known.is_some_and(|known| known.process(&context.boot_id).is_ok()) {
        let error = format!("{name} is already running");
        return Err(Problem::new(ProblemKind::Conflict, error, format!("see `whimbrel vm show {name}`")));
    }
    check_no_open_migration(context, &name)?;
    let directory = context.config.run_dir.join("vms").join(name.as_str());
    check_no_qemu_runs(&name, &directory)?;
    let failed =
        |error: &dyn std::error::Error, advice: &str| Problem::caused_by(ProblemKind::Refused, error, advice);
    let fresh = !directory.exists();
    std::fs::create_dir_all(&directory)
        .map_err(|error| failed(&error, "check `run_dir` in the configuration"))?;
    let mut launch = file.launch(&directory);
    if launch.cwd.is_none() {
        launch.cwd = request.path.parent().map(Path::to_owned);
    }
    let remove_fresh = || {
        if fresh {
            remove(&directory);
        }
    };
    let second =
        SecondCopy::before_start(context, &name, &launch, request).inspect_err(|_| remove_fresh())?;
    if request.paused {
        launch.argv.push("-S".into());
    }
    let patience = Duration::from_millis(context.config.timeouts.qemu_start_ms);
    let started = qemu::process::start(&launch, Instant::now() + patience);
    let (started, mut qmp) = started.map_err(|error| {
        remove_fresh();
        failed(&error, "correct `args` or `qemu` in the file; the message quotes QEMU")
    })?;
    let taken = find::find(&Selector::Pid(started.pid))
        .map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log"))
        .and_then(|process| {
            second.after_start(&process)?;
            record_vm(context, name, &process, &mut qmp, &context.config.qemu.allow_options)
        });
    if taken.is_err() {
        if let Ok(process) = Process::open_exact(started.pid, started.start_time_ticks)
            && let Err(error) = process.signal(tracee::Signal::KILL)
        {
            warn!(pid = started.pid, %error, "cannot kill the QEMU that was started; it may still run");
        }
        remove_fresh();
    }
    taken
}

/// Checks that no forgotten QEMU of that name still runs with its monitor in the same directory, which must stay its
/// own.
fn check_no_qemu_runs(name: &VmName, directory: &Path) -> Result<(), Problem> {
    find_by_monitor(&directory.join(QMP_FILE)).map_or(Ok(()), |process| {
        let pid = process.pid();
        let error = format!(
            "a QEMU that was started here as {name} and then forgotten is still running (process {pid})"
        );
        let advice = format!("adopt it with `whimbrel vm adopt --pid {pid}`, or change `name` in the file");
        Err(Problem::new(ProblemKind::Conflict, error, advice))
    })
}

/// Forgets a VM; its QEMU goes on. Removes the agent's files for a QEMU that is gone, and releases the VM in the
/// ownership registry.
pub fn forget(context: &Context, record: &VmRecord) -> Result<Forgotten, Problem> {
    let failed =
        |error: JournalError| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log");
    let pid = record.process(&context.boot_id).is_ok().then_some(record.pid);
    context.journal.remove_vm(&record.vm).map_err(failed)?;
    remove_own_directory(context, record);
    let released = if pid.is_none() { ownership::release(context, &record.vm) } else { None };
    Ok(Forgotten { vm: record.vm.clone(), pid, released })
}

/// Removes the files that the agent made for a VM's QEMU that is gone.
pub fn remove_runtime_files(context: &Context, vm: &VmName) {
    if let Ok(Some(record)) = context.journal.vm(vm) {
        remove_own_directory(context, &record);
    }
}

fn remove_own_directory(context: &Context, record: &VmRecord) {
    let gone = record.process(&context.boot_id).is_err();
    if gone && let Some((directory, log_directory)) = logs::own_directories(&context.config, &record.qmp) {
        remove(&directory);
        logs::remove_empty(&log_directory);
    }
}

fn remove(directory: &Path) {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            warn!(directory = %directory.display(), %error, "cannot remove the directory");
        }
        _ => {}
    }
}

/// Returns a VM's entry in the list; `open` is its open migration, with the standing of that.
pub fn summary(
    context: &Context,
    record: &VmRecord,
    open: Option<(&MigrationRecord, Standing)>,
) -> VmSummary {
    let alive = record.process(&context.boot_id).is_ok();
    let mut summary = VmSummary {
        vm: record.vm.clone(),
        pid: alive.then_some(record.pid),
        state: "gone".to_owned(),
        ram_bytes: 0,
        qemu_version: String::new(),
        migration: open.map(|(open, _)| open.terms.migration.clone()),
    };
    if let Ok(described) = serde_json::from_value::<VmDescription>(record.description.clone()) {
        summary.ram_bytes = described.memory.base_bytes + described.memory.plugged_bytes;
        summary.qemu_version = described.program.version;
    }
    if let Some((open, standing)) = open {
        // Its monitor belongs to the migration now, and its QEMU may be held.
        state_between_hosts(open, standing).clone_into(&mut summary.state);
    } else if alive {
        let patience = QUERY_TIMEOUT.min(Duration::from_millis(context.config.timeouts.qmp_ms));
        let state = find::connect_at(record.pid, &record.qmp, patience).and_then(|mut qmp| {
            let version = qmp.version();
            summary.qemu_version = format!("{}.{}.{}", version.major, version.minor, version.micro);
            qemu::control::status(&mut qmp)
        });
        summary.state = state.map_or_else(|_| "unreachable".to_owned(), |state| state.status);
    }
    summary
}

/// Returns the state of a VM that is between two hosts.
fn state_between_hosts(record: &MigrationRecord, standing: Standing) -> &'static str {
    match (&record.state, standing) {
        (_, Standing::InDoubt) => "in-doubt",
        (State::Source(_), _) => "leaving",
        (State::Destination(_), _) => "arriving",
    }
}

/// Returns all details of a VM. Its description is made anew if its monitor is free.
pub fn detail(context: &Context, record: &VmRecord, summary: VmSummary) -> VmDetail {
    let mut detail = VmDetail {
        qmp: Some(record.qmp.clone()),
        adopted: rfc3339(record.adopted_unix_ms),
        ram_kind: String::new(),
        description: record.description.clone(),
        needs_hosts: Vec::new(),
        missing_pages: None,
        findings: Vec::new(),
        summary,
    };
    if detail.summary.migration.is_some() || detail.summary.pid.is_none() {
        return detail;
    }
    let described = (|| {
        let process = find::find(&Selector::Pid(record.pid)).ok()?;
        let mut qmp = find::connect_at(record.pid, &record.qmp, QUERY_TIMEOUT).ok()?;
        let described = qemu::describe::describe(&mut qmp, &process.start_command()).ok()?;
        let blocks = qemu::ram::ram_blocks(&mut qmp, record.pid).ok()?;
        Some((process, described, blocks))
    })();
    if let Some((process, described, blocks)) = described {
        detail.findings = preflight::description_findings(&described, &context.config.qemu.allow_options);
        detail.findings.extend(starts_again(&process));
        detail.ram_kind =
            blocks.iter().max_by_key(|block| block.used_bytes).map(crate::ram::kind).unwrap_or_default();
        if let Ok(value) = serde_json::to_value(&described) {
            detail.description = value;
        }
    }
    detail
}

/// Returns all details of an arriving VM, which has no record yet.
pub fn arriving_detail(context: &Context, record: &MigrationRecord, standing: Standing) -> VmDetail {
    let proposal = context.journal.proposal(record.id()).ok().flatten();
    VmDetail {
        summary: arriving(record, standing),
        qmp: None,
        adopted: rfc3339(record.created_unix_ms),
        ram_kind: String::new(),
        description: proposal.map(|proposal| proposal.description).unwrap_or_default(),
        needs_hosts: Vec::new(),
        missing_pages: None,
        findings: Vec::new(),
    }
}

/// Returns an arriving VM's entry in the list.
pub fn arriving(record: &MigrationRecord, standing: Standing) -> VmSummary {
    VmSummary {
        vm: record.id().vm.clone(),
        pid: None,
        state: state_between_hosts(record, standing).to_owned(),
        ram_bytes: 0,
        qemu_version: String::new(),
        migration: Some(record.id().clone()),
    }
}

#[cfg(test)]
mod tests {
    use engine::handover::source::SourceState;

    use super::*;
    use crate::testing::{PATIENCE, Qemu, World, id, terms, vm};

    #[test]
    fn the_name_of_a_vm_in_migration_is_not_taken_by_another() {
        let world = World::new();
        check_no_open_migration(&world.context, &vm()).unwrap();
        world.journalled(&terms("a", "b"), State::Source(SourceState::Prepared { run: true }));
        let problem = check_no_open_migration(&world.context, &vm()).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Conflict);
        assert!(problem.error.contains("web is in a migration, web#1"), "{}", problem.error);
        world.context.journal.close(&id(1)).unwrap();
        check_no_open_migration(&world.context, &vm()).unwrap();
    }
    #[test]
    fn a_silent_qemu_does_not_delay_the_adoption_of_others() {
        let world = World::new();
        let qemu = Qemu::start(world.folder.path());
        let mut qmp = Qmp::connect(qemu.path(), PATIENCE * 2).unwrap();
        qemu.monitor().mute = true;
        let (pid, start_time_ticks) = qemu.process();
        let process = QemuProcess {
            pid,
            start_time_ticks,
            binary: "/bin/sleep".into(),
            arguments: vec![],
            working_dir: "/".into(),
            name: None,
            monitors: vec![],
            unit: None,
            unit_of_user: None,
        };
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| record_vm(&world.context, vm(), &process, &mut qmp, &[]));
            crate::testing::eventually("it is asked", || !qemu.monitor().received.is_empty());
            let (free, freed) = std::sync::mpsc::channel();
            let names = &world.context.names;
            scope.spawn(move || {
                let _adoption_lock = names.adoption_lock();
                free.send(())
            });
            let is_free = freed.recv_timeout(PATIENCE).is_ok();
            qemu.close_connections();
            assert!(asking.join().unwrap().is_err());
            assert!(is_free, "another could be entered meanwhile");
        });
    }
}
