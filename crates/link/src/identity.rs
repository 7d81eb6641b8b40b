//! Identity of this agent and its trust anchors: certificate, key and authority, read from files.
//!
//! Certificates are checked twice. TLS checks that the authority signed them, that they are in date and made for the
//! purpose. The host's name in them is checked by the connecting side within TLS, and by the answering side as soon as
//! `Hello` has brought the name.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proto::HostId;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, DnsName, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};
use serde::Deserialize;

use crate::error::{HandshakeError, certificate_fault};

/// Protocol name offered in TLS, so that a server of another protocol declines.
const ALPN: &[u8] = b"whimbrel";

/// Maximum number of bytes that may wait in a session to be sent.
const SESSION_BUFFER_BYTES: usize = 320 << 10;

/// Paths of certificate, key and authority, as PEM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificates of the authorities that peers' certificates have to be signed by.
    pub ca: PathBuf,
    /// This host's certificate, followed by the intermediate certificates up to the authority, if any.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

/// Protection of connections between agents. Both agents have to be configured alike.
#[derive(Clone, Debug)]
pub enum Security {
    /// TLS 1.3 with certificates on both sides.
    Tls(Identity),
    /// No encryption. Any program that reaches the port can claim to be any host, and read and change guests' memory.
    Plain,
}

/// A certificate, its key, and the authority, ready for use.
#[derive(Clone)]
pub struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    verifier: Arc<WebPkiServerVerifier>,
    chain: Vec<CertificateDer<'static>>,
    files: TlsFiles,
}

/// Error in the files of an [`Identity`].
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file is missing or not readable.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Reason of the failure.
        source: std::io::Error,
    },
    /// The file is not PEM.
    #[error("{} is not a PEM file", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// Reason of the failure.
        source: pem::Error,
    },
    /// The file lacks the item that it is named for.
    #[error("there is no {what} in {}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// The missing item.
        what: &'static str,
    },
    /// The authority cannot be used.
    #[error("the authority in {} cannot be used", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// Reason of the failure.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Certificate and key do not belong together, or cannot be used.
    #[error("the certificate in {} cannot be used with the key in {}", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Reason of the failure.
        source: rustls::Error,
    },
    /// A certificate that no peer will accept.
    #[error("this host's certificate in {} {}", path.display(), certificate_fault(fault))]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Fault of the certificate.
        fault: CertificateError,
    },
    /// The certificate does not bear the host's name.
    #[error("{} does not match this host", path.display())]
    Name {
        /// The certificate's file.
        path: PathBuf,
        /// The error that names both.
        source: HandshakeError,
    },
}

impl Identity {
    /// Reads the files. [`Identity::check`] finds out if peers will accept their contents.
    ///
    /// # Errors
    /// If a file cannot be read, or certificate and key do not belong together.
    pub fn load(files: &TlsFiles) -> Result<Self, IdentityError> {
        Self::load_with(files, rustls::crypto::aws_lc_rs::default_provider())
    }

    /// Loads with the ciphers of a provider. It is named here, so that none has to be installed for the whole process.
    fn load_with(files: &TlsFiles, provider: CryptoProvider) -> Result<Self, IdentityError> {
        let provider = Arc::new(provider);
        let roots = Arc::new(read_authorities(&files.ca)?);
        let chain = read_certificates(&files.certificate)?;
        let key = read_key(&files.key)?;

        let authority = |source: rustls::client::VerifierBuilderError| IdentityError::Authority {
            path: files.ca.clone(),
            source: source.into(),
        };
        let pair = |source| IdentityError::Pair {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            source,
        };
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(authority)?;
        let client_verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(authority)?;

        let mut client = client_config(&provider)
            .map_err(pair)?
            .with_webpki_verifier(Arc::clone(&verifier))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(pair)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();

        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(pair)?
            .with_client_cert_verifier(client_verifier)
            .with_single_cert(chain.clone(), key)
            .map_err(pair)?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.send_tls13_tickets = 0;

        Ok(Self { client: Arc::new(client), server: Arc::new(server), verifier, chain, files: files.clone() })
    }

    /// Checks this host's own certificate as its peers will: signed by the same authority, in date, with the host's
    /// name. Useful at the agent's start, when an operator sees the error.
    pub fn check(&self, host: &HostId) -> Result<(), IdentityError> {
        let path = || self.files.certificate.clone();
        let named = |source| IdentityError::Name { path: path(), source };
        let name = dns_name(host).map_err(named)?;
        let (own, between) = self
            .chain
            .split_first()
            .ok_or_else(|| IdentityError::Empty { path: path(), what: "certificate" })?;
        match self.verifier.verify_server_cert(own, between, &name, &[], UnixTime::now()) {
            Ok(_) => Ok(()),
            Err(error) => match peer_fault(error, host) {
                HandshakeError::PeerCertificate(fault) => {
                    Err(IdentityError::Unusable { path: path(), fault })
                }
                other => Err(named(other)),
            },
        }
    }

    /// Creates a TLS session towards a peer whose name is known.
    pub(crate) fn client(&self, peer: &HostId) -> Result<rustls::Connection, HandshakeError> {
        let session = rustls::ClientConnection::new(Arc::clone(&self.client), dns_name(peer)?)?;
        Ok(limit_buffer(session.into()))
    }

    /// Creates a TLS session with a client that has connected.
    pub(crate) fn server(&self) -> Result<rustls::Connection, HandshakeError> {
        let session = rustls::ServerConnection::new(Arc::clone(&self.server))?;
        Ok(limit_buffer(session.into()))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("files", &self.files).finish_non_exhaustive()
    }
}

fn client_config(
    provider: &Arc<CryptoProvider>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>, rustls::Error> {
    ClientConfig::builder_with_provider(Arc::clone(provider)).with_protocol_versions(&[&TLS13])
}

fn limit_buffer(mut session: rustls::Connection) -> rustls::Connection {
    session.set_buffer_limit(Some(SESSION_BUFFER_BYTES));
    session
}

/// Checks that a certificate, which TLS has accepted, bears the name of the host that showed it.
pub(crate) fn check_name(certificate: &CertificateDer<'_>, host: &HostId) -> Result<(), HandshakeError> {
    let name = dns_name(host)?;
    ParsedCertificate::try_from(certificate)
        .and_then(|parsed| verify_server_name(&parsed, &name))
        .map_err(|error| peer_fault(error, host))
}

/// Converts a fault of a peer's certificate, with the host's name if the fault is about names.
pub(crate) fn peer_fault(error: rustls::Error, host: &HostId) -> HandshakeError {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }) => {
            HandshakeError::WrongName {
                host: host.clone(),
                presented: presented.iter().map(|name| bare_name(name)).collect(),
            }
        }
        other => other.into(),
    }
}

/// Extracts the name from rustls' form, `DnsName("host-a")`.
fn bare_name(quoted_name: &str) -> String {
    quoted_name.split('"').nth(1).unwrap_or(quoted_name).to_owned()
}

fn dns_name(host: &HostId) -> Result<ServerName<'static>, HandshakeError> {
    DnsName::try_from(host.as_str())
        .map(|name| ServerName::DnsName(name.to_owned()))
        .map_err(|_| HandshakeError::NameNotDns(host.clone()))
}

fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    std::fs::read(path).map_err(|source| IdentityError::Read { path: path.to_owned(), source })
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&read(path)?)
        .collect::<Result<_, _>>()
        .map_err(|source| IdentityError::Pem { path: path.to_owned(), source })?;
    if certificates.is_empty() {
        return Err(IdentityError::Empty { path: path.to_owned(), what: "certificate" });
    }
    Ok(certificates)
}

fn read_authorities(path: &Path) -> Result<RootCertStore, IdentityError> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(path)? {
        roots
            .add(certificate)
            .map_err(|source| IdentityError::Authority { path: path.to_owned(), source: source.into() })?;
    }
    Ok(roots)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, IdentityError> {
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|source| match source {
        pem::Error::NoItemsFound => IdentityError::Empty { path: path.to_owned(), what: "private key" },
        source => IdentityError::Pem { path: path.to_owned(), source },
    })
}

#[cfg(test)]
impl Identity {
    /// Loads an identity whose keys wear out after `records` records of TLS. Real ones last for 2²⁴ records, which is
    /// hundreds of gigabytes on one connection.
    pub(crate) fn load_with_short_lived_keys(files: &TlsFiles, records: u64) -> Self {
        let mut provider = rustls::crypto::aws_lc_rs::default_provider();
        let suites = provider.cipher_suites.iter().filter_map(rustls::SupportedCipherSuite::tls13);
        let suites: Vec<_> = suites
            .map(|suite| {
                let common = rustls::crypto::CipherSuiteCommon {
                    suite: suite.common.suite,
                    hash_provider: suite.common.hash_provider,
                    confidentiality_limit: records,
                };
                let suite = rustls::Tls13CipherSuite {
                    common,
                    hkdf_provider: suite.hkdf_provider,
                    aead_alg: suite.aead_alg,
                    quic: None,
                };
                rustls::SupportedCipherSuite::Tls13(Box::leak(Box::new(suite)))
            })
            .collect();
        provider.cipher_suites = suites;
        Self::load_with(files, provider).unwrap()
    }
}
