//! Start of a driver for a migration that a user requests, and the checks of such a request.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use engine::handover::source::SourceState;
use proto::message::{Acceptance, Finding, Proposal, ProposedDisk, is_blocked};
use proto::{MigrationId, VmName};
use tracing::warn;

use super::{Daemon, DriverHandle, DriverMailbox};
use api::progress::Publisher;
use api::report::{Report, unix_ms_now};
use api::{CheckReport, MigrateRequest, MigrationStatus};
use api::{Problem, ProblemKind};
use host::preflight;
use host::{ownership, redirections, vms};
use migrate::source::{self, Goals, MigrationControls};
use store::journal::{Durability, JournalError, VmRecord};

/// Longest wait for the end of a migration that is decided.
const LAST_ENTRIES_TIMEOUT: Duration = Duration::from_secs(2);

/// A VM that can be moved as far as this host knows.
struct Offer {
    vm: source::SourceVm,
    proposal: Proposal,
    findings: Vec<Finding>,
    qemu_version: String,
    ram_kind: String,
    /// Sends frames to the destination's networks, until the proposal is answered.
    prober: Option<preflight::Prober>,
}

/// A migration that both hosts have checked.
pub(super) struct CheckedMigration {
    /// The request, with the addresses that need not be named.
    pub(super) request: MigrateRequest,
    pub(super) report: CheckReport,
    pub(super) disks: Vec<ProposedDisk>,
    /// The destination's answer; absent if it would reject the VM.
    pub(super) acceptance: Option<Acceptance>,
}

impl Daemon {
    /// Runs the pre-flight checks of both hosts, and forecasts the migration if that is requested.
    pub(super) fn check_both(&self, request: &MigrateRequest) -> Result<CheckReport, Problem> {
        let checked = self.check_in_full(request)?;
        let forecast = if request.forecast && checked.report.possible {
            Some(Box::new(self.forecast_checked(&checked, false)?))
        } else {
            None
        };
        Ok(CheckReport { forecast, ..checked.report })
    }

    /// Runs the pre-flight checks of both hosts; neither stores anything.
    pub(super) fn check_in_full(&self, request: &MigrateRequest) -> Result<CheckedMigration, Problem> {
        let (vm, to) = (request.vm.clone(), request.to.clone());
        let record = self.known(&vm)?;
        self.has_not_ended(&record)?;
        let request = &self.with_addresses(request);
        self.check_request(request)?;
        // During a migration the VM's monitor belongs to that migration.
        self.check_not_in_migration(&vm)?;
        let mut offer = self.offer(&record, request, true)?;
        offer.findings.extend(ownership::refused(&self.context, &vm));
        let mut report = CheckReport {
            vm: vm.clone(),
            from: self.context.config.host.clone(),
            to,
            possible: false,
            ram_kind: None,
            source_findings: offer.findings,
            destination_findings: Vec::new(),
            forecast: None,
        };
        let largest = self.context.journal.largest_epoch(&vm).map_err(|error| internal(&error))?;
        let id = MigrationId { vm, epoch: largest.next() };
        let redirection =
            preflight::offer_redirection(&self.context, &mut offer.vm, (&id, &report.to), request, true);
        match redirection {
            Ok(redirection) => offer.proposal.redirection = redirection,
            Err(found) => report.source_findings.push(found),
        }
        let disks = offer.proposal.disks.clone();
        let acceptance = match preflight::ask(&self.context, &report.to, id, offer.proposal) {
            Ok((findings, acceptance)) => {
                // The destination also reports the source's blockers, from the facts that it received.
                let is_new = |found: &Finding| !report.source_findings.contains(found);
                report.destination_findings = findings.into_iter().filter(is_new).collect();
                report.ram_kind = acceptance.as_ref().map(|acceptance| acceptance.ram_kind.clone());
                acceptance
            }
            Err(error) => {
                let advice = "make sure that the agent runs there, that the address is correct, and that \
                              both use the same [tls]";
                return Err(Problem::caused_by(ProblemKind::Unavailable, &error, advice));
            }
        };
        report.possible = !is_blocked(&report.source_findings) && !is_blocked(&report.destination_findings);
        Ok(CheckedMigration { request: request.clone(), report, disks, acceptance })
    }

    /// Begins a migration; its driver continues by itself.
    pub(super) fn begin(self: &Arc<Self>, request: &MigrateRequest) -> Result<MigrationStatus, Problem> {
        let (requested, requested_unix_ms) = (Instant::now(), unix_ms_now());
        let request = &self.with_addresses(request);
        self.check_request(request)?;
        self.wait_for_last_migration(&request.vm)?;
        let _exclusive = self.context.names.exclusive(&request.vm);
        let record = self.known(&request.vm)?;
        self.check_not_in_migration(&request.vm)?;
        self.has_not_ended(&record)?;
        // Only the migration tracks the VM's writes, and uses its monitor.
        self.measurements.interrupt(&request.vm);
        let mut offer = self.offer(&record, request, false)?;
        if is_blocked(&offer.findings) {
            return Err(refused(&request.vm, offer.findings));
        }
        let held = ownership::owned_since(&self.context, &request.vm).map_err(|error| {
            let found = ownership::finding(&error);
            Problem::new(ProblemKind::Unavailable, found.what.clone(), found.advice.clone())
                .with_findings(vec![found])
        })?;
        let journal = &self.context.journal;
        if let Some(epoch) = held {
            journal.learn_epoch(&request.vm, epoch).map_err(|error| internal(&error))?;
        }
        let epoch = journal.next_epoch(&request.vm).map_err(|error| internal(&error))?;
        let terms = MigrationTerms {
            migration: MigrationId { vm: request.vm.clone(), epoch },
            source: self.context.config.host.clone(),
            destination: request.to.clone(),
            registry: held,
            witness: self.context.config.registry.clone(),
        };
        let goals = Goals::new(request, &self.context.config);
        let parties = (&terms.migration, &terms.destination);
        let redirection = preflight::offer_redirection(&self.context, &mut offer.vm, parties, request, false);
        let proposal = Proposal {
            redirection: redirection.map_err(|found| refused(&request.vm, vec![found]))?,
            registry_epoch: held,
            streams: goals.settings.streams,
            delta_seed: Some(RandomState::new().hash_one(&terms.migration)),
            post_copy: goals.can_post_copy(),
            ..offer.proposal
        };
        let mut report = Report::begin(
            terms.migration.clone(),
            terms.source.clone(),
            terms.destination.clone(),
            goals.settings.clone(),
        );
        report.requested_at(requested_unix_ms);
        report.findings = offer.findings;
        report.source.qemu_version = Some(offer.qemu_version);
        report.source.ram_kind = Some(offer.ram_kind);
        report.ram_blocks.clone_from(&proposal.ram);
        let mut vm = offer.vm;
        report.run_state_before = vm.run_state().unwrap_or_default();
        let controls = Arc::new(MigrationControls::new(goals, report, requested).with_prober(offer.prober));
        let id = terms.migration.clone();
        self.start_source_driver(terms, vm, proposal, controls).inspect_err(|_| {
            // The offer has reserved what no driver removes now.
            if let Err(error) = redirections::remove_of(&self.context.redirections, &id) {
                warn!(migration = %id, error = crate::chain(&error), "a key of a tunnel is left until the agent starts anew");
            }
        })?;
        self.status(&id)
    }

    /// Journals PREPARED and starts a driver. Everything that the driver needs is reserved before that.
    pub(super) fn start_source_driver(
        self: &Arc<Self>,
        terms: MigrationTerms,
        vm: source::SourceVm,
        proposal: Proposal,
        controls: Arc<MigrationControls>,
    ) -> Result<(), Problem> {
        let id = terms.migration.clone();
        let details = source::SourceDetails::of(&self.context, Some(&vm), false);
        let (mut driver, driven) = self.source_driver(terms, SourceState::Idle, Some(vm), controls);
        let driver_slot = self.driver_slot(&id, driven)?;
        driver.begin(proposal).map_err(|error| {
            Problem::caused_by(ProblemKind::Internal, &error, "the VM is untouched; see the agent's log")
        })?;
        if let Err(error) = self.context.journal.set_details(&id, &details, Durability::Synced) {
            driver.give_up(&crate::chain(&error));
            return Err(internal(&error));
        }
        driver_slot.work(move || drop(driver.run()));
        Ok(())
    }

    /// Creates a driver for a source, and the handle to reach it.
    pub(super) fn source_driver(
        &self,
        terms: MigrationTerms,
        state: SourceState,
        vm: Option<source::SourceVm>,
        controls: Arc<MigrationControls>,
    ) -> (source::SourceDriver, DriverHandle) {
        let inbox = source::SourceInbox::new();
        let publisher = Publisher::new();
        let mailbox = DriverMailbox::Source(inbox.mailbox());
        let driven =
            DriverHandle { mailbox, publisher: publisher.clone(), controls: Some(Arc::clone(&controls)) };
        let mut vm = vm;
        if let Some(vm) = &mut vm {
            vm.watch(inbox.mailbox().qemu_exit());
        }
        let context = Arc::clone(&self.context);
        (source::SourceDriver::new(context, terms, state, vm, inbox, controls, publisher), driven)
    }

    /// Returns the request with the addresses that need not be named: those of a VM that returns to a network.
    fn with_addresses(&self, request: &MigrateRequest) -> MigrateRequest {
        let mut request = request.clone();
        if request.new_addresses.is_empty() {
            request.new_addresses = preflight::returning_addresses(&self.context, &request);
        }
        request
    }

    // ---- checks of a request

    /// Refuses to move a VM whose QEMU is gone.
    fn has_not_ended(&self, record: &VmRecord) -> Result<(), Problem> {
        let vm = &record.vm;
        record.process(&self.context.boot_id).map(drop).map_err(|_| {
            let error = format!("{vm} has ended: its QEMU (process {}) does not exist any more", record.pid);
            let advice = format!("start it again, or run `whimbrel vm forget {vm}`");
            Problem::new(ProblemKind::Gone, error, advice)
        })
    }

    /// Returns the record of a VM on this host. A VM that has just arrived is recorded a moment later.
    pub(super) fn known(&self, vm: &VmName) -> Result<VmRecord, Problem> {
        self.wait_for_last_migration(vm)?;
        let found = self.context.journal.vm(vm).map_err(|error| internal(&error))?;
        found.ok_or_else(|| {
            let error = format!("no VM {vm} on this host");
            Problem::new(
                ProblemKind::NotFound,
                error,
                "`whimbrel vm list` lists its VMs; `whimbrel vm adopt` adopts a QEMU",
            )
        })
    }

    /// Refuses a request whose destination or options are impossible.
    fn check_request(&self, request: &MigrateRequest) -> Result<(), Problem> {
        let to = &request.to;
        if *to == self.context.config.host {
            let error = format!("{} is on {to} already", request.vm);
            return Err(Problem::new(ProblemKind::BadRequest, error, "name another host with --to"));
        }
        if self.context.config.peer(to).is_none() {
            let error = format!("no host {to} in the configuration");
            return Err(Problem::new(
                ProblemKind::NotFound,
                error,
                format!("add [hosts.{to}] with its address"),
            ));
        }
        if self.context.config.registry.as_ref() == Some(to) {
            let error = format!("{to} keeps the ownership registry");
            return Err(Problem::new(
                ProblemKind::BadRequest,
                error,
                "the witness cannot be the source or destination; choose another host",
            ));
        }
        let settings = Goals::new(request, &self.context.config).settings;
        Ok(request.check_options(&settings)?)
    }

    /// Waits for the end of a migration that is decided. A user who knows that a VM has moved may move it on at once, a
    /// moment before the last journal entries of the destination.
    pub(super) fn wait_for_last_migration(&self, vm: &VmName) -> Result<(), Problem> {
        let deadline = Instant::now() + LAST_ENTRIES_TIMEOUT;
        loop {
            let driven = self.drivers().keys().any(|id| id.vm == *vm);
            let open = self.context.journal.open_migrations().map_err(|error| internal(&error))?;
            let undecided = open.iter().any(|record| record.id().vm == *vm && !record.state.is_final());
            if !driven || undecided || Instant::now() >= deadline {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn check_not_in_migration(&self, vm: &VmName) -> Result<(), Problem> {
        let open = self.context.journal.open_migrations().map_err(|error| internal(&error))?;
        let driven = self.drivers().keys().find(|id| id.vm == *vm).cloned();
        let open = open.into_iter().map(|record| record.terms.migration).find(|id| id.vm == *vm).or(driven);
        open.map_or(Ok(()), |id| {
            let error = format!("{vm} is already in a migration, {id}");
            let advice =
                format!("wait until it ends, or run `whimbrel cancel {vm}` or `whimbrel recover {vm}`");
            Err(Problem::new(ProblemKind::Conflict, error, advice))
        })
    }

    fn offer(&self, record: &VmRecord, request: &MigrateRequest, check_only: bool) -> Result<Offer, Problem> {
        let context = &self.context;
        let mut vm = source::SourceVm::attach(context, record)
            .map_err(|error| Problem::caused_by(ProblemKind::Unavailable, &error, vms::advice(&record.vm)))?;
        let allowed: Vec<_> =
            context.config.qemu.allow_options.iter().chain(&request.allow_options).cloned().collect();
        let surveyed = preflight::source(&mut vm, &allowed)
            .map_err(|error| Problem::caused_by(ProblemKind::Unavailable, &error, vms::advice(&record.vm)))?;
        let probe =
            preflight::begin_probe(&mut vm, Goals::new(request, &context.config).settings.network_check);
        let names =
            preflight::check_dns_records(&context.config, &record.vm, &request.to, &request.new_addresses);
        let mut disks = preflight::proposed_disks(&surveyed.disks, request)?;
        preflight::measure(&surveyed.disks, &mut disks, &context.config.run_dir);
        let proposal = Proposal {
            reply_to: context.config.listen.to_string(),
            streams: request.options.streams.unwrap_or(context.config.migration.streams),
            ram: vm.proposed_blocks(),
            facts: surveyed.facts,
            description: surveyed.description,
            check_only,
            registry_epoch: None,
            witness: context.config.registry.clone(),
            ram_kind: preflight::wanted_ram(request.ram),
            allow_options: allowed,
            disks,
            delta_seed: None,
            post_copy: false,
            probe: probe.proposed,
            redirection: None,
        };
        let findings = surveyed.findings.into_iter().chain(probe.findings).chain(names).collect();
        Ok(Offer {
            ram_kind: vm.ram_kind(),
            qemu_version: surveyed.qemu_version,
            findings,
            vm,
            proposal,
            prober: probe.prober,
        })
    }
}

/// Refuses a migration for these findings.
pub(super) fn refused(vm: &VmName, findings: Vec<Finding>) -> Problem {
    let error = format!("{vm} cannot be migrated");
    Problem::new(ProblemKind::Refused, error, "see the findings, each with advice").with_findings(findings)
}

pub(super) fn internal(error: &JournalError) -> Problem {
    Problem::caused_by(ProblemKind::Internal, error, "see the agent's log")
}
