//! A guest that must survive all attempts, and remains that must not exist afterwards.

use std::fs;
use std::path::PathBuf;

use serde_json::json;

use crate::common::{self, Accel, Cluster, DEADLINE, Guest, GuestSpec};
use crate::eventually;

/// A guest on the first host that counts and checks, with its QEMU's open files before any attempt.
pub(crate) struct WatchedGuest {
    pub guest: Guest,
    pub name: &'static str,
    pub open: Vec<String>,
    pub output: lab::LogFollower,
    pub counted: lab::bare::PassProgress,
}

impl WatchedGuest {
    pub(crate) fn new(cluster: &Cluster, name: &'static str) -> Self {
        Self::with(cluster, name, bare(name))
    }

    pub(crate) fn with(cluster: &Cluster, name: &'static str, spec: GuestSpec) -> Self {
        let guest = Guest::start(&cluster.lab.a, &cluster.environment, &spec).unwrap();
        let output = guest.serial().follow().unwrap();
        let counted = lab::bare::PassProgress::default();
        let mut watched = Self { guest, name, open: Vec::new(), output, counted };
        watched.assert_counts();
        watched.open = open_files(watched.guest.pid());
        cluster.a.cli(&["vm", "adopt", "--pid", &watched.guest.pid().to_string()]).ok();
        watched
    }

    /// Asserts that the guest continues, and finds every page as it wrote it.
    #[track_caller]
    pub(crate) fn assert_counts(&mut self) {
        self.counted.wait(&mut self.output, 1, 1, DEADLINE).unwrap();
        assert_eq!(self.counted.wrong, 0);
    }

    /// Asserts that it runs at its source as before, and that nothing is left of the attempt.
    #[track_caller]
    pub(crate) fn assert_unharmed(&self, cluster: &Cluster, after: &str) {
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        let vm = cluster.a.vm(self.name).unwrap();
        let pid = self.guest.pid();
        assert_eq!((&vm["state"], &vm["pid"]), (&json!("running"), &json!(pid)), "{after}");
        assert_nothing_left(cluster, after);
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

    /// Migrates it completely: nothing is in the way.
    #[track_caller]
    pub(crate) fn migrate_whole(self, cluster: &Cluster) {
        cluster.migrate(self.name, "a", "b", &[]);
        assert!(cluster.a.vm(self.name).is_none());
        assert_eq!(cluster.b.vm(self.name).unwrap()["state"], "running");
    }
}

pub(crate) fn bare(name: &str) -> GuestSpec {
    GuestSpec::bare(name, Accel::Tcg, 1)
}

/// Asserts that nothing is left at the second host: no VM, no QEMU, no file of one.
#[track_caller]
pub(crate) fn assert_nothing_left(cluster: &Cluster, after: &str) {
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

pub(crate) fn is_qemu(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.to_string_lossy().contains("qemu-system"))
}

/// Returns the open files of a process; sockets and pipes without their numbers.
pub(crate) fn open_files(pid: u32) -> Vec<String> {
    let kind = |file: PathBuf| {
        let file = file.to_string_lossy().into_owned();
        file.split_once(":[")
            .filter(|(kind, _)| !kind.contains('/') && *kind != "anon_inode")
            .map_or(file.clone(), |(kind, _)| kind.to_owned())
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).map(kind).collect()
}
