//! Journalled facts about pages that were still missing when the guest was continued, for an agent that takes over.

use std::path::PathBuf;

use ::memory::ram::RamRegion;
use proto::message::PageRequest;
use serde::{Deserialize, Serialize};
use tracee::Process;

use crate::ram::JournalledRegion;

/// Journalled facts about missing pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MissingPagesRecord {
    /// Number of the descriptor inside QEMU.
    pub descriptor: i32,
    /// The file that lists the missing pages.
    pub file: PathBuf,
    /// The guest's memory.
    pub regions: Vec<JournalledRegion>,
    /// A page that was present although it was still to arrive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unexpected_page: Option<UnexpectedPage>,
}

impl MissingPagesRecord {
    /// Returns the location of the guest's memory.
    pub fn regions(&self) -> Vec<RamRegion> {
        self.regions.iter().map(JournalledRegion::region).collect()
    }

    /// Returns true if the descriptor inside QEMU is still open.
    pub fn is_open(&self, process: &Process) -> bool {
        let descriptor = format!("/proc/{}/fd/{}", process.pid(), self.descriptor);
        std::fs::read_link(descriptor).is_ok_and(|target| target.to_string_lossy().contains("userfaultfd"))
    }

    /// Removes the file.
    pub(crate) fn remove(&self) {
        drop(std::fs::remove_file(&self.file));
    }
}

/// Journalled record of a page that was present although it was still to arrive.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct UnexpectedPage {
    /// The first page that was found, or one of those that arrived with it and lie behind it.
    pub page: PageRequest,
    /// True if the guest was stopped because of the page: it is not stopped again if a user lets it go on.
    pub is_stopped: bool,
}
