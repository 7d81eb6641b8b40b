//! Lines of text, over a port of virtio-serial with the name [`PORT`].
//!
//! The host sends one request after the other:
//!
//! ```text
//! report ID CACHE       report the memory that need not be sent
//! give-back ID CACHE    reclaim the page cache, and report then
//! ```
//!
//! ID is a number of the host's choice, CACHE is the part of the page cache that counts as such: `none`, `cold` (not
//! used recently) or `all`. The guest answers with lines that begin with
//!
//! ```text
//! begin ID VERSION      the following lines are true after the request was read
//! memory RANGE...       all memory
//! poisoned              the kernel checks that free pages keep their content: all of them must be sent
//! note TEXT             a failure
//! free RANGE...         unused pages
//! cache RANGE...        page cache that could be reclaimed; only in answer to `report`
//! end ID                the answer is complete
//! ```
//!
//! A RANGE is `FIRST+COUNT`, the first page's number and the number of pages, both hexadecimal; each kind's ranges
//! ascend. No line is longer than [`LINE_BYTES`]. Lines of an answer are valid on arrival, until an invalid line. Lines
//! of an answer to another request than the last one are ignored.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The port's name, by which both sides find it.
pub const PORT: &str = "org.whimbrel.guest.0";
/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Longest line, its end included.
pub const LINE_BYTES: usize = 4096;

/// Numbers of pages of 4 KiB, as the guest's kernel counts them.
pub type Pages = Range<u64>;

/// Parts of the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// No part.
    #[default]
    None,
    /// Pages not used recently.
    Cold,
    /// All of it.
    All,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Cold => "cold",
            Self::All => "all",
        })
    }
}

/// An invalid line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine(pub String);

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot read {:?}", self.0)
    }
}

impl std::error::Error for BadLine {}

impl FromStr for Cache {
    type Err = BadLine;

    fn from_str(word: &str) -> Result<Self, BadLine> {
        match word {
            "none" => Ok(Self::None),
            "cold" => Ok(Self::Cold),
            "all" => Ok(Self::All),
            _ => Err(BadLine(word.to_owned())),
        }
    }
}

/// A request of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Repeated in the answer.
    pub id: u64,
    /// True if the page cache is to be reclaimed first.
    pub give_back: bool,
    /// The part of the page cache.
    pub cache: Cache,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.give_back { "give-back" } else { "report" };
        write!(f, "{verb} {} {}", self.id, self.cache)
    }
}

impl FromStr for Request {
    type Err = BadLine;

    fn from_str(line: &str) -> Result<Self, BadLine> {
        let bad = || BadLine(line.to_owned());
        let mut words = line.split_ascii_whitespace();
        let (Some(verb), Some(id), Some(cache), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(bad());
        };
        let give_back = match verb {
            "report" => false,
            "give-back" => true,
            _ => return Err(bad()),
        };
        Ok(Self { id: id.parse().map_err(|_| bad())?, give_back, cache: cache.parse()? })
    }
}

/// Kinds of pages that a line lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All pages.
    Memory,
    /// Unused pages.
    Free,
    /// Page cache that could be reclaimed.
    Cache,
}

impl Kind {
    /// Number of kinds.
    pub const COUNT: usize = 3;

    const ALL: [(Self, &'static str); Self::COUNT] =
        [(Self::Memory, "memory"), (Self::Free, "free"), (Self::Cache, "cache")];

    /// Returns the word with which its lines begin.
    pub fn word(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, word)| word)
    }
}

/// A line of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// An answer begins.
    Begin {
        /// The request's number.
        id: u64,
        /// The guest's version of the protocol.
        version: u32,
    },
    /// All free pages must be sent.
    Poisoned,
    /// Human-readable text.
    Note(String),
    /// Pages of a kind.
    Pages(Kind, Vec<Pages>),
    /// The answer is complete.
    End {
        /// The request's number.
        id: u64,
    },
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin { id, version } => write!(f, "begin {id} {version}"),
            Self::Poisoned => f.write_str("poisoned"),
            Self::Note(text) => write!(f, "note {text}"),
            Self::Pages(kind, ranges) => {
                f.write_str(kind.word())?;
                ranges.iter().try_for_each(|range| write!(f, " {}", RangeText(range)))
            }
            Self::End { id } => write!(f, "end {id}"),
        }
    }
}

/// A range in its text form.
struct RangeText<'a>(&'a Pages);

impl fmt::Display for RangeText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}+{:x}", self.0.start, self.0.end - self.0.start)
    }
}

/// Parses a range that is not empty and does not overflow.
fn range(word: &str) -> Option<Pages> {
    let (first, count) = word.split_once('+')?;
    let (first, count) = (u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(count, 16).ok()?);
    first.checked_add(count).filter(|end| *end > first).map(|end| first..end)
}

impl FromStr for Line {
    type Err = BadLine;

    fn from_str(line: &str) -> Result<Self, BadLine> {
        let bad = || BadLine(line.chars().take(80).collect());
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let number = |text: &str| text.parse().map_err(|_| bad());
        match word {
            "begin" => {
                let (id, version) = rest.split_once(' ').ok_or_else(bad)?;
                Ok(Self::Begin { id: number(id)?, version: version.parse().map_err(|_| bad())? })
            }
            "end" => Ok(Self::End { id: number(rest)? }),
            "poisoned" if rest.is_empty() => Ok(Self::Poisoned),
            "note" => Ok(Self::Note(rest.to_owned())),
            _ => {
                let kind = Kind::ALL.iter().find(|(_, known)| *known == word).ok_or_else(bad)?.0;
                let ranges: Option<Vec<_>> = rest.split_ascii_whitespace().map(range).collect();
                Ok(Self::Pages(kind, ranges.ok_or_else(bad)?))
            }
        }
    }
}

/// Merges pages into ranges, and ranges into lines within the length limit.
#[derive(Debug)]
pub struct Ranges {
    kind: Kind,
    open: Option<Pages>,
    line: String,
}

impl Ranges {
    /// Returns an empty list of a kind.
    pub fn new(kind: Kind) -> Self {
        Self { kind, open: None, line: kind.word().to_owned() }
    }

    /// Adds pages that are behind all pages added before. Returns a line that is full.
    pub fn add(&mut self, pages: Pages) -> Option<String> {
        match &mut self.open {
            Some(open) if open.end == pages.start => {
                open.end = pages.end;
                None
            }
            open => {
                let before = open.replace(pages);
                before.and_then(|range| self.write(&range))
            }
        }
    }

    /// Returns the last lines.
    pub fn finish(mut self) -> Vec<String> {
        let full = self.open.take().and_then(|range| self.write(&range));
        let rest = (self.line.len() > self.kind.word().len()).then_some(self.line);
        full.into_iter().chain(rest).collect()
    }

    fn write(&mut self, range: &Pages) -> Option<String> {
        let word = format!(" {}", RangeText(range));
        let is_full = self.line.len() + word.len() + 1 > LINE_BYTES;
        let full = is_full.then(|| std::mem::replace(&mut self.line, self.kind.word().to_owned()));
        self.line.push_str(&word);
        full
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(text: &str) -> Line {
        text.parse().unwrap()
    }

    #[test]
    fn lines_are_written_as_they_are_read() {
        let pages = Line::Pages(Kind::Free, vec![1..0x9f, 0x100..0x101]);
        for (text, meant) in [
            ("begin 7 1", Line::Begin { id: 7, version: 1 }),
            ("poisoned", Line::Poisoned),
            ("note drop_caches: no", Line::Note("drop_caches: no".to_owned())),
            ("free 1+9e 100+1", pages),
            ("memory", Line::Pages(Kind::Memory, Vec::new())),
            ("end 18446744073709551615", Line::End { id: u64::MAX }),
        ] {
            assert_eq!((line(text), meant.to_string().as_str()), (meant, text));
        }
        for text in ["report 3 none", "report 4 cold", "give-back 18446744073709551615 all"] {
            assert_eq!(text.parse::<Request>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for text in [
            "",
            "beg",
            "begin 1",
            "begin x 1",
            "end",
            "end -1",
            "free 1",
            "free 1+0",
            "free 1+",
            "free g+1",
            "free ffffffffffffffff+1",
            "poisoned 1",
            "cache 1+1,2+1",
        ] {
            assert!(text.parse::<Line>().is_err(), "{text}");
        }
        for text in ["", "report", "report 1", "report 1 some", "drop 1 all", "report 1 all more"] {
            assert!(text.parse::<Request>().is_err(), "{text}");
        }
    }

    proptest! {
        /// Lines contain the same pages, and none is too long, for any pages.
        #[test]
        fn ranges_survive_encoding_and_decoding(steps in prop::collection::vec((0_u64..3, 1_u64..1 << 40), 0..2000)) {
            let mut ranges = Ranges::new(Kind::Cache);
            let (mut next, mut pages, mut lines) = (0, Vec::<Pages>::new(), Vec::new());
            for (gap, count) in steps {
                let range = next + gap..next + gap + count;
                next = range.end;
                lines.extend(ranges.add(range.clone()));
                match pages.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => pages.push(range),
                }
            }
            lines.extend(ranges.finish());
            let mut read = Vec::new();
            for text in lines {
                prop_assert!(text.len() < LINE_BYTES);
                let Line::Pages(Kind::Cache, more) = line(&text) else { panic!("{text}") };
                read.extend(more);
            }
            prop_assert_eq!(read, pages);
        }

        #[test]
        fn no_text_panics(text in ".{0,200}") {
            let _ = text.parse::<Line>();
            let _ = text.parse::<Request>();
        }
    }
}
