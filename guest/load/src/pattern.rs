//! Order in which the pages of a working set are rewritten.

use std::error::Error;
use std::fmt;
use std::str::FromStr;

use crate::mix;

/// Choice of the pages to rewrite, and their relative frequencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pattern {
    /// `sequential`: one after the other, over and over.
    #[default]
    Sequential,
    /// `random`: any of them, each as likely as the others.
    Random,
    /// `hot-spot:WRITES/PAGES`: this share of the writes goes to this share of the pages, those at the beginning, both
    /// in percent; the other writes go to the other pages. Within each of the two it is random.
    HotSpot {
        /// Share of the writes, 1 to 99.
        writes_percent: u8,
        /// Share of the pages, 1 to 99.
        pages_percent: u8,
    },
    /// `strided:N`: every Nth of them, then those that follow these, until all were written; over and over.
    Strided {
        /// Distance from one page to the next, 1 to 65535.
        pages: u16,
    },
}

/// Error of a word that is no pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadPattern;

impl fmt::Display for BadPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "expected sequential, random, hot-spot:WRITES/PAGES (each 1 to 99 percent) or strided:PAGES (1 to 65535)",
        )
    }
}

impl Error for BadPattern {}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sequential => f.write_str("sequential"),
            Self::Random => f.write_str("random"),
            Self::HotSpot { writes_percent, pages_percent } => {
                write!(f, "hot-spot:{writes_percent}/{pages_percent}")
            }
            Self::Strided { pages } => write!(f, "strided:{pages}"),
        }
    }
}

impl FromStr for Pattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, BadPattern> {
        let percent = |text: &str| {
            let percent = text.parse().map_err(|_| BadPattern)?;
            (1..=99).contains(&percent).then_some(percent).ok_or(BadPattern)
        };
        match text.split_once(':') {
            None if text == "sequential" => Ok(Self::Sequential),
            None if text == "random" => Ok(Self::Random),
            Some(("hot-spot", shares)) => {
                let (writes, pages) = shares.split_once('/').ok_or(BadPattern)?;
                Ok(Self::HotSpot { writes_percent: percent(writes)?, pages_percent: percent(pages)? })
            }
            Some(("strided", pages)) => {
                let pages = pages.parse().map_err(|_| BadPattern)?;
                if pages > 0 { Ok(Self::Strided { pages }) } else { Err(BadPattern) }
            }
            _ => Err(BadPattern),
        }
    }
}

/// Sequence of pages: the same one for the same seed.
#[derive(Clone, Debug)]
pub struct Order {
    seed: u64,
    /// Number of random numbers drawn.
    drawn: u64,
    /// The next page, in patterns with an order.
    next: usize,
}

impl Order {
    /// Starts from the beginning.
    pub fn new(seed: u64) -> Self {
        Self { seed: mix(seed), drawn: 0, next: 0 }
    }

    /// Returns the next page of a working set of `pages` pages, at least one. Pattern and working set may change at any
    /// time.
    pub fn next(&mut self, pattern: Pattern, pages: usize) -> usize {
        match pattern {
            Pattern::Sequential => self.stride(1, pages),
            Pattern::Strided { pages: stride } => self.stride(usize::from(stride), pages),
            Pattern::Random => self.below(pages),
            Pattern::HotSpot { writes_percent, pages_percent } => {
                // A working set of one page is hot.
                let hot = (pages * usize::from(pages_percent) / 100).max(1);
                if self.below(100) < usize::from(writes_percent) || hot >= pages {
                    self.below(hot)
                } else {
                    hot + self.below(pages - hot)
                }
            }
        }
    }

    fn stride(&mut self, stride: usize, pages: usize) -> usize {
        let page = if self.next < pages { self.next } else { 0 };
        let beside = page % stride + 1;
        self.next = match page + stride {
            next if next < pages => next,
            _ if beside < stride.min(pages) => beside,
            _ => 0,
        };
        page
    }

    /// Returns a random number below `end`, each as likely as the others.
    fn below(&mut self, end: usize) -> usize {
        self.drawn += 1;
        let random = mix(self.seed ^ self.drawn);
        ((u128::from(random) * end as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 1000;
    const HOT: Pattern = Pattern::HotSpot { writes_percent: 90, pages_percent: 10 };

    /// Returns the number of writes to each page.
    fn writes(pattern: Pattern, seed: u64, writes: usize) -> Vec<usize> {
        let mut order = Order::new(seed);
        let mut counts = vec![0; PAGES];
        (0..writes).for_each(|_| counts[order.next(pattern, PAGES)] += 1);
        counts
    }

    /// Returns true if all counts are within six standard deviations of the expected one.
    fn are_even(counts: &[usize], expected: f64) -> bool {
        counts.iter().all(|count| (*count as f64 - expected).abs() < 6.0 * expected.sqrt())
    }

    #[test]
    fn a_pattern_is_read_as_it_is_written_and_mistakes_are_none() {
        for pattern in [Pattern::Sequential, Pattern::Random, HOT, Pattern::Strided { pages: 7 }] {
            assert_eq!(pattern.to_string().parse(), Ok(pattern));
        }
        assert_eq!("hot-spot:90/10".parse(), Ok(HOT));
        for wrong in [
            "",
            "loud",
            "random:1",
            "hot-spot",
            "hot-spot:90",
            "hot-spot:0/10",
            "hot-spot:90/100",
            "strided",
            "strided:0",
            "strided:65536",
        ] {
            assert_eq!(wrong.parse::<Pattern>(), Err(BadPattern), "{wrong}");
        }
    }

    #[test]
    fn sequential_goes_from_page_to_page() {
        let mut order = Order::new(1);
        let seen: Vec<_> = (0..7).map(|_| order.next(Pattern::Sequential, 3)).collect();
        assert_eq!(seen, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn strided_leaves_out_what_it_comes_back_to() {
        let mut order = Order::new(1);
        let seen: Vec<_> = (0..11).map(|_| order.next(Pattern::Strided { pages: 4 }, 10)).collect();
        assert_eq!(seen, [0, 4, 8, 1, 5, 9, 2, 6, 3, 7, 0]);
        for pages in [1, 3, 64, 999, 1000, 5000] {
            assert_eq!(writes(Pattern::Strided { pages }, 1, 2 * PAGES), vec![2; PAGES], "{pages}");
        }
    }

    #[test]
    fn random_is_even_over_all_pages() {
        let counts = writes(Pattern::Random, 1, 1000 * PAGES);
        assert!(are_even(&counts, 1000.0), "{counts:?}");
        assert!(counts.iter().any(|count| *count != 1000), "in no order");
    }

    #[test]
    fn a_hot_spot_gets_its_share_and_both_parts_are_even() {
        for (writes_percent, pages_percent) in [(90, 10), (50, 25), (10, 90)] {
            let pattern = Pattern::HotSpot { writes_percent, pages_percent };
            let counts = writes(pattern, 1, 1000 * PAGES);
            let (hot, cold) = counts.split_at(PAGES * usize::from(pages_percent) / 100);
            let share = hot.iter().sum::<usize>() as f64 / (1000 * PAGES) as f64;
            assert!((share - f64::from(writes_percent) / 100.0).abs() < 0.003, "{pattern}: {share}");
            let of_each = |percent: u8, pages: &[usize]| {
                f64::from(percent) / 100.0 * (1000 * PAGES) as f64 / pages.len() as f64
            };
            assert!(are_even(hot, of_each(writes_percent, hot)), "{pattern}: {hot:?}");
            assert!(are_even(cold, of_each(100 - writes_percent, cold)), "{pattern}: {cold:?}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_pages_and_another_one_others() {
        // So many that hardly any page is drawn twice by chance.
        const MANY: usize = 1 << 40;
        for pattern in [Pattern::Random, HOT] {
            let pages = |seed| {
                let mut order = Order::new(seed);
                (0..100).map(|_| order.next(pattern, MANY)).collect::<Vec<_>>()
            };
            assert_eq!(pages(7), pages(7));
            let others = pages(6);
            assert!(pages(7).iter().all(|page| !others.contains(page)), "not in another order either");
        }
    }

    #[test]
    fn working_set_and_pattern_may_change_at_any_time() {
        let mut order = Order::new(1);
        let patterns = [Pattern::Sequential, Pattern::Strided { pages: 300 }, HOT, Pattern::Random];
        for n in 0..10_000 {
            let pages = [1, 2, 900, 5][n % 4];
            assert!(order.next(patterns[n / 3 % 4], pages) < pages);
        }
    }
}
