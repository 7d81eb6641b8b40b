//! Identifiers that both hosts of a migration share.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::limits;

/// A host's name in the configuration; also a DNS name in the host's certificate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostId(String);

/// A virtual machine's name, unique among the hosts that exchange it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

/// Error of a name that is empty, too long, or has a character other than letters, digits, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a valid name: use 1 to {max} letters, digits, '.', '_' or '-', not starting with '.' or \
     '-'",
    max = limits::NAME_BYTES
)]
pub struct BadName(pub String);

fn checked_name(name: String) -> Result<String, BadName> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = !name.is_empty()
        && name.len() <= limits::NAME_BYTES
        && !name.starts_with(['.', '-'])
        && name.chars().all(allowed);
    if good { Ok(name) } else { Err(BadName(name)) }
}

macro_rules! name_type {
    ($type:ident) => {
        impl $type {
            /// Checks a name and wraps it.
            pub fn new(name: impl Into<String>) -> Result<Self, BadName> {
                checked_name(name.into()).map(Self)
            }

            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = BadName;

            fn try_from(name: String) -> Result<Self, BadName> {
                Self::new(name)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> Self {
                name.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name_type!(HostId);
name_type!(VmName);

/// Number of a migration of one VM. Each attempt has an epoch of its own, larger than all earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Returns the epoch of the next attempt.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of a set of connections within one migration; each cut of the link begins a new one. Frames of a connection
/// of an older generation are not applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// Returns the generation after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identifier of one migration of one VM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId {
    /// The VM that moves.
    pub vm: VmName,
    /// Number of the migration.
    pub epoch: Epoch,
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.vm, self.epoch)
    }
}

/// Id of a controller's command, which the controller chooses, and never uses for another command.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CommandId(String);

/// Error of a command's id that is empty, too long, or has a character other than letters, digits, `.`, `_`, `-` and `/`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid id of a command")]
pub struct BadCommandId(pub String);

impl CommandId {
    /// Checks an id and wraps it.
    pub fn new(id: impl Into<String>) -> Result<Self, BadCommandId> {
        let id = id.into();
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/');
        let good = !id.is_empty() && id.len() <= limits::COMMAND_ID_BYTES && id.chars().all(allowed);
        if good { Ok(Self(id)) } else { Err(BadCommandId(id)) }
    }

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for CommandId {
    type Error = BadCommandId;

    fn try_from(id: String) -> Result<Self, BadCommandId> {
        Self::new(id)
    }
}

impl From<CommandId> for String {
    fn from(id: CommandId) -> Self {
        id.0
    }
}

impl fmt::Display for CommandId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One QEMU process in one boot of the destination, made ready over one generation of connections. GO names an
/// incarnation, and starts no other process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation {
    /// `/proc/sys/kernel/random/boot_id` of the destination.
    pub boot_id: String,
    /// Process id of the destination's QEMU.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: when the process started, in clock ticks since boot.
    pub start_time_ticks: u64,
    /// Generation of the connections over which the process was made ready.
    pub generation: Generation,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_where_they_enter() {
        assert!(HostId::new("host-a.example").is_ok());
        for bad in ["", "-x", ".x", "a b", "a/b", "\u{e4}", &"x".repeat(limits::NAME_BYTES + 1)] {
            assert_eq!(VmName::new(bad), Err(BadName(bad.to_owned())));
            assert!(serde_json::from_value::<VmName>(serde_json::json!(bad)).is_err());
        }
    }

    #[test]
    fn ids_of_commands_are_checked_where_they_enter() {
        assert_eq!(CommandId::new("e7/3").map(String::from), Ok("e7/3".to_owned()));
        for bad in ["", "e 7", "e7\n", "\u{e4}", &"x".repeat(limits::COMMAND_ID_BYTES + 1)] {
            assert_eq!(CommandId::new(bad), Err(BadCommandId(bad.to_owned())));
            assert!(serde_json::from_value::<CommandId>(serde_json::json!(bad)).is_err());
        }
    }
}
