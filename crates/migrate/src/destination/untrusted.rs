//! A page that was still to arrive while the guest runs, and was present already.
//!
//! No such page is present when the waits begin: that is checked, and the migration ends if one is. A page that appears
//! later was written around the waits, by a process that has also mapped the guest's memory, or by a defect here or in
//! the kernel. Its content is foreign or old; the guest may have read it, and may have written to it since.
//!
//! So the page is not replaced, which would undo the guest's own writes or tear them. The guest does not run on with it
//! either, as it would not on hardware with corrupted memory: it would write results that depend on the page to its
//! disks.
//!
//! - As long as no virtual CPU has run, this copy is discarded, and the source goes on with memory that is right.
//! - After that the guest is stopped. The remaining pages arrive nevertheless, so that it does not depend on the other
//!   host as well; both hosts report the page to their users, who decide whether the guest is started again or goes on.
//!
//! Zero pages in a file's memory are only checked if a thread waits for them: to place the others would use memory. An
//! agent that takes over cannot distinguish such a page from one that its predecessor had placed and not yet recorded.

use host::{ArrivalArtifacts, DestinationDetails};

use engine::handover::destination::{DestinationReport, DestinationState};
use proto::limits::PAGE_BYTES;
use proto::message::{Finding, PageRequest, RamBlock as ProposedBlock, Severity};
use serde_json::Value;
use tracing::{error, warn};

use super::DestinationDriver;
use super::post_copy_receiver::PostCopyReceiver;
use host::Context;
use host::missing_pages_record::UntrustedPage;
use store::journal::{Durability, MigrationRecord};

impl DestinationDriver {
    /// Returns the recorded page, if there is one.
    pub(super) fn untrusted(&self) -> Option<UntrustedPage> {
        self.resources.vm.as_ref()?.artifacts.awaited.as_ref()?.untrusted
    }

    /// Returns the message about the page, if there is one.
    pub(super) fn untrusted_message(&self) -> Option<String> {
        self.untrusted().map(|untrusted| page_message(untrusted.page, &self.proposal.ram))
    }

    /// Records a page that was found, and discards the copy or stops the guest.
    pub(super) fn check_untrusted_page(&mut self) {
        let found = self.resources.stage.missing().and_then(PostCopyReceiver::untrusted);
        if let Some(page) = found.filter(|_| self.untrusted().is_none()) {
            self.record_untrusted(UntrustedPage { page, is_stopped: false });
            error!(
                migration = %self.terms.migration,
                why = self.untrusted_message(),
                "the guest must not run with an untrusted page"
            );
        }
        match (self.untrusted_message(), self.session.state()) {
            (Some(page_message), DestinationState::Prepared) => self.fail(&page_message),
            (Some(_), DestinationState::Completing { .. }) => self.stop_untrusted(),
            // Nothing can be decided here yet; the page is checked before the guest is continued.
            _ => {}
        }
    }

    /// True if the guest is still to be stopped.
    pub(super) fn is_to_be_stopped(&self) -> bool {
        self.untrusted().is_some_and(|untrusted| !untrusted.is_stopped)
    }

    fn stop_untrusted(&mut self) {
        let Some(untrusted) = self.untrusted().filter(|untrusted| !untrusted.is_stopped) else { return };
        // Until the next attempt other notices are processed.
        if !self.session.may_stop_guest(self.clock.now()) {
            return;
        }
        let Some(vm) = &mut self.resources.vm else { return };
        // QEMU answers when the virtual CPUs have the pages that they wait for. These may be behind a connection that
        // this driver has to replace: so the wait is short, and the command is repeated.
        if let Err(error) = vm.qmp().and_then(|qmp| qmp.run("stop", Value::Null)) {
            // The command may have lasted until its time-out.
            self.session.stop_again_after(self.clock.read(), self.retry());
            return error!(error = crate::chain(&error), "cannot stop the guest; trying again");
        }
        self.record_untrusted(UntrustedPage { is_stopped: true, ..untrusted });
        self.reporter.last_report = None;
        self.report_to_user(DestinationReport::Incomplete);
        self.send_incomplete();
    }

    fn record_untrusted(&mut self, untrusted: UntrustedPage) {
        let Some(vm) = &mut self.resources.vm else { return };
        if let Some(awaited) = &mut vm.artifacts.awaited {
            awaited.untrusted = Some(untrusted);
        }
        if let Err(error) = vm.artifacts.keep(&self.context, &self.terms.migration, Durability::Process) {
            warn!(error = crate::chain(&error), "cannot record an untrusted page in the journal");
        }
    }
}

/// Returns a message about the page.
pub(crate) fn page_message(PageRequest { block, page }: PageRequest, ram: &[ProposedBlock]) -> String {
    let name = ram.get(usize::from(block)).map_or("?", |block| &*block.name);
    let offset = page * PAGE_BYTES;
    format!(
        "a missing page of its memory (RAM block {name}, at or after {offset:#x}) was written by something \
         else before it arrived, and cannot be trusted"
    )
}

/// Returns the page that the journal has for an arrived or arriving VM.
pub fn of_record(record: &MigrationRecord) -> Option<PageRequest> {
    artifacts(record)?.awaited?.untrusted.map(|untrusted| untrusted.page)
}

fn artifacts(record: &MigrationRecord) -> Option<ArrivalArtifacts> {
    serde_json::from_value::<DestinationDetails>(record.details.clone()).ok().map(|details| details.artifacts)
}

/// Returns a finding for a VM that arrived, or is arriving, with such a page, as long as it runs in the same QEMU, and
/// not in one that was started since.
pub fn finding(context: &Context, record: &MigrationRecord, pid: Option<u32>) -> Option<Finding> {
    let page = of_record(record)?;
    if pid.is_some() && pid != artifacts(record)?.process.map(|(pid, _)| pid) {
        return None;
    }
    let proposal = context.journal.proposal(record.id()).ok().flatten();
    Some(Finding {
        severity: Severity::Warning,
        code: "page-not-trusted".to_owned(),
        what: page_message(page, proposal.as_ref().map_or(&[], |proposal| &proposal.ram)),
        advice: "find out which program writes to its memory; restart it from its disks, or resume it as it \
                 is with `cont` on its monitor"
            .to_owned(),
    })
}
