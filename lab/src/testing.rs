//! Helpers of end-to-end tests: a command's output, and waiting for events.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    clippy::return_self_not_must_use,
    reason = "helpers of tests"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::follow::DEADLINE;
use crate::kill_pid;

/// Far longer than any command of a test needs, also migrations on a loaded machine.
const LONGEST_COMMAND: Duration = Duration::from_mins(10);

/// Output and exit code of the program.
#[derive(Debug)]
pub struct CommandOutput {
    /// Exit code; -1 if a signal ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl CommandOutput {
    /// Runs it to its end. A program that does not end is killed, so that a test reports its state.
    pub fn by(command: &mut Command) -> Self {
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (pid, (ended, end)) = (child.id(), mpsc::channel::<()>());
        let guard = thread::spawn(move || {
            if end.recv_timeout(LONGEST_COMMAND) == Err(mpsc::RecvTimeoutError::Timeout) {
                kill_pid(pid).unwrap();
            }
        });
        let output = child.wait_with_output().unwrap();
        drop(ended);
        guard.join().unwrap();
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Returns the JSON document on the standard output.
    pub fn json(&self) -> Value {
        serde_json::from_str(self.stdout.trim()).unwrap_or_else(|error| panic!("no JSON ({error}): {self:?}"))
    }

    /// Returns the last line that is JSON: lines of progress may precede it.
    pub fn last_json(&self) -> Value {
        let line = self.stdout.lines().rev().find(|line| line.starts_with('{'));
        line.and_then(|line| serde_json::from_str(line).ok()).unwrap_or_else(|| self.json())
    }

    /// Asserts that the command has succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }
}

/// Waits until a condition is true.
#[track_caller]
pub fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the names of a directory's entries, for "nothing is left behind".
pub fn entries(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
