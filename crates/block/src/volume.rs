//! Logical volumes of LVM in which disks arrive, instead of files. LVM's own programs make and remove them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::image::ImageError;
use crate::thin::{ThinPool, Usage};

/// Longest name of a logical volume that is made, without what it begins with; LVM takes 127, less the group's.
const NAME_BYTES: usize = 60;
/// What names begin with, and a tag: by it people know what was made here.
const TAG: &str = "whimbrel";
/// How long one of LVM's programs may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(5);
/// How often a volume that is in use is tried again to be removed, and after how long.
const REMOVALS: u32 = 5;
const REMOVAL_PAUSE: Duration = Duration::from_millis(500);

/// Where volumes are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Name of the volume group.
    pub name: String,
    /// Name of a thin pool in it; none to take the group's own room.
    pub thin_pool: Option<String>,
}

impl Group {
    /// Where a volume will be, of a name made of this text. LVM takes letters, digits and `+_.-`, and has uses of its
    /// own for some names with `_` in them and some that begin otherwise.
    pub fn path(&self, text: &str) -> PathBuf {
        let plain = |letter: char| {
            if letter.is_ascii_alphanumeric() || "+.-".contains(letter) { letter } else { '+' }
        };
        let mut name: String = text.chars().map(plain).collect();
        // What makes it unlike all others stands at the end.
        if name.len() > NAME_BYTES {
            name.drain(..name.len() - NAME_BYTES);
        }
        Path::new("/dev").join(&self.name).join(format!("{TAG}-{name}"))
    }

    /// Makes a volume of at least so many bytes at a [path](Self::path) of this group. One of that name is an error.
    /// What is in it is not known, but for a thin one, which reads as zeros.
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

    /// The thin pool, if volumes are made in one.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn thin(&self) -> Result<Option<ThinPool>, ImageError> {
        self.thin_pool.as_ref().map(|pool| ThinPool::of(&self.name, pool)).transpose()
    }

    /// What is in use of the group's own room.
    ///
    /// # Errors
    /// When LVM does not tell.
    pub fn usage(&self) -> Result<Usage, ImageError> {
        let mut command = Command::new("vgs");
        command.args(["--noheadings", "--nosuffix", "--units", "b", "--options", "vg_size,vg_free"]);
        command.arg(&self.name);
        let path = Path::new(&self.name);
        let said = run("vgs", command, path)?;
        usage(&said).ok_or_else(|| ImageError::Tool {
            tool: "vgs",
            path: path.to_owned(),
            said: format!("said {:?}", said.trim()),
        })
    }
}

/// What is in use, from LVM's words: how large the group is, and how much of it is free, in bytes.
fn usage(said: &str) -> Option<Usage> {
    let words: Option<Vec<u64>> = said.split_whitespace().map(|word| word.parse().ok()).collect();
    let [total_bytes, free_bytes] = words?[..] else { return None };
    Some(Usage { used_bytes: total_bytes.checked_sub(free_bytes)?, total_bytes })
}

/// Removes a volume that was made here; whether there was one.
pub fn remove(path: &Path) -> Result<bool, ImageError> {
    let remove = || {
        let mut command = Command::new("lvremove");
        command.args(["--quiet", "--yes"]).arg(path);
        run("lvremove", command, path)
    };
    // Whoever looks at new devices may still look at this one.
    let mut tries = 0..REMOVALS;
    loop {
        match remove() {
            Ok(_) => return Ok(true),
            Err(ImageError::Tool { said, .. }) if said.contains("Failed to find") => return Ok(false),
            Err(ImageError::Tool { said, .. }) if said.contains("in use") && tries.next().is_some() => {
                std::thread::sleep(REMOVAL_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Runs a program of LVM or device mapper. LVM's wait for the group's lock as long as another has it.
pub(crate) fn run(tool: &'static str, mut command: Command, path: &Path) -> Result<String, ImageError> {
    let failed = |said: String| ImageError::Tool { tool, path: path.to_owned(), said };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env("LC_ALL", "C");
    let started = command.spawn();
    let mut child = started.map_err(|source| ImageError::NoTool { tool, package: "lvm2", source })?;
    let deadline = Instant::now() + PATIENCE;
    // What it says is little: it fits a pipe.
    while child.try_wait().is_ok_and(|ended| ended.is_none()) {
        if Instant::now() >= deadline {
            // It may end at this very moment; or only when the kernel lets go of it.
            let _ = child.kill();
            std::thread::spawn(move || child.wait());
            return Err(failed(format!("did not end within {} s", PATIENCE.as_secs())));
        }
        std::thread::sleep(LOOK);
    }
    let done = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    Err(failed(String::from_utf8_lossy(&done.stderr).trim().replace('\n', "; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_such_as_lvm_takes() {
        let group = Group { name: "vg0".to_owned(), thin_pool: None };
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
        for said in ["", "1g 1", "1", "1 2", "1 1 1"] {
            assert_eq!(usage(said), None, "{said:?}");
        }
    }
}
