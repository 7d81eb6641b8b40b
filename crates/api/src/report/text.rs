//! The report as people read it on a terminal.

use std::fmt::{self, Write as _};
use std::iter;

use proto::limits::PAGE_BYTES;
use proto::message::CardFrames;

use super::numbers::{bytes, milliseconds, rate, seconds, to_the_second};
use super::{Downtime, Event, Outcome, PostCopy, Report, Round, Waiting, connections, forecast, reductions};

impl Outcome {
    /// Returns the outcome as text.
    pub fn words(self) -> &'static str {
        match self {
            Self::Underway => "under way",
            Self::Moved => "moved",
            Self::Aborted => "failed; the VM is at its source, unharmed",
            Self::Cancelled => "cancelled; the VM is at its source",
            Self::VmEnded => "the VM ended before it was moved",
            Self::Returned => "refused by the destination; the VM is at its source again",
            Self::InDoubt => "in doubt: see `whimbrel recover`",
        }
    }
}

/// Parts of the text, in their order.
const PARTS: &[fn(&Report, &mut String) -> fmt::Result] = &[
    outcome,
    time,
    downtime,
    forecast::write,
    disks,
    memory,
    qemu_versions,
    wire,
    reduction_summaries,
    waits,
    post_copy,
    first_frames,
    connections::write,
    dns_records,
    agent_cpu,
    run_state,
    verification,
    rounds_tables,
    downtime_table,
    findings,
    events,
];

/// Formats a report: heading, rounds, downtime, findings. Ends with a newline.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = PARTS.iter().try_for_each(|part| part(report, &mut text));
    text
}

fn outcome(report: &Report, out: &mut String) -> fmt::Result {
    let Report { migration, source, destination, .. } = report;
    writeln!(out, "{} from {} to {}: {}", migration, source.host, destination.host, report.outcome.words())?;
    if let Some(reason) = &report.reason {
        writeln!(out, "  reason      {reason}")?;
    }
    Ok(())
}

fn time(report: &Report, out: &mut String) -> fmt::Result {
    let ended = report.ended.as_deref().map_or_else(|| "not ended".to_owned(), to_the_second);
    let started = to_the_second(&report.started);
    writeln!(out, "  time        {} in all; {started} to {ended}", seconds(report.total_us))
}

fn downtime(report: &Report, out: &mut String) -> fmt::Result {
    let Some(downtime) = &report.downtime else { return Ok(()) };
    let (took, allowed_ms) = (milliseconds(downtime.total_us), report.settings.max_downtime_ms);
    writeln!(out, "  downtime    {took} of {allowed_ms} ms allowed")
}

fn disks(report: &Report, out: &mut String) -> fmt::Result {
    // After an earlier end the images are removed again.
    let copied = match report.outcome {
        Outcome::Underway | Outcome::Moved | Outcome::InDoubt => "copied to",
        Outcome::Aborted | Outcome::Cancelled | Outcome::VmEnded | Outcome::Returned => "was to be copied to",
    };
    for disk in &report.disks {
        writeln!(out, "  disk        {}, {}, {copied} {}", disk.name, bytes(disk.bytes), disk.path)?;
    }
    Ok(())
}

fn memory(report: &Report, out: &mut String) -> fmt::Result {
    let blocks = &report.ram_blocks;
    writeln!(
        out,
        "  memory      {} in {} blocks; {} → {}",
        bytes(blocks.iter().map(|block| block.bytes).sum()),
        blocks.len(),
        known(report.source.ram_kind.as_deref()),
        known(report.destination.ram_kind.as_deref())
    )
}

fn qemu_versions(report: &Report, out: &mut String) -> fmt::Result {
    let [before, after] = [&report.source, &report.destination].map(|side| side.qemu_version.as_deref());
    writeln!(out, "  QEMU        {} → {}", known(before), known(after))
}

fn wire(report: &Report, out: &mut String) -> fmt::Result {
    writeln!(
        out,
        "  wire        {} out, {} back, {} streams, {} reconnections",
        bytes(report.sent_bytes),
        bytes(report.received_bytes),
        report.settings.streams,
        report.reconnections
    )
}

fn reduction_summaries(report: &Report, out: &mut String) -> fmt::Result {
    reductions::summaries(report).try_for_each(|summary| writeln!(out, "  {summary}"))
}

fn waits(report: &Report, out: &mut String) -> fmt::Result {
    let Some(waiting) = report.waiting else { return Ok(()) };
    let Some(waited_permille) = waiting.permille else { return Ok(()) };
    let Waiting { before_permille, most_permille, nicest, fewest_threads, longest_interval_factor, .. } =
        waiting;
    let percent = |permille: u64| format!("{}.{}%", permille / 10, permille % 10);
    let before = before_permille.map_or_else(|| "unknown".to_owned(), percent);
    writeln!(
        out,
        "  waited      {} of its time for processors, {} at worst, {before} before;",
        percent(waited_permille),
        percent(most_permille.unwrap_or(waited_permille))
    )?;
    write!(out, "              copying nice {nicest}")?;
    // Niceness is the first restraint: without further ones there is nothing else to report.
    if let (Some(threads), Some(factor @ 2..)) = (fewest_threads, longest_interval_factor) {
        let threads = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
        write!(out, ", {threads} at a time, scan interval {factor}-fold")?;
    }
    writeln!(out)
}

fn post_copy(report: &Report, out: &mut String) -> fmt::Result {
    let Some(post_copy) = report.post_copy else { return Ok(()) };
    let PostCopy { remaining_pages, requested_pages, duration_us, .. } = post_copy;
    let (left, took) = (bytes(remaining_pages.saturating_mul(PAGE_BYTES)), seconds(duration_us));
    writeln!(
        out,
        "  post-copy   {left} sent after the VM was started at the destination, in {took}; the VM waited for \
         {requested_pages} pages"
    )
}

fn first_frames(report: &Report, out: &mut String) -> fmt::Result {
    for CardFrames { interface, first_in_us, first_out_us, .. } in &report.network {
        let after = |us: Option<u64>| us.map_or_else(|| "none".to_owned(), milliseconds);
        let (first_in, first_out) = (after(*first_in_us), after(*first_out_us));
        writeln!(out, "  network     {interface}: first frame in after {first_in}, out after {first_out}")?;
    }
    Ok(())
}

fn dns_records(report: &Report, out: &mut String) -> fmt::Result {
    for record in report.names.iter().flat_map(|names| &names.records) {
        writeln!(out, "  name        {record}: {}", record.detail)?;
    }
    Ok(())
}

fn agent_cpu(report: &Report, out: &mut String) -> fmt::Result {
    let [before, after] = [&report.source, &report.destination].map(|side| side.agent_cpu_us.map(seconds));
    writeln!(out, "  agents' CPU {} → {}", known(before.as_deref()), known(after.as_deref()))
}

fn run_state(report: &Report, out: &mut String) -> fmt::Result {
    let before = Some(report.run_state_before.as_str()).filter(|state| !state.is_empty());
    writeln!(out, "  run state   {} → {}", known(before), known(report.run_state_after.as_deref()))
}

fn verification(report: &Report, out: &mut String) -> fmt::Result {
    let Some(verification) = &report.verification else { return Ok(()) };
    let found = match verification.different_chunks {
        0 => "all equal".to_owned(),
        n => format!("{n} chunks differ"),
    };
    let (compared, took) = (bytes(verification.compared_bytes), seconds(verification.duration_us));
    writeln!(out, "  verified    {compared} in {took}: {found}")
}

fn rounds_tables(report: &Report, out: &mut String) -> fmt::Result {
    if report.rounds.is_empty() { Ok(()) } else { write!(out, "\n{}", rounds(&report.rounds)) }
}

fn downtime_table(report: &Report, out: &mut String) -> fmt::Result {
    report.downtime.as_ref().map_or(Ok(()), |downtime| write!(out, "\n{}", parts(downtime)))
}

fn findings(report: &Report, out: &mut String) -> fmt::Result {
    for finding in &report.findings {
        writeln!(out, "\n{:?}: {}\n  {}", finding.severity, finding.what, finding.advice)?;
    }
    Ok(())
}

fn events(report: &Report, out: &mut String) -> fmt::Result {
    if !report.events.is_empty() {
        writeln!(out)?;
    }
    for Event { at_us, what, detail } in &report.events {
        writeln!(out, "  {:>10}  {}", seconds(*at_us), format!("{what} {detail}").trim_end())?;
    }
    Ok(())
}

/// Numbers of rounds that are shown from the beginning, and from the end, of a long list.
const FIRST_ROUNDS: usize = 8;
const LAST_ROUNDS: usize = 24;

/// Formats two tables, each of which fits on a terminal of 80 columns: the course of the rounds, and their pages.
fn rounds(all: &[Round]) -> String {
    let last = all.len().saturating_sub(LAST_ROUNDS).max(FIRST_ROUNDS.min(all.len()));
    let (first, rest) = all.split_at(FIRST_ROUNDS.min(all.len()));
    let left_out = last - first.len();
    let rounds: Vec<&Round> = first.iter().chain(&rest[left_out..]).collect();
    let number =
        |round: &Round| if round.stopped { format!("{}*", round.round) } else { round.round.to_string() };
    let sent_row = |round: &Round| {
        [
            number(round),
            bytes(round.sent_bytes),
            milliseconds(round.duration_us),
            rate(round.rate_bytes_per_s),
            rate(round.dirty_rate_bytes_per_s),
            round.expected_downtime_us.map_or_else(|| "-".to_owned(), milliseconds),
            if round.decision == "another-round" { "again" } else { &round.decision }.to_owned(),
        ]
    };
    let pages_row = |round: &Round| {
        [
            number(round),
            round.dirty_pages.to_string(),
            round.data_pages.to_string(),
            empty_pages(round).saturating_add(round.hinted_pages).to_string(),
            round.reference_pages.saturating_add(round.delta_pages).to_string(),
            milliseconds(round.scan_us),
            milliseconds(round.drain_us),
        ]
    };
    let heading = ["round", "sent", "took", "rate", "dirtied", "expected", "then"].map(str::to_owned);
    let mut text =
        table(&iter::once(heading).chain(rounds.iter().map(|round| sent_row(round))).collect::<Vec<_>>());
    let heading = ["round", "dirty", "data", "empty", "there", "scan", "drain"].map(str::to_owned);
    text.push('\n');
    text.push_str(&table(
        &iter::once(heading).chain(rounds.iter().map(|round| pages_row(round))).collect::<Vec<_>>(),
    ));
    if left_out > 0 {
        let _ = writeln!(
            text,
            "  {left_out} rounds after the first {FIRST_ROUNDS} are not shown; --json shows them"
        );
    }
    if rounds.iter().any(|round| round.stopped) {
        text.push_str("  * with the guest stopped\n");
    }
    if let Some(pattern) = rounds.iter().rev().find_map(|round| round.pattern) {
        let _ = writeln!(text, "  stopped at {pattern}");
    }
    text
}

fn parts(downtime: &Downtime) -> String {
    let Downtime {
        total_us,
        stop_us,
        last_pages_us,
        last_scans_us: _,
        verify_us,
        device_state_us,
        load_us,
        handover_us,
        continue_us,
        events_us: _,
    } = *downtime;
    let parts = [
        ("stop", stop_us),
        ("last pages", last_pages_us),
        ("verification", verify_us),
        ("device state", device_state_us),
        ("load", load_us),
        ("handover", handover_us),
        ("continue", continue_us),
        ("downtime", total_us),
    ];
    let rows: Vec<_> = parts
        .into_iter()
        .filter(|(name, us)| *us > 0 || *name != "verification")
        .map(|(name, us)| [name.to_owned(), milliseconds(us)])
        .collect();
    table(&rows)
}

/// Returns the number of pages that are sent with next to no bytes, because they are zeros, holes or filled.
pub(super) fn empty_pages(round: &Round) -> u64 {
    [round.zero_pages, round.hole_pages, round.filled_pages].into_iter().fold(0, u64::saturating_add)
}

/// Formats columns of minimal width, numbers to the right, decisions and names to the left.
pub(super) fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            let left = ["then", "why"].contains(&rows[0][column].as_str()) || (N == 2 && column == 0);
            let _ = if left { write!(line, "  {cell:<width$}") } else { write!(line, "  {cell:>width$}") };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn known(text: Option<&str>) -> &str {
    text.unwrap_or("unknown")
}

#[cfg(test)]
pub(super) mod tests;
