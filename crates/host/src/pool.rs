//! Storage for images of arriving disks: a directory, or a volume group of LVM.
//!
//! | module | content |
//! |---|---|
//! | [`room`] | check for free space, before disks arrive |
//! | [`watch`] | check for free space while they arrive |

mod room;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};

use block::image::{self, Format, ImageError};
use block::thin::NewVolume;
use block::volume::{self, VolumeGroup};
use proto::MigrationId;
use qemu::preflight::FileIdentity;
use qemu::preflight::files::created_unix_ns;
use serde::{Deserialize, Serialize};

pub use watch::PoolWatch;

/// Storage for images, and the share that must stay free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Kind of storage.
    pub storage: Storage,
    /// Part that stays free, in percent of all: a migration that would use more is refused, or ends.
    pub keep_free_percent: u8,
}

/// Default part of a thin pool that stays free: a full pool stops every VM in it.
pub(crate) const THIN_KEEP_FREE_PERCENT: u8 = 5;

/// Kind of storage for images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Files of a file system of this host.
    Directory {
        /// The directory.
        path: PathBuf,
        /// Format of the images.
        format: PoolFormat,
    },
    /// Logical volumes, which hold raw bytes.
    Volumes(VolumeGroup),
}

/// The format of images that are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoolFormat {
    /// The source's format, if that is raw or qcow2; raw otherwise.
    #[default]
    Same,
    /// Raw, sparse.
    Raw,
    /// QEMU's own.
    Qcow2,
}

/// An image as it will be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageLocation {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    /// The group of the volume, if it is one.
    group: Option<VolumeGroup>,
}

impl Pool {
    /// Returns the location for the image of a disk: no other image has it, as long as `unique` is unique.
    pub(crate) fn location(
        &self,
        migration: &MigrationId,
        disk: &str,
        format: Option<&str>,
        unique: &str,
    ) -> ImageLocation {
        let name = format!("{}@{}-{disk}-{unique}", migration.vm, migration.epoch);
        match &self.storage {
            Storage::Directory { path, format: wanted } => {
                let format = match wanted {
                    PoolFormat::Raw => Format::Raw,
                    PoolFormat::Qcow2 => Format::Qcow2,
                    PoolFormat::Same => format.and_then(Format::of).unwrap_or(Format::Raw),
                };
                let path = path.join(format!("{}.{format}", plain(&name)));
                ImageLocation { path, format, group: None }
            }
            Storage::Volumes(group) => {
                ImageLocation { path: group.path(&name), format: Format::Raw, group: Some(group.clone()) }
            }
        }
    }

    /// Returns the human-readable name of the pool.
    pub(crate) fn display_name(&self) -> String {
        match &self.storage {
            Storage::Directory { path, .. } => format!("the directory for images, {}", path.display()),
            Storage::Volumes(VolumeGroup { name, thin_pool: None }) => {
                format!("the volume group for images, {name}")
            }
            Storage::Volumes(VolumeGroup { name, thin_pool: Some(pool) }) => {
                format!("the thin pool for images, {name}/{pool}")
            }
        }
    }
}

impl ImageLocation {
    /// True if it reads as zeros when it is new. Data that is not sent must read as zeros.
    pub(crate) fn is_blank(&self) -> bool {
        self.grows()
    }

    /// True if it allocates space as it is written.
    pub(crate) fn grows(&self) -> bool {
        self.group.as_ref().is_none_or(|group| group.thin_pool.is_some())
    }

    /// True if it is a block device, which may be longer than the disk.
    pub(crate) fn is_device(&self) -> bool {
        self.group.is_some()
    }

    /// Returns the space in the pool that it will use, for a disk of `bytes` bytes with `used_bytes` in use.
    pub(crate) fn needed_bytes(&self, bytes: u64, used_bytes: u64) -> u64 {
        if !self.grows() {
            return bytes;
        }
        // A twentieth more than is in use now: the guest goes on writing.
        let content_bytes = used_bytes.saturating_add(used_bytes / 20).min(bytes);
        content_bytes.saturating_add(self.format.overhead_bytes(bytes, content_bytes))
    }

    /// Makes the image. For a thin volume returns the state with which it is written without using more of its pool
    /// than needed.
    pub(crate) fn make(&self, bytes: u64) -> Result<Option<NewVolume>, ImageError> {
        let Some(group) = &self.group else {
            return image::create(&self.path, self.format, bytes).map(|()| None);
        };
        group.create(&self.path, bytes)?;
        Ok(group.thin()?.map(|pool| NewVolume::new(&pool)))
    }
}

/// Identity of an image as it was made, so that no other file is mistaken for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeImage {
    /// The disk, by its name in the description.
    pub(crate) disk: String,
    /// Path of the image.
    pub path: PathBuf,
    pub(crate) identity: FileIdentity,
    /// Time at which its inode was made; none if the file system does not record it.
    pub(crate) created_unix_ns: Option<u64>,
}

impl MadeImage {
    /// Returns the identity of the file that is at the path now; none if there is no file.
    pub(crate) fn at(path: &Path, disk: &str) -> Option<Self> {
        let meta = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
        let created_unix_ns = created_unix_ns(&meta);
        Some(Self {
            disk: disk.to_owned(),
            path: path.to_owned(),
            identity: FileIdentity::of(path)?,
            created_unix_ns,
        })
    }

    /// True if another file is at its path now.
    pub(crate) fn is_replaced(&self) -> bool {
        let is_it = |now: &Self| {
            now.identity.is_same_here(&self.identity) && now.created_unix_ns == self.created_unix_ns
        };
        Self::at(&self.path, &self.disk).is_some_and(|now| !is_it(&now))
    }
}

/// Removes the file or volume at a path; returns true if there was one.
pub(crate) fn remove(path: &Path) -> Result<bool, ImageError> {
    // A volume may exist although its device does not. A file system may be mounted there, too.
    let is_file = fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    if path.starts_with("/dev") && !is_file {
        return volume::remove(path);
    }
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(ImageError::Make { path: path.to_owned(), source }),
    }
}

/// Returns a name that every file system accepts.
fn plain(name: &str) -> String {
    let plain =
        |letter: char| if letter.is_ascii_alphanumeric() || "-_.@".contains(letter) { letter } else { '_' };
    name.chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use proto::{Epoch, VmName};

    use super::*;

    fn pool(storage: Storage) -> Pool {
        Pool { storage, keep_free_percent: 0 }
    }

    #[test]
    fn an_image_s_name_is_nobody_else_s() {
        let id = |vm: &str, epoch| MigrationId { vm: VmName::new(vm).unwrap(), epoch: Epoch(epoch) };
        let directory = |format| pool(Storage::Directory { path: "/pool".into(), format });
        let path = |pool: &Pool, disk, format| pool.location(&id("web", 3), disk, format, "7f").path;
        assert_eq!(
            path(&directory(PoolFormat::Same), "drive0", Some("qcow2")),
            Path::new("/pool/web@3-drive0-7f.qcow2")
        );
        assert_eq!(
            path(&directory(PoolFormat::Same), "drive0", Some("vmdk")),
            Path::new("/pool/web@3-drive0-7f.raw")
        );
        assert_eq!(
            path(&directory(PoolFormat::Raw), "../x", Some("qcow2")),
            Path::new("/pool/web@3-.._x-7f.raw")
        );
        let volumes = pool(Storage::Volumes(VolumeGroup { name: "vg0".into(), thin_pool: None }));
        assert_eq!(path(&volumes, "../x", Some("qcow2")), Path::new("/dev/vg0/whimbrel-web+3-..+x-7f"));
    }

    /// A host that was rebooted still has its images.
    #[test]
    fn an_image_stays_the_same_over_a_boot() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        fs::write(&path, "disk").unwrap();
        let mut made = MadeImage::at(&path, "disk0").unwrap();
        made.identity.host = Some("the last boot".to_owned());
        assert!(!made.is_replaced());
        let away = folder.path().join("away");
        fs::rename(&path, &away).unwrap();
        assert!(!made.is_replaced());
        fs::copy(&away, &path).unwrap();
        assert!(made.is_replaced());
    }

    #[test]
    fn what_does_not_grow_takes_all_of_its_length() {
        let id = MigrationId { vm: VmName::new("web").unwrap(), epoch: Epoch(1) };
        let location = |storage| pool(storage).location(&id, "sda", None, "7f");
        let needed = |storage| location(storage).needed_bytes(100 << 30, 20 << 30) >> 30;
        assert_eq!(needed(Storage::Directory { path: "/pool".into(), format: PoolFormat::Same }), 21);
        assert_eq!(
            needed(Storage::Volumes(VolumeGroup { name: "vg0".into(), thin_pool: Some("thin".into()) })),
            21
        );
        assert_eq!(needed(Storage::Volumes(VolumeGroup { name: "vg0".into(), thin_pool: None })), 100);
    }

    /// At most the disk's length plus the format's own data: `qemu-img measure` has 384 KiB for 1 GiB.
    #[test]
    fn a_full_disk_takes_its_length_and_what_its_format_does() {
        let id = MigrationId { vm: VmName::new("web").unwrap(), epoch: Epoch(1) };
        let needed = |format| {
            let pool = pool(Storage::Directory { path: "/pool".into(), format });
            pool.location(&id, "sda", None, "7f").needed_bytes(1 << 30, 1 << 30) - (1 << 30)
        };
        assert_eq!(needed(PoolFormat::Raw), 0);
        assert!((384 << 10..2 << 20).contains(&needed(PoolFormat::Qcow2)));
    }
}
