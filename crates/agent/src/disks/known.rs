//! Files of disks as they were when the migration began.
//!
//! QEMU opens the images once more by their paths before its guest runs: a file that another program put there in
//! between would become the guest's disk.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Identity of a file or a block device at a path.
#[derive(Clone, Debug)]
pub(crate) struct KnownFile {
    path: PathBuf,
    /// Its file system, its inode, and its device number: no other file has the same while the host is up.
    numbers: (u64, u64, u64),
}

impl KnownFile {
    /// Returns the identity of the file or device that is at `path` now; none if there is nothing.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        Some(Self { path: path.to_owned(), numbers: (found.dev(), found.ino(), found.rdev()) })
    }

    /// Returns the reason for which the guest must not run with this path: it has another file now, or none.
    pub(crate) fn changed(&self) -> Option<String> {
        let path = self.path.display();
        match Self::at(&self.path) {
            Some(now) if now.numbers == self.numbers => None,
            Some(_) => Some(format!("another file has taken the place of {path} since the migration began")),
            None => Some(format!("{path} is not there any more")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_took_the_place_of_a_file_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        assert!(KnownFile::at(&path).is_none());
        fs::write(&path, "disk").unwrap();
        let known = KnownFile::at(&path).unwrap();
        assert_eq!(known.changed(), None);
        fs::write(&path, "what the guest wrote").unwrap();
        assert_eq!(known.changed(), None);
        let away = folder.path().join("away");
        fs::rename(&path, &away).unwrap();
        assert!(known.changed().unwrap().contains("not there"));
        fs::copy(&away, &path).unwrap();
        assert!(known.changed().unwrap().contains("another file"));
        fs::rename(&away, &path).unwrap();
        assert_eq!(known.changed(), None);
    }
}
