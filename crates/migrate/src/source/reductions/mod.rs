//! Reductions of the data that is sent, one module each: as requested, or as policies choose them while pages are sent.

mod compression;
mod deltas;
pub(super) mod hints;
mod link_sampler;
pub(super) mod references;

use std::any::Any;
use std::fmt;
use std::iter::Sum;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use ::memory::{ContentIndex, LinkCounters, LinkMeter, Reduction};
use proto::message::Acceptance;
use proto::packed::{Codec, CompressionTrial};

use super::payload::Payload;
use super::{MigrationControls, SourceDriver};
use api::report::Report;
use compression::ActiveCompression;
use deltas::ActiveDeltas;
use link_sampler::Interval;
use references::{ActiveReferences, SharedImages};

/// A reduction of one migration, as driver and policies control it.
pub(crate) trait ActiveReduction: Any + fmt::Debug + Send + Sync {
    /// Returns the part that the streams use.
    fn of_streams(&self) -> Arc<dyn Reduction>;

    /// Returns its progress until now, by which the link is judged.
    fn progress(&self) -> ReductionProgress;

    /// Returns the results of trials since the last call.
    fn take_trials(&self) -> Vec<CompressionTrial>;

    /// Returns true if it needs samples of a link that is slow, or not yet found to be.
    fn needs_samples(&self, is_slow: bool) -> bool;

    /// Learns that a connection was lost.
    fn interrupted(&self, is_slow: bool);

    /// Learns of an interval.
    fn sampled(&self, interval: &Interval<'_>, controls: &MigrationControls);

    /// Starts what needs time for each page: the senders wait for the link, so that it is worthwhile from here on.
    fn link_is_slow(&self, controls: &Arc<MigrationControls>);

    /// Completes its section of the report.
    fn report(&self, link: &LinkCounters, report: &mut Report);
}

/// Progress of reductions since the migration began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReductionProgress {
    /// Pages that the destination had, in bytes.
    pub(super) taken_bytes: u64,
    /// Pages that the destination was wrongly presumed to have, in bytes.
    pub(super) refused_bytes: u64,
    /// Pages that the destination has not answered for yet, in bytes.
    pub(super) awaited_bytes: u64,
    /// Number of lost connections, each with its unanswered pages.
    pub(super) interruptions: u64,
    /// Processor time of encoding data that was sent, in nanoseconds.
    pub(super) pack_ns: u64,
    /// Processor time of trials, in nanoseconds.
    pub(super) trial_ns: u64,
}

impl ReductionProgress {
    /// Returns the progress since an earlier moment; what is awaited is that of now.
    fn since(&self, before: &Self) -> Self {
        Self {
            taken_bytes: self.taken_bytes - before.taken_bytes,
            refused_bytes: self.refused_bytes - before.refused_bytes,
            awaited_bytes: self.awaited_bytes,
            interruptions: self.interruptions - before.interruptions,
            pack_ns: self.pack_ns - before.pack_ns,
            trial_ns: self.trial_ns - before.trial_ns,
        }
    }
}

impl Sum for ReductionProgress {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            taken_bytes: sum.taken_bytes + one.taken_bytes,
            refused_bytes: sum.refused_bytes + one.refused_bytes,
            awaited_bytes: sum.awaited_bytes + one.awaited_bytes,
            interruptions: sum.interruptions + one.interruptions,
            pack_ns: sum.pack_ns + one.pack_ns,
            trial_ns: sum.trial_ns + one.trial_ns,
        })
    }
}

/// The reductions of a migration. Those that can reduce the same page do so in the order of the list.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActiveReductions {
    list: Vec<Arc<dyn ActiveReduction>>,
    /// Meter of the link, if a policy or the report needs it.
    meter: Option<Arc<LinkMeter>>,
}

impl ActiveReductions {
    fn new(list: Vec<Arc<dyn ActiveReduction>>, is_metered: bool) -> Self {
        Self { list, meter: is_metered.then(Arc::default) }
    }

    /// Returns the parts that the streams use.
    pub(super) fn of_streams(&self) -> ::memory::Reductions {
        let list = self.list.iter().map(|reduction| reduction.of_streams()).collect();
        ::memory::Reductions::new(list, self.meter.clone())
    }

    /// Returns the reduction of a type, if it is in use.
    pub(super) fn find<T: ActiveReduction>(&self) -> Option<Arc<T>> {
        let found =
            |one: &Arc<dyn ActiveReduction>| (Arc::clone(one) as Arc<dyn Any + Send + Sync>).downcast();
        self.list.iter().find_map(|one| found(one).ok())
    }
}

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
