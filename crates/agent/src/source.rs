//! The source's driver: one thread that takes a VM from here to another host.
//!
//! A migration is a list of phases, each a function: check, prepare, pre-copy, stop, last pages, device state. They
//! end in READY or in a [`Failure`]; both are events for the engine, which decides everything from there on
//! ([`handover`]). Whatever happens outside (a message, a lost link, a user's word, QEMU's end) arrives in one
//! [`inbox`], so that no phase can miss it.

mod conversation;
mod ending;
mod guest;
mod handover;
mod inbox;
mod leavings;
mod memory;
mod phases;
mod pressure;
mod references;
mod serving;
mod slowing;
mod softening;
mod sparing;
mod telemetry;
mod throttling;
mod vm;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use engine::handover::Terms;
use engine::handover::source::{SourceEvent, SourceReport, SourceState};
use engine::precopy::{CostHistory, Sampling};
use proto::message::Proposal;
use proto::{Generation, VmName};

pub(crate) use inbox::{Inbox, Mailbox, Notice};

use crate::api::{
    Compress, Deltas, MigrateRequest, OnLimit, SoftPages, StopPolicy, ThrottleCpu, ThrottleWrites,
};
use crate::config::Limits as ConfigLimits;
use crate::context::Context;
use crate::cpu::CpuTime;
use crate::journal::VmRecord;
use crate::owners;
use crate::progress::{Phase, Publisher};
use crate::ram::KeptRegion;
use crate::report::{Objective, Outcome, Report};
use telemetry::Telemetry;
pub(crate) use vm::{SourceVm, VmError};

/// What a migration aims at; parts of it can be changed while it runs.
#[derive(Clone, Debug)]
pub(crate) struct Aims {
    /// When the guest is stopped.
    pub(crate) policy: StopPolicy,
    /// How its writes are looked at.
    pub(crate) sampling: Sampling,
    /// Downtime to aim at, in milliseconds.
    pub(crate) max_downtime_ms: u64,
    /// How long all of it may take, in milliseconds; none if it has time.
    pub(crate) max_total_ms: Option<u64>,
    /// Most rounds of pre-copy.
    pub(crate) max_rounds: u32,
    /// Whether nobody has said how many these are to be.
    pub(crate) has_usual_rounds: bool,
    /// How often all that is dirty goes before the rest comes after the guest, where that is the policy.
    pub(crate) hybrid_passes: u32,
    /// What to do when the rounds are used up.
    pub(crate) on_limit: OnLimit,
    /// Number of data streams.
    pub(crate) streams: u16,
    /// Cap on the sending rate, in bytes per second; none if there is none.
    pub(crate) bandwidth_bytes_per_s: Option<u64>,
    /// Compare all of memory and of copied disks after the stop.
    pub(crate) verify: bool,
    /// How fast the guest may write to disks that are copied.
    pub(crate) throttle_writes: ThrottleWrites,
    /// How fast its processors may be.
    pub(crate) throttle_cpu: ThrottleCpu,
    /// Pages of disks that the destination has already are referred to, and not sent.
    pub(crate) references: bool,
    /// How pages are compressed.
    pub(crate) compression: Compress,
    /// What is worth it.
    pub(crate) worth: ::memory::Worth,
    /// Whether only what changed is sent of pages that are sent again.
    pub(crate) deltas: Deltas,
    /// How much is remembered of pages for that, in bytes.
    pub(crate) deltas_bytes: usize,
    /// Which of the guest's memory is not sent because it can do without.
    pub(crate) soft_pages: SoftPages,
}

impl Aims {
    /// What a request says, and the configuration where it says nothing.
    pub(crate) fn new(request: &MigrateRequest, limits: &ConfigLimits) -> Self {
        let bandwidth = request.bandwidth_bytes_per_s.unwrap_or(limits.bandwidth_bytes_per_s);
        let throttle_writes = request.throttle_writes.unwrap_or(limits.throttle_writes);
        // A guest whose writes become slower and slower gets there in the end.
        let usual_rounds = match throttle_writes {
            ThrottleWrites::Off => limits.max_rounds,
            ThrottleWrites::Drain | ThrottleWrites::Threshold => limits.max_rounds.saturating_mul(10),
        };
        let policy = request.policy.unwrap_or(limits.policy);
        let is_sla = policy == StopPolicy::Sla;
        let max_total_ms = request.max_total_ms.unwrap_or(limits.max_total_ms);
        let soft_pages = match request.soft_pages.unwrap_or(limits.soft_pages) {
            // How long a guest takes to give its page cache back cannot be foreseen.
            SoftPages::Cold | SoftPages::All if is_sla => SoftPages::Free,
            soft_pages => soft_pages,
        };
        Self {
            policy,
            sampling: limits.sampling(),
            max_downtime_ms: request.max_downtime_ms.unwrap_or(limits.max_downtime_ms),
            max_total_ms: Some(max_total_ms).filter(|ms| *ms > 0 && is_sla),
            max_rounds: request.max_rounds.unwrap_or(usual_rounds),
            has_usual_rounds: request.max_rounds.is_none(),
            hybrid_passes: request.hybrid_passes.unwrap_or(limits.hybrid_passes),
            on_limit: request.on_limit.unwrap_or(limits.on_limit),
            streams: request.streams.unwrap_or(limits.streams),
            bandwidth_bytes_per_s: (bandwidth > 0).then_some(bandwidth),
            verify: request.verify,
            throttle_writes,
            throttle_cpu: request.throttle_cpu.unwrap_or(limits.throttle_cpu),
            references: request.references.unwrap_or(limits.references),
            compression: request.compression.unwrap_or(limits.compression),
            worth: limits.worth(),
            deltas: request.deltas.unwrap_or(limits.deltas),
            deltas_bytes: limits.deltas_bytes(),
            soft_pages,
        }
    }

    /// No disk is copied: there are no writes that could become slower, and so no reason for more rounds than usual.
    pub(crate) fn throttles_nothing(&mut self, limits: &ConfigLimits) {
        if self.has_usual_rounds {
            self.max_rounds = limits.max_rounds;
        }
        self.throttle_writes = ThrottleWrites::Off;
    }

    /// Whether pages have to be able to come after the guest.
    pub(crate) fn needs_post_copy(&self) -> bool {
        self.policy == StopPolicy::Hybrid || self.on_limit == OnLimit::PostCopy
    }

    /// Whether they may, where the destination knows how.
    pub(crate) fn may_post_copy(&self) -> bool {
        // What comes when the guest runs cannot be compared.
        self.needs_post_copy() || self.policy == StopPolicy::Sla && !self.verify
    }

    pub(crate) fn objective(&self) -> Objective {
        Objective {
            policy: self.policy.name().to_owned(),
            max_downtime_ms: self.max_downtime_ms,
            max_total_ms: self.max_total_ms,
            max_rounds: self.max_rounds,
            on_limit: match self.on_limit {
                OnLimit::Stop => "stop".to_owned(),
                OnLimit::PostCopy => "post-copy".to_owned(),
                OnLimit::Abort => "abort".to_owned(),
            },
            streams: self.streams,
            bandwidth_bytes_per_s: self.bandwidth_bytes_per_s,
        }
    }
}

/// What others may touch while a migration runs.
#[derive(Debug)]
pub(crate) struct Controls {
    /// What it aims at.
    pub(crate) aims: Mutex<Aims>,
    /// Cap on the sending rate, shared by all streams of all generations.
    pub(crate) rate: Arc<link::RateLimit>,
    /// The report as far as it is written.
    pub(crate) report: Mutex<Report>,
    /// When a user asked for it; of a migration that another agent began, when this one found it.
    pub(crate) requested: Instant,
}

impl Controls {
    pub(crate) fn new(aims: Aims, report: Report, requested: Instant) -> Self {
        let rate = Arc::new(link::RateLimit::new(aims.bandwidth_bytes_per_s));
        Self { aims: Mutex::new(aims), rate, report: Mutex::new(report), requested }
    }

    pub(crate) fn aims(&self) -> Aims {
        self.aims.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes what the migration aims at, and says what it aims at now.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Aims)) -> Aims {
        let mut aims = self.aims.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut aims);
        aims.clone()
    }

    pub(crate) fn report<T>(&self, change: impl FnOnce(&mut Report) -> T) -> T {
        change(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What the journal keeps of a migration for its driver's successor.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Details {
    /// The boot of the host on which it began.
    pub(crate) boot_id: String,
    /// Whether the destination has accepted. Without that it never had anything, whatever else was not synced: there is
    /// nothing to ask it, and a destination that is asked about what its journal does not know has lost its journal.
    #[serde(default)]
    pub(crate) accepted: bool,
    /// Its memory, where pages of it are to be sent when the guest runs at the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) later: Option<Vec<KeptRegion>>,
    /// Its QEMU. What the journal has of the VM itself can be forgotten or replaced meanwhile.
    #[serde(default)]
    pub(crate) process: Option<ProcessTrace>,
    /// Whether the VM ended before it was moved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) vm_ended: bool,
}

/// How a QEMU is found again.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct ProcessTrace {
    pub(crate) pid: u32,
    pub(crate) start_time_ticks: u64,
    pub(crate) qmp: PathBuf,
}

impl Details {
    /// What there is to be kept of a VM.
    pub(crate) fn of(context: &Context, vm: Option<&SourceVm>, accepted: bool) -> Self {
        let process = vm.map(|vm| ProcessTrace {
            pid: vm.process.pid(),
            start_time_ticks: vm.process.start_time(),
            qmp: vm.qmp_path.clone(),
        });
        Self { boot_id: context.boot_id.clone(), accepted, later: None, process, vm_ended: false }
    }

    /// The record of the VM's QEMU, as the migration found it.
    pub(crate) fn vm(&self, vm: &VmName) -> Option<VmRecord> {
        let process = self.process.as_ref()?;
        let (pid, start, qmp) = (process.pid, process.start_time_ticks, process.qmp.clone());
        Some(VmRecord::new(vm.clone(), serde_json::Value::Null, (pid, start), &self.boot_id, qmp))
    }
}

/// The source's side of one migration.
pub(crate) struct Driver {
    context: Arc<Context>,
    terms: Terms,
    state: SourceState,
    /// Absent when its QEMU is gone.
    vm: Option<SourceVm>,
    inbox: Inbox,
    controls: Arc<Controls>,
    telemetry: Telemetry,
    generation: Generation,
    /// The connection for messages: the control stream of the present generation, later one for questions.
    control: Option<phases::Control>,
    /// What ended the last one that was lost; none if that is not known.
    control_lost: Option<String>,
    /// The last one, on which ABORT is on its way.
    parting: Option<phases::Control>,
    /// What copying costs the guest, where that can be seen.
    pressure: Option<pressure::Watch>,
    /// The guest's processors, where they may be slowed down.
    slowing: Option<slowing::Slowing>,
    /// The guest's memory and disks, once their writes are seen and no phase has them in hand.
    cargo: Option<memory::Cargo>,
    /// Pages that the destination's guest still needs, where they come after it.
    later: Option<serving::Later>,
    /// The connection for pages that somebody waits for, until it is of use; there is one where pages may come later.
    page_stream: Option<link::Connection>,
    /// The destination has said that they may.
    may_post_copy: bool,
    /// And that it takes pages away before the guest is stopped.
    takes_away: bool,
    /// Which of them it was told to.
    named: phases::Named,
    /// What the guest wrote last, where that may come after it.
    written: ::memory::Recency,
    /// One of the pages that come after it was there before it came, and the guest was stopped for it.
    came_untrusted: bool,
    /// The destination was asked what is in its templates, and has not told all of it.
    seeking: bool,
    /// Who waits for an answer to the question that is being dealt with.
    asker: Option<inbox::Reply>,
    /// Events that effects led to, to be taken before anything from the inbox.
    follow_ups: VecDeque<SourceEvent>,
    /// An effect has failed since the last repetition.
    effects_failed: bool,
    /// What the journal did not take and has to take before the end.
    unjournalled: Option<SourceState>,
    /// QEMU was asked to record its guest's writes no more, and has not answered.
    still_records: bool,
    /// The destination may have all that it needs: HELD was sent, and no pages come after the guest.
    may_have_all: bool,
    proposal: Option<Proposal>,
    /// Its questions to the register.
    register: owners::Desk,
    /// An offer to the register is on its way.
    offering: Arc<AtomicBool>,
    clock: phases::StopClock,
    contact: handover::Contact,
    outcome: Option<Outcome>,
    /// The last thing that people were told, and in which state: not again at every repetition.
    told: Option<(&'static str, SourceReport)>,
    /// They were told that the destination cannot be reached, and not that it was since.
    said_unreachable: bool,
    /// The last reason that the journal was given.
    reason: Option<String>,
    /// Since the migration began; absent if another agent began it.
    cpu: Option<CpuTime>,
}

impl Driver {
    /// What migrations like this one have measured.
    fn fixed_costs<T>(&self, use_it: impl FnOnce(&mut CostHistory) -> T) -> T {
        let copies_disks = self.controls.report(|report| !report.disks.is_empty());
        self.context.fixed_costs(&self.terms.destination, copies_disks, use_it)
    }

    /// The source's side of a migration, new ([`SourceState::Idle`]) or as the journal has it. `vm` is absent if its
    /// QEMU is gone.
    pub(crate) fn new(
        context: Arc<Context>,
        terms: Terms,
        state: SourceState,
        vm: Option<SourceVm>,
        inbox: Inbox,
        controls: Arc<Controls>,
        publisher: Publisher,
    ) -> Self {
        let contact = handover::Contact::new(&context.config.timeouts);
        let ram_bytes = controls.report(|report| report.ram_blocks.iter().map(|block| block.bytes).sum());
        publisher.update(|progress| progress.ram_bytes = ram_bytes);
        let cpu = (state == SourceState::Idle).then(CpuTime::start);
        let telemetry = Telemetry::new(publisher, controls.requested);
        Self {
            context,
            terms,
            state,
            vm,
            inbox,
            controls,
            telemetry,
            generation: Generation(1),
            control: None,
            control_lost: None,
            parting: None,
            pressure: None,
            slowing: None,
            cargo: None,
            later: None,
            page_stream: None,
            may_post_copy: false,
            takes_away: false,
            named: phases::Named::none(),
            written: ::memory::Recency::default(),
            came_untrusted: false,
            seeking: false,
            asker: None,
            follow_ups: VecDeque::new(),
            effects_failed: false,
            unjournalled: None,
            still_records: false,
            may_have_all: false,
            proposal: None,
            register: owners::Desk::default(),
            offering: Arc::default(),
            clock: phases::StopClock::default(),
            contact,
            outcome: None,
            told: None,
            said_unreachable: false,
            reason: None,
            cpu,
        }
    }

    fn phase(&self, phase: Phase) {
        self.telemetry.update(|progress| progress.phase = phase);
    }

    fn note(&self, what: &str, detail: impl Into<String>) {
        let at_us = self.telemetry.elapsed_us();
        self.controls.report(|report| report.event(at_us, what, detail));
    }
}
