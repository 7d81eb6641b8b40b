//! Processors that are slowed down below systemd, which has all control groups in one tree of version 2.

use std::cell::RefCell;
use std::process::Child;

use lab::rack::{Rack, RackHost};
use lab::{Boot, GuestSpec, until};

use crate::support::{VM, assert_moved, assert_whole, begin, kvm_guest, rack, two, wait_settled};
use crate::tried::Trial;

/// A guest that writes faster than pages are sent, also on an emulated processor that it shares with the agent.
fn fast_guest() -> GuestSpec {
    let mut guest = GuestSpec { vcpus: 2, memory_mib: 160, ..kvm_guest() };
    if let Boot::Tiny(load) = &mut guest.boot {
        (load.fill_mib, load.wss_mib, load.rate_mib_per_s) = (8, 24, 100);
    }
    guest
}

/// Returns the limits of the agent's control groups on a host.
fn limits(host: &RackHost) -> Vec<String> {
    let show =
        "find /sys/fs/cgroup -type d -name 'whimbrel-cpu-*' -exec cat '{}/cpu.max' ';' 2>/dev/null || true";
    host.shell(show).unwrap().lines().map(str::to_owned).collect()
}

/// Waits until the guest of a migration that has just begun is slowed down.
fn wait_until_slow(rack: &Rack, host: &RackHost, migration: &mut Child) {
    let migration = RefCell::new(migration);
    until("the guest is slowed down", || {
        assert!(
            migration.borrow_mut().try_wait().unwrap().is_none(),
            "the migration has ended before: {:#}",
            rack.whimbrel(host, &["report", VM]).json()
        );
        limits(host).iter().any(|limit| !limit.starts_with("max"))
    });
}

const SLOWLY: [&str; 8] =
    ["--throttle-cpu", "drain", "--bandwidth", "1M", "--compress", "none", "--deltas", "never"];

/// In an administrator's unit, whose guest leaves; and in the scope of a guest that has arrived, and stays.
#[test]
#[ignore = "make rack"]
fn processors_are_slowed_down_below_systemd() {
    let Some(rack) = rack(&two()) else { return };
    let trial =
        Trial::begin(&rack, "processors slowed down by cgroup v2, in a unit and in a scope of systemd");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let _serial = rack.start_guest(alpha, &fast_guest()).unwrap();
    alpha.run(&["systemctl", "set-property", "--runtime", "vm-vm1.service", "CPUWeight=100"]).unwrap();
    let mut migration = begin(alpha, beta, &SLOWLY);
    wait_until_slow(&rack, alpha, &mut migration);
    let output = migration.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = rack.whimbrel(alpha, &["report", VM]).ok().json();
    assert_moved(&report);
    let events = report["events"].as_array().unwrap();
    assert!(events.iter().any(|event| event["what"] == "cpu-throttled"), "{report:#}");
    assert_eq!(limits(alpha), [""; 0]);
    assert_whole(&rack, beta);

    let mut migration = begin(beta, alpha, &SLOWLY);
    wait_until_slow(&rack, beta, &mut migration);
    rack.whimbrel(beta, &["cancel", VM]).ok();
    let output = migration.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    wait_settled(&rack, beta);
    assert_eq!(limits(beta), [""; 0]);
    assert_whole(&rack, beta);
    trial.works();
}
