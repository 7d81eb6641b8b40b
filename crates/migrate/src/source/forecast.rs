//! Forecasts of migrations from this host: the facts of the VM, of the path and of the hosts are put together, and the
//! migration is simulated with the policy that would decide.

use std::time::Duration;

use engine::forecast::calibration::CalibrationClass;
use engine::forecast::facts::{DiskFacts, GuestFacts, MigrationFacts};
use engine::forecast::history::{LinkOrigin, PathMemory};
use engine::forecast::writes::WorkingSetCurve;
use engine::forecast::{ForecastWithAlternatives, MigrationForecast, RestForecaster, compare};
use engine::pre_copy::AvailableStrategies;
use proto::HostId;
use proto::message::{Acceptance, ProposedDisk};
use proto::packed::Compression;
use tracing::warn;

use super::expected_end::EndForecaster;
use super::{Goals, SourceDriver, payload};
use api::progress::ExpectedEnd;
use api::report::{ReportedForecast, rfc3339, unix_ms_now};
use api::{Compress, ThrottleCpu, VmMeasurement};
use host::Context;
use store::journal::JournalError;

/// Longest age of a measurement by which a migration that begins is forecast, in milliseconds: a day.
const LONGEST_AGE_MS: u64 = 24 * 3600 * 1000;
/// Rate of a link above which pages are not compressed, in bytes per second: the processors would need longer.
const COMPRESSED_BELOW_BYTES_PER_S: u64 = 500_000_000;
/// Time from the destination's acceptance to the first page, if it is not known.
const STREAMS_SETUP: Duration = Duration::from_millis(100);
/// Interval of a rate that is known alone, in nanoseconds.
const SECOND_NS: u64 = 1_000_000_000;

/// Facts that are known before a migration.
#[derive(Clone, Copy, Debug)]
pub struct ForecastBasis<'a> {
    /// Measurement of the VM.
    pub measurement: &'a VmMeasurement,
    /// Record of the path to the destination.
    pub path: &'a PathMemory,
    /// Allocated data of the disks that are copied, in bytes; none if none is.
    pub copied_bytes: Option<u64>,
    /// Time until the destination has accepted.
    pub accept: Duration,
}

/// Forecast, with all that it follows from.
#[derive(Clone, Debug)]
pub struct SimulatedForecast {
    /// Facts.
    pub facts: MigrationFacts,
    /// Kind of the VM.
    pub kind: CalibrationClass,
    /// The forecast as it was simulated.
    pub simulated: MigrationForecast,
    /// The forecast as earlier outcomes correct it, and other ways.
    pub found: ForecastWithAlternatives,
}

/// Forecasts a migration with these goals.
pub fn forecast(
    context: &Context,
    to: &HostId,
    goals: &Goals,
    basis: &ForecastBasis<'_>,
) -> SimulatedForecast {
    let copies_disks = basis.copied_bytes.is_some();
    let mut goals = goals.clone();
    if !copies_disks {
        goals.disable_write_throttle();
    }
    let fixed = context.fixed_costs(to, copies_disks, |history| history.estimate());
    let facts = MigrationFacts {
        fixed,
        sampling: goals.sampling,
        throttle_requested: goals.settings.throttle_cpu != ThrottleCpu::Off,
        ..facts(&goals, basis)
    };
    // Whether QEMU and the kernel allow them is seen when they are used.
    let ways = AvailableStrategies { slow_down: true, post_copy: !goals.verify };
    let policy = payload::policy(&goals, ways, fixed).policy().clone();
    let kind = CalibrationClass::of(policy.name(), &facts);
    let mut found = compare(&facts, &policy, payload::pre_copy_goals(&goals), ways);
    let simulated = found.forecast;
    let calibration = remembered(context.journal.calibration(), "the record of forecasts");
    found.forecast = calibration.unwrap_or_default().correct(&kind, &simulated);
    SimulatedForecast { facts, kind, simulated, found }
}

/// Returns the allocated data of the disks that a destination would copy, in bytes; none if it copies none.
pub fn copied_bytes(proposed: &[ProposedDisk], acceptance: &Acceptance) -> Option<u64> {
    let is_copied = |disk: &&ProposedDisk| acceptance.copied.iter().any(|copied| copied.name == disk.name);
    let bytes: Vec<u64> = proposed.iter().filter(is_copied).map(|disk| disk.allocated_bytes).collect();
    (!bytes.is_empty()).then(|| bytes.into_iter().fold(0, u64::saturating_add))
}

/// Returns the facts of guest and path.
fn facts(goals: &Goals, basis: &ForecastBasis<'_>) -> MigrationFacts {
    let ForecastBasis { measurement, path, copied_bytes, accept } = *basis;
    let mut link = path.facts();
    if let Some(cap) = goals.bandwidth_bytes_per_s() {
        link.link_bytes_per_s = link.link_bytes_per_s.min(cap);
    }
    let is_compressed = match goals.settings.compression {
        Compress::Auto => link.link_bytes_per_s < COMPRESSED_BELOW_BYTES_PER_S,
        Compress::Fixed(compression) => compression != Compression::None,
    };
    if is_compressed {
        link.wire_permille = measurement.compressed_permille.clamp(1, 1000);
    }
    let disks = copied_bytes.map(|bytes| DiskFacts {
        bytes,
        writes: WorkingSetCurve::steady(measurement.disk_bytes_per_s.unwrap_or(0), SECOND_NS),
    });
    MigrationFacts {
        guest: GuestFacts {
            memory_bytes: measurement.memory_bytes,
            used_bytes: measurement.used_bytes,
            writes: measurement.writes.clone(),
            disks,
            vcpu_use_us_per_s: measurement.vcpu_use_us_per_s.clone(),
        },
        path: link,
        times: path.times((accept + STREAMS_SETUP).as_nanos() as u64),
        ..MigrationFacts::default()
    }
}

/// Returns what the journal remembers. Without it a migration goes on all the same.
fn remembered<T>(read: Result<T, JournalError>, what: &str) -> Option<T> {
    read.inspect_err(|error| warn!(error = crate::chain(error), what, "cannot read the journal")).ok()
}

impl SourceDriver {
    /// Forecasts a migration that the destination has accepted, from facts that are remembered; and begins to forecast
    /// its end, from its own rounds if nothing was known before.
    pub(super) fn forecast(&mut self, acceptance: &Acceptance) {
        let goals = self.controls.goals();
        let proposal = self.agreement.proposal.as_ref();
        let copied_bytes = proposal.and_then(|proposal| copied_bytes(&proposal.disks, acceptance));
        let to = &self.terms.destination;
        let path = remembered(self.context.journal.path_memory(to), "the path").unwrap_or_default();
        let accept = self.controls.requested.elapsed();
        let measurement = self.remembered_measurement();
        let is_known = measurement.is_some() && path.link().origin != LinkOrigin::Assumed;
        let memory_bytes: u64 =
            self.controls.report(|report| report.ram_blocks.iter().map(|block| block.bytes).sum());
        let measurement = measurement.unwrap_or_else(|| unmeasured(memory_bytes));
        let basis = ForecastBasis { measurement: &measurement, path: &path, copied_bytes, accept };
        let SimulatedForecast { facts, kind, simulated, found } = forecast(&self.context, to, &goals, &basis);
        if is_known {
            let shown = found.forecast;
            self.telemetry.update(|progress| progress.expected_end = Some(ExpectedEnd::of(&shown)));
            let measured = rfc3339(measurement.unix_ms);
            let forecast = ReportedForecast { measured, kind, simulated, shown, outcome: None };
            self.controls.report(|report| report.forecast = Some(forecast));
        }
        let rest = RestForecaster::new(facts, is_known);
        self.reporter.end_forecaster = EndForecaster::start(rest, self.telemetry.publisher());
    }

    /// Returns the last measurement of the VM, if it is not too old.
    fn remembered_measurement(&self) -> Option<VmMeasurement> {
        let vm = self.resources.vm.as_ref()?;
        let process = (vm.process.pid(), vm.process.start_time());
        let measured = self.context.journal.measurement(&self.terms.migration.vm);
        let measured = remembered(measured, "the measurement of the VM").flatten();
        measured.filter(|measured| measured.is_of(process, unix_ms_now(), LONGEST_AGE_MS))
    }

    /// Remembers what the migration has shown, for forecasts of later ones.
    pub(super) fn learn_for_forecasts(&self) {
        let (sample, record) =
            self.controls.report(|report| (report.path_sample(), report.calibration_record()));
        let journal = &self.context.journal;
        let path = sample.map_or(Ok(()), |sample| journal.learn_path(&self.terms.destination, sample));
        let outcome = record.map_or(Ok(()), |record| journal.learn_outcome(&self.terms.migration, &record));
        if let Err(error) = path.and(outcome) {
            warn!(error = crate::chain(&error), "cannot record for forecasts what the migration has shown");
        }
    }
}

/// Returns the measurement of a VM of which nothing is known but its size.
fn unmeasured(memory_bytes: u64) -> VmMeasurement {
    VmMeasurement {
        unix_ms: 0,
        pid: 0,
        start_time_ticks: 0,
        memory_bytes,
        used_bytes: memory_bytes,
        compressed_permille: 1000,
        writes: WorkingSetCurve::default(),
        tracked_us: 0,
        faults: 0,
        fault_ns: 0,
        vcpu_use_us_per_s: Vec::new(),
        disk_bytes_per_s: None,
    }
}

#[cfg(test)]
mod tests {
    use engine::forecast::MigrationEnd;
    use engine::forecast::history::MeasuredLink;
    use engine::pre_copy::MigrationStrategy;
    use host::testing::{self, World};
    use serde_json::json;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn goals(world: &World, options: &serde_json::Value) -> Goals {
        let request = json!({ "vm": "web", "to": "b", "options": options });
        Goals::new(&serde_json::from_value(request).unwrap(), &world.context.config)
    }

    /// A VM of 1 GiB that writes at this rate to new pages.
    fn measured(bytes_per_s: u64) -> VmMeasurement {
        VmMeasurement {
            compressed_permille: 400,
            writes: WorkingSetCurve::looping(bytes_per_s, 512 * MIB),
            ..unmeasured(1024 * MIB)
        }
    }

    fn path(bytes_per_s: u64) -> PathMemory {
        let measured = MeasuredLink { unix_ms: 1, bytes_per_s, rtt_ns: 1000, sent_bytes: 1 };
        PathMemory { measured: Some(measured), ..PathMemory::default() }
    }

    fn found(world: &World, options: &serde_json::Value, writes: u64, link: u64) -> SimulatedForecast {
        let (measurement, path) = (measured(writes), path(link));
        let accept = Duration::from_millis(300);
        let basis = ForecastBasis { measurement: &measurement, path: &path, copied_bytes: None, accept };
        forecast(&world.context, &testing::host("b"), &goals(world, options), &basis)
    }

    #[test]
    fn a_guest_that_is_faster_than_the_link_gets_other_ways() {
        let world = World::new();
        let none = json!({ "compression": "none" });
        let idle = found(&world, &none, 0, 100 * MIB);
        assert!(idle.found.forecast.converges && idle.found.alternatives.is_empty(), "{idle:?}");
        assert_eq!(idle.facts.times.setup_ns, 400_000_000);
        let hot = found(&world, &none, 300 * MIB, 100 * MIB);
        assert!(matches!(hot.found.forecast.end, MigrationEnd::GivesUp { .. }), "{hot:?}");
        let hybrid = hot.found.alternatives.iter().find(|other| other.way == MigrationStrategy::PostCopy);
        assert!(hybrid.is_some(), "{hot:?}");
    }

    #[test]
    fn facts_follow_the_options() {
        let world = World::new();
        let facts = |options: &serde_json::Value, link| found(&world, options, 0, link).facts;
        let slow = facts(&json!({}), 100 * MIB);
        assert_eq!((slow.path.wire_permille, slow.path.link_bytes_per_s), (400, 100 * MIB));
        assert_eq!(facts(&json!({ "compression": "none" }), 100 * MIB).path.wire_permille, 1000);
        assert_eq!(facts(&json!({}), 1000 * MIB).path.wire_permille, 1000, "the link is faster");
        let capped = facts(&json!({ "bandwidth_bytes_per_s": 5 * MIB }), 100 * MIB);
        assert_eq!(capped.path.link_bytes_per_s, 5 * MIB);
        assert!(facts(&json!({ "throttle_cpu": "drain" }), MIB).throttle_requested);
    }

    #[test]
    fn only_disks_that_are_copied_count() {
        let disk = |name: &str, bytes: u64| -> ProposedDisk {
            let disk = json!({ "name": name, "bytes": 1 << 30, "allocated_bytes": bytes, "wanted": "auto" });
            serde_json::from_value(disk).unwrap()
        };
        let proposed = [disk("a", 1), disk("b", 2), disk("c", 4)];
        let accepted = |copied: &[&str]| {
            let copied = copied.iter().map(|name| json!({ "name": name, "path": "/x", "format": "raw" }));
            let copied: Vec<_> = copied.collect();
            Acceptance { copied: serde_json::from_value(copied.into()).unwrap(), ..testing::acceptance() }
        };
        assert_eq!(copied_bytes(&proposed, &accepted(&[])), None);
        assert_eq!(copied_bytes(&proposed, &accepted(&["c", "a"])), Some(5));
    }
}
