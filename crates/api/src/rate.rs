//! Rates in the form in which users write them.

use std::str::FromStr;

/// A rate in bytes per second; 0 means no cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub u64);

/// Text that is no rate.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "write bytes per second as 500000, 500k, 1.5G or 512Mi, bits per second as 10Gbit, or `none` for no cap"
)]
pub struct BadRate;

impl FromStr for Rate {
    type Err = BadRate;

    fn from_str(text: &str) -> Result<Self, BadRate> {
        if text == "none" {
            return Ok(Self(0));
        }
        let text = text.strip_suffix("/s").unwrap_or(text);
        let (text, divisor) = match text.strip_suffix("bit") {
            Some(bits) => (bits, 8.0),
            None => (text.strip_suffix('B').unwrap_or(text), 1.0),
        };
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let factor = match unit {
            "" => 1.0,
            "k" | "K" => 1e3,
            "M" => 1e6,
            "G" => 1e9,
            "T" => 1e12,
            "Ki" => 1024.0,
            "Mi" => 1024.0 * 1024.0,
            "Gi" => 1024.0 * 1024.0 * 1024.0,
            _ => return Err(BadRate),
        };
        let number: f64 = number.parse().map_err(|_| BadRate)?;
        let rate = number * factor / divisor;
        // A cap of 0 would mean none, which a user who writes 0.1 hardly wants.
        if rate == 0.0 || (1.0..1e18).contains(&rate) { Ok(Self(rate as u64)) } else { Err(BadRate) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        let good = [
            ("none", 0),
            ("0", 0),
            ("1000", 1000),
            ("500k", 500_000),
            ("1.5G", 1_500_000_000),
            ("512Mi", 512 << 20),
            ("512MiB/s", 512 << 20),
            ("10Gbit", 1_250_000_000),
            ("8kbit/s", 1000),
        ];
        for (text, rate) in good {
            assert_eq!(text.parse(), Ok(Rate(rate)), "{text}");
        }
        for bad in ["", "fast", "-1", "1X", "G", "0.1", "1e99", "1..2", "9999999999T", "NaN", "inf", "1 M"] {
            assert_eq!(bad.parse::<Rate>(), Err(BadRate), "{bad}");
        }
    }
}
