//! Run time of a guest's program that comes to an end: from the moment at which the guest resumes from its saved state,
//! by the host's clock, so that the downtime is included.

use std::thread::{self, JoinHandle};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::serial::Serial;

/// Result of a guest's program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProgramResult {
    /// From the guest's start to the end of its program, ms.
    pub ms: f64,
    /// True if all results are right, by its own verification.
    pub verified: bool,
    /// True if it ended at the source: before the switchover, or because there was none.
    pub at_source: bool,
}

/// The course of a program, followed from the start of its guest.
pub(super) struct ProgramRun {
    began: Instant,
    at_source: JoinHandle<Result<Option<(Instant, i32)>>>,
}

impl ProgramRun {
    /// Follows the program of a guest that has just been started.
    pub(super) fn begin(source: &Serial) -> Self {
        let (began, serial) = (Instant::now(), source.clone());
        Self { began, at_source: thread::spawn(move || end(&serial)) }
    }

    /// Waits until the program has ended, at the destination or at the source. With `None` the guest has not moved: its
    /// program continues at the source.
    pub(super) fn finish(self, destination: Option<&Serial>) -> Result<ProgramResult> {
        let at_source = self.at_source.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let ended = match (at_source, destination) {
            (None, Some(serial)) => end(serial)?,
            (ended, _) => ended,
        };
        let (at, status) =
            ended.ok_or_else(|| Error::Config("the guest ended before its program".to_owned()))?;
        let ms = (at - self.began).as_secs_f64() * 1e3;
        Ok(ProgramResult { ms, verified: status == 0, at_source: at_source.is_some() })
    }
}

/// Waits for the end of a program; returns its time and status, or `None` if its QEMU ended before.
fn end(serial: &Serial) -> Result<Option<(Instant, i32)>> {
    Ok(serial.wait_for_nas_end()?.map(|end| (Instant::now(), end.status)))
}
