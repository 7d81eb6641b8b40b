//! Rounds while the guest runs: the step that follows a dirty scan.
//!
//! ```text
//! dirty scan ─► policy ─┬─ another round ──► discard, if only disks are sent ──► send
//!                       ├─ stop, memory is deferred ──► take back ──► send all
//!                       ├─ stop ──► notices ──► discard, if post-copy ─┬──► stop
//!                       │                                              └──► send, because the link is cut
//!                       └─ give up
//! ```
//!
//! A dirty scan follows each round, no matter if all of it was sent.

use std::time::Duration;

use super::passes::{PageSelection, Passes, RoundLimits};
use crate::pre_copy::{
    Decision, GiveUp, Outlook, PreCopyGoals, RoundObservation, ThrottleChange, TracedStopPolicy,
};
use crate::session::time::Time;
use crate::throttle::processors::ThrottleDemand;

/// Kind of the stop that ends the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SwitchoverKind {
    /// The guest is stopped while the remaining pages are sent.
    StopAndCopy,
    /// The remaining pages are sent while the guest runs at the destination.
    PostCopy,
}

/// Next step of a source that sends rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundStep {
    /// Send the pages that [`Rounds::select_pages`] selects, and report the outcome.
    Send,
    /// Let the destination discard pages that it receives after the guest, for as long as that shortens the stop.
    Discard,
    /// Let the guest give back its deferred page cache, whose pages are added to the scan. A policy without
    /// observations replaces the present one ([`Rounds::deferred_reclaimed`]).
    ReclaimDeferred,
    /// Send all pages of the scan, those that were deferred included, in a round that no policy learns of.
    SendReclaimed,
    /// Handle the notices that have arrived: the stop depends on the control stream.
    CheckControl,
    /// Stop the guest.
    Stop {
        /// Downtime that the policy expects.
        expected_downtime: Duration,
        /// Kind of the stop.
        ending: SwitchoverKind,
    },
    /// End the migration.
    GiveUp {
        /// Reason.
        reason: GiveUp,
    },
}

/// Facts on which the next step depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundContext {
    /// True if the control stream exists.
    pub has_control: bool,
    /// True if page cache is deferred that the guest is to give back before the stop.
    pub has_deferred: bool,
    /// True if the destination has discarded pages over the present connections, and no round has sent memory since.
    pub has_discarded: bool,
}

/// A round that was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentRound {
    /// Time of the scan before the round.
    pub scanned_at: Time,
    /// Pages that the round sent, zero pages included.
    pub pages_sent: u64,
    /// Those of them that needed next to no bytes.
    pub empty_pages: u64,
    /// Those of them that needed fewer bytes than they have.
    pub reduced_pages: u64,
    /// Dirty pages that the round left to the next.
    pub remaining_pages: u64,
    /// Those of `remaining_pages` that have to be sent before the guest runs at the destination.
    pub remaining_must_precopy_pages: u64,
    /// Pages of the round that were sent shortly before, too.
    pub resent_pages: u64,
    /// Bytes of the round on the wire.
    pub bytes_sent: u64,
    /// Duration of the round, in nanoseconds.
    pub duration_ns: u64,
}

/// Result of a dirty scan, and the goals at that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanResult {
    /// Time of the scan.
    pub scanned_at: Time,
    /// Duration of the scan, in nanoseconds.
    pub scan_ns: u64,
    /// Dirty pages.
    pub dirty_pages: u64,
    /// Those of them without any knowledge that would save the link a part of them.
    pub full_pages: u64,
    /// Those of them that have to be sent before the guest runs at the destination.
    pub must_precopy_pages: u64,
    /// Time since the migration was requested.
    pub elapsed: Duration,
    /// Goals of the migration.
    pub goals: PreCopyGoals,
    /// True if a user has requested a throttle of the guest's processors.
    pub is_throttle_requested: bool,
}

/// Decision of the policy after a dirty scan, for the report and for the throttle of the guest's processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecidedRound {
    /// Observation of the policy.
    pub observed: RoundObservation,
    /// Decision of the policy.
    pub decision: Decision,
    /// Outlook of the policy, if it has changed its strategy.
    pub new_outlook: Option<Outlook>,
    /// Demand for the throttle of the guest's processors, if another round follows. The change that it causes is
    /// recorded ([`Rounds::throttle_changed`]).
    pub demand: Option<ThrottleDemand>,
}

/// Stage between a dirty scan and the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoundStage {
    /// A round follows. With `discards_first`, pages are discarded before it.
    Send { discards_first: bool },
    /// The policy stops the guest; nothing is checked yet.
    StopDecided { expected_downtime: Duration, ending: SwitchoverKind },
    /// No memory is deferred, and the notices that had arrived are handled.
    NoticesHandled { expected_downtime: Duration, ending: SwitchoverKind },
    /// The pages for post-copy are discarded at the destination, as far as that is worth it.
    Discarded { expected_downtime: Duration, ending: SwitchoverKind },
    /// Deferred memory is part of the scan.
    Reclaimed,
    /// The policy gives up.
    GivenUp(GiveUp),
}

/// Rounds until the policy decides to stop the guest.
#[derive(Clone, Debug)]
pub struct Rounds {
    policy: TracedStopPolicy,
    passes: Passes,
    /// The round before the present dirty scan; none if it was cut off, or if no policy learns of it.
    sent: Option<SentRound>,
    /// True until one round was sent.
    is_first: bool,
    stage: RoundStage,
}

impl Rounds {
    /// Begins with a policy that has no observations yet.
    pub fn new(policy: TracedStopPolicy) -> Self {
        let stage = RoundStage::Send { discards_first: false };
        Self { policy, passes: Passes::after(0), sent: None, is_first: true, stage }
    }

    /// Returns the policy.
    pub fn policy(&self) -> &TracedStopPolicy {
        &self.policy
    }

    /// Returns the number of completed passes over the dirty pages.
    pub fn passes(&self) -> u32 {
        self.passes.completed()
    }

    /// Returns true until one round was sent.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// Returns true in the first pass, which sends all of memory.
    pub fn is_first_pass(&self) -> bool {
        self.passes.completed() == 0
    }

    /// Returns true if a dirty scan has to report the pages of memory that were written since the one before: the first
    /// pass leaves them for later, and post-copy sends them first.
    pub fn needs_written_pages(&self, can_post_copy: bool) -> bool {
        self.is_first_pass() || can_post_copy
    }

    /// Returns true if every page was sent once, including those that were written during the first pass.
    pub fn has_sent_all(&self) -> bool {
        self.passes.completed() > 1
    }

    /// Returns true if the next round sends only pages that have to be sent before the guest runs at the destination.
    pub fn sends_must_precopy_only(&self) -> bool {
        self.passes.limits().must_precopy_only
    }

    /// Ends the first pass: a dirty scan found that the guest has written all pages that were not sent yet.
    pub fn end_first_pass(&mut self) {
        self.passes.end_first();
    }

    /// Decides after a dirty scan, whose result `scan` returns if it is needed: without a round before the scan, a
    /// round follows. Returns the decision, if there is one.
    pub fn scanned(&mut self, scan: impl FnOnce() -> ScanResult) -> Option<DecidedRound> {
        self.stage = RoundStage::Send { discards_first: false };
        let sent = self.sent.take()?;
        let scan = scan();
        let observed = observe(&sent, &scan, self.passes.completed());
        self.policy.set_goals(scan.goals);
        let before = self.policy.outlook();
        let decision = self.policy.decide(&observed);
        let is_new = |now: &Outlook| {
            before.is_none_or(|before| (before.chosen, before.is_feasible) != (now.chosen, now.is_feasible))
        };
        let new_outlook = self.policy.outlook().filter(is_new);
        let mut demand = None;
        self.stage = match decision {
            Decision::NextRound { expected_downtime_ns, most_pages, slow, must_precopy_only } => {
                self.passes.limit(RoundLimits { most_pages, must_precopy_only });
                demand = Some(ThrottleDemand {
                    is_chosen: slow,
                    is_requested: scan.is_throttle_requested,
                    passes: observed.pass,
                    expected_downtime_ns,
                    max_downtime_ns: scan.goals.max_downtime_ns,
                });
                // The remaining pages of disks are sent last, so that nothing needs time between them and the stop.
                RoundStage::Send { discards_first: must_precopy_only }
            }
            Decision::StopAndCopy { expected_downtime_ns, .. } => {
                let expected_downtime = Duration::from_nanos(expected_downtime_ns);
                RoundStage::StopDecided { expected_downtime, ending: SwitchoverKind::StopAndCopy }
            }
            Decision::PostCopy { expected_downtime_ns } => {
                let expected_downtime = Duration::from_nanos(expected_downtime_ns);
                RoundStage::StopDecided { expected_downtime, ending: SwitchoverKind::PostCopy }
            }
            Decision::GiveUp { reason } => RoundStage::GivenUp(reason),
        };
        Some(DecidedRound { observed, decision, new_outlook, demand })
    }

    /// Records a change of the throttle of the guest's processors.
    pub fn throttle_changed(&mut self, change: ThrottleChange) {
        self.policy.throttle_changed(change);
    }

    /// Returns the next step after a dirty scan.
    pub fn next_step(&mut self, facts: RoundContext) -> RoundStep {
        match self.stage {
            RoundStage::Send { discards_first } => {
                self.stage = RoundStage::Send { discards_first: false };
                if discards_first && !facts.has_discarded { RoundStep::Discard } else { RoundStep::Send }
            }
            RoundStage::StopDecided { .. } if facts.has_deferred => RoundStep::ReclaimDeferred,
            RoundStage::StopDecided { expected_downtime, ending } => {
                self.stage = RoundStage::NoticesHandled { expected_downtime, ending };
                RoundStep::CheckControl
            }
            RoundStage::NoticesHandled { expected_downtime, ending: SwitchoverKind::PostCopy } => {
                self.stage = RoundStage::Discarded { expected_downtime, ending: SwitchoverKind::PostCopy };
                RoundStep::Discard
            }
            RoundStage::NoticesHandled { expected_downtime, ending }
            | RoundStage::Discarded { expected_downtime, ending } => {
                if facts.has_control {
                    return RoundStep::Stop { expected_downtime, ending };
                }
                // The guest is not stopped to wait for a link that is cut.
                self.passes.limit(RoundLimits::default());
                self.stage = RoundStage::Send { discards_first: false };
                RoundStep::Send
            }
            RoundStage::Reclaimed => RoundStep::SendReclaimed,
            RoundStage::GivenUp(reason) => RoundStep::GiveUp { reason },
        }
    }

    /// Records that the guest was asked to give back its page cache. The guest writes to its records of each page that
    /// it gives back, for as long as that lasts: neither those writes nor the round of these pages predict the rounds
    /// that follow, which a policy without observations decides.
    pub fn deferred_reclaimed(&mut self, policy: TracedStopPolicy) {
        self.policy = policy;
        self.passes = Passes::after(self.passes.completed());
        self.stage = RoundStage::Reclaimed;
    }

    /// Selects the pages of the next round, of `dirty_pages`. A round is longer than usual by `interval_factor`, for a
    /// guest that suffers from dirty scans.
    pub fn select_pages(&mut self, dirty_pages: u64, interval_factor: u32) -> PageSelection {
        self.passes.select(dirty_pages, interval_factor)
    }

    /// Records that the selected pages were sent. `has_reached_end` is true if a part has reached the end of all pages.
    pub fn sent(&mut self, sent: SentRound, has_reached_end: bool) {
        self.passes.sent(has_reached_end);
        self.is_first = false;
        self.sent = Some(sent);
    }

    /// Records that the round was cut off: the policy learns nothing of it. While there was no link, the guest was not
    /// slowed down.
    pub fn cut(&mut self) {
        self.policy.throttle_changed(ThrottleChange::Lifted);
    }
}

/// Returns the observation of a round, and of the scan that followed it, after `passes` passes.
fn observe(sent: &SentRound, scan: &ScanResult, passes: u32) -> RoundObservation {
    RoundObservation {
        pass: passes,
        dirty_pages: scan.dirty_pages,
        full_pages: scan.full_pages,
        must_precopy_pages: scan.must_precopy_pages,
        pages_sent: sent.pages_sent,
        empty_pages: sent.empty_pages,
        reduced_pages: sent.reduced_pages,
        remaining_pages: sent.remaining_pages,
        remaining_must_precopy_pages: sent.remaining_must_precopy_pages,
        resent_pages: sent.resent_pages,
        bytes_sent: sent.bytes_sent,
        duration_ns: sent.duration_ns,
        interval_ns: scan.scanned_at.since(sent.scanned_at).as_nanos() as u64,
        scan_ns: scan.scan_ns,
        elapsed_ns: scan.elapsed.as_nanos() as u64,
    }
}

#[cfg(test)]
mod tests;
