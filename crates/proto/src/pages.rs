//! Guest memory on a data stream.
//!
//! A `Pages` frame describes one chunk (2 MiB) of one RAM block: a list of runs, then the contents of the runs that
//! have contents, one after the other. A chunk always travels on the same stream, and frames of a stream are applied
//! in order, so that of two contents of a page the one that was read later stays.
//!
//! ```text
//! seq u64 | round u32 | block u16 | runs u16 | chunk u64 | run ... | data ...
//! run: first page u16 | pages u16 | content u16 (1 data, 2 zero, 3 hole, 4 reference, 5 delta, 6 filled) | pieces u16
//! ```
//!
//! The data of a run of kind 4 is a [reference](crate::reference) to bytes that the destination already has. That of a
//! run of kind 5 is a [delta](crate::delta) for each page, against the version that was sent before; *pieces* is the
//! number of pieces of all these deltas, and zero for the other kinds. That of a run of kind 6 is the eight bytes that
//! repeat throughout all of its pages.
//!
//! All numbers are little-endian. `RoundEnd` is `seq u64 | round u32`. The destination sends two kinds of frames:
//!
//! - `Ack` is `seq u64 | waited u32`: everything up to and including frame *seq* has been applied, and since the `Ack`
//!   before the destination has waited for frames for *waited* µs.
//! - `Missing` is sent before the `Ack` of its frame, see [references](crate::reference).
//!
//! Pages that are compressed travel in frames of another kind ([`crate::packed`]).

pub use crate::decode::BadPages;
use crate::decode::Cursor;
use crate::delta::{self, PIECE_BYTES};
use crate::limits::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES};
use crate::reference::REFERENCE_BYTES;

/// Bytes before the runs.
pub const FIXED_BYTES: usize = 24;
/// Position of the number of runs.
const RUNS_AT: usize = 14;
/// Bytes of the pattern that fills a run of [`Content::Filled`].
pub const FILLING_BYTES: usize = 8;
/// Bytes of one run.
pub const RUN_BYTES: usize = 8;
/// Longest payload of a `Pages` frame, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = FIXED_BYTES + RUN_BYTES * CHUNK_PAGES as usize + CHUNK_BYTES as usize;
/// Length of a `RoundEnd` payload, in bytes.
pub const ROUND_END_BYTES: usize = 12;
/// Length of an `Ack` payload, in bytes.
pub const ACK_BYTES: usize = 12;

/// Content of a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bytes that follow in the frame.
    Data,
    /// Zeros that occupy memory.
    Zero,
    /// No memory: never touched, or returned to the host. Reads as zeros.
    Hole,
    /// Content that the destination already has; a [`Reference`](crate::reference::Reference) follows in the frame.
    Reference,
    /// Changes of pages of which the destination has an earlier version; a [`Delta`](delta::Delta) of each page
    /// follows in the frame.
    Delta {
        /// Number of pieces that follow, of all pages of the run together.
        pieces: u16,
    },
    /// A pattern of [`FILLING_BYTES`] bytes that repeats throughout all pages, and follows in the frame once.
    Filled,
}

impl Content {
    /// Encodes the kind and the number of pieces, as in a run.
    fn encode(self) -> (u16, u16) {
        match self {
            Self::Data => (1, 0),
            Self::Zero => (2, 0),
            Self::Hole => (3, 0),
            Self::Reference => (4, 0),
            Self::Delta { pieces } => (5, pieces),
            Self::Filled => (6, 0),
        }
    }

    /// Decodes and checks the content of a run of `pages` pages.
    fn decode(kind: u16, pieces: u16, pages: u16) -> Result<Self, BadPages> {
        let content = match kind {
            1 => Self::Data,
            2 => Self::Zero,
            3 => Self::Hole,
            4 => Self::Reference,
            5 if u32::from(pieces) <= u32::from(pages) * delta::MAX_PIECES => Self::Delta { pieces },
            5 => return Err(BadPages::Delta),
            6 => Self::Filled,
            other => return Err(BadPages::Content(other)),
        };
        if content.encode().1 == pieces { Ok(content) } else { Err(BadPages::Runs) }
    }
}

/// Neighbouring pages of a chunk with the same kind of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// First page, counted from the beginning of the chunk.
    pub first_page: u16,
    /// Number of pages, at least one.
    pub pages: u16,
    /// Content of the pages.
    pub content: Content,
}

impl PageRun {
    /// Returns the offset of the run within the chunk, in bytes.
    pub fn offset_bytes(self) -> u64 {
        u64::from(self.first_page) * PAGE_BYTES
    }

    /// Returns the length of the run, in bytes.
    pub fn len_bytes(self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES
    }

    /// Returns the number of bytes of the frame's data that belong to this run.
    pub fn data_bytes(self) -> usize {
        match self.content {
            Content::Data => self.len_bytes() as usize,
            Content::Reference => REFERENCE_BYTES,
            Content::Delta { pieces } => {
                usize::from(self.pages) * delta::HEAD_BYTES + usize::from(pieces) * PIECE_BYTES
            }
            Content::Filled => FILLING_BYTES,
            Content::Zero | Content::Hole => 0,
        }
    }

    fn encode(self) -> [u8; RUN_BYTES] {
        let [f0, f1] = self.first_page.to_le_bytes();
        let [p0, p1] = self.pages.to_le_bytes();
        let (kind, pieces) = self.content.encode();
        let ([c0, c1], [n0, n1]) = (kind.to_le_bytes(), pieces.to_le_bytes());
        [f0, f1, p0, p1, c0, c1, n0, n1]
    }

    /// Decodes a run that begins at `next_page` or later.
    fn decode(bytes: [u8; RUN_BYTES], next_page: u64) -> Result<Self, BadPages> {
        let [f0, f1, p0, p1, c0, c1, n0, n1] = bytes;
        let [first_page, pages, kind, pieces] =
            [[f0, f1], [p0, p1], [c0, c1], [n0, n1]].map(u16::from_le_bytes);
        let run = Self { first_page, pages, content: Content::decode(kind, pieces, pages)? };
        let in_order = u64::from(run.first_page) >= next_page && run.end_page() <= CHUNK_PAGES;
        if run.pages > 0 && in_order { Ok(run) } else { Err(BadPages::Runs) }
    }

    /// Returns the first page after the run.
    fn end_page(self) -> u64 {
        u64::from(self.first_page) + u64::from(self.pages)
    }
}

/// Part of a `Pages` frame before the runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesHeader {
    /// Sequence number of the frame in its stream and generation, from 1 on.
    pub seq: u64,
    /// The round that sends it, from 1 on.
    pub round: u32,
    /// Index of the RAM block in the proposal's list.
    pub block: u16,
    /// Number of the chunk in the block.
    pub chunk: u64,
}

impl PagesHeader {
    /// Appends header and runs; the caller appends the data, in the order of the runs.
    pub fn encode(&self, runs: &[PageRun], out: &mut Vec<u8>) {
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.round.to_le_bytes());
        out.extend_from_slice(&self.block.to_le_bytes());
        out.extend_from_slice(&(runs.len() as u16).to_le_bytes());
        out.extend_from_slice(&self.chunk.to_le_bytes());
        out.reserve(runs.len() * RUN_BYTES);
        for run in runs {
            out.extend_from_slice(&run.encode());
        }
    }

    /// Decodes and checks a payload: header, runs (written to `runs`, which is cleared first), and the data.
    pub fn decode<'a>(payload: &'a [u8], runs: &mut Vec<PageRun>) -> Result<(Self, &'a [u8]), BadPages> {
        let (header, data, data_bytes) = Self::decode_runs(payload, runs)?;
        match data.len().checked_sub(data_bytes) {
            Some(0) => Ok((header, data)),
            Some(surplus) => Err(BadPages::Surplus(surplus)),
            None => Err(BadPages::Truncated),
        }
    }

    /// Returns the length of header and runs in bytes, from the first [`FIXED_BYTES`] bytes of a payload.
    pub fn head_bytes(fixed: &[u8; FIXED_BYTES]) -> usize {
        let count = u16::from_le_bytes([fixed[RUNS_AT], fixed[RUNS_AT + 1]]);
        FIXED_BYTES + usize::from(count) * RUN_BYTES
    }

    /// Decodes and checks header and runs of a payload whose data follows by another way. Returns the header, and the
    /// length of the data, in bytes.
    pub fn decode_head(head: &[u8], runs: &mut Vec<PageRun>) -> Result<(Self, usize), BadPages> {
        match Self::decode_runs(head, runs)? {
            (header, [], data_bytes) => Ok((header, data_bytes)),
            (_, surplus, _) => Err(BadPages::Surplus(surplus.len())),
        }
    }

    /// Decodes and checks header and runs. Returns the header, the bytes after the runs, and the length that the data
    /// of the runs has when it is not compressed, in bytes.
    pub(crate) fn decode_runs<'a>(
        payload: &'a [u8],
        runs: &mut Vec<PageRun>,
    ) -> Result<(Self, &'a [u8], usize), BadPages> {
        let mut at = Cursor(payload);
        let header = Self {
            seq: u64::from_le_bytes(at.take()?),
            round: u32::from_le_bytes(at.take()?),
            block: u16::from_le_bytes(at.take()?),
            chunk: 0,
        };
        let count = u16::from_le_bytes(at.take()?);
        let header = Self { chunk: u64::from_le_bytes(at.take()?), ..header };

        runs.clear();
        let (encoded, data) =
            at.0.split_at_checked(usize::from(count) * RUN_BYTES).ok_or(BadPages::Truncated)?;
        runs.reserve(usize::from(count));
        let mut next_page = 0;
        let mut data_bytes = 0;
        for bytes in encoded.as_chunks().0 {
            let run = PageRun::decode(*bytes, next_page)?;
            next_page = run.end_page();
            data_bytes += run.data_bytes();
            runs.push(run);
        }
        Ok((header, data, data_bytes))
    }
}

/// Encodes the payload of a `RoundEnd` frame.
pub fn encode_round_end(seq: u64, round: u32) -> [u8; ROUND_END_BYTES] {
    let mut bytes = [0; ROUND_END_BYTES];
    bytes[..8].copy_from_slice(&seq.to_le_bytes());
    bytes[8..].copy_from_slice(&round.to_le_bytes());
    bytes
}

/// Decodes sequence number and round of a `RoundEnd` payload.
pub fn decode_round_end(payload: &[u8]) -> Result<(u64, u32), BadPages> {
    let mut at = Cursor(payload);
    let end = (u64::from_le_bytes(at.take()?), u32::from_le_bytes(at.take()?));
    at.finish().map(|()| end)
}

/// Acknowledgement of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Sequence number of the last frame that has been applied; all before it have been, too.
    pub seq: u64,
    /// Time for which the destination waited for frames since the acknowledgement before, in microseconds.
    pub waited_us: u32,
}

impl Ack {
    /// Encodes the payload.
    pub fn encode(self) -> [u8; ACK_BYTES] {
        let mut bytes = [0; ACK_BYTES];
        bytes[..8].copy_from_slice(&self.seq.to_le_bytes());
        bytes[8..].copy_from_slice(&self.waited_us.to_le_bytes());
        bytes
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// Fails if the payload has another length.
    pub fn decode(payload: &[u8]) -> Result<Self, BadPages> {
        let mut at = Cursor(payload);
        let ack = Self { seq: u64::from_le_bytes(at.take()?), waited_us: u32::from_le_bytes(at.take()?) };
        at.finish().map(|()| ack)
    }
}
