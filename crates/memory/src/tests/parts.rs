//! The reductions of a test's migration, each of its own type.

use std::sync::Arc;

use crate::{
    CompressionState, ContentIndex, Deltas, HintedPages, LinkCounters, LinkMeter, Reduction, Reductions,
};

/// Reductions, each as far as it takes part.
#[derive(Clone, Default)]
pub(super) struct Parts {
    pub(super) known: Option<Arc<ContentIndex>>,
    pub(super) deltas: Option<Arc<Deltas>>,
    pub(super) packing: Option<Arc<CompressionState>>,
    pub(super) hinted: Option<Arc<HintedPages>>,
    pub(super) meter: Arc<LinkMeter>,
}

impl Parts {
    pub(super) fn reductions(&self) -> Reductions {
        let Self { known, deltas, packing, hinted, meter } = self.clone();
        let list = [
            hinted.map(|hinted| hinted as Arc<dyn Reduction>),
            known.map(|known| known as Arc<dyn Reduction>),
            deltas.map(|deltas| deltas as Arc<dyn Reduction>),
            packing.map(|packing| packing as Arc<dyn Reduction>),
        ];
        Reductions::new(list.into_iter().flatten().collect(), Some(meter))
    }

    /// Returns what was counted of the link.
    pub(super) fn counted(&self) -> LinkCounters {
        self.meter.count()
    }
}
