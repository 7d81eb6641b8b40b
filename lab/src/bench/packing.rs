//! What compression brings, in the columns of the table of Yang and Hong (*VM live migration speedup in Xen*, "Proposal –
//! Multithread").

use std::fmt::Write as _;

use super::case::Program;
use super::contender::{Contender, Way};
use super::result::{CaseResult, Measured, Results, Spread};

/// Rows: what the paper calls them, and who did so here.
const ROWS: [(&str, Contender); 4] = [
    ("none", Contender::Packing(Way::None)),
    ("zstd, selective, one thread", Contender::OneThread(Way::Zstd(1))),
    ("the same, four threads", Contender::Packing(Way::Zstd(1))),
    ("`auto`, and all else that spares bytes", Contender::Whimbrel(None)),
];

/// A table for each guest with real memory and a limited link; nothing where none was measured.
pub(super) fn table(results: &Results) -> String {
    let is_real = |result: &&CaseResult| result.case.program == Program::Debian;
    results.cases.iter().filter(is_real).filter_map(of_case).collect()
}

fn of_case(result: &CaseResult) -> Option<String> {
    let link_bytes_per_s = result.case.link_bytes_per_s? as f64;
    let mut text = format!(
        "\n*{}*:\n\n| | migration time, s | compression time, s | transfer time, s | throughput, Mb/s | compression ratio | \
         processors, % of one |\n|---|---|---|---|---|---|---|\n",
        result.case.name
    );
    let mut has_rows = false;
    for (name, contender) in ROWS {
        let median = |of: &dyn Fn(&Measured) -> Option<f64>| {
            let runs = result.runs_of(contender).filter_map(|run| run.measured.as_ref());
            Spread::of(runs.filter_map(of)).map(|spread| spread.median)
        };
        let packing = |m: &Measured| m.packing.filter(|packing| packing.wire_bytes > 0);
        let cells = [
            (median(&|m| Some(m.total_ms / 1e3)), 2),
            (median(&|m| m.packing.map_or(Some(0.0), |packing| Some(packing.cpu_ms / 1e3))), 2),
            (median(&|m| Some(m.sent_bytes as f64 / link_bytes_per_s)), 2),
            (median(&|m| Some(m.sent_bytes as f64 * 8.0 / 1e3 / (m.total_ms - m.start_ms))), 0),
            (
                median(&|m| {
                    Some(
                        packing(m)
                            .map_or(1.0, |packing| packing.data_bytes as f64 / packing.wire_bytes as f64),
                    )
                }),
                2,
            ),
            (median(&|m| Some(m.cpu_ms / m.total_ms * 100.0)), 0),
        ];
        if cells.iter().any(|(median, _)| median.is_none()) {
            continue;
        }
        has_rows = true;
        let cell =
            |(median, digits): (Option<f64>, usize)| format!(" {:.digits$} |", median.unwrap_or_default());
        let _ = writeln!(text, "| {name} |{}", cells.into_iter().map(cell).collect::<String>());
    }
    has_rows.then_some(text)
}
