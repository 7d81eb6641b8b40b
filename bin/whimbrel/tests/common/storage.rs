//! Storage with limits.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of its own, of the wanted size; unmounted when dropped.
pub struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    pub fn mount(directory: &Path, size: &str) -> Self {
        let options = format!("size={size}");
        let mut mount = Command::new("mount");
        assert!(
            mount.args(["-t", "tmpfs", "-o", &options, "none"]).arg(directory).status().unwrap().success()
        );
        Self(directory.to_owned())
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A block device over a file; gone when dropped.
pub struct LoopDevice(pub PathBuf);

impl LoopDevice {
    pub fn over(file: &Path) -> Self {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        Self(String::from_utf8(made.stdout).unwrap().trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
