//! Failures: attempts, other targets, doubt, lost hosts, cancelled evacuations.

use super::fleet::*;
use crate::evacuation::*;
use crate::planner::MoveLimits;

/// Three hosts, and two VMs on the first one that move at the same time.
fn two_at_once() -> Bench {
    let mut bench =
        Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("v1", "a", 8), vm("v2", "a", 4)]);
    let mut request = empty_request(&["a"]);
    request.limits = MoveLimits { copy_bytes_per_s: 400_000_000, ..MoveLimits::default() };
    bench.begin("e", request);
    assert_eq!(bench.ordered(), ["v1 a>b", "v2 a>c"]);
    bench
}

#[test]
fn one_failure_does_not_stop_the_others() {
    let mut bench = two_at_once();
    bench.end("v1", failed(MoveFailure::Other));
    assert!(bench.has_text("VM v1 did not move to host b: Other; the next attempt is in 5 s"));
    bench.end("v2", MoveEnd::Moved);
    assert_eq!(bench.ordered(), Vec::<String>::new());
    bench.tick(4);
    assert_eq!(bench.ordered(), Vec::<String>::new());
    bench.tick(1);
    // Another host is tried, by another command.
    assert_eq!(bench.ordered(), ["v1 a>c"]);
    assert_eq!(bench.orders["v1"].command.number, 3);
    bench.run();
    assert_eq!(*bench.outcome("e"), EvacuationOutcome::Done { moved: 2, late_by_ns: None });
}

#[test]
fn a_host_that_refuses_a_vm_is_not_tried_again() {
    let mut bench = two_at_once();
    bench.end("v1", failed(MoveFailure::Refused));
    bench.tick(60);
    assert_eq!(bench.ordered(), ["v1 a>c", "v2 a>c"]);
    let status = bench.one("e").status(bench.now_ns);
    let one = status.moves.iter().find(|one| one.vm == "v1").unwrap();
    assert_eq!(one.avoids, [("b".to_owned(), "Refused".to_owned())]);
    bench.end("v1", failed(MoveFailure::Refused));
    bench.end("v2", MoveEnd::Moved);
    bench.run();
    let EvacuationOutcome::Incomplete { vms, .. } = bench.outcome("e") else { panic!("{:?}", bench.texts) };
    assert!(matches!(&vms[..], [BlockedVm { why: BlockedReason::NoPlan { .. }, .. }]), "{vms:?}");
}

#[test]
fn attempts_are_bounded_and_pauses_double() {
    let mut bench = two_at_once();
    bench.end("v2", MoveEnd::Moved);
    for pause_s in [5, 10, 20] {
        bench.end("v1", failed(MoveFailure::NotConverging));
        bench.tick(pause_s - 1);
        assert_eq!(bench.ordered(), Vec::<String>::new());
        bench.tick(1);
        assert_eq!(bench.ordered().len(), 1);
    }
    bench.end("v1", failed(MoveFailure::NotConverging));
    bench.run();
    let EvacuationOutcome::Incomplete { vms, .. } = bench.outcome("e") else { panic!("{:?}", bench.texts) };
    assert!(matches!(&vms[0].why, BlockedReason::Failed { attempts: 4, .. }), "{vms:?}");
    // A person has removed the reason.
    let step = bench.evacuations.resume(&id("e"), &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    bench.answer();
    assert_eq!(bench.ordered().len(), 1);
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 2, .. }), "{:?}", bench.texts);
}

#[test]
fn a_vm_that_cannot_move_blocks_itself_alone() {
    let mut bench = two_at_once();
    bench.end("v1", failed(MoveFailure::Immovable));
    bench.end("v2", MoveEnd::Moved);
    bench.run();
    let EvacuationOutcome::Incomplete { vms, hosts } = bench.outcome("e") else {
        panic!("{:?}", bench.texts)
    };
    assert!(matches!(&vms[..], [BlockedVm { why: BlockedReason::Immovable { .. }, .. }]));
    assert_eq!(hosts[0].remaining, Some(vec![Remaining::Vm { vm: "v1".to_owned() }]));
    assert_eq!(bench.vms_on("a"), ["v1"]);
}

#[test]
fn a_move_in_doubt_blocks_its_vm_and_keeps_its_room() {
    let mut bench =
        Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 40), vm("v2", "a", 10), vm("v3", "a", 8)]);
    bench.begin("e", empty_request(&["a"]));
    let doubt = MoveEnd::InDoubt { reason: "the witness does not answer".to_owned() };
    bench.end("v1", doubt.clone());
    assert!(bench.has_text("VM v1 is blocked"), "{:?}", bench.texts);
    // The link is free; 14 of 64 GiB are, too.
    let first = bench.orders.remove("v1").unwrap();
    assert_eq!(bench.ordered(), ["v2 a>b"]);
    bench.end("v2", MoveEnd::Moved);
    bench.end("v3", MoveEnd::Moved);
    bench.tick(1);
    assert_eq!(bench.one("e").outcome(), None);
    bench.handle(&EvacuationEvent::MoveEnded { command: first.command.clone(), end: doubt });
    assert_eq!(bench.orders.len(), 0);
    // It was decided that it has stayed: it moves by another command.
    bench.handle(&EvacuationEvent::MoveEnded { command: first.command, end: failed(MoveFailure::Other) });
    assert!(bench.has_text("VM v1 is in doubt no longer: it is on host a"), "{:?}", bench.texts);
    bench.tick(5);
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    bench.run();
    assert_eq!(*bench.outcome("e"), EvacuationOutcome::Done { moved: 3, late_by_ns: None });
}

#[test]
fn a_doubt_that_lasts_ends_the_evacuation_with_its_reason() {
    let mut bench = two_at_once();
    bench.end("v1", MoveEnd::InDoubt { reason: "cut".to_owned() });
    let first = bench.orders.remove("v1").unwrap();
    bench.end("v2", MoveEnd::Moved);
    bench.tick(601);
    let EvacuationOutcome::Incomplete { vms, .. } = bench.outcome("e") else { panic!("{:?}", bench.texts) };
    assert!(matches!(&vms[..], [BlockedVm { why: BlockedReason::InDoubt { .. }, .. }]), "{vms:?}");
    assert!(!bench.evacuations.forget(&id("e")));
    // The answer comes afterwards, and is known when it is resumed.
    bench.spec("v1").host = "b".to_owned();
    bench.handle(&EvacuationEvent::MoveEnded { command: first.command, end: MoveEnd::Moved });
    let step = bench.evacuations.resume(&id("e"), &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    bench.answer();
    bench.run();
    assert_eq!(*bench.outcome("e"), EvacuationOutcome::Done { moved: 2, late_by_ns: None });
    assert!(bench.evacuations.forget(&id("e")));
}

#[test]
fn a_lost_target_is_replaced_and_a_lost_source_waited_for() {
    let mut bench = Bench::new(
        vec![host("a"), host("b"), host("c")],
        vec![vm("v1", "a", 8), vm("v2", "a", 4), vm("v3", "b", 20)],
    );
    bench.begin("e", empty_request(&["a"]));
    assert_eq!(bench.ordered(), ["v1 a>c"]);
    bench.handle(&EvacuationEvent::HostLost { host: "c".to_owned() });
    assert!(bench.has_text("host c has lost its connection"), "{:?}", bench.texts);
    // What is under way goes on; then both go elsewhere.
    bench.end("v1", failed(MoveFailure::Connection));
    assert_eq!(bench.ordered(), ["v2 a>b"]);
    bench.end("v2", MoveEnd::Moved);
    bench.tick(6);
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    bench.handle(&EvacuationEvent::HostLost { host: "a".to_owned() });
    bench.tick(30);
    assert_eq!(bench.one("e").outcome(), None);
    bench.connect("a");
    bench.answer();
    assert!(bench.has_text("host a is connected again"), "{:?}", bench.texts);
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { .. }), "{:?}", bench.texts);
}

#[test]
fn a_source_that_does_not_come_back_ends_the_evacuation() {
    let mut bench = two_at_once();
    bench.handle(&EvacuationEvent::HostLost { host: "a".to_owned() });
    // The destination has one of them: that is enough to know.
    bench.handle(&EvacuationEvent::VmAppeared { vm: "v2".to_owned(), host: "c".to_owned() });
    bench.tick(601);
    let EvacuationOutcome::Incomplete { vms, hosts } = bench.outcome("e") else {
        panic!("{:?}", bench.texts)
    };
    assert!(matches!(&vms[..], [BlockedVm { why: BlockedReason::HostLost { .. }, .. }]), "{vms:?}");
    assert_eq!(hosts[0].remaining, None);
    // When the host is back, the order to cancel reaches it: nothing of the evacuation begins afterwards.
    bench.orders.remove("v2");
    bench.connect("a");
    bench.answer();
    let is_cancel = |action: &EvacuationAction| matches!(action, EvacuationAction::CancelMove { .. });
    assert_eq!(count(&bench.actions, is_cancel), 1, "{:?}", bench.actions);
    assert_eq!(count(&bench.actions, |one| matches!(one, EvacuationAction::StartMove { .. })), 0);
}

#[test]
fn a_move_without_progress_is_cancelled_and_tried_again() {
    let mut bench = two_at_once();
    bench.end("v2", MoveEnd::Moved);
    let command = bench.orders["v1"].command.clone();
    let progressed = |bytes_left| EvacuationEvent::MoveProgressed {
        command: command.clone(),
        progress: MoveProgress { bytes_left, bytes_per_s: 1_000_000, ..MoveProgress::default() },
    };
    let is_cancel = |action: &EvacuationAction| matches!(action, EvacuationAction::CancelMove { .. });
    bench.handle(&progressed(1 << 30));
    bench.tick(500);
    bench.handle(&progressed(1 << 29));
    bench.tick(599);
    assert_eq!(count(&bench.actions, is_cancel), 0);
    // More is left than before, and nothing was sent.
    bench.handle(&progressed(1 << 30));
    bench.tick(1);
    assert_eq!(count(&bench.actions, is_cancel), 1);
    bench.end("v1", MoveEnd::Cancelled);
    assert!(bench.has_text("it made no progress"), "{:?}", bench.texts);
    bench.tick(5);
    assert_eq!(bench.ordered().len(), 1);
}

#[test]
fn a_move_of_many_rounds_is_not_cancelled() {
    let mut bench = two_at_once();
    bench.end("v2", MoveEnd::Moved);
    let command = bench.orders["v1"].command.clone();
    let progressed = |bytes_left, sent_bytes, phase| EvacuationEvent::MoveProgressed {
        command: command.clone(),
        progress: MoveProgress { bytes_left, bytes_per_s: 1_000_000, sent_bytes, phase },
    };
    let is_cancel = |action: &EvacuationAction| matches!(action, EvacuationAction::CancelMove { .. });
    // Two rounds, and then another phase in which nothing is sent.
    let rounds = [(50, 0, 1), (1, 49, 1), (50, 51, 1), (2, 99, 1), (2, 99, 2)];
    for (left, sent, phase) in rounds {
        bench.handle(&progressed(left << 20, sent << 20, phase));
        bench.tick(400);
        assert_eq!(count(&bench.actions, is_cancel), 0, "{left} MiB left");
    }
    bench.tick(200);
    assert_eq!(count(&bench.actions, is_cancel), 1, "nothing happens");
}

#[test]
fn a_cancelled_evacuation_leaves_vms_and_can_be_resumed() {
    let mut bench = two_at_once();
    bench.end("v2", MoveEnd::Moved);
    let step = bench.evacuations.cancel(&id("e"), &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    let is_cancel = |action: &EvacuationAction| matches!(action, EvacuationAction::CancelMove { .. });
    assert_eq!(count(&bench.actions, is_cancel), 1);
    assert_eq!(bench.one("e").outcome(), None);
    bench.end("v1", MoveEnd::Cancelled);
    assert_eq!(*bench.outcome("e"), EvacuationOutcome::Cancelled { moved: 1, unsettled: Vec::new() });
    assert!(!bench.inventory.hosts[0].cordoned);
    assert!(bench.evacuations.cancel(&id("e"), &bench.inventory, bench.now_ns).is_err());
    let step = bench.evacuations.resume(&id("e"), &bench.inventory, bench.now_ns).unwrap();
    bench.take(step);
    bench.answer();
    assert_eq!(bench.ordered().len(), 1);
    assert!(bench.inventory.hosts[0].cordoned);
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 2, .. }), "{:?}", bench.texts);
}

#[test]
fn a_vm_that_appears_is_moved_and_one_that_ends_is_not() {
    let mut bench = two_at_once();
    bench.end("v1", MoveEnd::VmEnded);
    bench.inventory.vms.retain(|spec| spec.name != "v1");
    bench.inventory.vms.push(vm("v9", "a", 2));
    bench.handle(&EvacuationEvent::VmAppeared { vm: "v9".to_owned(), host: "a".to_owned() });
    assert!(bench.has_text("VM v9 has appeared on host a"), "{:?}", bench.texts);
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 2, .. }), "{:?}", bench.texts);
    assert_eq!(bench.vms_on("a"), Vec::<&str>::new());
}

#[test]
fn agents_that_contradict_themselves_are_asked_again() {
    let mut bench = two_at_once();
    let command = bench.orders["v1"].command.clone();
    bench.end("v1", failed(MoveFailure::Other));
    bench.handle(&EvacuationEvent::MoveEnded { command, end: MoveEnd::Moved });
    assert!(bench.has_text("has ended in two ways"), "{:?}", bench.texts);
    assert!(bench.questions().iter().any(|(host, _)| host == "a"));
    bench.tick(60);
    // Nothing of that host begins before it has answered.
    assert_eq!(bench.ordered(), ["v2 a>c"]);
}

#[test]
fn a_target_that_has_filled_up_is_not_used() {
    let mut bench =
        Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("v1", "a", 8), vm("v2", "a", 4)]);
    bench.begin("e", empty_request(&["a"]));
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    // Another VM was started on the next one's host in the meantime.
    bench.inventory.vms.push(vm("other", "c", 62));
    bench.tick(6);
    bench.end("v1", MoveEnd::Moved);
    assert_eq!(bench.ordered(), ["v2 a>b"]);
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { .. }), "{:?}", bench.texts);
}

#[test]
fn a_move_that_reports_no_progress_at_all_is_tried_again() {
    let mut bench = two_at_once();
    bench.end("v2", MoveEnd::Moved);
    let command = bench.orders["v1"].command.clone();
    bench.tick(3);
    bench.handle(&EvacuationEvent::MoveStarted { command });
    bench.tick(599);
    assert_eq!(bench.one("e").outcome(), None, "{:?}", bench.texts);
    bench.tick(1);
    let is_cancel = |action: &EvacuationAction| matches!(action, EvacuationAction::CancelMove { .. });
    assert_eq!(count(&bench.actions, is_cancel), 1, "{:?}", bench.texts);
    bench.end("v1", MoveEnd::Cancelled);
    bench.tick(5);
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 2, .. }), "{:?}", bench.texts);
}

#[test]
fn an_evacuation_ends_also_if_a_stuck_move_is_not_cancelled() {
    let mut bench = two_at_once();
    bench.end("v2", MoveEnd::Moved);
    bench.tick(600);
    assert_eq!(bench.one("e").outcome(), None);
    bench.tick(600);
    let EvacuationOutcome::Incomplete { vms, .. } = bench.outcome("e") else { panic!("{:?}", bench.texts) };
    assert!(matches!(&vms[..], [BlockedVm { why: BlockedReason::StillMoving { .. }, .. }]), "{vms:?}");
}

#[test]
fn an_ended_vm_that_the_inventory_still_has_is_not_moved() {
    let mut bench = two_at_once();
    bench.spec("v2").rules.follows = vec!["v1".to_owned()];
    bench.end("v1", MoveEnd::VmEnded);
    bench.end("v2", failed(MoveFailure::Other));
    bench.tick(60);
    let orders: Vec<(&String, u32)> =
        bench.orders.iter().map(|(vm, order)| (vm, order.command.number)).collect();
    assert_eq!(orders, [(&"v2".to_owned(), 3)]);
    let command = bench.orders.remove("v2").unwrap().command;
    bench.spec("v2").host = "b".to_owned();
    bench.handle(&EvacuationEvent::MoveEnded { command, end: MoveEnd::Moved });
    assert_eq!(bench.ordered(), Vec::<String>::new());
    // Agents of the bench have what the inventory has.
    bench.inventory.vms.retain(|spec| spec.name != "v1");
    bench.run();
    assert!(matches!(bench.outcome("e"), EvacuationOutcome::Done { moved: 1, .. }), "{:?}", bench.texts);
}

#[test]
fn a_vm_that_only_a_lost_host_can_take_waits_for_it() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8)]);
    bench.begin("e", empty_request(&["a"]));
    bench.handle(&EvacuationEvent::HostLost { host: "b".to_owned() });
    bench.end("v1", failed(MoveFailure::Connection));
    bench.tick(300);
    assert_eq!(bench.one("e").outcome(), None, "{:?}", bench.texts);
    let status = bench.one("e").status(bench.now_ns);
    assert!(matches!(&status.blocked[0].why, BlockedReason::HostLost { host } if host == "b"), "{status:?}");
    bench.connect("b");
    bench.tick(5);
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    // But not for ever.
    bench.handle(&EvacuationEvent::HostLost { host: "b".to_owned() });
    bench.end("v1", failed(MoveFailure::Connection));
    bench.tick(30);
    bench.tick(570);
    let EvacuationOutcome::Incomplete { vms, .. } = bench.outcome("e") else { panic!("{:?}", bench.texts) };
    assert!(matches!(&vms[0].why, BlockedReason::HostLost { host } if host == "b"), "{vms:?}");
}
