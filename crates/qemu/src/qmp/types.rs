//! What a monitor says, and what can go wrong between it and us.

use std::io;
use std::path::PathBuf;

use serde_json::Value;

/// What can go wrong between us and a monitor.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket could not be opened.
    #[error(
        "cannot connect to the QMP socket {path}; check that the path is that of a QEMU started with -qmp unix:PATH,server=on,wait=off and that this user may open it"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The socket is there, but nobody greets: QEMU serves one client at a time.
    #[error(
        "the QMP monitor at {path} does not answer: another client (libvirt, a script) holds it, or QEMU is stopped; end that client, or give QEMU a second monitor"
    )]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// QEMU answered a command with an error.
    #[error("QEMU refused {command}: {desc}")]
    CommandFailed {
        /// The command's name.
        command: String,
        /// QMP's error class, usually `GenericError`.
        class: String,
        /// QEMU's own words.
        desc: String,
    },
    /// Another process listens there.
    #[error(
        "the socket {path} belongs to process {pid} and not to the guest's QEMU: start the guest with a path of its own"
    )]
    Another {
        /// The socket.
        path: PathBuf,
        /// Whose it is.
        pid: u32,
    },
    /// QEMU closed the connection, usually because it ended.
    #[error("QEMU closed the monitor during {during}; it has probably ended, see its log")]
    Closed {
        /// What was going on.
        during: String,
    },
    /// A deadline passed.
    #[error("no answer from QEMU to {waiting_for} in {after_ms} ms")]
    Timeout {
        /// What was waited for.
        waiting_for: String,
        /// How long, in milliseconds.
        after_ms: u64,
    },
    /// Something came that is not QMP.
    #[error("the monitor does not speak QMP as it should: {what}")]
    Protocol {
        /// What was wrong.
        what: String,
    },
    /// An answer was well-formed, but is not what the command answers.
    #[error("cannot read QEMU's answer to {command}")]
    Answer {
        /// The command's name.
        command: String,
        /// What did not fit.
        source: serde_json::Error,
    },
    /// Reading from or writing to the socket failed.
    #[error("the connection to QEMU failed during {during}")]
    Io {
        /// What was going on.
        during: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl QmpError {
    /// Whether QEMU itself said no (the connection is fine, the command was not done).
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::CommandFailed { .. })
    }

    /// Whether this QEMU does not know the command.
    pub fn is_unknown_command(&self) -> bool {
        matches!(self, Self::CommandFailed { class, .. } if class == "CommandNotFound")
    }
}

/// An event that QEMU sent on its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its name, e.g. `STOP` or `MIGRATION`.
    pub name: String,
    /// What it carries; `Null` when nothing.
    pub data: Value,
    /// When QEMU sent it, by its host's wall clock, in microseconds since 1970.
    pub timestamp_us: u64,
}

/// QEMU's version, from the greeting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// E.g. 10.
    pub major: u64,
    /// E.g. 0.
    pub minor: u64,
    /// E.g. 2.
    pub micro: u64,
    /// The distribution's own version, may be empty.
    pub package: String,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}
