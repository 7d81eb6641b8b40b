//! Random numbers from a seed: xoshiro256++ (Blackman and Vigna 2019), seeded by `SplitMix64`.
//!
//! The algorithm is fixed here instead of taken from a library, so that a seed gives the same numbers in all versions.

/// Generator of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 4],
}

impl Random {
    /// Returns the generator for a seed.
    pub fn new(seed: u64) -> Self {
        let mut mixed = seed;
        let state = std::array::from_fn(|_| {
            mixed = mixed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let first = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let second = (first ^ (first >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            second ^ (second >> 31)
        });
        Self { state }
    }

    /// Returns 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let result = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (third, fourth) = (c ^ a, d ^ b);
        self.state = [a ^ fourth, b ^ third, third ^ (b << 17), fourth.rotate_left(45)];
        result
    }

    /// Returns a number from 0 up to, but not including, 1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
    }

    /// Returns an exponentially distributed number with mean 1.
    #[inline]
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Returns a normally distributed number with mean 0 and variance 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Returns a number with the Poisson distribution: the events of a process of rate 1 until `mean`.
    ///
    /// Takes time in proportion to `mean`, which is a second's number of requests here.
    pub fn poisson(&mut self, mean: f64) -> u32 {
        let mut count = 0;
        let mut at = self.exponential();
        while at < mean {
            count += 1;
            at += self.exponential();
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs for the state 1, 2, 3, 4, as the authors' C code prints them.
    #[test]
    fn the_algorithm_is_xoshiro256_plus_plus() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let first: Vec<u64> = (0..4).map(|_| random.bits()).collect();
        assert_eq!(first, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
    }

    /// `SplitMix64` of seed 0, as its author prints it.
    #[test]
    fn the_seed_is_mixed_by_splitmix64() {
        assert_eq!(Random::new(0).state[..2], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn distributions_have_their_mean_and_variance() {
        let count = 200_000;
        let check = |draw: &mut dyn FnMut(&mut Random) -> f64, mean: f64, variance: f64| {
            let mut random = Random::new(7);
            let all: Vec<f64> = (0..count).map(|_| draw(&mut random)).collect();
            let found = all.iter().sum::<f64>() / f64::from(count);
            let spread = all.iter().map(|x| (x - found).powi(2)).sum::<f64>() / f64::from(count);
            let error = 5.0 * (variance / f64::from(count)).sqrt();
            assert!((found - mean).abs() < error, "mean {found} instead of {mean}");
            assert!((spread / variance - 1.0).abs() < 0.03, "variance {spread} instead of {variance}");
        };
        check(&mut Random::unit, 0.5, 1.0 / 12.0);
        check(&mut Random::exponential, 1.0, 1.0);
        check(&mut Random::normal, 0.0, 1.0);
        check(&mut |random| f64::from(random.poisson(3.5)), 3.5, 3.5);
    }
}
