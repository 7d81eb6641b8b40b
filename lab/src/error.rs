//! What can go wrong in the laboratory.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

/// Errors of the laboratory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program that the laboratory uses ended with an error.
    #[error("`{command}` ended with {status}: {output}")]
    Command {
        /// The command line.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// What it printed, errors first.
        output: String,
    },
    /// The system refused something.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Something that `scripts/setup` makes is not there.
    #[error("{path} is missing: run scripts/setup as root")]
    Missing {
        /// What is missing.
        path: PathBuf,
    },
    /// An awaited line did not come.
    #[error("{log}: waited {waited_ms} ms in vain for {awaited}; it ends with:\n{tail}")]
    Timeout {
        /// The file that was followed.
        log: PathBuf,
        /// How long, milliseconds.
        waited_ms: u128,
        /// What for.
        awaited: String,
        /// The file's last lines.
        tail: String,
    },
    /// The process that was to write an awaited line ended.
    #[error("{log}: the process that writes it ended before {awaited}; it ends with:\n{tail}")]
    Ended {
        /// The file that was followed.
        log: PathBuf,
        /// What for.
        awaited: String,
        /// The file's last lines.
        tail: String,
    },
    /// A certificate could not be made.
    #[error("cannot make a certificate")]
    Certificate(#[from] rcgen::Error),
    /// QEMU's monitor answered with an error.
    #[error("QMP command {command}: {answer}")]
    Monitor {
        /// The command.
        command: String,
        /// The answer.
        answer: String,
    },
    /// A prefix that cannot be one.
    #[error("prefix {0:?}: 1 to 20 letters, digits and dashes are possible")]
    Prefix(String),
    /// A setting of the laboratory that cannot be.
    #[error("{0}")]
    Config(String),
}

/// Result of the laboratory's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names what was tried when the system refuses it.
pub(crate) trait Context<T> {
    /// `what` is evaluated only on failure.
    fn context<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| Error::Io { what: what().into(), source: error.into() })
    }
}
