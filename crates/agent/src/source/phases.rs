//! The phases of a migration up to READY, each a function.
//!
//! ```text
//! prepare     PREPARED journalled; the destination has accepted; streams are open; writes are tracked
//! pre-copy    rounds: clear, drain, read; over new connections after a cut
//! stop        the guest stands still
//! last pages  what is left, the device state saved meanwhile, one scan more
//! verify      where asked for
//! load        the destination loads the device state: READY
//! ```
//!
//! A phase that cannot go on returns a [`Failure`]: what the engine is to be told, and why, for people.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::{DataStream, Interrupted, Owed, Sender, Sent};
use engine::handover::source::SourceEvent;
use engine::precopy::{Decision, Policy, RoundObservation};
use link::Writer;
use proto::message::{Finding, Message, Severity};
use proto::{Epoch, Incarnation};
use tracing::{info, warn};

use super::vm::SourceVm;
use super::{Details, Driver, memory};
use crate::journal::Durability;
use crate::machine::Machine;
use crate::progress::Phase;
use crate::report::{Measured, Round};

/// Why a phase ended the migration.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What the engine is told.
    pub(crate) event: SourceEvent,
    /// What people are told.
    pub(crate) reason: String,
}

impl Failure {
    pub(crate) fn new(event: SourceEvent, reason: impl Into<String>) -> Self {
        Self { event, reason: reason.into() }
    }

    /// Something on this side made going on impossible. Takes an error with all its causes.
    pub(crate) fn local(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(SourceEvent::Failed, format!("{doing}: {}", crate::chain(error)))
    }

    pub(super) fn peer(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(SourceEvent::PeerLost, format!("{doing}: {}", crate::chain(error)))
    }
}

/// The writing half of a control stream; a thread of its own reads the other half into the inbox.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) writer: Writer,
    pub(crate) handle: link::Handle,
    /// Which connection, by the driver's own count.
    pub(crate) link: u64,
}

impl Drop for Control {
    fn drop(&mut self) {
        self.handle.shutdown();
    }
}

/// What the source's clock measures around the stop.
#[derive(Debug, Default)]
pub(crate) struct StopClock {
    pub(crate) stopped_at: Option<Instant>,
    /// What the policy expected when it said stop.
    pub(crate) expected_downtime: Duration,
    pub(crate) measured: Measured,
}

/// READY, as it came.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) incarnation: Incarnation,
}

impl Driver {
    /// All phases, one after the other.
    pub(crate) fn reach_ready(&mut self) -> Result<Ready, Failure> {
        self.prepare()?;
        let mut tracked = self.track()?;
        let ready = self.move_to_ready(&mut tracked);
        // A guest that goes on here does so first; the kernel's bookkeeping is undone after that.
        self.tracked = Some(tracked);
        ready
    }

    fn move_to_ready(&mut self, tracked: &mut memory::Tracked) -> Result<Ready, Failure> {
        let sender = self.open_streams(tracked)?;
        let (sender, owed) = self.pre_copy(sender, tracked)?;
        self.stop()?;
        let state = self.last_pages(sender, owed, tracked)?;
        if self.controls.aims().verify {
            self.verify()?;
        }
        self.load(&state)
    }

    fn prepare(&mut self) -> Result<(), Failure> {
        self.phase(Phase::Preparing);
        let control =
            self.connect_control().map_err(|error| Failure::peer("cannot reach the destination", &error))?;
        self.control = Some(control);
        let proposal =
            self.proposal.clone().ok_or_else(|| Failure::new(SourceEvent::Failed, "nothing to propose"))?;
        self.say(&Message::Propose(Box::new(proposal)))?;
        let patience = Duration::from_millis(self.context.config.timeouts.qemu_start_ms) * 2;
        match self.hear(Instant::now() + patience)? {
            Message::Accept(acceptance) => {
                self.accepted()?;
                self.note("accepted", format!("QEMU started in {} ms", acceptance.qemu_start_us / 1000));
                self.controls.report(|report| {
                    report.destination.ram_kind = Some(acceptance.ram_kind);
                    report.destination.qemu_version = acceptance.qemu_version;
                    report.findings.extend(acceptance.findings);
                });
                Ok(())
            }
            Message::Reject { findings, largest_epoch } => {
                if let Some(largest) = largest_epoch {
                    self.learn_epoch(largest);
                }
                let reason = refusal(&findings);
                self.controls.report(|report| report.findings.extend(findings));
                Err(Failure::new(SourceEvent::PeerLost, reason))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// A journal that was begun anew gives epochs that others have seen already: the next one is larger. Not larger by any
    /// number that a peer may name: there must be epochs left.
    fn learn_epoch(&mut self, largest: Epoch) {
        const LEAP: u64 = 1 << 32;
        let own = self.terms.epoch();
        if largest.0 > own.0.saturating_add(LEAP) {
            warn!(%largest, "an epoch out of reach");
        } else if let Err(error) = self.context.journal.learn_epoch(&self.terms.migration.vm, largest) {
            warn!(error = crate::chain(&error), "the epoch is not in the journal");
        }
    }

    /// Noted before anything is sent: only a destination that has accepted is ever asked what it has.
    fn accepted(&self) -> Result<(), Failure> {
        let details = Details::of(&self.context, self.vm.as_ref(), true);
        self.context
            .journal
            .set_details(&self.terms.migration, &details, Durability::Synced)
            .map_err(|error| Failure::local("cannot note that the destination has accepted", &error))
    }

    /// From here on writes of the guest are seen. Takes seconds for a large guest that came by a migration, and listens
    /// meanwhile.
    fn track(&mut self) -> Result<memory::Tracked, Failure> {
        let failed = |error: memory::TrackError| Failure::local("cannot track the guest's writes", &error);
        let context = Arc::clone(&self.context);
        let mut tracking = memory::Tracking::begin(&context, self.vm()?).map_err(failed)?;
        while tracking.step().map_err(failed)? {
            self.take_notices()?;
        }
        tracking.finish(self.vm()?).map_err(failed)
    }

    fn open_streams(&mut self, tracked: &memory::Tracked) -> Result<Sender, Failure> {
        let streams =
            self.connect_streams().map_err(|error| Failure::peer("cannot open the data streams", &error))?;
        self.start_sender(tracked, streams)
    }

    pub(super) fn start_sender(
        &mut self,
        tracked: &memory::Tracked,
        streams: Vec<DataStream>,
    ) -> Result<Sender, Failure> {
        let sender = Sender::start(tracked.ram(), streams)
            .map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        self.inbox.interrupts(Some(sender.handle()));
        self.telemetry.follow(Some(sender.handle()));
        Ok(sender)
    }

    /// Rounds until the policy says stop.
    fn pre_copy(&mut self, sender: Sender, tracked: &mut memory::Tracked) -> Result<(Sender, Owed), Failure> {
        self.phase(Phase::PreCopy);
        let mut policy = memory::policy(&self.controls.aims(), self.context.fixed_costs().estimate());
        let mut owed = tracked.everything();
        let mut sender = sender;
        let mut sent_before = None;
        loop {
            let scanned_at = Instant::now();
            let cleared = owed
                .clear_marks(tracked.log())
                .map_err(|failed| Failure::local("cannot scan for dirty pages", &failed))?;
            let scan = cleared.scan();
            let drain_began = Instant::now();
            let vm = self.vm()?;
            let readable = cleared
                .drain(|| vm.drain())
                .map_err(|failed| Failure::local("cannot drain block I/O", &failed))?;
            let drain_us = drain_began.elapsed().as_micros() as u64;

            if let Some(sent) = sent_before.take() {
                let observed = memory::observe(&sent, scan, readable.pages(), scanned_at);
                policy.aim(memory::aim(&self.controls.aims()));
                let decision = policy.decide(&observed);
                self.decided(&observed, &decision);
                match decision {
                    Decision::NextRound { .. } => {}
                    Decision::StopAndCopy { expected_downtime_ns } => {
                        self.clock.expected_downtime = Duration::from_nanos(expected_downtime_ns);
                        return Ok((sender, readable.give_up()));
                    }
                    Decision::GiveUp { reason } => {
                        self.context.fixed_costs().forget();
                        return Err(Failure::new(SourceEvent::Failed, reason.to_string()));
                    }
                }
            }
            self.take_notices()?;

            let pages = readable.pages();
            match sender.send_round(readable) {
                Ok(Sent { sender: next, owed: left, stats }) => {
                    self.controls.report(|report| {
                        report.rounds.push(Round {
                            round: stats.round,
                            dirty_pages: pages,
                            scan_us: scan.duration_us,
                            drain_us,
                            ..memory::round_report(&stats)
                        });
                    });
                    sent_before = Some(memory::SentRound { stats, scanned_at });
                    (sender, owed) = (next, left);
                }
                Err(interrupted) => {
                    let Interrupted { owed: left, cause, .. } = *interrupted;
                    info!(%cause, "round interrupted");
                    self.inbox.interrupts(None);
                    self.take_notices_or(&cause)?;
                    sender = self.reconnect(tracked, &cause)?;
                    owed = left;
                }
            }
        }
    }

    fn decided(&self, observed: &RoundObservation, decision: &Decision) {
        let (word, expected_us) = match decision {
            Decision::NextRound { expected_downtime_ns } => {
                ("another-round", Some(expected_downtime_ns / 1000))
            }
            Decision::StopAndCopy { expected_downtime_ns } => ("stop", Some(expected_downtime_ns / 1000)),
            Decision::GiveUp { .. } => ("abort", None),
        };
        self.controls.report(|report| {
            if let Some(round) = report.rounds.last_mut() {
                word.clone_into(&mut round.decision);
                round.expected_downtime_us = expected_us;
                round.dirty_rate_bytes_per_s = observed.dirty_rate_bytes_per_s();
            }
        });
        self.telemetry.update(|progress| {
            progress.expected_downtime_us = expected_us;
            progress.dirty_rate_bytes_per_s = observed.dirty_rate_bytes_per_s();
        });
    }

    fn stop(&mut self) -> Result<(), Failure> {
        self.phase(Phase::LastRound);
        let cannot = |error: super::VmError| Failure::local("the guest is not moved", &error);
        let run = self.vm()?.runs_or_is_paused().map_err(cannot)?;
        self.clock.stopped_at = Some(Instant::now());
        self.feed(&SourceEvent::Stop { run })
            .map_err(|error| Failure::local("cannot stop the guest", &error))?;
        // Its state may have changed in between.
        self.vm()?.runs_or_is_paused().map_err(cannot)?;
        self.clock.measured.stop_us = self.since_stop_us();
        self.note("stopped", "");
        Ok(())
    }

    /// Sends what is left. Meanwhile QEMU saves its device state; because saving may write guest memory, one scan more
    /// comes after it.
    fn last_pages(
        &mut self,
        sender: Sender,
        owed: Owed,
        tracked: &mut memory::Tracked,
    ) -> Result<Vec<u8>, Failure> {
        let began = Instant::now();
        let acknowledged_by = self.standstill_ends();
        // Nothing gives memory back any more. Without a comparison the guest does not stand still for it.
        if self.controls.aims().verify {
            tracked.will_be_compared();
        }
        let vm = self.vm()?;
        let cleared = owed
            .clear_marks(tracked.log())
            .map_err(|failed| Failure::local("cannot scan for dirty pages", &failed))?;
        let (pages, scan) = (cleared.pages(), cleared.scan());
        let readable = cleared.stopped_before();
        let (sent, saved) = std::thread::scope(|scope| {
            let saving = scope.spawn(|| vm.save_devices());
            (sender.send_round_by(readable, acknowledged_by), saving.join())
        });
        let sent = sent.map_err(|interrupted| self.lost_while_stopped(&interrupted.cause))?;
        let state = saved
            .map_err(|_| Failure::new(SourceEvent::Failed, "saving the device state panicked"))?
            .map_err(|error| Failure::local("cannot save the device state", &error))?;
        self.last_round(&sent, pages, scan.duration_us);

        let cleared = sent
            .owed
            .clear_marks(tracked.log())
            .map_err(|failed| Failure::local("cannot scan for dirty pages", &failed))?;
        let (pages, scan) = (cleared.pages(), cleared.scan());
        let sent = sent
            .sender
            .send_round_by(cleared.stopped_before(), self.standstill_ends())
            .map_err(|interrupted| self.lost_while_stopped(&interrupted.cause))?;
        self.last_round(&sent, pages, scan.duration_us);
        self.inbox.interrupts(None);
        self.telemetry.follow(None);
        self.take_notices()?;
        self.clock.measured.last_pages_us = began.elapsed().as_micros() as u64;
        Ok(state)
    }

    /// Until when the stopped guest waits for the destination's next answer: longer than all should take, but not for
    /// ever. An agent that hangs is no reason to stand still, however well its host is.
    fn standstill_ends(&self) -> Instant {
        let patience = Duration::from_millis(self.context.config.timeouts.standstill_ms);
        Instant::now() + 4 * self.clock.expected_downtime + patience
    }

    fn last_round(&self, sent: &Sent, pages: u64, scan_us: u64) {
        self.controls.report(|report| {
            report.rounds.push(Round {
                stopped: true,
                dirty_pages: pages,
                scan_us,
                ..memory::round_report(&sent.stats)
            });
        });
    }

    /// The guest stands still: waiting for the link would make it wait too, so the migration ends.
    fn lost_while_stopped(&mut self, cause: &::memory::SendError) -> Failure {
        self.inbox.interrupts(None);
        match self.take_notices_or(cause) {
            Err(failure) => failure,
            Ok(()) => Failure::new(
                SourceEvent::PeerLost,
                format!("the link was lost while the guest was stopped: {}", crate::chain(cause)),
            ),
        }
    }

    fn verify(&mut self) -> Result<(), Failure> {
        self.phase(Phase::Verifying);
        let began = Instant::now();
        // Otherwise memory that was plugged meanwhile would be taken for memory that was lost.
        self.check_unchanged()?;
        let vm = self.vm()?;
        let hashes = vm.hashes().map_err(|error| Failure::local("cannot read the guest's memory", &error))?;
        let patience = Duration::from_millis(self.context.config.timeouts.give_up_after_ms);
        let (chunks, compared_bytes) = (hashes.chunks, hashes.bytes);
        let mut different = 0;
        for message in &hashes.messages {
            self.say(message)?;
            match self.hear(Instant::now() + patience)? {
                Message::Verified { different_chunks } => different += different_chunks.len() as u64,
                other => return Err(unexpected(&other)),
            }
        }
        let duration_us = began.elapsed().as_micros() as u64;
        self.clock.measured.verify_us = duration_us;
        self.controls.report(|report| {
            report.verification = Some(crate::report::Verification {
                compared_bytes,
                chunks,
                different_chunks: different,
                duration_us,
            });
        });
        if different > 0 {
            let reason = format!(
                "{different} of {chunks} chunks of memory differ between the two sides; this is an error of Whimbrel, \
                 please report it. The VM goes on here"
            );
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        Ok(())
    }

    fn load(&mut self, state: &[u8]) -> Result<Ready, Failure> {
        self.phase(Phase::DeviceState);
        let began = Instant::now();
        let digest = blake3::hash(state).to_hex().to_string();
        self.say(&Message::DeviceState { bytes: state.len() as u64, digest: digest.clone() })?;
        for piece in state.chunks(proto::limits::BLOB_BYTES) {
            self.send("cannot send the device state", |writer| writer.send_blob(piece))?;
        }
        // While the destination loads. That it is ready then implies that this side is held.
        self.check_unchanged()?;
        self.hold()?;
        self.say(&Message::Held { epoch: self.terms.epoch() })?;
        match self.hear(self.standstill_ends())? {
            Message::Ready { epoch, incarnation, digest: loaded, load_us } => {
                if epoch != self.terms.epoch() || loaded != digest {
                    return Err(Failure::new(
                        SourceEvent::Failed,
                        "the destination has loaded another device state than the one that was sent",
                    ));
                }
                self.clock.measured.load_us = load_us;
                self.clock.measured.save_to_ready_us = began.elapsed().as_micros() as u64;
                self.note("ready", "");
                Ok(Ready { incarnation })
            }
            other => Err(unexpected(&other)),
        }
    }

    fn check_unchanged(&mut self) -> Result<(), Failure> {
        let unchanged = self.vm()?.check_unchanged();
        unchanged.map_err(|error| Failure::local("the guest is not as it was", &error))
    }

    /// Before READY nobody's `cont` has reached the guest, and from here on nobody's can: QEMU is held first, and then
    /// looked at. If nothing comes of the handover, the guest's `cont` lets QEMU go, or undoing does.
    pub(super) fn hold(&mut self) -> Result<(), Failure> {
        self.vm()?.hold().map_err(|error| Failure::local("QEMU cannot be held", &error))?;
        if self.vm()?.was_resumed().map_err(|error| Failure::local("QEMU's monitor failed", &error))? {
            let reason = "somebody else continued the guest while it was stopped for the handover";
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        Ok(())
    }

    fn vm(&mut self) -> Result<&mut SourceVm, Failure> {
        self.vm.as_mut().ok_or_else(|| Failure::new(SourceEvent::QemuDied, "QEMU is gone"))
    }

    pub(crate) fn since_stop_us(&self) -> u64 {
        self.clock.stopped_at.map_or(0, |at| at.elapsed().as_micros() as u64)
    }
}

pub(super) fn no_control() -> Failure {
    Failure::new(SourceEvent::PeerLost, "the control stream is gone")
}

pub(super) fn unexpected(message: &Message) -> Failure {
    let kind = serde_json::to_value(message).ok().and_then(|value| value["type"].as_str().map(str::to_owned));
    let kind = kind.unwrap_or_default();
    Failure::new(SourceEvent::Failed, format!("the destination sent `{kind}` where it does not belong"))
}

/// The blockers among findings, as one line.
pub(crate) fn refusal(findings: &[Finding]) -> String {
    let blockers: Vec<_> = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Blocker)
        .map(|finding| format!("{}: {}", finding.what, finding.advice))
        .collect();
    if blockers.is_empty() {
        "the destination refused without a reason".to_owned()
    } else {
        format!("the destination refuses: {}", blockers.join("; "))
    }
}
