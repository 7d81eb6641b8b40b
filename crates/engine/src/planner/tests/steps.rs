//! Order of moves: room that others leave, circles, hosts that are full.

use super::*;

/// Two full hosts exchange VMs over a third one.
#[test]
fn a_circle_is_broken_by_a_step_aside() {
    let vms = vec![vm("v1", "a", 60 * GIB), vm("v2", "b", 50 * GIB)];
    let inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let found = plan(&inventory, &place(&[("v1", "b"), ("v2", "a")])).unwrap();
    assert_eq!(moves(&found), ["v2 b>c", "v1 a>b", "v2 c>a"]);
    assert_eq!(found.moves[0].why, MoveReason::StepsAside { then_to: "a".to_owned() });
    assert_eq!(found.moves[1].waits_for, [0]);
    assert_eq!(found.moves[2].waits_for, [0, 1]);
}

#[test]
fn a_circle_without_a_third_host_is_refused() {
    let vms = vec![vm("v1", "a", 60 * GIB), vm("v2", "b", 50 * GIB), vm("v3", "c", 40 * GIB)];
    let mut inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let request = place(&[("v1", "b"), ("v2", "a")]);
    let refused = plan(&inventory, &request).unwrap_err();
    assert_eq!(refused, Refusal::NoOrder { vms: vec!["v2".to_owned(), "v1".to_owned()] });
    assert!(refused.advice().contains("free room"));
    // Room on a cordoned host does not count.
    inventory.vms.pop();
    inventory.hosts[2].cordoned = true;
    assert_eq!(plan(&inventory, &request).unwrap_err(), refused);
}

#[test]
fn a_chain_of_moves_begins_at_its_free_end() {
    let vms = vec![vm("v1", "a", 40 * GIB), vm("v2", "b", 40 * GIB), vm("v3", "c", 40 * GIB)];
    let inventory = inventory(vec![host("a"), host("b"), host("c"), host("d")], vms);
    let found = plan(&inventory, &place(&[("v1", "b"), ("v2", "c"), ("v3", "d")])).unwrap();
    assert_eq!(moves(&found), ["v3 c>d", "v2 b>c", "v1 a>b"]);
    assert_eq!(found.moves[1].waits_for, [0]);
    assert_eq!(found.moves[2].waits_for, [1]);
}

#[test]
fn a_vm_makes_room_for_a_larger_one() {
    // 30 GiB are free on each, and the VM needs 40.
    let vms = vec![
        vm("large", "a", 40 * GIB),
        vm("small", "b", 14 * GIB),
        vm("rest", "b", 20 * GIB),
        vm("other", "c", 34 * GIB),
    ];
    let inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let found = plan(&inventory, &drain(&["a"])).unwrap();
    assert_eq!(moves(&found), ["small b>c", "large a>b"]);
    assert_eq!(found.moves[0].why, MoveReason::MakesRoom { vm: "large".to_owned() });
    assert_eq!(found.moves[1].waits_for, [0]);
    let mut request = drain(&["a"]);
    request.limits.make_room = false;
    let Refusal::NoTarget { vm, obstacles, .. } = plan(&inventory, &request).unwrap_err() else { panic!() };
    assert_eq!(vm, "large");
    assert_eq!(obstacles, [(Obstacle::Memory { needs_mib: 40 * GIB, free_mib: 30 * GIB }, 2)]);
}

/// The largest VM first takes the host that only another one can use; the search finds the other way.
#[test]
fn a_search_finds_what_first_choices_miss() {
    let mut only_b = vm("v2", "a", 30 * GIB);
    only_b.rules.only_on = vec!["b".to_owned()];
    let vms = vec![vm("v1", "a", 31 * GIB), only_b, vm("v3", "b", 20 * GIB), vm("v4", "c", 25 * GIB)];
    let inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let mut request = drain(&["a"]);
    request.limits.make_room = false;
    assert_eq!(moves(&plan(&inventory, &request).unwrap()), ["v1 a>c", "v2 a>b"]);
}

#[test]
fn a_vm_that_moves_already_uses_both_hosts() {
    let mut moving = vm("v2", "b", 40 * GIB);
    moving.moving_to = Some("c".to_owned());
    let vms = vec![vm("v1", "a", 30 * GIB), moving];
    let mut inventory = inventory(vec![host("a"), host("b"), host("c")], vms);
    let refused = plan(&inventory, &drain(&["a"])).unwrap_err();
    assert!(matches!(refused, Refusal::NoTarget { .. }), "{refused}");
    inventory.hosts.push(host("d"));
    assert_eq!(moves(&plan(&inventory, &drain(&["a"])).unwrap()), ["v1 a>d"]);
    // Its old host is about to be empty without a plan; its next one is not.
    assert_eq!(plan(&inventory, &drain(&["b"])).unwrap().moves, []);
    let refused = plan(&inventory, &drain(&["c"])).unwrap_err();
    assert_eq!(refused.to_string(), "VM v2 has to leave host c: the VM moves already");
}

#[test]
fn nodes_have_room_for_vms_that_need_one() {
    let mut split = host("b");
    split.numa_mib = vec![32 * GIB, 32 * GIB];
    let bound = |name: &str, host: &str, gib: u64| VmSpec { one_node: true, ..vm(name, host, gib * GIB) };
    let vms = vec![bound("v1", "a", 20), bound("v2", "a", 20), bound("v3", "a", 20)];
    let mut inventory = inventory(vec![host("a"), split], vms);
    let Refusal::NoTarget { obstacles, .. } = plan(&inventory, &drain(&["a"])).unwrap_err() else { panic!() };
    assert_eq!(obstacles, [(Obstacle::Node { needs_mib: 20 * GIB, free_mib: 12 * GIB }, 1)]);
    // One that may lie in both nodes fits beside the others.
    inventory.vms[1].one_node = false;
    assert_eq!(plan(&inventory, &drain(&["a"])).unwrap().moves.len(), 3);
}
