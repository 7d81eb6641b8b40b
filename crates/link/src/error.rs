//! Errors of connections, in words for the person who has to fix them.

use std::io;
use std::net::SocketAddr;

use proto::frame::{BadHeader, FrameKind};
use proto::{HostId, Versions};
use rustls::{AlertDescription, CertificateError};

/// Error of an open connection. All but [`LinkError::TimedOut`] end it.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// This side ended the connection, by [`Handle::shutdown`](crate::Handle::shutdown) or after an earlier error.
    #[error("the connection was ended on this side")]
    Closed,
    /// The peer ended the connection between two frames.
    #[error("the other side ended the connection")]
    Ended,
    /// The peer ended the connection within a frame.
    #[error("the other side ended the connection in the middle of a frame")]
    Truncated,
    /// The network or the peer's host failed.
    #[error("the connection is lost")]
    Lost(#[source] io::Error),
    /// The peer sent nothing before the deadline. The connection can still be used.
    #[error("the other side sent nothing in time")]
    TimedOut,
    /// The received bytes violate TLS.
    #[error("TLS failed")]
    Tls(#[source] rustls::Error),
    /// The received bytes are no frame of the protocol.
    #[error("the other side violates the protocol")]
    Header(#[from] BadHeader),
    /// A frame longer than is allowed at this point.
    #[error("the other side sent {bytes} bytes; at most {max} are allowed")]
    TooMuch {
        /// Announced length, in bytes.
        bytes: usize,
        /// Maximum length, in bytes.
        max: usize,
    },
    /// The payload to be sent does not fit into a frame.
    #[error("the data does not fit into one frame")]
    TooLong(#[source] BadHeader),
    /// The parts of a frame do not add up to the length in its header.
    #[error("a frame of {announced} bytes has {given} bytes of payload")]
    WrongLength {
        /// Length in the header, in bytes.
        announced: usize,
        /// Length of the parts, in bytes.
        given: usize,
    },
    /// A frame of a kind that is not allowed here.
    #[error("unexpected {0:?} frame")]
    NotExpected(FrameKind),
    /// A message unknown to this version of the protocol.
    #[error("the other side sent a message that is unknown to this version")]
    Message(#[source] serde_json::Error),
    /// A message that breaks the protocol's limits.
    #[error("the other side sent a message that breaks the protocol's limits")]
    Invalid(#[from] proto::Invalid),
}

/// Error that kept a connection from opening, on either side.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The peer did not finish in time.
    #[error("the other side did not finish the handshake in time")]
    TimedOut,
    /// The peer speaks without TLS.
    #[error(
        "the other side does not use TLS, but this agent's configuration requires it: give both agents \
         certificates, or configure both for plain connections"
    )]
    PeerIsPlain,
    /// The peer speaks TLS.
    #[error(
        "the other side uses TLS, but this agent is configured for plain connections: give both agents \
         certificates, or configure both for plain connections"
    )]
    PeerIsTls,
    /// The peer is not an agent.
    #[error("the other side is not a Whimbrel agent (its first byte is {0:#04x}): check address and port")]
    NotAnAgent(u8),
    /// The peer showed no certificate.
    #[error("the other side sent no certificate: configure one there, signed by this agent's authority")]
    NoCertificate,
    /// The peer's certificate is not trusted.
    #[error("the other side's certificate {}", certificate_fault(.0))]
    PeerCertificate(CertificateError),
    /// The peer does not trust this agent's certificate.
    #[error("the other side does not accept this agent's certificate: {}", alert_meaning(*.0))]
    OwnCertificate(AlertDescription),
    /// The peer is not the host that it claims to be, or that was expected.
    #[error(
        "the other side's certificate is for {}, not for '{host}': \
         give it a certificate with the DNS name '{host}', or correct the host's name",
        quoted(.presented)
    )]
    WrongName {
        /// The name that the peer uses, or that was expected of the peer.
        host: HostId,
        /// The names in the peer's certificate.
        presented: Vec<String>,
    },
    /// Another host answers at this address.
    #[error("the agent there is host '{found}', not '{expected}': correct the address or the name")]
    WrongHost {
        /// The expected host.
        expected: HostId,
        /// The host that answered.
        found: HostId,
    },
    /// A host name that cannot appear in a certificate.
    #[error("'{0}' cannot be a DNS name in a certificate: use letters, digits, '-' and '.'")]
    NameNotDns(HostId),
    /// No version of the protocol is common to both agents.
    #[error(
        "this agent supports {ours} of the protocol, the other side {theirs}: install releases of Whimbrel \
         on both hosts that have a version in common"
    )]
    Version {
        /// Versions that this program speaks.
        ours: Versions,
        /// Versions that the peer offers, or the one that it has chosen.
        theirs: Versions,
    },
    /// The peer refused the connection.
    #[error("the other side refused: {reason}")]
    Refused {
        /// The peer's reason, in its own words.
        reason: String,
    },
    /// The first message received is not the required greeting.
    #[error("the other side's first message is invalid")]
    Greeting(#[source] serde_json::Error),
    /// TLS could not be negotiated, for a reason other than certificates.
    #[error("TLS failed")]
    Tls(#[source] rustls::Error),
    /// The underlying connection failed.
    #[error("the connection failed during the handshake")]
    Link(#[source] LinkError),
}

impl From<LinkError> for HandshakeError {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::TimedOut => Self::TimedOut,
            LinkError::Tls(source) => source.into(),
            other => Self::Link(other),
        }
    }
}

impl From<rustls::Error> for HandshakeError {
    fn from(error: rustls::Error) -> Self {
        use rustls::Error as Tls;
        match error {
            Tls::NoCertificatesPresented => Self::NoCertificate,
            Tls::InvalidCertificate(fault) => Self::PeerCertificate(fault),
            Tls::AlertReceived(alert) if alert_meaning(alert) != OTHER_ALERT => Self::OwnCertificate(alert),
            other => Self::Tls(other),
        }
    }
}

/// Error of connecting to a peer.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address cannot be resolved.
    #[error("cannot resolve {address:?}: write it as host:port, with a host that the resolver knows")]
    Resolve {
        /// The address as configured.
        address: String,
        /// The resolver's reason.
        source: io::Error,
    },
    /// No agent answers.
    #[error("cannot reach {host} at {address}: is the agent running there, and is the port open?")]
    Unreachable {
        /// The host to connect to.
        host: HostId,
        /// The address as configured.
        address: String,
        /// The last address's reason.
        source: io::Error,
    },
    /// A program answers, but the handshake fails.
    #[error("no connection to {host} at {address}")]
    Handshake {
        /// The host to connect to.
        host: HostId,
        /// The address as configured.
        address: String,
        /// Reason of the failure.
        source: HandshakeError,
    },
}

/// Error of listening.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The address cannot be resolved.
    #[error("cannot resolve {address:?}: write it as host:port, with an address of this host")]
    Resolve {
        /// The address as configured.
        address: String,
        /// The resolver's reason.
        source: io::Error,
    },
    /// The system does not grant the address.
    #[error("cannot listen on {address}: is another agent running, and is it an address of this host?")]
    Bind {
        /// The last address tried.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// No thread could be started to accept connections.
    #[error("cannot start a thread that accepts connections")]
    Thread(#[source] io::Error),
}

const OTHER_ALERT: &str = "it gives no reason";

fn alert_meaning(alert: AlertDescription) -> &'static str {
    match alert {
        AlertDescription::CertificateRequired => "it requires one; configure certificate and key here",
        // `DecryptError` if that authority has the same name and another key.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it is not signed by the authority that the other side trusts"
        }
        AlertDescription::CertificateExpired => "it has expired, or one of the two clocks is wrong",
        AlertDescription::CertificateRevoked => "it is revoked",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown => {
            "its names or its purpose do not match (it needs the host's name, for both client and server)"
        }
        _ => OTHER_ALERT,
    }
}

pub(crate) fn certificate_fault(fault: &CertificateError) -> String {
    use CertificateError as Fault;
    match fault {
        Fault::Expired | Fault::ExpiredContext { .. } => {
            "has expired, or the clock of this host is wrong: issue a new one".to_owned()
        }
        Fault::NotValidYet | Fault::NotValidYetContext { .. } => {
            "is not valid yet, or the clock of this host is wrong".to_owned()
        }
        Fault::UnknownIssuer | Fault::BadSignature => {
            "is not signed by the authority that this agent is configured to trust".to_owned()
        }
        Fault::InvalidPurpose | Fault::InvalidPurposeContext { .. } => {
            "is not made for both client and server: issue one with both extended key usages".to_owned()
        }
        Fault::BadEncoding => "cannot be read".to_owned(),
        other => format!("is not accepted: {other}"),
    }
}

pub(crate) fn quoted(names: &[String]) -> String {
    if names.is_empty() {
        return "no name".to_owned();
    }
    names.iter().map(|name| format!("'{}'", name.escape_debug())).collect::<Vec<_>>().join(", ")
}
