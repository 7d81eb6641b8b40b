//! Ranges of addresses in another process.
//!
//! Half open, in bytes. This crate describes memory of another process only by such ranges; upper
//! layers turn them into pages of RAM blocks.

use std::fmt;

/// Size in bytes of the smallest page, and the unit in which the kernel reports writes.
pub const PAGE_SIZE: u64 = 4096;

/// The addresses from `start` to just before `end`, in bytes, in the address space of some process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    /// First address of the range.
    pub start: u64,
    /// First address after the range.
    pub end: u64,
}

impl AddressRange {
    /// Returns the range from `start` to just before `end`; empty if `end` is not above `start`.
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start, end }
    }

    /// Returns the range of `len` bytes that begins at `start`; it ends at the top of the address
    /// space if it would go beyond.
    pub const fn with_len(start: u64, len: u64) -> Self {
        Self { start, end: start.saturating_add(len) }
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Returns true if no address is in the range.
    pub const fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Returns true if `address` is in the range.
    pub const fn contains(&self, address: u64) -> bool {
        self.start <= address && address < self.end
    }

    /// Returns the addresses that are in both ranges.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let both = Self::new(self.start.max(other.start), self.end.min(other.end));
        (!both.is_empty()).then_some(both)
    }

    /// Returns true if both ends are multiples of `unit` bytes (a power of two).
    pub const fn is_aligned(&self, unit: u64) -> bool {
        (self.start | self.end) & (unit - 1) == 0
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start, self.end)
    }
}

/// Sorts the elements of `ranges` from index `from` on, and joins those that touch or overlap;
/// earlier ones stay unchanged.
pub fn merge_from(ranges: &mut Vec<AddressRange>, from: usize) {
    ranges[from..].sort_unstable();
    let mut kept = from;
    for next in from..ranges.len() {
        let range = ranges[next];
        if range.is_empty() {
            continue;
        }
        if kept > from && ranges[kept - 1].end >= range.start {
            ranges[kept - 1].end = ranges[kept - 1].end.max(range.end);
        } else {
            ranges[kept] = range;
            kept += 1;
        }
    }
    ranges.truncate(kept);
}

/// Returns the addresses in `from` that are not in `without`; all three sorted and joined.
pub fn subtract(from: &[AddressRange], without: &[AddressRange]) -> Vec<AddressRange> {
    let mut left = Vec::new();
    let mut without = without.iter().copied().peekable();
    for &range in from {
        let mut start = range.start;
        while let Some(&cut) = without.peek().filter(|cut| cut.start < range.end) {
            if start < cut.start {
                left.push(AddressRange::new(start, cut.start));
            }
            start = start.max(cut.end);
            if cut.end > range.end {
                // It also cuts into the next range.
                break;
            }
            without.next();
        }
        if start < range.end {
            left.push(AddressRange::new(start, range.end));
        }
    }
    left
}

/// Returns the addresses in both lists; all three sorted and joined.
pub fn intersect(one: &[AddressRange], other: &[AddressRange]) -> Vec<AddressRange> {
    subtract(one, &subtract(one, other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn merging_keeps_every_address_and_nothing_else(pairs in prop::collection::vec((0u64..64, 0u64..9), 0..24)) {
            let mut ranges = vec![AddressRange::new(7, 9)];
            let mut expected = BTreeSet::new();
            for &(start, len) in &pairs {
                ranges.push(AddressRange::with_len(start, len));
                expected.extend(start..start + len);
            }
            merge_from(&mut ranges, 1);
            prop_assert_eq!(ranges[0], AddressRange::new(7, 9));
            let seen: BTreeSet<u64> = ranges[1..].iter().flat_map(|r| r.start..r.end).collect();
            prop_assert_eq!(seen, expected);
            for two in ranges[1..].windows(2) {
                prop_assert!(two[0].end < two[1].start);
            }
        }
    }

    proptest! {
        #[test]
        fn sets_of_ranges_are_sets(
            a in prop::collection::btree_set(0u64..40, 0..30),
            b in prop::collection::btree_set(0u64..40, 0..30),
        ) {
            let ranges = |set: &BTreeSet<u64>| {
                let mut ranges: Vec<_> = set.iter().map(|&at| AddressRange::with_len(at, 1)).collect();
                merge_from(&mut ranges, 0);
                ranges
            };
            prop_assert_eq!(subtract(&ranges(&a), &ranges(&b)), ranges(&(&a - &b)));
            prop_assert_eq!(intersect(&ranges(&a), &ranges(&b)), ranges(&(&a & &b)));
        }
    }

    #[test]
    fn intersection_contains_common_addresses() {
        let a = AddressRange::new(10, 20);
        assert_eq!(a.intersection(&AddressRange::new(15, 30)), Some(AddressRange::new(15, 20)));
        assert_eq!(a.intersection(&AddressRange::new(20, 30)), None);
        assert!(a.contains(10) && !a.contains(20));
    }
}
