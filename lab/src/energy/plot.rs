//! The results as pictures.

use std::path::Path;

use fleet::queue::figure::{Figure, LATENCIES_S};
use fleet::vms::{Metrics, POLICIES, SweepPoint};

use super::{EnergyResults, Named};
use crate::bench::plot::{PlotAxes, PlotLine, draw, lines};
use crate::error::Result;

/// Quantity of a simulation that is drawn.
type MetricQuantity = fn(&Metrics) -> f64;

/// Draws the results into a directory. Returns the names of the files.
pub fn plots(results: &EnergyResults, directory: &Path) -> Result<Vec<String>> {
    let mut drawn = Vec::new();
    let mut picture = |name: &str, axes: &PlotAxes<'_>, content: Vec<PlotLine>| -> Result<()> {
        let content: Vec<_> = content.into_iter().filter(|line| line.points.len() > 1).collect();
        if !content.is_empty() {
            drawn.push(draw(directory, name, &|canvas| lines(canvas, axes, &content))?);
        }
        Ok(())
    };
    let y = "energy, % of the static baseline";
    for one in &results.queue {
        let title = format!("{}: energy of the best pair by latency (Fig. 4)", one.name);
        let axes = PlotAxes { title: &title, x: "latency: migration and power-on, s", y, least_y: 100.0 };
        picture(&format!("energy-{}", one.name), &axes, by_latency(one))?;
    }
    let all: Vec<PlotLine> = results.queue.iter().filter(|one| is_whole(&one.result)).map(line).collect();
    let axes = PlotAxes {
        title: "Energy of the best pair by latency, all traces",
        x: "latency: migration and power-on, s",
        y,
        least_y: 100.0,
    };
    picture("energy-latency", &axes, all)?;
    for one in &results.vms {
        let quantities: [(&str, &str, MetricQuantity); 3] = [
            ("energy", "energy, kWh a day", |metrics| metrics.energy_kwh),
            ("overload", "SLATAH, %", |metrics| metrics.slatah * 100.0),
            ("loss", "PDM, %", |metrics| metrics.pdm * 100.0),
        ];
        for (quantity, y, of) in quantities {
            let title = format!("{}: {quantity} by the time that a move takes", one.name);
            let axes = PlotAxes { title: &title, x: "mean time of a move, s", y, least_y: 0.1 };
            let line = |policy: &&str| by_move(&one.result.sweep, policy, of);
            // The static policy moves nothing, and would hide the others.
            let moving = POLICIES.iter().filter(|policy| **policy != "static");
            picture(&format!("energy-moves-{}-{quantity}", one.name), &axes, moving.map(line).collect())?;
        }
    }
    Ok(drawn)
}

/// Returns true for a figure with all of the paper's latencies.
fn is_whole(figure: &Figure) -> bool {
    LATENCIES_S.iter().all(|latency_s| figure.points.iter().any(|point| point.latency_s == *latency_s))
}

fn line(one: &Named<Figure>) -> PlotLine {
    let point =
        |point: &fleet::queue::figure::Point| Some((f64::from(point.latency_s), point.of_static? * 100.0));
    PlotLine {
        label: one.name.clone(),
        points: one.result.points.iter().filter_map(point).collect(),
        dotted: true,
    }
}

fn by_latency(one: &Named<Figure>) -> Vec<PlotLine> {
    let ends = one.result.points.first().zip(one.result.points.last());
    let baseline = ends.map_or_else(Vec::new, |(first, last)| {
        vec![(f64::from(first.latency_s), 100.0), (f64::from(last.latency_s), 100.0)]
    });
    vec![line(one), PlotLine { label: "static baseline".to_owned(), points: baseline, dotted: false }]
}

fn by_move(sweep: &[SweepPoint], policy: &str, of: fn(&Metrics) -> f64) -> PlotLine {
    let point = |point: &SweepPoint| {
        let found = point.policies.iter().find(|one| one.policy == policy)?;
        Some((point.mean_move_s, of(&found.metrics)))
    };
    PlotLine { label: policy.to_owned(), points: sweep.iter().filter_map(point).collect(), dotted: true }
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    #[test]
    fn latency_and_moves_are_drawn() {
        let directory = tempfile::tempdir().unwrap();
        let drawn = plots(&results(), directory.path()).unwrap();
        let names: Vec<_> =
            drawn.iter().map(|path| Path::new(path).file_name().unwrap().to_string_lossy()).collect();
        let expected = [
            "energy-tournament.svg",
            "energy-moves-judged-energy.svg",
            "energy-moves-judged-overload.svg",
            "energy-moves-judged-loss.svg",
        ];
        assert_eq!(names, expected);
        let first = std::fs::read_to_string(&drawn[0]).unwrap();
        assert!(first.contains("static baseline") && first.contains("Fig. 4"));
    }
}
