use std::collections::BTreeMap;

use proto::message::{FailedFlow, Finding, RamBlock, Severity};
use proto::{Epoch, HostId, MigrationId, VmName};

use engine::pressure::Restraint;

use super::super::{Measured, RedirectedConnections, TrackedConnections, Verification};
use super::*;
use crate::MigrationSettings;
use crate::{NameChanges, NameRecord, NameStanding, NamesGoal};

pub(in crate::report) fn sample() -> Report {
    let id = MigrationId { vm: VmName::new("web").unwrap(), epoch: Epoch(7) };
    let settings = MigrationSettings { max_downtime_ms: 30, ..MigrationSettings::default() };
    let mut report = Report::begin(id, HostId::new("alpha").unwrap(), HostId::new("beta").unwrap(), settings);
    report.ram_blocks = vec![RamBlock { name: "pc.ram".into(), bytes: 512 << 20, page_bytes: 4096 }];
    report.rounds = vec![
        Round {
            round: 1,
            pass: 1,
            dirty_pages: 131_072,
            data_pages: 1000,
            hole_pages: 130_072,
            sent_bytes: 4_100_000,
            duration_us: 12_345,
            decision: "another-round".into(),
            ..Round::default()
        },
        Round {
            round: 2,
            stopped: true,
            dirty_pages: 3,
            data_pages: 3,
            decision: "last".into(),
            ..Round::default()
        },
    ];
    report.downtime = Some(Downtime::from_measured(Measured {
        total_us: 10_000,
        stop_us: 500,
        last_pages_us: 2_000,
        last_scans_us: 700,
        save_us: 0,
        verify_us: 0,
        save_to_ready_us: 5_000,
        load_us: 3_000,
        continue_us: 1_000,
        stop_event_us: Some(400),
        resumed_us: Some(600),
    }));
    report.verification = Some(Verification {
        left_out_pages: 0,
        compared_bytes: 512 << 20,
        chunks: 256,
        different_chunks: 0,
        duration_us: 900_000,
    });
    report.findings = vec![Finding {
        severity: Severity::Warning,
        code: "unit-restarts".into(),
        what: "systemd restarts web.service".into(),
        advice: "set Restart=no".into(),
    }];
    report.event(1_000, "stopped", "");
    report.end(Outcome::Moved, None, 2_000_000);
    report
}

#[test]
fn parts_add_up_whatever_was_measured() {
    let sum = |d: Downtime| {
        d.stop_us
            + d.last_pages_us
            + d.verify_us
            + d.device_state_us
            + d.load_us
            + d.handover_us
            + d.continue_us
    };
    let plain = sample().downtime.unwrap();
    assert_eq!((plain.handover_us, plain.device_state_us, sum(plain)), (1_500, 2_000, plain.total_us));
    assert_eq!(plain.events_us, Some(9_000));
    let odd = Downtime::from_measured(Measured {
        total_us: 5,
        load_us: 90,
        save_to_ready_us: 40,
        ..Measured::default()
    });
    assert_eq!((odd.total_us, sum(odd)), (40, 40));
}

#[test]
fn text_holds_what_matters() {
    let text = render(&sample());
    for expected in [
        "web#7 from alpha to beta: moved",
        "downtime    10.0 ms of 30 ms allowed",
        "all equal",
        "Warning: systemd restarts web.service",
        "* with the guest stopped",
    ] {
        assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
    }
    let table: Vec<_> = text.lines().skip_while(|line| !line.contains("drain")).take(3).collect();
    let at = |line: &str, word: &str| line.find(word).map(|at| line[..at].chars().count() + word.len());
    assert_eq!(at(table[0], "dirty"), at(table[1], "131072"), "columns are aligned:\n{text}");
}

#[test]
fn what_copying_held_back_is_told_as_far_as_it_came_to_that() {
    let of = |restraints: &[(u8, u16, u32)]| {
        let mut waiting = Waiting { permille: Some(123), most_permille: Some(456), ..Waiting::default() };
        for (nice, threads, interval_factor) in restraints {
            waiting.reached(Restraint { nice: *nice, threads: *threads, interval_factor: *interval_factor });
        }
        render(&Report { waiting: Some(waiting), ..sample() })
    };
    let nicer = of(&[(5, 4, 1), (9, 4, 1), (7, 4, 1)]);
    let waited = "  waited      12.3% of its time for processors, 45.6% at worst, unknown before;\n";
    assert!(nicer.contains(&format!("{waited}              copying nice 9\n")), "{nicer}");
    let all = of(&[(11, 2, 2), (11, 1, 4), (11, 2, 2), (5, 4, 1)]);
    let expected_text = "copying nice 11, 1 thread at a time, scan interval 4-fold\n";
    assert!(all.contains(expected_text), "{all}");
}

#[test]
fn of_very_many_rounds_the_first_and_the_last_are_shown() {
    let many = |count: u32| -> Vec<Round> {
        (1..=count)
            .map(|round| Round { round, dirty_pages: 7_000 + u64::from(round), ..Round::default() })
            .collect()
    };
    assert!(!rounds(&many(32)).contains("not shown") && rounds(&many(32)).contains("7009"));
    let text = rounds(&many(100));
    assert!(text.contains("68 rounds after the first 8 are not shown"), "{text}");
    assert!(text.contains("7008") && !text.contains("7009"), "{text}");
    assert!(!text.contains("7076") && text.contains("7077") && text.contains("7100"), "{text}");
    assert!(!rounds(&[]).contains("not shown"));
}

/// All numbers have their largest size; the length of a VM's name, of paths and of reasons is not limited.
#[test]
fn text_fits_on_a_terminal() {
    let mut report = sample();
    let large = Round {
        round: 999,
        pass: 99,
        dirty_pages: 1_000_000_000,
        disk_pages: 1_000_000_000,
        participant_pages: BTreeMap::from([("network".to_owned(), 1_000_000_000)]),
        data_pages: 1_000_000_000,
        zero_pages: 1_000_000_000,
        hole_pages: 1_000_000_000,
        filled_pages: 1_000_000_000,
        hinted_pages: 1_000_000_000,
        reference_pages: 1_000_000_000,
        delta_pages: 1_000_000_000,
        remaining_pages: 1_000_000_000,
        resent_pages: 1_000_000_000,
        pattern: Some(engine::pre_copy::Pattern::Resent),
        refused_pages: 1_000_000_000,
        sent_bytes: 1000 << 40,
        duration_us: 999_999_900,
        scan_us: 9_999_900,
        drain_us: 9_999_900,
        rate_bytes_per_s: 1000 << 20,
        dirty_rate_bytes_per_s: 1000 << 20,
        expected_downtime_us: Some(99_999_900),
        decision: "another-round".into(),
        stopped: true,
    };
    report.rounds.push(large);
    report.waiting = Some(Waiting {
        before_permille: Some(1000),
        permille: Some(1000),
        most_permille: Some(1000),
        nicest: 11,
        fewest_threads: Some(32),
        longest_interval_factor: Some(4),
    });
    let wide: Vec<_> =
        render(&report).lines().filter(|line| line.chars().count() > 80).map(str::to_owned).collect();
    assert!(wide.is_empty(), "{wide:#?}");
}

#[test]
fn json_names_its_schema_and_reads_back() {
    let report = sample();
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["schema"], "whimbrel.report/2");
    assert_eq!(json["vm"], "web");
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
}

#[test]
fn units_do_not_overflow_their_columns() {
    assert_eq!(bytes(1023), "1023 B");
    assert_eq!(bytes(1 << 20), "1.0 MiB");
    assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
    assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    assert_eq!(super::super::rfc3339(0), "1970-01-01T00:00:00.000Z");
    assert!(super::super::rfc3339(u64::MAX).starts_with("9999-12-31"));
}

#[test]
fn connections_that_were_not_carried_are_listed() {
    let mut report = sample();
    let failed = FailedFlow { flow: "tcp a → b".to_owned(), reason: "no room".to_owned() };
    report.connections = Some(TrackedConnections { carried: 7, failed: vec![failed], more_failed: 2 });
    let text = render(&report);
    assert!(text.contains("  connections 7 tracked connections carried, 3 not:\n"), "{text}");
    assert!(text.contains("  tcp a → b: no room\n") && text.contains("  and 2 more\n"), "{text}");
    report.connections = Some(TrackedConnections { carried: 7, ..TrackedConnections::default() });
    assert!(render(&report).contains("  connections 7 tracked connections carried\n"));
}

#[test]
fn the_tunnel_of_redirected_connections_is_shown() {
    let mut report = sample();
    let mut redirected = RedirectedConnections {
        addresses: vec!["192.0.2.5=198.51.100.5/24".parse().unwrap()],
        tunnel: "WireGuard".to_owned(),
        ends: ["192.0.2.2", "198.51.100.2"].map(|end| end.parse().unwrap()),
        mtu: 1440,
        prepare_us: None,
        switch_us: None,
    };
    report.redirection = Some(redirected.clone());
    let text = render(&report);
    let line =
        "  redirection 192.0.2.5=198.51.100.5/24 by WireGuard from 192.0.2.2 to 198.51.100.2, 1440 bytes\n";
    assert!(text.contains(line) && !text.contains("switched"), "{text}");
    (redirected.prepare_us, redirected.switch_us) = (Some(2_000), Some(3_000));
    report.redirection = Some(redirected);
    assert!(render(&report).contains("prepared in 2.0 ms, switched in 3.0 ms\n"), "{}", render(&report));
}

#[test]
fn names_are_shown_with_their_state() {
    let record = |after: &[&str], standing| NameRecord {
        name: "web.example.org".to_owned(),
        kind: "A".to_owned(),
        before: vec!["192.0.2.10".to_owned()],
        after: after.iter().map(|text| (*text).to_owned()).collect(),
        standing,
        ttl_s: None,
        serial: None,
        detail: "changed".to_owned(),
    };
    let records = vec![
        record(&["198.51.100.7", "198.51.100.8"], NameStanding::Made),
        record(&[], NameStanding::Failed),
    ];
    let names = NameChanges { goal: NamesGoal::Switched, reached: false, old_until_unix_s: None, records };
    assert_eq!(names.failed().count(), 1);
    let text = render(&Report { names: Some(names), ..sample() });
    for line in ["192.0.2.10 → 198.51.100.7, 198.51.100.8", "192.0.2.10 → nothing"] {
        let line = format!("\n  name        web.example.org A {line}: changed\n");
        assert!(text.contains(&line), "{line:?} is missing in\n{text}");
    }
}
