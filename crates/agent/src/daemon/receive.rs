//! Start of a driver for a VM that a peer proposes.

use host::arrivals::ReservationGuard;
use host::disks::PlannedDisk;
use host::preflight::{self, Comparison};
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm, Context};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use engine::handover::destination::DestinationState;
use link::transport::Channel;
use proto::MigrationId;
use proto::message::{Acceptance, Finding, Message, Proposal, Severity};
use proto::packed::Codec;
use qemu::process::Launch;
use qemu::qmp::Qmp;
use qemu::ram::RamBlock;
use tracing::{info, warn};

use super::driver_slot::DriverSlot;
use super::{Daemon, DriverHandle, DriverMailbox};
use api::progress::Publisher;
use migrate::destination::{self, ArrivalPlan, DestinationDriver};
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
        let exclusive = context.arrivals.starts.write().unwrap_or_else(PoisonError::into_inner);
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
            takes_flows: false,
            redirection: None,
        })
    }

    fn consider(
        &self,
        from: &proto::HostId,
        id: &MigrationId,
        proposal: Proposal,
    ) -> Result<preflight::AcceptableProposal, Vec<Finding>> {
        proposal.validate().map_err(|error| {
            blocker(
                "agents-incompatible",
                crate::chain(&error),
                "use the same version of whimbrel on both hosts",
            )
        })?;
        self.check_not_cordoned()?;
        self.check_name_is_free(id, proposal.check_only)?;
        preflight::destination(&self.context, from, id, proposal)
    }

    /// Checks that this host accepts VMs.
    fn check_not_cordoned(&self) -> Result<(), Vec<Finding>> {
        match self.context.journal.is_cordoned() {
            Ok(false) => Ok(()),
            Ok(true) => {
                let what = format!("{} is cordoned: it accepts no VMs", self.context.config.host);
                Err(blocker("host-cordoned", what, "choose another host, or run `whimbrel fleet uncordon`"))
            }
            Err(error) => Err(blocker(
                "journal-unusable",
                crate::chain(&error),
                "repair the journal on the destination",
            )),
        }
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
                    "journal-unusable",
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

    /// Reserves the VM's name and a driver's thread, enters PREPARED in the journal, and lets the thread receive the
    /// VM.
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
            artifacts,
            compared,
            reserved,
            ram_kind,
            copied,
            ..
        } = considered;
        let (mut driver, driven) = self.destination_driver(terms, DestinationState::Idle, proposal);
        // Pre-flight takes time; the name may be in use by now.
        let exclusive = self.context.names.exclusive(&id.vm);
        let driver_slot = match self.free_slot(id, driven) {
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
        let arrival = Arrival {
            context: Arc::clone(&self.context),
            migration: id.clone(),
            launch,
            artifacts,
            reserved,
            ram_kind,
            copied,
            templates: self.template_count(),
        };
        driver_slot.work(move || match prepared {
            Ok(()) => arrival.run(driver, compared),
            Err(error) => {
                let (code, advice) = match error.largest_epoch() {
                    Some(_) => {
                        ("epoch", "try again: the source knows that epoch now, and will use a larger one")
                    }
                    None => ("journal-unusable", SEE_DISK),
                };
                driver.reject(blocker(code, crate::chain(&error), advice), error.largest_epoch());
            }
        });
    }

    /// Returns a slot for the driver, if the VM's name is free here.
    fn free_slot(
        self: &Arc<Self>,
        id: &MigrationId,
        driven: DriverHandle,
    ) -> Result<DriverSlot, Vec<Finding>> {
        self.check_name_is_free(id, false)?;
        self.driver_slot(id, driven)
            .map_err(|problem| blocker("in-migration", problem.error, &problem.advice))
    }

    /// Creates a driver for a destination, and the handle to reach it.
    pub(super) fn destination_driver(
        &self,
        terms: MigrationTerms,
        state: DestinationState,
        proposal: Proposal,
    ) -> (DestinationDriver, DriverHandle) {
        let inbox = destination::DestinationInbox::new();
        let publisher = Publisher::new();
        let mailbox = DriverMailbox::Destination(inbox.mailbox());
        let driven = DriverHandle { mailbox, publisher: publisher.clone(), controls: None };
        let context = Arc::clone(&self.context);
        let driver = DestinationDriver::new(context, terms, state, proposal, None, inbox, publisher);
        (driver, driven)
    }
}

/// An arrival that can be accepted, for the thread of its driver.
struct Arrival {
    context: Arc<Context>,
    migration: MigrationId,
    /// Command line of the QEMU that waits for the VM.
    launch: Launch,
    /// Files that are made for that QEMU.
    artifacts: ArrivalArtifacts,
    /// Memory that is reserved until the VM has arrived or failed to arrive.
    reserved: Option<ReservationGuard>,
    /// Kind of the QEMU's memory, as text for users.
    ram_kind: String,
    /// Copied disks.
    copied: Vec<PlannedDisk>,
    /// Number of templates of this host.
    templates: u16,
}

/// Facts about a QEMU that was started for an arrival.
struct StartedQemu {
    qemu_version: Option<String>,
    findings: Vec<Finding>,
    /// Reason against post-copy, if that was proposed and is impossible.
    no_post_copy: Option<Finding>,
}

impl Arrival {
    /// Starts QEMU, and receives the VM; rejects the migration if QEMU does not start.
    fn run(self, mut driver: DestinationDriver, compared: Comparison) {
        let began = Instant::now();
        let mut artifacts = self.artifacts.clone();
        let redirection = compared.agreed_redirections();
        let (copied, shared_files) = (self.copied.clone(), compared.shared_files());
        let plan = ArrivalPlan { copied, shared_files, redirection: Arc::clone(&redirection) };
        let started = self.start(&mut driver, &plan, &mut artifacts, compared);
        if started.is_err() {
            driver.undo_start(&self.artifacts);
        }
        match preflight::started_or_findings(started) {
            Ok(started) => {
                let acceptance = Acceptance {
                    redirection: redirection.get().and_then(|agreed| serde_json::to_value(agreed).ok()),
                    ..self.acceptance(&driver, started, began)
                };
                driver.accept(acceptance);
                driver.run();
            }
            Err(findings) => driver.reject(findings, None),
        }
    }

    /// Makes what QEMU needs, starts it, and begins to receive into it. After an error no QEMU runs, and the caller
    /// removes what was made.
    fn start(
        &self,
        driver: &mut DestinationDriver,
        plan: &ArrivalPlan,
        artifacts: &mut ArrivalArtifacts,
        compared: Comparison,
    ) -> Result<StartedQemu, ArrivalError> {
        let (context, migration) = (&self.context, &self.migration);
        driver.check(plan)?;
        let names_until = context.dns_keeper.begin_to_end_changes(&migration.vm);
        artifacts.make_directory()?;
        artifacts.keep(context, migration, Durability::Synced)?;
        let patience = Duration::from_millis(context.config.timeouts.qemu_start_ms);
        driver.prepare_start(artifacts)?;
        let look = |qmp: &mut Qmp, blocks: &[RamBlock], pid: u32| compared.check_started(qmp, blocks, pid);
        let ram = &driver.proposal().ram;
        // A trial may use the port that this VM needs.
        let no_trial = context.arrivals.starts.read().unwrap_or_else(PoisonError::into_inner);
        let (mut vm, findings) = ArrivingVm::start(artifacts.clone(), &self.launch, ram, patience, look)?;
        drop(no_trial);
        if let Err(error) = vm.artifacts.keep(context, migration, Durability::Synced) {
            vm.destroy();
            return Err(error.into());
        }
        if let Some(reserved) = &self.reserved {
            reserved.set_pid(vm.process.pid());
        }
        let qemu_version = vm.qmp().ok().map(|qmp| qmp.version().to_string());
        let no_post_copy = driver.started(vm)?;
        // Before the source looks at the VM's names, which are to be changed from there now.
        context.dns_keeper.end_earlier_changes(&migration.vm, names_until);
        Ok(StartedQemu { qemu_version, findings, no_post_copy })
    }

    /// Returns the acceptance for the source.
    fn acceptance(&self, driver: &DestinationDriver, started: StartedQemu, began: Instant) -> Acceptance {
        let StartedQemu { qemu_version, mut findings, no_post_copy } = started;
        let post_copy = driver.proposal().post_copy && no_post_copy.is_none();
        findings.extend(no_post_copy);
        Acceptance {
            findings,
            qemu_start_us: began.elapsed().as_micros() as u64,
            ram_kind: self.ram_kind.clone(),
            qemu_version,
            copied: self.copied.iter().map(PlannedDisk::copied_disk).collect(),
            references: true,
            templates: self.templates,
            codecs: codecs(),
            deltas: true,
            post_copy,
            can_discard: true,
            has_network: true,
            takes_frames: driver.takes_frames(),
            takes_flows: driver.takes_flows(),
            redirection: None,
        }
    }
}

/// Returns findings with one blocker.
fn blocker(code: &str, what: String, advice: &str) -> Vec<Finding> {
    vec![Finding::new(Severity::Blocker, code, what, advice)]
}

/// Returns the names of all codecs that can be decompressed here.
fn codecs() -> Vec<String> {
    Codec::ALL.map(|codec| codec.name().to_owned()).into()
}
