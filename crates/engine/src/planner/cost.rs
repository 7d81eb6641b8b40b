//! Cost of a move: its time, downtime and bytes on a link of a rate.

use super::inventory::{ForecastAtRate, VmSpec};
use crate::forecast::Estimate;

/// Forecast of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MoveCost {
    pub(super) total_ns: Estimate,
    pub(super) downtime_ns: u64,
    pub(super) bytes: u64,
}

/// Time of a move beside sending, where there is no forecast, in nanoseconds.
const SETUP_NS: u64 = 500_000_000;
/// Downtime where there is no forecast, in nanoseconds.
const DOWNTIME_NS: u64 = 20_000_000;

fn times(value: u64, by: u64, of: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(by) / u128::from(of.max(1))).unwrap_or(u64::MAX)
}

/// Returns the cost of moving a VM at a rate.
///
/// Of the forecasts that of the next lower rate is used, and its time becomes shorter in proportion: a faster link can
/// only spare more, because the guest writes less in the meantime. Below all forecasts the lowest is made longer, which
/// hides that rounds may not converge there.
pub(super) fn cost(vm: &VmSpec, bytes_per_s: u64) -> MoveCost {
    let bytes_per_s = bytes_per_s.max(1);
    let below = |point: &&ForecastAtRate| point.bytes_per_s <= bytes_per_s;
    let next = vm.forecasts.iter().filter(below).max_by_key(|point| point.bytes_per_s);
    let lowest = || vm.forecasts.iter().min_by_key(|point| point.bytes_per_s);
    let Some(point) = next.or_else(lowest) else { return unmeasured(vm, bytes_per_s) };
    let scale = |ns: u64| {
        let sending_ns = ns.saturating_sub(point.downtime_ns);
        times(sending_ns, point.bytes_per_s, bytes_per_s).saturating_add(ns.min(point.downtime_ns))
    };
    let Estimate { expected, low, high } = point.total_ns;
    MoveCost {
        total_ns: Estimate { expected: scale(expected), low: scale(low), high: scale(high) },
        downtime_ns: point.downtime_ns,
        bytes: point.bytes,
    }
}

/// Returns the cost of moving a VM without forecasts: its memory and its disks are sent once.
fn unmeasured(vm: &VmSpec, bytes_per_s: u64) -> MoveCost {
    let bytes = (vm.memory_mib.saturating_add(vm.disk_mib)).saturating_mul(1 << 20);
    let sending_ns = times(bytes, 1_000_000_000, bytes_per_s);
    let expected = sending_ns.saturating_add(SETUP_NS);
    // A guest that has free memory is faster, one that writes is slower.
    let total_ns = Estimate {
        expected,
        low: (sending_ns / 2).saturating_add(SETUP_NS / 2),
        high: (sending_ns / 2).saturating_mul(3).saturating_add(2 * SETUP_NS),
    };
    MoveCost { total_ns, downtime_ns: DOWNTIME_NS, bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_vm_without_forecasts_is_sent_once() {
        let vm = VmSpec { memory_mib: 1000, disk_mib: 24, ..VmSpec::default() };
        let found = cost(&vm, 1 << 30);
        assert_eq!((found.bytes, found.total_ns.expected), (1 << 30, SECOND + SETUP_NS));
        assert!(found.total_ns.low < SECOND && found.total_ns.high > 2 * SECOND);
        assert!(cost(&vm, 0).total_ns.expected > 1000 * SECOND);
    }

    #[test]
    fn the_forecast_of_the_next_lower_rate_counts() {
        let point = |bytes_per_s, seconds: u64| ForecastAtRate {
            bytes_per_s,
            total_ns: Estimate::certain(seconds * SECOND),
            downtime_ns: SECOND,
            bytes: 7,
        };
        let vm = VmSpec { forecasts: vec![point(100, 101), point(1000, 6)], ..VmSpec::default() };
        let seconds = |rate| cost(&vm, rate).total_ns.expected / SECOND;
        assert_eq!([50, 100, 200, 999, 1000, 5000].map(seconds), [201, 101, 51, 11, 6, 2]);
        assert_eq!(cost(&vm, 200).bytes, 7);
    }
}
