//! Post-copy: the guest runs at the destination, and some of its memory is still at the source. The guest checks every
//! page that it has filled or rewritten; all of its memory is compared when it is migrated to another host later.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

#[path = "../common/mod.rs"]
mod common;
mod injuries;

use common::replay::{assert_replayed, decisions};
use common::{Agent, Cluster, DEADLINE, GuestSpec, Load, Setup, has_event, until};
use engine::discards::DiscardDecision;
use engine::pre_copy::Decision;
use serde_json::Value;
use tracee::maps::{self, Backing};
use tracee::{Process, RamFile};

const RATE: u64 = 20 << 20;

/// Size of its working set, MiB, which it rewrites faster than the link carries it.
const HOT_MIB: u64 = 64;

/// Starts a guest on a link of 20 MiB/s.
fn stage() -> (Cluster, lab::Guest) {
    stage_with(Setup::default())
}

fn stage_with(setup: Setup) -> (Cluster, lab::Guest) {
    stage_of(setup, 1)
}

fn stage_of(setup: Setup, vcpus: u32) -> (Cluster, lab::Guest) {
    let link = lab::Link::Limited { rate_bytes_per_s: RATE };
    let cluster = Cluster::with(&Setup { link, ..setup }.without_yielding());
    let load = Load { fill_mib: HOT_MIB + 16, wss_mib: HOT_MIB, rate_mib_per_s: 200, ..Load::default() };
    let guest = cluster.guest(&GuestSpec { vcpus, ..GuestSpec::tiny("vm1", load) });
    (cluster, guest)
}

const HYBRID: [&str; 8] = ["migrate", "vm1", "--to", "b", "--policy", "hybrid", "--compress", "none"];

/// Asserts that the VM was migrated, and that pages followed by post-copy.
#[track_caller]
fn assert_post_copy(report: &Value) {
    assert_eq!(report["outcome"], "moved", "{report:#}");
    let left = report["post_copy"]["remaining_pages"].as_u64().unwrap();
    assert!(left > 1000, "{report:#}");
    let traces = assert_replayed(report);
    assert!(matches!(decisions(&traces).last(), Some(Decision::PostCopy { .. })), "{report:#}");
    assert!(traces.others.push.is_some(), "{report:#}");
    let naming = traces.others.discards.unwrap();
    assert_eq!(naming.decisions().next(), Some(&DiscardDecision::Discard), "{report:#}");
}

/// Asserts that the guest is whole, and that its QEMU has no remains: it can be migrated like any other, and compared.
#[track_caller]
fn assert_whole_and_movable(cluster: &Cluster) {
    cluster.assert_guest_whole("b", "vm1");
    let pid = cluster.b.vm("vm1").unwrap()["pid"].as_u64().unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let left = descriptors.flatten().filter(|descriptor| {
        std::fs::read_link(descriptor.path())
            .is_ok_and(|target| target.to_string_lossy().contains("userfaultfd"))
    });
    assert_eq!(left.count(), 0, "a userfaultfd is left in QEMU");
    assert!(cluster.a.vm("vm1").is_none());
    cluster.serial("b", "vm1").set("rate=1").unwrap();
    cluster.migrate("vm1", "b", "a", &[]);
    cluster.assert_guest_whole("a", "vm1");
}

#[test]
fn a_guest_that_is_too_fast_runs_before_its_pages_are_there() {
    let (cluster, mut guest) = stage();
    let report = cluster.a.cli(&HYBRID).last_json();
    assert_post_copy(&report);
    assert!(report["post_copy"]["requested_pages"].as_u64().unwrap() > 0, "{report:#}");
    assert!(report["downtime"]["total_us"].as_u64().unwrap() > 0, "{report:#}");
    assert!(!guest.is_running(), "the source's QEMU is left");
    let text = cluster.a.text(&["report", "vm1"]).ok();
    assert!(text.stdout.contains("sent after the VM was started at the destination"), "{text:?}");
    assert_whole_and_movable(&cluster);
}

#[test]
fn memory_of_either_kind_comes_after_the_guest() {
    for kind in ["anonymous", "memfd"] {
        let (cluster, _guest) = stage();
        let report = cluster.a.cli(&[&HYBRID[..], &["--ram", kind]].concat()).last_json();
        assert_post_copy(&report);
        assert_eq!(report["destination"]["ram_kind"], kind, "{report:#}");
        assert_whole_and_movable(&cluster);
    }
}

/// Pages of the working set are sent at most one and a half times: parts of the first pass leave them out.
#[test]
fn hot_pages_come_last() {
    let (cluster, _guest) = stage();
    let report = cluster.a.cli(&HYBRID).last_json();
    assert_post_copy(&report);
    let of_pass = |round: &&Value| round["pass"] == 1;
    let parts: Vec<_> = report["rounds"].as_array().unwrap().iter().filter(of_pass).collect();
    assert!(parts.len() > 1, "all of it went at once: {report:#}");
    let sent_pages: u64 = parts.iter().map(|part| part["dirty_pages"].as_u64().unwrap()).sum();
    let blocks = report["ram_blocks"].as_array().unwrap().iter();
    let all_pages = blocks.map(|block| block["bytes"].as_u64().unwrap()).sum::<u64>() / 4096;
    let hot_pages = (HOT_MIB << 20) / 4096;
    assert!(report["post_copy"]["remaining_pages"].as_u64().unwrap() >= hot_pages * 9 / 10, "{report:#}");
    assert!(
        sent_pages <= all_pages - hot_pages / 2,
        "{sent_pages} of {all_pages} pages went before the guest: {report:#}"
    );
}

/// All dirty pages are sent this many times before post-copy.
#[test]
fn as_many_passes_are_made_as_are_asked_for() {
    let (cluster, _guest) = stage();
    let report = cluster.a.cli(&[&HYBRID[..], &["--hybrid-passes", "3"]].concat()).last_json();
    assert_post_copy(&report);
    let passes = report["rounds"].as_array().unwrap().iter().map(|round| round["pass"].as_u64().unwrap());
    assert_eq!(passes.max(), Some(3), "{report:#}");
    // The end of the stream is no loss.
    assert!(!has_event(&report, "link-lost"), "{report:#}");
    assert_whole_and_movable(&cluster);
}

/// Rounds make no progress, and the remaining pages follow by post-copy: also pages that were sent before, which the
/// destination has to discard.
#[test]
fn pages_left_by_the_rounds_follow_by_post_copy() {
    let (cluster, _guest) = stage();
    let words = ["migrate", "vm1", "--to", "b", "--on-limit", "post-copy", "--compress", "none"];
    let report = cluster.a.cli(&words).last_json();
    assert_post_copy(&report);
    let passes = report["rounds"].as_array().unwrap().iter().map(|round| round["pass"].as_u64().unwrap());
    assert!(passes.max() >= Some(2), "{report:#}");
    let naming = assert_replayed(&report).others.discards.unwrap();
    let [.., before, last] = &naming.entries[..] else { panic!("{report:#}") };
    assert_eq!(
        (before.decision, last.decision),
        (DiscardDecision::Discard, DiscardDecision::Stop),
        "{report:#}"
    );
    assert!(last.observed.pages < before.observed.pages, "most is taken away before the stop: {report:#}");
    assert_whole_and_movable(&cluster);
}

/// A guest that its user has paused does not write: it does not need both hosts.
#[test]
fn a_paused_guest_has_all_before() {
    let (cluster, guest) = stage();
    guest.monitor().unwrap().command("stop", &serde_json::json!({})).unwrap();
    let report = cluster.a.cli(&HYBRID).last_json();
    assert_eq!(report["outcome"], "moved", "{report:#}");
    assert!(report["post_copy"].is_null(), "{report:#}");
    assert_eq!(report["run_state_after"], "paused");
}

#[test]
fn impossible_requests_are_refused_first() {
    let (cluster, guest) = stage();
    let output = cluster.a.cli(&[&HYBRID[..], &["--verify"]].concat());
    assert_eq!(output.code, 2, "{output:?}");
    assert!(output.stdout.contains("cannot be compared"), "{output:?}");
    for (words, why) in [
        (&["--policy", "hybrid", "--hybrid-passes", "0"][..], "0 passes are not possible"),
        (&["--policy", "hybrid", "--hybrid-passes", "31"], "31 passes exceed the maximum of 30"),
        (&["--hybrid-passes", "2", "--policy", "pattern"], "only with --policy hybrid"),
    ] {
        let output = cluster.a.cli(&[&["migrate", "vm1", "--to", "b"][..], words].concat());
        assert!(output.code == 2 && output.stdout.contains(why), "{output:?}");
    }
    assert!(guest.serial().check().unwrap().ok);
}

/// Returns the missing pages that `vm show` reports at a side, with the need of both hosts.
fn missing_pages(agent: &Agent) -> u64 {
    let shown = agent.cli(&["vm", "show", "vm1"]).ok().json();
    assert_eq!(shown["needs_hosts"], serde_json::json!(["a", "b"]), "{shown:#}");
    let text = agent.text(&["vm", "show", "vm1"]).ok().stdout;
    assert!(text.contains("needs      a and b"), "{text}");
    let pages = shown["missing_pages"].as_u64();
    assert_eq!(pages.is_some(), text.contains("until its last page has arrived"), "{text}");
    pages.unwrap_or(0)
}

#[test]
fn both_sides_report_that_both_are_needed_during_post_copy() {
    let (cluster, _guest) = stage();
    let migration = cluster.a.begin(&HYBRID);
    cluster.wait_for_progress(|progress| progress["missing_pages"].as_u64() > Some(0));
    cluster.lab.cut_both().unwrap();
    for agent in [&cluster.a, &cluster.b] {
        until("it says how many pages are missing", || missing_pages(agent) > 0);
    }
    cluster.lab.heal().unwrap();
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    cluster.b.wait_settled();
    let shown = cluster.b.cli(&["vm", "show", "vm1"]).ok().json();
    assert_eq!(shown["needs_hosts"], serde_json::json!(["b"]), "{shown:#}");
    assert!(shown["missing_pages"].is_null() && shown["findings"] == serde_json::json!([]), "{shown:#}");
    assert_whole_and_movable(&cluster);
}

/// Fills all missing memory of the arriving guest, past the waits of its QEMU, as another process could that has mapped
/// it.
fn write_missing_pages(cluster: &Cluster) {
    let socket = format!("{}/", cluster.b.directory.display());
    let is_its_qemu = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
            let line = String::from_utf8_lossy(&line);
            line.contains("vm1@") && line.contains(&socket) && line.contains("-incoming")
        })
    };
    let names = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let pid = names.filter_map(|name| name.parse().ok()).find(is_its_qemu).unwrap();
    let process = Process::open(pid).unwrap();
    let mappings = maps::mappings(&process).unwrap();
    let of_files = mappings.iter().filter(|mapping| matches!(mapping.backing, Backing::SharedFile(_)));
    let ram = of_files.max_by_key(|mapping| mapping.range.len()).unwrap();
    let (file, len) = (RamFile::open(&process, ram).unwrap(), ram.range.len());
    let mut there = Vec::new();
    // The firmware's pages at the beginning are not counted.
    file.data_runs(16 << 20..len, &mut there).unwrap();
    let mut at = 16 << 20;
    for run in there.into_iter().chain(std::iter::once(len..len)) {
        file.write_at(at, &vec![0xA5; (run.start - at) as usize]).unwrap();
        at = run.end;
    }
}

/// Another program writes a missing page while the guest runs there: the guest is stopped, and this is reported
/// everywhere.
#[test]
fn a_running_guest_is_stopped_at_an_unexpected_page() {
    let (mut cluster, mut guest) = stage();
    let migration = cluster.a.begin(&[&HYBRID[..], &["--ram", "memfd"]].concat());
    cluster
        .wait_for_progress(|progress| progress["phase"] == "post-copy" && progress["downtime_us"].is_u64());
    cluster.lab.cut_both().unwrap();
    write_missing_pages(&cluster);
    cluster.lab.heal().unwrap();
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    cluster.b.wait_settled();
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_post_copy(&report);
    assert!(has_event(&report, "unexpected-page"), "{report:#}\n{}", cluster.b.log());
    assert_eq!(report["run_state_after"], "paused", "{report:#}");
    assert!(!guest.is_running(), "the source's QEMU is left");
    for is_restarted in [false, true] {
        if is_restarted {
            cluster.b.kill();
            cluster.b.start();
        }
        let shown = cluster.b.cli(&["vm", "show", "vm1"]).ok().json();
        assert_eq!(
            (&shown["state"], &shown["findings"][0]["code"]),
            (&"paused".into(), &"unexpected-page".into())
        );
    }
    let output = cluster.b.cli(&["migrations"]).ok().json();
    assert!(output[0]["message"].as_str().unwrap().contains("cannot be trusted"), "{output:#}");
}

/// Another program writes a missing page before the guest has run there: it continues where all of its memory is right.
#[test]
fn a_guest_with_an_unexpected_page_is_not_run_there() {
    let (cluster, mut guest) = stage_with(Setup { fault_harness: true, ..Setup::default() });
    let faults = cluster.faults.as_ref().unwrap();
    faults.want("destination/ready/go[no-registry,run]:before-effects");
    let migration = cluster.a.begin(&[&HYBRID[..], &["--ram", "memfd"]].concat());
    let Some(held) = faults.held(DEADLINE) else { panic!("{}\n---\n{}", cluster.a.log(), cluster.b.log()) };
    write_missing_pages(&cluster);
    until("it is seen there", || cluster.b.log().contains("a missing page was present before it arrived"));
    held.release();
    drop(migration.wait_with_output().unwrap());
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(report["outcome"], "returned", "{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("cannot be trusted"), "{report:#}");
    assert!(cluster.b.vm("vm1").is_none());
    assert!(guest.is_running());
    cluster.assert_guest_whole("a", "vm1");
}
