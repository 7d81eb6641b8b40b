//! The phases of a migration up to READY, each a function.
//!
//! ```text
//! prepare     PREPARED journalled; the destination has accepted; streams are open; writes are tracked
//! pre-copy    rounds: clear, drain, read; over new connections after a cut
//! stop        the guest is stopped
//! last pages  the remaining pages, the device state saved at the same time, one more scan; or, with post-copy, the
//!             remaining pages are announced and sent later
//! verify      if requested
//! load        the destination loads the device state: READY
//! ```
//!
//! The next step is decided in [`engine::session`], and carried out here. A phase that cannot continue returns a
//! [`Failure`]: the event for the engine, and the reason for users. The rounds are in [`pre_copy`]; the work while the
//! guest is stopped is in [`switchover`]. Each phase has the stage that it runs in ([`stages`](super::stages)): after a
//! failure, the stage's way back leaves to the driver what has to be undone.

mod disks_first;
mod page_selector;
mod post_copy;
mod pre_copy;
mod rounds;
mod switchover;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::OwedPages;
use engine::handover::source::SourceEvent;
use engine::session::{
    self, PostCopyRequirement, StartOrder, SwitchoverKind, SwitchoverPlan, UnmetRequirement,
};
use link::transport::{ConnectionHandle, MessageSender};
use proto::message::{Acceptance, Message};
use proto::{Epoch, Incarnation};
use tracing::{debug, warn};

use super::agreement::RedirectedGuest;
use super::cpu_throttle::CpuThrottle;
use super::failure::{Failure, gone, refusal, unexpected};
use super::participants::PrepareProgress;
use super::payload::Payload;
use super::pressure::PressureMeter;
use super::reductions::ReductionControl;
use super::stages::{Accepted, Proposed, RolledBack, SourceStage, Stopped, Streaming, StreamingRecords};
use super::streams::Streams;
use super::{Goals, SourceDetails, SourceDriver};
use api::progress::Phase;
use api::report::{FailureKind, Measured};
use api::{StopPolicy, ThrottleCpu};
use host::SourceVm;
use store::journal::Durability;

/// The writing half of a control stream; a thread of its own reads the other half into the inbox.
#[derive(Debug)]
pub(crate) struct ControlStream {
    pub(crate) writer: Box<dyn MessageSender>,
    pub(crate) handle: Arc<dyn ConnectionHandle>,
    /// Number of the connection, counted by the driver.
    pub(crate) connection_id: u64,
}

impl Drop for ControlStream {
    fn drop(&mut self) {
        self.handle.shutdown();
    }
}

/// Times around the stop, by the source's clock.
#[derive(Debug, Default)]
pub(crate) struct StopClock {
    pub(crate) stopped_at: Option<Instant>,
    /// Downtime that the policy expected when it decided to stop.
    pub(crate) expected_downtime: Duration,
    pub(crate) measured: Measured,
}

/// Streams and pages with which rounds begin, in this order of participants.
struct FirstRound {
    streams: Streams,
    owed: OwedPages,
    order: StartOrder,
}

/// Content of READY.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) incarnation: Incarnation,
}

impl SourceDriver {
    /// Runs all phases, one after the other.
    pub(crate) fn reach_ready(&mut self) -> Result<Ready, Failure> {
        self.enable_cpu_throttle()?;
        let proposed = Proposed { pressure: self.start_pressure_meter() };
        let (accepted, acceptance) = self.propose(proposed)?;
        let ready = self.move_to_ready(accepted, &acceptance);
        self.set_control_deadline(None);
        ready
    }

    /// Runs the phases of a migration that is proposed.
    fn propose(&mut self, proposed: Proposed) -> Result<(Accepted, Acceptance), Failure> {
        let prepared = self.prepare();
        // However that ended, no frame of the probe enters the guest's network from here on.
        self.controls.end_probe();
        let opened = prepared.and_then(|acceptance| {
            let payload = self.open_participants(&acceptance)?;
            Ok((payload, acceptance))
        });
        match opened {
            Ok((payload, acceptance)) => Ok((proposed.accept(payload), acceptance)),
            Err(failure) => Err(self.fail_in(proposed.roll_back(), failure)),
        }
    }

    /// Runs the phases of a migration that the destination has accepted.
    fn move_to_ready(&mut self, mut accepted: Accepted, acceptance: &Acceptance) -> Result<Ready, Failure> {
        match self.begin_streaming(&mut accepted, acceptance) {
            Ok((first, control)) => {
                let ready = self.stream(accepted.stream(), first);
                // Policies control the reductions until here.
                drop(control);
                ready
            }
            Err(failure) => Err(self.fail_in(accepted.roll_back(), failure)),
        }
    }

    /// Starts the reductions, and opens the streams.
    fn begin_streaming(
        &mut self,
        accepted: &mut Accepted,
        acceptance: &Acceptance,
    ) -> Result<(FirstRound, ReductionControl), Failure> {
        let payload = &mut accepted.payload;
        let shared = self.shared_images(acceptance, payload);
        let order = StartOrder::of(self.resources.participants.is_any_sent_first());
        let has_common_content = order == StartOrder::DisksFirst || shared.is_some();
        let known = if self.uses_references(acceptance) && has_common_content {
            Some((self.query_destination_content(acceptance, payload)?, shared))
        } else {
            None
        };
        let control = self.start_reductions(acceptance, known, payload);
        accepted.reductions = control.reductions().clone();
        let mut owed = self.resources.participants.first_pages();
        if order == StartOrder::Together {
            owed = self.prepare_others(owed, payload)?;
        }
        let streams = self.open_streams(payload)?;
        Ok((FirstRound { streams, owed, order }, control))
    }

    /// Runs the phases in which pages are sent while the guest runs, and stops it.
    fn stream(&mut self, mut streaming: Streaming, first: FirstRound) -> Result<Ready, Failure> {
        let sent = self.send_rounds(&mut streaming, first).and_then(|sent| {
            self.stop()?;
            Ok(sent)
        });
        match sent {
            Ok((streams, owed, ending)) => {
                let (mut stopped, records) = streaming.stop();
                let ready = self.switch_over(&mut stopped, records, streams, owed, ending);
                // A guest that continues at the source does so first; changes of the kernel's and of QEMU's state are
                // undone after that.
                self.resources.stage = SourceStage::Stopped(stopped);
                ready
            }
            Err(failure) => Err(self.fail_in(streaming.roll_back(), failure)),
        }
    }

    /// Sends rounds, the first ones of participants that are sent before the others, until the guest is to be stopped.
    fn send_rounds(
        &mut self,
        streaming: &mut Streaming,
        first: FirstRound,
    ) -> Result<(Streams, OwedPages, SwitchoverKind), Failure> {
        let FirstRound { mut streams, mut owed, order } = first;
        if order == StartOrder::DisksFirst {
            (streams, owed) = self.send_disks_first(streams, owed, streaming)?;
            owed = self.prepare_others(owed, &streaming.payload)?;
        }
        self.pre_copy(streams, owed, streaming)
    }

    /// Runs the phases in which the guest is stopped.
    fn switch_over(
        &mut self,
        stopped: &mut Stopped,
        mut records: StreamingRecords,
        streams: Streams,
        owed: OwedPages,
        ending: SwitchoverKind,
    ) -> Result<Ready, Failure> {
        let must_compare = self.controls.goals().verify;
        let switchover = SwitchoverPlan::begin(ending, self.session.state(), must_compare);
        let (state, streams) = match switchover.ending() {
            SwitchoverKind::PostCopy => (self.announce_pages(streams, owed, stopped, &mut records)?, None),
            SwitchoverKind::StopAndCopy => {
                let (state, streams) = self.last_pages(streams, owed, stopped)?;
                (state, Some(streams))
            }
        };
        if switchover.is_compared() {
            self.verify(stopped)?;
        }
        self.load(&state, stopped, streams, records)
    }

    /// Ends the phases with a failure. A guest that continues at the source does so first; what the stage has left is
    /// undone after that.
    fn fail_in(&mut self, rolled_back: RolledBack, failure: Failure) -> Failure {
        self.resources.stage = SourceStage::RolledBack(rolled_back);
        failure
    }

    /// Proposes the migration; the destination decides which disks are copied.
    fn prepare(&mut self) -> Result<Acceptance, Failure> {
        self.phase(Phase::Preparing);
        let control =
            self.connect_control().map_err(|error| Failure::peer("cannot reach the destination", &error))?;
        self.connections.control = Some(control);
        let proposal = self
            .agreement
            .proposal
            .clone()
            .ok_or_else(|| Failure::new(SourceEvent::Failed, "nothing to propose"))?;
        self.send_message(&Message::Propose(Box::new(proposal)))?;
        let patience = Duration::from_millis(self.context.config.timeouts.qemu_start_ms) * 2;
        match self.receive_message(Instant::now() + patience)? {
            Message::Accept(acceptance) => self.take_acceptance(acceptance),
            Message::Reject { findings, largest_epoch } => {
                if let Some(largest) = largest_epoch {
                    self.learn_epoch(largest);
                }
                let reason = refusal(&findings);
                self.controls.report(|report| report.findings.extend(findings));
                Err(Failure::new(SourceEvent::PeerLost, reason).of_kind(FailureKind::Refused))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Records what the destination accepts, and fails if that is not enough for the goals.
    fn take_acceptance(&mut self, acceptance: Acceptance) -> Result<Acceptance, Failure> {
        self.note("accepted", format!("QEMU started in {} ms", acceptance.qemu_start_us / 1000));
        let proposed =
            self.agreement.proposal.as_ref().map(|proposal| proposal.disks.clone()).unwrap_or_default();
        let accepted =
            session::check_acceptance(&proposed, &acceptance, post_copy_goal(&self.controls.goals()));
        let why_not = acceptance.findings.iter().find(|finding| finding.code == "no-post-copy");
        let why_not = why_not.map_or_else(
            || "its version of whimbrel does not support it".to_owned(),
            |finding| finding.what.clone(),
        );
        self.agree_on_redirection(acceptance.redirection.clone())?;
        let agreed = self.agreement.with(&acceptance);
        self.controls.report(|report| {
            report.destination.ram_kind = Some(acceptance.ram_kind.clone());
            report.destination.qemu_version.clone_from(&acceptance.qemu_version);
            report.findings.extend(acceptance.findings.iter().cloned());
            self.resources.participants.report(&agreed, report);
        });
        self.forecast(&acceptance);
        self.record_accepted()?;
        let unmet = |goal| match goal {
            UnmetRequirement::Disk(name) => {
                format!("the destination does not confirm that it receives a copy of disk {name}")
            }
            UnmetRequirement::PostCopy => {
                format!("post-copy is not possible: {why_not}. Choose another --policy or --on-limit")
            }
        };
        let terms = accepted.map_err(|goal| Failure::new(SourceEvent::Failed, unmet(goal)))?;
        self.agreement.can_discard = terms.can_discard;
        self.agreement.can_post_copy = terms.can_post_copy;
        Ok(acceptance)
    }

    /// Accepts the destination's redirection of the VM's connections, if it is the one that was offered.
    fn agree_on_redirection(&mut self, answered: Option<serde_json::Value>) -> Result<(), Failure> {
        let Some(proposal) = &self.agreement.proposal else { return Ok(()) };
        let agreed = RedirectedGuest::of(&self.terms, proposal, answered);
        self.agreement.redirection = agreed.map_err(|reason| Failure::new(SourceEvent::Failed, reason))?;
        Ok(())
    }

    /// Makes the next epoch larger than `largest`.
    fn learn_epoch(&mut self, largest: Epoch) {
        if !session::is_plausible_epoch(self.terms.epoch(), largest) {
            warn!(%largest, "ignored an epoch that is too large");
        } else if let Err(error) = self.context.journal.learn_epoch(&self.terms.migration.vm, largest) {
            warn!(error = crate::chain(&error), "cannot record the epoch in the journal");
        }
    }

    /// Records, before anything is sent, that the destination has accepted: only such a destination is ever asked for
    /// its state. The present report is recorded, too, because it names the images that the destination has made: an
    /// agent that restarts, or an operator who has to decide, needs to know where they are.
    fn record_accepted(&self) -> Result<(), Failure> {
        let report = self.controls.report(|report| report.clone());
        let details = SourceDetails::of(&self.context, self.resources.vm.as_ref(), true);
        let journal = &self.context.journal;
        journal
            .put_report(&report)
            .and_then(|()| journal.set_details(&self.terms.migration, &details, Durability::Synced))
            .map_err(|error| Failure::local("cannot record that the destination has accepted", &error))
    }

    /// Prepares what the streams will send. The writes to participants that are sent first are recorded from here on.
    pub(super) fn open_participants(&mut self, acceptance: &Acceptance) -> Result<Payload, Failure> {
        let agreed = self.agreement.with(acceptance);
        self.resources.participants.check(&agreed)?;
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        let payload = self.resources.participants.open(vm)?;
        self.telemetry.show(self.resources.participants.progress());
        Ok(payload)
    }

    /// Prepares the remaining participants, whose pages are owed from here on. Handles notices in the meantime.
    fn prepare_others(&mut self, mut owed: OwedPages, payload: &Payload) -> Result<OwedPages, Failure> {
        loop {
            let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
            let participants = &mut self.resources.participants;
            if participants.prepare(vm, &payload.reductions(), &mut owed)? == PrepareProgress::Done {
                return Ok(owed);
            }
            self.handle_notices()?;
        }
    }

    /// Prepares the throttle of the guest's processors, if it was requested or if the policy may use it.
    fn enable_cpu_throttle(&mut self) -> Result<(), Failure> {
        let goals = self.controls.goals();
        let (is_wished, may_be) =
            (goals.settings.throttle_cpu != ThrottleCpu::Off, goals.settings.policy == StopPolicy::Sla);
        if !is_wished && !may_be {
            return Ok(());
        }
        let context = Arc::clone(&self.context);
        match CpuThrottle::begin(self.vm()?, &context.guard) {
            Ok(cpu_throttle) => self.resources.cpu_throttle = Some(cpu_throttle),
            Err(error) if is_wished => {
                return Err(Failure::local("cannot throttle the guest's processors", &error));
            }
            Err(error) => self.note("cpu-not-throttled", crate::chain(&error)),
        }
        Ok(())
    }

    /// Starts the measurement of how long the guest waits for processors: before anything is copied, for comparison.
    fn start_pressure_meter(&mut self) -> Option<PressureMeter> {
        let allowed_permille = u64::from(self.context.config.tuning.guest_wait_percent) * 10;
        let watch = self.resources.vm.as_mut().map(|vm| PressureMeter::begin(vm, allowed_permille));
        match watch.transpose() {
            #[cfg(feature = "comparison")]
            Ok(watch) => {
                let restraints = self.controls.goals().settings.restraints;
                watch.map(|watch| watch.restrained_by(restraints))
            }
            #[cfg(not(feature = "comparison"))]
            Ok(watch) => watch,
            // The kernel does not count this; nothing else is affected.
            Err(error) => {
                debug!(error = crate::chain(&error), "cannot measure the guest's waits");
                None
            }
        }
    }

    fn vm(&mut self) -> Result<&mut SourceVm, Failure> {
        self.resources.vm.as_mut().ok_or_else(gone)
    }
}

/// Returns the goal for post-copy.
fn post_copy_goal(goals: &Goals) -> PostCopyRequirement {
    if goals.settings.needs_post_copy() {
        PostCopyRequirement::Required
    } else if goals.can_post_copy() {
        PostCopyRequirement::Allowed
    } else {
        PostCopyRequirement::NotUsed
    }
}
