//! Effects of a migration on kernels of the NAS Parallel Benchmarks, as in Table I of Ibrahim et al.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::bar::Bar;
use super::case::Program;
use super::contender::{Contender, Policy, QemuMode};
use super::result::{CaseResult, Quantity, Results, Run, Spread, pairs};

const PATTERN: Contender = Contender::Policy(Policy::Pattern);
const HYBRID: Contender = Contender::Policy(Policy::Hybrid);
const ENDLESS: Contender = Contender::Policy(Policy::Endless);
const FROZEN: Contender = Contender::Policy(Policy::Frozen);

/// Returns the results of kernels that come to an end.
pub(super) fn kernels(results: &Results) -> Vec<&CaseResult> {
    let is_kernel =
        |result: &&CaseResult| matches!(result.case.program, Program::Nas(_)) && result.case.has_end();
    results.cases.iter().filter(is_kernel).collect()
}

/// Returns the kernel's additional run time compared with the same turn without a migration, in percent, over the runs
/// that count.
pub(super) fn slowdown(result: &CaseResult, of: Contender, counts: impl Fn(&Run) -> bool) -> Option<Spread> {
    let ms = |run: &Run| (run.contender != of || counts(run)).then(|| Quantity::RunTime.of(run)).flatten();
    let pairs = pairs(&result.runs, of, Contender::NoMigration, ms);
    Spread::of(pairs.into_iter().map(|(own, alone)| (own / alone - 1.0) * 100.0))
}

/// Returns true if the guest's program ended before the switchover, or without one.
fn outlasted(run: &Run) -> bool {
    run.program.is_some_and(|program| program.at_source)
}

fn always(_: &Run) -> bool {
    true
}

/// Returns Table I for each class, with a column for each kernel, and the same for `hybrid` and for QEMU's ways; empty
/// where no kernel was measured.
pub(super) fn table(results: &Results) -> String {
    let mut classes = BTreeMap::<_, Vec<_>>::new();
    for result in kernels(results) {
        if let Program::Nas(nas) = &result.case.program {
            // `W` before `A`, the larger one.
            classes.entry(Reverse(&nas.class)).or_default().push(result);
        }
    }
    classes.values().map(|kernels| table_of(kernels)).collect()
}

fn table_of(kernels: &[&CaseResult]) -> String {
    let names: Vec<_> = kernels.iter().map(|result| result.case.name.as_str()).collect();
    let mut text = format!("\n| | {} |\n|---|{}\n", names.join(" | "), "---|".repeat(names.len()));
    let mut row = |heading: &str, cell: &dyn Fn(&CaseResult) -> Option<String>| {
        let cells: Vec<_> = kernels.iter().map(|result| cell(result)).collect();
        if cells.iter().any(Option::is_some) {
            let cells = cells.into_iter().map(Option::unwrap_or_default).collect::<Vec<_>>().join(" | ");
            // Writing to a string cannot fail.
            let _ = writeln!(text, "| {heading} | {cells} |");
        }
    };
    row("slowdown", &|result| slowdown(result, PATTERN, always).map(percent));
    row("no convergence: slowdown", &|result| slowdown(result, ENDLESS, outlasted).map(percent));
    row("downtime, ms", &|result| downtime(result, PATTERN, always));
    row("downtime, most: the guest stopped before anything is sent, ms", &|result| {
        downtime(result, FROZEN, always)
    });
    row("downtime, least: the kernel has ended, ms", &|result| downtime(result, ENDLESS, outlasted));
    row("pattern", &patterns);
    row("moved, and verified at the destination", &|result| Some(verified(result, PATTERN)));
    let is_other = |one: &Contender| one.is_qemu() || *one == HYBRID;
    let others: BTreeSet<_> =
        kernels.iter().flat_map(|result| result.contenders()).filter(is_other).collect();
    for mode in others {
        let is_endless = mode == Contender::Qemu(QemuMode::Endless);
        let counts = |run: &Run| !is_endless || outlasted(run);
        row(&format!("*{mode}*: slowdown"), &|result| slowdown(result, mode, counts).map(percent));
        row(&format!("*{mode}*: downtime, ms"), &|result| downtime(result, mode, counts));
        row(&format!("*{mode}*: moved, and verified"), &|result| {
            (!is_endless && result.contenders().contains(&mode)).then(|| verified(result, mode))
        });
    }
    text
}

/// Returns the bars: each kernel is migrated, and computes right results.
pub(super) fn bars(results: &Results) -> Vec<Bar> {
    let bar = |result: &&CaseResult| {
        let name = &result.case.name;
        Bar {
            what: format!("{name}: moved by policy `pattern`, and verified at the destination"),
            wanted: "always".to_owned(),
            found: verified(result, PATTERN),
            held: result.runs_of(PATTERN).all(is_verified),
        }
    };
    kernels(results).iter().filter(|result| result.contenders().contains(&PATTERN)).map(bar).collect()
}

fn is_verified(run: &Run) -> bool {
    run.measured.is_some() && run.program.is_some_and(|program| program.verified && !program.at_source)
}

fn verified(result: &CaseResult, of: Contender) -> String {
    let all = result.runs_of(of).count();
    format!("{}/{all}", result.runs_of(of).filter(|run| is_verified(run)).count())
}

fn percent(spread: Spread) -> String {
    format!("**{:.1}%** ({:.1}–{:.1})", spread.median, spread.least, spread.most)
}

fn downtime(result: &CaseResult, of: Contender, counts: impl Fn(&Run) -> bool) -> Option<String> {
    let runs = result.runs_of(of).filter(|run| counts(run));
    let spread = Spread::of(runs.filter_map(|run| Quantity::Downtime.of(run)))?;
    Some(spread.cell(1.0))
}

/// Returns the observed patterns, by the paper's letters, with their counts; a dash where the guest was stopped because
/// the downtime was short enough.
fn patterns(result: &CaseResult) -> Option<String> {
    let mut seen = BTreeMap::new();
    for stop in result.runs_of(PATTERN).filter_map(|run| run.measured.as_ref()?.stop.as_ref()) {
        let letter = match stop.pattern.as_deref() {
            Some("stable") => "a",
            Some("drained") => "b",
            Some("resent") => "c",
            _ => "–",
        };
        *seen.entry(letter).or_insert(0) += 1;
    }
    let words: Vec<_> = seen.into_iter().map(|(letter, times)| format!("{letter} ({times})")).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

#[cfg(test)]
mod tests {
    use super::super::program_run::ProgramResult;
    use super::super::result::{Measured, Provenance, SCHEMA};
    use super::super::statistics::StopCircumstances;
    use super::super::suite::{large_nas_case, nas_case};
    use super::*;

    fn run(contender: Contender, ms: f64, at_source: bool, measured: Option<Measured>) -> Run {
        let program = Some(ProgramResult { ms, verified: true, at_source });
        Run { measured, program, ..Run::new(contender, 1) }
    }

    #[test]
    fn the_table_has_the_columns_of_the_paper() {
        let moved = |downtime_ms, pattern: Option<&str>| {
            let stop = Some(StopCircumstances {
                pattern: pattern.map(str::to_owned),
                ..StopCircumstances::default()
            });
            Some(Measured { downtime_ms, stop, ..Measured::default() })
        };
        let default = Contender::Qemu(QemuMode::Default);
        let runs = vec![
            run(Contender::NoMigration, 1000.0, true, None),
            run(PATTERN, 1100.0, false, moved(20.0, Some("resent"))),
            run(ENDLESS, 1500.0, true, moved(8.0, None)),
            run(FROZEN, 2000.0, false, moved(900.0, None)),
            run(default, 1300.0, true, None),
        ];
        let case = CaseResult { case: nas_case("cg", Some(1)), made: Provenance::default(), runs };
        let results = Results { schema: SCHEMA.to_owned(), cases: vec![case] };
        let text = table(&results);
        for line in [
            "| | nas-cg |",
            "| slowdown | **10.0%** (10.0–10.0) |",
            "| no convergence: slowdown | **50.0%** (50.0–50.0) |",
            "| downtime, ms | **20.0** (20.0–20.0) |",
            "| downtime, most: the guest stopped before anything is sent, ms | **900** (900–900) |",
            "| downtime, least: the kernel has ended, ms | **8.0** (8.0–8.0) |",
            "| pattern | c (1) |",
            "| moved, and verified at the destination | 1/1 |",
            "| *qemu*: slowdown | **30.0%** (30.0–30.0) |",
            "| *qemu*: moved, and verified | 0/1 |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("*qemu*: downtime"), "{text}");
        assert!(bars(&results)[0].held);
        let mut wrong = results.clone();
        wrong.cases[0].runs[1].program = Some(ProgramResult { verified: false, ..ProgramResult::default() });
        assert!(!bars(&wrong)[0].held);
        assert_eq!(table(&Results { cases: Vec::new(), ..results }), "");
    }

    #[test]
    fn each_class_has_a_table() {
        let moved = Some(Measured { downtime_ms: 8.0, ..Measured::default() });
        let runs = vec![run(Contender::NoMigration, 1000.0, true, None), run(HYBRID, 1100.0, false, moved)];
        let of = |case| CaseResult { case, made: Provenance::default(), runs: runs.clone() };
        let cases =
            vec![of(large_nas_case("cg", Some(1))), of(nas_case("cg", Some(1))), of(nas_case("mg", Some(1)))];
        let text = table(&Results { schema: SCHEMA.to_owned(), cases });
        let headings: Vec<_> = text.lines().filter(|line| line.starts_with("| | ")).collect();
        assert_eq!(headings, ["| | nas-cg | nas-mg |", "| | nas-cg-a |"]);
        assert!(text.contains("| *whimbrel-hybrid*: slowdown | **10.0%** (10.0–10.0) |\n"), "{text}");
        assert!(text.contains("| *whimbrel-hybrid*: moved, and verified | 1/1 |\n"), "{text}");
    }

    /// A run that ended by itself before the kernel did shows nothing about a migration without convergence.
    #[test]
    fn an_endless_one_counts_where_it_was_endless() {
        let runs = vec![
            run(Contender::NoMigration, 1000.0, true, None),
            run(ENDLESS, 1100.0, false, Some(Measured { downtime_ms: 8.0, ..Measured::default() })),
        ];
        let case = CaseResult { case: nas_case("ep", Some(1)), made: Provenance::default(), runs };
        assert_eq!(slowdown(&case, ENDLESS, outlasted), None);
        assert!(slowdown(&case, ENDLESS, always).is_some());
        assert_eq!(downtime(&case, ENDLESS, outlasted), None);
    }
}
