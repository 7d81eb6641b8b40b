//! Post-copy: how much of what is left is pushed at once, and how fast.
//!
//! Whoever waits for a page waits behind what is on its way already. So nothing is pushed faster than the link carries: what
//! is on its way then is little, and stands in no queue. And no more is pushed at once than the link carries in some
//! milliseconds, for what is wanted next may be elsewhere. But each part has to be acknowledged before the next begins, so on
//! a link that is long it has to be larger, or most of the time nothing would be sent: it grows for as long as twice as much
//! goes noticeably faster.
//!
//! What the link carries is what the last two of these parts differ by: what twice as much took longer. From there on it
//! is followed. A part that takes longer than its pace says stood in a queue, and the next ones are slower; while none does,
//! they become faster, little by little.
//!
//! Pages of zeros take nothing on the wire, and the time that it takes to find them tells nothing of the link. Parts have as
//! many more pages as there were such among the last ones, and nothing is learnt from one of little else.

use serde::{Deserialize, Serialize};

use crate::trace::{Blank, Decider};

/// How many pages are pushed at once, and how fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Blank", into = "Blank")]
pub struct Push {
    /// How many pages with data are to be in a part.
    data_pages: u64,
    /// How many pages there were for each with data.
    spread: u64,
    /// The part before that told something.
    last: Option<Part>,
    /// How long a part is to take, once that is known.
    target_ns: Option<u64>,
    pace_bytes_per_s: Option<u64>,
    /// What a part takes beside its pace at least: the way there and back.
    least_beside_ns: u64,
    /// Parts in a row that stood in no queue.
    on_time: u32,
}

/// A part that was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Pages that went.
    pub pages: u64,
    /// Those of them that took something on the wire: others are holes, or full of the same few bytes, mostly zeros.
    pub data_pages: u64,
    /// What they took on the wire, in bytes.
    pub wire_bytes: u64,
    /// How long that took until the last one was acknowledged, in nanoseconds.
    pub duration_ns: u64,
}

/// How the next part goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextPart {
    /// How many pages it has at most.
    pub pages: u64,
    /// How fast it is to go, in bytes on the wire per second; none for as fast as it goes.
    pub pace_bytes_per_s: Option<u64>,
}

impl Decider for Push {
    type Observed = Part;
    type Decision = NextPart;

    const KEPT: usize = 1000;

    fn decide(&mut self, part: &Part) -> NextPart {
        self.learn(*part);
        NextPart { pages: self.pages(), pace_bytes_per_s: self.pace_bytes_per_s }
    }
}

impl Push {
    /// A part takes no less than that, in nanoseconds.
    pub const SHORTEST_NS: u64 = 8_000_000;
    /// And no less than that at a pace: there is no queue that it would make longer.
    pub const SHORTEST_PACED_NS: u64 = 16_000_000;
    /// The first part, in pages.
    const FIRST_PAGES: u64 = 64;
    /// The largest, in pages: 1 GiB.
    const MOST_PAGES: u64 = 1 << 18;
    /// One page with data among so many tells of the link: to find the others takes a small part of the time.
    const TELLING_SPREAD: u64 = 4;
    /// Parts become no larger for pages without data: what comes next may be nothing but data.
    const MOST_SPREAD: u64 = 16;
    /// Faster links, in bytes per second, are not what is waited for, and no clock is good enough for their pace.
    const FASTEST: u64 = 500_000_000;
    /// A part stood in a queue if it took so much longer than its pace says, in nanoseconds, or a tenth if that is more.
    const LATE_NS: u64 = 1_500_000;

    /// How many pages the next part has at most.
    pub fn pages(&self) -> u64 {
        (self.data_pages * self.spread).min(Self::MOST_PAGES)
    }

    /// Learns from a part.
    fn learn(&mut self, part: Part) {
        let part = Part { duration_ns: part.duration_ns.max(1), ..part };
        // The last one of all.
        if part.pages < self.pages() {
            return;
        }
        let spread = (part.pages + part.data_pages / 2).checked_div(part.data_pages);
        self.spread = spread.map_or(Self::MOST_SPREAD, |spread| spread.clamp(1, Self::MOST_SPREAD));
        if self.spread > Self::TELLING_SPREAD {
            return;
        }
        match self.target_ns {
            Some(target_ns) => {
                self.follow(part);
                let wanted =
                    u128::from(part.data_pages) * u128::from(target_ns) / u128::from(part.duration_ns);
                let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
                self.data_pages = wanted.clamp(self.data_pages / 2, self.data_pages * 2);
            }
            None if self.is_no_faster(part) => self.settle(part),
            None => self.data_pages *= 2,
        }
        self.data_pages = self.data_pages.clamp(Self::FIRST_PAGES, Self::MOST_PAGES);
        self.last = Some(part);
    }

    /// Whether a part that took long enough went hardly faster than the smaller one before.
    fn is_no_faster(&self, part: Part) -> bool {
        let Some(last) = self.last else { return false };
        let now = u128::from(part.data_pages) * u128::from(last.duration_ns);
        let before = u128::from(last.data_pages) * u128::from(part.duration_ns);
        part.duration_ns >= Self::SHORTEST_NS && now * 20 < before * 21
    }

    /// Parts are long enough; what the link carries is known.
    fn settle(&mut self, part: Part) {
        self.target_ns = Some(part.duration_ns);
        let rate = per_second(part.wire_bytes, part.duration_ns);
        let more = self.last.map_or(0, |last| {
            let (bytes, ns) = (
                part.wire_bytes.saturating_sub(last.wire_bytes),
                part.duration_ns.saturating_sub(last.duration_ns),
            );
            per_second(bytes, ns)
        });
        // Two moments of a busy host may differ by anything.
        let carries = more.clamp(rate, rate.saturating_add(rate / 4));
        if (1..=Self::FASTEST).contains(&carries) {
            self.pace_bytes_per_s = Some(carries - carries / 32);
            self.target_ns = Some(part.duration_ns.max(Self::SHORTEST_PACED_NS));
            self.least_beside_ns = part.duration_ns.saturating_sub(time_for(part.wire_bytes, carries));
        }
    }

    /// The pace follows the link.
    fn follow(&mut self, part: Part) {
        let Some(pace) = self.pace_bytes_per_s else { return };
        let planned_ns = time_for(part.wire_bytes, pace);
        let beside_ns = part.duration_ns.saturating_sub(planned_ns);
        self.least_beside_ns = self.least_beside_ns.min(beside_ns);
        let is_late = beside_ns - self.least_beside_ns > Self::LATE_NS.max(planned_ns / 10);
        self.on_time = if is_late { 0 } else { self.on_time.saturating_add(1) };
        let next = if is_late {
            let rate = per_second(part.wire_bytes, part.duration_ns - self.least_beside_ns);
            // A host or a link that hung for a moment will not do so again.
            (rate - rate / 32).max(pace / 2)
        } else {
            // The longer it goes well the larger the steps: a link may have become much faster.
            pace.saturating_add(pace >> (6 - (self.on_time / 8).min(3)))
        };
        self.pace_bytes_per_s = (1..=Self::FASTEST).contains(&next).then_some(next);
    }
}

impl From<Blank> for Push {
    fn from(_: Blank) -> Self {
        Self::default()
    }
}

impl Default for Push {
    fn default() -> Self {
        Self {
            data_pages: Self::FIRST_PAGES,
            spread: 1,
            last: None,
            target_ns: None,
            pace_bytes_per_s: None,
            least_beside_ns: u64::MAX,
            on_time: 0,
        }
    }
}

fn per_second(bytes: u64, ns: u64) -> u64 {
    let rate = (u128::from(bytes) * 1_000_000_000).checked_div(ns.into()).unwrap_or(0);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// In nanoseconds.
fn time_for(bytes: u64, bytes_per_s: u64) -> u64 {
    let ns = (u128::from(bytes) * 1_000_000_000).checked_div(bytes_per_s.into()).unwrap_or(u128::MAX);
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// A link that carries so many bytes in a second and is so long, in milliseconds, there and back.
    #[derive(Clone, Copy)]
    struct Link {
        bytes_per_s: u64,
        long_ms: u64,
    }

    impl Link {
        /// Has a part pushed; how long something else would have waited behind it at most, in nanoseconds.
        fn carry(self, push: &mut Push) -> u64 {
            let wire_bytes = push.pages() * PAGE;
            let sent_ns = push.pace_bytes_per_s.map_or(0, |pace| time_for(wire_bytes, pace));
            let carried_ns = time_for(wire_bytes, self.bytes_per_s);
            let duration_ns = self.long_ms * 1_000_000 + carried_ns.max(sent_ns);
            let pages = push.pages();
            push.learn(Part { pages, data_pages: pages, wire_bytes, duration_ns });
            carried_ns.saturating_sub(sent_ns)
        }
    }

    /// How long parts are in the end, in milliseconds, and which share of what the link carries goes.
    fn settled(link: Link) -> (u64, f64) {
        let mut push = Push::default();
        (0..256).for_each(|_| _ = link.carry(&mut push));
        let bytes = push.pages() * PAGE;
        let rate = push.pace_bytes_per_s.unwrap_or(u64::MAX).min(link.bytes_per_s);
        let part_ns = time_for(bytes, rate);
        let share = time_for(bytes, link.bytes_per_s) as f64 / (part_ns + link.long_ms * 1_000_000) as f64;
        (part_ns / 1_000_000, share)
    }

    #[test]
    fn a_part_is_short_on_a_short_link_and_long_enough_on_a_long_one() {
        for bytes_per_s in [12_500_000, 125_000_000, 1_250_000_000] {
            let (part_ms, share) = settled(Link { bytes_per_s, long_ms: 0 });
            assert!((4..=64).contains(&part_ms) && share > 0.93, "{bytes_per_s}: {part_ms} ms, {share}");
            for long_ms in [1, 10, 100] {
                let (part_ms, share) = settled(Link { bytes_per_s, long_ms });
                assert!(share > 0.85, "{bytes_per_s} bytes/s, {long_ms} ms: {part_ms} ms, {share}");
                assert!(part_ms <= 64 + 64 * long_ms, "{bytes_per_s} bytes/s, {long_ms} ms: {part_ms} ms");
            }
        }
    }

    /// Whoever waits for a page does not wait behind what is pushed.
    #[test]
    fn what_is_pushed_stands_in_no_queue() {
        for long_ms in [0, 1, 10] {
            let link = Link { bytes_per_s: 125_000_000, long_ms };
            let mut push = Push::default();
            (0..16).for_each(|_| _ = link.carry(&mut push));
            let queue_ns = (0..256).map(|_| link.carry(&mut push)).max().unwrap();
            let most_ns = Push::LATE_NS.max(2 * time_for(push.pages() * PAGE, link.bytes_per_s) / 10);
            assert!(queue_ns <= most_ns, "{long_ms}: {queue_ns}");
        }
    }

    #[test]
    fn the_pace_follows_a_link_that_becomes_slower_and_faster() {
        let mut push = Push::default();
        for bytes_per_s in [125_000_000, 25_000_000, 100_000_000] {
            (0..128).for_each(|_| _ = Link { bytes_per_s, long_ms: 1 }.carry(&mut push));
            let share = push.pace_bytes_per_s.unwrap() as f64 / bytes_per_s as f64;
            assert!((0.9..1.2).contains(&share), "{bytes_per_s}: {share}");
        }
    }

    #[test]
    fn a_link_that_is_faster_than_any_clock_has_no_pace() {
        let mut push = Push::default();
        (0..64).for_each(|_| _ = Link { bytes_per_s: 1_250_000_000, long_ms: 0 }.carry(&mut push));
        assert_eq!(push.pace_bytes_per_s, None);
    }

    #[test]
    fn a_link_that_becomes_slower_has_smaller_parts_and_a_small_one_tells_nothing() {
        let mut push = Push::default();
        (0..32).for_each(|_| _ = Link { bytes_per_s: 1_250_000_000, long_ms: 0 }.carry(&mut push));
        let fast = push.pages();
        push.learn(Part { pages: 1, data_pages: 1, wire_bytes: PAGE, duration_ns: 1_000_000_000 });
        assert_eq!(push.pages(), fast);
        (0..32).for_each(|_| _ = Link { bytes_per_s: 12_500_000, long_ms: 0 }.carry(&mut push));
        assert!(push.pages() < fast / 10, "{fast}, {}", push.pages());
    }

    /// Parts of pages that need nothing on the wire, and clocks that stand still.
    #[test]
    fn nothing_is_divided_by_zero() {
        let mut push = Push::default();
        for (wire_bytes, duration_ns) in
            [(0, 0), (0, 9_000_000), (1, 9_000_000), (u64::MAX, 1), (0, u64::MAX)]
        {
            for _ in 0..4 {
                let pages = push.pages();
                push.learn(Part { pages, data_pages: pages, wire_bytes, duration_ns });
            }
        }
    }

    /// Pages in the order in which they go: so many MiB of zeros, or of data, and again.
    struct Layout(Vec<(bool, u64)>);

    impl Layout {
        /// How long all of it takes, in nanoseconds, where it takes `zero_ns` to find out that a page is one of zeros.
        fn pushed_over(&self, link: Link, zero_ns: u64) -> u64 {
            let mib = |&(is_data, mib): &(bool, u64)| std::iter::repeat_n(is_data, (mib << 8) as usize);
            let mut left = self.0.iter().flat_map(mib).peekable();
            let (mut push, mut all_ns) = (Push::default(), 0);
            while left.peek().is_some() {
                let (mut pages, mut data_pages) = (0, 0);
                for is_data in left.by_ref().take(push.pages() as usize) {
                    (pages, data_pages) = (pages + 1, data_pages + u64::from(is_data));
                }
                let wire_bytes = 300 + data_pages * PAGE + (pages - data_pages) / 8;
                let sent_ns = push.pace_bytes_per_s.map_or(0, |pace| time_for(wire_bytes, pace));
                let carried_ns = time_for(wire_bytes, link.bytes_per_s).max(sent_ns);
                let duration_ns = link.long_ms * 1_000_000 + carried_ns + (pages - data_pages) * zero_ns;
                push.learn(Part { pages, data_pages, wire_bytes, duration_ns });
                all_ns += duration_ns;
            }
            all_ns
        }
    }

    /// The time that it takes to find them is not what the link carries.
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

    /// One page with data among many, all the way: every part is a way there and back.
    #[test]
    fn data_here_and_there_among_zeros_goes_in_parts_that_are_larger() {
        let mut push = Push::default();
        for _ in 0..4 {
            let pages = push.pages();
            push.learn(Part { pages, data_pages: pages / 8, wire_bytes: pages * 512, duration_ns: 1 });
        }
        assert_eq!((push.pages(), push.pace_bytes_per_s), (8 * Push::FIRST_PAGES, None));
    }
}
