//! Errors of the laboratory.

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
        /// Its exit status.
        status: ExitStatus,
        /// Its output, errors first.
        output: String,
    },
    /// The system refused an operation.
    #[error("{what}")]
    Io {
        /// The operation.
        what: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file that `scripts/setup` makes is missing.
    #[error("{path} is missing: run scripts/setup as root")]
    Missing {
        /// The missing path.
        path: PathBuf,
    },
    /// An awaited line did not arrive in time.
    #[error("{log}: waited {waited_ms} ms in vain for {awaited}; it ends with:\n{tail}")]
    Timeout {
        /// The file that was followed.
        log: PathBuf,
        /// Time waited, milliseconds.
        waited_ms: u128,
        /// The awaited line.
        awaited: String,
        /// The file's last lines.
        tail: String,
    },
    /// The process that was to write an awaited line ended.
    #[error("{log}: the process that writes it ended before {awaited}; it ends with:\n{tail}")]
    Ended {
        /// The file that was followed.
        log: PathBuf,
        /// The awaited line.
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
    /// An invalid prefix.
    #[error("prefix {0:?}: 1 to 20 letters, digits and dashes are possible")]
    Prefix(String),
    /// An invalid setting of the laboratory.
    #[error("{0}")]
    Config(String),
}

/// Result of the laboratory's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the attempted operation to an error of the system.
pub(crate) trait Context<T> {
    /// `what` is evaluated only on failure.
    fn context<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| Error::Io { what: what().into(), source: error.into() })
    }
}
