//! A guest that runs and writes is moved between two hosts. Every move compares all of memory by a path of its own
//! (`--verify`), and the guest itself checks every page that it wrote. Needs root.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{Cluster, GuestSpec, Load};

/// A guest that writes while it is moved.
fn busy() -> Load {
    Load { fill_mib: 128, wss_mib: 32, rate_mib_per_s: 40, ..Load::default() }
}

#[track_caller]
fn verified(report: &serde_json::Value) {
    assert_eq!(report["outcome"], "moved", "{report:#}");
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    let ram: u64 =
        report["ram_blocks"].as_array().unwrap().iter().map(|block| block["bytes"].as_u64().unwrap()).sum();
    assert_eq!(report["verification"]["compared_bytes"], ram, "all of memory was compared: {report:#}");
}

#[test]
fn a_writing_guest_moves_and_misses_nothing() {
    let cluster = Cluster::new();
    let guest = cluster.guest(&GuestSpec::tiny("vm1", busy()));
    cluster.a.cli(&["migrate", "vm1", "--to", "b", "--verify"]).ok();
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    verified(&report);
    drop(guest);
    let serial = cluster.serial("b", "vm1");
    let check = serial.check().unwrap();
    assert!(check.ok && check.wrong == 0, "{check:?}");
    assert!(cluster.a.vm("vm1").is_none());
}
