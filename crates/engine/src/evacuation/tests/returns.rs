//! Returns: what left a host comes back.

use super::fleet::*;
use crate::evacuation::*;

fn emptied() -> Bench {
    let mut bench = Bench::new(
        vec![host("a"), host("b"), host("c")],
        vec![vm("v1", "a", 8), vm("v2", "a", 4), vm("v3", "b", 1)],
    );
    bench.begin("e", empty_request(&["a"]));
    bench.run();
    bench
}

#[test]
fn what_left_comes_back_and_nothing_else() {
    let mut bench = emptied();
    let request = bench.evacuations.return_request("a", &bench.inventory).unwrap();
    let vms = ["v1".to_owned(), "v2".to_owned()];
    assert_eq!(request.goal, EvacuationGoal::Return { host: "a".to_owned(), vms: vms.into() });
    bench.begin("r", request);
    assert!(!bench.inventory.hosts[0].cordoned);
    bench.run();
    assert!(matches!(bench.outcome("r"), EvacuationOutcome::Done { moved: 2, .. }), "{:?}", bench.texts);
    assert_eq!(bench.vms_on("a"), ["v1", "v2"]);
    assert_eq!(bench.one("e").departures(), []);
    let again = bench.evacuations.return_request("a", &bench.inventory);
    assert!(matches!(again, Err(EvacuationRefusal::NothingToReturn { .. })));
}

#[test]
fn a_vm_comes_back_from_wherever_it_is_now() {
    let mut bench = emptied();
    bench.spec("v1").host = "b".to_owned();
    bench.inventory.vms.retain(|spec| spec.name != "v2");
    let request = bench.evacuations.return_request("a", &bench.inventory).unwrap();
    bench.begin("r", request);
    assert_eq!(bench.ordered(), ["v1 b>a"]);
    bench.run();
    assert!(matches!(bench.outcome("r"), EvacuationOutcome::Done { moved: 1, .. }), "{:?}", bench.texts);
    // The other one has ended, and remains recorded.
    assert_eq!(bench.one("e").departures().len(), 1);
}

#[test]
fn a_return_survives_a_restart_of_the_controller() {
    let mut bench = emptied();
    let request = bench.evacuations.return_request("a", &bench.inventory).unwrap();
    bench.begin("r", request);
    let command = bench.orders.values().next().unwrap().command.clone();
    bench.restart();
    for host in ["a", "b", "c"] {
        bench.connect(host);
        bench.answer();
    }
    assert!(bench.orders.values().any(|order| order.command == command));
    bench.run();
    assert_eq!(bench.vms_on("a"), ["v1", "v2"]);
    assert_eq!(bench.one("e").departures(), []);
}

#[test]
fn a_vm_that_fails_to_return_stays_recorded() {
    let mut bench = emptied();
    let request = bench.evacuations.return_request("a", &bench.inventory).unwrap();
    bench.begin("r", request);
    while !bench.orders.contains_key("v1") {
        bench.end("v2", MoveEnd::Moved);
    }
    bench.end("v1", failed(MoveFailure::Immovable));
    bench.run();
    assert!(matches!(bench.outcome("r"), EvacuationOutcome::Incomplete { .. }), "{:?}", bench.texts);
    let left: Vec<&str> = bench.one("e").departures().iter().map(|one| one.vm.as_str()).collect();
    assert_eq!(left, ["v1"]);
}

#[test]
fn an_evacuation_that_is_resumed_sees_what_came_back() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8), vm("v2", "a", 4)]);
    bench.begin("e", empty_request(&["a"]));
    bench.end("v1", MoveEnd::Moved);
    bench.end("v2", failed(MoveFailure::Immovable));
    bench.run();
    let request = bench.evacuations.return_request("a", &bench.inventory).unwrap();
    bench.begin("r", request);
    bench.run();
    assert_eq!(bench.vms_on("a"), ["v1", "v2"]);
    let step = bench.evacuations.resume(&id("e"), &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    bench.answer();
    bench.run();
    assert_eq!(bench.vms_on("a"), Vec::<&str>::new());
    assert_eq!(bench.one("e").departures().len(), 2);
}

/// A return of a VM of host b and one of host c.
fn return_from_two() -> (Bench, EvacuationRequest) {
    let mut bench = emptied();
    bench.spec("v1").host = "b".to_owned();
    bench.spec("v2").host = "c".to_owned();
    let request = bench.evacuations.return_request("a", &bench.inventory).unwrap();
    (bench, request)
}

#[test]
fn a_return_waits_for_the_hosts_of_its_vms() {
    let (mut bench, request) = return_from_two();
    let step = bench.evacuations.begin(id("r"), request, &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    let asked = bench.questions();
    bench.handle(&EvacuationEvent::HostLost { host: "b".to_owned() });
    assert_eq!(asked.len(), 1);
    bench.answer_with("a", std::collections::BTreeMap::new(), contents("a", &[]));
    for _ in 0..10 {
        bench.tick(30);
        bench.answer();
    }
    assert_eq!(bench.one("r").outcome(), None, "{:?}", bench.texts);
    bench.connect("b");
    bench.answer();
    bench.tick(5);
    bench.run();
    assert!(matches!(bench.outcome("r"), EvacuationOutcome::Done { moved: 2, .. }), "{:?}", bench.texts);
}

#[test]
fn a_return_from_a_host_that_stays_lost_is_refused() {
    let (mut bench, request) = return_from_two();
    bench.handle(&EvacuationEvent::HostLost { host: "b".to_owned() });
    let refusal = EvacuationRefusal::NotConnected { host: "b".to_owned() };
    let begun = bench.evacuations.begin(id("r"), request.clone(), &bench.inventory, bench.now_ns);
    assert_eq!(begun.unwrap_err(), refusal);
    bench.connect("b");
    let step = bench.evacuations.begin(id("r"), request, &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    bench.handle(&EvacuationEvent::HostLost { host: "b".to_owned() });
    bench.answer_with("a", std::collections::BTreeMap::new(), contents("a", &[]));
    for _ in 0..20 {
        bench.tick(30);
        bench.answer();
    }
    assert_eq!(*bench.outcome("r"), EvacuationOutcome::Refused { refusal });
}
