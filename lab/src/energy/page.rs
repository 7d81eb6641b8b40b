//! The results as tables.

use std::fmt::Write as _;

use fleet::queue::figure::{Figure, Point};
use fleet::vms::{Evaluation, PolicyResult, sum_up};

use super::EnergyResults;

/// Returns all results as tables, in Markdown.
pub fn tables(results: &EnergyResults) -> String {
    let mut text = String::new();
    traces(results, &mut text);
    for one in &results.queue {
        figure(&one.name, &one.result, &mut text);
    }
    savings(results, &mut text);
    for one in &results.vms {
        evaluation(&one.name, &one.result, &mut text);
    }
    text
}

// Writing to a string cannot fail.
macro_rules! line {
    ($text:expr, $($words:tt)*) => { let _ = writeln!($text, $($words)*); };
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "none".to_owned(), |share| format!("{:.1}%", share * 100.0))
}

fn traces(results: &EnergyResults, text: &mut String) {
    line!(text, "### Workloads\n");
    line!(
        text,
        "| result | requests | hours | gaps | scaled by | smoothed over | mean service | peak, 1/s | mean, 1/s |"
    );
    line!(text, "|---|---|---|---|---|---|---|---|---|");
    for one in &results.queue {
        let trace = &one.result.trace;
        line!(
            text,
            "| {} | {} | {:.1} | {} of {} s | {:.2} | {} s | {:.4} s | {:.1} | {:.1} |",
            one.name,
            trace.requests,
            trace.seconds as f64 / 3600.0,
            trace.gaps,
            trace.gap_s,
            trace.factor,
            trace.smoothing_s,
            trace.service_s,
            trace.peak_per_s,
            trace.mean_per_s
        );
    }
}

fn figure(name: &str, figure: &Figure, text: &mut String) {
    let watts: Vec<f64> = figure.bank.power.clone().into();
    line!(text, "\n### {name}: energy by latency\n");
    let curve: Vec<String> = watts.iter().map(f64::to_string).collect();
    let baseline = figure.static_baseline.as_ref();
    let whole = figure.whole_bank.as_ref();
    line!(
        text,
        "Power curve {} W. Static baseline: {} servers, {:.1} kWh; all {} servers: {}.\n",
        curve.join(", "),
        baseline.map_or(0, |one| one.servers),
        baseline.map_or(0.0, |one| one.met.energy_j / 3.6e6),
        figure.bank.servers,
        whole.map_or_else(|| "miss the goal".to_owned(), |met| format!("{:.1} kWh", met.energy_j / 3.6e6))
    );
    line!(
        text,
        "| latency | headroom | minimum run | energy | of static | mean servers | starts | late | waking |"
    );
    line!(text, "|---|---|---|---|---|---|---|---|---|");
    for point in &figure.points {
        line!(text, "{}", row(point));
    }
}

fn row(point: &Point) -> String {
    let Some(best) = &point.best else {
        return format!("| {} s | none meets the goal | | | | | | | |", point.latency_s);
    };
    format!(
        "| {} s | {}% | {} min | {:.1} kWh | {} | {:.2} | {} | {:.2}% | {:.1}% |",
        point.latency_s,
        best.pair.headroom_percent,
        best.pair.min_run_s / 60,
        best.met.energy_j / 3.6e6,
        percent(point.of_static),
        best.met.mean_servers,
        best.met.starts,
        best.met.responses.late_share() * 100.0,
        best.met.waking_share * 100.0
    )
}

fn savings(results: &EnergyResults, text: &mut String) {
    line!(text, "\n### Savings beside the paper's\n");
    line!(text, "| result | 30 s instead of 180 s | the paper | 150 s instead of 330 s | the paper |");
    line!(text, "|---|---|---|---|---|");
    for one in results.queue.iter().filter(|one| !one.result.savings.is_empty()) {
        let cells = one
            .result
            .savings
            .iter()
            .map(|saving| format!("{} | {:.0}%", percent(saving.share), saving.paper * 100.0));
        line!(text, "| {} | {} |", one.name, cells.collect::<Vec<_>>().join(" | "));
    }
}

/// Begins a table of the policies' metrics, whose rows are told apart by `first`.
fn head_of_policies(first: &str, text: &mut String) {
    line!(
        text,
        "| {first} | policy | kWh | SLATAH | PDM | SLAV × 10⁶ | ESV × 10³ | moves | hosts on | unserved |"
    );
    line!(text, "|---|---|---|---|---|---|---|---|---|---|");
}

fn evaluation(name: &str, evaluation: &Evaluation, text: &mut String) {
    line!(text, "\n### {name}: VMs on {} hosts, memory {:?}\n", evaluation.hosts, evaluation.memory);
    head_of_policies("day", text);
    for day in &evaluation.days {
        for one in &day.policies {
            line!(text, "| {} | {}", day.day, policy(one));
        }
    }
    for one in sum_up(&evaluation.days) {
        line!(text, "| mean | {}", policy(&one));
    }
    if !evaluation.sweep.is_empty() {
        line!(text, "\n### {name}: by the time that a move takes\n");
        head_of_policies("mean move", text);
    }
    for point in &evaluation.sweep {
        for one in &point.policies {
            line!(text, "| {:.1} s | {}", point.mean_move_s, policy(one));
        }
    }
}

fn policy(one: &PolicyResult) -> String {
    let metrics = &one.metrics;
    format!(
        "{} | {:.2} | {:.4}% | {:.4}% | {:.3} | {:.4} | {} | {:.1} | {:.4}% |",
        one.policy,
        metrics.energy_kwh,
        metrics.slatah * 100.0,
        metrics.pdm * 100.0,
        metrics.slav * 1e6,
        metrics.esv * 1e3,
        metrics.moves,
        metrics.mean_hosts,
        metrics.unserved * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    #[test]
    fn all_results_have_their_rows() {
        let text = tables(&results());
        for expected in
            ["| 30 s |", "| 180 s |", "| 20110306 | LR-MMT |", "| mean | whimbrel |", "| 20.0 s | whimbrel |"]
        {
            assert!(text.contains(expected), "{expected} in {text}");
        }
        assert!(text.contains("Static baseline: "));
    }
}
