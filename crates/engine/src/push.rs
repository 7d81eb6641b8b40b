//! Post-copy: how much of what is left is pushed at once.
//!
//! Whoever waits for a page waits behind what is on its way already, so no more is sent at once than the link carries in
//! some milliseconds. But each part has to be acknowledged before the next begins, so on a link that is long it has to be
//! larger, or most of the time nothing would be sent: it grows for as long as twice as much goes noticeably faster.

use serde::{Deserialize, Serialize};

/// How many pages are pushed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Push {
    pages: u64,
    /// The part before: pages, and how long they took.
    last: Option<(u64, u64)>,
    /// How long a part is to take, once that is known.
    target_ns: Option<u64>,
}

impl Push {
    /// A part takes no less than that, in nanoseconds.
    pub const SHORTEST_NS: u64 = 8_000_000;
    /// The first part, in pages.
    const FIRST_PAGES: u64 = 64;
    /// The largest, in pages: 1 GiB.
    const MOST_PAGES: u64 = 1 << 18;

    /// How many pages the next part has at most.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Learns from a part: pages that went, and how long that took until the last was acknowledged.
    pub fn learn(&mut self, pages: u64, duration_ns: u64) {
        let duration_ns = duration_ns.max(1);
        // The last one of all, or one of nearly nothing but zeros.
        if pages < self.pages {
            return;
        }
        match self.target_ns {
            Some(target_ns) => {
                let wanted = u128::from(pages) * u128::from(target_ns) / u128::from(duration_ns);
                let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
                self.pages = wanted.clamp(self.pages / 2, self.pages * 2);
            }
            None if self.is_no_faster(pages, duration_ns) => {
                self.target_ns = Some(duration_ns);
            }
            None => self.pages *= 2,
        }
        self.pages = self.pages.clamp(Self::FIRST_PAGES, Self::MOST_PAGES);
        self.last = Some((pages, duration_ns));
    }

    /// Whether a part that took long enough went hardly faster than the smaller one before.
    fn is_no_faster(&self, pages: u64, duration_ns: u64) -> bool {
        let Some((last_pages, last_ns)) = self.last else { return false };
        let (now, before) =
            (u128::from(pages) * u128::from(last_ns), u128::from(last_pages) * u128::from(duration_ns));
        duration_ns >= Self::SHORTEST_NS && now * 20 < before * 21
    }
}

impl Default for Push {
    fn default() -> Self {
        Self { pages: Self::FIRST_PAGES, last: None, target_ns: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts over a link that carries so many pages in a second and is so long, in milliseconds, there and back.
    fn settle(rate: u64, long_ms: u64) -> (u64, f64) {
        let mut push = Push::default();
        for _ in 0..64 {
            let pages = push.pages();
            push.learn(pages, long_ms * 1_000_000 + pages * 1_000_000_000 / rate);
        }
        let sending_ms = (push.pages() * 1000 / rate) as f64;
        (push.pages() * 1000 / rate, sending_ms / (sending_ms + long_ms as f64))
    }

    #[test]
    fn a_part_is_short_on_a_short_link_and_long_enough_on_a_long_one() {
        for rate in [3_000, 30_000, 300_000] {
            let (part_ms, _) = settle(rate, 0);
            assert!((4..=64).contains(&part_ms), "{rate}: {part_ms} ms");
            for long_ms in [1, 10, 100] {
                let (part_ms, share) = settle(rate, long_ms);
                assert!(share > 0.85, "{rate} pages/s, {long_ms} ms: {part_ms} ms, {share}");
                assert!(part_ms <= 64 + 64 * long_ms, "{rate} pages/s, {long_ms} ms: {part_ms} ms");
            }
        }
    }

    #[test]
    fn a_link_that_becomes_slower_has_smaller_parts_and_a_small_one_tells_nothing() {
        let mut push = Push::default();
        let learn = |push: &mut Push, rate: u64| {
            let pages = push.pages();
            push.learn(pages, pages * 1_000_000_000 / rate);
        };
        (0..32).for_each(|_| learn(&mut push, 300_000));
        let fast = push.pages();
        push.learn(1, 1_000_000_000);
        assert_eq!(push.pages(), fast);
        (0..32).for_each(|_| learn(&mut push, 3_000));
        assert!(push.pages() < fast / 10, "{fast}, {}", push.pages());
    }
}
