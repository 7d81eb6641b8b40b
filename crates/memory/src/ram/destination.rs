//! Writers of a waiting QEMU's RAM.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use proto::limits::PAGE_BYTES;
use tracee::{AddressRange, Pagemap, Process, RamFile, RamFileKind, RemoteMemory};

use super::backing::{BlockBacking, find};
use super::block::{BlockWriter, DiscardMethod, RamError, RamRegion};
use super::preallocated::Preallocated;
use super::zero::ZEROS;
use crate::lock;
use crate::page_set::PageSet;

/// Opens the RAM of a QEMU for writing, block by block, each with the writer that fits it.
///
/// Has to be called before the first page arrives: it looks up the pages that QEMU itself has written by then
/// (firmware), so that a hole of the source becomes zeros there too. A block that is present from end to end was
/// preallocated, and stays so.
///
/// # Errors
/// If a block is not at its address, or its file cannot be opened.
pub fn open_destination(
    process: &Process,
    regions: &[RamRegion],
) -> Result<Vec<Box<dyn BlockWriter>>, RamError> {
    let memory = Arc::new(RemoteMemory::new(process)?);
    let pagemap = Arc::new(Mutex::new(Pagemap::open(process)?));
    let places = find(process, regions)?;
    let writers =
        regions.iter().zip(places).map(|(region, backing)| -> Result<Box<dyn BlockWriter>, RamError> {
            let region = region.clone();
            let touched = touched(&mut lock(&pagemap), &region)?;
            let is_preallocated = touched.count() == touched.pages();
            let (file, discards, dirty) = match backing {
                BlockBacking::File(file, offset) if file.kind() != RamFileKind::Hugetlbfs => {
                    return Ok(wrap_if_preallocated(
                        is_preallocated,
                        Box::new(FileWriter { region, file, offset }),
                    ));
                }
                BlockBacking::File(file, offset) => (Some((file, offset)), false, touched),
                BlockBacking::Anonymous => (None, true, touched),
                // The file behind a private mapping shows through in all pages that were not written.
                BlockBacking::PrivateFile(..) | BlockBacking::Opaque => {
                    (None, false, PageSet::full(region.bytes))
                }
            };
            let zeroed = PageSet::new(region.bytes);
            let state = Mutex::new(WriterState { dirty, zeroed });
            let (memory, pagemap) = (Arc::clone(&memory), Arc::clone(&pagemap));
            let writer = ProcessWriter { region, memory, pagemap, file, discards, state };
            Ok(wrap_if_preallocated(is_preallocated, Box::new(writer)))
        });
    writers.collect()
}

fn wrap_if_preallocated(is_preallocated: bool, writer: Box<dyn BlockWriter>) -> Box<dyn BlockWriter> {
    if is_preallocated { Box::new(Preallocated(writer)) } else { writer }
}

/// Returns the pages of a block that are present already.
fn touched(pagemap: &mut Pagemap, region: &RamRegion) -> Result<PageSet, RamError> {
    let mut found = Vec::new();
    pagemap.populated(region.range(), &mut found).map_err(RamError::Present)?;
    let mut pages = PageSet::new(region.bytes);
    for range in found {
        pages.set_bytes(range.start - region.address..range.end - region.address);
    }
    Ok(pages)
}

struct FileWriter {
    region: RamRegion,
    file: RamFile,
    /// Start of the block in the file, in bytes.
    offset: u64,
}

impl BlockWriter for FileWriter {
    fn name(&self) -> &str {
        &self.region.name
    }

    fn bytes(&self) -> u64 {
        self.region.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        Ok(self.file.read_at(self.offset + offset, into)?)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        Ok(self.file.write_at(self.offset + offset, data)?)
    }

    /// The file itself knows which of its pages are written.
    fn allow_direct_placement(&self, _: Range<u64>) -> bool {
        true
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        Ok(self.file.punch_hole(self.offset + range.start..self.offset + range.end)?)
    }

    fn discard_method(&self) -> DiscardMethod {
        if self.region.page_bytes > PAGE_BYTES { DiscardMethod::Never } else { DiscardMethod::FromOutside }
    }

    /// Queries only the start of the data: for its end, the kernel would walk through all of the file's pages.
    fn first_mapped(&self, range: Range<u64>) -> Result<Option<u64>, RamError> {
        let first = self.file.first_data(self.offset + range.start..self.offset + range.end)?;
        Ok(first.map(|at| at - self.offset))
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

struct ProcessWriter {
    region: RamRegion,
    memory: Arc<RemoteMemory>,
    pagemap: Arc<Mutex<Pagemap>>,
    /// The file of huge pages behind the block, in which holes can be punched, and the start of the block in it.
    file: Option<(RamFile, u64)>,
    /// True if QEMU can give pages back and reads zeros then.
    discards: bool,
    state: Mutex<WriterState>,
}

struct WriterState {
    /// Pages that may hold something other than zeros.
    dirty: PageSet,
    /// Pages that were filled with zeros and not written since.
    zeroed: PageSet,
}

impl ProcessWriter {
    /// Punches out the huge pages that lie wholly in a range. Returns the bytes of these pages.
    fn punch(&self, range: &Range<u64>) -> Result<Range<u64>, RamError> {
        let Some((file, base)) = &self.file else { return Ok(range.start..range.start) };
        let page = file.page_size().max(PAGE_BYTES);
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start >= end {
            return Ok(range.start..range.start);
        }
        file.punch_hole(base + start..base + end)?;
        Ok(start..end)
    }

    /// Notes that these ranges of bytes may hold something other than zeros.
    fn note_written(&self, runs: &[Range<u64>]) {
        let mut state = lock(&self.state);
        for run in runs {
            state.dirty.set(pages(run));
            state.zeroed.clear(pages(run));
        }
    }

    fn write_zeros(&self, range: Range<u64>) -> Result<(), RamError> {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(ZEROS.len() as u64);
            self.memory.write(self.region.address + at, &ZEROS[..len as usize])?;
            at += len;
        }
        Ok(())
    }
}

/// Returns the pages of a range of bytes.
fn pages(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES)
}

impl BlockWriter for ProcessWriter {
    fn name(&self) -> &str {
        &self.region.name
    }

    fn bytes(&self) -> u64 {
        self.region.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        Ok(self.memory.read(self.region.address + offset, into)?)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        self.write_runs(std::slice::from_ref(&(offset..offset + data.len() as u64)), data)
    }

    /// Uses one system call for many scattered pages.
    fn write_runs(&self, runs: &[Range<u64>], data: &[u8]) -> Result<(), RamError> {
        // Before the bytes: if writing fails half-way, they count as written.
        self.note_written(runs);
        let address = self.region.address;
        let mapped_ranges: Vec<AddressRange> =
            runs.iter().map(|run| AddressRange::new(address + run.start, address + run.end)).collect();
        Ok(self.memory.write_runs(&mapped_ranges, data)?)
    }

    fn allow_direct_placement(&self, range: Range<u64>) -> bool {
        self.note_written(std::slice::from_ref(&range));
        true
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        let punched = self.punch(&range)?;
        let mut state = lock(&self.state);
        state.dirty.clear(pages(&punched));
        let to_zero: Vec<Range<u64>> = state.dirty.runs_within(pages(&range)).collect();
        drop(state);
        for run in to_zero {
            self.write_zeros(run.start * PAGE_BYTES..run.end * PAGE_BYTES)?;
            let mut state = lock(&self.state);
            state.dirty.clear(run.clone());
            state.zeroed.set(run);
        }
        Ok(())
    }

    fn discard_method(&self) -> DiscardMethod {
        if self.discards && self.region.page_bytes == PAGE_BYTES {
            DiscardMethod::ByProcess
        } else {
            DiscardMethod::Never
        }
    }

    fn mapped_ranges(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, RamError> {
        let base = self.region.address;
        let mut found = Vec::new();
        let range = AddressRange::new(base + range.start, base + range.end);
        lock(&self.pagemap).populated(range, &mut found).map_err(RamError::Present)?;
        Ok(found.into_iter().map(|part| part.start - base..part.end - base).collect())
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        if !self.discards {
            return Vec::new();
        }
        let mut state = lock(&self.state);
        let zeroed = std::mem::replace(&mut state.zeroed, PageSet::new(self.region.bytes));
        drop(state);
        let mut found: Vec<Range<u64>> = Vec::new();
        for run in zeroed.runs() {
            let bytes = run.start * PAGE_BYTES..run.end * PAGE_BYTES;
            match found.last_mut() {
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                _ => found.push(bytes),
            }
        }
        let page = self.region.page_bytes.max(PAGE_BYTES);
        for range in &mut found {
            *range = range.start.next_multiple_of(page)..range.end / page * page;
        }
        found.retain(|range| range.start < range.end);
        found
    }
}
