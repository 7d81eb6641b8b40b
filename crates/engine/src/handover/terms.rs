//! Terms of a handover, and the state of its QEMU that an agent finds when it starts.

use std::fmt;

use proto::{Epoch, HostId, MigrationId};
use serde::{Deserialize, Serialize};

/// Data on which both hosts agreed when they prepared; journalled with PREPARED and the same throughout a migration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MigrationTerms {
    /// The VM and the epoch of this attempt.
    pub migration: MigrationId,
    /// The host at which the VM runs.
    pub source: HostId,
    /// The host at which the VM is to run.
    pub destination: HostId,
    /// With an ownership registry: the epoch in which the source owns the VM there, as pre-flight read it (it may have
    /// grown since, see [`registry`](super::registry)). Without one: none.
    pub registry: Option<Epoch>,
    /// The host that keeps that registry. Answers of no other host count. Absent in entries of older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness: Option<HostId>,
}

impl MigrationTerms {
    /// Returns the epoch of this attempt.
    pub fn epoch(&self) -> Epoch {
        self.migration.epoch
    }
}

/// Role of a host in a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The host at which the VM runs.
    Source,
    /// The host at which the VM is to run.
    Destination,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// State of its QEMU that an agent finds when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QemuAtStart {
    /// The process lives and its vCPUs run.
    Running,
    /// The process lives and its vCPUs do not run, or it is held by SIGSTOP and cannot be asked.
    Paused,
    /// The process is gone, on the same boot of the host. The journal is complete.
    Gone,
    /// The host has booted since PREPARED. The process is gone and entries that were not synced may be missing.
    Rebooted,
}
