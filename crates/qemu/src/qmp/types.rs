//! Types of a monitor's messages, and errors of its connection.

use std::io;
use std::path::PathBuf;

use serde_json::Value;

/// Error of a monitor or its connection.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket could not be opened.
    #[error(
        "cannot connect to the QMP socket {path}; check that the path is that of a QEMU started with -qmp unix:PATH,server=on,wait=off and that this user may open it"
    )]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The socket exists, but QEMU does not greet: it serves one client at a time.
    #[error(
        "the QMP monitor at {path} does not answer: another client (libvirt, a script) holds it, or QEMU is stopped; end that client, or give QEMU a second monitor"
    )]
    Busy {
        /// Path of the socket.
        path: PathBuf,
    },
    /// QEMU answered a command with an error.
    #[error("QEMU refused {command}: {desc}")]
    CommandFailed {
        /// Name of the command.
        command: String,
        /// QMP's error class, usually `GenericError`.
        class: String,
        /// QEMU's own words.
        desc: String,
    },
    /// Another process listens on the socket.
    #[error(
        "the socket {path} belongs to process {pid} and not to the guest's QEMU: start the guest with a unique socket path"
    )]
    WrongProcess {
        /// Path of the socket.
        path: PathBuf,
        /// Process that listens.
        pid: u32,
    },
    /// QEMU closed the connection, usually because it ended.
    #[error("QEMU closed the monitor during {during}; it has probably exited, see its log")]
    Closed {
        /// Operation that was in progress.
        during: String,
    },
    /// A deadline passed.
    #[error("no answer from QEMU to {waiting_for} in {after_ms} ms")]
    Timeout {
        /// Awaited answer.
        waiting_for: String,
        /// Elapsed time in milliseconds.
        after_ms: u64,
    },
    /// Data arrived that are not QMP.
    #[error("the monitor does not follow the QMP protocol: {what}")]
    Protocol {
        /// Description of the error.
        what: String,
    },
    /// An answer was well-formed, but is not of the command's type.
    #[error("cannot read QEMU's answer to {command}")]
    Answer {
        /// Name of the command.
        command: String,
        /// Error of the decoder.
        source: serde_json::Error,
    },
    /// Reading from or writing to the socket failed.
    #[error("the connection to QEMU failed during {during}")]
    Io {
        /// Operation that was in progress.
        during: String,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl QmpError {
    /// Returns true if QEMU itself refused (the connection is fine, the command was not run).
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::CommandFailed { .. })
    }
}

/// An event that QEMU sent on its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Name, e.g. `STOP` or `MIGRATION`.
    pub name: String,
    /// Data; `Null` if the event has none.
    pub data: Value,
    /// Time at which QEMU sent it, by the host's wall clock, in microseconds since 1970.
    pub timestamp_us: u64,
}

/// QEMU's version, from the greeting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major version, e.g. 10.
    pub major: u64,
    /// Minor version, e.g. 0.
    pub minor: u64,
    /// Micro version, e.g. 2.
    pub micro: u64,
    /// Version of the distribution's package, may be empty.
    pub package: String,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}
