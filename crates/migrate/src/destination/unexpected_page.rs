//! Reaction to an [unexpected page](crate::unexpected_page): this copy is not run, or the guest is stopped.

use engine::handover::destination::{DestinationReport, DestinationState};
use serde_json::Value;
use tracing::{error, warn};

use super::DestinationDriver;
use super::post_copy_receiver::PostCopyReceiver;
use crate::unexpected_page::page_message;
use host::missing_pages_record::UnexpectedPage;
use store::journal::Durability;

impl DestinationDriver {
    /// Returns the recorded page, if there is one.
    pub(super) fn unexpected_page(&self) -> Option<UnexpectedPage> {
        self.resources.vm.as_ref()?.artifacts.missing_pages.as_ref()?.unexpected_page
    }

    /// Returns the message about the page, if there is one.
    pub(super) fn unexpected_page_message(&self) -> Option<String> {
        self.unexpected_page().map(|unexpected_page| page_message(unexpected_page.page, &self.proposal.ram))
    }

    /// Records a page that was found, and destroys the copy or stops the guest.
    pub(super) fn check_unexpected_page(&mut self) {
        let found = self.resources.stage.missing().and_then(PostCopyReceiver::unexpected_page);
        if let Some(page) = found.filter(|_| self.unexpected_page().is_none()) {
            self.record_unexpected_page(UnexpectedPage { page, is_stopped: false });
            error!(
                migration = %self.terms.migration,
                why = self.unexpected_page_message(),
                "the guest must not run with an unexpected page"
            );
        }
        match (self.unexpected_page_message(), self.session.state()) {
            (Some(page_message), DestinationState::Prepared) => self.fail(&page_message),
            (Some(_), DestinationState::Completing { .. }) => self.stop_for_unexpected_page(),
            // Nothing can be decided here yet; the page is checked before the guest is continued.
            _ => {}
        }
    }

    /// True if the guest is still to be stopped.
    pub(super) fn is_to_be_stopped(&self) -> bool {
        self.unexpected_page().is_some_and(|unexpected_page| !unexpected_page.is_stopped)
    }

    fn stop_for_unexpected_page(&mut self) {
        let Some(unexpected_page) =
            self.unexpected_page().filter(|unexpected_page| !unexpected_page.is_stopped)
        else {
            return;
        };
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
        self.record_unexpected_page(UnexpectedPage { is_stopped: true, ..unexpected_page });
        self.reporter.last_report = None;
        self.report_to_user(DestinationReport::Incomplete);
        self.send_incomplete();
    }

    fn record_unexpected_page(&mut self, unexpected_page: UnexpectedPage) {
        let Some(vm) = &mut self.resources.vm else { return };
        if let Some(record) = &mut vm.artifacts.missing_pages {
            record.unexpected_page = Some(unexpected_page);
        }
        if let Err(error) = vm.artifacts.keep(&self.context, &self.terms.migration, Durability::Process) {
            warn!(error = crate::chain(&error), "cannot record an unexpected page in the journal");
        }
    }
}
