//! Energy of a fleet: results of `whimbrel fleet simulate`, as tables and pictures.
//!
//! Nothing is simulated here. `whimbrel` is the small program that users install, and draws nothing.

mod page;
mod plot;

use fleet::queue::figure::Figure;
use fleet::vms::Evaluation;
use serde::{Deserialize, Serialize};

pub use page::tables;
pub use plot::plots;

/// Schema of [`EnergyResults`].
pub const SCHEMA: &str = "whimbrel.energy/1";

/// Result with a name that stays when the result is replaced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Named<R> {
    /// The name.
    pub name: String,
    /// The result.
    pub result: R,
}

/// Results of both simulations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnergyResults {
    /// [`SCHEMA`].
    pub schema: String,
    /// Results of `whimbrel fleet simulate queue`.
    pub queue: Vec<Named<Figure>>,
    /// Results of `whimbrel fleet simulate vms`.
    pub vms: Vec<Named<Evaluation>>,
}

/// Result of either simulation.
#[derive(Deserialize)]
#[serde(untagged)]
enum Either {
    Queue(Box<Figure>),
    Vms(Box<Evaluation>),
}

impl EnergyResults {
    /// Returns no results.
    pub fn none() -> Self {
        Self { schema: SCHEMA.to_owned(), queue: Vec::new(), vms: Vec::new() }
    }

    /// Adds a result, which is the JSON that `whimbrel --json fleet simulate` prints; replaces that of the same name.
    pub fn add(&mut self, name: &str, json: &str) -> Result<(), serde_json::Error> {
        match serde_json::from_str(json)? {
            Either::Queue(figure) => put(&mut self.queue, name, *figure),
            Either::Vms(evaluation) => put(&mut self.vms, name, *evaluation),
        }
        Ok(())
    }
}

fn put<R>(all: &mut Vec<Named<R>>, name: &str, result: R) {
    let new = Named { name: name.to_owned(), result };
    match all.iter_mut().find(|one| one.name == name) {
        Some(old) => *old = new,
        None => all.push(new),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use fleet::generator::tournament;
    use fleet::planner::Settings;
    use fleet::queue::figure::{Baselines, Figure, TraceSummary, pairs};
    use fleet::queue::search::{Goal, Search};
    use fleet::queue::{Bank, Scale, Workload};
    use fleet::trace::{Day, RequestTrace, STEPS_PER_DAY};
    use fleet::vms::{Evaluation, MemoryRule, POLICIES, SweepPoint, evaluate_day, sum_up};

    use super::*;

    /// Small results of both simulations.
    pub(crate) fn results() -> EnergyResults {
        let mut results = EnergyResults::none();
        results.add("tournament", &serde_json::to_string(&figure()).unwrap()).unwrap();
        results.add("judged", &serde_json::to_string(&evaluation()).unwrap()).unwrap();
        results
    }

    fn figure() -> Figure {
        let counts = tournament(1, 1)[40_000..50_000].to_vec();
        let scale = Scale { servers: 20, max_service_s: 0.1, seed: 1 };
        let workload = Workload::new(&RequestTrace::new(counts).unwrap(), &scale).unwrap();
        let power = "100,200".parse().unwrap();
        let bank = Bank { servers: 20, window_s: 60, power, waking_share: 1.0, off_watts: 0.0 };
        let goal = Goal { limit_s: 2.0, late_share: 0.01 };
        let search = Search { workload: &workload, bank: &bank, goal, seed: 1 };
        let pairs = pairs(&[50, 300], &[900]);
        let best = [30, 180].map(|latency_s| (latency_s, search.best(latency_s, &pairs)));
        let whole_bank = search.constant(20);
        let baselines = Baselines { static_baseline: search.static_baseline(), whole_bank };
        let summary = TraceSummary::new("part of a day".to_owned(), &workload);
        Figure::new(summary, bank.clone(), goal, 1, pairs.len(), baselines, best.to_vec())
    }

    fn evaluation() -> Evaluation {
        let vms = (0..8).map(|vm| vec![vm * 5; STEPS_PER_DAY]).collect();
        let day = Day { name: "20110306".to_owned(), vms };
        let (settings, wanted) = (Settings::default(), POLICIES.map(str::to_owned));
        let day = evaluate_day(&day, 10, MemoryRule::Ignored, 1.0, settings, &wanted).unwrap();
        let days = vec![day];
        let point = |move_factor| SweepPoint { move_factor, mean_move_s: 20.0, policies: sum_up(&days) };
        let (schema, trace) = (fleet::vms::SCHEMA.to_owned(), "planetlab".to_owned());
        let sweep = vec![point(1.0), point(10.0)];
        Evaluation { schema, trace, hosts: 10, memory: MemoryRule::Ignored, settings, days, sweep }
    }

    #[test]
    fn a_result_replaces_that_of_its_name() {
        let mut results = results();
        let again = serde_json::to_string(&results.vms[0].result).unwrap();
        results.add("judged", &again).unwrap();
        results.add("other", &again).unwrap();
        let names: Vec<_> = results.vms.iter().map(|one| one.name.as_str()).collect();
        assert_eq!((results.queue.len(), names), (1, vec!["judged", "other"]));
        assert!(results.add("bad", "{}").is_err());
    }
}
