//! The QEMUs of this host: which one an arriving VM gets, and what it can do.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use qemu::command::HostRules;
use qemu::process::{Launch, StartError};
use qemu::qmp::Qmp;
use tracee::{Process, Signal};

use crate::context::Context;

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

/// A QEMU without a guest that can be asked questions. Ends when dropped.
pub(super) struct Probe {
    pub(super) qmp: Qmp,
    process: Option<Process>,
    directory: PathBuf,
}

impl Probe {
    pub(super) fn start(context: &Context, rules: &HostRules) -> Result<Self, StartError> {
        let name = format!("probe-{:?}", std::thread::current().id());
        let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let directory = context.config.run_dir.join(name);
        let log = directory.join("qemu.log");
        std::fs::create_dir_all(&directory)
            .map_err(|source| StartError::Log { path: log.clone(), source })?;
        let qmp = directory.join("qmp.sock");
        let mut argv = vec![rules.qemu_binary.clone().into_os_string()];
        for dir in &rules.data_dirs {
            argv.extend(["-L".into(), dir.clone().into_os_string()]);
        }
        argv.extend(
            ["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S"].map(Into::into),
        );
        argv.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", qmp.display()).into()]);
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
