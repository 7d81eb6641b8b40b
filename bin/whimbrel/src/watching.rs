//! Watching a migration until it has ended: a bar on a terminal, lines otherwise.

use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use api::progress::{ExpectedEnd, PartProgress, Phase, Progress, Standing};
use api::report::{bytes, milliseconds, rate};
use api::{Client, ClientError, MigrationId, MigrationSelector};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::failure::Failure;
use crate::output::Output;

/// Pause before a stream is reopened that ended although the migration continues: its driver is being replaced.
const REOPEN_PAUSE: Duration = Duration::from_millis(200);

/// Outcome of watching.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The standing of the migration.
    Settled(Standing),
    /// The user pressed Ctrl-C. The migration continues.
    Interrupted,
}

enum Event {
    Progress(Progress),
    Failed(ClientError),
    Interrupted,
}

/// Watches a migration until it has ended or is in doubt, or Ctrl-C is pressed.
pub(crate) fn watch(id: &MigrationId, socket: &Path, output: &Output) -> Result<Ended, Failure> {
    let (events, arriving) = mpsc::channel();
    on_interrupt(events.clone())?;
    let client = Client::new(socket)?;
    let watched = id.clone();
    thread::Builder::new()
        .name("progress".to_owned())
        .spawn(move || {
            if let Err(error) = follow(&client, &watched, &events) {
                let _ = events.send(Event::Failed(error));
            }
        })
        .map_err(|source| Failure::System { what: "cannot start a thread", source })?;

    let mut display = Display::new(id, output);
    // The senders live as long as the threads do, so the loop ends with one of their events.
    for event in arriving {
        match event {
            Event::Progress(progress) => {
                display.show(&progress);
                if progress.standing != Standing::Underway {
                    return Ok(Ended::Settled(progress.standing));
                }
            }
            Event::Failed(error @ (ClientError::NoAgent { .. } | ClientError::Lost(_))) => {
                return Err(Failure::Unwatched(error));
            }
            Event::Failed(error) => return Err(error.into()),
            Event::Interrupted => return Ok(Ended::Interrupted),
        }
    }
    Ok(Ended::Interrupted)
}

/// Forwards the agent's progress, until the migration is settled or the receiver is gone. A stream may end before: then
/// its driver has ended, and the status shows whether another one follows.
fn follow(client: &Client, id: &MigrationId, events: &Sender<Event>) -> Result<(), ClientError> {
    let which = MigrationSelector::Epoch(id.epoch.0);
    loop {
        for line in client.progress(&id.vm, which)? {
            let progress = line?.progress;
            let settled = progress.standing != Standing::Underway;
            if events.send(Event::Progress(progress)).is_err() || settled {
                return Ok(());
            }
        }
        let status = client.migration(&id.vm, which)?;
        if status.standing != Standing::Underway {
            let known = status.progress.unwrap_or_default();
            let message = status.message.or(known.message);
            let last = Progress { phase: Phase::Ended, standing: status.standing, message, ..known };
            let _ = events.send(Event::Progress(last));
            return Ok(());
        }
        thread::sleep(REOPEN_PAUSE);
    }
}

fn on_interrupt(events: Sender<Event>) -> Result<(), Failure> {
    let failed = |source| Failure::System { what: "cannot wait for Ctrl-C", source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    // Registered here, so that from now on Ctrl-C does not end the program.
    let mut interrupts = {
        let _context = runtime.enter();
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt()).map_err(failed)?
    };
    thread::Builder::new()
        .name("ctrl-c".to_owned())
        .spawn(move || {
            runtime.block_on(interrupts.recv());
            let _ = events.send(Event::Interrupted);
        })
        .map(drop)
        .map_err(failed)
}

/// Display of progress.
struct Display {
    name: String,
    how: DisplayMode,
}

enum DisplayMode {
    /// Two lines: the present step, and a bar with the outlook. Each is cut at the terminal's right edge.
    Bar {
        line: ProgressBar,
        bar: ProgressBar,
    },
    /// A line whenever phase or round have changed.
    Lines(Option<(Phase, u32)>),
    Nothing,
}

impl Display {
    fn new(id: &MigrationId, output: &Output) -> Self {
        let how = if Output::is_on_terminal() {
            let lines = MultiProgress::new();
            let styled = |template: &str| {
                let line = lines.add(ProgressBar::new(1));
                if let Ok(style) = ProgressStyle::with_template(template) {
                    line.set_style(style.progress_chars("=> "));
                }
                line
            };
            DisplayMode::Bar { line: styled("{wide_msg}"), bar: styled("[{bar:24}] {wide_msg}") }
        } else if output.wants_lines() {
            DisplayMode::Lines(None)
        } else {
            DisplayMode::Nothing
        };
        Self { name: id.to_string(), how }
    }

    fn show(&mut self, progress: &Progress) {
        match &mut self.how {
            DisplayMode::Bar { line, bar } => {
                line.set_message(format!("{}: {}", self.name, now(progress).join(", ")));
                bar.set_length(progress.round_bytes.max(1));
                bar.set_position(progress.round_bytes.saturating_sub(progress.remaining_bytes));
                bar.set_message(outlook(progress).join(", "));
            }
            DisplayMode::Lines(shown) => {
                let step = (progress.phase, progress.round);
                if *shown != Some(step) {
                    *shown = Some(step);
                    let parts = [now(progress), outlook(progress)].concat();
                    eprintln!("{}: {}", self.name, parts.join(", "));
                }
            }
            DisplayMode::Nothing => {}
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if let DisplayMode::Bar { line, bar } = &self.how {
            bar.finish_and_clear();
            line.finish_and_clear();
        }
    }
}

/// Describes the present step.
fn now(progress: &Progress) -> Vec<String> {
    let phase = match progress.phase {
        Phase::Preparing => "preparing".to_owned(),
        Phase::PreCopy => format!("round {}", progress.round),
        Phase::LastRound => format!("round {}, guest stopped", progress.round),
        Phase::Verifying => "comparing memory, guest stopped".to_owned(),
        Phase::DeviceState => "device state, guest stopped".to_owned(),
        Phase::Handover => "handover".to_owned(),
        Phase::PostCopy => "post-copy, the guest runs at the destination".to_owned(),
        Phase::Reconnecting => "reconnecting".to_owned(),
        Phase::InDoubt => "in doubt".to_owned(),
        Phase::Undoing => "rolling back".to_owned(),
        Phase::Ended => "over".to_owned(),
    };
    let mut parts = vec![phase];
    if matches!(progress.phase, Phase::PreCopy | Phase::LastRound | Phase::PostCopy) {
        parts.push(format!("{} left", bytes(progress.remaining_bytes)));
        parts.push(rate(progress.rate_bytes_per_s));
        parts.extend(progress.parts.iter().filter(|part| part.round_bytes > 0).map(by_itself));
    }
    parts.extend(progress.downtime_us.map(|us| format!("downtime {}", milliseconds(us))));
    parts.extend(progress.message.as_deref().map(crate::output::plain));
    parts
}

/// Describes the progress of a part of the VM.
fn by_itself(part: &PartProgress) -> String {
    let done = bytes(part.round_bytes.saturating_sub(part.remaining_bytes));
    let [kind, name] = [&part.kind, &part.name].map(|text| crate::output::plain(text));
    format!("{kind} {name} {done} of {}", bytes(part.round_bytes))
}

/// Returns the outlook from earlier rounds; empty before the first has ended.
fn outlook(progress: &Progress) -> Vec<String> {
    let mut parts = Vec::new();
    if matches!(progress.phase, Phase::PreCopy | Phase::LastRound)
        && let Some(us) = progress.expected_downtime_us
    {
        parts.push(format!("dirtied {}", rate(progress.dirty_rate_bytes_per_s)));
        parts.push(format!("downtime {} expected", milliseconds(us)));
    }
    let is_moving = !matches!(progress.phase, Phase::InDoubt | Phase::Undoing | Phase::Ended);
    parts.extend(progress.expected_end.filter(|_| is_moving).map(|end| done_in(progress.elapsed_us, end)));
    parts
}

/// Formats the expected end, as `done in 14 s ± 3`.
fn done_in(elapsed_us: u64, end: ExpectedEnd) -> String {
    let ExpectedEnd { total_us, low_us, high_us, arrives } = end;
    if !arrives {
        return "not expected to converge".to_owned();
    }
    let left_us = total_us.saturating_sub(elapsed_us);
    let within_us = high_us.saturating_sub(total_us).max(total_us.saturating_sub(low_us));
    let tenths = |us: u64| (us + 50_000) / 100_000;
    match tenths(left_us) {
        left @ 0..100 => {
            let within = tenths(within_us);
            format!("done in {}.{} s ± {}.{}", left / 10, left % 10, within / 10, within % 10)
        }
        left => format!("done in {} s ± {}", (left + 5) / 10, tenths(within_us).div_ceil(10)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_matters_in_its_phase() {
        let progress = Progress {
            phase: Phase::PreCopy,
            round: 3,
            remaining_bytes: 16 << 20,
            rate_bytes_per_s: 1 << 30,
            dirty_rate_bytes_per_s: 100 << 20,
            expected_downtime_us: Some(12_000),
            ..Progress::default()
        };
        assert_eq!(now(&progress).join(", "), "round 3, 16.0 MiB left, 1.0 GiB/s");
        assert_eq!(outlook(&progress).join(", "), "dirtied 100.0 MiB/s, downtime 12.0 ms expected");
        let disk = |name: &str, round_mib: u64, remaining_mib: u64| PartProgress {
            kind: "disk".to_owned(),
            name: name.to_owned(),
            bytes: 1 << 40,
            round_bytes: round_mib << 20,
            remaining_bytes: remaining_mib << 20,
        };
        let parts = vec![disk("sda", 64, 16), disk("sdb", 0, 0)];
        let with_disks = Progress { parts, ..progress.clone() };
        let words = "round 3, 16.0 MiB left, 1.0 GiB/s, disk sda 48.0 MiB of 64.0 MiB";
        assert_eq!(now(&with_disks).join(", "), words, "nothing is to be sent of the other");
        let first = Progress { round: 1, expected_downtime_us: None, ..progress.clone() };
        assert!(outlook(&first).is_empty(), "no rate of dirtying is known yet");
        let end =
            ExpectedEnd { total_us: 15_000_000, low_us: 12_000_000, high_us: 17_000_000, arrives: true };
        let with_end = Progress { expected_end: Some(end), elapsed_us: 1_000_000, ..first };
        assert_eq!(outlook(&with_end).join(", "), "done in 14 s ± 3");
        let later = Progress { elapsed_us: 8_500_000, ..with_end.clone() };
        assert_eq!(outlook(&later).join(", "), "done in 6.5 s ± 3.0");
        let stuck = Progress { expected_end: Some(ExpectedEnd { arrives: false, ..end }), ..later };
        assert_eq!(outlook(&stuck).join(", "), "not expected to converge");
        let over = Progress {
            phase: Phase::Ended,
            expected_end: Some(end),
            message: Some("disk full".into()),
            ..progress
        };
        assert_eq!(now(&over).join(", "), "over, disk full");
        assert!(outlook(&over).is_empty());
    }
}
