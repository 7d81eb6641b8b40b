//! Logical volumes of LVM for arriving disks, instead of files. LVM's own programs create and remove them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::image::ImageError;
use crate::program::run;
use crate::thin::{ThinPool, Usage};

/// Longest name of a new logical volume, in bytes, without its prefix; LVM permits 127, less the group's name.
const NAME_BYTES: usize = 60;
/// Prefix of the names, and a tag, by which people recognize volumes of this program.
const TAG: &str = "whimbrel";
/// Number of attempts to remove a volume that is in use, and the pause between them.
const REMOVALS: u32 = 5;
const REMOVAL_PAUSE: Duration = Duration::from_millis(500);

/// A volume group in which volumes are created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeGroup {
    /// Name of the volume group.
    pub name: String,
    /// Name of a thin pool in it; none to use the group's own extents.
    pub thin_pool: Option<String>,
}

impl VolumeGroup {
    /// Returns the path of a volume whose name is derived from `text`. LVM permits letters, digits and `+_.-`, and
    /// reserves some names with `_` and some prefixes for itself.
    pub fn path(&self, text: &str) -> PathBuf {
        let plain = |letter: char| {
            if letter.is_ascii_alphanumeric() || "+.-".contains(letter) { letter } else { '+' }
        };
        let mut name: String = text.chars().map(plain).collect();
        // The distinctive part of a name is at its end.
        if name.len() > NAME_BYTES {
            name.drain(..name.len() - NAME_BYTES);
        }
        Path::new("/dev").join(&self.name).join(format!("{TAG}-{name}"))
    }

    /// Creates a volume of at least `bytes` bytes at a [path](Self::path) of this group. Fails if the name exists. The
    /// content is undefined, except that a thin volume reads as zeros.
    pub fn create(&self, path: &Path, bytes: u64) -> Result<(), ImageError> {
        let mut command = Command::new("lvcreate");
        command.args(["--quiet", "--yes", "--wipesignatures", "y", "--addtag", TAG, "--name"]);
        command.arg(path.file_name().unwrap_or_default());
        // LVM rounds up to whole extents.
        let size = format!("{bytes}b");
        match &self.thin_pool {
            Some(pool) => {
                command.args(["--virtualsize", &size, "--thinpool"]).arg(format!("{}/{pool}", self.name))
            }
            None => command.args(["--size", &size]).arg(&self.name),
        };
        run("lvcreate", command, path).map(drop)
    }

    /// Returns the state of the thin pool, if volumes are created in one.
    ///
    /// # Errors
    /// Fails if its state cannot be read.
    pub fn thin(&self) -> Result<Option<ThinPool>, ImageError> {
        self.thin_pool.as_ref().map(|pool| ThinPool::of(&self.name, pool)).transpose()
    }

    /// Returns the usage of the group's own extents.
    ///
    /// # Errors
    /// Fails if LVM does not report it.
    pub fn usage(&self) -> Result<Usage, ImageError> {
        let mut command = Command::new("vgs");
        command.args(["--noheadings", "--nosuffix", "--units", "b", "--options", "vg_size,vg_free"]);
        command.arg(&self.name);
        let path = Path::new(&self.name);
        let message = run("vgs", command, path)?;
        usage(&message).ok_or_else(|| ImageError::Tool {
            tool: "vgs",
            path: path.to_owned(),
            message: format!("unexpected output {:?}", message.trim()),
        })
    }
}

/// Parses LVM's output: size of the group, and free part, in bytes.
fn usage(message: &str) -> Option<Usage> {
    let words: Option<Vec<u64>> = message.split_whitespace().map(|word| word.parse().ok()).collect();
    let [total_bytes, free_bytes] = words?[..] else { return None };
    Some(Usage { used_bytes: total_bytes.checked_sub(free_bytes)?, total_bytes })
}

/// Removes a volume of this program. Returns false if there was none.
pub fn remove(path: &Path) -> Result<bool, ImageError> {
    let remove = || {
        let mut command = Command::new("lvremove");
        command.args(["--quiet", "--yes"]).arg(path);
        run("lvremove", command, path)
    };
    // A program that inspects new devices may still have this one open.
    let mut tries = 0..REMOVALS;
    loop {
        match remove() {
            Ok(_) => return Ok(true),
            Err(ImageError::Tool { message, .. }) if message.contains("Failed to find") => return Ok(false),
            Err(ImageError::Tool { message, .. }) if message.contains("in use") && tries.next().is_some() => {
                std::thread::sleep(REMOVAL_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_such_as_lvm_takes() {
        let group = VolumeGroup { name: "vg0".to_owned(), thin_pool: None };
        let name = |text: &str| group.path(text).display().to_string();
        assert_eq!(name("web@3-drive0-00ff"), "/dev/vg0/whimbrel-web+3-drive0-00ff");
        assert_eq!(name("-x_tdata/../y z"), "/dev/vg0/whimbrel--x+tdata+..+y+z");
        let long = name(&format!("{}-00ff", "x".repeat(300)));
        assert!(long.len() == "/dev/vg0/whimbrel-".len() + NAME_BYTES && long.ends_with("x-00ff"), "{long}");
    }

    #[test]
    fn what_lvm_says_is_free() {
        let found = usage("  1073741824 268435456\n");
        assert_eq!(found, Some(Usage { used_bytes: 768 << 20, total_bytes: 1 << 30 }));
        for message in ["", "1g 1", "1", "1 2", "1 1 1"] {
            assert_eq!(usage(message), None, "{message:?}");
        }
    }
}
