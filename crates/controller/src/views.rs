//! The fleet as users see it.

use api::fleet::{FleetEvent, FleetHost, FleetInfo, FleetMigration, FleetVm};
use api::report::rfc3339;
use proto::message::{HostFacts, MigrationStanding};
use proto::{HostId, VmName};
use store::fleet::StoredEvent;

use crate::coordinator::Coordinator;
use crate::fleet::{Fleet, HostEntry, VmEntry};

/// Returns the controller and the counts of its fleet.
pub(crate) fn info(coordinator: &Coordinator) -> FleetInfo {
    let fleet = &coordinator.fleet;
    let count =
        |is_one: &dyn Fn(&HostEntry) -> bool| fleet.hosts().filter(|(_, entry)| is_one(entry)).count() as u32;
    let with = |standing: MigrationStanding| {
        let of_source = fleet.hosts().flat_map(|(host, entry)| {
            entry.migrations.values().filter(move |facts| facts.from == *host && facts.standing == standing)
        });
        of_source.count() as u32
    };
    FleetInfo {
        controller: coordinator.config.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        term: coordinator.term,
        listen: coordinator.config.listen.to_string(),
        pid: std::process::id(),
        hosts: count(&|_| true),
        connected: count(&|entry| entry.connected),
        cordoned: count(&is_cordoned),
        vms: fleet.places().len() as u32,
        migrations: with(MigrationStanding::Underway),
        in_doubt: with(MigrationStanding::InDoubt),
        evacuations: coordinator
            .evacuations
            .iter()
            .filter(|one| one.outcome().is_none())
            .map(|one| one.id().0.clone())
            .collect(),
        last_event: coordinator.last_event,
    }
}

/// Returns true if a host accepts no VMs, as far as is known.
pub(crate) fn is_cordoned(entry: &HostEntry) -> bool {
    entry.cordon.is_wanted() || entry.facts.as_ref().is_some_and(|facts| facts.cordoned)
}

/// Returns all hosts.
pub(crate) fn hosts(fleet: &Fleet) -> Vec<FleetHost> {
    fleet.hosts().map(|(name, entry)| host(name, entry)).collect()
}

/// Returns a host.
pub(crate) fn host(name: &HostId, entry: &HostEntry) -> FleetHost {
    let text = |of: fn(&HostFacts) -> &String| entry.facts.as_ref().map(of).cloned().unwrap_or_default();
    let remains = entry.contents.as_ref().map(engine::evacuation::HostContents::what_remains);
    FleetHost {
        host: name.clone(),
        connected: entry.connected,
        last_report: (entry.last_report_unix_ms > 0).then(|| rfc3339(entry.last_report_unix_ms)),
        role: text(|facts| &facts.role),
        version: text(|facts| &facts.version),
        address: text(|facts| &facts.address),
        cordoned: is_cordoned(entry),
        processors: entry.facts.as_ref().map_or(0, |facts| facts.cpu.processors),
        memory_bytes: entry.facts.as_ref().map_or(0, |facts| facts.memory_bytes),
        load: entry.load,
        qemu_versions: entry.facts.as_ref().map(|facts| facts.qemu_versions.clone()).unwrap_or_default(),
        kernel: text(|facts| &facts.kernel),
        vms: entry.vms.keys().cloned().collect(),
        remains: remains.map(|remains| remains.iter().map(ToString::to_string).collect()),
    }
}

/// Returns all VMs, by name.
pub(crate) fn vms(fleet: &Fleet) -> Vec<FleetVm> {
    let places = fleet.places();
    let known = places.into_iter().filter_map(|(vm, host)| {
        let entry = fleet.host(host)?;
        Some(one_vm(fleet, (vm, host), entry, entry.vms.get(vm)?))
    });
    known.collect()
}

fn one_vm(fleet: &Fleet, (vm, host): (&VmName, &HostId), entry: &HostEntry, known: &VmEntry) -> FleetVm {
    let facts = &known.facts;
    let migration = fleet.open_migration(host, vm).map(|open| {
        let progress = open.progress.clone().unwrap_or_default();
        FleetMigration {
            migration: open.migration.clone(),
            to: open.to.clone(),
            remaining_bytes: progress.remaining_bytes,
            rate_bytes_per_s: progress.rate_bytes_per_s,
        }
    });
    FleetVm {
        vm: vm.clone(),
        host: host.clone(),
        connected: entry.connected,
        state: facts.state.clone(),
        memory_bytes: facts.memory_bytes,
        vcpus: facts.vcpus,
        busy_milli: facts.busy_milli,
        qemu_version: facts.qemu_version.clone(),
        migration,
    }
}

/// Returns an event.
pub(crate) fn event(stored: StoredEvent) -> FleetEvent {
    let StoredEvent { number, event } = stored;
    FleetEvent {
        number,
        time: rfc3339(event.unix_ms),
        kind: event.kind,
        host: event.host.and_then(|host| HostId::new(host).ok()),
        vm: event.vm.and_then(|vm| VmName::new(vm).ok()),
        evacuation: event.evacuation,
        text: event.text,
    }
}
