//! Examples of messages between agents and their controller.

use proto::message::{
    CommandAnswer, CommandVerb, CpuFacts, EvacuationStanding, FleetChange, FleetReport, HostEvacuation,
    HostFacts, HostLoad, Message, MigrationFacts, MigrationProgress, MigrationStanding, MoveOrder,
    MovePolicy, VmFacts,
};
use proto::{CommandId, Epoch, HostId, MigrationId, VmName};
use whimbrel_proto as proto;

fn vm() -> VmName {
    VmName::new("web-1").unwrap()
}

fn migration() -> MigrationId {
    MigrationId { vm: vm(), epoch: Epoch(3) }
}

fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

fn command() -> CommandId {
    CommandId::new("e7/3").unwrap()
}

/// Facts of a host, all of them.
fn host_facts() -> HostFacts {
    HostFacts {
        version: "0.1.0".into(),
        role: "host".into(),
        address: "192.0.2.1:7740".into(),
        boot_id: "7d0e3f6c-3b44-4d7b-9d0f-0d2f7a1c5e11".into(),
        peers: vec![host("host-b")],
        cordoned: true,
        cpu: CpuFacts {
            processors: 8,
            vendor: "GenuineIntel".into(),
            model: "Intel(R) Xeon(R)".into(),
            features: vec!["aes".into(), "avx2".into()],
        },
        memory_bytes: 64 << 30,
        numa_bytes: vec![32 << 30, 32 << 30],
        qemu_versions: vec!["10.0".into(), "7.2".into()],
        kernel: "6.12.9".into(),
        kernel_lacks: vec!["PAGEMAP_SCAN".into()],
        kvm: true,
    }
}

fn vm_facts() -> VmFacts {
    VmFacts {
        vm: vm(),
        state: "running".into(),
        memory_bytes: 4 << 30,
        vcpus: 2,
        busy_milli: 340,
        qemu_version: "10.0.2".into(),
        machine_type: "pc-q35-10.0".into(),
        cpu_model: "max".into(),
        kvm: true,
        disk_bytes: 20 << 30,
        migration: None,
    }
}

fn migration_facts() -> MigrationFacts {
    MigrationFacts {
        migration: migration(),
        from: host("host-a"),
        to: host("host-b"),
        state: "prepared".into(),
        standing: MigrationStanding::Underway,
        message: None,
        progress: None,
    }
}

fn reports() -> Vec<FleetReport> {
    let progress = MigrationProgress {
        phase: "pre-copy".into(),
        round_bytes: 1 << 30,
        remaining_bytes: 1 << 20,
        sent_bytes: 1 << 29,
        rate_bytes_per_s: 117_000_000,
        dirty_rate_bytes_per_s: 5_000_000,
        downtime_us: Some(23_000),
        elapsed_us: 4_000_000,
    };
    let load = HostLoad { busy_milli: 2500, available_bytes: 40 << 30, pool_free_bytes: 1 << 40 };
    let more = MigrationFacts {
        standing: MigrationStanding::InDoubt,
        message: Some("the link was cut".into()),
        progress: Some(progress),
        ..migration_facts()
    };
    vec![
        FleetReport::Begin { host: Box::new(host_facts()) },
        FleetReport::Changed {
            changes: vec![
                FleetChange::Host { host: Box::new(host_facts()) },
                FleetChange::Load { load },
                FleetChange::Contents { contents: serde_json::json!({ "host": "host-a" }) },
                FleetChange::Vm { vm: Box::new(vm_facts()) },
                FleetChange::Vm { vm: Box::new(VmFacts { migration: Some(migration()), ..vm_facts() }) },
                FleetChange::VmGone { vm: vm() },
                FleetChange::Migration { migration: Box::new(migration_facts()) },
                FleetChange::Migration { migration: Box::new(more) },
                FleetChange::Move { command: command(), state: serde_json::json!({ "state": "unknown" }) },
            ],
        },
        FleetReport::Complete,
        FleetReport::EvacuateHost { request: 6, within_s: None },
        FleetReport::EvacuateHost { request: 7, within_s: Some(1800) },
    ]
}

fn answers() -> Vec<CommandAnswer> {
    vec![
        CommandAnswer::Move { state: serde_json::json!({ "state": "underway" }) },
        CommandAnswer::Checked { report: serde_json::json!({ "possible": true }) },
        CommandAnswer::Report { report: serde_json::json!({ "outcome": "moved" }) },
        CommandAnswer::Facts { facts: serde_json::json!({ "host": "host-a" }) },
        CommandAnswer::Done,
        CommandAnswer::Refused { problem: serde_json::json!({ "kind": "not-found" }) },
        CommandAnswer::Stale { largest_term: 5 },
    ]
}

fn verbs() -> Vec<CommandVerb> {
    let order =
        MoveOrder { vm: vm(), to: host("host-b"), bandwidth_bytes_per_s: None, policy: None, verify: false };
    let all = |policy| MoveOrder {
        bandwidth_bytes_per_s: Some(50_000_000),
        policy: Some(policy),
        verify: true,
        ..order.clone()
    };
    vec![
        CommandVerb::Move(order.clone()),
        CommandVerb::Move(all(MovePolicy::Pattern)),
        CommandVerb::Move(all(MovePolicy::Hybrid)),
        CommandVerb::Check(all(MovePolicy::Sla)),
        CommandVerb::Cancel { of: command() },
        CommandVerb::Limit { of: command(), bandwidth_bytes_per_s: Some(0), max_downtime_ms: None },
        CommandVerb::Limit { of: command(), bandwidth_bytes_per_s: None, max_downtime_ms: Some(100) },
        CommandVerb::Report { migration: migration() },
        CommandVerb::Facts { commands: vec![command()] },
        CommandVerb::Cordon,
        CommandVerb::Uncordon,
    ]
}

/// One message of each kind, verb, report and answer, in the order of the file.
pub(crate) fn messages() -> Vec<Message> {
    let id = || CommandId::new("c2-17").unwrap();
    let commands = verbs().into_iter().map(|command| Message::FleetCommand { term: 4, id: id(), command });
    let answers = answers().into_iter().map(|answer| FleetReport::Answer { id: id(), answer });
    let reports = reports().into_iter().chain(answers);
    let reports = reports.zip(1..).map(|(report, seq)| Message::FleetReport { seq, report });
    let evacuation = |evacuation: Option<&str>, standing, text: &str| {
        let (evacuation, text) = (evacuation.map(str::to_owned), text.to_owned());
        Message::HostEvacuation(HostEvacuation { request: 7, evacuation, standing, text })
    };
    let evacuations = [
        evacuation(Some("e7"), EvacuationStanding::Underway, "web-1 has moved to host-b"),
        evacuation(Some("e7"), EvacuationStanding::Done, "the host is empty"),
        evacuation(None, EvacuationStanding::Failed, "no host has room"),
    ];
    std::iter::once(Message::ControllerTerm { term: 4 })
        .chain(commands)
        .chain(evacuations)
        .chain(reports)
        .collect()
}
