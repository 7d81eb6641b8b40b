//! The time of the guest's stop: the guest writes as fast as the link carries, or nearly. Every migration compares all
//! of memory by a path of its own (`--verify`), and the guest itself checks every page that it wrote.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::replay::{assert_replayed, decisions};
use common::{Cluster, GuestSpec, Load, Setup, has_event, per_second, until};
use engine::pre_copy::Decision;
use rustix::process::{Pid, setpriority_process};
use serde_json::Value;

const RATE: u64 = 20 << 20;

/// Starts a guest that rewrites 32 MiB at this rate, on a link of 20 MiB/s.
fn stage(rate_mib_per_s: u64) -> (Cluster, lab::Guest) {
    stage_of(RATE, 32, rate_mib_per_s)
}

/// Starts a guest with this working set, on a link of this many bytes per second. Copying does not yield: its course
/// has to depend on the guest's writes alone, also on a busy machine.
fn stage_of(rate_bytes_per_s: u64, wss_mib: u64, rate_mib_per_s: u64) -> (Cluster, lab::Guest) {
    let cluster = link_of(rate_bytes_per_s);
    let guest = cluster.guest(&writing(wss_mib, rate_mib_per_s));
    (cluster, guest)
}

fn link_of(rate_bytes_per_s: u64) -> Cluster {
    let link = lab::Link::Limited { rate_bytes_per_s };
    Cluster::with(&Setup { link, ..Setup::default() }.without_yielding())
}

fn writing(wss_mib: u64, rate_mib_per_s: u64) -> GuestSpec {
    // All of its time is for writing; its memory is checked in the end.
    let load =
        Load { fill_mib: wss_mib + 16, wss_mib, rate_mib_per_s, verify_mib_per_s: 0, ..Load::default() };
    GuestSpec::tiny("vm1", load)
}

/// A rate that no guest reaches.
const ALL_IT_CAN: u64 = 5000;

/// Sets the link to a quarter of the guest's write rate: half as much again as it would write with a sixth of a
/// processor. The guest precedes all other programs, so that it keeps this rate on a busy machine; no other guest does,
/// until the result is dropped.
fn carry_a_quarter(cluster: &Cluster, guest: &lab::Guest) -> MutexGuard<'static, ()> {
    static PRECEDENCE: Mutex<()> = Mutex::new(());
    let precedence = PRECEDENCE.lock().unwrap_or_else(PoisonError::into_inner);
    for thread in std::fs::read_dir(format!("/proc/{}/task", guest.pid())).unwrap() {
        let id = thread.unwrap().file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        setpriority_process(id, -15).unwrap();
    }
    // While its writes are tracked, even a fast guest writes only some hundred MiB of pages in a second.
    let rate = (per_second(guest.serial(), |tick| tick.writes) * 4096 / 4).clamp(RATE / 4, 12 * RATE);
    cluster.lab.set_rate(Some(rate)).unwrap();
    precedence
}

fn rounds(report: &Value) -> &[Value] {
    report["rounds"].as_array().unwrap()
}

/// Returns true if rounds after the first pass were sent in parts, of which each left pages to the next.
fn was_sent_in_parts(report: &Value) -> bool {
    let number = |round: &Value, what: &str| round[what].as_u64().unwrap();
    rounds(report).iter().any(|round| number(round, "pass") >= 2 && number(round, "remaining_pages") > 0)
}

#[test]
fn a_guest_that_is_too_fast_is_stopped_when_that_is_seen() {
    let (cluster, _guest) = stage(ALL_IT_CAN);
    let report = cluster.migrate("vm1", "a", "b", &[]);
    cluster.assert_guest_whole("b", "vm1");
    assert!(was_sent_in_parts(&report), "{report:#}");
    let Some(Decision::StopAndCopy { pattern: Some(pattern), .. }) =
        decisions(&assert_replayed(&report)).pop()
    else {
        panic!("no pattern: {report:#}")
    };
    let reported = rounds(&report).iter().find(|round| round["decision"] == "stop").unwrap();
    assert_eq!(reported["pattern"], serde_json::to_value(pattern).unwrap());
    let text = cluster.a.text(&["report", "vm1"]).ok();
    assert!(text.stdout.contains(&format!("stopped at {pattern}")), "{text:?}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, report.to_string()).unwrap();
    let text = cluster.a.text(&["replay", file.path().to_str().unwrap()]).ok();
    assert!(["stop (pattern): ", "pressure: "].iter().all(|policy| text.stdout.contains(policy)), "{text:?}");
}

/// Without options there is no long downtime.
#[test]
fn a_guest_that_is_too_fast_stays_by_default() {
    let (cluster, guest) = stage(ALL_IT_CAN);
    let output = cluster.a.cli(&["migrate", "vm1", "--to", "b"]);
    assert_eq!(output.code, 1, "{output:?}");
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(report["outcome"], "aborted", "{report:#}");
    assert!(
        matches!(decisions(&assert_replayed(&report)).pop(), Some(Decision::GiveUp { .. })),
        "{report:#}"
    );
    cluster.b.wait_settled();
    assert!(cluster.b.vm("vm1").is_none(), "nothing is left there");
    assert!(guest.serial().check().unwrap().ok);
}

/// A guest that writes half as fast as the link carries converges in parts; the link is cut in the meantime, while
/// pages left to later parts are still to be sent.
#[test]
fn a_cut_between_two_parts_loses_nothing() {
    let (cluster, _guest) = stage(12);
    let words = ["migrate", "vm1", "--to", "b", "--verify", "--on-limit", "stop", "--compress", "none"];
    let migration = cluster.a.begin(&words);
    // After the first pass.
    cluster.wait_for_progress(|progress| progress["pass"].as_u64() >= Some(2));
    cluster.lab.cut(lab::Direction::AToB).unwrap();
    cluster.wait_for_progress(|progress| progress["phase"] == "reconnecting");
    cluster.lab.heal().unwrap();
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    assert!(was_sent_in_parts(&report), "{report:#}");
    assert_replayed(&report);
    cluster.assert_guest_whole("b", "vm1");
}

/// The rules of KVM and Xen, for comparison.
#[test]
fn other_rules_move_a_guest_too() {
    let (cluster, _guest) = stage(4);
    for (policy, from, to) in [("target", "a", "b"), ("rounds", "b", "a")] {
        let report = cluster.migrate("vm1", from, to, &["--policy", policy]);
        assert_eq!(report["settings"]["policy"], policy);
        assert_eq!(report["traces"][0]["policy"]["policy"], policy, "{report:#}");
        assert!(
            matches!(decisions(&assert_replayed(&report)).pop(), Some(Decision::StopAndCopy { .. })),
            "{report:#}"
        );
        cluster.assert_guest_whole(to, "vm1");
    }
}

/// Its processors are throttled, and it writes less; at the destination it has its full speed.
#[test]
fn a_cpu_throttle_moves_a_guest_that_is_too_fast() {
    if !limits_processors() {
        return;
    }
    // Each processor is limited by itself.
    let cluster = link_of(RATE);
    let guest = cluster.guest(&GuestSpec { vcpus: 2, ..writing(256, ALL_IT_CAN) });
    let _precedence = carry_a_quarter(&cluster, &guest);
    let words = ["migrate", "vm1", "--to", "b", "--verify", "--throttle-cpu", "drain", "--compress", "none"];
    let output = cluster.a.cli(&[&words[..], &["--deltas", "never"]].concat());
    let report = output.last_json();
    assert_eq!(report["outcome"], "moved", "{report:#}");
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    assert!(has_event(&report, "cpu-throttled"), "{report:#}");
    let cpu_throttle = assert_replayed(&report).others.cpu_throttle.unwrap();
    assert!(cpu_throttle.decisions().any(Option::is_some), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
    let of_guest = format!("whimbrel-cpu-{}-", guest.pid());
    let groups = std::fs::read_dir("/sys/fs/cgroup/cpu").into_iter().flatten().flatten();
    let left: Vec<_> =
        groups.map(|group| group.path()).filter(|path| path.to_string_lossy().contains(&of_guest)).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Two limits, and the way that is expected to keep them.
#[test]
fn limits_are_kept_by_the_way_that_is_expected_to() {
    // Many times the link's rate, also on a busy machine.
    let (cluster, guest) = stage_of(RATE / 2, 32, ALL_IT_CAN);
    let sla = |max_downtime_ms: &str, max_total_s: &str| {
        let words = ["migrate", "vm1", "--to", "b", "--policy", "sla", "--max-downtime", max_downtime_ms];
        let plain = ["--compress", "none", "--deltas", "never"];
        cluster.a.cli(&[&words[..], &["--max-total", max_total_s], &plain].concat()).last_json()
    };
    // No way keeps this: the downtime is at least the time that a stop needs.
    let report = sla("1", "1");
    assert_eq!(report["outcome"], "aborted", "{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("the time limit is reached"), "{report:#}");
    assert!(
        matches!(decisions(&assert_replayed(&report)).pop(), Some(Decision::GiveUp { .. })),
        "{report:#}"
    );
    assert!(guest.serial().check().unwrap().ok);
    cluster.b.wait_settled();

    // A tenth of its processor time would still be too much.
    let report = sla("300", "100");
    assert_eq!(report["outcome"], "moved", "{report:#}\n{}", cluster.a.log());
    assert!(
        matches!(decisions(&assert_replayed(&report)).pop(), Some(Decision::PostCopy { .. })),
        "{report:#}"
    );
    assert!(report["post_copy"]["remaining_pages"].as_u64() > Some(0), "{report:#}");
    let way = report["events"].as_array().unwrap().iter().rfind(|event| event["what"] == "way").unwrap();
    assert!(way["detail"].as_str().unwrap().starts_with("post-copy; expected for "), "{way}");
    cluster.assert_guest_whole("b", "vm1");
}

/// With a comparison, post-copy is not possible.
#[test]
fn a_guest_is_throttled_where_that_keeps_the_limits() {
    if !limits_processors() {
        return;
    }
    let (cluster, guest) = stage_of(RATE, 256, ALL_IT_CAN);
    let _precedence = carry_a_quarter(&cluster, &guest);
    let words = ["migrate", "vm1", "--to", "b", "--verify", "--policy", "sla", "--max-total", "600"];
    let output = cluster.a.cli(&[&words[..], &["--compress", "none", "--deltas", "never"]].concat());
    let report = output.last_json();
    cluster.assert_moved("a", &report);
    let decisions = decisions(&assert_replayed(&report));
    assert!(matches!(decisions.last(), Some(Decision::StopAndCopy { .. })), "{report:#}");
    let is_slowing = |decision: &Decision| matches!(decision, Decision::NextRound { slow: true, .. });
    assert!(decisions.iter().any(is_slowing), "{report:#}");
    assert!(has_event(&report, "cpu-throttled"), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// Programs that use all processors that they can get.
struct Crowd(Vec<Child>);

impl Crowd {
    fn come() -> Self {
        let all = std::thread::available_parallelism().unwrap().get() * 2;
        let one = |_| Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        Self((0..all).map(one).collect())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for one in &mut self.0 {
            let _ = one.kill();
            let _ = one.wait();
        }
    }
}

/// The host becomes busy during the migration of a guest that needs its processor: its waiting is detected, and copying
/// yields.
#[test]
fn copying_gives_way_to_a_guest_that_waits_for_processors() {
    let link = lab::Link::Limited { rate_bytes_per_s: RATE };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() });
    // So much that it is not given up before the waiting is detected.
    let _guest = cluster.guest(&writing(96, 200));
    let words = ["migrate", "vm1", "--to", "b", "--verify", "--max-passes", "1000", "--compress", "none"];
    let migration = cluster.a.begin(&words);
    cluster.wait_for_progress(|progress| progress["phase"] == "pre-copy");
    let crowd = Crowd::come();
    until("copying gives way as far as it can", || {
        let waiting = cluster.a.cli(&["report", "vm1"]).ok().json()["waiting"].take();
        waiting["nicest"] == 11 && waiting["fewest_threads"] == 1 && waiting["longest_interval_factor"] == 4
    });
    drop(crowd);
    // It writes too fast for the link.
    cluster.a.cli(&["limit", "vm1", "--max-downtime", "600000"]).ok();
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    cluster.assert_moved("a", &report);
    let waiting = |what: &str| report["waiting"][what].as_u64().unwrap();
    assert!(waiting("most_permille") > waiting("before_permille") + 50, "{report:#}");
    let text = cluster.a.text(&["report", "vm1"]).ok();
    let reported = "copying nice 11, 1 thread at a time, scan interval 4-fold";
    assert!(text.stdout.contains(reported), "{text:?}");
    // A part was longer than the policy wanted, by far more than its last cluster.
    let replayed = assert_replayed(&report);
    let decisions = decisions(&replayed);
    let was_longer = decisions.iter().zip(&rounds(&report)[1..]).any(|(decision, next)| match decision {
        Decision::NextRound { most_pages: Some(most), .. } => {
            next["dirty_pages"].as_u64().unwrap() > most * 3 / 2
        }
        _ => false,
    });
    assert!(was_longer, "{report:#}");
    let pressure = replayed.others.pressure.unwrap();
    assert!(pressure.decisions().any(|restraint| restraint.threads == 1), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// The limit on processors is lifted after every outcome of the migration.
#[test]
fn no_limit_on_processors_outlives_the_migration() {
    if !limits_processors() {
        return;
    }
    let (mut cluster, guest) = stage(200);
    let words =
        ["migrate", "vm1", "--to", "b", "--throttle-cpu", "drain", "--max-passes", "1000", "--detach"];
    for is_cancelled in [true, false] {
        cluster.a.cli(&words).ok();
        until("the guest is slowed down", || is_throttled(guest.pid()));
        if is_cancelled {
            cluster.a.cli(&["cancel", "vm1"]).ok();
        } else {
            cluster.a.kill();
            cluster.a.start();
        }
        cluster.a.wait_settled();
        assert_eq!(groups_of_ours(guest.pid()), [""; 0], "{is_cancelled}: {}", cluster.a.log());
        assert!(guest.serial().check().unwrap().ok);
    }
}

/// The agent is killed and not restarted.
#[test]
fn no_limit_on_processors_outlives_a_killed_agent() {
    if !limits_processors() {
        return;
    }
    let (mut cluster, guest) = stage(200);
    let words =
        ["migrate", "vm1", "--to", "b", "--throttle-cpu", "drain", "--max-passes", "1000", "--detach"];
    cluster.a.cli(&words).ok();
    until("the guest is slowed down", || is_throttled(guest.pid()));
    cluster.a.kill();
    until("the guest is let go", || groups_of_ours(guest.pid()).is_empty());
    assert!(guest.serial().check().unwrap().ok);
    cluster.a.start();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    // It can be throttled and migrated all the same.
    cluster.migrate("vm1", "a", "b", &["--throttle-cpu", "drain"]);
    cluster.assert_guest_whole("b", "vm1");
}

/// Returns true if this kernel supports limits on processors.
fn limits_processors() -> bool {
    let known = ["/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cgroup.controllers"];
    let limits = known.iter().any(|file| Path::new(file).exists());
    if !limits {
        lab::not_tried("limits on processors: no control group of this machine limits them");
    }
    limits
}

/// Returns Whimbrel's control groups that contain threads of a process, by the kernel's record.
fn groups_of_ours(pid: u32) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let texts = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("cgroup")).ok());
    let groups = texts.flat_map(|text| {
        let ours = text.lines().filter(|line| line.contains("/whimbrel-cpu-"));
        ours.filter_map(|line| Some(line.splitn(3, ':').nth(2)?.to_owned())).collect::<Vec<_>>()
    });
    groups.collect()
}

/// Returns true if one of them limits its threads.
fn is_throttled(pid: u32) -> bool {
    let files = [("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "-1"), ("/sys/fs/cgroup", "cpu.max", "max")];
    groups_of_ours(pid).iter().any(|group| {
        files.iter().any(|(root, file, unlimited)| {
            std::fs::read_to_string(format!("{root}{group}/{file}"))
                .is_ok_and(|limit| !limit.starts_with(unlimited))
        })
    })
}
