//! A page that was to come while the guest runs, and was there already.
//!
//! None is there when the waits begin: that is looked at, and the migration ends where one is. One that is there later was
//! written past the waits, by a process that has mapped the guest's memory as well, or by a mistake here or in the kernel.
//! What is in it is a stranger's, or old; the guest may have read it, and may have written to it since. So it is not
//! replaced, which would undo the guest's own writes or tear them; and the guest does not run on with it, as it would not
//! on hardware whose memory has lost what was in it: what it makes of the page it would write to its disks.
//!
//! - As long as no virtual CPU has run, this copy is given up, and the source goes on with memory that is right.
//! - After that the guest is stopped. The rest of its pages comes all the same, so that it does not wait for the other host
//!   as well; whoever it belongs to is told on both sides, and decides whether it is started again or goes on.
//!
//! Of pages of zeros in a file's memory only those are looked at for which somebody waits: to place the others would take memory.
//! An agent that takes over cannot tell such a page from one that its predecessor had placed and not yet noted.

use std::time::{Duration, Instant};

use engine::handover::destination::{DestinationReport, DestinationState};
use proto::limits::PAGE_BYTES;
use proto::message::{Finding, RamBlock as ProposedBlock, Severity, WantedPage};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::{error, warn};

use super::{DestinationDetails, Driver, Traces};
use crate::context::Context;
use crate::journal::{Durability, MigrationRecord};

/// What the journal keeps of it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Untrusted {
    /// The first that was found, or one of those that came with it and lie behind it.
    pub(crate) page: WantedPage,
    /// The guest was stopped for it: not again where somebody lets it go on.
    pub(super) is_stopped: bool,
}

impl Driver {
    /// What is known of one.
    pub(super) fn untrusted(&self) -> Option<Untrusted> {
        self.vm.as_ref()?.traces.awaited.as_ref()?.untrusted
    }

    /// What there is to say of it.
    pub(super) fn untrusted_said(&self) -> Option<String> {
        self.untrusted().map(|untrusted| said(untrusted.page, &self.proposal.ram))
    }

    /// Whether one was found, and what follows.
    pub(super) fn look_whether_trusted(&mut self) {
        let found = self.awaiting.as_ref().and_then(super::awaiting::Awaiting::untrusted);
        if let Some(page) = found.filter(|_| self.untrusted().is_none()) {
            self.note_untrusted(Untrusted { page, is_stopped: false });
            error!(migration = %self.terms.migration, why = self.untrusted_said(), "the guest must not run with it");
        }
        match (self.untrusted_said(), &self.state) {
            (Some(said), DestinationState::Prepared) => self.fail(&said),
            (Some(_), DestinationState::Completing { .. }) => self.stop_untrusted(),
            // Nothing can be decided here yet; it is looked at before the guest is continued.
            _ => {}
        }
    }

    /// Whether the guest is still to be stopped.
    pub(super) fn is_to_be_stopped(&self) -> bool {
        self.untrusted().is_some_and(|untrusted| !untrusted.is_stopped)
    }

    fn stop_untrusted(&mut self) {
        let Some(untrusted) = self.untrusted().filter(|untrusted| !untrusted.is_stopped) else { return };
        // In between whatever else comes is taken.
        if self.stop_again_at.is_some_and(|again| Instant::now() < again) {
            return;
        }
        let Some(vm) = &mut self.vm else { return };
        // It answers when the virtual CPUs have the pages that they wait for. These may be on the other side of a link that
        // is to be mended here: so it is not waited for for long, and asked again.
        if let Err(error) = vm.qmp().and_then(|qmp| qmp.run("stop", Value::Null)) {
            let retry = Duration::from_millis(self.context.config.timeouts.retry_ms);
            self.stop_again_at = Some(Instant::now() + retry);
            return error!(error = crate::chain(&error), "the guest is not stopped; it is tried again");
        }
        self.note_untrusted(Untrusted { is_stopped: true, ..untrusted });
        self.told = None;
        self.tell_user(DestinationReport::Incomplete);
        self.say_incomplete();
    }

    fn note_untrusted(&mut self, untrusted: Untrusted) {
        let Some(vm) = &mut self.vm else { return };
        if let Some(awaited) = &mut vm.traces.awaited {
            awaited.untrusted = Some(untrusted);
        }
        if let Err(error) = vm.traces.keep(&self.context, &self.terms.migration, Durability::Process) {
            warn!(error = crate::chain(&error), "a page that cannot be trusted is not in the journal");
        }
    }
}

/// In words.
pub(crate) fn said(WantedPage { block, page }: WantedPage, ram: &[ProposedBlock]) -> String {
    let name = ram.get(usize::from(block)).map_or("?", |block| &*block.name);
    let offset = page * PAGE_BYTES;
    format!(
        "a page of its memory that was to come (RAM block {name}, at or after {offset:#x}) was there already and cannot be \
         trusted"
    )
}

/// The page with which a VM has come, as the journal has it, or is coming.
pub(crate) fn of_record(record: &MigrationRecord) -> Option<WantedPage> {
    traces(record)?.awaited?.untrusted.map(|untrusted| untrusted.page)
}

fn traces(record: &MigrationRecord) -> Option<Traces> {
    serde_json::from_value::<DestinationDetails>(record.details.clone()).ok().map(|details| details.traces)
}

/// What is to be known of a VM that has come with one, or is coming: as long as it is that QEMU, and not one that was
/// started since.
pub(crate) fn finding(context: &Context, record: &MigrationRecord, pid: Option<u32>) -> Option<Finding> {
    let page = of_record(record)?;
    if pid.is_some() && pid != traces(record)?.process.map(|(pid, _)| pid) {
        return None;
    }
    let proposal = context.journal.proposal(record.id()).ok().flatten();
    Some(Finding {
        severity: Severity::Warning,
        code: "page-not-trusted".to_owned(),
        what: said(page, proposal.as_ref().map_or(&[], |proposal| &proposal.ram)),
        advice: "find out who else writes to its memory; start it again from its disks, or have it go on as it is with \
                 `cont` on its monitor"
            .to_owned(),
    })
}
