//! Watts of a host at a utilisation of its processors.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Watts at equally spaced utilisations from 0 to 1, and straight lines between them.
///
/// Two values are a linear curve; eleven are a table as SPECpower publishes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<f64>", into = "Vec<f64>")]
pub struct PowerCurve {
    watts: Vec<f64>,
}

/// Numbers that are no power curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPowerCurve {
    /// Fewer than two values.
    #[error("a power curve needs at least two values, in watts: idle and fully busy")]
    TooShort,
    /// Text, a negative number or one that is not finite.
    #[error("value {at} of the power curve is not a number of watts of 0 or more")]
    NotWatts {
        /// Number of the value, from 1.
        at: usize,
    },
    /// A value below the one before it.
    #[error("value {at} of the power curve is below the value before it: a busier host needs no less power")]
    Falling {
        /// Number of the value, from 1.
        at: usize,
    },
    /// A fully busy host that needs no power.
    #[error("the last value of the power curve is 0: a busy host needs power")]
    NoPower,
}

impl PowerCurve {
    /// Returns the curve through equally spaced values, from idle to fully busy.
    pub fn new(watts: Vec<f64>) -> Result<Self, BadPowerCurve> {
        if watts.len() < 2 {
            return Err(BadPowerCurve::TooShort);
        }
        if let Some(at) = watts.iter().position(|watts| !watts.is_finite() || *watts < 0.0) {
            return Err(BadPowerCurve::NotWatts { at: at + 1 });
        }
        if let Some(at) = watts.windows(2).position(|pair| pair[1] < pair[0]) {
            return Err(BadPowerCurve::Falling { at: at + 2 });
        }
        let curve = Self { watts };
        if curve.peak() > 0.0 { Ok(curve) } else { Err(BadPowerCurve::NoPower) }
    }

    /// Returns the watts at a utilisation; one outside of 0 to 1 counts as the nearer end.
    pub fn watts(&self, utilisation: f64) -> f64 {
        let last = self.watts.len() - 1;
        let at = utilisation.clamp(0.0, 1.0) * last as f64;
        let below = (at as usize).min(last - 1);
        let (low, high) = (self.watts[below], self.watts[below + 1]);
        low + (high - low) * (at - below as f64)
    }

    /// Returns the watts of an idle host.
    pub fn idle(&self) -> f64 {
        self.watts[0]
    }

    /// Returns the watts of a fully busy host.
    pub fn peak(&self) -> f64 {
        self.watts.last().copied().unwrap_or(0.0)
    }
}

impl TryFrom<Vec<f64>> for PowerCurve {
    type Error = BadPowerCurve;

    fn try_from(watts: Vec<f64>) -> Result<Self, BadPowerCurve> {
        Self::new(watts)
    }
}

impl From<PowerCurve> for Vec<f64> {
    fn from(curve: PowerCurve) -> Self {
        curve.watts
    }
}

/// Values in watts, separated by commas.
impl FromStr for PowerCurve {
    type Err = BadPowerCurve;

    fn from_str(text: &str) -> Result<Self, BadPowerCurve> {
        let value = |(at, word): (usize, &str)| {
            word.trim().parse().map_err(|_| BadPowerCurve::NotWatts { at: at + 1 })
        };
        Self::new(text.split(',').enumerate().map(value).collect::<Result<_, _>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watts_follow_straight_lines_between_the_values() {
        let curve: PowerCurve = "100, 120, 180".parse().unwrap();
        let at = [(0.0, 100.0), (0.25, 110.0), (0.5, 120.0), (0.75, 150.0), (1.0, 180.0), (1.5, 180.0)];
        for (utilisation, watts) in at {
            assert!((curve.watts(utilisation) - watts).abs() < 1e-9, "{utilisation}");
        }
        assert!((curve.idle() - 100.0).abs() < 1e-9 && (curve.peak() - 180.0).abs() < 1e-9);
    }

    #[test]
    fn impossible_curves_are_refused() {
        let refused = |text: &str| text.parse::<PowerCurve>().unwrap_err();
        assert_eq!(refused("100"), BadPowerCurve::TooShort);
        assert_eq!(refused("100,-1"), BadPowerCurve::NotWatts { at: 2 });
        assert_eq!(refused("100,much"), BadPowerCurve::NotWatts { at: 2 });
        assert_eq!(refused("NaN,100"), BadPowerCurve::NotWatts { at: 1 });
        assert_eq!(refused("100,120,110"), BadPowerCurve::Falling { at: 3 });
        assert_eq!(refused("0,0"), BadPowerCurve::NoPower);
    }
}
