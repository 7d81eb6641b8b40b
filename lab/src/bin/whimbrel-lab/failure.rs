//! Errors of commands, and their exit codes.

use std::io;
use std::path::PathBuf;

use crate::Code;

/// Error of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The laboratory fails, or cannot be made as requested.
    #[error(transparent)]
    Lab(#[from] lab::Error),
    /// A file cannot be read.
    #[error("cannot read {path}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The system refuses a basic operation.
    #[error("{what}")]
    System {
        /// The operation.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The program that is to be measured is missing.
    #[error("there is no program {path}: build it with `cargo build -p whimbrel`, with the same profile", path = path.display())]
    NoProgram {
        /// Path at which it is expected.
        path: PathBuf,
    },
}

impl Failure {
    /// Returns the exit code.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::File { .. } | Self::NoProgram { .. } | Self::Lab(lab::Error::Prefix(_)) => Code::Usage,
            Self::Lab(_) | Self::System { .. } => Code::Failed,
        }
    }
}
