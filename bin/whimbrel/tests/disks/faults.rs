//! Storage that fails or stalls, agents that die, hosts that are rebooted: the guest stays unharmed, and nothing is
//! left of a disk that did not arrive.

use std::fs;
use std::process::Command;

use lab::{Guest, Host};
use serde_json::json;

use crate::common::{Cluster, QemuVersion, entries, has_event, until};
use crate::{assert_guest_works, pool, report_of_failed, with_disk};

/// Returns the processes of a host that run a program with this in its name.
fn processes(host: &Host, program: &str) -> Vec<u32> {
    let is_it = |pid: &u32| {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        exe.to_string_lossy().contains(program)
    };
    host.processes().unwrap().into_iter().filter(is_it).collect()
}

fn signal(signal: &str, pids: &[u32]) {
    assert!(!pids.is_empty(), "nobody is there for {signal}");
    let pids = pids.iter().map(u32::to_string);
    assert!(Command::new("kill").arg(signal).args(pids).status().unwrap().success());
}

/// Starts a migration that has begun to copy, and will not end soon.
fn begin(cluster: &Cluster) -> std::process::Child {
    let migration = cluster.a.begin(&["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "2M"]);
    cluster.wait_for_sent(1 << 20);
    assert_eq!(entries(&pool(cluster, "b")).len(), 1, "an image is being written");
    migration
}

/// Asserts that QEMU records no writes and serves no disk.
#[track_caller]
fn assert_no_recording(guest: &Guest) {
    let mut monitor = guest.monitor().unwrap();
    assert_eq!(monitor.command("query-block-exports", &json!({})).unwrap(), json!([]));
    let nodes = monitor.command("query-named-block-nodes", &json!({ "flat": true })).unwrap();
    assert!(!nodes.to_string().contains("dirty-bitmaps"), "{nodes:#}");
}

/// Without a registry. The copy is lost with the host's memory; the image is on its disk, and is not needed.
#[test]
fn a_destination_that_is_booted_anew_leaves_no_image() {
    let (mut cluster, guest, _image) = with_disk(QemuVersion::Installed, "qcow2");
    let migration = begin(&cluster);
    cluster.b.kill();
    // Processes that an agent leaves end soon by themselves, and with the host at once.
    until("nothing of it runs", || {
        let left = ["qemu-system", "qemu-nbd"].map(|program| processes(&cluster.lab.b, program)).concat();
        for pid in &left {
            drop(Command::new("kill").args(["-KILL", &pid.to_string()]).status());
        }
        left.is_empty()
    });
    let boot = cluster.b.directory.join("boot_id");
    fs::write(&boot, "00000000-1111-2222-3333-444444444444\n").unwrap();
    let instead = format!("mount --bind {} /proc/sys/kernel/random/boot_id; exec \"$@\"", boot.display());
    cluster.b.starter = ["unshare", "--mount", "sh", "-ec", &instead, "sh"].map(str::to_owned).to_vec();
    cluster.b.start();
    report_of_failed(&cluster, migration);
    assert_eq!(entries(&pool(&cluster, "b")), [""; 0], "{}", cluster.b.log());
    assert_guest_works(guest.serial());
    assert_no_recording(&guest);
    cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    cluster.assert_guest_whole("b", "vm1");
}

/// The guest keeps running without an agent, and the next agent cleans up on both sides.
#[test]
fn a_source_agent_that_dies_leaves_no_recording_and_no_image() {
    let (mut cluster, guest, _image) = with_disk(QemuVersion::Installed, "raw");
    lose_the_source_agent(&mut cluster, &guest);
    cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
    cluster.assert_guest_whole("b", "vm1");
}

/// Kills the source's agent while a disk is copied.
pub(crate) fn lose_the_source_agent(cluster: &mut Cluster, guest: &Guest) {
    let migration = begin(cluster);
    cluster.a.kill();
    assert_guest_works(guest.serial());
    cluster.a.start();
    drop(migration.wait_with_output());
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_no_recording(guest);
    assert_eq!(entries(&pool(cluster, "b")), [""; 0], "{}", cluster.b.log());
    assert_guest_works(guest.serial());
}

/// Storage that neither completes a write nor fails it: the migration ends after `stall_ms`.
#[test]
fn storage_that_stalls_ends_the_migration() {
    let (mut cluster, guest, _image) = with_disk(QemuVersion::Installed, "raw");
    let config = fs::read_to_string(cluster.b.config()).unwrap();
    fs::write(cluster.b.config(), config.replace("[timeouts]\n", "[timeouts]\nstall_ms = 10000\n")).unwrap();
    cluster.b.kill();
    cluster.b.start();
    let migration = begin(&cluster);
    signal("-STOP", &processes(&cluster.lab.b, "qemu-nbd"));
    assert_guest_works(guest.serial());
    let report = report_of_failed(&cluster, migration);
    let reason = report["reason"].as_str().unwrap();
    assert!(reason.contains("cannot write"), "{reason}\n{}", cluster.b.log());
    assert!(!has_event(&report, "stopped"), "the guest stood still for it: {report:#}");
    assert_eq!(processes(&cluster.lab.b, "qemu-nbd"), [0; 0], "its server is gone");
    assert_eq!(entries(&pool(&cluster, "b")), [""; 0], "{}", cluster.b.log());
    assert_no_recording(&guest);
    assert_guest_works(guest.serial());
}

/// Configures a `qemu-nbd` whose image fails like a dying disk: all requests of one kind.
fn with_failing_images(cluster: &mut Cluster, fails: &str) {
    let directory = cluster.b.directory.join("bin");
    fs::create_dir_all(&directory).unwrap();
    let program = directory.join("qemu-nbd");
    let real = Command::new("sh").args(["-c", "command -v qemu-nbd"]).output().unwrap();
    let real = String::from_utf8(real.stdout).unwrap();
    // Of its arguments only the format is changed; the image is the last one.
    let text = format!(
        r#"#!/bin/sh
words=
while [ $# -gt 1 ]; do
    case $1 in
    --format) format=$2; shift ;;
    *) words="$words $1" ;;
    esac
    shift
done
exec {} $words --image-opts "driver=$format,file.driver=blkdebug,file.image.driver=file,file.image.filename=$1,file.inject-error.0.event=none,file.inject-error.0.iotype={fails},file.inject-error.0.errno=5"
"#,
        real.trim()
    );
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("PATH={}:{}", directory.display(), std::env::var("PATH").unwrap());
    cluster.b.kill();
    cluster.b.starter = vec!["env".to_owned(), path];
    cluster.b.start();
}

/// Data that does not reach stable storage is not handed over, and the guest is unharmed.
#[test]
fn an_image_with_failed_writes_or_flushes_is_not_handed_over() {
    for fails in ["write", "flush"] {
        let (mut cluster, guest, _image) = with_disk(QemuVersion::Installed, "raw");
        with_failing_images(&mut cluster, fails);
        // So slowly that a flush has been tried long before the end.
        let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "24M"];
        let failed = cluster.a.cli(&[&words[..], &["--on-limit", "stop"]].concat());
        assert_eq!(failed.code, 1, "{fails}: {failed:?}");
        let report = cluster.a.cli(&["report", "vm1"]).ok().json();
        let reason = report["reason"].as_str().unwrap();
        assert!(reason.contains("Input/output error"), "{fails}: {reason}\n{}", cluster.b.log());
        assert!(!has_event(&report, "stopped"), "{fails}: the guest stood still for it: {report:#}");
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        assert_eq!(entries(&pool(&cluster, "b")), [""; 0], "{}", cluster.b.log());
        assert_guest_works(guest.serial());
    }
}
