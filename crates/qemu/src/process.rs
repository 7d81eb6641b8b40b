//! Start of a QEMU that outlives this process.
//!
//! The new QEMU leads a session of its own (the `setsid` program starts it, which replaces itself,
//! so that the process keeps its number), has an empty standard input, and writes its messages to a
//! log in the run directory. Where systemd runs, QEMU can be put into a scope of its own, so that a
//! restart of the agent's unit does not stop the guests.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::qmp::{Qmp, QmpError};

/// Number of bytes at the end of a log that become part of an error.
const TAIL_BYTES: u64 = 2000;

/// Error: a QEMU could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The command line is empty.
    #[error("the command line is empty")]
    Empty,
    /// The log file could not be created.
    #[error("cannot write QEMU's log {path}")]
    Log {
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// QEMU cannot be started in its directory.
    #[error("cannot start QEMU in the directory {path}: create it, or name another one")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The process could not be created.
    #[error("cannot start {program}; are QEMU and setsid (util-linux) installed?")]
    Spawn {
        /// The program.
        program: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// QEMU ended before its monitor answered.
    #[error("QEMU exited immediately ({status}): {log}")]
    Ended {
        /// Exit status.
        status: String,
        /// End of its log.
        log: String,
    },
    /// QEMU runs, but its monitor does not answer.
    #[error("QEMU process {pid} was started, but its monitor does not answer: {log}")]
    Silent {
        /// Process id. The process was killed.
        pid: u32,
        /// End of its log.
        log: String,
        /// Error of the monitor.
        source: QmpError,
    },
}

/// Parameters of a start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Program and arguments, among them the monitor at `qmp`.
    pub argv: Vec<OsString>,
    /// Environment variables to set, besides ours.
    pub env: Vec<(String, String)>,
    /// Working directory; ours if `None`.
    pub cwd: Option<PathBuf>,
    /// File for QEMU's messages.
    pub log: PathBuf,
    /// Socket of the monitor that the arguments open.
    pub qmp: PathBuf,
    /// Name of the systemd scope for the process; ignored where systemd does not run.
    pub scope: Option<String>,
    /// OOM score adjustment of the process; it would inherit ours, which keeps the agent alive.
    pub oom_score_adj: i32,
}

/// A QEMU that this process started. Dropping it leaves QEMU running.
#[derive(Debug)]
pub struct StartedQemu {
    /// Process id.
    pub pid: u32,
    /// Start time, in clock ticks since boot: together with `pid` it identifies the process
    /// permanently, because process ids are reused.
    pub start_time_ticks: u64,
    /// Path of its log.
    pub log: PathBuf,
    exited: Receiver<ExitStatus>,
}

impl StartedQemu {
    /// Waits until the process has ended; returns `None` if it has not by the deadline.
    pub fn wait(&self, deadline: Instant) -> Option<ExitStatus> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.exited.recv_timeout(left).ok()
    }
}

/// Starts QEMU and waits until its monitor answers.
///
/// # Errors
/// Includes the end of QEMU's log (port in use, no memory, unknown option); no process is left
/// running.
pub fn start(launch: &Launch, deadline: Instant) -> Result<(StartedQemu, Qmp), StartError> {
    let (program, arguments) = launch.argv.split_first().ok_or(StartError::Empty)?;
    let log = open_log(&launch.log).map_err(|source| StartError::Log { path: launch.log.clone(), source })?;
    let logs = log.try_clone().map(|other| (Stdio::from(other), Stdio::from(log)));
    let (out, err) = logs.map_err(|source| StartError::Log { path: launch.log.clone(), source })?;
    // A socket of an earlier QEMU would only confuse the wait.
    let _ = std::fs::remove_file(&launch.qmp);
    let mut command = match launch.scope.as_deref().filter(|_| is_systemd_running()) {
        Some(scope) => {
            let mut command = Command::new("systemd-run");
            // The agent manages its control groups: the guest's processors may have to be slowed down there.
            command.args(["--scope", "--quiet", "--collect", "--property", "Delegate=yes"]);
            command.args(["--unit", scope, "--", "setsid"]);
            command
        }
        None => Command::new("setsid"),
    };
    command.arg(program).args(arguments).stdin(Stdio::null()).stdout(out).stderr(err);
    command.envs(launch.env.iter().map(|(key, value)| (key, value)));
    if let Some(cwd) = &launch.cwd {
        // The kernel would report a missing directory as a missing program.
        std::fs::read_dir(cwd).map_err(|source| StartError::Directory { path: cwd.clone(), source })?;
        command.current_dir(cwd);
    }
    let mut child = command
        .spawn()
        .map_err(|source| StartError::Spawn { program: program.to_string_lossy().into_owned(), source })?;
    let pid = child.id();
    // The value stays when the program replaces itself. A QEMU that has ended reports the reason in its log.
    let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), launch.oom_score_adj.to_string());
    // The exit status of a child must be collected, or it stays a zombie as long as this process runs.
    let (tell, exited) = channel();
    std::thread::spawn(move || {
        if let Ok(status) = child.wait() {
            let _ = tell.send(status);
        }
    });
    let started = StartedQemu {
        pid,
        start_time_ticks: start_time_ticks(pid).unwrap_or(0),
        log: launch.log.clone(),
        exited,
    };
    match wait_for_monitor(launch, &started, deadline) {
        Ok(qmp) => Ok((started, qmp)),
        Err(error) => {
            kill(pid);
            Err(error)
        }
    }
}

fn wait_for_monitor(launch: &Launch, started: &StartedQemu, deadline: Instant) -> Result<Qmp, StartError> {
    let pause = Duration::from_millis(5);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let error = match Qmp::connect(&launch.qmp, left) {
            Ok(qmp) => return Ok(qmp),
            Err(error) => error,
        };
        // The socket appears some time after the process starts; the process may end at any time.
        if let Some(status) = started.wait(deadline.min(Instant::now() + pause)) {
            let log = log_tail(&launch.log);
            return Err(StartError::Ended { status: status.to_string(), log });
        }
        // A monitor that did not wait for us (a guest's own `wait=off`) may send a second greeting while it is still
        // being initialised (seen with QEMU 7.2).
        let patient =
            matches!(error, QmpError::Connect { .. } | QmpError::Closed { .. } | QmpError::Protocol { .. });
        if !patient || Instant::now() >= deadline {
            let log = log_tail(&launch.log);
            return Err(StartError::Silent { pid: started.pid, log, source: error });
        }
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    // Messages of an earlier QEMU would be mistaken for this one's.
    log.set_len(0)?;
    Ok(log)
}

fn kill(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Returns true if systemd is this host's init.
pub(crate) fn is_systemd_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Returns the start time of a process, in clock ticks since boot (field 22 of `/proc/PID/stat`).
pub fn start_time_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything, also spaces and parentheses.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// QEMU's message while it waits for our connection. Every log has it, and it explains nothing.
const WAITING: &str = "info: QEMU waiting for connection on: ";

/// Returns the last lines of a log, at most 2000 bytes, in one line; empty if there is none.
pub fn log_tail(path: &Path) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.contains(WAITING)).collect();
    lines.get(lines.len().saturating_sub(5)..).unwrap_or_default().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_tail_omits_the_message_about_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        assert_eq!(log_tail(&path), "");
        let text = "qemu: -chardev socket,id=m,path=/q,server=on,wait=on: info: QEMU waiting for connection on: \
            disconnected:unix:/q,server=on\n\n  qemu: no memory\nqemu: no such device\n";
        std::fs::write(&path, text).unwrap();
        assert_eq!(log_tail(&path), "qemu: no memory; qemu: no such device");
    }
}
