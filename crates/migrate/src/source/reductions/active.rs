//! Reductions in use: the trait by which a driver controls them, and their progress.

use std::any::Any;
use std::fmt;
use std::iter::Sum;
use std::sync::Arc;

use ::memory::{LinkCounters, LinkMeter, Reduction};
use engine::compression::CompressionDecision;
use proto::packed::CompressionTrial;

use crate::source::MigrationControls;
use api::report::Report;

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

/// An interval, as reductions learn of it.
pub(crate) struct Interval<'a> {
    pub(super) length_ns: u64,
    /// Data of the pages that were sent, in bytes before compression.
    pub(super) data_bytes: u64,
    /// Progress of the reductions during it.
    pub(super) progress: ReductionProgress,
    /// True if the destination has yet to answer, and nothing else passes.
    pub(super) is_awaited: bool,
    /// True if the link was slow before it, too.
    pub(super) is_slow: bool,
    /// Judgement of link and processors.
    pub(super) decision: &'a CompressionDecision,
}

/// Progress of reductions since the migration began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReductionProgress {
    /// Pages that the destination had, in bytes.
    pub(in crate::source) taken_bytes: u64,
    /// Pages that the destination was wrongly presumed to have, in bytes.
    pub(in crate::source) refused_bytes: u64,
    /// Pages that the destination has not answered for yet, in bytes.
    pub(in crate::source) awaited_bytes: u64,
    /// Number of lost connections, each with its unanswered pages.
    pub(in crate::source) interruptions: u64,
    /// Processor time of encoding data that was sent, in nanoseconds.
    pub(in crate::source) pack_ns: u64,
    /// Processor time of trials, in nanoseconds.
    pub(in crate::source) trial_ns: u64,
}

impl ReductionProgress {
    /// Returns the progress since an earlier moment; what is awaited is that of now.
    pub(super) fn since(&self, before: &Self) -> Self {
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
    pub(super) list: Vec<Arc<dyn ActiveReduction>>,
    /// Meter of the link, if a policy or the report needs it.
    pub(super) meter: Option<Arc<LinkMeter>>,
}

impl ActiveReductions {
    pub(super) fn new(list: Vec<Arc<dyn ActiveReduction>>, is_metered: bool) -> Self {
        Self { list, meter: is_metered.then(Arc::default) }
    }

    /// Returns the parts that the streams use.
    pub(in crate::source) fn of_streams(&self) -> ::memory::Reductions {
        let list = self.list.iter().map(|reduction| reduction.of_streams()).collect();
        ::memory::Reductions::new(list, self.meter.clone())
    }

    /// Returns the reduction of a type, if it is in use.
    pub(in crate::source) fn find<T: ActiveReduction>(&self) -> Option<Arc<T>> {
        let found =
            |one: &Arc<dyn ActiveReduction>| (Arc::clone(one) as Arc<dyn Any + Send + Sync>).downcast();
        self.list.iter().find_map(|one| found(one).ok())
    }
}
