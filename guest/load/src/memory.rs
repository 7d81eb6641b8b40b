//! Memory whose every page can be checked at any time.
//!
//! For each page a version is kept, from which its content can be computed again. A page that a migration lost or left
//! stale therefore shows up as wrong, with any content.

use whimbrel_guest_load::{WORDS, mix, words};

use crate::options::Mode;

/// A page of 4096 bytes, at a page's boundary.
#[repr(align(4096))]
#[derive(Clone)]
struct Page([u64; WORDS]);

/// Parameters of a page's expected content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Expected {
    /// Number of rewritings of the whole page.
    base: u32,
    /// Number of rewritings of a few words since then.
    few: u32,
    /// True for a zero page.
    zero: bool,
}

/// A page that differs from its last write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) page: usize,
    pub(crate) word: usize,
    pub(crate) expected: u64,
    pub(crate) found: u64,
}

/// Parameters of the content of all pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipe {
    /// Makes content differ between runs.
    pub(crate) seed: u64,
    /// Percentage of pieces of memory that look random; the others hold small numbers, as much of a program's memory
    /// does, and compress well.
    pub(crate) noise_percent: u64,
}

/// Number of neighbouring pages that are all random, or all not, as in real memory: 1 MiB.
const PIECE_PAGES: usize = 256;

impl Recipe {
    fn is_noise(self, page: usize) -> bool {
        let piece = (page / PIECE_PAGES) as u64;
        mix(self.seed ^ mix(piece)) % 100 < self.noise_percent
    }
}

/// The pages and their expected content.
pub(crate) struct Memory {
    recipe: Recipe,
    /// In pieces, so that it can grow where it is.
    pieces: Vec<Vec<Page>>,
    expected: Vec<Expected>,
}

impl Memory {
    /// Allocates and writes every page once.
    pub(crate) fn filled(recipe: Recipe, pages: usize) -> Self {
        let mut memory = Self { recipe, pieces: Vec::new(), expected: Vec::new() };
        memory.grow(pages);
        memory
    }

    /// Grows to at least this number of pages, and writes each new one once.
    pub(crate) fn grow(&mut self, pages: usize) {
        for page in self.len()..pages {
            if page % PIECE_PAGES == 0 {
                self.pieces.push(Vec::with_capacity(PIECE_PAGES.min(pages - page)));
            }
            self.pieces[page / PIECE_PAGES].push(Page([0; WORDS]));
            self.expected.push(Expected { base: 0, few: 0, zero: true });
            self.write(page, Mode::Random);
        }
    }

    fn page(&self, page: usize) -> &Page {
        &self.pieces[page / PIECE_PAGES][page % PIECE_PAGES]
    }

    fn page_mut(&mut self, page: usize) -> &mut Page {
        &mut self.pieces[page / PIECE_PAGES][page % PIECE_PAGES]
    }

    /// Returns the number of pages.
    pub(crate) fn len(&self) -> usize {
        self.expected.len()
    }

    /// Writes one page.
    pub(crate) fn write(&mut self, page: usize, mode: Mode) {
        let expected = &mut self.expected[page];
        match mode {
            Mode::Few if !expected.zero => {
                expected.few = expected.few.wrapping_add(1);
                let few = *expected;
                for (at, word) in few_words(self.recipe.seed, page, few) {
                    self.page_mut(page).0[at] = word;
                }
                return;
            }
            Mode::Zero if !expected.zero => expected.zero = true,
            _ => *expected = Expected { base: expected.base.wrapping_add(1), few: 0, zero: false },
        }
        self.rewrite(page);
    }

    /// Compares one page with its last write. A wrong page is repaired, so that each error is reported once.
    pub(crate) fn verify(&mut self, page: usize) -> Option<Wrong> {
        let expected = self.expected[page];
        let wrong = content(self.recipe, page, expected)
            .zip(&self.page(page).0)
            .enumerate()
            .find(|(_, (expected, found))| expected != *found)
            .map(|(word, (expected, found))| Wrong { page, word, expected, found: *found });
        if wrong.is_some() {
            self.rewrite(page);
        }
        wrong
    }

    fn rewrite(&mut self, page: usize) {
        let content = content(self.recipe, page, self.expected[page]);
        for (to, word) in self.page_mut(page).0.iter_mut().zip(content) {
            *to = word;
        }
    }
}

/// Returns all words of a page.
fn content(recipe: Recipe, page: usize, expected: Expected) -> impl Iterator<Item = u64> {
    let few = few_words(recipe.seed, page, expected);
    let mask = if recipe.is_noise(page) { u64::MAX } else { 0xff };
    words(recipe.seed, page as u64, expected.base).enumerate().map(move |(at, base)| {
        if expected.zero {
            return 0;
        }
        let few = few.iter().find(|(few_at, _)| expected.few > 0 && *few_at == at);
        few.map_or(base & mask, |(_, word)| *word)
    })
}

/// Returns the four words that a rewriting of a few changes: always the same places of a page, with new values each
/// time.
fn few_words(seed: u64, page: usize, expected: Expected) -> [(usize, u64); 4] {
    let first = mix(page as u64) as usize;
    [0, 1, 2, 3].map(|k| {
        let version = (u64::from(expected.base) << 32) | u64::from(expected.few);
        ((first + k * 131) % WORDS, mix(mix(seed ^ version) ^ mix((page * 4 + k) as u64)))
    })
}

#[cfg(test)]
mod tests {
    use whimbrel_guest_load::{Order, Pattern};

    use super::*;

    const ALL_NOISE: Recipe = Recipe { seed: 5, noise_percent: 100 };

    #[test]
    fn noise_is_as_much_as_was_wished_for_and_lies_together() {
        let noise = |noise_percent: u64, piece: usize| {
            let recipe = Recipe { noise_percent, ..ALL_NOISE };
            let is_noise = recipe.is_noise(piece * PIECE_PAGES);
            assert!((0..PIECE_PAGES).all(|page| recipe.is_noise(piece * PIECE_PAGES + page) == is_noise));
            is_noise
        };
        assert!((0..100).all(|piece| noise(100, piece) && !noise(0, piece)));
        let third = (0..1000).filter(|piece| noise(33, *piece)).count();
        assert!((250..420).contains(&third), "{third}");
        let mut plain = Memory::filled(Recipe { noise_percent: 0, ..ALL_NOISE }, 2);
        assert!(plain.page(1).0.iter().all(|word| *word < 256));
        plain.write(1, Mode::Random);
        assert_eq!(plain.verify(1), None);
    }

    #[test]
    fn every_mode_verifies_and_every_change_is_found_once() {
        let mut memory = Memory::filled(ALL_NOISE, 8);
        for round in 0..12 {
            for page in 0..8 {
                memory.write(page, [Mode::Random, Mode::Few, Mode::Zero, Mode::Few][(round + page) % 4]);
                assert_eq!(memory.verify(page), None, "round {round}, page {page}");
            }
        }
        memory.page_mut(3).0[511] ^= 1 << 63;
        let wrong = memory.verify(3).unwrap();
        assert_eq!((wrong.page, wrong.word, wrong.found ^ wrong.expected), (3, 511, 1 << 63));
        assert_eq!(memory.verify(3), None);
    }

    #[test]
    fn memory_that_grew_verifies() {
        let mut memory = Memory::filled(ALL_NOISE, 3);
        memory.write(1, Mode::Few);
        for pages in [7, 2] {
            memory.grow(pages);
            assert_eq!(memory.len(), 7);
            assert!((0..7).all(|page| memory.verify(page).is_none() && memory.page(page).0 != [0; WORDS]));
        }
    }

    #[test]
    fn a_stale_page_is_found() {
        for mode in [Mode::Random, Mode::Few, Mode::Zero] {
            let mut memory = Memory::filled(ALL_NOISE, 1);
            let stale = memory.page(0).clone();
            memory.write(0, mode);
            *memory.page_mut(0) = stale;
            assert!(memory.verify(0).is_some(), "{mode:?}");
        }
    }

    /// A page that is written often, or rarely, is as right as the others, and a stale one as wrong.
    #[test]
    fn every_pattern_verifies_and_a_stale_page_is_found() {
        const PAGES: usize = 64;
        for pattern in ["sequential", "random", "hot-spot:90/10", "strided:7"] {
            let pattern: Pattern = pattern.parse().unwrap();
            let (mut memory, mut order) = (Memory::filled(ALL_NOISE, PAGES), Order::new(ALL_NOISE.seed));
            for n in 0..20 * PAGES {
                memory.write(order.next(pattern, PAGES), [Mode::Random, Mode::Few, Mode::Zero][n % 3]);
            }
            assert!((0..PAGES).all(|page| memory.verify(page).is_none()), "{pattern}");
            for mode in [Mode::Few, Mode::Few, Mode::Zero, Mode::Random] {
                let page = order.next(pattern, PAGES);
                let stale = memory.page(page).clone();
                memory.write(page, mode);
                *memory.page_mut(page) = stale;
                let wrong: Vec<_> = (0..PAGES).filter(|page| memory.verify(*page).is_some()).collect();
                assert_eq!(wrong, [page], "{pattern}, {mode:?}");
            }
        }
    }
}
