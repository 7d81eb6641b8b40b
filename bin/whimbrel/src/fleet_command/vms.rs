//! `whimbrel fleet simulate vms`.

use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use fleet::planner::Settings;
use fleet::trace::{Day, open, read_days};
use fleet::vms::{
    BadEvaluation, DayResult, Evaluation, MemoryRule, PolicyResult, SCHEMA, Setup, SweepPoint, evaluate_day,
    sum_up,
};

use super::cli::{Memory, VmsOptions};
use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text, table};

/// Simulates, and shows the results.
pub(crate) fn simulate(options: &VmsOptions, output: &Output) -> Result<Code, Failure> {
    let settings = settings(options)?;
    let days = days(options)?;
    let memory = match options.memory {
        Memory::Ignored => MemoryRule::Ignored,
        Memory::Kept => MemoryRule::Kept,
    };
    // The results of all days with moves as long as they are come first.
    let factors: Vec<f64> = std::iter::once(1.0).chain(options.move_factor.iter().copied()).collect();
    let tasks: Vec<(f64, &Day)> =
        factors.iter().flat_map(|factor| days.iter().map(move |day| (*factor, day))).collect();
    let evaluate = |(factor, day): (f64, &Day)| {
        let began = Instant::now();
        let result = evaluate_day(day, options.hosts, memory, factor, settings, &options.policy);
        eprintln!("{} × {factor}: {:.1} s", day.name, began.elapsed().as_secs_f64());
        result
    };
    let mut results = in_threads(&tasks, options.threads, evaluate).map_err(impossible)?;
    let mut points = Vec::new();
    for (at, move_factor) in options.move_factor.iter().copied().enumerate() {
        let of_factor = &results[(at + 1) * days.len()..(at + 2) * days.len()];
        let mean_move_s = mean_move_s(&days, options.hosts, move_factor).map_err(impossible)?;
        points.push(SweepPoint { move_factor, mean_move_s, policies: sum_up(of_factor) });
    }
    results.truncate(days.len());
    let evaluation = Evaluation {
        schema: SCHEMA.to_owned(),
        trace: options.trace.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        hosts: options.hosts,
        memory,
        settings,
        days: results,
        sweep: points,
    };
    output.show(&evaluation, render);
    let is_plausible = evaluation.days.iter().all(|day| day.findings.is_empty());
    Ok(if is_plausible { Code::Done } else { Code::Failed })
}

fn impossible(source: BadEvaluation) -> Failure {
    Failure::Setting(source.into())
}

fn settings(options: &VmsOptions) -> Result<Settings, Failure> {
    let Some(path) = &options.settings else { return Ok(Settings::default()) };
    let text = fs::read_to_string(path).map_err(|source| Failure::File { path: path.clone(), source })?;
    let settings: Settings =
        serde_json::from_slice(text.as_bytes()).map_err(|source| Failure::Setting(source.into()))?;
    settings.check().map_err(|source| Failure::Setting(source.into()))?;
    Ok(settings)
}

fn days(options: &VmsOptions) -> Result<Vec<Day>, Failure> {
    let path = || options.trace.clone();
    let reader = open::open(&options.trace).map_err(|source| Failure::File { path: path(), source })?;
    let mut days = read_days(reader).map_err(|source| Failure::Trace { path: path(), source })?;
    if let Some(missing) = options.day.iter().find(|name| !days.iter().any(|day| day.name == **name)) {
        return Err(Failure::NoSuchDay { path: path(), day: missing.clone() });
    }
    if !options.day.is_empty() {
        days.retain(|day| options.day.contains(&day.name));
    }
    for day in &mut days {
        let vms = day.vms.clone();
        (1..options.repeat).for_each(|_| day.vms.extend_from_slice(&vms));
    }
    Ok(days)
}

fn mean_move_s(days: &[Day], hosts: usize, move_factor: f64) -> Result<f64, BadEvaluation> {
    let Some(day) = days.first() else { return Ok(0.0) };
    let setup = Setup::new(day, hosts, MemoryRule::Ignored, move_factor)?;
    Ok((0..setup.vms.len()).map(|vm| setup.move_s(vm)).sum::<f64>() / setup.vms.len() as f64)
}

/// Carries out tasks in threads, which take the next one as soon as they are free; returns results in the order of
/// tasks.
fn in_threads<T: Copy + Sync, R: Send>(
    tasks: &[T],
    threads: usize,
    carry_out: impl Fn(T) -> Result<R, BadEvaluation> + Sync,
) -> Result<Vec<R>, BadEvaluation> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..threads.min(tasks.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(task) = tasks.get(at) else { return };
                    let result = carry_out(*task);
                    if let Ok(mut done) = done.lock() {
                        done.push((at, result));
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_default();
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

const HEADING: [&str; 8] = ["policy", "kWh", "SLATAH", "PDM", "ESV ×1000", "moves", "hosts", "unserved"];

fn render(evaluation: &Evaluation) -> String {
    let mut shown = String::new();
    for DayResult { day, vms, bounds, policies, findings } in &evaluation.days {
        let mut text = Text::default();
        text.line(format_args!(
            "{day}: {vms} VMs on {} hosts; all on {:.1} kWh, perfect packing {:.1} kWh",
            evaluation.hosts, bounds.all_on_kwh, bounds.packed_kwh
        ));
        shown.push_str(&text.finish());
        shown.push_str(&table(HEADING, policies.iter().map(row)));
        let mut text = Text::default();
        for finding in findings {
            text.line(format_args!("  not plausible: {finding}"));
        }
        shown.push_str(&text.finish());
        shown.push('\n');
    }
    shown.push_str("mean of the days\n");
    shown.push_str(&table(HEADING, sum_up(&evaluation.days).iter().map(row)));
    for point in &evaluation.sweep {
        let mut text = Text::default();
        text.line(format_args!(
            "\nmoves that take {} times as long, {:.1} s in the mean",
            point.move_factor, point.mean_move_s
        ));
        shown.push_str(&text.finish());
        shown.push_str(&table(HEADING, point.policies.iter().map(row)));
    }
    shown
}

fn row(result: &PolicyResult) -> [String; 8] {
    let metrics = &result.metrics;
    [
        result.policy.clone(),
        format!("{:.2}", metrics.energy_kwh),
        format!("{:.3}%", metrics.slatah * 100.0),
        format!("{:.4}%", metrics.pdm * 100.0),
        format!("{:.4}", metrics.esv * 1000.0),
        metrics.moves.to_string(),
        format!("{:.1}", metrics.mean_hosts),
        format!("{:.3}%", metrics.unserved * 100.0),
    ]
}
