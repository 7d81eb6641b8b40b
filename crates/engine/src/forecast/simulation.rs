//! Simulation of a migration: the real policies decide about a modelled guest.
//!
//! Rounds are those of the source driver: the first pass goes in parts, and pages that are written before it reaches
//! them are left to its end; each later round sends the dirty pages, or as many of them as the policy allows.

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

use super::facts::MigrationFacts;
use super::pages::{PageCounts, SimulatedPages};
use super::slowdown::Slowdown;
use crate::disks_first::{DiskRound, DisksFirstPolicy, NextPhase};
use crate::pre_copy::{AnyPolicy, Decision, GiveUp, Policy, PreCopyGoals, RoundObservation, Sampling};
use crate::trace::Decider;

/// Most decisions of a simulated migration: one that is not over then has no end.
const MOST_DECISIONS: u32 = 5000;
/// Most rounds of disks alone.
const MOST_DISK_ROUNDS: u32 = 100;

/// End of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "end", rename_all = "kebab-case")]
pub enum MigrationEnd {
    /// The guest is stopped for the remaining pages.
    StopAndCopy,
    /// The remaining pages are sent when the guest runs at the destination.
    PostCopy,
    /// The policy gives up.
    GivesUp {
        /// Reason.
        reason: GiveUp,
    },
    /// Rounds are sent as long as the guest writes as it does: nothing limits them.
    Endless,
}

/// Outcome of a simulated migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SimulatedOutcome {
    pub(super) end: MigrationEnd,
    /// Time from the request to the end, in nanoseconds.
    pub(super) total_ns: f64,
    pub(super) downtime_ns: f64,
    /// Bytes on the wire.
    pub(super) bytes: f64,
    /// Rounds, without those of disks alone.
    pub(super) rounds: u32,
    /// True if the guest's processors were slowed down.
    pub(super) is_slowed: bool,
}

/// A simulated migration.
pub(super) struct Simulation<'a> {
    facts: &'a MigrationFacts,
    pages: SimulatedPages,
    slowdown: Slowdown,
    elapsed_ns: f64,
    bytes: f64,
    rounds: u32,
    passes: u32,
    /// Pages of memory with content.
    memory_pages: f64,
    /// First pass: share of the pages not written since its start that were not sent.
    unsent_share: f64,
    /// First pass: empty pages that were not sent.
    unsent_empty: f64,
    /// Part of a pass that was sent, where a round sends a part.
    position: f64,
    /// True once a round has sent pages after the first pass.
    has_history: bool,
    last: Option<RoundObservation>,
}

/// Pages and times of a round.
struct SimulatedRound {
    sent: PageCounts,
    empty: f64,
    /// Pages that were owed before the round.
    owed: f64,
    owed_disk: f64,
    resent: f64,
}

fn pages_of(bytes: u64) -> f64 {
    (bytes / PAGE_BYTES) as f64
}

fn whole(value: f64) -> u64 {
    value.round() as u64
}

impl<'a> Simulation<'a> {
    /// Prepares a migration that begins with the request.
    pub(super) fn of_request(facts: &'a MigrationFacts) -> Self {
        let guest = &facts.guest;
        let memory_pages = pages_of(guest.used_bytes.min(guest.memory_bytes));
        let memory = guest.writes.classes(memory_pages);
        let disk = guest.disks.as_ref().map(|disks| disks.writes.classes(pages_of(disks.bytes)));
        Self {
            facts,
            pages: SimulatedPages::all_dirty(&memory, &disk.unwrap_or_default()),
            slowdown: Slowdown::new(&guest.vcpu_use_us_per_s, facts.throttle_requested),
            elapsed_ns: facts.times.setup_ns as f64,
            bytes: 0.0,
            rounds: 0,
            passes: 0,
            memory_pages,
            unsent_share: 1.0,
            unsent_empty: (pages_of(guest.memory_bytes) - memory_pages).max(0.0),
            position: 0.0,
            has_history: false,
            last: None,
        }
    }

    /// Prepares the rest of a migration that is under way, after the round that `observed` is about.
    pub(super) fn of_rest(facts: &'a MigrationFacts, observed: &RoundObservation) -> Self {
        let mut simulation = Self::of_request(facts);
        simulation.elapsed_ns = observed.elapsed_ns as f64;
        simulation.passes = observed.pass;
        let disk = observed.must_precopy_pages.min(observed.dirty_pages) as f64;
        let memory = observed.dirty_pages as f64 - disk;
        if observed.pass == 0 {
            simulation.pages.clean_all_but(PageCounts { memory: 0.0, disk });
            let all = simulation.memory_pages + simulation.unsent_empty;
            let share = if all > 0.0 { (memory / all).min(1.0) } else { 0.0 };
            simulation.unsent_share = share;
            simulation.unsent_empty *= share;
        } else {
            simulation.pages.clean_all_but(PageCounts { memory, disk });
            (simulation.unsent_share, simulation.unsent_empty) = (0.0, 0.0);
            simulation.has_history = true;
        }
        simulation.last = Some(*observed);
        simulation
    }

    /// Lets the policy decide until the migration ends.
    pub(super) fn run(mut self, mut policy: AnyPolicy, goals: PreCopyGoals) -> SimulatedOutcome {
        if self.last.is_none() {
            self.send_disks_ahead();
            // From here on writes to memory are tracked.
            self.pages.clean(1.0, 0.0);
            self.last = Some(self.send_part());
        }
        for _ in 0..MOST_DECISIONS {
            let Some(observed) = self.last else { break };
            match Policy::decide(&mut policy, &observed) {
                Decision::NextRound { expected_downtime_ns, most_pages, slow, must_precopy_only } => {
                    let change = self.slowdown.update(&observed, slow, expected_downtime_ns, goals);
                    if let Some(change) = change {
                        policy.throttle_changed(change);
                    }
                    self.last = Some(if self.passes == 0 {
                        self.send_part()
                    } else {
                        self.send_round(most_pages, must_precopy_only)
                    });
                }
                Decision::StopAndCopy { .. } => return self.stop(MigrationEnd::StopAndCopy),
                Decision::PostCopy { .. } => return self.stop(MigrationEnd::PostCopy),
                Decision::GiveUp { reason } => {
                    return self.outcome(MigrationEnd::GivesUp { reason }, self.elapsed_ns, 0.0);
                }
            }
        }
        self.outcome(MigrationEnd::Endless, self.elapsed_ns, 0.0)
    }

    /// Sends rounds of disks alone, until memory begins.
    fn send_disks_ahead(&mut self) {
        if self.facts.guest.disks.is_none() {
            return;
        }
        let mut policy = DisksFirstPolicy { memory_bytes: self.facts.guest.used_bytes };
        for _ in 0..MOST_DISK_ROUNDS {
            let sent = self.pages.clean(0.0, 1.0);
            self.transfer(sent.all(), 0.0);
            let bytes = |pages: f64| whole(pages).saturating_mul(PAGE_BYTES);
            let disk_round =
                DiskRound { dirty_bytes: bytes(self.pages.dirty().disk), sent_bytes: bytes(sent.disk) };
            if policy.decide(&disk_round) == NextPhase::Memory {
                return;
            }
        }
    }

    /// Sends a part of the first pass.
    fn send_part(&mut self) -> RoundObservation {
        let path = &self.facts.path;
        let sampling = self.facts.sampling;
        let usual_ns = if sampling.interval_ns > 0 { sampling.interval_ns } else { Sampling::LONGEST_NS };
        let part_ns = usual_ns.max(path.scan_ns.saturating_mul(Sampling::MIN_SCANS)) as f64;
        let before = self.pages.dirty();
        let pool = (self.memory_pages - before.memory).max(0.0) * self.unsent_share;
        let all_ns = path.pages_ns(pool, self.unsent_empty);
        let share = if all_ns <= part_ns { 1.0 } else { part_ns / all_ns };
        let simulated = SimulatedRound {
            sent: PageCounts { memory: pool * share, disk: 0.0 },
            empty: self.unsent_empty * share,
            owed: before.all() + pool + self.unsent_empty,
            owed_disk: before.disk,
            resent: 0.0,
        };
        self.unsent_share *= 1.0 - share;
        self.unsent_empty -= simulated.empty;
        if share >= 1.0 {
            (self.passes, self.unsent_empty) = (1, 0.0);
        }
        self.observe(&simulated)
    }

    /// Sends the dirty pages, or a part of them.
    fn send_round(&mut self, most_pages: Option<u64>, must_precopy_only: bool) -> RoundObservation {
        let before = self.pages.dirty();
        let share = most_pages.map_or(1.0, |most| (most as f64 / before.all().max(1.0)).min(1.0));
        let rewritten = if self.has_history { self.pages.rewritten_memory() } else { 0.0 };
        // A part begins where the part before it ended, so the two overlap only if each is more than a half: of the
        // pages of a part all were in the one before but those that it left.
        let overlap = ((2.0 * share - 1.0) / share.max(0.5)).max(0.0);
        let sent = if must_precopy_only {
            self.pages.clean(0.0, 1.0)
        } else {
            self.position += share;
            self.has_history = true;
            self.pages.clean(share, share)
        };
        if self.position >= 1.0 {
            self.position = if share < 1.0 { self.position - 1.0 } else { 0.0 };
            self.passes += 1;
        }
        let resent = if must_precopy_only { 0.0 } else { (rewritten * overlap).min(sent.memory) };
        self.observe(&SimulatedRound { sent, empty: 0.0, owed: before.all(), owed_disk: before.disk, resent })
    }

    /// Sends pages while the guest runs; returns the duration and the time until the next scan, in nanoseconds.
    fn transfer(&mut self, pages: f64, empty: f64) -> (f64, f64) {
        let path = &self.facts.path;
        let duration_ns = path.pages_ns(pages, empty) + path.rtt_ns as f64;
        let interval_ns = duration_ns + path.drain_ns as f64 + path.scan_ns as f64;
        self.bytes += path.wire_bytes(pages);
        self.elapsed_ns += interval_ns;
        self.pages.run(interval_ns * self.slowdown.speed());
        (duration_ns, interval_ns)
    }

    /// Sends the pages of a round, and returns what the driver would observe after it.
    fn observe(&mut self, simulated: &SimulatedRound) -> RoundObservation {
        let sent = simulated.sent.all();
        let (duration_ns, interval_ns) = self.transfer(sent, simulated.empty);
        self.rounds += 1;
        let dirty = self.pages.dirty();
        let unsent = (self.memory_pages - dirty.memory).max(0.0) * self.unsent_share + self.unsent_empty;
        let dirty_pages = whole(dirty.all() + unsent);
        let remaining = (simulated.owed - sent - simulated.empty).max(0.0);
        RoundObservation {
            pass: self.passes,
            dirty_pages,
            full_pages: whole(dirty.all() + unsent - self.unsent_empty),
            pages_sent: whole(sent + simulated.empty),
            empty_pages: whole(simulated.empty),
            reduced_pages: 0,
            remaining_pages: whole(remaining).min(dirty_pages),
            remaining_must_precopy_pages: whole((simulated.owed_disk - simulated.sent.disk).max(0.0)),
            resent_pages: whole(simulated.resent),
            bytes_sent: whole(self.facts.path.wire_bytes(sent)),
            duration_ns: whole(duration_ns),
            interval_ns: whole(interval_ns),
            scan_ns: self.facts.path.scan_ns,
            elapsed_ns: whole(self.elapsed_ns),
            must_precopy_pages: whole(dirty.disk).min(dirty_pages),
        }
    }

    /// Stops the guest, and sends the remaining pages before or after it continues.
    fn stop(mut self, end: MigrationEnd) -> SimulatedOutcome {
        let path = &self.facts.path;
        let dirty = self.pages.dirty();
        let unsent = (self.memory_pages - dirty.memory).max(0.0) * self.unsent_share;
        let waiting = if end == MigrationEnd::PostCopy {
            PageCounts { memory: dirty.memory + unsent, disk: 0.0 }
        } else {
            PageCounts::default()
        };
        let last = PageCounts { memory: dirty.memory + unsent, disk: dirty.disk }.minus(waiting);
        let empty_ns = path.pages_ns(0.0, self.unsent_empty);
        let send_ns = |pages: f64| {
            if pages > 0.0 { path.pages_ns(pages, 0.0) + path.rtt_ns as f64 } else { 0.0 }
        };
        let last_ns = send_ns(last.all());
        let waiting_ns = send_ns(waiting.all()) + empty_ns;
        let downtime_ns = self.facts.fixed.downtime_ns(whole(last_ns)) as f64 + 2.0 * path.scan_ns as f64;
        self.bytes += path.wire_bytes(last.all() + waiting.all());
        let total_ns = self.elapsed_ns + downtime_ns + waiting_ns + self.facts.times.finish_ns as f64;
        self.outcome(end, total_ns, downtime_ns)
    }

    fn outcome(&self, end: MigrationEnd, total_ns: f64, downtime_ns: f64) -> SimulatedOutcome {
        SimulatedOutcome {
            end,
            total_ns,
            downtime_ns,
            bytes: self.bytes,
            rounds: self.rounds,
            is_slowed: self.slowdown.was_slowed(),
        }
    }
}
