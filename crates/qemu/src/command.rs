//! Command line for a described guest on another host.
//!
//! [`build`] accepts a [`VmDescription`] and the host's [`HostRules`] and rewrites what belongs to a host;
//! everything that the guest sees stays. The rules:
//!
//! | what | becomes |
//! |---|---|
//! | unix sockets that QEMU listens on (monitors, serial ports, VNC) | the same name in the run directory |
//! | files that serial ports write, logs | the same name in the directory for logs |
//! | terminals (`stdio`, `-nographic`) | a file in the directory for logs |
//! | taps, bridges | the interface that `tap` names for them, else the same name |
//! | disks that are copied | the image that was made for it, alone, with the same caching and I/O options |
//! | other disks, kernels, firmware | the same path, or under the directory that `disk_dirs` names |
//! | memory | as [`RamPlan`] specifies; the blocks keep their names, by which both hosts identify them |
//! | windows | none; VNC and SPICE stay |
//!
//! The new QEMU has a monitor of ours, waits for its state (`-S -incoming defer`), and stays in the
//! foreground of a session of its own.

mod chardevs;
mod disks;
mod net_and_display;
mod ram;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cmdline::{self, OptionPolicy, QemuOption};
use crate::describe::{FILE_OPTIONS, Problem, VmDescription, is_file_key};
pub use disks::NewImage;

/// Label of our own monitor.
pub const MONITOR_ID: &str = "whimbrel-qmp";
/// Our own monitor, in a guest's run directory.
pub const QMP_FILE: &str = "whimbrel-qmp.sock";
/// QEMU's messages, in a guest's run directory.
pub const LOG_FILE: &str = "whimbrel-qemu.log";
/// Socket through which the device state is loaded, in a guest's run directory.
const STATE_FILE: &str = "whimbrel-state.sock";
/// Names that a guest's own sockets and logs never get.
const RESERVED_NAMES: [&str; 3] = [QMP_FILE, LOG_FILE, STATE_FILE];
/// Longest path of a unix socket, in bytes.
const MAX_SOCKET_PATH: usize = 107;

/// Kind of the guest's memory on the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RamPlan {
    /// Shared memfd: pages can be received into it and page faults can be served quickly.
    Memfd {
        /// Size of the huge pages (hugetlbfs) in bytes, or `None` for normal pages.
        hugepage_bytes: Option<u64>,
    },
    /// Private anonymous memory, which keeps transparent huge pages and KSM where the host has them
    /// off for shared memory.
    Anonymous,
}

/// Rules that translate a source host's resources to those of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRules {
    /// QEMU program to start.
    pub qemu_binary: PathBuf,
    /// Directories of QEMU's data (`-L`); empty for the program's default.
    pub data_dirs: Vec<PathBuf>,
    /// Directory for the sockets and logs of this guest alone.
    pub run_dir: PathBuf,
    /// Directory for human-readable files that QEMU writes (serial ports, logs); `None` means the run directory.
    pub log_dir: Option<PathBuf>,
    /// Interface or bridge on this host for an interface, a bridge or a netdev id of the source host.
    pub tap: BTreeMap<String, String>,
    /// Directories on this host for directories of the source host; the longest match counts.
    pub disk_dirs: Vec<(PathBuf, PathBuf)>,
    /// Images that were made on this host for disks, by disk name.
    pub images: BTreeMap<String, NewImage>,
    /// Kind of the guest's memory.
    pub ram: RamPlan,
    /// Options (`frobnicate`) and objects (`object:TYPE`) to keep although they are unknown.
    pub allow_options: Vec<String>,
}

impl HostRules {
    /// Returns rules that change only the run directory.
    pub fn new(qemu_binary: impl Into<PathBuf>, run_dir: impl Into<PathBuf>) -> Self {
        Self {
            qemu_binary: qemu_binary.into(),
            data_dirs: Vec::new(),
            run_dir: run_dir.into(),
            log_dir: None,
            tap: BTreeMap::new(),
            disk_dirs: Vec::new(),
            images: BTreeMap::new(),
            ram: RamPlan::Memfd { hugepage_bytes: None },
            allow_options: Vec::new(),
        }
    }

    /// Returns the path on this host for a path of the source host.
    pub fn local_path(&self, path: &str) -> String {
        let rule = self
            .disk_dirs
            .iter()
            .filter_map(|(from, to)| Some((from, Path::new(path).strip_prefix(from).ok()?, to)))
            .max_by_key(|(from, _, _)| from.components().count());
        match rule {
            Some((_, rest, to)) => to.join(rest).to_string_lossy().into_owned(),
            None => path.to_owned(),
        }
    }

    fn allows(&self, name: &str) -> bool {
        self.allow_options.iter().any(|allowed| allowed.trim_start_matches('-') == name)
    }
}

/// A command line, and the files that belong to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltCommand {
    /// Program and arguments.
    pub argv: Vec<OsString>,
    /// Socket of our monitor.
    pub qmp: PathBuf,
    /// File for QEMU's messages.
    pub log: PathBuf,
    /// Socket through which the device state can be loaded ([`crate::device_state::Incoming`]).
    pub state_socket: PathBuf,
    /// Names of the files that QEMU will write into the directory for logs.
    pub logs: Vec<String>,
    /// Changes that a user of the guest may notice.
    pub notes: Vec<String>,
    /// Omitted settings whose absence may make the guest slower on this host, each with advice.
    pub warnings: Vec<Problem>,
}

/// Error: the guest cannot be built on this host.
#[derive(Debug, thiserror::Error)]
#[error("the guest cannot be started on the destination: {}", join(.problems))]
pub struct CommandError {
    /// All reasons, each with advice.
    pub problems: Vec<Problem>,
}

fn join(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join(". ")
}

/// Returns the command line for a QEMU on this host that can receive the guest.
///
/// # Errors
/// Lists all obstacles, not only the first.
pub fn build(vm: &VmDescription, rules: &HostRules) -> Result<BuiltCommand, CommandError> {
    let mut build = CommandBuilder::new(vm, rules);
    for option in &vm.options {
        build.option(option);
    }
    build.terminal();
    build.memory();
    build.check_images_used();
    build.finish()
}

struct CommandBuilder<'a> {
    vm: &'a VmDescription,
    rules: &'a HostRules,
    out: Vec<QemuOption>,
    problems: Vec<Problem>,
    notes: Vec<String>,
    warnings: Vec<Problem>,
    logs: Vec<String>,
    /// Names in the run directory that are in use.
    names: BTreeSet<String>,
    /// Number of options that use the image of each disk that has one.
    images_used: BTreeMap<String, usize>,
}

impl<'a> CommandBuilder<'a> {
    fn new(vm: &'a VmDescription, rules: &'a HostRules) -> Self {
        Self {
            vm,
            rules,
            out: Vec::new(),
            problems: vm.problems.clone(),
            notes: Vec::new(),
            warnings: Vec::new(),
            logs: Vec::new(),
            names: RESERVED_NAMES.map(str::to_owned).into(),
            images_used: BTreeMap::new(),
        }
    }

    fn problem(&mut self, code: &str, what: impl Into<String>, advice: impl Into<String>) {
        self.problems.push(Problem::new(code, what, advice));
    }

    fn option(&mut self, option: &QemuOption) {
        if self.rules.allows(&option.name) {
            self.out.push(option.clone());
            return;
        }
        let Some(option_spec) = cmdline::option_spec(&option.name) else {
            self.problem(
                "option-unknown",
                format!("option -{} is unknown", option.name),
                format!("if it can be carried over unchanged, allow it by name ({})", option.name),
            );
            return;
        };
        match option_spec.policy {
            OptionPolicy::Keep => self.out.push(option.clone()),
            OptionPolicy::Drop(_) => {}
            OptionPolicy::Refuse(why) => self.problem(
                "option-refused",
                format!("option -{} cannot be carried over: {why}", option.name),
                "start the guest without it, or allow it by name",
            ),
            OptionPolicy::Rewrite => {
                if let Some(option) = self.rewrite(option) {
                    self.out.push(option);
                }
            }
        }
    }

    fn rewrite(&mut self, option: &QemuOption) -> Option<QemuOption> {
        match option.name.as_str() {
            // The data directories of this host's QEMU apply.
            "L" => (self.rules.data_dirs.is_empty() && self.is_same_program()).then(|| option.clone()),
            "serial" | "parallel" | "debugcon" | "monitor" | "qmp" | "qmp-pretty" => {
                self.short_chardev(option)
            }
            "chardev" => self.chardev(option),
            "mon" => {
                let ours = option.parse_value().get("chardev").as_deref() == Some(MONITOR_ID);
                (!ours).then(|| option.clone())
            }
            "netdev" | "nic" | "net" => Some(self.network(option)),
            "display" => self.display(option),
            "vnc" => Some(self.vnc(option)),
            "spice" => Some(self.spice(option)),
            "object" => self.object(option),
            "machine" => Some(self.machine(option)),
            name if name == "bios" || FILE_OPTIONS.contains(&name) => {
                let path = option.value.as_deref()?;
                Some(QemuOption::new(name, self.local_path(path)))
            }
            "drive" | "blockdev" => match self.copied(option) {
                disks::DiskRewrite::No => Some(self.rewrite_paths(option)),
                disks::DiskRewrite::Replaced { disk, by } => {
                    *self.images_used.entry(disk).or_default() += 1;
                    Some(by)
                }
                disks::DiskRewrite::Gone => None,
            },
            _ => Some(self.rewrite_paths(option)),
        }
    }

    fn is_same_program(&self) -> bool {
        self.rules.qemu_binary == self.vm.program.binary
    }

    /// Translates the paths of files that an option names.
    fn rewrite_paths(&mut self, option: &QemuOption) -> QemuOption {
        let mut value = option.parse_value();
        let mut changed = Vec::new();
        value.map_texts(&mut |key, text| {
            let here = is_file_key(&option.name, key).then(|| self.local_path(text))?;
            (here != text).then(|| {
                changed.push(text.to_owned());
                here
            })
        });
        let disk = ["drive", "blockdev"].contains(&option.name.as_str());
        for file in changed.iter().filter(|_| disk) {
            self.check_backing(file);
        }
        if changed.is_empty() { option.clone() } else { QemuOption::new(&option.name, value.to_string()) }
    }

    /// Reports a problem if an image at another path has backing files: it still names them by their old paths.
    fn check_backing(&mut self, file: &str) {
        let has_backing = self
            .vm
            .disks
            .iter()
            .find(|disk| disk.file.as_deref() == Some(file) && !disk.backing_files.is_empty());
        if let Some(disk) = has_backing {
            let backing = disk.backing_files.join(", ");
            self.problem(
                "disk-backing-moved",
                format!("image {file} names its backing file {backing} by a path of the source host"),
                "give the destination the same path (mount or link), and no directory rule for this disk",
            );
        }
    }

    fn local_path(&self, path: &str) -> String {
        self.rules.local_path(path)
    }

    /// Returns a path with this file name in the log directory; each call returns a different path.
    fn log(&mut self, path: &str) -> String {
        let name = self.unused_name(path);
        let directory = self.rules.log_dir.as_ref().unwrap_or(&self.rules.run_dir);
        let file = directory.join(&name).to_string_lossy().into_owned();
        if self.rules.log_dir.is_some() {
            self.logs.push(name);
        }
        file
    }

    /// Returns a path with this file name in the run directory; each call returns a different path.
    fn in_run_dir(&mut self, path: &str) -> String {
        let name = self.unused_name(path);
        self.rules.run_dir.join(name).to_string_lossy().into_owned()
    }

    fn unused_name(&mut self, path: &str) -> String {
        let name = Path::new(path).file_name().map_or("file".into(), |name| name.to_string_lossy());
        let mut unique = name.clone().into_owned();
        let mut number = 1;
        while !self.names.insert(unique.clone()) {
            number += 1;
            unique = format!("{name}.{number}");
        }
        unique
    }

    fn socket_in_run_dir(&mut self, path: &str) -> String {
        let new = self.in_run_dir(path);
        if new.len() > MAX_SOCKET_PATH {
            self.problem(
                "run-dir-too-long",
                format!("{new} is too long for a unix socket ({MAX_SOCKET_PATH} bytes)"),
                "choose a run directory with a shorter path",
            );
        }
        if new != path {
            self.notes.push(format!("socket {path} becomes {new}"));
        }
        new
    }

    fn machine(&mut self, option: &QemuOption) -> QemuOption {
        let value = option.parse_value();
        for key in ["memory-encryption", "confidential-guest-support"] {
            if value.get(key).is_some() {
                self.problem(
                    "guest-encrypted",
                    "the guest's memory is encrypted (SEV, TDX), and only the processor can read it",
                    "such guests cannot be migrated",
                );
            }
        }
        self.rewrite_paths(option)
    }

    /// Replaces a source's terminal with a file on this host.
    fn terminal(&mut self) {
        let has = |out: &[QemuOption], name: &str| out.iter().any(|option| option.name == name);
        if has(&self.out, "nographic") && !has(&self.out, "nodefaults") {
            if !has(&self.out, "serial") {
                let file = self.log("serial0.log");
                self.notes.push(format!("the first serial port writes to {file}"));
                self.out.push(QemuOption::new("serial", format!("file:{file}")));
            }
            if !has(&self.out, "monitor") {
                self.out.push(QemuOption::new("monitor", "none"));
            }
        }
        if !has(&self.out, "display") && !has(&self.out, "nographic") {
            self.out.push(QemuOption::new("display", "none"));
        }
    }

    fn finish(mut self) -> Result<BuiltCommand, CommandError> {
        let file = |name: &str| self.rules.run_dir.join(name);
        let (qmp, log, state_socket) = (file(QMP_FILE), file(LOG_FILE), file(STATE_FILE));
        if state_socket.as_os_str().len() > MAX_SOCKET_PATH {
            let what = format!("{} is too long for a unix socket", state_socket.display());
            self.problem("run-dir-too-long", what, "choose a run directory with a shorter path");
        }
        if !self.problems.is_empty() {
            self.problems.dedup();
            return Err(CommandError { problems: self.problems });
        }
        let mut argv = vec![self.rules.qemu_binary.clone().into_os_string()];
        for dir in &self.rules.data_dirs {
            argv.push("-L".into());
            argv.push(dir.clone().into_os_string());
        }
        argv.extend(cmdline::arguments(&self.out).into_iter().map(OsString::from));
        argv.extend(monitor(&qmp).map(OsString::from));
        argv.extend(["-S", "-incoming", "defer"].map(OsString::from));
        Ok(BuiltCommand {
            argv,
            qmp,
            log,
            state_socket,
            logs: self.logs,
            notes: self.notes,
            warnings: self.warnings,
        })
    }
}

/// Returns the options of a monitor of our own at `path`. The process that starts QEMU connects to it at once.
///
/// QEMU waits for that connection (`wait=on`) before it initialises anything else. Without `wait=on` it accepts the
/// connection while both its main loop and the monitor's own thread watch the socket, and on a busy host it then sends
/// two greetings, or never answers the first command (seen with 7.2, once in 150 starts). A QEMU whose starter has
/// died in the meantime waits for ever; it is found by this option ([`crate::find::find_by_own_monitor`]).
pub fn monitor(path: &Path) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("{}server=on,wait=on", monitor_prefix(path)),
        "-mon".to_owned(),
        format!("chardev={MONITOR_ID},mode=control"),
    ]
}

/// Returns the start of the option that creates our own monitor; it is the same in all our versions.
pub(crate) fn monitor_prefix(path: &Path) -> String {
    format!("socket,id={MONITOR_ID},path={},", path.to_string_lossy().replace(',', ",,"))
}

#[cfg(test)]
mod tests;
