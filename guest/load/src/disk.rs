//! Reads of the first disk past the page cache, straight into memory that is checked later.
//!
//! Such a read is DMA: the page is written when the disk answers, not when the program asks. Each slot of the buffer is therefore checked not
//! after its read but before it is used again, long after a migration may have lost it, and all at once when asked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread;

use whimbrel_guest_load::{PAGE_BYTES, mix, wrong_disk_block};

/// Bytes of a read.
const READ: usize = 16 << 10;
/// Blocks of a read.
const BLOCKS: u64 = (READ / PAGE_BYTES) as u64;
/// `O_DIRECT` on x86-64.
const O_DIRECT: i32 = 0o40000;
const PATH: &str = "/dev/vda";

/// A piece of memory into which the disk may write by itself.
#[repr(align(4096))]
#[derive(Clone)]
struct Slot([u8; READ]);

/// Counts that all readers share.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) reads: AtomicU64,
    pub(crate) wrong: AtomicU64,
}

/// The readers.
#[derive(Debug)]
pub(crate) struct Readers {
    pub(crate) counts: Arc<Counts>,
    asks: Vec<mpsc::Sender<mpsc::Sender<u64>>>,
}

impl Readers {
    /// Starts `threads` readers that share `mib` of memory.
    pub(crate) fn start(threads: usize, mib: usize) -> io::Result<Self> {
        let counts = Arc::new(Counts::default());
        let mut asks = Vec::new();
        for n in 0..threads {
            let file = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(PATH)?;
            let slots = ((mib << 20) / READ / threads).max(2);
            let (ask, asked) = mpsc::channel();
            asks.push(ask);
            let reader = Reader {
                blocks: disk_blocks()?,
                file,
                slots: vec![Slot([0; READ]); slots],
                holds: vec![None; slots],
                counts: Arc::clone(&counts),
            };
            thread::spawn(move || reader.run(mix(n as u64 + 1), &asked));
        }
        Ok(Self { counts, asks })
    }

    /// Has every reader check all it has read; answers how many blocks that were.
    pub(crate) fn check(&self) -> u64 {
        let (answer, answers) = mpsc::channel();
        let asked = self.asks.iter().filter(|ask| ask.send(answer.clone()).is_ok()).count();
        answers.iter().take(asked).sum()
    }
}

fn disk_blocks() -> io::Result<u64> {
    let sectors = std::fs::read_to_string("/sys/block/vda/size")?;
    let sectors: u64 = sectors.trim().parse().map_err(io::Error::other)?;
    Ok(sectors * 512 / PAGE_BYTES as u64)
}

struct Reader {
    file: File,
    blocks: u64,
    slots: Vec<Slot>,
    /// The first block that each slot was read from.
    holds: Vec<Option<u64>>,
    counts: Arc<Counts>,
}

impl Reader {
    fn run(mut self, mut random: u64, asked: &mpsc::Receiver<mpsc::Sender<u64>>) {
        loop {
            while let Ok(answer) = asked.try_recv() {
                let blocks = (0..self.slots.len()).map(|slot| self.check(slot)).sum();
                let _ = answer.send(blocks);
            }
            random = mix(random);
            let slot = (random >> 32) as usize % self.slots.len();
            let block = (random & 0xffff_ffff) % (self.blocks / BLOCKS).max(1) * BLOCKS;
            self.check(slot);
            self.holds[slot] = None;
            match self.file.read_exact_at(&mut self.slots[slot].0, block * PAGE_BYTES as u64) {
                Ok(()) => {
                    self.holds[slot] = Some(block);
                    self.counts.reads.fetch_add(1, Relaxed);
                }
                Err(error) => {
                    println!("DISK error {error}");
                    return;
                }
            }
        }
    }

    fn check(&self, slot: usize) -> u64 {
        let Some(first) = self.holds[slot] else { return 0 };
        if let Some(block) = wrong_disk_block(first, &self.slots[slot].0)
            && self.counts.wrong.fetch_add(1, Relaxed) < crate::TOLD
        {
            println!("WRONG block {block} of the disk in memory");
        }
        BLOCKS
    }
}
