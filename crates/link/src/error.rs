//! What can go wrong with a connection, in words for the person who has to put it right.

use std::io;
use std::net::SocketAddr;

use proto::frame::{BadHeader, Kind};
use proto::{HostId, Versions};
use rustls::{AlertDescription, CertificateError};

/// Why an open connection could not be used. All but [`LinkError::TimedOut`] end it.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// This side ended the connection, by [`Handle::shutdown`](crate::Handle::shutdown) or after an earlier error.
    #[error("the connection was ended on this side")]
    Closed,
    /// The other side ended the connection between two frames.
    #[error("the other side ended the connection")]
    Ended,
    /// The other side ended the connection within a frame.
    #[error("the other side ended the connection in the middle of a frame")]
    Truncated,
    /// The network or the other host failed.
    #[error("the connection is lost")]
    Lost(#[source] io::Error),
    /// Nothing came before the deadline. The connection can still be used.
    #[error("nothing came from the other side in time")]
    TimedOut,
    /// What came is not what TLS allows.
    #[error("TLS failed")]
    Tls(#[source] rustls::Error),
    /// What came is no frame of the protocol.
    #[error("the other side does not keep to the protocol")]
    Header(#[from] BadHeader),
    /// More than may come at this point.
    #[error("the other side sent {bytes} bytes where at most {max} may come")]
    TooMuch {
        /// What it announced.
        bytes: usize,
        /// What may come.
        max: usize,
    },
    /// What is to be sent does not fit into a frame.
    #[error("what was to be sent does not fit into one frame")]
    TooLong(#[source] BadHeader),
    /// The parts of a frame do not have the length that its header tells.
    #[error("a frame of {announced} bytes was to be sent with {given} bytes of payload")]
    WrongLength {
        /// What the header tells.
        announced: usize,
        /// What the parts hold.
        given: usize,
    },
    /// A frame that has no place here.
    #[error("{0:?} frame where none may come")]
    NotExpected(Kind),
    /// A message that this version of the protocol does not know.
    #[error("the other side sent a message that this version does not know")]
    Message(#[source] serde_json::Error),
    /// A message that says what it may not.
    #[error("the other side sent a message that breaks the protocol's limits")]
    Invalid(#[from] proto::Invalid),
}

/// Why a connection was not opened, on either side.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The other side did not finish in time.
    #[error("the other side did not finish the handshake in time")]
    TimedOut,
    /// The other side speaks without TLS.
    #[error(
        "the other side speaks without TLS, and this agent's configuration demands it: \
         give both agents certificates, or configure both for plain connections"
    )]
    PeerIsPlain,
    /// The other side speaks TLS.
    #[error(
        "the other side speaks TLS, and this agent is configured for plain connections: \
         give both agents certificates, or configure both for plain connections"
    )]
    PeerIsTls,
    /// Something else than an agent is there.
    #[error("the other side is no Whimbrel agent (its first byte is {0:#04x}): check address and port")]
    NotAnAgent(u8),
    /// The other side showed no certificate.
    #[error("the other side showed no certificate: configure one there, signed by this agent's authority")]
    NoCertificate,
    /// The other side's certificate is not to be trusted.
    #[error("the other side's certificate {}", certificate_fault(.0))]
    PeerCertificate(CertificateError),
    /// The other side does not trust ours.
    #[error("the other side does not accept this agent's certificate: {}", alert_meaning(*.0))]
    OwnCertificate(AlertDescription),
    /// The other side is not the host that it says it is, or that was expected.
    #[error(
        "the other side's certificate is for {}, not for '{host}': \
         give it a certificate with the DNS name '{host}', or correct the host's name",
        quoted(.presented)
    )]
    WrongName {
        /// The name that the other side uses, or that was expected of it.
        host: HostId,
        /// The names in its certificate.
        presented: Vec<String>,
    },
    /// Another host answers at this address.
    #[error("the agent there is host '{found}', not '{expected}': correct the address or the name")]
    WrongHost {
        /// Who was expected.
        expected: HostId,
        /// Who answered.
        found: HostId,
    },
    /// A host's name that cannot stand in a certificate.
    #[error("'{0}' cannot be a DNS name in a certificate: use letters, digits, '-' and '.'")]
    NameNotDns(HostId),
    /// No version of the protocol is known to both.
    #[error(
        "this agent speaks {ours} of the protocol, the other side {theirs}: \
         install releases of Whimbrel on both hosts that have a version in common"
    )]
    Version {
        /// What this program speaks.
        ours: Versions,
        /// What the other side offers, or has chosen.
        theirs: Versions,
    },
    /// The other side said no.
    #[error("the other side refused: {reason}")]
    Refused {
        /// In its words.
        reason: String,
    },
    /// What came is not the greeting that has to come first.
    #[error("the other side's first message is not what it has to be")]
    Greeting(#[source] serde_json::Error),
    /// TLS could not be agreed on, for another reason than certificates.
    #[error("TLS failed")]
    Tls(#[source] rustls::Error),
    /// The connection failed below.
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

/// Why there is no connection to a peer.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address means nothing.
    #[error("cannot resolve {address:?}: write it as host:port, with a host that the resolver knows")]
    Resolve {
        /// As configured.
        address: String,
        /// The resolver's reason.
        source: io::Error,
    },
    /// Nobody answers.
    #[error("cannot reach {host} at {address}: is the agent running there, and is the port open?")]
    Unreachable {
        /// Who was wanted.
        host: HostId,
        /// As configured.
        address: String,
        /// The last address's reason.
        source: io::Error,
    },
    /// Somebody answers, and then it fails.
    #[error("no connection to {host} at {address}")]
    Handshake {
        /// Who was wanted.
        host: HostId,
        /// As configured.
        address: String,
        /// Why.
        source: HandshakeError,
    },
}

/// Why an agent cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The address means nothing.
    #[error("cannot resolve {address:?}: write it as host:port, with an address of this host")]
    Resolve {
        /// As configured.
        address: String,
        /// The resolver's reason.
        source: io::Error,
    },
    /// The system does not let us have it.
    #[error("cannot listen on {address}: is another agent running, and is it an address of this host?")]
    Bind {
        /// The last one tried.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// No thread to accept connections in.
    #[error("cannot start a thread that accepts connections")]
    Thread(#[source] io::Error),
}

const OTHER_ALERT: &str = "it does not say why";

fn alert_meaning(alert: AlertDescription) -> &'static str {
    match alert {
        AlertDescription::CertificateRequired => "it demands one; configure certificate and key here",
        // The second where that authority has the same name and another key.
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it is not signed by the authority that the other side trusts"
        }
        AlertDescription::CertificateExpired => "it has expired, or one of the two clocks is wrong",
        AlertDescription::CertificateRevoked => "it is revoked",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown => {
            "its names or its purpose do not fit (it needs the host's name, for both client and server)"
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
