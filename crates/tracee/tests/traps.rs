//! Traps of tracking, each shown once with the failure and once with its avoidance.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};

use common::{Victim, injector};
use linux_raw_sys::general as raw;
use nix::libc;
use whimbrel_tracee::{AddressRange, PAGE_SIZE, RamFile, RemoteMemory, WriteTracker, maps};

const MIB: u64 = 1 << 20;
const PAGEMAP_SCAN: u64 = 0xC060_6610;

/// A tracker with planted errors, which uses the kernel's bare calls.
struct Planted {
    uffd: OwnedFd,
    pagemap: File,
    range: AddressRange,
}

impl Planted {
    fn start(victim: &Victim, range: AddressRange) -> Self {
        let uffd = injector().create_userfaultfd(&victim.process).unwrap();
        let features = raw::UFFD_FEATURE_WP_ASYNC | raw::UFFD_FEATURE_WP_UNPOPULATED;
        let features = u64::from(features | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM);
        let mut api = raw::uffdio_api { api: u64::from(raw::UFFD_API), features, ioctls: 0 };
        ioctl(&uffd, linux_raw_sys::ioctl::UFFDIO_API.into(), &mut api);
        let area = raw::uffdio_range { start: range.start, len: range.len() };
        let mut register = raw::uffdio_register { range: area, mode: 2, ioctls: 0 };
        ioctl(&uffd, linux_raw_sys::ioctl::UFFDIO_REGISTER.into(), &mut register);
        let pagemap = File::open(victim.process.path("pagemap")).unwrap();
        let planted = Self { uffd, pagemap, range };
        planted.protect_all();
        planted
    }

    fn protect_all(&self) {
        let area = raw::uffdio_range { start: self.range.start, len: self.range.len() };
        let mut protect = raw::uffdio_writeprotect { range: area, mode: 1 };
        ioctl(&self.uffd, linux_raw_sys::ioctl::UFFDIO_WRITEPROTECT.into(), &mut protect);
    }

    /// Returns the pages marked as written: one pass, protecting them in the same step or not.
    fn written(&self, protect: bool) -> Vec<AddressRange> {
        let mut found = vec![raw::page_region { start: 0, end: 0, categories: 0 }; 4096];
        let written = u64::from(raw::PAGE_IS_WRITTEN);
        let mut scan = raw::pm_scan_arg {
            size: size_of::<raw::pm_scan_arg>() as u64,
            flags: if protect { 3 } else { 0 },
            start: self.range.start,
            end: self.range.end,
            walk_end: 0,
            vec: found.as_mut_ptr() as u64,
            vec_len: found.len() as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: written,
            category_anyof_mask: 0,
            return_mask: written,
        };
        let count = ioctl(&self.pagemap, PAGEMAP_SCAN, &mut scan);
        assert_eq!(scan.walk_end, self.range.end);
        found.truncate(count as usize);
        found.iter().map(|one| AddressRange::new(one.start, one.end)).collect()
    }
}

fn ioctl<T>(fd: &impl AsRawFd, request: u64, argument: &mut T) -> i32 {
    // SAFETY: every caller passes the structure of its request, with valid pointers in it.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    result
}

fn tracker(victim: &Victim, range: AddressRange) -> WriteTracker {
    let uffd = injector().create_userfaultfd(&victim.process).unwrap();
    WriteTracker::start(&victim.process, uffd, &[range]).unwrap()
}

fn dirty(tracker: &mut WriteTracker, range: AddressRange) -> Vec<AddressRange> {
    let mut found = Vec::new();
    tracker.take_dirty(range, &mut found).unwrap();
    found
}

fn contents(victim: &Victim, range: AddressRange) -> Vec<u8> {
    let mut bytes = vec![0; range.len() as usize];
    RemoteMemory::new(&victim.process).unwrap().read(range.start, &mut bytes).unwrap();
    bytes
}

/// Trap 1: data that a disk reads straight into memory arrive after the page was marked.
#[test]
fn trap_1_a_page_is_marked_before_the_disk_has_written_it() {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    let content: Vec<u8> =
        (0..64 * MIB).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8).collect();
    fs::write(file.path(), &content).unwrap();
    file.as_file().sync_all().unwrap();
    let direct = std::os::unix::fs::OpenOptionsExt::custom_flags(File::options().read(true), libc::O_DIRECT)
        .open(file.path());
    if direct.is_err() {
        eprintln!("no O_DIRECT under /var/tmp: not tested");
        return;
    }
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("memfd", 64 * MIB);
    victim.ask(&format!("write 0 {} 1", range.len()));
    let mapping = maps::mapping_at(&victim.process, range.start).unwrap().unwrap();
    let ram = RamFile::open(&victim.process, &mapping).unwrap();
    let mut tracker = tracker(&victim, range);
    let mut replica = contents(&victim, range);
    let submit = format!("direct-read {}", file.path().display());
    let mut copy = |found: &[AddressRange]| {
        for one in found {
            let at = one.start - range.start;
            ram.read_at(at, &mut replica[at as usize..(at + one.len()) as usize]).unwrap();
        }
        let now = contents_of(&ram, range.len());
        let pages = now.chunks(PAGE_SIZE as usize).zip(replica.chunks(PAGE_SIZE as usize));
        pages.filter(|(now, copied)| now != copied).count()
    };

    // The cure: clear the marks, let I/O in flight complete, then read.
    for seed in 0..3 {
        victim.ask(&format!("write 0 {} {seed}", range.len()));
        victim.ask(&submit);
        let found = dirty(&mut tracker, range);
        victim.ask("direct-wait");
        assert_eq!(copy(&found), 0, "pages were lost in spite of waiting");
    }
    // The trap: a read before the data have arrived. The number of affected pages depends on the disk.
    let lost = (0..50).find_map(|seed| {
        victim.ask(&format!("write 0 {} {seed}", range.len()));
        copy(&dirty(&mut tracker, range));
        victim.ask(&submit);
        let found = dirty(&mut tracker, range);
        copy(&found);
        victim.ask("direct-wait");
        let lost = copy(&dirty(&mut tracker, range));
        (lost > 0).then_some(lost)
    });
    println!("{lost:?} pages lost when read too early");
    assert!(lost.is_some(), "the trap could not be shown");
}

fn contents_of(ram: &RamFile, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    ram.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Trap 2: another process that maps the same memory writes without being detected; its mapping reveals it.
#[test]
fn trap_2_another_process_writes_unseen() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("memfd", MIB);
    victim.ask("write 0 1048576 1");
    let mut tracker = tracker(&victim, range);
    let before = contents(&victim, range);
    victim.ask("fork-stay 4096 8 2");
    assert!(contents(&victim, range) != before);
    assert!(dirty(&mut tracker, range).is_empty(), "the kernel sees writes of other processes now?");
}

/// Trap 3: pages without an entry in the page table were dropped, and their marks with them.
#[test]
fn trap_3_a_discarded_page_counts_as_written() {
    for kind in ["anonymous", "memfd"] {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, 8 * MIB);
        victim.ask(&format!("write 0 {} 1", range.len()));

        // A query for written pages is not sufficient: clean pages may be discarded. Shared memory keeps markers,
        // and for a whole page table of anonymous memory the kernel keeps nothing (since 6.14).
        let planted = Planted::start(&victim, range);
        assert!(planted.written(true).is_empty());
        victim.ask(&format!("drop {} {}", 2 * MIB, 4 * MIB));
        let missed = 4 * MIB - planted.written(true).iter().map(AddressRange::len).sum::<u64>();
        println!("{kind}: that alone misses {} of 1024 pages", missed / PAGE_SIZE);
        if kind == "memfd" {
            assert!(missed > 0, "the kernel marks punched pages now?");
        }
        drop(planted);

        victim.ask(&format!("write 0 {} 2", range.len()));
        let mut tracker = tracker(&victim, range);
        assert!(dirty(&mut tracker, range).is_empty());
        victim.ask(&format!("drop {} {}", 2 * MIB, 4 * MIB));
        let discarded = AddressRange::with_len(range.start + 2 * MIB, 4 * MIB);
        assert_eq!(dirty(&mut tracker, range), [discarded], "{kind}");
        assert!(dirty(&mut tracker, range).is_empty(), "{kind}: found twice");
        // Written again, discarded again.
        victim.ask(&format!("write {} 1 3", 3 * MIB));
        let page = AddressRange::with_len(range.start + 3 * MIB, PAGE_SIZE);
        assert_eq!(dirty(&mut tracker, range), [page], "{kind}");
        victim.ask(&format!("drop {} 4096", 3 * MIB));
        assert_eq!(dirty(&mut tracker, range), [page], "{kind}");
    }
}

/// Trap 4: a scan that does not protect in the same step loses what is written in between.
#[test]
fn trap_4_a_scan_protects_in_the_same_step() {
    for kind in ["anonymous", "memfd"] {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, MIB);
        victim.ask("write 0 1048576 1");

        let planted = Planted::start(&victim, range);
        victim.ask("write 0 8 2");
        let first = planted.written(false);
        assert_eq!(first, [AddressRange::with_len(range.start, PAGE_SIZE)]);
        victim.ask("write 8192 8 3");
        planted.protect_all();
        assert!(planted.written(false).is_empty(), "the write in between was expected to be lost");
        drop(planted);

        // The tracker's own scan: whenever the write happens, it is in this scan or in the next.
        let mut tracker = tracker(&victim, range);
        victim.ask("storm");
        let mut replica = contents(&victim, range);
        for round in 0.. {
            let last = round == 200;
            if last {
                victim.ask("calm");
            }
            let found = dirty(&mut tracker, range);
            let memory = RemoteMemory::new(&victim.process).unwrap();
            for one in found {
                let at = (one.start - range.start) as usize;
                memory.read(one.start, &mut replica[at..at + one.len() as usize]).unwrap();
            }
            if last {
                break;
            }
        }
        assert!(contents(&victim, range) == replica, "{kind}: a write was lost");
    }
}
