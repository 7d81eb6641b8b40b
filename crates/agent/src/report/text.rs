//! The report as people read it on a terminal.

use std::fmt::{self, Write as _};
use std::iter;

use proto::limits::PAGE_BYTES;

use super::{Compression, Deltas, Downtime, Event, Outcome, PickedWay, Report, Round};

impl Outcome {
    /// The outcome in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Underway => "under way",
            Self::Moved => "moved",
            Self::Aborted => "failed; the VM is at its source, unharmed",
            Self::Cancelled => "cancelled; the VM is at its source",
            Self::Returned => "refused by the destination; the VM is at its source again",
            Self::InDoubt => "in doubt: see `whimbrel recover`",
        }
    }
}

/// Text of a report: heading, rounds, downtime, what was found. Ends with a newline.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = write_all(&mut text, report);
    text
}

fn write_all(out: &mut String, report: &Report) -> fmt::Result {
    let Report { migration, source, destination, .. } = report;
    writeln!(out, "{} from {} to {}: {}", migration, source.host, destination.host, report.outcome.words())?;
    if let Some(reason) = &report.reason {
        writeln!(out, "  because     {reason}")?;
    }
    let ended = report.ended.as_deref().map_or_else(|| "not over".to_owned(), to_the_second);
    let started = to_the_second(&report.started);
    writeln!(out, "  time        {} in all; {started} to {ended}", seconds(report.total_us))?;
    if let Some(downtime) = &report.downtime {
        writeln!(
            out,
            "  downtime    {} of {} ms allowed",
            milliseconds(downtime.total_us),
            report.objective.max_downtime_ms
        )?;
    }
    for disk in &report.disks {
        writeln!(out, "  disk        {}, {}, copied to {}", disk.name, bytes(disk.bytes), disk.path)?;
    }
    let ram_bytes: u64 = report.ram_blocks.iter().map(|block| block.bytes).sum();
    writeln!(
        out,
        "  memory      {} in {} blocks; {} → {}",
        bytes(ram_bytes),
        report.ram_blocks.len(),
        known(source.ram_kind.as_deref()),
        known(destination.ram_kind.as_deref())
    )?;
    writeln!(
        out,
        "  QEMU        {} → {}",
        known(source.qemu_version.as_deref()),
        known(destination.qemu_version.as_deref())
    )?;
    writeln!(
        out,
        "  wire        {} out, {} back, {} streams, {} reconnections",
        bytes(report.sent_bytes),
        bytes(report.received_bytes),
        report.objective.streams,
        report.reconnections
    )?;
    if let Some(compression) = &report.compression {
        writeln!(out, "  compressed  {}", compressed(compression))?;
    }
    if let Some(Deltas { pages, page_bytes, changed_bytes, mark_cpu_us, .. }) = &report.deltas {
        let (all, changed, cpu) = (bytes(*page_bytes), bytes(*changed_bytes), seconds(*mark_cpu_us));
        writeln!(out, "  changes     {changed} of {pages} pages ({all}), found in {cpu} of CPU")?;
    }
    if let Some(soft) = &report.soft {
        let left_out: u64 = report.rounds.iter().map(|round| round.soft_pages).sum();
        write!(out, "  left out    {} that the VM does not use", bytes(left_out.saturating_mul(PAGE_BYTES)))?;
        if soft.put_off_pages > 0 {
            write!(out, ", page cache among it")?;
        }
        writeln!(out)?;
        for note in &soft.notes {
            writeln!(out, "              {note}")?;
        }
    }
    writeln!(
        out,
        "  agents' CPU {} → {}",
        known(source.agent_cpu_us.map(seconds).as_deref()),
        known(destination.agent_cpu_us.map(seconds).as_deref())
    )?;
    writeln!(
        out,
        "  run state   {} → {}",
        known(Some(report.run_state_before.as_str()).filter(|state| !state.is_empty())),
        known(report.run_state_after.as_deref())
    )?;
    if let Some(verification) = &report.verification {
        let found = match verification.different_chunks {
            0 => "all equal".to_owned(),
            n => format!("{n} chunks differ"),
        };
        writeln!(
            out,
            "  verified    {} in {}: {found}",
            bytes(verification.compared_bytes),
            seconds(verification.duration_us)
        )?;
    }
    if !report.rounds.is_empty() {
        out.push('\n');
        out.push_str(&rounds(&report.rounds));
    }
    if let Some(downtime) = &report.downtime {
        out.push('\n');
        out.push_str(&parts(downtime));
    }
    for finding in &report.findings {
        writeln!(out, "\n{:?}: {}\n  {}", finding.severity, finding.what, finding.advice)?;
    }
    if !report.events.is_empty() {
        out.push('\n');
        for Event { at_us, what, detail } in &report.events {
            writeln!(out, "  {:>10}  {}", seconds(*at_us), format!("{what} {detail}").trim_end())?;
        }
    }
    Ok(())
}

/// What compression did, in a line.
fn compressed(compression: &Compression) -> String {
    let Compression { wanted, data_bytes, packed_bytes, wire_bytes, pack_cpu_us, ways } = compression;
    if *packed_bytes == 0 {
        return format!("nothing of {} ({wanted})", bytes(*data_bytes));
    }
    let plain = data_bytes.saturating_sub(*packed_bytes);
    let picked: Vec<_> = ways
        .iter()
        .map(|PickedWay { at_us, way, .. }| format!("{way} from {} on", seconds(*at_us)))
        .collect();
    let picked = if picked.is_empty() { String::new() } else { format!(": {}", picked.join(", ")) };
    format!(
        "{} of {} to {} in {} of CPU ({wanted}{picked})",
        bytes(*packed_bytes),
        bytes(*data_bytes),
        bytes(wire_bytes.saturating_sub(plain)),
        seconds(*pack_cpu_us)
    )
}

/// Of very many rounds so many are shown at the beginning, and at the end.
const FIRST_ROUNDS: usize = 8;
const LAST_ROUNDS: usize = 24;

/// Two tables, each of which fits on a terminal of 80 columns: how it went, and what was in the rounds.
fn rounds(all: &[Round]) -> String {
    let last = all.len().saturating_sub(LAST_ROUNDS).max(FIRST_ROUNDS.min(all.len()));
    let (first, rest) = all.split_at(FIRST_ROUNDS.min(all.len()));
    let left_out = last - first.len();
    let rounds: Vec<&Round> = first.iter().chain(&rest[left_out..]).collect();
    let number =
        |round: &Round| if round.stopped { format!("{}*", round.round) } else { round.round.to_string() };
    let went = |round: &Round| {
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
    let held = |round: &Round| {
        [
            number(round),
            round.dirty_pages.to_string(),
            round.data_pages.to_string(),
            empty_pages(round).saturating_add(round.soft_pages).to_string(),
            round.reference_pages.saturating_add(round.delta_pages).to_string(),
            milliseconds(round.scan_us),
            milliseconds(round.drain_us),
        ]
    };
    let heading = ["round", "sent", "took", "rate", "dirtied", "expected", "then"].map(str::to_owned);
    let mut text =
        table(&iter::once(heading).chain(rounds.iter().map(|round| went(round))).collect::<Vec<_>>());
    let heading = ["round", "dirty", "data", "empty", "there", "scan", "drain"].map(str::to_owned);
    text.push('\n');
    text.push_str(&table(
        &iter::once(heading).chain(rounds.iter().map(|round| held(round))).collect::<Vec<_>>(),
    ));
    if left_out > 0 {
        let _ = writeln!(
            text,
            "  {left_out} rounds after the first {FIRST_ROUNDS} are not shown; --json has them"
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

/// Pages of which next to nothing was sent, because there is next to nothing in them.
pub(super) fn empty_pages(round: &Round) -> u64 {
    [round.zero_pages, round.hole_pages, round.filled_pages].into_iter().fold(0, u64::saturating_add)
}

/// Columns as wide as they have to be, numbers to the right, what is decided and names to the left.
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

/// A number of bytes with a binary unit, as `1.5 MiB`.
pub fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be printed as 1024.0 of the smaller unit.
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", units[unit])
}

/// A rate, as `1.5 MiB/s`.
pub fn rate(bytes_per_s: u64) -> String {
    format!("{}/s", bytes(bytes_per_s))
}

/// A moment (RFC 3339, UTC) without its fraction of a second, as `2026-01-31T23:59:59Z`.
pub fn to_the_second(moment: &str) -> String {
    moment.split_once('.').map_or_else(|| moment.to_owned(), |(second, _)| format!("{second}Z"))
}

/// A duration in milliseconds, as `12.3 ms`.
pub fn milliseconds(us: u64) -> String {
    format!("{:.1} ms", us as f64 / 1e3)
}

/// A duration in seconds, as `1.234 s`.
pub fn seconds(us: u64) -> String {
    format!("{:.3} s", us as f64 / 1e6)
}

#[cfg(test)]
pub(super) mod tests {
    use proto::message::{Finding, RamBlock, Severity};
    use proto::{Epoch, HostId, MigrationId, VmName};

    use super::super::{Measured, Objective, Verification};
    use super::*;

    pub(in crate::report) fn sample() -> Report {
        let id = MigrationId { vm: VmName::new("web").unwrap(), epoch: Epoch(7) };
        let objective = Objective {
            policy: "pattern".into(),
            max_downtime_ms: 30,
            max_rounds: 30,
            on_limit: "abort".into(),
            streams: 4,
            bandwidth_bytes_per_s: None,
        };
        let mut report =
            Report::begin(id, HostId::new("alpha").unwrap(), HostId::new("beta").unwrap(), objective);
        report.ram_blocks = vec![RamBlock { name: "pc.ram".into(), bytes: 512 << 20, page_bytes: 4096 }];
        report.rounds = vec![
            Round {
                round: 1,
                pass: 1,
                dirty_pages: 131_072,
                data_pages: 1000,
                hole_pages: 130_072,
                sent_bytes: 4_100_000,
                duration_us: 12_345,
                decision: "another-round".into(),
                ..Round::default()
            },
            Round {
                round: 2,
                stopped: true,
                dirty_pages: 3,
                data_pages: 3,
                decision: "last".into(),
                ..Round::default()
            },
        ];
        report.downtime = Some(Downtime::from_measured(Measured {
            total_us: 10_000,
            stop_us: 500,
            last_pages_us: 2_000,
            last_scans_us: 700,
            save_us: 0,
            verify_us: 0,
            save_to_ready_us: 5_000,
            load_us: 3_000,
            continue_us: 1_000,
            stop_event_us: Some(400),
            resumed_us: Some(600),
        }));
        report.verification = Some(Verification {
            left_out_pages: 0,
            compared_bytes: 512 << 20,
            chunks: 256,
            different_chunks: 0,
            duration_us: 900_000,
        });
        report.findings = vec![Finding {
            severity: Severity::Warning,
            code: "unit-restarts".into(),
            what: "systemd restarts web.service".into(),
            advice: "set Restart=no".into(),
        }];
        report.event(1_000, "stopped", "");
        report.end(Outcome::Moved, None, 2_000_000);
        report
    }

    #[test]
    fn what_compression_did_is_one_line() {
        let mut compression = Compression {
            wanted: "auto".into(),
            data_bytes: 700 << 20,
            wire_bytes: 700 << 20,
            ..Compression::default()
        };
        assert_eq!(compressed(&compression), "nothing of 700.0 MiB (auto)");
        let picked = |at_us, way: &str| PickedWay { at_us, way: way.into(), link_bytes_per_s: 1 };
        compression.ways = vec![picked(210_000, "lz4"), picked(1_000_000, "zstd:3")];
        (compression.packed_bytes, compression.wire_bytes) = (500 << 20, 330 << 20);
        compression.pack_cpu_us = 1_500_000;
        assert_eq!(
            compressed(&compression),
            "500.0 MiB of 700.0 MiB to 130.0 MiB in 1.500 s of CPU (auto: lz4 from 0.210 s on, zstd:3 from 1.000 s on)"
        );
    }

    #[test]
    fn parts_add_up_whatever_was_measured() {
        let sum = |d: Downtime| {
            d.stop_us
                + d.last_pages_us
                + d.verify_us
                + d.device_state_us
                + d.load_us
                + d.handover_us
                + d.continue_us
        };
        let plain = sample().downtime.unwrap();
        assert_eq!((plain.handover_us, plain.device_state_us, sum(plain)), (1_500, 2_000, plain.total_us));
        assert_eq!(plain.events_us, Some(9_000));
        let odd = Downtime::from_measured(Measured {
            total_us: 5,
            load_us: 90,
            save_to_ready_us: 40,
            ..Measured::default()
        });
        assert_eq!((odd.total_us, sum(odd)), (40, 40));
    }

    #[test]
    fn text_holds_what_matters() {
        let text = render(&sample());
        for expected in [
            "web#7 from alpha to beta: moved",
            "downtime    10.0 ms of 30 ms allowed",
            "all equal",
            "Warning: systemd restarts web.service",
            "* with the guest stopped",
        ] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
        let table: Vec<_> = text.lines().skip_while(|line| !line.contains("drain")).take(3).collect();
        let at = |line: &str, word: &str| line.find(word).map(|at| line[..at].chars().count() + word.len());
        assert_eq!(at(table[0], "dirty"), at(table[1], "131072"), "columns are aligned:\n{text}");
    }

    #[test]
    fn of_very_many_rounds_the_first_and_the_last_are_shown() {
        let many = |count: u32| -> Vec<Round> {
            (1..=count)
                .map(|round| Round { round, dirty_pages: 7_000 + u64::from(round), ..Round::default() })
                .collect()
        };
        assert!(!rounds(&many(32)).contains("not shown") && rounds(&many(32)).contains("7009"));
        let text = rounds(&many(100));
        assert!(text.contains("68 rounds after the first 8 are not shown"), "{text}");
        assert!(text.contains("7008") && !text.contains("7009"), "{text}");
        assert!(!text.contains("7076") && text.contains("7077") && text.contains("7100"), "{text}");
        assert!(!rounds(&[]).contains("not shown"));
    }

    /// With numbers as large as they come, but for the length of a VM's name, paths and reasons.
    #[test]
    fn text_fits_on_a_terminal() {
        let mut report = sample();
        let large = Round {
            round: 999,
            pass: 99,
            dirty_pages: 1_000_000_000,
            disk_pages: 1_000_000_000,
            data_pages: 1_000_000_000,
            zero_pages: 1_000_000_000,
            hole_pages: 1_000_000_000,
            filled_pages: 1_000_000_000,
            soft_pages: 1_000_000_000,
            reference_pages: 1_000_000_000,
            delta_pages: 1_000_000_000,
            left_pages: 1_000_000_000,
            resent_pages: 1_000_000_000,
            pattern: Some(engine::precopy::Pattern::Resent),
            refused_pages: 1_000_000_000,
            sent_bytes: 1000 << 40,
            duration_us: 999_999_900,
            scan_us: 9_999_900,
            drain_us: 9_999_900,
            rate_bytes_per_s: 1000 << 20,
            dirty_rate_bytes_per_s: 1000 << 20,
            expected_downtime_us: Some(99_999_900),
            decision: "another-round".into(),
            stopped: true,
        };
        report.rounds.push(large);
        let wide: Vec<_> =
            render(&report).lines().filter(|line| line.chars().count() > 80).map(str::to_owned).collect();
        assert!(wide.is_empty(), "{wide:#?}");
    }

    #[test]
    fn json_names_its_schema_and_reads_back() {
        let report = sample();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["schema"], "whimbrel.report/1");
        assert_eq!(json["vm"], "web");
        assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
    }

    #[test]
    fn units_do_not_overflow_their_columns() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1 << 20), "1.0 MiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!(super::super::rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert!(super::super::rfc3339(u64::MAX).starts_with("9999-12-31"));
    }
}
