//! Local regression of a host's last values of use (Loess, as LR uses it).

/// Number of values.
pub(super) const VALUES: usize = 10;

/// Returns the factors by which the values, the oldest first, are multiplied to give the line's height `ahead` steps
/// after the last one.
///
/// The line is fitted by least squares with tricube weights, of which the newest value has the largest and the oldest
/// none. It is linear in the values, so these factors are all of the regression.
pub(super) fn forecast_factors(ahead: f64) -> [f64; VALUES] {
    let last = VALUES as f64;
    let weight = |x: f64| (1.0 - ((last - x) / (last - 1.0)).powi(3)).powi(3);
    let xs: [f64; VALUES] = std::array::from_fn(|at| at as f64 + 1.0);
    let total: f64 = xs.iter().map(|x| weight(*x)).sum();
    let mean = xs.iter().map(|x| weight(*x) * x).sum::<f64>() / total;
    let spread: f64 = xs.iter().map(|x| weight(*x) * (x - mean).powi(2)).sum();
    let at = last + ahead - mean;
    xs.map(|x| weight(x) * (1.0 / total + at * (x - mean) / spread))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forecast(values: [f64; VALUES], ahead: f64) -> f64 {
        forecast_factors(ahead).iter().zip(values).map(|(factor, value)| factor * value).sum()
    }

    #[test]
    fn a_line_is_continued() {
        let line: [f64; VALUES] = std::array::from_fn(|at| 0.2 + 0.05 * at as f64);
        assert!((forecast(line, 1.0) - 0.7).abs() < 1e-12);
        assert!((forecast(line, 3.0) - 0.8).abs() < 1e-12);
    }

    #[test]
    fn new_values_count_for_more() {
        let mut rising = [0.5; VALUES];
        rising[VALUES - 1] = 0.6;
        let mut old = [0.5; VALUES];
        old[1] = 0.6;
        assert!(forecast(rising, 1.0) > 0.52);
        assert!((forecast(old, 1.0) - 0.5).abs() < 0.02);
    }
}
