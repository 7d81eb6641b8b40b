//! Hosts with certificates of their own, and connections between them.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of this")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use proto::{Epoch, Generation, HostId, MigrationId, Purpose, VmName};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use whimbrel_link::{
    ConnectedPeer, Connection, Endpoint, Identity, Listener, ListenerHandle, Peer, Rejected, Security,
    TlsFiles,
};

/// Maximum time that a test waits for an expected event; no test waits for this to pass.
pub const PATIENCE: Duration = Duration::from_mins(1);

pub fn soon() -> Instant {
    Instant::now() + PATIENCE
}

pub fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

pub fn migration() -> MigrationId {
    MigrationId { vm: VmName::new("vm").unwrap(), epoch: Epoch(1) }
}

pub fn control() -> Purpose {
    Purpose::Control { migration: migration(), generation: Generation(1) }
}

pub fn data(generation: u64, stream: u16) -> Purpose {
    Purpose::Data { migration: migration(), generation: Generation(generation), stream }
}

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Default for Authority {
    fn default() -> Self {
        Self::named("authority")
    }
}

impl Authority {
    pub fn named(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Writes the files of a host with these names; `change` may spoil the certificate first.
    pub fn files(&self, at: &Path, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> TlsFiles {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let unique =
            key.serialized_der().iter().fold(0_u64, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte));
        let write = |what: &str, pem: String| {
            let path = at.join(format!("{unique:016x}-{what}.pem"));
            std::fs::write(&path, pem).unwrap();
            path
        };
        TlsFiles {
            ca: write("ca", self.0.pem()),
            certificate: write("certificate", certificate.pem()),
            key: write("key", key.serialize_pem()),
        }
    }

    pub fn identity(&self, names: &[&str]) -> Identity {
        self.spoilt_identity(names, |_| ())
    }

    pub fn spoilt_identity(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Identity {
        let at = tempfile::tempdir().unwrap();
        Identity::load(&self.files(at.path(), names, change)).unwrap()
    }

    pub fn endpoint(&self, name: &str) -> Endpoint {
        Endpoint::new(host(name), Security::Tls(self.identity(&[name])))
    }
}

/// A client and a server with TLS, and a pair without.
pub fn both_endpoints() -> [(Endpoint, Endpoint); 2] {
    let authority = Authority::default();
    let tls = (authority.endpoint("host-a"), authority.endpoint("host-b"));
    [tls, (plain("host-a"), plain("host-b"))]
}

pub fn plain(name: &str) -> Endpoint {
    Endpoint::new(host(name), Security::Plain)
}

/// A listening agent, and its arrivals.
pub struct Server {
    pub serving: ListenerHandle,
    pub host: HostId,
    arrivals: Mutex<Receiver<Result<ConnectedPeer, Rejected>>>,
}

impl Server {
    pub fn new(endpoint: Endpoint) -> Self {
        let (sender, arrivals) = mpsc::channel();
        let sender = Mutex::new(sender);
        let host = endpoint.host().clone();
        let serving = Listener::bind(endpoint, "127.0.0.1:0")
            .unwrap()
            .serve(move |arrival| drop(sender.lock().unwrap().send(arrival)))
            .unwrap();
        Self { serving, host, arrivals: Mutex::new(arrivals) }
    }

    pub fn peer(&self) -> Peer {
        Peer { host: self.host.clone(), address: self.serving.address().to_string() }
    }

    pub fn arrival(&self) -> Result<ConnectedPeer, Rejected> {
        self.arrivals.lock().unwrap().recv_timeout(PATIENCE).expect("nobody arrived")
    }

    /// Returns true if no connection has arrived yet.
    pub fn has_no_arrival(&self) -> bool {
        self.arrivals.lock().unwrap().try_recv().is_err()
    }

    pub fn accept(&self) -> Connection {
        self.arrival().unwrap().accept().unwrap()
    }
}

/// Both ends of a connection: the connecting side, and the answering side.
pub fn connected(client: &Endpoint, server: Endpoint) -> (Connection, Connection) {
    let server = Server::new(server);
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| client.connect(&server.peer(), control(), soon()).unwrap());
        let answering = server.accept();
        (connecting.join().unwrap(), answering)
    })
}

/// A pair of connected ends with TLS, and one without.
pub fn both_kinds() -> [(&'static str, Connection, Connection); 2] {
    let [tls, plain] = both_endpoints().map(|(client, server)| connected(&client, server));
    [("tls", tls.0, tls.1), ("plain", plain.0, plain.1)]
}

/// Returns the whole chain of an error, as a user reads it.
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}
