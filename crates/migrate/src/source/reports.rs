//! Effects of reports on what users see: the outcome of a migration, and its progress.

use engine::handover::source::SourceReport;

use api::progress::{Phase, Progress, Standing};
use api::report::Outcome;

/// Record of a migration's reports to users.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// The last report and the state that it was made in: it is not repeated at every repetition.
    last: Option<(&'static str, SourceReport)>,
    /// True if users were informed that the destination is unreachable, and not yet that it is reachable again.
    is_unreachable: bool,
    outcome: Option<Outcome>,
}

impl Reports {
    /// Records a report that was made in a state. Returns true if it is not the last one again.
    pub(super) fn record(&mut self, state: &'static str, report: SourceReport) -> bool {
        self.outcome = outcome_of(report).or(self.outcome);
        self.last.replace((state, report)) != Some((state, report))
    }

    /// Returns the migration's outcome, once a report has one.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// Shows a report in the progress. `reason` is the reason for the migration's end, if it has one: users need it
    /// more than the report's `text`.
    pub(super) fn show(
        &mut self,
        report: SourceReport,
        text: String,
        reason: Option<String>,
        progress: &mut Progress,
    ) {
        let has_outcome = outcome_of(report).is_some();
        let is_reached = has_outcome || report == SourceReport::Incomplete;
        let is_reached_again = is_reached
            && (std::mem::take(&mut self.is_unreachable) || progress.standing == Standing::InDoubt);
        self.is_unreachable |= report == SourceReport::NeededThere;
        if is_in_doubt(report) {
            progress.phase = Phase::InDoubt;
            progress.standing = Standing::InDoubt;
            progress.message = Some(text);
        } else if report == SourceReport::NeededThere {
            progress.message = Some(text);
        } else if is_reached_again {
            // Advice that was shown in the meantime is no longer valid.
            progress.message = Some(reason.unwrap_or(text));
            if report == SourceReport::Incomplete {
                // The VM's state is known again: pages are sent again.
                progress.standing = Standing::Underway;
            }
        } else {
            progress.message.get_or_insert(text);
        }
    }
}

/// Returns the report that users get. If memory that the destination needs is gone with this host's QEMU, this is worth
/// more than the state's own report.
pub(super) fn with_lost_memory(report: SourceReport, is_memory_lost: bool) -> SourceReport {
    match report {
        SourceReport::Incomplete | SourceReport::CopyLost | SourceReport::NeededThere if is_memory_lost => {
            SourceReport::MemoryLost
        }
        report => report,
    }
}

fn outcome_of(report: SourceReport) -> Option<Outcome> {
    match report {
        SourceReport::Cancelled => Some(Outcome::Cancelled),
        SourceReport::Returned => Some(Outcome::Returned),
        SourceReport::Done => Some(Outcome::Moved),
        SourceReport::VmCrashed => Some(Outcome::VmEnded),
        SourceReport::Failed | SourceReport::PeerGaveUp | SourceReport::Interrupted => Some(Outcome::Aborted),
        SourceReport::QemuLost
        | SourceReport::Incomplete
        | SourceReport::NeededThere
        | SourceReport::MemoryLost
        | SourceReport::TooLate
        | SourceReport::OperatorNeeded
        | SourceReport::DestinationOwns
        | SourceReport::ForeignRecord
        | SourceReport::DestinationCrashed
        | SourceReport::ContinueFailed
        | SourceReport::Contradiction
        | SourceReport::CopyLost => None,
    }
}

/// Returns true if users have to decide or to repair something before the migration goes on.
fn is_in_doubt(report: SourceReport) -> bool {
    matches!(
        report,
        SourceReport::QemuLost
            | SourceReport::OperatorNeeded
            | SourceReport::ForeignRecord
            | SourceReport::DestinationCrashed
            | SourceReport::MemoryLost
            | SourceReport::Contradiction
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shows the reports one after the other; returns the last message and standing.
    fn shown(reports: &[SourceReport], reason: Option<&str>) -> (String, Standing) {
        let (mut record, mut progress) = (Reports::default(), Progress::default());
        for report in reports {
            record.show(*report, format!("{report:?}"), reason.map(str::to_owned), &mut progress);
        }
        (progress.message.unwrap(), progress.standing)
    }

    #[test]
    fn the_first_message_stays_until_advice_replaces_it() {
        use SourceReport::{ContinueFailed, Failed, Incomplete, NeededThere, OperatorNeeded, TooLate};
        let table: [(&[SourceReport], &str, Standing); 7] = [
            (&[TooLate, ContinueFailed], "TooLate", Standing::Underway),
            (&[TooLate, OperatorNeeded], "OperatorNeeded", Standing::InDoubt),
            (&[OperatorNeeded, TooLate], "OperatorNeeded", Standing::InDoubt),
            // The destination is reached again.
            (&[OperatorNeeded, Incomplete], "Incomplete", Standing::Underway),
            (&[Incomplete, NeededThere], "NeededThere", Standing::Underway),
            (&[Incomplete, NeededThere, Incomplete, TooLate], "Incomplete", Standing::Underway),
            (&[NeededThere, Failed], "Failed", Standing::Underway),
        ];
        for (reports, message, standing) in table {
            assert_eq!(shown(reports, None), (message.to_owned(), standing), "{reports:?}");
        }
    }

    #[test]
    fn the_reason_replaces_advice_that_is_no_longer_valid() {
        use SourceReport::{Failed, Incomplete, NeededThere, OperatorNeeded};
        for reports in [[NeededThere, Failed], [OperatorNeeded, Incomplete]] {
            assert_eq!(shown(&reports, Some("the link")).0, "the link");
        }
        assert_eq!(shown(&[NeededThere], Some("the link")).0, "NeededThere");
    }

    #[test]
    fn only_a_report_that_differs_is_new_and_an_outcome_stays() {
        let mut reports = Reports::default();
        let mut record = |state, report| reports.record(state, report);
        assert!(record("aborting", SourceReport::ContinueFailed));
        assert!(!record("aborting", SourceReport::ContinueFailed));
        assert!(record("aborted", SourceReport::ContinueFailed));
        assert!(record("aborted", SourceReport::Cancelled));
        assert!(record("aborted", SourceReport::TooLate));
        assert_eq!(reports.outcome(), Some(Outcome::Cancelled));
    }

    #[test]
    fn lost_memory_is_reported_in_place_of_what_it_makes_worse() {
        use SourceReport::{CopyLost, Done, Incomplete, MemoryLost, NeededThere};
        for report in [Incomplete, CopyLost, NeededThere] {
            assert_eq!(with_lost_memory(report, true), MemoryLost);
            assert_eq!(with_lost_memory(report, false), report);
        }
        assert_eq!(with_lost_memory(Done, true), Done);
    }
}
