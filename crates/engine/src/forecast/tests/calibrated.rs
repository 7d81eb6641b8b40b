//! Calibration: what forecasts learn from outcomes.

use super::*;
use crate::forecast::calibration::{CalibrationClass, CalibrationRecord, MigrationOutcome, WriteHeat};

fn idle_forecast() -> MigrationForecast {
    forecast_pattern(&facts(WorkingSetCurve::default()), OnLimit::Abort)
}

fn kind(memory_octave: u32) -> CalibrationClass {
    CalibrationClass { policy: "pattern".to_owned(), memory_octave, heat: WriteHeat::Idle }
}

/// A record of a migration whose total time was `percent` hundredths of the forecast.
fn record(kind: CalibrationClass, percent: u64) -> CalibrationRecord {
    let simulated = idle_forecast();
    let outcome = MigrationOutcome {
        total_ns: simulated.total_ns.expected * percent / 100,
        downtime_ns: simulated.downtime_ns.expected,
        bytes: simulated.bytes.expected,
        converged: true,
    };
    CalibrationRecord { kind, simulated, shown: simulated, outcome }
}

#[test]
fn kinds_follow_policy_size_and_writes() {
    let writes = [0, 10 * MIB, 90 * MIB].map(|rate| WorkingSetCurve::steady(rate, SECOND));
    let kinds = writes.map(|writes| CalibrationClass::of("pattern", &facts(writes)));
    assert_eq!(kinds[0], kind(12));
    assert_eq!([kinds[1].heat, kinds[2].heat], [WriteHeat::Warm, WriteHeat::Hot]);
}

#[test]
fn a_few_outcomes_change_nothing() {
    let mut calibration = Calibration::default();
    for _ in 1..Calibration::MIN_RECORDS {
        calibration.learn(record(kind(12), 150));
    }
    assert_eq!(calibration.correct(&kind(12), &idle_forecast()), idle_forecast());
    calibration.learn(record(kind(12), 150));
    let corrected = calibration.correct(&kind(12), &idle_forecast());
    assert_near(corrected.total_ns.expected, idle_forecast().total_ns.expected * 3 / 2, 1);
    assert_eq!(corrected.downtime_ns.expected, idle_forecast().downtime_ns.expected);
}

/// Each tail of the interval has at most two of 19 outcomes.
#[test]
fn intervals_are_quantiles_of_the_record() {
    let mut calibration = Calibration::default();
    for percent in 91..110 {
        calibration.learn(record(kind(12), percent));
    }
    let total_ns = calibration.correct(&kind(12), &idle_forecast()).total_ns;
    let simulated = idle_forecast().total_ns.expected;
    assert_near(total_ns.expected, simulated, 1);
    assert_near(total_ns.low, simulated * 92 / 100, 1);
    assert_near(total_ns.high, simulated * 108 / 100, 1);
    let inside = (91..110).filter(|percent| total_ns.contains(simulated * percent / 100)).count();
    assert!((15..=17).contains(&inside), "{inside}");
}

#[test]
fn a_kind_without_a_record_uses_that_of_its_policy() {
    let mut calibration = Calibration::default();
    for _ in 0..20 {
        calibration.learn(record(kind(12), 200));
    }
    let simulated = idle_forecast();
    let total = |kind: &CalibrationClass| calibration.correct(kind, &simulated).total_ns.expected;
    assert_near(total(&kind(15)), simulated.total_ns.expected * 2, 1);
    let other = CalibrationClass { policy: "hybrid".to_owned(), ..kind(12) };
    assert_eq!(total(&other), simulated.total_ns.expected);
}

#[test]
fn outcomes_of_another_end_do_not_count() {
    let mut calibration = Calibration::default();
    let stuck = MigrationOutcome { converged: false, downtime_ns: 0, ..record(kind(12), 300).outcome };
    for _ in 0..20 {
        calibration.learn(CalibrationRecord { outcome: stuck, ..record(kind(12), 300) });
    }
    assert_eq!(calibration.correct(&kind(12), &idle_forecast()), idle_forecast());
}

#[test]
fn the_record_is_stated() {
    let mut calibration = Calibration::default();
    assert_eq!(calibration.accuracy().to_string(), "no forecast has an outcome yet");
    for _ in 0..27 {
        calibration.learn(record(kind(12), 101));
    }
    for _ in 0..4 {
        calibration.learn(record(kind(12), 300));
    }
    let text = calibration.accuracy().to_string();
    assert_eq!(
        text,
        "of 31 forecasts 27 within ±20% of the total time and 31 within ±50% of the downtime; 27 and 31 within their \
         80% intervals"
    );
    let stuck = MigrationOutcome { converged: false, ..record(kind(12), 100).outcome };
    calibration.learn(CalibrationRecord { outcome: stuck, ..record(kind(12), 100) });
    assert!(
        calibration
            .accuracy()
            .to_string()
            .ends_with("; 0 forecast not to converge, 1 did not, 0 of them as forecast")
    );
}

#[test]
fn old_records_are_dropped() {
    let mut calibration = Calibration::default();
    for _ in 0..Calibration::MOST_RECORDS + 3 {
        calibration.learn(record(kind(12), 100));
    }
    assert_eq!(calibration.records().len(), Calibration::MOST_RECORDS);
    let text = serde_json::to_string(&calibration).unwrap();
    assert_eq!(serde_json::from_str::<Calibration>(&text).unwrap(), calibration);
}
