//! Items of migrations in the kernel of a host.

use proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};

use crate::names::OpenNames;
use crate::new_address::NewAddress;

/// Items of migrations in the kernel of a host, beside the interfaces of the VMs, and names that its agent has to change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkState {
    /// Redirections of connections of VMs that have moved to another network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub redirections: Vec<StandingRedirection>,
    /// The items, by kind and name.
    pub items: Vec<NetworkItem>,
    /// Parts of the kernel that cannot be read, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<String>,
    /// Names in DNS that the agent still has to change, or to give their TTL back, by migration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<OpenNames>,
}

/// A redirection of which this host has a part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandingRedirection {
    /// The migration by which the VM has moved.
    pub migration: MigrationId,
    /// Host where the VM is.
    pub at: HostId,
    /// Hosts that it has left, and whose networks its old connections come from.
    pub left: Vec<HostId>,
    /// Kind of the tunnel; absent when old connections have ended, and only new addresses are still translated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<String>,
    /// Addresses of the VM: the one that it has configured, and the one by which it is reached where it is.
    pub addresses: Vec<NewAddress>,
    /// Stage.
    pub stage: RedirectionStage,
    /// Time since it is in this stage, in seconds.
    pub age_s: u64,
    /// Connections that use it; absent if they cannot be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<usize>,
}

/// Stage of a redirection at a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RedirectionStage {
    /// The VM is about to move.
    Prepared,
    /// It redirects connections.
    Active,
    /// It redirects connections, but for what could not be made: the agent tries again.
    Incomplete,
    /// It is being removed.
    Ending,
}

impl RedirectionStage {
    /// Returns the stage as text for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prepared => "prepared",
            Self::Active => "active",
            Self::Incomplete => "incomplete",
            Self::Ending => "ending",
        }
    }
}

/// Something of a migration in the kernel of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkItem {
    /// Kind.
    pub kind: NetworkItemKind,
    /// Name in the kernel; that of a table with its family.
    pub name: String,
    /// Interfaces of VMs to which the rules of a table apply.
    pub interfaces: Vec<String>,
    /// The migration whose name it bears; absent if it bears none.
    pub migration: Option<MigrationId>,
    /// Time at which that migration began (RFC 3339, UTC); absent if the journal does not have it.
    pub begun: Option<String>,
    /// Time since then, in seconds.
    pub age_s: Option<u64>,
    /// Standing.
    pub standing: NetworkItemStanding,
    /// Advice, if it should not be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// Kind of what a migration has in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkItemKind {
    /// A table of netfilter, with its rules.
    Table,
    /// A network device.
    Device,
    /// A route in a routing table of a redirection.
    Route,
    /// A policy rule, which chooses such a table.
    Rule,
}

impl NetworkItemKind {
    /// Returns the kind as text for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Table => "table",
            Self::Device => "device",
            Self::Route => "route",
            Self::Rule => "rule",
        }
    }
}

/// Standing of what a migration has in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkItemStanding {
    /// The migration is under way, or its redirection stands.
    InUse,
    /// The migration has ended a moment ago: late frames are still passed on.
    Ending,
    /// The migration has ended, and should have removed it.
    LeftOver,
    /// The journal of this host has no such migration.
    Unknown,
}

impl NetworkItemStanding {
    /// Returns the standing as text for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::InUse => "in use",
            Self::Ending => "ending",
            Self::LeftOver => "left over",
            Self::Unknown => "unknown",
        }
    }
}
