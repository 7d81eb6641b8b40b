//! Reading and writing the memory of another process.
//!
//! With `process_vm_readv` and `process_vm_writev`: one copy, no system call of the process
//! itself, and its page protections hold. Slower than a shared file, but works for everything.

use std::io;

use nix::libc;

use crate::{AddressRange, Process, ProcessError};

/// Maximum number of pieces in one system call (`IOV_MAX`).
const MAX_PIECES: usize = 1024;

/// Error of a read or write of another process's memory.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The process has ended, or may not be accessed.
    #[error("cannot reach the memory of the process")]
    Process(#[from] ProcessError),
    /// The process has no mapping at this address, or none that permits this access.
    #[error("address {address:#x} cannot be {}", if *.write { "written" } else { "read" })]
    Fault {
        /// First address that could not be accessed, rounded down to the kernel's granularity.
        address: u64,
        /// True if it was a write.
        write: bool,
    },
    /// The length of the buffer differs from that of the ranges.
    #[error("a buffer of {buffer} bytes for ranges of {ranges} bytes")]
    Length {
        /// Length of the buffer in bytes.
        buffer: u64,
        /// Length of all ranges in bytes.
        ranges: u64,
    },
    /// Any other error.
    #[error("cannot reach the memory of process {pid}")]
    Io {
        /// Process id.
        pid: u32,
        /// Error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Memory of another process.
///
/// Several threads may use one at the same time. The kernel finds the process by its id, so every
/// transfer is followed (and every write preceded) by a check that the process still lives.
#[derive(Debug)]
pub struct RemoteMemory {
    process: Process,
}

impl RemoteMemory {
    /// Opens the memory of a process.
    pub fn new(process: &Process) -> Result<Self, ProcessError> {
        Ok(Self { process: process.try_clone()? })
    }

    /// Fills `buffer` with the memory from `address` on.
    ///
    /// # Errors
    /// [`RemoteError::Fault`] names the address; the memory before it has been read.
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), RemoteError> {
        let range = AddressRange::with_len(address, buffer.len() as u64);
        self.read_runs(&[range], buffer)
    }

    /// Writes `data` to the memory from `address` on.
    ///
    /// # Errors
    /// [`RemoteError::Fault`] names the address; the data before it have been written.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), RemoteError> {
        let range = AddressRange::with_len(address, data.len() as u64);
        self.write_runs(&[range], data)
    }

    /// Fills `buffer` with the memory of several ranges, one after the other: few system calls for
    /// many pages.
    ///
    /// # Errors
    /// As [`RemoteMemory::read`]; [`RemoteError::Length`] if the buffer does not fit the ranges.
    pub fn read_runs(&self, ranges: &[AddressRange], buffer: &mut [u8]) -> Result<(), RemoteError> {
        // The buffer is lent as writable memory for the duration of the transfer.
        self.transfer(ranges, buffer.as_mut_ptr(), buffer.len(), false)
    }

    /// Writes `data` to several ranges, one after the other.
    ///
    /// # Errors
    /// As [`RemoteMemory::write`]; [`RemoteError::Length`] if the data do not fit the ranges.
    pub fn write_runs(&self, ranges: &[AddressRange], data: &[u8]) -> Result<(), RemoteError> {
        self.process.check_alive()?;
        self.transfer(ranges, data.as_ptr().cast_mut(), data.len(), true)
    }

    /// Transfers bytes; `local` has to be valid for `len` bytes, of writes too unless `write`.
    fn transfer(
        &self,
        ranges: &[AddressRange],
        local: *mut u8,
        len: usize,
        write: bool,
    ) -> Result<(), RemoteError> {
        let total = ranges.iter().map(AddressRange::len).fold(0, u64::saturating_add);
        if total != len as u64 {
            return Err(RemoteError::Length { buffer: len as u64, ranges: total });
        }
        let mut cursor = Cursor { ranges, offset: 0 };
        let mut done = 0;
        let mut pieces = Vec::with_capacity(ranges.len().min(MAX_PIECES));
        while done < len {
            pieces.clear();
            let asked = cursor.fill(&mut pieces);
            // SAFETY: `done` is below `len`, so the pointer stays inside the caller's buffer.
            let here = unsafe { local.add(done) };
            match self.step(here, asked, &pieces, write) {
                Ok(moved) => {
                    done += moved;
                    cursor.advance(moved as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.explain(error, cursor.address(), write)),
            }
        }
        Ok(self.process.check_alive()?)
    }

    fn step(&self, local: *mut u8, len: usize, remote: &[libc::iovec], write: bool) -> io::Result<usize> {
        let here = libc::iovec { iov_base: local.cast(), iov_len: len };
        let pid = self.process.pid() as libc::pid_t;
        let count = remote.len() as libc::c_ulong;
        let moved = if write {
            // SAFETY: `here` describes `len` bytes of a buffer that outlives the call and is only
            // read; the other addresses belong to another process, and the kernel checks them.
            unsafe { libc::process_vm_writev(pid, &raw const here, 1, remote.as_ptr(), count, 0) }
        } else {
            // SAFETY: as above; the buffer is lent to us as writable.
            unsafe { libc::process_vm_readv(pid, &raw const here, 1, remote.as_ptr(), count, 0) }
        };
        match moved {
            0 => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            moved => usize::try_from(moved).map_err(|_| io::Error::last_os_error()),
        }
    }

    fn explain(&self, source: io::Error, address: u64, write: bool) -> RemoteError {
        let pid = self.process.pid();
        match source.raw_os_error() {
            _ if !self.process.is_alive() => ProcessError::Gone { pid }.into(),
            Some(libc::EFAULT) => RemoteError::Fault { address, write },
            Some(libc::ESRCH) => ProcessError::Gone { pid }.into(),
            Some(libc::EPERM) => ProcessError::NotPermitted { pid }.into(),
            _ => RemoteError::Io { pid, source },
        }
    }
}

/// Progress of a transfer in a list of ranges.
struct Cursor<'a> {
    ranges: &'a [AddressRange],
    /// Number of bytes of the first range that are done.
    offset: u64,
}

impl Cursor<'_> {
    /// Describes the next pieces, as many as one system call accepts; returns their length in
    /// bytes.
    fn fill(&self, pieces: &mut Vec<libc::iovec>) -> usize {
        let mut skip = self.offset;
        let mut total = 0;
        for range in self.ranges.iter().take(MAX_PIECES) {
            let len = (range.len() - skip) as usize;
            pieces.push(libc::iovec { iov_base: (range.start + skip) as *mut libc::c_void, iov_len: len });
            total += len;
            skip = 0;
        }
        total
    }

    fn advance(&mut self, mut moved: u64) {
        while let [first, rest @ ..] = self.ranges {
            let left = first.len() - self.offset;
            if moved < left {
                self.offset += moved;
                return;
            }
            moved -= left;
            self.ranges = rest;
            self.offset = 0;
        }
    }

    fn address(&self) -> u64 {
        self.ranges.first().map_or(0, |range| range.start + self.offset)
    }
}
