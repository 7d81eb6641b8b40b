//! Bad input gets a clear error and changes nothing: requests that name nothing, peers that cannot be trusted, noise at
//! the port, hosts without room, VMs that somebody else works on. After each the guest runs on at its source, nothing is
//! left at the destination, and no descriptor is left in its QEMU. Needs root.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::needless_pass_by_value,
    clippy::unnecessary_debug_formatting,
    clippy::unreadable_literal,
    reason = "a test may fail"
)]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use common::{Accel, Agent, Cluster, DEADLINE, Guest, GuestSpec, QemuVersion, Said, Setup, WHIMBREL};
use serde_json::{Value, json};

/// The program says no: with this exit code, and with these words, which name the thing and say what to do.
#[track_caller]
fn refused(said: &Said, code: i32, words: &[&str]) {
    assert_eq!(said.code, code, "{words:?}: {said:#?}");
    let text = format!("{}{}", said.stdout, said.stderr);
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {said:#?}");
    }
}

/// Waits until something that has to happen by itself has happened.
#[track_caller]
fn eventually(what: &str, mut happened: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + DEADLINE;
    while let Err(how) = happened() {
        assert!(Instant::now() < deadline, "{what}: {how}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A guest on the first host that counts and checks, and what its QEMU had open before anything was tried.
struct Watched {
    guest: Guest,
    name: &'static str,
    open: Vec<String>,
    output: lab::Follow,
    counted: lab::bare::Progress,
}

impl Watched {
    fn new(cluster: &Cluster, name: &'static str) -> Self {
        Self::with(cluster, name, bare(name))
    }

    fn with(cluster: &Cluster, name: &'static str, spec: GuestSpec) -> Self {
        let guest = Guest::start(&cluster.lab.a, &cluster.environment, &spec).unwrap();
        let output = guest.serial().follow().unwrap();
        let counted = lab::bare::Progress::default();
        let mut watched = Self { guest, name, open: Vec::new(), output, counted };
        watched.counts();
        watched.open = open_files(watched.guest.pid());
        cluster.a.cli(&["vm", "adopt", "--pid", &watched.guest.pid().to_string()]).ok();
        watched
    }

    /// The guest goes on, and finds every page as it wrote it.
    #[track_caller]
    fn counts(&mut self) {
        self.counted.wait(&mut self.output, 1, 1, DEADLINE).unwrap();
        assert_eq!(self.counted.wrong, 0);
    }

    /// It runs at its source as before, and nothing is left of what was tried.
    #[track_caller]
    fn is_unharmed(&self, cluster: &Cluster, after: &str) {
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        let vm = cluster.a.vm(self.name).unwrap();
        let pid = self.guest.pid();
        assert_eq!((&vm["state"], &vm["pid"]), (&json!("running"), &json!(pid)), "{after}");
        nothing_is_left(cluster, after);
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("TracerPid:\t0\n"), "{after}: still traced");
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let mut flags = smaps.lines().filter(|line| line.starts_with("VmFlags:"));
        assert!(!flags.any(|line| line.contains(" uw")), "{after}: ranges are still tracked");
        // QEMU closes a monitor's connection a moment after the other end has.
        eventually(after, || {
            let mut extra = open_files(pid);
            for known in &self.open {
                if let Some(at) = extra.iter().position(|open| open == known) {
                    extra.remove(at);
                }
            }
            if extra.is_empty() { Ok(()) } else { Err(format!("{extra:?} is left in QEMU")) }
        });
    }

    /// Nothing stands in its way: it is moved for good, all of it.
    #[track_caller]
    fn moves(self, cluster: &Cluster) {
        cluster.migrate(self.name, "a", "b", &[]);
        assert!(cluster.a.vm(self.name).is_none());
        assert_eq!(cluster.b.vm(self.name).unwrap()["state"], "running");
    }
}

fn bare(name: &str) -> GuestSpec {
    GuestSpec::bare(name, Accel::Tcg, 1)
}

/// Nothing is left at the second host: no VM, no QEMU, no file of one.
#[track_caller]
fn nothing_is_left(cluster: &Cluster, after: &str) {
    assert_eq!(cluster.b.cli(&["vm", "list"]).ok().json(), json!([]), "{after}");
    let left = common::entries(&cluster.b.directory.join("run/vms"));
    assert!(left.is_empty(), "{after}: {left:?} is left");
    let probes = common::entries(&cluster.b.directory.join("run"));
    assert!(!probes.iter().any(|name| name.starts_with("probe")), "{after}: {probes:?} is left");
    eventually(after, || {
        let left: Vec<_> =
            cluster.lab.b.processes().unwrap().into_iter().filter(|pid| is_qemu(*pid)).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("QEMUs {left:?} are left")) }
    });
}

fn is_qemu(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.to_string_lossy().contains("qemu-system"))
}

/// What a process has open; sockets and pipes without their numbers.
fn open_files(pid: u32) -> Vec<String> {
    let kind = |file: PathBuf| {
        let file = file.to_string_lossy().into_owned();
        file.split_once(":[")
            .filter(|(kind, _)| !kind.contains('/') && *kind != "anon_inode")
            .map_or(file.clone(), |(kind, _)| kind.to_owned())
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).map(kind).collect()
}

/// Adds lines to an agent's configuration and starts it again.
fn configure(agent: &mut Agent, change: impl FnOnce(String) -> String) {
    let text = fs::read_to_string(agent.config()).unwrap();
    agent.kill();
    fs::write(agent.config(), change(text)).unwrap();
    agent.start();
}

/// An agent beside the two of the cluster.
struct Stranger {
    directory: PathBuf,
    host: lab::Host,
    _daemon: lab::Daemon,
}

impl Stranger {
    fn start(host: &lab::Host, name: &str, port: u16, tls: &str, hosts: &str) -> Self {
        let directory = host.directory().join(name);
        fs::create_dir_all(&directory).unwrap();
        let config = format!(
            "host = {name:?}\nlisten = \"{}:{port}\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n{tls}\n{hosts}\n{}",
            host.address(),
            Setup::default().extra
        );
        fs::write(directory.join("agent.toml"), config).unwrap();
        let mut command = host.command(WHIMBREL);
        command.arg("agent").arg("--config").arg(directory.join("agent.toml"));
        let mut daemon = lab::Daemon::start(&mut command, &directory.join("agent.log")).unwrap();
        let deadline = Instant::now() + DEADLINE;
        let stranger = loop {
            let ready = directory.join("run/agent.sock").exists();
            assert!(daemon.is_running(), "{}", fs::read_to_string(directory.join("agent.log")).unwrap());
            assert!(Instant::now() < deadline, "{name} does not start");
            if ready {
                break Self { directory, host: host.clone(), _daemon: daemon };
            }
            thread::sleep(Duration::from_millis(20));
        };
        eventually(name, || if stranger.cli(&["info"]).code == 0 { Ok(()) } else { Err("no answer".into()) });
        stranger
    }

    fn cli(&self, words: &[&str]) -> Said {
        let mut command = self.host.command(WHIMBREL);
        command.arg("--socket").arg(self.directory.join("run/agent.sock")).arg("--json").args(words);
        said(&mut command)
    }
}

fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    Said {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn tls(identity: &lab::Identity) -> String {
    format!(
        "[tls]\nca = {:?}\ncertificate = {:?}\nkey = {:?}",
        identity.ca, identity.certificate, identity.key
    )
}

// ---- requests

#[test]
fn requests_that_name_nothing_or_the_wrong_thing() {
    let cluster = Cluster::new();
    let mut vm = Watched::new(&cluster, "vm1");
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["migrate", "vm9", "--to", "b"], 2, &["no VM vm9 here", "vm list", "vm adopt"]),
        (&["migrate", "vm9", "--to", "b", "--check"], 2, &["no VM vm9 here"]),
        (&["vm", "show", "vm9"], 2, &["no VM vm9 here", "vm list"]),
        (&["vm", "forget", "vm9"], 2, &["no VM vm9 here", "vm list"]),
        (&["cancel", "vm9"], 2, &["vm9"]),
        (&["recover", "vm9"], 2, &["vm9"]),
        (&["watch", "vm9"], 2, &["vm9"]),
        (&["limit", "vm9", "--bandwidth", "1MiB"], 2, &["vm9"]),
        (&["report", "vm1"], 2, &["vm1"]),
        (&["migrate", "vm1", "--to", "mars"], 2, &["no host mars", "[hosts.mars]"]),
        (&["migrate", "vm1", "--to", "mars", "--check"], 2, &["no host mars", "[hosts.mars]"]),
        (&["migrate", "vm1", "--to", "a"], 2, &["vm1 is on a already", "--to"]),
        (&["migrate", "vm1", "--to", "a", "--check"], 2, &["vm1 is on a already", "--to"]),
        (&["migrate", "vm1", "--to", "b", "--streams", "0"], 2, &["streams", "64"]),
        (&["migrate", "vm1", "--to", "b", "--streams", "65"], 2, &["streams", "64"]),
        (&["migrate", "../vm1", "--to", "b"], 2, &["no valid name"]),
        (&["vm", "adopt", "--pid", "4194304"], 2, &["process 4194304", "vm1"]),
        (&["vm", "adopt", "nobody"], 2, &["name nobody", "vm1"]),
        (&["vm", "adopt", "--qmp", "/nonexistent/qmp.sock"], 2, &["/nonexistent/qmp.sock", "--pid"]),
        (&["vm", "adopt", "--pid", "1", "--as", "../vm"], 2, &["no valid name"]),
    ];
    for (words, code, expected) in cases {
        refused(&cluster.a.cli(words), *code, expected);
    }
    // This very test is a process, and no QEMU.
    let pid = std::process::id().to_string();
    refused(&cluster.a.cli(&["vm", "adopt", "--pid", &pid]), 2, &["no QEMU", &pid]);
    let again = vm.guest.pid().to_string();
    refused(&cluster.a.cli(&["vm", "adopt", "--pid", &again, "--as", "other"]), 1, &["vm1", "vm forget vm1"]);
    vm.is_unharmed(&cluster, "requests that name nothing");
    vm.counts();
}

#[test]
fn qemus_that_cannot_be_taken_charge_of() {
    let cluster = Cluster::new();
    let a = &cluster.a;

    // No monitor at all.
    let machine = ["-machine", "none", "-nodefaults", "-display", "none", "-S", "-name", "dumb"];
    let dumb = cluster.lab.a.spawn("dumb", &[&["qemu-system-x86_64"], &machine[..]].concat()).unwrap();
    eventually("QEMU starts", || if is_qemu(dumb.pid()) { Ok(()) } else { Err("not yet".into()) });
    let pid = dumb.pid().to_string();
    refused(&a.cli(&["vm", "adopt", "--pid", &pid]), 1, &["dumb", "no QMP monitor", "-qmp unix:"]);
    drop(dumb);

    // Its only monitor is held by somebody else: before it is adopted, and after.
    let guest = Guest::start(&cluster.lab.a, &cluster.environment, &bare("held")).unwrap();
    let held = guest.monitor().unwrap();
    let (pid, socket) = (guest.pid().to_string(), guest.qmp_socket().display().to_string());
    refused(&a.cli(&["vm", "adopt", "--pid", &pid]), 1, &["held (process", "by other clients", "end them"]);
    refused(&a.cli(&["vm", "adopt", "--qmp", &socket]), 1, &[&socket, "close what holds the socket"]);
    assert_eq!(a.cli(&["vm", "list"]).ok().json(), json!([]), "nothing was adopted");
    drop(held);
    drop(guest);

    let mut spec = bare("vm1");
    spec.extra.extend(["-qtest-log".to_owned(), "/dev/null".to_owned()]);
    let vm = Watched::with(&cluster, "vm1", spec);
    let socket = vm.guest.qmp_socket().display().to_string();
    let held = vm.guest.monitor().unwrap();
    refused(&a.cli(&["migrate", "vm1", "--to", "b"]), 1, &[&socket, "end that client"]);
    assert_eq!(a.vm("vm1").unwrap()["state"], "unreachable");
    drop(held);
    vm.is_unharmed(&cluster, "a held monitor");

    // Another one of the same name.
    let twin = Guest::start(&cluster.lab.a, &cluster.environment, &bare("twin")).unwrap();
    let pid = twin.pid().to_string();
    refused(&a.cli(&["vm", "adopt", "--pid", &pid, "--as", "vm1"]), 1, &["vm1", "already", "--as"]);
    a.cli(&["vm", "adopt", "--pid", &pid, "--as", "twin"]).ok();
    let taken = cluster.b.cli(&["vm", "adopt", "--pid", &pid, "--as", "vm1"]).ok();
    assert_eq!(taken.json()["vm"], "vm1");
    refused(
        &a.cli(&["migrate", "vm1", "--to", "b", "--allow-option", "qtest-log"]),
        1,
        &["a VM named vm1 already", "another name"],
    );
    cluster.b.cli(&["vm", "forget", "vm1"]).ok();
    a.cli(&["vm", "forget", "twin"]).ok();
    drop(twin);
    vm.is_unharmed(&cluster, "a name that is taken");

    // An option that is not known: refused, unless it is allowed by name.
    let unknown = ["migrate", "vm1", "--to", "b"];
    refused(&a.cli(&unknown), 1, &["-qtest-log", "allow it by name"]);
    let check = a.cli(&[&unknown[..], &["--check"]].concat());
    refused(&check, 1, &["option-unknown", "-qtest-log"]);
    assert_eq!(check.json()["possible"], false);
    vm.is_unharmed(&cluster, "an unknown option");
    let check = a.cli(&[&unknown[..], &["--check", "--allow-option", "-qtest-log"]].concat()).ok();
    assert_eq!(check.json()["possible"], true);
    vm.is_unharmed(&cluster, "pre-flight alone");
    cluster.migrate("vm1", "a", "b", &["--allow-option", "qtest-log"]);
}

#[test]
fn vm_files_with_errors_name_file_line_and_key() {
    let cluster = Cluster::new();
    let file = cluster.lab.a.directory().join("vm.toml");
    let path = file.display().to_string();
    let run = |text: &str| {
        fs::write(&file, text).unwrap();
        cluster.a.cli(&["vm", "run", &path])
    };
    let cases = [
        ("name = \"web\"\nargs = [\n", 2, "args"),
        ("name = \"web\"\n\nargs = 3\n", 3, "args"),
        ("name = \"web\"\nargs = []\nmemory = 3\n", 3, "memory"),
        ("\nname = \"../web\"\nargs = []\n", 2, "name"),
        ("name = \"web\"\nargs = [\"-daemonize\"]\n", 2, "args"),
        ("name = \"web\"\nargs = [\"-incoming\", \"defer\"]\n", 2, "args"),
        ("name = \"web\"\n", 1, "args"),
    ];
    for (text, line, key) in cases {
        let said = run(text);
        refused(&said, 2, &[&format!("{path}:{line}: "), key]);
    }
    refused(&cluster.a.cli(&["vm", "run", "/nonexistent/vm.toml"]), 2, &["cannot read /nonexistent/vm.toml"]);
    // QEMU itself says what is wrong with its arguments.
    let said = run("name = \"web\"\nargs = [\"-frobnicate\"]\n");
    refused(&said, 1, &["-frobnicate", "args"]);
    let said = run("name = \"web\"\nqemu = \"/nonexistent/qemu\"\nargs = []\n");
    refused(&said, 1, &["/nonexistent/qemu"]);
    assert_eq!(cluster.a.cli(&["vm", "list"]).ok().json(), json!([]));
    let left = common::entries(&cluster.a.directory.join("run/vms"));
    assert!(left.is_empty(), "{left:?} is left");
}

#[test]
fn configurations_with_errors_name_file_line_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.toml");
    let begin = "host = \"a\"\nlisten = \"127.0.0.1:0\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n";
    let start = |text: &str| {
        fs::write(&path, text).unwrap();
        said(Command::new(WHIMBREL).arg("agent").arg("--config").arg(&path))
    };
    let cases = [
        ("[tls]\nplain = 3\n", 6, "tls.plain", "boolean"),
        ("[tls]\nplan = true\n", 6, "tls.plan", "plain"),
        ("[tls]\nca = \"ca.pem\"\n", 5, "tls", "certificate"),
        ("tls.plain = true\n[hosts.b]\naddress = \"nowhere\"\n", 7, "hosts.b.address", "HOST:PORT"),
        ("tls.plain = true\n[hosts.\"../b\"]\naddress = \"b:1\"\n", 6, "hosts", "name"),
        ("tls.plain = true\n[register]\nhost = \"w\"\n", 7, "register.host", "[hosts.w]"),
        ("tls.plain = true\n[limits]\nstreams = 65\n", 7, "limits.streams", "64"),
        ("tls.plain = true\n[timeouts]\nretry_ms = -1\n", 7, "timeouts.retry_ms", "u64"),
    ];
    for (text, line, key, advice) in cases {
        let place = format!("agent.toml, line {line}, key `{key}");
        refused(&start(&format!("{begin}{text}")), 2, &[&place, advice]);
    }
    refused(&start(&format!("{begin}[tls]\nplain = maybe\n")), 2, &["agent.toml, line 6: ", "quoted"]);
    let missing = "[tls]\nca = \"ca.pem\"\ncertificate = \"a.pem\"\nkey = \"a.key\"\n";
    refused(&start(&format!("{begin}{missing}")), 2, &["[tls]", "ca.pem"]);
}

// ---- peers

/// Answers every connection in a way that no agent does, for as long as the test runs.
fn impostor(host: &lab::Host, port: u16, answer: &'static [u8]) -> SocketAddr {
    let address = SocketAddr::from((host.address(), port));
    let listener = host.within(|| TcpListener::bind(address)).unwrap().unwrap();
    thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.write_all(answer);
            // Open for ever: it is not the end of the connection that tells.
            kept.push(stream);
        }
    });
    address
}

#[test]
fn peers_that_cannot_be_trusted() {
    let mut cluster = Cluster::new();
    let (host_a, host_b) = (cluster.lab.a.clone(), cluster.lab.b.clone());
    let pki = |name: &str| lab::Pki::new(&cluster.lab.shared_directory().unwrap().join(name)).unwrap();
    let foreign = pki("foreign").issue("foreign", &[host_b.address().into()]).unwrap();
    let intruder = pki("intruder").issue("intruder", &[host_a.address().into()]).unwrap();
    let to_b = format!("[hosts.b]\naddress = \"{}:7740\"", host_b.address());
    let plain = "[tls]\nplain = true";
    let _foreign = Stranger::start(&host_b, "foreign", 7741, &tls(&foreign), "");
    let _open = Stranger::start(&host_b, "open", 7742, plain, "");
    impostor(&host_b, 7743, b"HTTP/1.1 400 Bad Request\r\n\r\n");
    impostor(&host_b, 7744, b"");
    let peers = [
        ("foreign", 7741),
        ("open", 7742),
        ("web", 7743),
        ("mute", 7744),
        ("nobody", 7749),
        // The second host under a name that it does not have.
        ("other", 7740),
    ];
    configure(&mut cluster.a, |text| {
        let hosts =
            peers.map(|(name, port)| format!("[hosts.{name}]\naddress = \"{}:{port}\"\n", host_b.address()));
        text + &hosts.concat()
    });
    let mut vm = Watched::new(&cluster, "vm1");
    let words: [&[&str]; 6] = [
        &["foreign", "certificate", "not signed by the authority"],
        &["open", "speaks without TLS", "configure both for plain"],
        &["web", "no Whimbrel agent", "check address and port"],
        &["mute", "did not finish the handshake in time"],
        &["cannot reach nobody", "is the agent running there"],
        &["certificate is for", "correct the host's name"],
    ];
    for ((to, _), words) in peers.iter().zip(words) {
        let check = cluster.a.cli(&["migrate", "vm1", "--to", to, "--check"]);
        refused(&check, 1, words);
        assert_eq!(check.json()["kind"], "unavailable", "{check:?}");
        let failed = cluster.a.cli(&["migrate", "vm1", "--to", to]);
        refused(&failed, 1, words);
        assert_eq!(failed.last_json()["outcome"], "aborted", "{failed:?}");
        vm.is_unharmed(&cluster, to);
    }

    // And the other way round: strangers that would move a VM of theirs here.
    let theirs = Guest::start(&host_a, &cluster.environment, &bare("theirs")).unwrap();
    let pid = theirs.pid().to_string();
    let intruder = Stranger::start(&host_a, "intruder", 7741, &tls(&intruder), &to_b);
    let naked = Stranger::start(&host_a, "naked", 7742, plain, &to_b);
    let words: [&[&str]; 2] = [&["certificate", "not signed"], &["demands TLS", "certificates"]];
    for (stranger, words) in [&intruder, &naked].into_iter().zip(words) {
        stranger.cli(&["vm", "adopt", "--pid", &pid]).ok();
        refused(&stranger.cli(&["migrate", "theirs", "--to", "b"]), 1, words);
        assert_eq!(stranger.cli(&["vm", "list"]).ok().json()[0]["state"], "running");
        nothing_is_left(&cluster, "a stranger's migration");
    }
    let log = cluster.b.log();
    assert!(log.contains("a connection was refused") && log.contains("speaks without TLS"), "{log}");

    // No certificate at all, by a client that speaks TLS well.
    let address = format!("{}:7740", host_b.address());
    let tool = host_a
        .command("openssl")
        .args(["s_client", "-connect", &address, "-tls1_3"])
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    if tool.status.code() == Some(127) {
        eprintln!("no openssl here: a client without certificate was not tried");
    } else {
        eventually("a client without a certificate", || {
            let log = cluster.b.log();
            if log.contains("showed no certificate") { Ok(()) } else { Err(log) }
        });
    }
    noise(&host_a, SocketAddr::from((host_b.address(), 7740)));
    vm.is_unharmed(&cluster, "strangers");
    vm.counts();
    vm.moves(&cluster);
}

// ---- noise

/// What no agent sends, whole and cut off. The other side may hang up at any moment, but must not answer.
fn noise(from: &lab::Host, to: SocketAddr) {
    let mut random = vec![0_u8; 64 << 10];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for byte in &mut random {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = state as u8;
    }
    let oversized = [&[0x16, 3, 1, 0xff, 0xff][..], &random].concat();
    let truncated = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    for bytes in [&random[..], &oversized, &truncated, b"GET / HTTP/1.1\r\n\r\n", b"", &[0; 4096]] {
        let mut stream = from.within(|| TcpStream::connect(to)).unwrap().unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        hung_up(stream);
    }
}

/// Waits for the other side to hang up, and returns what it said before.
fn hung_up(mut stream: TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it does not hang up"),
    }
    answer
}

/// A frame of the protocol, with whatever length it claims.
fn frame(kind: u8, claimed: usize, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend((claimed as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn message(value: &Value) -> Vec<u8> {
    let text = value.to_string();
    frame(1, text.len(), text.as_bytes())
}

fn hello(version: u16, purpose: Value) -> Vec<u8> {
    message(&json!({ "oldest": version, "newest": version, "host": "stranger", "purpose": purpose }))
}

/// The first frame that comes back.
#[track_caller]
fn answer(stream: &mut TcpStream, to: &str) -> Value {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut header = [0; 8];
    stream.read_exact(&mut header).unwrap_or_else(|error| panic!("no answer to {to}: {error}"));
    let mut payload = vec![0; u32::from_le_bytes(header[4..].try_into().unwrap()) as usize];
    stream.read_exact(&mut payload).unwrap();
    serde_json::from_slice(&payload).unwrap()
}

#[test]
fn noise_at_the_port_of_an_agent_without_tls() {
    let mut cluster = Cluster::with(&Setup { plain: true, ..Setup::default() });
    let (host_a, host_b) = (cluster.lab.a.clone(), cluster.lab.b.clone());
    let address = SocketAddr::from((host_b.address(), 7740));
    let connect = |first: &[u8]| {
        let mut stream = host_a.within(|| TcpStream::connect(address)).unwrap().unwrap();
        stream.write_all(first).unwrap();
        stream
    };
    let migration = json!({ "vm": "ghost", "epoch": 1 });
    let control = json!({ "for": "control", "migration": migration, "generation": 1 });

    // Somebody who says nothing, before and after the greeting, all the while.
    let _mute = [connect(b""), connect(&hello(1, control.clone())), connect(&frame(1, 100, b"{"))];
    noise(&host_a, address);

    // Other versions, other purposes: a refusal that says why.
    let elsewhere = json!({ "vm": "../../etc", "epoch": 1 });
    let refusals = [
        (hello(9, control.clone()), "install releases"),
        (hello(0, control.clone()), "install releases"),
        (hello(1, json!({ "for": "register" })), "no witness"),
        (
            hello(1, json!({ "for": "data", "migration": migration, "generation": 1, "stream": 0 })),
            "no data stream",
        ),
        (hello(1, json!({ "for": "control", "migration": migration, "generation": 7 })), "not under way"),
    ];
    for (bytes, reason) in refusals {
        let answer = answer(&mut connect(&bytes), reason);
        assert_eq!(answer["answer"], "refused", "{answer}");
        assert!(answer["reason"].as_str().unwrap().contains(reason), "{reason:?} is missing: {answer}");
    }
    // What is no greeting: the agent hangs up, whatever length it is told.
    for bytes in [
        frame(1, 1 << 20, b"{"),
        frame(1, u32::MAX as usize, b"{"),
        frame(9, 2, b"{}"),
        frame(3, 2, b"{}"),
        frame(1, 2, b"{}"),
        hello(1, json!({ "for": "control", "migration": elsewhere, "generation": 1 })),
        vec![1, 0xff, 0, 0, 2, 0, 0, 0, b'{', b'}'],
    ] {
        let told = hung_up(connect(&bytes));
        assert!(!String::from_utf8_lossy(&told).contains("accepted"), "{told:?}");
    }
    // Cut off in the middle.
    let whole = hello(1, control.clone());
    for length in [1, 7, 8, 9, whole.len() - 1] {
        let stream = connect(&whole[..length]);
        stream.shutdown(Shutdown::Write).unwrap();
        hung_up(stream);
    }
    // A good greeting, and then what does not belong there.
    let rubbish = json!({ "type": "propose", "reply_to": "x:1", "streams": 4, "ram": [{ "name": "pc.ram", "bytes": 2097152, "page_bytes": 4096 }], "facts": {}, "description": {}, "check_only": false });
    let endless = json!({ "type": "propose", "reply_to": "x:1", "streams": 65, "ram": [{ "name": "pc.ram", "bytes": u64::MAX, "page_bytes": 4096 }], "facts": {}, "description": {}, "check_only": false });
    for (bytes, word) in [
        (frame(1, (4 << 20) + 1, b"{"), None),
        (frame(2, 4, b"blob"), None),
        (frame(3, 1 << 30, b""), None),
        (message(&json!({ "type": "fly" })), None),
        (message(&json!({ "type": "go", "epoch": 1 })), None),
        (frame(1, 4, b"\xff\xff\xff\xff"), None),
        (message(&rubbish), Some("reject")),
        (message(&endless), None),
    ] {
        let mut stream = connect(&hello(1, control.clone()));
        assert_eq!(answer(&mut stream, "a greeting")["answer"], "accepted");
        let _ = stream.write_all(&bytes);
        if let Some(word) = word {
            let said = answer(&mut stream, word);
            assert_eq!(said["type"], word, "{said}");
            assert!(!said["findings"][0]["advice"].as_str().unwrap().is_empty(), "{said}");
        }
        let told = hung_up(stream);
        assert!(!String::from_utf8_lossy(&told).contains("accept"), "{told:?}");
    }
    nothing_is_left(&cluster, "noise");
    assert_eq!(cluster.b.cli(&["migrations"]).ok().json(), json!([]), "no migration is remembered");
    assert!(!cluster.b.log().contains("panicked"), "{}", cluster.b.log());

    // Seen from the other side: an agent of another version, and one that accepts and says rubbish.
    let newer = message(&json!({ "answer": "accepted", "version": 9, "host": "newer" }));
    let babble =
        [message(&json!({ "answer": "accepted", "version": 1, "host": "babble" })), frame(1, 1 << 30, b"{")]
            .concat();
    let wide = message(&json!({ "answer": "accepted", "version": 1, "host": "b" }));
    let peers: [(&str, u16, Vec<u8>, &[&str]); 3] = [
        ("newer", 7745, newer, &["newer", "install releases"]),
        ("babble", 7746, babble, &["babble", "protocol"]),
        ("wrong", 7747, wide, &["correct the address or the name"]),
    ];
    configure(&mut cluster.a, |text| {
        let hosts = peers
            .clone()
            .map(|(name, port, ..)| format!("[hosts.{name}]\naddress = \"{}:{port}\"\n", host_b.address()));
        text + &hosts.concat()
    });
    let vm = Watched::new(&cluster, "vm1");
    for (name, port, bytes, words) in peers {
        impostor(&host_b, port, bytes.leak());
        refused(&cluster.a.cli(&["migrate", "vm1", "--to", name, "--check"]), 1, words);
        refused(&cluster.a.cli(&["migrate", "vm1", "--to", name]), 1, words);
        vm.is_unharmed(&cluster, name);
    }
    vm.moves(&cluster);
}

// ---- room

/// A small file system in memory, mounted on a directory; its files are lost at the end.
struct Small(PathBuf);

impl Small {
    fn mount(directory: &Path) -> Self {
        fs::create_dir_all(directory).unwrap();
        let words = ["-t", "tmpfs", "-o", "size=4m,nr_inodes=256,mode=700", "tmpfs"];
        assert!(Command::new("mount").args(words).arg(directory).status().unwrap().success());
        Self(directory.to_owned())
    }

    /// Not a byte, and not a file, goes in any more.
    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("full")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        let mut number = 0;
        while fs::File::create(self.0.join(format!("full{number}"))).is_ok() {
            number += 1;
        }
    }

    fn empty(&self) {
        for name in common::entries(&self.0) {
            if name.starts_with("full") {
                fs::remove_file(self.0.join(name)).unwrap();
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn hosts_without_room() {
    let mut cluster = Cluster::new();
    let mut small = Vec::new();
    for (agent, directory) in [("a", "state"), ("b", "state"), ("b", "run")] {
        let agent = cluster.agent_mut(agent);
        agent.kill();
        small.push(Small::mount(&agent.directory.join(directory)));
    }
    cluster.a.start();
    cluster.b.start();
    let mut vm = Watched::new(&cluster, "vm1");
    for (full, words) in [
        // The source cannot journal that it begins.
        (&small[0], ["full", "the VM is untouched"]),
        // Nor the destination that it takes part.
        (&small[1], ["full", "see that the destination's disk is not full"]),
        // No place for the arriving QEMU's sockets.
        (&small[2], ["No space left", "destination"]),
    ] {
        full.fill();
        let failed = cluster.a.cli(&["migrate", "vm1", "--to", "b"]);
        let what = format!("{} is full", full.0.display());
        assert_eq!(failed.code, 1, "{what}: {failed:#?}");
        full.empty();
        refused(&failed, 1, &words);
        vm.is_unharmed(&cluster, &what);
    }
    vm.counts();

    // More memory than the destination has; the guest itself touches little of it.
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    let mib = (kib >> 10).next_multiple_of(1024) + 1024;
    let mut large = bare("large");
    large.memory_mib = mib;
    large.machine = "q35,memory-backend=ram".to_owned();
    large.extra = vec!["-object".to_owned(), format!("memory-backend-ram,id=ram,size={mib}M,reserve=off")];
    let large = Watched::with(&cluster, "large", large);
    let needs = format!("needs {mib} MiB");
    let check = cluster.a.cli(&["migrate", "large", "--to", "b", "--check"]);
    refused(&check, 1, &["memory-short", &needs, "choose another host"]);
    refused(&cluster.a.cli(&["migrate", "large", "--to", "b"]), 1, &[&needs, "choose another host"]);
    large.is_unharmed(&cluster, "no memory");
    vm.moves(&cluster);
}

#[test]
fn qemus_that_are_too_old_or_not_there() {
    let mut cluster = Cluster::new();
    let newest = *cluster.environment.qemu_versions().last().unwrap();
    let vm = Watched::with(&cluster, "vm1", GuestSpec { qemu: newest, ..bare("vm1") });
    let mut cases =
        vec![("/nonexistent/qemu-system-x86_64", ["/nonexistent/qemu-system-x86_64", "[qemu] binaries"])];
    if newest == QemuVersion::Installed {
        eprintln!("one QEMU only: an older one at the destination was not tried");
    } else {
        cases.push(("/usr/bin/qemu-system-x86_64", ["older", "QEMU"]));
    }
    for (binary, words) in cases {
        configure(&mut cluster.b, |text| {
            let ours = |line: &str| {
                if line.starts_with("binaries") {
                    format!("binaries = [{binary:?}]")
                } else {
                    line.to_owned()
                }
            };
            text.lines().map(|line| ours(line) + "\n").collect()
        });
        refused(&cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]), 1, &words);
        refused(&cluster.a.cli(&["migrate", "vm1", "--to", "b"]), 1, &words);
        vm.is_unharmed(&cluster, binary);
    }
}

// ---- VMs and agents that somebody else is at work on

#[test]
fn a_vm_that_is_debugged_or_on_its_way_already() {
    let cluster = Cluster::new();
    let vm = Watched::new(&cluster, "vm1");
    let pid = vm.guest.pid().to_string();
    let traced = |traced: bool| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        if status.contains("TracerPid:\t0\n") == traced { Err(status) } else { Ok(()) }
    };
    match Command::new("strace").args(["-f", "-e", "trace=none", "-o", "/dev/null", "-p", &pid]).spawn() {
        Err(error) => eprintln!("no strace here ({error}): a debugger was not tried"),
        Ok(mut debugger) => {
            eventually("strace attaches", || traced(true));
            let by = format!("debugged by process {}", debugger.id());
            let words = [by.as_str(), "detach the debugger"];
            refused(&cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]), 1, &words);
            refused(&cluster.a.cli(&["migrate", "vm1", "--to", "b"]), 1, &words);
            nothing_is_left(&cluster, "a debugger");
            debugger.kill().unwrap();
            debugger.wait().unwrap();
            eventually("strace is gone", || traced(false));
            vm.is_unharmed(&cluster, "a debugger");
        }
    }

    // Other agents on the same directories are sent away; this one goes on.
    let holder = format!("pid {}", cluster.a.pid());
    let config = cluster.a.config();
    let second = || said(cluster.lab.a.command(WHIMBREL).arg("agent").arg("--config").arg(&config));
    refused(&second(), 1, &["another agent", &holder, "state_dir"]);
    vm.is_unharmed(&cluster, "a second agent");

    // A second migration, and everything else that would disturb the first.
    cluster
        .a
        .cli(&[
            "migrate",
            "vm1",
            "--to",
            "b",
            "--verify",
            "--on-limit",
            "stop",
            "--bandwidth",
            "1MiB",
            "--detach",
        ])
        .ok();
    let cases: &[(&[&str], &[&str])] = &[
        (&["migrate", "vm1", "--to", "b"], &["in a migration already, vm1#", "whimbrel cancel vm1"]),
        (
            &["migrate", "vm1", "--to", "b", "--check"],
            &["in a migration already, vm1#", "whimbrel cancel vm1"],
        ),
        (&["vm", "forget", "vm1"], &["in a migration already, vm1#", "whimbrel cancel vm1"]),
        (&["vm", "adopt", "--pid", &pid, "--as", "other"], &["vm1"]),
    ];
    for (words, expected) in cases {
        refused(&cluster.a.cli(words), 1, expected);
    }
    refused(&second(), 1, &["another agent", &holder]);
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "0"]).ok();
    let watched = cluster.a.cli(&["watch", "vm1"]).ok();
    assert_eq!(watched.last_json()["outcome"], "moved", "the first one went on: {watched:?}");
    assert_eq!(cluster.b.vm("vm1").unwrap()["state"], "running");
}
