//! Plans of small fleets whose right answer is plain; properties and exact solvers are below.

mod goals;
mod oracle;
mod properties;
mod rules;
mod steps;

use std::collections::{BTreeMap, BTreeSet};

use super::inventory::{CpuModel, HostPlatform, HostSpec, LinkSpec, PlatformChange, VmPlatform, VmSpec};
use super::*;

const GIB: u64 = 1024;

/// A host of 16 processors and 64 GiB, with a link of a gigabyte a second.
pub(super) fn host(name: &str) -> HostSpec {
    HostSpec {
        name: name.to_owned(),
        platform: "new".to_owned(),
        processors: 16,
        memory_mib: 64 * GIB,
        links: vec![LinkSpec { network: "migration".to_owned(), bytes_per_s: 1_000_000_000 }],
        storage: BTreeSet::from(["san".to_owned()]),
        disk_free_mib: 100 * GIB,
        networks: BTreeSet::from(["lan".to_owned()]),
        ..HostSpec::default()
    }
}

/// A VM of two processors, half of them busy.
pub(super) fn vm(name: &str, host: &str, memory_mib: u64) -> VmSpec {
    VmSpec {
        name: name.to_owned(),
        host: host.to_owned(),
        platform: "old".to_owned(),
        vcpus: 2,
        busy_milli: 500,
        memory_mib,
        storage: BTreeSet::from(["san".to_owned()]),
        networks: BTreeSet::from(["lan".to_owned()]),
        ..VmSpec::default()
    }
}

pub(super) fn features(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Returns an inventory whose hosts have QEMU 8.2, and whose VMs were started by QEMU 7.2.
pub(super) fn inventory(hosts: Vec<HostSpec>, vms: Vec<VmSpec>) -> Inventory {
    let new = HostPlatform {
        cpu_vendor: "Maker".to_owned(),
        cpu: "Maker 1".to_owned(),
        cpu_features: features(&["sse2", "avx", "avx2"]),
        qemu: "8.2.2".to_owned(),
        kvm: true,
        ..HostPlatform::default()
    };
    let old = VmPlatform {
        qemu: "7.2.1".to_owned(),
        machine_type: "pc-q35-7.2".to_owned(),
        cpu_model: "Middle".to_owned(),
        kvm: true,
        ..VmPlatform::default()
    };
    let model = |name: &str, names: &[&str]| CpuModel {
        name: name.to_owned(),
        vendor: "Maker".to_owned(),
        features: features(names),
    };
    Inventory {
        hosts,
        vms,
        host_platforms: BTreeMap::from([("new".to_owned(), new)]),
        vm_platforms: BTreeMap::from([("old".to_owned(), old)]),
        cpu_models: vec![
            model("Low", &["sse2"]),
            model("Middle", &["sse2", "avx"]),
            model("High", &["sse2", "avx", "avx2", "avx512f"]),
        ],
    }
}

pub(super) fn drain(hosts: &[&str]) -> PlanRequest {
    let hosts = hosts.iter().map(|name| (*name).to_owned()).collect();
    PlanRequest { goal: PlanGoal::Drain { hosts, to: Vec::new() }, ..PlanRequest::default() }
}

pub(super) fn drain_to(hosts: &[&str], to: &[&str]) -> PlanRequest {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    PlanRequest { goal: PlanGoal::Drain { hosts: names(hosts), to: names(to) }, ..PlanRequest::default() }
}

pub(super) fn place(pairs: &[(&str, &str)]) -> PlanRequest {
    let placement = |(vm, host): &(&str, &str)| Placement { vm: (*vm).to_owned(), host: (*host).to_owned() };
    let placements = pairs.iter().map(placement).collect();
    PlanRequest { goal: PlanGoal::Place { placements }, ..PlanRequest::default() }
}

/// Returns the moves as `vm from>to`.
pub(super) fn moves(plan: &PlacementPlan) -> Vec<String> {
    plan.moves.iter().map(|one| format!("{} {}>{}", one.vm, one.from, one.to)).collect()
}

#[test]
fn a_host_is_emptied_onto_the_least_loaded_others() {
    let hosts = vec![host("a"), host("b"), host("c")];
    let vms = vec![
        vm("v1", "a", 8 * GIB),
        vm("v2", "a", 4 * GIB),
        vm("v3", "b", 16 * GIB),
        vm("v4", "c", 15 * GIB),
    ];
    let inventory = inventory(hosts, vms);
    let found = plan(&inventory, &drain(&["a"])).unwrap();
    assert_eq!(moves(&found), ["v1 a>c", "v2 a>b"]);
    assert!(found.moves.iter().all(|one| one.why == MoveReason::Drained && one.waits_for.is_empty()));
    // 8 GiB at a gigabyte a second, and half a second beside sending; the link of a is used by one after the other.
    let first = &found.moves[0];
    assert_eq!(first.bytes, 8 << 30);
    assert_eq!(first.total_ns.expected, (8 << 30) + 500_000_000);
    assert_eq!(found.moves[1].begins_ns, first.total_ns.expected);
    assert_eq!(found.duration_ns.expected, (12 << 30) + 1_000_000_000);
    assert!(found.duration_ns.low < found.duration_ns.expected);
    assert!(found.duration_ns.high > found.duration_ns.expected);
    assert_eq!((found.highest_load_before_percent, found.highest_load_after_percent), (25, 36));
}

#[test]
fn faster_links_are_preferred_until_load_outweighs_them() {
    let mut fast = host("fast");
    fast.links[0].bytes_per_s = 10_000_000_000;
    let mut source = host("a");
    source.links[0].bytes_per_s = 10_000_000_000;
    let vms = vec![vm("v1", "a", 16 * GIB), vm("v2", "fast", 40 * GIB)];
    let mut request = drain(&["a"]);
    request.limits.copy_bytes_per_s = 10_000_000_000;
    let inventory = inventory(vec![source, fast, host("slow")], vms);
    // 1.7 s or 17 s; a load of 88% or 25% is worth 53 s or 15 s.
    assert_eq!(moves(&plan(&inventory, &request).unwrap()), ["v1 a>slow"]);
    request.limits.load_worth_s = 10;
    assert_eq!(moves(&plan(&inventory, &request).unwrap()), ["v1 a>fast"]);
}

#[test]
fn a_slow_copy_leaves_the_link_to_other_moves() {
    let mut request = drain(&["a"]);
    request.limits.copy_bytes_per_s = 400_000_000;
    let vms = (1..5).map(|at| vm(&format!("v{at}"), "a", 4 * GIB)).collect();
    let hosts = vec![host("a"), host("b"), host("c")];
    let mut inventory = inventory(hosts, vms);
    let begins = |inventory: &Inventory, request: &PlanRequest| {
        let found = plan(inventory, request).unwrap();
        found.moves.iter().map(|one| one.begins_ns / 1_000_000_000).collect::<Vec<_>>()
    };
    // Two at 400 MB/s, and the third with half of its wish.
    assert_eq!(begins(&inventory, &request), [0, 0, 0, 11]);
    request.limits.least_link_percent = 60;
    assert_eq!(begins(&inventory, &request), [0, 0, 11, 11]);
    // A budget of all.
    request.limits.bytes_per_s = Some(400_000_000);
    assert_eq!(begins(&inventory, &request), [0, 11, 22, 33]);
    // Busy processors let one go on.
    request.limits.bytes_per_s = None;
    inventory.hosts[0].processors = 3;
    assert_eq!(begins(&inventory, &request), [0, 11, 22, 33]);
    inventory.hosts[0].processors = 16;
    request.limits.per_host = 1;
    assert_eq!(begins(&inventory, &request), [0, 11, 22, 33]);
}

#[test]
fn priorities_go_first() {
    let mut urgent = vm("v2", "a", GIB);
    urgent.rules.priority = 1;
    let vms = vec![vm("v1", "a", 8 * GIB), urgent, vm("v3", "a", 4 * GIB)];
    let inventory = inventory(vec![host("a"), host("b")], vms);
    let found = plan(&inventory, &drain(&["a"])).unwrap();
    assert_eq!(moves(&found), ["v2 a>b", "v1 a>b", "v3 a>b"]);
}

#[test]
fn the_matrix_says_what_stands_in_the_way() {
    let mut old = host("old");
    old.platform = "small".to_owned();
    let mut cordoned = host("cordoned");
    cordoned.cordoned = true;
    let mut inventory = inventory(
        vec![host("a"), old, cordoned, host("b")],
        vec![vm("v1", "a", 8 * GIB), vm("v2", "b", 60 * GIB)],
    );
    let small = HostPlatform {
        qemu: "7.0".to_owned(),
        cpu_features: features(&["sse2"]),
        ..inventory.host_platforms["new"].clone()
    };
    inventory.host_platforms.insert("small".to_owned(), small);
    let found = matrix(&inventory, &["v1".to_owned()], 90).unwrap();
    let [row] = &found.rows[..] else { panic!("{found:?}") };
    let cell = |name: &str| &row.cells.iter().find(|cell| cell.host == name).unwrap().obstacles[..];
    assert!(
        matches!(
            cell("old"),
            [Obstacle::OlderQemu { .. }, Obstacle::MachineType { .. }, Obstacle::CpuFeatures { .. }]
        ),
        "{row:?}"
    );
    assert_eq!(cell("cordoned"), [Obstacle::Cordoned]);
    assert_eq!(cell("b"), [Obstacle::Memory { needs_mib: 8 * GIB, free_mib: 4 * GIB }]);
    // All hosts have what the oldest has.
    let common = found.common_cpu.unwrap();
    assert_eq!((common.model.as_str(), common.option.as_str()), ("Low", "-cpu Low,enforce"));
    assert_eq!(common.next, Some(NextCpuModel { model: "Middle".to_owned(), hosts: vec!["old".to_owned()] }));

    // What if the old host had the others' QEMU and processor?
    let change =
        PlatformChange { qemu: Some("8.2".to_owned()), cpu_of: Some("new".to_owned()), kernel: None };
    assert!(inventory.apply("old", &change));
    let found = matrix(&inventory, &[], 90).unwrap();
    assert_eq!(found.rows.len(), 2);
    assert_eq!(found.rows[0].cells[0].obstacles, []);
    let common = found.common_cpu.unwrap();
    assert_eq!(common.option, "-cpu Middle,+avx2,enforce");
    assert!(!inventory.apply("nowhere", &change));
    assert_eq!(
        matrix(&inventory, &["none".to_owned()], 90).unwrap_err().to_string(),
        "VM none is not in the inventory; the request names it"
    );
}
