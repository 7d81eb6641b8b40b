//! How less was sent, in the report.

use serde::{Deserialize, Serialize};

use crate::api::SoftPages;

/// What compression did. Data is what is left of pages when zeros, holes and references are taken away.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Compression {
    /// What was wanted (`auto`, `lz4`, `zstd:3`).
    pub wanted: String,
    /// All data, in bytes.
    pub data_bytes: u64,
    /// The part of it that was sent compressed, in bytes before that; the rest was not worth it.
    pub packed_bytes: u64,
    /// What was sent for all of it, in bytes.
    pub wire_bytes: u64,
    /// Processor time of compressing, and of trying ways out, in microseconds.
    pub pack_cpu_us: u64,
    /// Of the data, what went before `auto` could pick anything: compressed as the link took it, in bytes.
    pub opening_bytes: u64,
    /// What `auto` picked, and when: the first hundred times.
    pub ways: Vec<PickedWay>,
}

/// Pages of which only what changed was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Deltas {
    /// When pages began to be marked, since the migration was asked for, in microseconds.
    pub since_us: u64,
    /// How many pages, without those that the destination refused.
    pub pages: u64,
    /// How long they are, in bytes.
    pub page_bytes: u64,
    /// What was sent for all of them, before it was compressed, in bytes.
    pub changed_bytes: u64,
    /// Processor time of marking all pages and of comparing the marks, in microseconds.
    pub mark_cpu_us: u64,
}

/// What a guest said of its memory, and what became of that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Soft {
    /// What was not to be sent.
    pub wanted: SoftPages,
    /// How often it answered completely.
    pub answers: u64,
    /// The longest that an answer took, in microseconds.
    pub longest_answer_us: u64,
    /// Its kernel looks at what is in free pages: they were sent.
    pub poisoned: bool,
    /// Pages of the page cache that were put off.
    pub put_off_pages: u64,
    /// Those of them that were free before the stop; the others were sent.
    pub given_back_pages: u64,
    /// What did not work.
    pub notes: Vec<String>,
}

/// A way to compress that was picked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PickedWay {
    /// Since the migration was asked for, in microseconds.
    pub at_us: u64,
    /// Which way (`none`, `lz4`, `zstd:3`).
    pub way: String,
    /// What the link seemed to carry, in bytes per second.
    pub link_bytes_per_s: u64,
}
