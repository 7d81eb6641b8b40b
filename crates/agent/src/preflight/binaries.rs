//! The QEMUs of this host: which one an arriving VM gets, and what it can do.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use qemu::command::{HostRules, QMP_FILE};
use qemu::process::{Launch, StartError};
use qemu::qmp::Qmp;
use tracee::{Process, Signal};

use crate::context::Context;
use crate::destination::find_by_monitor;

/// The QEMU for a VM that ran under a version: the first of the same one (`major.minor`), else the first newer one,
/// else the first, about which pre-flight will have something to say.
pub(super) fn choose(binaries: &[PathBuf], wanted: &str) -> PathBuf {
    let wanted = parse(wanted);
    let versions: Vec<_> = binaries.iter().map(|binary| (binary, version(binary))).collect();
    let same = versions.iter().find(|(_, found)| found.is_some() && *found == wanted);
    let newer = versions.iter().find(|(_, found)| found.is_some() && *found > wanted);
    same.or(newer).or(versions.first()).map_or_else(PathBuf::new, |(binary, _)| (*binary).clone())
}

/// Major and minor number.
fn parse(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

/// What a QEMU says of itself: `QEMU emulator version 7.2.22 (…)`.
fn version(binary: &Path) -> Option<(u64, u64)> {
    let output =
        Command::new(binary).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    parse(text.split_once("version ")?.1.split_whitespace().next()?)
}

/// What the directories of probes begin with.
const PREFIX: &str = "probe-";

/// Ends the probes that an agent before this one left behind when it was killed: they would wait for ever.
pub(crate) fn end_probes(context: &Context) {
    let Ok(entries) = std::fs::read_dir(&context.config.run_dir) else { return };
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

/// A QEMU without a guest that can be asked questions. Ends when dropped.
pub(super) struct Probe {
    pub(super) qmp: Qmp,
    process: Option<Process>,
    directory: PathBuf,
}

impl Probe {
    pub(super) fn start(context: &Context, rules: &HostRules) -> Result<Self, StartError> {
        let name = format!("{PREFIX}{:?}", std::thread::current().id());
        let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let directory = context.config.run_dir.join(name);
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
        let patience = Duration::from_millis(context.config.timeouts.qemu_start_ms);
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
        tracing::warn!(directory = %directory.display(), %error, "left behind");
    }
}

#[cfg(test)]
mod tests {
    use std::process::Child;

    use super::*;
    use crate::testing::World;

    /// A process that stays until its input ends and has this argument.
    fn with_argument(argument: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "read line", "sh", argument]).stdin(Stdio::piped());
        let child = command.spawn().unwrap();
        // The kernel says that it runs a moment before it shows its arguments.
        let shown = || std::fs::read_to_string(format!("/proc/{}/cmdline", child.id())).unwrap();
        while !shown().contains(argument) {
            std::thread::yield_now();
        }
        child
    }

    /// A QEMU that waits for an agent that has been killed is ended by the next; whoever else names its monitor is not.
    #[test]
    fn a_probe_that_was_left_behind_is_ended() {
        let world = World::new();
        let directory = world.context.config.run_dir.join("probe-ThreadId7");
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join(QMP_FILE);
        let mut others = with_argument(&format!("UNIX-CONNECT:{}", path.display()));
        let mut left = with_argument(&qemu::command::monitor(&path)[1]);
        end_probes(&world.context);
        let status = left.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        assert!(!directory.exists());
        assert_eq!(others.try_wait().unwrap(), None, "not ours");
        drop(others.stdin.take());
        assert_eq!(others.wait().unwrap().code(), Some(1), "its input ended");
    }
}
