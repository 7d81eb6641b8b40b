//! A policy of pre-copy: its goals, observations and decisions.

use std::fmt;

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// Observation after a round: measurements of the round, and of the dirty scan right after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundObservation {
    /// Number of passes over all dirty pages, this one included: 1 when all of memory was sent once, and 0 before. One
    /// pass can be several rounds, each with a part of the pages.
    pub pass: u32,
    /// Pages that would have to be sent if the guest were stopped now.
    pub dirty_pages: u64,
    /// Those of them for which the source knows no version or reference that would spare the link a part of them.
    #[serde(default)]
    pub full_pages: u64,
    /// Pages that the round sent, zero pages included.
    pub pages_sent: u64,
    /// Those of them that needed next to no bytes, because they are zero pages or the like: they reveal nothing about
    /// the link.
    #[serde(default)]
    pub empty_pages: u64,
    /// Those of them that needed fewer bytes than they have: sent as deltas or as references, or skipped because the
    /// guest does not use them.
    #[serde(default)]
    pub reduced_pages: u64,
    /// Pages that were dirty before the round and that it did not send, because it was to be a short one.
    #[serde(default)]
    pub remaining_pages: u64,
    /// Those of `remaining_pages` that have to be sent before the guest runs at the destination: pages of disks.
    #[serde(default)]
    pub remaining_must_precopy_pages: u64,
    /// Those of the pages sent that had been sent shortly before, too, once all of memory was sent
    /// ([`Sampling::history`](super::Sampling::history)).
    #[serde(default)]
    pub resent_pages: u64,
    /// Bytes of the round on the wire.
    pub bytes_sent: u64,
    /// Duration of the round in nanoseconds, from its first page until the last one was acknowledged.
    pub duration_ns: u64,
    /// Time between the scan before the round and the one after it, in nanoseconds: those of `dirty_pages` that do not
    /// count as `remaining_pages` were written in this time.
    pub interval_ns: u64,
    /// Duration of the scan after the round, in nanoseconds.
    pub scan_ns: u64,
    /// Time since the migration was requested, in nanoseconds.
    #[serde(default)]
    pub elapsed_ns: u64,
    /// Those of `dirty_pages` that have to be sent before the guest runs at the destination: pages of disks.
    #[serde(default)]
    pub must_precopy_pages: u64,
}

impl RoundObservation {
    /// Returns the rate on the wire, in bytes per second; 0 for a round that took no time.
    pub fn link_rate_bytes_per_s(&self) -> u64 {
        per_second(self.bytes_sent.into(), self.duration_ns)
    }

    /// Returns the observation without the pages that post-copy cannot send, which are those of disks. The measurements
    /// of the round itself cover all pages.
    #[must_use]
    pub fn without_must_precopy(&self) -> Self {
        Self {
            dirty_pages: self.dirty_pages.saturating_sub(self.must_precopy_pages),
            remaining_pages: self.remaining_pages.saturating_sub(self.remaining_must_precopy_pages),
            must_precopy_pages: 0,
            remaining_must_precopy_pages: 0,
            ..*self
        }
    }

    /// Returns the dirty rate of the guest, in bytes of whole pages per second.
    pub fn dirty_rate_bytes_per_s(&self) -> u64 {
        let written = self.dirty_pages.saturating_sub(self.remaining_pages);
        per_second(u128::from(written) * u128::from(PAGE_BYTES), self.interval_ns)
    }
}

/// Goals of a migration. A user may change them while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreCopyGoals {
    /// Downtime limit, in nanoseconds.
    pub max_downtime_ns: u64,
    /// Limit on the number of passes.
    pub max_passes: u32,
    /// Limit on the total time since the request, in nanoseconds; none for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total_ns: Option<u64>,
}

impl Default for PreCopyGoals {
    /// 300 ms, QEMU's own default, 30 passes, and no time limit.
    fn default() -> Self {
        Self { max_downtime_ns: 300_000_000, max_passes: 30, max_total_ns: None }
    }
}

/// Decision after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "kebab-case")]
pub enum Decision {
    /// Send the dirty pages while the guest runs.
    NextRound {
        /// Expected downtime if the guest were stopped now, in nanoseconds. `u64::MAX` before anything was measured.
        expected_downtime_ns: u64,
        /// Most pages to send before the next scan; none to send all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        most_pages: Option<u64>,
        /// True to slow down the guest's processors during the round.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        slow: bool,
        /// True to send only the dirty pages that post-copy cannot send, which are those of disks.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        must_precopy_only: bool,
    },
    /// Stop the guest and send the remaining pages.
    StopAndCopy {
        /// Expected downtime, in nanoseconds.
        expected_downtime_ns: u64,
        /// Pattern of the guest's writes, if it is the reason: rounds do not help any more.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pattern: Option<Pattern>,
    },
    /// Stop the guest, run it at the destination, and send the remaining pages while it runs.
    PostCopy {
        /// Expected downtime, in nanoseconds.
        expected_downtime_ns: u64,
    },
    /// End the migration; the guest continues at the source.
    GiveUp {
        /// Reason.
        reason: GiveUp,
    },
}

/// Pattern of a guest's writes where rounds do not shorten the downtime any more (Ibrahim et al., section VII, Fig.
/// 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// a: as many pages are written as are sent, so that the number of modified pages stays the same.
    Stable,
    /// b: all modified pages were sent in less than a sampling interval.
    Drained,
    /// c: the pages that are sent were sent shortly before, too.
    Resent,
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stable => "pattern a: pages are written as fast as they are sent",
            Self::Drained => "pattern b: each round sends all written pages immediately",
            Self::Resent => "pattern c: the same pages are written again and again",
        })
    }
}

/// Reason for which a policy gives up. `Display` includes advice for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GiveUp {
    /// Limit that was reached.
    pub limit: Limit,
    /// Expected downtime, in nanoseconds.
    pub expected_downtime_ns: u64,
    /// Part of the expected downtime that does not depend on the remaining pages, in nanoseconds: device state,
    /// handover.
    pub fixed_ns: u64,
    /// Downtime limit, in nanoseconds.
    pub max_downtime_ns: u64,
}

/// Action when rounds do not help any more and the expected downtime exceeds the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLimit {
    /// Stop the guest for longer than requested.
    Stop,
    /// Send the remaining pages in post-copy, when the guest runs at the destination.
    PostCopy,
    /// Give up; the guest continues at the source.
    #[default]
    Abort,
}

/// Limits at which rounds end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The number of passes.
    Passes,
    /// Rounds no longer leave fewer pages than earlier ones did: the guest writes as fast as the link carries.
    NotShrinking,
    /// The limit on the total time.
    Total,
    /// Memory may follow in post-copy, and the dirty pages of the disks do not become fewer.
    Disks,
}

impl fmt::Display for GiveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.limit {
            Limit::Passes => "the maximum number of passes is reached",
            Limit::NotShrinking => "rounds no longer reduce the number of dirty pages",
            Limit::Total => "the time limit is reached",
            Limit::Disks => {
                "memory can be sent in post-copy, but dirty pages of disks must be sent before the stop, and \
                 do not become fewer"
            }
        };
        let tenths = |ns: u64| format!("{}.{}", ns / 1_000_000, ns / 100_000 % 10);
        match self.expected_downtime_ns {
            u64::MAX => write!(f, "{what}; the downtime of a stop now is not known yet")?,
            expected_ns => write!(
                f,
                "{what}; a stop now would take about {} ms ({} of them regardless of the remaining pages)",
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
                Limit::Disks => "a write throttle (--throttle-writes)",
                Limit::Passes | Limit::NotShrinking => "more passes",
            },
        )
    }
}

/// Change of the CPU throttle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThrottleChange {
    /// The guest's processors become slower.
    Slower,
    /// The throttle is lifted until it is applied again: a link was cut.
    Lifted,
    /// The throttle is lifted and cannot be applied any more.
    Unavailable,
}

/// Policy that decides after each round.
pub trait Policy {
    /// Sets changed goals, which apply from the next decision on.
    fn set_goals(&mut self, goals: PreCopyGoals);

    /// Notes that the guest's speed has changed: earlier observations of its writes do not predict later ones.
    fn throttle_changed(&mut self, change: ThrottleChange);

    /// Decides after a round.
    fn decide(&mut self, observed: &RoundObservation) -> Decision;
}

/// Returns the rate of `amount` in `ns`, per second.
fn per_second(amount: u128, ns: u64) -> u64 {
    let rate = (amount * 1_000_000_000).checked_div(ns.into()).unwrap_or(0);
    u64::try_from(rate).unwrap_or(u64::MAX)
}
