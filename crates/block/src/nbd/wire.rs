//! NBD's numbers and layouts (the protocol's `doc/proto.md`), as far as they are used here. All of them are
//! big-endian.

/// First of the two words of a server's greeting: `NBDMAGIC`.
pub(super) const GREETING: u64 = 0x4e42_444d_4147_4943;
/// The second word, and the beginning of each option: `IHAVEOPT`.
pub(super) const OPTION: u64 = 0x4948_4156_454f_5054;
/// The beginning of the answer to an option.
pub(super) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// The beginning of a request.
pub(super) const REQUEST: u32 = 0x2560_9513;
/// The beginning of a simple reply.
pub(super) const SIMPLE_REPLY: u32 = 0x6744_6698;
/// The beginning of a chunk of a structured reply.
pub(super) const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Flags of the greeting, both ways: fixed newstyle, and no 124 zeros after the export's size.
pub(super) const FIXED_NEWSTYLE: u16 = 1;
pub(super) const NO_ZEROES: u16 = 2;

pub(super) const OPTION_GO: u32 = 7;
pub(super) const OPTION_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPTION_SET_META_CONTEXT: u32 = 10;

pub(super) const REPLY_ACK: u32 = 1;
pub(super) const REPLY_INFO: u32 = 3;
pub(super) const REPLY_META_CONTEXT: u32 = 4;
/// Replies from here on are errors; most carry a message.
pub(super) const REPLY_ERROR: u32 = 1 << 31;

pub(super) const INFO_EXPORT: u16 = 0;

/// Commands to an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    WriteZeroes = 6,
    BlockStatus = 7,
}

impl Command {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Disconnect => "disconnect",
            Self::Flush => "flush",
            Self::WriteZeroes => "write zeros",
            Self::BlockStatus => "report the allocated parts",
        }
    }
}

/// The last chunk of a structured reply.
pub(super) const CHUNK_DONE: u16 = 1;

pub(super) const CHUNK_NONE: u16 = 0;
pub(super) const CHUNK_DATA: u16 = 1;
pub(super) const CHUNK_HOLE: u16 = 2;
pub(super) const CHUNK_STATUS: u16 = 5;
/// Chunks from here on are errors: errno, length of the message, message.
pub(super) const CHUNK_ERROR: u16 = 1 << 15;

/// Reads numbers from the front of bytes.
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }
}
