//! The results as tables.

use std::fmt::Write as _;

use super::bars::bars;
use super::case::Mover;
use super::io::DriverState;
use super::result::{DiskCaseResult, DiskQuantity, DiskResults};
use crate::bench::Spread;
use crate::bench::page::bars_table;

/// A column of the tables: its heading, its quantity, and the quantity's value that is shown as one.
const COLUMNS: [(&str, DiskQuantity, f64); 18] = [
    ("total, s", DiskQuantity::Total, 1.0),
    ("disk, s", DiskQuantity::Disk, 1.0),
    ("memory, s", DiskQuantity::Memory, 1.0),
    ("downtime, ms", DiskQuantity::Downtime, 1.0),
    ("disruption, ms", DiskQuantity::Disruption, 1.0),
    ("at the switch-over, ms", DiskQuantity::Switchover, 1.0),
    ("of it before the stop, ms", DiskQuantity::BeforeStop, 1.0),
    ("after the resumption, ms", DiskQuantity::AfterResume, 1.0),
    ("before, ms", DiskQuantity::UsualGap, 1.0),
    ("writes/s", DiskQuantity::WriteRate, 1.0),
    ("deltas", DiskQuantity::Deltas, 1.0),
    ("deltas/s", DiskQuantity::DeltaRate, 1.0),
    ("sent, MB", DiskQuantity::Sent, 1e6),
    ("overhead, %", DiskQuantity::Overhead, 1.0),
    ("answers, % of before", DiskQuantity::Answers, 1.0),
    ("slowest answer, ms", DiskQuantity::SlowestAnswer, 1.0),
    ("late frames", DiskQuantity::LateFrames, 1.0),
    ("underruns", DiskQuantity::Underruns, 1.0),
];

const STATES: [(DriverState, &str); 4] = [
    (DriverState::Alone, "no agent"),
    (DriverState::Adopted, "adopted, not migrating"),
    (DriverState::Recording, "recording"),
    (DriverState::Transferring, "transferring"),
];

/// Returns all results as tables, in Markdown, without the cases that were not measured.
pub fn tables(results: &DiskResults) -> String {
    let mut text = String::new();
    if !results.cases.is_empty() {
        let _ = write!(text, "**What was to be reached**\n\n{}", bars_table(&bars(results)));
    }
    for result in &results.cases {
        let (case, made) = (&result.case, &result.made);
        // Writing to a string cannot fail.
        let _ = write!(text, "\n**{}**: {}. {made}.\n\n", case.name, case.describe());
        if !result.runs.is_empty() {
            moves(result, &mut text);
        }
        if !result.io.is_empty() {
            states(result, &mut text);
        }
    }
    text
}

fn moves(result: &DiskCaseResult, text: &mut String) {
    let columns: Vec<_> = COLUMNS
        .into_iter()
        .filter(|(_, quantity, _)| result.runs.iter().any(|run| quantity.of(run).is_some()))
        .collect();
    let headings = columns.iter().map(|(heading, ..)| *heading).collect::<Vec<_>>().join(" | ");
    let _ = writeln!(text, "| | ended | {headings} |\n|{}", "---|".repeat(columns.len() + 2));
    for mover in result.movers() {
        let (ended, all) = result.ended(mover);
        let cell = |quantity, one| result.spread(mover, quantity).map(|spread| spread.cell(one));
        let cells = columns.iter().map(|(_, quantity, one)| cell(*quantity, *one).unwrap_or_default());
        let cells = cells.collect::<Vec<_>>().join(" | ");
        let _ = writeln!(text, "| {mover} | {ended}/{all} | {cells} |");
    }
    beyond(result, &columns, text);
    for run in &result.runs {
        if let Some(why) = &run.given_up {
            let _ = writeln!(text, "\n{}, turn {}: {why}.", run.mover, run.turn);
        }
    }
}

/// Writes the differences in disruption to the same guest whose memory alone was migrated.
fn beyond(result: &DiskCaseResult, columns: &[(&str, DiskQuantity, f64)], text: &mut String) {
    let is_compared = |quantity: DiskQuantity| {
        matches!(quantity, DiskQuantity::Downtime | DiskQuantity::Disruption | DiskQuantity::Switchover)
    };
    let cells = columns.iter().map(|(_, quantity, _)| {
        let beyond = result.beyond(Mover::Whimbrel, Mover::MemoryOnly, *quantity);
        beyond.filter(|_| is_compared(*quantity))
    });
    let cells: Vec<_> = cells.collect();
    if cells.iter().all(Option::is_none) {
        return;
    }
    let shown = |beyond: Option<Spread>| {
        let text = |it: Spread| format!("{:+.1} ({:+.1}–{:+.1})", it.median, it.least, it.most);
        beyond.map(text).unwrap_or_default()
    };
    let cells = cells.into_iter().map(shown).collect::<Vec<_>>().join(" | ");
    let _ = writeln!(text, "| *whimbrel beyond memory-only* | | {cells} |");
}

fn states(result: &DiskCaseResult, text: &mut String) {
    text.push_str(
        "| | writes/s | latency, µs | 99 of 100 within, µs | more than with no agent, % | link, kB/s |\n",
    );
    text.push_str("|---|---|---|---|---|---|\n");
    for (state, name) in STATES {
        let of = |value: &dyn Fn(&super::IoTurn) -> Option<f64>| {
            let spread = Spread::of(result.io.iter().filter_map(value));
            spread.map(|spread| spread.cell(1.0)).unwrap_or_default()
        };
        let link = |turn: &super::IoTurn| {
            turn.states.iter().find(|rates| rates.state == state).map(|rates| rates.link_bytes_per_s / 1e3)
        };
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {} |",
            of(&|turn| turn.writes_per_s(state)),
            of(&|turn| turn.median(state, |rate| rate.latency_us)),
            of(&|turn| turn.median(state, |rate| rate.p99_us)),
            of(&|turn| turn.excess(state).map(|share| share * 100.0)),
            of(&link),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::cases;
    use super::super::io::{IoRate, IoTurn, StateRates};
    use super::super::result::{ClientObservations, DiskMeasured, DiskRun, SCHEMA};
    use super::*;
    use crate::bench::Provenance;

    #[test]
    fn tables_have_what_was_measured_and_nothing_else() {
        let none = DiskResults { schema: SCHEMA.to_owned(), cases: Vec::new() };
        assert_eq!(tables(&none), "");
        let (qemu, commit) = ("QEMU 10".to_owned(), Some("abc".to_owned()));
        let made = Provenance { qemu, commit, ..Provenance::default() };
        let run = |mover, total_ms| {
            let measured = Some(DiskMeasured { total_ms, memory_ms: 1000.0, ..DiskMeasured::default() });
            DiskRun {
                mover,
                turn: 1,
                measured,
                given_up: None,
                seen: ClientObservations::default(),
                timeline: None,
            }
        };
        let stuck =
            DiskRun { measured: None, given_up: Some("rounds".to_owned()), ..run(Mover::Mirror, 0.0) };
        let case = |name: &str| cases().into_iter().find(|(case, _)| case.name == name).unwrap().0;
        let video = DiskCaseResult {
            case: case("video"),
            made: made.clone(),
            runs: vec![run(Mover::MemoryOnly, 12_000.0), run(Mover::Whimbrel, 70_000.0), stuck],
            io: Vec::new(),
        };
        let rate = IoRate { writes_per_s: 500.0, ..IoRate::default() };
        let state = StateRates { state: DriverState::Alone, link_bytes_per_s: 0.0, samples: vec![rate] };
        let io = DiskCaseResult {
            case: case("io"),
            made,
            runs: Vec::new(),
            io: vec![IoTurn { turn: 1, states: vec![state] }],
        };
        let text = tables(&DiskResults { cases: vec![video, io], ..none });
        assert!(text.contains("| whimbrel | 1/1 | **70.0** (70.0–70.0) |"), "{text}");
        assert!(text.contains("| mirror | 0/1 | "), "{text}");
        assert!(text.contains("mirror, turn 1: rounds."), "{text}");
        assert!(text.contains("| *whimbrel beyond memory-only* | |"), "{text}");
        assert!(!text.contains("overhead"), "nothing had to be sent: {text}");
        assert!(text.contains("| no agent | **500** (500–500) |"), "{text}");
        assert!(text.contains("| recording |  |"), "{text}");
    }
}
