use serde_json::json;

use super::super::RamKind;
use super::*;
use crate::qmp::tests::fake;

fn block(name: &str, bytes: u64, host_address: u64) -> RamBlock {
    RamBlock {
        name: name.to_owned(),
        page_size_bytes: 4096,
        used_bytes: bytes,
        max_bytes: bytes,
        host_address,
        kind: RamKind::Anonymous,
    }
}

const MAIN: u64 = 0x7f00_0000_0000;
const VIDEO: u64 = 0x7e00_0000_0000;

/// Main memory on both sides of 4 GiB, with a window onto a ROM in its lower part, and video memory.
const TREE: &str = "address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-000000007fffffff (prio 0, ram): alias ram-below-4g @pc.ram 0000000000000000-000000007fffffff
    0000000000000000-ffffffffffffffff (prio -1, i/o): pci
      00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
      00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
    00000000fed00000-00000000fed003ff (prio 0, i/o): hpet
    0000000100000000-000000017fffffff (prio 0, ram): alias ram-above-4g @pc.ram 0000000080000000-00000000ffffffff
";

fn blocks() -> [RamBlock; 2] {
    [block("0000:00:02.0/vga.vram", 1 << 24, VIDEO), block("pc.ram", 4 << 30, MAIN)]
}

/// Replies as QEMU does, where the window shows the ROM.
fn reply(question: &str) -> String {
    let address = u64::from_str_radix(question.strip_prefix("gpa2hva 0x").unwrap(), 16).unwrap();
    let (region, host) = match address {
        0xc_0000..0xe_0000 => ("pc.rom", 0x7d00_0000_0000 + address - 0xc_0000),
        0..0x8000_0000 => ("pc.ram", MAIN + address),
        0xfd00_0000..0xfe00_0000 => ("vga.vram", VIDEO + address - 0xfd00_0000),
        0x1_0000_0000..0x1_8000_0000 => ("pc.ram", MAIN + address - 0x8000_0000),
        _ => return format!("No memory is mapped at address {address:#x}"),
    };
    format!("Host virtual address for {address:#x} ({region}) is {host:#x}")
}

fn seen_with(reply: impl Fn(&str) -> String) -> Result<View, RamError> {
    let regions = text::regions(TREE);
    let pieces = pieces(&regions);
    let replies: Vec<_> = pieces.iter().flat_map(Piece::questions).map(|question| reply(&question)).collect();
    view(&pieces, &replies, &blocks())
}

#[test]
fn memory_below_and_above_four_gib_is_one_block() {
    let seen = |guest_address, bytes, block, offset_bytes| GuestMapping {
        guest_address,
        bytes,
        block,
        offset_bytes,
    };
    let expected = [
        seen(0, 0xc_0000, 1, 0),
        seen(0xe_0000, (2 << 30) - 0xe_0000, 1, 0xe_0000),
        seen(0xfd00_0000, 1 << 24, 0, 0),
        seen(4 << 30, 2 << 30, 1, 2 << 30),
    ];
    assert_eq!(seen_with(reply).unwrap().mappings, expected);
}

#[test]
fn a_block_at_another_place_is_a_contradiction() {
    let moved = |question: &str| reply(question).replace("0x7f00", "0x7f08");
    assert!(matches!(seen_with(moved), Err(RamError::Contradiction { block, .. }) if block == "pc.ram"));
    // The end of a piece is elsewhere than its beginning says.
    let torn = |question: &str| match question {
        "gpa2hva 0xfdfff000" => reply("gpa2hva 0xfd000000"),
        question => reply(question),
    };
    assert!(matches!(seen_with(torn), Err(RamError::Contradiction { .. })));
}

#[test]
fn what_a_region_of_no_block_covers_is_not_seen() {
    let covered = |question: &str| reply(question).replace("(vga.vram)", "(system.flash0)");
    assert_eq!(seen_with(covered).unwrap().mappings.len(), 3);
}

/// Checks regions that change: the firmware's window is in the ROM in the first tree and in the memory when `gpa2hva`
/// runs, and stays there if `settles` is true.
fn checked(settles: bool) -> Result<usize, RamError> {
    let map = |name: &str, at: u32| {
        format!(
            "address-space: memory\n  00000000000d8000-00000000000dbfff (prio 0, ram): alias window @{name} {at:016x}-00000000ffffffff\n"
        )
    };
    let (old, new) = (map("pc.rom", 0x18000), map("pc.ram", 0xd8000));
    let (mut qmp, thread, _dir) = fake(move |fake| {
        let asked = fake.receive();
        fake.answer(&asked["id"], &json!(old));
        for _ in 0..if settles { 2 } else { 1 } {
            for (guest, host) in [(0xd8000, 0x7f00_000d_8000_u64), (0xdb000, 0x7f00_000d_b000)] {
                let asked = fake.receive();
                assert_eq!(asked["arguments"]["command-line"], format!("gpa2hva {guest:#x}"));
                let reply = format!("Host virtual address for {guest:#x} (pc.ram) is {host:#x}");
                fake.answer(&asked["id"], &json!(reply));
            }
            let asked = fake.receive();
            fake.answer(&asked["id"], &json!(if settles { &new } else { &old }));
        }
    });
    let blocks = [block("pc.rom", 1 << 20, VIDEO), block("pc.ram", 1 << 20, MAIN)];
    let compared = cross_check(&mut qmp, &blocks);
    thread.join().unwrap();
    compared
}

#[test]
fn regions_that_changed_are_sampled_again() {
    assert_eq!(checked(true).unwrap(), 2);
    assert!(matches!(checked(false), Err(RamError::Contradiction { .. })));
}
