//! Pre-copy: rounds until the policy decides to stop.

use host::VmError;
use std::time::{Duration, Instant};

use ::memory::{
    CompletedRound, DataStream, DirtyBitmap, Interrupted, Owed, PageCursor, PartBoundary, Readable,
    RoundStats, ScanStats, Sender, Stage,
};
use engine::handover::source::SourceEvent;
use engine::precopy::{
    AvailableStrategies, CostHistory, Decision, Outlook, RoundObservation, ThrottleChange, Trace,
    TracedPolicy,
};
use engine::throttle::processors::ThrottleDemand;
use tracing::info;

use super::pass_scheduler::{PassScheduler, RoundPages};
use super::{Ending, Failure, gone};
use crate::source::cpu_throttle::CpuThrottle;
use crate::source::memory::Payload;
use crate::source::pressure::PressureMeter;
use crate::source::telemetry::DeferredPages;
use crate::source::{Driver, memory};
use api::ThrottleCpu;
use api::progress::Phase;
use api::report::Round;

/// Result of a dirty scan: the pages that a round has to send, ready to be read.
pub(super) struct DirtyScan {
    pub(super) readable: Readable,
    /// Pages that have to be sent before the guest runs at the destination.
    must_precopy_pages: u64,
    pub(super) scan: ScanStats,
    scanned_at: Instant,
    drain_us: u64,
    /// Pages of memory that were written since the scan before, if they were requested.
    pub(super) found: Vec<DirtyBitmap>,
}

impl DirtyScan {
    /// Splits the pages by `divide`; returns the part to send and the remaining pages.
    pub(super) fn divided<T>(
        self,
        payload: &Payload,
        divide: impl FnOnce(Readable) -> (Readable, T),
    ) -> (Self, T) {
        let (readable, left) = divide(self.readable);
        let must_precopy_pages = payload.must_precopy_pages(readable.owed());
        (Self { readable, must_precopy_pages, ..self }, left)
    }

    /// Splits off a part of `pages` pages that begins at `from`. Returns it, the pages that are left out, and the start
    /// of the next part. For a round without pages that may be sent later.
    pub(super) fn part(self, from: PageCursor, pages: u64) -> (Self, Owed, Option<PageCursor>) {
        let (readable, later, next) = self.readable.part(from, pages, PartBoundary::BetweenClusters);
        let must_precopy_pages = readable.pages();
        (Self { readable, must_precopy_pages, ..self }, later, next)
    }
}

/// A round that was sent, or cut off.
pub(super) struct RoundOutcome {
    pub(super) sender: Sender,
    pub(super) owed: Owed,
    /// Statistics of the round; none if it was cut off, and then the sender has new connections.
    pub(super) stats: Option<RoundStats>,
}

/// Step after a dirty scan.
#[derive(Clone, Copy)]
enum NextStep {
    /// A round, of up to `most_pages` pages, or of those alone that cannot be sent later.
    Round { most_pages: Option<u64>, must_precopy_only: bool },
    /// The stop, with its kind.
    Stop { expected_downtime: Duration, ending: Ending },
}

impl Driver {
    /// Opens the data streams. If the control stream was lost, all connections are made anew, because otherwise the
    /// destination could not be informed of a round's end. A link that is cut before the first stream opens is worth
    /// waiting for like any other.
    pub(crate) fn open_streams(&mut self, payload: &Payload) -> Result<Sender, Failure> {
        self.handle_notices()?;
        if self.connections.control.is_none() {
            return self.reconnect(payload, self.control_loss().reason);
        }
        match self.connect_streams() {
            Ok(streams) => self.start_sender(payload, streams),
            Err(error) => {
                self.reconnect(payload, Failure::peer("cannot open the data streams", &error).reason)
            }
        }
    }

    pub(crate) fn start_sender(
        &mut self,
        payload: &Payload,
        streams: Vec<DataStream>,
    ) -> Result<Sender, Failure> {
        let started = Sender::with_reductions(payload.readers(), payload.saving(), streams);
        let sender = started.map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        self.inbox.interrupts(Some(sender.handle()));
        self.telemetry.follow(Some(sender.handle()));
        Ok(sender)
    }

    /// Sends rounds until the policy decides to stop.
    #[expect(clippy::too_many_lines, reason = "not split yet: it decides and acts by turns")]
    pub(super) fn pre_copy(
        &mut self,
        sender: Sender,
        owed: Owed,
        payload: &mut Payload,
    ) -> Result<(Sender, Owed, Ending), Failure> {
        self.phase(Phase::PreCopy);
        let mut pass_scheduler = self.new_pass_scheduler(0);
        let (mut sender, mut owed) = (sender, owed);
        let mut sent_before: Option<memory::SentRound> = None;
        let mut hints = self.connect_to_guest(payload);
        let mut is_first = true;
        loop {
            let mut scanned =
                self.scan_dirty(owed, pass_scheduler.passes == 0 || self.agreement.can_post_copy, payload)?;
            if self.agreement.can_post_copy {
                self.resources.written.note(scanned.found.clone());
            }
            pass_scheduler.record_scan(&mut scanned);
            if let Some(mut sent) = sent_before.take() {
                sent.pass = pass_scheduler.passes;
                let next = self.decide(&mut pass_scheduler.policy, &sent, &scanned, payload)?;
                match (next, &mut hints) {
                    (NextStep::Round { most_pages, must_precopy_only }, _) => {
                        // The remaining pages of disks are sent last, so that nothing needs time between them and the
                        // stop.
                        if must_precopy_only && self.resources.discarded.is_none(self.connections.generation)
                        {
                            scanned = self.discard_ahead(scanned, payload)?;
                        }
                        (pass_scheduler.most_pages, pass_scheduler.must_precopy_only) =
                            (most_pages, must_precopy_only);
                    }
                    (NextStep::Stop { .. }, Some(hints)) if hints.has_deferred() => {
                        // The source agent waits for the guest.
                        self.lift_cpu_throttle();
                        scanned.readable = self.take_back(hints, scanned.readable)?;
                        // The guest writes to its records of each page that it gives back, for as long as that lasts:
                        // neither those writes nor this round predict the rounds that follow.
                        pass_scheduler = self.new_pass_scheduler(pass_scheduler.passes);
                        self.handle_notices()?;
                        self.telemetry.begin_round(pass_scheduler.passes + 1, DeferredPages::default());
                        self.resources.discarded.mark_resent();
                        let sent = self.send_scanned(sender, scanned, None, payload)?;
                        if sent.stats.is_some() {
                            self.complete_round_report(pass_scheduler.passes + 1, 0, 0);
                        }
                        (sender, owed) = (sent.sender, sent.owed);
                        continue;
                    }
                    (NextStep::Stop { expected_downtime, ending }, _) => {
                        self.handle_notices()?;
                        if ending == Ending::PostCopy {
                            scanned = self.discard_ahead(scanned, payload)?;
                        }
                        if self.connections.control.is_some() {
                            self.reporter.stop_clock.expected_downtime = expected_downtime;
                            return Ok((sender, scanned.readable.give_up(), ending));
                        }
                        // The guest is not stopped to wait for a link that is cut.
                        (pass_scheduler.most_pages, pass_scheduler.must_precopy_only) = (None, false);
                    }
                }
            }
            if let Some(hints) = &mut hints {
                scanned.readable = self.ask_guest(hints, scanned.readable, is_first)?;
                pass_scheduler.set_hints_pending(hints.is_first_pending());
            }
            self.before_round(scanned.readable.pages())?;
            self.handle_notices()?;
            let scanned_at = scanned.scanned_at;
            pass_scheduler.interval_factor =
                self.resources.pressure.as_ref().map_or(1, PressureMeter::interval_factor);
            let must_precopy_only = pass_scheduler.must_precopy_only;
            let RoundPages { scanned, later, until } = pass_scheduler.select_pages(scanned, payload);
            let later_pages = later.as_ref().map_or(0, Owed::pages);
            let (resent_pages, of_pass) =
                (pass_scheduler.count_resent(&scanned, payload), pass_scheduler.passes + 1);
            self.telemetry
                .begin_round(of_pass, later.as_ref().map(|later| payload.waiting(later)).unwrap_or_default());
            if let Some(later) = &later {
                payload.keep_versions(later);
            }
            if !must_precopy_only {
                self.resources.discarded.mark_resent();
            }
            let sent = self.send_scanned(sender, scanned, until, payload)?;
            self.resources.participants.after_round(sent.stats.as_ref());
            (sender, owed) = (sent.sender, sent.owed);
            let refused_pages = sent.stats.as_ref().map_or(0, |stats| stats.refused_pages);
            // Pages that the destination refused count as sent in this round.
            let remaining_pages = later_pages + owed.pages().saturating_sub(refused_pages);
            let remaining_must_precopy_pages = payload.must_precopy_pages(&owed)
                + later.as_ref().map_or(0, |later| payload.must_precopy_pages(later));
            pass_scheduler.sent(sent.stats.as_ref(), &owed);
            if let Some(later) = &later {
                owed.take_back(later);
            }
            is_first &= sent.stats.is_none();
            if pass_scheduler.has_sent_all() {
                payload.end_reductions(Stage::MemorySent);
            }
            let pass = pass_scheduler.passes;
            if sent.stats.is_none() {
                // While there was no link, the guest was not slowed down.
                pass_scheduler.policy.throttle_changed(ThrottleChange::Free);
            }
            sent_before = sent.stats.map(|stats| {
                self.complete_round_report(of_pass, remaining_pages, resent_pages);
                memory::SentRound {
                    stats,
                    scanned_at,
                    pass,
                    remaining_pages,
                    remaining_must_precopy_pages,
                    resent_pages,
                }
            });
        }
    }

    /// Lets the participants act before a round of up to `pages` pages; returns the number of pages after which they want
    /// to act again.
    pub(super) fn before_round(&mut self, pages: u64) -> Result<u64, Failure> {
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        self.resources.participants.before_round(vm, pages)
    }

    /// Creates a scheduler whose policy has no observations yet, after `passes` passes.
    fn new_pass_scheduler(&self, passes: u32) -> PassScheduler {
        let goals = self.controls.goals();
        let ways = AvailableStrategies {
            slow_down: self.resources.cpu_throttle.is_some(),
            post_copy: self.agreement.can_post_copy,
        };
        let policy = memory::policy(&goals, ways, self.fixed_costs(|history| history.estimate()));
        self.controls.report(|report| report.traces.stop.push(policy.trace().clone()));
        PassScheduler::new(policy, goals.sampling, passes)
    }

    /// Decides the next step, after a round and the dirty scan that followed it.
    fn decide(
        &mut self,
        policy: &mut TracedPolicy,
        sent: &memory::SentRound,
        scanned: &DirtyScan,
        payload: &Payload,
    ) -> Result<NextStep, Failure> {
        let owed = scanned.readable.owed();
        let (pages, unknown) = (owed.pages(), payload.full_pages(owed));
        let dirty = memory::DirtyCounts { pages, unknown, must_precopy: scanned.must_precopy_pages };
        let elapsed = self.controls.requested.elapsed();
        let observed = memory::observe(sent, scanned.scan, dirty, scanned.scanned_at, elapsed);
        let goals = self.controls.goals();
        policy.set_goals(memory::precopy_goals(&goals));
        let before = policy.outlook();
        let decision = policy.decide(&observed);
        self.report_decision(&observed, &decision, policy.trace());
        self.note_way(before, policy.outlook());
        match decision {
            Decision::NextRound { most_pages, expected_downtime_ns, slow, must_precopy_only } => {
                let demand = ThrottleDemand {
                    is_chosen: slow,
                    is_requested: goals.settings.throttle_cpu != ThrottleCpu::Off,
                    passes: sent.pass,
                    expected_downtime_ns,
                    max_downtime_ns: memory::precopy_goals(&goals).max_downtime_ns,
                };
                if let Some(change) = self.slow_down(&observed, demand) {
                    policy.throttle_changed(change);
                }
                Ok(NextStep::Round { most_pages, must_precopy_only })
            }
            Decision::StopAndCopy { expected_downtime_ns, .. } => {
                let expected_downtime = Duration::from_nanos(expected_downtime_ns);
                Ok(NextStep::Stop { expected_downtime, ending: Ending::LastRound })
            }
            Decision::PostCopy { expected_downtime_ns } => {
                let expected_downtime = Duration::from_nanos(expected_downtime_ns);
                Ok(NextStep::Stop { expected_downtime, ending: Ending::PostCopy })
            }
            Decision::GiveUp { reason } => {
                self.fixed_costs(CostHistory::forget);
                Err(Failure::new(SourceEvent::Failed, reason.to_string()))
            }
        }
    }

    /// Notes a change of the way that the policy has chosen, and the reason.
    fn note_way(&self, before: Option<Outlook>, now: Option<Outlook>) {
        let Some(now) = now else { return };
        if before.is_none_or(|before| (before.chosen, before.is_feasible) != (now.chosen, now.is_feasible)) {
            self.note("way", now.to_string());
        }
    }

    /// Throttles the guest's processors as the policy decides, if they may be slowed down; returns the change.
    fn slow_down(&mut self, observed: &RoundObservation, demand: ThrottleDemand) -> Option<ThrottleChange> {
        let cpu_throttle = self.resources.cpu_throttle.as_mut()?;
        let change = cpu_throttle.sample(observed, demand);
        self.controls
            .report(|report| cpu_throttle.policy().update_report(&mut report.traces.others.cpu_throttle));
        match change {
            Ok(None) => None,
            Ok(Some(change)) => {
                self.note("cpu-throttled", format!("to {}% of what it usually uses", change.percent));
                change.is_slower.then_some(ThrottleChange::Slower)
            }
            // Another program may have changed the groups: the guest runs unthrottled, and may still be moved.
            Err(error) => {
                self.resources.cpu_throttle = None;
                self.note("cpu-not-throttled", crate::chain(&error));
                Some(ThrottleChange::ForGood)
            }
        }
    }

    /// Scans the logs for dirty pages, and waits until I/O in flight has completed.
    pub(super) fn scan(&mut self, owed: Owed, payload: &mut Payload) -> Result<DirtyScan, Failure> {
        self.scan_dirty(owed, false, payload)
    }

    /// Scans like `sample`, and also returns the dirty pages of memory if `reports_pages` is true.
    pub(super) fn scan_dirty(
        &mut self,
        owed: Owed,
        reports_pages: bool,
        payload: &mut Payload,
    ) -> Result<DirtyScan, Failure> {
        let reported_blocks = if reports_pages { payload.ram_blocks() } else { 0 };
        let scanned_at = Instant::now();
        let cannot_ask = |error: VmError| Failure::local("cannot query QEMU", &error);
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        let participants = &mut self.resources.participants;
        let monitor = vm.monitor().map_err(cannot_ask)?;
        let (cleared, found) = owed
            .clear_marks_and_report(&mut participants.log(Some(monitor)), reported_blocks)
            .map_err(|failed| Failure::local("cannot find the dirty pages", &failed))?;
        let scan = cleared.scan();
        let drain_began = Instant::now();
        let readable = cleared
            .drain(|| vm.drain())
            .map_err(|failed| Failure::local("cannot drain block I/O", &failed))?;
        let drain_us = drain_began.elapsed().as_micros() as u64;
        participants.after_scan(vm.monitor().map_err(cannot_ask)?)?;
        let must_precopy_pages = payload.must_precopy_pages(readable.owed());
        Ok(DirtyScan { readable, must_precopy_pages, scan, scanned_at, drain_us, found })
    }

    /// Sends a round, or as much as possible until `until`. If the link is cut, new connections are made; pages that
    /// did not arrive are owed.
    pub(super) fn send_scanned(
        &mut self,
        sender: Sender,
        scanned: DirtyScan,
        until: Option<Instant>,
        payload: &Payload,
    ) -> Result<RoundOutcome, Failure> {
        let DirtyScan { readable, must_precopy_pages, scan, drain_us, .. } = scanned;
        if self.connections.control.is_none() {
            self.inbox.interrupts(None);
            drop(sender);
            let sender = self.open_streams(payload)?;
            return Ok(RoundOutcome { sender, owed: readable.give_up(), stats: None });
        }
        let pages = readable.pages();
        if let Some(pressure) = &mut self.resources.pressure {
            pressure.restrain(&sender.handle());
        }
        let sent = match until {
            Some(until) => sender.send_round_until(readable, until),
            None => sender.send_round(readable),
        };
        match sent {
            Ok(CompletedRound { sender, owed, stats }) => {
                self.sample_pressure();
                // For a part of a round, the pages that were sent count.
                let (pages, must_precopy_pages) = if until.is_some() {
                    (
                        stats.contents.pages(),
                        must_precopy_pages.saturating_sub(payload.must_precopy_pages(&owed)),
                    )
                } else {
                    (pages, must_precopy_pages)
                };
                self.controls.report(|report| {
                    report.rounds.push(Round {
                        round: stats.round,
                        dirty_pages: pages,
                        disk_pages: must_precopy_pages,
                        scan_us: scan.duration_us,
                        drain_us,
                        ..memory::round_report(&stats)
                    });
                });
                Ok(RoundOutcome { sender, owed, stats: Some(stats) })
            }
            Err(interrupted) => {
                let Interrupted { owed, cause, .. } = *interrupted;
                info!(%cause, "round interrupted");
                self.inbox.interrupts(None);
                self.handle_notices_or(&cause)?;
                let sender = self.reconnect(payload, crate::chain(&cause))?;
                Ok(RoundOutcome { sender, owed, stats: None })
            }
        }
    }

    /// Adapts the sender's niceness and threads to the waiting times of the guest's processors.
    fn sample_pressure(&mut self) {
        let is_held = self.resources.cpu_throttle.as_ref().is_some_and(CpuThrottle::is_holding);
        let Some(pressure) = &mut self.resources.pressure else { return };
        let Some(waiting) = pressure.sample(is_held) else { return };
        self.controls.report(|report| {
            report.waiting = Some(waiting);
            if let Some(policy) = pressure.policy() {
                policy.update_report(&mut report.traces.others.pressure);
            }
        });
    }

    /// Adds these numbers to the report's last round.
    fn complete_round_report(&self, pass: u32, remaining_pages: u64, resent_pages: u64) {
        self.controls.report(|report| {
            if let Some(round) = report.rounds.last_mut() {
                (round.pass, round.remaining_pages, round.resent_pages) =
                    (pass, remaining_pages, resent_pages);
            }
        });
    }

    fn report_decision(&self, observed: &RoundObservation, decision: &Decision, trace: &Trace) {
        let (word, expected_us, pattern) = match decision {
            Decision::NextRound { expected_downtime_ns, .. } => {
                ("another-round", Some(expected_downtime_ns / 1000), None)
            }
            Decision::StopAndCopy { expected_downtime_ns, pattern } => {
                ("stop", Some(expected_downtime_ns / 1000), *pattern)
            }
            Decision::PostCopy { expected_downtime_ns } => {
                ("post-copy", Some(expected_downtime_ns / 1000), None)
            }
            Decision::GiveUp { .. } => ("abort", None, None),
        };
        // Nothing was measured yet where it is the largest number.
        let expected_us = expected_us.filter(|us| *us < u64::MAX / 1000);
        self.controls.report(|report| {
            if let Some(recorded) = report.traces.stop.last_mut() {
                recorded.catch_up(trace);
            }
            if let Some(round) = report.rounds.last_mut() {
                word.clone_into(&mut round.decision);
                round.pattern = pattern;
                round.expected_downtime_us = expected_us;
                round.dirty_rate_bytes_per_s = observed.dirty_rate_bytes_per_s();
            }
        });
        self.telemetry.update(|progress| {
            progress.expected_downtime_us = expected_us;
            progress.dirty_rate_bytes_per_s = observed.dirty_rate_bytes_per_s();
        });
    }
}
