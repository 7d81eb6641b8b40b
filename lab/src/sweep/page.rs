//! The results as tables.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::point::{ACTIVE_MIB, CONFIGURATIONS, ITERATIONS, KERNELS, kernel_case_name, place};
use crate::bench::{CaseResult, Contender, Policy, QemuMode, Quantity, Results};

/// The contender that stops a kernel of figure 5 after a number of iterations.
type Stopper = fn(u32) -> Contender;

/// The stoppers of figure 5.
pub(super) const STOPPERS: [(&str, Stopper); 2] = [
    ("whimbrel", |passes| Contender::Policy(Policy::After(passes))),
    ("qemu", |passes| Contender::Qemu(QemuMode::After(passes))),
];

/// Returns all results as tables, in Markdown, without the points that were not measured.
pub fn tables(results: &Results) -> String {
    let mut text = String::new();
    for contender in contenders_of_latency(results) {
        latency(results, contender, &mut text);
    }
    for (name, stopper) in STOPPERS {
        iterations(results, name, stopper, &mut text);
    }
    others(results, &mut text);
    if !results.cases.is_empty() {
        let made: BTreeSet<_> = results.cases.iter().map(|result| result.made.to_string()).collect();
        // Writing to a string cannot fail.
        let _ = write!(text, "\nMeasured with {}.\n", made.into_iter().collect::<Vec<_>>().join("; "));
    }
    text
}

/// Returns the contenders of figure 1.
pub(super) fn contenders_of_latency(results: &Results) -> BTreeSet<Contender> {
    let of_figure = results.cases.iter().filter(|result| result.case.name.starts_with("fig1-"));
    of_figure.flat_map(CaseResult::contenders).collect()
}

pub(super) fn result<'a>(results: &'a Results, name: &str) -> Option<&'a CaseResult> {
    results.cases.iter().find(|result| result.case.name == name)
}

fn headings<T: std::fmt::Display>(first: &str, rest: impl IntoIterator<Item = T>) -> String {
    let rest: Vec<_> = rest.into_iter().map(|heading| heading.to_string()).collect();
    format!("| {first} | {} |\n|{}\n", rest.join(" | "), "---|".repeat(rest.len() + 1))
}

/// Writes figure 1 of one contender, and the cost for the guest.
fn latency(results: &Results, contender: Contender, text: &mut String) {
    let columns = ACTIVE_MIB.map(|mib| format!("{mib} MiB"));
    let _ = write!(
        text,
        "\n**Total time by active memory, s, and downtime** (Isci et al., Fig. 1): {contender}\n\n{}",
        headings("buffer, link, packets, cap", columns)
    );
    for configuration in CONFIGURATIONS {
        let cells = ACTIVE_MIB.map(|mib| {
            let point = result(results, &configuration.case_name(mib));
            point.map_or(String::new(), |point| total(point, contender))
        });
        if cells.iter().any(|cell| !cell.is_empty()) {
            let _ = writeln!(text, "| {} | {} |", configuration.describe(), cells.join(" | "));
        }
    }
}

/// Returns a contender's total time in seconds and its downtime, and the number of its migrations that ended if not all
/// did.
fn total(point: &CaseResult, contender: Contender) -> String {
    let (ended, all) = point.ended(contender);
    let downtime = point.spread(contender, Quantity::Downtime).map_or(0.0, |spread| spread.median);
    let spread = point.spread(contender, Quantity::Total);
    let spread = spread.map(|spread| format!("{}; {downtime:.0} ms", spread.cell(1e3)));
    match (ended == all, spread) {
        (true, spread) => spread.unwrap_or_default(),
        (false, spread) => format!("{} {ended}/{all} ended", spread.unwrap_or_default()).trim().to_owned(),
    }
}

/// Writes figure 5 of one way to migrate.
fn iterations(results: &Results, name: &str, stopper: Stopper, text: &mut String) {
    let measured = KERNELS.map(|kernel| (kernel, result(results, &kernel_case_name(kernel))));
    if measured.iter().all(|(_, point)| point.is_none()) {
        return;
    }
    let _ = write!(
        text,
        "\n**Downtime when the guest is stopped after so many iterations, ms** (Ibrahim et al., Fig. 5): {name}\n\n{}",
        headings("kernel", ITERATIONS)
    );
    for (kernel, point) in measured {
        let Some(point) = point else { continue };
        let cell = |passes| {
            let spread = point.spread(stopper(passes), Quantity::Downtime);
            spread.map(|spread| spread.cell(1.0)).unwrap_or_default()
        };
        let _ = writeln!(text, "| {} | {} |", kernel.to_uppercase(), ITERATIONS.map(cell).join(" | "));
    }
}

/// Writes the points of no figure, a line for each contender.
fn others(results: &Results, text: &mut String) {
    let mut points = results.cases.iter().filter(|result| place(result) == usize::MAX).peekable();
    if points.peek().is_none() {
        return;
    }
    let columns = ["", "ended", "total, s", "downtime, ms", "sent, MB", "lost work, ms"];
    let _ = write!(text, "\n**Other points**\n\n{}", headings("point", columns));
    for point in points {
        for contender in point.contenders() {
            let cell = |quantity, one| {
                point.spread(contender, quantity).map(|spread| spread.cell(one)).unwrap_or_default()
            };
            let (ended, all) = point.ended(contender);
            let _ = writeln!(
                text,
                "| {} | {contender} | {ended}/{all} | {} | {} | {} | {} |",
                point.case.name,
                cell(Quantity::Total, 1e3),
                cell(Quantity::Downtime, 1.0),
                cell(Quantity::Sent, 1e6),
                cell(Quantity::Lost, 1.0),
            );
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bench::{Measured, Provenance, Run, SCHEMA};
    use crate::sweep::figures;

    /// Returns a point with one run of each: total time and downtime are derived from the positions.
    pub(in super::super) fn results(names: &[&str]) -> Results {
        let points = figures().into_iter().flat_map(|figure| figure.points);
        let known = points.filter(|(case, _)| names.contains(&case.name.as_str()));
        let cases = known.map(|(case, contenders)| {
            let run = |(number, contender)| {
                let number = number as f64 + 1.0;
                let measured =
                    Measured { total_ms: number * 1e3, downtime_ms: number * 10.0, ..Measured::default() };
                Run { measured: Some(measured), ..Run::new(contender, 1) }
            };
            let runs = contenders.into_iter().enumerate().map(run).collect();
            CaseResult { case, made: Provenance::default(), runs }
        });
        Results { schema: SCHEMA.to_owned(), cases: cases.collect() }
    }

    #[test]
    fn figures_have_what_was_measured_and_nothing_else() {
        assert_eq!(tables(&results(&[])), "");
        let mut some = results(&["fig1-1-64", "fig1-7-192", "fig5-cg"]);
        some.cases[0].runs[1].measured = None;
        let text = tables(&some);
        for line in [
            "| 1: 1 KiB, 1 Gb/s, 1500 B, slow start | **1.0** (1.0–1.0); 10 ms |  |  |  |",
            "| 1: 1 KiB, 1 Gb/s, 1500 B, slow start | 0/1 ended |  |  |  |",
            "| 7: 32 KiB, 10 Gb/s, 8000 B, unlimited |  | **1.0** (1.0–1.0); 10 ms |  |  |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(text.contains("| CG | **10.0** (10.0–10.0) | **30.0** (30.0–30.0) |"), "{text}");
        assert!(
            !text.contains("| FT |") && !text.contains("2: 1 KiB") && !text.contains("Other points"),
            "{text}"
        );
    }

    #[test]
    fn a_point_of_no_figure_has_a_line_for_each() {
        let mut grid = results(&["fig1-1-64"]);
        grid.cases[0].case.name = "grid-w64".to_owned();
        let text = tables(&grid);
        assert!(
            text.contains("| grid-w64 | qemu | 1/1 | **3.0** (3.0–3.0) | **30.0** (30.0–30.0) |"),
            "{text}"
        );
        assert!(!text.contains("Fig. 1"), "{text}");
    }
}
