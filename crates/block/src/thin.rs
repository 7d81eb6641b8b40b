//! Thin pools of LVM: their usage, and writing to a new volume of a pool without provisioning more blocks than
//! necessary.
//!
//! A new volume has no blocks; it reads as zeros where it has none. A block is provisioned by the first write to it,
//! also by a write of zeros. So zeros are not written where nothing was written before. A pool that does not zero the
//! blocks that it provisions (`skip_block_zeroing`) leaves data of another volume in the rest of a block; such a block
//! is filled with zeros first.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::image::ImageError;
use crate::nbd::{Client, NbdError};
use crate::program::run;

/// Size of a block of a pool's metadata, in bytes; the kernel supports no other.
const METADATA_BLOCK_BYTES: u64 = 4096;
/// Fewest data blocks that a metadata block maps: it has room for 252, and is split when it is full.
const BLOCKS_PER_METADATA_BLOCK: u64 = 126;
/// Metadata of a volume itself, in bytes: its details, and copies of blocks that a transaction changes.
const METADATA_OVERHEAD_BYTES: u64 = 64 << 10;

/// Usage of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

impl Usage {
    /// Returns the free bytes if `keep_free_percent` percent of all are to stay free.
    pub fn free_bytes(&self, keep_free_percent: u8) -> u64 {
        let kept = (u128::from(self.total_bytes) * u128::from(keep_free_percent)).div_ceil(100) as u64;
        self.total_bytes.saturating_sub(self.used_bytes).saturating_sub(kept)
    }
}

impl Usage {
    /// Returns true if less than `keep_free_percent` percent of all is free.
    pub fn is_below_reserve(&self, keep_free_percent: u8) -> bool {
        let free_bytes = self.total_bytes.saturating_sub(self.used_bytes);
        u128::from(free_bytes) * 100 < u128::from(self.total_bytes) * u128::from(keep_free_percent)
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} MiB", self.used_bytes >> 20, self.total_bytes >> 20)
    }
}

/// State of a thin pool in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinPool {
    /// Usage of its data blocks.
    pub data: Usage,
    /// Usage of its metadata, which maps the blocks. A pool whose metadata is full fails all its volumes.
    pub metadata: Usage,
    /// Size of a block, in bytes.
    pub block_bytes: u64,
    /// True if the kernel zeroes the unwritten part of a new block.
    pub zeroes_blocks: bool,
    /// Reason for which the pool cannot be written, in the kernel's words, if there is one.
    pub trouble: Option<String>,
}

impl ThinPool {
    /// Reads the state of a pool of a volume group from the kernel.
    ///
    /// # Errors
    /// Fails if the pool is not active, or the answer has an unknown format.
    pub fn of(group: &str, pool: &str) -> Result<Self, ImageError> {
        // LVM doubles hyphens within a name.
        let [plain_group, plain_pool] = [group, pool].map(|name| name.replace('-', "--"));
        let device = format!("{plain_group}-{plain_pool}");
        // Once a pool has volumes, it has the first name, and the plain name is a device for inspection.
        Self::at(&format!("{device}-tpool"), group, pool).or_else(|_| Self::at(&device, group, pool))
    }

    fn at(device: &str, group: &str, pool: &str) -> Result<Self, ImageError> {
        let path = format!("{group}/{pool}");
        let ask = |question| {
            let mut command = Command::new("dmsetup");
            // Reading the status is no reason to commit the pool's metadata.
            let no_flush: &[&str] = if question == "status" { &["--noflush"] } else { &[] };
            command.arg(question).args(no_flush).args(["--target", "thin-pool", device]);
            run("dmsetup", command, Path::new(&path))
        };
        let (status, table) = (ask("status")?, ask("table")?);
        Self::parse(&status, &table).ok_or_else(|| ImageError::Tool {
            tool: "dmsetup",
            message: format!("unexpected output {:?} and {:?}", status.trim(), table.trim()),
            path: path.into(),
        })
    }

    fn parse(status: &str, table: &str) -> Option<Self> {
        // START LENGTH thin-pool METADATA-DEVICE DATA-DEVICE BLOCK-SECTORS LOW-WATER FEATURES…
        let mut words = table.split_whitespace().skip(2);
        (words.next()? == "thin-pool").then_some(())?;
        let block_bytes = words.nth(2)?.parse::<u64>().ok()?.checked_mul(512).filter(|bytes| *bytes > 0)?;
        let zeroes_blocks = !words.any(|word| word == "skip_block_zeroing");
        // START LENGTH thin-pool TRANSACTION USED/TOTAL USED/TOTAL ROOT MODE …, or "Fail" or "Error" in place of all.
        let mut words = status.split_whitespace().skip(2);
        (words.next()? == "thin-pool").then_some(())?;
        let nothing = Usage { used_bytes: 0, total_bytes: 0 };
        let failed = |word: &str| Self {
            data: nothing,
            metadata: nothing,
            block_bytes,
            zeroes_blocks,
            trouble: Some(word.to_owned()),
        };
        let first = words.next()?;
        if first.parse::<u64>().is_err() {
            return Some(failed(first));
        }
        let usage = |words: &str, unit_bytes: u64| {
            let (used, total) = words.split_once('/')?;
            let [used, total] = [used, total].map(|word| word.parse::<u64>().ok());
            let bytes = |blocks: Option<u64>| blocks?.checked_mul(unit_bytes);
            Some(Usage { used_bytes: bytes(used)?, total_bytes: bytes(total)? })
        };
        let metadata = usage(words.next()?, METADATA_BLOCK_BYTES)?;
        let data = usage(words.next()?, block_bytes)?;
        let rest: Vec<_> = words.skip(1).collect();
        let trouble = match rest.first()? {
            &"rw" if rest.contains(&"needs_check") => Some("needs_check"),
            &"rw" => None,
            word => Some(*word),
        };
        let trouble = trouble.map(str::to_owned);
        Some(Self { data, metadata, block_bytes, zeroes_blocks, trouble })
    }

    /// Returns the most metadata, in bytes, that volumes with `data_bytes` of content need.
    pub fn metadata_needed_bytes(&self, data_bytes: u64) -> u64 {
        let blocks = data_bytes.div_ceil(self.block_bytes).div_ceil(BLOCKS_PER_METADATA_BLOCK);
        blocks.saturating_mul(METADATA_BLOCK_BYTES).saturating_add(METADATA_OVERHEAD_BYTES)
    }
}

/// Destination of the writes to a volume.
pub trait VolumeWriter {
    /// Returns the length of the volume, in bytes.
    fn size_bytes(&self) -> u64;

    /// Writes bytes.
    ///
    /// # Errors
    /// Fails if the bytes are not written.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), NbdError>;

    /// Writes zeros and provisions blocks where there are none; no block is released.
    ///
    /// # Errors
    /// Fails if the zeros are not written.
    fn allocate_zeroes(&mut self, range: Range<u64>) -> Result<(), NbdError>;
}

impl VolumeWriter for Client {
    fn size_bytes(&self) -> u64 {
        Client::size_bytes(self)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), NbdError> {
        Client::write(self, offset, data)
    }

    fn allocate_zeroes(&mut self, range: Range<u64>) -> Result<(), NbdError> {
        Client::allocate_zeroes(self, range)
    }
}

/// A new thin volume that several threads fill, each with a part of its own.
#[derive(Debug)]
pub struct NewVolume {
    block_bytes: u64,
    zeroes_blocks: bool,
    /// One bit for each block, set if it has been written. Locked while a block is filled, so that no other thread
    /// writes to it before.
    provisioned: Mutex<Vec<u64>>,
}

impl NewVolume {
    /// Creates the state of a volume of `pool` to which nothing was written yet.
    pub fn new(pool: &ThinPool) -> Self {
        let (block_bytes, zeroes_blocks) = (pool.block_bytes, pool.zeroes_blocks);
        Self { block_bytes, zeroes_blocks, provisioned: Mutex::default() }
    }

    /// Fills the first block where the pool does not zero it: LVM writes to the beginning of that block when it
    /// creates the volume, and the rest has data of another volume.
    ///
    /// # Errors
    /// Fails if the write fails.
    pub fn begin(&self, to: &mut impl VolumeWriter) -> Result<(), NbdError> {
        if self.zeroes_blocks {
            return Ok(());
        }
        let mut provisioned = self.lock();
        to.allocate_zeroes(0..self.block_bytes.min(to.size_bytes()))?;
        set(&mut provisioned, 0);
        Ok(())
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// Fails if the bytes are not written.
    pub fn write(&self, offset: u64, data: &[u8], to: &mut impl VolumeWriter) -> Result<(), NbdError> {
        let range = offset..offset + data.len() as u64;
        {
            let mut provisioned = self.lock();
            for block in self.blocks(&range) {
                if is_set(&provisioned, block) {
                    continue;
                }
                let mut whole = self.block(block);
                whole.end = whole.end.min(to.size_bytes());
                let is_written_whole = range.start <= whole.start && whole.end <= range.end;
                if !self.zeroes_blocks && !is_written_whole {
                    to.allocate_zeroes(whole)?;
                }
                set(&mut provisioned, block);
            }
        }
        to.write(offset, data)
    }

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// Fails if the write fails.
    pub fn write_zeroes(&self, range: Range<u64>, to: &mut impl VolumeWriter) -> Result<(), NbdError> {
        let mut written: Vec<Range<u64>> = Vec::new();
        {
            let provisioned = self.lock();
            for block in self.blocks(&range).filter(|block| is_set(&provisioned, *block)) {
                let whole = self.block(block);
                let part = whole.start.max(range.start)..whole.end.min(range.end);
                match written.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => written.push(part),
                }
            }
        }
        written.into_iter().try_for_each(|part| to.allocate_zeroes(part))
    }

    fn blocks(&self, range: &Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return 0..0;
        }
        range.start / self.block_bytes..range.end.div_ceil(self.block_bytes)
    }

    fn block(&self, number: u64) -> Range<u64> {
        let start = number * self.block_bytes;
        start..start.saturating_add(self.block_bytes)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.provisioned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_set(words: &[u64], bit: u64) -> bool {
    words.get((bit / 64) as usize).is_some_and(|word| word & (1 << (bit % 64)) != 0)
}

fn set(words: &mut Vec<u64>, bit: u64) {
    let word = (bit / 64) as usize;
    if words.len() <= word {
        words.resize(word + 1, 0);
    }
    words[word] |= 1 << (bit % 64);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "0 524288 thin-pool 253:0 253:1 128 0 0 \n";

    #[test]
    fn what_the_kernel_says_of_a_pool() {
        let status =
            "0 524288 thin-pool 1 112/1024 345/4096 - rw discard_passdown queue_if_no_space - 256 \n";
        let pool = ThinPool::parse(status, TABLE).unwrap();
        assert_eq!(pool.block_bytes, 64 << 10);
        assert_eq!(pool.data, Usage { used_bytes: 345 << 16, total_bytes: 256 << 20 });
        assert_eq!(pool.metadata, Usage { used_bytes: 112 << 12, total_bytes: 4 << 20 });
        assert!(pool.zeroes_blocks && pool.trouble.is_none());

        let careless = TABLE.replace("128 0 0", "128 0 1 skip_block_zeroing");
        assert!(!ThinPool::parse(status, &careless).unwrap().zeroes_blocks);
        for (word, in_place_of) in [("out_of_data_space", "rw"), ("ro", "rw"), ("needs_check", "- 256")] {
            let bad = status.replace(in_place_of, word);
            assert_eq!(ThinPool::parse(&bad, TABLE).unwrap().trouble.as_deref(), Some(word), "{bad}");
        }
        let failed = ThinPool::parse("0 524288 thin-pool Fail\n", TABLE).unwrap();
        assert_eq!(failed.trouble.as_deref(), Some("Fail"));
        for nonsense in ["", "0 1 linear", "0 1 thin-pool 1 1/x 2/3 - rw", "0 1 thin-pool 1 1/2"] {
            assert_eq!(ThinPool::parse(nonsense, TABLE), None, "{nonsense:?}");
        }
        assert_eq!(ThinPool::parse(status, "0 524288 linear 7:0 0"), None);
    }

    #[test]
    fn a_margin_is_not_free() {
        let usage = Usage { used_bytes: 90, total_bytes: 101 };
        assert_eq!((usage.free_bytes(0), usage.free_bytes(5), usage.free_bytes(50)), (11, 5, 0));
        assert!(!usage.is_below_reserve(0) && !usage.is_below_reserve(10) && usage.is_below_reserve(11));
    }

    /// Fake of a volume in a pool whose new blocks have data of other volumes, where they are not zeroed.
    struct Kernel {
        bytes: Vec<u8>,
        provisioned: Vec<bool>,
        zeroes_blocks: bool,
    }

    const BLOCK: usize = 8;

    impl Kernel {
        fn new(bytes: usize, zeroes_blocks: bool) -> Self {
            Self { bytes: vec![0; bytes], provisioned: vec![false; bytes.div_ceil(BLOCK)], zeroes_blocks }
        }

        fn put(&mut self, range: Range<usize>, byte: impl Fn(usize) -> u8) {
            for at in range.clone() {
                let block = at / BLOCK;
                if !self.provisioned[block] {
                    self.provisioned[block] = true;
                    let end = ((block + 1) * BLOCK).min(self.bytes.len());
                    let others = if self.zeroes_blocks { 0 } else { 0xee };
                    self.bytes[block * BLOCK..end].fill(others);
                }
                self.bytes[at] = byte(at - range.start);
            }
        }
    }

    impl VolumeWriter for Kernel {
        fn size_bytes(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), NbdError> {
            let start = offset as usize;
            self.put(start..start + data.len(), |at| data[at]);
            Ok(())
        }

        fn allocate_zeroes(&mut self, range: Range<u64>) -> Result<(), NbdError> {
            self.put(range.start as usize..range.end as usize, |_| 0);
            Ok(())
        }
    }

    fn pool(zeroes_blocks: bool) -> ThinPool {
        let usage = Usage { used_bytes: 0, total_bytes: 1 << 20 };
        ThinPool { data: usage, metadata: usage, block_bytes: BLOCK as u64, zeroes_blocks, trouble: None }
    }

    proptest::proptest! {
        /// After any writes in any order the volume has their data, zeros elsewhere, and no unnecessary block.
        #[test]
        fn a_volume_has_what_was_written_and_no_more(
            zeroes_blocks: bool,
            writes in proptest::collection::vec((0..61_usize, 1..25_usize, 0..3_u8), 1..30),
        ) {
            let volume = NewVolume::new(&pool(zeroes_blocks));
            let mut kernel = Kernel::new(61, zeroes_blocks);
            // LVM writes to the first block.
            kernel.put(0..4, |_| 0);
            volume.begin(&mut kernel).unwrap();
            let (mut expected, mut touched) = (vec![0_u8; 61], [false; 8]);
            touched[0] = true;
            for (start, len, byte) in writes {
                let range = start..(start + len).min(61);
                expected[range.clone()].fill(byte);
                if byte == 0 {
                    volume.write_zeroes(range.start as u64..range.end as u64, &mut kernel).unwrap();
                } else {
                    range.clone().for_each(|at| touched[at / BLOCK] = true);
                    volume.write(range.start as u64, &vec![byte; range.len()], &mut kernel).unwrap();
                }
            }
            proptest::prop_assert_eq!(&kernel.bytes, &expected);
            proptest::prop_assert_eq!(&kernel.provisioned[..], &touched[..]);
        }
    }

    #[test]
    fn metadata_for_blocks() {
        let pool = pool(true);
        assert_eq!(pool.metadata_needed_bytes(0), METADATA_OVERHEAD_BYTES);
        let many = pool.metadata_needed_bytes(BLOCK as u64 * 127);
        assert_eq!(many, METADATA_OVERHEAD_BYTES + 2 * METADATA_BLOCK_BYTES);
    }
}
