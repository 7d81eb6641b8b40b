//! Post-copy: size and rate of the parts in which the remaining pages are pushed.
//!
//! A page request waits behind the pages that are already in transit. So pages are pushed no faster than the link
//! carries them: little is then in transit, and nothing queues. A part is no larger than what the link carries in some
//! milliseconds, because the next request may be for a page elsewhere.
//!
//! But each part has to be acknowledged before the next begins, so on a long link a part has to be larger, or the link
//! would be idle most of the time: the size doubles as long as this is noticeably faster.
//!
//! From there on every other part is half as large. The additional time of the larger parts is what the link, or the
//! pace, needs for the other half, and the rest is the round trip, however that changes. A pace beyond the rate of the
//! link is reduced to that rate; otherwise the next parts go faster, little by little. Parts are so long that the
//! round trips are a small share of the time.
//!
//! Zero pages need nothing on the wire, and the time to find them reveals nothing about the link. Parts grow by as
//! many pages as there were zero pages among the last ones, and nothing is learned from a part of little else.

use serde::{Deserialize, Serialize};

use crate::trace::{Decider, NoParameters};

/// Policy for the size of a part and its rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "NoParameters", into = "NoParameters")]
pub struct PushPolicy {
    /// Number of pages with data in a large part.
    data_pages: u64,
    /// Number of pages for each page with data.
    spread: u64,
    /// Last part from which something was learned, until parts are long enough.
    last: Option<PushedPart>,
    /// Parts since then, up to the next adjustment.
    timings: Vec<PartTiming>,
    /// True once parts are long enough.
    has_grown: bool,
    pace_bytes_per_s: Option<u64>,
    /// Consecutive adjustments that found no pace beyond the rate of the link.
    on_time: u32,
}

/// Measurements of a part that adjust size and pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartTiming {
    wire_bytes: u64,
    duration_ns: u64,
    is_small: bool,
}

/// Measurements of a part that was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushedPart {
    /// Number of pages sent.
    pub pages: u64,
    /// Those of them that needed bytes on the wire: the others are holes, or filled with the same few bytes, mostly
    /// zeros.
    pub data_pages: u64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Time until the last page was acknowledged, in nanoseconds.
    pub duration_ns: u64,
}

/// Size and rate of the next part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextPart {
    /// Most pages of the part.
    pub pages: u64,
    /// Rate limit, in bytes on the wire per second; none for no limit.
    pub pace_bytes_per_s: Option<u64>,
}

impl Decider for PushPolicy {
    type Observed = PushedPart;
    type Decision = NextPart;

    const MAX_ENTRIES: usize = 1000;

    fn decide(&mut self, part: &PushedPart) -> NextPart {
        self.learn(*part);
        NextPart { pages: self.pages(), pace_bytes_per_s: self.pace_bytes_per_s }
    }
}

impl PushPolicy {
    /// Shortest duration of a part, in nanoseconds.
    pub const SHORTEST_NS: u64 = 8_000_000;
    /// Shortest duration of a part with a rate limit, in nanoseconds: such a part makes no queue longer.
    pub const SHORTEST_PACED_NS: u64 = 16_000_000;
    /// Size of the first part, in pages.
    const FIRST_PAGES: u64 = 64;
    /// Size of the largest part, in pages: 1 GiB.
    const MAX_PAGES: u64 = 1 << 18;
    /// Highest number of pages for each page with data at which a part reveals the rate of the link: finding the other
    /// pages then takes a small share of the time.
    const MAX_INFORMATIVE_SPREAD: u64 = 4;
    /// Highest factor by which parts grow for pages without data: the next pages may all have data.
    const MAX_SPREAD: u64 = 16;
    /// Highest rate limit, in bytes per second. Faster links are not the bottleneck, and no clock is precise enough
    /// for their pace.
    const FASTEST: u64 = 500_000_000;
    /// Number of parts, at one pace, that are evaluated together: the quickest of either size counts, because any part
    /// may have been held up.
    const TIMED_PARTS: usize = 6;
    /// Duration of a part in round trips.
    const MIN_ROUND_TRIPS: u64 = 8;

    /// Returns the most pages of the next part.
    pub fn pages(&self) -> u64 {
        let data_pages = if self.is_small() { self.data_pages / 2 } else { self.data_pages };
        (data_pages * self.spread).min(Self::MAX_PAGES)
    }

    /// Returns true if the next part is one of half the size.
    fn is_small(&self) -> bool {
        self.has_grown && self.timings.len().is_multiple_of(2)
    }

    /// Learns from a part.
    fn learn(&mut self, part: PushedPart) {
        let part = PushedPart { duration_ns: part.duration_ns.max(1), ..part };
        // The last part of all is shorter.
        if part.pages < self.pages() {
            return;
        }
        let spread = (part.pages + part.data_pages / 2).checked_div(part.data_pages);
        self.spread = spread.map_or(Self::MAX_SPREAD, |spread| spread.clamp(1, Self::MAX_SPREAD));
        if self.spread > Self::MAX_INFORMATIVE_SPREAD {
            return;
        }
        if self.has_grown {
            self.adjust(part);
        } else if self.is_no_faster(part) {
            self.end_growth(part);
        } else {
            self.data_pages *= 2;
        }
        self.data_pages = self.data_pages.clamp(Self::FIRST_PAGES, Self::MAX_PAGES);
        self.last = Some(part);
    }

    /// Returns true if a part that took long enough was hardly faster than the smaller one before.
    fn is_no_faster(&self, part: PushedPart) -> bool {
        let Some(last) = self.last else { return false };
        let now = u128::from(part.data_pages) * u128::from(last.duration_ns);
        let before = u128::from(last.data_pages) * u128::from(part.duration_ns);
        part.duration_ns >= Self::SHORTEST_NS && now * 20 < before * 21
    }

    /// Ends the growth of parts: they are long enough, and the rate of the link is known.
    fn end_growth(&mut self, part: PushedPart) {
        self.has_grown = true;
        let rate = per_second(part.wire_bytes, part.duration_ns);
        let more = self.last.map_or(0, |last| {
            let (bytes, ns) = (
                part.wire_bytes.saturating_sub(last.wire_bytes),
                part.duration_ns.saturating_sub(last.duration_ns),
            );
            per_second(bytes, ns)
        });
        // Two moments of a busy host may differ by any amount.
        let carries = more.clamp(rate, rate.saturating_add(rate / 4));
        if (1..=Self::FASTEST).contains(&carries) {
            self.pace_bytes_per_s = Some(carries - carries / 32);
        }
    }

    /// Adjusts the pace to the link, and the size of parts to both.
    fn adjust(&mut self, part: PushedPart) {
        let PushedPart { wire_bytes, duration_ns, .. } = part;
        self.timings.push(PartTiming { wire_bytes, duration_ns, is_small: self.is_small() });
        if self.timings.len() < Self::TIMED_PARTS {
            return;
        }
        let (small, large) = (self.quickest(true), self.quickest(false));
        // The next parts have another pace.
        self.timings.clear();
        let (Some(small), Some(large)) = (small, large) else { return };
        // The sizes may just have changed.
        if large.wire_bytes <= small.wire_bytes.saturating_add(small.wire_bytes / 4) {
            return;
        }
        let (more_bytes, more_ns) =
            (large.wire_bytes - small.wire_bytes, large.duration_ns.saturating_sub(small.duration_ns));
        // The rate that both the link and the pace permit.
        let rate = if more_ns == 0 { u64::MAX } else { per_second(more_bytes, more_ns) };
        if let Some(pace) = self.pace_bytes_per_s {
            let is_below_reserve = rate < pace - pace / 8;
            self.on_time = if is_below_reserve { 0 } else { self.on_time.saturating_add(1) };
            let next = if is_below_reserve {
                // A host or a link that hung for a moment will not do so again.
                rate.max(pace / 2)
            } else {
                // The longer the pace is kept the larger the steps: a link may have become much faster.
                pace.saturating_add(pace >> (5 - (self.on_time / 4).min(2)))
            };
            self.pace_bytes_per_s = (1..=Self::FASTEST).contains(&next).then_some(next);
        }
        let way_ns = small.duration_ns.saturating_sub(time_for(small.wire_bytes, rate));
        let shortest_ns =
            if self.pace_bytes_per_s.is_some() { Self::SHORTEST_PACED_NS } else { Self::SHORTEST_NS };
        let long_ns = shortest_ns.max(way_ns.saturating_mul(Self::MIN_ROUND_TRIPS));
        let goes = self.pace_bytes_per_s.unwrap_or(rate);
        let bytes = u128::from(goes) * u128::from(long_ns) / 1_000_000_000;
        let pages = (bytes * u128::from(part.data_pages)).checked_div(wire_bytes.into()).unwrap_or(0);
        let pages = u64::try_from(pages).unwrap_or(u64::MAX);
        self.data_pages = pages.clamp(self.data_pages / 2, self.data_pages * 2);
    }

    /// Returns the part of a size that was held up least.
    fn quickest(&self, is_small: bool) -> Option<PartTiming> {
        let beside_ns = |part: &&PartTiming| {
            let paced_ns = self.pace_bytes_per_s.map_or(0, |pace| time_for(part.wire_bytes, pace));
            i128::from(part.duration_ns) - i128::from(paced_ns)
        };
        self.timings.iter().filter(|part| part.is_small == is_small).min_by_key(beside_ns).copied()
    }
}

impl From<NoParameters> for PushPolicy {
    fn from(_: NoParameters) -> Self {
        Self::default()
    }
}

impl Default for PushPolicy {
    fn default() -> Self {
        Self {
            data_pages: Self::FIRST_PAGES,
            spread: 1,
            last: None,
            timings: Vec::new(),
            has_grown: false,
            pace_bytes_per_s: None,
            on_time: 0,
        }
    }
}

fn per_second(bytes: u64, ns: u64) -> u64 {
    let rate = (u128::from(bytes) * 1_000_000_000).checked_div(ns.into()).unwrap_or(0);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// Returns the time for `bytes`, in nanoseconds.
fn time_for(bytes: u64, bytes_per_s: u64) -> u64 {
    let ns = (u128::from(bytes) * 1_000_000_000).checked_div(bytes_per_s.into()).unwrap_or(u128::MAX);
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// A link with a rate and a round trip time, in milliseconds.
    #[derive(Clone, Copy)]
    struct Link {
        bytes_per_s: u64,
        long_ms: u64,
    }

    impl Link {
        /// Pushes a part. Returns how long another frame would have waited behind it at most, in nanoseconds.
        fn carry(self, push: &mut PushPolicy) -> u64 {
            let wire_bytes = push.pages() * PAGE;
            let sent_ns = push.pace_bytes_per_s.map_or(0, |pace| time_for(wire_bytes, pace));
            let carried_ns = time_for(wire_bytes, self.bytes_per_s);
            let duration_ns = self.long_ms * 1_000_000 + carried_ns.max(sent_ns);
            let pages = push.pages();
            push.learn(PushedPart { pages, data_pages: pages, wire_bytes, duration_ns });
            carried_ns.saturating_sub(sent_ns)
        }
    }

    /// Returns the final duration of parts, in milliseconds, and the used share of the link's rate.
    fn grown(link: Link) -> (u64, f64) {
        let mut push = PushPolicy::default();
        (0..256).for_each(|_| _ = link.carry(&mut push));
        // One part of either size.
        let bytes = push.data_pages / 2 * 3 * PAGE / 2;
        let rate = push.pace_bytes_per_s.unwrap_or(u64::MAX).min(link.bytes_per_s);
        let part_ns = time_for(bytes, rate);
        let share = time_for(bytes, link.bytes_per_s) as f64 / (part_ns + link.long_ms * 1_000_000) as f64;
        (part_ns / 1_000_000, share)
    }

    #[test]
    fn parts_are_short_on_short_links_and_longer_on_long_ones() {
        for bytes_per_s in [12_500_000, 125_000_000, 1_250_000_000] {
            let (part_ms, share) = grown(Link { bytes_per_s, long_ms: 0 });
            assert!((4..=64).contains(&part_ms) && share > 0.93, "{bytes_per_s}: {part_ms} ms, {share}");
            for long_ms in [1, 10, 100] {
                let (part_ms, share) = grown(Link { bytes_per_s, long_ms });
                assert!(share > 0.85, "{bytes_per_s} bytes/s, {long_ms} ms: {part_ms} ms, {share}");
                assert!(part_ms <= 64 + 64 * long_ms, "{bytes_per_s} bytes/s, {long_ms} ms: {part_ms} ms");
            }
        }
    }

    /// A page request does not wait behind pages that are pushed.
    #[test]
    fn what_is_pushed_stands_in_no_queue() {
        for long_ms in [0, 1, 10] {
            let link = Link { bytes_per_s: 125_000_000, long_ms };
            let mut push = PushPolicy::default();
            (0..16).for_each(|_| _ = link.carry(&mut push));
            let queue_ns = (0..256).map(|_| link.carry(&mut push)).max().unwrap();
            let part_ns =
                PushPolicy::SHORTEST_PACED_NS.max(PushPolicy::MIN_ROUND_TRIPS * long_ms * 1_000_000);
            let most_ns = part_ns * 3 / 10;
            assert!(queue_ns <= most_ns, "{long_ms}: {queue_ns}");
        }
    }

    #[test]
    fn the_pace_follows_a_link_that_becomes_slower_and_faster() {
        let mut push = PushPolicy::default();
        for bytes_per_s in [125_000_000, 25_000_000, 100_000_000] {
            (0..128).for_each(|_| _ = Link { bytes_per_s, long_ms: 1 }.carry(&mut push));
            let share = push.pace_bytes_per_s.unwrap() as f64 / bytes_per_s as f64;
            assert!((0.9..1.2).contains(&share), "{bytes_per_s}: {share}");
        }
    }

    /// Returns the used share of a link's rate, over 64 MiB and more, where the round trip of each part takes
    /// `way_ns`.
    fn share_of(bytes_per_s: u64, mut way_ns: impl FnMut(u64) -> u64) -> f64 {
        let (mut push, mut sent, mut all_ns) = (PushPolicy::default(), 0, 0);
        for part in 0..2_000 {
            let pages = push.pages();
            let wire_bytes = pages * PAGE;
            let sent_ns = push.pace_bytes_per_s.map_or(0, |pace| time_for(wire_bytes, pace));
            let duration_ns = way_ns(part) + time_for(wire_bytes, bytes_per_s).max(sent_ns);
            push.learn(PushedPart { pages, data_pages: pages, wire_bytes, duration_ns });
            (sent, all_ns) = (sent + wire_bytes, all_ns + duration_ns);
        }
        per_second(sent, all_ns) as f64 / bytes_per_s as f64
    }

    /// A longer round trip does not mean a slower link: its reason may be another sender's queue, or a busy host.
    #[test]
    fn ways_that_become_longer_do_not_make_what_is_pushed_slower() {
        const MS: u64 = 1_000_000;
        for bytes_per_s in [12_500_000, 125_000_000, 1_250_000_000] {
            for (before, after) in [(300_000, 2 * MS), (300_000, 5 * MS), (MS, 31 * MS), (31 * MS, MS)] {
                let share = share_of(bytes_per_s, |part| if part < 32 { before } else { after });
                assert!(share > 0.7, "{bytes_per_s}, {before} to {after} ns: {share}");
            }
            // A random round trip, a millisecond in the mean, and now and then much more.
            let mut random = 1_u64;
            let share = share_of(bytes_per_s, |part| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let uniform = ((random >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
                let held_up = if part % 100 == 99 { 50 * MS } else { 0 };
                300_000 + held_up + (-uniform.ln() * MS as f64) as u64
            });
            assert!(share > 0.6, "{bytes_per_s}: {share}");
        }
    }

    /// Like a rate limit that lets a burst pass first.
    #[test]
    fn a_burst_at_the_beginning_does_not_mislead() {
        let bytes_per_s = 20_000_000;
        let mut burst_ns = 50_000_000_u64;
        let share = share_of(bytes_per_s, |_| std::mem::take(&mut burst_ns) / 50);
        assert!(share > 0.85, "{share}");
    }

    #[test]
    fn a_link_that_is_faster_than_any_clock_has_no_pace() {
        let mut push = PushPolicy::default();
        (0..64).for_each(|_| _ = Link { bytes_per_s: 1_250_000_000, long_ms: 0 }.carry(&mut push));
        assert_eq!(push.pace_bytes_per_s, None);
    }

    #[test]
    fn a_slower_link_gets_smaller_parts() {
        let mut push = PushPolicy::default();
        (0..32).for_each(|_| _ = Link { bytes_per_s: 1_250_000_000, long_ms: 0 }.carry(&mut push));
        let fast = push.pages();
        push.learn(PushedPart { pages: 1, data_pages: 1, wire_bytes: PAGE, duration_ns: 1_000_000_000 });
        assert_eq!(push.pages(), fast);
        (0..32).for_each(|_| _ = Link { bytes_per_s: 12_500_000, long_ms: 0 }.carry(&mut push));
        assert!(push.pages() < fast / 10, "{fast}, {}", push.pages());
    }

    /// Parts of pages that need nothing on the wire, and clocks that stand still.
    #[test]
    fn nothing_is_divided_by_zero() {
        let mut push = PushPolicy::default();
        for (wire_bytes, duration_ns) in
            [(0, 0), (0, 9_000_000), (1, 9_000_000), (u64::MAX, 1), (0, u64::MAX)]
        {
            for _ in 0..4 {
                let pages = push.pages();
                push.learn(PushedPart { pages, data_pages: pages, wire_bytes, duration_ns });
            }
        }
    }

    /// Pages in the order in which they are sent: runs of zeros or of data, each with its length in MiB.
    struct Layout(Vec<(bool, u64)>);

    impl Layout {
        /// Returns the time for all of it, in nanoseconds, where it takes `zero_ns` to find out that a page is a zero
        /// page.
        fn pushed_over(&self, link: Link, zero_ns: u64) -> u64 {
            let mib = |&(is_data, mib): &(bool, u64)| std::iter::repeat_n(is_data, (mib << 8) as usize);
            let mut left = self.0.iter().flat_map(mib).peekable();
            let (mut push, mut all_ns) = (PushPolicy::default(), 0);
            while left.peek().is_some() {
                let (mut pages, mut data_pages) = (0, 0);
                for is_data in left.by_ref().take(push.pages() as usize) {
                    (pages, data_pages) = (pages + 1, data_pages + u64::from(is_data));
                }
                let wire_bytes = 300 + data_pages * PAGE + (pages - data_pages) / 8;
                let sent_ns = push.pace_bytes_per_s.map_or(0, |pace| time_for(wire_bytes, pace));
                let carried_ns = time_for(wire_bytes, link.bytes_per_s).max(sent_ns);
                let duration_ns = link.long_ms * 1_000_000 + carried_ns + (pages - data_pages) * zero_ns;
                push.learn(PushedPart { pages, data_pages, wire_bytes, duration_ns });
                all_ns += duration_ns;
            }
            all_ns
        }
    }

    /// The time to find zero pages is not taken for time of the link.
    #[test]
    fn pages_of_zeros_make_nothing_slower() {
        let alternating = |data, zeros| [(true, data), (false, zeros)].repeat(8);
        let link = Link { bytes_per_s: 125_000_000, long_ms: 1 };
        for zero_ns in [60, 150, 400] {
            for layout in [
                vec![(false, 256), (true, 512)],
                vec![(true, 64), (false, 512), (true, 448)],
                alternating(64, 128),
                alternating(64, 16),
                alternating(64, 1),
            ] {
                let data_bytes: u64 =
                    layout.iter().filter(|(is_data, _)| *is_data).map(|(_, mib)| mib << 20).sum();
                let zeros: u64 = layout.iter().filter(|(is_data, _)| !is_data).map(|(_, mib)| mib << 8).sum();
                let least_ns = time_for(data_bytes, link.bytes_per_s) + zeros * zero_ns;
                let all_ns = Layout(layout.clone()).pushed_over(link, zero_ns);
                assert!(all_ns < least_ns * 5 / 4, "{layout:?}, {zero_ns}: {all_ns} instead of {least_ns}");
            }
        }
    }

    /// One page with data among many, throughout: the duration of every part is a round trip.
    #[test]
    fn sparse_data_among_zeros_is_sent_in_larger_parts() {
        let mut push = PushPolicy::default();
        for _ in 0..4 {
            let pages = push.pages();
            push.learn(PushedPart { pages, data_pages: pages / 8, wire_bytes: pages * 512, duration_ns: 1 });
        }
        assert_eq!((push.pages(), push.pace_bytes_per_s), (8 * PushPolicy::FIRST_PAGES, None));
    }
}
