//! Holding a QEMU by SIGSTOP (design, trap 18).
//!
//! A guest that is paused is not safe from being continued: QEMU may have more monitors than the agent's, and a manager
//! that sees a paused guest may think that it does well to continue it. A QEMU that is held hears no monitor. So the
//! source's is held from before READY until the matter is decided, and the destination's from READY on.

use std::thread;
use std::time::{Duration, Instant};

use tracee::{Process, ProcessError, Signal};

/// How long a signal may take to have its effect.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a QEMU could not be held or let go.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HoldError {
    /// Its process is gone, or not to be signalled.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A signal had no effect.
    #[error("QEMU (pid {pid}) does not {what} after {signal}")]
    Signal {
        /// Its process.
        pid: u32,
        /// What it should do.
        what: &'static str,
        /// The signal.
        signal: &'static str,
    },
}

/// Holds a process. From its return on its first thread does not run, in which QEMU obeys its monitors, so that
/// nobody's `cont` is obeyed. The others have the signal too, and stop when they next leave the kernel; that is not
/// waited for: those of a guest that stands still run nothing of it.
pub(crate) fn hold(process: &Process) -> Result<(), HoldError> {
    process.signal(Signal::STOP)?;
    wait_until(process, is_held, "stop", "SIGSTOP")
}

/// Lets the process, not yet its guest, go on.
pub(crate) fn release(process: &Process) -> Result<(), HoldError> {
    if !is_held(process) {
        return Ok(());
    }
    process.signal(Signal::CONT)?;
    wait_until(process, |process| !is_held(process), "go on", "SIGCONT")
}

/// Whether a process is held, by whomever.
pub(crate) fn is_held(process: &Process) -> bool {
    process.status().is_ok_and(|status| status.state == 'T')
}

fn wait_until(
    process: &Process,
    holds: impl Fn(&Process) -> bool,
    what: &'static str,
    signal: &'static str,
) -> Result<(), HoldError> {
    let deadline = Instant::now() + PATIENCE;
    while !holds(process) {
        process.check_alive()?;
        if Instant::now() > deadline {
            return Err(HoldError::Signal { pid: process.pid(), what, signal });
        }
        thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}
