//! Pages of a simulated guest: which of them are dirty, as expected numbers of pages in each class of writes.

use std::collections::VecDeque;

use super::writes::WriteClass;

/// Most parts of a class that are kept apart.
const MOST_PARTS: usize = 64;

/// Pages of a class that were written in the same round.
#[derive(Clone, Copy, Debug)]
struct PagePart {
    pages: f64,
    /// Share of them that is dirty.
    dirty: f64,
    /// Share of them that the last scan cleaned.
    cleaned: f64,
}

/// Pages of one class.
#[derive(Clone, Debug)]
struct SimulatedClass {
    class: WriteClass,
    is_disk: bool,
    /// Those that were not written for the longest time first: they are written next.
    parts: VecDeque<PagePart>,
    /// Pages that the last scan cleaned and that were written since.
    rewritten: f64,
}

impl SimulatedClass {
    fn new(class: &WriteClass, is_disk: bool) -> Self {
        let all = PagePart { pages: class.pages, dirty: 1.0, cleaned: 0.0 };
        Self { class: *class, is_disk, parts: VecDeque::from([all]), rewritten: 0.0 }
    }

    fn dirty_pages(&self) -> f64 {
        self.parts.iter().map(|part| part.pages * part.dirty).sum()
    }

    /// Writes the pages whose turn it is.
    fn run(&mut self, ns: f64) {
        let written = self.class.pages * (ns / self.class.period_ns).min(1.0);
        let mut left = written;
        while left > 0.0 {
            let Some(part) = self.parts.front_mut() else { break };
            let pages = part.pages.min(left);
            self.rewritten += pages * part.cleaned;
            left -= pages;
            part.pages -= pages;
            if part.pages <= 0.0 {
                self.parts.pop_front();
            }
        }
        if written > 0.0 {
            self.parts.push_back(PagePart { pages: written, dirty: 1.0, cleaned: 0.0 });
        }
    }

    /// Cleans a share of the dirty pages; returns their number.
    fn clean(&mut self, share: f64) -> f64 {
        let before = self.dirty_pages();
        for part in &mut self.parts {
            part.cleaned = part.dirty * share;
            part.dirty -= part.cleaned;
        }
        self.rewritten = 0.0;
        while self.parts.len() > MOST_PARTS {
            let (Some(first), Some(second)) = (self.parts.pop_front(), self.parts.pop_front()) else { break };
            let pages = first.pages + second.pages;
            let mean = |one: f64, other: f64| (one * first.pages + other * second.pages) / pages;
            let (dirty, cleaned) = (mean(first.dirty, second.dirty), mean(first.cleaned, second.cleaned));
            self.parts.push_front(PagePart { pages, dirty, cleaned });
        }
        before * share
    }

    /// Cleans all pages but so many; returns the number of those that stay dirty.
    fn clean_all_but(&mut self, dirty: f64) -> f64 {
        let (pages, dirty) = (self.class.pages, dirty.min(self.class.pages));
        self.parts.clear();
        self.parts.push_back(PagePart { pages, dirty: dirty / pages, cleaned: 0.0 });
        dirty
    }
}

/// Expected numbers of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PageCounts {
    /// Pages of memory.
    pub(super) memory: f64,
    /// Pages of disks.
    pub(super) disk: f64,
}

impl PageCounts {
    pub(super) fn all(self) -> f64 {
        self.memory + self.disk
    }

    fn of(&mut self, is_disk: bool) -> &mut f64 {
        if is_disk { &mut self.disk } else { &mut self.memory }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self { memory: (self.memory - other.memory).max(0.0), disk: (self.disk - other.disk).max(0.0) }
    }
}

/// All pages of a simulated guest, memory and disks. A page is dirty until a scan cleans it, and again once it is
/// written.
///
/// The pages of a class are written in turns: next the one that was not written for the longest time. How pages lie in
/// memory is not modelled: those that a round selects are of all classes, in proportion to their dirty pages, whenever
/// they were written.
#[derive(Clone, Debug)]
pub(super) struct SimulatedPages {
    classes: Vec<SimulatedClass>,
}

impl SimulatedPages {
    /// Returns pages that are all dirty.
    pub(super) fn all_dirty(memory: &[WriteClass], disk: &[WriteClass]) -> Self {
        let memory = memory.iter().map(|class| SimulatedClass::new(class, false));
        Self { classes: memory.chain(disk.iter().map(|class| SimulatedClass::new(class, true))).collect() }
    }

    /// Lets the guest run.
    pub(super) fn run(&mut self, ns: f64) {
        for class in &mut self.classes {
            class.run(ns);
        }
    }

    /// Returns the dirty pages.
    pub(super) fn dirty(&self) -> PageCounts {
        let mut sum = PageCounts::default();
        for class in &self.classes {
            *sum.of(class.is_disk) += class.dirty_pages();
        }
        sum
    }

    /// Returns the pages of memory that the last scan cleaned and that are dirty again.
    pub(super) fn rewritten_memory(&self) -> f64 {
        self.classes.iter().filter(|class| !class.is_disk).map(|class| class.rewritten).sum()
    }

    /// Cleans a share of the dirty pages of memory, and one of those of disks; returns their numbers.
    pub(super) fn clean(&mut self, memory_share: f64, disk_share: f64) -> PageCounts {
        let mut cleaned = PageCounts::default();
        for class in &mut self.classes {
            let share = if class.is_disk { disk_share } else { memory_share };
            *cleaned.of(class.is_disk) += class.clean(share);
        }
        cleaned
    }

    /// Cleans all pages but so many of memory and of disks, which are those that are written most often.
    pub(super) fn clean_all_but(&mut self, dirty: PageCounts) {
        let mut left = dirty;
        // Classes of memory, and those of disks, stand in the order of their periods.
        for class in &mut self.classes {
            let left = left.of(class.is_disk);
            *left -= class.clean_all_but(*left);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "these values are exact")]

    use super::*;

    fn guest() -> SimulatedPages {
        let classes = [
            WriteClass { pages: 100.0, period_ns: 8.0 },
            WriteClass { pages: 900.0, period_ns: f64::INFINITY },
        ];
        SimulatedPages::all_dirty(&classes, &[WriteClass { pages: 50.0, period_ns: 100.0 }])
    }

    #[test]
    fn pages_become_dirty_again_until_all_of_a_class_are() {
        let mut pages = guest();
        assert_eq!(pages.dirty(), PageCounts { memory: 1000.0, disk: 50.0 });
        assert_eq!(pages.clean(1.0, 1.0).all(), 1050.0);
        pages.run(4.0);
        assert_eq!(pages.dirty(), PageCounts { memory: 50.0, disk: 2.0 });
        assert_eq!(pages.rewritten_memory(), 50.0);
        pages.run(46.0);
        assert_eq!(pages.dirty(), PageCounts { memory: 100.0, disk: 25.0 });
    }

    #[test]
    fn a_part_of_the_pages_leaves_the_others_dirty() {
        let mut pages = guest();
        assert_eq!(pages.clean(0.5, 0.0), PageCounts { memory: 500.0, disk: 0.0 });
        assert_eq!(pages.dirty(), PageCounts { memory: 500.0, disk: 50.0 });
        pages.run(4.0);
        // Half of the 50 pages that were written were clean.
        assert_eq!(pages.dirty().memory, 525.0);
        assert_eq!(pages.rewritten_memory(), 25.0);
    }

    /// However often pages are cleaned, no more become dirty than are written.
    #[test]
    fn frequent_scans_find_what_is_written_and_no_more() {
        let mut pages = guest();
        pages.clean(1.0, 1.0);
        for _ in 0..100 {
            pages.run(1.0);
            assert_eq!(pages.dirty(), PageCounts { memory: 12.5, disk: 0.5 });
            pages.clean(1.0, 1.0);
        }
        // The pages that were just cleaned are not written before the others.
        pages.run(1.0);
        assert_eq!(pages.rewritten_memory(), 0.0);
        pages.run(7.0);
        assert_eq!(pages.rewritten_memory(), 12.5);
    }

    #[test]
    fn many_scans_lose_no_page() {
        let mut pages = guest();
        for _ in 0..1000 {
            pages.clean(0.01, 0.01);
            pages.run(0.001);
        }
        let dirty = pages.dirty();
        assert!((0.0..1050.0).contains(&dirty.all()), "{dirty:?}");
        pages.clean(1.0, 1.0);
        assert!(pages.dirty().all() < 1e-6, "{:?}", pages.dirty());
    }

    #[test]
    fn a_migration_under_way_owes_the_busiest_pages() {
        let mut pages = guest();
        pages.clean_all_but(PageCounts { memory: 60.0, disk: 0.0 });
        assert_eq!(pages.dirty().all(), 60.0);
        pages.run(4.0);
        assert_eq!(pages.dirty().memory, 80.0);
    }
}
