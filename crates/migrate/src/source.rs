//! The source's driver: one thread that migrates a VM from this host to another.
//!
//! A migration is a list of phases, each a function: check, prepare, pre-copy, stop, last pages, device state. They
//! carry out the steps that [`engine::session`] decides, and end in READY or in a [`Failure`](failure::Failure); both
//! are events for the engine's state machine of the handover ([`handover`]). Every outside event (a message, a lost
//! link, a user's command, QEMU's end) arrives in one [`inbox`], so that no phase can miss it.

mod agreement;
mod answers;
mod conversation;
mod cpu_throttle;
mod ending;
mod expected_end;
mod failure;
mod forecast;
mod handover;
mod inbox;
mod participants;
mod payload;
mod phases;
mod post_copy_server;
mod pressure;
mod reductions;
mod reports;
mod requested_discards;
mod sending_rate;
mod stages;
mod streams;
mod telemetry;
mod wording;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use engine::handover::source::SourceState;
use engine::pre_copy::{CostHistory, Sampling};
use engine::session::{RegistryClient, SourceSession};
use net::Prober;
use proto::{Generation, VmName};

pub use answers::answer_from_journal;
pub use forecast::{ForecastBasis, SimulatedForecast, copied_bytes, forecast};
pub use inbox::{SourceInbox, SourceMailbox, SourceNotice};

use crate::clock::Clock;
use agreement::Agreement;
use api::progress::{Phase, Publisher};
use api::report::Report;
use api::{
    HintedMemory, MigrateRequest, MigrationSettings, NetworkCheck, NewAddress, StopPolicy, ThrottleWrites,
};
use host::Context;
pub use host::SourceVm;
use host::config::Config;
use host::cpu::CpuTime;
use host::ram::JournalledRegion;
use stages::SourceStage;
use store::journal::VmRecord;
use telemetry::Telemetry;

/// Goals of a migration; some can be changed while it runs.
#[derive(Clone, Debug)]
pub struct Goals {
    /// Values of all options.
    pub settings: MigrationSettings,
    /// True if the request has no maximum of rounds.
    pub has_default_passes: bool,
    /// Maximum number of passes without a throttle of writes, if the request has none.
    default_passes: u32,
    /// True if all of memory and of copied disks is compared after the stop.
    pub verify: bool,
    /// Intervals and history of the dirty scans.
    pub sampling: Sampling,
    /// Thresholds that decide which data is worth compressing.
    pub worth: ::memory::CompressionCriteria,
    /// Memory for the record of sent pages that deltas need, in bytes.
    pub deltas_bytes: usize,
    /// Addresses of a VM that moves to another network.
    pub new_addresses: Vec<NewAddress>,
}

impl Goals {
    /// Returns the goals of a request, with the configuration's values as defaults.
    pub fn new(request: &MigrateRequest, config: &Config) -> Self {
        let mut settings = config.migration.with(&request.options);
        let has_default_passes = request.options.max_passes.is_none();
        // Writes that are throttled more and more let the migration converge in the end.
        if has_default_passes && settings.throttle_writes != ThrottleWrites::Off {
            settings.max_passes = config.migration.max_passes.saturating_mul(10);
        }
        if settings.policy == StopPolicy::Sla {
            // It cannot be predicted how long the guest needs to give back its page cache.
            if matches!(settings.free_page_hints, HintedMemory::Cold | HintedMemory::All) {
                settings.free_page_hints = HintedMemory::Free;
            }
        } else {
            settings.max_total_ms = 0;
        }
        let new_addresses = request.new_addresses.clone();
        if !new_addresses.is_empty() {
            // The VM moves to another network on purpose.
            settings.network_check = NetworkCheck::Off;
        }
        Self { has_default_passes, verify: request.verify, new_addresses, ..Self::restored(settings, config) }
    }

    /// Returns the goals of a migration that an agent before this one began with these settings.
    pub fn restored(settings: MigrationSettings, config: &Config) -> Self {
        let tuning = &config.tuning;
        Self {
            settings,
            has_default_passes: true,
            default_passes: config.migration.max_passes,
            verify: false,
            sampling: tuning.sampling(),
            worth: tuning.worth(),
            deltas_bytes: tuning.deltas_bytes(),
            new_addresses: Vec::new(),
        }
    }

    /// Returns the limit on the total time, in milliseconds; none if there is no limit.
    pub fn max_total_ms(&self) -> Option<u64> {
        Some(self.settings.max_total_ms).filter(|ms| *ms > 0)
    }

    /// Returns the limit on the sending rate, in bytes per second; none if unlimited.
    pub fn bandwidth_bytes_per_s(&self) -> Option<u64> {
        Some(self.settings.bandwidth_bytes_per_s).filter(|rate| *rate > 0)
    }

    /// Adapts the goals to a migration without copied disks: there are no writes to throttle, and so no reason for more
    /// than the usual maximum of rounds.
    pub(crate) fn disable_write_throttle(&mut self) {
        if self.has_default_passes {
            self.settings.max_passes = self.default_passes;
        }
        self.settings.throttle_writes = ThrottleWrites::Off;
    }

    /// Returns true if the goals allow post-copy, provided that the destination supports it.
    pub fn can_post_copy(&self) -> bool {
        // Pages that arrive while the guest runs cannot be compared.
        self.settings.needs_post_copy() || self.settings.policy == StopPolicy::Sla && !self.verify
    }
}

/// State of a running migration that other threads may read or change.
#[derive(Debug)]
pub struct MigrationControls {
    /// The migration's goals.
    pub(crate) goals: Mutex<Goals>,
    /// Limit on the sending rate, shared by all streams of all generations.
    pub rate: Arc<link::RateLimit>,
    /// The report, which is filled while the migration runs.
    pub(crate) report: Mutex<Report>,
    /// Time of the user's request; for a migration that another agent began, the time when this agent found it.
    pub(crate) requested: Instant,
    /// Sends the frames of a probe, until the proposal is answered.
    prober: Mutex<Option<Prober>>,
}

impl MigrationControls {
    /// Creates the controls of a migration that was requested at this time.
    pub fn new(goals: Goals, report: Report, requested: Instant) -> Self {
        let rate = Arc::new(link::RateLimit::new(goals.bandwidth_bytes_per_s()));
        let (goals, report) = (Mutex::new(goals), Mutex::new(report));
        Self { goals, rate, report, requested, prober: Mutex::default() }
    }

    /// Keeps a probe of the guest's networks until the proposal is answered.
    #[must_use]
    pub fn with_prober(self, prober: Option<Prober>) -> Self {
        Self { prober: Mutex::new(prober), ..self }
    }

    /// Ends the probe of the guest's networks.
    pub(crate) fn end_probe(&self) {
        drop(self.prober.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Returns the current goals.
    pub fn goals(&self) -> Goals {
        self.goals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the migration's goals and returns the new ones.
    pub fn change(&self, change: impl FnOnce(&mut Goals)) -> Goals {
        let mut goals = self.goals.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut goals);
        goals.clone()
    }

    /// Adds an event to the report.
    pub(crate) fn note(&self, what: &str, detail: impl Into<String>) {
        let at_us = self.requested.elapsed().as_micros() as u64;
        self.report(|report| report.event(at_us, what, detail));
    }

    /// Reads or changes the report.
    pub fn report<T>(&self, change: impl FnOnce(&mut Report) -> T) -> T {
        change(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Details of a migration in the journal, for the driver of an agent that restarts.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct SourceDetails {
    /// Boot id of the host on which the migration began.
    pub boot_id: String,
    /// True if the destination has accepted. Without that it never received anything, even if other entries were not
    /// synced: there is nothing to ask it, and a destination that is asked about a migration unknown to its journal has
    /// lost its journal.
    #[serde(default)]
    pub accepted: bool,
    /// Regions of the guest's memory, if pages are sent after the guest runs at the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copied_regions: Option<Vec<JournalledRegion>>,
    /// The VM's QEMU. The journal's own record of the VM can be forgotten or replaced in the meantime.
    #[serde(default)]
    pub process: Option<ProcessIdentity>,
    /// True if the VM ended before it was moved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_ended: bool,
}

/// Identity of a QEMU process, by which an agent that restarts finds it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct ProcessIdentity {
    pub(crate) pid: u32,
    pub(crate) start_time_ticks: u64,
    pub(crate) qmp: PathBuf,
}

impl SourceDetails {
    /// Returns the details for `vm`.
    pub fn of(context: &Context, vm: Option<&SourceVm>, accepted: bool) -> Self {
        let process = vm.map(|vm| ProcessIdentity {
            pid: vm.process.pid(),
            start_time_ticks: vm.process.start_time(),
            qmp: vm.qmp_path.clone(),
        });
        Self {
            boot_id: context.boot_id.clone(),
            accepted,
            post_copied_regions: None,
            process,
            vm_ended: false,
        }
    }

    /// Returns the record of the VM's QEMU, as the migration found it.
    pub fn vm(&self, vm: &VmName) -> Option<VmRecord> {
        let process = self.process.as_ref()?;
        let (pid, start, qmp) = (process.pid, process.start_time_ticks, process.qmp.clone());
        Some(VmRecord::new(vm.clone(), serde_json::Value::Null, (pid, start), &self.boot_id, qmp))
    }
}

/// Driver of the source's part in one migration.
pub struct SourceDriver {
    context: Arc<Context>,
    terms: MigrationTerms,
    inbox: SourceInbox,
    controls: Arc<MigrationControls>,
    telemetry: Telemetry,
    clock: Clock,
    session: SourceSession,
    registry: RegistryRequests,
    agreement: Agreement,
    connections: SourceConnections,
    resources: SourceResources,
    reporter: SourceReporter,
}

/// Requests of this migration to the ownership registry.
#[derive(Default)]
struct RegistryRequests {
    client: RegistryClient,
    /// True while an offer is in progress.
    is_offering: bool,
}

/// Connections to the destination.
struct SourceConnections {
    generation: Generation,
    /// Connection for messages: the control stream of the present generation, later a connection for questions.
    control: Option<phases::ControlStream>,
    /// Error that ended the last lost control connection; none if unknown.
    control_lost: Option<String>,
    /// The last control connection, on which ABORT was sent.
    aborted_control: Option<phases::ControlStream>,
    /// Peer that waits for the answer to the question in progress.
    asker: Option<inbox::Reply>,
}

impl SourceConnections {
    fn new() -> Self {
        Self {
            generation: Generation(1),
            control: None,
            control_lost: None,
            aborted_control: None,
            asker: None,
        }
    }
}

/// The VM, and all that exists on this host because of its migration.
struct SourceResources {
    /// The VM; absent if its QEMU is gone.
    vm: Option<SourceVm>,
    /// The CPU throttle, if the guest's processors may be slowed down.
    cpu_throttle: Option<cpu_throttle::CpuThrottle>,
    /// Parts of the VM that migrate with it.
    participants: participants::Participants,
    /// Stage of the migration, with what exists in it alone. A phase has it while it runs.
    stage: SourceStage,
}

impl SourceResources {
    fn new(vm: Option<SourceVm>, participants: participants::Participants) -> Self {
        Self { vm, cpu_throttle: None, participants, stage: SourceStage::default() }
    }
}

/// Reports to users, and measurements for them.
#[derive(Default)]
struct SourceReporter {
    reports: reports::Reports,
    /// The last reason recorded in the journal.
    reason: Option<String>,
    stop_clock: phases::StopClock,
    /// CPU time since the migration began; absent if another agent began it.
    cpu: Option<CpuTime>,
    /// True if the destination found a page present that post-copy was to send, and stopped the guest for it.
    has_unexpected_page: bool,
    /// Forecasts the end for users.
    end_forecaster: Option<expected_end::EndForecaster>,
}

impl SourceDriver {
    /// Passes the measured fixed costs of migrations like this one to `use_it`.
    fn fixed_costs<T>(&self, use_it: impl FnOnce(&mut CostHistory) -> T) -> T {
        let copies_disks = self.controls.report(|report| !report.disks.is_empty());
        self.context.fixed_costs(&self.terms.destination, copies_disks, use_it)
    }

    /// Creates the driver of a migration, either new ([`SourceState::Idle`]) or in the state that the journal has. `vm`
    /// is absent if its QEMU is gone.
    pub fn new(
        context: Arc<Context>,
        terms: MigrationTerms,
        state: SourceState,
        vm: Option<SourceVm>,
        inbox: SourceInbox,
        controls: Arc<MigrationControls>,
        publisher: Publisher,
    ) -> Self {
        let ram_bytes = controls.report(|report| report.ram_blocks.iter().map(|block| block.bytes).sum());
        publisher.update(|progress| progress.ram_bytes = ram_bytes);
        let cpu = (state == SourceState::Idle).then(CpuTime::start);
        let telemetry = Telemetry::new(publisher, controls.requested);
        let participants = participants::of_a_vm(&participants::Environment {
            context: Arc::clone(&context),
            terms: terms.clone(),
            controls: Arc::clone(&controls),
            is_resumed: state != SourceState::Idle,
        });
        Self {
            context,
            terms,
            inbox,
            controls,
            telemetry,
            clock: Clock::start(),
            session: SourceSession::new(state),
            registry: RegistryRequests::default(),
            agreement: Agreement::default(),
            connections: SourceConnections::new(),
            resources: SourceResources::new(vm, participants),
            reporter: SourceReporter { cpu, ..SourceReporter::default() },
        }
    }

    /// Returns the time between two attempts.
    fn retry(&self) -> Duration {
        Duration::from_millis(self.context.config.timeouts.retry_ms)
    }

    /// Returns the time without a sign of life after which a party counts as lost for good.
    fn reclaim_after(&self) -> Duration {
        Duration::from_millis(self.context.config.timeouts.reclaim_after_ms)
    }

    fn phase(&self, phase: Phase) {
        self.telemetry.update(|progress| progress.phase = phase);
    }

    fn note(&self, what: &str, detail: impl Into<String>) {
        self.controls.note(what, detail);
    }
}
