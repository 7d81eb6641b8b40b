//! Limits on the contents of messages, beyond their form. The link checks every message on arrival, so that all
//! receivers can rely on these limits. The receiver checks that the contents are true.

mod fleet;

use std::collections::BTreeSet;

use crate::ids::Incarnation;
use crate::limits;
use crate::message::{
    Acceptance, CardClaims, CardFrames, CommandVerb, HashedRun, Message, NetworkProbe, Ownership, ProbedCard,
    Proposal, ProposedDisk, RamBlock, RegistryReply, RegistryRequest, Verdict,
};
use crate::missing_pages::ENTRY_BYTES;

/// Number of digits of a chunk's hash (XXH3, 64 bits).
const HASH_DIGITS: usize = 16;

/// Number of digits of a page's content hash (BLAKE3, 48 bits).
const CONTENT_HASH_DIGITS: usize = 12;

/// Number of digits of a device state's digest (BLAKE3).
const DIGEST_DIGITS: usize = 64;

/// Error of a message that violates a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Number of data streams: zero, or too many.
    #[error("{0} data streams; 1 to {max} are allowed", max = limits::STREAMS)]
    Streams(u16),
    /// Number of RAM blocks: zero, or too many.
    #[error("{0} RAM blocks; 1 to {max} are allowed", max = limits::RAM_BLOCKS)]
    RamBlocks(usize),
    /// A text is empty, too long, or has control characters.
    #[error("{field} is empty, too long or has control characters")]
    Text {
        /// Description of the text.
        field: &'static str,
    },
    /// Two RAM blocks have the same name.
    #[error("RAM block {0:?} is listed twice")]
    DuplicateRamBlock(String),
    /// Sizes of a RAM block: its length is not a multiple of the page size, or its pages have no valid size.
    #[error("RAM block {name:?} of {bytes} bytes in pages of {page_bytes}")]
    RamBlockSize {
        /// Name of the block.
        name: String,
        /// Claimed length, in bytes.
        bytes: u64,
        /// Claimed page size, in bytes.
        page_bytes: u64,
    },
    /// Two disks have the same name.
    #[error("disk {0:?} is listed twice")]
    DuplicateDisk(String),
    /// Length of a disk: not a multiple of a sector, or beyond the limit.
    #[error("disk {name:?} of {bytes} bytes")]
    DiskSize {
        /// Name of the disk.
        name: String,
        /// Claimed length, in bytes.
        bytes: u64,
    },
    /// Size of the RAM, beyond the limit.
    #[error("more than {max} bytes of RAM", max = limits::RAM_BYTES)]
    RamBytes,
    /// Index of a RAM block that no list can have.
    #[error("RAM block {0}; at most {max} are allowed", max = limits::RAM_BLOCKS)]
    BlockIndex(u16),
    /// Number of a chunk that no block can have.
    #[error("chunk {0} is beyond the end of memory")]
    Chunk(u64),
    /// A list has too many entries.
    #[error("{count} entries in {field}; at most {max} are allowed")]
    TooMany {
        /// Description of the list.
        field: &'static str,
        /// Number of entries.
        count: usize,
        /// Highest permitted number.
        max: usize,
    },
    /// A text is not a hexadecimal number of the required length.
    #[error("{field} is not {digits} hexadecimal digits (0-9, a-f)")]
    Hex {
        /// Description of the text.
        field: &'static str,
        /// Required number of digits.
        digits: usize,
    },
    /// Length of the device state: zero, or beyond the limit.
    #[error("device state of {0} bytes; 1 to {max} are allowed", max = limits::DEVICE_STATE_BYTES)]
    DeviceStateBytes(u64),
    /// Length of the list of missing pages: beyond the limit, or not a multiple of an entry's length.
    #[error(
        "a list of missing pages of {0} bytes; at most {max} are allowed",
        max = limits::MISSING_PAGES_BYTES
    )]
    MissingPagesBytes(u64),
    /// Length of the list of pages to discard: zero, beyond the limit, or not a multiple of an entry's length.
    #[error(
        "a list of pages to discard of {0} bytes; at most {max} are allowed",
        max = limits::DISCARD_BYTES
    )]
    DiscardBytes(u64),
    /// Length of the changes to tracked connections: zero, or beyond the limit.
    #[error("{0} bytes of tracked connections; 1 to {max} are allowed", max = limits::FLOWS_BYTES)]
    FlowsBytes(u64),
    /// Length of the data by which a link is measured: zero, or beyond the limit.
    #[error("{0} bytes to measure a link; 1 to {max} are allowed", max = limits::MEASURED_BYTES)]
    MeasuredBytes(u64),
    /// The process id is 0.
    #[error("process id 0")]
    Pid,
}

impl Message {
    /// Checks the contents of the message against the protocol's limits.
    #[expect(clippy::too_many_lines, reason = "one arm for each message")]
    pub fn validate(&self) -> Result<(), Invalid> {
        match self {
            Self::Propose(proposal) => proposal.validate(),
            Self::QueryTemplates { hashes } => {
                at_most("queried pages", hashes.len(), limits::QUERIED_PAGES)?;
                hashes.iter().try_for_each(|digits| hex("a page's content hash", digits, CONTENT_HASH_DIGITS))
            }
            Self::TemplatePages { runs, .. } => {
                let digits: usize = runs.iter().map(|run| run.hashes.len()).sum();
                at_most("pages of a template", digits.div_ceil(CONTENT_HASH_DIGITS), limits::TEMPLATE_PAGES)?;
                runs.iter().try_for_each(HashedRun::validate)
            }
            Self::Verify { block, first_chunk, hashes } => {
                block_index(*block)?;
                at_most("hashes", hashes.len(), limits::HASHES)?;
                chunk(first_chunk.saturating_add(hashes.len() as u64))?;
                hashes.iter().try_for_each(|hash| hex("a chunk's hash", hash, HASH_DIGITS))
            }
            Self::Verified { different_chunks } => {
                at_most("different chunks", different_chunks.len(), limits::HASHES)?;
                different_chunks.iter().try_for_each(|&index| chunk(index))
            }
            Self::Discard { bytes, digest } => {
                if !(1..=limits::DISCARD_BYTES).contains(bytes) || !bytes.is_multiple_of(ENTRY_BYTES as u64) {
                    return Err(Invalid::DiscardBytes(*bytes));
                }
                hex("the digest of pages to discard", digest, DIGEST_DIGITS)
            }
            Self::MissingPages { bytes, digest, .. } => {
                if *bytes > limits::MISSING_PAGES_BYTES || !bytes.is_multiple_of(ENTRY_BYTES as u64) {
                    return Err(Invalid::MissingPagesBytes(*bytes));
                }
                hex("the digest of missing pages", digest, DIGEST_DIGITS)
            }
            Self::RequestPages { pages } => {
                at_most("requested pages", pages.len(), limits::REQUESTED_PAGES)?;
                pages.iter().try_for_each(|wanted| {
                    block_index(wanted.block)?;
                    chunk(wanted.page / limits::CHUNK_PAGES)
                })
            }
            Self::Claims { cards } => {
                at_most("network cards", cards.len(), limits::NETWORK_CARDS)?;
                let claimed = |card: &CardClaims| {
                    at_most("claimed addresses", card.addresses.len(), limits::CLAIMED_ADDRESSES)
                };
                cards.iter().try_for_each(claimed)
            }
            Self::Flows { bytes } if !(1..=limits::FLOWS_BYTES).contains(bytes) => {
                Err(Invalid::FlowsBytes(*bytes))
            }
            Self::MeasureLink { bytes } if !(1..=limits::MEASURED_BYTES).contains(bytes) => {
                Err(Invalid::MeasuredBytes(*bytes))
            }
            Self::FlowsInstalled { failed, .. } => {
                at_most("tracked connections", failed.len(), limits::FAILED_FLOWS)?;
                failed.iter().try_for_each(|failed| {
                    text("a tracked connection", &failed.flow, limits::FLOW_TEXT_BYTES)?;
                    text("the reason of a tracked connection", &failed.reason, limits::FLOW_TEXT_BYTES)
                })
            }
            Self::FirstFrames { cards, .. } => {
                at_most("network cards", cards.len(), limits::NETWORK_CARDS)?;
                let named = |card: &CardFrames| {
                    text("a MAC address", &card.mac, limits::NAME_BYTES)?;
                    text("an interface", &card.interface, limits::NAME_BYTES)
                };
                cards.iter().try_for_each(named)
            }
            Self::Running { unexpected_page: Some(page), .. }
            | Self::Incomplete { unexpected_page: Some(page), .. } => {
                block_index(page.block)?;
                chunk(page.page / limits::CHUNK_PAGES)
            }
            Self::DeviceState { bytes, state_bytes, digest } => {
                let is_impossible = |bytes: &&u64| **bytes == 0 || **bytes > limits::DEVICE_STATE_BYTES;
                if let Some(bytes) = [bytes, state_bytes].into_iter().find(is_impossible) {
                    return Err(Invalid::DeviceStateBytes(*bytes));
                }
                hex("the device state's digest", digest, DIGEST_DIGITS)
            }
            // An agent that was restarted after it has loaded the state does not know the digest any more.
            Self::Ready { incarnation, digest, .. } if digest.is_empty() => incarnation.validate(),
            Self::Ready { incarnation, digest, .. } => {
                incarnation.validate()?;
                hex("the device state's digest", digest, DIGEST_DIGITS)
            }
            Self::Go { incarnation, .. }
            | Self::Verdict { verdict: Verdict::Committed { incarnation, .. }, .. } => incarnation.validate(),
            Self::RegistryRequest(RegistryRequest::CompareAndSet { new: ownership, .. })
            | Self::RegistryReply(RegistryReply::Record { record: Some(ownership) }) => ownership.validate(),
            Self::AskTunnelEnd(request) => text("a MAC address", &request.card, limits::NAME_BYTES),
            Self::Accept(acceptance) => acceptance.validate(),
            Self::FleetReport { report, .. } => report.validate(),
            Self::FleetCommand { command: CommandVerb::Facts { commands }, .. } => {
                at_most("commands", commands.len(), limits::FLEET_COMMANDS)
            }
            Self::Reject { .. }
            | Self::Resume
            | Self::Resumed
            | Self::Discarded { .. }
            | Self::PagesComplete
            | Self::Flows { .. }
            | Self::MeasureLink { .. }
            | Self::LinkMeasured { .. }
            | Self::Frozen { .. }
            | Self::Running { .. }
            | Self::Incomplete { .. }
            | Self::AskRedirection
            | Self::RedirectionStands { .. }
            | Self::TunnelEnd { .. }
            | Self::Repoint { .. }
            | Self::Repointed { .. }
            | Self::ControllerTerm { .. }
            | Self::FleetCommand { .. }
            | Self::HostEvacuation(_)
            | Self::Refused { .. }
            | Self::Crashed { .. }
            | Self::Inquire { .. }
            | Self::Abort { .. }
            | Self::Ask { .. }
            | Self::Verdict { verdict: Verdict::Aborted | Verdict::Returned | Verdict::Undecided, .. }
            | Self::Ping
            | Self::Pong
            | Self::RegistryRequest(RegistryRequest::Read { .. })
            | Self::RegistryReply(
                RegistryReply::Set | RegistryReply::Failed { .. } | RegistryReply::Record { record: None },
            ) => Ok(()),
        }
    }
}

impl Proposal {
    /// Checks streams, RAM blocks and texts. The crate that knows QEMU checks facts and description.
    pub fn validate(&self) -> Result<(), Invalid> {
        text("the address for answers", &self.reply_to, limits::ADDRESS_BYTES)?;
        if !(1..=limits::STREAMS).contains(&self.streams) {
            return Err(Invalid::Streams(self.streams));
        }
        if !(1..=limits::RAM_BLOCKS).contains(&self.ram.len()) {
            return Err(Invalid::RamBlocks(self.ram.len()));
        }
        let mut seen = BTreeSet::new();
        let mut ram_bytes = 0_u64;
        for block in &self.ram {
            block.validate()?;
            if !seen.insert(&block.name) {
                return Err(Invalid::DuplicateRamBlock(block.name.clone()));
            }
            ram_bytes = ram_bytes.saturating_add(block.bytes);
        }
        if ram_bytes > limits::RAM_BYTES {
            return Err(Invalid::RamBytes);
        }
        at_most("disks", self.disks.len(), limits::DISKS)?;
        let mut seen = BTreeSet::new();
        for disk in &self.disks {
            disk.validate()?;
            if !seen.insert(&disk.name) {
                return Err(Invalid::DuplicateDisk(disk.name.clone()));
            }
        }
        self.probe.as_ref().map_or(Ok(()), NetworkProbe::validate)
    }
}

impl NetworkProbe {
    /// Checks the cards' texts and lists. Numbers of VLANs are only compared.
    pub fn validate(&self) -> Result<(), Invalid> {
        at_most("probed network cards", self.cards.len(), limits::NETWORK_CARDS)?;
        self.cards.iter().try_for_each(ProbedCard::validate)
    }
}

impl ProbedCard {
    fn validate(&self) -> Result<(), Invalid> {
        text("a MAC address", &self.mac, limits::NAME_BYTES)?;
        text("an interface", &self.interface, limits::NAME_BYTES)?;
        text("a bridge", &self.bridge, limits::NAME_BYTES)?;
        at_most("probed VLANs", self.tagged.len(), limits::PROBED_VLANS)?;
        at_most("gateways", self.gateways.len(), limits::PROBED_GATEWAYS)
    }
}

impl HashedRun {
    fn validate(&self) -> Result<(), Invalid> {
        let pages = (self.hashes.len() / CONTENT_HASH_DIGITS).max(1);
        hex("content hashes of pages", &self.hashes, pages * CONTENT_HASH_DIGITS)?;
        let end = self.first_page.checked_add(pages as u64);
        end.filter(|end| *end <= limits::DISK_BYTES / limits::PAGE_BYTES)
            .map(drop)
            .ok_or(Invalid::Chunk(self.first_page / limits::CHUNK_PAGES))
    }
}

impl ProposedDisk {
    /// Checks name and length.
    pub fn validate(&self) -> Result<(), Invalid> {
        const SECTOR_BYTES: u64 = 512;
        text("a disk's name", &self.name, limits::DISK_NAME_BYTES)?;
        let whole = self.bytes > 0 && self.bytes.is_multiple_of(SECTOR_BYTES);
        if whole && self.bytes <= limits::DISK_BYTES {
            return Ok(());
        }
        Err(Invalid::DiskSize { name: self.name.clone(), bytes: self.bytes })
    }
}

impl Acceptance {
    /// Checks the lists of disks and of codecs. The source checks that it has proposed the disks.
    pub fn validate(&self) -> Result<(), Invalid> {
        at_most("codecs", self.codecs.len(), limits::CODECS)?;
        self.codecs.iter().try_for_each(|codec| text("a codec's name", codec, limits::NAME_BYTES))?;
        at_most("copied disks", self.copied.len(), limits::DISKS)?;
        self.copied.iter().try_for_each(|disk| text("a disk's name", &disk.name, limits::DISK_NAME_BYTES))
    }
}

impl RamBlock {
    /// Checks name and sizes.
    pub fn validate(&self) -> Result<(), Invalid> {
        text("a RAM block's name", &self.name, limits::RAM_BLOCK_NAME_BYTES)?;
        let whole_pages = self.bytes > 0 && self.bytes.is_multiple_of(limits::PAGE_BYTES);
        let known_pages = self.page_bytes.is_power_of_two()
            && (limits::PAGE_BYTES..=limits::HUGE_PAGE_BYTES).contains(&self.page_bytes);
        if whole_pages && known_pages {
            return Ok(());
        }
        Err(Invalid::RamBlockSize { name: self.name.clone(), bytes: self.bytes, page_bytes: self.page_bytes })
    }
}

impl Incarnation {
    /// Checks the fields of the process's identity.
    pub fn validate(&self) -> Result<(), Invalid> {
        text("a boot id", &self.boot_id, limits::NAME_BYTES)?;
        if self.pid == 0 { Err(Invalid::Pid) } else { Ok(()) }
    }
}

impl Ownership {
    /// Checks the offer, if there is one.
    pub fn validate(&self) -> Result<(), Invalid> {
        match &self.offer {
            Some(offer) => offer.incarnation.validate(),
            None => Ok(()),
        }
    }
}

fn text(field: &'static str, text: &str, max_bytes: usize) -> Result<(), Invalid> {
    let good = !text.is_empty() && text.len() <= max_bytes && !text.chars().any(char::is_control);
    if good { Ok(()) } else { Err(Invalid::Text { field }) }
}

fn hex(field: &'static str, text: &str, digits: usize) -> Result<(), Invalid> {
    let good = text.len() == digits && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    if good { Ok(()) } else { Err(Invalid::Hex { field, digits }) }
}

fn at_most(field: &'static str, count: usize, max: usize) -> Result<(), Invalid> {
    if count > max { Err(Invalid::TooMany { field, count, max }) } else { Ok(()) }
}

fn block_index(index: u16) -> Result<(), Invalid> {
    let blocks = limits::RAM_BLOCKS + limits::DISKS;
    if usize::from(index) < blocks { Ok(()) } else { Err(Invalid::BlockIndex(index)) }
}

fn chunk(index: u64) -> Result<(), Invalid> {
    let most_bytes = limits::RAM_BYTES.max(limits::DISK_BYTES);
    if index <= most_bytes / limits::CHUNK_BYTES { Ok(()) } else { Err(Invalid::Chunk(index)) }
}
