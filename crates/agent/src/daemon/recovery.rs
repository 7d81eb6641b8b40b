//! Resuming the migrations of a previous agent: every migration that is open in the journal gets a driver, which first
//! determines the state of its QEMU.

use host::{ArrivalArtifacts, ArrivalError, ArrivingVm, DestinationDetails, SourceVm, VmError};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::handover::QemuAtStart;
use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use proto::MigrationId;
use proto::message::Proposal;
use tracee::ProcessError;
use tracing::{error, info, warn};

use super::Daemon;
use api::Problem;
use api::report::Report;
use host::Context;
use host::ownership;
use migrate::source::{Goals, MigrationControls, SourceDetails};
use store::journal::{JournalError, MigrationRecord, State};

impl Daemon {
    /// Starts drivers for all open migrations. An agent that cannot read the list must not start: it would treat VMs
    /// that are between two hosts as its own.
    pub(super) fn resume_migrations(self: &Arc<Self>) -> Result<(), JournalError> {
        for record in self.context.journal.open_migrations()? {
            let id = record.id().clone();
            info!(
                migration = %id,
                role = %record.role(),
                state = record.state.name(),
                "resumed the migration"
            );
            if let Some(what) = ownership::witness_mismatch(&self.context, &record.terms) {
                error!(migration = %id, what, "the configuration names a different registry");
                if let Err(error) = self.context.journal.set_message(&id, &what) {
                    warn!(migration = %id, error = crate::chain(&error), "cannot record this in the journal");
                }
            }
            let taken = match record.state.clone() {
                State::Source(state) => self.resume_source(&record, state),
                State::Destination(state) => self.resume_destination(&record, state),
            };
            if let Err(problem) = taken {
                error!(migration = %id, error = problem.error, "cannot resume the migration");
            }
        }
        Ok(())
    }

    fn resume_source(self: &Arc<Self>, record: &MigrationRecord, state: SourceState) -> Result<(), Problem> {
        let details: Option<SourceDetails> = serde_json::from_value(record.details.clone()).ok();
        let controls = Arc::new(self.controls_of(record));
        let (mut driver, driven) = self.source_driver(record.terms.clone(), state, None, controls);
        driver.proposed(self.context.journal.proposal(record.id()).ok().flatten());
        let (context, id) = (Arc::clone(&self.context), record.id().clone());
        self.driver_slot(record.id(), driven)?.work(move || {
            // A QEMU that cannot be queried is not gone; to treat it as gone could run the guest twice.
            let vm = retry_until_known(&context, &id, || find_source_qemu(&context, &id, details.as_ref()));
            let found = if let Some(vm) = vm {
                driver.found_with(vm, details.as_ref())
            } else {
                let found = recovered_source_state(details.as_ref(), &context.boot_id);
                driver.found_gone(found, details.as_ref())
            };
            driver.run_on(found);
        });
        Ok(())
    }

    fn resume_destination(
        self: &Arc<Self>,
        record: &MigrationRecord,
        state: DestinationState,
    ) -> Result<(), Problem> {
        let patience = Duration::from_millis(self.context.config.timeouts.qmp_ms);
        let details: Option<DestinationDetails> = serde_json::from_value(record.details.clone()).ok();
        let rebooted = details.as_ref().is_some_and(|details| details.boot_id != self.context.boot_id);
        let artifacts = details.map_or_else(
            || ArrivalArtifacts::plan(&self.context.config, record.id()),
            |details| details.artifacts,
        );
        let proposal =
            self.context.journal.proposal(record.id()).ok().flatten().unwrap_or_else(|| Proposal {
                reply_to: String::new(),
                streams: 1,
                ram: Vec::new(),
                facts: serde_json::Value::Null,
                description: serde_json::Value::Null,
                check_only: false,
                registry_epoch: record.terms.registry,
                witness: record.terms.witness.clone(),
                ram_kind: None,
                allow_options: Vec::new(),
                disks: Vec::new(),
                delta_seed: None,
                post_copy: false,
                probe: None,
                redirection: None,
            });
        let (mut driver, driven) = self.destination_driver(record.terms.clone(), state, proposal);
        let (context, id) = (Arc::clone(&self.context), record.id().clone());
        self.driver_slot(record.id(), driven)?.work(move || {
            // A QEMU that lives and does not answer is not gone; to treat it as gone could run the guest twice.
            let vm =
                retry_until_known(&context, &id, || match ArrivingVm::find(artifacts.clone(), patience) {
                    _ if rebooted => Ok(None),
                    Ok(vm) => Ok(Some(vm)),
                    Err(
                        ArrivalError::Gone
                        | ArrivalError::Process(ProcessError::Gone { .. } | ProcessError::Replaced { .. }),
                    ) => Ok(None),
                    Err(error) => Err(error),
                });
            let found = match vm {
                Some(vm) => driver.found(vm),
                None if rebooted => QemuAtStart::Rebooted,
                None => QemuAtStart::Gone,
            };
            driver.run_on(found);
        });
        Ok(())
    }

    /// Restores the controls of a migration. Its goals do not matter any more, except the bandwidth; its report is
    /// continued.
    fn controls_of(&self, record: &MigrationRecord) -> MigrationControls {
        let config = &self.context.config;
        let report = self.context.journal.report(record.id()).ok().flatten();
        let settings = report.as_ref().map_or(&config.migration, |report| &report.settings).clone();
        let report = report.unwrap_or_else(|| {
            let terms = &record.terms;
            let (source, destination) = (terms.source.clone(), terms.destination.clone());
            Report::begin(terms.migration.clone(), source, destination, settings.clone())
        });
        let goals = Goals::restored(settings, config);
        // Times in the report count from the request, whichever agent received it.
        let since = Duration::from_millis(api::report::unix_ms_now().saturating_sub(report.started_unix_ms));
        let now = Instant::now();
        MigrationControls::new(goals, report, now.checked_sub(since).unwrap_or(now))
    }
}

/// Repeats `look` until it is known whether a QEMU exists. Runs on the driver's own thread, so that it delays no other
/// migration.
fn retry_until_known<T, E: std::error::Error>(
    context: &Context,
    id: &MigrationId,
    look: impl Fn() -> Result<Option<T>, E>,
) -> Option<T> {
    let mut last_error = String::new();
    loop {
        match look() {
            Ok(vm) => return vm,
            Err(error) => {
                let what = crate::chain(&error);
                if last_error != what {
                    warn!(migration = %id, error = what, "cannot inspect QEMU; trying again");
                    last_error = what;
                }
                std::thread::sleep(Duration::from_millis(context.config.timeouts.retry_ms));
            }
        }
    }
}

/// Returns the source's QEMU, or none if it is known to be gone.
fn find_source_qemu(
    context: &Context,
    id: &MigrationId,
    details: Option<&SourceDetails>,
) -> Result<Option<SourceVm>, SourceQemuError> {
    let kept = match details.and_then(|details| details.vm(&id.vm)) {
        Some(kept) => Some(kept),
        None => context.journal.vm(&id.vm)?,
    };
    let vm = match kept.map(|kept| SourceVm::find(context, &kept)) {
        Some(Ok(vm)) => vm,
        None | Some(Err(VmError::Process(ProcessError::Gone { .. } | ProcessError::Replaced { .. }))) => {
            return Ok(None);
        }
        Some(Err(error)) => return Err(error.into()),
    };
    // An injector that was killed may have left a descriptor inside.
    match context.injector.close_leftovers(&vm.process, &[]) {
        Ok(0) => {}
        Ok(count) => info!(
            migration = %id,
            count,
            "closed file descriptors that an injector had left in QEMU"
        ),
        Err(error) => warn!(
            migration = %id,
            error = crate::chain(&error),
            "cannot check QEMU for leftovers of an injector"
        ),
    }
    Ok(Some(vm))
}

/// Reason for which it is not known whether a source's QEMU exists.
#[derive(Debug, thiserror::Error)]
enum SourceQemuError {
    /// The journal could not be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The process could not be queried.
    #[error(transparent)]
    Vm(#[from] VmError),
}

/// Returns the state of a source whose QEMU is gone. Entries that may be missing after a reboot matter only if the
/// destination had accepted, which is synced before anything is sent.
fn recovered_source_state(details: Option<&SourceDetails>, boot_id: &str) -> QemuAtStart {
    if details.is_some_and(|details| details.accepted && details.boot_id != boot_id) {
        QemuAtStart::Rebooted
    } else {
        QemuAtStart::Gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unaccepted_source_asks_no_peer_after_a_reboot() {
        let details = |accepted| SourceDetails {
            boot_id: "last".to_owned(),
            accepted,
            post_copied_regions: None,
            process: None,
            vm_ended: false,
        };
        assert_eq!(recovered_source_state(None, "this"), QemuAtStart::Gone);
        assert_eq!(recovered_source_state(Some(&details(false)), "this"), QemuAtStart::Gone);
        assert_eq!(recovered_source_state(Some(&details(true)), "this"), QemuAtStart::Rebooted);
        assert_eq!(recovered_source_state(Some(&details(true)), "last"), QemuAtStart::Gone);
    }
}
