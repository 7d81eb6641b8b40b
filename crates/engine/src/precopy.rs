//! Pre-copy: when to stop the guest.
//!
//! Memory is sent in rounds while the guest runs: the first round sends all of it, each later one what was written
//! since. After each round the policy sees one [`RoundObservation`] and says whether to send another round, to stop the
//! guest and send the rest, or to give up.
//!
//! # Where the rule comes from
//!
//! KVM's rule (Ibrahim et al., *Optimized pre-copy live migration*, section II.A, Algorithm 1, lines 21 and 27–31):
//!
//! ```text
//! bandwidth         ← bytes_transferred / transfer_time
//! expected_downtime ← remaining_modified_data() / bandwidth
//! if expected_downtime < max_downtime then stop and send the rest
//! ```
//!
//! [`ByPattern`] keeps its idea and changes five things. The expected downtime has a *fixed part*, because stopping,
//! saving and loading devices and continuing take time even when no page is left; for small remainders they are most
//! of it. The bandwidth is not that of the last interval alone. Below the allowed downtime it goes on as long as a
//! round is worth it. There are limits: section II.B shows that a target below what is attainable keeps KVM's loop
//! going for ever. And beyond the allowed downtime it looks at how the guest writes (section VII, Algorithm 2): where
//! a [`Pattern`] says that rounds do not help, it does not go on until a limit is reached.
//!
//! [`BySla`] has a limit of time beside that of the downtime, and picks the way that is expected to keep both.
//! [`ByHybrid`] does not wait for the guest at all: what is left after the first way through memory goes after it.
//! [`ByTarget`] is KVM's rule itself, [`ByRounds`] Xen's: to compare with.
//!
//! # Replay
//!
//! What a policy was shown [`Traced`] keeps as a [`Trace`], which goes into the report, to be decided again ([`crate::trace`]).

mod classic;
mod forecast;
mod hybrid;
mod leaving;
mod pace;
mod pattern;
mod sla;
mod trace;

use std::fmt;

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

pub use classic::{ByRounds, ByTarget};
pub use forecast::{CostHistory, FixedCost};
pub use hybrid::ByHybrid;
pub use pattern::{ByPattern, Pattern, Sampling};
pub use sla::{BySla, Outcome, Outlook, Way, Ways};
pub use trace::{AnyPolicy, Happened, Trace, Traced};

/// What a policy is shown after a round: how it went, and what a scan right after it found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundObservation {
    /// How often all that was dirty has been sent, this time included: 1 when all of memory went once, and 0 before.
    /// One time can be several rounds, each with a part of the pages.
    pub round: u32,
    /// Pages that would have to be sent if the guest were stopped now.
    pub dirty_pages: u64,
    /// Those of them of which nothing is known at the source that would spare the link a part of them.
    #[serde(default)]
    pub unknown_pages: u64,
    /// Pages that the round sent, those of zeros among them.
    pub pages_sent: u64,
    /// Those of them that went as next to nothing, because they are zeros or the like: they tell nothing of the link.
    #[serde(default)]
    pub empty_pages: u64,
    /// Those of them that went as less than what is in them: as what changed of them, as where the destination has them
    /// already, or as nothing because the guest does not use them.
    #[serde(default)]
    pub spared_pages: u64,
    /// Pages that were dirty before the round and that it did not send, because it was to be a short one.
    #[serde(default)]
    pub left_pages: u64,
    /// Those of them that are of disks.
    #[serde(default)]
    pub left_of_disks: u64,
    /// Pages of those sent that had been sent shortly before, too, once all of memory went ([`Sampling::history`]).
    #[serde(default)]
    pub resent_pages: u64,
    /// Bytes that the round put on the wire.
    pub bytes_sent: u64,
    /// How long the round took, from its first page until the last one was acknowledged.
    pub duration_ns: u64,
    /// Time between the scan before the round and the one after it: in this time those of `dirty_pages` were written
    /// that had not been left.
    pub interval_ns: u64,
    /// How long the scan after the round took.
    pub scan_ns: u64,
    /// Since the migration was asked for.
    #[serde(default)]
    pub elapsed_ns: u64,
    /// Those of `dirty_pages` that are of disks.
    #[serde(default)]
    pub disk_pages: u64,
}

impl RoundObservation {
    /// What the wire carried, in bytes per second; 0 for a round that took no time.
    pub fn link_rate_bytes_per_s(&self) -> u64 {
        per_second(self.bytes_sent.into(), self.duration_ns)
    }

    /// What was seen of memory, without disks: what of the round it was is not told apart.
    #[must_use]
    pub fn of_memory(&self) -> Self {
        Self {
            dirty_pages: self.dirty_pages.saturating_sub(self.disk_pages),
            left_pages: self.left_pages.saturating_sub(self.left_of_disks),
            disk_pages: 0,
            left_of_disks: 0,
            ..*self
        }
    }

    /// How fast the guest writes to new pages, in bytes of whole pages per second.
    pub fn dirty_rate_bytes_per_s(&self) -> u64 {
        let written = self.dirty_pages.saturating_sub(self.left_pages);
        per_second(u128::from(written) * u128::from(PAGE_BYTES), self.interval_ns)
    }
}

/// What a migration aims at. A user may change it while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aim {
    /// The guest may stand still for this long.
    pub max_downtime_ns: u64,
    /// After this many rounds the limit is reached.
    pub max_rounds: u32,
    /// All of it is to be over so long after it was asked for; none if it has time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total_ns: Option<u64>,
}

impl Default for Aim {
    /// 300 ms, as QEMU's own, 30 rounds, and all the time there is.
    fn default() -> Self {
        Self { max_downtime_ns: 300_000_000, max_rounds: 30, max_total_ns: None }
    }
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "kebab-case")]
pub enum Decision {
    /// Send what is dirty while the guest runs.
    NextRound {
        /// What the downtime would be if the guest were stopped now. `u64::MAX` where nothing was measured yet.
        expected_downtime_ns: u64,
        /// Send only so many pages and look again; none to send all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        most_pages: Option<u64>,
        /// Have the guest's processors be slower meanwhile.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        slow: bool,
        /// Send what is dirty of disks and nothing of memory: that comes after the guest.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        disks_alone: bool,
    },
    /// Stop the guest and send the rest.
    StopAndCopy {
        /// What the downtime is expected to be.
        expected_downtime_ns: u64,
        /// How the guest writes, where that says that rounds help no more.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pattern: Option<Pattern>,
    },
    /// Stop the guest, run it at the destination, and send the rest meanwhile.
    PostCopy {
        /// What the downtime is expected to be.
        expected_downtime_ns: u64,
    },
    /// End the migration; the guest runs on where it is.
    GiveUp {
        /// Why.
        reason: GiveUp,
    },
}

/// Why a policy gives up. `Display` says what a user can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GiveUp {
    /// What was reached.
    pub limit: Limit,
    /// What the downtime would be.
    pub expected_downtime_ns: u64,
    /// How much of that whatever is left to send: device state, handover.
    pub fixed_ns: u64,
    /// What it may be.
    pub max_downtime_ns: u64,
}

/// What to do when rounds lead no further and the expected downtime is beyond what is allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLimit {
    /// Stop the guest for longer than was asked for.
    Stop,
    /// Have the rest come when the guest runs at the destination.
    PostCopy,
    /// Give up; the guest runs on where it is.
    #[default]
    Abort,
}

/// A limit of patience.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The number of rounds.
    Rounds,
    /// Rounds no longer leave less than earlier ones did: the guest writes as fast as the link carries.
    NotShrinking,
    /// The time after which all has to be over.
    Total,
    /// Memory may come after the guest, and what it writes to its disks does not become less.
    Disks,
}

impl fmt::Display for GiveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.limit {
            Limit::Rounds => "the limit of rounds is reached",
            Limit::NotShrinking => "rounds leave no less to send than the ones before",
            Limit::Total => "there is no time left",
            Limit::Disks => {
                "memory may come after the VM, but what it has written to its disks goes before it and becomes no less"
            }
        };
        let tenths = |ns: u64| format!("{}.{}", ns / 1_000_000, ns / 100_000 % 10);
        match self.expected_downtime_ns {
            u64::MAX => write!(f, "{what}; how long stopping now would take is not known yet")?,
            expected_ns => write!(
                f,
                "{what}; stopping now would take about {} ms ({} of them whatever is left to send)",
                tenths(expected_ns),
                tenths(self.fixed_ns),
            )?,
        }
        write!(
            f,
            " and {} ms are allowed: allow a longer downtime, a higher bandwidth or {}, or stop at the limit",
            tenths(self.max_downtime_ns),
            match self.limit {
                Limit::Total => "more time",
                Limit::Disks => "have its writes throttled (--throttle-writes)",
                Limit::Rounds | Limit::NotShrinking => "more rounds",
            },
        )
    }
}

/// How fast a guest's processors may be from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Held {
    /// Slower than before.
    Slower,
    /// As fast as ever, until they are slowed down again: a link was cut.
    Free,
    /// As fast as ever, and nobody can slow them down any more.
    ForGood,
}

/// Decides after each round.
pub trait Policy {
    /// Takes a changed aim; it holds from the next decision on.
    fn aim(&mut self, aim: Aim);

    /// The guest is as fast as it was no more: what was seen of how it writes tells nothing of how it will.
    fn held(&mut self, held: Held);

    /// What to do after this round.
    fn decide(&mut self, observed: &RoundObservation) -> Decision;
}

/// `amount` in `ns`, as an amount per second.
fn per_second(amount: u128, ns: u64) -> u64 {
    let rate = (amount * 1_000_000_000).checked_div(ns.into()).unwrap_or(0);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
