//! Pages that are resent as deltas. Every migration compares all of memory by a path of its own (`--verify`), and the
//! guest itself checks every page that it wrote.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use common::{Cluster, GuestSpec, Load, Setup};
use lab::LoadMode;
use serde_json::Value;

/// A guest that writes a few bytes to each of many pages, again and again.
fn load(fill_mib: u64) -> Load {
    Load { fill_mib, wss_mib: 24, rate_mib_per_s: 40, mode: LoadMode::Few, ..Load::default() }
}

fn number(report: &Value, name: &str) -> u64 {
    report["deltas"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

fn of_rounds(report: &Value, name: &str) -> u64 {
    report["rounds"].as_array().unwrap().iter().map(|round| round[name].as_u64().unwrap()).sum()
}

/// Asserts that some pages were sent as deltas, that these were small, and that the destination had all of the old
/// pages.
fn assert_deltas_sent(report: &Value) {
    assert!(number(report, "pages") > 0, "{report:#}");
    assert_eq!(number(report, "page_bytes"), number(report, "pages") * 4096);
    assert!(number(report, "delta_bytes") < number(report, "page_bytes") / 4, "{report:#}");
    assert!(number(report, "mark_cpu_us") > 0, "{report:#}");
}

#[test]
fn requested_deltas_are_used() {
    let cluster = Cluster::new();
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", load(64)));
    // Slow enough that the guest has written to some pages when the first round ends.
    let report = cluster.migrate("vm1", "a", "b", &["--deltas", "always", "--bandwidth", "100Mi"]);
    assert_deltas_sent(&report);
    let refused = of_rounds(&report, "refused_pages");
    assert_eq!(of_rounds(&report, "delta_pages"), number(&report, "pages") + refused, "{report:#}");
    // A changed piece rarely has the same check value as before.
    assert!(refused < 2 + number(&report, "pages") / 100, "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
    let report = cluster.migrate("vm1", "b", "a", &["--deltas", "never", "--bandwidth", "100Mi"]);
    assert_eq!(report["deltas"], Value::Null, "{report:#}");
    assert_eq!(of_rounds(&report, "delta_pages"), 0, "{report:#}");
    cluster.assert_guest_whole("a", "vm1");
}

/// On a slow link, deltas are used without an option, also with a cut in the middle: pages that may not have arrived
/// are sent in full.
#[test]
fn a_slow_link_is_reason_enough_and_a_cut_loses_nothing() {
    for more in [&[][..], &["--compress", "none"]] {
        let link = lab::Link::Limited { rate_bytes_per_s: 12 << 20 };
        let cluster = Cluster::with(&Setup { link, ..Setup::default() }.without_yielding());
        let _guest = cluster.guest(&GuestSpec::tiny("vm1", load(96)));
        let report = cluster.migrate_through_a_cut("vm1", more);
        assert_deltas_sent(&report);
        assert!(number(&report, "since_us") > 0, "{report:#}");
        assert_eq!(report["compression"].is_null(), !more.is_empty(), "{report:#}");
        cluster.assert_guest_whole("b", "vm1");
    }
}
