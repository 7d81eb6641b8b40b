//! Post-copy after COMMITTED: connections that were cut are made anew for as long as the destination needs pages, by
//! the agent that began post-copy or by the next one.

use host::SourceVm;
use std::sync::Arc;
use std::time::Duration;

use ::memory::Sender;
use engine::handover::QemuAtStart;
use engine::handover::source::{SourceEvent, SourceState};
use engine::session::{ServingAttempt, ServingContext, ServingStep};
use proto::message::{Message, PageRequest, Proposal};
use tracing::{info, warn};

use crate::source::failure::Failure;
use crate::source::inbox::SourceNotice;
use crate::source::post_copy_server::PostCopyServer;
use crate::source::stages::SourceStage;
use crate::source::streams::OpenedStreams;
use crate::source::{SourceDetails, SourceDriver};
use crate::unexpected_page;
use host::ram::JournalledRegion;

/// Result of an attempt to make new connections for pages.
enum Resumption {
    /// Pages are sent over them.
    Serving,
    /// The destination needs no more pages.
    Unneeded,
}

impl SourceDriver {
    /// Sets the proposal that an agent before this one sent to the destination.
    pub fn proposed(&mut self, proposal: Option<Proposal>) {
        self.agreement.proposal = proposal;
    }

    /// Attaches the VM like [`found`](Self::found); the pages that the destination's guest may need become readable
    /// again.
    pub fn found_with(&mut self, vm: SourceVm, details: Option<&SourceDetails>) -> QemuAtStart {
        let found = self.found(vm);
        if let Some(regions) = details.and_then(|details| details.post_copied_regions.clone()) {
            self.resources.stage = SourceStage::Unread(regions);
        }
        if self.session.may_be_needed() {
            self.read_left_memory();
        }
        if matches!(self.session.state(), SourceState::Committed { has_run: true, .. }) {
            // The agent before this one may have died before it called this.
            self.resources.participants.running();
        }
        found
    }

    /// Makes the memory readable that an agent before this one has left to send. If that fails, the state's repetition
    /// tries again.
    fn read_left_memory(&mut self) {
        let Some(left) = self.resources.stage.take_unread() else { return };
        let Some(vm) = self.resources.vm.as_ref().filter(|vm| vm.is_alive()) else { return };
        let regions: Vec<_> = left.iter().map(JournalledRegion::region).collect();
        let readers = match ::memory::open_source(&vm.process, &regions) {
            Ok(readers) => readers,
            Err(error) => {
                let error = crate::chain(&error);
                warn!(error, "cannot read yet the memory that the destination may request");
                self.resources.stage = SourceStage::Unread(left);
                return;
            }
        };
        let mut server = PostCopyServer::new(
            readers.into(),
            ::memory::RecentWrites::default(),
            self.telemetry.remaining(),
            Arc::clone(&self.controls.rate),
        );
        // The earlier agent's push policy cannot be continued: its measurements are lost.
        server.before = self.controls.report(|report| {
            report.traces.others.push = None;
            report.post_copy.unwrap_or_default()
        });
        self.resources.stage = SourceStage::resumed(server);
    }

    /// Handles the end of post-copy over a set of connections; there is no error if the destination has all pages.
    pub(super) fn handle_serving_end(&mut self, error: Option<String>) {
        let Some(serving) = self.resources.stage.server_mut().and_then(|server| server.serving.take()) else {
            return;
        };
        drop(serving);
        if let Some(server) = self.resources.stage.server_mut() {
            server.is_complete = error.is_none();
            server.lost = error;
        }
        // If this agent dies before the next connections exist, the report has the decisions made until now.
        self.report_served();
        self.keep_report();
    }

    /// Makes new connections if the destination may need pages and there are none.
    pub(super) fn reconnect_serving(&mut self) {
        if !self.session.may_be_needed() {
            return;
        }
        self.read_left_memory();
        let is_cut = self.resources.stage.server().is_some_and(PostCopyServer::is_cut);
        let last = self.connections.generation;
        let Some(attempt) = self.session.reconnect_serving(is_cut, last) else { return };
        if let Some(error) = self.resources.stage.server_mut().and_then(|server| server.lost.take()) {
            self.note("link-lost", error);
        }
        self.connections.generation = attempt.generation();
        match self.resume_serving(attempt) {
            Ok(Resumption::Serving) => {
                self.note("reconnected", format!("generation {}", self.connections.generation));
                self.controls.report(|report| report.reconnections += 1);
                self.telemetry.update(|progress| progress.reconnections += 1);
                info!(
                    migration = %self.terms.migration,
                    generation = %self.connections.generation,
                    "sending of pages continues"
                );
            }
            Ok(Resumption::Unneeded) => {
                info!(migration = %self.terms.migration, "the destination needs no pages");
            }
            Err(failure) => {
                warn!(
                    migration = %self.terms.migration,
                    reason = failure.reason,
                    "no connections for sending pages yet"
                );
                self.connections.control = None;
            }
        }
    }

    fn resume_serving(&mut self, mut attempt: ServingAttempt) -> Result<Resumption, Failure> {
        let control =
            self.connect_control().map_err(|error| Failure::peer("cannot reach the destination", &error))?;
        let connection_id = control.connection_id;
        self.connections.control = Some(control);
        self.send_message(&Message::Resume)?;
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        attempt.asked(self.clock.read(), patience);
        loop {
            let facts = ServingContext {
                has_server: self.resources.stage.server().is_some(),
                has_control: self.connections.control.is_some(),
            };
            let until = match attempt.next_step(facts, self.clock.read()) {
                ServingStep::AwaitResumed(until) => until,
                ServingStep::OpenStreams => break,
                ServingStep::Unneeded => return Ok(Resumption::Unneeded),
                ServingStep::ControlLost => return Err(self.control_loss()),
                ServingStep::Silent => {
                    return Err(Failure::new(SourceEvent::PeerSilent, "the destination does not answer"));
                }
            };
            match self.inbox.wait(self.clock.instant(until)) {
                Some(SourceNotice::Message { connection_id: Some(from), message: Message::Resumed })
                    if from == connection_id =>
                {
                    attempt.resumed();
                }
                Some(notice) => {
                    self.clock.read();
                    self.notice(notice);
                }
                None => {}
            }
        }
        self.open_serving()?;
        Ok(Resumption::Serving)
    }

    /// Opens the streams of the present generation, and serves over them.
    fn open_serving(&mut self) -> Result<(), Failure> {
        let opened =
            self.connect_streams().map_err(|error| Failure::peer("cannot open the data streams", &error))?;
        let OpenedStreams { data, page_stream } = opened;
        let (Some(server), Some(page_stream)) = (self.resources.stage.server_mut(), page_stream) else {
            return Err(self.control_loss());
        };
        let sender = Sender::with_reductions(server.readers.clone(), server.reductions.clone(), data)
            .map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        // The guest has left this host.
        sender.handle().set_niceness(0);
        sender.handle().stop_direct_placement();
        self.telemetry.follow(Some(sender.handle()));
        server
            .serve(self.connections.generation, sender, page_stream, self.inbox.mailbox())
            .map_err(|error| Failure::local("cannot start a thread to send pages", &error))
    }

    /// Records that the destination found a page present that post-copy was to send, and has stopped the guest.
    pub(super) fn record_unexpected_page(&mut self, page: Option<PageRequest>) {
        let Some(page) = page.filter(|_| !self.reporter.has_unexpected_page) else { return };
        self.reporter.has_unexpected_page = true;
        let ram = self.agreement.proposal.as_ref().map_or(&[][..], |proposal| &proposal.ram);
        let (to, page_message) = (&self.terms.destination, unexpected_page::page_message(page, ram));
        let page_message =
            format!("the VM was stopped at {to}: {page_message}; see `whimbrel vm show` there");
        self.note("unexpected-page", &*page_message);
        self.record_reason(&page_message);
    }

    /// Updates the report with the pages sent until now and the policy's decisions.
    pub(super) fn report_served(&mut self) {
        let Some(server) = self.resources.stage.server() else { return };
        self.controls.report(|report| {
            let remaining_pages = report.post_copy.map_or(0, |before| before.remaining_pages);
            report.post_copy = Some(server.statistics(remaining_pages));
            server.counted.push_policy().update_report(&mut report.traces.others.push);
        });
    }
}
