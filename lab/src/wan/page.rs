//! The results as tables and as a picture.

use std::fmt::Write as _;
use std::path::Path;

use super::measure::{WanMove, WanResult, WanResults};
use crate::bench::plot::{PlotBar, bars, draw};
use crate::bench::{Bar, Spread, page::bars_table};
use crate::error::Result;

/// A column: its heading, and the value of a move.
type Column = (&'static str, fn(&WanMove) -> Option<f64>);

const COLUMNS: [Column; 7] = [
    ("total, s", |one| Some(one.total_ms / 1e3)),
    ("downtime, ms", |one| Some(one.downtime_ms)),
    ("longest silence for the client, ms", |one| Some(one.silence_ms)),
    ("answers took before, ms", |one| Some(one.answer_before_ms)),
    ("and after, ms", |one| Some(one.answer_after_ms)),
    ("at most twice as long again after, ms", |one| one.recovered_ms),
    ("sent, MB", |one| Some(one.sent_bytes as f64 / 1e6)),
];

/// Returns all results as tables, in Markdown: first what was to be reached.
pub fn tables(results: &WanResults) -> String {
    let mut text = "## What was to be reached\n\n".to_owned();
    text.push_str(&bars_table(&results.cases.iter().flat_map(bars_of).collect::<Vec<_>>()));
    text.push_str("\n## Case by case\n");
    results.cases.iter().for_each(|result| case_table(result, &mut text));
    text
}

/// Draws the results into a directory; returns the names of the files.
pub fn plots(results: &WanResults, directory: &Path) -> Result<Vec<String>> {
    let all: Vec<_> =
        results.cases.iter().flat_map(|result| [bar(result, false), bar(result, true)]).collect();
    let title = "the longest time that a client gets no answer, ms (less is better)";
    Ok(vec![draw(directory, "wan-silence", &|canvas| bars(canvas, title, &all))?])
}

fn bar(result: &WanResult, is_back: bool) -> PlotBar {
    let silence = spread(result, is_back, |one| Some(one.silence_ms));
    let median = |spread: Option<Spread>| spread.map_or(0.0, |spread| spread.median);
    let downtime = median(spread(result, is_back, |one| Some(one.downtime_ms)));
    let beyond = (median(silence) - downtime).max(0.0);
    let parts = vec![("downtime", downtime), ("beyond the downtime", beyond)];
    PlotBar { label: format!("{}: {}", result.case.name, way(is_back)), parts, spread: silence }
}

fn way(is_back: bool) -> &'static str {
    if is_back { "back" } else { "there" }
}

fn spread(result: &WanResult, is_back: bool, of: fn(&WanMove) -> Option<f64>) -> Option<Spread> {
    Spread::of(result.moves.iter().filter(|one| one.is_back == is_back).filter_map(of))
}

fn case_table(result: &WanResult, text: &mut String) {
    let (case, turns) = (&result.case, result.moves.iter().filter(|one| one.is_back).count());
    let headings = COLUMNS.map(|(heading, _)| heading).join(" | ");
    // Writing to a string cannot fail.
    let _ = write!(text, "\n**{}**: {}. {turns} turns. {}.\n\n", case.name, case.describe(), result.made);
    let _ = writeln!(text, "| | {headings} |\n|{}", "---|".repeat(COLUMNS.len() + 1));
    for is_back in [false, true] {
        let cell = |(_, of): &Column| {
            spread(result, is_back, *of).map_or("never".to_owned(), |spread| spread.cell(1.0))
        };
        let cells: Vec<_> = COLUMNS.iter().map(cell).collect();
        let _ = writeln!(text, "| {} | {} |", way(is_back), cells.join(" | "));
    }
}

/// Returns the targets of a case, if it has any.
fn bars_of(result: &WanResult) -> Vec<Bar> {
    const RECOVERED_MS: f64 = 3_000.0;
    let case = &result.case;
    if (case.megabits_per_s, case.round_trip_ms, case.lost_per_million) != (50, 80, 0) {
        return Vec::new();
    }
    let silence = result.moves.iter().map(|one| one.silence_ms).fold(0.0, f64::max);
    let late = result.moves.iter().filter(|one| one.recovered_ms.is_none_or(|ms| ms > RECOVERED_MS)).count();
    vec![
        Bar {
            what: format!("{}: longest silence of all moves", case.name),
            wanted: "≤ 500 ms".to_owned(),
            found: format!("{silence:.0} ms"),
            held: silence <= 500.0,
        },
        Bar {
            what: format!("{}: moves after which answers take at most twice as long within 3 s", case.name),
            wanted: "all".to_owned(),
            found: format!("{} of {}", result.moves.len() - late, result.moves.len()),
            held: late == 0,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::case::cases;
    use super::*;
    use crate::bench::{DowntimeParts, Provenance};

    #[test]
    fn targets_are_missed_by_one_move() {
        let good = WanMove {
            turn: 1,
            is_back: false,
            total_ms: 9_000.0,
            downtime_ms: 300.0,
            sent_bytes: 1,
            silence_ms: 400.0,
            answer_before_ms: 80.0,
            answer_after_ms: 160.0,
            recovered_ms: Some(100.0),
            parts: DowntimeParts::default(),
        };
        let result = |moves| WanResult { case: cases()[0].clone(), made: Provenance::default(), moves };
        let held = |moves| bars_of(&result(moves)).iter().map(|bar| bar.held).collect::<Vec<_>>();
        assert_eq!(held(vec![good.clone()]), [true, true]);
        let silent = WanMove { silence_ms: 501.0, ..good.clone() };
        assert_eq!(held(vec![good.clone(), silent]), [false, true]);
        let slow = WanMove { recovered_ms: None, ..good.clone() };
        assert_eq!(held(vec![good.clone(), slow]), [true, false]);
        let table = tables(&WanResults { schema: String::new(), cases: vec![result(vec![good])] });
        assert!(
            table.contains("| there | **9.0** (9.0–9.0) |") && table.contains("| back | never |"),
            "{table}"
        );
    }
}
