//! For a latency, the pair of parameters that meets the limit on late requests with the least energy.

use serde::{Deserialize, Serialize};

use super::capacity::{Bank, Capacity, Pair};
use super::simulation::{Responses, simulate};
use super::workload::Workload;

/// The limit on late requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    /// Response time above which a request is late, in seconds.
    pub limit_s: f64,
    /// Largest share of late requests.
    pub late_share: f64,
}

/// A capacity that meets the goal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Met {
    /// Energy, in joules.
    pub energy_j: f64,
    /// Share of the energy in servers that were being switched on.
    pub waking_share: f64,
    /// Mean number of serving servers.
    pub mean_servers: f64,
    /// Number of times that a server was switched on.
    pub starts: u64,
    /// Response times of all requests.
    pub responses: Responses,
}

/// The best pair for a latency.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Time between the decision to switch a server on and its first request, in seconds.
    pub latency_s: u32,
    /// The pair.
    pub pair: Pair,
    /// Its result.
    pub met: Met,
    /// Number of pairs that were cheaper, and missed the goal.
    pub cheaper_pairs: usize,
    /// Number of requests that the search simulated.
    pub simulated: u64,
}

/// The smallest bank that meets the goal without ever switching a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Static {
    /// Number of servers.
    pub servers: usize,
    /// Its result.
    pub met: Met,
}

/// A search through the pairs of parameters.
#[derive(Clone, Debug)]
pub struct Search<'a> {
    /// The requests.
    pub workload: &'a Workload,
    /// The servers.
    pub bank: &'a Bank,
    /// The limit on late requests.
    pub goal: Goal,
    /// Seed of arrivals and services.
    pub seed: u64,
}

impl Search<'_> {
    /// Returns the cheapest pair that meets the goal; none if no pair does.
    ///
    /// The energy of a pair is known before a request is simulated. So the pairs are tried from the cheapest on, and
    /// the first that meets the goal is the best one. A trial ends with the first late request too many. A pair that
    /// misses the goal twice over without chance, as a fluid queue, is not tried: chance only makes queues longer.
    pub fn best(&self, latency_s: u32, pairs: &[Pair]) -> Option<Best> {
        let follow =
            |pair: Pair| Capacity::follow(self.workload, self.bank, pair, latency_s, self.goal.limit_s);
        let requests = self.workload.requests() as f64;
        let is_possible = |late: u64| late as f64 <= 2.0 * self.goal.late_share * requests;
        let mut by_energy: Vec<(f64, Pair, bool)> = pairs
            .iter()
            .map(|pair| (follow(*pair), *pair))
            .map(|(capacity, pair)| (capacity.energy.total_j(), pair, is_possible(capacity.fluid_late)))
            .collect();
        by_energy.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut simulated = 0;
        for (cheaper_pairs, (_, pair, _)) in by_energy.iter().enumerate().filter(|(_, one)| one.2) {
            let capacity = follow(*pair);
            let responses = self.responses(&capacity);
            simulated += responses.requests;
            if !responses.is_abandoned {
                let met = self.met(&capacity, responses);
                return Some(Best { latency_s, pair: *pair, met, cheaper_pairs, simulated });
            }
        }
        None
    }

    /// Returns the smallest constant number of servers that meets the goal; none if the whole bank does not.
    pub fn static_baseline(&self) -> Option<Static> {
        let all: Vec<usize> = (1..=self.bank.servers as usize).collect();
        // More servers never make a first-come-first-served queue slower, so halving finds the smallest number.
        let at = all.partition_point(|servers| self.constant(*servers).is_none());
        let servers = *all.get(at)?;
        Some(Static { servers, met: self.constant(servers)? })
    }

    /// Returns the result of a constant number of servers, if it meets the goal.
    pub fn constant(&self, servers: usize) -> Option<Met> {
        let capacity = Capacity::constant(self.workload, self.bank, servers, self.goal.limit_s);
        let responses = self.responses(&capacity);
        (!responses.is_abandoned).then(|| self.met(&capacity, responses))
    }

    fn responses(&self, capacity: &Capacity) -> Responses {
        let most_late = (self.goal.late_share * self.workload.requests() as f64) as u64;
        let servers = |second| capacity.servers(second);
        let mut responses = simulate(self.workload, servers, self.goal.limit_s, Some(most_late), self.seed);
        // The last requests of a trace are served after its last second.
        responses.is_abandoned |= responses.late > most_late;
        responses
    }

    fn met(&self, capacity: &Capacity, responses: Responses) -> Met {
        let energy_j = capacity.energy.total_j();
        Met {
            energy_j,
            waking_share: capacity.energy.waking_j / energy_j,
            mean_servers: capacity.server_s as f64 / self.workload.seconds() as f64,
            starts: capacity.starts,
            responses,
        }
    }
}
