//! File behind shared RAM of another process.
//!
//! RAM of a memfd, of tmpfs or of hugetlbfs can be read and written through the file, without
//! involving the process. It is opened through `/proc/PID/map_files`, or where that is not
//! permitted through the descriptor that the process itself still has open.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstatfs, seek};

use crate::maps::{Backing, FileId, Mapping};
use crate::{PAGE_SIZE, Process, ProcessError};

/// Kind of file that holds the RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RamFileKind {
    /// tmpfs or a memfd.
    Tmpfs,
    /// hugetlbfs, or a memfd with huge pages. It can be read and punched, but has no `write(2)`,
    /// and does not report its holes.
    Hugetlbfs,
    /// A file on a disk, or on an unknown file system.
    Other,
}

/// Error of the file behind RAM. Offsets and lengths in bytes.
#[derive(Debug, thiserror::Error)]
pub enum RamFileError {
    /// The process could not be inspected.
    #[error("cannot reach the file behind RAM")]
    Process(#[from] ProcessError),
    /// The mapping has no file, or not a shared one.
    #[error("the memory at {address:#x} is not a shared file")]
    NotShared {
        /// First address of the mapping.
        address: u64,
    },
    /// The mapping has no file, or a shared one.
    #[error("the memory at {address:#x} is not a private mapping of a file")]
    NotPrivate {
        /// First address of the mapping.
        address: u64,
    },
    /// Neither way to open it worked.
    #[error(
        "cannot open the file {name} behind the RAM of process {pid}: run as root, or with CAP_CHECKPOINT_RESTORE"
    )]
    Open {
        /// Number of the process.
        pid: u32,
        /// Name of the file, as the kernel writes it.
        name: PathBuf,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
    /// hugetlbfs has no `write(2)`.
    #[error("a file on hugetlbfs cannot be written with write(2): write through the memory of the process")]
    NoWrite,
    /// Any other error.
    #[error("cannot {action} {len} bytes at {offset} of the file behind RAM")]
    Io {
        /// Attempted action.
        action: &'static str,
        /// Offset of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Range of a file in bytes, from `start` to just before `end`.
pub type FileRange = std::ops::Range<u64>;

/// A file that holds RAM.
#[derive(Debug)]
pub struct RamFile {
    file: File,
    id: Option<FileId>,
    kind: RamFileKind,
    page_size: u64,
}

impl RamFile {
    /// Opens the file behind a shared mapping of another process, for reading and writing.
    pub fn open(process: &Process, mapping: &Mapping) -> Result<Self, RamFileError> {
        match mapping.backing {
            Backing::SharedFile(id) => Self::open_as(process, mapping, id, true),
            _ => Err(RamFileError::NotShared { address: mapping.range.start }),
        }
    }

    /// Opens the file behind a private mapping of another process, which shows through wherever that process has not
    /// written; for reading.
    pub fn open_behind_private(process: &Process, mapping: &Mapping) -> Result<Self, RamFileError> {
        match mapping.backing {
            Backing::PrivateFile(id) => Self::open_as(process, mapping, id, false),
            _ => Err(RamFileError::NotPrivate { address: mapping.range.start }),
        }
    }

    fn open_as(process: &Process, mapping: &Mapping, id: FileId, write: bool) -> Result<Self, RamFileError> {
        let open = |path: &Path| OpenOptions::new().read(true).write(write).open(path);
        let map_file = format!("map_files/{:x}-{:x}", mapping.range.start, mapping.range.end);
        let opened = open(&process.path(&map_file)).or_else(|error| {
            let candidates = process.descriptors().unwrap_or_default();
            let mut links = candidates.iter().map(|(fd, _)| process.path(&format!("fd/{fd}")));
            // `stat` through the link does not open anything (pipes, sockets, devices).
            links
                .find(|link| fs::metadata(link).is_ok_and(|found| found.is_file() && is_file(&found, id)))
                .map_or(Err(error), |link| open(&link))
        });
        let name = mapping.name.clone().unwrap_or_default();
        let file = opened.map_err(|source| RamFileError::Open { pid: process.pid(), name, source })?;
        process.check_alive()?;
        let mut opened = Self::from_file(file)?;
        opened.id = Some(id);
        Ok(opened)
    }

    /// Uses a file that this process has open already, such as a memfd that it created for a new
    /// QEMU.
    pub fn from_file(file: File) -> Result<Self, RamFileError> {
        let system = fstatfs(&file).map_err(|error| RamFileError::Io {
            action: "inspect",
            offset: 0,
            len: 0,
            source: error.into(),
        })?;
        let (kind, page_size) = match system.f_type {
            libc::HUGETLBFS_MAGIC => (RamFileKind::Hugetlbfs, system.f_bsize as u64),
            libc::TMPFS_MAGIC => (RamFileKind::Tmpfs, PAGE_SIZE),
            _ => (RamFileKind::Other, PAGE_SIZE),
        };
        Ok(Self { file, id: None, kind, page_size })
    }

    /// Returns the file itself.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the identity of the file, if it was found behind a mapping.
    pub fn id(&self) -> Option<FileId> {
        self.id
    }

    /// Returns the kind of the file.
    pub fn kind(&self) -> RamFileKind {
        self.kind
    }

    /// Returns the size in bytes of its pages, in which holes are punched.
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> Result<u64, RamFileError> {
        let found = self.file.metadata();
        found.map(|found| found.len()).map_err(|source| RamFileError::Io {
            action: "measure",
            offset: 0,
            len: 0,
            source,
        })
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> Result<bool, RamFileError> {
        Ok(self.len()? == 0)
    }

    /// Fills `buffer` with the bytes from `offset` on.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), RamFileError> {
        let len = buffer.len() as u64;
        let read = self.file.read_exact_at(buffer, offset);
        read.map_err(|source| RamFileError::Io { action: "read", offset, len, source })
    }

    /// Writes `data` from `offset` on.
    ///
    /// # Errors
    /// [`RamFileError::NoWrite`] for hugetlbfs; go through [`crate::RemoteMemory`] there.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), RamFileError> {
        if self.kind == RamFileKind::Hugetlbfs {
            return Err(RamFileError::NoWrite);
        }
        let len = data.len() as u64;
        let written = self.file.write_all_at(data, offset);
        written.map_err(|source| RamFileError::Io { action: "write", offset, len, source })
    }

    /// Returns true if [`RamFile::data_runs`] reports holes: not on hugetlbfs, where everything counts as data.
    pub fn has_hole_info(&self) -> bool {
        self.kind != RamFileKind::Hugetlbfs
    }

    /// Returns the offset of the first data in `range`; none if all of it is a hole.
    pub fn first_data(&self, range: FileRange) -> Result<Option<u64>, RamFileError> {
        match seek(&self.file, SeekFrom::Data(range.start)) {
            Ok(data) => Ok((data < range.end).then_some(data)),
            // There are no data after this offset.
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(source) => Err(RamFileError::Io {
                action: "find data within",
                offset: range.start,
                len: range.end - range.start,
                source: source.into(),
            }),
        }
    }

    /// Appends the parts of `range` that hold data; the rest are holes and read as zeros.
    pub fn data_runs(&self, range: FileRange, found: &mut Vec<FileRange>) -> Result<(), RamFileError> {
        // Threads may do this at the same time: `lseek` returns its result, and no code uses the
        // position that it sets.
        let file = &self.file;
        let mut at = range.start;
        while at < range.end {
            let io = |source: rustix::io::Errno| RamFileError::Io {
                action: "find data within",
                offset: at,
                len: range.end - at,
                source: source.into(),
            };
            let data = match seek(file, SeekFrom::Data(at)) {
                Ok(data) if data < range.end => data,
                // There are no data after this offset.
                Ok(_) | Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(io(error)),
            };
            let hole = seek(file, SeekFrom::Hole(data)).map_err(io)?.min(range.end);
            if hole <= data {
                // It became a hole in between.
                at = data + self.page_size;
                continue;
            }
            found.push(data..hole);
            at = hole;
        }
        Ok(())
    }

    /// Appends the parts of `range` (whole pages) that are in memory now, the rest being holes, in swap or on a disk;
    /// without reading anything.
    ///
    /// The kernel reports it only to processes that may write the file; for others everything counts as "in memory".
    pub fn resident_runs(&self, range: FileRange, found: &mut Vec<FileRange>) -> Result<(), RamFileError> {
        let pages = residency(&self.file, &range).map_err(|source| RamFileError::Io {
            action: "find the resident pages within",
            offset: range.start,
            len: range.end - range.start,
            source,
        })?;
        let from = found.len();
        for (at, _) in
            (range.start..).step_by(PAGE_SIZE as usize).zip(pages).filter(|(_, page)| page & 1 != 0)
        {
            match found[from..].last_mut() {
                Some(last) if last.end == at => last.end += PAGE_SIZE,
                _ => found.push(at..at + PAGE_SIZE),
            }
        }
        Ok(())
    }

    /// Discards the pages of `range`: they read as zeros, in every process.
    pub fn punch_hole(&self, range: FileRange) -> Result<(), RamFileError> {
        let (offset, len) = (range.start, range.end - range.start);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, offset, len).map_err(|error| RamFileError::Io {
            action: "punch out",
            offset,
            len,
            source: error.into(),
        })
    }
}

/// Returns a byte for each page; bit 0 is set if the page is in memory.
fn residency(file: &File, range: &FileRange) -> io::Result<Vec<u8>> {
    let len = usize::try_from(range.end - range.start).ok().and_then(NonZeroUsize::new);
    let offset = i64::try_from(range.start).map_err(io::Error::other)?;
    let Some(len) = len else { return Ok(Vec::new()) };
    let mut pages = vec![0; len.get().div_ceil(PAGE_SIZE as usize)];
    // SAFETY: a new mapping, at an address that the kernel chooses, that no code can read or write.
    let window = unsafe { mmap(None, len, ProtFlags::PROT_NONE, MapFlags::MAP_SHARED, file, offset)? };
    // SAFETY: the mapping has `len` bytes, and `pages` a byte for each page of it.
    let asked = unsafe { libc::mincore(window.as_ptr(), len.get(), pages.as_mut_ptr()) };
    let asked = Errno::result(asked);
    // SAFETY: it is the mapping that was made above, and nothing refers to it.
    unsafe { munmap(window, len.get())? };
    asked?;
    Ok(pages)
}

fn is_file(found: &fs::Metadata, id: FileId) -> bool {
    let device = found.dev();
    found.ino() == id.inode && (libc::major(device), libc::minor(device)) == id.device
}
