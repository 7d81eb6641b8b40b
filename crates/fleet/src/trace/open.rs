//! Trace files: the only place of this crate that reads files.

#![allow(clippy::disallowed_types, reason = "the edge of this crate: what decides gets text")]

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::path::Path;

use lzma_rust2::XzReader;

/// First bytes of a file that xz has compressed.
const XZ: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];

/// Opens a trace file; decompresses it if xz has compressed it. `-` is the standard input.
pub fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    if path.as_os_str() == "-" {
        return decompressed(BufReader::new(io::stdin()));
    }
    decompressed(BufReader::with_capacity(1 << 16, File::open(path)?))
}

fn decompressed(mut reader: impl BufRead + 'static) -> io::Result<Box<dyn BufRead>> {
    let mut first = Vec::new();
    reader.by_ref().take(XZ.len() as u64).read_to_end(&mut first)?;
    let is_compressed = first == XZ;
    let whole = io::Cursor::new(first).chain(reader);
    if is_compressed {
        return Ok(Box::new(BufReader::with_capacity(1 << 16, XzReader::new(whole, true))));
    }
    Ok(Box::new(whole))
}
