//! Sample of a guest's memory for a forecast: how much of it has content, and how well that compresses.
//!
//! Pages are only read, and only those that have memory behind them: a hole stays a hole.

use proto::limits::PAGE_BYTES;

use crate::ram::{BlockReader, RamError, zero};
use crate::reductions::compression::compressed_bytes;

/// Pages that are compressed together, as in a frame.
const PAGES_TOGETHER: usize = 16;

/// Content of sampled pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContentSample {
    /// Number of pages.
    pub pages: u64,
    /// Those of them that need next to no bytes: holes, zeros, and pages that repeat eight bytes.
    pub empty_pages: u64,
    /// Content of the other pages, in bytes.
    pub content_bytes: u64,
    /// Length of that content after fast compression, in bytes.
    pub compressed_bytes: u64,
}

impl ContentSample {
    /// Returns the share of pages with content, in thousandths; all if no page was sampled.
    pub fn content_permille(&self) -> u64 {
        let content = self.pages.saturating_sub(self.empty_pages);
        (content * 1000).checked_div(self.pages).unwrap_or(1000)
    }

    /// Returns the length of compressed content, in thousandths of the content.
    pub fn compressed_permille(&self) -> u64 {
        (self.compressed_bytes * 1000).checked_div(self.content_bytes).unwrap_or(1000).min(1000)
    }
}

/// Samples about `pages` pages of the blocks, evenly spread and at random positions that follow from `seed`. `goes_on` is
/// asked before each page; the sample ends early if it is false.
///
/// # Errors
/// A page cannot be read.
pub fn sample_content(
    readers: &[Box<dyn BlockReader>],
    pages: u64,
    seed: u64,
    goes_on: impl Fn() -> bool,
) -> Result<ContentSample, RamError> {
    let all: u64 = readers.iter().map(|reader| reader.bytes() / PAGE_BYTES).sum();
    let step = (all / pages.max(1)).max(1);
    let mut sample = ContentSample::default();
    let mut content = Vec::with_capacity(PAGES_TOGETHER * PAGE_BYTES as usize);
    for first in (0..all).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
        if !goes_on() {
            break;
        }
        let page = (first + mixed(seed ^ first) % step).min(all - 1);
        sample.pages += 1;
        if !read_content(readers, page, &mut content)? {
            sample.empty_pages += 1;
        } else if content.len() >= PAGES_TOGETHER * PAGE_BYTES as usize {
            sample.compress(&mut content);
        }
    }
    sample.compress(&mut content);
    Ok(sample)
}

impl ContentSample {
    fn compress(&mut self, content: &mut Vec<u8>) {
        self.content_bytes += content.len() as u64;
        self.compressed_bytes += compressed_bytes(content) as u64;
        content.clear();
    }
}

/// Appends a page to `content`, counted over all blocks. Returns false, and appends nothing, if the page is empty.
fn read_content(
    readers: &[Box<dyn BlockReader>],
    page: u64,
    content: &mut Vec<u8>,
) -> Result<bool, RamError> {
    let mut offset = page * PAGE_BYTES;
    for reader in readers {
        if offset >= reader.bytes() {
            offset -= reader.bytes();
            continue;
        }
        if reader.first_present(offset..offset + PAGE_BYTES)? > offset {
            return Ok(false);
        }
        let from = content.len();
        content.resize(from + PAGE_BYTES as usize, 0);
        let is_content = reader.read(offset, &mut content[from..]).map(|()| {
            let page = &content[from..];
            !zero::is_zero(page) && zero::filling(page).is_none()
        });
        if !matches!(is_content, Ok(true)) {
            content.truncate(from);
        }
        return is_content;
    }
    Ok(false)
}

/// Mixes the bits of a number (`SplitMix64`).
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    /// A block whose pages have content by their numbers: of four, one is a hole, one zero, one compressible, one noise.
    struct Pages {
        pages: u64,
    }

    impl BlockReader for Pages {
        fn name(&self) -> &'static str {
            "pages"
        }

        fn bytes(&self) -> u64 {
            self.pages * PAGE_BYTES
        }

        fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
            let page = offset / PAGE_BYTES;
            assert_ne!(page % 4, 0, "a hole is not read");
            for (at, byte) in into.iter_mut().enumerate() {
                *byte = match page % 4 {
                    1 => 0,
                    2 => (at / 256) as u8,
                    _ => mixed(page * PAGE_BYTES + at as u64) as u8,
                };
            }
            Ok(())
        }

        fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
            Ok(if (range.start / PAGE_BYTES).is_multiple_of(4) { range.end } else { range.start })
        }
    }

    fn blocks() -> Vec<Box<dyn BlockReader>> {
        vec![Box::new(Pages { pages: 30_000 }), Box::new(Pages { pages: 10_001 })]
    }

    #[test]
    fn a_sample_is_like_the_whole() {
        let sample = sample_content(&blocks(), 2000, 7, || true).unwrap();
        assert!((2000..=2101).contains(&sample.pages), "{sample:?}");
        assert!((450..=550).contains(&sample.content_permille()), "{sample:?}");
        // The half of the content is noise, and the rest next to nothing.
        assert!((400..=600).contains(&sample.compressed_permille()), "{sample:?}");
        let again = sample_content(&blocks(), 2000, 7, || true).unwrap();
        assert_eq!(sample, again, "the positions follow from the seed");
    }

    #[test]
    fn a_small_guest_is_read_whole_and_an_interrupted_sample_ends() {
        let all = sample_content(&[Box::new(Pages { pages: 8 })], 2000, 7, || true).unwrap();
        assert_eq!((all.pages, all.empty_pages, all.content_bytes), (8, 4, 4 * PAGE_BYTES));
        let none = sample_content(&blocks(), 2000, 7, || false).unwrap();
        assert_eq!((none, none.content_permille()), (ContentSample::default(), 1000));
    }
}
