//! Images that VMs left behind.

use std::path::PathBuf;

use proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};

/// A leftover image of a VM: from when it moved away with its disks, or when it ended here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftoverImage {
    /// The migration in which it was left.
    #[serde(flatten)]
    pub migration: MigrationId,
    /// The destination of that migration; this host if the VM ended here.
    pub to: HostId,
    /// True if the VM ended here; its disk may be nowhere else.
    #[serde(default)]
    pub ended: bool,
    /// The disk, by its name in the description.
    pub disk: String,
    /// Path of the image's file.
    pub path: PathBuf,
    /// Space that it uses on this host, in bytes.
    pub used_bytes: u64,
    /// Reason for which it cannot be removed; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_by: Option<String>,
}
