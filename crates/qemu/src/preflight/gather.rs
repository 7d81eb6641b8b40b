//! Gathering of the facts for [`super::check`], on each host separately.

use super::facts::{self, HostFacts};
use super::files::{NeededFile, files_not_open, inspect_files};
use super::findings::major_minor;
use super::input::{DestinationFacts, QemuInfo, SourceFacts};
use super::open_files::OpenFiles;
use crate::command::{HostRules, RamPlan};
use crate::control;
use crate::describe::{Problem, VmDescription, describe};
use crate::find::QemuProcess;
use crate::qmp::{Qmp, QmpError};
use crate::queues;
use crate::ram::RamBlock;
use crate::restart_units;
use crate::tree;

/// Gathers the facts of the source: describes its guest. Its memory was located already, see
/// [`crate::ram::ram_blocks`].
///
/// # Errors
/// If the monitor fails.
pub fn source(
    qmp: &mut Qmp,
    process: &QemuProcess,
    ram_blocks: Vec<RamBlock>,
) -> Result<SourceFacts, QmpError> {
    let vm = describe(qmp, &process.start_command())?;
    // Without a list of descriptors no file is confirmed: each then counts as not open.
    let open = OpenFiles::of(process.pid).unwrap_or_default();
    Ok(SourceFacts {
        host: HostFacts::gather(),
        run_state: control::status(qmp)?.status,
        blocked_reasons: control::blocked_reasons(qmp)?,
        other_mappers: facts::other_mappers(process.pid, &ram_blocks),
        tracer_pid: facts::tracer_pid(process.pid),
        cpu_unavailable: control::cpu_unavailable_features(qmp)?,
        nested_guests: facts::nested_guests(process.pid),
        user: facts::user(process.pid),
        oom_score_adj: facts::oom_score_adj(process.pid),
        stuck_queues: queues::find_stuck(qmp)?,
        starts_again: restart_units::starts_again(process),
        files_not_open: files_not_open(&vm, &open),
        ram_blocks,
        vm,
    })
}

/// Returns interfaces and bridges that the guest's networks need on this host and that do not exist.
/// QEMU itself creates a tap that has a script.
pub fn missing_interfaces(vm: &VmDescription, rules: &HostRules) -> Vec<String> {
    let here = |name: &str, id: &str| {
        rules.tap.get(name).or_else(|| rules.tap.get(id)).cloned().unwrap_or(name.to_owned())
    };
    let wanted = vm.options.iter().filter_map(|option| {
        if !["netdev", "nic", "net"].contains(&option.name.as_str()) {
            return None;
        }
        let value = option.parse_value();
        let id = value.get("id").unwrap_or_default();
        match value.get("type").as_deref() {
            Some("tap") if value.get("script").as_deref() == Some("no") || value.get("fd").is_some() => {
                Some(here(&value.get("ifname").unwrap_or_default(), &id))
            }
            Some("bridge") => Some(here(&value.get("br").unwrap_or("br0".to_owned()), &id)),
            _ => None,
        }
    });
    // Not /sys/class/net, which shows the network namespace in which it was mounted.
    let table = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let there: Vec<&str> = table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
    wanted.filter(|name| !name.is_empty() && !there.contains(&name.as_str())).collect()
}

/// Returns the properties of a QEMU program. `qmp` is a monitor of one that was started without a
/// guest (`-machine none`), see [`crate::process`].
///
/// # Errors
/// If the monitor fails.
pub fn emulator(qmp: &mut Qmp) -> Result<QemuInfo, QmpError> {
    Ok(QemuInfo { version: qmp.version().to_string(), machine_types: control::machine_types(qmp)? })
}

/// Gathers the facts of a destination before a QEMU of this kind is started for the guest.
pub fn destination(
    emulator: &QemuInfo,
    vm: &VmDescription,
    files: &[NeededFile],
    rules: &HostRules,
    shared: &[String],
    problems: Vec<Problem>,
) -> DestinationFacts {
    let hugepage_bytes = match rules.ram {
        RamPlan::Memfd { hugepage_bytes } => hugepage_bytes,
        RamPlan::Anonymous => None,
    };
    DestinationFacts {
        host: HostFacts::gather(),
        user: rustix::process::geteuid().as_raw(),
        qemu_version: emulator.version.clone(),
        machine_types: emulator.machine_types.clone(),
        hugepage_bytes,
        disks: inspect_files(files, rules, shared),
        missing_interfaces: missing_interfaces(vm, rules),
        // The source reports the guest's own problems already.
        problems: problems.into_iter().filter(|problem| !vm.problems.contains(problem)).collect(),
        ram_blocks: None,
        device_differences: None,
        cpu_unavailable: None,
    }
}

/// Adds facts that only a QEMU that was started for the guest can report, before anything is loaded into it: its RAM
/// blocks, the differences of its devices from the source's, the CPU features that it cannot provide.
pub fn started(
    destination: &mut DestinationFacts,
    source: &SourceFacts,
    qmp: &mut Qmp,
    ram_blocks: &[RamBlock],
) -> Result<(), QmpError> {
    let same_version = major_minor(&source.vm.program.version) == major_minor(&qmp.version().to_string());
    let tree = tree::device_tree(qmp)?;
    destination.device_differences = Some(tree::differences(&source.vm.devices, &tree, same_version));
    destination.cpu_unavailable = Some(control::cpu_unavailable_features(qmp)?);
    destination.ram_blocks = Some(ram_blocks.to_vec());
    Ok(())
}
