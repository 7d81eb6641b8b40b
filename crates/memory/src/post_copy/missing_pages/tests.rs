use std::collections::BTreeMap;

use super::*;

const PAGE: usize = PAGE_BYTES as usize;
const BASE: u64 = 1 << 30;

/// Pages by their addresses.
#[derive(Default)]
struct Memory(Mutex<BTreeMap<u64, Vec<u8>>>);

impl Placer for Memory {
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, PageFaultError> {
        let mut memory = lock(&self.0);
        let before = memory.len();
        for (address, page) in (address..).step_by(PAGE).zip(pages.chunks(PAGE)) {
            memory.entry(address).or_insert_with(|| page.to_vec());
        }
        Ok((memory.len() - before) as u64)
    }

    fn place_zeros(&self, range: AddressRange) -> Result<u64, PageFaultError> {
        self.place(range.start, &vec![0; range.len() as usize])
    }
}

fn region(name: &str, address: u64, pages: u64) -> RamRegion {
    RamRegion { name: name.to_owned(), bytes: pages * PAGE_BYTES, page_bytes: PAGE_BYTES, address }
}

fn set(pages: u64, these: &[u64]) -> PageSet {
    let mut set = PageSet::new(pages * PAGE_BYTES);
    for page in these {
        set.set(*page..page + 1);
    }
    set
}

fn missing() -> Arc<MissingPages<Memory>> {
    let regions = vec![region("rom", BASE / 2, 4), region("ram", BASE, 1000)];
    Arc::new(MissingPages::new(
        Memory::default(),
        regions,
        vec![set(4, &[]), set(1000, &[7, 8, 900, 901])],
        || (),
    ))
}

fn address(page: u64) -> u64 {
    BASE + page * PAGE_BYTES
}

#[test]
fn missing_pages_are_requested_once_others_become_zeros() {
    let missing = missing();
    let page = |page| PageRequest { block: 1, page };
    assert_eq!(missing.handle_fault(address(7)).unwrap(), Some(page(7)));
    assert_eq!(missing.handle_fault(address(7)).unwrap(), None);
    assert_eq!(missing.handle_fault(address(900)).unwrap(), Some(page(900)));
    assert_eq!(missing.handle_fault(address(9)).unwrap(), None);
    assert_eq!(missing.handle_fault(BASE / 2).unwrap(), None);
    assert!(missing.handle_fault(12).is_err(), "nothing of the guest");
    let zeros: Vec<_> = lock(&missing.placer().0).keys().copied().collect();
    assert_eq!(zeros, [BASE / 2, address(9)]);
    assert_eq!(missing.requested(), [page(7), page(900)]);

    let writers = missing.writers();
    writers[1].write(7 * PAGE_BYTES, &[5; 2 * PAGE]).unwrap();
    assert_eq!((missing.requested(), missing.pages()), (vec![page(900)], 2));
    // Zeros, with or without a waiting thread.
    writers[1].drop_pages(900 * PAGE_BYTES..903 * PAGE_BYTES).unwrap();
    assert_eq!((missing.requested(), missing.pages()), (Vec::new(), 0));
    let memory = || lock(&missing.placer().0);
    assert_eq!([7, 8, 9, 900].map(|page| memory()[&address(page)][0]), [5, 5, 0, 0]);
    assert_eq!(memory()[&address(901)][0], 0);
    assert!(!memory().contains_key(&address(902)), "nobody awaits it");
    // Given back by the guest since: a second copy does not restore the page.
    memory().remove(&address(7));
    writers[1].write(7 * PAGE_BYTES, &[6; 3 * PAGE]).unwrap();
    assert!(!memory().contains_key(&address(7)));
    assert_eq!([8, 9].map(|page| memory()[&address(page)][0]), [5, 0]);
    assert_eq!(missing.handle_fault(address(7)).unwrap(), None);
    assert_eq!(memory()[&address(7)][0], 0);
    assert_eq!(missing.unexpected_page(), None);
    assert!(writers[1].read(0, &mut [0]).is_err());
}

/// A page was written from outside: it is reported at once, and threads that wait for the others still get them.
#[test]
fn missing_page_found_present_is_reported_without_blocking() {
    for zeros in [false, true] {
        let reports = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&reports);
        let count_report = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let sets = vec![set(1000, &[7, 8, 900])];
        let missing =
            MissingPages::new(Memory::default(), vec![region("ram", BASE, 1000)], sets, count_report);
        let missing = Arc::new(missing);
        let writer = &missing.writers()[0];
        lock(&missing.placer().0).insert(address(8), vec![1; PAGE]);
        if zeros {
            writer.drop_pages(7 * PAGE_BYTES..9 * PAGE_BYTES).unwrap();
        } else {
            writer.write(7 * PAGE_BYTES, &[5; 2 * PAGE]).unwrap();
        }
        assert_eq!(missing.unexpected_page(), Some(PageRequest { block: 0, page: 7 }));
        assert_eq!((missing.pages(), reports.load(Ordering::Relaxed)), (1, 1));
        assert_eq!(lock(&missing.placer().0)[&address(8)][0], 1, "the guest may have written to it");
        writer.write(900 * PAGE_BYTES, &[5; PAGE]).unwrap();
        assert_eq!((missing.pages(), reports.load(Ordering::Relaxed)), (0, 2));
    }
}

/// The agent had placed the page, but not yet updated its file.
#[test]
fn page_placed_by_a_dead_agent_is_trusted() {
    let missing = Arc::new(Arc::into_inner(missing()).unwrap().taken_over());
    lock(&missing.placer().0).insert(address(8), vec![1; PAGE]);
    missing.writers()[1].write(7 * PAGE_BYTES, &[5; 2 * PAGE]).unwrap();
    assert_eq!((missing.pages(), missing.unexpected_page()), (2, None));
    assert_eq!(lock(&missing.placer().0)[&address(8)][0], 1, "the guest may have written to it");
}

#[test]
fn the_last_page_is_reported_and_the_file_records_all() {
    let folder = tempfile::tempdir().unwrap();
    let (path, sets) = (folder.path().join("missing"), vec![set(4, &[]), set(1000, &[7, 8, 900])]);
    let reports = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&reports);
    let regions = vec![region("rom", BASE / 2, 4), region("ram", BASE, 1000)];
    let missing = MissingPages::new(Memory::default(), regions, sets.clone(), move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let missing = Arc::new(missing.with_file(MissingPagesFile::create(&path, &sets).unwrap()));
    let kept = || MissingPagesFile::open(&path, [4, 1000].map(|pages| pages * PAGE_BYTES)).unwrap().1;
    let writers = missing.writers();
    writers[1].write(7 * PAGE_BYTES, &[5; PAGE]).unwrap();
    assert_eq!((kept(), reports.load(Ordering::Relaxed)), (missing.set(), 0));
    writers[1].drop_pages(8 * PAGE_BYTES..901 * PAGE_BYTES).unwrap();
    assert_eq!((kept(), reports.load(Ordering::Relaxed)), (vec![set(4, &[]), set(1000, &[])], 1));
    writers[1].write(0, &vec![5; 9 * PAGE]).unwrap();
    assert_eq!((missing.pages(), reports.load(Ordering::Relaxed)), (0, 1));
}

#[test]
fn zero_pages_without_a_request_are_not_placed_in_files() {
    let missing = Arc::new(Arc::into_inner(missing()).unwrap().placing_zeros([true, false]));
    assert!(missing.handle_fault(address(8)).unwrap().is_some());
    missing.writers()[1].drop_pages(0..901 * PAGE_BYTES).unwrap();
    let zeros: Vec<_> = lock(&missing.placer().0).keys().copied().collect();
    assert_eq!((zeros, missing.pages()), (vec![address(8)], 1));
}

/// Memory that has room for some new pages.
struct Narrow(Memory, Mutex<u64>);

impl Placer for Narrow {
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, PageFaultError> {
        let mut room = lock(&self.1);
        let mut placed = 0;
        for (address, page) in (address..).step_by(PAGE).zip(pages.chunks(PAGE)) {
            let is_there = lock(&self.0.0).contains_key(&address);
            if !is_there && *room == 0 {
                return Err(PageFaultError::Ended);
            }
            let new = self.0.place(address, page)?;
            *room -= new;
            placed += new;
        }
        Ok(placed)
    }

    fn place_zeros(&self, range: AddressRange) -> Result<u64, PageFaultError> {
        self.place(range.start, &vec![0; range.len() as usize])
    }
}

#[test]
fn pages_placed_before_an_error_are_not_missing_any_more() {
    let narrow = Narrow(Memory::default(), Mutex::new(3));
    let sets = vec![set(1000, &[7, 8, 9, 10])];
    let missing = Arc::new(MissingPages::new(narrow, vec![region("ram", BASE, 1000)], sets, || ()));
    let writer = &missing.writers()[0];
    assert!(writer.write(7 * PAGE_BYTES, &vec![5; 4 * PAGE]).is_err());
    assert_eq!(missing.pages(), 1);
    *lock(&missing.placer().1) = 9;
    writer.write(7 * PAGE_BYTES, &vec![6; 4 * PAGE]).unwrap();
    assert_eq!(missing.pages(), 0);
    assert_eq!([7, 9, 10].map(|page| lock(&missing.placer().0.0)[&address(page)][0]), [5, 5, 6]);
}

#[test]
fn zeros_placed_before_an_error_are_expected() {
    let narrow = Narrow(Memory::default(), Mutex::new(3));
    let sets = vec![set(1000, &[7, 8, 20, 21])];
    let missing = Arc::new(MissingPages::new(narrow, vec![region("ram", BASE, 1000)], sets, || ()));
    let writer = &missing.writers()[0];
    assert!(writer.drop_pages(7 * PAGE_BYTES..30 * PAGE_BYTES).is_err());
    assert_eq!(missing.pages(), 1);
    *lock(&missing.placer().1) = 9;
    writer.drop_pages(7 * PAGE_BYTES..30 * PAGE_BYTES).unwrap();
    assert_eq!((missing.pages(), missing.unexpected_page()), (0, None));
}

/// Memory of which a block was unmapped.
struct Unplugged(Memory);

impl Placer for Unplugged {
    fn place(&self, address: u64, pages: &[u8]) -> Result<u64, PageFaultError> {
        if address < BASE {
            return Err(PageFaultError::Unmapped { range: AddressRange::with_len(address, PAGE_BYTES) });
        }
        self.0.place(address, pages)
    }

    fn place_zeros(&self, range: AddressRange) -> Result<u64, PageFaultError> {
        self.place(range.start, &vec![0; range.len() as usize])
    }
}

#[test]
fn no_page_is_missing_in_a_block_that_was_unmapped() {
    for zeros in [false, true] {
        let regions = vec![region("rom", BASE / 2, 8), region("ram", BASE, 8)];
        let sets = vec![set(8, &[1, 2, 7]), set(8, &[3])];
        let missing = Arc::new(MissingPages::new(Unplugged(Memory::default()), regions, sets, || ()));
        let writers = missing.writers();
        if zeros {
            writers[0].drop_pages(PAGE_BYTES..2 * PAGE_BYTES).unwrap();
        } else {
            writers[0].write(PAGE_BYTES, &[5; PAGE]).unwrap();
        }
        assert_eq!((missing.pages(), missing.unexpected_page()), (1, None), "what is there has to come");
        writers[1].write(3 * PAGE_BYTES, &[6; PAGE]).unwrap();
        assert_eq!(missing.pages(), 0);
    }
}
