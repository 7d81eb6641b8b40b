//! Certificates for a laboratory: one authority, and one certificate with its key for each host.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};

use crate::error::{Context, Result};

/// An authority that makes certificates, as PEM files in a directory.
#[derive(Debug)]
pub struct Pki {
    directory: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The files of one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// The host's certificate.
    pub certificate: PathBuf,
    /// The host's private key, readable by its owner alone.
    pub key: PathBuf,
}

impl Pki {
    /// Makes a new authority; its certificate is `ca.pem` in the directory.
    pub fn new(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory).context(|| format!("cannot make {}", directory.display()))?;
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, "whimbrel laboratory");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)?;
        write(&directory.join("ca.pem"), &issuer.pem(), 0o644)?;
        Ok(Self { directory: directory.to_owned(), issuer })
    }

    /// Makes a certificate, good for both sides of a connection, for a host's name and addresses: `NAME.pem` and
    /// `NAME.key`.
    pub fn issue(&self, name: &str, addresses: &[IpAddr]) -> Result<Identity> {
        let mut parameters = CertificateParams::new(vec![name.to_owned()])?;
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        // QEMU's TLS needs the second, with any key.
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        parameters.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &self.issuer)?;
        let identity = Identity {
            ca: self.directory.join("ca.pem"),
            certificate: self.directory.join(format!("{name}.pem")),
            key: self.directory.join(format!("{name}.key")),
        };
        write(&identity.certificate, &certificate.pem(), 0o644)?;
        write(&identity.key, &key.serialize_pem(), 0o600)?;
        Ok(identity)
    }
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let mut file = fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(mode)
        .open(path)
        .context(context)?;
    io_write(&mut file, text).context(context)
}

fn io_write(file: &mut fs::File, text: &str) -> std::io::Result<()> {
    std::io::Write::write_all(file, text.as_bytes())
}
