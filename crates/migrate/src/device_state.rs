//! Compression of the device state. The guest is stopped while it is sent, on a connection that was idle before: on a
//! long way TCP needs a round trip for the first 14 KB, and further ones for the rest.

use std::io;

use zstd::bulk;

/// Zstandard's fastest usual level: the guest waits for it.
const LEVEL: i32 = 1;

/// Compresses a device state.
pub(crate) fn compress(state: &[u8]) -> io::Result<Vec<u8>> {
    bulk::compress(state, LEVEL)
}

/// Returns the device state of so many bytes; none if the data is damaged.
pub(crate) fn decompress(compressed: &[u8], bytes: u64) -> Option<Vec<u8>> {
    let state = bulk::decompress(compressed, usize::try_from(bytes).ok()?).ok()?;
    (state.len() as u64 == bytes).then_some(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_back_or_is_called_damaged() {
        let state: Vec<u8> = (0..100_000_u32).map(|number| (number / 64 % 251) as u8).collect();
        let compressed = compress(&state).unwrap();
        assert!(compressed.len() < state.len() / 10);
        assert_eq!(decompress(&compressed, state.len() as u64), Some(state.clone()));
        for bytes in [0, state.len() as u64 - 1, state.len() as u64 + 1] {
            assert_eq!(decompress(&compressed, bytes), None);
        }
        assert_eq!(decompress(&compressed[1..], state.len() as u64), None);
        assert_eq!(decompress(&compressed[..compressed.len() - 1], state.len() as u64), None);
    }
}
