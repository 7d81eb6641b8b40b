//! Guard processes that lift a guest's throttles when the agent that set them dies: caps on its writes, a limit on its
//! processors.
//!
//! QEMU keeps a throttle until it is lifted, and so does the kernel: they know no lease. The next agent lifts it, but
//! it may never be started. So a separate process waits for the agent's end, which it notices because the kernel closes
//! the pipe to it. Then it does only what is harmless at any time, which is to lift throttles: a new agent may already
//! be at work with the same guest.
//!
//! An agent that holds the monitor has lifted the throttles that it found, so the guard need not wait long for the
//! monitor. Each guard lifts one of the two throttles, because either may end while the other continues.

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

use crate::HelperProgram;

/// Time limit for the connection to a monitor.
const PATIENCE: Duration = Duration::from_secs(10);

/// Process that lifts a guest's throttle when this process ends in any way, unless it is [dismissed](Self::dismiss).
#[derive(Debug)]
pub struct ThrottleGuard(Option<Child>);

impl ThrottleGuard {
    /// Starts a guard that lifts the caps on writes, for the QEMU with this monitor.
    pub fn for_writes(helper: &HelperProgram, process: &Process, monitor: &Path) -> io::Result<Self> {
        Self::start(helper, process, Some(monitor))
    }

    /// Starts a guard that lifts the limit on the guest's processors.
    pub fn for_processors(helper: &HelperProgram, process: &Process) -> io::Result<Self> {
        Self::start(helper, process, None)
    }

    fn start(helper: &HelperProgram, process: &Process, monitor: Option<&Path>) -> io::Result<Self> {
        let mut command = Command::new(&helper.program);
        command.args(&helper.arguments);
        command.args([process.pid().to_string(), process.start_time().to_string()]).args(monitor);
        // A signal to the agent's terminal or process group must not end the guard.
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .map(|child| Self(Some(child)))
    }

    /// Ends the guard without effect, because the throttle is already lifted.
    pub(crate) fn dismiss(mut self) {
        if let Some(stdin) = self.0.as_mut().and_then(|child| child.stdin.as_mut()) {
            // A guard that does not receive this finds nothing to lift.
            let _ = stdin.write_all(b".");
        }
    }
}

impl Drop for ThrottleGuard {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        // The guard soon ends by itself; its exit status must be collected.
        drop(child.stdin.take());
        let wait = move || drop(child.wait());
        if let Err(error) = thread::Builder::new().name("guard".to_owned()).spawn(wait) {
            warn!(%error, "cannot wait for the end of the throttle's guard process");
        }
    }
}

/// Dismisses its guard when it is dropped: the throttle has been lifted by then.
#[derive(Debug)]
pub struct DismissOnDrop(pub Option<ThrottleGuard>);

impl Drop for DismissOnDrop {
    fn drop(&mut self) {
        if let Some(guard) = self.0.take() {
            guard.dismiss();
        }
    }
}

/// Runs the guard with the arguments of [`ThrottleGuard::start`]: without a monitor, it guards the processors.
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
        None => CpuLimit::end_leftover(&process).map_err(|error| crate::chain(&error)),
    };
    match lifted {
        Ok(_) => ExitCode::SUCCESS,
        // This goes to the agent's log, if it is still open.
        Err(error) => {
            let _ = writeln!(io::stderr(), "a guest may still be throttled: {error}");
            ExitCode::FAILURE
        }
    }
}
