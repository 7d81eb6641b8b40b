//! Disks: the current state of the block graph.
//!
//! A drive keeps its `-drive` with its caching and I/O options, and gets the name of the current
//! top image (after a snapshot, the overlay). Nodes of `-blockdev` are kept if they still exist,
//! and dropped if not; nodes that were added later are described from the graph. Names that QEMU
//! generated (`#block123`) cannot be assigned to a node again, so such nodes get a name of ours.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::graph::{Backend, Node};
use super::live::{LiveDevice, LiveState};
use super::{Disk, DiskNodes, Layer, Problem, absolute};
use crate::cmdline::QemuOption;
use crate::options::Value;
use crate::recording;

/// Drivers that a file name or one child describes fully.
const FILE_DRIVERS: &[&str] = &["file", "host_device", "host_cdrom"];
const FORMAT_DRIVERS: &[&str] =
    &["raw", "qcow2", "qed", "vdi", "vhdx", "vmdk", "vpc", "copy-on-read", "preallocate"];

/// Names of the nodes on the destination.
#[derive(Debug, Default)]
pub(super) struct NodeNames {
    renamed: BTreeMap<String, String>,
}

impl NodeNames {
    /// Returns the value of a device's `drive` on the destination; `None` if it has none.
    pub(super) fn drive_of(&self, device: &LiveDevice, live: &LiveState) -> Option<String> {
        let below = format!("{}/", device.path);
        let backend = live.backends.iter().find(|backend| {
            backend.device.as_ref().is_some_and(|path| {
                *path == device.path || path.starts_with(&below) || device.id.as_ref() == Some(path)
            })
        })?;
        if !backend.name.is_empty() {
            return Some(backend.name.clone());
        }
        backend.root.as_ref().map(|root| self.renamed.get(root).unwrap_or(root).clone())
    }
}

/// Rewrites the short options (`-hda`, `-cdrom`, …) as `-drive`.
pub(super) fn normalise(options: &mut [QemuOption]) {
    for option in options {
        let place = match option.name.as_str() {
            "hda" => "index=0,media=disk",
            "hdb" => "index=1,media=disk",
            "hdc" => "index=2,media=disk",
            "hdd" => "index=3,media=disk",
            "cdrom" => "index=2,media=cdrom",
            "fda" => "if=floppy,index=0",
            "fdb" => "if=floppy,index=1",
            "sd" => "if=sd",
            "mtdblock" => "if=mtd",
            "pflash" => "if=pflash",
            _ => continue,
        };
        let file = option.value.take().unwrap_or_default().replace(',', ",,");
        *option = QemuOption::new("drive", format!("{place},file={file}"));
    }
}

/// Returns the description of a disk for reports.
pub(super) fn disk(backend: &Backend, live: &LiveState, names: &NodeNames, working_dir: &Path) -> Disk {
    let file_of = |node: &Node| absolute(&live.file_of(node), working_dir);
    let chain = backend.root.as_ref().map(|root| live.chain(root)).unwrap_or_default();
    let top = chain.first();
    let file = top.map(|node| file_of(node));
    let filters = filters(&chain);
    let mut below: Vec<String> = chain.iter().map(|node| file_of(node)).collect();
    below.dedup();
    let data_files = |node: &&Node| live.data_files(node);
    let data_file = |file: String| absolute(&file, working_dir);
    below.extend(chain.iter().skip(filters + 1).flat_map(data_files).map(data_file));
    let is_device = |name: &String| live.nodes.get(name).is_some_and(|node| node.driver == "host_device");
    let is_encrypted =
        |name: &String| live.nodes.get(name).is_some_and(|node| node.encrypted || node.driver == "luks");
    let is_encrypted_somewhere =
        backend.root.iter().flat_map(|root| live.below(root)).any(|name| is_encrypted(&name));
    // QEMU does not know how much of a device is in use.
    let on_device = backend.root.iter().flat_map(|root| live.below(root)).any(|name| is_device(&name));
    let image = chain.get(filters);
    // A snapshot in a backing file is not one of this disk. Bitmaps without a name belong to block
    // jobs.
    let snapshots = image.iter().flat_map(|node| &node.image.snapshots).map(|named| named.name.clone());
    let bitmaps = chain.iter().take(filters + 1).flat_map(|node| &node.bitmaps).map(|named| &named.name);
    let is_others = |name: &&String| !name.is_empty() && !name.starts_with(recording::PREFIX);
    Disk {
        name: if backend.name.is_empty() {
            backend.root.clone().unwrap_or_default()
        } else {
            backend.name.clone()
        },
        device: backend.device.clone(),
        backing_files: below.into_iter().skip(1).collect(),
        data_files: image.iter().flat_map(|node| live.data_files(node)).map(data_file).collect(),
        part: image.and_then(|node| live.part(node)),
        layers: if is_encrypted_somewhere { Vec::new() } else { layers(&chain, live, working_dir) },
        file,
        format: top.map(|node| node.driver.clone()),
        read_only: top.is_some_and(|node| node.read_only),
        encrypted: is_encrypted_somewhere,
        snapshots: snapshots.collect(),
        bitmaps: bitmaps.filter(is_others).cloned().collect(),
        direct: top.is_some_and(|node| node.cache.direct),
        removable: backend.removable,
        bytes: backend.bytes,
        used_bytes: if on_device { backend.bytes } else { backend.used_bytes },
        nodes: backend.root.as_ref().map(|root| nodes(root, live, names)),
    }
}

/// Filter drivers, which only inspect the I/O of the image below them.
const FILTER_DRIVERS: &[&str] = &["throttle", "copy-on-read", "preallocate"];

/// Returns the number of nodes of a chain before its first image.
fn filters(chain: &[&Node]) -> usize {
    chain.iter().take_while(|node| FILTER_DRIVERS.contains(&node.driver.as_str())).count()
}

/// Returns the images of a chain.
fn layers(chain: &[&Node], live: &LiveState, working_dir: &Path) -> Vec<Layer> {
    let is_file = |driver: &str| ["file", "host_device"].contains(&driver);
    let mut layers = Vec::new();
    for node in chain.iter().skip(filters(chain)) {
        let is_lowest = !node.children.contains_key("backing");
        let below = live.nodes.get(node.children.get("file").unwrap_or(&node.name));
        let format = match node.driver.as_str() {
            driver if is_file(driver) => "raw",
            "raw" | "qcow2" if below.is_some_and(|below| is_file(&below.driver)) => &node.driver,
            _ => return Vec::new(),
        };
        layers.push(Layer { file: absolute(&live.file_of(node), working_dir), format: format.to_owned() });
        if is_lowest {
            break;
        }
    }
    layers
}

fn nodes(top: &str, live: &LiveState, names: &NodeNames) -> DiskNodes {
    let chain = live.chain(top);
    let filters = filters(&chain);
    let image = chain.get(filters).map_or(top, |node| &node.name);
    let mut below = live.below(image);
    below.remove(image);
    let format = chain.get(filters).map(|node| node.driver.clone()).unwrap_or_default();
    let image = names.renamed.get(image).map_or(image, String::as_str);
    DiskNodes { top: top.to_owned(), image: image.to_owned(), format, below: below.into_iter().collect() }
}

/// Updates `-drive` and `-blockdev` to the current state.
pub(super) fn refresh(
    options: &mut Vec<QemuOption>,
    live: &LiveState,
    working_dir: &Path,
    problems: &mut Vec<Problem>,
) -> NodeNames {
    let mut work = BlockRefresh {
        live,
        working_dir,
        problems,
        names: NodeNames::default(),
        declared: BTreeSet::new(),
        devices: Vec::new(),
    };
    work.names.rename(live);
    let mut of_drives = BTreeSet::new();
    let mut used = BTreeSet::new();
    let mut kept = Vec::new();
    for option in std::mem::take(options) {
        match option.name.as_str() {
            "drive" => {
                let Some(backend) = work.backend_of(&option.parse_value(), &used) else {
                    continue;
                };
                used.insert(backend.name.clone());
                if let Some(root) = &backend.root {
                    of_drives.extend(live.below(root));
                }
                kept.push(work.drive(option, backend));
            }
            "blockdev" => kept.extend(work.blockdev(option)),
            _ => kept.push(option),
        }
    }
    kept.append(&mut work.devices);
    // Nodes that were added later: first those with a name, then those that devices use directly.
    let roots = live.backends.iter().filter(|b| b.name.is_empty()).filter_map(|b| b.root.as_ref());
    let named = live.nodes.keys().filter(|name| !name.starts_with('#'));
    let mut added = Vec::new();
    for name in named.chain(roots) {
        if !of_drives.contains(name) {
            work.declare(name, &mut added);
        }
    }
    *options = kept;
    options.extend(added);
    work.names
}

impl NodeNames {
    fn rename(&mut self, live: &LiveState) {
        let roots = live.backends.iter().filter(|b| b.name.is_empty()).filter_map(|b| b.root.as_ref());
        for root in roots.filter(|root| root.starts_with('#')) {
            let mut number = self.renamed.len();
            while live.nodes.contains_key(&format!("whimbrel-node{number}")) {
                number += 1;
            }
            self.renamed.entry(root.clone()).or_insert(format!("whimbrel-node{number}"));
        }
    }
}

struct BlockRefresh<'a> {
    live: &'a LiveState,
    working_dir: &'a Path,
    problems: &'a mut Vec<Problem>,
    names: NodeNames,
    declared: BTreeSet<String>,
    /// Devices that QEMU created for drives by itself.
    devices: Vec<QemuOption>,
}

impl<'a> BlockRefresh<'a> {
    /// Finds the drive that a `-drive` created: by its id, or else by the interface and the image
    /// that is still its top or below it.
    fn backend_of(&self, value: &Value, used: &BTreeSet<String>) -> Option<&'a Backend> {
        if let Some(id) = value.get("id") {
            return self.live.backends.iter().find(|backend| backend.name == id);
        }
        let interface = value.get("if");
        let interface = interface.as_deref().unwrap_or("");
        let medium = match value.get("media").as_deref() {
            Some("cdrom") => "-cd",
            _ => "-hd",
        };
        let fits = |backend: &&Backend| {
            let rest = if interface.is_empty() {
                // The machine's own default.
                backend
                    .name
                    .strip_prefix("ide")
                    .or_else(|| backend.name.strip_prefix("scsi"))
                    .or_else(|| backend.name.strip_prefix("virtio"))
                    .or_else(|| backend.name.strip_prefix("sd"))
            } else {
                backend.name.strip_prefix(interface)
            };
            rest.is_some_and(|rest| {
                let number_only = !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
                number_only || rest.contains(medium)
            }) && !used.contains(&backend.name)
        };
        let mut candidates: Vec<&Backend> = self.live.backends.iter().filter(fits).collect();
        candidates.sort_by_key(|backend| (backend.name.len(), backend.name.clone()));
        let file = self.file_of(value);
        let has_file = |backend: &&&Backend| {
            backend.root.as_ref().is_some_and(|root| {
                let below = self.live.below(root);
                below.iter().any(|name| {
                    self.live
                        .nodes
                        .get(name)
                        .is_some_and(|node| Some(self.absolute(&self.live.file_of(node))) == file)
                })
            })
        };
        candidates
            .iter()
            .find(has_file)
            .or_else(|| candidates.iter().find(|backend| backend.root.is_none() || backend.removable))
            .or_else(|| candidates.first())
            .copied()
    }

    fn file_of(&self, value: &Value) -> Option<String> {
        value.get("file").or_else(|| value.get("file.filename")).map(|file| self.absolute(&file))
    }

    fn absolute(&self, file: &str) -> String {
        absolute(file, self.working_dir)
    }

    fn drive(&mut self, mut option: QemuOption, backend: &Backend) -> QemuOption {
        let mut value = option.parse_value();
        if value.get("if").as_deref() == Some("virtio") {
            // QEMU creates a device for it in the first free slot. It is written out as an option,
            // so that the slot can be specified as well.
            for key in ["index", "bus", "unit", "addr"] {
                value.remove(key);
            }
            value.set("if", "none");
            value.set("id", &backend.name);
            let drive = backend.name.replace(',', ",,");
            self.devices.push(QemuOption::new("device", format!("virtio-blk-pci,drive={drive}")));
        }
        let Some(root) = backend.root.as_ref().and_then(|root| self.live.nodes.get(root)) else {
            // Ejected.
            for key in ["file", "format", "driver", "read-only", "readonly"] {
                value.remove(key);
            }
            option.value = Some(value.to_string());
            return option;
        };
        let present = self.absolute(&self.live.file_of(root));
        if self.file_of(&value).as_ref() != Some(&present) {
            if FILE_DRIVERS.contains(&root.driver.as_str()) || FORMAT_DRIVERS.contains(&root.driver.as_str())
            {
                let (file, format) = if value.get("file").is_some() {
                    ("file", "format")
                } else {
                    ("file.filename", "driver")
                };
                let format = if value.get("driver").is_some() { "driver" } else { format };
                let file = if value.get("file.filename").is_some() { "file.filename" } else { file };
                value.set(if file == "file.filename" { file } else { "file" }, &present);
                value.set(
                    format,
                    if FILE_DRIVERS.contains(&root.driver.as_str()) { "raw" } else { &root.driver },
                );
                // The new image's header names its own backing files, so the option for the old
                // image's is dropped.
                value.remove("backing");
                if !root.name.starts_with('#') {
                    value.set("node-name", &root.name);
                }
            } else {
                self.report_undescribable(root);
            }
        }
        if root.encrypted {
            self.encrypted(root);
        }
        option.value = Some(value.to_string());
        option
    }

    fn blockdev(&mut self, mut option: QemuOption) -> Option<QemuOption> {
        let mut value = option.parse_value();
        let name = value.get("node-name")?;
        let node = self.live.nodes.get(&name)?;
        let given = value.get("read-only").as_deref() == Some("on");
        if given != node.read_only && value.get("auto-read-only").as_deref() != Some("on") {
            value.set_json("read-only", node.read_only.into());
        }
        self.declared.insert(name);
        option.value = Some(value.to_string());
        Some(option)
    }

    /// Adds the `-blockdev`s that create a node and the named ones below it.
    fn declare(&mut self, name: &str, added: &mut Vec<QemuOption>) {
        if !self.declared.insert(name.to_owned()) {
            return;
        }
        let Some(node) = self.live.nodes.get(name) else { return };
        let mut map = self.node(node, added);
        let there = self.names.renamed.get(name).map_or(name, String::as_str);
        map.insert("node-name".to_owned(), there.into());
        added.push(QemuOption::new("blockdev", Json::Object(map).to_string()));
    }

    fn node(&mut self, node: &Node, added: &mut Vec<QemuOption>) -> Map<String, Json> {
        let mut map = Map::new();
        if let Some(Ok(Json::Object(described))) =
            node.file.strip_prefix("json:").map(str::as_bytes).map(serde_json::from_slice)
        {
            map = described;
        }
        map.insert("driver".to_owned(), node.driver.clone().into());
        map.insert("read-only".to_owned(), node.read_only.into());
        map.insert(
            "cache".to_owned(),
            json!({ "direct": node.cache.direct, "no-flush": node.cache.no_flush }),
        );
        if !node.detect_zeroes.is_empty() && node.detect_zeroes != "off" {
            map.insert("detect-zeroes".to_owned(), node.detect_zeroes.clone().into());
        }
        if node.encrypted {
            self.encrypted(node);
        }
        let is_file = FILE_DRIVERS.contains(&node.driver.as_str());
        if is_file {
            map.entry("filename").or_insert_with(|| absolute(&node.file, self.working_dir).into());
        } else if !FORMAT_DRIVERS.contains(&node.driver.as_str()) {
            self.report_undescribable(node);
        }
        for (role, child) in &node.children {
            let described = if self.declared.contains(child) || !child.starts_with('#') {
                self.declare(child, added);
                self.names.renamed.get(child).unwrap_or(child).clone().into()
            } else if let Some(child) = self.live.nodes.get(child) {
                Json::Object(self.node(child, added))
            } else {
                continue;
            };
            map.insert(role.clone(), described);
        }
        map
    }

    fn report_undescribable(&mut self, node: &Node) {
        self.problems.push(Problem::new(
            "disk-unclear",
            format!(
                "block node {} was added after the start, and QEMU does not report all properties of its \
                 driver {}",
                node.name, node.driver
            ),
            "remove it (blockdev-del), or give it with -blockdev when the guest is started next",
        ));
    }

    fn encrypted(&mut self, node: &Node) {
        if node.name.starts_with('#') {
            self.problems.push(Problem::new(
                "disk-encrypted",
                format!("image {} is encrypted, and QEMU does not report its key", node.file),
                "give it with -blockdev and a secret object when the guest is started next",
            ));
        }
    }
}
