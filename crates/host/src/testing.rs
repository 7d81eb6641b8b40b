//! Shared fixtures of the tests of drivers and daemon: an agent `a` with a journal in a directory of its own, its peer
//! `b`, and a QEMU that is a sleeping process with a monitor.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, reason = "a test may fail")]
#![allow(missing_docs, clippy::new_without_default, reason = "only tests use it")]

use std::fs::File;
use std::io::{self, BufRead, BufReader, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use link::transport::{Channel, TcpTransport};
use link::{
    ConnectedPeer, Connection, Endpoint, Incoming, LinkError, Listener, ListenerHandle, Rejected, Security,
};
use net::redirection::host_kernel::HostKernel;
use net::redirection::testing::FakeKernel;
use proto::message::{Acceptance, Message, Proposal};
use proto::{Epoch, HostId, Incarnation, MigrationId, VmName};
use qemu::describe::redact_secrets;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use tracee::{Injector, Process};

use crate::Context;
use crate::EmulatorCache;
use crate::HelperProgram;
use crate::MigrationTransport;
use crate::SourceVm;
use crate::config::Config;
use crate::dns_keeper::DnsKeeper;
use crate::fault::Faults;
use crate::name_locks::NameLocks;
use crate::redirections;
use crate::templates::Templates;
use store::journal::{Journal, NewMigration, State, VmRecord};
use store::registry::Registry;

/// Longest wait of a test for an expected event.
pub const PATIENCE: Duration = Duration::from_mins(1);

pub fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

pub fn vm() -> VmName {
    VmName::new("web").unwrap()
}

pub fn id(epoch: u64) -> MigrationId {
    MigrationId { vm: vm(), epoch: Epoch(epoch) }
}

/// Returns the terms of the first migration, from one host to the other.
pub fn terms(source: &str, destination: &str) -> MigrationTerms {
    MigrationTerms {
        migration: id(1),
        source: host(source),
        destination: host(destination),
        registry: None,
        witness: None,
    }
}

pub fn proposal() -> Proposal {
    let proposal = json!({
        "reply_to": "127.0.0.1:1", "streams": 1, "facts": {}, "description": {}, "check_only": false,
        "ram": [{ "name": "pc.ram", "bytes": 2 << 20, "page_bytes": 4096 }],
    });
    serde_json::from_value(proposal).unwrap()
}

/// Returns the answer of a destination that can do nothing special.
pub fn acceptance() -> Acceptance {
    serde_json::from_value(json!({ "findings": [], "qemu_start_us": 0, "ram_kind": "" })).unwrap()
}

/// Waits until a condition holds that other threads have to establish.
#[track_caller]
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a thread of this process is blocked, or has ended.
#[track_caller]
pub fn wait_until_blocked(thread: rustix::thread::Pid) {
    let stat = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    eventually("a thread that waits", || {
        let stat = std::fs::read_to_string(&stat);
        stat.ok().is_none_or(|stat| stat.rsplit_once(") ").unwrap().1.starts_with('S'))
    });
}

/// Accepts every connection. The receiver may be gone already.
fn accept_all(sender: Sender<Connection>) -> impl Fn(Result<ConnectedPeer, Rejected>) + Send + Sync {
    move |arrival| {
        if let Some(connection) = arrival.ok().and_then(|arrival| arrival.accept().ok()) {
            drop(sender.send(connection));
        }
    }
}

/// The agent `a`, and the connections to its peer `b`.
pub struct World {
    pub context: Arc<Context>,
    /// Kernel of redirections.
    pub kernel: Arc<FakeKernel>,
    pub folder: tempfile::TempDir,
    arrivals: Receiver<Connection>,
    _peer: ListenerHandle,
}

impl World {
    pub fn new() -> Self {
        Self::with(None)
    }

    pub fn with(registry: Option<Arc<dyn Registry>>) -> Self {
        Self::patient(registry, "")
    }

    /// Creates a world with more lines for the configuration's time-outs.
    pub fn patient(registry: Option<Arc<dyn Registry>>, timeouts: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (sender, arrivals) = mpsc::channel();
        let peer = Listener::bind(endpoint("b"), "127.0.0.1:0").unwrap();
        let address = peer.address();
        let peer = peer.serve(accept_all(sender)).unwrap();
        let text = format!(
            "host = \"a\"\nlisten = \"127.0.0.1:1\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n[tls]\nplain = true\n\
             [hosts.b]\naddress = \"{address}\"\n[timeouts]\nretry_ms = 20\nqmp_ms = 500\n{timeouts}"
        );
        let config = Config::parse(&folder.path().join("agent.toml"), &text).unwrap();
        let router = link::Router::default();
        let kernel = Arc::<FakeKernel>::default();
        let context = Context {
            journal: Journal::open(&config.state_dir, redact_secrets).unwrap(),
            transport: MigrationTransport {
                connections: Arc::new(TcpTransport::new(endpoint("a"), router.clone())),
                router,
            },
            registry,
            injector: Arc::new(Injector::new(PathBuf::from("/nonexistent"), Vec::new())),
            guard: HelperProgram { program: "/nonexistent".into(), arguments: Vec::new() },
            faults: Faults::default(),
            boot_id: "this boot".to_owned(),
            arrivals: Arc::default(),
            names: NameLocks::default(),
            dns_keeper: DnsKeeper::load(&config),
            redirections: redirections::keeper_with(&config, Arc::clone(&kernel) as Arc<dyn HostKernel>),
            emulators: EmulatorCache::default(),
            fixed_costs: Mutex::default(),
            templates: Arc::new(
                Templates::start(Vec::new(), folder.path().join("templates"), PATIENCE).unwrap(),
            ),
            config,
        };
        Self { context: Arc::new(context), kernel, folder, arrivals, _peer: peer }
    }

    /// Returns the next connection that `a` opens to `b`.
    pub fn accept(&self) -> Peer {
        Peer(self.arrivals.recv_timeout(PATIENCE).expect("nobody connects"))
    }

    /// Returns both ends of a connection that `b` has opened to `a`.
    pub fn from_peer() -> (Channel, Peer) {
        let (sender, arrivals) = mpsc::channel();
        let listener = Listener::bind(endpoint("a"), "127.0.0.1:0").unwrap();
        let address = listener.address();
        let _serving = listener.serve(accept_all(sender)).unwrap();
        let there = Peer::connect("b", address, proto::Purpose::Handover { migration: id(1) }).unwrap();
        (arrivals.recv_timeout(PATIENCE).unwrap().into(), there)
    }

    /// Writes the first migration into the journal.
    pub fn journalled(&self, terms: &MigrationTerms, state: State) {
        let new = NewMigration { terms, state, proposal: &proposal() };
        self.context.journal.begin(&new).unwrap();
    }

    /// Returns the first migration's state in the journal.
    pub fn state(&self) -> State {
        self.context.journal.migration(&id(1)).unwrap().expect("the journal does not know it").state
    }

    /// Waits until the journal has the first migration in a state of this name.
    #[track_caller]
    pub fn reaches(&self, state: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.state().name() != state {
            assert!(Instant::now() < deadline, "{:?}, not {state}", self.state());
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Returns an endpoint of this name that speaks the protocol for a test.
pub fn endpoint(name: &str) -> Endpoint {
    Endpoint::new(host(name), Security::Plain)
}

/// The other end of a connection.
pub struct Peer(pub Connection);

impl Peer {
    /// Connects to the agent `a`.
    pub fn connect(
        name: &str,
        address: SocketAddr,
        purpose: proto::Purpose,
    ) -> Result<Self, link::ConnectError> {
        let to = link::Peer { host: host("a"), address: address.to_string() };
        endpoint(name).connect(&to, purpose, Instant::now() + PATIENCE).map(Self)
    }

    pub fn send_message(&mut self, message: &Message) {
        self.0.send(message).unwrap();
    }

    pub fn receive_message(&mut self) -> Message {
        match self.0.recv(Some(Instant::now() + PATIENCE)).expect("nothing is said") {
            Incoming::Message(message) => message,
            Incoming::Blob(_) => unreachable!("no test sends device state"),
        }
    }

    /// Waits for a matching message, and drops all others.
    pub fn receive_until(&mut self, wanted: impl Fn(&Message) -> bool) -> Message {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "it is not said");
            let message = self.receive_message();
            if wanted(&message) {
                return message;
            }
        }
    }

    /// Waits until the peer closes the connection, and returns the messages that it sent before.
    pub fn receive_until_closed(&mut self) -> Vec<Message> {
        let mut messages = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "it does not hang up");
            match self.0.recv(Some(Instant::now() + PATIENCE)) {
                Ok(Incoming::Message(message)) => messages.push(message),
                Ok(Incoming::Blob(_)) => {}
                Err(LinkError::TimedOut) => unreachable!("it does not hang up; it said {messages:?}"),
                Err(_) => return messages,
            }
        }
    }
}

/// A process that sleeps, and a monitor with answers that the test chooses.
pub struct Qemu {
    child: Child,
    process: Process,
    path: PathBuf,
    monitor: Arc<Mutex<Monitor>>,
}

/// Behaviour of the monitor.
#[derive(Default)]
pub struct Monitor {
    /// True if the guest runs.
    pub running: bool,
    /// True if it accepts connections and does not greet.
    pub mute: bool,
    /// A command that is not answered.
    pub ignores: Option<&'static str>,
    /// A command that is answered once this field changes.
    pub waits: Option<&'static str>,
    /// A command that is refused.
    pub refuses: Option<&'static str>,
    /// Commands that were received.
    pub received: Vec<String>,
    /// Number of connections that were accepted.
    pub connections: usize,
    clients: Vec<UnixStream>,
    /// File that a client has passed.
    passed: Option<File>,
}

/// Commands of a client, with the file that it may pass.
struct Commands<'a> {
    stream: UnixStream,
    shared: &'a Mutex<Monitor>,
}

impl Read for Commands<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut passed = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(bytes)];
        let received = recvmsg(&self.stream, &mut parts, &mut passed, RecvFlags::CMSG_CLOEXEC)?;
        for message in passed.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.shared.lock().unwrap().passed = files.last().map(File::from);
            }
        }
        Ok(received.bytes)
    }
}

impl Qemu {
    pub fn start(directory: &Path) -> Self {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        std::fs::create_dir_all(directory).unwrap();
        let path = directory.join(::qemu::command::QMP_FILE);
        let listener = UnixListener::bind(&path).unwrap();
        let monitor = Arc::<Mutex<Monitor>>::default();
        let shared = Arc::clone(&monitor);
        let watched = process.try_clone().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shared, process) = (Arc::clone(&shared), watched.try_clone().unwrap());
                thread::spawn(move || serve(stream, &process, &shared));
            }
        });
        Self { child, process, path, monitor }
    }

    pub fn monitor(&self) -> std::sync::MutexGuard<'_, Monitor> {
        self.monitor.lock().unwrap()
    }

    pub fn record(&self) -> VmRecord {
        VmRecord::new(vm(), Value::Null, self.process(), "this boot", self.path.clone())
    }

    /// Returns process id and start time.
    pub fn process(&self) -> (u32, u64) {
        (self.process.pid(), self.process.start_time())
    }

    pub fn incarnation(&self) -> Incarnation {
        Incarnation {
            boot_id: "this boot".to_owned(),
            pid: self.process.pid(),
            start_time_ticks: self.process.start_time(),
            generation: proto::Generation(1),
        }
    }

    /// Returns the VM, as a migration that begins finds it.
    pub fn source_vm(&self, context: &Context) -> SourceVm {
        let mut vm = SourceVm::find(context, &self.record()).unwrap();
        "pc-q35-10.0".clone_into(&mut vm.machine_type);
        vm
    }

    pub fn is_frozen(&self) -> bool {
        is_frozen(&self.process)
    }

    /// Returns the path of its monitor.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closes its clients' connections.
    pub fn close_connections(&self) {
        for client in &self.monitor().clients {
            client.shutdown(std::net::Shutdown::Both).unwrap();
        }
    }

    /// Reports to its clients that the guest goes on, as another client's `cont` does.
    pub fn emit_resume(&self) {
        let event = json!({ "event": "RESUME", "timestamp": { "seconds": 1, "microseconds": 0 } });
        for client in &mut self.monitor().clients {
            writeln!(client, "{event}").unwrap();
        }
    }

    /// Waits until a command was received `times` times.
    #[track_caller]
    pub fn received(&self, command: &str, times: usize) {
        eventually(command, || {
            self.monitor().received.iter().filter(|received| *received == command).count() >= times
        });
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn is_frozen(process: &Process) -> bool {
    process.status().is_ok_and(|status| status.state == 'T')
}

fn serve(mut stream: UnixStream, process: &Process, shared: &Mutex<Monitor>) {
    let commands = Commands { stream: stream.try_clone().unwrap(), shared };
    let mut lines = BufReader::new(commands).lines();
    {
        let mut monitor = shared.lock().unwrap();
        monitor.connections += 1;
        monitor.clients.push(stream.try_clone().unwrap());
        if !monitor.mute {
            let version = json!({ "qemu": { "micro": 2, "minor": 0, "major": 10 }, "package": "" });
            writeln!(stream, "{}", json!({ "QMP": { "version": version, "capabilities": [] } })).unwrap();
        }
    }
    while let Some(Ok(line)) = lines.next() {
        // A process that is held answers no client.
        while is_frozen(process) {
            thread::sleep(Duration::from_millis(2));
        }
        let asked: Value = serde_json::from_str(&line).unwrap();
        let command = asked["execute"].as_str().unwrap();
        let mut monitor = shared.lock().unwrap();
        monitor.received.push(command.to_owned());
        if monitor.mute || monitor.ignores == Some(command) {
            continue;
        }
        while monitor.waits == Some(command) {
            drop(monitor);
            thread::sleep(Duration::from_millis(2));
            monitor = shared.lock().unwrap();
        }
        if monitor.refuses == Some(command) {
            let error = json!({ "class": "GenericError", "desc": "not now" });
            if writeln!(stream, "{}", json!({ "error": error, "id": asked["id"] })).is_err() {
                return;
            }
            continue;
        }
        let answer = match command {
            "query-status" => {
                let status = if monitor.running { "running" } else { "paused" };
                json!({ "status": status, "running": monitor.running })
            }
            "stop" | "cont" => {
                monitor.running = command == "cont";
                json!({})
            }
            "human-monitor-command" => json!(""),
            "query-block" => json!([]),
            "add-fd" => json!({ "fdset-id": 1, "fd": 9 }),
            "xen-save-devices-state" => {
                if let Some(mut file) = monitor.passed.as_ref() {
                    file.write_all(b"QEVM\0\0\0\x03\x04section\0").unwrap();
                }
                json!({})
            }
            _ => json!({}),
        };
        if writeln!(stream, "{}", json!({ "return": answer, "id": asked["id"] })).is_err() {
            return;
        }
    }
}

/// A registry that counts its requests and answers when the test sends the answer.
pub struct SlowRegistry {
    pub asked: Sender<proto::message::RegistryRequest>,
    pub answers: Mutex<Receiver<engine::handover::registry::RegistryAnswer>>,
}

impl Registry for SlowRegistry {
    fn ask(&self, request: &proto::message::RegistryRequest) -> engine::handover::registry::RegistryAnswer {
        self.asked.send(request.clone()).unwrap();
        self.answers.lock().unwrap().recv().unwrap_or(engine::handover::registry::RegistryAnswer::Unreachable)
    }
}
