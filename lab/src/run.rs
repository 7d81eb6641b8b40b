//! Running programs: to their end, with their output in the error; or as daemons with a log that can be followed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use crate::error::{Context, Error, Result};
use crate::follow::LogFollower;

/// Runs a command to its end and returns its output.
pub fn run(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().context(|| format!("cannot run {}", command_line(command)))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let mut text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let stdout = String::from_utf8_lossy(&output.stdout);
    if !stdout.trim().is_empty() {
        text = format!("{text}\n{}", stdout.trim());
    }
    Err(Error::Command { command: command_line(command), status: output.status, output: text })
}

/// Returns an approximation of the command line as a user would type it.
fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// A process that runs until it is ended. It is killed when this is dropped, unless it was [`Daemon::release`]d.
#[derive(Debug)]
pub struct Daemon {
    child: Option<Child>,
    pid: u32,
    log: PathBuf,
}

impl Daemon {
    /// Starts a command in a process group of its own; its output is appended to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let output = open_log(log)?;
        let errors = output.try_clone().context(|| format!("cannot use {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context(|| format!("cannot start {}", command_line(command)))?;
        Ok(Self { pid: child.id(), child: Some(child), log: log.to_owned() })
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the file with its output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Follows its output from the start of the log. Waiting fails when the process ends.
    pub fn follow(&self) -> Result<LogFollower> {
        LogFollower::start(&self.log, Some(self.pid))
    }

    /// Returns true if it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Waits until it has ended, and leaves it to be reaped.
    pub fn wait_for_end(&self) -> Result<()> {
        let context = || format!("cannot wait for process {}", self.pid);
        let Some(pid) = Pid::from_raw(self.pid as i32) else { return Ok(()) };
        let process = pidfd_open(pid, PidfdFlags::empty()).context(context)?;
        crate::follow::wait_for_end(&process).context(context)
    }

    /// Kills it (SIGKILL) and waits until it is gone. Does nothing if it has ended before.
    pub fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        child.kill().context(|| format!("cannot kill process {}", self.pid))?;
        child.wait().context(|| format!("cannot wait for process {}", self.pid))?;
        Ok(())
    }

    /// Asks it to end (SIGTERM) and waits until it has.
    pub fn terminate(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        if let Some(pid) = Pid::from_raw(self.pid as i32) {
            // It may have ended by itself: then no process receives the signal.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        child.wait().context(|| format!("cannot wait for process {}", self.pid))?;
        Ok(())
    }

    /// Keeps it running when this is dropped. Returns its process id.
    pub fn release(mut self) -> u32 {
        self.child = None;
        self.pid
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // An error cannot be returned here; `Lab::down` kills the remaining processes in its namespaces.
        let _ = self.kill();
    }
}

/// Opens a log for appending, with its directory.
fn open_log(log: &Path) -> Result<File> {
    if let Some(directory) = log.parent() {
        fs::create_dir_all(directory).context(|| format!("cannot make {}", directory.display()))?;
    }
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .context(|| format!("cannot write {}", log.display()))
}

/// Kills a process that need not be a child, by its id, and waits until it is gone.
pub fn kill_pid(pid: u32) -> Result<()> {
    let Some(raw) = Pid::from_raw(pid as i32) else { return Ok(()) };
    // The descriptor names this process even when its number is used again.
    let process = match pidfd_open(raw, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(io::Error::from(error)).context(|| format!("cannot open process {pid}")),
    };
    match rustix::process::pidfd_send_signal(&process, Signal::KILL) {
        Ok(()) => crate::follow::wait_for_end(&process).context(|| format!("cannot wait for process {pid}")),
        Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(io::Error::from(error)).context(|| format!("cannot kill process {pid}")),
    }
}
