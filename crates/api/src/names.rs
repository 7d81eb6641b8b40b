//! Names of VMs that move to another network, as users see them.

use std::fmt;

use proto::MigrationId;
use serde::{Deserialize, Serialize};

/// Changes of a VM's names in DNS, which one migration makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameChanges {
    /// State that is aimed at.
    pub goal: NamesGoal,
    /// True if it is reached at all servers, as was read back from them.
    pub reached: bool,
    /// Time until which resolvers may still give the VM's old records, in seconds since 1970; absent as long as the
    /// records are not all changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_until_unix_s: Option<u64>,
    /// The records, by name and type.
    pub records: Vec<NameRecord>,
}

/// State of a VM's names that is aimed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NamesGoal {
    /// The records of the source, with a low TTL: the VM is about to move.
    Lowered,
    /// The records of the destination, with a low TTL: the VM has moved.
    Switched,
    /// The records of the destination, with the TTL that was found.
    Restored,
    /// Records as they were found: the VM stays.
    Undone,
}

/// Records of one name and type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameRecord {
    /// The name.
    pub name: String,
    /// Type of the records.
    #[serde(rename = "type")]
    pub kind: String,
    /// The VM's records at the source.
    pub before: Vec<String>,
    /// The VM's records at the destination.
    pub after: Vec<String>,
    /// Standing.
    pub standing: NameStanding,
    /// TTL in seconds, as it was read back; absent if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_s: Option<u32>,
    /// Serial number of the zone then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<u32>,
    /// State in words, with the reason of a failure.
    pub detail: String,
}

/// Standing of the records of one name and type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NameStanding {
    /// Not tried yet for the present goal.
    Pending,
    /// There is nothing to change.
    NotNeeded,
    /// All servers have what is aimed at.
    Made,
    /// The server that accepts updates has it, others do not.
    Lagging,
    /// Another hand has changed the records: they are left alone.
    LeftAlone,
    /// The server could not be asked, or refuses: it is tried again.
    Failed,
}

/// Names of a VM that an agent still has to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenNames {
    /// The migration for which they change.
    pub migration: MigrationId,
    /// The changes.
    pub changes: NameChanges,
}

impl NameChanges {
    /// Returns the records that were tried, and are not what is aimed at where updates are accepted.
    pub fn failed(&self) -> impl Iterator<Item = &NameRecord> {
        let failed = [NameStanding::LeftAlone, NameStanding::Failed];
        self.records.iter().filter(move |record| failed.contains(&record.standing))
    }
}

impl fmt::Display for NameRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = |values: &[String]| match values {
            [] => "nothing".to_owned(),
            values => values.join(", "),
        };
        let Self { name, kind, before, after, .. } = self;
        write!(f, "{name} {kind} {} → {}", values(before), values(after))
    }
}
