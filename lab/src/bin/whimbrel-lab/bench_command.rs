//! `whimbrel-lab bench`: Whimbrel beside QEMU's own migration.

use lab::bench::{Bench, Cap, Case, CaseResult, Contender, Program, Quantity, Results, Run, SCHEMA, suites};
use lab::{Packets, QemuVersion};

use crate::Code;
use crate::cli::{BenchCommand, CaseOptions};
use crate::failure::Failure;
use crate::output::{Output, joined};
use crate::results_file;

pub(crate) fn run(command: &BenchCommand, output: &Output) -> Result<Code, Failure> {
    if command.list {
        output.show(&names(), |names| names.join("\n") + "\n");
        return Ok(Code::Done);
    }
    let none = Results { schema: SCHEMA.to_owned(), cases: Vec::new() };
    let results = command.kept.results.as_deref();
    let mut results = results_file::read(results, command.redraw, none, |results: &Results| &results.schema)?;
    let cases = if command.redraw { Vec::new() } else { chosen(command)? };
    for (case, contenders) in &cases {
        check_keeps_contenders(&results, case, contenders)?;
    }
    if command.redraw {
        results_file::keep(&command.kept, &results, "results", lab::bench::tables, lab::bench::plots)?;
    }
    measure(cases, &command.prefix, command.turns, &mut results, |results| {
        results_file::keep(&command.kept, results, "results", lab::bench::tables, lab::bench::plots)
    })?;
    output.show(&results, text);
    Ok(Code::Done)
}

/// Measures case after case; each result replaces the earlier result of its case.
pub(crate) fn measure(
    cases: Vec<(Case, Vec<Contender>)>,
    prefix: &str,
    turns: u32,
    results: &mut Results,
    keep: impl Fn(&Results) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let program = crate::whimbrel()?;
    let total = cases.len();
    for (number, (case, contenders)) in cases.into_iter().enumerate() {
        eprintln!("[{}/{total}] {}: {} contenders", number + 1, case.name, contenders.len());
        let name = case.name.clone();
        let bench = Bench::prepare(prefix, case, &program)?;
        let measured = bench.run(&contenders, turns, |run| eprintln!("  {}", line(run)))?;
        results.cases.retain(|known| known.case.name != name);
        results.cases.push(measured);
        // After each case: a bench needs long, and may be interrupted.
        keep(results)?;
    }
    Ok(())
}

/// Fails if a result would replace one with more contenders: a case is kept whole.
pub(crate) fn check_keeps_contenders(
    results: &Results,
    case: &Case,
    contenders: &[Contender],
) -> Result<(), Failure> {
    let known = results.cases.iter().find(|known| known.case.name == case.name);
    let lost = known.and_then(|known| known.contenders().into_iter().find(|one| !contenders.contains(one)));
    lost.map_or(Ok(()), |lost| {
        let name = &case.name;
        Err(lab::Error::Config(format!(
            "the results of {name} have {lost} too, which would be lost: measure all contenders, or write into another file"
        ))
        .into())
    })
}

/// Returns a case with its contenders, as it is listed.
pub(crate) fn listed((case, contenders): &(Case, Vec<Contender>)) -> String {
    let contenders = contenders.iter().map(Contender::to_string).collect::<Vec<_>>().join(" ");
    format!("  {:28} {contenders}", case.name)
}

fn names() -> Vec<String> {
    let suite = |suite: lab::bench::Suite| {
        let cases = suite.cases.iter().map(listed).collect::<Vec<_>>();
        [vec![format!("{}: {}", suite.name, suite.about)], cases].concat()
    };
    suites().into_iter().flat_map(suite).collect()
}

/// Returns the cases to measure.
fn chosen(command: &BenchCommand) -> Result<Vec<(Case, Vec<Contender>)>, Failure> {
    let others = |contenders: Vec<Contender>| {
        if command.contender.is_empty() { contenders } else { command.contender.clone() }
    };
    if command.suite.is_empty() {
        let CaseOptions { debian, pattern, wss, rate, .. } = command.case;
        if pattern != lab::Pattern::Sequential && (debian || wss == 0 || rate == 0) {
            let what = if debian {
                "the Debian guest rewrites nothing by a pattern: leave out --debian or --pattern".to_owned()
            } else {
                format!(
                    "nothing is rewritten, {pattern} or not: say how much with --wss, and how fast with --rate"
                )
            };
            return Err(lab::Error::Config(what).into());
        }
        return Ok(vec![(case(&command.case), others(Contender::all()))]);
    }
    let mut chosen = Vec::new();
    for wanted in &command.suite {
        let before = chosen.len();
        for suite in suites() {
            let whole = wanted == "all" || wanted == suite.name;
            let cases = suite.cases.into_iter().filter(|(case, _)| whole || *wanted == case.name);
            chosen.extend(cases.map(|(case, contenders)| (case, others(contenders))));
        }
        if chosen.len() == before {
            return Err(lab::Error::Config(format!(
                "there is no suite and no case {wanted}: `whimbrel-lab bench --list` has them"
            ))
            .into());
        }
    }
    Ok(chosen)
}

fn case(options: &CaseOptions) -> Case {
    let CaseOptions { fill, wss, rate, verify, few, pattern, noise, .. } = *options;
    Case {
        name: "case".to_owned(),
        qemu: if options.installed_qemu { QemuVersion::Installed } else { QemuVersion::Newer },
        program: if options.debian {
            Program::Debian
        } else {
            Program::Load {
                fill_mib: fill,
                wss_mib: wss,
                rate_mib_per_s: rate,
                verify_mib_per_s: verify,
                few,
                pattern,
                noise_percent: noise,
            }
        },
        memory_mib: options.memory,
        regions: options.regions,
        devices: options.devices,
        memfd: options.memfd,
        preallocated: options.preallocated,
        neighbours: options.neighbours,
        client: options.client,
        tracked_connections: options.tracked_connections,
        guest_wait_percent: options.guest_wait,
        cache_mib: options.cache,
        link_bytes_per_s: (options.link.0 > 0).then_some(options.link.0),
        packets: Packets::default(),
        cap: Cap::default(),
        tls: options.tls,
        patience_s: options.patience,
    }
}

/// Returns the line that shows a measurement.
fn line(run: &Run) -> String {
    let turn = if run.turn == 0 { "warm-up".to_owned() } else { format!("turn {}", run.turn) };
    let measured = run.measured.as_ref().map_or_else(
        || if run.contender == Contender::NoMigration { String::new() } else { "given up".to_owned() },
        |m| {
            format!(
                "total {:.0} ms (start {:.0}), downtime {:.1}, CPU {:.0} (agents {:.0}), sent {:.1} MB, {} rounds",
                m.total_ms,
                m.start_ms,
                m.downtime_ms,
                m.cpu_ms,
                m.agents_cpu_ms,
                m.sent_bytes as f64 / 1e6,
                m.rounds
            )
        },
    );
    let disturbed = run.disturbance.map_or_else(String::new, |d| {
        let brownout = d.brownout_ms.map_or("for good".to_owned(), |ms| format!("{ms:.0}"));
        format!("; stall {:.1}, lost {:.0}, brownout {brownout}", d.longest_stall_ms, d.lost_work_ms)
    });
    let ran = run.program.map_or_else(String::new, |ran| {
        let verified = if ran.verified { "verified" } else { "not verified" };
        let place = if ran.at_source { "source" } else { "destination" };
        format!("; ran {:.2} s, {verified} at the {place}", ran.ms / 1e3)
    });
    format!("{turn:8} {:18} {measured}{disturbed}{ran}", run.contender)
}

pub(crate) fn text(results: &Results) -> String {
    let mut lines = Vec::new();
    for result in &results.cases {
        lines.push(format!("{}:", result.case.name));
        for contender in result.contenders() {
            lines.push(format!("  {}", summary(result, contender)));
        }
    }
    joined(&lines)
}

fn summary(result: &CaseResult, contender: Contender) -> String {
    let (ended, all) = result.ended(contender);
    let value = |name: &str, quantity: Quantity| {
        let spread = result.spread(contender, quantity)?;
        Some(format!("{name} {:.1} ({:.1} to {:.1})", spread.median, spread.least, spread.most))
    };
    let values = [
        value("total", Quantity::Total),
        value("downtime", Quantity::Downtime),
        value("CPU", Quantity::Cpu),
        value("stall", Quantity::Stall),
        value("lost", Quantity::Lost),
        value("brownout", Quantity::Brownout),
        value("run time", Quantity::RunTime),
    ];
    let values = values.into_iter().flatten().collect::<Vec<_>>().join(", ");
    format!("{contender:18} {ended}/{all} {values} ms")
}

#[cfg(test)]
mod tests {
    use lab::bench::Provenance;

    use super::*;

    #[test]
    fn a_part_does_not_take_the_place_of_a_whole() {
        let (case, both) =
            (Case::idle("idle", QemuVersion::Newer), [Contender::NoMigration, Contender::Whimbrel(None)]);
        let run = |contender| Run::new(contender, 1);
        let known =
            CaseResult { case: case.clone(), made: Provenance::default(), runs: both.map(run).into() };
        let results = Results { schema: SCHEMA.to_owned(), cases: vec![known] };
        assert!(check_keeps_contenders(&results, &case, &both).is_ok());
        assert!(check_keeps_contenders(&results, &case, &both[1..]).is_err());
        let other = Case::idle("other", QemuVersion::Newer);
        assert!(check_keeps_contenders(&results, &other, &both[1..]).is_ok());
    }
}
