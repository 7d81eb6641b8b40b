//! Explanation of the amount of data that a migration sent, from its report.

use std::fmt::Write as _;

use proto::limits::PAGE_BYTES;

use super::numbers::bytes;
use super::text::{empty_pages, table};
use super::{Report, Round, reductions};

/// Reason for which pages were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// Disks are sent before memory.
    DisksFirst,
    /// The first pass over all memory.
    FirstTime,
    /// The guest wrote to them while it ran, or the destination could not apply a page reference or delta.
    Written,
    /// The guest was stopped.
    Stopped,
}

const CAUSES: [(Cause, &str); 4] = [
    (Cause::DisksFirst, "disks, first"),
    (Cause::FirstTime, "first time"),
    (Cause::Written, "written since"),
    (Cause::Stopped, "at the stop"),
];

/// Returns a text: pages by the reason for sending them and the form in which they were sent, and other sent data. Ends
/// with a newline.
pub fn explain(report: &Report) -> String {
    let heading =
        ["why", "pages", "empty", "hints", "there", "delta", "full", "of", "sent"].map(str::to_owned);
    let mut rows = vec![heading];
    let mut total = Round::default();
    let causes = causes(report);
    for (cause, why) in CAUSES {
        let mut sum = Round::default();
        let mut is_any = false;
        for (round, _) in report.rounds.iter().zip(&causes).filter(|(_, of)| **of == cause) {
            add(&mut sum, round);
            is_any = true;
        }
        if is_any {
            rows.push(row(why, &sum));
            add(&mut total, &sum);
        }
    }
    rows.push(row("all", &total));
    let mut text = format!("{} sent {}\n", report.migration, bytes(report.sent_bytes));
    text.push_str(&table(&rows));
    let rest = report.sent_bytes.saturating_sub(total.sent_bytes);
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "  {} more: device state, messages, encryption, rounds that were cut off",
        bytes(rest)
    );
    if total.refused_pages > 0 {
        let _ = writeln!(
            text,
            "  {} pages were refused as references by the destination, and sent again",
            total.refused_pages
        );
    }
    for explanation in reductions::explanations(report) {
        let _ = writeln!(text, "  {explanation}");
    }
    text
}

/// Returns the cause of each round.
fn causes(report: &Report) -> Vec<Cause> {
    let cause = |round: &Round| match round.pass {
        _ if round.stopped => Cause::Stopped,
        0 => Cause::DisksFirst,
        1 => Cause::FirstTime,
        _ => Cause::Written,
    };
    report.rounds.iter().map(cause).collect()
}

fn add(sum: &mut Round, round: &Round) {
    let pairs = [
        (&mut sum.dirty_pages, round.dirty_pages),
        (&mut sum.data_pages, round.data_pages),
        (&mut sum.zero_pages, round.zero_pages),
        (&mut sum.hole_pages, round.hole_pages),
        (&mut sum.filled_pages, round.filled_pages),
        (&mut sum.hinted_pages, round.hinted_pages),
        (&mut sum.reference_pages, round.reference_pages),
        (&mut sum.delta_pages, round.delta_pages),
        (&mut sum.refused_pages, round.refused_pages),
        (&mut sum.sent_bytes, round.sent_bytes),
    ];
    for (sum, more) in pairs {
        *sum = sum.saturating_add(more);
    }
}

fn row(why: &str, sum: &Round) -> [String; 9] {
    [
        why.to_owned(),
        sum.dirty_pages.to_string(),
        empty_pages(sum).to_string(),
        sum.hinted_pages.to_string(),
        sum.reference_pages.to_string(),
        sum.delta_pages.to_string(),
        sum.data_pages.to_string(),
        bytes(sum.dirty_pages.saturating_mul(PAGE_BYTES)),
        bytes(sum.sent_bytes),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::sample;
    use super::super::{Compression, Deltas};
    use super::Cause::{DisksFirst, FirstTime, Stopped, Written};
    use super::*;

    #[test]
    fn every_round_has_its_cause_and_nothing_is_counted_twice() {
        let mut report = sample();
        let disk =
            Round { dirty_pages: 10, disk_pages: 10, data_pages: 10, sent_bytes: 41_000, ..Round::default() };
        report.rounds.insert(0, disk);
        let later = Round {
            pass: 2,
            dirty_pages: 500,
            data_pages: 100,
            delta_pages: 400,
            sent_bytes: 450_000,
            ..Round::default()
        };
        // The first pass in two parts.
        report.rounds.insert(2, Round { pass: 1, dirty_pages: 7, data_pages: 7, ..Round::default() });
        report.rounds.insert(3, later.clone());
        report.rounds.insert(4, Round { refused_pages: 7, ..later });
        report.sent_bytes = 6_000_000;
        assert_eq!(causes(&report), [DisksFirst, FirstTime, FirstTime, Written, Written, Stopped]);
        report.compression =
            Some(Compression { data_bytes: 5 << 20, wire_bytes: 3 << 20, ..Compression::default() });
        report.deltas = Some(Deltas {
            page_bytes: 800 << 12,
            delta_bytes: 80_000,
            mark_cpu_us: 9_000,
            ..Deltas::default()
        });
        let text = explain(&report);
        for expected in [
            "web#7 sent 5.7 MiB",
            "written since    1000       0      0      0    800   200    3.9 MiB  878.9 KiB",
            "7 pages were refused",
            "compression saved 2.0 MiB",
            "deltas saved 3.0 MiB in 0.009 s of CPU",
        ] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_report_without_rounds_has_nothing_to_explain() {
        let mut report = sample();
        report.rounds.clear();
        assert!(explain(&report).contains("all      0"), "{}", explain(&report));
    }
}
