//! Contents that messages must not have.

use proto::message::{
    CardClaims, CardFrames, ClaimedAddress, DiskMode, FailedFlow, Message, NetworkProbe, ProbedCard,
    Proposal, ProposedDisk, RamBlock,
};
use proto::{Epoch, Generation, Incarnation, Invalid, limits};
use whimbrel_proto as proto;

fn block(name: &str, bytes: u64, page_bytes: u64) -> RamBlock {
    RamBlock { name: name.into(), bytes, page_bytes }
}

fn proposal() -> Proposal {
    Proposal {
        reply_to: "host-a:7700".into(),
        streams: 4,
        ram: vec![block("pc.ram", 1 << 30, 4096), block("pc.bios", 4096, 4096)],
        facts: serde_json::Value::Null,
        description: serde_json::Value::Null,
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

/// Returns the result of validating a changed proposal.
fn changed(change: impl FnOnce(&mut Proposal)) -> Result<(), Invalid> {
    let mut proposal = proposal();
    change(&mut proposal);
    Message::Propose(Box::new(proposal)).validate()
}

#[test]
fn probes() {
    let card = ProbedCard {
        mac: "52:54:00:12:34:56".into(),
        interface: "tap0".into(),
        bridge: "br0".into(),
        vlan: None,
        tagged: vec![5; limits::PROBED_VLANS],
        gateways: vec![[10, 0, 0, 1].into(); limits::PROBED_GATEWAYS],
    };
    let probed = |cards: Vec<ProbedCard>| {
        changed(|proposal| proposal.probe = Some(NetworkProbe { nonce: 1, required: false, cards }))
    };
    let with = |change: fn(&mut ProbedCard)| {
        let mut card = card.clone();
        change(&mut card);
        probed(vec![card])
    };
    assert_eq!(probed(vec![card.clone(); limits::NETWORK_CARDS]), Ok(()));
    let many = probed(vec![card.clone(); limits::NETWORK_CARDS + 1]);
    assert!(matches!(many, Err(Invalid::TooMany { field: "probed network cards", .. })));
    assert!(matches!(with(|card| card.tagged.push(6)), Err(Invalid::TooMany { .. })));
    assert!(matches!(with(|card| card.gateways.push([10, 0, 0, 2].into())), Err(Invalid::TooMany { .. })));
    for texts in [
        with(|card| card.mac.clear()),
        with(|card| card.interface.push('\n')),
        with(|card| card.bridge.clear()),
    ] {
        assert!(matches!(texts, Err(Invalid::Text { .. })));
    }
}

#[test]
fn proposals() {
    assert_eq!(changed(|_| ()), Ok(()));
    assert_eq!(changed(|proposal| proposal.streams = limits::STREAMS), Ok(()));
    for streams in [0, limits::STREAMS + 1, u16::MAX] {
        assert_eq!(changed(|proposal| proposal.streams = streams), Err(Invalid::Streams(streams)));
    }

    let many = |count: usize| (0..count).map(|at| block(&format!("ram{at}"), 4096, 4096)).collect::<Vec<_>>();
    assert_eq!(changed(|proposal| proposal.ram = many(limits::RAM_BLOCKS)), Ok(()));
    for count in [0, limits::RAM_BLOCKS + 1] {
        assert_eq!(changed(|proposal| proposal.ram = many(count)), Err(Invalid::RamBlocks(count)));
    }
    assert_eq!(
        changed(|proposal| proposal.ram.push(block("pc.ram", 4096, 4096))),
        Err(Invalid::DuplicateRamBlock("pc.ram".into()))
    );

    let longest = "x".repeat(limits::RAM_BLOCK_NAME_BYTES);
    assert_eq!(changed(|proposal| proposal.ram[0].name.clone_from(&longest)), Ok(()));
    for name in [String::new(), longest + "x", "a\nb".into(), "a\0".into()] {
        let invalid = changed(|proposal| proposal.ram[0].name = name);
        assert_eq!(invalid, Err(Invalid::Text { field: "a RAM block's name" }));
    }
    for reply_to in [String::new(), "x".repeat(limits::ADDRESS_BYTES + 1)] {
        let invalid = changed(|proposal| proposal.reply_to = reply_to);
        assert_eq!(invalid, Err(Invalid::Text { field: "the address for answers" }));
    }

    for (bytes, page_bytes) in [(4096, 4096), (3 << 30, 1 << 30), (limits::RAM_BYTES - 4096, 2 << 20)] {
        assert_eq!(changed(|proposal| proposal.ram[0] = block("pc.ram", bytes, page_bytes)), Ok(()));
    }
    let sizes = [
        (0, 4096),
        (4095, 4096),
        (4097, 4096),
        (u64::MAX, 4096),
        (4096, 0),
        (4096, 2048),
        (4096, 12288),
        (4096, 2 << 30),
    ];
    for (bytes, page_bytes) in sizes {
        let name = "pc.ram".to_owned();
        assert_eq!(
            changed(|proposal| proposal.ram[0] = block("pc.ram", bytes, page_bytes)),
            Err(Invalid::RamBlockSize { name, bytes, page_bytes })
        );
    }
    let too_much = |proposal: &mut Proposal| proposal.ram[0].bytes = limits::RAM_BYTES;
    assert_eq!(changed(too_much), Err(Invalid::RamBytes));
    let overflowing = |proposal: &mut Proposal| {
        proposal.ram.iter_mut().for_each(|block| block.bytes = u64::MAX - 4095);
    };
    assert_eq!(changed(overflowing), Err(Invalid::RamBytes));
}

#[test]
fn hashes() {
    let verify = |block, first_chunk, hashes| Message::Verify { block, first_chunk, hashes }.validate();
    let hash = || "00ff00ff00ff00ff".to_owned();
    assert_eq!(verify(0, 0, vec![hash(); limits::HASHES]), Ok(()));
    assert!(matches!(verify(0, 0, vec![hash(); limits::HASHES + 1]), Err(Invalid::TooMany { .. })));
    // Disks are behind the RAM blocks.
    let blocks = (limits::RAM_BLOCKS + limits::DISKS) as u16;
    assert_eq!(verify(blocks - 1, 0, vec![hash()]), Ok(()));
    assert_eq!(verify(blocks, 0, vec![hash()]), Err(Invalid::BlockIndex(blocks)));
    let chunks = limits::DISK_BYTES / limits::CHUNK_BYTES;
    assert_eq!(verify(0, chunks - 1, vec![hash()]), Ok(()));
    assert_eq!(verify(0, chunks, vec![hash()]), Err(Invalid::Chunk(chunks + 1)));
    assert_eq!(verify(0, u64::MAX, vec![hash()]), Err(Invalid::Chunk(u64::MAX)));
    let invalid = Invalid::Hex { field: "a chunk's hash", digits: 16 };
    for bad in [
        "",
        "00ff00ff00ff00f",
        "00ff00ff00ff00ff0",
        "00FF00ff00ff00ff",
        "00ff00ff00ff00fg",
        "\u{e4}00ff00ff00ff00",
    ] {
        assert_eq!(verify(0, 0, vec![hash(), bad.into()]), Err(invalid.clone()), "{bad}");
    }

    let verified = |different_chunks| Message::Verified { different_chunks }.validate();
    assert_eq!(verified(vec![0; limits::HASHES]), Ok(()));
    assert!(matches!(verified(vec![0; limits::HASHES + 1]), Err(Invalid::TooMany { .. })));
    assert_eq!(verified(vec![chunks + 1]), Err(Invalid::Chunk(chunks + 1)));
}

#[test]
fn device_state_and_incarnations() {
    let digest = || "0".repeat(64);
    let state = |bytes, digest| Message::DeviceState { bytes, state_bytes: 1, digest }.validate();
    assert_eq!(state(limits::DEVICE_STATE_BYTES, digest()), Ok(()));
    for bytes in [0, limits::DEVICE_STATE_BYTES + 1, u64::MAX] {
        assert_eq!(state(bytes, digest()), Err(Invalid::DeviceStateBytes(bytes)));
        let plain = Message::DeviceState { bytes: 1, state_bytes: bytes, digest: digest() };
        assert_eq!(plain.validate(), Err(Invalid::DeviceStateBytes(bytes)));
    }
    let invalid = Err(Invalid::Hex { field: "the device state's digest", digits: 64 });
    assert_eq!(state(1, "0".repeat(63)), invalid);
    assert_eq!(state(1, String::new()), invalid);

    let incarnation = |boot_id: &str, pid| Incarnation {
        boot_id: boot_id.into(),
        pid,
        start_time_ticks: 1,
        generation: Generation(1),
    };
    let ready =
        |incarnation, digest| Message::Ready { epoch: Epoch(1), incarnation, digest, load_us: 0 }.validate();
    assert_eq!(ready(incarnation("b", 1), digest()), Ok(()));
    assert_eq!(ready(incarnation("b", 1), String::new()), Ok(()));
    assert_eq!(ready(incarnation("b", 1), "0".into()), invalid);
    let go = |incarnation| Message::Go { epoch: Epoch(1), incarnation, run: true }.validate();
    assert_eq!(go(incarnation("b", 1)), Ok(()));
    for (bad, error) in [
        (incarnation("b", 0), Invalid::Pid),
        (incarnation("", 1), Invalid::Text { field: "a boot id" }),
        (incarnation("b\n", 1), Invalid::Text { field: "a boot id" }),
    ] {
        assert_eq!(go(bad.clone()), Err(error.clone()));
        assert_eq!(ready(bad.clone(), digest()), Err(error.clone()));
        assert_eq!(ready(bad, String::new()), Err(error));
    }
}

#[test]
fn disks() {
    let disk = |name: &str, bytes| ProposedDisk {
        name: name.into(),
        bytes,
        allocated_bytes: 0,
        wanted: DiskMode::Auto,
        drop_snapshots: false,
    };
    let with = |disks: Vec<ProposedDisk>| changed(|proposal| proposal.disks = disks);
    assert_eq!(with(vec![disk("a", 512), disk("b", limits::DISK_BYTES)]), Ok(()));
    for bytes in [0, 511, limits::DISK_BYTES + 512] {
        assert_eq!(with(vec![disk("a", bytes)]), Err(Invalid::DiskSize { name: "a".into(), bytes }));
    }
    assert_eq!(with(vec![disk("a", 512), disk("a", 512)]), Err(Invalid::DuplicateDisk("a".into())));
    assert_eq!(with(vec![disk("", 512)]), Err(Invalid::Text { field: "a disk's name" }));
    let many: Vec<_> = (0..=limits::DISKS).map(|number| disk(&number.to_string(), 512)).collect();
    assert!(matches!(with(many), Err(Invalid::TooMany { field: "disks", .. })));
}

#[test]
fn network_cards() {
    let address = ClaimedAddress { address: std::net::Ipv4Addr::LOCALHOST.into(), vlan: None, router: false };
    let claims = |cards: usize, addresses: usize| {
        let card = CardClaims { mac: "a".into(), addresses: vec![address.clone(); addresses] };
        Message::Claims { cards: vec![card; cards] }.validate()
    };
    assert_eq!(claims(limits::NETWORK_CARDS, 1), Ok(()));
    assert_eq!(claims(1, limits::CLAIMED_ADDRESSES), Ok(()));
    assert!(matches!(claims(limits::NETWORK_CARDS + 1, 1), Err(Invalid::TooMany { .. })));
    assert!(matches!(claims(1, limits::CLAIMED_ADDRESSES + 1), Err(Invalid::TooMany { .. })));

    let frames = |cards: usize, mac: &str, interface: &str| {
        let card = CardFrames {
            mac: mac.into(),
            interface: interface.into(),
            first_in_us: None,
            first_out_us: None,
        };
        Message::FirstFrames { epoch: Epoch(1), cards: vec![card; cards] }.validate()
    };
    assert_eq!(frames(limits::NETWORK_CARDS, "52:54:00:12:34:56", "tap0"), Ok(()));
    assert!(matches!(frames(limits::NETWORK_CARDS + 1, "a", "b"), Err(Invalid::TooMany { .. })));
    assert_eq!(frames(1, "a\nb", "tap0"), Err(Invalid::Text { field: "a MAC address" }));
    assert_eq!(frames(1, "a", ""), Err(Invalid::Text { field: "an interface" }));
}

#[test]
fn measurements_of_a_link() {
    for bytes in [1, limits::MEASURED_BYTES] {
        assert_eq!(Message::MeasureLink { bytes }.validate(), Ok(()));
    }
    for bytes in [0, limits::MEASURED_BYTES + 1] {
        assert_eq!(Message::MeasureLink { bytes }.validate(), Err(Invalid::MeasuredBytes(bytes)));
    }
}

#[test]
fn tracked_connections() {
    assert_eq!(Message::Flows { bytes: limits::FLOWS_BYTES }.validate(), Ok(()));
    for bytes in [0, limits::FLOWS_BYTES + 1] {
        assert_eq!(Message::Flows { bytes }.validate(), Err(Invalid::FlowsBytes(bytes)));
    }
    let failed = |count: usize, flow: &str, reason: &str| {
        let failed = FailedFlow { flow: flow.into(), reason: reason.into() };
        Message::FlowsInstalled { installed: 1, failed: vec![failed; count], more_failed: 0 }.validate()
    };
    assert_eq!(failed(limits::FAILED_FLOWS, "tcp a → b", "no room"), Ok(()));
    assert!(matches!(failed(limits::FAILED_FLOWS + 1, "a", "b"), Err(Invalid::TooMany { .. })));
    assert_eq!(failed(1, "", "b"), Err(Invalid::Text { field: "a tracked connection" }));
    let long = "a".repeat(limits::FLOW_TEXT_BYTES + 1);
    assert_eq!(failed(1, "a", &long), Err(Invalid::Text { field: "the reason of a tracked connection" }));
}
