//! Tests of the streams with fakes: RAM in vectors with an exact model of the kernel's write tracking, and connections
//! without sockets that break at chosen points.

mod deltas;
mod direct;
mod fake_ram;
mod fake_wire;
mod golden;
mod handmade_frames;
mod moves;
mod pair;
mod parts;
mod references;
mod sender;
mod turns;

/// A small generator of numbers (splitmix64), so that a seed determines everything.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to just before `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
