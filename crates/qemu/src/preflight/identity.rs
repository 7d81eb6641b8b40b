//! Identity of files and block devices, which is comparable between hosts.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// File systems that several hosts can mount at once.
const SHARED_FILE_SYSTEMS: &[&str] = &[
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "ocfs2",
    "gfs2",
    "glusterfs",
    "lustre",
    "gpfs",
    "9p",
    "virtiofs",
    "beegfs",
];
/// Value of [`FileIdentity::file_system`] for a block device.
const BLOCK_DEVICE: &str = "block device";
/// Prefixes of names that are unique world-wide. `t10.` and `nvme.` consist of names and serial numbers, which are
/// equal for emulated disks; an NAA of type 3 is chosen locally.
const WORLD_WIDE: &[&str] = &["naa.2", "naa.5", "naa.6", "eui.", "uuid."];
/// Maximum depth of stacked device-mapper devices.
const MAX_LAYERS: usize = 16;

/// Identity of a file, equal if two hosts see the same file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Type of the file system, or `block device`.
    pub file_system: String,
    /// Source of the mount, e.g. `server:/export`; for a block device its world-wide name, or its number.
    pub mounted: String,
    /// Inode number; 0 for a block device.
    pub inode: u64,
    /// Boot id of the host, for file systems that only one host can have, and for block devices without a name other
    /// than this host's number; equal for two agents in namespaces of one host.
    pub host: Option<String>,
}

impl FileIdentity {
    /// Returns the identity of a regular file or a block device; `None` for anything else or a missing file.
    pub fn of(path: &Path) -> Option<Self> {
        let path = path.canonicalize().ok()?;
        let meta = std::fs::metadata(&path).ok()?;
        if meta.file_type().is_block_device() {
            return Some(Self::of_block_device(Path::new("/sys/dev/block"), &meta));
        }
        if !meta.file_type().is_file() {
            return None;
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        let (file_system, mounted) = mount_of(&mounts, &path)?;
        let host = (!is_shared(&file_system)).then(this_boot);
        Some(Self { file_system, mounted, inode: meta.ino(), host })
    }

    fn of_block_device(sys: &Path, meta: &Metadata) -> Self {
        let number = meta.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        Self::of_device_number(sys, &number)
    }

    fn of_device_number(sys: &Path, number: &str) -> Self {
        let name = sys.join(number).canonicalize().ok().and_then(|device| world_wide_name(&device, 0));
        let host = name.is_none().then(this_boot);
        Self {
            file_system: BLOCK_DEVICE.to_owned(),
            mounted: name.unwrap_or_else(|| number.to_owned()),
            inode: 0,
            host,
        }
    }

    /// Returns true if both are one file or device of the host that inspects them, even in different boots of that
    /// host.
    pub fn is_same_here(&self, other: &Self) -> bool {
        (&self.file_system, &self.mounted, self.inode) == (&other.file_system, &other.mounted, other.inode)
    }

    /// Returns true if several hosts can have its file system, or the device, at once.
    pub fn is_on_shared_storage(&self) -> bool {
        is_shared(&self.file_system) || self.is_block_device()
    }

    fn is_block_device(&self) -> bool {
        self.file_system == BLOCK_DEVICE
    }

    /// Returns true if two files may be one file of a server that the hosts know by different names.
    pub fn can_be_on_one_server(&self, other: &Self) -> bool {
        let of_servers = is_shared(&self.file_system) && is_shared(&other.file_system);
        of_servers && self.inode == other.inode && self.mounted != other.mounted
    }

    /// Returns true if both may be the same device although nothing proves it: one of two block devices has no name
    /// that is valid on other hosts.
    pub fn can_be_same(&self, other: &Self) -> bool {
        let unnamed = self.host.is_some() || other.host.is_some();
        self.is_block_device() && other.is_block_device() && unnamed && self.host != other.host
    }
}

fn this_boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Returns a name of a block device that is the same on every host that sees it, from its directory in sysfs: the
/// world-wide name that the storage assigns, or a device-mapper device's UUID together with those of all devices
/// below it.
///
/// A UUID alone would not suffice: cloned hosts have local volumes with the same UUIDs. A partition is named by its
/// place on such a device.
fn world_wide_name(device: &Path, layer: usize) -> Option<String> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(device.join(name)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    if layer > MAX_LAYERS {
        return None;
    }
    if let (Some(number), Some(start)) = (read("partition"), read("start")) {
        let whole = world_wide_name(device.parent()?, layer + 1)?;
        return Some(format!("{whole} partition {number} at {start}"));
    }
    if let Some(uuid) = read("dm/uuid") {
        let below = std::fs::read_dir(device.join("slaves")).ok()?;
        let below: Option<BTreeSet<String>> =
            below.map(|slave| world_wide_name(&slave.ok()?.path().canonicalize().ok()?, layer + 1)).collect();
        let below: Vec<String> = below?.into_iter().collect();
        // Several paths to one device are that device, on a host with one path as on one with two.
        return match below.as_slice() {
            [] => None,
            [one] if uuid.starts_with("mpath-") => Some(one.clone()),
            all => Some(format!("{uuid} on {}", all.join(", "))),
        };
    }
    let name = read("wwid").or_else(|| read("device/wwid"))?;
    WORLD_WIDE.iter().any(|start| name.starts_with(start)).then_some(name)
}

fn is_shared(file_system: &str) -> bool {
    let plain = file_system.strip_prefix("fuse.").unwrap_or(file_system);
    SHARED_FILE_SYSTEMS.contains(&plain)
}

/// Returns type and source of the mount that contains a path: the longest mount point above it, the
/// last one of equals. Lines: `36 35 98:0 /root /mount options - ext4 /dev/sda1 rw`.
fn mount_of(mountinfo: &str, path: &Path) -> Option<(String, String)> {
    let mount = |line: &str| {
        let (head, tail) = line.split_once(" - ")?;
        let point = PathBuf::from(unescape(head.split(' ').nth(4)?));
        let mut tail = tail.split(' ');
        let (kind, source) = (tail.next()?.to_owned(), unescape(tail.next()?));
        path.starts_with(&point).then(|| (point.components().count(), kind, source))
    };
    // `max_by_key` returns the last of equals.
    let found = mountinfo.lines().filter_map(mount).max_by_key(|(depth, _, _)| *depth)?;
    Some((found.1, found.2))
}

/// Decodes spaces and similar characters, which are octal in mountinfo.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_files_have_different_identities() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let one = FileIdentity::of(file.path()).unwrap();
        assert_eq!(FileIdentity::of(file.path()), Some(one.clone()));
        let other = tempfile::NamedTempFile::new().unwrap();
        assert_ne!(FileIdentity::of(other.path()), Some(one));
        assert_eq!(FileIdentity::of(Path::new("/nonexistent")), None);
        assert_eq!(FileIdentity::of(Path::new("/dev/null")), None);
    }

    #[test]
    fn mounts_are_found() {
        let mounts = "20 1 8:1 / / rw - ext4 /dev/sda1 rw
30 20 0:40 / /vm rw shared:1 - nfs4 server:/export\\040a rw
31 30 0:41 / /vm/a\\040b rw - tmpfs tmpfs rw
";
        let mount = |path: &str| mount_of(mounts, Path::new(path)).unwrap();
        assert_eq!(mount("/vm/x.img"), ("nfs4".to_owned(), "server:/export a".to_owned()));
        assert_eq!(mount("/vm/a b/x").0, "tmpfs");
        assert_eq!(mount("/vmx").0, "ext4");
        assert!(is_shared("fuse.glusterfs") && is_shared("nfs4") && !is_shared("ext4"));
    }

    /// A host's sysfs, as far as these tests need it.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            let sys = Self(tempfile::tempdir().unwrap());
            std::fs::create_dir(sys.0.path().join("block")).unwrap();
            sys
        }

        /// Creates a device with this number and these files, on top of the devices `on`.
        fn device(&self, number: &str, path: &str, files: &[(&str, &str)], on: &[&str]) {
            let place = self.0.path().join(path);
            for (name, text) in files {
                let file = place.join(name);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, format!("{text}\n")).unwrap();
            }
            std::fs::create_dir_all(place.join("slaves")).unwrap();
            for other in on {
                let name = Path::new(other).file_name().unwrap();
                std::os::unix::fs::symlink(self.0.path().join(other), place.join("slaves").join(name))
                    .unwrap();
            }
            std::os::unix::fs::symlink(place, self.0.path().join("block").join(number)).unwrap();
        }

        fn see(&self, number: &str) -> FileIdentity {
            FileIdentity::of_device_number(&self.0.path().join("block"), number)
        }
    }

    #[test]
    fn block_devices_are_identified_by_the_storage_name() {
        let (here, there) = (Sys::new(), Sys::new());
        let lun = ("device/wwid", "naa.600a098038314f6a2b5d4c2d4f2d3157");
        here.device("8:16", "sdb", &[lun], &[]);
        there.device("8:32", "sdc", &[lun], &[]);
        assert_eq!(here.see("8:16"), there.see("8:32"));
        assert_eq!(here.see("8:16").host, None);
        assert!(here.see("8:16").is_on_shared_storage());

        here.device("8:17", "sdb/sdb1", &[("partition", "1"), ("start", "2048")], &[]);
        here.device("8:18", "sdb/sdb2", &[("partition", "2"), ("start", "4096")], &[]);
        there.device("8:33", "sdc/sdc1", &[("partition", "1"), ("start", "2048")], &[]);
        assert_eq!(here.see("8:17"), there.see("8:33"));
        assert_ne!(here.see("8:18"), there.see("8:33"));
        assert_ne!(here.see("8:16"), there.see("8:33"));

        // A volume on it, which one host reaches by two paths.
        there.device("8:48", "sdd", &[lun], &[]);
        there.device("253:0", "dm-0", &[("dm/uuid", "mpath-3600a098")], &["sdc", "sdd"]);
        let volume = ("dm/uuid", "LVM-vg1lv1");
        here.device("253:3", "dm-3", &[volume], &["sdb"]);
        there.device("253:1", "dm-1", &[volume], &["dm-0"]);
        assert_eq!(here.see("253:3"), there.see("253:1"));
        there.device("253:2", "dm-2", &[("dm/uuid", "LVM-vg1lv2")], &["dm-0"]);
        assert_ne!(here.see("253:3"), there.see("253:2"));
    }

    #[test]
    fn block_devices_without_such_a_name_are_their_hosts() {
        let sys = Sys::new();
        sys.device("254:0", "vda", &[("serial", "disk0")], &[]);
        sys.device("8:0", "sda", &[("device/wwid", "t10.ATA     QEMU HARDDISK   QM00001")], &[]);
        // A clone of this host has a volume of the same name.
        sys.device("253:0", "dm-0", &[("dm/uuid", "LVM-vg1lv1")], &["vda"]);
        sys.device("253:1", "dm-1", &[("dm/uuid", "")], &["vda"]);
        for number in ["254:0", "8:0", "253:0", "253:1", "7:99"] {
            let one = sys.see(number);
            assert_eq!((one.mounted.as_str(), one.host.clone()), (number, Some(this_boot())));
            let elsewhere = FileIdentity { host: Some("another boot".to_owned()), ..one.clone() };
            assert!(one.can_be_same(&elsewhere) && !one.can_be_same(&one));
        }
        assert_ne!(sys.see("254:0"), sys.see("8:0"));
        assert!(!sys.see("254:0").can_be_same(&sys.see("8:0")), "of one host they are known by number");
    }
}
