//! `whimbrel-lab sweep`: dependence of a migration's cost on parameters.

use lab::bench::{Cap, Results, SCHEMA};
use lab::sweep::{Axes, Point, figures, is_measured, place, plots, tables};
use lab::{Pattern, QemuVersion};

use crate::Code;
use crate::bench_command::{check_keeps_contenders, listed, measure, text};
use crate::cli::{AxesOptions, SweepCommand};
use crate::failure::Failure;
use crate::output::Output;
use crate::results_file;

pub(crate) fn run(command: &SweepCommand, output: &Output) -> Result<Code, Failure> {
    let none = Results { schema: SCHEMA.to_owned(), cases: Vec::new() };
    let results = command.kept.results.as_deref();
    let keep = |results: &Results| results_file::keep(&command.kept, results, "sweep", tables, plots);
    if command.redraw {
        let results = results_file::read(results, true, none, |results: &Results| &results.schema)?;
        keep(&results)?;
        output.show(&results, text);
        return Ok(Code::Done);
    }
    let points = chosen(command)?;
    if command.list {
        let names: Vec<_> =
            points.iter().map(|point| format!("{}\n    {}", listed(point), point.0.describe())).collect();
        output.show(&names, |names| names.join("\n") + "\n");
        return Ok(Code::Done);
    }
    let mut results = results_file::read(results, false, none, |results: &Results| &results.schema)?;
    let all = points.len();
    let is_wanted = |point: &Point| command.again || !is_measured(&results, point, command.turns);
    let points: Vec<_> = points.into_iter().filter(is_wanted).collect();
    for (case, contenders) in &points {
        check_keeps_contenders(&results, case, contenders)?;
    }
    if points.len() < all {
        eprintln!("{} of {all} points were measured before", all - points.len());
    }
    measure(points, &command.prefix, command.turns, &mut results, |results| {
        let mut results = results.clone();
        results.cases.sort_by_key(place);
        keep(&results)
    })?;
    results.cases.sort_by_key(place);
    keep(&results)?;
    output.show(&results, text);
    Ok(Code::Done)
}

/// Returns the points to measure.
fn chosen(command: &SweepCommand) -> Result<Vec<Point>, Failure> {
    let mut points =
        if command.axes.is_given() { axes(&command.axes).points() } else { of_figures(command)? };
    if let Some(unknown) =
        command.point.iter().find(|name| !points.iter().any(|(case, _)| case.name == **name))
    {
        return Err(unknown_word(&format!("no point {unknown}")));
    }
    points.retain(|(case, _)| command.point.is_empty() || command.point.contains(&case.name));
    if !command.contender.is_empty() {
        for (_, contenders) in &mut points {
            contenders.clone_from(&command.contender);
        }
    }
    // Before the first one is measured.
    for (case, _) in &points {
        case.check()?;
    }
    Ok(points)
}

fn of_figures(command: &SweepCommand) -> Result<Vec<Point>, Failure> {
    let known = figures();
    if let Some(unknown) =
        command.figure.iter().find(|number| !known.iter().any(|one| one.number == **number))
    {
        return Err(unknown_word(&format!("no figure {unknown}")));
    }
    let is_wanted = |number| command.figure.is_empty() || command.figure.contains(&number);
    Ok(known.into_iter().filter(|figure| is_wanted(figure.number)).flat_map(|figure| figure.points).collect())
}

fn unknown_word(what: &str) -> Failure {
    lab::Error::Config(format!("there is {what}: `whimbrel-lab sweep --list` has what there is")).into()
}

/// Returns the requested grid; axes without a request have one value.
fn axes(options: &AxesOptions) -> Axes {
    fn or<T: Clone>(values: &[T], usual: T) -> Vec<T> {
        if values.is_empty() { vec![usual] } else { values.to_vec() }
    }
    // 0 stands for the kernel's choice.
    let kernels = |value: &u32| (*value > 0).then_some(*value);
    let rate = |rate: &api::Rate| (rate.0 > 0).then_some(rate.0);
    let links: Vec<_> = options.link.iter().map(rate).collect();
    let buffers: Vec<_> = options.buffer.iter().map(kernels).collect();
    let packets: Vec<_> = options.mtu.iter().map(|bytes| Some(*bytes)).collect();
    let caps: Vec<_> = options.cap.iter().map(|cap| Cap::from(*cap)).collect();
    Axes {
        qemu: if options.installed_qemu { QemuVersion::Installed } else { QemuVersion::Newer },
        memory_mib: options.memory.unwrap_or(1024),
        wss_mib: or(&options.wss, 128),
        rate_mib_per_s: or(&options.rate, 40),
        pattern: or(&options.pattern, Pattern::Sequential),
        link_bytes_per_s: or(&links, Some(125_000_000)),
        streams: options.streams.clone(),
        buffer_kib: or(&buffers, None),
        mtu_bytes: or(&packets, None),
        cap: or(&caps, Cap::Unlimited),
        patience_s: options.patience.unwrap_or(180),
    }
}

impl AxesOptions {
    /// Returns true if any axis was given.
    fn is_given(&self) -> bool {
        let Self { wss, rate, pattern, link, streams, buffer, mtu, cap, memory, patience, installed_qemu } =
            self;
        let given = [
            !wss.is_empty(),
            !rate.is_empty(),
            !pattern.is_empty(),
            !link.is_empty(),
            !streams.is_empty(),
            !buffer.is_empty(),
            !mtu.is_empty(),
            !cap.is_empty(),
            memory.is_some(),
            patience.is_some(),
            *installed_qemu,
        ];
        given.contains(&true)
    }
}
