//! Compression: as requested, or as the policy chooses it while pages are sent.

use std::sync::{Arc, Mutex, PoisonError};

use ::memory::{CompressionCounters, CompressionState, LinkCounters, Reduction};
use engine::compression::{CompressionDecision, WAYS};
use proto::packed::{Codec, Compression as Way, CompressionTrial};

use super::active::{ActiveReduction, Interval, ReductionProgress};
use crate::source::{Goals, MigrationControls, Telemetry};
use api::Compress;
use api::report::{Compression, LevelChoice, Report};

/// Maximum number of compression choices in the report.
const MAX_REPORTED: usize = 100;

/// Compression of a migration.
#[derive(Debug)]
pub(super) struct ActiveCompression {
    wanted: Compress,
    state: Arc<CompressionState>,
    /// The last choice.
    present: Mutex<Way>,
}

impl ActiveCompression {
    /// Starts the requested compression; returns none if there is none, or if the destination cannot decompress it.
    pub(super) fn begin(
        codecs: &[Codec],
        controls: &MigrationControls,
        telemetry: &Telemetry,
    ) -> Option<Self> {
        let Goals { settings, worth, .. } = controls.goals();
        let wanted = supported_compression(settings.compression, codecs, controls, telemetry);
        let state = match wanted {
            Compress::Auto => CompressionState::opening(worth),
            Compress::Fixed(Way::None) => return None,
            Compress::Fixed(way) => CompressionState::new(way, worth),
        };
        Some(Self { wanted, state: Arc::new(state), present: Mutex::new(Way::None) })
    }
}

impl ActiveReduction for ActiveCompression {
    fn of_streams(&self) -> Arc<dyn Reduction> {
        Arc::clone(&self.state) as Arc<dyn Reduction>
    }

    fn progress(&self) -> ReductionProgress {
        let CompressionCounters { pack_ns, trial_ns, .. } = self.state.count();
        ReductionProgress { pack_ns, trial_ns, ..ReductionProgress::default() }
    }

    fn take_trials(&self) -> Vec<CompressionTrial> {
        self.state.take_trials()
    }

    fn needs_samples(&self, _: bool) -> bool {
        self.wanted == Compress::Auto
    }

    fn interrupted(&self, _: bool) {}

    fn sampled(&self, interval: &Interval<'_>, controls: &MigrationControls) {
        let decision = interval.decision;
        if self.wanted != Compress::Auto {
            return;
        }
        if !decision.try_out.is_empty() {
            self.state.try_out(&decision.try_out);
        }
        // Before that the opening's choice is better, no matter how long the policy needs.
        if !decision.is_informed {
            return;
        }
        self.state.set_compression(decision.way, decision.standing_way);
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        if decision.way != *present {
            *present = decision.way;
            update_report(decision, controls);
        }
    }

    fn link_is_slow(&self, _: &Arc<MigrationControls>) {}

    fn report(&self, link: &LinkCounters, report: &mut Report) {
        let CompressionCounters { opening_bytes, compressed_bytes, pack_ns, trial_ns, .. } =
            self.state.count();
        let compression = report.compression.get_or_insert_default();
        let ways = std::mem::take(&mut compression.ways);
        let (wanted, compression_cpu_us) = (self.wanted.to_string(), (pack_ns + trial_ns) / 1000);
        let LinkCounters { data_bytes, wire_bytes, .. } = *link;
        *compression = Compression {
            wanted,
            data_bytes,
            compressed_bytes,
            wire_bytes,
            compression_cpu_us,
            opening_bytes,
            ways,
        };
    }
}

/// Returns the requested compression, or none if the destination cannot unpack it.
fn supported_compression(
    wanted: Compress,
    codecs: &[Codec],
    controls: &MigrationControls,
    telemetry: &Telemetry,
) -> Compress {
    let needed: Vec<_> = match wanted {
        Compress::Auto => WAYS.iter().filter_map(|way| way.codec()).collect(),
        Compress::Fixed(way) => way.codec().into_iter().collect(),
    };
    if needed.iter().all(|codec| codecs.contains(codec)) {
        return wanted;
    }
    let at_us = telemetry.elapsed_us();
    let detail = format!("nothing is compressed: the destination does not support {wanted}");
    controls.report(|report| report.event(at_us, "compression", detail));
    Compress::Fixed(Way::None)
}

/// Notes the picked compression in the report.
fn update_report(decision: &CompressionDecision, controls: &MigrationControls) {
    let picked = LevelChoice {
        at_us: controls.requested.elapsed().as_micros() as u64,
        way: decision.way.to_string(),
        link_bytes_per_s: decision.link_bytes_per_s.unwrap_or(0),
    };
    controls.report(|report| {
        let ways = &mut report.compression.get_or_insert_default().ways;
        if ways.len() < MAX_REPORTED {
            ways.push(picked);
        }
    });
}
