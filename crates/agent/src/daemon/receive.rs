//! Start of a driver for a VM that a peer proposes.

use host::ArrivingVm;
use host::disks::PlannedDisk;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use engine::handover::destination::DestinationState;
use link::transport::Channel;
use proto::MigrationId;
use proto::message::{Acceptance, Finding, Message, Proposal, Severity};
use proto::packed::Codec;
use qemu::qmp::Qmp;
use qemu::ram::RamBlock;
use tracing::{info, warn};

use super::{Daemon, DriverHandle, DriverMailbox};
use api::progress::Publisher;
use host::preflight;
use migrate::destination::{self, ArrivalPlan};
use store::journal::Durability;

const SEE_DISK: &str = "make sure that the destination's disk is not full";

impl Daemon {
    /// Handles a peer's proposal of a VM.
    pub(super) fn proposed(self: &Arc<Self>, mut connection: Channel, id: &MigrationId, proposal: Proposal) {
        let from = connection.peer().clone();
        let check_only = proposal.check_only;
        info!(migration = %id, %from, check_only, "received a proposal");
        let answer = match self.consider(&from, id, proposal) {
            Err(findings) => Message::Reject { findings, largest_epoch: None },
            Ok(considered) if check_only => self.try_out(considered),
            Ok(considered) => {
                self.receive(connection, id, considered);
                return;
            }
        };
        match connection.send(&answer) {
            Ok(()) => info!(migration = %id, "answered the proposal"),
            Err(error) => {
                warn!(migration = %id, error = crate::chain(&error), "cannot send the answer to the source");
            }
        }
    }

    /// Starts the QEMU that a VM would get, and ends it.
    fn try_out(&self, considered: preflight::AcceptableProposal) -> Message {
        let context = &self.context;
        let (seen, ram_kind) = (considered.findings.clone(), considered.ram_kind.clone());
        let qemu_version = Some(considered.qemu_version.clone());
        let copied = considered.copied.iter().map(PlannedDisk::copied_disk).collect();
        let post_copy = considered.proposal.post_copy;
        let exclusive = context.starts.write().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        let patience = Duration::from_millis(context.config.timeouts.qemu_start_ms);
        let tried = preflight::Trial::prepare(context, considered).and_then(|trial| trial.run(patience));
        drop(exclusive);
        let findings = match preflight::started_or_findings(tried) {
            Ok(findings) => findings,
            Err(found) => {
                let others = seen.into_iter().filter(|seen| !found.contains(seen)).collect::<Vec<_>>();
                let findings = others.into_iter().chain(found).collect();
                return Message::Reject { findings, largest_epoch: None };
            }
        };
        Message::Accept(Acceptance {
            findings,
            qemu_start_us: began.elapsed().as_micros() as u64,
            ram_kind,
            qemu_version,
            copied,
            references: true,
            templates: self.template_count(),
            codecs: codecs(),
            deltas: true,
            // The QEMU of the real migration determines whether it is possible.
            post_copy,
            can_discard: true,
            has_network: true,
            takes_frames: false,
        })
    }

    fn consider(
        &self,
        from: &proto::HostId,
        id: &MigrationId,
        proposal: Proposal,
    ) -> Result<preflight::AcceptableProposal, Vec<Finding>> {
        proposal.validate().map_err(|error| {
            blocker("proposal", crate::chain(&error), "use the same version of whimbrel on both hosts")
        })?;
        self.check_name_is_free(id, proposal.check_only)?;
        preflight::destination(&self.context, from, id, proposal)
    }

    /// Checks that the VM's name is free here.
    fn check_name_is_free(&self, id: &MigrationId, check_only: bool) -> Result<(), Vec<Finding>> {
        match self.context.journal.vm(&id.vm) {
            Ok(Some(_)) => {
                let what = format!("this host already has a VM named {}", id.vm);
                return Err(blocker("name-taken", what, "adopt one of the two under another name"));
            }
            Ok(None) => {}
            Err(error) => {
                return Err(blocker(
                    "journal",
                    crate::chain(&error),
                    "repair the journal on the destination",
                ));
            }
        }
        if !check_only && let Err(problem) = self.check_not_in_migration(&id.vm) {
            return Err(blocker("in-migration", problem.error, &problem.advice));
        }
        Ok(())
    }

    fn template_count(&self) -> u16 {
        u16::try_from(self.context.templates.count()).unwrap_or(u16::MAX)
    }

    #[expect(clippy::too_many_lines, reason = "not split yet: it decides and acts by turns")]
    fn receive(
        self: &Arc<Self>,
        mut connection: Channel,
        id: &MigrationId,
        considered: preflight::AcceptableProposal,
    ) {
        let preflight::AcceptableProposal {
            terms,
            proposal,
            launch,
            mut artifacts,
            compared,
            reserved,
            ram_kind,
            copied,
            ..
        } = considered;
        let proposed = proposal.ram.clone();
        let (mut driver, driven) = self.destination_driver(terms, DestinationState::Idle, proposal);
        // Pre-flight takes time; the name may be in use by now.
        let exclusive = self.context.names.exclusive(&id.vm);
        let free = self.check_name_is_free(id, false);
        let driver_slot = free.and_then(|()| {
            let driver_slot = self.driver_slot(id, driven);
            driver_slot.map_err(|problem| blocker("in-migration", problem.error, &problem.advice))
        });
        let driver_slot = match driver_slot {
            Ok(driver_slot) => driver_slot,
            Err(findings) => {
                warn!(migration = %id, ?findings, "the migration cannot be received");
                drop(connection.send(&Message::Reject { findings, largest_epoch: None }));
                return;
            }
        };
        if let Err(error) = driver.attach_control_stream(connection) {
            warn!(migration = %id, %error, "cannot start a thread for the control stream");
            return;
        }
        let prepared = driver.prepare();
        drop(exclusive);
        let context = Arc::clone(&self.context);
        let migration = id.clone();
        let templates = self.template_count();
        let work = move || {
            if let Err(error) = prepared {
                let (code, advice) = match error.largest_epoch() {
                    Some(_) => {
                        ("epoch", "try again: the source knows that epoch now, and will use a larger one")
                    }
                    None => ("journal", SEE_DISK),
                };
                driver.reject(blocker(code, crate::chain(&error), advice), error.largest_epoch());
                return;
            }
            let began = Instant::now();
            let left = artifacts.clone();
            let copied_disk = copied.iter().map(PlannedDisk::copied_disk).collect();
            let plan = ArrivalPlan { copied, shared_files: compared.shared_files() };
            // Held until the VM has arrived or failed to arrive.
            let reserved = reserved;
            let started = driver.check(&plan).and_then(|()| artifacts.make_directory()).and_then(|()| {
                artifacts.keep(&context, &migration, Durability::Synced)?;
                let patience = Duration::from_millis(context.config.timeouts.qemu_start_ms);
                driver.prepare_start(&mut artifacts)?;
                let look =
                    |qmp: &mut Qmp, blocks: &[RamBlock], pid: u32| compared.check_started(qmp, blocks, pid);
                // A trial may use the port that this VM needs.
                let no_trial = context.starts.read().unwrap_or_else(PoisonError::into_inner);
                let (vm, findings) = ArrivingVm::start(artifacts, &launch, &proposed, patience, look)?;
                drop(no_trial);
                vm.artifacts.keep(&context, &migration, Durability::Synced)?;
                if let Some(reserved) = &reserved {
                    reserved.set_pid(vm.process.pid());
                }
                Ok((vm, findings))
            });
            let started = started.and_then(|(mut vm, findings)| {
                let version = vm.qmp().ok().map(|qmp| qmp.version().to_string());
                driver.started(vm).map(|no_post_copy| (version, findings, no_post_copy))
            });
            if started.is_err() {
                driver.undo_start(&left);
            }
            match preflight::started_or_findings(started) {
                Ok((qemu_version, mut findings, no_post_copy)) => {
                    let post_copy = driver.proposal().post_copy && no_post_copy.is_none();
                    findings.extend(no_post_copy);
                    let takes_frames = driver.takes_frames();
                    driver.accept(Acceptance {
                        findings,
                        qemu_start_us: began.elapsed().as_micros() as u64,
                        ram_kind,
                        qemu_version,
                        copied: copied_disk,
                        references: true,
                        templates,
                        codecs: codecs(),
                        deltas: true,
                        post_copy,
                        can_discard: true,
                        has_network: true,
                        takes_frames,
                    });
                    driver.run();
                }
                Err(findings) => driver.reject(findings, None),
            }
        };
        driver_slot.work(work);
    }

    /// Creates a driver for a destination, and the handle to reach it.
    pub(super) fn destination_driver(
        &self,
        terms: MigrationTerms,
        state: DestinationState,
        proposal: Proposal,
    ) -> (destination::DestinationDriver, DriverHandle) {
        let inbox = destination::DestinationInbox::new();
        let publisher = Publisher::new();
        let mailbox = DriverMailbox::Destination(inbox.mailbox());
        let driven = DriverHandle { mailbox, publisher: publisher.clone(), controls: None };
        let context = Arc::clone(&self.context);
        let driver =
            destination::DestinationDriver::new(context, terms, state, proposal, None, inbox, publisher);
        (driver, driven)
    }
}

/// Returns findings with one blocker.
fn blocker(code: &str, what: String, advice: &str) -> Vec<Finding> {
    vec![Finding { severity: Severity::Blocker, code: code.to_owned(), what, advice: advice.to_owned() }]
}

/// Returns the names of all codecs that can be decompressed here.
fn codecs() -> Vec<String> {
    Codec::ALL.map(|codec| codec.name().to_owned()).into()
}
