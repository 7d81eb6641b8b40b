//! Reading a running guest's RAM.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use tracee::{AddressRange, Pagemap, Process, RamFile, RemoteMemory};

use super::place::{Place, find};
use super::{BlockReader, RamError, RamRegion};
use crate::lock;
use crate::send::SourceRam;

/// Opens the RAM of a QEMU for reading, block by block, each in the way that fits it.
///
/// # Errors
/// When a block is not where it is said to be, or its file cannot be opened.
pub fn open_source(process: &Process, regions: &[RamRegion]) -> Result<SourceRam, RamError> {
    let memory = Arc::new(RemoteMemory::new(process)?);
    let table = Arc::new(Mutex::new(PageTable { pagemap: Pagemap::open(process)?, found: Vec::new() }));
    let places = find(process, regions)?;
    let readers = regions.iter().zip(places).map(|(region, place)| -> Box<dyn BlockReader> {
        let (memory, region) = (Arc::clone(&memory), region.clone());
        match place {
            Place::File(file, offset) => Box::new(FileReader { region, file, offset }),
            Place::Anonymous => Box::new(ProcessReader { region, memory, table: Some(Arc::clone(&table)) }),
            Place::Opaque => Box::new(ProcessReader { region, memory, table: None }),
        }
    });
    Ok(readers.collect())
}

struct FileReader {
    region: RamRegion,
    file: RamFile,
    /// Where the block begins in the file, in bytes.
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

    /// Only ever asks where data begins: asking where it ends walks all of the data that follows, to the end of a file
    /// that may be all data, and that for each chunk.
    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        if !self.file.tells_holes() {
            return Ok(range.start);
        }
        // Threads share the file's position; nobody uses it.
        match seek(self.file.file(), SeekFrom::Data(self.offset + range.start)) {
            Ok(data) => Ok((data - self.offset).clamp(range.start, range.end)),
            Err(Errno::NXIO) => Ok(range.end),
            Err(errno) => Err(RamError::Present(errno.into())),
        }
    }
}

struct ProcessReader {
    region: RamRegion,
    memory: Arc<RemoteMemory>,
    /// None where the page table does not tell what reads as zeros.
    table: Option<Arc<Mutex<PageTable>>>,
}

struct PageTable {
    pagemap: Pagemap,
    found: Vec<AddressRange>,
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
        let PageTable { pagemap, found } = &mut *lock(table);
        found.clear();
        let asked = AddressRange::new(address + range.start, address + range.end);
        pagemap.populated(asked, found).map_err(RamError::Present)?;
        Ok(found.first().map_or(range.end, |first| first.start - address))
    }
}
