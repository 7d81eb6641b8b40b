//! Bytes that had to be sent, and bytes sent beyond these.
//!
//! A guest's necessary bytes are the content of its disk and its memory: blocks and pages of zeros need not be sent.
//! They are counted at the destination by a program that has no part in copying, so that they are the same for all
//! movers.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::mover::ArrivedGuest;
use crate::environment::Qemu;
use crate::error::{Context, Result};
use crate::run::run;
use crate::traffic::Traffic;

const PAGE_BYTES: usize = 4096;
/// Headers of a packet of a TCP connection with timestamps: Ethernet, IP, TCP.
const HEADERS_BYTES: u64 = 14 + 20 + 32;

/// Returns the bytes sent without headers of the network, which are the same for all.
pub(super) fn payload_bytes(traffic: Traffic) -> u64 {
    traffic.bytes.saturating_sub(traffic.packets * HEADERS_BYTES)
}

/// Returns the share sent beyond the necessary bytes; negative where some of these need not be sent.
pub(super) fn overhead(sent_bytes: u64, content_bytes: u64) -> Option<f64> {
    (content_bytes > 0).then(|| sent_bytes as f64 / content_bytes as f64 - 1.0)
}

/// Content of a guest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Content {
    pub(super) disk_bytes: u64,
    pub(super) memory_bytes: u64,
}

/// Counts the content of a guest, which is stopped for that.
pub(super) fn content(
    arrived: &ArrivedGuest,
    qemu: &Qemu,
    memory_mib: u64,
    scratch: &Path,
) -> Result<Content> {
    let mut monitor = arrived.monitor()?;
    monitor.command("stop", &json!({}))?;
    let memory = scratch.join("content.ram");
    let all = json!({ "val": 0, "size": memory_mib << 20, "filename": memory.display().to_string() });
    monitor.command("pmemsave", &all)?;
    let memory_bytes = counted(&memory)?;
    Ok(Content { disk_bytes: disk_content(qemu, arrived.image(), scratch)?, memory_bytes })
}

/// Counts the content of an image, which must not be written in the meantime.
pub(super) fn disk_content(qemu: &Qemu, image: &Path, scratch: &Path) -> Result<u64> {
    let raw = scratch.join("content.raw");
    run(Command::new(&qemu.img).args(["convert", "-q", "-U", "-O", "raw"]).arg(image).arg(&raw))?;
    counted(&raw)
}

/// Counts the content of a file, and removes it.
fn counted(path: &Path) -> Result<u64> {
    let context = || format!("cannot read {}", path.display());
    let bytes = File::open(path).and_then(held_bytes).context(context)?;
    fs::remove_file(path).context(context)?;
    Ok(bytes)
}

/// Returns the bytes of all pages that are not zero pages.
fn held_bytes(mut from: impl Read) -> io::Result<u64> {
    let mut buffer = vec![0; 256 * PAGE_BYTES];
    let mut held = 0;
    loop {
        let mut filled = 0;
        while filled < buffer.len() {
            match from.read(&mut buffer[filled..])? {
                0 => break,
                read => filled += read,
            }
        }
        let pages = buffer[..filled].chunks(PAGE_BYTES);
        held += pages
            .filter(|page| page.iter().any(|byte| *byte != 0))
            .map(|page| page.len() as u64)
            .sum::<u64>();
        if filled < buffer.len() {
            return Ok(held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_zeros_need_not_be_sent() {
        let mut bytes = vec![0; 700 * PAGE_BYTES + 100];
        bytes[0] = 1;
        bytes[300 * PAGE_BYTES - 1] = 1;
        bytes[700 * PAGE_BYTES + 99] = 1;
        assert_eq!(held_bytes(&bytes[..]).unwrap(), 2 * PAGE_BYTES as u64 + 100);
        assert_eq!(held_bytes(&[][..]).unwrap(), 0);
    }

    #[test]
    fn overhead_is_a_share_of_what_had_to_be_sent() {
        let traffic = Traffic { bytes: 1_514_000, packets: 1_000 };
        assert_eq!(payload_bytes(traffic), 1_448_000);
        assert!((overhead(1_100, 1_000).unwrap() - 0.1).abs() < 1e-9);
        assert!((overhead(900, 1_000).unwrap() + 0.1).abs() < 1e-9);
        assert_eq!(overhead(1, 0), None);
    }
}
