//! Change of the records of one name and type: what they are before a VM moves, what they are after it, and how far the
//! change is.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::Server;
use crate::failure::Failure;
use crate::name::Name;
use crate::rdata::{Rdata, RecordType};

/// State of all records that is aimed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// The records of the source, with a low TTL.
    Lowered,
    /// The records of the destination, with a low TTL.
    Switched,
    /// The records of the destination, with the TTL that was found.
    Restored,
    /// The records of the source, with the TTL that was found.
    Undone,
}

impl Goal {
    /// Returns true if the records of the destination are aimed at.
    pub(crate) fn is_destination(self) -> bool {
        matches!(self, Self::Switched | Self::Restored)
    }

    /// Returns true if the low TTL is aimed at.
    pub(crate) fn is_lowered(self) -> bool {
        matches!(self, Self::Lowered | Self::Switched)
    }
}

/// Record of the source, and the one in its place at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdataChange {
    /// Record at the source; none if it is new.
    pub before: Option<Rdata>,
    /// Record at the destination; none if it ends.
    pub after: Option<Rdata>,
}

/// Records that a server has for a name and a type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rrset {
    /// Their data; nothing if there are none.
    pub values: BTreeSet<Rdata>,
    /// Their TTL in seconds; 0 if there are none.
    pub ttl_s: u32,
    /// Name whose alias this name is, in place of records.
    pub alias: Option<Name>,
}

impl fmt::Display for Rrset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(alias) = &self.alias {
            return write!(f, "an alias of {alias}");
        }
        write_values(f, &self.values)
    }
}

/// Records as they were found before the first change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OriginalRrset {
    /// Records of the same name and type that are not the VM's. They stay.
    pub others: BTreeSet<Rdata>,
    /// TTL in seconds, of all.
    pub ttl_s: u32,
    /// Time at which the TTL was seen to be low, in seconds since 1970.
    pub lowered_at_s: Option<u64>,
    /// Time at which the records of the destination were seen, in seconds since 1970.
    pub switched_at_s: Option<u64>,
}

/// Change of the records of one name and type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RrsetChange {
    /// Zone of the name.
    pub zone: Name,
    /// The name.
    pub owner: Name,
    /// Type of the records.
    pub kind: RecordType,
    /// Records of the VM. Those that are not found at the source are removed from here when the originals are read.
    pub rdata_changes: Vec<RdataChange>,
    /// Low TTL, in seconds.
    pub lowered_ttl_s: u32,
    /// TTL of records that are new, in seconds.
    pub new_ttl_s: u32,
    /// True if the records may be missing at the source: then nothing is changed.
    pub is_optional: bool,
    /// TTL of the records in seconds before an earlier change, which has lowered it and was not finished; none if there was
    /// none.
    #[serde(default)]
    pub original_ttl_s: Option<u32>,
    /// The records before the first change; none as long as they could not be read.
    pub original: Option<OriginalRrset>,
    /// True if the answer to an update was lost: it may have an effect later.
    pub may_still_apply: bool,
    /// Progress.
    pub state: ChangeState,
}

/// Progress of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeState {
    /// Not tried.
    Pending,
    /// There is nothing to change.
    NotNeeded,
    /// The primary has what was aimed at.
    Made {
        /// Goal at that time.
        goal: Goal,
        /// TTL of the records in seconds, as it was read back.
        ttl_s: u32,
        /// Serial number of the zone then.
        serial: u32,
        /// Servers that do not have it yet.
        lags: Vec<Lag>,
    },
    /// The records are neither those of the source nor those of the destination. They are left alone.
    Conflict {
        /// The records.
        found: Rrset,
    },
    /// The servers could not be asked, or refuse.
    Failed {
        /// The reason.
        failure: Failure,
    },
}

/// Server that does not have a change yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lag {
    /// The server.
    pub server: Server,
    /// The reason.
    pub reason: LagReason,
}

/// Reason for which a server does not have a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LagReason {
    /// It has an older version of the zone.
    Behind {
        /// Serial number of that version.
        serial: u32,
    },
    /// It has this version of the zone or a later one, and other records.
    Different {
        /// The records.
        found: Rrset,
    },
    /// The primary did not increment the serial number: secondaries do not see that there is a change.
    SerialNotIncremented {
        /// The serial number.
        serial: u32,
    },
    /// It could not be asked.
    Failed {
        /// The reason.
        failure: Failure,
    },
}

impl RrsetChange {
    /// Returns the VM's records at the source.
    pub fn before(&self) -> BTreeSet<Rdata> {
        self.rdata_changes.iter().filter_map(|rdata_change| rdata_change.before.clone()).collect()
    }

    /// Returns the VM's records at the destination.
    pub fn after(&self) -> BTreeSet<Rdata> {
        self.rdata_changes.iter().filter_map(|rdata_change| rdata_change.after.clone()).collect()
    }

    /// Returns true if a goal is reached at all servers.
    pub fn is_complete(&self, aim: Goal) -> bool {
        match &self.state {
            ChangeState::NotNeeded => true,
            ChangeState::Made { goal, lags, .. } => *goal == aim && lags.is_empty(),
            _ => false,
        }
    }

    /// Returns true if a goal is reached at the primary.
    pub fn is_reached(&self, aim: Goal) -> bool {
        match &self.state {
            ChangeState::NotNeeded => true,
            ChangeState::Made { goal, .. } => *goal == aim,
            _ => false,
        }
    }

    /// Returns the last time at which a cache may still give the records of the source, in seconds since 1970; none if
    /// that is not known, or the records are not changed.
    pub fn stale_until_s(&self) -> Option<u64> {
        let original = self.original.as_ref()?;
        let switched_s = original.switched_at_s?;
        let low_ttl_s = u64::from(original.ttl_s.min(self.lowered_ttl_s));
        let original_ttl_s = u64::from(original.ttl_s);
        // Read with the TTL that was found, right before that was lowered.
        let read_before_s =
            original.lowered_at_s.map_or(switched_s, |at_s| at_s.min(switched_s)) + original_ttl_s;
        let read_later_s = if original.lowered_at_s.is_some() { switched_s + low_ttl_s } else { 0 };
        Some(read_before_s.max(read_later_s))
    }
}

fn write_values(f: &mut fmt::Formatter<'_>, values: &BTreeSet<Rdata>) -> fmt::Result {
    if values.is_empty() {
        return f.write_str("nothing");
    }
    for (index, value) in values.iter().enumerate() {
        write!(f, "{}{value}", if index == 0 { "" } else { ", " })?;
    }
    Ok(())
}

impl fmt::Display for RrsetChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.owner, self.kind)?;
        write_values(f, &self.before())?;
        f.write_str(" → ")?;
        write_values(f, &self.after())
    }
}

impl fmt::Display for ChangeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending => f.write_str("not tried yet"),
            Self::NotNeeded => f.write_str("nothing to change"),
            Self::Made { goal, ttl_s, serial, lags } => {
                let done = match goal {
                    Goal::Lowered => "unchanged, with a low TTL",
                    Goal::Switched => "changed, with a low TTL",
                    Goal::Restored => "changed",
                    Goal::Undone => "unchanged",
                };
                write!(f, "{done} (TTL {ttl_s} s, serial {serial})")?;
                for Lag { server, reason } in lags {
                    write!(f, "; {server}: {reason}")?;
                }
                Ok(())
            }
            Self::Conflict { found } => write!(f, "left alone: another client has changed it to {found}"),
            Self::Failed { failure } => write!(f, "failed: {failure}"),
        }
    }
}

impl fmt::Display for LagReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Behind { serial } => write!(f, "has the older serial {serial}"),
            Self::Different { found } => write!(f, "has {found}"),
            Self::SerialNotIncremented { serial } => {
                write!(
                    f,
                    "has changed the zone and kept the serial {serial}, so that secondaries do not fetch it"
                )
            }
            Self::Failed { failure } => write!(f, "{failure}"),
        }
    }
}
