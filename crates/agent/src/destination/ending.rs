//! What people get to know of an arriving VM, and the last entries.

use std::thread;
use std::time::Duration;

use engine::handover::destination::{DestinationReport, DestinationState};
use tracing::{error, info, warn};

use super::Driver;
use crate::journal::{Durability, VmRecord};
use crate::progress::{Phase, Standing};

impl Driver {
    pub(super) fn tell_user(&mut self, report: DestinationReport) {
        let (vm, from) = (&self.terms.migration.vm, &self.terms.source);
        let text = match report {
            DestinationReport::Discarded => {
                "the migration ended before the VM was complete; nothing is left here".into()
            }
            DestinationReport::SourceKept => format!("{from} keeps the VM; nothing is left here"),
            DestinationReport::OperatorNeeded => format!(
                "in doubt: {from} cannot be asked whether {vm} runs there; mend the link, or see `whimbrel recover {vm}`"
            ),
            DestinationReport::TooLate => "too late to cancel here".to_owned(),
            DestinationReport::Incomplete => {
                format!("the VM runs here; some of its memory is still at {from}")
            }
            DestinationReport::SourceNeeded => format!(
                "the VM waits for memory that is still at {from}, which cannot be reached: mend the link, or start its agent"
            ),
            DestinationReport::Active => "the VM is here".to_owned(),
            DestinationReport::Refused => format!("this copy could not run and has not; {from} keeps the VM"),
            DestinationReport::Crashed => {
                "QEMU ended after it was told to run; the VM crashed here".to_owned()
            }
            DestinationReport::Bereft => {
                format!("the host was booted with {vm} on its way here: the copy is gone")
            }
            DestinationReport::ContFailed => "QEMU does not continue the guest; trying again".to_owned(),
            DestinationReport::RegisterForeign => {
                format!(
                    "the register's record of {vm} does not fit this migration; see `whimbrel recover {vm}`"
                )
            }
        };
        let told = Some((self.state.name(), report));
        let again = self.told == told;
        self.told = told;
        if !again {
            info!(migration = %self.terms.migration, text, "report");
        }
        let doubt = matches!(report, DestinationReport::OperatorNeeded | DestinationReport::RegisterForeign);
        self.publisher.update(|progress| {
            if doubt {
                progress.phase = Phase::InDoubt;
                progress.standing = Standing::InDoubt;
            }
            progress.message = Some(text.clone());
        });
        if !again && let Err(error) = self.context.journal.set_message(&self.terms.migration, &text) {
            warn!(error = crate::chain(&error), "the message is not in the journal");
        }
    }

    /// The matter is settled: the VM is one of this host's, or nothing of it is left.
    pub(super) fn end(&mut self) {
        if matches!(self.state, DestinationState::Crashed { .. }) {
            let log = self.vm.as_ref().map(|vm| qemu::process::log_tail(&vm.traces.log()));
            warn!(migration = %self.terms.migration, log, "what its QEMU said last");
            self.discard();
        }
        let id = &self.terms.migration;
        let journal = &self.context.journal;
        let active = matches!(self.state, DestinationState::Active { .. });
        if active {
            // An agent before this one may have ended before it did so: one that was paused by its user gets no `cont`.
            self.let_go();
        }
        if let Some(vm) = self.vm.as_ref().filter(|_| active) {
            vm.forget_awaited();
        }
        let record = self.vm.take_if(|_| active).map(|vm| {
            let description = self.proposal.description.clone();
            let process = (vm.process.pid(), vm.process.start_time());
            VmRecord::new(id.vm.clone(), description, process, &self.context.boot_id, vm.traces.qmp())
        });
        let enter = || {
            if let Some(record) = &record {
                journal.put_arrived_vm(record)?;
            }
            journal.close(id)
        };
        let mut entered = enter();
        // Until it is in the journal, this agent must not forget it: it would not know its VM, or take the name for
        // taken.
        while let Err(error) = entered {
            error!(migration = %id, error = crate::chain(&error), "the end of the migration is not in the journal yet");
            thread::sleep(Duration::from_millis(self.context.config.timeouts.retry_ms));
            // The state that ended it may be missing, too.
            entered = journal.record_destination(id, &self.state, Durability::Synced).and_then(|()| enter());
        }
        self.publisher.update(|progress| {
            progress.phase = Phase::Ended;
            progress.standing = if active { Standing::Done } else { Standing::Failed };
        });
    }
}
