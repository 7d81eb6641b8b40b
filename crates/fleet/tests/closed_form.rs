//! Checks the queue simulation against the closed form of M/M/k.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use whimbrel_fleet::queue::closed_form::Mmk;
use whimbrel_fleet::queue::{Observer, poisson_arrivals};

/// Parts of a run, from whose spread its standard error follows: waits of neighbouring requests are not independent.
const BATCHES: usize = 100;

/// Means over one batch after the other.
#[derive(Default)]
struct Batches {
    size: u64,
    /// Wait for which P(wait > t) is observed, in seconds.
    exceeded_s: f64,
    count: u64,
    sums: Vec<[f64; 3]>,
}

impl Observer for Batches {
    fn record(&mut self, wait_s: f64, _: f64) {
        if self.count.is_multiple_of(self.size) {
            self.sums.push([0.0; 3]);
        }
        self.count += 1;
        let sums = self.sums.last_mut().unwrap();
        sums[0] += wait_s;
        sums[1] += f64::from(u8::from(wait_s > 0.0));
        sums[2] += f64::from(u8::from(wait_s > self.exceeded_s));
    }
}

impl Batches {
    /// Returns the mean and its standard error.
    fn estimate(&self, which: usize) -> (f64, f64) {
        let means: Vec<f64> = self.sums.iter().map(|sums| sums[which] / self.size as f64).collect();
        let mean = means.iter().sum::<f64>() / means.len() as f64;
        let variance = means.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / (means.len() - 1) as f64;
        (mean, (variance / means.len() as f64).sqrt())
    }
}

/// Checks mean wait, P(wait > 0) and P(wait > t): within 1% or four standard errors.
fn check(servers: u32, load: f64, requests: u64) {
    let service_s = 0.1;
    let queue = Mmk { servers, arrivals_per_s: load * f64::from(servers) / service_s, service_s };
    let exceeded_s = queue.mean_wait_s() / queue.wait_probability();
    let size = requests / BATCHES as u64;
    let mut batches = Batches { size, exceeded_s, ..Batches::default() };
    let seed = u64::from(servers) * 1000 + (load * 100.0) as u64;
    poisson_arrivals(&queue, requests / 10, requests, seed, &mut batches);
    let exact = [queue.mean_wait_s(), queue.wait_probability(), queue.wait_exceeds(exceeded_s)];
    for (which, exact) in exact.into_iter().enumerate() {
        let (found, error) = batches.estimate(which);
        let off = (found - exact).abs();
        println!("k {servers:2} load {load} quantity {which}: {found:.6} exact {exact:.6} error {error:.6}");
        assert!(off <= (0.01 * exact).max(4.0 * error), "k {servers}, load {load}: {found} is not {exact}");
        // A run that is too short would excuse everything.
        assert!(error <= 0.1 * exact, "k {servers}, load {load}: the run is too short");
    }
}

const LOADS: [f64; 5] = [0.5, 0.7, 0.8, 0.9, 0.95];

#[test]
fn waits_agree_with_the_closed_form() {
    for servers in [1, 4, 20] {
        for load in LOADS {
            check(servers, load, if load < 0.85 && servers < 20 { 400_000 } else { 2_000_000 });
        }
    }
}

#[test]
#[ignore = "long: 750 million requests"]
fn waits_agree_with_the_closed_form_in_long_runs() {
    for servers in [1, 2, 5, 10, 20] {
        for load in LOADS.into_iter().chain([0.85]) {
            check(servers, load, 25_000_000);
        }
    }
}
