//! Search for the QEMUs of this host.
//!
//! All information is from `/proc`: which processes are QEMUs, how they were started, which
//! monitors they listen on. A guest is selected by process, by the socket of its monitor, or by
//! name, and errors name the obstacle to talking to it together with advice.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cmdline::{self, QemuOption};
use crate::describe::{StartCommand, absolute};
use crate::process::start_time_ticks;
use crate::qmp::{Qmp, QmpError};

mod processes;

pub use processes::other_kvm_processes;
use processes::{all_processes, is_qemu_program, there, try_program};

/// A QMP monitor of a QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Monitor {
    /// Path of the socket.
    pub path: PathBuf,
    /// True if the kernel reports that the process listens on it.
    pub listening: bool,
    /// True if a client is connected to it; QEMU serves one at a time.
    pub held: bool,
}

/// A running QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuProcess {
    /// Process id.
    pub pid: u32,
    /// Start time, in clock ticks since boot.
    pub start_time_ticks: u64,
    /// Path of the program, with which it can be started again.
    pub binary: PathBuf,
    /// Arguments, without the program's name.
    pub arguments: Vec<String>,
    /// Working directory.
    pub working_dir: PathBuf,
    /// Name of the guest (`-name`).
    pub name: Option<String>,
    /// QMP monitors on unix sockets.
    pub monitors: Vec<Monitor>,
    /// Name of the systemd unit in which the process runs.
    pub unit: Option<String>,
    /// User whose own systemd manages that unit; none for the system's.
    pub unit_of_user: Option<u32>,
}

impl QemuProcess {
    /// Returns the program, arguments and directory, for [`crate::describe::describe`].
    pub fn start_command(&self) -> StartCommand {
        StartCommand {
            binary: self.binary.clone(),
            arguments: self.arguments.clone(),
            working_dir: self.working_dir.clone(),
        }
    }

    /// Returns true if libvirt started the process.
    pub fn is_managed_by_libvirt(&self) -> bool {
        let of_libvirt = |text: &str| text.contains("libvirt") || text.contains("charmonitor");
        self.arguments.iter().any(|argument| of_libvirt(argument))
    }

    fn label(&self) -> String {
        match &self.name {
            Some(name) => format!("{name} (process {})", self.pid),
            None => format!("process {}", self.pid),
        }
    }
}

/// Criterion by which a guest is selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// Process id.
    Pid(u32),
    /// Socket of its monitor.
    Socket(PathBuf),
    /// Name of the guest.
    Name(String),
}

impl Selector {
    /// Parses a selector: digits are a process id, a path is a socket, anything else a name.
    pub fn parse(text: &str) -> Self {
        if let Ok(pid) = text.parse() {
            Self::Pid(pid)
        } else if text.contains('/') {
            Self::Socket(text.into())
        } else {
            Self::Name(text.to_owned())
        }
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pid(pid) => write!(f, "process {pid}"),
            Self::Socket(path) => write!(f, "monitor {}", path.display()),
            Self::Name(name) => write!(f, "name {name}"),
        }
    }
}

/// Error: a guest was not found or cannot be connected to.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// No QEMU matches.
    #[error("no QEMU of this host has {selector}; {seen}")]
    None {
        /// Selector of the request.
        selector: Selector,
        /// QEMUs that exist.
        seen: String,
    },
    /// More than one QEMU matches.
    #[error("several QEMUs have {selector}: {which}; select one by its process id")]
    Several {
        /// Selector of the request.
        selector: Selector,
        /// QEMUs that match.
        which: String,
    },
    /// The QEMU has no monitor that we could use.
    #[error(
        "QEMU {which} has no QMP monitor on a unix socket, and none can be added while it runs; start it with -qmp unix:PATH,server=on,wait=off next time"
    )]
    NoMonitor {
        /// The process.
        which: String,
    },
    /// libvirt holds the only monitor.
    #[error(
        "the only QMP monitor of QEMU {which} is held by libvirt, so it cannot be adopted; give the domain a second monitor (<qemu:commandline> with -qmp unix:PATH,server=on,wait=off) when it is started next"
    )]
    HeldByLibvirt {
        /// The process.
        which: String,
    },
    /// Other clients hold all monitors.
    #[error(
        "all QMP monitors of QEMU {which} are held by other clients or do not answer; end those clients, or start QEMU with one more monitor next time"
    )]
    Held {
        /// The process.
        which: String,
        /// Error of the last monitor.
        source: QmpError,
    },
}

/// The QEMUs of this host, as far as this user may see them.
#[derive(Debug, Default)]
pub struct QemuSurvey {
    /// QEMUs, by process id.
    pub found: Vec<QemuProcess>,
    /// Processes of which it is not known whether they are QEMUs, with the obstacle.
    pub unknown: Vec<(u32, io::Error)>,
}

/// Returns all QEMUs of this host that this user may see, by process id.
pub fn list() -> Vec<QemuProcess> {
    survey().map(|survey| survey.found).unwrap_or_default()
}

/// Returns all QEMUs of this host, and what cannot be seen.
///
/// # Errors
/// The processes of this host cannot be listed.
pub fn survey() -> io::Result<QemuSurvey> {
    let pids = all_processes()?;
    let mut survey = QemuSurvey::default();
    // `/proc` can be mounted so that it has only the processes of this user.
    if pids.first() != Some(&1) {
        survey.unknown.push((1, io::ErrorKind::PermissionDenied.into()));
    }
    for pid in pids {
        match try_inspect(pid) {
            Ok(found) => survey.found.extend(found),
            Err(error) => survey.unknown.push((pid, error)),
        }
    }
    Ok(survey)
}

/// Returns the selected QEMU.
pub fn find(selector: &Selector) -> Result<QemuProcess, FindError> {
    let all = list();
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_it = |process: &&QemuProcess| match selector {
        Selector::Pid(pid) => process.pid == *pid,
        Selector::Socket(path) => {
            let path = canonical(path);
            process.monitors.iter().any(|monitor| canonical(&monitor.path) == path)
        }
        Selector::Name(name) => process.name.as_ref() == Some(name),
    };
    let mut found: Vec<&QemuProcess> = all.iter().filter(is_it).collect();
    if found.len() > 1 {
        let which = found.iter().map(|process| process.label()).collect::<Vec<_>>().join(", ");
        return Err(FindError::Several { selector: selector.clone(), which });
    }
    found.pop().cloned().ok_or_else(|| {
        let names: Vec<String> = all.iter().map(QemuProcess::label).collect();
        let seen = if names.is_empty() {
            "no QEMU is running, or this user may not see it".to_owned()
        } else {
            format!("there are {}", names.join(", "))
        };
        FindError::None { selector: selector.clone(), seen }
    })
}

/// Connects to the first monitor of a QEMU that is free.
pub fn connect(process: &QemuProcess, timeout: Duration) -> Result<Qmp, FindError> {
    let which = process.label();
    let mut last = None;
    // Monitors without a client first.
    let mut monitors: Vec<&Monitor> = process.monitors.iter().collect();
    monitors.sort_by_key(|monitor| (monitor.held, !monitor.listening));
    for monitor in monitors {
        // A held monitor greets no second client: a short wait suffices.
        let patience = if monitor.held { timeout.min(Duration::from_millis(200)) } else { timeout };
        let path = reachable_path(process.pid, &monitor.path);
        match connect_at(process.pid, &path, patience) {
            Ok(qmp) => return Ok(qmp),
            Err(error) => last = Some(error),
        }
    }
    Err(match last {
        None => FindError::NoMonitor { which },
        Some(_) if process.is_managed_by_libvirt() => FindError::HeldByLibvirt { which },
        Some(source) => FindError::Held { which, source },
    })
}

/// Connects to the monitor at `path`, if it belongs to process `pid`.
///
/// The kernel reports which process listens. If that is another QEMU (whose socket has replaced this one's, or has the
/// same name in another mount namespace), no byte is sent to it. A socket that was passed to QEMU belongs to the
/// process that started QEMU; it is trusted.
pub fn connect_at(pid: u32, path: &Path, timeout: Duration) -> Result<Qmp, QmpError> {
    Qmp::connect_if(path, timeout, |listener| listener == pid || inspect(listener).is_none())
}

/// Returns the path as this process can open it: QEMU may run in another mount namespace, where the same path is
/// another file.
pub(crate) fn reachable_path(pid: u32, path: &Path) -> PathBuf {
    let through = PathBuf::from(format!("/proc/{pid}/root{}", path.display()));
    if has_same_root(pid) || !through.exists() { path.to_owned() } else { through }
}

/// Returns true if a process has this one's mount namespace and root directory.
fn has_same_root(pid: u32) -> bool {
    let same = |what: &str| {
        let of = |process: &str| std::fs::metadata(format!("/proc/{process}/{what}")).ok();
        let id = |found: std::fs::Metadata| (found.dev(), found.ino());
        of("self").map(id) == of(&pid.to_string()).map(id)
    };
    same("ns/mnt") && same("root")
}

/// Finds the process that was started with our own monitor at `path` ([`crate::command::monitor`]), even if it does not
/// listen there. Other processes that name that path (`socat`, an editor) do not match.
pub fn find_by_own_monitor(path: &Path) -> Option<u32> {
    let prefix = crate::command::monitor_prefix(path);
    all_processes().ok()?.into_iter().find(|pid| has_argument(*pid, prefix.as_bytes()))
}

fn has_argument(pid: u32, prefix: &[u8]) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline"));
    line.is_ok_and(|line| line.split(|byte| *byte == 0).any(|argument| argument.starts_with(prefix)))
}

/// Returns true if a process is a QEMU.
pub(crate) fn is_qemu(pid: u32) -> bool {
    inspect(pid).is_some()
}

fn inspect(pid: u32) -> Option<QemuProcess> {
    try_inspect(pid).ok().flatten()
}

/// Returns a process as a QEMU; none if it is none.
///
/// # Errors
/// This user may not look at the process.
fn try_inspect(pid: u32) -> io::Result<Option<QemuProcess>> {
    let Some(binary) = try_program(pid)?.filter(|binary| is_qemu_program(binary)) else { return Ok(None) };
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let Some(cmdline) = there(std::fs::read(proc.join("cmdline")))? else { return Ok(None) };
    let mut words = split_cmdline(&cmdline).into_iter();
    // A process that has ended and was not waited for has no command line.
    if words.next().is_none() {
        return Ok(None);
    }
    let arguments: Vec<String> = words.collect();
    let Some(working_dir) = there(std::fs::read_link(proc.join("cwd")))? else { return Ok(None) };
    let Some(start_time_ticks) = start_time_ticks(pid) else { return Ok(None) };
    let given = cmdline::parse(&arguments);
    let cgroup = std::fs::read_to_string(proc.join("cgroup")).unwrap_or_default();
    Ok(Some(QemuProcess {
        pid,
        start_time_ticks,
        name: guest_name(&given),
        monitors: monitors(pid, &given, &working_dir),
        unit: unit(&cgroup),
        unit_of_user: user_of_unit(&cgroup),
        binary,
        arguments,
        working_dir,
    }))
}

fn split_cmdline(bytes: &[u8]) -> Vec<String> {
    let mut words: Vec<String> =
        bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    // A zero byte ends each word, also the last one.
    if words.last().is_some_and(String::is_empty) {
        words.pop();
    }
    words
}

fn guest_name(given: &[QemuOption]) -> Option<String> {
    let option = given.iter().rev().find(|option| option.name == "name")?;
    let value = crate::options::Value::parse(option.value.as_deref()?, Some("guest"));
    value.get("guest").filter(|name| !name.is_empty())
}

/// Returns the monitors on the command line, with the state of the process's sockets.
fn monitors(pid: u32, given: &[QemuOption], working_dir: &Path) -> Vec<Monitor> {
    let sockets = Sockets::of(pid);
    let chardevs: BTreeMap<String, crate::options::Value> = given
        .iter()
        .filter(|option| option.name == "chardev")
        .filter_map(|option| Some((option.parse_value().get("id")?, option.parse_value())))
        .collect();
    let mut paths: Vec<PathBuf> = Vec::new();
    for option in given {
        let path = match option.name.as_str() {
            "qmp" | "qmp-pretty" => {
                let text = option.value.as_deref().unwrap_or_default();
                match text.strip_prefix("chardev:") {
                    Some(id) => chardevs.get(id).and_then(|chardev| sockets.path_of(chardev)),
                    None => {
                        text.strip_prefix("unix:").and_then(|rest| rest.split(',').next()).map(str::to_owned)
                    }
                }
            }
            "mon" => {
                let mon = option.parse_value();
                let control = mon.get("mode").as_deref() == Some("control");
                let chardev = mon.get("chardev").filter(|_| control);
                chardev.and_then(|id| chardevs.get(&id)).and_then(|chardev| sockets.path_of(chardev))
            }
            _ => None,
        };
        let Some(path) = path else { continue };
        let path = PathBuf::from(absolute(&path, working_dir));
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    let monitor = |path: PathBuf| {
        let name = path.to_string_lossy().into_owned();
        let is = |set: &BTreeSet<String>| {
            set.contains(&name) || set.iter().any(|other| Path::new(&absolute(other, working_dir)) == path)
        };
        Monitor { listening: is(&sockets.listening), held: is(&sockets.connected), path }
    };
    paths.into_iter().map(monitor).collect()
}

/// The named unix sockets of a process.
#[derive(Debug, Default)]
struct Sockets {
    listening: BTreeSet<String>,
    connected: BTreeSet<String>,
    /// Paths by descriptor.
    by_fd: BTreeMap<String, String>,
}

impl Sockets {
    fn of(pid: u32) -> Self {
        let mut of_process: BTreeMap<u64, String> = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Ok(link) = std::fs::read_link(entry.path()) else { continue };
            let inode =
                link.to_str().and_then(|l| l.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            if let Some(inode) = inode {
                of_process.insert(inode, entry.file_name().to_string_lossy().into_owned());
            }
        }
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap_or_default();
        Self::parse(&table, &of_process)
    }

    /// Parses lines such as `ffff…: 00000002 00000000 00010000 0001 01 21312 /run/qmp`: the flags
    /// show which socket listens, the state which one is connected (03).
    fn parse(table: &str, of_process: &BTreeMap<u64, String>) -> Self {
        let mut found = Self::default();
        for line in table.lines().skip(1) {
            let mut words = line.split_whitespace();
            let flags = words.nth(3).unwrap_or_default();
            let state = words.nth(1).unwrap_or_default();
            let inode = words.next().and_then(|inode| inode.parse::<u64>().ok());
            let path = words.collect::<Vec<_>>().join(" ");
            let Some(fd) = inode.and_then(|inode| of_process.get(&inode)) else { continue };
            if path.is_empty() {
                continue;
            }
            if flags == "00010000" {
                found.listening.insert(path.clone());
            } else if state == "03" {
                found.connected.insert(path.clone());
            }
            found.by_fd.insert(fd.clone(), path);
        }
        found
    }

    fn path_of(&self, chardev: &crate::options::Value) -> Option<String> {
        if chardev.get("backend").as_deref() != Some("socket") {
            return None;
        }
        chardev.get("path").or_else(|| self.by_fd.get(&chardev.get("fd")?).cloned())
    }
}

/// Returns the unit in `/proc/PID/cgroup`: the last component that is a service or a scope. If both of systemd's
/// hierarchies exist, one of them may not name it.
fn unit(cgroup: &str) -> Option<String> {
    let paths = cgroup.lines().filter_map(|line| {
        line.strip_prefix("0::").or_else(|| line.split_once(":name=systemd:").map(|(_, path)| path))
    });
    let mut parts = paths.flat_map(|path| path.rsplit('/'));
    let unit = parts.find(|part| matches!(part.rsplit_once('.'), Some((_, "service" | "scope"))));
    unit.map(str::to_owned)
}

/// Returns the user whose own systemd (`user@1000.service`) manages the unit in `/proc/PID/cgroup`.
fn user_of_unit(cgroup: &str) -> Option<u32> {
    let mut parts = cgroup.lines().flat_map(|line| line.split('/'));
    parts.find_map(|part| part.strip_prefix("user@")?.strip_suffix(".service")?.parse().ok())
}

#[cfg(test)]
mod tests;
