//! Findings of the destination's check that come from its command line, its emulator and its connections.

use std::error::Error;
use std::path::Path;

use proto::message::{Finding, Severity};
use proto::{HostId, MigrationId, Purpose};
use qemu::describe::Problem;
use qemu::preflight as rules;

use crate::Context;
use crate::peers;

/// Converts problems of a VM's description to findings.
pub(super) fn problems(problems: &[Problem]) -> Vec<Finding> {
    let blocker = |problem: &Problem| Finding {
        severity: Severity::Blocker,
        code: problem.code.clone(),
        what: problem.what.clone(),
        advice: problem.advice.clone(),
    };
    problems.iter().map(blocker).collect()
}

/// Returns the finding for facts of the source that this host cannot read, or cannot store.
pub(super) fn unreadable(what: &str, error: &dyn Error) -> Finding {
    Finding {
        severity: Severity::Blocker,
        code: "agents-incompatible".to_owned(),
        what: format!("{what}: {}", crate::chain(error)),
        advice: "use the same version of whimbrel on both hosts".to_owned(),
    }
}

/// Returns the finding for a QEMU that cannot be asked about itself.
pub(super) fn no_qemu_starts(program: &Path, error: &dyn Error) -> Finding {
    Finding {
        severity: Severity::Blocker,
        code: "no-qemu-starts".to_owned(),
        what: format!("{} does not start: {}", program.display(), crate::chain(error)),
        advice: "name a QEMU that works under [qemu] binaries on the destination".to_owned(),
    }
}

/// Returns findings about endpoints that users of the VM find at another path or address here.
pub(super) fn changed_paths(here: &HostId, notes: &[String]) -> impl Iterator<Item = Finding> {
    notes.iter().map(move |note| Finding {
        severity: Severity::Info,
        code: "path-changes".to_owned(),
        what: format!("on {here}, {note}"),
        advice: "find it there after the migration".to_owned(),
    })
}

/// Checks that this host can connect to the source, which a destination in doubt has to ask. The problem is found
/// before there is any doubt.
pub(super) fn unreachable_source_finding(
    context: &Context,
    from: &HostId,
    id: &MigrationId,
    reply_to: &str,
) -> Option<Finding> {
    let purpose = Purpose::Handover { migration: id.clone() };
    let error = peers::connect(context, from, Some(reply_to), purpose).err()?;
    Some(Finding {
        severity: Severity::Warning,
        code: "source-unreachable".to_owned(),
        what: format!(
            "{} must connect to {from} when a handover is interrupted, and cannot: {}",
            context.config.host,
            crate::chain(&error)
        ),
        advice: format!("name the source's address under [hosts.{from}] in the destination's configuration"),
    })
}

/// Returns findings about options that the command line here lacks.
pub(super) fn left_out(warnings: &[Problem]) -> impl Iterator<Item = Finding> {
    warnings.iter().map(|left_out| Finding {
        severity: Severity::Warning,
        code: left_out.code.clone(),
        what: left_out.what.clone(),
        advice: left_out.advice.clone(),
    })
}

/// Converts a finding of the comparison to one of the protocol.
pub(super) fn finding(found: rules::Finding) -> Finding {
    Finding {
        severity: match found.severity {
            rules::Severity::Blocker => Severity::Blocker,
            rules::Severity::Warning => Severity::Warning,
            rules::Severity::Info => Severity::Info,
        },
        code: found.code,
        what: found.what,
        advice: found.advice,
    }
}
