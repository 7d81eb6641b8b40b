use super::*;

fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

fn vm(name: &str) -> VmFacts {
    VmFacts {
        vm: VmName::new(name).unwrap(),
        state: "running".to_owned(),
        memory_bytes: 1 << 30,
        vcpus: 1,
        busy_milli: 0,
        qemu_version: "10.0.2".to_owned(),
        machine_type: "pc-q35-10.0".to_owned(),
        cpu_model: String::new(),
        kvm: false,
        disk_bytes: 0,
        migration: None,
    }
}

fn stored(fleet: &mut Fleet) -> FleetRecords {
    let mut batch = FleetBatch::default();
    fleet.take_changes(&mut batch);
    FleetRecords { hosts: batch.hosts, vms: batch.vms, ..FleetRecords::default() }
}

#[test]
fn a_fleet_is_restored_without_connections() {
    let mut fleet = Fleet::default();
    fleet.change(&host("a"), |entry| {
        entry.connected = true;
        entry.cordon.by_user = true;
        entry.last_report_unix_ms = 5;
    });
    assert!(fleet.put_vm(&host("a"), vm("web")));
    assert!(!fleet.put_vm(&host("a"), VmFacts { busy_milli: 900, ..vm("web") }));
    let restored = Fleet::restore(&stored(&mut fleet));
    let entry = restored.host(&host("a")).unwrap();
    assert!(!entry.connected && entry.cordon.by_user);
    assert_eq!((entry.vms.len(), entry.last_report_unix_ms), (1, 5));
    assert_eq!(stored(&mut fleet), FleetRecords::default(), "nothing is stored twice");
    // The use of processors alone is not worth a write.
    fleet.put_vm(&host("a"), VmFacts { busy_milli: 10, ..vm("web") });
    assert!(stored(&mut fleet).vms.is_empty());
    assert!(fleet.remove_vm(&host("a"), &vm("web").vm) && !fleet.remove_vm(&host("a"), &vm("web").vm));
    assert_eq!(stored(&mut fleet).vms[0].document, None);
}

#[test]
fn a_vm_that_two_hosts_report_is_where_it_appeared_last() {
    let mut fleet = Fleet::default();
    for name in ["a", "b"] {
        fleet.change(&host(name), |entry| entry.connected = true);
    }
    fleet.put_vm(&host("b"), vm("web"));
    fleet.put_vm(&host("a"), vm("web"));
    // A further report is no appearance.
    fleet.put_vm(&host("b"), VmFacts { state: "paused".to_owned(), ..vm("web") });
    assert_eq!(fleet.places(), BTreeMap::from([(&vm("web").vm, &host("a"))]));
    fleet.change(&host("a"), |entry| entry.connected = false);
    assert_eq!(fleet.places()[&vm("web").vm], &host("b"), "a host that is away may be wrong");
}

#[test]
fn cordons_of_users_on_the_host_are_taken_over() {
    let mut cordon = CordonState::default();
    assert!(!cordon.take_report(true), "the first report of a host that was cordoned before");
    assert!(cordon.by_user);
    assert!(!cordon.take_report(false), "a user has uncordoned it on the host");
    assert!(!cordon.is_wanted());

    cordon.by_evacuation = true;
    assert!(cordon.take_report(false), "the command has not arrived yet");
    assert!(!cordon.take_report(true) && !cordon.by_user, "it has arrived");
    assert!(!cordon.take_report(false) && !cordon.is_wanted(), "a user has changed it on the host since");
}
