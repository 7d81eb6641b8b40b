//! Copied disks: the image made on the destination replaces the old image and all images below it.
//!
//! The guest does not notice this. Options for caching and I/O stay; options for the old image's format and for the
//! files below it are dropped. Filters above the image (throttling) stay as they are.

use std::path::PathBuf;

use serde_json::{Map, Value as Json, json};

use super::CommandBuilder;
use crate::cmdline::QemuOption;
use crate::describe::Disk;
use crate::options::Value;

/// An image that was made for a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewImage {
    /// Path of the image.
    pub path: PathBuf,
    /// Format of the image.
    pub format: String,
    /// Length of the disk in bytes, if the file or device is longer (a logical volume).
    pub cut_to_bytes: Option<u64>,
    /// True if the image is on a block device.
    pub is_device: bool,
}

/// Result of the check whether an option belongs to a copied disk.
#[derive(Debug)]
pub(super) enum DiskRewrite {
    /// The option belongs to no copied disk.
    No,
    /// The option belongs to this disk, and names the new image now.
    Replaced {
        /// Name of the disk.
        disk: String,
        /// Option that replaces it.
        by: QemuOption,
    },
    /// The option created something that the new image does not need.
    Gone,
}

/// Keys of `-drive` and `-blockdev` for the I/O of the image file that also apply to a new image.
const KEPT_FILE_KEYS: &[&str] = &["aio", "locking", "discard", "cache.direct", "cache.no-flush"];
/// Keys of the image's own node that also apply to a new image.
const KEPT_IMAGE_KEYS: &[&str] =
    &["read-only", "auto-read-only", "discard", "detect-zeroes", "cache.direct", "cache.no-flush"];
/// Keys of the old format that do not apply to the new image's format.
const FORMAT_KEYS: &[&str] = &[
    "backing",
    "backing-file",
    "cache-clean-interval",
    "cache-size",
    "data-file",
    "discard-no-unref",
    "driver",
    "encrypt",
    "l2-cache-entry-size",
    "l2-cache-size",
    "lazy-refcounts",
    "offset",
    "overlap-check",
    "pass-discard-other",
    "pass-discard-request",
    "pass-discard-snapshot",
    "refcount-cache-size",
    "size",
];

impl CommandBuilder<'_> {
    pub(super) fn copied(&self, option: &QemuOption) -> DiskRewrite {
        let value = option.parse_value();
        if option.name == "drive" {
            let is_it = |disk: &&Disk| match value.get("id") {
                Some(id) => disk.name == id,
                None => {
                    disk.file.is_some()
                        && disk.file == value.get("file").or_else(|| value.get("file.filename"))
                }
            };
            let disk = self.vm.disks.iter().find(is_it);
            let image = disk.and_then(|disk| Some((disk, self.rules.images.get(&disk.name)?)));
            return image.map_or(DiskRewrite::No, |(disk, image)| DiskRewrite::Replaced {
                disk: disk.name.clone(),
                by: drive(option, value, image),
            });
        }
        let Some(name) = value.get("node-name") else { return DiskRewrite::No };
        let mut used = false;
        for disk in &self.vm.disks {
            let Some(nodes) = &disk.nodes else { continue };
            let below = nodes.below.contains(&name);
            match self.rules.images.get(&disk.name) {
                Some(image) if nodes.image == name => {
                    return DiskRewrite::Replaced {
                        disk: disk.name.clone(),
                        by: self.blockdev(&value, &name, nodes.below.as_slice(), image),
                    };
                }
                Some(_) => used |= below,
                // Another disk, which is not copied, still needs it.
                None if below || nodes.image == name => return DiskRewrite::No,
                None => {}
            }
        }
        if used { DiskRewrite::Gone } else { DiskRewrite::No }
    }

    /// Checks that each image has exactly one option: a guest whose disk was copied must not get another disk.
    pub(super) fn check_images_used(&mut self) {
        for disk in self.rules.images.keys() {
            let options = self.images_used.get(disk).copied().unwrap_or_default();
            if options != 1 {
                let what = format!(
                    "disk {disk} must occur in exactly one option to be replaced by its copy, and occurs \
                         in {options}"
                );
                let advice = "give the disk an id (-drive id=…) or a node name when the guest is started next, do not \
                     allow -drive or -blockdev by name, or let both hosts share it (--disk NAME=shared)";
                self.problem("disk-unclear", what, advice);
            }
        }
    }

    /// Returns the node of an image, with a node for its file below it.
    fn blockdev(&self, value: &Value, name: &str, below: &[String], image: &NewImage) -> QemuOption {
        let declared = value.get("file").filter(|file| below.contains(file));
        let file_option = declared.as_ref().and_then(|file| {
            let names_it =
                |option: &&QemuOption| option.parse_value().get("node-name").as_ref() == Some(file);
            self.vm.options.iter().filter(|option| option.name == "blockdev").find(names_it)
        });
        let of_file = |key: &str| match file_option {
            Some(option) => option.parse_value().get(key),
            None => value.get(&format!("file.{key}")),
        };
        let driver = if image.is_device { "host_device" } else { "file" };
        let mut file = Value::Json(Map::new());
        file.set("driver", driver);
        file.set("filename", &image.path.to_string_lossy());
        if let Some(name) = declared.clone().or_else(|| value.get("file.node-name")) {
            file.set("node-name", &name);
        }
        for key in KEPT_FILE_KEYS {
            copy_setting(&mut file, key, of_file(key));
        }
        let mut node = Value::Json(Map::new());
        node.set("driver", &image.format);
        node.set("node-name", name);
        for key in KEPT_IMAGE_KEYS {
            copy_setting(&mut node, key, value.get(key));
        }
        if let Some(bytes) = image.cut_to_bytes {
            node.set_json("size", bytes.into());
        }
        if let (Value::Json(node), Value::Json(file)) = (&mut node, file) {
            node.insert("file".to_owned(), Json::Object(file));
        }
        QemuOption::new("blockdev", node.to_string())
    }
}

/// Copies a setting in the type that QEMU's JSON requires.
fn copy_setting(node: &mut Value, key: &str, setting: Option<String>) {
    let Some(setting) = setting else { return };
    let is_switch = ["read-only", "auto-read-only", "cache.direct", "cache.no-flush"].contains(&key);
    node.set_json(key, if is_switch { json!(setting == "on") } else { json!(setting) });
}

/// Returns a `-drive` with its caching and I/O options, and the new image.
fn drive(option: &QemuOption, mut value: Value, image: &NewImage) -> QemuOption {
    let locking = value.get("file.locking");
    for key in FORMAT_KEYS.iter().chain(&["file", "format"]) {
        value.remove(key);
    }
    value.set("file", &image.path.to_string_lossy());
    value.set("format", &image.format);
    if let Some(locking) = locking {
        value.set("file.locking", &locking);
    }
    if let Some(bytes) = image.cut_to_bytes {
        value.set("size", &bytes.to_string());
    }
    QemuOption { value: Some(value.to_string()), ..option.clone() }
}
