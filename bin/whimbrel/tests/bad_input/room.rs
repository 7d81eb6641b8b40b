//! Hosts without room, and QEMUs that are too old.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::assert_fails;
use crate::common::{self, Cluster, GuestSpec, QemuVersion, Setup};
use crate::stranger::configure;
use crate::watched::{WatchedGuest, bare};

/// A small file system in memory, mounted on a directory; its files are lost at the end.
struct Small(PathBuf);

impl Small {
    fn mount(directory: &Path) -> Self {
        fs::create_dir_all(directory).unwrap();
        let words = ["-t", "tmpfs", "-o", "size=4m,nr_inodes=256,mode=700", "tmpfs"];
        assert!(Command::new("mount").args(words).arg(directory).status().unwrap().success());
        Self(directory.to_owned())
    }

    /// Fills it, so that no further byte and no further file fits.
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
    let mut cluster = Cluster::with(&Setup::impatient());
    let mut small = Vec::new();
    for (agent, directory) in [("a", "state"), ("b", "state"), ("b", "run")] {
        let agent = cluster.agent_mut(agent);
        agent.kill();
        small.push(Small::mount(&agent.directory.join(directory)));
    }
    cluster.a.start();
    cluster.b.start();
    let mut vm = WatchedGuest::new(&cluster, "vm1");
    for (full, words) in [
        // The source cannot journal the begin.
        (&small[0], ["full", "the VM is untouched"]),
        // Nor can the destination journal its part.
        (&small[1], ["full", "make sure that the destination's disk is not full"]),
        // No space for the arriving QEMU's sockets.
        (&small[2], ["No space left", "destination"]),
    ] {
        full.fill();
        let failed = cluster.a.cli(&["migrate", "vm1", "--to", "b"]);
        let what = format!("{} is full", full.0.display());
        assert_eq!(failed.code, 1, "{what}: {failed:#?}");
        full.empty();
        assert_fails(&failed, 1, &words);
        vm.assert_unharmed(&cluster, &what);
    }
    vm.assert_counts();

    // More memory than the destination has; the guest itself touches little of it.
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    let mib = (kib >> 10).next_multiple_of(1024) + 1024;
    let mut large = bare("large");
    large.memory_mib = mib;
    large.machine = "q35,memory-backend=ram".to_owned();
    large.extra = vec!["-object".to_owned(), format!("memory-backend-ram,id=ram,size={mib}M,reserve=off")];
    let large = WatchedGuest::with(&cluster, "large", large);
    // QEMU itself needs some, too.
    let needs = format!("need {} MiB", mib + 256);
    let check = cluster.a.cli(&["migrate", "large", "--to", "b", "--check"]);
    assert_fails(&check, 1, &["memory-short", &needs, "choose another host"]);
    assert_fails(&cluster.a.cli(&["migrate", "large", "--to", "b"]), 1, &[&needs, "choose another host"]);
    large.assert_unharmed(&cluster, "no memory");
    vm.migrate_whole(&cluster);
}

#[test]
fn qemus_that_are_too_old_or_not_there() {
    let mut cluster = Cluster::with(&Setup::impatient());
    let newest = *cluster.environment.qemu_versions().last().unwrap();
    let vm = WatchedGuest::with(&cluster, "vm1", GuestSpec { qemu: newest, ..bare("vm1") });
    let mut cases =
        vec![("/nonexistent/qemu-system-x86_64", ["/nonexistent/qemu-system-x86_64", "[qemu] binaries"])];
    if newest == QemuVersion::Installed {
        lab::not_tried("an older QEMU at the destination: there is one only");
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
        assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]), 1, &words);
        assert_fails(&cluster.a.cli(&["migrate", "vm1", "--to", "b"]), 1, &words);
        vm.assert_unharmed(&cluster, binary);
    }
}
