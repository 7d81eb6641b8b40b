//! Human-readable files that a VM's QEMU writes: output of serial ports, and logs.
//!
//! They outlive the VM's stay on this host, and the host's next boot. Each arrival has a directory of its own, so that
//! nothing is overwritten; links in the run directory lead there while the VM is here.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use tracing::warn;

use crate::config::Config;

/// Returns the directory for the files of one arrival.
pub(crate) fn directory(config: &Config, arrival: &str) -> PathBuf {
    config.log_dir.join(arrival)
}

/// Returns the directories that the agent made for a VM's QEMU and for its logs, if it did.
pub(crate) fn own_directories(config: &Config, qmp: &Path) -> Option<(PathBuf, PathBuf)> {
    let run = qmp.parent().filter(|found| found.parent() == Some(&config.run_dir.join("vms")))?;
    let name = run.file_name()?.to_str()?;
    Some((run.to_owned(), directory(config, name)))
}

/// Makes the directory for files of these names, and links to them in `links`.
pub(crate) fn make(directory: &Path, names: &[String], links: &Path) -> io::Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    names.iter().try_for_each(|name| symlink(directory.join(name), links.join(name)))
}

/// Removes empty files, and the directory if it is empty then.
pub(crate) fn remove_empty(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let is_empty = entry.metadata().is_ok_and(|found| found.is_file() && found.len() == 0);
        if is_empty && let Err(error) = fs::remove_file(entry.path()) {
            warn!(file = %entry.path().display(), %error, "cannot remove the empty file");
        }
    }
    // A directory with files stays.
    let _ = fs::remove_dir(directory);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (logs, links) = (folder.path().join("logs/vm@1"), folder.path().join("run"));
        fs::create_dir(&links).unwrap();
        make(&logs, &[], &links).unwrap();
        assert!(!logs.exists());
        make(&logs, &["written".to_owned(), "empty".to_owned()], &links).unwrap();
        fs::write(links.join("written"), "boot").unwrap();
        fs::write(links.join("empty"), "").unwrap();
        fs::remove_dir_all(&links).unwrap();
        remove_empty(&logs);
        assert_eq!(fs::read_to_string(logs.join("written")).unwrap(), "boot");
        assert!(!logs.join("empty").exists());
        fs::remove_file(logs.join("written")).unwrap();
        remove_empty(&logs);
        assert!(!logs.exists());
    }
}
