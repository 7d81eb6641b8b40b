//! Processes with memory on demand, and real connections.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test program uses a part of this")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, mpsc};
use std::time::{Duration, Instant};

use link::{Connection, Endpoint, Identity, Listener, Peer, Security, TlsFiles};
use proto::{Epoch, Generation, HostId, MigrationId, Purpose, VmName};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tracee::{Injector, Process, Signal};
use whimbrel_memory::RamRegion;
use whimbrel_memory::verify::Block;

/// The programs of tracee's tests: a victim with memory on demand, and an injector. Built in the same place as this
/// test.
static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
    let here = std::env::current_exe().unwrap();
    let profile = here.ancestors().find(|dir| dir.join("deps").is_dir()).unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    build.args(["build", "--quiet", "--locked", "--offline", "-p", "whimbrel-tracee", "--bins"]);
    build.arg("--target-dir").arg(profile.parent().unwrap());
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "the programs of tracee's tests cannot be built");
    profile.to_owned()
});

pub fn injector() -> Injector {
    Injector::new(PROGRAMS.join("tracee-test-injector"), Vec::new())
}

/// A process with one mapping; killed when dropped.
pub struct Victim {
    pub process: Process,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    bytes: u64,
    page_bytes: u64,
    address: u64,
}

impl Victim {
    pub fn start(kind: &str, bytes: u64) -> Self {
        let mut command = Command::new(PROGRAMS.join("tracee-test-victim"));
        let mut child =
            command.arg("mode-memory").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let page_bytes = if kind.starts_with("hugetlb") { 2 << 20 } else { 4096 };
        let mut victim = Self { process, child, input, output, bytes, page_bytes, address: 0 };
        assert_eq!(victim.line(), "ready");
        victim.address = victim.order(&format!("map {kind} {bytes}")).parse().unwrap();
        victim
    }

    /// Makes the victim do something to its memory (see the victim's own page).
    pub fn order(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.line()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.output.read_line(&mut line).unwrap() > 0, "the victim has ended");
        line.trim_end().to_owned()
    }

    /// Returns its memory as two blocks, so that more than one is moved; their border is not that of a chunk.
    pub fn regions(&self) -> Vec<RamRegion> {
        let first = if self.page_bytes > 4096 { self.bytes / 2 } else { self.bytes / 2 + 12 * 4096 };
        let region = |name: &str, bytes, address| {
            let name = name.to_owned();
            RamRegion { name, bytes, page_bytes: self.page_bytes, address }
        };
        vec![region("low", first, self.address), region("high", self.bytes - first, self.address + first)]
    }

    pub fn blocks(&self) -> Vec<Block> {
        let block =
            |region: RamRegion| Block { name: region.name, bytes: region.bytes, address: region.address };
        self.regions().into_iter().map(block).collect()
    }

    /// Stops all its threads, and returns when they have stopped.
    pub fn freeze(&self) {
        self.process.signal(Signal::STOP).unwrap();
        // The state stands behind the name in brackets.
        let stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
        while !std::fs::read_dir(self.process.path("task"))
            .unwrap()
            .all(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")).is_ok_and(stopped))
        {
            std::thread::yield_now();
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn identity(at: &Path, authority: &CertifiedIssuer<'static, KeyPair>, name: &str) -> Identity {
    let mut params = CertificateParams::new([name.to_owned()]).unwrap();
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    let write = |what: &str, pem: String| {
        let path = at.join(format!("{name}-{what}.pem"));
        std::fs::write(&path, pem).unwrap();
        path
    };
    let files = TlsFiles {
        ca: write("ca", authority.pem()),
        certificate: write("certificate", certificate.pem()),
        key: write("key", key.serialize_pem()),
    };
    Identity::load(&files).unwrap()
}

/// Returns two hosts with certificates, or without.
pub fn endpoints(tls: bool) -> [Endpoint; 2] {
    let names = ["host-a", "host-b"];
    if !tls {
        return names.map(|name| Endpoint::new(HostId::new(name).unwrap(), Security::Plain));
    }
    let at = tempfile::tempdir().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    names.map(|name| {
        Endpoint::new(HostId::new(name).unwrap(), Security::Tls(identity(at.path(), &authority, name)))
    })
}

/// Returns connections over loopback TCP, near ends and far ends, in the order of their streams.
pub fn connections(tls: bool, streams: u16) -> (Vec<Connection>, Vec<Connection>) {
    let [near, far] = endpoints(tls);
    let peer = far.host().clone();
    let (arrived, arrivals) = mpsc::channel();
    let arrived = std::sync::Mutex::new(arrived);
    let serving = Listener::bind(far, "127.0.0.1:0")
        .unwrap()
        .serve(move |arrival| arrived.lock().unwrap().send(arrival.unwrap().accept().unwrap()).unwrap())
        .unwrap();
    let peer = Peer { host: peer, address: serving.address().to_string() };
    let migration = MigrationId { vm: VmName::new("vm").unwrap(), epoch: Epoch(1) };
    let deadline = Instant::now() + Duration::from_mins(1);
    let pairs = (0..streams).map(|stream| {
        let purpose = Purpose::Data { migration: migration.clone(), generation: Generation(1), stream };
        let mine = near.connect(&peer, purpose, deadline).unwrap();
        (mine, arrivals.recv().unwrap())
    });
    let ends = pairs.unzip();
    serving.stop();
    ends
}
