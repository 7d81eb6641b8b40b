//! The random numbers of the specification: x′ = 5¹³ x mod 2⁴⁶, and x 2⁻⁴⁶ is the number, between 0 and 1.

/// 5¹³.
const MULTIPLIER: u64 = 5_u64.pow(13);
/// Reduces modulo 2⁴⁶.
const MASK: u64 = (1 << 46) - 1;
/// 2⁻⁴⁶.
const UNIT: f64 = 1.0 / (1_u64 << 46) as f64;

/// Seed of CG, IS, MG and FT.
pub const SEED: u64 = 314_159_265;
/// Seed of EP.
pub const SEED_EP: u64 = 271_828_183;

/// A place in a sequence of random numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Returns the sequence of `seed` after `drawn` numbers, without drawing them: the owner of a part of the data
    /// starts there.
    pub fn at(seed: u64, drawn: u64) -> Self {
        let (mut state, mut power, mut left) = (seed & MASK, MULTIPLIER, drawn);
        while left > 0 {
            if left % 2 == 1 {
                state = product(state, power);
            }
            power = product(power, power);
            left /= 2;
        }
        Self { state }
    }

    /// Returns the next number.
    pub fn draw(&mut self) -> f64 {
        self.state = product(self.state, MULTIPLIER);
        // Exact: a float holds integers up to 2⁵³.
        self.state as f64 * UNIT
    }
}

/// Returns the product modulo 2⁴⁶. Exact although it may overflow: the low 46 bits of a product depend on no higher
/// bits.
const fn product(a: u64, b: u64) -> u64 {
    a.wrapping_mul(b) & MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_agrees_with_drawing() {
        let mut stepped = Random::at(SEED, 0);
        for drawn in 0..2000 {
            assert_eq!(Random::at(SEED, drawn), stepped, "after {drawn}");
            stepped.draw();
        }
    }

    #[test]
    fn skips_add_up() {
        let far = Random::at(SEED_EP, 1 << 33);
        assert_eq!(Random::at(far.state, 12_345), Random::at(SEED_EP, (1 << 33) + 12_345));
        assert_ne!(far, Random::at(SEED_EP, (1 << 33) + 1));
    }

    #[test]
    fn the_first_number_is_the_one_worked_out_by_hand() {
        let state = u128::from(SEED) * 1_220_703_125 % (1 << 46);
        assert_eq!(Random::at(SEED, 0).draw().to_bits(), (state as f64 / 70_368_744_177_664.0).to_bits());
    }
}
