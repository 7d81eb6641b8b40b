//! Forecasts of real guests, before they are moved and beside the outcome. A forecast leaves nothing behind, in QEMU or
//! in the guest, however it ends; and it is never made beside a migration of the same VM.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::fs;

use common::draw::{Generator, seed};
use common::{Cluster, Guest, GuestSpec, Load, Ram, Setup, until};
use serde_json::Value;

/// Rate of the link, in bytes per second.
const RATE: u64 = 20 << 20;

fn limited() -> Cluster {
    let link = lab::Link::Limited { rate_bytes_per_s: RATE };
    Cluster::with(&Setup { link, ..Setup::default() }.without_yielding())
}

fn idle(ram: Ram) -> GuestSpec {
    let load = Load { fill_mib: 40, wss_mib: 8, ..Load::default() };
    GuestSpec { ram, ..GuestSpec::tiny("vm1", load) }
}

/// A guest that rewrites 32 MiB much faster than the link carries.
fn hot() -> GuestSpec {
    let load =
        Load { fill_mib: 48, wss_mib: 32, rate_mib_per_s: 5000, verify_mib_per_s: 0, ..Load::default() };
    GuestSpec::tiny("vm1", load)
}

/// Returns true if a userfaultfd of any process watches memory of QEMU.
fn is_tracked(guest: &Guest) -> bool {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.pid())).unwrap();
    smaps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" uw"))
}

/// Asserts that nothing of a forecast is left in QEMU, and that the guest finds every page as it wrote it.
#[track_caller]
fn assert_untouched(guest: &Guest) {
    assert!(!is_tracked(guest), "writes are still tracked");
    let open = fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap();
    let left = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let left: Vec<_> = left.filter(|target| target.to_string_lossy().contains("userfaultfd")).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(guest.serial().check().unwrap().ok);
}

#[track_caller]
fn assert_interval(estimate: &Value) {
    let number = |name: &str| estimate[name].as_u64().unwrap_or_else(|| panic!("{name}: {estimate}"));
    assert!(number("low") <= number("expected") && number("expected") <= number("high"), "{estimate}");
}

/// Asserts that a forecast has all of its parts.
#[track_caller]
fn assert_whole(forecast: &Value) {
    for estimate in ["total_ns", "downtime_ns", "bytes"] {
        assert_interval(&forecast["forecast"][estimate]);
    }
    let measurement = &forecast["measurement"];
    assert!(measurement["tracked_us"].as_u64().unwrap() > 0, "{forecast:#}");
    assert!(measurement["writes"].as_array().unwrap().len() > 1, "several intervals: {forecast:#}");
    assert!(measurement["used_bytes"].as_u64() <= measurement["memory_bytes"].as_u64(), "{forecast:#}");
    assert_eq!(forecast["link"]["origin"], "measured", "{forecast:#}");
}

/// Asserts that the report has the forecast beside the outcome, with the same end, and that the record has both.
#[track_caller]
fn assert_compared(cluster: &Cluster, report: &Value, forecast: &Value, converged: bool) {
    let reported = &report["forecast"];
    assert_eq!(reported["shown"]["end"], forecast["forecast"]["end"], "{report:#}");
    assert_eq!(reported["outcome"]["converged"], converged, "{report:#}");
    for estimate in ["total_ns", "downtime_ns", "bytes"] {
        assert_interval(&reported["shown"][estimate]);
        assert!(reported["outcome"][estimate].is_u64(), "{report:#}");
    }
    let text = cluster.a.text(&["report", "vm1"]).ok();
    assert!(text.stdout.contains("  forecast    ") && text.stdout.contains("  outcome     "), "{text:?}");
    let record = cluster.a.cli(&["forecast", "--calibration"]).ok().json();
    assert_eq!(record["accuracy"]["forecasts"], 1, "{record:#}");
    assert_eq!(record["forecasts"][0]["vm"], "vm1", "{record:#}");
    assert_eq!(record["forecasts"][0]["outcome"], reported["outcome"], "{record:#}");
}

#[test]
fn an_idle_guest_converges_as_forecast() {
    for ram in [Ram::Anonymous, Ram::Memfd] {
        let cluster = limited();
        let guest = cluster.guest(&idle(ram));
        let checked = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check", "--forecast"]).ok().json();
        let forecast = &checked["forecast"];
        assert_whole(forecast);
        assert_eq!(forecast["forecast"]["end"]["end"], "stop-and-copy", "{forecast:#}");
        assert_eq!(forecast["forecast"]["converges"], true, "{forecast:#}");
        assert_untouched(&guest);

        // Within the hour nothing is measured again, unless that is asked for.
        let measured = |more: &[&str]| {
            let forecast = cluster.a.cli(&[&["forecast", "vm1", "--to", "b"], more].concat()).ok().json();
            assert_whole(&forecast);
            forecast["measurement"]["unix_ms"].as_u64().unwrap()
        };
        let first = forecast["measurement"]["unix_ms"].as_u64().unwrap();
        assert_eq!(measured(&[]), first);
        assert!(measured(&["--fresh"]) > first);
        let text = cluster.a.text(&["forecast", "vm1", "--to", "b"]).ok();
        assert!(text.stdout.starts_with("vm1 from a to b: will converge in "), "{text:?}");
        assert_untouched(&guest);

        let report = cluster.migrate("vm1", "a", "b", &[]);
        assert_compared(&cluster, &report, forecast, true);
        cluster.assert_guest_whole("b", "vm1");
        // The host that it has left no longer has a VM of that name.
        let gone = cluster.a.cli(&["forecast", "vm1", "--to", "b"]);
        assert_eq!((gone.code, &gone.json()["kind"]), (2, &"not-found".into()), "{gone:?}");
    }
}

#[test]
fn a_guest_faster_than_the_link_does_not_converge_as_forecast() {
    let cluster = limited();
    let guest = cluster.guest(&hot());
    let options = ["--compress", "none", "--deltas", "never"];
    let forecast = cluster.a.cli(&[&["forecast", "vm1", "--to", "b"], &options[..]].concat()).ok().json();
    assert_whole(&forecast);
    assert_eq!(forecast["forecast"]["end"]["end"], "gives-up", "{forecast:#}");
    assert_eq!(forecast["forecast"]["converges"], false, "{forecast:#}");
    let number = |name: &str| forecast["forecast"][name].as_u64().unwrap();
    assert!(number("writes_bytes_per_s") > number("sends_bytes_per_s"), "{forecast:#}");
    let ways: Vec<_> =
        forecast["alternatives"].as_array().unwrap().iter().map(|other| &other["way"]).collect();
    assert!(ways.contains(&&Value::from("post-copy")), "{forecast:#}");
    let text = cluster.a.text(&[&["forecast", "vm1", "--to", "b"], &options[..]].concat()).ok();
    assert!(text.stdout.starts_with("vm1 from a to b: will not converge: writes "), "{text:?}");
    assert!(text.stdout.contains("  instead     --policy hybrid: "), "{text:?}");
    assert_untouched(&guest);

    let output = cluster.a.cli(&[&["migrate", "vm1", "--to", "b"], &options[..]].concat());
    assert_eq!(output.code, 1, "{output:?}");
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    assert_eq!(report["outcome"], "aborted", "{report:#}");
    assert_compared_end(&report);
    cluster.b.wait_settled();
    assert!(guest.serial().check().unwrap().ok);
    assert_untouched(&guest);
}

/// Asserts that the policy gave up, as the report's forecast states.
#[track_caller]
fn assert_compared_end(report: &Value) {
    assert_eq!(report["forecast"]["shown"]["end"]["end"], "gives-up", "{report:#}");
    assert_eq!(report["forecast"]["outcome"]["converged"], false, "{report:#}");
    assert_eq!(report["forecast"]["outcome"]["downtime_ns"], 0, "{report:#}");
}

#[test]
fn a_vm_is_not_forecast_beside_its_migration() {
    let cluster = limited();
    let guest = cluster.guest(&idle(Ram::Anonymous));
    let migration = cluster.migrate_slowly("vm1", "2M");
    cluster.wait_for_sent(1 << 20);
    for words in
        [&["forecast", "vm1", "--to", "b"][..], &["migrate", "vm1", "--to", "b", "--check", "--forecast"]]
    {
        let refused = cluster.a.cli(words);
        assert_eq!((refused.code, &refused.json()["kind"]), (1, &"conflict".into()), "{refused:?}");
        assert!(refused.json()["error"].as_str().unwrap().contains("already in a migration"), "{refused:?}");
    }
    assert!(is_tracked(&guest), "the migration goes on");
    cluster.a.cli(&["limit", "vm1", "--bandwidth", "none"]).ok();
    assert!(migration.wait_with_output().unwrap().status.success(), "{}", cluster.a.log());
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    cluster.assert_moved("a", &report);
    assert!(report["forecast"].is_null(), "nothing was measured before: {report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

#[test]
fn a_migration_that_begins_ends_a_forecast() {
    let cluster = limited();
    let guest = cluster.guest(&idle(Ram::Anonymous));
    let forecast = cluster.a.begin(&["forecast", "vm1", "--to", "b"]);
    until("the forecast tracks the guest's writes", || is_tracked(&guest));
    // Without another check before it, which would need the monitor of QEMU at the same time.
    let words = ["migrate", "vm1", "--to", "b", "--verify", "--on-limit", "stop"];
    let moved = cluster.a.cli(&words);
    assert_eq!(moved.code, 0, "{moved:?}\n{}", cluster.a.log());
    let ended = forecast.wait_with_output().unwrap();
    let problem: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!((ended.status.code(), &problem["kind"]), (Some(1), &"conflict".into()), "{problem:#}");
    let report = cluster.a.cli(&["report", "vm1"]).ok().json();
    cluster.assert_moved("a", &report);
    cluster.assert_guest_whole("b", "vm1");
}

#[test]
fn an_agent_that_dies_leaves_no_tracking_behind() {
    let mut cluster = limited();
    let guest = cluster.guest(&hot());
    let forecast = cluster.a.begin(&["forecast", "vm1", "--to", "b"]);
    until("the forecast tracks the guest's writes", || is_tracked(&guest));
    cluster.a.kill();
    assert!(!forecast.wait_with_output().unwrap().status.success());
    until("the kernel has ended the tracking", || !is_tracked(&guest));
    assert_untouched(&guest);
    cluster.a.start();
    let forecast = cluster.a.cli(&["forecast", "vm1", "--to", "b"]).ok().json();
    assert_whole(&forecast);
    assert_untouched(&guest);
}

#[test]
fn an_agent_that_measures_regularly_forecasts_each_migration() {
    let link = lab::Link::Limited { rate_bytes_per_s: RATE };
    let setup = Setup { link, ..Setup::default() }.without_yielding();
    let extra = setup.extra.clone() + "[forecast]\nmeasure_every_s = 3600\n";
    let mut cluster = Cluster::with(&Setup { extra, ..setup });
    let guest = cluster.guest(&idle(Ram::Anonymous));
    // It looks for VMs at its start.
    cluster.a.kill();
    cluster.a.start();
    until("the agent has measured the VM", || cluster.a.log().contains("measured the VM"));
    assert_untouched(&guest);
    let forecast = cluster.a.cli(&["forecast", "vm1", "--to", "b"]).ok().json();
    assert_whole(&forecast);
    let report = cluster.migrate("vm1", "a", "b", &[]);
    assert_compared(&cluster, &report, &forecast, true);
    cluster.assert_guest_whole("b", "vm1");
}

/// Write rates of the guest, in hundredths of the link's rate: half of them do not converge.
const WRITES_PERCENT: [u64; 8] = [0, 10, 30, 60, 150, 200, 400, 1000];

/// Forecasts and moves a guest in random cases, and prints how good the forecasts were. Asserts nothing about that: how
/// long a migration takes depends on what else the machine does. Each forecast is made alone, before its migration.
fn random_cases(cases: usize) {
    let cluster = limited();
    let mut draw = Generator(seed(3));
    let load = Load { fill_mib: 72, wss_mib: 48, verify_mib_per_s: 0, ..Load::default() };
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", load));
    let (mut from, mut to) = ("a", "b");
    let (mut converging, mut moved) = (0, 0);
    for case in 0..cases {
        let rate_mib = 8 + draw.below(40) as u64;
        let percent = WRITES_PERCENT[draw.below(WRITES_PERCENT.len())];
        let max_downtime = ["100", "300", "1000"][draw.below(3)];
        let compress = ["none", "auto"][draw.below(2)];
        cluster.lab.set_rate(Some(rate_mib << 20)).unwrap();
        cluster.serial(from, "vm1").set(&format!("rate={}", rate_mib * percent / 100)).unwrap();
        let words = ["vm1", "--to", to, "--verify", "--max-downtime", max_downtime, "--compress", compress];
        let forecast = cluster.agent(from).cli(&[&["forecast", "--fresh"], &words[..]].concat()).ok().json();
        assert_whole(&forecast);
        let output = cluster.agent(from).cli(&[&["migrate"], &words[..]].concat());
        let report = cluster.agent(from).cli(&["report", "vm1"]).ok().json();
        let outcome = &report["forecast"]["outcome"];
        assert!(outcome["total_ns"].is_u64(), "{output:?}\n{report:#}");
        converging += usize::from(outcome["converged"] == true);
        let shown = &report["forecast"]["shown"];
        println!(
            "case {case}: {rate_mib} MiB/s, writes {percent}%, {max_downtime} ms, {compress}: {} | total {} of {} | \
             downtime {} of {} | converged {} of {}",
            shown["end"]["end"],
            shown["total_ns"],
            outcome["total_ns"],
            shown["downtime_ns"],
            outcome["downtime_ns"],
            shown["converges"],
            outcome["converged"],
        );
        if report["outcome"] == "moved" {
            cluster.assert_moved(from, &report);
            (from, to) = (to, from);
            moved += 1;
        }
        cluster.a.wait_settled();
        cluster.b.wait_settled();
        cluster.assert_guest_whole(from, "vm1");
    }
    let mut forecasts = 0;
    for agent in [&cluster.a, &cluster.b] {
        let record = agent.cli(&["forecast", "--calibration"]).ok().json();
        println!("{}: {:#}", agent.name, record["accuracy"]);
        forecasts += record["accuracy"]["forecasts"].as_u64().unwrap();
    }
    println!("{converging} of {cases} converged, {moved} moved");
    assert_eq!(forecasts, cases as u64, "each one is recorded");
}

#[test]
fn random_guests_are_forecast_and_recorded() {
    random_cases(3);
}

#[test]
#[ignore = "takes a quarter of an hour"]
fn many_random_guests_are_forecast_and_recorded() {
    random_cases(50);
}
