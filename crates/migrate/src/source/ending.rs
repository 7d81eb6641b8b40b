//! Reports of a migration to users, and its last journal entries.

use host::SourceVm;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::source::{SourceReport, SourceState};
use tracing::{error, info, warn};

use super::inbox::SourceNotice;
use super::stages::{Committed, SourceStage};
use super::{SourceDetails, SourceDriver, reports, wording};
use api::progress::{Phase, Standing};
use api::report::Outcome;
use host::cpu::CpuTime;
use store::journal::{Durability, JournalError};

/// Longest wait for the last messages of the destination, which itself waits a second for the guest's first frames.
const LAST_MESSAGES_WAIT: Duration = Duration::from_millis(1500);

impl SourceDriver {
    /// Records the reason of a migration's end. The first reason is the one that users need; later ones are only its
    /// consequences.
    pub(super) fn record_reason(&mut self, reason: &str) {
        self.telemetry.update(|progress| {
            progress.message.get_or_insert_with(|| reason.to_owned());
        });
        if self.reporter.reason.as_deref() == Some(reason) {
            return;
        }
        match self.context.journal.set_message(&self.terms.migration, reason) {
            Ok(()) => self.reporter.reason = Some(reason.to_owned()),
            Err(error) => warn!(error = crate::chain(&error), "cannot record the reason in the journal"),
        }
    }

    pub(super) fn report_to_user(&mut self, report: SourceReport) {
        let is_needed = self.resources.stage.server().is_some()
            || matches!(self.session.state(), SourceState::Committed { has_run: true, .. });
        let is_lost = is_needed && !self.resources.vm.as_ref().is_some_and(SourceVm::is_alive);
        let report = reports::with_lost_memory(report, is_lost);
        let shutdown = || self.resources.vm.as_mut().and_then(SourceVm::shutdown_reason);
        let text = wording::report(report, &self.terms, shutdown);
        if self.reporter.reports.record(self.session.state().name(), report) {
            info!(migration = %self.terms.migration, text, "report");
            self.note("report", &*text);
        }
        let (reports, reason) = (&mut self.reporter.reports, self.reporter.reason.clone());
        self.telemetry.update(|progress| reports.show(report, text, reason, progress));
    }

    /// Finishes a migration that is over: last journal entries, report, final progress.
    pub(super) fn end(&mut self) {
        let sent = self.resources.stage.finish();
        let references = sent.as_ref().and_then(Committed::references);
        self.telemetry.follow(None);
        self.reporter.end_forecaster = None;
        self.await_abort_read();
        if let Some(state) = self.session.take_unjournalled() {
            self.retry_journal(&state);
        }
        self.finish_undoing();
        let standing = match self.session.state() {
            SourceState::Done { .. } => Standing::Done,
            _ if self.reporter.reports.outcome() == Some(Outcome::VmEnded) => Standing::VmEnded,
            _ => Standing::Failed,
        };
        if let SourceState::Done { run, .. } = *self.session.state() {
            let word = if run && !self.reporter.has_unexpected_page { "running" } else { "paused" };
            self.controls.report(|report| report.run_state_after = Some(word.to_owned()));
        }
        if let Some(vm) = &mut self.resources.vm {
            let state = vm.run_state();
            self.controls.report(|report| report.run_state_after = state);
        }
        let outcome = self.reporter.reports.outcome().unwrap_or(if standing == Standing::Done {
            Outcome::Moved
        } else {
            Outcome::Aborted
        });
        let reason = self.telemetry.now().message;
        let (sent, received) = self.telemetry.counted();
        let has_unexpected_page = self.reporter.has_unexpected_page;
        let (total_us, cpu_us) = (self.telemetry.elapsed_us(), self.reporter.cpu.map(CpuTime::used_us));
        self.controls.report(|report| {
            report.sent_bytes = sent;
            report.received_bytes = received;
            report.source.agent_cpu_us = cpu_us;
            report.end(
                outcome,
                reason.filter(|_| outcome != Outcome::Moved || has_unexpected_page),
                total_us,
            );
            report.record_outcome();
        });
        self.record_report();
        self.learn_for_forecasts();
        if standing == Standing::Done && self.await_last_messages() {
            self.record_report();
        }
        // The agent retries until the end is in the journal: otherwise the next agent would treat the VM as its own.
        while let Err(error) = self.close_in_journal(standing) {
            error!(
                migration = %self.terms.migration,
                error = crate::chain(&error),
                "cannot record the end of the migration in the journal yet"
            );
            thread::sleep(self.retry());
        }
        if let Some((first_disk, references)) = references.filter(|_| standing == Standing::Done) {
            self.remember_images(first_disk, &references);
        }
        self.telemetry.update(|progress| {
            progress.phase = Phase::Ended;
            progress.missing_pages = None;
            progress.standing = standing;
        });
    }

    fn record_report(&self) {
        let report = self.controls.report(|report| report.clone());
        if let Err(error) = self.context.journal.put_report(&report) {
            let id = &self.terms.migration;
            warn!(migration = %id, error = crate::chain(&error), "cannot record the report in the journal");
        }
    }

    /// Waits for the last messages of the destination's participants, which are sent after RUNNING. Returns true if one
    /// has arrived. Nothing depends on them but the report, which is in the journal by then.
    fn await_last_messages(&mut self) -> bool {
        let mut has_arrived = false;
        let is_expected = self.reporter.stop_clock.measured.total_us > 0;
        let Some(control) =
            self.connections.control.as_ref().filter(|_| is_expected).map(|it| it.connection_id)
        else {
            return has_arrived;
        };
        let until = Instant::now() + LAST_MESSAGES_WAIT;
        while self.resources.participants.expects_message() {
            match self.inbox.wait(until) {
                // The handover is over: later questions are answered from the journal.
                Some(SourceNotice::Message { message, .. }) => {
                    self.resources.participants.learn(&message);
                    has_arrived = true;
                }
                Some(SourceNotice::Lost { connection_id, .. }) if connection_id == control => break,
                Some(_) => {}
                None => break,
            }
        }
        has_arrived
    }

    /// Returns why the source's QEMU ended, by its own report.
    pub(super) fn qemu_end_reason(&mut self) -> &'static str {
        wording::qemu_end(self.resources.vm.as_mut().and_then(SourceVm::shutdown_reason).as_deref())
    }

    /// Makes the last journal entries.
    fn close_in_journal(&self, standing: Standing) -> Result<(), JournalError> {
        let (journal, id) = (&self.context.journal, &self.terms.migration);
        if standing == Standing::Done {
            journal.remove_vm(&id.vm)?;
        }
        if standing == Standing::VmEnded && *self.session.state() != SourceState::Idle {
            let details = serde_json::json!(SourceDetails {
                vm_ended: true,
                ..SourceDetails::of(&self.context, None, true)
            });
            journal.set_details(id, &details, Durability::Process)?;
        }
        if *self.session.state() == SourceState::Idle { Ok(()) } else { journal.close(id) }
    }

    /// Undoes again what could not be undone, for as long as a slow QEMU may need to answer; what the kernel has to
    /// confirm is undone without a QEMU, too. After that a user has to know.
    pub(super) fn finish_undoing(&mut self) {
        let until = Instant::now() + Duration::from_millis(self.context.config.timeouts.qmp_ms);
        while !self.resources.stage.remaining().is_empty() && Instant::now() < until {
            thread::sleep(self.retry());
            let vm = self.resources.vm.as_mut().filter(|vm| vm.is_alive());
            let remaining = self.resources.participants.undo(vm);
            self.resources.stage = SourceStage::Undone(remaining);
        }
        let text = self.resources.stage.remaining().join("; ");
        if text.is_empty() {
            return;
        }
        warn!(migration = %self.terms.migration, text);
        self.telemetry.update(|progress| {
            let before = progress.message.take().map_or_else(String::new, |before| before + "; ");
            progress.message = Some(before + &text);
        });
    }

    /// Waits until the destination has read ABORT, but only for a moment.
    pub(super) fn await_abort_read(&mut self) {
        let Some(aborted_control) = self.connections.aborted_control.take() else { return };
        let until = Instant::now() + self.retry();
        while let Some(notice) = self.inbox.wait(until) {
            if matches!(notice, SourceNotice::Lost { connection_id, .. } if connection_id == aborted_control.connection_id)
            {
                return;
            }
        }
    }

    /// Records the final state, and retries until it is in the journal.
    pub(super) fn retry_journal(&self, state: &SourceState) {
        while let Err(error) =
            self.context.journal.record_source(&self.terms.migration, state, Durability::Synced)
        {
            error!(
                migration = %self.terms.migration,
                error = crate::chain(&error),
                "cannot record ABORTED in the journal yet"
            );
            thread::sleep(self.retry());
        }
    }
}
