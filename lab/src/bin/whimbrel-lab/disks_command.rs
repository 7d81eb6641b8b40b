//! `whimbrel-lab disks`: costs of migrating a guest with its disk.

use lab::storage::{
    DiskBench, DiskCase, DiskCaseResult, DiskQuantity, DiskResults, DiskRun, IoTurn, Measurement, Mover,
    SCHEMA, bars, cases, plots, tables,
};

use crate::Code;
use crate::cli::DisksCommand;
use crate::failure::Failure;
use crate::output::{Output, joined};
use crate::results_file;

pub(crate) fn run(command: &DisksCommand, output: &Output) -> Result<Code, Failure> {
    if command.list {
        output.show(&names(), |names| names.join("\n") + "\n");
        return Ok(Code::Done);
    }
    let program = crate::whimbrel()?;
    let none = DiskResults { schema: SCHEMA.to_owned(), cases: Vec::new() };
    let results = command.kept.results.as_deref();
    let mut results =
        results_file::read(results, command.redraw, none, |results: &DiskResults| &results.schema)?;
    let chosen = if command.redraw { Vec::new() } else { chosen(command)? };
    if command.redraw {
        results_file::keep(&command.kept, &results, "disks", tables, plots)?;
    }
    let total = chosen.len();
    for (number, (case, movers)) in chosen.into_iter().enumerate() {
        eprintln!("[{}/{total}] {}: {}", number + 1, case.name, case.describe());
        let name = case.name.clone();
        let bench = DiskBench::prepare(&command.prefix, case, &program)?;
        let measured = bench.run(&movers, command.turns, |note| eprintln!("  {}", line(&note)))?;
        results.cases.retain(|known| known.case.name != name);
        results.cases.push(measured);
        results.cases.sort_by_key(place);
        // After each case: all of them need long, and may be interrupted.
        results_file::keep(&command.kept, &results, "disks", tables, plots)?;
    }
    output.show(&results, text);
    Ok(Code::Done)
}

/// Returns the position of a case among all.
fn place(result: &DiskCaseResult) -> usize {
    cases().iter().position(|(case, _)| case.name == result.case.name).unwrap_or(usize::MAX)
}

fn names() -> Vec<String> {
    let line = |(case, movers): (DiskCase, Vec<Mover>)| {
        let movers = movers.iter().map(Mover::to_string).collect::<Vec<_>>().join(" ");
        format!("{:12} {} [{movers}]", case.name, case.describe())
    };
    cases().into_iter().map(line).collect()
}

/// Returns the cases to measure.
fn chosen(command: &DisksCommand) -> Result<Vec<(DiskCase, Vec<Mover>)>, Failure> {
    let known = || cases().into_iter();
    let is_wanted =
        |name: &String| command.case.is_empty() || command.case.iter().any(|wanted| wanted == name);
    let unknown = command.case.iter().find(|wanted| !known().any(|(case, _)| case.name == **wanted));
    if let Some(unknown) = unknown {
        let error = format!("there is no case {unknown}: `whimbrel-lab disks --list` has them");
        return Err(lab::Error::Config(error).into());
    }
    let movers = |movers| if command.mover.is_empty() { movers } else { command.mover.clone() };
    let chosen = known().filter(|(case, _)| is_wanted(&case.name));
    Ok(chosen.map(|(case, theirs)| (case, movers(theirs))).collect())
}

/// Returns the line that shows a measurement.
fn line(note: &Measurement<'_>) -> String {
    match note {
        Measurement::DiskRun(run) => moved(run),
        Measurement::Io(io) => states(io),
    }
}

fn turn(turn: u32) -> String {
    if turn == 0 { "warm-up".to_owned() } else { format!("turn {turn}") }
}

fn moved(run: &DiskRun) -> String {
    let measured = run.measured.as_ref().map_or_else(
        || format!("given up: {}", run.given_up.as_deref().unwrap_or_default()),
        |m| {
            let overhead = DiskQuantity::Overhead.of(run).unwrap_or_default();
            format!(
                "total {:.1} s (disk {:.1}, memory {:.1}), downtime {:.1} ms, sent {:.1} MB ({overhead:+.1}%)",
                m.total_ms / 1e3,
                m.disk_ms / 1e3,
                m.memory_ms / 1e3,
                m.downtime_ms,
                m.payload_bytes as f64 / 1e6,
            )
        },
    );
    let seen = &run.seen;
    let broken = if seen.broken.is_empty() { String::new() } else { format!("; broken: {:?}", seen.broken) };
    format!(
        "{:8} {:18} {measured}; disruption {:.1} ms (before {:.1}), {:.1} answers/s (before {:.1}){broken}",
        turn(run.turn),
        run.mover,
        seen.disruption_ms,
        seen.usual_gap_ms,
        seen.answers_per_s,
        seen.usual_answers_per_s,
    )
}

fn states(io: &IoTurn) -> String {
    let state = |rates: &lab::storage::StateRates| {
        let rate = io.writes_per_s(rates.state).unwrap_or_default();
        format!("{:?} {rate:.0} writes/s", rates.state)
    };
    format!("{:8} {}", turn(io.turn), io.states.iter().map(state).collect::<Vec<_>>().join(", "))
}

fn text(results: &DiskResults) -> String {
    let mut lines = Vec::new();
    for bar in bars(results) {
        let held = if bar.held { "held" } else { "missed" };
        lines.push(format!("{:6} {}: {} (wanted {})", held, bar.what, bar.found, bar.wanted));
    }
    joined(&lines)
}
