//! Description of a running guest, from which it can be built again on another host.
//!
//! The command line shows how the guest was started, QMP shows its current state. After the first
//! hot-plug, snapshot or ejected disc the two differ, and QMP is right; but QMP does not report
//! everything (the options with which a disk is opened, the file of a serial port).
//!
//! So the command line is processed option by option and *refreshed*: an option of a removed thing
//! is dropped, a changed one is set to the current value, and things that were added later become
//! options with the same ids and addresses.
//!
//! The result, a [`VmDescription`], is the command line with which the guest would have been started
//! in its current state. It still names this host's files and sockets; [`crate::command`] adapts
//! them to another host.
//!
//! Anything that cannot be described exactly is not guessed: it becomes a [`Problem`], and a
//! description with problems builds no guest.

mod backends;
mod blocks;
mod chains;
mod devices;
mod graph;
mod live;
mod machine;
mod secrets;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cmdline::{self, QemuOption};
use crate::qmp::{Qmp, QmpError};
use crate::tree::{DeviceTree, device_tree};

use live::LiveState;
pub use secrets::redact_secrets;

/// Version of the format of [`VmDescription`].
pub const SCHEMA: u32 = 1;

/// Description of a guest in a stable format.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmDescription {
    /// Version of the format: [`SCHEMA`].
    pub schema: u32,
    /// Value of `-name`.
    pub name: Option<String>,
    /// Value of `-uuid`, if the option is present.
    pub uuid: Option<String>,
    /// QEMU program of the guest.
    pub program: Program,
    /// Machine and processors.
    pub machine: Machine,
    /// Memory of the guest.
    pub memory: Memory,
    /// Disks in their current state.
    pub disks: Vec<Disk>,
    /// Back ends of the network cards.
    pub networks: Vec<Network>,
    /// Character devices.
    pub chardevs: Vec<Chardev>,
    /// All devices that the guest sees.
    pub devices: DeviceTree,
    /// Command line that would start the guest in its current state, on this host.
    pub options: Vec<QemuOption>,
    /// Reasons why the guest cannot be moved; empty if it can.
    pub problems: Vec<Problem>,
}

/// A QEMU program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Path of the program.
    pub binary: PathBuf,
    /// Version, `major.minor.micro`.
    pub version: String,
    /// Working directory, to which relative file names refer.
    pub working_dir: PathBuf,
}

/// Machine and processors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Versioned machine type, e.g. `pc-q35-10.0`.
    pub machine_type: String,
    /// Accelerator: `kvm`, `tcg`, or another value of `-accel`.
    pub accelerator: String,
    /// QEMU's type of the processors, e.g. `max-x86_64-cpu`.
    pub cpu_type: String,
    /// Model and features as requested (`-cpu`), if they were.
    pub cpu_option: Option<String>,
    /// Current number of processors.
    pub cpus: usize,
}

/// Memory of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Size at the start, in bytes.
    pub base_bytes: u64,
    /// Size of plugged memory, in bytes.
    pub plugged_bytes: u64,
    /// Name of the machine's default RAM block, e.g. `pc.ram`.
    pub default_block: Option<String>,
    /// Names and page sizes of all RAM blocks.
    pub blocks: Vec<MemoryBlock>,
}

/// Name and page size of a RAM block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBlock {
    /// Name, equal on source and destination.
    pub name: String,
    /// Page size: 4096, or a huge page's size for hugetlbfs.
    pub page_size_bytes: u64,
}

/// A disk in its current state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Name of the drive, or of its top node.
    pub name: String,
    /// QOM path of the device that uses the disk; `None` if no device does.
    pub device: Option<String>,
    /// Current top image; `None` for an empty drive.
    pub file: Option<String>,
    /// Format of the top image.
    pub format: Option<String>,
    /// Images below the top image, from top to bottom.
    pub backing_files: Vec<String>,
    /// Files beside the top image that also hold its content: the external data file of a qcow2 image.
    #[serde(default)]
    pub data_files: Vec<String>,
    /// Part of the file that the top image occupies; `None` if it is the whole file.
    #[serde(default)]
    pub part: Option<FilePart>,
    /// Images of widely known formats that hold the disk's content, from top to bottom; empty if one of them is backed
    /// by anything but a file of this host.
    #[serde(default)]
    pub layers: Vec<Layer>,
    /// True if the guest can only read the disk.
    pub read_only: bool,
    /// True if the content is encrypted on the host and the guest sees it in plain text.
    #[serde(default)]
    pub encrypted: bool,
    /// Names of the internal snapshots in the current top image.
    #[serde(default)]
    pub snapshots: Vec<String>,
    /// Names of the dirty bitmaps of other programs, by which a backup program finds the blocks that were written
    /// since its last backup.
    #[serde(default)]
    pub bitmaps: Vec<String>,
    /// True if the page cache is bypassed (`cache=none`, `cache.direct=on`).
    pub direct: bool,
    /// True if the medium can be changed.
    pub removable: bool,
    /// Length as the guest sees it, in bytes; `None` for an empty drive.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Approximate number of bytes that are in use.
    #[serde(default)]
    pub used_bytes: Option<u64>,
    /// Place in the block graph; `None` for an empty drive.
    #[serde(default)]
    pub nodes: Option<DiskNodes>,
}

impl Disk {
    /// Returns true if it is a flash chip of the machine that is only read: the firmware. QEMU reads all of it into a RAM
    /// block when it starts, and the guest uses that block, also when it boots anew.
    pub fn is_firmware(&self) -> bool {
        self.read_only && self.device.as_deref().is_some_and(|device| device.starts_with(FLASH))
    }
}

/// Beginning of the QOM paths of a machine's flash chips (`-drive if=pflash`, `-machine pflash0=`).
const FLASH: &str = "/machine/system.flash";

/// A part of a file; other parts belong to other users (`offset` and `size` of QEMU's raw driver).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// Offset of a raw disk in its file, in bytes; `None` if QEMU does not report it, and for an image of another
    /// format inside the part.
    pub offset_bytes: Option<u64>,
}

/// One of the images that hold a disk's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// File or block device of the image.
    pub file: String,
    /// Format: `raw` or `qcow2`.
    pub format: String,
}

/// A disk's place in the block graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskNodes {
    /// Node that the device uses; all writes of the guest go through it.
    pub top: String,
    /// Node of the image: the top node, or the one that it filters; as the options name it.
    pub image: String,
    /// Format of the image, or its driver where it has none.
    #[serde(default)]
    pub format: String,
    /// All nodes below the image: its file, the images below it, and their files.
    pub below: Vec<String>,
}

/// Back end of a network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Id; begins with `#` if QEMU generated it.
    pub id: String,
    /// Type: `tap`, `user`, `bridge`, …
    pub kind: String,
    /// Details as QEMU prints them.
    pub details: String,
}

/// A character device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chardev {
    /// Label of the device.
    pub id: String,
    /// Back end of the device as QEMU prints it.
    pub details: String,
}

/// A reason why a guest cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Identifier for programs, e.g. `option-refused`.
    pub code: String,
    /// Description of the obstacle.
    pub what: String,
    /// Advice.
    pub advice: String,
}

impl Problem {
    pub(crate) fn new(code: &str, what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: code.to_owned(), what: what.into(), advice: advice.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {}", self.what, self.advice)
    }
}

/// Program, arguments and directory of a QEMU process, from `/proc` (see [`crate::find`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartCommand {
    /// Path of the program.
    pub binary: PathBuf,
    /// Arguments, without the program's name.
    pub arguments: Vec<String>,
    /// Working directory.
    pub working_dir: PathBuf,
}

/// Describes the guest of the QEMU that `qmp` is connected to.
///
/// # Errors
/// Only if the monitor fails. Obstacles to moving the guest are part of the result.
pub fn describe(qmp: &mut Qmp, start_command: &StartCommand) -> Result<VmDescription, QmpError> {
    let tree = device_tree(qmp)?;
    let mut live = LiveState::query(qmp)?;
    live.add_usb_ports(&tree);
    let mut problems = Vec::new();
    let mut options = cmdline::parse(&start_command.arguments);
    machine::refresh(&mut options, &live);
    blocks::normalise(&mut options);
    absolute_paths(&mut options, &start_command.working_dir);
    let mut names = blocks::refresh(&mut options, &live, &start_command.working_dir, &mut problems);
    let plugged = devices::refresh(&mut options, &live, &names, &mut problems);
    for device in plugged {
        options.push(devices::describe(qmp, device, &live, &mut names)?);
    }
    backends::refresh(qmp, &mut options, &live, &mut problems)?;
    for job in &live.jobs {
        problems.push(Problem::new(
            "block-job",
            format!("a block job is running on {job}"),
            "wait until it has finished, or cancel it (block-job-cancel)",
        ));
    }
    devices::report_refused(&options, &mut problems);
    Ok(assemble(start_command, live, &names, tree, options, problems))
}

fn assemble(
    start_command: &StartCommand,
    live: LiveState,
    names: &blocks::NodeNames,
    devices: DeviceTree,
    options: Vec<QemuOption>,
    problems: Vec<Problem>,
) -> VmDescription {
    let disks = live
        .backends
        .iter()
        .map(|backend| blocks::disk(backend, &live, names, &start_command.working_dir))
        .collect();
    let block = |(name, page_size_bytes)| MemoryBlock { name, page_size_bytes };
    VmDescription {
        schema: SCHEMA,
        name: live.name,
        uuid: live.uuid,
        program: Program {
            binary: start_command.binary.clone(),
            version: live.version.to_string(),
            working_dir: start_command.working_dir.clone(),
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

/// Converts a file name to an absolute path. Names with a protocol (`nbd:…`, `json:…`, `fd:…`) are
/// returned unchanged, because they are no paths.
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

/// Returns true if a key of an option names a file of the host.
pub(crate) fn is_file_key(option: &str, key: &str) -> bool {
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
pub(crate) const FILE_OPTIONS: &[&str] = &["kernel", "initrd", "dtb", "shim", "option-rom"];

fn absolute_paths(options: &mut [QemuOption], working_dir: &Path) {
    for option in options {
        let Some(text) = &option.value else { continue };
        if FILE_OPTIONS.contains(&option.name.as_str()) {
            option.value = Some(absolute(text, working_dir));
            continue;
        }
        // QEMU looks for firmware and key maps in its data directories first.
        let mut value = option.parse_value();
        let name = option.name.clone();
        let mut changed = false;
        value.map_texts(&mut |key, text| {
            let keeps_directory = key.ends_with("romfile") || key.ends_with("firmware");
            if !is_file_key(&name, key) || (keeps_directory && !text.contains('/')) {
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
