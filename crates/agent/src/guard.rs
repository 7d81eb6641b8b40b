//! Lifts what holds a guest down when the agent that set it dies: caps on its writes, a limit on its processors.
//!
//! QEMU keeps a throttle until somebody lifts it, and so does the kernel: they know no lease. The next agent lifts it, but
//! nobody may start one. So a process of its own waits for the agent's end, which the kernel tells it: the pipe to it is
//! closed. It does nothing then but what can do no harm at any time, which is to lift throttles: a new agent may be at work
//! already, with the same guest. One that has the monitor has lifted what it found, so that the guard need not wait for it
//! for long. Each guard lifts one of the two, for either may be over while the other goes on.

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use qemu::{find, recording};
use tracee::{CpuLimit, Process};
use tracing::warn;

use crate::daemon::HelperProgram;

/// How long a monitor may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process that lifts a guest's throttle unless it is [dismissed](Self::dismiss), however this one ends.
#[derive(Debug)]
pub(crate) struct Guard(Option<Child>);

impl Guard {
    /// Starts one that lifts caps on writes, for the QEMU with this monitor.
    pub(crate) fn of_writes(helper: &HelperProgram, process: &Process, monitor: &Path) -> io::Result<Self> {
        Self::start(helper, process, Some(monitor))
    }

    /// Starts one that lifts the limit on its processors.
    pub(crate) fn of_processors(helper: &HelperProgram, process: &Process) -> io::Result<Self> {
        Self::start(helper, process, None)
    }

    fn start(helper: &HelperProgram, process: &Process, monitor: Option<&Path>) -> io::Result<Self> {
        let mut command = Command::new(&helper.program);
        command.args(&helper.arguments);
        command.args([process.pid().to_string(), process.start_time().to_string()]).args(monitor);
        // What ends the agent by its terminal or its group shall not end it.
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .map(|child| Self(Some(child)))
    }

    /// Nothing is left to be lifted.
    pub(crate) fn dismiss(mut self) {
        if let Some(stdin) = self.0.as_mut().and_then(|child| child.stdin.as_mut()) {
            // If it does not hear of it, it finds nothing.
            let _ = stdin.write_all(b".");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        // It ends by itself, and soon; somebody has to take notice of it.
        drop(child.stdin.take());
        let wait = move || drop(child.wait());
        if let Err(error) = thread::Builder::new().name("guard".to_owned()).spawn(wait) {
            warn!(%error, "nobody waits for the guard of a throttle to end");
        }
    }
}

/// Dismisses its guard when it is dropped: what was to be lifted has been lifted then.
#[derive(Debug)]
pub(crate) struct Dismissed(pub(crate) Option<Guard>);

impl Drop for Dismissed {
    fn drop(&mut self) {
        if let Some(guard) = self.0.take() {
            guard.dismiss();
        }
    }
}

/// The guard's life, by the arguments that [`Guard::start`] gives it: without a monitor, it is one of processors.
pub fn guard_main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut arguments = arguments.into_iter();
    let mut number = || arguments.next()?.to_str()?.parse::<u64>().ok();
    let (Some(pid), Some(start_time)) = (number(), number()) else { return ExitCode::from(2) };
    let monitor = arguments.next().map(PathBuf::from);
    if matches!(io::stdin().read(&mut [0]), Ok(1..)) {
        return ExitCode::SUCCESS;
    }
    let Ok(process) = Process::open_exact(pid as u32, start_time) else { return ExitCode::SUCCESS };
    let lifted = match &monitor {
        Some(monitor) => find::connect_at(process.pid(), monitor, PATIENCE)
            .and_then(|mut monitor| recording::lift_caps(&mut monitor))
            .map_err(|error| crate::chain(&error)),
        None => CpuLimit::end_left(&process).map_err(|error| crate::chain(&error)),
    };
    match lifted {
        Ok(_) => ExitCode::SUCCESS,
        // The agent's log, if anybody still reads it.
        Err(error) => {
            let _ = writeln!(io::stderr(), "a guest may still be throttled: {error}");
            ExitCode::FAILURE
        }
    }
}
