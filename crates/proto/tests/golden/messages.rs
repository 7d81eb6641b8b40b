//! Examples of all messages, in the order of the file.

use std::net::{Ipv4Addr, Ipv6Addr};

use proto::message::{
    Acceptance, CardClaims, CardFrames, ClaimedAddress, CopiedDisk, DiskMode, FailedFlow, Finding, HashedRun,
    Hello, Message, NetworkProbe, Offer, Ownership, PageRequest, ProbedCard, Proposal, ProposedDisk, Purpose,
    RamBlock, RegistryReply, RegistryRequest, RepointStep, Severity, TunnelRequest, Verdict, Welcome,
};
use proto::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};
use whimbrel_proto as proto;

const HASH: &str = "0123456789abcdef";
const DIGEST: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

fn vm() -> VmName {
    VmName::new("web-1").unwrap()
}

fn host() -> HostId {
    HostId::new("host-a").unwrap()
}

fn incarnation() -> Incarnation {
    Incarnation {
        boot_id: "7d0e3f6c-3b44-4d7b-9d0f-0d2f7a1c5e11".into(),
        pid: 4711,
        start_time_ticks: 123_456_789,
        generation: Generation(2),
    }
}

fn ownership() -> Ownership {
    let offer = Offer { epoch: Epoch(4), incarnation: incarnation(), run: true };
    Ownership { epoch: Epoch(3), owner: host(), offer: Some(Box::new(offer)), released: false }
}

fn finding() -> Finding {
    Finding {
        severity: Severity::Blocker,
        code: "kernel-too-old".into(),
        what: "Linux 6.1".into(),
        advice: "install 6.7 or newer".into(),
    }
}

/// Acceptance of a destination without any optional feature.
fn acceptance() -> Acceptance {
    Acceptance {
        findings: Vec::new(),
        qemu_start_us: 250_000,
        ram_kind: "memfd".into(),
        qemu_version: None,
        copied: Vec::new(),
        references: false,
        templates: 0,
        codecs: Vec::new(),
        deltas: false,
        post_copy: false,
        can_discard: false,
        has_network: false,
        takes_frames: false,
        takes_flows: false,
        redirection: None,
    }
}

fn proposal() -> Proposal {
    Proposal {
        reply_to: "host-a:7700".into(),
        streams: 4,
        ram: vec![
            RamBlock { name: "pc.ram".into(), bytes: 1 << 30, page_bytes: 2 << 20 },
            RamBlock { name: "0000:00:02.0/vga.vram".into(), bytes: 16 << 20, page_bytes: 4096 },
        ],
        facts: serde_json::json!({ "kernel": "6.18" }),
        description: serde_json::json!({ "machine": "pc-i440fx-7.2" }),
        check_only: false,
        registry_epoch: None,
        witness: None,
        ram_kind: None,
        allow_options: Vec::new(),
        disks: Vec::new(),
        delta_seed: None,
        post_copy: false,
        probe: None,
        redirection: None,
    }
}

pub(crate) fn greetings() -> Vec<Hello> {
    let migration = || MigrationId { vm: vm(), epoch: Epoch(3) };
    [
        Purpose::Control { migration: migration(), generation: Generation(1) },
        Purpose::Data { migration: migration(), generation: Generation(1), stream: 3 },
        Purpose::Handover { migration: migration() },
        Purpose::Registry,
        Purpose::Frames { migration: migration() },
        Purpose::Flows { migration: migration() },
        Purpose::Redirection { migration: migration() },
        Purpose::Measurement,
        Purpose::Controller,
    ]
    .map(|purpose| Hello { oldest: 1, newest: 1, host: host(), purpose })
    .into()
}

pub(crate) fn answers() -> Vec<Welcome> {
    vec![
        Welcome::Accepted { version: 1, host: host() },
        Welcome::Refused { reason: "no such migration".into() },
    ]
}

/// One message of each kind, in the order of the file; for those with optional fields one without and one with them.
#[expect(clippy::too_many_lines, reason = "a list of messages")]
pub(crate) fn messages() -> Vec<Message> {
    let epoch = Epoch(3);
    let reason = || "the link was cut".to_owned();
    let full = Proposal {
        check_only: true,
        registry_epoch: Some(Epoch(2)),
        witness: Some(HostId::new("host-w").unwrap()),
        ram_kind: Some("memfd".into()),
        allow_options: vec!["-foo".into()],
        disks: vec![ProposedDisk {
            name: "drive0".into(),
            bytes: 20 << 30,
            allocated_bytes: 1 << 30,
            wanted: DiskMode::Auto,
            drop_snapshots: false,
        }],
        delta_seed: Some(u64::MAX),
        post_copy: true,
        probe: Some(NetworkProbe {
            nonce: u64::MAX,
            required: true,
            cards: vec![ProbedCard {
                mac: "52:54:00:12:34:56".into(),
                interface: "tap0".into(),
                bridge: "br0".into(),
                vlan: Some(5),
                tagged: vec![6],
                gateways: vec!["10.0.0.254".parse().unwrap()],
            }],
        }),
        ..proposal()
    };
    let committed = Verdict::Committed { incarnation: incarnation(), run: false };
    let set = RegistryRequest::CompareAndSet {
        vm: vm(),
        expected: Some((Epoch(2), HostId::new("host-b").unwrap())),
        new: ownership(),
    };
    let first = RegistryRequest::CompareAndSet {
        vm: vm(),
        expected: None,
        new: Ownership { epoch: Epoch(1), owner: host(), offer: None, released: false },
    };
    let mut messages = vec![
        Message::Propose(Box::new(proposal())),
        Message::Propose(Box::new(full)),
        Message::Propose(Box::new(Proposal {
            redirection: Some(serde_json::json!({ "number": 31 })),
            ..proposal()
        })),
        Message::Accept(Acceptance {
            findings: vec![Finding { severity: Severity::Warning, ..finding() }],
            ..acceptance()
        }),
        Message::Accept(Acceptance {
            qemu_version: Some("10.0.2".into()),
            copied: vec![CopiedDisk {
                name: "drive0".into(),
                path: "/var/lib/whimbrel/disks/web@3-drive0.qcow2".into(),
                format: "qcow2".into(),
                send_zeros: false,
            }],
            ..acceptance()
        }),
        Message::Accept(Acceptance {
            copied: vec![CopiedDisk {
                name: "drive0".into(),
                path: "/dev/vg0/web+3-drive0".into(),
                format: "raw".into(),
                send_zeros: true,
            }],
            references: true,
            templates: 2,
            codecs: vec!["lz4".into(), "zstd".into()],
            deltas: true,
            post_copy: true,
            ..acceptance()
        }),
        Message::Accept(Acceptance { post_copy: true, can_discard: true, ..acceptance() }),
        Message::Accept(Acceptance { has_network: true, takes_frames: true, ..acceptance() }),
        Message::Accept(Acceptance { takes_flows: true, ..acceptance() }),
        Message::Accept(Acceptance { redirection: Some(serde_json::json!({ "epoch": 3 })), ..acceptance() }),
        Message::Reject {
            findings: vec![finding(), Finding { severity: Severity::Info, ..finding() }],
            largest_epoch: None,
        },
        Message::Reject { findings: vec![finding()], largest_epoch: Some(Epoch(9)) },
        Message::Resume,
        Message::Resumed,
        Message::QueryTemplates { hashes: vec!["00112233aabb".into(), "ffeeddccbbaa".into()] },
        Message::TemplatePages {
            template: 1,
            runs: vec![HashedRun { first_page: 4096, hashes: "00112233aabbffeeddccbbaa".into() }],
            last: false,
        },
        Message::TemplatePages { template: 0, runs: Vec::new(), last: true },
        Message::Verify { block: 1, first_chunk: 4096, hashes: vec![HASH.into(), HASH.into()] },
        Message::Verified { different_chunks: vec![4097] },
        Message::Discard { bytes: 72, digest: DIGEST.into() },
        Message::Discarded { duration_us: 4_000 },
        Message::MissingPages { bytes: 144, digest: DIGEST.into(), round: 9 },
        Message::RequestPages { pages: vec![PageRequest { block: 1, page: 4711 }] },
        Message::PagesComplete,
        Message::Claims {
            cards: vec![CardClaims {
                mac: "52:54:00:12:34:56".into(),
                addresses: vec![
                    ClaimedAddress { address: Ipv4Addr::new(10, 0, 0, 7).into(), vlan: None, router: false },
                    ClaimedAddress { address: Ipv6Addr::LOCALHOST.into(), vlan: Some(5), router: true },
                ],
            }],
        },
        Message::Flows { bytes: 2_345 },
        Message::FlowsInstalled { installed: 7, failed: Vec::new(), more_failed: 0 },
        Message::FlowsInstalled {
            installed: 0,
            failed: vec![FailedFlow { flow: "udp 10.0.0.9:53 → 10.0.0.7:53".into(), reason: reason() }],
            more_failed: 9,
        },
        Message::DeviceState { bytes: 31_000, state_bytes: 275_000, digest: DIGEST.into() },
        Message::Frozen { epoch, run: true },
        Message::Ready { epoch, incarnation: incarnation(), digest: DIGEST.into(), load_us: 6_000 },
        Message::Go { epoch, incarnation: incarnation(), run: true },
        Message::Running {
            epoch,
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            agent_cpu_us: None,
            unexpected_page: None,
        },
        Message::Running {
            epoch,
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            agent_cpu_us: Some(1_250_000),
            unexpected_page: None,
        },
        Message::Running {
            epoch,
            continue_us: 900,
            since_us: 1200,
            resumed_us: Some(700),
            agent_cpu_us: None,
            unexpected_page: None,
        },
        Message::Incomplete {
            epoch,
            generation: Generation(2),
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            unexpected_page: None,
        },
        Message::Incomplete {
            epoch,
            generation: Generation(2),
            continue_us: 900,
            since_us: 1200,
            resumed_us: Some(700),
            unexpected_page: None,
        },
        Message::Incomplete {
            epoch,
            generation: Generation(2),
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            unexpected_page: Some(PageRequest { block: 1, page: 4096 }),
        },
        Message::FirstFrames {
            epoch,
            cards: vec![CardFrames {
                mac: "52:54:00:12:34:56".into(),
                interface: "tap0".into(),
                first_in_us: Some(900),
                first_out_us: None,
            }],
        },
        Message::Refused { epoch, reason: reason() },
        Message::Crashed { epoch, reason: reason() },
        Message::Inquire { epoch },
        Message::Abort { epoch, reason: reason() },
        Message::Ask { epoch },
        Message::Verdict { epoch, verdict: committed },
        Message::Verdict { epoch, verdict: Verdict::Aborted },
        Message::Verdict { epoch, verdict: Verdict::Returned },
        Message::Verdict { epoch, verdict: Verdict::Undecided },
        Message::Ping,
        Message::Pong,
        Message::RegistryRequest(RegistryRequest::Read { vm: vm() }),
        Message::RegistryRequest(set),
        Message::RegistryRequest(first),
        Message::RegistryReply(RegistryReply::Record { record: Some(ownership()) }),
        Message::RegistryReply(RegistryReply::Record { record: None }),
        Message::RegistryReply(RegistryReply::Set),
        Message::RegistryReply(RegistryReply::Failed { reason: reason() }),
        Message::AskRedirection,
        Message::RedirectionStands { stands: true, confirmed: false },
        Message::RedirectionStands { stands: true, confirmed: true },
        Message::AskTunnelEnd(TunnelRequest {
            card: "52:54:00:00:00:07".into(),
            destination: host(),
            check_only: false,
        }),
        Message::AskTunnelEnd(TunnelRequest {
            card: "52:54:00:00:00:07".into(),
            destination: host(),
            check_only: true,
        }),
        Message::TunnelEnd { end: Some(serde_json::json!({ "number": 31 })), reason: None },
        Message::TunnelEnd { end: None, reason: Some(reason()) },
        Message::Repoint { step: RepointStep::Prepare, redirection: Some(serde_json::json!({ "epoch": 3 })) },
        Message::Repoint { step: RepointStep::Switch, redirection: None },
        Message::Repoint { step: RepointStep::Remove, redirection: None },
        Message::Repointed { error: None },
        Message::Repointed { error: Some(reason()) },
        Message::MeasureLink { bytes: 1 << 20 },
        Message::LinkMeasured { bytes: 983_040, duration_us: 8400 },
    ];
    messages.extend(super::fleet::messages());
    messages
}

/// Number of a message's kind. A new message does not compile here; its number also has to be in the list above.
pub(crate) fn number(message: &Message) -> usize {
    match message {
        Message::Propose(_) => 0,
        Message::Accept(_) => 1,
        Message::Reject { .. } => 2,
        Message::Resume => 3,
        Message::Resumed => 4,
        Message::QueryTemplates { .. } => 5,
        Message::TemplatePages { .. } => 6,
        Message::Verify { .. } => 7,
        Message::Verified { .. } => 8,
        Message::Discard { .. } => 9,
        Message::Discarded { .. } => 10,
        Message::MissingPages { .. } => 11,
        Message::RequestPages { .. } => 12,
        Message::PagesComplete => 13,
        Message::Claims { .. } => 14,
        Message::Flows { .. } => 15,
        Message::FlowsInstalled { .. } => 16,
        Message::DeviceState { .. } => 17,
        Message::Frozen { .. } => 18,
        Message::Ready { .. } => 19,
        Message::Go { .. } => 20,
        Message::Running { .. } => 21,
        Message::Incomplete { .. } => 22,
        Message::FirstFrames { .. } => 23,
        Message::Refused { .. } => 24,
        Message::Crashed { .. } => 25,
        Message::Inquire { .. } => 26,
        Message::Abort { .. } => 27,
        Message::Ask { .. } => 28,
        Message::Verdict { .. } => 29,
        Message::Ping => 30,
        Message::Pong => 31,
        Message::RegistryRequest(_) => 32,
        Message::RegistryReply(_) => 33,
        Message::AskRedirection => 34,
        Message::RedirectionStands { .. } => 35,
        Message::AskTunnelEnd(_) => 36,
        Message::TunnelEnd { .. } => 37,
        Message::Repoint { .. } => 38,
        Message::Repointed { .. } => 39,
        Message::MeasureLink { .. } => 40,
        Message::LinkMeasured { .. } => 41,
        Message::ControllerTerm { .. } => 42,
        Message::FleetCommand { .. } => 43,
        Message::HostEvacuation(_) => 44,
        Message::FleetReport { .. } => 45,
    }
}
