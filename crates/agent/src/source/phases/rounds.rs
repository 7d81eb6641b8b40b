//! Pre-copy: rounds until the policy decides to stop.

use std::time::{Duration, Instant};

use ::memory::{
    CompletedRound, DataStream, DirtyBitmap, Interrupted, Owed, PageCursor, PartBoundary, Readable,
    RoundStats, ScanStats, Sender,
};
use engine::handover::source::SourceEvent;
use engine::precopy::{
    AvailableStrategies, CostHistory, Decision, Held, Outlook, RoundObservation, Trace, TracedPolicy,
};
use engine::throttle::processors::ThrottleDemand;
use tracing::info;

use super::course::{Course, Share};
use super::{Ending, Failure};
use crate::api::ThrottleCpu;
use crate::progress::Phase;
use crate::report::Round;
use crate::source::memory::Cargo;
use crate::source::pressure::Watch;
use crate::source::slowing::Slowing;
use crate::source::telemetry::Later;
use crate::source::{Driver, VmError, memory};

/// Result of a dirty scan: the pages that a round has to send, ready to be read.
pub(super) struct Looked {
    pub(super) readable: Readable,
    disk_pages: u64,
    pub(super) scan: ScanStats,
    scanned_at: Instant,
    drain_us: u64,
    /// Pages of memory that were written since the scan before, if they were requested.
    pub(super) found: Vec<DirtyBitmap>,
}

impl Looked {
    /// Splits the pages by `divide`; returns the part to send and the remaining pages.
    pub(super) fn divided<T>(
        self,
        cargo: &Cargo,
        divide: impl FnOnce(Readable) -> (Readable, T),
    ) -> (Self, T) {
        let (readable, left) = divide(self.readable);
        let disk_pages = cargo.disk_pages(readable.owed());
        (Self { readable, disk_pages, ..self }, left)
    }

    /// Splits off a part of `pages` pages that begins at `from`. Returns it, the pages that are left out, and the start
    /// of the next part. For a round of disks alone.
    pub(super) fn part(self, from: PageCursor, pages: u64) -> (Self, Owed, Option<PageCursor>) {
        let (readable, later, next) = self.readable.part(from, pages, PartBoundary::BetweenClusters);
        let disk_pages = readable.pages();
        (Self { readable, disk_pages, ..self }, later, next)
    }
}

/// A round that was sent, or cut off.
pub(super) struct SentOrCut {
    pub(super) sender: Sender,
    pub(super) owed: Owed,
    /// Statistics of the round; none if it was cut off, and then the sender has new connections.
    pub(super) stats: Option<RoundStats>,
}

/// Step after a dirty scan.
#[derive(Clone, Copy)]
enum Next {
    /// A round, of up to `most_pages` pages, or of disks alone.
    Round { most_pages: Option<u64>, disks_alone: bool },
    /// The stop, with its kind.
    Stop { expected_downtime: Duration, ending: Ending },
}

impl Driver {
    /// Opens the data streams. If the control stream was lost, all connections are made anew, because otherwise the
    /// destination could not be informed of a round's end. A link that is cut before the first stream opens is worth
    /// waiting for like any other.
    pub(crate) fn open_streams(&mut self, cargo: &Cargo) -> Result<Sender, Failure> {
        self.take_notices()?;
        if self.control.is_none() {
            return self.reconnect(cargo, self.control_is_lost().reason);
        }
        match self.connect_streams() {
            Ok(streams) => self.start_sender(cargo, streams),
            Err(error) => self.reconnect(cargo, Failure::peer("cannot open the data streams", &error).reason),
        }
    }

    pub(crate) fn start_sender(
        &mut self,
        cargo: &Cargo,
        streams: Vec<DataStream>,
    ) -> Result<Sender, Failure> {
        let started = Sender::saving(cargo.readers(), cargo.saving(), streams);
        let sender = started.map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        self.inbox.interrupts(Some(sender.handle()));
        self.telemetry.follow(Some(sender.handle()));
        Ok(sender)
    }

    /// Sends rounds until the policy decides to stop.
    pub(super) fn pre_copy(
        &mut self,
        sender: Sender,
        owed: Owed,
        cargo: &mut Cargo,
    ) -> Result<(Sender, Owed, Ending), Failure> {
        self.phase(Phase::PreCopy);
        let mut course = self.new_course(0);
        let (mut sender, mut owed) = (sender, owed);
        let mut sent_before: Option<memory::SentRound> = None;
        let mut softening = self.meet_guest(cargo);
        let mut is_first = true;
        loop {
            let mut looked = self.look_at(owed, course.passes == 0 || self.may_post_copy, cargo)?;
            if self.may_post_copy {
                self.written.note(looked.found.clone());
            }
            course.record_scan(&mut looked);
            if let Some(mut sent) = sent_before.take() {
                sent.pass = course.passes;
                let next = self.decide(&mut course.policy, &sent, &looked, cargo)?;
                match (next, &mut softening) {
                    (Next::Round { most_pages, disks_alone }, _) => {
                        // The remaining pages of disks are sent last, so that nothing needs time between them and the
                        // stop.
                        if disks_alone && self.named.is_none(self.generation) {
                            looked = self.name_ahead(looked, cargo)?;
                        }
                        (course.most_pages, course.disks_alone) = (most_pages, disks_alone);
                    }
                    (Next::Stop { .. }, Some(softening)) if softening.has_put_off() => {
                        // The source agent waits for the guest.
                        self.lift_slowing();
                        looked.readable = self.take_back(softening, looked.readable)?;
                        // The guest writes to its records of each page that it gives back, for as long as that lasts:
                        // neither those writes nor this round predict the rounds that follow.
                        course = self.new_course(course.passes);
                        self.take_notices()?;
                        self.telemetry.begins(course.passes + 1, Later::default());
                        self.named.may_be_back();
                        let sent = self.send_looked(sender, looked, None, cargo)?;
                        if sent.stats.is_some() {
                            self.tell_of_part(course.passes + 1, 0, 0);
                        }
                        (sender, owed) = (sent.sender, sent.owed);
                        continue;
                    }
                    (Next::Stop { expected_downtime, ending }, _) => {
                        self.take_notices()?;
                        if ending == Ending::PostCopy {
                            looked = self.name_ahead(looked, cargo)?;
                        }
                        if self.control.is_some() {
                            self.clock.expected_downtime = expected_downtime;
                            return Ok((sender, looked.readable.give_up(), ending));
                        }
                        // The guest is not stopped to wait for a link that is cut.
                        (course.most_pages, course.disks_alone) = (None, false);
                    }
                }
            }
            if let Some(softening) = &mut softening {
                looked.readable = self.ask_guest(softening, looked.readable, is_first)?;
                course.set_hints_pending(softening.waits_for_first());
            }
            self.throttle(cargo)?;
            self.take_notices()?;
            let scanned_at = looked.scanned_at;
            course.interval_factor = self.pressure.as_ref().map_or(1, Watch::interval_factor);
            let disks_alone = course.disks_alone;
            let Share { looked, later, until } = course.share(looked, cargo);
            let later_pages = later.as_ref().map_or(0, Owed::pages);
            let (resent_pages, of_pass) = (course.count_resent(&looked, cargo), course.passes + 1);
            self.telemetry
                .begins(of_pass, later.as_ref().map(|later| cargo.waiting(later)).unwrap_or_default());
            if let Some(later) = &later {
                cargo.keep_marks(later);
            }
            if !disks_alone {
                self.named.may_be_back();
            }
            let sent = self.send_looked(sender, looked, until, cargo)?;
            cargo.drained(sent.stats.as_ref());
            (sender, owed) = (sent.sender, sent.owed);
            let refused_pages = sent.stats.as_ref().map_or(0, |stats| stats.refused_pages);
            // Pages that the destination refused count as sent in this round.
            let left_pages = later_pages + owed.pages().saturating_sub(refused_pages);
            let left_of_disks =
                cargo.disk_pages(&owed) + later.as_ref().map_or(0, |later| cargo.disk_pages(later));
            course.sent(sent.stats.as_ref(), &owed);
            if let Some(later) = &later {
                owed.take_back(later);
            }
            is_first &= sent.stats.is_none();
            if course.has_sent_all() {
                cargo.end_references();
            }
            let pass = course.passes;
            if sent.stats.is_none() {
                // While there was no link, the guest was not slowed down.
                course.policy.held(Held::Free);
            }
            sent_before = sent.stats.map(|stats| {
                self.tell_of_part(of_pass, left_pages, resent_pages);
                memory::SentRound { stats, scanned_at, pass, left_pages, left_of_disks, resent_pages }
            });
        }
    }

    /// Creates a scheduler whose policy has no observations yet, after `passes` passes.
    fn new_course(&self, passes: u32) -> Course {
        let aims = self.controls.aims();
        let ways = AvailableStrategies { slow_down: self.slowing.is_some(), post_copy: self.may_post_copy };
        let policy = memory::policy(&aims, ways, self.fixed_costs(|history| history.estimate()));
        self.controls.report(|report| report.traces.stop.push(policy.trace().clone()));
        Course::new(policy, aims.sampling, passes)
    }

    /// Decides the next step, after a round and the dirty scan that followed it.
    fn decide(
        &mut self,
        policy: &mut TracedPolicy,
        sent: &memory::SentRound,
        looked: &Looked,
        cargo: &Cargo,
    ) -> Result<Next, Failure> {
        let owed = looked.readable.owed();
        let (pages, unknown) = (owed.pages(), cargo.unknown_pages(owed));
        let dirty = memory::Dirty { pages, unknown, of_disks: looked.disk_pages };
        let elapsed = self.controls.requested.elapsed();
        let observed = memory::observe(sent, looked.scan, dirty, looked.scanned_at, elapsed);
        let aims = self.controls.aims();
        policy.aim(memory::aim(&aims));
        let before = policy.outlook();
        let decision = policy.decide(&observed);
        self.decided(&observed, &decision, policy.trace());
        self.tell_of_way(before, policy.outlook());
        match decision {
            Decision::NextRound { most_pages, expected_downtime_ns, slow, disks_alone } => {
                let wish = ThrottleDemand {
                    is_chosen: slow,
                    is_asked_for: aims.throttle_cpu != ThrottleCpu::Off,
                    passes: sent.pass,
                    expected_downtime_ns,
                    max_downtime_ns: memory::aim(&aims).max_downtime_ns,
                };
                if let Some(held) = self.slow_down(&observed, wish) {
                    policy.held(held);
                }
                Ok(Next::Round { most_pages, disks_alone })
            }
            Decision::StopAndCopy { expected_downtime_ns, .. } => {
                let expected_downtime = Duration::from_nanos(expected_downtime_ns);
                Ok(Next::Stop { expected_downtime, ending: Ending::LastRound })
            }
            Decision::PostCopy { expected_downtime_ns } => {
                let expected_downtime = Duration::from_nanos(expected_downtime_ns);
                Ok(Next::Stop { expected_downtime, ending: Ending::PostCopy })
            }
            Decision::GiveUp { reason } => {
                self.fixed_costs(CostHistory::forget);
                Err(Failure::new(SourceEvent::Failed, reason.to_string()))
            }
        }
    }

    /// Notes a change of the way that the policy has chosen, and the reason.
    fn tell_of_way(&self, before: Option<Outlook>, now: Option<Outlook>) {
        let Some(now) = now else { return };
        if before.is_none_or(|before| (before.chosen, before.is_feasible) != (now.chosen, now.is_feasible)) {
            self.note("way", now.to_string());
        }
    }

    /// Throttles the guest's processors as the policy decides, if they may be slowed down; returns the change.
    fn slow_down(&mut self, observed: &RoundObservation, wish: ThrottleDemand) -> Option<Held> {
        let slowing = self.slowing.as_mut()?;
        let change = slowing.look(observed, wish);
        self.controls.report(|report| slowing.policy().update_report(&mut report.traces.others.slowing));
        match change {
            Ok(None) => None,
            Ok(Some(change)) => {
                self.note("cpu-throttled", format!("to {}% of what it usually uses", change.percent));
                change.is_slower.then_some(Held::Slower)
            }
            // Another program may have changed the groups: the guest runs unthrottled, and may still be moved.
            Err(error) => {
                self.slowing = None;
                self.note("cpu-not-throttled", crate::chain(&error));
                Some(Held::ForGood)
            }
        }
    }

    /// Scans the logs for dirty pages, and waits until I/O in flight has completed.
    pub(super) fn look(&mut self, owed: Owed, cargo: &mut Cargo) -> Result<Looked, Failure> {
        self.look_at(owed, false, cargo)
    }

    /// Scans like `look`, and also returns the dirty pages of memory if `tells` is true.
    pub(super) fn look_at(&mut self, owed: Owed, tells: bool, cargo: &mut Cargo) -> Result<Looked, Failure> {
        let told_blocks = if tells { cargo.ram_blocks() } else { 0 };
        let scanned_at = Instant::now();
        let cannot_ask = |error: VmError| Failure::local("QEMU cannot be asked", &error);
        let vm = self.vm()?;
        let (cleared, found) = owed
            .clear_marks_and_report(&mut cargo.log(vm.monitor().map_err(cannot_ask)?), told_blocks)
            .map_err(|failed| Failure::local("cannot find out what was written", &failed))?;
        let scan = cleared.scan();
        let drain_began = Instant::now();
        let readable = cleared
            .drain(|| vm.drain())
            .map_err(|failed| Failure::local("cannot drain block I/O", &failed))?;
        let drain_us = drain_began.elapsed().as_micros() as u64;
        cargo
            .tidy(vm.monitor().map_err(cannot_ask)?)
            .map_err(|error| Failure::local("QEMU does not let go of a bitmap", &error))?;
        let disk_pages = cargo.disk_pages(readable.owed());
        Ok(Looked { readable, disk_pages, scan, scanned_at, drain_us, found })
    }

    /// Sends a round, or as much as possible until `until`. If the link is cut, new connections are made; pages that
    /// did not arrive are owed.
    pub(super) fn send_looked(
        &mut self,
        sender: Sender,
        looked: Looked,
        until: Option<Instant>,
        cargo: &Cargo,
    ) -> Result<SentOrCut, Failure> {
        let Looked { readable, disk_pages, scan, drain_us, .. } = looked;
        if self.control.is_none() {
            self.inbox.interrupts(None);
            drop(sender);
            let sender = self.open_streams(cargo)?;
            return Ok(SentOrCut { sender, owed: readable.give_up(), stats: None });
        }
        let pages = readable.pages();
        if let Some(pressure) = &mut self.pressure {
            pressure.copying(&sender.handle());
        }
        let sent = match until {
            Some(until) => sender.send_round_until(readable, until),
            None => sender.send_round(readable),
        };
        match sent {
            Ok(CompletedRound { sender, owed, stats }) => {
                self.look_at_pressure();
                // For a part of a round, the pages that were sent count.
                let (pages, disk_pages) = if until.is_some() {
                    (stats.contents.pages(), disk_pages.saturating_sub(cargo.disk_pages(&owed)))
                } else {
                    (pages, disk_pages)
                };
                self.controls.report(|report| {
                    report.rounds.push(Round {
                        round: stats.round,
                        dirty_pages: pages,
                        disk_pages,
                        scan_us: scan.duration_us,
                        drain_us,
                        ..memory::round_report(&stats)
                    });
                });
                Ok(SentOrCut { sender, owed, stats: Some(stats) })
            }
            Err(interrupted) => {
                let Interrupted { owed, cause, .. } = *interrupted;
                info!(%cause, "round interrupted");
                self.inbox.interrupts(None);
                self.take_notices_or(&cause)?;
                let sender = self.reconnect(cargo, crate::chain(&cause))?;
                Ok(SentOrCut { sender, owed, stats: None })
            }
        }
    }

    /// Adapts the sender's niceness and threads to the waiting times of the guest's processors.
    fn look_at_pressure(&mut self) {
        let is_held = self.slowing.as_ref().is_some_and(Slowing::is_holding);
        let Some(pressure) = &mut self.pressure else { return };
        let Some(waiting) = pressure.look(is_held) else { return };
        self.controls.report(|report| {
            report.waiting = Some(waiting);
            if let Some(policy) = pressure.policy() {
                policy.update_report(&mut report.traces.others.pressure);
            }
        });
    }

    /// Adds these numbers to the report's last round.
    fn tell_of_part(&self, pass: u32, left_pages: u64, resent_pages: u64) {
        self.controls.report(|report| {
            if let Some(round) = report.rounds.last_mut() {
                (round.pass, round.left_pages, round.resent_pages) = (pass, left_pages, resent_pages);
            }
        });
    }

    fn decided(&self, observed: &RoundObservation, decision: &Decision, trace: &Trace) {
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
            if let Some(told) = report.traces.stop.last_mut() {
                told.catch_up(trace);
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
