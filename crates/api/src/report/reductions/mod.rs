//! Reductions of the sent data, in the report: a section each. References have none, because the rounds count them.

mod compression;
mod deltas;
mod hints;

use super::Report;

pub use compression::{Compression, LevelChoice};
pub use deltas::Deltas;
pub use hints::FreePageHintStats;

/// Returns what the report's text says about each reduction.
pub(super) fn summaries(report: &Report) -> impl Iterator<Item = String> {
    [compression::summary, deltas::summary, hints::summary].into_iter().filter_map(|summary| summary(report))
}

/// Returns what the explanation says about each reduction.
pub(super) fn explanations(report: &Report) -> impl Iterator<Item = String> {
    let all = [hints::explanation, compression::explanation, deltas::explanation];
    all.into_iter().filter_map(|explanation| explanation(report))
}
