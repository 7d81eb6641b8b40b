//! The QEMU binaries of this host: the choice for an arriving VM, and their capabilities.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use qemu::command::{HostRules, QMP_FILE};
use qemu::preflight::{QemuInfo, gather};
use qemu::process::{Launch, StartError};
use qemu::qmp::{Qmp, QmpError};
use tracee::{Process, Signal};

use crate::config::Config;

/// Cached capabilities of this host's QEMU binaries. To start one for a query takes as long as to start it for a VM, so
/// it is queried once, and again when its file has changed.
#[derive(Debug, Default)]
pub struct EmulatorCache(Mutex<HashMap<File, CachedEmulator>>);

/// Identity of a program's file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct File {
    path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    changed_ns: i128,
}

/// Known facts about a program; none at first.
#[derive(Clone, Debug, Default)]
struct CachedEmulator {
    /// Major and minor number.
    version: Option<(u64, u64)>,
    emulator: Option<Arc<QemuInfo>>,
}

impl File {
    fn of(path: &Path) -> io::Result<Self> {
        let found = std::fs::metadata(path)?;
        let changed_ns = i128::from(found.ctime()) * 1_000_000_000 + i128::from(found.ctime_nsec());
        let (device, inode, bytes) = (found.dev(), found.ino(), found.len());
        Ok(Self { path: path.to_owned(), device, inode, bytes, changed_ns })
    }
}

impl EmulatorCache {
    fn known(&self) -> MutexGuard<'_, HashMap<File, CachedEmulator>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses the QEMU for a VM that ran under version `wanted`: the first of the same version (`major.minor`), else
    /// the first newer one, else the first, for which the pre-flight checks will report findings.
    pub(crate) fn choose(&self, binaries: &[PathBuf], wanted: &str) -> PathBuf {
        let wanted = parse(wanted);
        let versions: Vec<_> = binaries.iter().map(|binary| (binary, self.version(binary))).collect();
        let same = versions.iter().find(|(_, found)| found.is_some() && *found == wanted);
        let newer = versions.iter().find(|(_, found)| found.is_some() && *found > wanted);
        same.or(newer).or(versions.first()).map_or_else(PathBuf::new, |(binary, _)| (*binary).clone())
    }

    /// Returns the versions (`major.minor`) of these programs, in their order; without those that report none.
    pub fn versions(&self, binaries: &[PathBuf]) -> Vec<String> {
        let versions = binaries.iter().filter_map(|binary| self.version(binary));
        versions.map(|(major, minor)| format!("{major}.{minor}")).collect()
    }

    fn version(&self, binary: &Path) -> Option<(u64, u64)> {
        let file = File::of(binary).ok()?;
        if let Some(version) = self.known().get(&file).and_then(|known| known.version) {
            return Some(version);
        }
        let version = version(binary);
        self.known().entry(file).or_default().version = version;
        version
    }

    /// Returns the capabilities of the QEMU that these rules name.
    pub(crate) fn ask(&self, config: &Config, rules: &HostRules) -> Result<Arc<QemuInfo>, QemuQueryError> {
        let file = File::of(&rules.qemu_binary).map_err(|source| QemuQueryError::File { source })?;
        if let Some(emulator) = self.known().get(&file).and_then(|known| known.emulator.clone()) {
            return Ok(emulator);
        }
        let mut probe = Probe::start(config, rules)?;
        let emulator = Arc::new(gather::emulator(&mut probe.qmp)?);
        self.known().entry(file).or_default().emulator = Some(Arc::clone(&emulator));
        Ok(emulator)
    }
}

/// Reason for which a QEMU could not be queried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QemuQueryError {
    /// Its file cannot be found.
    #[error("it was not found")]
    File {
        /// Error of the file system.
        source: io::Error,
    },
    /// It does not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// It does not answer.
    #[error("it does not answer")]
    Monitor(#[from] QmpError),
}

/// Parses the major and minor number.
fn parse(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

/// Reads the version from a QEMU's own output: `QEMU emulator version 7.2.22 (…)`.
fn version(binary: &Path) -> Option<(u64, u64)> {
    let output =
        Command::new(binary).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    parse(text.split_once("version ")?.1.split_whitespace().next()?)
}

/// Prefix of the directories of probes.
pub(crate) const PREFIX: &str = "probe-";

/// Ends the leftover probes of a previous agent that was killed: they would wait for ever.
pub fn end_probes(config: &Config) {
    let Ok(entries) = std::fs::read_dir(&config.run_dir) else { return };
    for directory in entries.flatten().map(|entry| entry.path()) {
        if !directory.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(PREFIX.as_bytes())) {
            continue;
        }
        if let Some(process) = find_by_monitor(&directory.join(QMP_FILE))
            && let Err(error) = process.signal(Signal::KILL)
        {
            tracing::debug!(%error, "the probe had ended");
        }
        remove(&directory);
    }
}

/// Finds the QEMU that an agent started with a monitor at `path`.
pub(crate) fn find_by_monitor(path: &Path) -> Option<Process> {
    qemu::find::find_by_own_monitor(path).and_then(|pid| Process::open(pid).ok())
}

/// A QEMU without a guest that can be queried. Ends when dropped.
struct Probe {
    qmp: Qmp,
    process: Option<Process>,
    directory: PathBuf,
}

impl Probe {
    fn start(config: &Config, rules: &HostRules) -> Result<Self, StartError> {
        let name = format!("{PREFIX}{:?}", std::thread::current().id());
        let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let directory = config.run_dir.join(name);
        let log = directory.join("qemu.log");
        std::fs::create_dir_all(&directory)
            .map_err(|source| StartError::Log { path: log.clone(), source })?;
        let qmp = directory.join(QMP_FILE);
        let mut argv = vec![rules.qemu_binary.clone().into_os_string()];
        for dir in &rules.data_dirs {
            argv.extend(["-L".into(), dir.clone().into_os_string()]);
        }
        argv.extend(
            ["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S"].map(Into::into),
        );
        argv.extend(qemu::command::monitor(&qmp).map(Into::into));
        let launch = Launch { argv, env: Vec::new(), cwd: None, log, qmp, scope: None, oom_score_adj: 0 };
        let patience = Duration::from_millis(config.timeouts.qemu_start_ms);
        let started = qemu::process::start(&launch, Instant::now() + patience);
        match started {
            Ok((started, qmp)) => {
                let process = Process::open_exact(started.pid, started.start_time_ticks).ok();
                Ok(Self { qmp, process, directory })
            }
            Err(error) => {
                remove(&directory);
                Err(error)
            }
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(process) = &self.process
            && let Err(error) = process.signal(Signal::KILL)
        {
            tracing::debug!(%error, "the probe had ended");
        }
        remove(&self.directory);
    }
}

fn remove(directory: &Path) {
    if let Err(error) = std::fs::remove_dir_all(directory) {
        tracing::warn!(directory = %directory.display(), %error, "cannot remove the directory of a probe");
    }
}

#[cfg(test)]
mod tests {
    use std::process::Child;

    use super::*;
    use crate::testing::World;

    /// Starts a process with this argument that stays until its input ends.
    fn with_argument(argument: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "read line", "sh", argument]).stdin(Stdio::piped());
        let child = command.spawn().unwrap();
        // The kernel reports the process as running a moment before it shows its arguments.
        let shown = || std::fs::read_to_string(format!("/proc/{}/cmdline", child.id())).unwrap();
        while !shown().contains(argument) {
            std::thread::yield_now();
        }
        child
    }

    /// A program is queried once, and again when it was replaced.
    #[test]
    fn a_replaced_program_is_asked_again() {
        use std::os::unix::fs::PermissionsExt as _;

        let directory = tempfile::tempdir().unwrap();
        let (program, asked) = (directory.path().join("qemu"), directory.path().join("asked"));
        let write = |version: &str| {
            let new = directory.path().join("new");
            let text =
                format!("#!/bin/sh\necho x >>{}\necho QEMU emulator version {version}\n", asked.display());
            std::fs::write(&new, text).unwrap();
            std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
            std::fs::rename(&new, &program).unwrap();
        };
        let emulators = EmulatorCache::default();
        assert_eq!(emulators.version(&program), None);
        for (version, wanted, times) in [("7.2.1", (7, 2), 1), ("10.0.2", (10, 0), 2)] {
            write(version);
            assert_eq!(emulators.version(&program), Some(wanted));
            assert_eq!(emulators.version(&program), Some(wanted));
            assert_eq!(std::fs::read_to_string(&asked).unwrap().lines().count(), times);
        }
        assert_eq!(emulators.choose(std::slice::from_ref(&program), "10.0"), program);
    }

    /// A QEMU that waits for an agent that has been killed is ended by the next; another process that names its monitor
    /// is not.
    #[test]
    fn a_probe_that_was_left_behind_is_ended() {
        let world = World::new();
        let directory = world.context.config.run_dir.join("probe-ThreadId7");
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join(QMP_FILE);
        let mut others = with_argument(&format!("UNIX-CONNECT:{}", path.display()));
        let mut left = with_argument(&qemu::command::monitor(&path)[1]);
        end_probes(&world.context.config);
        let status = left.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        assert!(!directory.exists());
        assert_eq!(others.try_wait().unwrap(), None, "not ours");
        drop(others.stdin.take());
        assert_eq!(others.wait().unwrap().code(), Some(1), "its input ended");
    }
}
