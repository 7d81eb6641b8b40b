//! VMs that another program is at work on.

use std::fs;
use std::process::Command;

use crate::common::{Cluster, Setup, WHIMBREL};
use crate::stranger::result;
use crate::watched::{WatchedGuest, assert_nothing_left};
use crate::{assert_fails, eventually};

#[test]
fn a_vm_that_is_debugged_or_on_its_way_already() {
    let cluster = Cluster::with(&Setup::impatient());
    let vm = WatchedGuest::new(&cluster, "vm1");
    let pid = vm.guest.pid().to_string();
    let traced = |traced: bool| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        if status.contains("TracerPid:\t0\n") == traced { Err(status) } else { Ok(()) }
    };
    match Command::new("strace").args(["-f", "-e", "trace=none", "-o", "/dev/null", "-p", &pid]).spawn() {
        Err(error) => lab::not_tried(format!("a debugger: no strace ({error})")),
        Ok(mut debugger) => {
            eventually("strace attaches", || traced(true));
            let by = format!("debugged by process {}", debugger.id());
            let words = [by.as_str(), "detach the debugger"];
            assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]), 1, &words);
            assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", "b"]), 1, &words);
            assert_nothing_left(&cluster, "a debugger");
            debugger.kill().unwrap();
            debugger.wait().unwrap();
            eventually("strace is gone", || traced(false));
            vm.assert_unharmed(&cluster, "a debugger");
        }
    }

    // Other agents on the same directories fail; this one continues.
    let holder = format!("pid {}", cluster.a.pid());
    let config = cluster.a.config();
    let second = || result(cluster.lab.a.command(WHIMBREL).arg("agent").arg("--config").arg(&config));
    assert_fails(&second(), 1, &["another agent", &holder, "state_dir"]);
    vm.assert_unharmed(&cluster, "a second agent");

    // A second migration, and all other requests that would disturb the first.
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
            "--compress",
            "none",
            "--detach",
        ])
        .ok();
    let cases: &[(&[&str], &[&str])] = &[
        (&["migrate", "vm1", "--to", "b"], &["in a migration, vm1#", "whimbrel cancel vm1"]),
        (&["migrate", "vm1", "--to", "b", "--check"], &["in a migration, vm1#", "whimbrel cancel vm1"]),
        (&["vm", "forget", "vm1"], &["in a migration, vm1#", "whimbrel cancel vm1"]),
        (&["vm", "adopt", "--pid", &pid, "--as", "other"], &["vm1"]),
    ];
    for (words, expected) in cases {
        assert_fails(&cluster.a.cli(words), 1, expected);
    }
    assert_fails(&second(), 1, &["another agent", &holder]);
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "0"]).ok();
    let watched = cluster.a.cli(&["watch", "vm1"]).ok();
    assert_eq!(watched.last_json()["outcome"], "moved", "the first one went on: {watched:?}");
    assert_eq!(cluster.b.vm("vm1").unwrap()["state"], "running");
}
