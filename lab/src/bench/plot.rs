//! The results as pictures (SVG).

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::case::{Case, Program};
use super::contender::{Contender, Policy, QemuMode};
use super::nas;
use super::result::{CaseResult, Quantity, Results, Spread};
use super::statistics::{DowntimeParts, Noises};
use crate::error::{Context, Error, Result};

/// The size of a picture, in points.
const SIZE: (u32, u32) = (900, 420);
const OURS: Contender = Contender::Whimbrel(None);
/// Colours that the colour-blind can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(120, 120, 120),
];

pub(crate) type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the results into a directory: a file for each picture for which there is something to draw. Returns their
/// names.
pub fn plots(results: &Results, directory: &Path) -> Result<Vec<String>> {
    let case = |name: &str| results.cases.iter().find(|result| result.case.name == name);
    let mut drawn = Vec::new();
    let mut draw = |name: &str, picture: &dyn Fn(&Canvas<'_>) -> Drawn| -> Result<()> {
        drawn.push(draw(directory, name, picture)?);
        Ok(())
    };
    for name in ["idle", "idle-tls"] {
        if let Some(result) = case(name) {
            let title = format!("{name}: total time and processor time, ms (less is better)");
            draw(name, &|canvas| bars(canvas, &title, &totals(result)))?;
        }
    }
    let downtimes: Vec<_> = ["tiny-idle", "tiny-128-150", "devices-idle", "devices-128-150"]
        .into_iter()
        .filter_map(case)
        .flat_map(downtime)
        .collect();
    if !downtimes.is_empty() {
        draw("downtime", &|canvas| bars(canvas, "downtime, ms (less is better)", &downtimes))?;
    }
    let growth = lines_by(results, "size-", |case| case.memory_mib as f64, Quantity::Moving);
    if !growth.is_empty() {
        let axes = PlotAxes {
            title: "time after the start, by size of the guest",
            x: "memory, MiB",
            y: "ms",
            least_y: 1.0,
        };
        draw("sizes", &|canvas| lines(canvas, &axes, &growth))?;
    }
    let rate = |case: &Case| match case.program {
        Program::Load { rate_mib_per_s, .. } => rate_mib_per_s as f64,
        Program::Debian | Program::Nas(_) => 0.0,
    };
    let writing = lines_by(results, "write-128-", rate, Quantity::Downtime);
    if !writing.is_empty() {
        let axes = PlotAxes {
            title: "downtime by write rate, 128 MiB rewritten",
            x: "written, MiB/s",
            y: "downtime, ms",
            least_y: 1.0,
        };
        draw("writing", &|canvas| lines(canvas, &axes, &writing))?;
    }
    if let Some(result) = case("noise") {
        let title = "work that neighbours lose while a guest migrates, ms (less is better)";
        draw("neighbours", &|canvas| bars(canvas, title, &neighbours(result)))?;
    }
    let silences: Vec<_> = results.cases.iter().flat_map(silence).collect();
    if !silences.is_empty() {
        let title = "the longest time that a client waits for an answer, ms (less is better)";
        draw("silence", &|canvas| bars(canvas, title, &silences))?;
    }
    let slowdowns: Vec<_> = nas::kernels(results).into_iter().flat_map(slowdowns).collect();
    if !slowdowns.is_empty() {
        let title = "NAS kernels that are moved: slowdown, % (less is better)";
        draw("nas", &|canvas| bars(canvas, title, &slowdowns))?;
    }
    Ok(drawn)
}

pub(crate) type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// Draws a picture into a directory; returns the name of its file.
pub(crate) fn draw(directory: &Path, name: &str, picture: &dyn Fn(&Canvas<'_>) -> Drawn) -> Result<String> {
    std::fs::create_dir_all(directory).context(|| format!("cannot make {}", directory.display()))?;
    let path = directory.join(format!("{name}.svg"));
    let canvas = SVGBackend::new(&path, SIZE).into_drawing_area();
    let done = canvas.fill(&WHITE).map_err(Into::into).and_then(|()| picture(&canvas));
    done.and_then(|()| Ok(canvas.present()?))
        .map_err(|error| Error::Config(format!("cannot draw {}: {error}", path.display())))?;
    Ok(path.display().to_string())
}

/// A bar of several parts, one after the other.
pub(crate) struct PlotBar {
    pub(crate) label: String,
    pub(crate) parts: Vec<(&'static str, f64)>,
    pub(crate) spread: Option<Spread>,
}

/// Returns the total time, split into start and rest, and the processor time of each contender.
fn totals(result: &CaseResult) -> Vec<PlotBar> {
    let median = |contender, of: &dyn Fn(&super::Measured) -> f64| {
        let values = result.runs_of(contender).filter_map(|run| run.measured.as_ref()).map(of);
        Spread::of(values).map_or(0.0, |spread| spread.median)
    };
    let contenders = result.contenders().into_iter().filter(|one| result.ended(*one).0 > 0);
    contenders
        .flat_map(|one| {
            let start = median(one, &|m| m.start_ms);
            let total = PlotBar {
                label: format!("{one}: total"),
                parts: vec![("start of QEMU", start), ("migration", median(one, &|m| m.total_ms) - start)],
                spread: result.spread(one, Quantity::Total),
            };
            let cpu = PlotBar {
                label: format!("{one}: CPU"),
                parts: vec![("processor time", median(one, &|m| m.cpu_ms))],
                spread: result.spread(one, Quantity::Cpu),
            };
            [total, cpu]
        })
        .collect()
}

/// Returns the downtime of each contender, Whimbrel's in its parts.
fn downtime(result: &CaseResult) -> Vec<PlotBar> {
    let part = |of: &dyn Fn(&DowntimeParts) -> f64| {
        let parts = result.runs_of(OURS).filter_map(|run| run.measured.as_ref()?.parts.as_ref());
        Spread::of(parts.map(of)).map_or(0.0, |spread| spread.median)
    };
    let contenders = result.contenders().into_iter();
    contenders
        .filter_map(|one| {
            let whole = if one == OURS { Quantity::Standstill } else { Quantity::Downtime };
            let spread = result.spread(one, whole)?;
            let parts = if one == OURS {
                vec![
                    ("stop", part(&|p| p.stop_ms)),
                    ("last pages", part(&|p| p.last_pages_ms)),
                    ("device state", part(&|p| p.device_state_ms)),
                    ("load", part(&|p| p.load_ms)),
                    ("handover", part(&|p| p.handover_ms)),
                    ("continue", part(&|p| p.continue_ms)),
                ]
            } else {
                vec![("downtime", spread.median)]
            };
            Some(PlotBar { label: format!("{}: {one}", result.case.name), parts, spread: Some(spread) })
        })
        .collect()
}

/// Returns the work that the neighbours at both hosts lost with each contender.
fn neighbours(result: &CaseResult) -> Vec<PlotBar> {
    let bar = |one: Contender| {
        let lost = |of: &dyn Fn(&Noises) -> f64| {
            Spread::of(result.runs_of(one).filter_map(|run| run.noises.as_ref()).map(of))
        };
        let source = lost(&|noises| noises.source.lost_work_ms)?;
        let destination = lost(&|noises| noises.destination.lost_work_ms)?;
        let spread = lost(&|noises| noises.source.lost_work_ms + noises.destination.lost_work_ms);
        let parts = vec![("at the source", source.median), ("at the destination", destination.median)];
        Some(PlotBar { label: one.to_string(), parts, spread })
    };
    let moves = |one: &Contender| *one != Contender::NoMigration;
    result.contenders().into_iter().filter(moves).filter_map(bar).collect()
}

/// Returns how long the guest's client waited with each contender: as long as the guest was stopped, and beyond.
fn silence(result: &CaseResult) -> Vec<PlotBar> {
    let bar = |one: Contender| {
        let spread = result.spread(one, Quantity::Silence)?;
        let beyond = result.spread(one, Quantity::SilenceBeyondDowntime)?.median.max(0.0);
        let parts = vec![("downtime", spread.median - beyond), ("beyond the downtime", beyond)];
        Some(PlotBar { label: format!("{}: {one}", result.case.name), parts, spread: Some(spread) })
    };
    result.contenders().into_iter().filter_map(bar).collect()
}

/// Returns the additional run time of a kernel with each contender that migrates it in one way only.
fn slowdowns(result: &CaseResult) -> Vec<PlotBar> {
    let shown = [
        Contender::Policy(Policy::Pattern),
        Contender::Qemu(QemuMode::Default),
        Contender::Qemu(QemuMode::AutoConverge),
        Contender::Qemu(QemuMode::PostCopy),
    ];
    let bar = |one: Contender| {
        let spread = nas::slowdown(result, one, |_| true)?;
        // A run faster than the undisturbed one is chance.
        let spread = Spread { least: spread.least.max(0.0), most: spread.most.max(0.0), ..spread };
        let parts = vec![("slowdown", spread.median.max(0.0))];
        Some(PlotBar { label: format!("{}: {one}", result.case.name), parts, spread: Some(spread) })
    };
    shown.into_iter().filter_map(bar).collect()
}

/// Draws horizontal bars, with a thin line from the least to the most, cut off where it is very long.
pub(crate) fn bars(canvas: &Canvas<'_>, title: &str, bars: &[PlotBar]) -> Drawn {
    // Bars end in the left half: behind them are their spreads, their numbers, and the legend.
    let longest = bars.iter().filter_map(|bar| bar.spread).map(|spread| spread.median).fold(1.0, f64::max);
    let (most, cut) = (longest * 1.8, longest * 1.35);
    let mut kinds: Vec<&str> = Vec::new();
    for (kind, _) in bars.iter().flat_map(|bar| &bar.parts) {
        if !kinds.contains(kind) {
            kinds.push(kind);
        }
    }
    let count = bars.len() as f64;
    let mut chart = ChartBuilder::on(canvas)
        .caption(title, ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(28)
        .y_label_area_size(200)
        .build_cartesian_2d(0.0..most, 0.0..count)?;
    chart.configure_mesh().disable_y_mesh().disable_y_axis().draw()?;
    for (kind, name) in kinds.iter().enumerate() {
        let colour = COLOURS[kind % COLOURS.len()];
        let rectangles = bars.iter().enumerate().filter_map(|(row, bar)| {
            let before: f64 =
                bar.parts.iter().take_while(|(part, _)| part != name).map(|(_, value)| value).sum();
            let (_, value) = bar.parts.iter().find(|(part, _)| part == name)?;
            let top = count - row as f64;
            Some(Rectangle::new([(before, top - 0.85), (before + value, top - 0.15)], colour.filled()))
        });
        chart
            .draw_series(rectangles)?
            .label(*name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    for (row, bar) in bars.iter().enumerate() {
        let middle = count - row as f64 - 0.5;
        if let Some(Spread { median, least, most: slowest }) = bar.spread {
            chart.draw_series([PathElement::new([(least, middle), (slowest.min(cut), middle)], BLACK)])?;
            let text = format!("{median:.1}");
            chart.draw_series([Text::new(
                text,
                (slowest.min(cut) + most * 0.01, middle + 0.2),
                ("sans-serif", 11),
            )])?;
        }
        let (_, y) = chart.backend_coord(&(0.0, middle + 0.2));
        canvas.draw(&Text::new(bar.label.clone(), (12, y), ("sans-serif", 12)))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

/// A line, such as that of a contender: medians over what grows.
pub(crate) struct PlotLine {
    pub(crate) label: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// True if its points are drawn one by one.
    pub(crate) dotted: bool,
}

/// Returns for each contender the medians of a quantity over `x`, in the cases whose names begin with `prefix`; all
/// else is the same in these cases.
fn lines_by(results: &Results, prefix: &str, x: impl Fn(&Case) -> f64, quantity: Quantity) -> Vec<PlotLine> {
    let cases: Vec<_> = results
        .cases
        .iter()
        .filter(|result| result.case.name.starts_with(prefix) && !result.case.memfd)
        .filter(|result| !matches!(result.case.program, Program::Load { few: true, .. }))
        .collect();
    let mut contenders: Vec<_> = cases.iter().flat_map(|result| result.contenders()).collect();
    contenders.sort_unstable();
    contenders.dedup();
    let line = |contender: Contender| {
        let point =
            |result: &&CaseResult| Some((x(&result.case), result.spread(contender, quantity)?.median));
        let mut points: Vec<_> = cases.iter().filter_map(point).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        PlotLine { label: contender.to_string(), points, dotted: true }
    };
    contenders.into_iter().map(line).filter(|line| line.points.len() > 1).collect()
}

/// Titles and ranges of a picture of lines.
pub(crate) struct PlotAxes<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    /// Least end of the vertical axis: pictures that are compared have the same.
    pub(crate) least_y: f64,
}

pub(crate) fn lines(canvas: &Canvas<'_>, axes: &PlotAxes<'_>, lines: &[PlotLine]) -> Drawn {
    let all = || lines.iter().flat_map(|line| &line.points);
    let most_x = all().map(|point| point.0).fold(1.0, f64::max) * 1.05;
    let most_y = all().map(|point| point.1).fold(axes.least_y, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(canvas)
        .caption(axes.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..most_x, 0.0..most_y)?;
    chart.configure_mesh().x_desc(axes.x).y_desc(axes.y).light_line_style(WHITE).draw()?;
    for (number, line) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        chart
            .draw_series(
                LineSeries::new(line.points.iter().copied(), colour.stroke_width(2))
                    .point_size(if line.dotted { 3 } else { 0 }),
            )?
            .label(&line.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}
