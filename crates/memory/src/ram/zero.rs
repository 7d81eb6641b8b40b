//! Detection of pages with uniform content.

use std::sync::LazyLock;

use proto::pages::FILLING_BYTES;

/// Bytes compared at a time: as many as stay in the processor's first cache beside a page.
const STEP: usize = 4096;

/// Source of zeros to write. Its length is also that of one check of memory that stays allocated.
pub(super) static ZEROS: LazyLock<Box<[u8]>> = LazyLock::new(|| vec![0; 64 << 10].into());

/// Returns true if all bytes are zero. The comparison is the C library's, which has wide instructions at every level of
/// optimisation, and ends at the first difference.
pub fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; STEP] = [0; STEP];
    bytes.chunks(STEP).all(|step| *step == ZEROS[..step.len()])
}

/// Returns the eight bytes that a page repeats, if it does: debugging kernels and other systems fill free memory with
/// such patterns. Most pages differ in their first bytes.
pub(crate) fn filling(page: &[u8]) -> Option<[u8; FILLING_BYTES]> {
    let (first, rest) = page.split_first_chunk()?;
    (rest.starts_with(first) && *rest == page[..rest.len()]).then_some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fills_a_page_is_found() {
        let mut page: Vec<u8> = [1, 2, 3, 4, 5, 6, 7, 8].repeat(512);
        assert_eq!(filling(&page), Some([1, 2, 3, 4, 5, 6, 7, 8]));
        for at in [0, 7, 8, 9, 2000, 4095] {
            page[at] ^= 0x80;
            assert_eq!(filling(&page), None, "byte {at}");
            page[at] ^= 0x80;
        }
        assert_eq!(filling(&[0xaa; 4096]), Some([0xaa; 8]));
        assert_eq!(filling(&[0; 4096]), Some([0; 8]));
    }

    #[test]
    fn one_byte_anywhere_is_seen() {
        let mut page = vec![0; 4096];
        assert!(is_zero(&page));
        for at in 0..page.len() {
            page[at] = 1 << (at % 8);
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
        for len in 0..300 {
            assert!(is_zero(&page[..len]));
            if let Some(last) = len.checked_sub(1) {
                page[last] = 0x80;
                assert!(!is_zero(&page[..len]));
                page[last] = 0;
            }
        }
    }
}
