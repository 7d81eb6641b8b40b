//! End of a redirection: the decision, and the count of connections that use it.

use std::fs;
use std::io;
use std::time::Duration;

use super::kernel_names::MARK_MASK;
use super::record::RedirectionRecord;
use crate::conntrack;
use crate::netlink::Socket;

/// Most entries that are looked at.
const MOST_ENTRIES: usize = 1 << 20;
/// Setting by which a host takes up connections of TCP in their middle.
const TAKES_UP: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_loose";

/// Times that a user has configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TeardownLimits {
    /// Least age: names are resolved to the old address for so long (the time to live in DNS).
    pub least: Duration,
    /// Time without any connection after which none is expected any more.
    pub quiet: Duration,
    /// Greatest age.
    pub longest: Duration,
}

impl Default for TeardownLimits {
    fn default() -> Self {
        Self {
            least: Duration::from_mins(5),
            quiet: Duration::from_mins(1),
            longest: Duration::from_hours(24),
        }
    }
}

/// Facts about a redirection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TeardownFacts {
    /// Time since it became active.
    pub age: Duration,
    /// Connections that use the old address; none if they cannot be counted.
    pub connections: Option<usize>,
    /// Time for which there has been none.
    pub quiet_for: Duration,
    /// True if the other host has ended its part.
    pub is_other_gone: bool,
    /// True if the guest was to be on this host, and is not any more.
    pub is_guest_gone: bool,
}

/// Reason for an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TeardownReason {
    /// The guest is not on this host any more.
    GuestGone,
    /// The other host serves no connection any more.
    OtherHostGone,
    /// No connection uses the old address.
    Unused,
    /// It is as old as it may become. Connections that still use it end.
    TooOld,
}

/// Decides whether a redirection ends; returns the reason.
pub fn decide(facts: TeardownFacts, limits: TeardownLimits) -> Option<TeardownReason> {
    let is_unused = facts.connections == Some(0) && facts.quiet_for >= limits.quiet;
    if facts.is_guest_gone {
        Some(TeardownReason::GuestGone)
    } else if facts.is_other_gone {
        Some(TeardownReason::OtherHostGone)
    } else if facts.age >= limits.longest {
        Some(TeardownReason::TooOld)
    } else if facts.age >= limits.least && is_unused {
        Some(TeardownReason::Unused)
    } else {
        None
    }
}

/// Counts the connections that use a redirection at this host, in the network namespace of this thread. None if the host
/// does not take up connections in their middle: those from before the move are not tracked then.
///
/// # Errors
/// If this process may not use connection tracking.
pub fn connections(record: &RedirectionRecord) -> io::Result<Option<usize>> {
    if fs::read_to_string(TAKES_UP)?.trim() == "0" {
        return Ok(None);
    }
    let redirection = &record.redirection;
    let own = redirection.legs.iter().find(|leg| leg.host == record.host);
    let legs = redirection.legs.iter().filter(|leg| own.is_none_or(|own| own == *leg));
    let pairs = legs.flat_map(|leg| &leg.attachment.pairs);
    let addresses = pairs.flat_map(|pair| [pair.guest, pair.public]).collect();
    // Where connections by the new address bear the same address after translation, the mark tells them apart.
    let needs_mark = own.is_none() && redirection.is_translated();
    let (entries, _) = conntrack::list(&Socket::netfilter()?, &addresses, MOST_ENTRIES)?;
    let uses = |entry: &&conntrack::ConntrackEntry| {
        !entry.is_over() && (!needs_mark || entry.mark() & MARK_MASK != 0)
    };
    Ok(Some(entries.iter().filter(uses).count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_mins(1);

    #[test]
    fn a_redirection_ends_when_nothing_uses_it() {
        let limits = TeardownLimits::default();
        let used = TeardownFacts {
            age: 10 * MINUTE,
            connections: Some(1),
            quiet_for: Duration::ZERO,
            is_other_gone: false,
            is_guest_gone: false,
        };
        let unused = TeardownFacts { connections: Some(0), quiet_for: MINUTE, ..used };
        let old = Duration::from_hours(24);
        for (facts, expected) in [
            (used, None),
            (unused, Some(TeardownReason::Unused)),
            (TeardownFacts { quiet_for: MINUTE / 2, ..unused }, None),
            (TeardownFacts { connections: None, ..unused }, None),
            (TeardownFacts { age: 4 * MINUTE, ..unused }, None),
            (TeardownFacts { age: old, ..used }, Some(TeardownReason::TooOld)),
            (TeardownFacts { age: old, connections: None, ..used }, Some(TeardownReason::TooOld)),
            (TeardownFacts { is_other_gone: true, ..used }, Some(TeardownReason::OtherHostGone)),
            (TeardownFacts { is_guest_gone: true, ..used }, Some(TeardownReason::GuestGone)),
        ] {
            assert_eq!(decide(facts, limits), expected, "{facts:?}");
        }
    }
}
