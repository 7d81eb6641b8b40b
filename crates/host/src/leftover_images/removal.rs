//! Removal of one file and no other, whatever happens to its path at the same time.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, open, openat, renameat_with, statat, unlinkat};
use rustix::io::Errno;
use tracee::FileLease;

/// A file that is open by its name in a directory that is open as well, and that no other process has open.
#[derive(Debug)]
pub(super) struct Removable {
    directory: OwnedFd,
    name: PathBuf,
    file: File,
    /// Keeps others from opening the file.
    _lease: FileLease,
}

impl Removable {
    /// Opens a file that may be removed; the error has the reason for which it may not.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let not_opened = |error: io::Error| format!("it cannot be opened: {error}");
        let parent = path.parent().ok_or("it has no directory")?;
        let name = PathBuf::from(path.file_name().ok_or("it has no name")?);
        let directory = open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let directory = directory.map_err(|error| not_opened(error.into()))?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&directory, &name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::LOOP) => {
                return Err("its path is a symbolic link, and only the link would be removed".to_owned());
            }
            Err(error) => return Err(not_opened(error.into())),
        };
        let lease = super::acquire_lease(file.try_clone().map_err(not_opened)?, path)?;
        Ok(Self { directory, name, file, _lease: lease })
    }

    /// Returns the metadata of the open file, whatever is at its path.
    pub(super) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Removes the open file from its directory. Another file that has its name by now is not touched.
    ///
    /// Another file could get the name at any moment, so that the file gets a name of its own first, and is removed
    /// only if it is the open one.
    pub(super) fn remove(self) -> Result<(), String> {
        let own_name = own_name(self.name.as_os_str());
        self.rename(&self.name, &own_name).map_err(|error| error.to_string())?;
        if self.is_at(&own_name) {
            return unlinkat(&self.directory, &own_name, AtFlags::empty()).map_err(|error| error.to_string());
        }
        let another = "another file has replaced it";
        match self.rename(&own_name, &self.name) {
            Ok(()) => Err(another.to_owned()),
            Err(error) => Err(format!("{another}, and is called {} now: {error}", own_name.display())),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), Errno> {
        renameat_with(&self.directory, from, &self.directory, to, RenameFlags::NOREPLACE)
    }

    fn is_at(&self, name: &Path) -> bool {
        let there = statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW);
        let open = self.file.metadata();
        there
            .ok()
            .zip(open.ok())
            .is_some_and(|(there, open)| (there.st_dev, there.st_ino) == (open.dev(), open.ino()))
    }
}

/// Returns a name that no other file has.
fn own_name(name: &OsStr) -> PathBuf {
    let mut own = OsStr::new(".").to_owned();
    own.push(name);
    own.push(format!(".removed-{}", uuid::Uuid::new_v4()));
    PathBuf::from(own)
}

/// True if two paths lead to one file, or are spelled alike.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    one == other || id(one).zip(id(other)).is_some_and(|(one, other)| one == other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_open_elsewhere(why: &str) -> bool {
        ["temporarily unavailable", "open elsewhere", "open in "].iter().any(|reason| why.contains(reason))
    }

    /// Opens a file of a test. A process that another test starts has it open until it runs its own program.
    fn open_removable(path: &Path) -> Removable {
        loop {
            match Removable::open(path) {
                Ok(removable) => return removable,
                Err(why) if is_open_elsewhere(&why) => std::thread::yield_now(),
                Err(why) => panic!("{why}"),
            }
        }
    }

    #[test]
    fn only_the_open_file_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("disk"), "copied").unwrap();
        let removable = open_removable(&path("disk"));
        // Another file gets its path after all checks.
        fs::rename(path("disk"), path("away")).unwrap();
        fs::write(path("disk"), "another").unwrap();
        let why = removable.remove().unwrap_err();
        assert!(why.contains("another file"), "{why}");
        assert_eq!(fs::read(path("disk")).unwrap(), b"another");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);

        open_removable(&path("away")).remove().unwrap();
        assert!(!path("away").exists() && path("disk").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_symbolic_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("disk"), folder.path().join("link"));
        fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let why = Removable::open(&link).unwrap_err();
        assert!(why.contains("symbolic link"), "{why}");
    }
}
