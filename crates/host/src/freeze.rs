//! Freezing a QEMU by SIGSTOP (docs/traps.md, trap 18).
//!
//! A paused guest can still be continued: QEMU may have more monitors than the agent's, and a management program that
//! sees a paused guest may decide to continue it. A frozen QEMU processes no monitor command. So the source's QEMU is
//! frozen from before READY until the handover is decided, and the destination's from READY on.

use std::thread;
use std::time::{Duration, Instant};

use tracee::{Process, ProcessError, Signal};

/// Time limit for a signal to have its effect.
const PATIENCE: Duration = Duration::from_secs(5);

/// Error of freezing a QEMU or of letting it go on.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// The process is gone, or may not be signalled.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A signal had no effect.
    #[error("QEMU (pid {pid}) does not {what} after {signal}")]
    Signal {
        /// Process id of QEMU.
        pid: u32,
        /// The expected effect.
        what: &'static str,
        /// Name of the signal.
        signal: &'static str,
    },
}

/// Freezes a process by SIGSTOP. When this returns, its first thread does not run, in which QEMU executes monitor
/// commands, so that no `cont` is executed. The other threads have the signal too, and stop when they next leave the
/// kernel; this does not wait for them: the threads of a stopped guest run none of its code.
pub(crate) fn freeze(process: &Process) -> Result<(), FreezeError> {
    process.signal(Signal::STOP)?;
    wait_until(process, is_frozen, "stop", "SIGSTOP")
}

/// Lets the process go on by SIGCONT, not yet its guest.
pub(crate) fn thaw(process: &Process) -> Result<(), FreezeError> {
    if !is_frozen(process) {
        return Ok(());
    }
    process.signal(Signal::CONT)?;
    wait_until(process, |process| !is_frozen(process), "continue", "SIGCONT")
}

/// Returns true if a process is stopped by a signal, no matter who sent it.
pub(crate) fn is_frozen(process: &Process) -> bool {
    process.status().is_ok_and(|status| status.state == 'T')
}

fn wait_until(
    process: &Process,
    holds: impl Fn(&Process) -> bool,
    what: &'static str,
    signal: &'static str,
) -> Result<(), FreezeError> {
    let deadline = Instant::now() + PATIENCE;
    while !holds(process) {
        process.check_alive()?;
        if Instant::now() > deadline {
            return Err(FreezeError::Signal { pid: process.pid(), what, signal });
        }
        thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}
