//! Evacuations in which everything succeeds: order, limits, shares, and the word *empty*.

use std::collections::BTreeMap;

use super::fleet::*;
use crate::evacuation::*;
use crate::planner::MoveLimits;

#[test]
fn a_host_is_emptied_and_then_cordoned_still() {
    let mut bench = Bench::new(
        vec![host("a"), host("b"), host("c")],
        vec![vm("v1", "a", 8), vm("v2", "a", 4), vm("v3", "b", 1)],
    );
    bench.begin("e", empty_request(&["a"]));
    assert!(bench.actions.iter().any(|action| matches!(action, EvacuationAction::Cordon { .. })));
    // One at a time: it uses the whole link.
    assert_eq!(bench.ordered(), ["v1 a>c"]);
    assert_eq!(bench.rates["v1"], None);
    let waiting = &bench.one("e").status(bench.now_ns).moves[1];
    let link = WaitReason::Link { host: Some("a".to_owned()) };
    assert_eq!(waiting.standing, MoveStanding::Waits { reason: link });
    bench.end("v1", MoveEnd::Moved);
    assert_eq!(bench.ordered(), ["v2 a>b"]);
    bench.end("v2", MoveEnd::Moved);
    assert_eq!(*bench.outcome("e"), EvacuationOutcome::Done { moved: 2, late_by_ns: None });
    assert!(bench.inventory.hosts[0].cordoned);
    assert!(bench.has_text("host a is empty"), "{:?}", bench.texts);
    let left: Vec<_> =
        bench.one("e").departures().iter().map(|one| (&*one.vm, &*one.from, &*one.to)).collect();
    assert_eq!(left, [("v1", "a", "c"), ("v2", "a", "b")]);
}

#[test]
fn commands_have_ids_in_the_order_of_the_moves() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8), vm("v2", "a", 4)]);
    bench.begin("night/7", empty_request(&["a"]));
    assert_eq!(bench.orders["v1"].command.to_string(), "night/7/1");
    let parsed: CommandId = "night/7/1".parse().unwrap();
    assert_eq!(parsed, bench.orders["v1"].command);
    assert!("night".parse::<CommandId>().is_err());
    bench.end("v1", MoveEnd::Moved);
    assert_eq!(bench.orders["v2"].command.number, 2);
}

#[test]
fn numbers_of_commands_can_be_skipped() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8), vm("v2", "a", 4)]);
    bench.begin("e", empty_request(&["a"]));
    let (first, begun_ns) = (bench.orders["v1"].command.clone(), bench.now_ns);
    assert_eq!(bench.evacuations.source_of(&first), Some("a"));
    assert_eq!(bench.evacuations.evacuation_with("b"), Some(&id("e")), "a move to it is under way");
    bench.evacuations.skip_numbers(40);
    bench.now_ns += SECOND;
    bench.end("v1", MoveEnd::Moved);
    let second = &bench.orders["v2"].command;
    assert_eq!(second.number, 41);
    assert_eq!(bench.evacuations.source_of(&CommandId { number: 7, ..second.clone() }), None);
    assert_eq!(bench.evacuations.latest_ns(), begun_ns + SECOND);
    bench.evacuations.skip_numbers(1);
    bench.run();
    assert_eq!(bench.evacuations.evacuation_with("a"), None, "it has ended");
}

#[test]
fn a_repeated_event_changes_nothing() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8), vm("v2", "a", 4)]);
    bench.begin("e", empty_request(&["a"]));
    let command = bench.orders["v1"].command.clone();
    bench.end("v1", MoveEnd::Moved);
    let before = bench.one("e").clone();
    for _ in 0..2 {
        bench.handle(&EvacuationEvent::MoveStarted { command: command.clone() });
        bench.handle(&EvacuationEvent::MoveEnded { command: command.clone(), end: MoveEnd::Moved });
        bench.handle(&EvacuationEvent::VmVanished { vm: "v1".to_owned(), host: "a".to_owned() });
        bench.handle(&EvacuationEvent::VmAppeared { vm: "v1".to_owned(), host: "b".to_owned() });
        assert_eq!(bench.actions, []);
    }
    assert_eq!(*bench.one("e"), before);
    let begun = bench.evacuations.begin(id("e"), empty_request(&["a"]), &bench.inventory, bench.now_ns);
    assert_eq!(begun.unwrap(), EvacuationStep::default());
}

#[test]
fn shares_are_equal_and_change_when_a_move_ends() {
    let vms = (1..=4).map(|at| vm(&format!("v{at}"), "a", 4)).collect();
    let mut bench = Bench::new(vec![host("a"), host("b"), host("c")], vms);
    let mut request = empty_request(&["a"]);
    request.limits = MoveLimits { copy_bytes_per_s: 250_000_000, ..MoveLimits::default() };
    bench.begin("e", request);
    assert_eq!(bench.orders.len(), 4);
    let rates = |bench: &Bench| bench.orders.keys().map(|vm| bench.rates[vm].unwrap()).collect::<Vec<_>>();
    assert_eq!(rates(&bench), [250_000_000; 4]);
    // A budget is shared anew.
    let mut request = empty_request(&["a"]);
    request.limits =
        MoveLimits { bytes_per_s: Some(600_000_000), least_link_percent: 1, ..MoveLimits::default() };
    let vms = (1..=3).map(|at| vm(&format!("v{at}"), "a", 4)).collect();
    let mut bench = Bench::new(vec![host("a"), host("b"), host("c")], vms);
    request.limits.copy_bytes_per_s = 200_000_000;
    bench.begin("e", request);
    assert_eq!(rates(&bench), [200_000_000; 3]);
    bench.end("v1", MoveEnd::Moved);
    assert_eq!(rates(&bench), [200_000_000; 2]);
}

#[test]
fn a_move_of_high_priority_gets_nine_tenths() {
    let vms = vec![vm("low", "a", 8), vm("high", "b", 8)];
    let mut bench = Bench::new(vec![host("a"), host("b"), host("c")], vms);
    bench.inventory.hosts[1].links[0].bytes_per_s = 1_000_000_000;
    let to_c = |host: &str, priority: i32, vm: &str| {
        let mut request = empty_request(&[host]);
        let EvacuationGoal::Empty { to, .. } = &mut request.goal else { unreachable!() };
        to.push("c".to_owned());
        request.priorities.insert(vm.to_owned(), priority);
        request
    };
    bench.begin("e1", to_c("a", 0, "low"));
    assert_eq!(bench.rates["low"], None);
    // The one that comes later does not wait, because it has a higher priority.
    bench.begin("e2", to_c("b", 1, "high"));
    assert_eq!(bench.rates["high"], Some(900_000_000));
    assert_eq!(bench.rates["low"], Some(100_000_000));
    bench.end("high", MoveEnd::Moved);
    assert_eq!(bench.rates["low"], None);
}

#[test]
fn what_a_move_leaves_of_its_share_lets_others_begin() {
    let mut bench =
        Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("v1", "a", 8), vm("v2", "a", 4)]);
    bench.begin("e", empty_request(&["a"]));
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    let command = bench.orders["v1"].command.clone();
    let progress = |bytes_per_s| MoveProgress { bytes_left: 4 << 30, bytes_per_s, ..MoveProgress::default() };
    let event = |bytes_per_s| EvacuationEvent::MoveProgressed {
        command: command.clone(),
        progress: progress(bytes_per_s),
    };
    bench.handle(&event(900_000_000));
    bench.tick(1);
    assert_eq!(bench.ordered().len(), 1);
    // Its copy is slow: processors, and not the link, are the limit.
    bench.handle(&event(200_000_000));
    bench.tick(1);
    assert_eq!(bench.ordered(), ["v1 a>b", "v2 a>c"]);
    let (one, other) = (bench.rates["v1"].unwrap(), bench.rates["v2"].unwrap());
    assert!(one >= 400_000_000 && one + other <= 1_000_000_000, "{one} {other}");
}

#[test]
fn a_host_is_empty_only_if_nothing_remains() {
    let full = HostContents {
        host: "a".to_owned(),
        qemus: vec![QemuOnHost { vm: Some("v1".to_owned()), pid: 1 }, QemuOnHost { vm: None, pid: 2 }],
        pages_to_serve: vec!["v2".to_owned()],
        held: vec!["v3".to_owned()],
        in_doubt: vec!["v4".to_owned()],
        redirections: vec!["10.0.0.1".to_owned()],
        arrivals: vec!["v5".to_owned()],
        services: HostServices {
            witness: true,
            etcd_member: true,
            controller: true,
            dns: true,
            storage_exports: vec!["images".to_owned()],
        },
        unknown: vec!["redirections: permission denied".to_owned()],
    };
    let remaining = full.what_remains();
    assert_eq!(remaining.len(), 13);
    assert!(remaining.iter().all(|one| !one.advice().is_empty() && !one.to_string().is_empty()));
    assert!(!full.is_empty());
    assert!(contents("a", &[]).is_empty());
    // Each part alone keeps it from being empty.
    let text = serde_json::to_value(&full).unwrap();
    let nothing = serde_json::to_value(contents("a", &[])).unwrap();
    let (parts, services) = (text.as_object().unwrap(), text["services"].as_object().unwrap());
    for key in parts.keys().filter(|key| !["host", "services"].contains(&key.as_str())) {
        let mut one = nothing.clone();
        one[key] = text[key].clone();
        assert!(!serde_json::from_value::<HostContents>(one).unwrap().is_empty(), "{key}");
    }
    for key in services.keys() {
        let mut one = nothing.clone();
        one["services"][key] = services[key].clone();
        assert_eq!(serde_json::from_value::<HostContents>(one).unwrap().what_remains().len(), 1, "{key}");
    }
    // A part that is missing in a message is not taken for nothing.
    for key in parts.keys() {
        let mut one = nothing.clone();
        one.as_object_mut().unwrap().remove(key);
        assert!(serde_json::from_value::<HostContents>(one).is_err(), "{key}");
    }
}

#[test]
fn an_evacuation_waits_for_what_remains_and_is_asked_for() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8)]);
    bench.begin("e", empty_request(&["a"]));
    let command = bench.orders.remove("v1").unwrap().command;
    bench.spec("v1").host = "b".to_owned();
    bench.handle(&EvacuationEvent::MoveEnded { command, end: MoveEnd::Moved });
    let [(asked, commands)] = &bench.questions()[..] else { panic!("{:?}", bench.actions) };
    assert_eq!((asked.as_str(), commands.len()), ("a", 0));
    let redirected = HostContents { redirections: vec!["v1".to_owned()], ..contents("a", &[]) };
    bench.answer_with("a", BTreeMap::default(), redirected.clone());
    assert_eq!(bench.one("e").status(bench.now_ns).phase, EvacuationPhase::WaitsForEmpty);
    assert!(bench.has_text("on host a remains a redirection of v1"), "{:?}", bench.texts);
    bench.tick(1);
    assert_eq!(bench.questions(), []);
    bench.tick(5);
    assert_eq!(bench.questions().len(), 1);
    bench.answer_with("a", BTreeMap::default(), redirected);
    assert_eq!(bench.one("e").outcome(), None);
    bench.handle(&EvacuationEvent::ContentsChanged { contents: contents("a", &[]) });
    assert_eq!(*bench.outcome("e"), EvacuationOutcome::Done { moved: 1, late_by_ns: None });
}

#[test]
fn a_service_on_the_host_is_reported_at_the_start() {
    let mut bench = Bench::new(vec![host("a"), host("b")], vec![vm("v1", "a", 8)]);
    let step = bench.evacuations.begin(id("e"), empty_request(&["a"]), &bench.inventory, bench.now_ns);
    bench.take(step.unwrap());
    let mut witness = contents("a", &["v1"]);
    witness.services.witness = true;
    bench.answer_with("a", BTreeMap::default(), witness.clone());
    assert!(bench.has_text("on host a remains the ownership registry"), "{:?}", bench.texts);
    assert_eq!(bench.ordered(), ["v1 a>b"]);
    let command = bench.orders.remove("v1").unwrap().command;
    bench.spec("v1").host = "b".to_owned();
    bench.handle(&EvacuationEvent::MoveEnded { command, end: MoveEnd::Moved });
    witness.qemus.clear();
    bench.answer_with("a", BTreeMap::default(), witness);
    let EvacuationOutcome::Incomplete { vms, hosts } = bench.outcome("e") else {
        panic!("{:?}", bench.texts)
    };
    assert!(vms.is_empty());
    assert_eq!(hosts[0].remaining, Some(vec![Remaining::Witness]));
}

#[test]
fn moves_are_explained_one_by_one() {
    let mut urgent = vm("urgent", "a", 2);
    urgent.rules.priority = 5;
    let mut follower = vm("cache", "a", 1);
    follower.rules.follows = vec!["db".to_owned()];
    let bench = Bench::new(vec![host("a"), host("b"), host("c")], vec![vm("db", "a", 8), follower, urgent]);
    let found = bench.evacuations.preview(&empty_request(&["a"]), &bench.inventory, bench.now_ns).unwrap();
    assert_eq!(found.moves.len(), 3);
    assert_eq!(found.moves[0].vm, "urgent");
    let cache = found.moves.iter().find(|one| one.vm == "cache").unwrap();
    let reason = WaitReason::Moves { vms: vec!["db".to_owned()] };
    assert_eq!(cache.standing, MoveStanding::Waits { reason });
    let db = found.moves.iter().find(|one| one.vm == "db").unwrap();
    assert_eq!(db.to, cache.to);
    assert!(found.waits_for.is_empty() && found.deadline.is_none());
    let text = db.to_string();
    assert!(text.starts_with("VM db from host a to host"), "{text}");
    assert!(text.contains("its host is to be emptied") && text.ends_with("it is next"), "{text}");
    // A preview changes nothing.
    assert_eq!(bench.evacuations.iter().count(), 0);
}
