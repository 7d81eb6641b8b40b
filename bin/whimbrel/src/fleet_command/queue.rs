//! `whimbrel fleet simulate queue`.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use fleet::generator::tournament;
use fleet::queue::figure::{Baselines, Figure, Point, TraceSummary, pairs};
use fleet::queue::search::{Best, Goal, Search};
use fleet::queue::{Bank, Pair, Scale, Workload};
use fleet::trace::{RequestTrace, open};

use super::cli::{Gaps, QueueOptions};
use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text, table};

/// Simulates, and shows the figure.
pub(crate) fn simulate(options: &QueueOptions, output: &Output) -> Result<Code, Failure> {
    let power = options.power.clone();
    let (servers, window_s, off_watts) = (options.servers, options.window, options.off);
    let bank = Bank { servers, window_s, power, waking_share: options.waking / 100.0, off_watts };
    bank.check().map_err(|source| Failure::Setting(source.into()))?;
    let (name, trace) = trace(options)?;
    if options.gaps == Gaps::Refuse {
        trace.refuse_gaps().map_err(|source| Failure::Trace { path: name.clone().into(), source })?;
    }
    let scale = Scale { servers, max_service_s: options.max_service, seed: options.seed };
    let workload = Workload::new(&trace, &scale).map_err(|source| Failure::Setting(source.into()))?;
    let goal = Goal { limit_s: options.limit, late_share: options.late / 100.0 };
    let search = Search { workload: &workload, bank: &bank, goal, seed: options.seed };
    let pairs = pairs(&options.headroom, &options.min_run);
    let baselines = Baselines {
        static_baseline: search.static_baseline(),
        whole_bank: search.constant(options.servers as usize),
    };
    let results = search_all(&search, &options.latency, &pairs, options.threads);
    let summary = TraceSummary::new(name, &workload);
    let figure = Figure::new(summary, bank.clone(), goal, options.seed, pairs.len(), baselines, results);
    output.show(&figure, render);
    Ok(Code::Done)
}

fn trace(options: &QueueOptions) -> Result<(String, RequestTrace), Failure> {
    let in_trace = |path: &Path| {
        let path = path.to_owned();
        move |source| Failure::Trace { path, source }
    };
    if let Some(path) = &options.trace {
        let reader = open::open(path).map_err(|source| Failure::File { path: path.clone(), source })?;
        let trace = RequestTrace::read(reader).map_err(in_trace(path))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        return Ok((name, trace));
    }
    let days = options.tournament.unwrap_or(1);
    let name = format!("tournament of {days} days, seed {}", options.seed);
    let trace = RequestTrace::new(tournament(days, options.seed)).map_err(in_trace(Path::new(&name)))?;
    Ok((name, trace))
}

/// Searches for each latency. Threads take the next latency as soon as they are free.
fn search_all(
    search: &Search<'_>,
    latencies: &[u32],
    pairs: &[Pair],
    threads: usize,
) -> Vec<(u32, Option<Best>)> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..threads.min(latencies.len()) {
            scope.spawn(|| {
                while let Some(latency_s) = latencies.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let began = Instant::now();
                    let best = search.best(*latency_s, pairs);
                    progress(*latency_s, best.as_ref(), began);
                    if let Ok(mut found) = found.lock() {
                        found.push((*latency_s, best));
                    }
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_default();
    found.sort_by_key(|(latency_s, _)| *latency_s);
    found
}

fn progress(latency_s: u32, best: Option<&Best>, began: Instant) {
    let simulated = best.map_or(0, |best| best.simulated);
    let elapsed_s = began.elapsed().as_secs_f64();
    eprintln!("latency {latency_s} s: simulated {simulated} requests in {elapsed_s:.1} s");
}

fn render(figure: &Figure) -> String {
    let mut text = Text::default();
    let trace = &figure.trace;
    text.line(format_args!("{}", trace.name));
    text.line(format_args!(
        "  {} requests in {} s; busiest minute {:.1} a second, mean {:.1}; mean service {:.4} s",
        trace.requests, trace.seconds, trace.peak_per_s, trace.mean_per_s, trace.service_s
    ));
    if trace.gaps > 0 {
        text.line(format_args!("  {} gaps of {} s in all were left out", trace.gaps, trace.gap_s));
    }
    if trace.smoothing_s > 1 {
        text.line(format_args!(
            "  scaled up by {:.2}, with rates smoothed over {} s",
            trace.factor, trace.smoothing_s
        ));
    }
    match &figure.static_baseline {
        Some(baseline) => text.line(format_args!(
            "  static baseline: {} servers, {:.2} kWh",
            baseline.servers,
            kwh(baseline.met.energy_j)
        )),
        None => text.line(format_args!("  no constant number of servers meets the limit on late requests")),
    }
    let heading = [
        "latency",
        "headroom",
        "min. run",
        "energy",
        "of static",
        "servers",
        "starts",
        "late",
        "mean response",
    ];
    let mut shown = text.finish();
    shown.push_str(&table(heading, figure.points.iter().map(row)));
    let mut text = Text::default();
    for saving in &figure.savings {
        let share = saving.share.map_or("unknown".to_owned(), |share| format!("{:.1}%", share * 100.0));
        text.line(format_args!(
            "{} s needs {share} less energy than {} s (the paper: {:.0}%)",
            saving.latency_s,
            saving.against_s,
            saving.paper * 100.0
        ));
    }
    shown + &text.finish()
}

fn row(point: &Point) -> [String; 9] {
    let latency = format!("{} s", point.latency_s);
    let Some(best) = &point.best else {
        return [latency, "none meets the limit".to_owned()]
            .into_iter()
            .chain(std::iter::repeat_n(String::new(), 7))
            .collect::<Vec<_>>()
            .try_into()
            .unwrap_or_default();
    };
    [
        latency,
        format!("{}%", best.pair.headroom_percent),
        format!("{} min", best.pair.min_run_s / 60),
        format!("{:.2} kWh", kwh(best.met.energy_j)),
        point.of_static.map_or(String::new(), |share| format!("{:.1}%", share * 100.0)),
        format!("{:.2}", best.met.mean_servers),
        best.met.starts.to_string(),
        format!("{:.2}%", best.met.responses.late_share() * 100.0),
        format!("{:.3} s", best.met.responses.mean_s()),
    ]
}

fn kwh(joules: f64) -> f64 {
    joules / 3_600_000.0
}
