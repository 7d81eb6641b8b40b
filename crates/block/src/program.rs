//! Programs of LVM and device mapper.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::image::ImageError;

/// Longest time for one of LVM's programs.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between two checks whether it has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Runs a program of LVM or device mapper. LVM's programs wait while another one holds the group's lock.
pub(crate) fn run(tool: &'static str, mut command: Command, path: &Path) -> Result<String, ImageError> {
    let failed = |message: String| ImageError::Tool { tool, path: path.to_owned(), message };
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env("LC_ALL", "C");
    let started = command.spawn();
    let mut child = started.map_err(|source| ImageError::NoTool { tool, package: "lvm2", source })?;
    let deadline = Instant::now() + TIMEOUT;
    // The output is short: it fits a pipe.
    while child.try_wait().is_ok_and(|ended| ended.is_none()) {
        if Instant::now() >= deadline {
            // It may end at this very moment, or only when a system call in the kernel returns.
            let _ = child.kill();
            std::thread::spawn(move || child.wait());
            return Err(failed(format!("did not end within {} s", TIMEOUT.as_secs())));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let done = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    Err(failed(String::from_utf8_lossy(&done.stderr).trim().replace('\n', "; ")))
}
