//! `whimbrel-lab wan`: moves to another network, far away.

use lab::wan::{SCHEMA, WanBench, WanCase, WanMove, WanResults, cases, plots, tables};

use crate::Code;
use crate::cli::WanCommand;
use crate::failure::Failure;
use crate::output::Output;
use crate::results_file;

pub(crate) fn run(command: &WanCommand, output: &Output) -> Result<Code, Failure> {
    if command.list {
        let line = |case: WanCase| format!("{:16} {}", case.name, case.describe());
        let names: Vec<_> = cases().into_iter().map(line).collect();
        output.show(&names, |names| names.join("\n") + "\n");
        return Ok(Code::Done);
    }
    let program = crate::whimbrel()?;
    let none = WanResults { schema: SCHEMA.to_owned(), cases: Vec::new() };
    let results = command.kept.results.as_deref();
    let mut results =
        results_file::read(results, command.redraw, none, |results: &WanResults| &results.schema)?;
    let keep = |results: &WanResults| results_file::keep(&command.kept, results, "wan", tables, plots);
    if command.redraw {
        keep(&results)?;
    }
    for case in if command.redraw { Vec::new() } else { chosen(command)? } {
        eprintln!("{}: {}", case.name, case.describe());
        let name = case.name.clone();
        let bench = WanBench::prepare(&command.prefix, case, &program)?;
        let measured = bench.run(command.turns, |one| eprintln!("  {}", line(one)))?;
        results.cases.retain(|known| known.case.name != name);
        results.cases.push(measured);
        let place = |name: &str| cases().iter().position(|case| case.name == name);
        results.cases.sort_by_key(|result| place(&result.case.name));
        keep(&results)?;
    }
    output.show(&results, tables);
    Ok(Code::Done)
}

/// Returns the cases to measure.
fn chosen(command: &WanCommand) -> Result<Vec<WanCase>, Failure> {
    let unknown = command.case.iter().find(|wanted| !cases().iter().any(|case| case.name == **wanted));
    if let Some(unknown) = unknown {
        let error = format!("there is no case {unknown}: `whimbrel-lab wan --list` has them");
        return Err(lab::Error::Config(error).into());
    }
    let is_wanted = |case: &WanCase| command.case.is_empty() || command.case.contains(&case.name);
    Ok(cases().into_iter().filter(is_wanted).collect())
}

fn line(one: &WanMove) -> String {
    let WanMove { turn, total_ms, downtime_ms, silence_ms, answer_before_ms, answer_after_ms, .. } = one;
    let way = if one.is_back { "back" } else { "there" };
    let recovered = one.recovered_ms.map_or("never".to_owned(), |ms| format!("{ms:.0} ms"));
    format!(
        "turn {turn:<2} {way:5} total {total_ms:.0} ms, downtime {downtime_ms:.1}, silence {silence_ms:.1}; answers took \
         {answer_before_ms:.1} ms, then {answer_after_ms:.1}, recovered after {recovered}"
    )
}
