//! Messages to users about an arriving VM, and the last journal entries.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::destination::{DestinationReport, DestinationState};
use proto::MigrationId;
use tracing::{error, info, warn};

use super::DestinationDriver;
use super::participants::Leftover;
use api::progress::{Phase, Standing};
use host::Context;
use store::journal::{Durability, VmRecord};

impl DestinationDriver {
    pub(super) fn report_to_user(&mut self, report: DestinationReport) {
        let (vm, from) = (&self.terms.migration.vm, &self.terms.source);
        let why = self
            .reporter
            .reason
            .as_ref()
            .filter(|reason| !reason.is_empty())
            .map_or_else(String::new, |reason| format!(": {reason}"));
        let text = match report {
            DestinationReport::CopyDestroyed => {
                format!("the migration ended before the VM was complete, and nothing is left here{why}")
            }
            DestinationReport::SourceKept => format!("{from} keeps the VM; nothing is left here"),
            DestinationReport::OperatorNeeded => format!(
                "in doubt: {from} cannot be reached to find out whether {vm} runs there; repair the link, or \
                 see `whimbrel recover {vm}`"
            ),
            DestinationReport::TooLate => "this host can no longer cancel the migration".to_owned(),
            DestinationReport::Incomplete => {
                format!("the VM runs here; some of its memory is still at {from}")
            }
            DestinationReport::SourceNeeded => format!(
                "the VM waits for memory that is still at {from}, which cannot be reached: repair the link, \
                 or start its agent"
            ),
            DestinationReport::Active => "the VM is here".to_owned(),
            DestinationReport::Refused => {
                format!("this copy could not be started and has never run; {from} keeps the VM{why}")
            }
            DestinationReport::Crashed => {
                let places = self.resources.participants.places();
                let places = places.map_or_else(String::new, |places| format!("; {places}"));
                format!("QEMU exited after the VM was resumed; the VM crashed here{places}")
            }
            DestinationReport::Lost => {
                let right = self.resources.participants.places().map_or_else(String::new, |places| {
                    format!("; if it has run, {places}, otherwise those at {from}")
                });
                format!("the copy of {vm} is lost, and it is not known whether it has run here{right}")
            }
            DestinationReport::QemuLost => format!(
                "this host was rebooted while {vm} was arriving, and the copy is lost; asking {from} for the \
                 state of the VM"
            ),
            DestinationReport::ContFailed => "QEMU does not resume the guest; trying again".to_owned(),
            DestinationReport::ForeignRecord => {
                format!(
                    "the registry's record of {vm} does not fit this migration; see `whimbrel recover {vm}`"
                )
            }
        };
        let is_here = matches!(
            report,
            DestinationReport::Incomplete | DestinationReport::SourceNeeded | DestinationReport::Active
        );
        let text = match self.unexpected_page_message().filter(|_| is_here) {
            Some(notice) => format!("{text}; it was stopped: {notice}"),
            None => text,
        };
        let last_report = Some((self.session.state().name(), report));
        let is_repeated = self.reporter.last_report == last_report;
        self.reporter.last_report = last_report;
        if !is_repeated {
            info!(migration = %self.terms.migration, text, "report");
        }
        let doubt = matches!(report, DestinationReport::OperatorNeeded | DestinationReport::ForeignRecord);
        self.publisher.update(|progress| {
            if doubt {
                progress.phase = Phase::InDoubt;
                progress.standing = Standing::InDoubt;
            }
            progress.message = Some(text.clone());
        });
        if !is_repeated {
            record_message(&self.context, &self.terms.migration, &text);
        }
    }

    /// Reports what could not be removed from this host, and starts a thread that tries again: slow storage delays no
    /// migration.
    fn retry_removal(&mut self) {
        let left = self.resources.stage.take_leftovers();
        if left.is_empty() {
            return;
        }
        let notice = left.iter().map(|left| &*left.notice).collect::<Vec<_>>().join("; ");
        let before = self.publisher.now().message;
        self.publisher.update(|progress| progress.message = Some(notice.clone()));
        let (context, migration) = (Arc::clone(&self.context), self.terms.migration.clone());
        record_message(&context, &migration, &notice);
        let try_again = move || {
            if remove(&left, &context) {
                record_message(&context, &migration, before.as_deref().unwrap_or("nothing is left here"));
            }
        };
        if let Err(error) = thread::Builder::new().name("clear-up".to_owned()).spawn(try_again) {
            warn!(migration = %self.terms.migration, %error, "cannot start a thread to clear up");
        }
    }

    /// Sends the participants' last messages to the source, once they are complete; nothing waits for that.
    fn send_last_messages(&mut self) {
        let messages = self.resources.participants.last_messages();
        let mut open = std::mem::take(&mut self.connections.open);
        let send = move || {
            for message in messages {
                let message = message();
                for (writer, _) in open.values_mut() {
                    // The source may be gone: it has nothing left to do but its report.
                    drop(writer.send(&message));
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("last-messages".to_owned()).spawn(send) {
            warn!(%error, "the source does not receive the last messages of this migration");
        }
    }

    /// Ends the migration: the VM is one of this host's, or is gone from here.
    pub(super) fn end(&mut self) {
        if matches!(self.session.state(), DestinationState::Crashed { .. }) {
            let log = self.resources.vm.as_ref().map(|vm| qemu::process::log_tail(&vm.artifacts.log()));
            warn!(migration = %self.terms.migration, log, "last messages of its QEMU");
            self.destroy_copy();
        }
        let active = matches!(self.session.state(), DestinationState::Active { .. });
        if active {
            // A previous agent may have ended before it thawed QEMU: a VM that its user had paused gets no `cont`.
            self.thaw_qemu();
            self.send_last_messages();
            self.resources.participants.finish(self.resources.vm.as_ref());
        }
        let id = &self.terms.migration;
        let journal = &self.context.journal;
        let record = self.resources.vm.take_if(|_| active).map(|vm| {
            let description = self.proposal.description.clone();
            let process = (vm.process.pid(), vm.process.start_time());
            VmRecord::new(id.vm.clone(), description, process, &self.context.boot_id, vm.artifacts.qmp())
        });
        let enter = || {
            if let Some(record) = &record {
                journal.put_arrived_vm(record)?;
            }
            journal.close(id)
        };
        let mut entered = enter();
        // Until the end is in the journal, this agent must not forget the migration: it would not know its VM, or would
        // treat the VM's name as in use.
        while let Err(error) = entered {
            error!(
                migration = %id,
                error = crate::chain(&error),
                "cannot record the end of the migration in the journal yet"
            );
            thread::sleep(Duration::from_millis(self.context.config.timeouts.retry_ms));
            // The final state may be missing in the journal, too.
            entered = journal
                .record_destination(id, self.session.state(), Durability::Synced)
                .and_then(|()| enter());
        }
        self.retry_removal();
        self.publisher.update(|progress| {
            progress.phase = Phase::Ended;
            progress.missing_pages = None;
            progress.standing = if active { Standing::Done } else { Standing::Failed };
        });
    }
}

/// Tries to remove what was left for as long as storage may take. Returns true if all of it is gone.
fn remove(left: &[Leftover], context: &Context) -> bool {
    let timeouts = &context.config.timeouts;
    let until = Instant::now() + Duration::from_millis(timeouts.stall_ms);
    loop {
        thread::sleep(Duration::from_millis(timeouts.retry_ms));
        let kept = left.iter().filter(|left| !(left.remove)()).count();
        if kept == 0 || Instant::now() >= until {
            return kept == 0;
        }
    }
}

/// Records the message that users see for an ended migration.
fn record_message(context: &Context, migration: &MigrationId, text: &str) {
    if let Err(error) = context.journal.set_message(migration, text) {
        warn!(%migration, error = crate::chain(&error), "cannot record the message in the journal");
    }
}
