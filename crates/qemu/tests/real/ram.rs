//! Tests that RAM blocks are at the reported addresses.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use whimbrel_qemu::ram::{RamBlock, RamKind, cross_check, guest_mappings, ram_blocks, ram_blocks_from_heap};

use crate::support::{Version, Vm, args, deadline, not_tried, ticker_disk, until, versions};

/// Checks properties of the blocks of any guest.
fn check(vm: &mut Vm) -> Vec<RamBlock> {
    let pid = vm.pid();
    let blocks = ram_blocks(&mut vm.qmp, pid).unwrap();
    // On a QEMU that prints addresses, both ways must agree.
    assert_eq!(ram_blocks_from_heap(&mut vm.qmp, pid).unwrap(), blocks);
    assert!(cross_check(&mut vm.qmp, &blocks).unwrap() >= 4);
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    check_roms(&memory, &blocks);
    blocks
}

/// Checks two ROMs of equal size, which differ in the identity of their device in their headers.
fn check_roms(memory: &File, blocks: &[RamBlock]) {
    for (device, vendor, product) in [("e1000.rom", 0x8086, 0x100e), ("virtio-net-pci.rom", 0x1af4, 0x1000)] {
        for block in blocks.iter().filter(|block| block.name.ends_with(device)) {
            let mut rom = vec![0; 0x1000];
            memory.read_exact_at(&mut rom, block.host_address).unwrap();
            let word = |at: usize| u16::from_le_bytes([rom[at], rom[at + 1]]);
            assert_eq!(word(0), 0xaa55);
            let header = usize::from(word(0x18));
            assert_eq!(&rom[header..header + 4], b"PCIR");
            assert_eq!((word(header + 4), word(header + 6)), (vendor, product), "{}", block.name);
        }
    }
}

fn block<'a>(blocks: &'a [RamBlock], name: &str) -> &'a RamBlock {
    blocks.iter().find(|block| block.name == name).unwrap_or_else(|| panic!("no {name} in {blocks:#?}"))
}

/// Writes a pattern at the block's address and makes QEMU read it at the guest's.
fn assert_is_at(vm: &mut Vm, block: &RamBlock, offset: u64, guest: u64) {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{}/mem", vm.pid())).unwrap();
    let pattern: Vec<u8> = format!("{} at {guest:#x}", block.name).into_bytes();
    memory.write_all_at(&pattern, block.host_address + offset).unwrap();
    assert_eq!(vm.physical(guest, pattern.len() as u64), pattern);
}

fn on_each(test: impl Fn(&Version, &std::path::Path)) {
    for version in versions() {
        println!("QEMU {}", version.name);
        let dir = tempfile::tempdir().unwrap();
        test(&version, dir.path());
    }
}

#[test]
fn default_ram_and_many_devices() {
    on_each(|version, dir| {
        let disk = ticker_disk(dir);
        let mut vm = version.start(
            dir,
            "a",
            &args(&format!(
                "-machine q35 -m 256 -vga std -device e1000,netdev=n0 -netdev user,id=n0
                 -device virtio-net-pci,netdev=n1 -netdev user,id=n1 -device virtio-net-pci,netdev=n2 -netdev user,id=n2
                 -device virtio-balloon-pci -device virtio-rng-pci -device virtio-serial-pci -device qemu-xhci
                 -drive file={disk},format=raw,if=ide"
            )),
        );
        vm.wait_ticking();
        let blocks = check(&mut vm);
        let ram = block(&blocks, "pc.ram");
        assert_eq!(
            (ram.kind.clone(), ram.used_bytes, ram.page_size_bytes),
            (RamKind::Anonymous, 256 << 20, 4096)
        );
        assert_is_at(&mut vm, ram, 0x123_4560, 0x123_4560);
        assert_eq!(blocks.iter().filter(|block| block.name.ends_with("virtio-net-pci.rom")).count(), 2);
        // The firmware has assigned an address to the video memory, so it was compared as well.
        let seen = guest_mappings(&mut vm.qmp, &blocks).unwrap();
        assert!(seen.iter().any(|seen| blocks[seen.block].name.ends_with("vga.vram")), "{seen:?}");
    });
}

#[test]
fn shared_file_on_tmpfs_and_memory_above_4_gib() {
    on_each(|version, _| {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = dir.path().join("guest.ram");
        // Sparse: only pages that the guest touches use memory.
        let mut vm = version.start(
            dir.path(),
            "a",
            &args(&format!(
                "-machine q35,memory-backend=ram -m 5G -S -nodefaults
                 -object memory-backend-file,id=ram,size=5G,mem-path={},share=on",
                file.display()
            )),
        );
        let blocks = check(&mut vm);
        let ram = block(&blocks, "ram");
        let RamKind::SharedFile(mapped) = &ram.kind else { panic!("{ram:?}") };
        assert_eq!((&mapped.path, mapped.offset_bytes), (&file, 0));
        assert_eq!(mapped.inode, file.metadata().unwrap().ino());
        assert_is_at(&mut vm, ram, 0x10_0000, 0x10_0000);
        // q35 has 2 GiB below the PCI hole, the rest begins at 4 GiB.
        assert_is_at(&mut vm, ram, (2 << 30) + 0x3000, (4 << 30) + 0x3000);
    });
}

#[test]
fn two_numa_nodes_of_different_kinds() {
    on_each(|version, dir| {
        let mut vm = version.start(
            dir,
            "a",
            &args(
                "-machine pc -m 256 -smp 2 -S
                 -object memory-backend-memfd,id=near,size=128M,share=on -numa node,cpus=0,memdev=near
                 -object memory-backend-ram,id=far,size=128M -numa node,cpus=1,memdev=far",
            ),
        );
        let blocks = check(&mut vm);
        let near = block(&blocks, "near");
        let RamKind::SharedFile(mapped) = &near.kind else { panic!("{near:?}") };
        assert!(mapped.path.to_string_lossy().starts_with("/memfd:"), "{mapped:?}");
        assert_eq!(block(&blocks, "far").kind, RamKind::Anonymous);
        assert_is_at(&mut vm, near, 0x20_0000, 0x20_0000);
        assert_is_at(&mut vm, block(&blocks, "far"), 0x20_0000, (128 << 20) + 0x20_0000);
    });
}

#[test]
fn private_file_and_hugetlb_where_there_are_any() {
    on_each(|version, dir| {
        let file = dir.join("private.ram");
        let mut vm = version.start(
            dir,
            "a",
            &args(&format!(
                "-machine pc,memory-backend=ram -m 64 -S -nodefaults
                 -object memory-backend-file,id=ram,size=64M,mem-path={},share=off",
                file.display()
            )),
        );
        let blocks = check(&mut vm);
        assert!(matches!(block(&blocks, "ram").kind, RamKind::PrivateFile(_)));

        let free: u64 = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
            .map_or(0, |text| text.trim().parse().unwrap());
        if free < 32 {
            not_tried("hugetlbfs under QEMU itself: fewer than 32 huge pages of 2 MiB are free");
            return;
        }
        let mut vm = version.start(
            dir,
            "b",
            &args(
                "-machine pc,memory-backend=ram -m 64 -S -nodefaults
                 -object memory-backend-memfd,id=ram,size=64M,share=on,hugetlb=on,hugetlbsize=2M",
            ),
        );
        let blocks = check(&mut vm);
        assert_eq!(block(&blocks, "ram").page_size_bytes, 2 << 20);
    });
}

#[test]
fn firmware_in_flash() {
    let code = std::env::var("WHIMBREL_OVMF").unwrap_or("/usr/share/OVMF/OVMF_CODE_4M.fd".to_owned());
    if !std::path::Path::new(&code).exists() {
        not_tried(&format!("firmware in flash: no {code}; WHIMBREL_OVMF may name an OVMF_CODE file"));
        return;
    }
    on_each(|version, dir| {
        let vars = dir.join("vars.fd");
        std::fs::write(&vars, vec![0xff; 528 << 10]).unwrap();
        let mut vm = version.start(
            dir,
            "a",
            &args(&format!(
                "-machine q35 -m 128 -drive if=pflash,format=raw,unit=0,readonly=on,file={code}
                 -drive if=pflash,format=raw,unit=1,file={}",
                vars.display()
            )),
        );
        let blocks = check(&mut vm);
        let flash = block(&blocks, "system.flash0");
        let memory = File::open(format!("/proc/{}/mem", vm.pid())).unwrap();
        let mut there = vec![0; flash.used_bytes as usize];
        memory.read_exact_at(&mut there, flash.host_address).unwrap();
        assert_eq!(there, std::fs::read(&code).unwrap());
        block(&blocks, "system.flash1");
    });
}

#[test]
fn a_process_that_is_not_qemu_is_an_error() {
    let Some(version) = versions().pop() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut vm = version.start(dir.path(), "a", &args("-machine pc -m 64 -S -nodefaults"));
    let ours = std::process::id();
    assert!(ram_blocks(&mut vm.qmp, ours).is_err());
    assert!(ram_blocks_from_heap(&mut vm.qmp, ours).is_err());
    // A guest that has ended is an error as well.
    let pid = vm.pid();
    vm.command("quit", serde_json::Value::Null);
    vm.started.wait(deadline());
    until("its monitor is closed", || ram_blocks(&mut vm.qmp, pid).is_err());
}
