//! Properties of all plans, checked by a slow and plain replay that shares nothing with the planner.

use proptest::prelude::*;

use super::*;

/// Replays a plan: each move begins at its time in the plan, ends after a time, and uses both hosts in between.
struct Replay<'a> {
    inventory: &'a Inventory,
    /// Hosts of each VM: one, or two while it moves.
    places: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Replay<'a> {
    fn new(inventory: &'a Inventory) -> Self {
        let places = inventory.vms.iter().map(|vm| {
            let mut hosts = vec![vm.host.as_str()];
            hosts.extend(vm.moving_to.as_deref());
            (vm.name.as_str(), hosts)
        });
        Self { inventory, places: places.collect() }
    }

    fn on(&self, host: &str) -> Vec<&'a VmSpec> {
        self.inventory.vms.iter().filter(|vm| self.places[vm.name.as_str()].contains(&host)).collect()
    }

    /// Begins a move, and checks all that has to hold on the next host.
    fn begin(&mut self, one: &'a PlannedMove) {
        let hosts = self.places.get_mut(one.vm.as_str()).unwrap();
        assert_eq!(hosts.as_slice(), [one.from.as_str()], "{one:?}");
        hosts.push(&one.to);
        let spec = self.inventory.hosts.iter().find(|host| host.name == one.to).unwrap();
        let vms = self.on(&one.to);
        let memory: u64 = vms.iter().map(|vm| vm.memory_mib).sum();
        assert!(memory <= spec.guest_mib(), "memory of {}: {one:?}", spec.name);
        let busy: u64 = vms.iter().map(|vm| vm.busy_milli).sum();
        assert!(busy <= u64::from(spec.processors) * 900, "processors of {}: {one:?}", spec.name);
        let moved = vms.iter().find(|vm| vm.name == one.vm).unwrap();
        for other in vms.iter().filter(|vm| vm.name != one.vm) {
            let common = other.rules.apart.iter().find(|label| moved.rules.apart.contains(label));
            assert_eq!(common, None, "{} and {one:?}", other.name);
        }
        assert!(moved.rules.only_on.is_empty() || moved.rules.only_on.contains(&one.to), "{one:?}");
        assert!(!spec.cordoned && !moved.rules.pinned, "{one:?}");
        if !spec.numa_mib.is_empty() {
            let mut bound: Vec<u64> = vms.iter().filter(|vm| vm.one_node).map(|vm| vm.memory_mib).collect();
            bound.sort_unstable();
            assert!(fits_nodes(&bound, &mut spec.numa_mib.clone()), "nodes of {}: {one:?}", spec.name);
        }
    }

    fn end(&mut self, one: &'a PlannedMove) {
        self.places.insert(&one.vm, vec![&one.to]);
    }
}

/// Returns true if there is any way to put VMs into nodes.
fn fits_nodes(bound: &[u64], free: &mut Vec<u64>) -> bool {
    let Some((last, others)) = bound.split_last() else { return true };
    (0..free.len()).any(|node| {
        if free[node] < *last {
            return false;
        }
        free[node] -= last;
        let fits = fits_nodes(others, free);
        free[node] += last;
        fits
    })
}

/// Replays a plan by its own times.
fn replay_as_planned(inventory: &Inventory, plan: &PlacementPlan) {
    let mut events: Vec<(u64, bool, usize)> = Vec::new();
    for (at, one) in plan.moves.iter().enumerate() {
        events.push((one.begins_ns, true, at));
        events.push((one.begins_ns + one.total_ns.expected, false, at));
    }
    // Ends precede begins.
    events.sort_unstable();
    let mut replay = Replay::new(inventory);
    let mut active: BTreeMap<&str, (u32, u64)> = BTreeMap::new();
    for (_, is_begin, at) in events {
        let one = &plan.moves[at];
        if is_begin {
            replay.begin(one);
        } else {
            replay.end(one);
        }
        for host in [&one.from, &one.to] {
            let (count, rate) = active.entry(host).or_default();
            if is_begin {
                (*count, *rate) = (*count + 1, *rate + one.bytes_per_s);
            } else {
                (*count, *rate) = (*count - 1, *rate - one.bytes_per_s);
            }
            assert!(*count <= 8 && *rate <= 1_000_000_000, "{host}: {one:?}");
        }
    }
}

/// Replays a plan whose moves begin as soon as those that they wait for have ended, and end in any order.
fn replay_in_disorder(inventory: &Inventory, plan: &PlacementPlan, seed: u64) {
    let mut replay = Replay::new(inventory);
    let (mut waiting, mut active): (Vec<usize>, Vec<usize>) = ((0..plan.moves.len()).collect(), Vec::new());
    let mut ended = BTreeSet::new();
    let mut state = seed;
    while !waiting.is_empty() || !active.is_empty() {
        let (ready, later): (Vec<usize>, Vec<usize>) = waiting
            .into_iter()
            .partition(|at| plan.moves[*at].waits_for.iter().all(|before| ended.contains(before)));
        for at in ready.iter().rev() {
            replay.begin(&plan.moves[*at]);
        }
        waiting = later;
        active.extend(ready);
        assert!(!active.is_empty(), "moves wait for one another: {plan:?}");
        // A step of a linear congruential generator, whose high bits choose.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = active.swap_remove((state >> 33) as usize % active.len());
        replay.end(&plan.moves[at]);
        ended.insert(at as u32);
    }
}

/// Checks what has to hold in the end.
fn check_end(inventory: &Inventory, request: &PlanRequest, plan: &PlacementPlan) {
    let mut host_of: BTreeMap<&str, &str> =
        inventory.vms.iter().map(|vm| (vm.name.as_str(), vm.host.as_str())).collect();
    for one in &plan.moves {
        host_of.insert(&one.vm, &one.to);
    }
    let stays = |name: &str| plan.stays.iter().any(|stay| stay.vm == name);
    for vm in &inventory.vms {
        let moved = plan.moves.iter().any(|one| one.vm == vm.name);
        for leader in vm.rules.follows.iter().filter(|_| moved) {
            assert_eq!(host_of[vm.name.as_str()], host_of[leader.as_str()], "{plan:?}");
        }
        if let PlanGoal::Drain { hosts, .. } = &request.goal {
            let is_there = hosts.iter().any(|host| host == host_of[vm.name.as_str()]);
            let is_leaving = vm.moving_to.as_ref().is_some_and(|to| !hosts.contains(to));
            assert!(!is_there || is_leaving || stays(&vm.name), "{} is still there: {plan:?}", vm.name);
            assert!(request.partial || is_leaving || !stays(&vm.name));
        }
    }
}

prop_compose! {
    fn any_host()(
        gib in 16..64_u64,
        processors in 4..32_u32,
        nodes in 0..3_u64,
        cordoned in prop::bool::weighted(0.15),
        zone in prop::option::of(0..3_u8),
        busy_for_s in 0..600_u64,
    ) -> HostSpec {
        HostSpec {
            memory_mib: gib * GIB,
            processors,
            numa_mib: (0..nodes).map(|_| gib * GIB / nodes).collect(),
            cordoned,
            zone: zone.map(|zone| zone.to_string()),
            busy_for_s,
            ..host("")
        }
    }
}

prop_compose! {
    fn any_vm(hosts: usize)(
        at in 0..hosts,
        memory_mib in 1..24 * GIB,
        busy_milli in 0..4000_u64,
        (one_node, pinned) in (prop::bool::weighted(0.3), prop::bool::weighted(0.05)),
        label in prop::option::weighted(0.3, 0..3_u8),
        spread in prop::option::weighted(0.5, 0..2_u8),
        only_on in prop::collection::vec(0..hosts, 0..3),
        follows in prop::option::weighted(0.15, 0..30_usize),
        rested_s in prop::option::of(0..4000_u64),
        priority in 0..2,
    ) -> (usize, VmSpec, Vec<usize>, Option<usize>) {
        let mut spec = VmSpec { busy_milli, one_node, rested_s, ..vm("", "", memory_mib) };
        spec.rules.pinned = pinned;
        spec.rules.priority = priority;
        spec.rules.apart = label.into_iter().map(|label| label.to_string()).collect();
        spec.rules.spread = spread.map(|spread| spread.to_string());
        (at, spec, if only_on.len() == 2 { only_on } else { Vec::new() }, follows)
    }
}

prop_compose! {
    /// A fleet in which all rules hold.
    fn any_fleet()(count in 2..7_usize)(
        hosts in prop::collection::vec(any_host(), count),
        vms in prop::collection::vec(any_vm(count), 0..24),
    ) -> Inventory {
        let mut hosts = hosts;
        for (at, host) in hosts.iter_mut().enumerate() {
            host.name = format!("h{at}");
        }
        let mut placed: Vec<VmSpec> = Vec::new();
        for (at, mut spec, only_on, follows) in vms {
            spec.name = format!("v{}", placed.len());
            spec.host = format!("h{at}");
            if only_on.contains(&at) {
                spec.rules.only_on = only_on.iter().map(|host| format!("h{host}")).collect();
            }
            let here = |vm: &&VmSpec| vm.host == spec.host;
            let others: Vec<&VmSpec> = placed.iter().filter(here).collect();
            let memory: u64 = others.iter().map(|vm| vm.memory_mib).sum();
            let busy: u64 = others.iter().map(|vm| vm.busy_milli).sum();
            let has_label = |vm: &&VmSpec| vm.rules.apart.iter().any(|label| spec.rules.apart.contains(label));
            let of_node = |vm: &&VmSpec| vm.one_node;
            let is_full = memory + spec.memory_mib > hosts[at].memory_mib
                || busy + spec.busy_milli > u64::from(hosts[at].processors) * 900
                || (spec.one_node && !hosts[at].numa_mib.is_empty() && others.iter().any(of_node));
            let is_bound_too_large =
                spec.one_node && hosts[at].numa_mib.iter().any(|node| *node < spec.memory_mib);
            if is_full || is_bound_too_large || others.iter().any(has_label) {
                continue;
            }
            // Leaders are earlier VMs of the same host, so that nothing is cyclic.
            let leader = follows.and_then(|at| placed.get(at)).filter(|leader| leader.host == spec.host);
            if let Some(leader) = leader.filter(|leader| leader.rules.apart.is_empty()) {
                spec.rules.follows = vec![leader.name.clone()];
                spec.rules.apart.clear();
            }
            placed.push(spec);
        }
        inventory(hosts, placed)
    }
}

fn any_request(hosts: usize) -> impl Strategy<Value = PlanRequest> {
    let name = |at: usize| format!("h{at}");
    let drained = prop::collection::vec(0..hosts, 1..3);
    let drain = drained.prop_map(move |hosts| PlanGoal::Drain {
        hosts: hosts.into_iter().map(name).collect(),
        to: Vec::new(),
    });
    let placed = prop::collection::btree_map(0..24_usize, 0..hosts, 1..6).prop_map(move |pairs| {
        let placement = |(vm, host)| Placement { vm: format!("v{vm}"), host: name(host) };
        PlanGoal::Place { placements: pairs.into_iter().map(placement).collect() }
    });
    let goal =
        prop_oneof![4 => drain, 2 => placed, 1 => Just(PlanGoal::Balance), 1 => Just(PlanGoal::Spread)];
    (goal, any::<bool>(), any::<bool>()).prop_map(|(goal, partial, make_room)| {
        let hysteresis = Hysteresis { hold_s: 60, threshold_percent: 5, ..Hysteresis::default() };
        let limits = MoveLimits { make_room, copy_bytes_per_s: 400_000_000, ..MoveLimits::default() };
        PlanRequest { goal, partial, limits, hysteresis, deadline_s: None }
    })
}

fn any_task() -> impl Strategy<Value = (Inventory, PlanRequest)> {
    any_fleet().prop_flat_map(|inventory| {
        let hosts = inventory.hosts.len();
        (Just(inventory), any_request(hosts))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn plans_keep_all_rules_at_every_step((inventory, request) in any_task(), seed in any::<u64>()) {
        let found = plan(&inventory, &request);
        prop_assert_eq!(&found, &plan(&inventory, &request), "equal inputs give equal plans");
        match found {
            Ok(found) => {
                replay_as_planned(&inventory, &found);
                replay_in_disorder(&inventory, &found, seed);
                check_end(&inventory, &request, &found);
                prop_assert!(found.duration_ns.contains(found.duration_ns.expected));
            }
            Err(refusal) => {
                prop_assert!(!refusal.to_string().is_empty() && !refusal.advice().is_empty());
            }
        }
    }

    /// A level fleet is not touched again: what was planned is carried out, and then nothing is to be done.
    #[test]
    fn levelled_fleets_are_left_alone(inventory in any_fleet()) {
        let hysteresis = Hysteresis { hold_s: 0, rest_s: 1800, ..Hysteresis::default() };
        let request = PlanRequest { hysteresis, ..PlanRequest::default() };
        let mut inventory = inventory;
        let mut highest = u32::MAX;
        for _ in 0..20 {
            let found = plan(&inventory, &request).unwrap();
            prop_assert!(found.highest_load_after_percent <= found.highest_load_before_percent);
            prop_assert!(found.highest_load_after_percent <= highest);
            highest = found.highest_load_after_percent;
            if found.moves.is_empty() {
                return Ok(());
            }
            for one in &found.moves {
                let vm = inventory.vms.iter_mut().find(|vm| vm.name == one.vm).unwrap();
                vm.host.clone_from(&one.to);
                vm.rested_s = Some(1800);
            }
        }
        prop_assert!(false, "VMs are moved for ever");
    }
}
