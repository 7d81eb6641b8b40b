//! Rules of placement, and refusals: each has a reason and a way out.

use super::*;

fn refused(inventory: &Inventory, request: &PlanRequest) -> (String, String) {
    let refusal = plan(inventory, request).unwrap_err();
    (refusal.to_string(), refusal.advice())
}

#[test]
fn vms_that_follow_go_together_and_later() {
    let mut app = vm("app", "a", 10 * GIB);
    app.rules.follows = vec!["db".to_owned()];
    let vms = vec![app, vm("db", "a", 12 * GIB), vm("v3", "b", 44 * GIB)];
    let mut inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let found = plan(&inventory, &drain(&["a"])).unwrap();
    assert_eq!(moves(&found), ["db a>c", "app a>c"]);
    assert_eq!(found.moves[1].waits_for, [0]);
    // Both fit nowhere together, though each alone does.
    inventory.vms.push(vm("v4", "c", 44 * GIB));
    let mut request = drain(&["a"]);
    request.limits.make_room = false;
    assert!(matches!(plan(&inventory, &request), Err(Refusal::NoTarget { .. })));
    // One that runs elsewhere comes along.
    inventory.vms.pop();
    inventory.vms[0].host = "b".to_owned();
    let found = plan(&inventory, &drain(&["a"])).unwrap();
    assert_eq!(moves(&found), ["db a>c", "app b>c"]);
    assert_eq!(found.moves[1].why, MoveReason::Follows { vm: "db".to_owned() });
    // Going apart is refused.
    let (reason, advice) = refused(&inventory, &place(&[("db", "c")]));
    assert!(reason.contains("app, with which it goes, would be elsewhere"), "{reason}");
    assert!(advice.starts_with("place both on the same host"), "{advice}");
}

#[test]
fn cyclic_affinity_is_refused() {
    let follows = |name: &str, leader: &str| {
        let mut follower = vm(name, "a", GIB);
        follower.rules.follows = vec![leader.to_owned()];
        follower
    };
    let vms = vec![vm("v0", "a", GIB), follows("v1", "v2"), follows("v2", "v3"), follows("v3", "v1")];
    let inventory = inventory(vec![host("a"), host("b")], vms);
    let (reason, advice) = refused(&inventory, &drain(&["a"]));
    assert_eq!(reason, "the affinity is cyclic: v1, v2, v3 follow each other");
    assert_eq!(advice, "let one of them lead: remove `follows` from v1");
}

#[test]
fn a_vm_that_follows_itself_is_refused() {
    let mut own = vm("own", "a", GIB);
    own.rules.follows = vec!["own".to_owned()];
    let (reason, _) = refused(&inventory(vec![host("a"), host("b")], vec![own]), &drain(&["a"]));
    assert!(reason.starts_with("the affinity is cyclic: own"), "{reason}");
}

/// A VM that might have made room, and stays, takes no space for the disk that it has there.
#[test]
fn disks_of_vms_that_stay_take_no_free_space() {
    let with_disk = |name: &str, at: &str, memory_gib: u64, disk_gib: u64| {
        let mut vm = vm(name, at, memory_gib * GIB);
        vm.disk_mib = disk_gib * GIB;
        vm
    };
    let vms = vec![
        with_disk("moved", "a", 10, 50),
        with_disk("small", "b", 4, 80),
        with_disk("large", "b", 8, 0),
        with_disk("rest", "b", 49, 0),
        with_disk("other", "c", 56, 0),
    ];
    let found = plan(&inventory(vec![host("a"), host("b"), host("c")], vms), &drain(&["a"])).unwrap();
    assert_eq!(moves(&found), ["large b>c", "moved a>b"]);
}

#[test]
fn numbers_out_of_all_proportion_are_no_panic() {
    let mut idle = host("b");
    (idle.processors, idle.reserved_mib) = (0, idle.memory_mib);
    let mut request = drain(&["a"]);
    (request.limits.load_worth_s, request.hysteresis.payback_s) = (u64::MAX, u64::MAX);
    let inventory = inventory(vec![host("a"), idle, host("c")], vec![vm("v", "a", GIB), vm("w", "b", GIB)]);
    drop(plan(&inventory, &request));
    request.goal = PlanGoal::Balance;
    drop(plan(&inventory, &request));
}

#[test]
fn contradictory_affinity_is_refused() {
    let mut app = vm("app", "a", GIB);
    app.rules.follows = vec!["db".to_owned()];
    let mut vms = vec![app, vm("db", "a", GIB)];
    for vm in &mut vms {
        vm.rules.apart = vec!["pair".to_owned()];
    }
    let (reason, _) = refused(&inventory(vec![host("a"), host("b")], vms), &drain(&["a"]));
    assert_eq!(reason, "VMs db and app have to run on one host, and apart by the label pair");
}

#[test]
fn vms_with_a_common_label_stay_apart() {
    let apart = |name: &str, host: &str| {
        let mut spec = vm(name, host, GIB);
        spec.rules.apart = vec!["web".to_owned()];
        spec
    };
    let mut inventory =
        inventory(vec![host("a"), host("b"), host("c")], vec![apart("v1", "a"), apart("v2", "b")]);
    assert_eq!(moves(&plan(&inventory, &drain(&["a"])).unwrap()), ["v1 a>c"]);
    inventory.vms.push(apart("v3", "c"));
    let (reason, advice) = refused(&inventory, &drain(&["a"]));
    assert!(reason.ends_with("another VM with the label web is there (2 hosts)"), "{reason}");
    assert!(advice.starts_with("use more hosts, or drop the label"), "{advice}");
}

#[test]
fn pinned_vms_keep_a_host_from_being_emptied() {
    let mut pinned = vm("v1", "a", GIB);
    pinned.rules.pinned = true;
    let inventory = inventory(vec![host("a"), host("b")], vec![pinned, vm("v2", "a", GIB)]);
    let (reason, advice) = refused(&inventory, &drain(&["a"]));
    assert_eq!(reason, "VM v1 has to leave host a: the VM is pinned");
    assert_eq!(advice, "unpin the VM, or shut it down");
    let partial = PlanRequest { partial: true, ..drain(&["a"]) };
    let found = plan(&inventory, &partial).unwrap();
    assert_eq!(moves(&found), ["v2 a>b"]);
    let [StayingVm { vm, host, why }] = &found.stays[..] else { panic!("{found:?}") };
    assert_eq!((vm.as_str(), host.as_str()), ("v1", "a"));
    assert_eq!(why.to_string(), "the VM is pinned; unpin the VM, or shut it down");
}

#[test]
fn unknown_names_are_refused() {
    let mut inventory = inventory(vec![host("a"), host("b")], vec![vm("v1", "a", GIB)]);
    let (reason, advice) = refused(&inventory, &drain(&["x"]));
    assert_eq!(reason, "host x is not in the inventory; the request names it");
    assert_eq!(advice, "correct the name, or add what it names to the inventory");
    assert!(refused(&inventory, &drain_to(&["a"], &["y"])).0.starts_with("host y "));
    assert!(refused(&inventory, &place(&[("v2", "a")])).0.starts_with("VM v2 is not in the inventory"));
    inventory.vms[0].rules.follows = vec!["nobody".to_owned()];
    assert!(refused(&inventory, &drain(&["a"])).0.ends_with("VM v1 names it"));
    inventory.vms[0].platform = "none".to_owned();
    assert!(refused(&inventory, &drain(&["a"])).0.starts_with("platform none is not in the inventory"));
    inventory.hosts[1].name = "a".to_owned();
    assert_eq!(refused(&inventory, &drain(&["a"])).0, "the inventory has two hosts or two VMs named a");
}

#[test]
fn overfull_targets_are_refused_with_the_sums() {
    let vms = vec![vm("v1", "a", 30 * GIB), vm("v2", "a", 30 * GIB), vm("v3", "b", 20 * GIB)];
    let inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let (reason, advice) = refused(&inventory, &drain_to(&["a"], &["b"]));
    assert_eq!(reason, "host b would be overfull: the VMs need 61440 MiB, and 45056 are free");
    assert!(advice.starts_with("name more targets"), "{advice}");
    assert_eq!(plan(&inventory, &drain(&["a"])).unwrap().moves.len(), 2);
    assert_eq!(refused(&inventory, &drain(&["a", "b", "c"])).0, "no host is left that accepts VMs");
}

#[test]
fn impossible_deadlines_are_refused() {
    let vms = (1..5).map(|at| vm(&format!("v{at}"), "a", 10 * GIB)).collect();
    let inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let within = |deadline_s| PlanRequest { deadline_s: Some(deadline_s), ..drain(&["a"]) };
    let (reason, advice) = refused(&inventory, &within(30));
    assert_eq!(
        reason,
        "the moves need 45 s, and 30 s are left: host a alone has to move 42949 MB over its link"
    );
    assert!(
        advice.starts_with("allow 45 s; or begin with the 2 VMs that are there in time, and shut 2 down")
    );
    let deadline = |deadline_s| plan(&inventory, &within(deadline_s)).unwrap().deadline.unwrap();
    assert!(!deadline(50).is_safe && deadline(100).is_safe);
}

#[test]
fn settings_out_of_range_are_refused() {
    let inventory = inventory(vec![host("a"), host("b")], vec![vm("v1", "a", GIB)]);
    let mut request = drain(&["a"]);
    request.limits.per_host = 0;
    assert_eq!(refused(&inventory, &request).0, "per_host is out of its range");
    let mut request = drain(&["a"]);
    request.hysteresis.margin_percent = 0;
    assert_eq!(refused(&inventory, &request).0, "margin_percent is out of its range");
    let mut huge = inventory.clone();
    huge.vms[0].memory_mib = u64::MAX;
    assert_eq!(refused(&huge, &drain(&["a"])).0, "memory_mib of v1 is out of its range");
}

#[test]
fn a_request_is_read_from_json() {
    let text = r#"{"goal": {"goal": "drain", "hosts": ["a"]}, "deadline_s": 60, "limits": {"per_host": 2}}"#;
    let request: PlanRequest = serde_json::from_str(text).unwrap();
    assert_eq!(request.limits, MoveLimits { per_host: 2, ..MoveLimits::default() });
    assert_eq!(request.goal, drain(&["a"]).goal);
    let inventory = inventory(vec![host("a"), host("b")], vec![vm("v1", "a", GIB)]);
    let text = serde_json::to_string(&inventory).unwrap();
    assert_eq!(serde_json::from_str::<Inventory>(&text).unwrap(), inventory);
    let found = plan(&inventory, &request).unwrap();
    let text = serde_json::to_string(&found).unwrap();
    assert_eq!(serde_json::from_str::<PlacementPlan>(&text).unwrap(), found);
}
