//! Free page hints: `whimbrel-guest` in the guest reports memory that need not be sent. Every migration compares all
//! other memory by a path of its own (`--verify`), and the guest itself checks every page that it filled.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc;

use common::{Boot, Cluster, DEADLINE, Device, Disk, Guest, GuestSpec, Load, QemuVersion, Ram, Setup, until};
use lab::disk;
use serde_json::{Value, json};

const PAGES_OF_MIB: u64 = 256;

/// Returns a guest with much free memory that is not zero.
fn guest_with_free_memory(version: QemuVersion) -> GuestSpec {
    let load = Load { fill_mib: 48, wss_mib: 8, rate_mib_per_s: 20, litter_mib: 64, ..Load::default() };
    let mut spec = GuestSpec { qemu: version, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::GuestPort);
    spec
}

fn of_rounds(report: &Value, name: &str) -> u64 {
    report["rounds"].as_array().unwrap().iter().map(|round| round[name].as_u64().unwrap()).sum()
}

fn hint_stats(report: &Value, name: &str) -> u64 {
    report["free_page_hints"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

/// Waits until the program in the guest has opened its port.
fn wait_for_guest_program(guest: &Guest) {
    until("somebody in the guest listens", || {
        let chardevs = guest.monitor().unwrap().command("query-chardev", &json!({})).unwrap();
        let port = chardevs.as_array().unwrap().iter().find(|one| one["label"] == "guest0").unwrap().clone();
        port["frontend-open"] == true
    });
}

#[test]
fn what_is_free_is_not_sent() {
    for version in [QemuVersion::Installed, QemuVersion::Newer] {
        let cluster = Cluster::new();
        let guest = cluster.guest(&guest_with_free_memory(version));
        wait_for_guest_program(&guest);
        // So slow that the guest has answered long before all is sent.
        let report = cluster.migrate("vm1", "a", "b", &["--bandwidth", "15Mi", "--compress", "none"]);
        let left_out = of_rounds(&report, "hinted_pages");
        assert!(left_out > 48 * PAGES_OF_MIB, "{report:#}");
        assert!(
            hint_stats(&report, "answers") > 0 && report["free_page_hints"]["notes"] == json!([]),
            "{report:#}"
        );
        cluster.assert_guest_whole("b", "vm1");
        // The program answers there as well, and free pages are in use again: the guest keeps working.
        let report = cluster.migrate("vm1", "b", "a", &["--bandwidth", "40Mi", "--free-page-hints", "none"]);
        assert_eq!(
            (of_rounds(&report, "hinted_pages"), &report["free_page_hints"]),
            (0, &Value::Null),
            "{report:#}"
        );
        cluster.assert_guest_whole("a", "vm1");
        let report = cluster.migrate("vm1", "a", "b", &["--bandwidth", "40Mi"]);
        assert!(hint_stats(&report, "answers") > 0, "{report:#}");
        cluster.assert_guest_whole("b", "vm1");
    }
}

/// Memory that was free, and that the guest uses during the migration: all of its writes are sent, although it never
/// reports that the memory is not free any longer.
#[test]
fn what_is_in_use_again_is_sent() {
    let link = lab::Link::Limited { rate_bytes_per_s: 10 << 20 };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() });
    let guest = cluster.guest(&guest_with_free_memory(QemuVersion::Newer));
    wait_for_guest_program(&guest);
    let has_answered = forward_first_answer(&guest.directory().join("guest.sock"));
    let words = ["migrate", "vm1", "--to", "b", "--verify", "--on-limit", "stop", "--compress", "none"];
    let migration = cluster.a.begin(&words);
    assert_eq!(has_answered.recv_timeout(DEADLINE), Ok(()), "{}", cluster.a.log());
    guest.serial().set("fill=88").unwrap();
    cluster.wait_for_progress(|progress| progress["phase"] == "pre-copy");
    let output = migration.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    assert!(of_rounds(&report, "hinted_pages") > 0 && hint_stats(&report, "answers") == 1, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// Forwards the guest's answer to the first request, and notifies the receiver. Forwards no other request.
fn forward_first_answer(socket: &Path) -> mpsc::Receiver<()> {
    let of_qemu = socket.with_extension("qemu");
    std::fs::rename(socket, &of_qemu).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    let (notify, reported) = mpsc::channel();
    std::thread::spawn(move || {
        let (agent, _) = listener.accept().unwrap();
        let guest = UnixStream::connect(of_qemu).unwrap();
        let mut question = String::new();
        BufReader::new(&agent).read_line(&mut question).unwrap();
        (&guest).write_all(question.as_bytes()).unwrap();
        for line in BufReader::new(&guest).lines() {
            let line = line.unwrap();
            writeln!(&agent, "{line}").unwrap();
            if line.starts_with("end ") {
                break;
            }
        }
        notify.send(()).unwrap();
        // Until it hangs up.
        let _ = std::io::copy(&mut &agent, &mut std::io::sink());
    });
    reported
}

/// Below and above 4 GiB, in several blocks, in shared memory: only reported pages are left out, or the guest's check
/// would find zeros.
#[test]
fn hints_apply_to_blocks_nodes_and_shared_memory() {
    let spec = || guest_with_free_memory(QemuVersion::Newer);
    let large = GuestSpec { memory_mib: 3584, ..spec() };
    let nodes = GuestSpec { numa_nodes: 2, memory_mib: 256, ..spec() };
    let shared = GuestSpec { ram: Ram::Memfd, ..spec() };
    for spec in [large, nodes, shared] {
        let cluster = Cluster::new();
        let guest = cluster.guest(&spec);
        wait_for_guest_program(&guest);
        let report = cluster.migrate("vm1", "a", "b", &["--bandwidth", "15Mi", "--compress", "none"]);
        assert!(of_rounds(&report, "hinted_pages") > 48 * PAGES_OF_MIB, "{report:#}");
        cluster.assert_guest_whole("b", "vm1");
    }
}

/// Kernels that fill or check the pages that they free.
#[test]
fn kernels_that_care_for_free_pages() {
    for (words, is_poisoned) in [("init_on_free=1", false), ("page_poison=1", true)] {
        let cluster = Cluster::new();
        let mut spec = guest_with_free_memory(QemuVersion::Newer);
        if let Boot::Tiny(load) = &mut spec.boot {
            words.clone_into(&mut load.kernel);
        }
        let guest = cluster.guest(&spec);
        wait_for_guest_program(&guest);
        let report = cluster.migrate("vm1", "a", "b", &["--bandwidth", "15Mi", "--compress", "none"]);
        assert_eq!(report["free_page_hints"]["poisoned"], is_poisoned, "{report:#}");
        assert_eq!(of_rounds(&report, "hinted_pages") == 0, is_poisoned, "{report:#}");
        cluster.assert_guest_whole("b", "vm1");
    }
}

/// A paused guest could not answer, and a request that it finds when it resumes would be answered to another client.
#[test]
fn a_paused_guest_is_not_asked() {
    let cluster = Cluster::new();
    let guest = cluster.guest(&guest_with_free_memory(QemuVersion::Newer));
    wait_for_guest_program(&guest);
    guest.monitor().unwrap().command("stop", &json!({})).unwrap();
    let report = cluster.migrate("vm1", "a", "b", &[]);
    assert_eq!(
        (of_rounds(&report, "hinted_pages"), &report["free_page_hints"]),
        (0, &Value::Null),
        "{report:#}"
    );
}

/// With the link cut in the middle of the first round.
#[test]
fn a_cut_loses_nothing_of_what_is_in_use() {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() });
    let guest = cluster.guest(&guest_with_free_memory(QemuVersion::Newer));
    wait_for_guest_program(&guest);
    let report = cluster.migrate_through_a_cut("vm1", &[]);
    assert!(of_rounds(&report, "hinted_pages") > 0, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// Page cache is deferred, reclaimed before the stop, and not sent; only the requested part.
#[test]
fn page_cache_is_reclaimed_before_the_stop() {
    let cluster = Cluster::new();
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.img");
    disk::known_content(&qemu, &image, "raw", 80).unwrap();
    let load = Load { fill_mib: 32, cache_mib: 64, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, ..GuestSpec::tiny("vm1", load) };
    spec.devices.extend([Device::Disk(Disk::new("disk0", &image, "raw")), Device::GuestPort]);
    let guest = cluster.guest(&spec);
    wait_for_guest_program(&guest);
    let slowly = ["--bandwidth", "60Mi", "--compress", "none", "--free-page-hints"];

    let report = cluster.migrate("vm1", "a", "b", &[&slowly[..], &["free"]].concat());
    assert_eq!(
        (hint_stats(&report, "deferred_pages"), hint_stats(&report, "freed_pages")),
        (0, 0),
        "{report:#}"
    );
    cluster.assert_guest_whole("b", "vm1");
    // The guest receives no request that its kernel does not support: there are no cgroups in it.
    let report = cluster.migrate("vm1", "b", "a", &[&slowly[..], &["cold"]].concat());
    assert!(hint_stats(&report, "deferred_pages") > 0, "{report:#}");
    assert!(report["free_page_hints"]["notes"][0].as_str().unwrap().contains("memory.reclaim"), "{report:#}");
    cluster.assert_guest_whole("a", "vm1");

    let report = cluster.migrate("vm1", "a", "b", &[&slowly[..], &["all"]].concat());
    let (put_off, given_back) = (hint_stats(&report, "deferred_pages"), hint_stats(&report, "freed_pages"));
    assert!(put_off > 60 * PAGES_OF_MIB && given_back > put_off * 9 / 10, "{report:#}");
    assert_eq!(report["free_page_hints"]["notes"], json!([]), "{report:#}");
    let text = cluster.a.text(&["report", "vm1", "--explain"]).ok().stdout;
    assert!(text.contains("of page cache was deferred, of which the VM freed"), "{text}");
    cluster.assert_guest_whole("b", "vm1");
}

/// Together with all other reductions, and a copied disk.
#[test]
fn page_cache_of_a_disk_that_is_copied() {
    let link = lab::Link::Limited { rate_bytes_per_s: 30 << 20 };
    let cluster = Cluster::with(&Setup { pool: true, link, ..Setup::default() });
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.img");
    disk::known_content(&qemu, &image, "raw", 48).unwrap();
    let load = Load { fill_mib: 32, wss_mib: 8, rate_mib_per_s: 10, cache_mib: 40, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, ..GuestSpec::tiny("vm1", load) };
    spec.devices.extend([Device::Disk(Disk::new("disk0", &image, "raw")), Device::GuestPort]);
    let guest = cluster.guest(&spec);
    wait_for_guest_program(&guest);
    for (from, to, wanted) in [("a", "b", "free"), ("b", "a", "all")] {
        let report = cluster.migrate("vm1", from, to, &["--disks", "copy", "--free-page-hints", wanted]);
        assert!(of_rounds(&report, "hinted_pages") > 0, "{report:#}");
        assert_eq!(hint_stats(&report, "freed_pages") > 0, wanted == "all", "{report:#}");
        cluster.assert_guest_whole(to, "vm1");
    }
}

/// With post-copy, and a disk that is sent before the guest runs.
#[test]
fn what_is_free_is_not_sent_before_the_guest_nor_after_it() {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let cluster = Cluster::with(&Setup { pool: true, link, ..Setup::default() }.without_yielding());
    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.qcow2");
    disk::known_content(&qemu, &image, "qcow2", 48).unwrap();
    let load = Load {
        fill_mib: 64,
        wss_mib: 48,
        rate_mib_per_s: 200,
        litter_mib: 64,
        disk_threads: 2,
        disk_writers: 2,
        disk_mib: 16,
        ..Load::default()
    };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, ..GuestSpec::tiny("vm1", load) };
    spec.second_monitor = true;
    spec.devices.extend([Device::Disk(Disk::new("disk0", &image, "qcow2")), Device::GuestPort]);
    let guest = cluster.guest(&spec);
    wait_for_guest_program(&guest);
    let hybrid = ["--policy", "hybrid", "--disks", "copy", "--compress", "none"];
    let output = cluster.a.cli(&[&["migrate", "vm1", "--to", "b"], &hybrid[..]].concat());
    let report = output.ok().json();
    cluster.b.wait_settled();
    assert!(of_rounds(&report, "hinted_pages") > 40 * PAGES_OF_MIB, "{report:#}");
    assert!(report["post_copy"]["remaining_pages"].as_u64() > Some(1000), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
    let serial = cluster.serial("b", "vm1");
    serial.wait_for_disk_reads().unwrap();
    serial.wait_for_disk_writes().unwrap();
    // Pages that were not sent are in use again when the guest is compared on its way back.
    serial.set("rate=10").unwrap();
    cluster.migrate("vm1", "b", "a", &["--disks", "copy"]);
    cluster.assert_guest_whole("a", "vm1");
}

/// While the migration waits for the guest, its user's commands still work.
#[test]
fn a_migration_can_be_cancelled_during_a_slow_reclaim() {
    let cluster = Cluster::new();
    let guest = cluster.guest(&guest_with_free_memory(QemuVersion::Newer));
    wait_for_guest_program(&guest);
    let (notify, reported) = mpsc::channel();
    answer_for_the_guest(guest.directory().join("guest.sock"), move |verb, id| {
        if verb == "report" {
            return Some(format!("begin {id} 1\ncache 2000+100\nend {id}\n"));
        }
        notify.send(()).unwrap();
        None
    });
    let migration = cluster.a.begin(&["migrate", "vm1", "--to", "b", "--json", "--free-page-hints", "all"]);
    assert_eq!(reported.recv_timeout(DEADLINE), Ok(()), "{}", cluster.a.log());
    cluster.a.cli(&["cancel", "vm1"]).ok();
    let output = migration.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["outcome"], "cancelled", "{report:#}");
    assert_eq!(hint_stats(&report, "deferred_pages"), 256, "{report:#}");
    cluster.assert_guest_whole("a", "vm1");
}

/// Answers in place of the guest's program, with `answer` called for each request's verb and number.
fn answer_for_the_guest(
    socket: std::path::PathBuf,
    answer: impl Fn(&str, &str) -> Option<String> + Send + 'static,
) {
    std::thread::spawn(move || {
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        for connection in listener.incoming().flatten() {
            let mut questions = BufReader::new(connection.try_clone().unwrap());
            let mut connection: UnixStream = connection;
            let mut line = String::new();
            while questions.read_line(&mut line).is_ok_and(|read| read > 0) {
                let mut words = line.split(' ');
                if let Some(answer) = answer(words.next().unwrap(), words.next().unwrap()) {
                    let _ = connection.write_all(answer.as_bytes());
                }
                line.clear();
            }
        }
    });
}

/// With any answers, the VM is migrated, and only memory that they called free is missing.
#[test]
fn a_guest_with_invalid_answers_is_moved() {
    let cluster = Cluster::new();
    let guest = cluster.guest(&guest_with_free_memory(QemuVersion::Newer));
    wait_for_guest_program(&guest);
    let socket = guest.directory().join("guest.sock");
    answer_for_the_guest(socket, |_, id| Some(format!("begin {id} 1\nfree ffffffffff+5 zzz\nend {id}\n")));
    let report = cluster.migrate("vm1", "a", "b", &["--bandwidth", "60Mi"]);
    assert_eq!(of_rounds(&report, "hinted_pages"), 0, "{report:#}");
    let note = report["free_page_hints"]["notes"][0].as_str().unwrap();
    assert!(note.contains("cannot be read"), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// A port that is not open is no reason to wait.
#[test]
fn a_guest_without_a_listening_program_is_moved() {
    let cluster = Cluster::new();
    let mut spec = GuestSpec::bare("vm1", common::Accel::Tcg, 1);
    spec.devices.push(Device::GuestPort);
    let _guest = cluster.guest(&spec);
    let report = cluster.migrate("vm1", "a", "b", &[]);
    assert_eq!(report["free_page_hints"], Value::Null, "{report:#}");
    let events = report["events"].as_array().unwrap();
    let reported = events
        .iter()
        .any(|event| event["detail"].as_str().is_some_and(|text| text.contains("whimbrel-guest")));
    assert!(reported, "{report:#}");
}
