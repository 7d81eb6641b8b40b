//! Is it all zero?

/// Bytes compared at a time. The loop over them has no early exit, so that it is compiled to wide instructions.
const STEP: usize = 128;

/// Whether all bytes are zero. Pages with contents mostly show it in their first bytes, so looks there first.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (steps, rest) = bytes.as_chunks::<STEP>();
    steps.iter().all(|step| step.iter().fold(0, |seen, byte| seen | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
