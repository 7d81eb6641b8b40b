//! Disks that are copied: in the place of an image with all below it comes the one that was made here.
//!
//! The guest sees nothing of it. What QEMU was told about caching and I/O stays; what was said about the old image's
//! format and about the files below it goes. Filters above the image (throttling) stay as they are.

use std::path::PathBuf;

use serde_json::{Map, Value as Json, json};

use super::Build;
use crate::cmdline::Given;
use crate::describe::Disk;
use crate::options::Value;

/// An image that was made for a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewImage {
    /// Where it is.
    pub path: PathBuf,
    /// Its format.
    pub format: String,
    /// The disk's length where the place has more (a logical volume), in bytes.
    pub cut_to_bytes: Option<u64>,
    /// Whether the place is a block device.
    pub is_device: bool,
}

/// What becomes of an option.
#[derive(Debug)]
pub(super) enum Copied {
    /// It is none of a copied disk.
    No,
    /// It is this disk's, and names the new image now.
    Replaced {
        /// The disk's name.
        disk: String,
        /// What takes the option's place.
        by: Given,
    },
    /// It made something that the new image has no use for.
    Gone,
}

/// What a `-drive` or `-blockdev` says about the I/O of its image and that a new image takes over.
const KEPT_OF_FILE: &[&str] = &["aio", "locking", "discard", "cache.direct", "cache.no-flush"];
/// The same of the image's own node.
const KEPT_OF_IMAGE: &[&str] =
    &["read-only", "auto-read-only", "discard", "detect-zeroes", "cache.direct", "cache.no-flush"];
/// What only a format has that need not be the new one's.
const OF_FORMAT: &[&str] = &[
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

impl Build<'_> {
    pub(super) fn copied(&self, option: &Given) -> Copied {
        let value = option.parsed();
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
            return image.map_or(Copied::No, |(disk, image)| Copied::Replaced {
                disk: disk.name.clone(),
                by: drive(option, value, image),
            });
        }
        let Some(name) = value.get("node-name") else { return Copied::No };
        let mut used = false;
        for disk in &self.vm.disks {
            let Some(nodes) = &disk.nodes else { continue };
            let below = nodes.below.contains(&name);
            match self.rules.images.get(&disk.name) {
                Some(image) if nodes.image == name => {
                    return Copied::Replaced {
                        disk: disk.name.clone(),
                        by: self.blockdev(&value, &name, nodes.below.as_slice(), image),
                    };
                }
                Some(_) => used |= below,
                // Another disk, which is not copied, needs it still.
                None if below || nodes.image == name => return Copied::No,
                None => {}
            }
        }
        if used { Copied::Gone } else { Copied::No }
    }

    /// A guest whose disk was copied must not be given another one: each image has exactly one option.
    pub(super) fn all_images_are_used(&mut self) {
        for disk in self.rules.images.keys() {
            let options = self.images_used.get(disk).copied().unwrap_or_default();
            if options != 1 {
                let what =
                    format!("disk {disk} was to be replaced by its copy in one option, and is in {options}");
                let what_to_do = "give the disk an id (-drive id=…) or a node name when the guest is started next, do not \
                     allow -drive or -blockdev by name, or let both hosts share it (--disk NAME=shared)";
                self.problem("disk-unclear", what, what_to_do);
            }
        }
    }

    /// The node of an image, with one for its file below it.
    fn blockdev(&self, value: &Value, name: &str, below: &[String], image: &NewImage) -> Given {
        let declared = value.get("file").filter(|file| below.contains(file));
        let file_option = declared.as_ref().and_then(|file| {
            let names_it = |option: &&Given| option.parsed().get("node-name").as_ref() == Some(file);
            self.vm.options.iter().filter(|option| option.name == "blockdev").find(names_it)
        });
        let of_file = |key: &str| match file_option {
            Some(option) => option.parsed().get(key),
            None => value.get(&format!("file.{key}")),
        };
        let driver = if image.is_device { "host_device" } else { "file" };
        let mut file = Value::Json(Map::new());
        file.set("driver", driver);
        file.set("filename", &image.path.to_string_lossy());
        if let Some(name) = declared.clone().or_else(|| value.get("file.node-name")) {
            file.set("node-name", &name);
        }
        for key in KEPT_OF_FILE {
            keep(&mut file, key, of_file(key));
        }
        let mut node = Value::Json(Map::new());
        node.set("driver", &image.format);
        node.set("node-name", name);
        for key in KEPT_OF_IMAGE {
            keep(&mut node, key, value.get(key));
        }
        if let Some(bytes) = image.cut_to_bytes {
            node.set_json("size", bytes.into());
        }
        if let (Value::Json(node), Value::Json(file)) = (&mut node, file) {
            node.insert("file".to_owned(), Json::Object(file));
        }
        Given::new("blockdev", node.to_string())
    }
}

/// Takes a setting over, as QEMU's JSON wants it.
fn keep(node: &mut Value, key: &str, setting: Option<String>) {
    let Some(setting) = setting else { return };
    let is_switch = ["read-only", "auto-read-only", "cache.direct", "cache.no-flush"].contains(&key);
    node.set_json(key, if is_switch { json!(setting == "on") } else { json!(setting) });
}

/// A `-drive` with its way of caching and I/O, and the new image.
fn drive(option: &Given, mut value: Value, image: &NewImage) -> Given {
    let locking = value.get("file.locking");
    for key in OF_FORMAT.iter().chain(&["file", "format"]) {
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
    Given { value: Some(value.to_string()), ..option.clone() }
}
