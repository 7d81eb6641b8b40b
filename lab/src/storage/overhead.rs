//! How much had to be sent, and how much more was sent.
//!
//! What has to be sent of a guest is what its disk and its memory hold: blocks and pages of zeros need not. It is counted by
//! a program that has no part in copying, in what has arrived, so that it is the same for all who move the guest.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::mover::Arrived;
use crate::bench::usage::Traffic;
use crate::environment::Qemu;
use crate::error::{Context, Result};
use crate::run::run;

const PAGE_BYTES: usize = 4096;
/// Headers of a packet of a TCP connection with timestamps: Ethernet, IP, TCP.
const HEADERS_BYTES: u64 = 14 + 20 + 32;

/// What was sent, headers of the network apart: they are the same for all.
pub(super) fn payload_bytes(traffic: Traffic) -> u64 {
    traffic.bytes.saturating_sub(traffic.packets * HEADERS_BYTES)
}

/// By how much more was sent than had to be, as a share of it; less than nothing where some of it needed not be sent.
pub(super) fn overhead(sent_bytes: u64, content_bytes: u64) -> Option<f64> {
    (content_bytes > 0).then(|| sent_bytes as f64 / content_bytes as f64 - 1.0)
}

/// What a guest holds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Content {
    pub(super) disk_bytes: u64,
    pub(super) memory_bytes: u64,
}

/// Counts what a guest holds, which is stopped for that.
pub(super) fn content(arrived: &Arrived, qemu: &Qemu, memory_mib: u64, scratch: &Path) -> Result<Content> {
    let mut monitor = arrived.monitor()?;
    monitor.command("stop", &json!({}))?;
    let memory = scratch.join("content.ram");
    let all = json!({ "val": 0, "size": memory_mib << 20, "filename": memory.display().to_string() });
    monitor.command("pmemsave", &all)?;
    let memory_bytes = counted(&memory)?;
    Ok(Content { disk_bytes: disk_content(qemu, arrived.image(), scratch)?, memory_bytes })
}

/// Counts what an image holds; nobody may write to it meanwhile.
pub(super) fn disk_content(qemu: &Qemu, image: &Path, scratch: &Path) -> Result<u64> {
    let raw = scratch.join("content.raw");
    run(Command::new(&qemu.img).args(["convert", "-q", "-U", "-O", "raw"]).arg(image).arg(&raw))?;
    counted(&raw)
}

/// Counts what is in a file, and removes it.
fn counted(path: &Path) -> Result<u64> {
    let context = || format!("cannot read {}", path.display());
    let bytes = File::open(path).and_then(held_bytes).context(context)?;
    fs::remove_file(path).context(context)?;
    Ok(bytes)
}

/// Bytes of all pages that are not of zeros.
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
