//! Requests of users to the daemon.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::handover::Step;
use engine::handover::destination::DestinationEvent;
use engine::handover::source::SourceEvent;
use proto::{HostId, MigrationId, VmName};

use super::drive::internal;
use super::{Daemon, DriverMailbox};
use api::Control;
use api::progress::{Publisher, Standing, Watcher};
use api::report::Report;
use api::{
    AdoptRequest, Adopted, AgentInfo, CalibrationReport, CancelOutcome, CheckReport, ClaimReport,
    ClaimRequest, ControllerInfo, Cordon, EvacuateHostRequest, Forecast, ForecastRequest, Forgotten,
    HostEvacuation, LeftoverImage, Limits, MigrateRequest, MigrationOptions, MigrationStatus, NetworkState,
    RecoverReport, RecoverRequest, RunRequest, VmDetail, VmSummary,
};
use api::{Problem, ProblemKind};
use host::{leftover_images, net_show, preflight, redirections, vms};
use migrate::unexpected_page;
use migrate::{destination, source};
use store::journal::{MigrationRecord, State};

/// Longest wait of a user for the outcome of a request.
const PATIENCE: Duration = Duration::from_mins(1);

/// Implementation of the API's [`Control`] by the daemon.
pub(super) struct UserApi(pub(super) Arc<Daemon>);

impl Deref for UserApi {
    type Target = Arc<Daemon>;

    fn deref(&self) -> &Arc<Daemon> {
        &self.0
    }
}

impl Control for UserApi {
    fn agent(&self) -> AgentInfo {
        let config = &self.context.config;
        let (kernel, kernel_features) = preflight::kernel();
        AgentInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: config.host.clone(),
            role: config.role.as_str().to_owned(),
            listen: config.listen.to_string(),
            peers: config.peers().cloned().collect(),
            registry: config.registry.clone(),
            kernel,
            kernel_features,
            pid: std::process::id(),
            cordoned: self.context.journal.is_cordoned().unwrap_or(true),
            controller: config.controller.as_ref().map(|controller| ControllerInfo {
                name: controller.name.clone(),
                connected: self.controller_link.is_connected(),
            }),
            templates: self.context.templates.infos(),
        }
    }

    fn vms(&self) -> Result<Vec<VmSummary>, Problem> {
        let open = || self.context.journal.open_migrations().map_err(|error| internal(&error));
        for decided in open()?.iter().filter(|record| record.state.is_final()) {
            self.wait_for_last_migration(&decided.terms.migration.vm)?;
        }
        let records = self.context.journal.vms().map_err(|error| internal(&error))?;
        let mut known: Vec<_> = records.iter().map(|record| self.summary(record)).collect();
        // Arriving VMs have no record yet.
        for record in open()? {
            let vm = &record.terms.migration.vm;
            if matches!(record.state, State::Destination(_)) && known.iter().all(|summary| summary.vm != *vm)
            {
                known.push(vms::arriving(&record, self.standing_of(&record)));
            }
        }
        Ok(known)
    }

    fn vm(&self, vm: &VmName) -> Result<VmDetail, Problem> {
        let latest = self.context.journal.latest(vm).map_err(|error| internal(&error))?;
        let arriving = latest
            .as_ref()
            .filter(|latest| latest.open && matches!(latest.state, State::Destination(_)))
            .filter(|latest| !latest.state.is_final());
        let mut detail = if let Some(latest) = arriving {
            vms::arriving_detail(&self.context, latest, self.standing_of(latest))
        } else {
            let record = self.known(vm)?;
            vms::detail(&self.context, &record, self.summary(&record))
        };
        detail.needs_hosts = match &detail.summary.migration {
            Some(id) => self.needs_hosts(id)?,
            None => vec![self.context.config.host.clone()],
        };
        if let Some(latest) = latest {
            let driven = self.drivers().get(latest.id()).map(|driven| driven.publisher.now());
            detail.missing_pages = driven.and_then(|progress| progress.missing_pages);
            detail.findings.extend(unexpected_page::finding(&self.context, &latest, detail.summary.pid));
        }
        Ok(detail)
    }

    fn adopt(&self, request: AdoptRequest) -> Result<Adopted, Problem> {
        let (record, findings) = vms::adopt(&self.context, &request)?;
        Ok(Adopted { vm: self.summary(&record), findings })
    }

    fn run(&self, request: RunRequest) -> Result<Adopted, Problem> {
        let (record, findings) = vms::run(&self.context, &request)?;
        Ok(Adopted { vm: self.summary(&record), findings })
    }

    fn forget(&self, vm: &VmName) -> Result<Forgotten, Problem> {
        let _exclusive = self.context.names.exclusive(vm);
        self.check_not_in_migration(vm)?;
        vms::forget(&self.context, &self.known(vm)?)
    }

    fn claim(&self, vm: &VmName, request: ClaimRequest) -> Result<ClaimReport, Problem> {
        let _exclusive = self.context.names.exclusive(vm);
        let record = self.known(vm)?;
        self.check_not_in_migration(vm)?;
        vms::claim(&self.context, &record, &request)
    }

    fn forecast(&self, request: ForecastRequest) -> Result<Forecast, Problem> {
        self.forecast_request(&request)
    }

    fn calibration(&self) -> Result<CalibrationReport, Problem> {
        self.forecast_record()
    }

    fn check(&self, request: MigrateRequest) -> Result<CheckReport, Problem> {
        self.check_both(&request)
    }

    fn migrate(&self, request: MigrateRequest) -> Result<MigrationStatus, Problem> {
        self.begin(&request)
    }

    fn migrations(&self) -> Result<Vec<MigrationStatus>, Problem> {
        let records = self.context.journal.migrations().map_err(|error| internal(&error))?;
        Ok(records.iter().map(|record| self.status_of(record)).collect())
    }

    fn migration(&self, id: &MigrationId) -> Result<MigrationStatus, Problem> {
        self.status(id)
    }

    fn watch(&self, id: &MigrationId) -> Result<Watcher, Problem> {
        if let Some(driven) = self.drivers().get(id) {
            return Ok(driven.publisher.watch());
        }
        let status = self.status(id)?;
        let publisher = Publisher::new();
        publisher.update(|progress| {
            progress.standing = status.standing;
            progress.message = status.message;
        });
        Ok(publisher.watch())
    }

    fn report(&self, id: &MigrationId) -> Result<Report, Problem> {
        let live = self.drivers().get(id).and_then(|driven| driven.controls.clone());
        let mut report = match live {
            Some(controls) => controls.report(|report| report.clone()),
            None => self.context.journal.report(id).map_err(|error| internal(&error))?.ok_or_else(|| {
                let advice = "the source of a migration writes the report; ask there";
                Problem::new(ProblemKind::NotFound, format!("this host has no report of {id}"), advice)
            })?,
        };
        self.context.dns_keeper.put_into(&mut report);
        Ok(report)
    }

    fn cancel(&self, id: &MigrationId) -> Result<CancelOutcome, Problem> {
        let before = self.status(id)?;
        let word = match self.mailbox(id) {
            Some(DriverMailbox::Source(mailbox)) => {
                mailbox.put(source::SourceNotice::Event(SourceEvent::Cancel))
            }
            Some(DriverMailbox::Destination(mailbox)) => {
                mailbox.put(destination::DestinationNotice::Event(DestinationEvent::Cancel))
            }
            None => false,
        };
        if !word {
            return Ok(CancelOutcome::AlreadyOver { standing: before.standing });
        }
        self.wait_until_over(id, |status| {
            status.standing.is_over() || self.record(id).is_ok_and(|record| is_too_late_to_cancel(&record))
        });
        let after = self.status(id)?;
        Ok(match after.standing {
            Standing::Failed => CancelOutcome::Cancelled,
            standing => CancelOutcome::TooLate { standing, state: after.state },
        })
    }

    fn recover(&self, id: &MigrationId, request: RecoverRequest) -> Result<RecoverReport, Problem> {
        self.decide(id, &request)
    }

    fn set_limits(&self, id: &MigrationId, limits: Limits) -> Result<Limits, Problem> {
        let controls = self.drivers().get(id).and_then(|driven| driven.controls.clone());
        let Some(controls) = controls else {
            let record = self.record(id)?;
            let (error, advice) = if record.open {
                (format!("{id} is not sent from this host"), format!("ask at {}", record.terms.source))
            } else {
                (
                    format!("{id} is over"),
                    "limits can be changed only while the migration is under way".to_owned(),
                )
            };
            return Err(Problem::new(ProblemKind::Conflict, error, advice));
        };
        let changed = MigrationOptions::from(&limits);
        let settings = controls.goals().settings.with(&changed);
        if limits.max_total_ms.is_some() {
            settings.check_time_limit()?;
        }
        settings.check_values()?;
        let goals = controls.change(|goals| {
            goals.settings = goals.settings.with(&changed);
            goals.has_default_passes &= limits.max_passes.is_none();
        });
        controls.rate.set_rate(goals.bandwidth_bytes_per_s());
        Ok(Limits {
            bandwidth_bytes_per_s: Some(goals.settings.bandwidth_bytes_per_s),
            max_downtime_ms: Some(goals.settings.max_downtime_ms),
            max_passes: Some(goals.settings.max_passes),
            max_total_ms: goals.max_total_ms(),
        })
    }

    fn images(&self) -> Result<Vec<LeftoverImage>, Problem> {
        leftover_images::list(&self.context).map_err(|error| internal(&error))
    }

    fn remove_images(&self, vm: &VmName, epoch: Option<u64>) -> Result<Vec<LeftoverImage>, Problem> {
        leftover_images::remove(&self.context, vm, leftover_images::ImageSelection::MovedAway { epoch })
    }

    fn remove_ended_images(&self, vm: &VmName) -> Result<Vec<LeftoverImage>, Problem> {
        leftover_images::remove(&self.context, vm, leftover_images::ImageSelection::Ended)
    }

    fn set_cordoned(&self, cordoned: bool) -> Result<Cordon, Problem> {
        self.context.journal.set_cordoned(cordoned).map_err(|error| internal(&error))?;
        Ok(Cordon { host: self.context.config.host.clone(), cordoned })
    }

    fn ask_for_evacuation(&self, request: &EvacuateHostRequest) -> Result<HostEvacuation, Problem> {
        if !self.controller_link.ask_for_evacuation(request.within_s) {
            let error = "this host has no connection to a controller";
            let advice =
                "see `[controller]` in the configuration, and `whimbrel info`; or migrate the VMs one by one";
            return Err(Problem::new(ProblemKind::Unavailable, error, advice));
        }
        self.context.journal.wake();
        self.evacuation()
    }

    fn evacuation(&self) -> Result<HostEvacuation, Problem> {
        self.controller_link.evacuation(&self.0).ok_or_else(|| {
            let advice = "`whimbrel evacuate --this-host` asks for it";
            Problem::new(ProblemKind::NotFound, "no evacuation of this host was asked for", advice)
        })
    }

    fn metrics(&self) -> Result<String, Problem> {
        self.0.metrics().map_err(|error| internal(&error))
    }

    fn network(&self) -> Result<NetworkState, Problem> {
        let mut state = net_show::list(&self.context).map_err(|error| internal(&error))?;
        state.names = self.context.dns_keeper.open();
        Ok(state)
    }

    fn release_network(&self, vm: &VmName, all: bool) -> Result<Vec<MigrationId>, Problem> {
        self.wait_for_last_migration(vm)?;
        // Its driver changes the redirections of a VM that moves.
        let _exclusive = self.context.names.exclusive(vm);
        self.check_not_in_migration(vm)?;
        let released = redirections::end_of_vm(&self.context, vm, all).map_err(|error| {
            let advice = "`whimbrel net show` lists what remains; the agent tries again by itself";
            Problem::caused_by(ProblemKind::Internal, &error, advice)
        })?;
        if released.is_empty() {
            let error = format!("no connection of {vm} is redirected on this host");
            let advice = "`whimbrel net show` lists all redirections";
            return Err(Problem::new(ProblemKind::NotFound, error, advice));
        }
        Ok(released)
    }
}

impl Daemon {
    fn summary(&self, record: &store::journal::VmRecord) -> VmSummary {
        let latest = self.context.journal.latest(&record.vm).ok().flatten().filter(|latest| latest.open);
        let open = latest.as_ref().map(|latest| (latest, self.standing_of(latest)));
        vms::summary(&self.context, record, open)
    }

    fn needs_hosts(&self, id: &MigrationId) -> Result<Vec<HostId>, Problem> {
        let record = self.record(id)?;
        Ok(vec![record.terms.source, record.terms.destination])
    }

    /// Makes a driver repeat its current request.
    pub(super) fn nudge(&self, id: &MigrationId) {
        match self.mailbox(id) {
            Some(DriverMailbox::Source(mailbox)) => {
                mailbox.put(source::SourceNotice::Event(SourceEvent::Repeat));
            }
            Some(DriverMailbox::Destination(mailbox)) => {
                mailbox.put(destination::DestinationNotice::Event(DestinationEvent::Repeat));
            }
            None => {}
        }
    }

    /// Waits until `enough` holds for a migration's status, or a timeout.
    pub(super) fn wait_until_over(&self, id: &MigrationId, enough: impl Fn(&MigrationStatus) -> bool) {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let driven = self.drivers().contains_key(id);
            if !driven || self.status(id).is_ok_and(|status| enough(&status)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// True if a cancellation has no effect any more, and never will.
pub(super) fn is_too_late_to_cancel(record: &MigrationRecord) -> bool {
    match &record.state {
        State::Source(state) => matches!(
            engine::handover::source::source(&record.terms, state, &SourceEvent::Cancel),
            Ok(Step::Transition(step)) if step.to == *state
        ),
        State::Destination(state) => matches!(
            engine::handover::destination::destination(&record.terms, state, &DestinationEvent::Cancel),
            Ok(Step::Transition(step)) if step.to == *state
        ),
    }
}
