//! Exclusive use of a file, as the kernel knows it: openers in processes of all namespaces, and in the kernel itself,
//! as a loop device has its file open.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use linux_raw_sys::general::F_SETSIG;
use nix::libc;

/// Lease that proves that no other opener has a file open; a process that opens it waits until the lease is dropped.
#[derive(Debug)]
pub struct FileLease {
    /// The lease ends when the file is closed.
    _file: File,
}

impl FileLease {
    /// Acquires a lease of a file, which must be open for reading; returns none if any other opener has it open, in
    /// whatever mode. The lease should be held only for a moment.
    ///
    /// # Errors
    /// If the file system has no leases (a network file system), or the caller is neither the file's owner nor has
    /// `CAP_LEASE`.
    pub fn take(file: File) -> io::Result<Option<Self>> {
        let fd = file.as_raw_fd();
        // The kernel reports by a signal that a process waits for the file. Its default signal would end this
        // process; SIGURG is ignored. SAFETY: the argument is an integer, and the call touches no memory of this
        // process.
        let result = unsafe { libc::fcntl(fd, F_SETSIG as libc::c_int, libc::SIGURG) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        let taken = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) };
        if taken == 0 {
            return Ok(Some(Self { _file: file }));
        }
        match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
            error => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::thread;

    use super::*;

    #[test]
    fn only_an_exclusive_opener_gets_a_lease() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, "x").unwrap();
        let open = || File::open(&path).unwrap();
        for write in [false, true] {
            let other = OpenOptions::new().read(!write).write(write).open(&path).unwrap();
            assert!(FileLease::take(open()).unwrap().is_none(), "{write}");
            drop(other);
            let lease = FileLease::take(open()).unwrap().unwrap();
            // An opener in the meantime is admitted afterwards, and neither side is harmed.
            thread::scope(|scope| {
                let late = scope.spawn(|| OpenOptions::new().read(!write).write(write).open(&path));
                drop(lease);
                assert!(late.join().unwrap().is_ok());
            });
        }
    }
}
