//! Section of deltas.

use serde::{Deserialize, Serialize};

use crate::report::Report;
use crate::report::numbers::{bytes, seconds};

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

/// Returns the line of the report's text.
pub(super) fn summary(report: &Report) -> Option<String> {
    let Deltas { pages, page_bytes, delta_bytes, mark_cpu_us, .. } = report.deltas.as_ref()?;
    let (all, changed, cpu) = (bytes(*page_bytes), bytes(*delta_bytes), seconds(*mark_cpu_us));
    Some(format!("deltas      {changed} of {pages} pages ({all}), computed in {cpu} of CPU"))
}

/// Returns the line of the explanation.
pub(super) fn explanation(report: &Report) -> Option<String> {
    let deltas = report.deltas.as_ref()?;
    let spared = deltas.page_bytes.saturating_sub(deltas.delta_bytes);
    let cpu = seconds(deltas.mark_cpu_us);
    Some(format!("deltas saved {} in {cpu} of CPU", bytes(spared)))
}
