//! Reductions: ways to send fewer bytes, one folder each.

pub(crate) mod compression;
pub(crate) mod deltas;
pub(crate) mod hints;
pub(crate) mod references;
