//! Taking up what an agent before this one left: every migration that the journal has open gets a driver, which learns
//! first of all what is there.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::handover::Found;
use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use proto::message::Proposal;
use tracee::ProcessError;
use tracing::{error, info, warn};

use super::Daemon;
use super::drive::{DestinationDetails, internal};
use crate::api::{Kind, Problem};
use crate::destination::{ArriveError, Arriving, Traces};
use crate::journal::{JournalError, MigrationRecord, State};
use crate::report::{Objective, Report};
use crate::source::{Aims, Controls, Details, SourceVm, VmError};

impl Daemon {
    /// Sets drivers to work on all open migrations. An agent that cannot read which they are must not begin: it would
    /// take VMs for its own that are between two hosts.
    pub(super) fn take_up(self: &Arc<Self>) -> Result<(), JournalError> {
        for record in self.context.journal.open_migrations()? {
            let id = record.id().clone();
            info!(migration = %id, role = %record.role(), state = record.state.name(), "taken up");
            let taken = match record.state.clone() {
                State::Source(state) => self.take_up_source(&record, state),
                State::Destination(state) => self.take_up_destination(&record, state),
            };
            if let Err(problem) = taken {
                error!(migration = %id, error = problem.error, "nobody is at work on it");
            }
        }
        Ok(())
    }

    fn take_up_source(self: &Arc<Self>, record: &MigrationRecord, state: SourceState) -> Result<(), Problem> {
        let kept = self.context.journal.vm(&record.terms.migration.vm).map_err(|error| internal(&error))?;
        let mut vm = match kept.map(|kept| SourceVm::find(&self.context, &kept)) {
            Some(Ok(vm)) => Some(vm),
            None | Some(Err(VmError::Process(ProcessError::Gone { .. } | ProcessError::Replaced { .. }))) => {
                None
            }
            // What cannot be looked at is not gone; to take it for gone could run the guest twice.
            Some(Err(error)) => {
                return Err(Problem::caused_by(
                    Kind::Internal,
                    &error,
                    "restart the agent when that is mended",
                ));
            }
        };
        if let Some(vm) = &vm {
            // An injector that was killed may have left a descriptor inside.
            match self.context.injector.close_leftovers(&vm.process, &[]) {
                Ok(0) => {}
                Ok(count) => {
                    info!(migration = %record.id(), count, "closed what an injector had left in QEMU");
                }
                Err(error) => {
                    warn!(migration = %record.id(), error = crate::chain(&error), "QEMU was not looked into");
                }
            }
        }
        let details: Option<Details> = serde_json::from_value(record.details.clone()).ok();
        let found = match &mut vm {
            Some(vm) => vm.found(),
            None => left_of_source(details.as_ref(), &self.context.boot_id),
        };
        let controls = Arc::new(self.controls_of(record));
        let (driver, driven) = self.source_driver(record.terms.clone(), state, vm, controls);
        self.place(record.id(), driven)?.work(move || drop(driver.run_on(found)));
        Ok(())
    }

    fn take_up_destination(
        self: &Arc<Self>,
        record: &MigrationRecord,
        state: DestinationState,
    ) -> Result<(), Problem> {
        let patience = Duration::from_millis(self.context.config.timeouts.qmp_ms);
        let details: Option<DestinationDetails> = serde_json::from_value(record.details.clone()).ok();
        let rebooted = details.as_ref().is_some_and(|details| details.boot_id != self.context.boot_id);
        let traces = details.map_or_else(
            || Traces::plan(&self.context.config.run_dir, record.id()),
            |details| details.traces,
        );
        // A QEMU that lives and does not answer is not gone; to take it for gone could run the guest twice.
        let mut vm = loop {
            match Arriving::find(traces.clone(), patience) {
                Ok(vm) => break Some(vm),
                Err(
                    ArriveError::Gone
                    | ArriveError::Process(ProcessError::Gone { .. } | ProcessError::Replaced { .. }),
                ) => break None,
                Err(error) => {
                    warn!(migration = %record.id(), error = crate::chain(&error), "QEMU lives and does not answer");
                    std::thread::sleep(Duration::from_millis(self.context.config.timeouts.retry_ms));
                }
            }
        };
        let found = match &mut vm {
            Some(vm) => vm.found(),
            None if rebooted => Found::Rebooted,
            None => Found::Gone,
        };
        let proposal =
            self.context.journal.proposal(record.id()).ok().flatten().unwrap_or_else(|| Proposal {
                reply_to: String::new(),
                streams: 1,
                ram: Vec::new(),
                facts: serde_json::Value::Null,
                description: serde_json::Value::Null,
                check_only: false,
                register_epoch: record.terms.register,
                ram_kind: None,
                allow_options: Vec::new(),
            });
        let (driver, driven) = self.destination_driver(record.terms.clone(), state, proposal, vm);
        self.place(record.id(), driven)?.work(move || drop(driver.run_on(found)));
        Ok(())
    }

    /// What a migration aimed at is of no use any more; its report goes on.
    fn controls_of(&self, record: &MigrationRecord) -> Controls {
        let limits = &self.context.config.limits;
        let aims = Aims {
            max_downtime_ms: limits.max_downtime_ms,
            max_rounds: limits.max_rounds,
            on_limit: limits.on_limit,
            streams: limits.streams,
            bandwidth_bytes_per_s: None,
            verify: false,
        };
        let report = self.context.journal.report(record.id()).ok().flatten().unwrap_or_else(|| {
            let terms = &record.terms;
            let objective: Objective = aims.objective();
            Report::begin(terms.migration.clone(), terms.source.clone(), terms.destination.clone(), objective)
        });
        Controls {
            rate: Arc::new(link::RateLimit::new(None)),
            aims: Mutex::new(aims),
            report: Mutex::new(report),
        }
    }
}

/// What a source finds whose QEMU is gone. Entries that may be missing after a reboot matter only if the destination had
/// accepted, which is synced before anything is sent.
fn left_of_source(details: Option<&Details>, boot_id: &str) -> Found {
    if details.is_some_and(|details| details.accepted && details.boot_id != boot_id) {
        Found::Rebooted
    } else {
        Found::Gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_was_never_accepted_has_nobody_to_ask_after_a_reboot() {
        let details = |accepted| Details { boot_id: "last".to_owned(), accepted };
        assert_eq!(left_of_source(None, "this"), Found::Gone);
        assert_eq!(left_of_source(Some(&details(false)), "this"), Found::Gone);
        assert_eq!(left_of_source(Some(&details(true)), "this"), Found::Rebooted);
        assert_eq!(left_of_source(Some(&details(true)), "last"), Found::Gone);
    }
}
