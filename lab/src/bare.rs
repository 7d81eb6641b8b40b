//! The bare-metal guest: one boot sector (`guest/bare/bare.S`) that rewrites 48 MiB on each of one or two processors
//! for ever, and checks each page before it rewrites it. It needs no operating system, so it also runs under a nested
//! KVM.

use std::time::Duration;

use crate::error::Result;
use crate::follow::LogFollower;

/// The assembled boot sector; a test assembles the source again and compares.
const SECTOR: &[u8; 512] = include_bytes!("../../guest/bare/bare.bin");

/// Returns the image of a disk that boots the guest.
pub fn image() -> Vec<u8> {
    let mut image = SECTOR.to_vec();
    // The firmware does not boot from a disk of a single sector.
    image.resize(1 << 20, 0);
    image
}

/// Progress that the guest has printed so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassProgress {
    /// Lines of each processor: one every eight passes over its memory.
    pub lines: [u64; 2],
    /// Wrong pages found by the guest itself.
    pub wrong: u64,
}

impl PassProgress {
    /// Adds a line of output. With two processors a line may hold words of both, or none.
    pub fn add(&mut self, line: &str) {
        for letter in line.chars() {
            match letter {
                'a' => self.lines[0] += 1,
                'b' => self.lines[1] += 1,
                '!' => self.wrong += 1,
                _ => {}
            }
        }
    }

    /// Waits until each of `vcpus` processors has printed `lines` more lines than now.
    pub fn wait(
        &mut self,
        output: &mut LogFollower,
        vcpus: usize,
        lines: u64,
        deadline: Duration,
    ) -> Result<()> {
        let start = *self;
        output.wait_for("passes of the bare-metal guest", deadline, |line| {
            self.add(line);
            (0..vcpus.min(2)).all(|n| self.lines[n] >= start.lines[n] + lines)
        })?;
        Ok(())
    }
}
