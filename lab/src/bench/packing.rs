//! Benefits of compression, in the columns of the table of Yang and Hong (*VM live migration speedup in Xen*, "Proposal
//! – Multithread").

use super::case::Program;
use super::contender::{Contender, PageCompression};
use super::result::{CaseResult, Measured, Results, Spread};
use super::statistics::CompressionStats;

/// Rows: the paper's name, and the contender here.
const ROWS: [(&str, Contender); 4] = [
    ("none", Contender::Compressed(PageCompression::None)),
    ("zstd, selective, one thread", Contender::OneThread(PageCompression::Zstd(1))),
    ("the same, four threads", Contender::Compressed(PageCompression::Zstd(1))),
    ("`auto`, and all else that spares bytes", Contender::Whimbrel(None)),
];

/// Returns a table for each guest with real memory and a limited link; empty where none was measured.
pub(super) fn table(results: &Results) -> String {
    let is_real = |result: &&CaseResult| result.case.program == Program::Debian;
    results.cases.iter().filter(is_real).filter_map(of_case).collect()
}

fn of_case(result: &CaseResult) -> Option<String> {
    let link_bytes_per_s = result.case.link_bytes_per_s? as f64;
    let rows: String =
        ROWS.iter().filter_map(|(name, who)| row(result, name, *who, link_bytes_per_s)).collect();
    let heading = format!(
        "\n*{}*:\n\n| | migration time, s | compression time, s | transfer time, s | throughput, Mb/s | compression ratio | \
         processors, % of one |\n|---|---|---|---|---|---|---|\n",
        result.case.name
    );
    (!rows.is_empty()).then(|| heading + &rows)
}

/// Returns medians; `None` if the contender was not measured. Transfer is the sent bytes at the link's rate.
fn row(result: &CaseResult, name: &str, who: Contender, link_bytes_per_s: f64) -> Option<String> {
    let median = |of: fn(&Measured) -> f64| {
        let runs = result.runs_of(who).filter_map(|run| run.measured.as_ref());
        Spread::of(runs.map(of)).map(|spread| spread.median)
    };
    let total_s = median(|m| m.total_ms / 1e3)?;
    let compression_s = median(|m| m.packing.unwrap_or_default().cpu_ms / 1e3)?;
    let transfer_s = median(|m| m.sent_bytes as f64)? / link_bytes_per_s;
    let megabits_per_s = median(|m| m.sent_bytes as f64 * 8.0 / 1e3 / (m.total_ms - m.start_ms))?;
    let ratio = median(|m| m.packing.map_or(1.0, CompressionStats::ratio))?;
    let processors_percent = median(|m| m.cpu_ms / m.total_ms * 100.0)?;
    Some(format!(
        "| {name} | {total_s:.2} | {compression_s:.2} | {transfer_s:.2} | {megabits_per_s:.0} | {ratio:.2} | \
         {processors_percent:.0} |\n"
    ))
}
