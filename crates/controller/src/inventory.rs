//! The fleet as the planner sees it: reports of agents, and the configuration's rules.

use std::collections::BTreeMap;

use engine::planner::Inventory;
use engine::planner::inventory::{HostPlatform, HostSpec, LinkSpec, VmPlatform, VmSpec};
use proto::HostId;
use proto::message::{HostFacts, VmFacts};

use crate::config::{ControllerConfig, HostSettings, VmSettings};
use crate::fleet::{Fleet, HostEntry};

/// Network over which all hosts reach one another: their agents' own.
const NETWORK: &str = "agents";
/// Role of agents whose hosts run VMs.
const HOST_ROLE: &str = "host";
const MIB: u64 = 1 << 20;

/// Builds the inventory. VMs that several hosts report are where they appeared last.
pub(crate) fn inventory(fleet: &Fleet, config: &ControllerConfig) -> Inventory {
    let mut inventory = Inventory::default();
    let mut platforms = Platforms::default();
    let places = fleet.places();
    for (name, entry) in fleet.hosts() {
        let Some(facts) = entry.facts.as_ref().filter(|facts| facts.role == HOST_ROLE) else { continue };
        let platform = platforms.of_host(facts);
        inventory.hosts.push(host_spec(name, entry, facts, platform, config));
        for (vm, known) in &entry.vms {
            if places.get(vm) != Some(&name) {
                continue;
            }
            let platform = platforms.of_vm(&known.facts);
            let moving_to = fleet.open_migration(name, vm).map(|migration| migration.to.to_string());
            let settings = config.vms.get(vm);
            inventory.vms.push(vm_spec(name, &known.facts, platform, moving_to, settings));
        }
        // Between two hosts: its next host has not reported it yet.
        for (vm, facts) in entry.leaving.iter().filter(|(vm, _)| !places.contains_key(vm)) {
            let Some(migration) = fleet.open_migration(name, vm) else { continue };
            let (platform, moving_to) = (platforms.of_vm(facts), Some(migration.to.to_string()));
            inventory.vms.push(vm_spec(name, facts, platform, moving_to, config.vms.get(vm)));
        }
    }
    inventory.host_platforms = platforms.hosts;
    inventory.vm_platforms = platforms.vms;
    inventory
}

fn host_spec(
    name: &HostId,
    entry: &HostEntry,
    facts: &HostFacts,
    platform: String,
    config: &ControllerConfig,
) -> HostSpec {
    let default = HostSettings::default();
    let settings = config.hosts.get(name).unwrap_or(&default);
    let link = settings
        .link_bytes_per_s
        .unwrap_or_else(|| config.fleet.link_bytes_per_s.max(entry.measured_bytes_per_s));
    HostSpec {
        name: name.to_string(),
        platform,
        processors: facts.cpu.processors,
        memory_mib: facts.memory_bytes / MIB,
        reserved_mib: reserved_mib(entry, facts, settings, config),
        numa_mib: facts.numa_bytes.iter().map(|bytes| bytes / MIB).collect(),
        links: vec![LinkSpec { network: NETWORK.to_owned(), bytes_per_s: link }],
        storage: settings.storage.clone(),
        disk_free_mib: entry.load.pool_free_bytes / MIB,
        networks: settings.networks.clone(),
        zone: settings.zone.clone(),
        cordoned: entry.cordon.is_wanted() || facts.cordoned,
        busy_for_s: 0,
    }
}

/// Returns the memory that guests do not get: what is set, or what the host itself uses, if that is more.
fn reserved_mib(
    entry: &HostEntry,
    facts: &HostFacts,
    settings: &HostSettings,
    config: &ControllerConfig,
) -> u64 {
    let set = settings.reserved_mib.unwrap_or(config.fleet.reserved_mib);
    if entry.load.available_bytes == 0 {
        return set;
    }
    let used = facts.memory_bytes.saturating_sub(entry.load.available_bytes);
    let guests: u64 = entry.vms.values().map(|vm| vm.facts.memory_bytes).sum();
    set.max(used.saturating_sub(guests) / MIB)
}

fn vm_spec(
    host: &HostId,
    facts: &VmFacts,
    platform: String,
    moving_to: Option<String>,
    settings: Option<&VmSettings>,
) -> VmSpec {
    let settings = settings.cloned().unwrap_or_default();
    VmSpec {
        name: facts.vm.to_string(),
        host: host.to_string(),
        platform,
        vcpus: facts.vcpus,
        busy_milli: facts.busy_milli,
        memory_mib: facts.memory_bytes.div_ceil(MIB),
        one_node: settings.one_node,
        disk_mib: facts.disk_bytes.div_ceil(MIB),
        storage: settings.storage,
        networks: settings.networks,
        rules: settings.rules,
        moving_to,
        rested_s: None,
        forecasts: Vec::new(),
    }
}

/// Platforms so far, each once.
#[derive(Default)]
struct Platforms {
    hosts: BTreeMap<String, HostPlatform>,
    vms: BTreeMap<String, VmPlatform>,
}

impl Platforms {
    fn of_host(&mut self, facts: &HostFacts) -> String {
        let platform = HostPlatform {
            cpu_vendor: facts.cpu.vendor.clone(),
            cpu: facts.cpu.model.clone(),
            cpu_features: facts.cpu.features.iter().cloned().collect(),
            qemu: facts.qemu_versions.iter().max_by_key(|text| version(text)).cloned().unwrap_or_default(),
            machine_types: std::collections::BTreeSet::new(),
            kernel: facts.kernel.clone(),
            kernel_lacks: facts.kernel_lacks.clone(),
            kvm: facts.kvm,
        };
        name_of(&mut self.hosts, platform, "hosts")
    }

    fn of_vm(&mut self, facts: &VmFacts) -> String {
        let platform = VmPlatform {
            qemu: facts.qemu_version.clone(),
            machine_type: facts.machine_type.clone(),
            cpu_model: facts.cpu_model.clone(),
            cpu_features: std::collections::BTreeSet::new(),
            kvm: facts.kvm,
        };
        name_of(&mut self.vms, platform, "VMs")
    }
}

/// Returns the name of a platform, which is added if it is new.
fn name_of<P: PartialEq>(platforms: &mut BTreeMap<String, P>, platform: P, of: &str) -> String {
    if let Some((name, _)) = platforms.iter().find(|(_, known)| **known == platform) {
        return name.clone();
    }
    let name = format!("{of} of kind {}", platforms.len() + 1);
    platforms.insert(name.clone(), platform);
    name
}

/// Returns the numbers of a version, for comparisons.
fn version(text: &str) -> Vec<u64> {
    text.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use engine::planner::inventory::PlacementRules;
    use proto::message::{CpuFacts, HostLoad, MigrationFacts, MigrationStanding};
    use proto::{Epoch, MigrationId, VmName};

    use super::*;

    fn facts() -> HostFacts {
        HostFacts {
            version: "1".to_owned(),
            role: HOST_ROLE.to_owned(),
            address: String::new(),
            boot_id: String::new(),
            peers: Vec::new(),
            cordoned: false,
            cpu: CpuFacts { processors: 4, ..CpuFacts::default() },
            memory_bytes: 16 << 30,
            numa_bytes: Vec::new(),
            qemu_versions: vec!["7.2".to_owned(), "10.0".to_owned()],
            kernel: "6.12".to_owned(),
            kernel_lacks: Vec::new(),
            kvm: true,
        }
    }

    fn vm(name: &str) -> VmFacts {
        VmFacts {
            vm: VmName::new(name).unwrap(),
            state: "running".to_owned(),
            memory_bytes: (1 << 30) + 1,
            vcpus: 2,
            busy_milli: 100,
            qemu_version: "7.2.9".to_owned(),
            machine_type: "pc-q35-7.2".to_owned(),
            cpu_model: "max".to_owned(),
            kvm: true,
            disk_bytes: 0,
            migration: None,
        }
    }

    fn config(more: &str) -> ControllerConfig {
        let least = "name = \"control\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n";
        ControllerConfig::parse("/x".as_ref(), &format!("{least}{more}")).unwrap()
    }

    fn host(name: &str) -> HostId {
        HostId::new(name).unwrap()
    }

    /// A VM needs its room also in the moment between its source's last report and its destination's first one.
    #[test]
    fn a_vm_between_two_hosts_keeps_its_room() {
        let mut fleet = Fleet::default();
        for name in ["a", "b"] {
            fleet.change(&host(name), |entry| entry.facts = Some(facts()));
        }
        fleet.put_vm(&host("a"), vm("web"));
        let migration = |standing| MigrationFacts {
            migration: MigrationId { vm: VmName::new("web").unwrap(), epoch: Epoch(1) },
            from: host("a"),
            to: host("b"),
            state: String::new(),
            standing,
            message: None,
            progress: None,
        };
        fleet.put_migration(&host("a"), migration(MigrationStanding::Underway));
        fleet.remove_vm(&host("a"), &vm("web").vm);
        let found = |fleet: &Fleet| inventory(fleet, &config("")).vms;
        let between = found(&fleet);
        assert_eq!((between[0].host.as_str(), between[0].moving_to.as_deref()), ("a", Some("b")));
        fleet.put_vm(&host("b"), vm("web"));
        assert_eq!((found(&fleet).len(), found(&fleet)[0].host.as_str()), (1, "b"));
        fleet.put_migration(&host("a"), migration(MigrationStanding::Done));
        fleet.remove_vm(&host("b"), &vm("web").vm);
        assert!(found(&fleet).is_empty());
    }

    #[test]
    fn hosts_and_vms_are_as_reported_with_configured_rules() {
        let mut fleet = Fleet::default();
        for name in ["a", "b", "w"] {
            fleet.change(&host(name), |entry| entry.facts = Some(facts()));
        }
        fleet.change(&host("b"), |entry| {
            entry.cordon.by_evacuation = true;
            entry.load = HostLoad { available_bytes: 8 << 30, pool_free_bytes: 5 << 20, busy_milli: 0 };
        });
        fleet.change(&host("w"), |entry| {
            entry.facts = Some(HostFacts { role: "witness".to_owned(), ..facts() });
        });
        fleet.put_vm(&host("a"), vm("web"));
        fleet.put_vm(&host("b"), vm("web"));
        let config = config("[hosts.a]\nlink_bytes_per_s = 7\nzone = \"z\"\n[vms.web.rules]\npriority = 3\n");
        let built = inventory(&fleet, &config);
        let names: Vec<_> = built.hosts.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names, ["a", "b"], "a witness runs no VMs");
        assert_eq!(
            (built.hosts[0].links[0].bytes_per_s, built.hosts[1].links[0].bytes_per_s),
            (7, 125_000_000)
        );
        assert_eq!((built.hosts[0].reserved_mib, built.hosts[1].reserved_mib), (1024, 7 * 1024 - 1));
        assert!(built.hosts[1].cordoned && !built.hosts[0].cordoned);
        assert_eq!(built.host_platforms.len(), 1);
        assert_eq!(built.host_platforms.values().next().unwrap().qemu, "10.0");
        let [web] = &built.vms[..] else { panic!("{:?}", built.vms) };
        assert_eq!((web.host.as_str(), web.memory_mib), ("b", 1025));
        assert_eq!(web.rules, PlacementRules { priority: 3, ..PlacementRules::default() });
        // What is built can be planned with.
        let request = engine::planner::PlanRequest {
            goal: engine::planner::PlanGoal::Drain { hosts: vec!["b".to_owned()], to: Vec::new() },
            ..engine::planner::PlanRequest::default()
        };
        let plan = engine::planner::plan(&built, &request).unwrap();
        assert_eq!(plan.moves.len(), 1);
    }
}
