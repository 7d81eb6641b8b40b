//! Model of a guest's writes: how many different pages it writes in an interval, as a function of the interval.

use proto::limits::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// Number of different pages written in an interval, from tracking over one interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSetPoint {
    /// Length of the interval, in nanoseconds.
    pub interval_ns: u64,
    /// Bytes of whole pages that were written at least once.
    pub written_bytes: u64,
}

/// Working set curve: the pages that a guest writes in intervals of several lengths.
///
/// A guest writes some pages again and again, so the number of different pages grows more slowly than the interval.
/// The curve is concave: what was measured is replaced by the nearest concave curve above it. Behind the longest
/// interval it continues with its last slope, because nothing shows that the guest stops finding new pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<WorkingSetPoint>", into = "Vec<WorkingSetPoint>")]
pub struct WorkingSetCurve {
    points: Vec<WorkingSetPoint>,
}

/// Pages that are all written once in each period.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WriteClass {
    /// Number of pages.
    pub(super) pages: f64,
    /// Period, in nanoseconds; infinite for pages that are never written.
    pub(super) period_ns: f64,
}

impl From<Vec<WorkingSetPoint>> for WorkingSetCurve {
    fn from(points: Vec<WorkingSetPoint>) -> Self {
        Self::new(points)
    }
}

impl From<WorkingSetCurve> for Vec<WorkingSetPoint> {
    fn from(curve: WorkingSetCurve) -> Self {
        curve.points
    }
}

impl WorkingSetCurve {
    /// Creates a curve from measurements in any order; those without an interval are left out.
    pub fn new(points: impl IntoIterator<Item = WorkingSetPoint>) -> Self {
        let mut points: Vec<_> = points.into_iter().filter(|point| point.interval_ns > 0).collect();
        points.sort_unstable_by_key(|point| (point.interval_ns, point.written_bytes));
        Self { points }
    }

    /// Returns a curve of a guest that writes at a constant rate, and never the same page twice within `interval_ns`.
    pub fn steady(bytes_per_s: u64, interval_ns: u64) -> Self {
        let written = u128::from(bytes_per_s) * u128::from(interval_ns) / 1_000_000_000;
        let written_bytes = u64::try_from(written).unwrap_or(u64::MAX);
        Self::new([WorkingSetPoint { interval_ns, written_bytes }])
    }

    /// Returns a curve of a guest that writes `working_set_bytes` over and over at a constant rate.
    pub fn looping(bytes_per_s: u64, working_set_bytes: u64) -> Self {
        let period = u128::from(working_set_bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
        let period_ns = u64::try_from(period).unwrap_or(u64::MAX / 2).clamp(1, u64::MAX / 2);
        Self::new([
            WorkingSetPoint { interval_ns: period_ns, written_bytes: working_set_bytes },
            WorkingSetPoint { interval_ns: period_ns * 2, written_bytes: working_set_bytes },
        ])
    }

    /// Returns true if nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Returns the write rate over the shortest interval, in bytes of whole pages per second.
    pub fn bytes_per_s(&self) -> u64 {
        let rate = |point: &WorkingSetPoint| {
            u128::from(point.written_bytes) * 1_000_000_000 / u128::from(point.interval_ns)
        };
        self.points.first().map_or(0, |point| u64::try_from(rate(point)).unwrap_or(u64::MAX))
    }

    /// Returns the bytes of whole pages that are written in an interval; behind the longest one that was measured the
    /// curve continues with its last slope.
    pub fn bytes_within(&self, interval_ns: u64) -> f64 {
        let knots = self.concave(f64::INFINITY);
        let at = interval_ns as f64;
        let mut from = (0.0, 0.0);
        for (index, knot) in knots.iter().enumerate() {
            if at <= knot.0 || index + 1 == knots.len() {
                let pages = from.1 + (knot.1 - from.1) * (at - from.0) / (knot.0 - from.0);
                return pages * PAGE_BYTES as f64;
            }
            from = *knot;
        }
        0.0
    }

    /// Returns the curve of a guest that writes `percent` hundredths as fast.
    pub(super) fn scaled(&self, percent: u32) -> Self {
        let scale = |point: &WorkingSetPoint| WorkingSetPoint {
            interval_ns: u64::try_from(u128::from(point.interval_ns) * 100 / u128::from(percent.max(1)))
                .unwrap_or(u64::MAX)
                .max(1),
            ..*point
        };
        Self::new(self.points.iter().map(scale))
    }

    /// Returns classes of pages whose writes add up to the curve, together `pages` pages. The last class is the one
    /// with the longest period.
    ///
    /// Between two intervals the curve has a constant slope. A class of pages with the period `t` adds the same slope
    /// up to `t` and none behind it. So each bend of the curve is one class, of the size by which the slope becomes
    /// less there, and what remains behind the last bend is written with the last slope.
    pub(super) fn classes(&self, pages: f64) -> Vec<WriteClass> {
        let knots = self.concave(pages);
        let mut classes = Vec::new();
        let mut left = pages;
        let slope = |at: usize| {
            let (from_ns, from) = if at == 0 { (0.0, 0.0) } else { knots[at - 1] };
            let (to_ns, to) = knots[at];
            (to - from) / (to_ns - from_ns)
        };
        let tail = knots.len().checked_sub(1).map_or(0.0, slope);
        for (at, (knot_ns, _)) in knots.iter().enumerate() {
            // The last knot is a bend only if the curve is level behind it.
            let next = if at + 1 < knots.len() { slope(at + 1) } else { tail };
            let size = ((slope(at) - next) * knot_ns).clamp(0.0, left);
            if size > 0.0 {
                classes.push(WriteClass { pages: size, period_ns: *knot_ns });
                left -= size;
            }
        }
        if left > 0.0 {
            let period_ns = if tail > 0.0 { left / tail } else { f64::INFINITY };
            classes.push(WriteClass { pages: left, period_ns });
        }
        classes
    }

    /// Returns the upper concave hull of the points, as nanoseconds and pages, from the origin on; no more than `pages`
    /// pages.
    fn concave(&self, pages: f64) -> Vec<(f64, f64)> {
        let mut hull: Vec<(f64, f64)> = vec![(0.0, 0.0)];
        for point in &self.points {
            let ns = point.interval_ns as f64;
            let highest = hull.last().map_or(0.0, |(_, written)| *written);
            // A longer interval has at least the pages of a shorter one.
            let written = (point.written_bytes as f64 / PAGE_BYTES as f64).min(pages).max(highest);
            let is_above = |hull: &[(f64, f64)]| match hull {
                [.., one, other] => {
                    (other.1 - one.1) * (ns - other.0) <= (written - other.1) * (other.0 - one.0)
                }
                _ => false,
            };
            while is_above(&hull) {
                hull.pop();
            }
            hull.push((ns, written));
        }
        hull.remove(0);
        hull
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn point(interval_ns: u64, pages: u64) -> WorkingSetPoint {
        WorkingSetPoint { interval_ns, written_bytes: pages * PAGE_BYTES }
    }

    /// Returns the pages that the classes write in an interval.
    fn written(classes: &[WriteClass], ns: u64) -> f64 {
        classes.iter().map(|class| class.pages * (ns as f64 / class.period_ns).min(1.0)).sum()
    }

    #[test]
    fn classes_add_up_to_the_measured_curve() {
        let measured = [point(SECOND / 10, 100), point(SECOND, 600), point(4 * SECOND, 1200)];
        let classes = WorkingSetCurve::new(measured).classes(10_000.0);
        assert!((classes.iter().map(|class| class.pages).sum::<f64>() - 10_000.0).abs() < 1e-6);
        for point in measured {
            let pages = (point.written_bytes / PAGE_BYTES) as f64;
            assert!((written(&classes, point.interval_ns) - pages).abs() < 1e-6, "{classes:?}");
        }
        // Behind the last measurement new pages keep coming: 200 a second.
        assert!((written(&classes, 5 * SECOND) - 1400.0).abs() < 1e-6);
    }

    #[test]
    fn a_loop_over_a_working_set_writes_no_more_than_the_set() {
        let classes = WorkingSetCurve::looping(100 * PAGE_BYTES, 1000 * PAGE_BYTES).classes(5000.0);
        assert!((written(&classes, 5 * SECOND) - 500.0).abs() < 1e-6);
        for seconds in [10, 20, 1000] {
            assert!((written(&classes, seconds * SECOND) - 1000.0).abs() < 1e-6, "{seconds}: {classes:?}");
        }
    }

    #[test]
    fn points_that_are_not_concave_are_bridged_from_above() {
        let measured = [point(SECOND, 10), point(2 * SECOND, 200), point(3 * SECOND, 190)];
        let classes = WorkingSetCurve::new(measured).classes(1000.0);
        assert!((written(&classes, SECOND) - 100.0).abs() < 1e-6, "{classes:?}");
        assert!((written(&classes, 2 * SECOND) - 200.0).abs() < 1e-6);
        assert!((written(&classes, 3 * SECOND) - 200.0).abs() < 1e-6);
    }

    #[test]
    fn an_idle_guest_and_an_unknown_one_write_nothing() {
        for curve in [WorkingSetCurve::default(), WorkingSetCurve::new([point(SECOND, 0)])] {
            let classes = curve.classes(1000.0);
            assert_eq!(classes.len(), 1);
            assert!(classes[0].period_ns.is_infinite() && written(&classes, 1000 * SECOND) < 1e-9);
        }
        // More than there is counts as all.
        let classes = WorkingSetCurve::new([point(SECOND, 5000)]).classes(1000.0);
        assert!((written(&classes, SECOND) - 1000.0).abs() < 1e-6, "{classes:?}");
    }

    #[test]
    fn the_curve_is_read_between_and_behind_its_points() {
        let curve = WorkingSetCurve::new([point(SECOND, 100), point(3 * SECOND, 200)]);
        let pages = |ns: u64| curve.bytes_within(ns) / PAGE_BYTES as f64;
        for (ns, expected) in
            [(0, 0.0), (SECOND / 2, 50.0), (SECOND, 100.0), (2 * SECOND, 150.0), (5 * SECOND, 300.0)]
        {
            assert!((pages(ns) - expected).abs() < 1e-6, "{ns}: {}", pages(ns));
        }
        assert!(WorkingSetCurve::default().bytes_within(SECOND).abs() < 1e-6);
    }

    #[test]
    fn a_slower_guest_takes_longer_for_the_same_pages() {
        let curve = WorkingSetCurve::new([point(SECOND, 100)]);
        assert_eq!(curve.bytes_per_s(), 100 * PAGE_BYTES);
        assert_eq!(curve.scaled(50).bytes_per_s(), 50 * PAGE_BYTES);
        assert_eq!(curve.scaled(200).bytes_per_s(), 200 * PAGE_BYTES);
    }
}
