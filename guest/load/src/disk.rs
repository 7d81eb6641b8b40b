//! Reads and writes of the first disk past the page cache.
//!
//! A read goes straight into memory that is checked later. It is DMA: the page is written when the disk completes the
//! request, not when the program submits it. Each slot of the buffer is therefore checked not after its read but before
//! it is used again, long after a migration may have lost it, and all at once on request.
//!
//! A writer rewrites its own part of the disk and reads each place back before it writes there again: data that the
//! disk has acknowledged must be there, on either host.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::options::Options;
use whimbrel_guest_load::{BLOCKS_AT_ONCE, PAGE_BYTES, fill_disk, mix, wrong_disk_block};

/// Bytes of a read or a write.
const READ: usize = BLOCKS_AT_ONCE * PAGE_BYTES;
/// Blocks of a read or a write.
const BLOCKS: u64 = BLOCKS_AT_ONCE as u64;
/// Places that are read at once when all of them are checked: a slow disk limits the number of requests.
const CHECKED_AT_ONCE: usize = 64;
/// `O_DIRECT` and `O_DSYNC` on x86-64.
const O_DIRECT: i32 = 0o40000;
const O_DSYNC: i32 = 0o10000;
/// Time between two writes of a thread: the disk is written to, but has time for other work.
const PAUSE: Duration = Duration::from_millis(5);
const PATH: &str = "/dev/vda";

/// A piece of memory into which the disk may write by itself.
#[repr(align(4096))]
#[derive(Clone)]
struct ReadBuffer([u8; READ]);

/// A writer's buffer for writes and for data read back.
#[repr(align(4096))]
struct WriteBuffers([[u8; READ]; CHECKED_AT_ONCE]);

/// Counts that all threads share.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    /// Wrong blocks, and requests that failed.
    pub(crate) wrong: AtomicU64,
}

impl Counts {
    fn record_wrong(&self, what: &str) {
        if self.wrong.fetch_add(1, Relaxed) < crate::MOST_REPORTED {
            println!("WRONG {what}");
        }
    }

    /// Counts a completed request. A failed one counts as wrong as lost data does.
    fn done(&self, result: io::Result<()>, what: &AtomicU64) -> bool {
        match result {
            Ok(()) => {
                what.fetch_add(1, Relaxed);
                true
            }
            Err(error) => {
                self.record_wrong(&format!("answer of the disk: {error}"));
                false
            }
        }
    }
}

/// The readers and writers.
#[derive(Debug)]
pub(crate) struct DiskLoad {
    pub(crate) counts: Arc<Counts>,
    asks: Vec<mpsc::Sender<mpsc::Sender<u64>>>,
}

impl DiskLoad {
    /// Starts readers that share `mib` of memory, and writers that share the second half of the disk.
    #[expect(clippy::large_stack_arrays, reason = "a megabyte, on the stack of the first thread")]
    pub(crate) fn start(options: &Options) -> io::Result<Self> {
        let (readers, writers) = (options.disk_threads, options.disk_writers);
        let counts = Arc::new(Counts::default());
        let places = disk_blocks()? / BLOCKS;
        let read_only = if writers > 0 { places / 2 } else { places };
        let mut asks = Vec::new();
        let mut asked = || {
            let (ask, asked) = mpsc::channel();
            asks.push(ask);
            asked
        };
        for n in 0..readers {
            let slots = ((options.disk_mib << 20) / READ / readers).max(2);
            let reader = Reader {
                file: open(false, 0)?,
                places: read_only.max(1),
                slots: vec![ReadBuffer([0; READ]); slots],
                holds: vec![None; slots],
                pause: Duration::from_millis(options.disk_pause_ms),
                counts: Arc::clone(&counts),
            };
            let asked = asked();
            thread::spawn(move || reader.run(mix(n as u64 + 1), &asked));
        }
        for n in 0..writers as u64 {
            let share = (places - read_only) / writers as u64;
            let writer = Writer {
                file: open(true, if options.disk_sync { O_DSYNC } else { 0 })?,
                first: (read_only + n * share) * BLOCKS,
                versions: vec![0; share as usize],
                buffer: Box::new(WriteBuffers([[0; READ]; CHECKED_AT_ONCE])),
                counts: Arc::clone(&counts),
            };
            let asked = asked();
            thread::spawn(move || writer.run(mix(!n), &asked));
        }
        Ok(Self { counts, asks })
    }

    /// Makes every reader check all it has read, and every writer all it may have written.
    pub(crate) fn check(&self) -> DiskCheck {
        let (answer, answers) = mpsc::channel();
        for ask in &self.asks {
            let _ = ask.send(answer.clone());
        }
        DiskCheck { answers, blocks: 0 }
    }
}

/// A check by readers and writers that is under way.
#[derive(Debug)]
pub(crate) struct DiskCheck {
    answers: mpsc::Receiver<u64>,
    blocks: u64,
}

impl DiskCheck {
    /// Returns the number of checked blocks, once all of them have been checked.
    pub(crate) fn result(&mut self) -> Option<u64> {
        loop {
            match self.answers.try_recv() {
                Ok(blocks) => self.blocks += blocks,
                Err(mpsc::TryRecvError::Empty) => return None,
                Err(mpsc::TryRecvError::Disconnected) => return Some(self.blocks),
            }
        }
    }
}

fn open(write: bool, more_flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(write).custom_flags(O_DIRECT | more_flags).open(PATH)
}

fn disk_blocks() -> io::Result<u64> {
    let sectors = std::fs::read_to_string("/sys/block/vda/size")?;
    let sectors: u64 = sectors.trim().parse().map_err(io::Error::other)?;
    Ok(sectors * 512 / PAGE_BYTES as u64)
}

struct Reader {
    file: File,
    /// Number of places from the disk's beginning, of [`BLOCKS`] each.
    places: u64,
    slots: Vec<ReadBuffer>,
    /// The first block of each slot's last read.
    holds: Vec<Option<u64>>,
    /// Time between two reads.
    pause: Duration,
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
            let block = (random & 0xffff_ffff) % self.places * BLOCKS;
            self.check(slot);
            let read = self.file.read_exact_at(&mut self.slots[slot].0, block * PAGE_BYTES as u64);
            self.holds[slot] = self.counts.done(read, &self.counts.reads).then_some(block);
            if !self.pause.is_zero() {
                thread::sleep(self.pause);
            }
        }
    }

    fn check(&self, slot: usize) -> u64 {
        let Some(first) = self.holds[slot] else { return 0 };
        if let Some(block) = wrong_disk_block(first, 0, &self.slots[slot].0) {
            self.counts.record_wrong(&format!("block {block} of the disk in memory"));
        }
        BLOCKS
    }
}

struct Writer {
    file: File,
    /// The first block of its own part.
    first: u64,
    /// The version of each place of its own part.
    versions: Vec<u32>,
    /// For one place when it is written to, for many when all are checked.
    buffer: Box<WriteBuffers>,
    counts: Arc<Counts>,
}

impl Writer {
    fn run(mut self, mut random: u64, asked: &mpsc::Receiver<mpsc::Sender<u64>>) {
        loop {
            while let Ok(answer) = asked.try_recv() {
                let all = 0..self.versions.len();
                let pieces = all.clone().step_by(CHECKED_AT_ONCE);
                let blocks =
                    pieces.map(|first| self.check(first..all.end.min(first + CHECKED_AT_ONCE))).sum();
                let _ = answer.send(blocks);
            }
            random = mix(random);
            let place = (random >> 32) as usize % self.versions.len().max(1);
            self.check(place..place + 1);
            self.write(place);
            thread::sleep(PAUSE);
        }
    }

    fn block(&self, place: usize) -> u64 {
        self.first + place as u64 * BLOCKS
    }

    /// Checks these places, read all at once. Returns the number of their blocks.
    fn check(&mut self, places: Range<usize>) -> u64 {
        let from = self.block(places.start) * PAGE_BYTES as u64;
        let read = self.file.read_exact_at(self.buffer.0[..places.len()].as_flattened_mut(), from);
        if self.counts.done(read, &self.counts.reads) {
            for (place, slot) in places.clone().zip(&self.buffer.0) {
                let version = self.versions[place];
                if let Some(block) = wrong_disk_block(self.block(place), version, slot) {
                    self.counts.record_wrong(&format!("block {block} of the disk, version {version}"));
                }
            }
        }
        places.len() as u64 * BLOCKS
    }

    fn write(&mut self, place: usize) {
        let (first, version) = (self.block(place), self.versions[place].wrapping_add(1));
        fill_disk(first, version, &mut self.buffer.0[0]);
        let written = self.file.write_all_at(&self.buffer.0[0], first * PAGE_BYTES as u64);
        if self.counts.done(written, &self.counts.writes) {
            self.versions[place] = version;
        }
    }
}
