//! Forecasts, and plans for large fleets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for developers")]

#[path = "../../../benches/harness.rs"]
mod harness;

use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;

use engine::forecast::facts::{GuestFacts, MigrationFacts};
use engine::forecast::forecast;
use engine::forecast::writes::WorkingSetCurve;
use engine::planner::inventory::{HostPlatform, HostSpec, LinkSpec, VmPlatform, VmSpec};
use engine::planner::{Hysteresis, Inventory, PlanGoal, PlanRequest, plan};
use engine::pre_copy::{AnyPolicy, FixedCost, OnLimit, PatternPolicy, PreCopyGoals};
use harness::{Amount, Benches};
use whimbrel_engine as engine;

const GIB: u64 = 1 << 30;

fn main() {
    let mut benches = Benches::from_arguments();
    forecasts(&mut benches);
    for hosts in [1_000, 10_000] {
        plans(&mut benches, hosts);
    }
    benches.finish();
}

fn forecasts(benches: &mut Benches) {
    for (name, rate) in [("converging", 50_000_000), ("hot", 300_000_000)] {
        benches.timed(&format!("forecast/{name}"), Amount::Of(1, "forecast"), || {
            let guest = GuestFacts {
                memory_bytes: 8 * GIB,
                used_bytes: 6 * GIB,
                writes: WorkingSetCurve::looping(rate, 2 * GIB),
                ..GuestFacts::default()
            };
            let facts = MigrationFacts { guest, ..MigrationFacts::default() };
            let goals = PreCopyGoals::default();
            let policy = AnyPolicy::from(PatternPolicy::new(goals, OnLimit::Abort, FixedCost::default()));
            move || {
                black_box(forecast(black_box(&facts), &policy, goals));
            }
        });
    }
}

/// Returns a fleet of three kinds of hosts, two thirds full, with ten VMs for each host; every tenth host is busy.
fn fleet(hosts: u64) -> Inventory {
    let platform = |qemu: &str| HostPlatform { qemu: qemu.to_owned(), kvm: true, ..HostPlatform::default() };
    let host = |at: u64| HostSpec {
        name: format!("host-{at}"),
        platform: if at.is_multiple_of(3) { "new" } else { "newer" }.to_owned(),
        processors: 64,
        memory_mib: if at.is_multiple_of(2) { 512 << 10 } else { 384 << 10 },
        links: vec![LinkSpec { network: "migration".to_owned(), bytes_per_s: 3_000_000_000 }],
        storage: BTreeSet::from(["san".to_owned()]),
        networks: BTreeSet::from(["lan".to_owned()]),
        zone: Some(format!("zone-{}", at % 40)),
        busy_for_s: 600,
        ..HostSpec::default()
    };
    let vm = |at: u64| {
        let host = at % hosts;
        let scattered = at.wrapping_mul(2_654_435_761) >> 16;
        let mut spec = VmSpec {
            name: format!("vm-{at}"),
            host: format!("host-{host}"),
            platform: "guest".to_owned(),
            vcpus: 8,
            busy_milli: if host.is_multiple_of(10) { 5200 } else { 1000 + scattered % 2000 },
            memory_mib: (8 + scattered % 30) << 10,
            storage: BTreeSet::from(["san".to_owned()]),
            networks: BTreeSet::from(["lan".to_owned()]),
            ..VmSpec::default()
        };
        // Pairs that stay apart; and groups of about six, scattered over the zones.
        spec.rules.apart = if at.is_multiple_of(4) { vec![format!("pair-{}", at / 8)] } else { Vec::new() };
        spec.rules.spread = at.is_multiple_of(7).then(|| format!("spread-{}", scattered % (hosts / 4)));
        spec
    };
    let guest = VmPlatform { qemu: "8.2".to_owned(), kvm: true, ..VmPlatform::default() };
    Inventory {
        hosts: (0..hosts).map(host).collect(),
        vms: (0..hosts * 10).map(vm).collect(),
        host_platforms: BTreeMap::from([
            ("new".to_owned(), platform("8.2")),
            ("newer".to_owned(), platform("10.0")),
        ]),
        vm_platforms: BTreeMap::from([("guest".to_owned(), guest)]),
        cpu_models: Vec::new(),
    }
}

fn plans(benches: &mut Benches, hosts: u64) {
    let drained = (0..hosts / 10).map(|at| format!("host-{}", at * 10)).collect();
    let goals = [
        ("drain a tenth", PlanGoal::Drain { hosts: drained, to: Vec::new() }),
        ("balance", PlanGoal::Balance),
        ("spread", PlanGoal::Spread),
    ];
    for (name, goal) in goals {
        benches.timed(&format!("plan, {name}/{hosts} hosts"), Amount::Of(hosts * 10, "VM"), || {
            let inventory = fleet(hosts);
            let hysteresis = Hysteresis { threshold_percent: 10, ..Hysteresis::default() };
            let mut request = PlanRequest { goal, hysteresis, ..PlanRequest::default() };
            request.limits.moves = u32::MAX;
            let moves = plan(&inventory, &request).expect("a plan").moves.len();
            eprintln!("{moves} moves");
            move || {
                black_box(plan(black_box(&inventory), &request).expect("a plan"));
            }
        });
    }
}
