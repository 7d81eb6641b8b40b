//! Logical volumes of LVM in which disks arrive, instead of files. LVM's own programs make and remove them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::image::ImageError;

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
    /// What is in it is not known, thin or not: a pool need not zero what it gives.
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

    /// Bytes that are free.
    pub fn free_bytes(&self) -> Result<u64, ImageError> {
        let (tool, fields, of) = match &self.thin_pool {
            Some(pool) => ("lvs", "lv_size,data_percent", format!("{}/{pool}", self.name)),
            None => ("vgs", "vg_free", self.name.clone()),
        };
        let mut command = Command::new(tool);
        command.args(["--noheadings", "--nosuffix", "--units", "b", "--options", fields]).arg(&of);
        let said = run(tool, command, Path::new(&of))?;
        free(&said, self.thin_pool.is_some()).ok_or_else(|| ImageError::Tool {
            tool,
            path: of.into(),
            said: format!("said {:?}", said.trim()),
        })
    }
}

/// What is free, from LVM's words: bytes; of a thin pool its bytes, and how much of it is taken, in percent.
fn free(said: &str, thin: bool) -> Option<u64> {
    let mut words = said.split_whitespace();
    let bytes: u64 = words.next()?.parse().ok()?;
    if !thin {
        return words.next().is_none().then_some(bytes);
    }
    let percent: f64 = words.next()?.parse().ok().filter(|percent| (0.0..=100.0).contains(percent))?;
    Some((bytes as f64 * (1.0 - percent / 100.0)) as u64)
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

/// Runs one of LVM's programs, which waits for the group's lock as long as somebody else has it.
fn run(tool: &'static str, mut command: Command, path: &Path) -> Result<String, ImageError> {
    let failed = |said: String| ImageError::Tool { tool, path: path.to_owned(), said };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env("LC_ALL", "C");
    let started = command.spawn();
    let mut child = started.map_err(|source| ImageError::NoTool { tool, package: "lvm2", source })?;
    let deadline = Instant::now() + PATIENCE;
    // What it says is little: it fits a pipe.
    while child.try_wait().is_ok_and(|ended| ended.is_none()) {
        if Instant::now() >= deadline {
            // It may end at this very moment.
            let _ = child.kill();
            let _ = child.wait();
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
        assert_eq!(free("  1073741824\n", false), Some(1 << 30));
        assert_eq!(free("  1073741824 25.00\n", true), Some(768 << 20));
        assert_eq!(free("  1073741824 100.00\n", true), Some(0));
        for (said, thin) in
            [("", false), ("1g", false), ("1 2", false), ("1024", true), ("1024 x", true), ("1 101", true)]
        {
            assert_eq!(free(said, thin), None, "{said:?}");
        }
    }
}
