//! Memory of another process is read and written correctly, and inaccessible memory is reported.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Victim, injector};
use whimbrel_tracee::{
    AddressRange, PAGE_SIZE, Pagemap, ProcessError, RamFile, RamFileError, RamFileKind, RemoteError,
    RemoteMemory, WriteTracker, maps,
};

const MIB: u64 = 1 << 20;

#[test]
fn runs_are_read_and_written_in_order() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", 8 * MIB);
    let memory = RemoteMemory::new(&victim.process).unwrap();
    // More pieces than one system call accepts, of odd lengths, some empty.
    let runs: Vec<AddressRange> =
        (0..3000u64).map(|i| AddressRange::with_len(range.start + i * 2500, i % 700)).collect();
    let len = runs.iter().map(AddressRange::len).sum::<u64>() as usize;
    let data: Vec<u8> = (0..len).map(|at| (at * 31 / 8) as u8).collect();
    memory.write_runs(&runs, &data).unwrap();
    let mut back = vec![0; len];
    memory.read_runs(&runs, &mut back).unwrap();
    assert!(back == data);
    let mut whole = vec![0; range.len() as usize];
    memory.read(range.start, &mut whole).unwrap();
    let mut at = 0;
    for run in &runs {
        let (there, len) = ((run.start - range.start) as usize, run.len() as usize);
        assert!(whole[there..there + len] == data[at..at + len]);
        at += len;
    }
    let error = memory.read_runs(&runs, &mut back[1..]).unwrap_err();
    assert!(matches!(error, RemoteError::Length { .. }));
}

#[test]
fn a_fault_is_reported_with_its_address() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", MIB);
    victim.ask("write 0 1048576 1");
    let memory = RemoteMemory::new(&victim.process).unwrap();
    // The address space after the mapping is reserved without any access.
    let mut buffer = vec![0; 3 * PAGE_SIZE as usize];
    let near_the_end = range.end - PAGE_SIZE - 100;
    let error = memory.read(near_the_end, &mut buffer).unwrap_err();
    assert!(
        matches!(error, RemoteError::Fault { address, write: false } if address == range.end),
        "{error:?}"
    );
    let error = memory.write(near_the_end, &buffer).unwrap_err();
    assert!(
        matches!(error, RemoteError::Fault { address, write: true } if address == range.end),
        "{error:?}"
    );
    assert_eq!(error.to_string(), format!("address {:#x} cannot be written", range.end));
    assert!(matches!(memory.read(u64::MAX - 10, &mut buffer[..8]), Err(RemoteError::Fault { .. })));
    // Code is not writable, and stays so.
    let code = maps::mappings(&victim.process).unwrap().into_iter().find(|one| one.executable).unwrap();
    assert!(matches!(memory.write(code.range.start, b"x"), Err(RemoteError::Fault { .. })));
    memory.read(code.range.start, &mut buffer[..8]).unwrap();

    victim.child.kill().unwrap();
    victim.child.wait().unwrap();
    let error = memory.read(range.start, &mut buffer).unwrap_err();
    assert!(matches!(error, RemoteError::Process(ProcessError::Gone { .. })), "{error:?}");
}

#[test]
fn the_file_behind_ram_is_the_ram() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("memfd", 4 * MIB);
    let mapping = maps::mapping_at(&victim.process, range.start).unwrap().unwrap();
    let file = RamFile::open(&victim.process, &mapping).unwrap();
    assert_eq!(
        (file.kind(), file.page_size(), file.len().unwrap()),
        (RamFileKind::Tmpfs, PAGE_SIZE, 4 * MIB)
    );
    assert_eq!(file.id(), mapping.file());
    let runs = |range: std::ops::Range<u64>| {
        let mut found = Vec::new();
        file.data_runs(range, &mut found).unwrap();
        found
    };
    assert_eq!(runs(0..4 * MIB), []);
    victim.ask("write 8192 4096 1");
    victim.ask(&format!("write {MIB} 8192 1"));
    assert_eq!(runs(0..4 * MIB), [8192..12288, MIB..MIB + 8192]);
    // Cut to the requested range.
    assert_eq!(runs(9000..MIB + 4096), [9000..12288, MIB..MIB + 4096]);
    assert_eq!(runs(12288..MIB), []);

    let memory = RemoteMemory::new(&victim.process).unwrap();
    file.write_at(5000, b"through the file").unwrap();
    let mut back = [0; 16];
    memory.read(range.start + 5000, &mut back).unwrap();
    assert_eq!(&back, b"through the file");
    memory.write(range.start + 5000, b"through the map.").unwrap();
    file.read_at(5000, &mut back).unwrap();
    assert_eq!(&back, b"through the map.");

    file.punch_hole(4096..MIB).unwrap();
    assert!(matches!(&runs(0..4 * MIB)[..], [run] if *run == (MIB..MIB + 8192)));
    file.read_at(5000, &mut back).unwrap();
    assert_eq!(back, [0; 16]);
    let error = file.read_at(4 * MIB - 4, &mut back).unwrap_err();
    assert!(matches!(error, RamFileError::Io { action: "read", .. }), "{error:?}");

    let private = maps::mappings(&victim.process).unwrap().into_iter().find(|one| one.executable).unwrap();
    assert!(matches!(RamFile::open(&victim.process, &private), Err(RamFileError::NotShared { .. })));
    victim.assert_well();
}

#[test]
fn holes_of_anonymous_memory_are_seen_while_it_is_tracked() {
    for kind in ["anonymous", "huge"] {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, 8 * MIB);
        let mut pagemap = Pagemap::open(&victim.process).unwrap();
        let mut populated = |what: &str| {
            let mut found = Vec::new();
            pagemap.populated(range, &mut found).unwrap();
            println!("{kind}, {what}: {} bytes", found.iter().map(AddressRange::len).sum::<u64>());
            found
        };
        assert_eq!(populated("fresh"), []);
        victim.ask(&format!("write {} 5000 1", 2 * MIB));
        let page = if kind == "huge" { 2 * MIB } else { 8192 };
        let expected = [AddressRange::with_len(range.start + 2 * MIB, page)];
        let written = populated("written");
        // If the host has no huge pages left, or none at all, small ones are used.
        let small = [AddressRange::with_len(range.start + 2 * MIB, 8192)];
        assert!(written == expected || written == small, "{written:?}");
        let uffd = injector().create_userfaultfd(&victim.process).unwrap();
        let mut tracker = WriteTracker::start(&victim.process, uffd, &[range]).unwrap();
        assert_eq!(populated("tracked"), written);
        victim.ask("write 0 1 1");
        tracker.take_dirty(range, &mut Vec::new()).unwrap();
        let more = populated("tracked and written");
        assert!(more[0].start == range.start && more.len() <= 2, "{more:?}");
        victim.ask(&format!("drop 0 {}", range.len()));
        assert_eq!(populated("given back"), []);
        drop(tracker);
        assert_eq!(populated("not tracked any more"), []);
        victim.assert_well();
    }
}
