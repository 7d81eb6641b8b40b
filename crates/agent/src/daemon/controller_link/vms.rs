//! Facts about the VMs of this host, for the controller.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::handover::source::SourceState;
use host::config::Config;
use proto::VmName;
use proto::message::VmFacts;
use qemu::describe::{Disk, VmDescription};
use store::journal::{JournalError, MigrationRecord, State, VmRecord};

use crate::daemon::Daemon;

/// Time after which a VM's run state is asked anew. Its monitor has one client at a time, and others need it, too.
const STATE_AGE: Duration = Duration::from_mins(1);
/// Time of one look after which no more VMs are asked: the rest is asked by the next looks. A monitor that does not answer
/// takes seconds, in which nothing is reported.
const ASKING_TIME: Duration = Duration::from_secs(2);
/// State of a VM that was not asked yet.
const NOT_ASKED: &str = "unknown";
/// Time over which the use of processors is averaged.
const USE_AGE: Duration = Duration::from_secs(10);
/// Clock ticks in a second, on all architectures.
const TICKS_PER_S: u64 = 100;

/// The VMs of this host, with what was found out about them before.
#[derive(Debug, Default)]
pub(super) struct VmSurvey {
    known: BTreeMap<VmName, SurveyedVm>,
}

#[derive(Debug)]
struct SurveyedVm {
    /// Process id and start time of its QEMU.
    process: (u32, u64),
    facts: VmFacts,
    /// Time at which its state was asked; none if that was not done yet.
    state_since: Option<Instant>,
    /// CPU time of its QEMU, in clock ticks, at a moment.
    used: (u64, Instant),
}

/// Returns true if this host owns a VM that the journal has, given the VM's latest migration: the VM has not been handed
/// over, and nothing about it is in doubt.
pub(super) fn is_owned(latest: Option<&MigrationRecord>) -> bool {
    let Some(latest) = latest.filter(|latest| latest.open) else { return true };
    match &latest.state {
        State::Source(state) => !matches!(
            state,
            SourceState::Committed { .. }
                | SourceState::Reclaiming { .. }
                | SourceState::QemuLost { .. }
                | SourceState::Done { .. }
        ),
        State::Destination(state) => state.is_final(),
    }
}

impl VmSurvey {
    /// Returns the facts of all VMs that this host owns and runs, by name.
    pub(super) fn look(&mut self, daemon: &Arc<Daemon>) -> Result<BTreeMap<VmName, VmFacts>, JournalError> {
        let context = &daemon.context;
        let open: BTreeMap<VmName, MigrationRecord> = context
            .journal
            .open_migrations()?
            .into_iter()
            .map(|record| (record.id().vm.clone(), record))
            .collect();
        let mut found = BTreeMap::new();
        let mut records = BTreeMap::new();
        for record in context.journal.vms()? {
            let migration = open.get(&record.vm);
            if !is_owned(migration) || record.process(&context.boot_id).is_err() {
                continue;
            }
            let vm = self
                .known
                .remove(&record.vm)
                .filter(|vm| vm.process == (record.pid, record.start_time_ticks))
                .unwrap_or_else(|| SurveyedVm::new(&record, &context.config));
            found.insert(record.vm.clone(), vm.with_present_use());
            records.insert(record.vm.clone(), record);
        }
        let began = Instant::now();
        for name in to_be_asked(&found, &open) {
            if began.elapsed() >= ASKING_TIME {
                break;
            }
            if let (Some(vm), Some(record)) = (found.get_mut(&name), records.get(&name)) {
                vm.look_at_state(daemon, record, open.get(&name));
            }
        }
        self.known = found;
        Ok(self.known.iter().map(|(name, vm)| (name.clone(), vm.facts.clone())).collect())
    }
}

/// Returns the VMs whose states are to be asked: first those in a migration, which are not asked by their monitors, and then
/// those that were asked the longest time ago. One that does not answer does not keep the others from being asked.
fn to_be_asked(vms: &BTreeMap<VmName, SurveyedVm>, open: &BTreeMap<VmName, MigrationRecord>) -> Vec<VmName> {
    let is_due = |name: &VmName, vm: &SurveyedVm| {
        let migrates = open.get(name).map(MigrationRecord::id);
        vm.state_since.is_none_or(|since| since.elapsed() >= STATE_AGE)
            || vm.facts.migration.as_ref() != migrates
    };
    let mut due: Vec<_> = vms
        .iter()
        .filter(|(name, vm)| is_due(name, vm))
        .map(|(name, vm)| (!open.contains_key(name), vm.state_since, name.clone()))
        .collect();
    due.sort();
    due.into_iter().map(|(_, _, name)| name).collect()
}

impl SurveyedVm {
    fn new(record: &VmRecord, config: &Config) -> Self {
        let process = (record.pid, record.start_time_ticks);
        let facts = described(record, config);
        let used = (cpu_ticks(record.pid), Instant::now());
        Self { process, facts, state_since: None, used }
    }

    fn with_present_use(mut self) -> Self {
        let (before, since) = self.used;
        if since.elapsed() >= USE_AGE {
            let now = cpu_ticks(self.process.0);
            let elapsed_ms = since.elapsed().as_millis() as u64;
            let ticks = now.saturating_sub(before);
            self.facts.busy_milli = (ticks * 1_000_000 / TICKS_PER_S).checked_div(elapsed_ms).unwrap_or(0);
            self.used = (now, Instant::now());
        }
        self
    }

    fn look_at_state(
        &mut self,
        daemon: &Arc<Daemon>,
        record: &VmRecord,
        migration: Option<&MigrationRecord>,
    ) {
        let open = migration.map(|migration| (migration, daemon.standing_of(migration)));
        let summary = host::vms::summary(&daemon.context, record, open);
        self.facts.state = summary.state;
        self.facts.migration = summary.migration;
        self.state_since = Some(Instant::now());
    }
}

/// Returns the facts that follow from a VM's description.
fn described(record: &VmRecord, config: &Config) -> VmFacts {
    let mut facts = VmFacts {
        vm: record.vm.clone(),
        state: NOT_ASKED.to_owned(),
        memory_bytes: 0,
        vcpus: 1,
        busy_milli: 0,
        qemu_version: String::new(),
        machine_type: String::new(),
        cpu_model: String::new(),
        kvm: false,
        disk_bytes: 0,
        migration: None,
    };
    if let Ok(described) = serde_json::from_value::<VmDescription>(record.description.clone()) {
        let machine = described.machine;
        facts.memory_bytes = described.memory.base_bytes + described.memory.plugged_bytes;
        facts.vcpus = machine.cpus as u32;
        facts.qemu_version = described.program.version;
        facts.machine_type = machine.machine_type;
        // Features follow the model after a comma.
        let model = machine.cpu_option.as_deref().and_then(|option| option.split(',').next());
        model.unwrap_or_default().clone_into(&mut facts.cpu_model);
        facts.kvm = machine.accelerator == "kvm";
        facts.disk_bytes = described.disks.iter().map(|disk| copied_bytes(disk, config)).sum();
    }
    facts
}

/// Returns the size of a disk that would be copied, as far as this host knows: the destination may see it, too.
fn copied_bytes(disk: &Disk, config: &Config) -> u64 {
    let Some(file) = disk.file.as_deref().filter(|_| !disk.read_only) else { return 0 };
    let file = Path::new(file);
    let is_shared = is_on_network(file)
        || config.disks_shared.iter().any(|shared| file.starts_with(shared))
        || config.disk_dirs.iter().any(|(there, here)| file.starts_with(there) || file.starts_with(here));
    if is_shared { 0 } else { disk.used_bytes.or(disk.bytes).unwrap_or(0) }
}

/// File systems that other hosts may see, too, by the numbers of `statfs(2)`: NFS, SMB, CIFS, Ceph, GFS2, OCFS2, FUSE.
const NETWORK_FILE_SYSTEMS: [u32; 7] =
    [0x6969, 0xfe53_4d42, 0xff53_4d42, 0x00c3_6400, 0x0116_1970, 0x7461_636f, 0x6573_5546];

/// Returns true if a disk is likely to be seen by other hosts: its image is on a network file system, or it is a block device
/// or an address.
fn is_on_network(file: &Path) -> bool {
    let is_device = file.starts_with("/dev") || !file.is_absolute();
    is_device
        || rustix::fs::statfs(file).is_ok_and(|found| NETWORK_FILE_SYSTEMS.contains(&(found.f_type as u32)))
}

/// Returns the CPU time of a process, in clock ticks; 0 if it has ended.
fn cpu_ticks(pid: u32) -> u64 {
    fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|stat| ticks_of(&stat)).unwrap_or(0)
}

/// Returns `utime` and `stime` of /proc/PID/stat. The name before them may have any characters.
fn ticks_of(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(") ")?.1.split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use host::testing::{Qemu, World};

    use super::*;

    fn surveyed(state_since: Option<Instant>) -> SurveyedVm {
        let world = World::new();
        let qemu = Qemu::start(&world.folder.path().join("vm"));
        let vm = SurveyedVm::new(&qemu.record(), &world.context.config);
        assert_eq!(vm.facts.state, NOT_ASKED);
        SurveyedVm { state_since, ..vm }
    }

    #[test]
    fn the_vm_that_was_asked_last_is_asked_last() {
        let now = Instant::now();
        let vms = BTreeMap::from([
            (name("a"), surveyed(now.checked_sub(STATE_AGE))),
            (name("b"), surveyed(now.checked_sub(STATE_AGE * 2))),
            (name("c"), surveyed(None)),
            (name("d"), surveyed(Some(now))),
        ]);
        assert_eq!(to_be_asked(&vms, &BTreeMap::new()), [name("c"), name("b"), name("a")]);
    }

    fn name(text: &str) -> VmName {
        VmName::new(text).unwrap()
    }

    #[test]
    fn local_images_would_be_copied() {
        assert!(!is_on_network(Path::new("/proc/self/exe")));
        for path in ["/dev/vg0/web", "nbd://storage:10809", "rbd:pool/web"] {
            assert!(is_on_network(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let stat = "7 (qemu (x) y) S 1 7 7 0 -1 4194304 100 0 0 0 30 12 0 0 20 0 3 0 1000 1 1";
        assert_eq!(ticks_of(stat), Some(42));
        assert_eq!((ticks_of("7 (qemu"), ticks_of("7 (a) S 1")), (None, None));
        assert!(cpu_ticks(u32::MAX) == 0);
    }
}
