//! Threads wait for missing pages, however they touch them, and get the placed content.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::Write;
use std::os::unix::net::UnixStream;

use common::{Victim, injector};
use whimbrel_tracee::{
    AddressRange, LastingUserfaultfd, PAGE_SIZE, PageFaultError, PageFaultHandler, RamFile, RemoteMemory,
    maps,
};

const PAGES: u64 = 512;
const LEN: u64 = PAGES * PAGE_SIZE;
const KINDS: [&str; 3] = ["anonymous", "huge", "memfd"];

/// A victim with missing memory.
struct Stage {
    victim: Victim,
    range: AddressRange,
    missing: PageFaultHandler,
    /// Number of the descriptor that was left in the victim.
    there: i32,
    /// Sockets without traffic: a wait on them ends only because of threads.
    silence: (UnixStream, UnixStream),
}

impl Stage {
    fn new(kind: &str) -> Self {
        Self::after(kind, |_, _| {})
    }

    /// Starts a victim and runs `first` on its memory before any page is missing.
    fn after(kind: &str, first: impl FnOnce(&mut Victim, AddressRange)) -> Self {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, LEN);
        first(&mut victim, range);
        let LastingUserfaultfd { here, there } =
            injector().create_lasting_userfaultfd(&victim.process).unwrap();
        let missing = PageFaultHandler::begin(&victim.process, here, &[range]).unwrap();
        assert_eq!((victim.userfaultfds(), victim.registered()), (1, vec![range]));
        Self { victim, range, missing, there, silence: UnixStream::pair().unwrap() }
    }

    fn address(&self, page: u64) -> u64 {
        self.range.start + page * PAGE_SIZE
    }

    fn wait(&self) -> Vec<u64> {
        let mut found = Vec::new();
        assert!(self.missing.wait(&self.silence.0, &mut found).unwrap());
        found.iter().map(|address| (address - self.range.start) / PAGE_SIZE).collect()
    }

    /// Places the pages for threads that will touch all of them one after the other.
    fn serve(&self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            assert_eq!(self.wait(), [page]);
            assert_eq!(self.missing.place(self.address(page), &content(page)).unwrap(), 1);
        }
    }

    fn page(&self, page: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_SIZE as usize];
        RemoteMemory::new(&self.victim.process).unwrap().read(self.address(page), &mut bytes).unwrap();
        bytes
    }

    /// Ends the wait when all pages are placed; nothing remains.
    fn end(self) {
        self.missing.end().unwrap();
        injector().close_lasting(&self.victim.process, self.there).unwrap();
        assert_eq!((self.victim.userfaultfds(), self.victim.is_registered()), (0, false));
        self.victim.assert_well();
    }
}

fn content(page: u64) -> Vec<u8> {
    vec![(page % 251) as u8 + 1; PAGE_SIZE as usize]
}

#[test]
fn threads_that_touch_a_missing_page_wait() {
    for kind in KINDS {
        let mut stage = Stage::new(kind);
        stage.victim.tell(&format!("read 0 {LEN}"));
        stage.serve(0..PAGES);
        stage.victim.line();
        for page in 0..PAGES {
            assert_eq!(stage.page(page), content(page), "{kind}, page {page}");
        }
        stage.end();
    }
}

/// A page that was placed without a request exists before any thread waits; later writes of the process stay.
#[test]
fn existing_pages_are_not_overwritten() {
    for kind in KINDS {
        let mut stage = Stage::new(kind);
        let half: Vec<_> = (0..PAGES / 2).flat_map(content).collect();
        assert_eq!(stage.missing.place(stage.range.start, &half).unwrap(), PAGES / 2);
        stage.victim.ask(&format!("write 0 {PAGE_SIZE} 7"));
        let written = stage.page(0);
        assert_ne!(written, content(0));
        // Again, and beyond: every second page of the rest exists already.
        for page in (PAGES / 2..PAGES).step_by(2) {
            stage.missing.place_zeros(AddressRange::with_len(stage.address(page), PAGE_SIZE)).unwrap();
        }
        let all: Vec<_> = (0..PAGES).flat_map(|page| content(page + 100)).collect();
        assert_eq!(stage.missing.place(stage.range.start, &all).unwrap(), PAGES / 4);
        assert_eq!(stage.missing.place_zeros(stage.range).unwrap(), 0);
        stage.victim.ask(&format!("read 0 {LEN}"));
        assert_eq!(stage.page(0), written);
        assert_eq!(stage.page(1), content(1));
        assert_eq!(stage.page(PAGES - 2), vec![0; PAGE_SIZE as usize]);
        assert_eq!(stage.page(PAGES - 1), content(PAGES - 1 + 100));
        stage.end();
    }
}

/// Stale pages of earlier rounds are discarded: no thread waits for a page that exists.
#[test]
fn a_stale_page_is_waited_for_once_it_was_taken_away() {
    for kind in KINDS {
        let mut stage = Stage::after(kind, |victim, _| {
            victim.ask(&format!("write 0 {LEN} 3"));
        });
        // After the registration: before it, the kernel may fill the hole when it makes a huge page of the rest.
        let stale = AddressRange::with_len(stage.address(1), 2 * PAGE_SIZE);
        if kind == "memfd" {
            let mapping = maps::mapping_at(&stage.victim.process, stage.range.start).unwrap().unwrap();
            let file = RamFile::open(&stage.victim.process, &mapping).unwrap();
            file.punch_hole(PAGE_SIZE..3 * PAGE_SIZE).unwrap();
        } else {
            injector().discard(&stage.victim.process, &[stale]).unwrap();
        }
        stage.victim.tell(&format!("read 0 {LEN}"));
        stage.serve(1..3);
        stage.victim.line();
        assert_eq!((stage.page(1), stage.page(2)), (content(1), content(2)));
        stage.end();
    }
}

/// A wait that an agent has read and not answered before it died is reported to the next one.
#[test]
fn another_handler_can_take_over() {
    for kind in KINDS {
        let mut stage = Stage::new(kind);
        stage.victim.tell(&format!("read 0 {LEN}"));
        stage.serve(0..10);
        assert_eq!(stage.wait(), [10]);
        let Stage { missing, victim, range, there, .. } = stage;
        drop(missing);
        assert_eq!((victim.userfaultfds(), victim.registered()), (1, vec![range]));
        let missing = PageFaultHandler::take_over(&victim.process, there, &[range]).unwrap();
        let silence = UnixStream::pair().unwrap();
        let mut stage = Stage { victim, range, missing, there, silence };
        stage.serve(10..PAGES);
        stage.victim.line();
        assert_eq!((stage.page(9), stage.page(10)), (content(9), content(10)));
        stage.end();
    }
}

/// A range is unmapped, like the memory of an unplugged device: the other threads continue to wait, an agent that takes
/// over does not manage new memory at that address, and it does not block the end.
#[test]
fn unmapped_memory_is_not_managed_any_more() {
    for kind in KINDS {
        let mut stage = Stage::new(kind);
        let Stage { mut victim, range: first, there, silence, .. } = stage;
        victim.ask(&format!("unmap 0 {LEN}"));
        let missing = PageFaultHandler::take_over(&victim.process, there, &[first]).unwrap();
        let gone = missing.place(first.start, &content(0)).unwrap_err();
        assert!(matches!(gone, PageFaultError::Unmapped { .. }), "{gone:?}");
        assert!(matches!(missing.place_zeros(first), Err(PageFaultError::Unmapped { .. })));
        assert!(!victim.is_registered());
        missing.end().unwrap();
        stage = Stage { victim, range: first, missing, there, silence };
        stage.end();
    }
}

/// Disks are read straight into memory: the kernel itself touches the pages.
#[test]
fn the_kernel_waits_too() {
    for kind in KINDS {
        let mut stage = Stage::new(kind);
        let mut file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.write_all(&vec![0xaa; LEN as usize]).unwrap();
        file.as_file().sync_all().unwrap();
        stage.victim.tell(&format!("direct-read {}", file.path().display()));
        let mut served = 0;
        while served < PAGES {
            for page in stage.wait() {
                served += stage.missing.place(stage.address(page), &content(page)).unwrap();
            }
        }
        stage.victim.line();
        stage.victim.ask("direct-wait");
        assert_eq!(stage.page(3), vec![0xaa; PAGE_SIZE as usize], "{kind}");
        stage.end();
    }
}

#[test]
fn a_wait_can_be_ended() {
    let stage = Stage::new("anonymous");
    let (ours, theirs) = UnixStream::pair().unwrap();
    let waits = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| stage.missing.wait(&ours, &mut Vec::new()));
        drop(theirs);
        waiting.join().unwrap()
    });
    assert!(!waits.unwrap());
    stage.end();
}

#[test]
fn nonsense_is_refused() {
    let mut stage = Stage::new("memfd");
    let beyond = stage.range.end + (1 << 30);
    let page = content(0);
    assert!(matches!(stage.missing.place(beyond, &page), Err(PageFaultError::Lost { .. })));
    assert!(matches!(
        stage.missing.place(stage.range.start, &page[1..]),
        Err(PageFaultError::Unaligned { .. })
    ));
    assert!(matches!(
        stage.missing.place(stage.range.start + 1, &page),
        Err(PageFaultError::Unaligned { .. })
    ));
    // A range of another userfaultfd.
    let LastingUserfaultfd { here, there } =
        injector().create_lasting_userfaultfd(&stage.victim.process).unwrap();
    let error = PageFaultHandler::begin(&stage.victim.process, here, &[stage.range]).unwrap_err();
    assert!(matches!(error, PageFaultError::Taken { .. }), "{error:?}");
    injector().close_lasting(&stage.victim.process, there).unwrap();
    assert!(PageFaultHandler::take_over(&stage.victim.process, there, &[stage.range]).is_err());
    stage.missing.place_zeros(stage.range).unwrap();
    stage.victim.ask(&format!("read 0 {LEN}"));
    stage.end();
}
