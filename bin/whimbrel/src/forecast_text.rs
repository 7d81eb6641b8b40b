//! Forecasts as people read them: the first line states the answer, the lines below it the numbers.

use api::report::{bytes, milliseconds, rate, to_the_second};
use api::{CalibrationReport, Forecast, ForecastOutcome, VmMeasurement};
use engine::forecast::calibration::Accuracy;
use engine::forecast::history::{LinkOrigin, LinkRate};
use engine::forecast::{Alternative, Estimate, MigrationEnd, MigrationForecast, ShownDuration};
use engine::pre_copy::MigrationStrategy;

use crate::output::{Text, table};

/// Number of forecasts of the record that are shown.
const SHOWN_OUTCOMES: usize = 20;

/// Formats a forecast.
pub(crate) fn forecast(forecast: &Forecast) -> String {
    let found = &forecast.found;
    let MigrationForecast { end, total_ns, downtime_ns, bytes: wire, rounds, .. } = found.forecast;
    let mut text = Text::default();
    text.line(format_args!(
        "{} from {} to {}: {}",
        forecast.vm,
        forecast.from,
        forecast.to,
        headline(forecast)
    ));
    let total = match end {
        MigrationEnd::Endless => "without end".to_owned(),
        MigrationEnd::GivesUp { .. } => format!("gives up after {}", duration(total_ns)),
        MigrationEnd::StopAndCopy | MigrationEnd::PostCopy => duration(total_ns),
    };
    text.line(format_args!("  total       {total}"));
    let arrives = arrives(&found.forecast);
    if arrives {
        let allowed = ShownDuration(found.max_downtime_ns);
        text.line(format_args!("  downtime    {}, {allowed} allowed", duration(downtime_ns)));
    }
    let Estimate { expected, low, high } = wire;
    text.line(format_args!("  sent        {}", interval(&bytes(expected), &bytes(low), &bytes(high))));
    text.line(format_args!("  policy      {}, {rounds} rounds", found.policy));
    for Alternative { way, forecast } in &found.alternatives {
        let (total, downtime) = (duration(forecast.total_ns), duration(forecast.downtime_ns));
        text.line(format_args!("  instead     {}: {total}, downtime {downtime}", option(*way)));
    }
    if (20..=80).contains(&found.forecast.converging_percent) {
        let percent = found.forecast.converging_percent;
        text.line(format_args!(
            "  uncertain   rounds converge in {percent}% of the cases that the measurements allow"
        ));
    }
    guest(&forecast.measurement, &mut text);
    link(forecast, &mut text);
    text.line(format_args!("  record      {}", record(&forecast.accuracy)));
    text.finish()
}

/// Returns the record of earlier forecasts in one line.
fn record(accuracy: &Accuracy) -> String {
    let Accuracy { forecasts, near_total, near_downtime, .. } = accuracy;
    if *forecasts == 0 {
        return accuracy.to_string();
    }
    format!(
        "of {forecasts} forecasts, {near_total} within ±20% of the total time, {near_downtime} within ±50% of the downtime"
    )
}

/// Returns the answer in one line.
fn headline(forecast: &Forecast) -> String {
    let found = &forecast.found;
    let MigrationForecast { end, total_ns, downtime_ns, .. } = found.forecast;
    let (total, downtime) = (ShownDuration(total_ns.expected), ShownDuration(downtime_ns.expected));
    if found.forecast.converges {
        return format!("will converge in {total}, downtime {downtime}");
    }
    if end == MigrationEnd::PostCopy {
        return format!("will end in post-copy after {total}, downtime {downtime}");
    }
    let least_ns = forecast.facts.fixed.downtime_ns(0);
    if least_ns > found.max_downtime_ns {
        let (least, allowed) = (ShownDuration(least_ns), ShownDuration(found.max_downtime_ns));
        return format!(
            "cannot keep a downtime of {allowed}: {least} are needed however little memory remains"
        );
    }
    let megabytes = |bytes_per_s: u64| bytes_per_s / 1_000_000;
    let (writes, sends) =
        (megabytes(found.forecast.writes_bytes_per_s), megabytes(found.forecast.sends_bytes_per_s));
    let mut line = format!("will not converge: writes {writes} MB/s, link carries {sends} MB/s");
    if end == MigrationEnd::StopAndCopy {
        line = format!("{line}; the downtime would be {downtime}");
    }
    match found.alternatives.first() {
        Some(Alternative { way, forecast }) => {
            let total = ShownDuration(forecast.total_ns.expected);
            line = format!("{line}; {} would take {total}", name(*way));
        }
        None if end == MigrationEnd::StopAndCopy => {}
        None => line.push_str("; no other way would keep the downtime"),
    }
    line
}

/// Returns true if the VM is expected to arrive.
fn arrives(forecast: &MigrationForecast) -> bool {
    matches!(forecast.end, MigrationEnd::StopAndCopy | MigrationEnd::PostCopy)
}

fn guest(measured: &VmMeasurement, text: &mut Text) {
    let VmMeasurement { memory_bytes, used_bytes, writes, tracked_us, faults, fault_ns, .. } = measured;
    let took = ShownDuration(tracked_us.saturating_mul(1000));
    let written = writes.bytes_within(tracked_us.saturating_mul(1000)) as u64;
    if *tracked_us > 0 {
        text.line(format_args!(
            "  guest       writes {} at first, {} of pages within {took}",
            rate(writes.bytes_per_s()),
            bytes(written)
        ));
    } else {
        text.line(format_args!("  guest       is paused"));
    }
    text.line(format_args!("  memory      {} of {} have content", bytes(*used_bytes), bytes(*memory_bytes)));
    let age = age(measured.unix_ms);
    text.line(format_args!(
        "  measured    {age}; cost the guest {}: {faults} page faults of {fault_ns} ns",
        milliseconds(measured.cost_us())
    ));
}

fn link(forecast: &Forecast, text: &mut Text) {
    let LinkRate { bytes_per_s, origin, unix_ms } = forecast.link;
    let origin = match origin {
        LinkOrigin::Measured => format!("measured {}", age(unix_ms)),
        LinkOrigin::Migrations => format!("as migrations have shown, last {}", age(unix_ms)),
        LinkOrigin::Assumed => "assumed, because it was never measured".to_owned(),
    };
    text.line(format_args!("  link        {}, {origin}", rate(bytes_per_s)));
    if let Some(problem) = &forecast.link_problem {
        text.line(format_args!("              not measured now: {problem}"));
    }
}

/// Formats the record of forecasts.
pub(crate) fn calibration(report: &CalibrationReport) -> String {
    let mut text = Text::default();
    text.line(format_args!("{}", report.accuracy));
    if report.forecasts.is_empty() {
        return text.finish();
    }
    let heading =
        ["MIGRATION", "POLICY", "TOTAL", "FORECAST", "DOWNTIME", "FORECAST", "SENT", "FORECAST", "END"];
    let shown = report.forecasts.iter().take(SHOWN_OUTCOMES);
    text.append(&table(heading, shown.map(row)));
    let left_out = report.forecasts.len().saturating_sub(SHOWN_OUTCOMES);
    if left_out > 0 {
        text.line(format_args!("{left_out} older ones are not shown; --json shows them"));
    }
    text.finish()
}

fn row(forecast: &ForecastOutcome) -> [String; 9] {
    let record = &forecast.record;
    let (shown, outcome) = (&record.shown, &record.outcome);
    let end = match (shown.converges, outcome.converged) {
        (true, true) => "converged",
        (false, false) => "did not converge, as forecast",
        (true, false) => "did not converge",
        (false, true) => "converged, against the forecast",
    };
    [
        forecast.migration.to_string(),
        record.kind.policy.clone(),
        ShownDuration(outcome.total_ns).to_string(),
        duration(shown.total_ns),
        ShownDuration(outcome.downtime_ns).to_string(),
        duration(shown.downtime_ns),
        bytes(outcome.bytes),
        bytes(shown.bytes.expected),
        end.to_owned(),
    ]
}

/// Returns the name of a way in a sentence.
fn name(way: MigrationStrategy) -> &'static str {
    match way {
        MigrationStrategy::PreCopy => "rounds",
        MigrationStrategy::SlowedDown => "a CPU throttle",
        MigrationStrategy::PostCopy => "hybrid",
    }
}

/// Returns the option by which a way is requested.
fn option(way: MigrationStrategy) -> &'static str {
    match way {
        MigrationStrategy::PreCopy => "--policy pattern",
        MigrationStrategy::SlowedDown => "--throttle-cpu drain",
        MigrationStrategy::PostCopy => "--policy hybrid",
    }
}

fn duration(Estimate { expected, low, high }: Estimate) -> String {
    let [expected, low, high] = [expected, low, high].map(|ns| ShownDuration(ns).to_string());
    interval(&expected, &low, &high)
}

/// Formats a value with its interval; alone if all three are shown alike.
fn interval(expected: &str, low: &str, high: &str) -> String {
    if (expected, expected) == (low, high) {
        expected.to_owned()
    } else {
        format!("{expected} ({low} to {high})")
    }
}

/// Formats the time since a moment.
fn age(unix_ms: u64) -> String {
    let seconds = api::report::unix_ms_now().saturating_sub(unix_ms) / 1000;
    match seconds {
        0..60 => "now".to_owned(),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("at {}", to_the_second(&api::report::rfc3339(unix_ms))),
    }
}
