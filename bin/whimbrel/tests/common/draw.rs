//! What is drawn at random, and can be drawn again.

/// The seed of this run: `WHIMBREL_SEED`, or the usual one.
pub fn seed(usual: u64) -> u64 {
    std::env::var("WHIMBREL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(usual)
}

/// A small generator, so that a sample can be drawn again from its seed, which is not 0.
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}
