//! Rounds of a migration.

use std::collections::BTreeMap;

use engine::pre_copy::Pattern;
use serde::{Deserialize, Serialize};

/// Statistics of one round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Round {
    /// Number of the round, from 1 on.
    pub round: u32,
    /// The guest was stopped during it.
    pub stopped: bool,
    /// Number of the pass through memory that it belongs to, from 1 on; 0 for a round of disks alone, and for one with
    /// the guest stopped.
    #[serde(default)]
    pub pass: u32,
    /// Pages that it had to send; in a part of the first pass, the pages of that part. Disks count in pages, too.
    pub dirty_pages: u64,
    /// The part of `dirty_pages` that belongs to disks.
    pub disk_pages: u64,
    /// The parts of `dirty_pages`, by the name of the participant of the migration to which they belong, such as
    /// `memory`; none for a participant without dirty pages.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub participant_pages: BTreeMap<String, u64>,
    /// Pages sent with their bytes.
    pub data_pages: u64,
    /// Zero pages that occupy memory.
    pub zero_pages: u64,
    /// Pages that are holes.
    pub hole_pages: u64,
    /// Pages that consist of the same eight bytes, other than zeros.
    #[serde(default)]
    pub filled_pages: u64,
    /// Pages that were sent as holes, whatever their content, because the guest does not use them.
    #[serde(default)]
    pub hinted_pages: u64,
    /// Page references: pages whose content the destination had already on a disk or in a template.
    pub reference_pages: u64,
    /// Deltas: pages sent before, of which only the changes were sent.
    pub delta_pages: u64,
    /// Page references and deltas that the destination could not apply: their pages were sent in the next round.
    pub refused_pages: u64,
    /// Bytes sent on the data streams, on the wire.
    pub sent_bytes: u64,
    /// Time from its dirty scan to the last acknowledgement that it waited for, in microseconds.
    pub duration_us: u64,
    /// Time for finding dirty pages and protecting them again, in microseconds.
    pub scan_us: u64,
    /// Time for the guest's block I/O in flight to finish, in microseconds.
    pub drain_us: u64,
    /// Sending rate, in bytes per second.
    pub rate_bytes_per_s: u64,
    /// The guest's dirty rate in the previous round, in bytes per second.
    pub dirty_rate_bytes_per_s: u64,
    /// Expected downtime if the guest had been stopped after this round, in microseconds.
    pub expected_downtime_us: Option<u64>,
    /// Dirty pages that it left to the next round, to keep this one short.
    #[serde(default)]
    pub remaining_pages: u64,
    /// Pages that had also been sent shortly before, after the first pass.
    #[serde(default)]
    pub resent_pages: u64,
    /// The policy's decision after the round: `another-round`, `stop`, `post-copy` or `abort`; empty before it.
    pub decision: String,
    /// The guest's write pattern, if it showed that further rounds would not help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<Pattern>,
}

impl Round {
    /// Records to which participants the pages belong that the round had to send.
    pub fn set_participant_pages(&mut self, pages: BTreeMap<String, u64>) {
        self.disk_pages = pages.get("disks").copied().unwrap_or_default();
        self.participant_pages = pages;
    }
}
