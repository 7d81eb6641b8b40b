//! Reductions of the sent data, in the report: a section each. References have none, because the rounds count them.

mod compression;
mod deltas;
mod hints;

use super::Report;

pub use compression::{Compression, LevelChoice};
pub use deltas::Deltas;
pub use hints::FreePageHintStats;

/// Returns the lines of the report's text about each reduction.
pub(super) fn summaries(report: &Report) -> impl Iterator<Item = String> {
    [compression::summary, deltas::summary, hints::summary].into_iter().filter_map(|summary| summary(report))
}

/// Returns the lines of the explanation about each reduction.
pub(super) fn explanations(report: &Report) -> impl Iterator<Item = String> {
    let all = [hints::explanation, compression::explanation, deltas::explanation];
    all.into_iter().filter_map(|explanation| explanation(report))
}
