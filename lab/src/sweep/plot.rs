//! The results as pictures.

use std::path::Path;

use super::page::{STOPPERS, contenders_of_latency, result};
use super::point::{ACTIVE_MIB, CONFIGURATIONS, ITERATIONS, KERNELS, kernel_case_name};
use crate::bench::plot::{PlotAxes, PlotLine, draw, lines};
use crate::bench::{CaseResult, Quantity, Results};
use crate::error::Result;

/// Draws the results into a directory: a file for each picture for which there is something to draw. Returns their
/// names.
pub fn plots(results: &Results, directory: &Path) -> Result<Vec<String>> {
    let mut drawn = Vec::new();
    let mut picture = |name: &str, axes: &PlotAxes<'_>, content: Vec<PlotLine>| -> Result<()> {
        let content: Vec<_> = content.into_iter().filter(|line| line.points.len() > 1).collect();
        if !content.is_empty() {
            drawn.push(draw(directory, name, &|canvas| lines(canvas, axes, &content))?);
        }
        Ok(())
    };
    let longest_s = longest(results, |name| name.starts_with("fig1"), Quantity::Total) / 1e3;
    for contender in contenders_of_latency(results) {
        let title = format!("{contender}: total time by active memory, in seven configurations");
        let axes = PlotAxes { title: &title, x: "active memory, MiB", y: "total, s", least_y: longest_s };
        let line = CONFIGURATIONS.map(|configuration| {
            let points = ACTIVE_MIB.into_iter().filter_map(|mib| {
                let point = result(results, &configuration.case_name(mib))?;
                Some((mib as f64, point.spread(contender, Quantity::Total)?.median / 1e3))
            });
            PlotLine { label: configuration.describe(), points: points.collect(), dotted: true }
        });
        picture(&format!("sweep-1-{contender}"), &axes, line.into())?;
    }
    let longest_ms = longest(results, |name| name.starts_with("fig5"), Quantity::Downtime);
    for (name, stopper) in STOPPERS {
        let title = format!("{name}: downtime of NAS kernels that are stopped after so many iterations");
        let axes = PlotAxes { title: &title, x: "iterations", y: "downtime, ms", least_y: longest_ms };
        let line = KERNELS.map(|kernel| {
            let points = ITERATIONS.into_iter().filter_map(|passes| {
                let point = result(results, &kernel_case_name(kernel))?;
                Some((f64::from(passes), point.spread(stopper(passes), Quantity::Downtime)?.median))
            });
            PlotLine { label: kernel.to_uppercase(), points: points.collect(), dotted: true }
        });
        picture(&format!("sweep-5-{name}"), &axes, line.into())?;
    }
    Ok(drawn)
}

/// Returns the longest median of all contenders that are drawn beside one another.
fn longest(results: &Results, is_one: impl Fn(&str) -> bool, quantity: Quantity) -> f64 {
    let of = |result: &CaseResult| {
        let all = result.contenders().into_iter().filter_map(|one| result.spread(one, quantity));
        all.map(|spread| spread.median).fold(1.0, f64::max)
    };
    results.cases.iter().filter(|result| is_one(&result.case.name)).map(of).fold(1.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::super::page::tests::results;
    use super::*;

    #[test]
    fn lines_of_more_than_a_point_are_drawn() {
        let directory = tempfile::tempdir().unwrap();
        let some = results(&["fig1-1-64", "fig1-1-192", "fig1-7-64", "fig5-cg"]);
        let drawn = plots(&some, directory.path()).unwrap();
        let names: Vec<_> =
            drawn.iter().map(|path| Path::new(path).file_name().unwrap().to_string_lossy()).collect();
        let expected = [
            "sweep-1-whimbrel-pattern.svg",
            "sweep-1-whimbrel-hybrid.svg",
            "sweep-1-qemu.svg",
            "sweep-1-multifd-2.svg",
            "sweep-1-post-copy.svg",
            "sweep-5-whimbrel.svg",
            "sweep-5-qemu.svg",
        ];
        assert_eq!(names, expected);
        let first = std::fs::read_to_string(&drawn[0]).unwrap();
        assert!(first.contains("1: 1 KiB") && !first.contains("7: 32 KiB"), "one point is no line");
    }
}
