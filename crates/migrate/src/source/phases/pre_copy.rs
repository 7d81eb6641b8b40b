//! Pre-copy: carries out the steps of rounds until the guest is to be stopped.

use ::memory::{OwedPages, ReductionStage};
use engine::handover::source::SourceEvent;
use engine::pre_copy::{
    AvailableStrategies, CostHistory, Decision, RoundObservation, StopTrace, ThrottleChange, TracedStopPolicy,
};
use engine::session::{
    DecidedRound, RoundContext, RoundStep, Rounds, ScanResult, SentRound, SwitchoverKind, Time,
};
use engine::throttle::processors::ThrottleDemand;

use super::page_selector::{PageSelector, RoundPages};
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
use api::report::FailureKind;

/// State of pre-copy between two rounds.
struct PreCopy {
    rounds: Rounds,
    selector: PageSelector,
    /// Conversation with the guest about its free pages, if there is one.
    hints: Option<FreePageHints>,
}

/// Facts about a round that are known before it is sent.
struct RoundPlan {
    scanned_at: Time,
    /// Number of the pass, from 1.
    pass: u32,
    /// Pages of the round that were sent shortly before.
    resent_pages: u64,
    /// Pages that wait for a later round.
    later: Option<OwedPages>,
}

impl SourceDriver {
    /// Sends rounds until the guest is to be stopped.
    pub(super) fn pre_copy(
        &mut self,
        streams: Streams,
        owed: OwedPages,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages, SwitchoverKind), Failure> {
        self.phase(Phase::PreCopy);
        let (policy, selector) = self.new_policy();
        let hints = self.connect_to_guest(&streaming.reductions);
        let mut state = PreCopy { rounds: Rounds::new(policy), selector, hints };
        let (mut streams, mut owed) = (streams, owed);
        loop {
            let scanned = self.scan_between_rounds(&mut state, owed, streaming)?;
            self.decide(&mut state.rounds, &scanned, &streaming.payload);
            let ending;
            (streams, owed, ending) = self.after_scan(&mut state, streams, scanned, streaming)?;
            if let Some(ending) = ending {
                return Ok((streams, owed, ending));
            }
        }
    }

    fn scan_between_rounds(
        &mut self,
        state: &mut PreCopy,
        owed: OwedPages,
        streaming: &mut Streaming,
    ) -> Result<DirtyScan, Failure> {
        let can_post_copy = self.agreement.can_post_copy;
        let reports_pages = state.rounds.needs_written_pages(can_post_copy);
        let mut scanned = self.scan_dirty(owed, reports_pages, &mut streaming.payload)?;
        if can_post_copy {
            streaming.records.writes.note(scanned.found.clone());
        }
        if state.rounds.is_first_pass() && !state.selector.record_scan(&mut scanned) {
            state.rounds.end_first_pass();
        }
        Ok(scanned)
    }

    /// Carries out the steps after a dirty scan, until a round was sent or the guest is to be stopped. Returns the
    /// streams, the pages that are owed, and the kind of the stop if the guest is to be stopped.
    fn after_scan(
        &mut self,
        state: &mut PreCopy,
        streams: Streams,
        scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages, Option<SwitchoverKind>), Failure> {
        let mut scanned = scanned;
        loop {
            let facts = self.round_facts(state, streaming);
            match state.rounds.next_step(facts) {
                RoundStep::Send => {
                    let (streams, owed) = self.send_planned(state, streams, scanned, streaming)?;
                    return Ok((streams, owed, None));
                }
                RoundStep::Discard => scanned = self.discard_before_stop(scanned, streaming)?,
                RoundStep::ReclaimDeferred => scanned = self.take_deferred_back(state, scanned)?,
                RoundStep::SendReclaimed => {
                    let (streams, owed) = self.send_taken_back(state, streams, scanned, streaming)?;
                    return Ok((streams, owed, None));
                }
                RoundStep::CheckControl => self.handle_notices()?,
                RoundStep::Stop { expected_downtime, ending } => {
                    self.reporter.stop_clock.expected_downtime = expected_downtime;
                    return Ok((streams, scanned.readable.give_up(), Some(ending)));
                }
                RoundStep::GiveUp { reason } => {
                    self.fixed_costs(CostHistory::forget);
                    let failure = Failure::new(SourceEvent::Failed, reason.to_string());
                    return Err(failure.of_kind(FailureKind::NotConverging));
                }
            }
        }
    }

    fn round_facts(&self, state: &PreCopy, streaming: &Streaming) -> RoundContext {
        RoundContext {
            has_control: self.connections.control.is_some(),
            has_deferred: state.hints.as_ref().is_some_and(FreePageHints::has_deferred),
            has_discarded: !streaming.records.discards.has_none_over(self.connections.generation),
        }
    }

    /// Lets the guest give back its deferred page cache, and begins a policy without observations.
    fn take_deferred_back(&mut self, state: &mut PreCopy, scanned: DirtyScan) -> Result<DirtyScan, Failure> {
        let mut scanned = scanned;
        // The source agent waits for the guest.
        self.lift_cpu_throttle();
        if let Some(hints) = &mut state.hints {
            scanned.readable = self.take_back(hints, scanned.readable)?;
        }
        let (policy, selector) = self.new_policy();
        state.rounds.deferred_reclaimed(policy);
        state.selector = selector;
        Ok(scanned)
    }

    /// Sends all pages of a dirty scan, in a round that no policy learns of.
    fn send_taken_back(
        &mut self,
        state: &PreCopy,
        streams: Streams,
        scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages), Failure> {
        let pass = state.rounds.passes() + 1;
        self.handle_notices()?;
        self.telemetry.begin_round(pass, DeferredPages::default());
        streaming.records.discards.mark_resent();
        let RoundOutcome { streams, owed, stats } = self.send_scanned(streams, scanned, None, streaming)?;
        if stats.is_some() {
            self.complete_round_report(pass, 0, 0);
        }
        Ok((streams, owed))
    }

    /// Sends the selected pages.
    fn send_planned(
        &mut self,
        state: &mut PreCopy,
        streams: Streams,
        scanned: DirtyScan,
        streaming: &mut Streaming,
    ) -> Result<(Streams, OwedPages), Failure> {
        let mut scanned = scanned;
        if let Some(hints) = &mut state.hints {
            scanned.readable = self.ask_guest(hints, scanned.readable, state.rounds.is_first())?;
            state.selector.set_hints_pending(hints.is_first_pending());
        }
        self.before_round(scanned.readable.pages())?;
        self.handle_notices()?;
        let (rounds, selector) = (&mut state.rounds, &mut state.selector);
        let scanned_at = scanned.scanned_at;
        let Streaming { payload, records, .. } = &mut *streaming;
        let interval_factor = records.pressure.as_ref().map_or(1, PressureMeter::interval_factor);
        let must_precopy_only = rounds.sends_must_precopy_only();
        let selection = rounds.select_pages(scanned.readable.pages(), interval_factor);
        let RoundPages { scanned, later, until } =
            selector.select(selection, interval_factor, scanned, payload);
        let resent_pages = selector.count_resent(&scanned, payload);
        let waiting = later.as_ref().map(DeferredPages::of).unwrap_or_default();
        let plan = RoundPlan { scanned_at, pass: rounds.passes() + 1, resent_pages, later };
        self.telemetry.begin_round(plan.pass, waiting);
        if let Some(later) = &plan.later {
            payload.keep_versions(later);
        }
        if !must_precopy_only {
            records.discards.mark_resent();
        }
        let outcome = self.send_scanned(streams, scanned, until, streaming)?;
        self.resources.participants.after_round(outcome.stats.as_ref());
        Ok(self.record_outcome(state, &plan, outcome, &streaming.payload))
    }

    /// Records what became of a round. Returns the streams, and all pages that are owed.
    fn record_outcome(
        &self,
        state: &mut PreCopy,
        plan: &RoundPlan,
        outcome: RoundOutcome,
        payload: &Payload,
    ) -> (Streams, OwedPages) {
        let RoundOutcome { streams, mut owed, stats } = outcome;
        let later = plan.later.as_ref();
        if let Some(stats) = &stats {
            // Pages that the destination refused count as sent in this round.
            let unsent_pages = owed.pages().saturating_sub(stats.refused_pages);
            let remaining_pages = later.map_or(0, OwedPages::pages) + unsent_pages;
            let must_precopy_later = later.map_or(0, |later| payload.must_precopy_pages(later));
            let sent = SentRound {
                scanned_at: plan.scanned_at,
                remaining_pages,
                remaining_must_precopy_pages: payload.must_precopy_pages(&owed) + must_precopy_later,
                resent_pages: plan.resent_pages,
                ..payload::sent_round(stats)
            };
            state.rounds.sent(sent, state.selector.sent(stats, &owed));
            self.complete_round_report(plan.pass, remaining_pages, plan.resent_pages);
        } else {
            state.selector.cut(&owed);
            state.rounds.cut();
        }
        if let Some(later) = later {
            owed.take_back(later);
        }
        if state.rounds.has_sent_all() {
            payload.end_reductions(ReductionStage::MemorySent);
        }
        (streams, owed)
    }

    /// Creates a policy that has no observations yet, and the selector of its rounds.
    fn new_policy(&self) -> (TracedStopPolicy, PageSelector) {
        let goals = self.controls.goals();
        let ways = AvailableStrategies {
            slow_down: self.resources.cpu_throttle.is_some(),
            post_copy: self.agreement.can_post_copy,
        };
        let policy = payload::policy(&goals, ways, self.fixed_costs(|history| history.estimate()));
        self.controls.report(|report| report.traces.stop.push(policy.trace().clone()));
        let selector = PageSelector::new(&policy, goals.sampling);
        (policy, selector)
    }

    /// Lets the policy decide after a round and the dirty scan that followed it, and reports its decision.
    fn decide(&mut self, rounds: &mut Rounds, scanned: &DirtyScan, payload: &Payload) {
        let policy = rounds.policy().policy().clone();
        let decided = rounds.scanned(|| self.scan_facts(scanned, payload));
        let Some(DecidedRound { observed, decision, new_outlook, demand }) = decided else { return };
        // A guest that is about to be stopped gets all processors.
        if let (Decision::NextRound { .. }, Some(end_forecaster)) =
            (&decision, &mut self.reporter.end_forecaster)
        {
            end_forecaster.observe(policy, payload::pre_copy_goals(&self.controls.goals()), &observed);
        }
        self.report_decision(&observed, &decision, rounds.policy().trace());
        if let Some(outlook) = new_outlook {
            self.note("way", outlook.to_string());
        }
        if let Some(change) = demand.and_then(|demand| self.slow_down(&observed, demand)) {
            rounds.throttle_changed(change);
        }
    }

    fn scan_facts(&self, scanned: &DirtyScan, payload: &Payload) -> ScanResult {
        let (owed, goals) = (scanned.readable.owed(), self.controls.goals());
        ScanResult {
            scanned_at: scanned.scanned_at,
            scan_ns: scanned.scan.duration_us.saturating_mul(1000),
            dirty_pages: owed.pages(),
            full_pages: payload.full_pages(owed),
            must_precopy_pages: scanned.must_precopy_pages,
            elapsed: self.controls.requested.elapsed(),
            goals: payload::pre_copy_goals(&goals),
            is_throttle_requested: goals.settings.throttle_cpu != ThrottleCpu::Off,
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
                Some(ThrottleChange::Unavailable)
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
