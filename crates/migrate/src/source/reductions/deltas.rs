//! Deltas: as requested, or from the time on at which the link is found to be slow.

use std::sync::Arc;

use ::memory::{DeltaCounters, Deltas, LinkCounters, Reduction};
use proto::limits::PAGE_BYTES;
use proto::packed::CompressionTrial;

use super::active::{ActiveReduction, Interval, ReductionProgress};
use crate::source::{Goals, MigrationControls, Telemetry};
use api::DeltaUse;
use api::report::{self, Report};

/// Deltas of a migration.
#[derive(Debug)]
pub(super) struct ActiveDeltas {
    wanted: DeltaUse,
    state: Arc<Deltas>,
}

impl ActiveDeltas {
    /// Prepares deltas of the first `ram_blocks` blocks, or starts them if they were requested; returns none if the
    /// destination does not accept them, which it does with a seed.
    pub(super) fn begin(
        seed: Option<u64>,
        ram_blocks: usize,
        controls: &MigrationControls,
        telemetry: &Telemetry,
    ) -> Option<Self> {
        let Goals { settings, deltas_bytes, .. } = controls.goals();
        let wanted = settings.deltas;
        let seed = seed.filter(|_| wanted != DeltaUse::Never && deltas_bytes > 0);
        if wanted == DeltaUse::Always && seed.is_none() {
            let detail = "pages are sent in full: the destination does not support deltas, or no memory is \
                          configured for them";
            let at_us = telemetry.elapsed_us();
            controls.report(|report| report.event(at_us, "deltas", detail));
        }
        let deltas = Self { wanted, state: Arc::new(Deltas::new(ram_blocks, deltas_bytes, seed?)) };
        if wanted == DeltaUse::Always {
            deltas.start(controls);
        }
        Some(deltas)
    }

    /// Turns deltas on: from here on the versions of sent pages are recorded, and deltas are sent.
    fn start(&self, controls: &MigrationControls) {
        self.state.set(true);
        let since_us = controls.requested.elapsed().as_micros() as u64;
        controls.report(|report| report.deltas.get_or_insert_default().since_us = since_us);
    }
}

impl ActiveReduction for ActiveDeltas {
    fn of_streams(&self) -> Arc<dyn Reduction> {
        Arc::clone(&self.state) as Arc<dyn Reduction>
    }

    fn progress(&self) -> ReductionProgress {
        ReductionProgress::default()
    }

    fn take_trials(&self) -> Vec<CompressionTrial> {
        Vec::new()
    }

    fn needs_samples(&self, is_slow: bool) -> bool {
        self.wanted == DeltaUse::Auto && !is_slow
    }

    fn interrupted(&self, _: bool) {}

    fn sampled(&self, _: &Interval<'_>, _: &MigrationControls) {}

    fn link_is_slow(&self, controls: &Arc<MigrationControls>) {
        if self.wanted == DeltaUse::Auto {
            self.start(controls);
        }
    }

    fn report(&self, _: &LinkCounters, report: &mut Report) {
        if let Some(reported) = report.deltas.as_mut() {
            let DeltaCounters { pages, bytes, mark_ns } = self.state.count();
            *reported = report::Deltas {
                since_us: reported.since_us,
                pages,
                page_bytes: pages * PAGE_BYTES,
                delta_bytes: bytes,
                mark_cpu_us: mark_ns / 1000,
            };
        }
    }
}
