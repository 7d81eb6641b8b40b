//! A controller with three agents: hosts are emptied, and their VMs come back; the controller and agents are killed in the
//! middle. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]
#![allow(unreachable_pub, missing_docs, reason = "what the modules of a test share is seen by them alone")]

#[path = "../common/mod.rs"]
mod common;
mod fleet;
mod strangers;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Guest, WHIMBREL, until};
use fleet::Fleet;
use serde_json::Value;

/// Number of guests.
const GUESTS: usize = 4;

fn names() -> impl Iterator<Item = String> {
    (1..=GUESTS).map(|number| format!("vm{number}"))
}

/// Returns the number of VMs that are being migrated.
fn migrating(fleet: &Fleet) -> usize {
    let vms = fleet.run(&["fleet", "vms"]).ok().json();
    vms.as_array().unwrap().iter().filter(|vm| !vm["migration"].is_null()).count()
}

fn outcome(info: &Value) -> &str {
    info["status"]["outcome"]["outcome"].as_str().unwrap_or("none")
}

/// Waits until an evacuation has ended. Returns it.
fn wait_for_end(fleet: &Fleet, id: &str) -> Value {
    let output = fleet.run(&["evacuation", "watch", id]);
    let info = output.last_json();
    assert!(info["status"]["outcome"].is_object(), "{output:?}\n{}", fleet.logs());
    info
}

/// The controller knows its fleet; a plan moves nothing; a host is emptied and everything comes back.
#[test]
fn a_host_is_emptied_and_its_vms_return() {
    let fleet = Fleet::up();
    let _guests: Vec<Guest> = fleet.guests(GUESTS);
    let shown = fleet.host("a").unwrap();
    assert_eq!(shown["vms"].as_array().unwrap().len(), GUESTS, "{shown:#}");

    let plan = fleet.run(&["evacuate", "a", "--dry-run", "--to", "b"]).ok().json();
    assert_eq!(plan["plan"]["moves"].as_array().unwrap().len(), GUESTS, "{plan:#}");
    assert!(plan["moves"].as_array().unwrap().iter().all(|one| one["to"] == "b"), "{plan:#}");
    assert_eq!(fleet.run(&["evacuation", "list"]).ok().json(), serde_json::json!([]));
    for vm in names() {
        fleet.assert_moves(&vm, 0);
    }
    refusals(&fleet);

    let done = fleet.run(&["evacuate", "a", "--verify"]);
    assert_eq!(done.code, 0, "{done:?}\n{}", fleet.logs());
    let info = done.last_json();
    assert_eq!(outcome(&info), "done", "{info:#}");
    assert_eq!(info["status"]["outcome"]["moved"], GUESTS, "{info:#}");
    for vm in names() {
        fleet.assert_whole(&vm, |place| place != "a");
        fleet.assert_moves(&vm, 1);
    }
    assert!(fleet.node("a").qemus().is_empty());
    let emptied = fleet.host("a").unwrap();
    assert_eq!((&emptied["remains"], &emptied["cordoned"]), (&serde_json::json!([]), &Value::from(true)));
    // The agent itself refuses arrivals.
    let from = fleet.places("vm1")[0];
    let check = fleet.node(from).run(&["migrate", "vm1", "--to", "a", "--check"]).json();
    let findings = check["destination_findings"].as_array().unwrap();
    assert!(findings.iter().any(|found| found["code"] == "host-cordoned"), "{check:#}");

    let back = fleet.run(&["return", "a", "--verify"]);
    assert_eq!(back.code, 0, "{back:?}\n{}", fleet.logs());
    for vm in names() {
        fleet.assert_whole(&vm, |place| place == "a");
        fleet.assert_moves(&vm, 2);
    }
    assert_eq!(fleet.host("a").unwrap()["cordoned"], false);
    let again = fleet.run(&["return", "a"]);
    assert_eq!(again.code, 1, "everything is back: {again:?}");
    watched(&fleet);
}

/// Requests that are impossible are refused with the reason and a way out, and move nothing.
fn refusals(fleet: &Fleet) {
    let refused = |words: &[&str], code: i32, word: &str| {
        let output = fleet.run(words);
        assert_eq!(output.code, code, "{words:?}: {output:?}");
        let problem = output.json();
        assert!(problem["error"].as_str().unwrap().contains(word), "{problem:#}");
        assert!(!problem["advice"].as_str().unwrap().is_empty(), "{problem:#}");
    };
    refused(&["evacuate", "nowhere"], 2, "nowhere");
    refused(&["evacuate", "a", "--by", "1ms"], 1, "are left");
    refused(&["return", "b"], 1, "no evacuation");
    refused(&["fleet", "cordon", "nowhere"], 2, "nowhere");
    refused(&["evacuation", "resume", "e99"], 2, "e99");
    assert_eq!(migrating(fleet), 0);
}

/// Events, metrics and the inventory show what has happened.
fn watched(fleet: &Fleet) {
    let events = fleet.run(&["fleet", "events", "--after", "0"]).ok();
    let events: Vec<Value> = events.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let numbers: Vec<_> = events.iter().map(|event| event["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "without a gap");
    for kind in [
        "controller-started",
        "host-connected",
        "vm-appeared",
        "evacuation-began",
        "migration-ended",
        "host-cordoned",
    ] {
        assert!(events.iter().any(|event| event["kind"] == kind), "no {kind} in {events:#?}");
    }
    let inventory = fleet.run(&["fleet", "inventory"]).ok().json();
    assert_eq!(inventory["vms"].as_array().unwrap().len(), GUESTS, "{inventory:#}");
    for (socket, metric) in [
        (fleet.controller_socket(), "whimbrel_host_connected{host=\"a\"} 1"),
        (fleet.node("a").socket(), "whimbrel_controller_connected 1"),
    ] {
        let text = metrics(&socket);
        assert!(text.contains(metric), "{text}");
    }
}

/// Returns the answer of a daemon to a request for its metrics.
fn metrics(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: whimbrel\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    answer
}

/// The controller is killed while VMs move, and an agent as well: nothing moves twice, and the evacuation ends.
#[test]
fn killed_daemons_move_nothing_twice() {
    let mut fleet = Fleet::up();
    let _guests = fleet.guests(GUESTS);
    let begun = fleet.run(&["evacuate", "a", "--verify", "--bandwidth", "12M", "--detach"]).ok().json();
    let id = begun["id"].as_str().unwrap().to_owned();
    until("a VM moves", || migrating(&fleet) > 0);
    fleet.kill_controller();
    assert_eq!(fleet.run(&["fleet", "status"]).code, 1, "no controller answers");
    fleet.start_controller();
    fleet.wait_connected("a");
    until("a VM moves", || {
        migrating(&fleet) > 0 || !fleet.node("a").run(&["vm", "list"]).ok().json().to_string().contains("vm")
    });
    // Migrations before their commit point end with the agent of their source, and are tried again.
    fleet.node_mut("a").kill();
    until("the controller knows that the agent is away", || fleet.host("a").unwrap()["connected"] == false);
    fleet.node_mut("a").start();
    let info = wait_for_end(&fleet, &id);
    assert_eq!(outcome(&info), "done", "{info:#}\n{}", fleet.logs());
    for vm in names() {
        fleet.assert_whole(&vm, |place| place != "a");
        fleet.assert_moves(&vm, 1);
    }
    assert_eq!(fleet.host("a").unwrap()["remains"], serde_json::json!([]));
}

/// A cancelled evacuation leaves all VMs whole, and goes on when it is resumed.
#[test]
fn a_cancelled_evacuation_is_resumed() {
    let fleet = Fleet::up();
    let _guests = fleet.guests(GUESTS);
    let mut watching = fleet.begin(&["evacuate", "a", "--verify", "--bandwidth", "12M"]);
    until("a VM moves", || migrating(&fleet) > 0);
    let all = fleet.run(&["evacuation", "list"]).ok().json();
    let id = all[0]["id"].as_str().unwrap().to_owned();
    let cancelled = fleet.run(&["evacuation", "cancel", &id]);
    assert_eq!(cancelled.code, 0, "{cancelled:?}\n{}", fleet.logs());
    assert_eq!(outcome(&cancelled.last_json()), "cancelled", "{cancelled:?}");
    assert_eq!(watching.wait().unwrap().code(), Some(1), "whoever watches it learns that");
    for vm in names() {
        until("no migration is left", || fleet.places(&vm).len() == 1);
        fleet.assert_whole(&vm, |_| true);
    }
    let resumed = fleet.run(&["evacuation", "resume", &id]);
    assert_eq!(resumed.code, 0, "{resumed:?}\n{}", fleet.logs());
    assert_eq!(outcome(&resumed.last_json()), "done", "{resumed:?}");
    for vm in names() {
        fleet.assert_whole(&vm, |place| place != "a");
        fleet.assert_moves(&vm, 1);
    }
}

/// A host asks for its own evacuation, as the unit does that runs before a shutdown; cordons are kept on the host itself.
#[test]
fn a_host_asks_for_its_own_evacuation() {
    let mut fleet = Fleet::up();
    let _guests = fleet.guests(1);
    // Nothing can leave while no other host accepts VMs.
    for name in ["b", "c"] {
        fleet.run(&["fleet", "cordon", name]).ok();
    }
    let refused = fleet.node("a").run(&["evacuate", "--this-host", "--by", "10m"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert_eq!(refused.json()["standing"], "failed", "{refused:?}");
    fleet.node_mut("b").kill();
    fleet.node_mut("b").start();
    fleet.wait_connected("b");
    assert_eq!(fleet.host("b").unwrap()["cordoned"], true, "a cordon survives the agent");
    // A user of the host opens it again, and the controller follows.
    fleet.node("b").run(&["fleet", "uncordon", "--this-host"]).ok();
    until("the controller learns of it", || fleet.host("b").unwrap()["cordoned"] == false);
    let done = fleet.node("a").run(&["evacuate", "--this-host", "--by", "10m"]);
    assert_eq!(done.code, 0, "{done:?}\n{}", fleet.logs());
    assert_eq!(done.json()["standing"], "done", "{done:?}");
    fleet.assert_whole("vm1", |place| place == "b");
}

/// Events are followed by a command that stays.
#[test]
fn events_are_followed() {
    let fleet = Fleet::up();
    let mut following =
        fleet.command(&["fleet", "events", "--follow"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    // It follows from the moment at which it has asked: until then there is an event again and again.
    let (sender, ended) = std::sync::mpsc::channel::<()>();
    let found = std::thread::scope(|scope| {
        let fleet = &fleet;
        scope.spawn(move || {
            while ended.recv_timeout(std::time::Duration::from_millis(100)).is_err() {
                fleet.run(&["fleet", "cordon", "c"]).ok();
            }
        });
        let found = lines.find_map(|line| {
            let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
            (event["kind"] == "host-cordoned").then_some(event)
        });
        sender.send(()).unwrap();
        found
    });
    assert_eq!(found.unwrap()["host"], "c");
    following.kill().unwrap();
    following.wait().unwrap();
}

/// Commands about the fleet name the remedy where no controller is.
#[test]
fn a_missing_controller_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(WHIMBREL);
    command.env("WHIMBREL_CONTROLLER", folder.path().join("none.sock")).args(["fleet", "status"]);
    let output = common::CommandOutput::by(&mut command);
    assert_eq!(output.code, 1, "{output:?}");
    assert!(
        output.stderr.contains("no controller answers") && output.stderr.contains("--controller"),
        "{output:?}"
    );
}
