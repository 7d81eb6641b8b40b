//! The Debian guest and the client that watches it. Needs root, and the guest, which `make demo` and `make soak` make.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::time::Duration;

use whimbrel_lab as lab;

use lab::client::Client;
use lab::debian_guest::debian_guest;
use lab::{Environment, Guest, Lab, LabConfig, vm_address};

#[test]
#[ignore = "long: boots a Debian guest, which must have been made"]
fn the_guest_serves_and_the_client_sees_a_pause() {
    let lab = Lab::up(&LabConfig::for_test()).unwrap();
    let environment = Environment::discover();
    let spec = debian_guest(&lab, &environment, "web", 1).unwrap();
    let guest = Guest::start(&lab.a, &environment, &spec).unwrap();
    let line = guest.serial().follow().unwrap().wait_for_text("SERVING").unwrap();
    println!("{line}");

    let service = (vm_address(1), 80).into();
    let client = Client::start(&lab.client, service, Duration::from_millis(2)).unwrap();
    client.wait_for_answers(50).unwrap();
    let mut monitor = guest.monitor().unwrap();
    // The pause that the client has to detect.
    monitor.command("stop", &serde_json::json!({})).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    monitor.command("cont", &serde_json::json!({})).unwrap();
    client.wait_for_answers(50).unwrap();
    let report = client.finish();
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    assert!(report.is_clean(), "{report:?}");
    assert!(report.page.longest_gap_ms >= 300.0 && report.page.answered > 1 && report.notes.answered >= 1);

    // A client whose connection breaks reports it, and never opens another.
    let client = Client::start(&lab.client, service, Duration::from_millis(2)).unwrap();
    client.wait_for_answers(10).unwrap();
    let reject = "add table ip broken; add chain ip broken way { type filter hook forward priority 0; }; \
                  add rule ip broken way meta l4proto tcp reject with tcp reset";
    lab.router.run(&["nft", reject]).unwrap();
    assert!(client.wait_for_answers(1_000_000).is_err());
    lab.router.run(&["nft", "delete table ip broken"]).unwrap();
    let report = client.finish();
    assert!(report.page.error.is_some() && !report.is_clean(), "{report:?}");
}
