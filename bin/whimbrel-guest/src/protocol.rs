//! Lines of text, over a port of virtio-serial with the name [`PORT`].
//!
//! The host asks, one question after the other:
//!
//! ```text
//! report ID CACHE       tell what need not be sent
//! give-back ID CACHE    give the page cache back, and then tell
//! ```
//!
//! ID is a number of the host's choice, CACHE says which part of the page cache counts as such: `none`, `cold` (what was
//! not used of late) or `all`. The guest answers with lines that begin with
//!
//! ```text
//! begin ID VERSION      what follows is so after the question was read
//! memory RANGE...       what there is of memory
//! poisoned              the kernel looks whether free pages are as it left them: none may be left out
//! note TEXT             what did not work
//! free RANGE...         pages that are used for nothing
//! cache RANGE...        page cache that could be given back; in answer to `report` alone
//! end ID                that was all
//! ```
//!
//! A RANGE is `FIRST+COUNT`, the first page's number and how many pages there are, both hexadecimal; each kind's ranges
//! ascend. No line is longer than [`LINE_BYTES`]. An answer counts as it comes, until it goes wrong. What comes of an answer
//! to another question than the last one does not count.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The port's name, by which both sides find it.
pub const PORT: &str = "org.whimbrel.guest.0";
/// Version of what is said here.
pub const VERSION: u32 = 1;
/// Longest line, its end included.
pub const LINE_BYTES: usize = 4096;

/// Numbers of pages of 4 KiB, as the guest's kernel counts them.
pub type Pages = Range<u64>;

/// Which part of the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Nothing of it.
    #[default]
    None,
    /// What was not used of late.
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

/// A line that means nothing here.
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

/// What the host wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// To be said again with the answer.
    pub id: u64,
    /// Whether the page cache is to be given back first.
    pub give_back: bool,
    /// Which part of it.
    pub cache: Cache,
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.give_back { "give-back" } else { "report" };
        write!(f, "{verb} {} {}", self.id, self.cache)
    }
}

impl FromStr for Question {
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

/// What kind of pages a line lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All that there are.
    Memory,
    /// Used for nothing.
    Free,
    /// Page cache that could be given back.
    Cache,
}

impl Kind {
    /// How many kinds there are.
    pub const COUNT: usize = 3;

    const ALL: [(Self, &'static str); Self::COUNT] =
        [(Self::Memory, "memory"), (Self::Free, "free"), (Self::Cache, "cache")];

    /// The word with which its lines begin.
    pub fn word(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, word)| word)
    }
}

/// A line of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// An answer begins.
    Begin {
        /// To which question.
        id: u64,
        /// What the guest speaks.
        version: u32,
    },
    /// No free page may be left out.
    Poisoned,
    /// Something for people.
    Note(String),
    /// Pages of a kind.
    Pages(Kind, Vec<Pages>),
    /// The answer is complete.
    End {
        /// To which question.
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
                ranges.iter().try_for_each(|range| write!(f, " {}", Word(range)))
            }
            Self::End { id } => write!(f, "end {id}"),
        }
    }
}

/// A range as it is written.
struct Word<'a>(&'a Pages);

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}+{:x}", self.0.start, self.0.end - self.0.start)
    }
}

/// A range that is not empty, and ends before numbers do.
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

/// Puts pages together to ranges, and ranges to lines that are not too long.
#[derive(Debug)]
pub struct Ranges {
    kind: Kind,
    open: Option<Pages>,
    line: String,
}

impl Ranges {
    /// Of a kind.
    pub fn new(kind: Kind) -> Self {
        Self { kind, open: None, line: kind.word().to_owned() }
    }

    /// Adds pages, which come after all that were added before. Returns a line that is full.
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

    /// The last lines.
    pub fn finish(mut self) -> Vec<String> {
        let full = self.open.take().and_then(|range| self.write(&range));
        let rest = (self.line.len() > self.kind.word().len()).then_some(self.line);
        full.into_iter().chain(rest).collect()
    }

    fn write(&mut self, range: &Pages) -> Option<String> {
        let word = format!(" {}", Word(range));
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
            assert_eq!(text.parse::<Question>().unwrap().to_string(), text);
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
            assert!(text.parse::<Question>().is_err(), "{text}");
        }
    }

    proptest! {
        /// Whatever pages there are, lines say the same, and none is too long.
        #[test]
        fn ranges_come_as_they_went(steps in prop::collection::vec((0_u64..3, 1_u64..1 << 40), 0..2000)) {
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
        fn no_line_is_too_strange(text in ".{0,200}") {
            let _ = text.parse::<Line>();
            let _ = text.parse::<Question>();
        }
    }
}
