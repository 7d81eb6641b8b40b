//! Plans of small fleets beside the best ones: of an exhaustive search, and of a solver of integer programs.

use good_lp::{
    Expression, ProblemVariables, ResolutionError, SolverModel, Variable, constraint, microlp, variable,
};
use proptest::prelude::*;

use super::*;

/// Returns the time of a move by a formula of its own, in nanoseconds.
fn move_ns(vm: &VmSpec, from: &HostSpec, to: &HostSpec) -> u64 {
    let rate = from.links[0].bytes_per_s.min(to.links[0].bytes_per_s).min(1_000_000_000);
    let bytes = u128::from((vm.memory_mib + vm.disk_mib) << 20);
    (bytes * 1_000_000_000 / u128::from(rate)) as u64 + 500_000_000
}

fn find<'a>(inventory: &'a Inventory, name: &str) -> &'a HostSpec {
    inventory.hosts.iter().find(|host| host.name == name).unwrap()
}

/// VMs of the hosts that are emptied, and the hosts to which they can go.
fn task<'a>(inventory: &'a Inventory, drained: &[&str]) -> (Vec<&'a VmSpec>, Vec<&'a HostSpec>) {
    let is_drained = |name: &str| drained.contains(&name);
    let vms = inventory.vms.iter().filter(|vm| is_drained(&vm.host)).collect();
    let hosts = inventory.hosts.iter().filter(|host| !is_drained(&host.name) && !host.cordoned).collect();
    (vms, hosts)
}

/// Returns true if a host has room for VMs beside those that it has.
fn has_room(inventory: &Inventory, host: &HostSpec, vms: &[&VmSpec]) -> bool {
    let here = inventory.vms.iter().filter(|vm| vm.host == host.name);
    let all: Vec<&VmSpec> = here.chain(vms.iter().copied()).collect();
    let labels: Vec<&String> = all.iter().flat_map(|vm| &vm.rules.apart).collect();
    all.iter().map(|vm| vm.memory_mib).sum::<u64>() <= host.guest_mib()
        && all.iter().map(|vm| vm.busy_milli).sum::<u64>() <= u64::from(host.processors) * 900
        && labels.iter().collect::<BTreeSet<_>>().len() == labels.len()
}

/// Returns the least sum of times over all assignments; none if there is no possible one.
fn exhaustive(inventory: &Inventory, drained: &[&str]) -> Option<u64> {
    let (vms, hosts) = task(inventory, drained);
    let mut best = None;
    for code in 0..hosts.len().pow(vms.len() as u32) {
        let target = |at: usize| hosts[code / hosts.len().pow(at as u32) % hosts.len()];
        let placed = |host: &HostSpec| {
            let there = vms.iter().enumerate().filter(|(at, _)| target(*at).name == host.name);
            there.map(|(_, vm)| *vm).collect::<Vec<_>>()
        };
        if hosts.iter().all(|host| has_room(inventory, host, &placed(host))) {
            let times = vms.iter().enumerate();
            let sum = times.map(|(at, vm)| move_ns(vm, find(inventory, &vm.host), target(at))).sum::<u64>();
            best = Some(best.map_or(sum, |least: u64| least.min(sum)));
        }
    }
    best
}

/// Returns the same by a solver of integer programs, in milliseconds; none if there is no possible assignment.
fn solved(inventory: &Inventory, drained: &[&str]) -> Option<f64> {
    let (vms, hosts) = task(inventory, drained);
    let mut variables = ProblemVariables::new();
    let chosen: Vec<Vec<Variable>> =
        vms.iter().map(|_| hosts.iter().map(|_| variables.add(variable().binary())).collect()).collect();
    let mut cost = Expression::default();
    for (vm, row) in vms.iter().zip(&chosen) {
        for (host, is_there) in hosts.iter().zip(row) {
            cost += move_ns(vm, find(inventory, &vm.host), host) as f64 / 1e6 * *is_there;
        }
    }
    let mut model = variables.minimise(cost.clone()).using(microlp);
    for row in &chosen {
        model = model.with(constraint!(row.iter().copied().sum::<Expression>() == 1.0));
    }
    for (to, host) in hosts.iter().enumerate() {
        let here: Vec<&VmSpec> = inventory.vms.iter().filter(|vm| vm.host == host.name).collect();
        let free_mib = host.guest_mib() - here.iter().map(|vm| vm.memory_mib).sum::<u64>();
        let used: Expression = vms.iter().zip(&chosen).map(|(vm, row)| vm.memory_mib as f64 * row[to]).sum();
        model = model.with(constraint!(used <= free_mib as f64));
        let free_milli = u64::from(host.processors) * 900 - here.iter().map(|vm| vm.busy_milli).sum::<u64>();
        let busy: Expression = vms.iter().zip(&chosen).map(|(vm, row)| vm.busy_milli as f64 * row[to]).sum();
        model = model.with(constraint!(busy <= free_milli as f64));
        let labels: BTreeSet<&String> = vms.iter().flat_map(|vm| &vm.rules.apart).collect();
        for label in labels {
            let taken = here.iter().filter(|vm| vm.rules.apart.contains(label)).count();
            let with_label = vms.iter().zip(&chosen).filter(|(vm, _)| vm.rules.apart.contains(label));
            let count: Expression = with_label.map(|(_, row)| row[to]).sum();
            model = model.with(constraint!(count <= 1.0 - taken as f64));
        }
    }
    match model.solve() {
        Ok(solution) => Some(cost.eval_with(&solution)),
        Err(ResolutionError::Infeasible) => None,
        Err(error) => panic!("{error}"),
    }
}

/// A request whose score is the sum of times, and nothing else.
fn by_time(drained: &[&str]) -> PlanRequest {
    let mut request = drain(drained);
    (request.limits.load_worth_s, request.limits.make_room) = (0, false);
    request
}

prop_compose! {
    /// Hosts with links of several rates, the first of which has up to six VMs.
    fn small_fleet()(
        rates in prop::collection::vec(1..11_u64, 3..5),
        gib in prop::collection::vec(20..64_u64, 4),
        vms in prop::collection::vec((2..20_u64, 0..2000_u64, prop::option::weighted(0.3, 0..2_u8)), 1..7),
        others in prop::collection::vec((1..30_u64, 1..5_usize, prop::option::weighted(0.3, 0..2_u8)), 0..4),
    ) -> Inventory {
        let mut hosts = Vec::new();
        for (at, rate) in rates.iter().enumerate() {
            let mut one = host(&format!("h{at}"));
            one.memory_mib = if at == 0 { 200 * GIB } else { gib[at - 1] * GIB };
            one.links[0].bytes_per_s = rate * 100_000_000;
            hosts.push(one);
        }
        let labelled = |mut spec: VmSpec, label: Option<u8>| {
            spec.rules.apart = label.into_iter().map(|label| label.to_string()).collect();
            spec
        };
        let mut all = Vec::new();
        for (at, (gib, busy_milli, label)) in vms.into_iter().enumerate() {
            let spec = VmSpec { busy_milli, ..vm(&format!("v{at}"), "h0", gib * GIB) };
            all.push(labelled(spec, label));
        }
        for (at, (gib, host, label)) in others.into_iter().enumerate() {
            let name = format!("h{host}");
            let Some(target) = hosts.iter().find(|one| one.name == name) else { continue };
            let spec = labelled(vm(&format!("o{at}"), &name, gib * GIB), label);
            let found = inventory(hosts.clone(), all.clone());
            if has_room(&found, target, &[&spec]) {
                all.push(spec);
            }
        }
        inventory(hosts, all)
    }
}

fn sum_of_times(inventory: &Inventory, plan: &PlacementPlan) -> u64 {
    let one = |one: &PlannedMove| {
        let vm = inventory.vms.iter().find(|vm| vm.name == one.vm).unwrap();
        move_ns(vm, find(inventory, &one.from), find(inventory, &one.to))
    };
    plan.moves.iter().map(one).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// On small fleets the plan is the best one, and one is refused only if there is none.
    #[test]
    fn small_plans_are_the_best_ones(inventory in small_fleet()) {
        let best = exhaustive(&inventory, &["h0"]);
        match plan(&inventory, &by_time(&["h0"])) {
            Ok(found) => prop_assert_eq!(best, Some(sum_of_times(&inventory, &found))),
            Err(refusal) => prop_assert_eq!(best, None, "{}", refusal),
        }
    }

    #[test]
    fn a_solver_of_integer_programs_finds_nothing_better(inventory in small_fleet()) {
        let best = solved(&inventory, &["h0"]);
        match (best, plan(&inventory, &by_time(&["h0"]))) {
            (Some(best_ms), Ok(found)) => {
                let found_ms = sum_of_times(&inventory, &found) as f64 / 1e6;
                prop_assert!((found_ms - best_ms).abs() <= 1e-6 * best_ms, "{} {}", found_ms, best_ms);
            }
            (None, Err(_)) => {}
            (best, found) => prop_assert!(false, "{:?} {:?}", best, found),
        }
    }

    /// Making room only makes more possible.
    #[test]
    fn room_that_is_made_refuses_no_plan(inventory in small_fleet()) {
        let mut request = by_time(&["h0"]);
        if plan(&inventory, &request).is_ok() {
            request.limits.make_room = true;
            prop_assert!(plan(&inventory, &request).is_ok());
        }
    }
}
