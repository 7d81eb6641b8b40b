//! Checks, by subject.

use super::devices::devices;
use super::findings::{Findings, Severity, add, major_minor};
use super::input::{DestinationFacts, SourceFacts};
use crate::describe::Problem;
use crate::options::Value;
use crate::queues;
use crate::ram::RamBlock;
use crate::restart_units::RestartTime;
use crate::tree::Device;

/// Memory in bytes that a QEMU needs besides the guest's memory: its code, caches, the devices'
/// buffers.
const OVERHEAD_BYTES: u64 = 256 << 20;
/// First kernel with asynchronous write protection and `PAGEMAP_SCAN`.
const MIN_KERNEL: (u64, u64) = (6, 7);
/// Size of a normal page in bytes.
const PAGE_BYTES: u64 = 4096;
/// Oldest QEMU with which this was tested.
const MIN_TESTED_QEMU: (u64, u64) = (7, 2);

use Severity::{Blocker, Info, Warning};

/// Reports devices and options that cannot be described, or not be built again.
pub(super) fn problems(problems: &[Problem], findings: &mut Findings) {
    for problem in problems {
        add(findings, Blocker, &problem.code, &problem.what, &problem.advice);
    }
}

/// Checks the guest itself: parts that cannot be moved, and its run state.
pub(super) fn guest(source: &SourceFacts, findings: &mut Findings) {
    for reason in &source.blocked_reasons {
        add(
            findings,
            Blocker,
            "qemu-refuses",
            format!("QEMU itself refuses to migrate this guest: {reason}"),
            "remove the device or feature that QEMU names",
        );
    }
    match source.run_state.as_str() {
        "running" => {}
        "paused" | "prelaunch" => add(
            findings,
            Info,
            "paused",
            "the guest is paused",
            "nothing; it stays paused on the destination until it is resumed (`cont`)",
        ),
        state => add(findings, Blocker, "run-state", not_moved_in(state), RUN_STATE_REMEDY),
    }
    if source.tracer_pid != 0 {
        add(
            findings,
            Blocker,
            "debugger",
            format!("QEMU is being debugged by process {}", source.tracer_pid),
            "detach the debugger (gdb, strace)",
        );
    }
    if !source.stuck_queues.is_empty() {
        add(
            findings,
            Warning,
            "disk-stuck",
            format!(
                "the guest waits for disk requests that are already complete ({}): its disk I/O is stuck, \
                 with or without a migration",
                source.stuck_queues.join(", ")
            ),
            "restart the guest; under emulation it needs a second possible processor (-smp 1,maxcpus=2)",
        );
    }
    let is_virtio = |device: &Device| device.driver.starts_with("virtio-");
    if queues::can_become_stuck(&source.vm.machine.accelerator, &source.vm.options)
        && source.vm.devices.devices.iter().any(is_virtio)
    {
        add(
            findings,
            Warning,
            "virtio-emulated",
            "QEMU emulates the guest's only processor without memory barriers for its devices: its virtio \
             drivers may miss an interrupt and hang, and a migration makes that more likely",
            "start it with a second possible processor next time (-smp 1,maxcpus=2), or with KVM",
        );
    }
    for risk in &source.starts_again {
        let severity = if risk.when == RestartTime::Unknown { Warning } else { Blocker };
        add(findings, severity, risk.when.code(), &risk.what, &risk.advice);
    }
    match source.nested_guests {
        Some(true) => add(
            findings,
            Blocker,
            "nested-guests",
            "nested guests run inside this guest; their writes are not seen by write tracking",
            "shut the nested guests down and restart this one without virtualization (-cpu …,-vmx or -svm)",
        ),
        None if offers_virtualization(source) => add(
            findings,
            Warning,
            "nested-possible",
            "the guest can run nested guests, and this host does not show whether it does",
            "make sure that it does not, or mount debugfs so that this can be checked",
        ),
        Some(false) | None => {}
    }
}

const RUN_STATE_REMEDY: &str = "resume or pause it (for io-error: repair the storage, then resume it)";

fn not_moved_in(run_state: &str) -> String {
    format!("the guest is in run state {run_state}; only running and paused guests are migrated")
}

/// Returns the reason why a guest is not moved in a run state, and the advice, in one line.
pub fn run_state_refusal(run_state: &str) -> String {
    format!("{}; {RUN_STATE_REMEDY}", not_moved_in(run_state))
}

fn offers_virtualization(source: &SourceFacts) -> bool {
    let asked = source.vm.machine.cpu_option.as_deref().unwrap_or_default();
    let plain = asked.split(',').next().unwrap_or_default();
    let named = |sign: char| {
        [format!("{sign}vmx"), format!("{sign}svm")].iter().any(|name| asked.contains(name.as_str()))
    };
    source.vm.machine.accelerator == "kvm"
        && (named('+') || (["host", "max"].contains(&plain) && !named('-')))
}

/// Checks the programs: versions and machine types.
pub(super) fn qemu(source: &SourceFacts, destination: &DestinationFacts, findings: &mut Findings) {
    let machine = &source.vm.machine.machine_type;
    if !destination.machine_types.contains(machine) {
        add(
            findings,
            Blocker,
            "machine-type-unknown",
            format!(
                "the destination's QEMU {} does not know machine type {machine}",
                destination.qemu_version
            ),
            "install a QEMU there that has it (usually the same or a newer one)",
        );
    }
    let (ours, theirs) = (major_minor(&source.vm.program.version), major_minor(&destination.qemu_version));
    if theirs < ours {
        add(
            findings,
            Blocker,
            "qemu-older",
            format!("QEMU is {} here and {} there", source.vm.program.version, destination.qemu_version),
            "install at least the same version on the destination",
        );
    } else if theirs > ours {
        add(
            findings,
            Info,
            "qemu-newer",
            format!(
                "QEMU is {} here and {} there; a migration back would be to an older version",
                source.vm.program.version, destination.qemu_version
            ),
            "nothing, unless the guest is to be migrated back: then install the same version on both",
        );
    }
    if ours < MIN_TESTED_QEMU {
        add(
            findings,
            Warning,
            "qemu-untried",
            format!("QEMU {} is older than the tested versions (7.2 and 10.0)", source.vm.program.version),
            "try with an unimportant guest first",
        );
    }
    devices(source, destination, findings);
}

/// Checks the accelerator and CPU features.
pub(super) fn processor(source: &SourceFacts, destination: &DestinationFacts, findings: &mut Findings) {
    let (here, there) = (&source.host, &destination.host);
    let machine = &source.vm.machine;
    let kvm = machine.accelerator == "kvm";
    let model = machine.cpu_option.as_deref().unwrap_or_default().split(',').next().unwrap_or_default();
    if kvm && !there.kvm {
        add(
            findings,
            Blocker,
            "kvm-missing",
            "the guest runs on KVM, and the destination has no /dev/kvm that can be opened",
            "load kvm_intel or kvm_amd there, enable virtualization in its firmware, or give the agent \
             access",
        );
    }
    let gone: Vec<&str> = here.cpu_flags.difference(&there.cpu_flags).map(String::as_str).collect();
    if kvm && (model == "host" || model == "max") {
        if here.cpu != there.cpu || !gone.is_empty() {
            add(
                findings,
                Blocker,
                "cpu-host-differs",
                format!(
                    "the guest sees the host's own processor (-cpu {model}), {}, and the destination has {}{}",
                    here.cpu,
                    there.cpu,
                    missing_flags(&gone)
                ),
                "migrate it to a host with the same processor, or start it with a named model (-cpu NAME) \
                 next time",
            );
        }
    } else if kvm && !gone.is_empty() && destination.cpu_unavailable.is_none() {
        add(
            findings,
            Warning,
            "cpu-flags",
            format!("the destination's processor lacks features of this one{}", missing_flags(&gone)),
            "make sure that the guest's CPU model does not have them; the destination's QEMU checks that \
             when it is started",
        );
    }
    if !kvm
        && (model == "max" || model == "host")
        && major_minor(&source.vm.program.version) != major_minor(&destination.qemu_version)
    {
        add(
            findings,
            Warning,
            "cpu-max",
            "-cpu max means a different processor in each version of QEMU",
            "use the same version on both sides, or a named model",
        );
    }
    if let Some(theirs) = &destination.cpu_unavailable {
        let lost: Vec<&str> = theirs
            .iter()
            .filter(|feature| !source.cpu_unavailable.contains(feature))
            .map(String::as_str)
            .collect();
        if !lost.is_empty() {
            add(
                findings,
                Blocker,
                "cpu-features",
                format!("the destination lacks CPU features that the guest has now{}", missing_flags(&lost)),
                "migrate it to a host that has them, or start it with a model without them next time",
            );
        }
    }
}

fn missing_flags(flags: &[&str]) -> String {
    if flags.is_empty() { String::new() } else { format!(" (missing: {})", flags.join(", ")) }
}

/// Checks for other processes that map the guest's memory.
pub(super) fn shared_memory(source: &SourceFacts, findings: &mut Findings) {
    let mappers = &source.other_mappers;
    if !mappers.unreadable.is_empty() {
        add(
            findings,
            Warning,
            "memory-shared-unknown",
            format!(
                "the agent may not check whether these processes map the guest's memory: {}; their writes \
                 would be lost",
                mappers.unreadable.join(", ")
            ),
            "make sure that none of them serves the guest (vhost-user, virtiofsd); root with CAP_SYS_PTRACE \
             can check more processes",
        );
    }
    if !mappers.found.is_empty() {
        add(
            findings,
            Blocker,
            "memory-shared",
            format!(
                "other processes map the guest's memory ({}); their writes are not seen by write tracking",
                mappers.found.join(", ")
            ),
            "unplug the devices that they serve (vhost-user, virtiofsd), or end the processes",
        );
    }
}

/// Returns the memory that the guest needs in bytes, including QEMU's own if both come from the
/// same kind.
pub(super) fn memory_needed_bytes(source: &SourceFacts, hugepage_bytes: Option<u64>) -> u64 {
    if hugepage_bytes.is_some() {
        // Blocks that had normal pages get normal pages.
        let huge = source.ram_blocks.iter().filter(|block| block.page_size_bytes > PAGE_BYTES);
        return huge.map(|block| block.used_bytes).sum();
    }
    let memory = &source.vm.memory;
    memory.base_bytes.saturating_add(memory.plugged_bytes).saturating_add(OVERHEAD_BYTES)
}

/// Checks RAM blocks, and free memory for them.
pub(super) fn memory(source: &SourceFacts, destination: &DestinationFacts, findings: &mut Findings) {
    if let Some(theirs) = &destination.ram_blocks {
        blocks(&source.ram_blocks, theirs, findings);
    }
    let needed = memory_needed_bytes(source, destination.hugepage_bytes);
    let host = &destination.host;
    if let Some(size) = destination.hugepage_bytes {
        let free = host.hugepages_free_bytes.get(&size).copied().unwrap_or(0);
        // A started destination has allocated its pages already.
        if free < needed && destination.ram_blocks.is_none() {
            add(
                findings,
                Blocker,
                "hugepages-short",
                format!(
                    "{} MiB of huge pages of {} KiB are needed, {} MiB are free",
                    needed >> 20,
                    size >> 10,
                    free >> 20
                ),
                "reserve more (vm.nr_hugepages), or choose memory with normal pages",
            );
        }
    } else if host.memory_available_bytes < needed {
        add(
            findings,
            Blocker,
            "memory-short",
            format!(
                "the guest and its QEMU need {} MiB; the destination has {} MiB that are not reserved for \
                 other VMs",
                needed >> 20,
                host.memory_available_bytes >> 20
            ),
            "free memory there, or choose another host",
        );
    }
}

fn blocks(ours: &[RamBlock], theirs: &[RamBlock], findings: &mut Findings) {
    let mut differ = |what: String| {
        add(
            findings,
            Blocker,
            "ram-blocks-differ",
            what,
            "use the same version and package of QEMU (its ROMs, too) on both sides; if devices were plugged during the check, check again",
        );
    };
    for block in ours {
        match theirs.iter().find(|other| other.name == block.name) {
            None => differ(format!("the destination has no RAM block {}", block.name)),
            Some(other) if (other.used_bytes, other.max_bytes) != (block.used_bytes, block.max_bytes) => {
                differ(format!(
                    "RAM block {} has {} bytes (of {}) here and {} (of {}) there",
                    block.name, block.used_bytes, block.max_bytes, other.used_bytes, other.max_bytes
                ));
            }
            Some(_) => {}
        }
    }
    for other in theirs.iter().filter(|other| ours.iter().all(|block| block.name != other.name)) {
        differ(format!("RAM block {} is only on the destination", other.name));
    }
}

/// Checks kernels, networks, displays.
pub(super) fn environment(source: &SourceFacts, destination: &DestinationFacts, findings: &mut Findings) {
    let old = |kernel: &str| major_minor(kernel) < MIN_KERNEL;
    if old(&source.host.kernel) {
        add(
            findings,
            Blocker,
            "kernel-old",
            format!(
                "this host's kernel {} has no asynchronous write protection; 6.7 is needed",
                source.host.kernel
            ),
            "boot a kernel of at least 6.7 (Debian: linux-image from backports)",
        );
    }
    if old(&destination.host.kernel) {
        add(
            findings,
            Warning,
            "destination-kernel-old",
            format!(
                "the destination's kernel {} is older than 6.7: the guest can be migrated to it, but not \
                 away again",
                destination.host.kernel
            ),
            "boot a kernel of at least 6.7 there",
        );
    }
    // A QEMU that drops its privileges itself does so on the destination, too.
    let drops = source.vm.options.iter().any(|option| match option.name.as_str() {
        "runas" => true,
        "run-with" => option.parse_value().get("user").is_some(),
        _ => false,
    });
    if let Some(user) = source.user.filter(|user| *user != destination.user && !drops) {
        add(
            findings,
            Warning,
            "user-differs",
            format!("QEMU runs as user {user} here and would run as user {} there", destination.user),
            "start it with -runas USER (-run-with user=USER) next time, if it must have fewer rights there",
        );
    }
    for interface in &destination.missing_interfaces {
        add(
            findings,
            Blocker,
            "interface-missing",
            format!("the destination has no interface {interface}"),
            "create it there, or name another one for it (tap)",
        );
    }
    for option in &source.vm.options {
        match option.name.as_str() {
            "netdev" | "nic" | "net" => network(&option.parse_value(), findings),
            "vnc" | "spice" => add(
                findings,
                Info,
                "display-clients",
                format!("clients of -{} are disconnected", option.name),
                "reconnect them to the destination",
            ),
            _ => {}
        }
    }
}

fn network(value: &Value, findings: &mut Findings) {
    let name = value.get("id").map_or_else(|| "a network".to_owned(), |id| format!("network {id}"));
    if value.get("type").as_deref() == Some("user") {
        add(
            findings,
            Info,
            "network-user",
            format!("{name} is QEMU's user-mode network: its connections to the outside break"),
            "nothing, if the guest's programs reconnect; to keep connections, use a tap on a bridge",
        );
    }
}
