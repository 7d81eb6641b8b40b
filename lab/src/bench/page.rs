//! The results as tables, and their place in a page.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::bar::Bar;
use super::bars::bars;
use super::case::Case;
use super::contender::{Contender, QemuMode};
use super::nas;
use super::packing;
use super::result::{CaseResult, Quantity, Results, Run, Spread};
use super::suite::{Suite, suites};
use crate::error::{Context, Error, Result};

/// A column of the tables: its heading, its quantity, and the quantity's value that is shown as one.
const COLUMNS: [(&str, Quantity, f64); 17] = [
    ("run time, s", Quantity::RunTime, 1e3),
    ("total, ms", Quantity::Total, 1.0),
    ("downtime, ms", Quantity::Downtime, 1.0),
    ("with `stop` and `cont`, ms", Quantity::Standstill, 1.0),
    ("CPU, ms", Quantity::Cpu, 1.0),
    ("sent, MB", Quantity::Sent, 1e6),
    ("sent back, MB", Quantity::Received, 1e6),
    ("an agent's peak, MiB", Quantity::AgentPeak, (1 << 20) as f64),
    ("longest stall, ms", Quantity::Stall, 1.0),
    ("lost work, ms", Quantity::Lost, 1.0),
    ("brownout, ms", Quantity::Brownout, 1.0),
    ("longest silence for the client, ms", Quantity::Silence, 1.0),
    ("beyond the downtime, ms", Quantity::SilenceBeyondDowntime, 1.0),
    ("pace of the neighbour at the source, %", Quantity::PaceAtSource, 1.0),
    ("its lost work, ms", Quantity::LostAtSource, 1.0),
    ("pace of the neighbour at the destination, %", Quantity::PaceAtDestination, 1.0),
    ("its lost work, ms", Quantity::LostAtDestination, 1.0),
];

/// Returns all results as tables, in Markdown: first the bars, then suite by suite.
pub fn tables(results: &Results) -> String {
    let mut text = "## What was to be reached\n\n".to_owned();
    text.push_str(&bars_table(&bars(results)));
    text.push_str(&disturbed_more(results));
    let suites = suites();
    let is_of = |result: &CaseResult, suite: &Suite| {
        suite.cases.iter().any(|(case, _)| case.name == result.case.name)
    };
    for suite in &suites {
        let before = match suite.name {
            "nas" => nas::table(results),
            "packing" => packing::table(results),
            _ => String::new(),
        };
        section(suite.about, &before, results, |result| is_of(result, suite), &mut text);
    }
    let is_other = |result: &CaseResult| !suites.iter().any(|suite| is_of(result, suite));
    section("Other cases", "", results, is_other, &mut text);
    let is_missing = |case: &&Case| !results.cases.iter().any(|result| result.case.name == case.name);
    let cases = suites.iter().flat_map(|suite| suite.cases.iter().map(|(case, _)| case));
    let missing: Vec<_> = cases.filter(is_missing).map(|case| case.name.as_str()).collect();
    if !missing.is_empty() {
        let _ = write!(text, "\n## Not measured yet\n\n{}.\n", missing.join(", "));
    }
    text
}

/// Returns the bars as a table.
pub(crate) fn bars_table(bars: &[Bar]) -> String {
    let mut text = "| | wanted | found | |\n|---|---|---|---|\n".to_owned();
    for bar in bars {
        let held = if bar.held { "held" } else { "**missed**" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {} | {} | {} | {held} |", bar.what, bar.wanted, bar.found);
    }
    text
}

/// Returns a table of cases in which the guest's program was disturbed more than with one of QEMU's ways, in all turns
/// but one or in all.
fn disturbed_more(results: &Results) -> String {
    let mut text = String::new();
    for (quantity, word) in [(Quantity::Stall, "longest stall"), (Quantity::Lost, "lost work")] {
        for result in &results.cases {
            for theirs in result.contenders().into_iter().filter(|one| one.is_qemu()) {
                let differences = result.differences(Contender::Whimbrel(None), theirs, quantity);
                let (turns, more) =
                    (differences.len(), differences.iter().filter(|difference| **difference > 0.0).count());
                let Some(beyond) = Spread::of(differences).filter(|_| turns >= 5 && more + 1 >= turns) else {
                    continue;
                };
                // Writing to a string cannot fail.
                let _ = writeln!(
                    text,
                    "| {}: {word} | {theirs} | {more} of {turns} | {} |",
                    result.case.name,
                    difference(beyond)
                );
            }
        }
    }
    if text.is_empty() {
        return text;
    }
    format!(
        "\n## Where the guest's program was disturbed more\n\nThan with one of QEMU's ways, in all turns but one or in all.\n\n\
         | | than with | turns | more by, ms |\n|---|---|---|---|\n{text}"
    )
}

/// Writes the cases of a suite, with the text before them.
fn section(
    heading: &str,
    before: &str,
    results: &Results,
    is_of: impl Fn(&CaseResult) -> bool,
    text: &mut String,
) {
    let mut cases = results.cases.iter().filter(|result| is_of(result)).peekable();
    if cases.peek().is_some() {
        let _ = write!(text, "\n## {heading}\n{before}");
        cases.for_each(|result| case_table(result, text));
    }
}

fn case_table(result: &CaseResult, text: &mut String) {
    let columns: Vec<_> = COLUMNS
        .into_iter()
        .filter(|(_, quantity, _)| result.runs.iter().any(|run| quantity.of(run).is_some()))
        .collect();
    let headings = columns.iter().map(|(heading, ..)| *heading).collect::<Vec<_>>().join(" | ");
    let line = "---|".repeat(columns.len() + 2);
    let _ = write!(text, "\n**{}**: {}. {}.\n\n", result.case.name, result.case.describe(), result.made);
    let _ = writeln!(text, "| | ended | {headings} |\n|{line}");
    for contender in result.contenders() {
        let (ended, all) = result.ended(contender);
        let ended =
            if contender == Contender::NoMigration { String::new() } else { format!("{ended}/{all}") };
        let switched =
            result.runs_of(contender).filter_map(|run| run.measured.as_ref()?.has_switched_to_post_copy);
        let stayed = switched.filter(|has_switched_to_post_copy| !has_switched_to_post_copy).count();
        let ended = if stayed > 0 { format!("{ended}, {stayed} before it was switched") } else { ended };
        let cells = columns.iter().map(|(_, quantity, one)| cell(result, contender, *quantity, *one));
        let _ = writeln!(text, "| {contender} | {ended} |{}", cells.collect::<String>());
    }
    // Pairs with as many streams as channels, where their number is the subject.
    let pairs = result.contenders().into_iter().filter_map(|one| match one {
        Contender::Whimbrel(Some(streams)) => {
            Some((one, Contender::Qemu(QemuMode::Multifd(streams.try_into().ok()?))))
        }
        _ => None,
    });
    for (ours, theirs) in pairs {
        let compared = columns.iter().map(|(_, quantity, _)| compared(result, ours, Some(theirs), *quantity));
        let _ = writeln!(text, "| *{ours} to {theirs}* | |{}", compared.collect::<String>());
    }
    let ours = Contender::Whimbrel(None);
    if result.spread(ours, Quantity::Total).is_some() {
        let best = |quantity| result.best_of_qemu(quantity).map(|(best, _)| best);
        let compared =
            columns.iter().map(|(_, quantity, _)| compared(result, ours, best(*quantity), *quantity));
        let _ = writeln!(text, "| *whimbrel to the best of these* | |{}", compared.collect::<String>());
    }
}

/// Returns median, least and most; for effects on the guest's program also the median difference to no migration.
fn cell(result: &CaseResult, contender: Contender, quantity: Quantity, one: f64) -> String {
    let Some(spread) = result.spread(contender, quantity) else { return " |".to_owned() };
    // Measured before the events were reported: with `stop` and `cont`, which need longer.
    let is_longer = |run: &Run| run.measured.as_ref().is_some_and(|measured| measured.events_ms.is_none());
    let is_most =
        quantity == Quantity::Downtime && contender.is_whimbrel() && result.runs_of(contender).any(is_longer);
    let beyond = result
        .beyond(contender, Contender::NoMigration, quantity)
        .filter(|_| contender != Contender::NoMigration && quantity != Quantity::Brownout)
        .map_or(String::new(), |beyond| format!(", {:+.1}", beyond.median / one));
    format!(" {}{}{beyond} |", if is_most { "≤ " } else { "" }, spread.cell(one))
}

/// Returns the ratio of medians, with the range of the ratios within turns; or the median of the differences within
/// turns.
fn compared(result: &CaseResult, ours: Contender, theirs: Option<Contender>, quantity: Quantity) -> String {
    let compared = theirs.and_then(|theirs| {
        if !quantity.has_ratio() {
            let beyond = result.beyond(ours, theirs, quantity)?;
            return Some(format!("{} beyond {theirs}", difference(beyond)));
        }
        let ratio = result.ratio(ours, theirs, quantity)?;
        let paired = result.paired(ours, theirs, quantity)?;
        Some(format!("{ratio:.2} ({:.2}–{:.2}) of {theirs}", paired.least, paired.most))
    });
    compared.map_or(" |".to_owned(), |text| format!(" {text} |"))
}

fn difference(beyond: Spread) -> String {
    format!("{:+.1} ({:+.1}–{:+.1})", beyond.median, beyond.least, beyond.most)
}

/// Returns the marks of a page between which all lines are generated: those of `make bench`, or those of a part of it.
fn marks(part: &str) -> [String; 2] {
    ["begin", "end"].map(|end| format!("<!-- made from the {part}: {end} -->"))
}

/// Puts text between the marks of a part of a page: `results`, or `disks`.
///
/// # Errors
/// Fails if the page cannot be read or written, or has no marks.
pub fn put(page: &Path, part: &str, text: &str) -> Result<()> {
    let marks = marks(part);
    let old = fs::read_to_string(page).context(|| format!("cannot read {}", page.display()))?;
    let new = between(&marks, &old, text).ok_or_else(|| {
        Error::Config(format!("{} lacks the lines {}", page.display(), marks.join(" and ")))
    })?;
    fs::write(page, new).context(|| format!("cannot write {}", page.display()))
}

fn between([begin, end]: &[String; 2], page: &str, text: &str) -> Option<String> {
    let (before, rest) = page.split_once(begin)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{begin}\n\n{}\n\n{end}{after}", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::super::program::Disturbance;
    use super::super::result::Provenance;
    use super::*;
    use crate::environment::QemuVersion;

    #[test]
    fn what_is_more_in_nearly_all_turns_is_told() {
        const OURS: Contender = Contender::Whimbrel(None);
        const THEIRS: Contender = Contender::Qemu(QemuMode::Default);
        let run = |contender, turn, lost_work_ms| {
            let disturbance = Disturbance { lost_work_ms, ..Disturbance::default() };
            Run { disturbance: Some(disturbance), ..Run::new(contender, turn) }
        };
        let table_of = |ours: [f64; 5]| {
            let turns = (1..).zip(ours);
            let runs = turns.flat_map(|(turn, lost_work_ms)| {
                [(OURS, lost_work_ms), (THEIRS, 10.0)].map(|(who, lost_work_ms)| run(who, turn, lost_work_ms))
            });
            let case = CaseResult {
                case: Case::idle("idle", QemuVersion::Newer),
                made: Provenance::default(),
                runs: runs.collect(),
            };
            disturbed_more(&Results { schema: String::new(), cases: vec![case] })
        };
        assert_eq!(table_of([11.0, 12.0, 13.0, 9.0, 9.0]), "");
        let table = table_of([11.0, 12.0, 13.0, 9.0, 14.0]);
        assert!(table.ends_with("| idle: lost work | qemu | 4 of 5 | +2.0 (-1.0–+4.0) |\n"), "{table}");
    }

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let marks = marks("results");
        assert_eq!(marks[0], "<!-- made from the results: begin -->");
        let [begin, end] = &marks;
        let new = between(&marks, &format!("a\n{begin}\nold\n{end}\nb\n"), "new\n").unwrap();
        assert_eq!(new, format!("a\n{begin}\n\nnew\n\n{end}\nb\n"));
        assert_eq!(between(&marks, &new, "new\n").unwrap(), new);
        assert_eq!(between(&marks, "no marks", "new"), None);
    }
}
