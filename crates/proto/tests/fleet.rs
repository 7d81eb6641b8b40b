//! Limits on the contents of an agent's reports to its controller.

use proto::message::{CommandVerb, FleetChange, FleetReport, HostFacts, Message, VmFacts};
use proto::{CommandId, Invalid, VmName, limits};
use whimbrel_proto as proto;

fn host() -> HostFacts {
    HostFacts {
        version: "1".into(),
        role: "host".into(),
        address: "192.0.2.1:7740".into(),
        boot_id: "b".into(),
        peers: Vec::new(),
        cordoned: false,
        cpu: proto::message::CpuFacts::default(),
        memory_bytes: 1 << 30,
        numa_bytes: Vec::new(),
        qemu_versions: Vec::new(),
        kernel: "6.12".into(),
        kernel_lacks: Vec::new(),
        kvm: false,
    }
}

fn validated(report: FleetReport) -> Result<(), Invalid> {
    Message::FleetReport { seq: 1, report }.validate()
}

/// Returns the result of validating the changed facts of a host.
fn changed(change: impl FnOnce(&mut HostFacts)) -> Result<(), Invalid> {
    let mut host = host();
    change(&mut host);
    validated(FleetReport::Begin { host: Box::new(host) })
}

#[test]
fn facts_of_hosts_are_limited() {
    assert_eq!(changed(|_| ()), Ok(()));
    let name = || "n".to_owned();
    assert_eq!(changed(|host| host.cpu.features = vec![name(); limits::FLEET_NAMES]), Ok(()));
    for many in [
        changed(|host| host.cpu.features = vec![name(); limits::FLEET_NAMES + 1]),
        changed(|host| host.qemu_versions = vec![name(); limits::FLEET_NAMES + 1]),
        changed(|host| host.kernel_lacks = vec![name(); limits::FLEET_NAMES + 1]),
        changed(|host| host.numa_bytes = vec![1; limits::FLEET_NAMES + 1]),
    ] {
        assert!(matches!(many, Err(Invalid::TooMany { .. })), "{many:?}");
    }
    let long = || "l".repeat(limits::FLEET_TEXT_BYTES + 1);
    for text in [
        changed(|host| host.version = long()),
        changed(|host| host.address = long()),
        changed(|host| host.cpu.model = long()),
        changed(|host| host.qemu_versions = vec![long()]),
    ] {
        assert!(matches!(text, Err(Invalid::Text { .. })), "{text:?}");
    }
}

#[test]
fn lists_of_changes_are_limited() {
    let gone = FleetChange::VmGone { vm: VmName::new("web").unwrap() };
    let changes = |count| validated(FleetReport::Changed { changes: vec![gone.clone(); count] });
    assert_eq!(changes(limits::FLEET_CHANGES), Ok(()));
    assert!(matches!(changes(limits::FLEET_CHANGES + 1), Err(Invalid::TooMany { field: "changes", .. })));
    let long = "l".repeat(limits::FLEET_TEXT_BYTES + 1);
    let vm = VmFacts {
        vm: VmName::new("web").unwrap(),
        state: long,
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
    let vm = FleetChange::Vm { vm: Box::new(vm) };
    assert!(matches!(validated(FleetReport::Changed { changes: vec![vm] }), Err(Invalid::Text { .. })));
}

#[test]
fn questions_about_commands_are_limited() {
    let id = || CommandId::new("c1-1").unwrap();
    let question = |count| {
        let command = CommandVerb::Facts { commands: vec![id(); count] };
        Message::FleetCommand { term: 1, id: id(), command }.validate()
    };
    assert_eq!(question(limits::FLEET_COMMANDS), Ok(()));
    assert!(matches!(question(limits::FLEET_COMMANDS + 1), Err(Invalid::TooMany { field: "commands", .. })));
}
