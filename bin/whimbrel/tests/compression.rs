//! Compressed pages. Every migration compares all of memory by a path of its own (`--verify`), and the guest itself
//! checks every page that it wrote.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use common::replay::assert_replayed;
use common::{Cluster, GuestSpec, Load, Setup};
use serde_json::Value;

/// A guest that writes. A third of its memory looks random, the rest compresses well.
fn load() -> Load {
    Load { fill_mib: 160, wss_mib: 16, rate_mib_per_s: 10, noise_percent: 33, ..Load::default() }
}

fn number(report: &Value, name: &str) -> u64 {
    report["compression"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

/// Asserts that some pages were compressed, and some not, because it was not worth it.
fn assert_compressed(report: &Value) {
    let (data, packed) = (number(report, "data_bytes"), number(report, "compressed_bytes"));
    assert!(0 < packed && packed < data, "{report:#}");
    assert!(number(report, "wire_bytes") < data * 9 / 10, "{report:#}");
    assert!(number(report, "compression_cpu_us") > 0, "{report:#}");
}

#[test]
fn requested_compression_is_used() {
    let cluster = Cluster::new();
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", load()));
    let hosts = ["a", "b"];
    for (turn, way) in ["lz4", "zstd:1", "zstd", "none"].into_iter().enumerate() {
        let (from, to) = (hosts[turn % 2], hosts[(turn + 1) % 2]);
        let report = cluster.migrate("vm1", from, to, &["--compress", way]);
        if way == "none" {
            assert_eq!(report["compression"], Value::Null, "{report:#}");
        } else {
            assert_compressed(&report);
            assert_eq!(report["compression"]["wanted"], if way == "zstd" { "zstd:3" } else { way });
            assert!(number(&report, "wire_bytes") <= report["sent_bytes"].as_u64().unwrap(), "{report:#}");
        }
        cluster.assert_guest_whole(to, "vm1");
    }
}

/// On a slow link, compression is used without an option; and no decision is reported twice.
#[test]
fn a_slow_link_is_reason_enough() {
    let link = lab::Link::Limited { rate_bytes_per_s: 8 << 20 };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() }.without_yielding());
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", load()));
    let report = cluster.migrate("vm1", "a", "b", &[]);
    assert_compressed(&report);
    assert_eq!(report["compression"]["wanted"], "auto");
    let ways: Vec<_> = report["compression"]["ways"].as_array().unwrap().iter().collect();
    assert!(!ways.is_empty() && ways.windows(2).all(|pair| pair[0]["way"] != pair[1]["way"]), "{report:#}");
    assert!(ways.iter().all(|way| way["link_bytes_per_s"].as_u64().unwrap() > 0), "{report:#}");
    let compression = assert_replayed(&report).others.compression.unwrap();
    assert!(compression.decisions().any(|decision| decision.way.to_string() == ways[0]["way"]), "{report:#}");
    cluster.assert_guest_whole("b", "vm1");
}

/// A cut in the middle: compressed frames that were not acknowledged are sent again.
#[test]
fn a_cut_link_loses_nothing_that_was_compressed() {
    let link = lab::Link::Limited { rate_bytes_per_s: 20 << 20 };
    let cluster = Cluster::with(&Setup { link, ..Setup::default() });
    let _guest = cluster.guest(&GuestSpec::tiny("vm1", load()));
    let report = cluster.migrate_through_a_cut("vm1", &["--compress", "zstd:1"]);
    assert_compressed(&report);
    cluster.assert_guest_whole("b", "vm1");
}
