//! What a running guest is, so that it can be built again elsewhere.
//!
//! The command line says how the guest was started, QMP what it is now. After the first hot-plug,
//! snapshot or ejected disc the two differ, and QMP is right; but QMP does not tell everything (how
//! a disk is opened, what a serial port's file is called). So the command line is taken option by
//! option and *refreshed*: what is no longer there goes, what changed is set to what it is now, what
//! came later is added as options of the same ids and addresses. The result, a [`VmDescription`],
//! is what the command line would be had the guest been started as it is today. It still names this
//! host's files and sockets; [`crate::command`] makes them fit another.
//!
//! What cannot be described exactly is not guessed: it becomes a [`Problem`], and a description with
//! problems builds no guest.

mod backends;
mod blocks;
mod devices;
mod graph;
mod live;
mod machine;
mod secrets;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cmdline::{self, Given};
use crate::qmp::{Qmp, QmpError};
use crate::tree::{DeviceTree, device_tree};

use live::Live;
pub use secrets::without_secrets;

/// Version of the form of [`VmDescription`].
pub const SCHEMA: u32 = 1;

/// A guest, in a stable form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmDescription {
    /// [`SCHEMA`].
    pub schema: u32,
    /// `-name`.
    pub name: Option<String>,
    /// `-uuid`, where one was given.
    pub uuid: Option<String>,
    /// The program that runs it.
    pub program: Program,
    /// Machine and processors.
    pub machine: Machine,
    /// Its memory.
    pub memory: Memory,
    /// Its disks, as they are now.
    pub disks: Vec<Disk>,
    /// What its network cards are connected to.
    pub networks: Vec<Network>,
    /// Its character devices.
    pub chardevs: Vec<Chardev>,
    /// All devices that it sees.
    pub devices: DeviceTree,
    /// The command line that would start it as it is now, on this host.
    pub options: Vec<Given>,
    /// Why it cannot be moved; empty when it can.
    pub problems: Vec<Problem>,
}

/// A QEMU program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its path.
    pub binary: PathBuf,
    /// Its version, `major.minor.micro`.
    pub version: String,
    /// Where it runs: relative names of files start here.
    pub working_dir: PathBuf,
}

/// Machine and processors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The versioned type, e.g. `pc-q35-10.0`.
    pub machine_type: String,
    /// `kvm`, `tcg`, or what else `-accel` says.
    pub accelerator: String,
    /// QEMU's type of the processors, e.g. `max-x86_64-cpu`.
    pub cpu_type: String,
    /// The model and features as they were asked for (`-cpu`), when they were.
    pub cpu_option: Option<String>,
    /// How many there are now.
    pub cpus: usize,
}

/// The guest's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// What it was started with.
    pub base_bytes: u64,
    /// What was plugged in.
    pub plugged_bytes: u64,
    /// Name of the machine's default RAM block, e.g. `pc.ram`.
    pub default_block: Option<String>,
    /// Names and page sizes of all RAM blocks.
    pub blocks: Vec<MemoryBlock>,
}

/// A RAM block's name and pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBlock {
    /// Its name, equal on both sides.
    pub name: String,
    /// 4096, or a huge page's size for hugetlbfs.
    pub page_size_bytes: u64,
}

/// A disk as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The drive's name, or that of its top node.
    pub name: String,
    /// QOM path of the device that has it; `None` when no device does.
    pub device: Option<String>,
    /// The present top image; `None` for an empty drive.
    pub file: Option<String>,
    /// Its format.
    pub format: Option<String>,
    /// The images below it, from top to bottom.
    pub backing_files: Vec<String>,
    /// Files beside the top image in which its content is as well: the external data file of a qcow2 image.
    #[serde(default)]
    pub data_files: Vec<String>,
    /// The part of its file that the top image is; `None` where it is the whole file.
    #[serde(default)]
    pub part: Option<FilePart>,
    /// The images of formats that are widely known in which its content is, from top to bottom; none where a file of this
    /// host is not all that is behind one of them.
    #[serde(default)]
    pub layers: Vec<Layer>,
    /// Whether the guest can only read it.
    pub read_only: bool,
    /// Whether what is in it is encrypted on the host, and the guest sees it in plain text.
    #[serde(default)]
    pub encrypted: bool,
    /// Names of the internal snapshots in the present top image.
    #[serde(default)]
    pub snapshots: Vec<String>,
    /// Names of the dirty bitmaps of others, by which a backup program knows what was written since its last backup.
    #[serde(default)]
    pub bitmaps: Vec<String>,
    /// Whether the page cache is bypassed (`cache=none`, `cache.direct=on`).
    pub direct: bool,
    /// Whether the medium can be changed.
    pub removable: bool,
    /// Its length as the guest sees it, in bytes; `None` for an empty drive.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// About how much of it is in use, in bytes.
    #[serde(default)]
    pub used_bytes: Option<u64>,
    /// Its place in the block graph; `None` for an empty drive.
    #[serde(default)]
    pub nodes: Option<DiskNodes>,
}

/// A part of a file, in which the rest belongs to others (`offset` and `size` of QEMU's raw driver).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// Where a raw disk begins in its file, in bytes; `None` where QEMU does not name it, and for an image of another
    /// format inside the part.
    pub offset_bytes: Option<u64>,
}

/// One of the images in which a disk's content is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its file, or block device.
    pub file: String,
    /// Its format: `raw` or `qcow2`.
    pub format: String,
}

/// A disk's place in the block graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskNodes {
    /// What the device uses, through which all that the guest writes goes.
    pub top: String,
    /// The image: the top one, or what it filters; as the options name it.
    pub image: String,
    /// The image's format, or its driver where it has none.
    #[serde(default)]
    pub format: String,
    /// All nodes below the image: its file, the images below it, theirs.
    pub below: Vec<String>,
}

/// What a network card is connected to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its id; begins with `#` where QEMU made one up.
    pub id: String,
    /// `tap`, `user`, `bridge`, …
    pub kind: String,
    /// QEMU's own words about it.
    pub details: String,
}

/// A character device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chardev {
    /// Its label.
    pub id: String,
    /// QEMU's own words about what is behind it.
    pub details: String,
}

/// A reason why a guest cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// A word for programs, e.g. `option-refused`.
    pub code: String,
    /// What is in the way.
    pub what: String,
    /// What can be done about it.
    pub what_to_do: String,
}

impl Problem {
    pub(crate) fn new(code: &str, what: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self { code: code.to_owned(), what: what.into(), what_to_do: what_to_do.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {}", self.what, self.what_to_do)
    }
}

/// How a QEMU process was started, from `/proc` (see [`crate::find`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The program.
    pub binary: PathBuf,
    /// Its arguments, without the program's name.
    pub arguments: Vec<String>,
    /// Its working directory.
    pub working_dir: PathBuf,
}

/// Describes the guest behind `qmp`.
///
/// # Errors
/// Only when the monitor fails. What stands in the way of moving the guest is part of the result.
pub fn describe(qmp: &mut Qmp, origin: &Origin) -> Result<VmDescription, QmpError> {
    let tree = device_tree(qmp)?;
    let mut live = Live::ask(qmp)?;
    live.add_usb_ports(&tree);
    let mut problems = Vec::new();
    let mut options = cmdline::parse(&origin.arguments);
    machine::refresh(&mut options, &live);
    blocks::normalise(&mut options);
    absolute_paths(&mut options, &origin.working_dir);
    let mut names = blocks::refresh(&mut options, &live, &origin.working_dir, &mut problems);
    let plugged = devices::refresh(&mut options, &live, &names, &mut problems);
    for device in plugged {
        options.push(devices::describe(qmp, device, &live, &mut names)?);
    }
    backends::refresh(qmp, &mut options, &live, &mut problems)?;
    for job in &live.jobs {
        problems.push(Problem::new(
            "block-job",
            format!("a block job works on {job}"),
            "wait until it has ended, or cancel it (block-job-cancel)",
        ));
    }
    devices::refuse(&options, &mut problems);
    Ok(assemble(origin, live, &names, tree, options, problems))
}

fn assemble(
    origin: &Origin,
    live: Live,
    names: &blocks::Names,
    devices: DeviceTree,
    options: Vec<Given>,
    problems: Vec<Problem>,
) -> VmDescription {
    let disks = live
        .backends
        .iter()
        .map(|backend| blocks::disk(backend, &live, names, &origin.working_dir))
        .collect();
    let block = |(name, page_size_bytes)| MemoryBlock { name, page_size_bytes };
    VmDescription {
        schema: SCHEMA,
        name: live.name,
        uuid: live.uuid,
        program: Program {
            binary: origin.binary.clone(),
            version: live.version.to_string(),
            working_dir: origin.working_dir.clone(),
        },
        machine: Machine {
            machine_type: live.machine_type,
            accelerator: machine::accelerator(&options, live.kvm),
            cpu_type: live.cpu_type,
            cpu_option: options.iter().rev().find(|o| o.name == "cpu").and_then(|o| o.value.clone()),
            cpus: live.cpus,
        },
        memory: Memory {
            base_bytes: live.base_memory_bytes,
            plugged_bytes: live.plugged_memory_bytes,
            default_block: live.default_ram_id,
            blocks: live.ram_blocks.into_iter().map(block).collect(),
        },
        disks,
        networks: live
            .nets
            .into_iter()
            .map(|net| Network { id: net.id, kind: net.kind, details: net.details })
            .collect(),
        chardevs: live
            .chardevs
            .into_iter()
            .map(|chardev| Chardev { id: chardev.label, details: chardev.filename })
            .collect(),
        devices,
        options,
        problems,
    }
}

/// A name of a file as it is from anywhere. Names with a protocol (`nbd:…`, `json:…`, `fd:…`) are
/// none.
pub(crate) fn absolute(path: &str, working_dir: &Path) -> String {
    let protocol = path.split_once(':').is_some_and(|(head, _)| {
        !head.is_empty() && head.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-_".contains(&byte))
    });
    if path.is_empty() || path.starts_with('/') || protocol {
        return path.to_owned();
    }
    let joined = working_dir.join(path.strip_prefix("./").unwrap_or(path));
    joined.to_string_lossy().into_owned()
}

/// Whether a key of an option names a file of the host.
pub(crate) fn names_a_file(option: &str, key: &str) -> bool {
    let last = key.rsplit('.').next().unwrap_or(key);
    match option {
        // In a -blockdev `file` is the name of a node.
        "drive" => last == "filename" || key == "file",
        "blockdev" => last == "filename",
        "object" => last == "mem-path" || last == "file" || last == "dir" || last == "filename",
        "chardev" => last == "path" || last == "logfile",
        "netdev" | "nic" | "net" => last == "path",
        "fw_cfg" | "smbios" | "acpitable" => last == "file" || last == "data",
        "device" => last == "romfile" || last == "file",
        "machine" => ["kernel", "initrd", "dtb", "firmware", "shim"].contains(&last),
        "spice" => last == "addr" || last.starts_with("x509"),
        _ => false,
    }
}

/// Options whose whole value names a file.
pub(crate) const WHOLE_FILES: &[&str] = &["kernel", "initrd", "dtb", "shim", "option-rom"];

fn absolute_paths(options: &mut [Given], working_dir: &Path) {
    for option in options {
        let Some(text) = &option.value else { continue };
        if WHOLE_FILES.contains(&option.name.as_str()) {
            option.value = Some(absolute(text, working_dir));
            continue;
        }
        // QEMU looks for firmware and key maps in its data directories first.
        let mut value = option.parsed();
        let name = option.name.clone();
        let mut changed = false;
        value.map_texts(&mut |key, text| {
            let keeps_directory = key.ends_with("romfile") || key.ends_with("firmware");
            if !names_a_file(&name, key) || (keeps_directory && !text.contains('/')) {
                return None;
            }
            let new = absolute(text, working_dir);
            changed |= new != text;
            Some(new)
        });
        if changed {
            option.value = Some(value.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_absolute() {
        let dir = Path::new("/vm/a");
        assert_eq!(absolute("disk.img", dir), "/vm/a/disk.img");
        assert_eq!(absolute("./disk.img", dir), "/vm/a/disk.img");
        assert_eq!(absolute("../b/disk.img", dir), "/vm/a/../b/disk.img");
        assert_eq!(absolute("/x", dir), "/x");
        assert_eq!(absolute("nbd:host:10809", dir), "nbd:host:10809");
        assert_eq!(absolute("json:{}", dir), "json:{}");
        let mut options = cmdline::parse(
            &[
                "-drive",
                "file=a,if=none",
                "-chardev",
                "file,path=log,id=c",
                "-kernel",
                "k",
                "-device",
                "e1000",
            ]
            .map(str::to_owned),
        );
        absolute_paths(&mut options, dir);
        let values: Vec<&str> = options.iter().filter_map(|option| option.value.as_deref()).collect();
        assert_eq!(values, ["file=/vm/a/a,if=none", "backend=file,path=/vm/a/log,id=c", "/vm/a/k", "e1000"]);
    }
}
