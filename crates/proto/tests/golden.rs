//! The exact bytes of version 1. If a test here fails, programs of different releases no longer understand one
//! another: such a change needs a new version of the protocol, and this version's lines stay as they are.
//!
//! `golden/v1.messages` holds a JSON message a line, `golden/v1.frames` a frame a line, in hexadecimal.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use proto::delta::Delta;
use proto::frame::{FrameKind, Header};
use proto::message::{
    Acceptance, CopiedDisk, DiskMode, Finding, Hello, Message, NamedRun, Offer, Ownership, PageRequest,
    Proposal, ProposedDisk, Purpose, RamBlock, RegistryReply, RegistryRequest, Severity, Verdict, Welcome,
};
use proto::packed::{Codec, Packed};
use proto::pages::{self, Ack, Content, PageRun, PagesHeader, decode_round_end, encode_round_end};
use proto::reference::{ContentSource, Reference, decode_missing, encode_missing};
use proto::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};
use whimbrel_proto as proto;

const MESSAGES: &str = include_str!("golden/v1.messages");
const FRAMES: &str = include_str!("golden/v1.frames");

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
        register_epoch: None,
        witness: None,
        ram_kind: None,
        allow_options: Vec::new(),
        disks: Vec::new(),
        delta_seed: None,
        post_copy: false,
    }
}

fn greetings() -> Vec<Hello> {
    let migration = || MigrationId { vm: vm(), epoch: Epoch(3) };
    [
        Purpose::Control { migration: migration(), generation: Generation(1) },
        Purpose::Data { migration: migration(), generation: Generation(1), stream: 3 },
        Purpose::Handover { migration: migration() },
        Purpose::Register,
    ]
    .map(|purpose| Hello { oldest: 1, newest: 1, host: host(), purpose })
    .into()
}

fn answers() -> Vec<Welcome> {
    vec![
        Welcome::Accepted { version: 1, host: host() },
        Welcome::Refused { reason: "no such migration".into() },
    ]
}

/// One message of each kind, in the order of the file; for those with optional fields one without and one with them.
fn messages() -> Vec<Message> {
    let epoch = Epoch(3);
    let reason = || "the link was cut".to_owned();
    let full = Proposal {
        check_only: true,
        register_epoch: Some(Epoch(2)),
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
    vec![
        Message::Propose(Box::new(proposal())),
        Message::Propose(Box::new(full)),
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
        Message::Reject {
            findings: vec![finding(), Finding { severity: Severity::Info, ..finding() }],
            largest_epoch: None,
        },
        Message::Reject { findings: vec![finding()], largest_epoch: Some(Epoch(9)) },
        Message::Resume,
        Message::Resumed,
        Message::QueryTemplates { names: vec!["00112233aabb".into(), "ffeeddccbbaa".into()] },
        Message::TemplatePages {
            template: 1,
            runs: vec![NamedRun { first_page: 4096, names: "00112233aabbffeeddccbbaa".into() }],
            last: false,
        },
        Message::TemplatePages { template: 0, runs: Vec::new(), last: true },
        Message::Verify { block: 1, first_chunk: 4096, hashes: vec![HASH.into(), HASH.into()] },
        Message::Verified { different_chunks: vec![4097] },
        Message::Discard { bytes: 72, digest: DIGEST.into() },
        Message::Discarded { duration_us: 4_000 },
        Message::MissingPages { bytes: 144, digest: DIGEST.into(), round: 9 },
        Message::RequestPages { pages: vec![PageRequest { block: 1, page: 4711 }] },
        Message::DeviceState { bytes: 275_000, digest: DIGEST.into() },
        Message::Held { epoch, run: true },
        Message::Ready { epoch, incarnation: incarnation(), digest: DIGEST.into(), load_us: 6_000 },
        Message::Go { epoch, incarnation: incarnation(), run: true },
        Message::Running {
            epoch,
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            agent_cpu_us: None,
            untrusted: None,
        },
        Message::Running {
            epoch,
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            agent_cpu_us: Some(1_250_000),
            untrusted: None,
        },
        Message::Running {
            epoch,
            continue_us: 900,
            since_us: 1200,
            resumed_us: Some(700),
            agent_cpu_us: None,
            untrusted: None,
        },
        Message::Incomplete {
            epoch,
            generation: Generation(2),
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            untrusted: None,
        },
        Message::Incomplete {
            epoch,
            generation: Generation(2),
            continue_us: 900,
            since_us: 1200,
            resumed_us: Some(700),
            untrusted: None,
        },
        Message::Incomplete {
            epoch,
            generation: Generation(2),
            continue_us: 900,
            since_us: 1200,
            resumed_us: None,
            untrusted: Some(PageRequest { block: 1, page: 4096 }),
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
        Message::Register(RegistryRequest::Read { vm: vm() }),
        Message::Register(set),
        Message::Register(first),
        Message::Registered(RegistryReply::Stands { record: Some(ownership()) }),
        Message::Registered(RegistryReply::Stands { record: None }),
        Message::Registered(RegistryReply::Set),
        Message::Registered(RegistryReply::Failed { reason: reason() }),
    ]
}

/// Number of a message's kind. A new message does not compile here; its number also has to be in the list above.
fn number(message: &Message) -> usize {
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
        Message::DeviceState { .. } => 13,
        Message::Held { .. } => 14,
        Message::Ready { .. } => 15,
        Message::Go { .. } => 16,
        Message::Running { .. } => 17,
        Message::Incomplete { .. } => 18,
        Message::Refused { .. } => 19,
        Message::Crashed { .. } => 20,
        Message::Inquire { .. } => 21,
        Message::Abort { .. } => 22,
        Message::Ask { .. } => 23,
        Message::Verdict { .. } => 24,
        Message::Ping => 25,
        Message::Pong => 26,
        Message::Register(_) => 27,
        Message::Registered(_) => 28,
    }
}

fn frame(kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    [&Header::new(kind, payload.len()).unwrap().encode(), payload].concat()
}

const PAGES: PagesHeader = PagesHeader { seq: 0x0102_0304_0506_0708, round: 9, block: 1, chunk: 0x0a0b_0c0d };
const RUNS: [PageRun; 3] = [
    PageRun { first_page: 0, pages: 2, content: Content::Zero },
    PageRun { first_page: 3, pages: 1, content: Content::Hole },
    PageRun { first_page: 510, pages: 2, content: Content::Hole },
];

const REFERENCES: [Reference; 2] = [
    Reference { content_source: ContentSource::Template(3), first_page: 0x0102_0304_0506, hash: [0xaa; 16] },
    Reference { content_source: ContentSource::Block(1), first_page: 9, hash: [0xbb; 16] },
];

/// A frame with two references.
fn referring() -> Vec<u8> {
    let run = |first_page, pages| PageRun { first_page, pages, content: Content::Reference };
    let mut payload = Vec::new();
    PAGES.encode(&[run(4, 2), run(6, 1)], &mut payload);
    payload.extend(REFERENCES.iter().flat_map(Reference::encode));
    payload
}

/// A frame with the deltas of two pages, three pieces in all.
fn changed() -> Vec<u8> {
    let mut payload = Vec::new();
    PAGES.encode(&[PageRun { first_page: 4, pages: 2, content: Content::Delta { pieces: 3 } }], &mut payload);
    Delta::encode(&[0xaa; 4096], 0x0102_0304_0506_0708, 1 << 63 | 1, &mut payload);
    Delta::encode(&[0xbb; 4096], 0x090a_0b0c_0d0e_0f10, 1 << 9, &mut payload);
    payload
}

/// A frame with two runs of filled pages.
fn filled() -> Vec<u8> {
    let run = |first_page, pages| PageRun { first_page, pages, content: Content::Filled };
    let mut payload = Vec::new();
    PAGES.encode(&[run(4, 500), run(504, 1)], &mut payload);
    payload.extend_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa]);
    payload
}

const ACK: Ack = Ack { seq: 0x0102_0304_0506_0708, waited_us: 0x090a_0b0c };

/// A page of data in three bytes, which no codec could have produced; this test does not decompress.
fn packed() -> Vec<u8> {
    let mut payload = Codec::Zstd.encode().to_vec();
    PAGES.encode(&[PageRun { first_page: 3, pages: 1, content: Content::Data }], &mut payload);
    payload.extend_from_slice(&[0xaa; 3]);
    payload
}

/// One frame of each kind, in the order of the file. The page of data is checked separately: it would fill the file.
fn frames() -> Vec<Vec<u8>> {
    let mut without_data = Vec::new();
    PAGES.encode(&RUNS, &mut without_data);
    vec![
        frame(FrameKind::Message, &serde_json::to_vec(&Message::Ping).unwrap()),
        frame(FrameKind::Blob, b"QEVM"),
        frame(FrameKind::Pages, &without_data),
        frame(FrameKind::RoundEnd, &encode_round_end(0x0102_0304_0506_0708, 0x090a_0b0c)),
        frame(FrameKind::Ack, &ACK.encode()),
        frame(FrameKind::Missing, &encode_missing(0x0102_0304_0506_0708, &[1, 0, 0, 0, 0, 0, 0, 1 << 63])),
        frame(FrameKind::Pages, &referring()),
        frame(FrameKind::Packed, &packed()),
        frame(FrameKind::Pages, &changed()),
        frame(FrameKind::Pages, &filled()),
        Header::new(FrameKind::Pages, pages::MAX_PAYLOAD_BYTES).unwrap().encode().to_vec(),
    ]
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;

    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn every_message_is_on_file() {
    let mut seen: Vec<_> = messages().iter().map(number).collect();
    seen.dedup();
    assert_eq!(seen, (0..=28).collect::<Vec<_>>());
}

#[test]
fn json_is_written_and_read_as_in_version_1() {
    let mut written: Vec<String> = Vec::new();
    written.extend(greetings().iter().map(|hello| serde_json::to_string(hello).unwrap()));
    written.extend(answers().iter().map(|welcome| serde_json::to_string(welcome).unwrap()));
    written.extend(messages().iter().map(|message| serde_json::to_string(message).unwrap()));
    let lines: Vec<_> = MESSAGES.lines().collect();
    assert_eq!(written, lines, "written:\n{}", written.join("\n"));

    let mut lines = lines.into_iter();
    for hello in greetings() {
        assert_eq!(serde_json::from_str::<Hello>(lines.next().unwrap()).unwrap(), hello);
    }
    for welcome in answers() {
        assert_eq!(serde_json::from_str::<Welcome>(lines.next().unwrap()).unwrap(), welcome);
    }
    for message in messages() {
        let read: Message = serde_json::from_str(lines.next().unwrap()).unwrap();
        assert_eq!(read, message);
        assert_eq!(read.validate(), Ok(()));
    }
}

#[test]
fn frames_are_written_and_read_as_in_version_1() {
    let written: Vec<_> = frames().iter().map(|frame| hex(frame)).collect();
    let lines: Vec<_> = FRAMES.lines().collect();
    assert_eq!(written, lines, "written:\n{}", written.join("\n"));

    let read: Vec<_> = lines
        .iter()
        .map(|line| {
            let bytes = from_hex(line);
            let (header, payload) = bytes.split_first_chunk().unwrap();
            (Header::decode(*header).unwrap(), payload.to_vec())
        })
        .collect();
    let kinds: Vec<_> = read.iter().map(|(header, _)| header.kind).collect();
    let expected = [
        FrameKind::Message,
        FrameKind::Blob,
        FrameKind::Pages,
        FrameKind::RoundEnd,
        FrameKind::Ack,
        FrameKind::Missing,
    ];
    assert_eq!(
        kinds,
        [
            &expected[..],
            &[FrameKind::Pages, FrameKind::Packed, FrameKind::Pages, FrameKind::Pages, FrameKind::Pages]
        ]
        .concat()
    );
    for (header, payload) in &read[..10] {
        assert_eq!(header.payload_bytes as usize, payload.len());
    }
    let mut runs = Vec::new();
    assert_eq!(PagesHeader::decode(&read[2].1, &mut runs), Ok((PAGES, &[][..])));
    assert_eq!(runs, RUNS);
    assert_eq!(decode_round_end(&read[3].1), Ok((0x0102_0304_0506_0708, 0x090a_0b0c)));
    assert_eq!(Ack::decode(&read[4].1), Ok(ACK));
    assert_eq!(decode_missing(&read[5].1), Ok((0x0102_0304_0506_0708, [1, 0, 0, 0, 0, 0, 0, 1 << 63])));
    let (_, records) = PagesHeader::decode(&read[6].1, &mut runs).unwrap();
    let records: Vec<_> = records.chunks(32).map(|record| Reference::decode(record).unwrap()).collect();
    assert_eq!(records, REFERENCES);
    let packed = Packed::decode(&read[7].1, &mut runs).unwrap();
    assert_eq!((packed.header, packed.codec, packed.bytes), (PAGES, Codec::Zstd, &[0xaa; 3][..]));
    assert_eq!((packed.data_bytes, runs.len()), (4096, 1));
    let (_, mut changes) = PagesHeader::decode(&read[8].1, &mut runs).unwrap();
    assert_eq!(runs, [PageRun { first_page: 4, pages: 2, content: Content::Delta { pieces: 3 } }]);
    let first = Delta { hash: 0x0102_0304_0506_0708, changed: 1 << 63 | 1, pieces: &[0xaa; 128] };
    let second = Delta { hash: 0x090a_0b0c_0d0e_0f10, changed: 1 << 9, pieces: &[0xbb; 64] };
    assert_eq!([Delta::take(&mut changes), Delta::take(&mut changes)], [Ok(first), Ok(second)]);
    assert!(changes.is_empty());
    let (_, fillings) = PagesHeader::decode(&read[9].1, &mut runs).unwrap();
    assert_eq!((runs[0].content, runs[1].content, runs[0].pages), (Content::Filled, Content::Filled, 500));
    assert_eq!(fillings.as_chunks().0, [[1, 2, 3, 4, 5, 6, 7, 8], [0xaa; 8]]);
}

/// Contents follow the runs, in their order, with nothing in between.
#[test]
fn pages_of_data_stand_behind_the_runs() {
    let runs = [
        PageRun { first_page: 1, pages: 1, content: Content::Data },
        PageRun { first_page: 2, pages: 1, content: Content::Zero },
        PageRun { first_page: 7, pages: 2, content: Content::Data },
    ];
    let mut payload = Vec::new();
    PAGES.encode(&runs, &mut payload);
    let written = hex(&payload);
    assert_eq!(
        written,
        "080706050403020109000000010003000d0c0b0a00000000010001000100000002000100020000000700020001000000"
    );
    payload.extend((0..3 * 4096).map(|at| (at / 4096) as u8));
    let mut read = Vec::new();
    let (header, data) = PagesHeader::decode(&payload, &mut read).unwrap();
    assert_eq!((header, &read[..]), (PAGES, &runs[..]));
    assert_eq!((data.len(), data[0], data[4096], data[8192]), (3 * 4096, 0, 1, 2));
}

/// Later releases of this version may add optional fields; today's programs ignore them.
#[test]
fn unknown_fields_are_ignored_and_unknown_messages_are_not() {
    let read = serde_json::from_str::<Message>(r#"{"type":"ask","epoch":3,"why":{"later":[1,2]}}"#).unwrap();
    assert_eq!(read, Message::Ask { epoch: Epoch(3) });
    let read = serde_json::from_str::<Message>(r#"{"type":"ping","later":true}"#).unwrap();
    assert_eq!(read, Message::Ping);
    for unknown in [r#"{"type":"dance"}"#, r#"{"epoch":3}"#, r#"{"type":"ask"}"#, "{}", "null", "[]", ""] {
        assert!(serde_json::from_str::<Message>(unknown).is_err(), "{unknown}");
    }
}
