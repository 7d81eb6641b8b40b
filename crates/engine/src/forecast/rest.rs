//! Forecast of the rest of a migration, from facts that were known before and from what its rounds show.

use std::collections::VecDeque;

use proto::limits::PAGE_BYTES;

use super::facts::MigrationFacts;
use super::writes::{WorkingSetCurve, WorkingSetPoint};
use super::{MigrationForecast, forecast_rest};
use crate::pre_copy::{AnyPolicy, PreCopyGoals, RoundObservation};

/// Forecasts the rest of a migration after each round.
#[derive(Clone, Debug)]
pub struct RestForecaster {
    /// Facts that were known before.
    before: MigrationFacts,
    /// True if the guest's writes are among them.
    knows_writes: bool,
    /// The last rounds that show the rate of the link, the newest last.
    sent: VecDeque<SentContent>,
    /// Pages of the first pass, and those of them with content.
    first_pass: (u64, u64),
    /// Written pages in the intervals of the last rounds, the newest last.
    written: VecDeque<WorkingSetPoint>,
    scan_ns: u64,
}

/// Content that a round has sent.
#[derive(Clone, Copy, Debug, Default)]
struct SentContent {
    pages: u64,
    wire_bytes: u64,
    duration_ns: u64,
}

impl RestForecaster {
    /// Number of rounds that show the link: it may change.
    const RECENT_ROUNDS: usize = 4;
    /// Number of intervals of the guest's writes.
    const MOST_INTERVALS: usize = 16;
    /// Content of a round that shows the link, in pages.
    const LEAST_PAGES: u64 = 256;
    /// Divisor of memory: when this part of it was sent, the writes to it show how the guest writes.
    const SHOWN_DIVISOR: u64 = 4;
    /// Change of the guest's speed since it was measured, in hundredths, as far as it is believed.
    const SPEED_PERCENT: (u64, u64) = (25, 400);

    /// Begins with facts. Those about the guest's writes are used only if `knows_writes` is true.
    pub fn new(before: MigrationFacts, knows_writes: bool) -> Self {
        let scan_ns = before.path.scan_ns;
        Self {
            before,
            knows_writes,
            sent: VecDeque::new(),
            first_pass: (0, 0),
            written: VecDeque::new(),
            scan_ns,
        }
    }

    /// Learns from a round.
    pub fn observe(&mut self, observed: &RoundObservation) {
        self.scan_ns = observed.scan_ns;
        let content = observed.pages_sent.saturating_sub(observed.empty_pages);
        if content >= Self::LEAST_PAGES && observed.duration_ns > 0 {
            let sent = SentContent {
                pages: content,
                wire_bytes: observed.bytes_sent,
                duration_ns: observed.duration_ns,
            };
            push(&mut self.sent, sent, Self::RECENT_ROUNDS);
        }
        if observed.pass == 0 {
            self.first_pass.0 += observed.pages_sent;
            self.first_pass.1 += content;
        }
        let memory = observed.without_must_precopy();
        let mut pages = memory.dirty_pages.saturating_sub(memory.remaining_pages);
        if observed.pass == 0 {
            // Only writes to pages that were sent are seen.
            let (sent, all) = (self.first_pass.0, self.before.guest.memory_bytes / PAGE_BYTES);
            if sent < all / Self::SHOWN_DIVISOR || sent == 0 {
                return;
            }
            pages = u64::try_from(u128::from(pages) * u128::from(all.max(sent)) / u128::from(sent))
                .unwrap_or(u64::MAX);
        }
        let written_bytes = pages.saturating_mul(PAGE_BYTES);
        let point = WorkingSetPoint { interval_ns: observed.interval_ns, written_bytes };
        push(&mut self.written, point, Self::MOST_INTERVALS);
    }

    /// Forecasts the rest after the round that was observed last. `policy` is as it was before it decided. None if it is
    /// not known yet how the guest writes.
    pub fn forecast(
        &self,
        policy: &AnyPolicy,
        goals: PreCopyGoals,
        observed: &RoundObservation,
    ) -> Option<MigrationForecast> {
        let facts = self.facts()?;
        Some(forecast_rest(&facts, policy, goals, observed))
    }

    fn facts(&self) -> Option<MigrationFacts> {
        let mut facts = self.before.clone();
        facts.guest.writes = self.writes()?;
        facts.path.scan_ns = self.scan_ns;
        let sum = |of: fn(&SentContent) -> u64| self.sent.iter().map(of).fold(0, u64::saturating_add);
        let duration_ns = sum(|sent| sent.duration_ns);
        let content_bytes = u128::from(sum(|sent| sent.pages)) * u128::from(PAGE_BYTES);
        let wire_bytes = u128::from(sum(|sent| sent.wire_bytes));
        if duration_ns > 0 && content_bytes > 0 {
            let per_second = |bytes: u128| {
                u64::try_from(bytes * 1_000_000_000 / u128::from(duration_ns)).unwrap_or(u64::MAX).max(1)
            };
            facts.path.wire_permille =
                u32::try_from(wire_bytes * 1000 / content_bytes).unwrap_or(1000).clamp(1, 2000);
            facts.path.link_bytes_per_s = per_second(wire_bytes);
            facts.path.copy_bytes_per_s = facts.path.copy_bytes_per_s.max(per_second(content_bytes));
        }
        let (sent, content) = self.first_pass;
        let all = facts.guest.memory_bytes / PAGE_BYTES;
        if sent > 0 && all > 0 {
            // The rest is as it was known, or else as the pages that were sent.
            let rest = all.saturating_sub(sent);
            let rest_bytes = if self.knows_writes {
                u128::from(facts.guest.used_bytes) * u128::from(rest) / u128::from(all)
            } else {
                u128::from(content) * u128::from(PAGE_BYTES) * u128::from(rest) / u128::from(sent)
            };
            let used = u128::from(content) * u128::from(PAGE_BYTES) + rest_bytes;
            facts.guest.used_bytes = u64::try_from(used).unwrap_or(u64::MAX).min(facts.guest.memory_bytes);
        }
        Some(facts)
    }

    /// Returns the working set curve: the one that was known, at the speed that rounds show, or else what they show.
    fn writes(&self) -> Option<WorkingSetCurve> {
        if !self.knows_writes {
            return (!self.written.is_empty()).then(|| WorkingSetCurve::new(self.written.iter().copied()));
        }
        let known = &self.before.guest.writes;
        let seen = self.written.iter().fold(0_u64, |sum, point| sum.saturating_add(point.written_bytes));
        let expected: f64 = self.written.iter().map(|point| known.bytes_within(point.interval_ns)).sum();
        if expected < (Self::LEAST_PAGES * PAGE_BYTES) as f64 {
            // Where nothing was expected, what is seen is all that is known.
            let least = Self::LEAST_PAGES * PAGE_BYTES * self.written.len() as u64;
            return Some(if seen > least {
                WorkingSetCurve::new(self.written.iter().copied())
            } else {
                known.clone()
            });
        }
        let percent = (seen as f64 * 100.0 / expected) as u64;
        let (least, most) = Self::SPEED_PERCENT;
        Some(known.scaled(percent.clamp(least, most) as u32))
    }
}

fn push<T>(queue: &mut VecDeque<T>, item: T, most: usize) {
    if queue.len() >= most {
        queue.pop_front();
    }
    queue.push_back(item);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::facts::{GuestFacts, LinkFacts};
    use crate::pre_copy::{FixedCost, OnLimit, PatternPolicy};

    const SECOND: u64 = 1_000_000_000;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn facts(writes: WorkingSetCurve) -> MigrationFacts {
        MigrationFacts {
            guest: GuestFacts { memory_bytes: 4 * GIB, used_bytes: 4 * GIB, writes, ..GuestFacts::default() },
            path: LinkFacts { link_bytes_per_s: 1000 * MIB, ..LinkFacts::default() },
            ..MigrationFacts::default()
        }
    }

    fn policy() -> AnyPolicy {
        PatternPolicy::new(PreCopyGoals::default(), OnLimit::Abort, FixedCost::default()).into()
    }

    /// A second of the first pass on a link of 100 MiB/s; in each, `written` pages of those sent are written.
    fn part(number: u64, written: u64) -> RoundObservation {
        let sent = 100 * MIB / PAGE_BYTES;
        let left = 4 * GIB / PAGE_BYTES - number * sent;
        RoundObservation {
            pass: 0,
            dirty_pages: left + written,
            full_pages: left + written,
            pages_sent: sent,
            bytes_sent: 100 * MIB,
            remaining_pages: left,
            duration_ns: SECOND,
            interval_ns: SECOND,
            elapsed_ns: number * SECOND,
            ..RoundObservation::default()
        }
    }

    fn total_s(forecaster: &RestForecaster, observed: &RoundObservation) -> Option<u64> {
        let found = forecaster.forecast(&policy(), PreCopyGoals::default(), observed)?;
        Some(found.total_ns.expected / SECOND)
    }

    #[test]
    fn the_rate_of_the_link_is_that_of_the_rounds() {
        let idle = WorkingSetCurve::new([WorkingSetPoint { interval_ns: SECOND, written_bytes: 0 }]);
        let mut forecaster = RestForecaster::new(facts(idle), true);
        let observed = part(1, 0);
        assert!(total_s(&forecaster, &observed).unwrap() < 10, "as it was known before");
        forecaster.observe(&observed);
        let total = total_s(&forecaster, &observed).unwrap();
        assert!((40..44).contains(&total), "{total}");
    }

    #[test]
    fn without_facts_the_writes_show_after_a_while() {
        let mut forecaster = RestForecaster::new(facts(WorkingSetCurve::default()), false);
        for number in 1..=10 {
            forecaster.observe(&part(number, 0));
        }
        assert_eq!(total_s(&forecaster, &part(10, 0)), None);
        forecaster.observe(&part(11, 0));
        assert!(total_s(&forecaster, &part(11, 0)).is_some());
    }

    #[test]
    fn a_guest_that_is_faster_than_before_takes_longer() {
        let curve = WorkingSetCurve::steady(20 * MIB, SECOND);
        let mut as_before = RestForecaster::new(facts(curve), true);
        let mut faster = as_before.clone();
        for number in 1..=20 {
            let shown = |rate: u64| rate * MIB / PAGE_BYTES * number / 41;
            as_before.observe(&part(number, shown(20)));
            faster.observe(&part(number, shown(60)));
        }
        let observed = part(20, 0);
        let [before, after] = [&as_before, &faster].map(|it| total_s(it, &observed).unwrap());
        assert!(before < after, "{before} {after}");
    }

    #[test]
    fn content_of_the_first_pass_replaces_what_was_known() {
        let idle = WorkingSetCurve::new([WorkingSetPoint { interval_ns: SECOND, written_bytes: 0 }]);
        let mut forecaster = RestForecaster::new(facts(idle), false);
        for number in 1..=20 {
            let observed = part(number, 0);
            let empty_pages = observed.pages_sent / 2;
            forecaster.observe(&RoundObservation { empty_pages, bytes_sent: 50 * MIB, ..observed });
        }
        let used = forecaster.facts().unwrap().guest.used_bytes;
        assert!(used.abs_diff(2 * GIB) < 100 * MIB, "{used}");
    }
}
