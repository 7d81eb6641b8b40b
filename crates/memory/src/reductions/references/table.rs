//! Locations of pages by content hash: twelve bytes for each, in bounded memory.

use crate::content_hash::{CONTENT_HASH_BYTES, ContentHash};

/// Locations by hash: each is stored in the first free slot from the one that its hash selects, or, if none is near,
/// in the slot of another one, which is evicted.
#[derive(Debug)]
pub(super) struct LocationTable {
    /// The hash, and above it the higher bits of the location.
    hashes: Vec<u64>,
    /// The lower bits of the location.
    places: Vec<u32>,
    /// Number of insertions, and number of hashes evicted by them.
    inserted: usize,
    forgotten: usize,
}

/// Number of slots that are searched for a hash. In a table that is two thirds full nearly every hash finds one.
const NEAR: usize = 64;
const HASH_BITS: u32 = CONTENT_HASH_BYTES as u32 * 8;
/// A location has 48 bits, of which 37 are the page's number: 512 TiB of each block.
const PAGE_BITS: u32 = 37;
const WHICH_BITS: u32 = 48 - PAGE_BITS;
/// No location has all bits set.
const NOWHERE: u64 = (1 << 48) - 1;

/// Content of a slot.
enum Slot {
    Free,
    Taken { hash: u64, place: u64 },
}

fn of_place(place: u64) -> (u16, u64) {
    ((place >> PAGE_BITS) as u16, place & ((1 << PAGE_BITS) - 1))
}

impl LocationTable {
    /// Creates a table with room for `pages` pages; a table for 0 pages needs no memory.
    pub(super) fn new(pages: usize) -> Self {
        let slots = if pages == 0 { 0 } else { (pages + pages / 2).max(NEAR) };
        let free = NOWHERE >> 32 << HASH_BITS;
        Self { hashes: vec![free; slots], places: vec![NOWHERE as u32; slots], inserted: 0, forgotten: 0 }
    }

    /// Returns the number of insertions, including repeated hashes.
    pub(super) fn inserted(&self) -> usize {
        self.inserted
    }

    /// Returns the slots in which a hash may be, in their order.
    fn near(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let slots = self.hashes.len();
        let first = (hash % slots.max(1) as u64) as usize;
        (first..first + NEAR.min(slots)).map(move |slot| if slot < slots { slot } else { slot - slots })
    }

    fn get(&self, slot: usize) -> Slot {
        let word = self.hashes[slot];
        match word >> HASH_BITS << 32 | u64::from(self.places[slot]) {
            NOWHERE => Slot::Free,
            place => Slot::Taken { hash: word & ((1 << HASH_BITS) - 1), place },
        }
    }

    /// Inserts a location. One that cannot be encoded is ignored.
    pub(super) fn insert(&mut self, hash: ContentHash, which: u16, page: u64) {
        let place = u64::from(which) << PAGE_BITS | page;
        if page >> PAGE_BITS == 0 && which >> WHICH_BITS == 0 && place != NOWHERE {
            self.put(hash.number(), place);
        }
    }

    /// Inserts an entry as returned by [`Self::places`] of another table.
    pub(super) fn put(&mut self, hash: u64, place: u64) {
        if self.hashes.is_empty() {
            return;
        }
        self.inserted += 1;
        // A known hash gets the new location.
        let good =
            |slot: &usize| !matches!(self.get(*slot), Slot::Taken { hash: other, .. } if other != hash);
        let slot = self.near(hash).find(good).or_else(|| {
            self.forgotten += 1;
            self.near(hash).nth(self.forgotten % NEAR)
        });
        if let Some(slot) = slot {
            self.hashes[slot] = place >> 32 << HASH_BITS | hash;
            self.places[slot] = place as u32;
        }
    }

    /// Returns all hashes and their locations, in no order.
    pub(super) fn places(&self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.hashes.len()).filter_map(|slot| match self.get(slot) {
            Slot::Taken { hash, place } => Some((hash, place)),
            Slot::Free => None,
        })
    }

    /// Returns the location of a page with that hash: the number of its library, and the page's.
    pub(super) fn find(&self, hash: ContentHash) -> Option<(u16, u64)> {
        let hash = hash.number();
        for slot in self.near(hash) {
            match self.get(slot) {
                // Entries are never removed, so the hash would be in this slot.
                Slot::Free => return None,
                Slot::Taken { hash: found, place } if found == hash => {
                    return Some(of_place(place));
                }
                Slot::Taken { .. } => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Dice;

    fn hash(number: u64) -> ContentHash {
        ContentHash::of(&number.to_le_bytes())
    }

    /// With as many hashes as its room allows the table forgets next to none; with more it forgets some, and never
    /// returns a wrong location.
    #[test]
    fn a_table_tells_no_wrong_place() {
        let mut table = LocationTable::new(1000);
        let mut dice = Dice(5);
        let hashes: Vec<_> = (0..5000).map(|_| hash(dice.next())).collect();
        for (page, hash) in (0..).zip(&hashes) {
            table.insert(*hash, 2, page);
            if page == 999 {
                let found = hashes[..1000].iter().filter(|hash| table.find(**hash).is_some()).count();
                assert!(found >= 998, "{found}");
            }
        }
        let mut found = 0;
        for (page, hash) in (0..).zip(&hashes) {
            if let Some(place) = table.find(*hash) {
                assert_eq!(place, (2, page));
                found += 1;
            }
        }
        assert!(found > 1400 && found + table.forgotten == 5000, "{found} and {}", table.forgotten);
        assert_eq!(table.hashes.capacity() * 8 + table.places.capacity() * 4, 1500 * 12);
    }

    #[test]
    fn places_at_the_edges() {
        let mut table = LocationTable::new(4);
        for (which, page) in [(0, 0), (1279, (1 << PAGE_BITS) - 1), (2047, 3)] {
            table.insert(hash(1), which, page);
            assert_eq!(table.find(hash(1)), Some((which, page)));
        }
        // These cannot be encoded: the old location stays.
        for (which, page) in [(0, 1 << PAGE_BITS), (2048, 0), (2047, (1 << PAGE_BITS) - 1)] {
            table.insert(hash(1), which, page);
            assert_eq!(table.find(hash(1)), Some((2047, 3)));
        }
        let mut none = LocationTable::new(0);
        none.insert(hash(1), 0, 0);
        assert_eq!(none.find(hash(1)), None);
    }
}
