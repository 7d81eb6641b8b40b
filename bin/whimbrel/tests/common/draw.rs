//! Random samples that can be repeated.

/// Returns the seed of this run: `WHIMBREL_SEED`, which is not 0, or the usual one.
pub fn seed(usual: u64) -> u64 {
    match std::env::var("WHIMBREL_SEED") {
        Ok(seed) => {
            seed.parse().ok().filter(|seed| *seed != 0).expect("WHIMBREL_SEED is a number, and not 0")
        }
        Err(_) => usual,
    }
}

/// A small generator, so that a sample can be repeated from its seed.
pub struct Generator(pub u64);

impl Generator {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}
