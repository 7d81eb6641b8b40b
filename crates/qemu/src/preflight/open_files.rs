//! The files that a QEMU has open, independent of the files to which their paths lead now.
//!
//! A path is a name at one moment: after `mv`, a restored backup or `rm` it leads to another file or to none, while
//! QEMU continues to use the file that it opened. Its descriptors are the identity.

use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A path of a guest's image that does not lead to the file that its QEMU has open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MismatchedFile {
    /// Name of the disk.
    pub disk: String,
    /// The path.
    pub path: String,
    /// True if another file exists at the path.
    pub is_there: bool,
}

/// Identity of an open file within its host: a regular file's device and inode, or a block device's number, which is
/// the same whichever device node was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum OpenFileId {
    File { device: u64, inode: u64 },
    BlockDevice(u64),
}

impl OpenFileId {
    fn of(meta: &Metadata) -> Self {
        if meta.file_type().is_block_device() {
            Self::BlockDevice(meta.rdev())
        } else {
            Self::File { device: meta.dev(), inode: meta.ino() }
        }
    }
}

/// The files and block devices that a process has open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpenFiles(BTreeSet<OpenFileId>);

impl OpenFiles {
    /// Returns the files of a process.
    ///
    /// # Errors
    /// If its descriptors cannot be listed.
    pub fn of(pid: u32) -> io::Result<Self> {
        let mut open = BTreeSet::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            // The link leads to the open file itself, even if its name is gone. A descriptor that was closed since is
            // absent.
            if let Ok(meta) = fs::metadata(entry?.path()) {
                open.insert(OpenFileId::of(&meta));
            }
        }
        Ok(Self(open))
    }

    /// Returns true if the file at a path, as this process sees it, is among them.
    pub fn has(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|meta| self.0.contains(&OpenFileId::of(&meta)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_file_is_known_whatever_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("disk"), "x").unwrap();
        let _file = fs::File::open(path("disk")).unwrap();
        let has = |name: &str| OpenFiles::of(std::process::id()).unwrap().has(&path(name));
        assert!(has("disk"));
        // Other names of the same file.
        fs::hard_link(path("disk"), path("hard")).unwrap();
        std::os::unix::fs::symlink(path("disk"), path("soft")).unwrap();
        assert!(has("hard") && has("soft"));
        // Another file of the same name and content; the first one under another name.
        fs::copy(path("disk"), path("other")).unwrap();
        fs::rename(path("disk"), path("away")).unwrap();
        fs::rename(path("other"), path("disk")).unwrap();
        assert!(!has("disk") && has("away") && !has("soft"));
        fs::remove_file(path("disk")).unwrap();
        assert!(!has("disk"));
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        assert!(OpenFiles::of(u32::MAX).is_err());
    }
}
