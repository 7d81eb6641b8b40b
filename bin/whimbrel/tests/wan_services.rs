//! Connections of usual programs go on while their VM moves to a network far away, and back: an SSH session, a download, a
//! WebSocket, datagrams, and a transaction of PostgreSQL. Needs root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use common::two_networks::SOON;
use common::{Cluster, DEADLINE, Guest, GuestSpec, Setup};
use lab::client::wait_for_service;
use lab::database::{Committer, OpenTransaction, database_guest, rows};
use lab::debian_guest::debian_guest;
use lab::sessions::{Datagrams, Download, SshSession, WebSocket};
use lab::two_networks::{NEW_ADDRESS, separate_far};
use lab::wan::ocean;
use lab::{Emulator, Host, Link, Net, vm_address};

const VM: &str = "vm1";
/// Moves in `make test`; with `WHIMBREL_SOAK` there are [`MANY_MOVES`].
const MOVES: usize = 3;
const MANY_MOVES: usize = 50;
/// Images that a VM has left and that are kept: a VM that comes back finds its content there.
const KEPT_IMAGES: usize = 2;
/// Ports of the Debian guest: SSH, HTTP, the WebSocket.
const SERVICES: [u16; 3] = [22, 80, 8080];

/// Two networks with 50 Mb/s and 80 ms between them, and a client that is as far from the second one.
struct Ocean {
    cluster: Cluster,
    _ways: [Emulator; 2],
    /// The host where the VM is, and the other one.
    hosts: [&'static str; 2],
    images: Vec<PathBuf>,
}

impl Ocean {
    /// Makes both networks; each host has the image from which the VM's disk is made.
    fn with_template(image: impl Fn(&Cluster) -> PathBuf) -> Self {
        let way = ocean();
        let usual = Setup::default();
        let extra = usual.extra.clone() + SOON;
        // A router that drops no packets.
        let settings = lab::Settings { queue_bytes: lab::Settings::default().queue_bytes, ..way.settings() };
        let link = Link::Emulated(settings);
        let mut cluster = Cluster::with(&Setup { link, pool: true, extra, ..usual });
        let ways = separate_far(&cluster.lab, way.delay()).unwrap();
        let image = fs::canonicalize(image(&cluster)).unwrap();
        for name in ["a", "b"] {
            let host = if name == "a" { &cluster.lab.a } else { &cluster.lab.b };
            symlink(&image, host.directory().join("templates/template.qcow2")).unwrap();
            // Templates are read when an agent starts.
            cluster.agent_mut(name).kill();
            cluster.agent_mut(name).start();
        }
        Self { cluster, _ways: ways, hosts: ["a", "b"], images: Vec::new() }
    }

    fn boot(&self, spec: &GuestSpec) -> Guest {
        self.cluster.lab.b.tap(&Net::new(1).tap).unwrap();
        let guest = Guest::start(&self.cluster.lab.a, &self.cluster.environment, spec).unwrap();
        guest.serial().follow().unwrap().wait_for_text("SERVING").unwrap();
        self.cluster.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
        guest
    }

    fn client(&self) -> &Host {
        &self.cluster.lab.client
    }

    /// Moves the VM with its disk to the other network.
    fn cross(&mut self) {
        let [from, to] = self.hosts;
        let new_address = format!("{}={NEW_ADDRESS}", vm_address(1));
        let mut words = vec!["--disks", "copy"];
        if to == "b" {
            words.extend(["--new-address", &new_address]);
        }
        let report = self.cluster.migrate(VM, from, to, &words);
        assert_eq!(report["redirection"]["tunnel"], "VXLAN", "{report:#}");
        let seconds = |us: &serde_json::Value| us.as_f64().unwrap() / 1e6;
        eprintln!(
            "{from} to {to}: {:.1} s, {:.1} MB, stopped for {:.2} s: {}",
            seconds(&report["total_us"]),
            seconds(&report["sent_bytes"]),
            seconds(&report["downtime"]["total_us"]),
            report["downtime"],
        );
        self.images.push(report["disks"][0]["path"].as_str().unwrap().into());
        // The present one is the last.
        if self.images.len() > KEPT_IMAGES + 1 {
            fs::remove_file(self.images.remove(0)).unwrap();
        }
        self.hosts.reverse();
    }
}

fn moves() -> usize {
    if std::env::var_os("WHIMBREL_SOAK").is_some() { MANY_MOVES } else { MOVES }
}

/// Returns the number of connections of a host that ended with a reset.
fn resets(host: &Host) -> u64 {
    let text = host.run(&["cat", "/proc/net/snmp"]).unwrap();
    let mut tcp = text.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (names, values) = (tcp.next().unwrap(), tcp.next().unwrap());
    let mut fields = names.split_whitespace().zip(values.split_whitespace());
    fields.find_map(|(name, value)| (name == "EstabResets").then(|| value.parse().unwrap())).unwrap()
}

#[test]
fn sessions_of_a_server_go_on_far_away_and_back() {
    let mut ocean = Ocean::with_template(|cluster| cluster.environment.debian_disk().unwrap());
    let environment = ocean.cluster.environment.clone();
    let spec = debian_guest(&ocean.cluster.lab, &environment, VM, 1).unwrap();
    let _guest = ocean.boot(&spec);
    for port in SERVICES {
        wait_for_service(ocean.client(), vm_address(1), port, DEADLINE).unwrap();
    }
    let client = ocean.client().clone();
    let ssh = SshSession::start(&client, &environment, vm_address(1)).unwrap();
    let download = Download::start(&client, &environment, vm_address(1)).unwrap();
    let web_socket = WebSocket::start(&client, vm_address(1)).unwrap();
    let datagrams = Datagrams::start(&client, vm_address(1)).unwrap();
    let go_on = || {
        ssh.wait_for(20).unwrap();
        download.wait_for(20).unwrap();
        web_socket.wait_for(5).unwrap();
        datagrams.wait_for(50).unwrap();
    };
    go_on();
    let before = resets(&client);
    for _ in 0..moves() {
        ocean.cross();
        go_on();
    }
    let (ssh, download) = (ssh.finish(), download.finish());
    let (web_socket, datagrams) = (web_socket.finish(), datagrams.finish());
    eprintln!("{ssh:?}\n{download:?}\n{web_socket:?}\n{datagrams:?}");
    assert_eq!(
        [ssh.error, download.connection.error, web_socket.error, datagrams.answers.error],
        [const { None }; 4]
    );
    assert!(download.files > 0);
    // Some datagrams are lost (docs/operations/wan.md, limits); their flow goes on, and none comes twice.
    assert_eq!(datagrams.repeated, 0, "of {}", datagrams.sent);
    assert_eq!(resets(&client), before);
}

#[test]
fn a_transaction_goes_on_far_away_and_back() {
    let mut ocean = Ocean::with_template(|cluster| cluster.environment.database_disk().unwrap());
    let environment = ocean.cluster.environment.clone();
    let spec = database_guest(&ocean.cluster.lab, &environment, VM, 1, false).unwrap();
    let _guest = ocean.boot(&spec);
    let client = ocean.client().clone();
    wait_for_service(&client, vm_address(1), 5432, DEADLINE).unwrap();
    let mut transaction = OpenTransaction::begin(&client, vm_address(1), 1).unwrap();
    let committer = Committer::start(&client, vm_address(1), 2).unwrap();
    transaction.insert().unwrap();
    committer.wait_for_commits(5).unwrap();
    let before = resets(&client);
    for _ in 0..moves() {
        ocean.cross();
        transaction.insert().unwrap();
        committer.wait_for_commits(5).unwrap();
    }
    assert_eq!(resets(&client), before);
    assert_eq!(rows(&client, vm_address(1), 1).unwrap().len(), 0, "it is not committed");
    let inserted = transaction.commit().unwrap();
    assert_eq!(inserted, moves() as u64 + 1);
    let committed = committer.finish();
    assert_eq!(committed.error, None);
    // PostgreSQL compares the checksum of each page that it reads.
    for (number, expected) in [(1, inserted), (2, committed.rows)] {
        let found = rows(&client, vm_address(1), number).unwrap();
        assert!((0..expected).all(|row| found.contains(&row)), "{found:?} of {expected}");
    }
}
