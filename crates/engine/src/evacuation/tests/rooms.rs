//! Evacuations beside one another: the same room, each other's hosts, and requests that contradict.

use super::fleet::*;
use crate::evacuation::*;
use crate::planner::Refusal;

fn to(hosts: &[&str], targets: &[&str]) -> EvacuationRequest {
    let mut request = empty_request(hosts);
    let EvacuationGoal::Empty { to, .. } = &mut request.goal else { unreachable!() };
    to.extend(targets.iter().map(|host| (*host).to_owned()));
    request
}

#[test]
fn room_that_another_takes_for_good_is_refused() {
    let mut bench =
        Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("v1", "a", 40), vm("v2", "b", 40)]);
    bench.begin("e1", to(&["a"], &["c"]));
    let refused = bench.evacuations.begin(id("e2"), to(&["b"], &["c"]), &bench.inventory, bench.now_ns);
    let refusal = refused.unwrap_err();
    let EvacuationRefusal::RoomTaken { by, .. } = &refusal else { panic!("{refusal}") };
    assert_eq!(*by, [id("e1")]);
    assert!(refusal.to_string().starts_with("evacuation e1 takes the room"), "{refusal}");
    assert!(refusal.advice().contains("cancel the other one"), "{}", refusal.advice());
    // Also what is only planned is reserved.
    bench.end("v1", MoveEnd::Moved);
    let refused = bench.evacuations.begin(id("e2"), to(&["b"], &["c"]), &bench.inventory, bench.now_ns);
    assert!(
        matches!(refused, Err(EvacuationRefusal::Plan { refusal: Refusal::Overfull { .. } })),
        "{refused:?}"
    );
}

#[test]
fn room_that_is_only_planned_is_reserved() {
    let mut bench = Bench::new(
        vec![host("a"), host("b"), host("c")],
        vec![vm("v1", "a", 30), vm("v2", "a", 20), vm("v3", "b", 20)],
    );
    bench.begin("e1", to(&["a"], &["c"]));
    assert_eq!(bench.ordered(), ["v1 a>c"]);
    let refused = bench.evacuations.begin(id("e2"), to(&["b"], &["c"]), &bench.inventory, bench.now_ns);
    assert!(matches!(refused, Err(EvacuationRefusal::RoomTaken { .. })), "{refused:?}");
}

#[test]
fn room_that_another_frees_is_waited_for() {
    let mut bench =
        Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("v1", "a", 40), vm("v2", "b", 40)]);
    bench.begin("e", to(&["a"], &["c"]));
    bench.run();
    // It leaves c again, and what is on b goes there.
    let request = bench.evacuations.return_request("a", &bench.inventory).unwrap();
    bench.begin("r", request);
    assert_eq!(bench.ordered(), ["v1 c>a"]);
    let found = bench.evacuations.preview(&to(&["b"], &["c"]), &bench.inventory, bench.now_ns).unwrap();
    assert_eq!(found.waits_for, [id("r")]);
    bench.begin("f", to(&["b"], &["c"]));
    assert_eq!(bench.ordered(), ["v1 c>a"]);
    bench.end("v1", MoveEnd::Moved);
    bench.tick(5);
    assert_eq!(bench.ordered(), ["v2 b>c"]);
    bench.run();
    assert!(matches!(bench.outcome("f"), EvacuationOutcome::Done { moved: 1, .. }), "{:?}", bench.texts);
}

#[test]
fn an_evacuation_waits_for_arrivals_of_another() {
    let mut bench =
        Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("v1", "a", 8), vm("v2", "b", 4)]);
    bench.begin("e1", to(&["a"], &["b"]));
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    let found = bench.evacuations.preview(&empty_request(&["b"]), &bench.inventory, bench.now_ns).unwrap();
    assert_eq!(found.waits_for, [id("e1")]);
    let deadline_ns = Some(bench.now_ns + 900 * SECOND);
    bench.begin("e2", EvacuationRequest { deadline_ns, ..empty_request(&["b"]) });
    assert!(
        bench.has_text("it is not known if the deadline will be kept: evacuation e1 goes first"),
        "{:?}",
        bench.texts
    );
    assert_eq!(bench.one("e2").status(bench.now_ns).phase, EvacuationPhase::WaitsForEvacuation);
    assert!(bench.has_text("it waits until evacuation e1 has ended"), "{:?}", bench.texts);
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    // It waits however long that takes.
    for _ in 0..10 {
        bench.tick(50);
    }
    assert_eq!(bench.one("e2").outcome(), None);
    bench.end("v1", MoveEnd::Moved);
    assert!(bench.ordered().iter().all(|text| text.ends_with("b>c")), "{:?}", bench.ordered());
    bench.run();
    for name in ["e1", "e2"] {
        assert!(matches!(bench.outcome(name), EvacuationOutcome::Done { .. }), "{:?}", bench.texts);
    }
    assert_eq!(bench.vms_on("c"), ["v1", "v2"]);
}

#[test]
fn hosts_that_others_empty_are_no_targets() {
    let mut bench = Bench::new(
        vec![host("a"), host("b"), host("c")],
        vec![vm("v1", "a", 8), vm("v2", "b", 4), vm("v3", "c", 50)],
    );
    bench.begin("e1", empty_request(&["b"]));
    assert_eq!(bench.ordered(), ["v2 b>a"]);
    bench.begin("e2", empty_request(&["a"]));
    // It waits for the arrival, and then has c alone, which both fit.
    bench.end("v2", MoveEnd::Moved);
    bench.run();
    assert!(matches!(bench.outcome("e2"), EvacuationOutcome::Done { .. }), "{:?}", bench.texts);
    assert_eq!(bench.vms_on("b"), Vec::<&str>::new());
}

#[test]
fn requests_that_cannot_be_carried_out_are_refused() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8)]);
    let mut refusal = |request: EvacuationRequest| {
        let begun = bench.evacuations.begin(id("e"), request, &bench.inventory, bench.now_ns);
        begun.unwrap_err()
    };
    assert_eq!(refusal(empty_request(&[])), EvacuationRefusal::NothingNamed);
    assert!(matches!(
        refusal(empty_request(&["nowhere"])),
        EvacuationRefusal::Plan { refusal: Refusal::UnknownHost { .. } }
    ));
    assert!(matches!(
        refusal(to(&["a"], &["nowhere"])),
        EvacuationRefusal::Plan { refusal: Refusal::UnknownHost { .. } }
    ));
    bench.handle(&EvacuationEvent::HostLost { host: "a".to_owned() });
    let refused = bench.evacuations.begin(id("e"), empty_request(&["a"]), &bench.inventory, bench.now_ns);
    assert_eq!(refused.unwrap_err(), EvacuationRefusal::NotConnected { host: "a".to_owned() });
    bench.connect("a");
    bench.begin("e", empty_request(&["a"]));
    let refused = bench.evacuations.begin(id("f"), empty_request(&["a"]), &bench.inventory, bench.now_ns);
    assert_eq!(refused.unwrap_err(), EvacuationRefusal::Busy { host: "a".to_owned(), by: id("e") });
    assert!(bench.evacuations.resume(&id("e"), &bench.inventory, bench.now_ns).is_err());
    assert!(bench.evacuations.cancel(&id("g"), &bench.inventory, bench.now_ns).is_err());
}

#[test]
fn an_overfull_host_and_a_cyclic_affinity_are_refused() {
    let vms = vec![vm("v1", "a", 40), vm("v2", "a", 20), vm("v3", "b", 10)];
    let mut bench = Bench::new(vec![host("a"), host("b")], vms);
    let refused = bench.evacuations.preview(&empty_request(&["a"]), &bench.inventory, bench.now_ns);
    let refusal = refused.unwrap_err();
    assert!(matches!(&refusal, EvacuationRefusal::Plan { refusal: Refusal::Overfull { .. } }), "{refusal}");
    // In part it can be done.
    let request = EvacuationRequest { partial: true, ..empty_request(&["a"]) };
    bench.begin("e", request);
    bench.run();
    let EvacuationOutcome::Incomplete { vms, .. } = bench.outcome("e") else { panic!("{:?}", bench.texts) };
    assert_eq!(vms.len(), 1);
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 1), vm("v2", "a", 1)]);
    bench.spec("v1").rules.follows = vec!["v2".to_owned()];
    bench.spec("v2").rules.follows = vec!["v1".to_owned()];
    let refused = bench.evacuations.preview(&empty_request(&["a"]), &bench.inventory, bench.now_ns);
    assert!(
        matches!(&refused, Err(EvacuationRefusal::Plan { refusal: Refusal::CyclicAffinity { .. } })),
        "{refused:?}"
    );
}
