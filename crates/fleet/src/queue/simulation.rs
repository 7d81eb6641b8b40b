//! Response times of all requests of a workload.

use serde::{Deserialize, Serialize};

use super::closed_form::Mmk;
use super::server_bank::{Observer, ServerBank};
use super::workload::Workload;
use crate::random::Random;

/// Response times of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Responses {
    /// Number of requests that were served.
    pub requests: u64,
    /// Number of requests with a response time above the limit.
    pub late: u64,
    /// Sum of the response times, in seconds.
    pub response_s: f64,
    /// Sum of the times of service, in seconds.
    pub service_s: f64,
    /// Longest response time, in seconds.
    pub longest_s: f64,
    /// The simulation was ended early, because it had more late requests than it may have.
    pub is_abandoned: bool,
}

impl Responses {
    /// Returns the share of requests with a response time above the limit.
    pub fn late_share(&self) -> f64 {
        self.late as f64 / self.requests.max(1) as f64
    }

    /// Returns the mean response time, in seconds.
    pub fn mean_s(&self) -> f64 {
        self.response_s / self.requests.max(1) as f64
    }
}

struct Tally {
    limit_s: f64,
    responses: Responses,
}

impl Observer for Tally {
    #[inline]
    fn record(&mut self, wait_s: f64, service_s: f64) {
        let response_s = wait_s + service_s;
        let responses = &mut self.responses;
        responses.requests += 1;
        responses.late += u64::from(response_s > self.limit_s);
        responses.response_s += response_s;
        responses.service_s += service_s;
        responses.longest_s = responses.longest_s.max(response_s);
    }
}

/// Simulates a workload.
///
/// `servers` returns the number of servers in a second. Requests of a second arrive at independent, evenly distributed
/// moments of it. Response times above `limit_s` are late; with more than `most_late` of them the simulation ends.
/// Arrivals and services depend on `seed` alone: simulations with other numbers of servers have the same requests.
pub fn simulate(
    workload: &Workload,
    servers: impl Fn(usize) -> usize,
    limit_s: f64,
    most_late: Option<u64>,
    seed: u64,
) -> Responses {
    let mut random = Random::new(seed);
    let mut bank = ServerBank::new(0);
    let (requests, late, is_abandoned) = (0, 0, false);
    let empty = Responses { requests, late, response_s: 0.0, service_s: 0.0, longest_s: 0.0, is_abandoned };
    let mut tally = Tally { limit_s, responses: empty };
    let mut moments = Vec::new();
    for segment in workload.segments() {
        for second in segment {
            let count = servers(second);
            if count != bank.servers() {
                bank.set_servers(second as f64, count, &mut tally);
            }
            let requests = workload.counts[second];
            sorted_moments(&mut random, requests, &mut moments);
            for moment in &moments {
                let service_s = random.exponential() * workload.service_s;
                bank.arrive(second as f64 + moment, service_s, &mut tally);
            }
            if most_late.is_some_and(|most| tally.responses.late > most) {
                tally.responses.is_abandoned = true;
                return tally.responses;
            }
        }
    }
    bank.advance(f64::INFINITY, &mut tally);
    tally.responses
}

/// Fills `moments` with evenly distributed moments of a second, in ascending order: partial sums of exponential gaps,
/// divided by the sum of one gap more.
#[inline]
fn sorted_moments(random: &mut Random, count: u32, moments: &mut Vec<f64>) {
    moments.clear();
    let mut sum = 0.0;
    for _ in 0..count {
        sum += random.exponential();
        moments.push(sum);
    }
    let scale = 1.0 / (sum + random.exponential());
    for moment in moments {
        *moment *= scale;
    }
}

/// Simulates M/M/k: feeds `requests` requests of a Poisson process, after `warm_up` others that are not observed.
pub fn poisson_arrivals(queue: &Mmk, warm_up: u64, requests: u64, seed: u64, observer: &mut impl Observer) {
    struct Ignored;
    impl Observer for Ignored {
        fn record(&mut self, _: f64, _: f64) {}
    }
    let mut random = Random::new(seed);
    let mut bank = ServerBank::new(queue.servers as usize);
    let mut now = 0.0;
    let mut next = |random: &mut Random| {
        now += random.exponential() / queue.arrivals_per_s;
        (now, random.exponential() * queue.service_s)
    };
    for _ in 0..warm_up {
        let (now, service_s) = next(&mut random);
        bank.arrive(now, service_s, &mut Ignored);
    }
    for _ in 0..requests {
        let (now, service_s) = next(&mut random);
        bank.arrive(now, service_s, observer);
    }
    bank.advance(f64::INFINITY, observer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_a_second_are_evenly_distributed_and_sorted() {
        let (mut random, mut moments, mut firsts) = (Random::new(2), Vec::new(), 0.0);
        for _ in 0..20_000 {
            sorted_moments(&mut random, 4, &mut moments);
            assert!(moments.is_sorted() && moments[0] >= 0.0 && moments[3] < 1.0);
            firsts += moments[0];
        }
        // The least of four evenly distributed numbers has a mean of 1/5.
        assert!((firsts / 20_000.0 - 0.2).abs() < 0.006, "{firsts}");
    }
}
