//! The results as pictures: figures 3, 5 to 8 and 10 of Bradford et al. 2007.

use std::path::Path;

use super::case::{Mover, Workload};
use super::result::{DiskCaseResult, DiskResults};
use super::sampler::Timeline;
use crate::bench::plot::{PlotAxes, PlotLine, draw, lines};
use crate::error::Result;

/// Draws the results into a directory: a file for each picture for which there is something to draw. Returns their
/// names.
pub fn plots(results: &DiskResults, directory: &Path) -> Result<Vec<String>> {
    let mut drawn = Vec::new();
    let mut picture = |name: &str, title: &str, y: &str, content: &[PlotLine]| -> Result<()> {
        if content.iter().any(|line| line.points.len() > 1) {
            let axes = PlotAxes { title, x: "since the clients' start, s", y, least_y: 1.0 };
            drawn.push(draw(directory, name, &|canvas| lines(canvas, &axes, content))?);
        }
        Ok(())
    };
    // One case of each workload: on another link the guest writes the same, for longer.
    let mut workloads = Vec::new();
    let is_first = |result: &&DiskCaseResult| {
        let is_new = !workloads.contains(&result.case.workload);
        workloads.push(result.case.workload);
        is_new
    };
    let written: Vec<PlotLine> = results.cases.iter().filter(is_first).filter_map(written).collect();
    picture("disks-writes", "what the guest has written since the request", "MB", &written)?;
    for result in &results.cases {
        let name = &result.case.name;
        match result.case.workload {
            Workload::Static | Workload::Board | Workload::Video => {
                let Some(timeline) = timeline(result, Mover::Whimbrel) else { continue };
                let title = format!("{name}: moved by Whimbrel, from {:.0} s on", timeline.requested_s);
                picture(&format!("disks-{name}"), &title, "Mb/s", &flows(timeline))?;
                let gaps =
                    vec![line("longest time between two frames", timeline.frame_gap_ms.iter().copied())];
                picture(&format!("disks-{name}-frames"), &title, "ms", &gaps)?;
            }
            Workload::Writer => {
                let writes = result.movers().into_iter().filter_map(|mover| {
                    let bytes = &timeline(result, mover)?.written_bytes;
                    Some(line(&mover.to_string(), bytes.iter().map(|bytes| *bytes as f64 / 1e6)))
                });
                let title = format!("{name}: what the guest writes");
                picture(&format!("disks-{name}"), &title, "MB/s", &writes.collect::<Vec<_>>())?;
                let link = result.movers().into_iter().filter_map(|mover| {
                    Some(line(&mover.to_string(), megabits(&timeline(result, mover)?.link_bytes)))
                });
                let title = format!("{name}: what the link carries");
                picture(&format!("disks-{name}-link"), &title, "Mb/s", &link.collect::<Vec<_>>())?;
            }
            Workload::Io => {}
        }
    }
    Ok(drawn)
}

fn timeline(result: &DiskCaseResult, mover: Mover) -> Option<&Timeline> {
    result.runs_of(mover).find_map(|run| run.timeline.as_ref())
}

/// Returns a line with a point for each second.
fn line(label: &str, seconds: impl Iterator<Item = f64>) -> PlotLine {
    let points = seconds.enumerate().map(|(second, value)| (second as f64, value)).collect();
    PlotLine { label: label.to_owned(), points, dotted: false }
}

fn megabits(bytes: &[u64]) -> impl Iterator<Item = f64> {
    bytes.iter().map(|bytes| *bytes as f64 * 8.0 / 1e6)
}

/// Returns the rates of the clients, of the link, and of the guest's writes.
fn flows(timeline: &Timeline) -> Vec<PlotLine> {
    vec![
        line("to the clients", megabits(&timeline.client_bytes)),
        line("over the link", megabits(&timeline.link_bytes)),
        line("to the disk", megabits(&timeline.written_bytes)),
    ]
}

/// Returns the bytes that the guest of a case has written since the request, as long as it was at its source.
fn written(result: &DiskCaseResult) -> Option<PlotLine> {
    if !matches!(result.case.workload, Workload::Static | Workload::Board | Workload::Video) {
        return None;
    }
    let timeline = timeline(result, Mover::Whimbrel)?;
    let (from, to) = (timeline.requested_s as usize, timeline.stopped_s? as usize);
    let bytes = timeline.written_bytes.get(from..to)?;
    let so_far = bytes.iter().scan(0, |sum, bytes| {
        *sum += bytes;
        Some(*sum as f64 / 1e6)
    });
    let mut line = line(&result.case.name, so_far);
    // By the clients' clock, as everywhere.
    line.points.iter_mut().for_each(|(second, _)| *second += from as f64);
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::super::case::cases;
    use super::super::result::{ClientObservations, DiskRun, SCHEMA};
    use super::*;
    use crate::bench::Provenance;

    #[test]
    fn what_was_seen_is_drawn() {
        let timeline = Timeline {
            requested_s: 1.0,
            stopped_s: Some(3.0),
            resumed_s: Some(4.0),
            client_bytes: vec![1, 2, 3, 4],
            link_bytes: vec![0, 5, 5, 0],
            written_bytes: vec![9, 1_000_000, 2_000_000, 9],
            frame_gap_ms: vec![40.0; 4],
        };
        let result = |name: &str, movers: &[Mover]| {
            let run = |mover: &Mover| DiskRun {
                mover: *mover,
                turn: 1,
                measured: None,
                given_up: None,
                seen: ClientObservations::default(),
                timeline: Some(timeline.clone()),
            };
            let made = Provenance::default();
            let (case, _) = cases().into_iter().find(|(case, _)| case.name == name).unwrap();
            DiskCaseResult { case, made, runs: movers.iter().map(run).collect(), io: Vec::new() }
        };
        let video = result("video", &[Mover::Whimbrel]);
        assert_eq!(written(&video).unwrap().points, [(1.0, 1.0), (2.0, 3.0)]);
        let cases = vec![video, result("diabolical", &[Mover::WhimbrelDrain]), result("io", &[])];
        let directory = tempfile::tempdir().unwrap();
        let drawn = plots(&DiskResults { schema: SCHEMA.to_owned(), cases }, directory.path()).unwrap();
        let names: Vec<_> =
            drawn.iter().map(|path| Path::new(path).file_name().unwrap().to_string_lossy()).collect();
        let expected = [
            "disks-writes",
            "disks-video",
            "disks-video-frames",
            "disks-diabolical",
            "disks-diabolical-link",
        ];
        assert_eq!(names, expected.map(|name| format!("{name}.svg")));
        assert!(std::fs::read_to_string(&drawn[1]).unwrap().contains("over the link"));
    }
}
