//! A Debian guest that migrates with its root disk while it serves: data that its database has confirmed is on the disk
//! that arrived.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::cuts::Cuts;
use common::{Cluster, Setup};
use lab::client::{Client, wait_for_service};
use lab::debian_guest::debian_guest;
use lab::{Guest, Net, vm_address};

const VM: &str = "web";
const DEADLINE: Duration = Duration::from_mins(5);
const PAUSE: Duration = Duration::from_millis(2);
/// Migrations in `make test`; ten times as many in `make soak`.
const MOVES: usize = 5;
/// Seed of the cuts of the link.
const SEED: u64 = 3;

/// ext4, SQLite with a write-ahead log, nginx, and a client whose two connections are never reopened. The link is cut
/// at some moment of each migration, which compares memory and disk by hashes; at the end the guest is killed in the
/// midst of its work, as by a power cut, and programs that had no part in copying check the disk: the file system's
/// journal is replayed, then it has to be sound, the database too, and every note whose receipt was confirmed has to be
/// in it.
#[test]
fn a_database_moves_with_its_disk_and_loses_no_note() {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let spec = debian_guest(&cluster.lab, &cluster.environment, VM, 1).unwrap();
    cluster.lab.b.tap(&Net::new(1).tap).unwrap();
    let guest = Guest::start(&cluster.lab.a, &cluster.environment, &spec).unwrap();
    guest.serial().follow().unwrap().wait_for_text("SERVING").unwrap();
    wait_for_service(&cluster.lab.client, vm_address(1), 80, DEADLINE).unwrap();
    cluster.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
    let service = (vm_address(1), 80).into();
    let client = Client::start(&cluster.lab.client, service, PAUSE).unwrap();
    client.wait_for_answers(50).unwrap();

    let moves = if std::env::var_os("WHIMBREL_SOAK").is_some() { 10 * MOVES } else { MOVES };
    let mut cuts = Cuts::new(SEED);
    let mut hosts = ["a", "b"];
    let mut image = None;
    for _ in 0..moves {
        let report = cluster.migrate_through_any_cut(VM, hosts[0], hosts[1], &["--disks", "copy"], &mut cuts);
        client.wait_for_answers(20).unwrap();
        // The earlier image is not needed any longer.
        let arrived = report["disks"][0]["path"].as_str().unwrap().to_owned();
        if let Some(left) = image.replace(arrived) {
            std::fs::remove_file(left).unwrap();
        }
        hosts.reverse();
    }
    assert!(2 * cuts.made >= moves, "{} of {moves} moves were cut", cuts.made);
    let pid = cluster.agent(hosts[0]).vm(VM).unwrap()["pid"].as_u64().unwrap() as u32;
    // A client is still active when the guest dies; its error is ignored.
    let other = Client::start(&cluster.lab.client, service, PAUSE).unwrap();
    other.wait_for_answers(20).unwrap();
    let seen = client.finish();
    lab::kill_pid(pid).unwrap();
    std::mem::forget(other);
    assert!(seen.page.error.is_none() && seen.notes.error.is_none(), "{seen:?}");
    assert!(seen.notes.answered > moves as u64, "{seen:?}");
    let notes = notes_on(Path::new(&image.unwrap()));
    let is_there = |note: &u64| notes.contains(&format!("note {note}"));
    let lost: Vec<u64> = (0..seen.notes.answered).filter(|note| !is_there(note)).collect();
    assert!(lost.is_empty(), "{lost:?} of {} were lost; {} are there", seen.notes.answered, notes.len());
    assert!(notes.len() as u64 > seen.notes.answered, "those of the other one are there as well");
}

/// Content that the guest has read from its disk is sent with the disk, and memory refers to it; in the guest it is in
/// the page cache as before. Its present QEMU reads nothing from the disk to serve it.
#[test]
fn what_was_cached_is_served_without_a_read() {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let cluster = Cluster::with(&Setup { pool: true, link, ..Setup::default() });
    let spec = debian_guest(&cluster.lab, &cluster.environment, VM, 1).unwrap();
    cluster.lab.b.tap(&Net::new(1).tap).unwrap();
    let guest = Guest::start(&cluster.lab.a, &cluster.environment, &spec).unwrap();
    guest.serial().follow().unwrap().wait_for_text("SERVING").unwrap();
    wait_for_service(&cluster.lab.client, vm_address(1), 80, DEADLINE).unwrap();
    cluster.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
    let client = Client::start(&cluster.lab.client, (vm_address(1), 80).into(), PAUSE).unwrap();
    client.wait_for_answers(50).unwrap();
    let read_before = read_bytes(&cluster, "a");
    assert!(read_before > 0, "it has booted from its disk");

    let report = cluster.migrate(VM, "a", "b", &["--disks", "copy"]);
    client.wait_for_answers(50).unwrap();
    assert_eq!(read_bytes(&cluster, "b"), 0, "{report:#}");
    let rounds = report["rounds"].as_array().unwrap().iter();
    let of_memory = rounds.filter(|round| round["pass"] != 0);
    let referred_bytes =
        of_memory.map(|round| round["reference_pages"].as_u64().unwrap() * 4096).sum::<u64>();
    // Much of it was read for the boot, and evicted since.
    assert!(referred_bytes > read_before / 4, "{referred_bytes} of {read_before}: {report:#}");
    let seen = client.finish();
    assert!(seen.page.error.is_none() && seen.notes.error.is_none(), "{seen:?}");
}

/// Returns the bytes that the present QEMU of a VM has read for its guest.
fn read_bytes(cluster: &Cluster, host: &str) -> u64 {
    let shown = cluster.agent(host).cli(&["vm", "show", VM]).ok().json();
    let mut monitor = lab::Monitor::connect(Path::new(shown["qmp"].as_str().unwrap())).unwrap();
    let stats = monitor.command("query-blockstats", &serde_json::json!({})).unwrap();
    stats.as_array().unwrap().iter().map(|of| of["stats"]["rd_bytes"].as_u64().unwrap()).sum()
}

/// Returns the notes in the database on this disk.
fn notes_on(image: &Path) -> Vec<String> {
    let directory = tempfile::tempdir_in(image.parent().unwrap()).unwrap();
    let raw = directory.path().join("raw");
    let run = |program: &str, words: &[&str], well: &[i32]| {
        let result = Command::new(program).args(words).output().unwrap();
        assert!(
            result.status.code().is_some_and(|code| well.contains(&code)),
            "{program} {words:?}: {result:?}"
        );
    };
    let raw_path = raw.to_str().unwrap();
    run("qemu-img", &["convert", "-O", "raw", image.to_str().unwrap(), raw_path], &[0]);
    // 1: the journal was replayed, as after any power cut.
    run("e2fsck", &["-p", raw_path], &[0, 1]);
    run("e2fsck", &["-f", "-n", raw_path], &[0]);
    for file in ["notes.db", "notes.db-wal"] {
        let dump = format!("dump /var/lib/notes/{file} {}", directory.path().join(file).display());
        run("debugfs", &["-R", &dump, raw_path], &[0]);
    }
    let database = rusqlite::Connection::open(directory.path().join("notes.db")).unwrap();
    let sound: String = database.query_row("pragma integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(sound, "ok");
    let mut notes = database.prepare("select note from notes order by id").unwrap();
    let notes = notes.query_map([], |row| row.get(0)).unwrap();
    notes.map(Result::unwrap).collect()
}
