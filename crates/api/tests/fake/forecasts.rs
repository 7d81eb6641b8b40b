//! Forecasts of the fake control.

use engine::forecast::calibration::{Accuracy, CalibrationClass, CalibrationRecord, MigrationOutcome};
use engine::forecast::facts::{GuestFacts, LinkFacts, MigrationFacts};
use engine::forecast::history::{LinkOrigin, LinkRate};
use engine::forecast::writes::WorkingSetCurve;
use engine::forecast::{Calibration, compare};
use engine::pre_copy::{AnyPolicy, AvailableStrategies, OnLimit, PatternPolicy, PreCopyGoals};

use super::{host, vm};
use crate::api::{
    CalibrationReport, Epoch, Forecast, ForecastOutcome, MigrateRequest, MigrationId, VmMeasurement,
};

/// Returns the forecast of a migration: one to `beta` converges, one to `far` does not.
pub(crate) fn forecast(request: &MigrateRequest) -> Forecast {
    let converges = request.to.as_str() != "far";
    let writes = if converges { 12 << 20 } else { 310_000_000 };
    let facts = MigrationFacts {
        guest: GuestFacts {
            memory_bytes: 512 << 20,
            used_bytes: 300 << 20,
            writes: WorkingSetCurve::looping(writes, 400 << 20),
            ..GuestFacts::default()
        },
        path: LinkFacts { link_bytes_per_s: 110_000_000, ..LinkFacts::default() },
        ..MigrationFacts::default()
    };
    let goals = PreCopyGoals::default();
    let policy = AnyPolicy::from(PatternPolicy::new(goals, OnLimit::Abort, facts.fixed));
    let ways = AvailableStrategies { slow_down: false, post_copy: true };
    let found = compare(&facts, &policy, goals, ways);
    Forecast {
        vm: request.vm.clone(),
        from: host("alpha"),
        to: request.to.clone(),
        made: "2026-01-01T00:00:00.000Z".into(),
        simulated: found.forecast,
        kind: CalibrationClass::of("pattern", &facts),
        measurement: VmMeasurement {
            unix_ms: 1_767_225_600_000,
            pid: 4711,
            start_time_ticks: 9,
            memory_bytes: facts.guest.memory_bytes,
            used_bytes: facts.guest.used_bytes,
            compressed_permille: 400,
            writes: facts.guest.writes.clone(),
            tracked_us: 3_200_000,
            faults: 9830,
            fault_ns: 500,
            vcpu_use_us_per_s: vec![500_000],
            disk_bytes_per_s: Some(0),
        },
        link: LinkRate { bytes_per_s: 110_000_000, origin: LinkOrigin::Assumed, unix_ms: 0 },
        link_problem: Some("beta does not answer".into()),
        found,
        facts,
        accuracy: Accuracy::default(),
    }
}

/// Returns a record of one forecast.
pub(crate) fn calibration() -> CalibrationReport {
    let Forecast { kind, simulated, found, .. } = forecast(&MigrateRequest::new(vm("web"), host("beta")));
    let outcome = MigrationOutcome {
        total_ns: 15_000_000_000,
        downtime_ns: 31_000_000,
        bytes: 600 << 20,
        converged: true,
    };
    let record = CalibrationRecord { kind, simulated, shown: found.forecast, outcome };
    let mut calibration = Calibration::default();
    calibration.learn(record.clone());
    let migration = MigrationId { vm: vm("web"), epoch: Epoch(6) };
    let forecasts = vec![ForecastOutcome { migration, record }];
    CalibrationReport { accuracy: calibration.accuracy(), forecasts }
}
