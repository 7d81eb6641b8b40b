//! Walks over one page table by several threads.
//!
//! The walk over the page table is the cost of a scan of few dirty pages, and there are two during the switchover.
//! The kernel allows several threads to walk at the same time (they hold its lock of the memory map for reading), so
//! the table of a large guest is cut into parts, one for each processor.

use std::num::NonZero;
use std::panic;
use std::thread;

use crate::pagemap::Pagemap;
use crate::range::AddressRange;

/// Minimum memory per thread in bytes: a walk over less is done before the thread has begun.
const PART_BYTES: u64 = 1 << 30;
/// Parts begin at multiples of this, in bytes, where no page can be cut in two, however large it is.
const CUT_BYTES: u64 = 1 << 30;
/// Maximum number of parts: more threads obstruct each other.
const MAX_PARTS: u64 = 16;

/// The threads of a walk.
#[derive(Debug, Default)]
pub(super) struct Walkers {
    /// Duplicates of the page table, for each thread but the first.
    pagemaps: Vec<Pagemap>,
    /// Number of threads that can run at the same time: determined once, because it requires reading files.
    processors: Option<u64>,
}

fn processors() -> u64 {
    thread::available_parallelism().map_or(1, NonZero::get) as u64
}

impl Walkers {
    /// Calls `each` for all parts of the range, and returns the results, in no order. The caller's own thread processes
    /// the parts for which the system provides no thread.
    pub(super) fn walk<T: Send>(
        &mut self,
        own: &mut Pagemap,
        range: AddressRange,
        each: impl Fn(&mut Pagemap, AddressRange) -> T + Sync,
    ) -> Vec<T> {
        if range.len() < 2 * PART_BYTES {
            return vec![each(own, range)];
        }
        let processors = *self.processors.get_or_insert_with(processors);
        let mut parts = parts(range, processors.min(MAX_PARTS)).into_iter();
        while self.pagemaps.len() + 1 < parts.len()
            && let Ok(pagemap) = own.try_clone()
        {
            self.pagemaps.push(pagemap);
        }
        let first = parts.next();
        let each = &each;
        thread::scope(|scope| {
            let start = |(pagemap, part)| {
                let walk = move || each(pagemap, part);
                thread::Builder::new().name("scan".to_owned()).spawn_scoped(scope, walk).map_err(|_| part)
            };
            let started: Vec<_> = self.pagemaps.iter_mut().zip(&mut parts).map(start).collect();
            let mut walked: Vec<T> = first.into_iter().chain(parts).map(|part| each(own, part)).collect();
            for thread in started {
                walked.push(match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|cause| panic::resume_unwind(cause)),
                    Err(part) => each(own, part),
                });
            }
            walked
        })
    }
}

/// Cuts a range into at most `most` parts of about the same length.
fn parts(range: AddressRange, most: u64) -> Vec<AddressRange> {
    let length = range.len().div_ceil((range.len() / PART_BYTES).clamp(1, most));
    let mut parts = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let end =
            (start + length).checked_next_multiple_of(CUT_BYTES).map_or(range.end, |end| end.min(range.end));
        parts.push(AddressRange::new(start, end));
        start = end;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Process;

    const GIB: u64 = 1 << 30;

    #[test]
    fn parts_are_as_many_as_wanted_and_no_less_than_a_gib() {
        let lengths = |start: u64, bytes: u64, most: u64| {
            let parts = parts(AddressRange::with_len(start, bytes), most);
            assert_eq!(parts.iter().map(AddressRange::len).sum::<u64>(), bytes);
            assert!(parts.is_sorted_by(|one, next| one.end == next.start && next.start % CUT_BYTES == 0));
            parts.iter().map(AddressRange::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(GIB, 4096, 8), [4096]);
        assert_eq!(lengths(0, 2 * GIB - 4096, 8), [2 * GIB - 4096]);
        assert_eq!(lengths(0, 8 * GIB, 1), [8 * GIB]);
        assert_eq!(lengths(0, 8 * GIB, 2), [4 * GIB, 4 * GIB]);
        assert_eq!(lengths(0, 8 * GIB, 3), [3 * GIB, 3 * GIB, 2 * GIB]);
        // The first cut is at an address where a page of 1 GiB may begin.
        assert_eq!(lengths(GIB - 4096, 4 * GIB, 2), [2 * GIB + 4096, 2 * GIB - 4096]);
    }

    #[test]
    fn each_part_is_walked_over_once() {
        let mut own = Pagemap::open(&Process::open(std::process::id()).unwrap()).unwrap();
        let mut walkers = Walkers::default();
        for bytes in [4096, 5 * GIB, 2 * GIB] {
            let range = AddressRange::with_len(4 * GIB, bytes);
            let mut walked = walkers.walk(&mut own, range, |_, part| part);
            crate::range::merge_from(&mut walked, 0);
            assert_eq!(walked, [range]);
        }
    }
}
