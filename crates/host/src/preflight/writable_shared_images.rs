//! Images on storage that both hosts see, which the arrived guest will write to.
//!
//! QEMU opens them for writing only when the guest is to run, which is too late to be refused. These checks do not
//! write to them and do not parse their format: the source's QEMU is using them.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use proto::message::{Finding, Severity};
use qemu::command::HostRules;
use qemu::describe::VmDescription;
use rustix::fs::{SeekFrom, seek};

use crate::disks::{KnownFile, check_can_open_as};

/// Alignment that QEMU assumes for direct I/O if it cannot determine one, in bytes.
const LARGEST_BLOCK_BYTES: u64 = 4096;

/// A file that the guest will write to.
#[derive(Debug)]
pub(super) struct WritableSharedImage {
    path: PathBuf,
    /// True for a raw image that is used without the page cache.
    is_raw_and_direct: bool,
}

impl WritableSharedImage {
    /// Returns the current identity of the file.
    pub(super) fn known(&self) -> Option<KnownFile> {
        KnownFile::at(&self.path)
    }
}

/// Returns the images of a guest's shared disks that are files or devices of this host.
pub(super) fn of(vm: &VmDescription, here: &HostRules) -> Vec<WritableSharedImage> {
    let stays = |disk: &&qemu::describe::Disk| !disk.read_only && !here.images.contains_key(&disk.name);
    let files = vm.disks.iter().filter(stays).flat_map(|disk| {
        let is_raw_and_direct = disk.direct && disk.part.is_none() && disk.format.as_deref() == Some("raw");
        let top = disk.file.iter().map(move |file| (file, is_raw_and_direct));
        top.chain(disk.data_files.iter().map(move |file| (file, disk.direct)))
    });
    files
        .map(|(file, is_raw_and_direct)| WritableSharedImage {
            path: here.local_path(file).into(),
            is_raw_and_direct,
        })
        .filter(|image| image.path.is_absolute())
        .collect()
}

impl WritableSharedImage {
    /// Returns a finding if the QEMU with this process id will not be able to write to the image.
    pub(super) fn refused(&self, pid: u32) -> Option<Finding> {
        if let Err(error) = check_can_open_as(pid, &self.path) {
            return Some(Finding::new(
                Severity::Blocker,
                "disk-not-writable",
                format!("QEMU at the destination cannot open {} for writing: {error}", self.path.display()),
                "give the user that QEMU runs as there write access: check the file's owner and mode, \
                 whether its file system is mounted read-only, and on NFS the server's root_squash",
            ));
        }
        if self.is_raw_and_direct && self.has_no_alignment().unwrap_or(false) {
            return Some(Finding::new(
                Severity::Blocker,
                "disk-alignment",
                format!(
                    "the length of {} is not a multiple of {LARGEST_BLOCK_BYTES} and its first block is a \
                     hole: QEMU at the destination could not detect the alignment of direct I/O, and would \
                     refuse to write",
                    self.path.display()
                ),
                "let the guest write to the first block of that disk, or enlarge it (`block_resize`) to whole 4 KiB",
            ));
        }
        None
    }

    /// True if QEMU would assume an alignment that the file's length is not a multiple of.
    fn has_no_alignment(&self) -> io::Result<bool> {
        let file = File::open(&self.path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len().is_multiple_of(LARGEST_BLOCK_BYTES) {
            return Ok(false);
        }
        match seek(&file, SeekFrom::Data(0)) {
            Ok(first) => Ok(first > 0),
            Err(rustix::io::Errno::NXIO) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn an_image_is_refused_before_the_guest_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let image = |is_raw_and_direct| WritableSharedImage { path: path.clone(), is_raw_and_direct };
        let code =
            |is_raw_and_direct| image(is_raw_and_direct).refused(std::process::id()).map(|found| found.code);
        assert_eq!(code(true).as_deref(), Some("disk-not-writable"));
        let file = File::create(&path).unwrap();
        file.set_len((1 << 20) + 512).unwrap();
        assert_eq!(code(true).as_deref(), Some("disk-alignment"));
        assert_eq!(code(false), None);
        file.write_all_at(b"x", 0).unwrap();
        assert_eq!(code(true), None);
        file.set_len(0).unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(code(true), None);
    }
}
