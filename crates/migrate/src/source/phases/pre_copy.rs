//! Pre-copy: rounds until the policy decides to stop.

use std::time::{Duration, Instant};

use ::memory::{OwedPages, ReductionStage};
use engine::handover::source::SourceEvent;
use engine::pre_copy::{
    AvailableStrategies, CostHistory, Decision, Outlook, RoundObservation, StopTrace, ThrottleChange,
    TracedStopPolicy,
};
use engine::throttle::processors::ThrottleDemand;

use super::Ending;
use super::pass_scheduler::{PassScheduler, RoundPages};
use super::rounds::{DirtyScan, RoundOutcome};
use crate::source::failure::Failure;
use crate::source::payload::Payload;
use crate::source::pressure::PressureMeter;
use crate::source::reductions::hints::FreePageHints;
use crate::source::stages::Streaming;
use crate::source::streams::Streams;
use crate::source::telemetry::DeferredPages;
use crate::source::{SourceDriver, payload};
use api::ThrottleCpu;
use api::progress::Phase;

/// State of pre-copy between two rounds.
struct PreCopy {
    scheduler: PassScheduler,
    /// The round before the present dirty scan; none if it was cut off.
    sent: Option<payload::SentRound>,
    /// Conversation with the guest about its free pages, if there is one.
    hints: Option<FreePageHints>,
    /// True until one round was sent.
    is_first: bool,
}

/// Decision after a dirty scan.
#[derive(Clone, Copy)]
enum NextStep {
    /// A round, of up to `most_pages` pages, or of those alone that cannot be sent later.
    Round { most_pages: Option<u64>, must_precopy_only: bool },
    /// The stop, with its kind.
    Stop { expected_downtime: Duration, ending: Ending },
}

/// Step after a dirty scan.
enum AfterScan {
    /// These pages are sent as the scheduler decides.
    Round(DirtyScan),
    /// All of these pages are sent: they include deferred page cache, which the guest was asked to free first.
    TakenBack(DirtyScan),
    /// The guest is stopped; these pages remain.
    Stop(OwedPages, Ending),
}

/// Facts about a round that are known before it is sent.
struct RoundPlan {
    scanned_at: Instant,
    /// Number of the pass, from 1.
    pass: u32,
    /// Pages of the round that were sent shortly before.
    resent_pages: u64,
}

impl SourceDriver {
    /// Sends rounds until the policy decides to stop.
    pub(super) fn pre_copy(
        &mut self,
        streams: Streams,
        owed: OwedPages,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages, Ending), Failure> {
        self.phase(Phase::PreCopy);
        let mut state = PreCopy {
            scheduler: self.new_pass_scheduler(0),
            sent: None,
            hints: self.connect_to_guest(&streaming.reductions),
            is_first: true,
        };
        let (mut streams, mut owed) = (streams, owed);
        loop {
            let scanned = self.scan_between_rounds(&mut state, owed, streaming)?;
            (streams, owed) = match self.after_scan(&mut state, scanned, streaming)? {
                AfterScan::Round(scanned) => self.send_planned(&mut state, streams, scanned, streaming)?,
                AfterScan::TakenBack(scanned) => self.send_taken_back(&state, streams, scanned, streaming)?,
                AfterScan::Stop(owed, ending) => return Ok((streams, owed, ending)),
            };
        }
    }

    fn scan_between_rounds(
        &mut self,
        state: &mut PreCopy,
        owed: OwedPages,
        streaming: &mut Streaming,
    ) -> Result<DirtyScan, Failure> {
        let reports_pages = state.scheduler.passes == 0 || self.agreement.can_post_copy;
        let mut scanned = self.scan_dirty(owed, reports_pages, &mut streaming.payload)?;
        if self.agreement.can_post_copy {
            streaming.records.writes.note(scanned.found.clone());
        }
        state.scheduler.record_scan(&mut scanned);
        Ok(scanned)
    }

    /// Carries out the policy's decision after a dirty scan; without a round before it there is none.
    fn after_scan(
        &mut self,
        state: &mut PreCopy,
        scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<AfterScan, Failure> {
        let mut scanned = scanned;
        let Some(mut sent) = state.sent.take() else { return Ok(AfterScan::Round(scanned)) };
        sent.pass = state.scheduler.passes;
        match self.decide(&mut state.scheduler.policy, &sent, &scanned, &streaming.payload)? {
            NextStep::Round { most_pages, must_precopy_only } => {
                // The remaining pages of disks are sent last, so that nothing needs time between them and the stop.
                if must_precopy_only && streaming.records.discards.is_none(self.connections.generation) {
                    scanned = self.discard_before_stop(scanned, streaming)?;
                }
                (state.scheduler.most_pages, state.scheduler.must_precopy_only) =
                    (most_pages, must_precopy_only);
            }
            NextStep::Stop { expected_downtime, ending } => {
                if let Some(hints) = state.hints.as_mut().filter(|hints| hints.has_deferred()) {
                    // The source agent waits for the guest.
                    self.lift_cpu_throttle();
                    scanned.readable = self.take_back(hints, scanned.readable)?;
                    // The guest writes to its records of each page that it gives back, for as long as that lasts:
                    // neither those writes nor this round predict the rounds that follow.
                    state.scheduler = self.new_pass_scheduler(state.scheduler.passes);
                    return Ok(AfterScan::TakenBack(scanned));
                }
                self.handle_notices()?;
                if ending == Ending::PostCopy {
                    scanned = self.discard_before_stop(scanned, streaming)?;
                }
                if self.connections.control.is_some() {
                    self.reporter.stop_clock.expected_downtime = expected_downtime;
                    return Ok(AfterScan::Stop(scanned.readable.give_up(), ending));
                }
                // The guest is not stopped to wait for a link that is cut.
                (state.scheduler.most_pages, state.scheduler.must_precopy_only) = (None, false);
            }
        }
        Ok(AfterScan::Round(scanned))
    }

    /// Sends all pages of a dirty scan, in a round that no policy learns of.
    fn send_taken_back(
        &mut self,
        state: &PreCopy,
        streams: Streams,
        scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages), Failure> {
        let pass = state.scheduler.passes + 1;
        self.handle_notices()?;
        self.telemetry.begin_round(pass, DeferredPages::default());
        streaming.records.discards.mark_resent();
        let RoundOutcome { streams, owed, stats } = self.send_scanned(streams, scanned, None, streaming)?;
        if stats.is_some() {
            self.complete_round_report(pass, 0, 0);
        }
        Ok((streams, owed))
    }

    /// Sends the pages that the scheduler selects.
    fn send_planned(
        &mut self,
        state: &mut PreCopy,
        streams: Streams,
        scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages), Failure> {
        let mut scanned = scanned;
        if let Some(hints) = &mut state.hints {
            scanned.readable = self.ask_guest(hints, scanned.readable, state.is_first)?;
            state.scheduler.set_hints_pending(hints.is_first_pending());
        }
        self.before_round(scanned.readable.pages())?;
        self.handle_notices()?;
        let scheduler = &mut state.scheduler;
        let scanned_at = scanned.scanned_at;
        let Streaming { payload, records, .. } = &mut *streaming;
        scheduler.interval_factor = records.pressure.as_ref().map_or(1, PressureMeter::interval_factor);
        let must_precopy_only = scheduler.must_precopy_only;
        let RoundPages { scanned, later, until } = scheduler.select_pages(scanned, payload);
        let resent_pages = scheduler.count_resent(&scanned, payload);
        let plan = RoundPlan { scanned_at, pass: scheduler.passes + 1, resent_pages };
        let waiting = later.as_ref().map(DeferredPages::of).unwrap_or_default();
        self.telemetry.begin_round(plan.pass, waiting);
        if let Some(later) = &later {
            payload.keep_versions(later);
        }
        if !must_precopy_only {
            records.discards.mark_resent();
        }
        let outcome = self.send_scanned(streams, scanned, until, streaming)?;
        self.resources.participants.after_round(outcome.stats.as_ref());
        Ok(self.record_outcome(state, &plan, outcome, later.as_ref(), &streaming.payload))
    }

    /// Records what became of a round from which `later` was left out. Returns the streams, and all pages that are
    /// owed.
    fn record_outcome(
        &mut self,
        state: &mut PreCopy,
        plan: &RoundPlan,
        outcome: RoundOutcome,
        later: Option<&OwedPages>,
        payload: &Payload,
    ) -> (Streams, OwedPages) {
        let RoundOutcome { streams, mut owed, stats } = outcome;
        let scheduler = &mut state.scheduler;
        let refused_pages = stats.as_ref().map_or(0, |stats| stats.refused_pages);
        // Pages that the destination refused count as sent in this round.
        let remaining_pages = later.map_or(0, OwedPages::pages) + owed.pages().saturating_sub(refused_pages);
        let remaining_must_precopy_pages =
            payload.must_precopy_pages(&owed) + later.map_or(0, |later| payload.must_precopy_pages(later));
        scheduler.sent(stats.as_ref(), &owed);
        if let Some(later) = later {
            owed.take_back(later);
        }
        state.is_first &= stats.is_none();
        if scheduler.has_sent_all() {
            payload.end_reductions(ReductionStage::MemorySent);
        }
        if stats.is_none() {
            // While there was no link, the guest was not slowed down.
            scheduler.policy.throttle_changed(ThrottleChange::Free);
        }
        let pass = scheduler.passes;
        let RoundPlan { scanned_at, pass: of_pass, resent_pages } = *plan;
        state.sent = stats.map(|stats| {
            self.complete_round_report(of_pass, remaining_pages, resent_pages);
            payload::SentRound {
                stats,
                scanned_at,
                pass,
                remaining_pages,
                remaining_must_precopy_pages,
                resent_pages,
            }
        });
        (streams, owed)
    }

    /// Creates a scheduler whose policy has no observations yet, after `passes` passes.
    fn new_pass_scheduler(&self, passes: u32) -> PassScheduler {
        let goals = self.controls.goals();
        let ways = AvailableStrategies {
            slow_down: self.resources.cpu_throttle.is_some(),
            post_copy: self.agreement.can_post_copy,
        };
        let policy = payload::policy(&goals, ways, self.fixed_costs(|history| history.estimate()));
        self.controls.report(|report| report.traces.stop.push(policy.trace().clone()));
        PassScheduler::new(policy, goals.sampling, passes)
    }

    /// Decides the next step, after a round and the dirty scan that followed it.
    fn decide(
        &mut self,
        policy: &mut TracedStopPolicy,
        sent: &payload::SentRound,
        scanned: &DirtyScan,
        payload: &Payload,
    ) -> Result<NextStep, Failure> {
        let owed = scanned.readable.owed();
        let (pages, unknown) = (owed.pages(), payload.full_pages(owed));
        let dirty = payload::DirtyCounts { pages, unknown, must_precopy: scanned.must_precopy_pages };
        let elapsed = self.controls.requested.elapsed();
        let observed = payload::observe(sent, scanned.scan, dirty, scanned.scanned_at, elapsed);
        let goals = self.controls.goals();
        policy.set_goals(payload::pre_copy_goals(&goals));
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
                    max_downtime_ns: payload::pre_copy_goals(&goals).max_downtime_ns,
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
                self.note("cpu-throttled", format!("to {}% of its usual processor time", change.percent));
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

    /// Adds these numbers to the report's last round.
    fn complete_round_report(&self, pass: u32, remaining_pages: u64, resent_pages: u64) {
        self.controls.report(|report| {
            if let Some(round) = report.rounds.last_mut() {
                (round.pass, round.remaining_pages, round.resent_pages) =
                    (pass, remaining_pages, resent_pages);
            }
        });
    }

    fn report_decision(&self, observed: &RoundObservation, decision: &Decision, trace: &StopTrace) {
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
