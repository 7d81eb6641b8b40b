//! Reductions of the sent data, in the report.

use serde::{Deserialize, Serialize};

use crate::HintedMemory;

/// Statistics of compression. Data is the content of pages without zero pages, holes and page references.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Compression {
    /// The requested compression (`auto`, `lz4`, `zstd:3`).
    pub wanted: String,
    /// All data, in bytes.
    pub data_bytes: u64,
    /// The part of the data that was sent compressed, in bytes before compression; compressing the rest was not
    /// worthwhile.
    pub compressed_bytes: u64,
    /// Bytes that were sent for all of the data.
    pub wire_bytes: u64,
    /// CPU time of compression, and of trying levels, in microseconds.
    pub compression_cpu_us: u64,
    /// The part of the data that was sent before `auto` could choose a level, in bytes; it was compressed as the link
    /// required.
    pub opening_bytes: u64,
    /// The first hundred choices of `auto`, with their times.
    pub ways: Vec<LevelChoice>,
}

/// Statistics of deltas: pages of which only the changes were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Deltas {
    /// Time at which pages began to be marked, since the request for the migration, in microseconds.
    pub since_us: u64,
    /// Number of pages, without those that the destination refused.
    pub pages: u64,
    /// Full size of these pages, in bytes.
    pub page_bytes: u64,
    /// Bytes sent for all of them, before compression.
    pub delta_bytes: u64,
    /// CPU time of marking all pages and of comparing the marks, in microseconds.
    pub mark_cpu_us: u64,
}

/// Statistics of free page hints from the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FreePageHintStats {
    /// The kinds of pages that were to be omitted.
    pub wanted: HintedMemory,
    /// Number of complete answers.
    pub answers: u64,
    /// Longest time for an answer, in microseconds.
    pub longest_answer_us: u64,
    /// True if the guest's kernel checks the content of free pages: they were sent.
    pub poisoned: bool,
    /// Pages of the page cache that were deferred.
    pub deferred_pages: u64,
    /// The part of these that was free before the stop; the others were sent.
    pub freed_pages: u64,
    /// Failures, as text.
    pub notes: Vec<String>,
}

/// A compression level that `auto` chose.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LevelChoice {
    /// Time since the request for the migration, in microseconds.
    pub at_us: u64,
    /// Name of the level (`none`, `lz4`, `zstd:3`).
    pub way: String,
    /// Estimated rate of the link, in bytes per second.
    pub link_bytes_per_s: u64,
}
