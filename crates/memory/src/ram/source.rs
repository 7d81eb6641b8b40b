//! Readers of a running guest's RAM.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use tracee::{AddressRange, Pagemap, Process, RamFile, RemoteMemory};

use super::backing::{BlockBacking, find};
use super::block::{BlockReader, RamError, RamRegion};
use crate::lock;

/// Opens the RAM of a QEMU for reading, block by block, each with the reader that fits it.
///
/// # Errors
/// If a block is not at its address, or its file cannot be opened.
pub fn open_source(process: &Process, regions: &[RamRegion]) -> Result<Vec<Box<dyn BlockReader>>, RamError> {
    let memory = Arc::new(RemoteMemory::new(process)?);
    let table = Arc::new(Mutex::new(PageTable { pagemap: Pagemap::open(process)?, found: Vec::new() }));
    let places = find(process, regions)?;
    let readers = regions.iter().zip(places).map(|(region, backing)| -> Box<dyn BlockReader> {
        let (memory, region) = (Arc::clone(&memory), region.clone());
        match backing {
            BlockBacking::File(file, offset) => Box::new(FileReader { region, file, offset }),
            BlockBacking::Anonymous => {
                Box::new(ProcessReader { region, memory, table: Some(Arc::clone(&table)) })
            }
            BlockBacking::PrivateFile(file, offset) => {
                Box::new(PrivateReader { region, memory, table: Arc::clone(&table), file, offset })
            }
            BlockBacking::Opaque => Box::new(ProcessReader { region, memory, table: None }),
        }
    });
    Ok(readers.collect())
}

struct FileReader {
    region: RamRegion,
    file: RamFile,
    /// Start of the block in the file, in bytes.
    offset: u64,
}

impl BlockReader for FileReader {
    fn name(&self) -> &str {
        &self.region.name
    }

    fn bytes(&self) -> u64 {
        self.region.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        Ok(self.file.read_at(self.offset + offset, into)?)
    }

    /// Queries only the start of the data: to find its end, the kernel walks through all of the data that follows, to
    /// the end of a file that may be all data, and that for each chunk.
    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        first_data(&self.file, self.offset, range)
    }
}

/// Returns the first byte in a range of a block, which begins at `base` of a file, that is no hole.
fn first_data(file: &RamFile, base: u64, range: Range<u64>) -> Result<u64, RamError> {
    if !file.has_hole_info() {
        return Ok(range.start);
    }
    // Threads share the file's position; none of them uses it.
    match seek(file.file(), SeekFrom::Data(base + range.start)) {
        Ok(data) => Ok((data - base).clamp(range.start, range.end)),
        Err(Errno::NXIO) => Ok(range.end),
        Err(errno) => Err(RamError::Present(errno.into())),
    }
}

struct ProcessReader {
    region: RamRegion,
    memory: Arc<RemoteMemory>,
    /// None if the page table does not show which pages read as zeros.
    table: Option<Arc<Mutex<PageTable>>>,
}

/// Reader of a private mapping of a file. Reading an absent page of it would allocate that page: in the file, if the
/// file has a hole there, so that RAM on tmpfs would grow to its full size. Such a page is read from the file.
struct PrivateReader {
    region: RamRegion,
    memory: Arc<RemoteMemory>,
    table: Arc<Mutex<PageTable>>,
    file: RamFile,
    /// Start of the block in the file, in bytes.
    offset: u64,
}

struct PageTable {
    pagemap: Pagemap,
    found: Vec<AddressRange>,
}

impl PageTable {
    /// Returns the parts of a range that the process has in memory or in swap.
    fn populated(&mut self, range: AddressRange) -> Result<&[AddressRange], RamError> {
        self.found.clear();
        self.pagemap.populated(range, &mut self.found).map_err(RamError::Present)?;
        Ok(&self.found)
    }
}

impl fmt::Debug for PageTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageTable").finish_non_exhaustive()
    }
}

impl BlockReader for ProcessReader {
    fn name(&self) -> &str {
        &self.region.name
    }

    fn bytes(&self) -> u64 {
        self.region.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        Ok(self.memory.read(self.region.address + offset, into)?)
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        let Some(table) = &self.table else { return Ok(range.start) };
        let address = self.region.address;
        let asked = AddressRange::new(address + range.start, address + range.end);
        Ok(lock(table).populated(asked)?.first().map_or(range.end, |first| first.start - address))
    }
}

impl BlockReader for PrivateReader {
    fn name(&self) -> &str {
        &self.region.name
    }

    fn bytes(&self) -> u64 {
        self.region.bytes
    }

    /// A page that appears between the query and the reading is one that the guest writes: it is sent again.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        let first = self.region.address + offset;
        let asked = AddressRange::with_len(first, into.len() as u64);
        let populated = lock(&self.table).populated(asked)?.to_vec();
        let mut rest = into;
        let mut at = asked.start;
        for run in populated.into_iter().chain([AddressRange::new(asked.end, asked.end)]) {
            let (absent, behind) = rest.split_at_mut((run.start - at) as usize);
            if !absent.is_empty() {
                self.file.read_at(self.offset + (at - self.region.address), absent)?;
            }
            let (present, behind) = behind.split_at_mut(run.len() as usize);
            if !present.is_empty() {
                self.memory.read(run.start, present)?;
            }
            (rest, at) = (behind, run.end);
        }
        Ok(())
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        let address = self.region.address;
        let asked = AddressRange::new(address + range.start, address + range.end);
        let own = lock(&self.table).populated(asked)?.first().map(|first| first.start - address);
        first_data(&self.file, self.offset, range.start..own.unwrap_or(range.end))
    }
}
