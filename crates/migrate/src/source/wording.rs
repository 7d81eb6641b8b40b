//! Texts about a migration for users of the source.

use engine::handover::MigrationTerms;
use engine::handover::source::SourceReport;

/// Returns the text of a report. `shutdown_reason` asks QEMU for the reason of its end, and is called only if the text
/// has it.
pub(super) fn report(
    report: SourceReport,
    terms: &MigrationTerms,
    shutdown_reason: impl FnOnce() -> Option<String>,
) -> String {
    let (vm, to) = (&terms.migration.vm, &terms.destination);
    match report {
        SourceReport::Cancelled => "cancelled; the VM is here".to_owned(),
        SourceReport::Failed => "failed; the VM is here".to_owned(),
        SourceReport::PeerGaveUp => format!("{to} does not accept the VM; it is here"),
        SourceReport::Interrupted => {
            "the agent was restarted during the migration; the VM is here".to_owned()
        }
        SourceReport::VmCrashed => qemu_end(shutdown_reason().as_deref()).to_owned(),
        SourceReport::QemuLost => {
            format!(
                "this host's QEMU has ended, and {to} may have the only copy; this agent asks {to}. Do not \
                 start {vm} on this host"
            )
        }
        SourceReport::Returned => format!("{to} could not run the VM; it is here again"),
        SourceReport::Incomplete => {
            format!("the VM runs at {to}; some of its memory is still here")
        }
        SourceReport::NeededThere => format!(
            "the VM runs at {to}, which cannot be reached; some of its memory is only here, and the VM \
             waits when it needs that memory: repair the link, or see `whimbrel recover {vm}`"
        ),
        SourceReport::MemoryLost => format!(
            "the VM runs at {to}, but some of its memory was only here and is lost: it will hang there. \
             Restart it there, from the disks that it has at {to}"
        ),
        SourceReport::Done => format!("the VM is at {to}"),
        SourceReport::TooLate => "too late to cancel: the commit point has been passed".to_owned(),
        SourceReport::OperatorNeeded => format!(
            "{to} cannot be reached after the commit point, and there is no registry; repair the link, \
             or see `whimbrel recover {vm}`"
        ),
        SourceReport::DestinationOwns => {
            format!("according to the registry {to} owns the VM; waiting for it")
        }
        SourceReport::ForeignRecord => {
            format!("the registry's record of {vm} does not fit this migration; see `whimbrel recover {vm}`")
        }
        SourceReport::DestinationCrashed => format!(
            "the copy at {to} is lost and may have run; this host's stopped copy is kept, see `whimbrel \
             recover {vm}`"
        ),
        SourceReport::ContinueFailed => "QEMU does not resume the guest; trying again".to_owned(),
        SourceReport::Contradiction => {
            format!(
                "{to} reports that it runs {vm}, which this host owns: two copies may be running; check \
                 both hosts immediately"
            )
        }
        SourceReport::CopyLost => {
            format!("this host's stopped copy is lost; only the copy at {to} is left")
        }
    }
}

/// Returns why a QEMU ended, by the reason of its SHUTDOWN event.
pub(super) fn qemu_end(shutdown_reason: Option<&str>) -> &'static str {
    match shutdown_reason {
        Some("guest-shutdown") => "the guest shut itself down",
        Some("host-qmp-quit" | "host-ui") => "QEMU received a quit request",
        Some("host-signal") => "QEMU was ended by a signal",
        Some("guest-panic") => "the guest panicked",
        _ => "QEMU ended by itself: it crashed, or was killed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A QEMU that lives has no such reason, and its monitor need not be read.
    #[test]
    fn qemu_is_asked_only_for_the_reason_of_its_end() {
        let terms = host::testing::terms("a", "b");
        let asked = |report| {
            let mut is_asked = false;
            let shutdown_reason = || {
                is_asked = true;
                Some("guest-panic".to_owned())
            };
            let text = self::report(report, &terms, shutdown_reason);
            (text, is_asked)
        };
        assert_eq!(asked(SourceReport::VmCrashed), ("the guest panicked".to_owned(), true));
        assert_eq!(asked(SourceReport::Done), ("the VM is at b".to_owned(), false));
    }
}
