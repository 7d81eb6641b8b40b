//! Section of free page hints.

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

use crate::HintedMemory;
use crate::report::Report;
use crate::report::numbers::bytes;

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

/// Returns the lines of the report's text.
pub(super) fn summary(report: &Report) -> Option<String> {
    let hinted = report.free_page_hints.as_ref()?;
    let left_out: u64 = report.rounds.iter().map(|round| round.hinted_pages).sum();
    let cache = if hinted.deferred_pages > 0 { ", including page cache" } else { "" };
    let left_out = bytes(left_out.saturating_mul(PAGE_BYTES));
    let mut text = format!("left out    {left_out} that the VM does not use{cache}");
    for note in &hinted.notes {
        text.push_str("\n              ");
        text.push_str(note);
    }
    Some(text)
}

/// Returns the line of the explanation.
pub(super) fn explanation(report: &Report) -> Option<String> {
    let hinted = report.free_page_hints.as_ref().filter(|hinted| hinted.deferred_pages > 0)?;
    let (put_off, given_back) = (hinted.deferred_pages * PAGE_BYTES, hinted.freed_pages * PAGE_BYTES);
    let (put_off, given_back) = (bytes(put_off), bytes(given_back));
    Some(format!("{put_off} of page cache was deferred, of which the VM freed {given_back}"))
}
