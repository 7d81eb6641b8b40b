//! A PostgreSQL that migrates with its root disk while transactions are committed, beside a program that writes a file
//! and verifies it: no confirmed data is lost.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::path::PathBuf;

use common::cuts::Cuts;
use common::{Cluster, Setup};
use lab::database::{Committer, database_guest, database_guest_again, rows};
use lab::{Guest, Net, vm_address};

const VM: &str = "db";
/// Migrations in `make test`; ten times as many in `make soak`.
const MOVES: usize = 5;
/// Seed of the cuts of the link.
const SEED: u64 = 3;

/// The link is cut at some moment of each migration, which compares memory and disk by hashes. At the end the guest is
/// killed in the midst of its work, as by a power cut, and a new one is started from its disk: PostgreSQL replays its
/// log, and has all confirmed rows.
#[test]
fn a_database_moves_with_its_disk_and_loses_no_transaction() {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let spec = database_guest(&cluster.lab, &cluster.environment, VM, 1, true).unwrap();
    cluster.lab.b.tap(&Net::new(1).tap).unwrap();
    let guest = Guest::start(&cluster.lab.a, &cluster.environment, &spec).unwrap();
    guest.serial().follow().unwrap().wait_for_text("SERVING").unwrap();
    cluster.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
    let client = Committer::start(&cluster.lab.client, vm_address(1), 1).unwrap();
    client.wait_for_commits(50).unwrap();

    let moves = if std::env::var_os("WHIMBREL_SOAK").is_some() { 10 * MOVES } else { MOVES };
    let mut cuts = Cuts::new(SEED);
    let mut hosts = ["a", "b"];
    let mut image: Option<PathBuf> = None;
    for _ in 0..moves {
        let report = cluster.migrate_through_any_cut(VM, hosts[0], hosts[1], &["--disks", "copy"], &mut cuts);
        client.wait_for_commits(20).unwrap();
        let verified = cluster.serial(hosts[1], VM).follow_from_now().unwrap();
        wait_verified(verified);
        // The earlier image is not needed any longer.
        let arrived = PathBuf::from(report["disks"][0]["path"].as_str().unwrap());
        if let Some(left) = image.replace(arrived) {
            std::fs::remove_file(left).unwrap();
        }
        hosts.reverse();
    }
    assert!(2 * cuts.made >= moves, "{} of {moves} moves were cut", cuts.made);
    // A client still commits when the guest dies; its error is ignored.
    let other = Committer::start(&cluster.lab.client, vm_address(1), 2).unwrap();
    other.wait_for_commits(20).unwrap();
    let committed = client.finish();
    let pid = cluster.agent(hosts[0]).vm(VM).unwrap()["pid"].as_u64().unwrap() as u32;
    lab::kill_pid(pid).unwrap();
    std::mem::forget(other);
    assert_eq!(committed.error, None);
    assert!(committed.rows >= 50 + 20 * moves as u64, "{committed:?}");

    // Its earlier host has a tap of its name, which is free now.
    let second = database_guest_again(&cluster.environment, "again", 1, &image.unwrap()).unwrap();
    let host = if hosts[0] == "a" { &cluster.lab.a } else { &cluster.lab.b };
    let guest = Guest::start(host, &cluster.environment, &second).unwrap();
    guest.serial().follow().unwrap().wait_for_text("SERVING").unwrap();
    let there = rows(&cluster.lab.client, vm_address(1), 1).unwrap();
    let lost: Vec<u64> = (0..committed.rows).filter(|row| !there.contains(row)).collect();
    assert!(lost.is_empty(), "{lost:?} of {} were lost", committed.rows);
    assert!(rows(&cluster.lab.client, vm_address(1), 2).unwrap().len() >= 20);
}

/// Waits until the program in the guest has once more verified all that it had written.
fn wait_verified(mut console: lab::LogFollower) {
    let wanted = |line: &str| line.contains("VERIFIED") || line.contains("FIO FAILED");
    let verdict = console.wait_for("the file verified", lab::DEADLINE, wanted);
    assert!(verdict.as_ref().is_ok_and(|line| line.contains("VERIFIED")), "{verdict:?}");
}
