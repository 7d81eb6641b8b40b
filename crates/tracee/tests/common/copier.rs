//! Copies memory of a victim as a migration would.

use std::collections::BTreeSet;

use whimbrel_tracee::{
    AddressRange, Injector, PAGE_SIZE, Pagemap, RamFile, RemoteMemory, WriteTracker, maps,
};

use super::Victim;

/// A copy of the victim's memory that is made as a migration would, and compared with the memory
/// itself.
pub struct Copier {
    pub victim: Victim,
    pub range: AddressRange,
    pub tracker: WriteTracker,
    pub memory: RemoteMemory,
    /// The file behind shared memory.
    pub file: Option<RamFile>,
    /// True if pages that are not populated are zero.
    pub has_hole_info: bool,
    pub pagemap: Pagemap,
    pub replica: Vec<u8>,
}

impl Copier {
    pub fn start(injector: &Injector, kind: &str, len: u64) -> Self {
        let mut victim = Victim::start(&["mode-memory"]);
        let range = victim.map(kind, len);
        Self::start_with(injector, victim, range)
    }

    pub fn start_with(injector: &Injector, victim: Victim, range: AddressRange) -> Self {
        let uffd = injector.create_userfaultfd(&victim.process).unwrap();
        let tracker = WriteTracker::start(&victim.process, uffd, &[range]).unwrap();
        let memory = RemoteMemory::new(&victim.process).unwrap();
        let mapping = maps::mapping_at(&victim.process, range.start).unwrap().unwrap();
        let file = matches!(mapping.backing, maps::Backing::SharedFile(_))
            .then(|| RamFile::open(&victim.process, &mapping).unwrap());
        let has_hole_info = mapping.backing == maps::Backing::Anonymous;
        let pagemap = Pagemap::open(&victim.process).unwrap();
        let replica = vec![0xee; range.len() as usize];
        let mut copier = Self { victim, range, tracker, memory, file, has_hole_info, pagemap, replica };
        copier.copy(range);
        copier
    }

    /// Copies without touching holes: through the file, or only the populated parts.
    pub fn copy(&mut self, range: AddressRange) {
        let offset = |address: u64| address - self.range.start;
        let there = &mut self.replica[offset(range.start) as usize..offset(range.end) as usize];
        there.fill(0);
        let mut data = Vec::new();
        if let Some(file) = &self.file {
            file.data_runs(offset(range.start)..offset(range.end), &mut data).unwrap();
        } else if !self.has_hole_info {
            data.push(offset(range.start)..offset(range.end));
        } else {
            let mut populated = Vec::new();
            self.pagemap.populated(range, &mut populated).unwrap();
            data.extend(populated.iter().map(|run| offset(run.start)..offset(run.end)));
        }
        for run in data {
            let first = (run.start - offset(range.start)) as usize;
            let into = &mut there[first..first + (run.end - run.start) as usize];
            match &self.file {
                Some(file) => file.read_at(run.start, into).unwrap(),
                None => self.memory.read(self.range.start + run.start, into).unwrap(),
            }
        }
    }

    pub fn tell(&mut self, command: &str) {
        self.victim.ask(command);
    }

    /// Runs one round: copies the written ranges and returns them.
    pub fn round(&mut self) -> Vec<AddressRange> {
        let mut dirty = Vec::new();
        self.tracker.take_dirty(self.range, &mut dirty).unwrap();
        assert!(dirty.windows(2).all(|two| two[0].end < two[1].start), "not sorted and joined: {dirty:?}");
        assert!(dirty.iter().all(|one| self.range.intersection(one) == Some(*one)), "not within the range");
        for &range in &dirty {
            self.copy(range);
        }
        dirty
    }

    /// Returns the pages that differ between the copy and the memory, read in a simple way.
    pub fn differing(&self) -> Vec<u64> {
        let mut now = vec![0; self.replica.len()];
        self.memory.read(self.range.start, &mut now).unwrap();
        let pages = now.chunks(PAGE_SIZE as usize).zip(self.replica.chunks(PAGE_SIZE as usize));
        pages.enumerate().filter(|(_, (a, b))| a != b).map(|(page, _)| page as u64).collect()
    }

    pub fn assert_equal(&self) {
        let differing = self.differing();
        assert!(differing.is_empty(), "pages were missed: {differing:?}");
    }

    pub fn page_numbers(&self, ranges: &[AddressRange]) -> BTreeSet<u64> {
        let base = self.range.start;
        ranges.iter().flat_map(|one| (one.start - base) / PAGE_SIZE..(one.end - base) / PAGE_SIZE).collect()
    }
}
