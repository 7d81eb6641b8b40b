//! Arrivals of each second, scaled to a bank of servers.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::random::Random;
use crate::trace::{RequestTrace, segments_between};

/// Seconds over which the peak is a mean.
pub(super) const PEAK_WINDOW_S: usize = 60;

/// Most steps in which the factor of a scaled trace is found.
const FACTOR_STEPS: usize = 20;

/// Margin of the factor, so that chance does not lift the service time over its limit.
const FACTOR_MARGIN: f64 = 1.05;

/// Scale of a workload: the bank that the busiest minute keeps just busy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    /// Servers that hold the peak: at full load in the busiest minute.
    pub servers: u32,
    /// Longest mean service time, in seconds. A trace with fewer requests is scaled up.
    pub max_service_s: f64,
    /// Seed of the requests of a trace that is scaled up.
    pub seed: u64,
}

/// The reason why a trace makes no workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadWorkload {
    /// A trace without requests.
    #[error("the trace has no request, or none in a whole minute without a gap")]
    NoRequests,
    /// A bank without servers, or too many.
    #[error("a bank has 1 to 255 servers")]
    Servers,
    /// A service time that is no time.
    #[error("the longest mean service time has to be above 0 and finite, in seconds")]
    Service,
    /// A trace that would have to be scaled up beyond any sense.
    #[error("the trace has too few requests: it would have to be scaled up by more than 100,000")]
    TooFew,
}

/// Requests of each second, and their mean time of service.
#[derive(Clone, Debug)]
pub struct Workload {
    pub(super) counts: Vec<u32>,
    pub(super) gaps: Vec<Range<usize>>,
    /// Mean time of service, in seconds.
    pub service_s: f64,
    /// Mean requests per second in the busiest minute.
    pub peak_per_s: f64,
    /// Factor by which the trace was scaled up; 1 if its own requests are used.
    pub factor: f64,
    /// Seconds over which the rate of a trace that is scaled up was smoothed; 1 if it was not.
    pub smoothing_s: usize,
}

impl Workload {
    /// Scales a trace.
    ///
    /// The mean service time is such that `scale.servers` are fully busy in the busiest minute. If it would exceed
    /// `scale.max_service_s`, the rate is multiplied by a factor, and each second gets a Poisson number of requests of
    /// that rate. The rate of a second is then the mean of as many seconds around it as the factor has: it is known no
    /// better than from its requests, and a factor alone would multiply their chance too.
    pub fn new(trace: &RequestTrace, scale: &Scale) -> Result<Self, BadWorkload> {
        if !(1..=255).contains(&scale.servers) {
            return Err(BadWorkload::Servers);
        }
        if !(scale.max_service_s.is_finite() && scale.max_service_s > 0.0) {
            return Err(BadWorkload::Service);
        }
        let gaps = trace.gaps().to_vec();
        let rates: Vec<f64> = trace.counts().iter().map(|count| f64::from(*count)).collect();
        let (factor, smoothing_s) = factor(&rates, &gaps, scale)?;
        let counts = if smoothing_s == 1 {
            trace.counts().to_vec()
        } else {
            let mut random = Random::new(scale.seed);
            smooth(&rates, &gaps, smoothing_s).iter().map(|rate| random.poisson(rate * factor)).collect()
        };
        let scaled: Vec<f64> = counts.iter().map(|count| f64::from(*count)).collect();
        let peak_per_s = peak(&scaled, &gaps).ok_or(BadWorkload::NoRequests)?;
        let service_s = f64::from(scale.servers) / peak_per_s;
        Ok(Self { counts, gaps, service_s, peak_per_s, factor, smoothing_s })
    }

    /// Returns the number of requests.
    pub fn requests(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// Returns the number of seconds that are simulated: those that are not in a gap.
    pub fn seconds(&self) -> usize {
        self.segments().iter().map(Range::len).sum()
    }

    /// Returns the mean requests per second.
    pub fn mean_per_s(&self) -> f64 {
        self.requests() as f64 / self.seconds() as f64
    }

    pub(super) fn segments(&self) -> Vec<Range<usize>> {
        segments_between(self.counts.len(), &self.gaps)
    }
}

/// Returns the factor of the rate, and the seconds over which it is smoothed.
fn factor(rates: &[f64], gaps: &[Range<usize>], scale: &Scale) -> Result<(f64, usize), BadWorkload> {
    let needed = f64::from(scale.servers) / scale.max_service_s;
    let unscaled = peak(rates, gaps).ok_or(BadWorkload::NoRequests)?;
    if unscaled >= needed {
        return Ok((1.0, 1));
    }
    let (mut factor, mut window) = (1.0, 1);
    for _ in 0..FACTOR_STEPS {
        let smoothed = peak(&smooth(rates, gaps, window), gaps).unwrap_or(unscaled);
        let next = needed * FACTOR_MARGIN / smoothed;
        if next > 100_000.0 {
            return Err(BadWorkload::TooFew);
        }
        // The window grows with the factor, and the smoothed peak falls with the window: stop where both agree.
        if next <= factor {
            break;
        }
        factor = next;
        window = (factor.ceil() as usize) | 1;
    }
    Ok((factor, window.max(3)))
}

/// Returns the highest mean of [`PEAK_WINDOW_S`] seconds without a gap; none if there is none above zero.
fn peak(rates: &[f64], gaps: &[Range<usize>]) -> Option<f64> {
    let highest = segments_between(rates.len(), gaps)
        .into_iter()
        .flat_map(|segment| rates[segment].windows(PEAK_WINDOW_S).map(|window| window.iter().sum()))
        .fold(0.0, f64::max);
    (highest > 0.0).then_some(highest / PEAK_WINDOW_S as f64)
}

/// Returns the mean of `window` seconds around each second, without looking across gaps. Gaps have 0.
fn smooth(rates: &[f64], gaps: &[Range<usize>], window: usize) -> Vec<f64> {
    let mut smoothed = vec![0.0; rates.len()];
    for segment in segments_between(rates.len(), gaps) {
        let mut sums = vec![0.0];
        for rate in &rates[segment.clone()] {
            sums.push(sums[sums.len() - 1] + rate);
        }
        for at in 0..segment.len() {
            let (from, to) = (at.saturating_sub(window / 2), (at + window / 2 + 1).min(segment.len()));
            smoothed[segment.start + at] = (sums[to] - sums[from]) / (to - from) as f64;
        }
    }
    smoothed
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALE: Scale = Scale { servers: 20, max_service_s: 0.1, seed: 1 };

    fn workload(counts: Vec<u32>) -> Workload {
        Workload::new(&RequestTrace::new(counts).unwrap(), &SCALE).unwrap()
    }

    #[test]
    fn the_busiest_minute_keeps_the_bank_just_busy() {
        let mut counts = vec![100; 600];
        counts[200..260].fill(400);
        let workload = workload(counts.clone());
        assert!((workload.peak_per_s - 400.0).abs() < 1e-9);
        assert!((workload.service_s - 0.05).abs() < 1e-9);
        assert_eq!((workload.counts, workload.smoothing_s), (counts, 1));
    }

    #[test]
    fn few_requests_are_scaled_up_to_the_service_time() {
        let trace: Vec<u32> = (0..20_000).map(|second| 2 + u32::from(second / 3000 == 3) * 5).collect();
        let workload = workload(trace.clone());
        assert!(workload.service_s <= 0.1 && workload.service_s > 0.08, "{}", workload.service_s);
        assert_eq!(workload.smoothing_s, (workload.factor.ceil() as usize) | 1);
        let expected = workload.factor * trace.iter().map(|count| f64::from(*count)).sum::<f64>();
        assert!((workload.requests() as f64 / expected - 1.0).abs() < 0.01);
    }

    /// Smoothing keeps the chance of a scaled trace as large as that of a Poisson process, not larger.
    #[test]
    fn chance_is_not_multiplied_by_the_factor() {
        let mut random = Random::new(3);
        let workload = workload((0..100_000).map(|_| random.poisson(0.7)).collect());
        let mean = workload.mean_per_s();
        let square = |count: &u32| (f64::from(*count) - mean).powi(2);
        let variance = workload.counts.iter().map(square).sum::<f64>() / workload.counts.len() as f64;
        assert!(workload.factor > 50.0);
        assert!(variance / mean < 2.5, "variance is {} times the mean", variance / mean);
    }

    #[test]
    fn impossible_scales_are_refused() {
        let trace = RequestTrace::new(vec![1; 100]).unwrap();
        let refused = |scale: Scale| Workload::new(&trace, &scale).unwrap_err();
        assert_eq!(refused(Scale { servers: 0, ..SCALE }), BadWorkload::Servers);
        assert_eq!(refused(Scale { servers: 256, ..SCALE }), BadWorkload::Servers);
        assert_eq!(refused(Scale { max_service_s: 0.0, ..SCALE }), BadWorkload::Service);
        assert_eq!(refused(Scale { max_service_s: f64::NAN, ..SCALE }), BadWorkload::Service);
        assert_eq!(refused(Scale { max_service_s: 1e-9, ..SCALE }), BadWorkload::TooFew);
        let silent = RequestTrace::new(vec![0; 100]).unwrap();
        assert_eq!(Workload::new(&silent, &SCALE).unwrap_err(), BadWorkload::NoRequests);
    }
}
