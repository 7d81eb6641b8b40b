//! Forecast of a VM's demand: a smoothed level, a daily pattern, and the errors that the forecast had lately.

use super::model::Vm;
use super::settings::Settings;

/// Number of recent errors, of which headroom is a percentile.
pub const ERRORS: usize = 12;

/// Hours of the daily pattern.
const HOURS: usize = 24;
const HOUR_S: f64 = 3600.0;

/// Weight of a new day in the daily pattern.
const DAY_WEIGHT: f32 = 0.3;

/// Forecast of a VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// The newest sample.
    pub used: f32,
    /// Expected demand.
    pub level: f32,
    /// Headroom for what is not known yet.
    pub unknown: f32,
    /// The VM is known well enough, and rested long enough, to be moved for consolidation.
    pub may_move: bool,
    /// Errors of the last forecasts, by the number of the observation. Errors of several VMs are added element by
    /// element: VMs that rise together need more headroom than VMs that do not.
    pub errors: [f32; ERRORS],
}

/// Mean use in each hour of the day, over days.
#[derive(Clone, Debug, PartialEq)]
struct DailyPattern {
    means: [f32; HOURS],
    /// Sum and number of the samples of the hour under way.
    hour: usize,
    sum: f32,
    count: u32,
    /// Hours that were completed.
    completed: u32,
}

impl DailyPattern {
    fn new(hour: usize) -> Self {
        Self { means: [0.0; HOURS], hour, sum: 0.0, count: 0, completed: 0 }
    }

    fn observe(&mut self, now_s: f64, used: f32) {
        let hour = hour_of(now_s);
        if hour != self.hour && self.count > 0 {
            let mean = self.sum / self.count as f32;
            let old = self.means[self.hour];
            let weight = if self.completed < HOURS as u32 { 1.0 } else { DAY_WEIGHT };
            self.means[self.hour] = old + weight * (mean - old);
            self.completed += 1;
            (self.hour, self.sum, self.count) = (hour, 0.0, 0);
        }
        self.sum += used;
        self.count += 1;
    }

    /// Returns the change that the pattern expects within the next hour; 0 before a whole day is known.
    fn change(&self, now_s: f64) -> f32 {
        if self.completed < HOURS as u32 {
            return 0.0;
        }
        let hour = hour_of(now_s);
        self.means[(hour + 1) % HOURS] - self.means[hour]
    }
}

fn hour_of(now_s: f64) -> usize {
    (now_s / HOUR_S) as usize % HOURS
}

/// Record of a VM's use.
#[derive(Clone, Debug, Default)]
pub(super) struct Forecaster {
    samples: u32,
    used: f32,
    level: f32,
    errors: [f32; ERRORS],
    moved_at_s: Option<f64>,
    pattern: Option<Box<DailyPattern>>,
}

impl Forecaster {
    /// Learns a sample, which is the `number`th observation of the fleet.
    pub(super) fn observe(&mut self, settings: &Settings, now_s: f64, number: u64, used: f32) {
        let slot = (number % ERRORS as u64) as usize;
        let error = used - self.level;
        self.errors[slot] = if self.samples == 0 { 0.0 } else { error };
        // The first samples have equal weights.
        let weight = settings.smoothing.max(1.0 / (self.samples as f32 + 1.0));
        self.level += weight * error;
        self.used = used;
        self.samples = self.samples.saturating_add(1);
        let pattern = self.pattern.get_or_insert_with(|| Box::new(DailyPattern::new(hour_of(now_s))));
        pattern.observe(now_s, used);
    }

    /// Records that an observation is missing: the forecast stays, and has no error.
    pub(super) fn miss(&mut self, number: u64) {
        self.errors[(number % ERRORS as u64) as usize] = 0.0;
    }

    /// Records a move.
    pub(super) fn moved_at(&mut self, now_s: f64) {
        self.moved_at_s = Some(now_s);
    }

    /// Returns the forecast.
    pub(super) fn forecast(&self, settings: &Settings, now_s: f64, vm: &Vm) -> Forecast {
        let rising = self.pattern.as_ref().map_or(0.0, |pattern| pattern.change(now_s).max(0.0));
        // Nothing is known of a new VM: it may use all that it can.
        let level = if self.samples == 0 { vm.cpu as f32 } else { (self.level + rising).min(vm.cpu as f32) };
        let missing = 1.0 - (self.samples as f32 / ERRORS as f32).min(1.0);
        let is_rested = self.moved_at_s.is_none_or(|at_s| now_s - at_s >= settings.vm_rest_s);
        Forecast {
            used: self.used,
            level,
            unknown: settings.unknown_share * missing * vm.cpu as f32,
            may_move: is_rested && self.samples >= settings.min_samples && !vm.is_pinned && !vm.is_moving,
            errors: self.errors,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: Vm = Vm {
        id: 0,
        host: 0,
        cpu: 100.0,
        core: 100.0,
        memory_mb: 1.0,
        move_s: 1.0,
        apart: None,
        is_pinned: false,
        is_moving: false,
    };

    fn feed(samples: impl IntoIterator<Item = f32>) -> (Forecaster, f64) {
        let (mut forecaster, mut now_s) = (Forecaster::default(), 0.0);
        for (number, used) in samples.into_iter().enumerate() {
            forecaster.observe(&Settings::default(), now_s, number as u64 + 1, used);
            now_s += 300.0;
        }
        (forecaster, now_s - 300.0)
    }

    #[test]
    fn an_unknown_vm_may_use_all_it_can() {
        let forecast = Forecaster::default().forecast(&Settings::default(), 0.0, &VM);
        assert!((forecast.level - 100.0).abs() < 1e-6 && !forecast.may_move);
    }

    #[test]
    fn one_sample_lifts_the_level_only_partly() {
        let (forecaster, now_s) = feed([10.0; 20].into_iter().chain([90.0]));
        let forecast = forecaster.forecast(&Settings::default(), now_s, &VM);
        assert!((forecast.level - 50.0).abs() < 1e-3, "{}", forecast.level);
        let largest = forecast.errors.iter().copied().fold(0.0, f32::max);
        assert!((largest - 80.0).abs() < 1e-3);
    }

    /// A VM that is busy from 9:00 to 17:00 is forecast to rise at 8:00 of the second day, and not on the first.
    #[test]
    fn a_daily_pattern_is_learnt() {
        let used = |step: usize| if (9..17).contains(&(step / 12 % 24)) { 80.0 } else { 10.0 };
        let at = |steps: usize| {
            let (forecaster, now_s) = feed((0..steps).map(used));
            forecaster.forecast(&Settings::default(), now_s, &VM).level
        };
        assert!(at(12 * 8 + 6) < 15.0);
        assert!(at(12 * (24 + 8) + 6) > 70.0);
        assert!(at(12 * (24 + 20) + 6) < 15.0);
    }

    #[test]
    fn a_vm_rests_after_a_move() {
        let (mut forecaster, now_s) = feed([10.0; 20]);
        let settings = Settings::default();
        forecaster.moved_at(now_s);
        assert!(!forecaster.forecast(&settings, now_s + settings.vm_rest_s - 1.0, &VM).may_move);
        assert!(forecaster.forecast(&settings, now_s + settings.vm_rest_s, &VM).may_move);
    }
}
