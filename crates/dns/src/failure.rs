//! Reasons for which a server could not be asked, or has not done what it was asked for.

use serde::{Deserialize, Serialize};

use crate::config::Server;
use crate::message::ResponseCode;
use crate::name::Name;
use crate::tsig::KeyRejection;

/// Reason for which a server has not done what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum Failure {
    /// No connection, or no answer in time.
    #[error("the DNS server {server} is not reached: {reason}")]
    Unreachable {
        /// The server.
        server: Server,
        /// Error of the connection.
        reason: String,
    },
    /// The answer cannot be understood.
    #[error("the answer of the DNS server {server} cannot be understood: {reason}")]
    Malformed {
        /// The server.
        server: Server,
        /// Description of the error.
        reason: String,
    },
    /// The answer has no signature, so that it proves nothing.
    #[error("the DNS server {server} answers {code} without a signature")]
    Unsigned {
        /// The server.
        server: Server,
        /// The answer.
        code: ResponseCode,
    },
    /// The signature of the answer is wrong, so that it proves nothing.
    #[error("the signature of the answer of the DNS server {server} is wrong")]
    WrongSignature {
        /// The server.
        server: Server,
    },
    /// The server rejects the key.
    #[error("the DNS server {server} rejects the key: {}", rejection_text(*rejection))]
    Key {
        /// The server.
        server: Server,
        /// Its reason.
        rejection: KeyRejection,
    },
    /// The key cannot be used.
    #[error("{reason}")]
    KeyFile {
        /// Description of the error.
        reason: String,
    },
    /// The server does not permit it.
    #[error("the DNS server {server} refuses it")]
    Refused {
        /// The server.
        server: Server,
    },
    /// The server does not have the zone.
    #[error("the DNS server {server} does not serve the zone {zone}")]
    NoZone {
        /// The server.
        server: Server,
        /// The zone.
        zone: Name,
    },
    /// The zone is not in the configuration.
    #[error("the zone {zone} is not in the configuration")]
    NotConfigured {
        /// The zone.
        zone: Name,
    },
    /// Any other answer that is no success.
    #[error("the DNS server {server} answers {code}")]
    Code {
        /// The server.
        server: Server,
        /// The answer.
        code: ResponseCode,
    },
    /// The records differ from what the server has just given each time that they are to be changed.
    #[error(
        "the DNS server {server} denies the records that it gives: a wildcard makes them, or they change all the time"
    )]
    Contended {
        /// The server.
        server: Server,
    },
    /// An update whose answer was lost may still have an effect: the records are read again.
    #[error("the answer to an update was lost; the records are read again")]
    LostAnswer,
    /// The state could not be recorded; nothing is changed without that.
    #[error("cannot record the changes: {reason}")]
    NotRecorded {
        /// Error of the file.
        reason: String,
    },
}

fn rejection_text(rejection: KeyRejection) -> String {
    match rejection {
        KeyRejection::BadSig => "its secret is another one (BADSIG)".to_owned(),
        KeyRejection::BadKey => "it has no key of this name and algorithm (BADKEY)".to_owned(),
        KeyRejection::BadTime { .. } => "the clocks differ by more than five minutes (BADTIME)".to_owned(),
        KeyRejection::Other(code) => format!("code {code}"),
    }
}

impl Failure {
    /// Returns true if the connection cannot be used any longer.
    pub(crate) fn is_of_connection(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Malformed { .. })
    }

    /// Returns true if it passes by itself; other reasons need a person.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Malformed { .. }
            | Self::Code { .. }
            | Self::Contended { .. }
            | Self::NotRecorded { .. }
            | Self::LostAnswer => true,
            Self::Unsigned { .. }
            | Self::WrongSignature { .. }
            | Self::Key { .. }
            | Self::KeyFile { .. }
            | Self::Refused { .. }
            | Self::NoZone { .. }
            | Self::NotConfigured { .. } => false,
        }
    }
}
