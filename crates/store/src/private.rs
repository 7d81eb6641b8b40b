//! Databases that only their owner can read: they contain command lines, and with them passwords that users gave there.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Readable and writable by the owner alone.
const OWNER_ONLY: u32 = 0o600;
/// Suffixes of files that SQLite makes beside a database, with the database's permissions.
const BESIDE: &[&str] = &["-wal", "-shm", "-journal"];

/// Makes a database's file if there is none, and removes other users' permissions from it and from those beside it.
///
/// # Errors
/// When a file cannot be made or its permissions cannot be set.
pub(crate) fn create(path: &Path) -> io::Result<()> {
    OpenOptions::new().append(true).create(true).mode(OWNER_ONLY).open(path)?;
    fs::set_permissions(path, Permissions::from_mode(OWNER_ONLY))?;
    for end in BESIDE {
        let mut beside = path.as_os_str().to_owned();
        beside.push(end);
        match fs::set_permissions(PathBuf::from(beside), Permissions::from_mode(OWNER_ONLY)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn databases_are_their_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mode = |name: &str| fs::metadata(path(name)).unwrap().permissions().mode() & 0o777;
        create(&path("new.sqlite")).unwrap();
        assert_eq!(mode("new.sqlite"), OWNER_ONLY);
        // Files that an earlier version made.
        for name in ["old.sqlite", "old.sqlite-wal", "old.sqlite-shm"] {
            fs::write(path(name), "content").unwrap();
            fs::set_permissions(path(name), Permissions::from_mode(0o644)).unwrap();
        }
        create(&path("old.sqlite")).unwrap();
        for name in ["old.sqlite", "old.sqlite-wal", "old.sqlite-shm"] {
            assert_eq!(mode(name), OWNER_ONLY, "{name}");
            assert_eq!(fs::read_to_string(path(name)).unwrap(), "content");
        }
    }
}
