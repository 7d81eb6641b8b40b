//! Files of disks as they were when the migration began.
//!
//! QEMU opens the images once more by their paths before its guest runs: a file that another program put there in
//! between would become the guest's disk.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Identity of a file or a block device at a path.
#[derive(Clone, Debug)]
pub struct KnownFile {
    path: PathBuf,
    /// Its file system, its inode, and its device number: no other file has the same while the host is up.
    numbers: (u64, u64, u64),
    /// Length below which it must not fall, in bytes; 0 of files that others may shorten.
    least_bytes: u64,
}

impl KnownFile {
    /// Returns the identity of the file or device that is at `path` now; none if there is nothing.
    pub fn at(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        let numbers = (found.dev(), found.ino(), found.rdev());
        Some(Self { path: path.to_owned(), numbers, least_bytes: 0 })
    }

    /// Returns this identity for a file that no program may shorten: an image that was made at its full length.
    #[must_use]
    pub fn at_full_length(self) -> Self {
        let least_bytes = fs::metadata(&self.path).map_or(0, |found| found.len());
        Self { least_bytes, ..self }
    }

    /// Returns the reason for which the guest must not run with this path: it has another file now, or none.
    pub fn changed(&self) -> Option<String> {
        let path = self.path.display();
        match Self::at(&self.path) {
            Some(now) if now.numbers == self.numbers => {
                let bytes = fs::metadata(&self.path).map_or(0, |found| found.len());
                (bytes < self.least_bytes)
                    .then(|| format!("{path} was shortened to {bytes} bytes since the migration began"))
            }
            Some(_) => Some(format!("{path} was replaced by another file since the migration began")),
            None => Some(format!("{path} does not exist any more")),
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
        let image = known.clone().at_full_length();
        assert_eq!(image.changed(), None);
        fs::write(&path, "cut").unwrap();
        assert!(image.changed().unwrap().contains("shortened to 3 bytes"));
        assert_eq!(known.changed(), None);
        let away = folder.path().join("away");
        fs::rename(&path, &away).unwrap();
        assert!(known.changed().unwrap().contains("does not exist"));
        fs::copy(&away, &path).unwrap();
        assert!(known.changed().unwrap().contains("another file"));
        fs::rename(&away, &path).unwrap();
        assert_eq!(known.changed(), None);
    }
}
