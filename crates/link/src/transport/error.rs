//! Error of a transport: its kind, for programs, and its human-readable cause.

use crate::error::{ConnectError, HandshakeError, LinkError};

/// Reason that a transport gives, in its own type.
type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Error of a connection, whatever the transport. All but [`TransportError::Deadline`] of a receiver end the
/// connection.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// This side ended the connection, by its handle or after an earlier error.
    #[error("the connection was ended on this side")]
    Closed,
    /// The peer ended the connection.
    #[error(transparent)]
    PeerClosed(Cause),
    /// The peer did not act before the deadline.
    #[error(transparent)]
    Deadline(Cause),
    /// The peer refused the connection, or one side does not accept the other's identity, version or security.
    #[error(transparent)]
    Refused(Cause),
    /// The peer violates the protocol.
    #[error(transparent)]
    Protocol(Cause),
    /// The data to be sent violates the protocol: a bug in this program. Nothing was sent.
    #[error(transparent)]
    Unsendable(Cause),
    /// The transport cannot reach memory that it is to move by itself; new connections cannot help.
    #[error(transparent)]
    Memory(Cause),
    /// The network, the encryption or the peer's host failed.
    #[error(transparent)]
    Io(Cause),
}

impl TransportError {
    /// Returns the error of this host's system, for instance of a thread that cannot be started for a connection.
    pub fn local(error: std::io::Error) -> Self {
        LinkError::Lost(error).into()
    }

    /// Returns true if a new connection may succeed: the network or the peer's program failed, not the content of the
    /// peer's messages.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Closed | Self::PeerClosed(_) | Self::Deadline(_) | Self::Io(_) => true,
            Self::Refused(_) | Self::Protocol(_) | Self::Unsendable(_) | Self::Memory(_) => false,
        }
    }
}

/// Returns the variant for an error of an open connection.
fn variant(error: &LinkError) -> fn(Cause) -> TransportError {
    match error {
        LinkError::Closed => |_| TransportError::Closed,
        LinkError::Ended | LinkError::Truncated => TransportError::PeerClosed,
        LinkError::TimedOut => TransportError::Deadline,
        LinkError::Lost(_) | LinkError::Tls(_) => TransportError::Io,
        LinkError::Header(_)
        | LinkError::TooMuch { .. }
        | LinkError::NotExpected(_)
        | LinkError::Message(_)
        | LinkError::Invalid(_) => TransportError::Protocol,
        LinkError::TooLong(_) | LinkError::WrongLength { .. } => TransportError::Unsendable,
    }
}

impl From<LinkError> for TransportError {
    fn from(error: LinkError) -> Self {
        variant(&error)(Box::new(error))
    }
}

impl From<ConnectError> for TransportError {
    fn from(error: ConnectError) -> Self {
        let variant = match &error {
            ConnectError::Resolve { .. } | ConnectError::Unreachable { .. } => Self::Io,
            ConnectError::Handshake { source, .. } => match source {
                HandshakeError::TimedOut => Self::Deadline,
                HandshakeError::Greeting(_) => Self::Protocol,
                HandshakeError::Tls(_) => Self::Io,
                HandshakeError::Link(source) => variant(source),
                HandshakeError::PeerIsPlain
                | HandshakeError::PeerIsTls
                | HandshakeError::NotAnAgent(_)
                | HandshakeError::NoCertificate
                | HandshakeError::PeerCertificate(_)
                | HandshakeError::OwnCertificate(_)
                | HandshakeError::WrongName { .. }
                | HandshakeError::WrongHost { .. }
                | HandshakeError::NameNotDns(_)
                | HandshakeError::Version { .. }
                | HandshakeError::Refused { .. } => Self::Refused,
            },
        };
        variant(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use proto::frame::{BadHeader, FrameKind};

    use super::*;

    /// The human-readable text is that of the cause, once.
    #[test]
    fn the_text_is_that_of_the_cause() {
        let text = LinkError::Truncated.to_string();
        let error = TransportError::from(LinkError::Truncated);
        assert_eq!(error.to_string(), text);
        assert!(std::error::Error::source(&error).is_none(), "the cause would be shown twice");
        let lost = TransportError::from(LinkError::Lost(io::ErrorKind::ConnectionReset.into()));
        let source = std::error::Error::source(&lost).map(ToString::to_string);
        assert_eq!(source, Some(io::Error::from(io::ErrorKind::ConnectionReset).to_string()));
        assert_eq!(TransportError::from(LinkError::Closed).to_string(), LinkError::Closed.to_string());
    }

    #[test]
    fn only_faults_of_the_network_are_worth_another_connection() {
        let table = [
            (LinkError::Closed, true),
            (LinkError::Ended, true),
            (LinkError::Truncated, true),
            (LinkError::TimedOut, true),
            (LinkError::Lost(io::ErrorKind::ConnectionReset.into()), true),
            (LinkError::Tls(rustls::Error::DecryptError), true),
            (LinkError::Header(BadHeader::Reserved), false),
            (LinkError::TooMuch { bytes: 2, max: 1 }, false),
            (LinkError::NotExpected(FrameKind::Ack), false),
            (LinkError::TooLong(BadHeader::Reserved), false),
            (LinkError::WrongLength { announced: 2, given: 1 }, false),
        ];
        for (error, transient) in table {
            let text = error.to_string();
            assert_eq!(TransportError::from(error).is_transient(), transient, "{text}");
        }
    }
}
