//! Content of a test guest's pages and of its disks' blocks.
//!
//! Content is a pure function of a few numbers, so that a program that knows them can detect a wrong page without a
//! copy: the load generator in the guest (its own memory, and the data read from its disks), and the laboratory on the
//! host (disk images that it makes). It looks random and does not compress.
//!
//! The order of rewriting is another such function, a [`Pattern`].

mod pattern;

pub use pattern::{BadPattern, Order, Pattern};

/// Words of 64 bits in a page, or in a block of a disk, of 4096 bytes.
pub const WORDS: usize = 512;

/// Bytes of a page, and of a block of a disk.
pub const PAGE_BYTES: usize = WORDS * 8;

/// Blocks of a test disk that the guest reads or writes at once.
pub const BLOCKS_AT_ONCE: usize = 4;

/// The number that, in place of a secret, makes disk content differ from memory content.
pub const DISK_SEED: u64 = 0x6469_736b;

/// A good 64-bit mixer (the finaliser of splitmix64): neighbouring inputs give unrelated outputs.
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the words of a page (or block) `number` in its `version`, first to last.
pub fn words(seed: u64, number: u64, version: u32) -> impl Iterator<Item = u64> {
    // Xorshift must not start at zero.
    let mut x = mix(mix(seed ^ mix(number)) ^ u64::from(version)) | 1;
    std::iter::repeat_with(move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    })
    .take(WORDS)
}

/// Fills `block` (a multiple of [`PAGE_BYTES`]) with a test disk's content from block `first` on, in a version: 0 from
/// the laboratory, the guest's writers count on.
pub fn fill_disk(first: u64, version: u32, block: &mut [u8]) {
    for (number, page) in (first..).zip(block.chunks_exact_mut(PAGE_BYTES)) {
        for (bytes, word) in page.chunks_exact_mut(8).zip(words(DISK_SEED, number, version)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Returns the first block, counted from `first`, in which `data` differs from a test disk's content in that version.
pub fn wrong_disk_block(first: u64, version: u32, data: &[u8]) -> Option<u64> {
    (first..).zip(data.chunks_exact(PAGE_BYTES)).find_map(|(number, page)| {
        let wrong = page
            .chunks_exact(8)
            .zip(words(DISK_SEED, number, version))
            .any(|(bytes, word)| bytes != word.to_le_bytes());
        wrong.then_some(number)
    })
}

/// Returns a checksum that distinguishes a complete line from one that was damaged on its way.
pub fn checksum(line: &str) -> u64 {
    line.bytes().fold(0, |sum, byte| mix(sum ^ u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_byte_is_found() {
        let mut data = vec![0; 4 * PAGE_BYTES];
        fill_disk(7, 3, &mut data);
        assert_eq!(wrong_disk_block(7, 3, &data), None);
        assert_eq!(wrong_disk_block(7, 2, &data), Some(7));
        data[2 * PAGE_BYTES + 4095] ^= 1;
        assert_eq!(wrong_disk_block(7, 3, &data), Some(9));
        assert_eq!(wrong_disk_block(8, 3, &data), Some(8));
    }

    #[test]
    fn versions_and_pages_differ() {
        let page = |n, v| words(1, n, v).collect::<Vec<_>>();
        assert_ne!(page(1, 1), page(1, 2));
        assert_ne!(page(1, 1), page(2, 1));
        assert_eq!(page(3, 3), page(3, 3));
    }
}
