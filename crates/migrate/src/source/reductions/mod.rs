//! Reductions of the data that is sent, one module each: as requested, or as policies choose them while pages are sent.

mod active;
mod compression;
mod deltas;
pub(super) mod hints;
mod link_sampler;
pub(super) mod references;

use std::sync::Arc;
use std::sync::mpsc::Sender;

use ::memory::ContentIndex;
use proto::message::Acceptance;
use proto::packed::Codec;

use super::payload::Payload;
use super::{MigrationControls, SourceDriver};
use active::ActiveReduction;
pub(super) use active::ActiveReductions;
use compression::ActiveCompression;
use deltas::ActiveDeltas;
use references::{ActiveReferences, SharedImages};

/// Control of reductions by policies. Dropping it ends the samples, and then completes the report.
#[derive(Debug)]
pub(super) struct ReductionControl {
    reductions: ActiveReductions,
    controls: Arc<MigrationControls>,
    /// Ends the samples when it is dropped.
    sampling: Option<Sender<()>>,
}

impl ReductionControl {
    /// Returns the reductions.
    pub(super) fn reductions(&self) -> &ActiveReductions {
        &self.reductions
    }
}

impl Drop for ReductionControl {
    fn drop(&mut self) {
        self.sampling = None;
        let ActiveReductions { list, meter } = &self.reductions;
        let link = meter.as_ref().map(|meter| meter.count()).unwrap_or_default();
        self.controls.report(|report| list.iter().for_each(|reduction| reduction.report(&link, report)));
    }
}

impl SourceDriver {
    /// Starts the reductions that were requested and that the destination can undo; the report notes each request that
    /// is left out for that reason. Policies control them until the returned value is dropped.
    pub(super) fn start_reductions(
        &self,
        acceptance: &Acceptance,
        known: Option<(ContentIndex, Option<SharedImages>)>,
        payload: &mut Payload,
    ) -> ReductionControl {
        let (controls, telemetry) = (&self.controls, &self.telemetry);
        let references = known.map(|(known, shared)| ActiveReferences::new(known, shared));
        let codecs: Vec<_> = acceptance.codecs.iter().filter_map(|name| Codec::from_name(name)).collect();
        let compression = ActiveCompression::begin(&codecs, controls, telemetry);
        let delta_seed = self.agreement.proposal.as_ref().and_then(|proposal| proposal.delta_seed);
        let delta_seed = delta_seed.filter(|_| acceptance.deltas);
        let deltas = ActiveDeltas::begin(delta_seed, payload.ram_blocks(), controls, telemetry);
        let hints = self.free_page_hints(payload);
        let is_compressed = compression.is_some();
        let list: [Option<Arc<dyn ActiveReduction>>; 4] = [
            hints.map(|one| Arc::new(one) as Arc<_>),
            references.map(|one| Arc::new(one) as Arc<_>),
            deltas.map(|one| Arc::new(one) as Arc<_>),
            compression.map(|one| Arc::new(one) as Arc<_>),
        ];
        let list: Vec<_> = list.into_iter().flatten().collect();
        let is_watched = list.iter().any(|reduction| reduction.needs_samples(false));
        let reductions = ActiveReductions::new(list, is_watched || is_compressed);
        payload.set_reductions(reductions.of_streams());
        let workers = controls.goals().settings.streams;
        let meter = reductions.meter.clone().filter(|_| is_watched);
        let start =
            |meter| link_sampler::start(reductions.list.clone(), meter, workers, Arc::clone(controls));
        let sampling = meter.and_then(start);
        ReductionControl { reductions, controls: Arc::clone(controls), sampling }
    }
}
