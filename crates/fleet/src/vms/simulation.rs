//! A day of VMs on hosts.

use std::collections::VecDeque;

use super::metrics::Metrics;
use super::regression::VALUES;
use super::setup::{BadSetup, MOVE_LOSS, STEP_S, Setup};

/// State of the fleet at the start of a step, as a policy sees it.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// Hosts and VMs.
    pub setup: &'a Setup,
    /// Number of the step.
    pub step: usize,
    /// Demand of each VM now, in MIPS.
    pub demand: &'a [f32],
    /// Demand of the last steps up to now, the newest last.
    pub past: &'a VecDeque<&'a [f32]>,
    /// Host of each VM; that to which it moves, if it moves.
    pub host_of: &'a [u32],
    /// VMs that move.
    pub is_moving: &'a [bool],
    /// Memory in use on each host, in MB: of VMs that are there, leave or arrive. 0 if memory is ignored.
    pub memory_mb: &'a [f64],
}

/// A policy.
pub trait Policy {
    /// Returns the moves that begin now: VMs with the hosts to which they move. VMs that move already stay as they are.
    fn decide(&mut self, snapshot: &Snapshot<'_>) -> Vec<(usize, usize)>;
}

/// A host's meter.
#[derive(Clone, Debug, Default)]
struct HostMeter {
    /// Demand of the VMs that are here, in MIPS.
    mips: f64,
    /// Demand that VMs which arrive add before they are here, in MIPS.
    arriving_mips: f64,
    /// Number of VMs that are here or arrive.
    vms: usize,
    memory_mb: f64,
    /// Time up to which all sums are made, in seconds.
    until_s: f64,
    energy_j: f64,
    active_s: f64,
    full_s: f64,
    unserved: f64,
}

/// A move under way.
#[derive(Clone, Copy, Debug)]
struct PendingMove {
    vm: usize,
    from: usize,
    to: usize,
    end_s: f64,
}

struct World<'a> {
    setup: &'a Setup,
    meters: Vec<HostMeter>,
    host_of: Vec<u32>,
    is_moving: Vec<bool>,
    moves: Vec<PendingMove>,
    lost: Vec<f64>,
    count: u64,
    starts: u64,
}

/// Simulates all steps of a set-up under a policy.
///
/// VMs begin where [`first_placement`] puts them. At each step the policy decides by the demand of that step, which
/// then lasts for the step. A host without VMs is off.
pub fn simulate(setup: &Setup, policy: &mut impl Policy) -> Result<Metrics, BadSetup> {
    let mut world = World::new(setup, first_placement(setup)?);
    let mut past: VecDeque<&[f32]> = VecDeque::new();
    let mut asked = vec![0.0; setup.vms.len()];
    for step in 0..setup.steps() {
        let (now_s, demand) = (step as f64 * STEP_S, setup.demand(step));
        past.push_back(demand);
        if past.len() > VALUES {
            past.pop_front();
        }
        world.set_demand(demand);
        let memory_mb: Vec<f64> = world.meters.iter().map(|meter| meter.memory_mb).collect();
        let (host_of, is_moving, memory_mb) = (&world.host_of, &world.is_moving, &memory_mb);
        let snapshot = Snapshot { setup, step, demand, past: &past, host_of, is_moving, memory_mb };
        for (vm, to) in policy.decide(&snapshot) {
            world.begin(vm, to, now_s, demand);
        }
        world.run(now_s + STEP_S, demand);
        for (asked, demand) in asked.iter_mut().zip(demand) {
            *asked += f64::from(*demand) * STEP_S;
        }
    }
    Ok(world.metrics(&asked))
}

/// Returns the host of each VM at the start: the one whose power grows least, with room for all MIPS and memory that
/// the VM may ask for. It is the same for all policies.
pub(super) fn first_placement(setup: &Setup) -> Result<Vec<u32>, BadSetup> {
    let mut used = vec![(0.0, 0.0); setup.hosts.len()];
    let mut host_of = Vec::with_capacity(setup.vms.len());
    for (at, vm) in setup.vms.iter().enumerate() {
        let growth = |host: usize| {
            let (spec, mips) = (&setup.hosts[host], used[host].0);
            let before = if mips > 0.0 { spec.power.watts(mips / spec.mips) } else { 0.0 };
            spec.power.watts((mips + vm.mips) / spec.mips) - before
        };
        let fits = |host: &usize| {
            let (spec, (mips, memory_mb)) = (&setup.hosts[*host], used[*host]);
            vm.mips <= spec.core_mips
                && mips + vm.mips <= spec.mips
                && memory_mb + vm.memory_mb <= spec.memory_mb
        };
        let best = (0..setup.hosts.len())
            .filter(fits)
            .min_by(|a, b| growth(*a).total_cmp(&growth(*b)))
            .ok_or(BadSetup::NoRoom { vm: at + 1 })?;
        used[best].0 += vm.mips;
        used[best].1 += vm.memory_mb;
        host_of.push(best as u32);
    }
    Ok(host_of)
}

impl<'a> World<'a> {
    fn new(setup: &'a Setup, host_of: Vec<u32>) -> Self {
        let mut meters = vec![HostMeter::default(); setup.hosts.len()];
        for (vm, host) in host_of.iter().enumerate() {
            meters[*host as usize].vms += 1;
            meters[*host as usize].memory_mb += setup.room_mb(vm);
        }
        let starts = meters.iter().filter(|meter| meter.vms > 0).count() as u64;
        let (is_moving, lost) = (vec![false; setup.vms.len()], vec![0.0; setup.vms.len()]);
        Self { setup, meters, host_of, is_moving, moves: Vec::new(), lost, count: 0, starts }
    }

    fn set_demand(&mut self, demand: &[f32]) {
        for meter in &mut self.meters {
            (meter.mips, meter.arriving_mips) = (0.0, 0.0);
        }
        for (vm, host) in self.host_of.iter().enumerate().filter(|(vm, _)| !self.is_moving[*vm]) {
            self.meters[*host as usize].mips += f64::from(demand[vm]);
        }
        for one in &self.moves {
            let mips = f64::from(demand[one.vm]);
            self.meters[one.from].mips += mips;
            self.meters[one.to].arriving_mips += MOVE_LOSS * mips;
        }
    }

    fn begin(&mut self, vm: usize, to: usize, now_s: f64, demand: &[f32]) {
        let from = self.host_of[vm] as usize;
        if from == to || self.is_moving[vm] {
            return;
        }
        let room_mb = self.setup.room_mb(vm);
        assert!(
            self.meters[to].memory_mb + room_mb <= self.setup.hosts[to].memory_mb,
            "VM {vm} does not fit"
        );
        self.starts += u64::from(self.meters[to].vms == 0);
        self.meters[to].vms += 1;
        self.meters[to].memory_mb += room_mb;
        self.meters[to].arriving_mips += MOVE_LOSS * f64::from(demand[vm]);
        self.host_of[vm] = to as u32;
        self.is_moving[vm] = true;
        self.moves.push(PendingMove { vm, from, to, end_s: now_s + self.setup.move_s(vm) });
        self.count += 1;
    }

    /// Lets time pass until `end_s`.
    fn run(&mut self, end_s: f64, demand: &[f32]) {
        let began_s = end_s - STEP_S;
        for one in &self.moves {
            let moving_s = one.end_s.min(end_s) - began_s;
            self.lost[one.vm] += MOVE_LOSS * f64::from(demand[one.vm]) * moving_s;
        }
        let mut ended: Vec<PendingMove> = self.moves.extract_if(.., |one| one.end_s <= end_s).collect();
        ended.sort_by(|a, b| a.end_s.total_cmp(&b.end_s));
        for PendingMove { vm, from, to, end_s } in ended {
            self.measure(from, end_s);
            self.measure(to, end_s);
            let mips = f64::from(demand[vm]);
            let room_mb = self.setup.room_mb(vm);
            let source = &mut self.meters[from];
            source.mips -= mips;
            source.vms -= 1;
            source.memory_mb -= room_mb;
            self.meters[to].mips += mips;
            self.meters[to].arriving_mips -= MOVE_LOSS * mips;
            self.is_moving[vm] = false;
        }
        for host in 0..self.meters.len() {
            self.measure(host, end_s);
        }
    }

    /// Adds up what a host did until `now_s`.
    fn measure(&mut self, host: usize, now_s: f64) {
        let (meter, spec) = (&mut self.meters[host], &self.setup.hosts[host]);
        let passed_s = now_s - meter.until_s;
        meter.until_s = now_s;
        if meter.vms == 0 {
            return;
        }
        let mips = meter.mips + meter.arriving_mips;
        meter.energy_j += spec.power.watts(mips / spec.mips) * passed_s;
        meter.active_s += passed_s;
        // Sums of demands are not exact to the last digit.
        if mips >= spec.mips * (1.0 - 1e-9) {
            meter.full_s += passed_s;
            meter.unserved += (mips - spec.mips) * passed_s;
        }
    }

    fn metrics(&self, asked: &[f64]) -> Metrics {
        let active: Vec<&HostMeter> = self.meters.iter().filter(|meter| meter.active_s > 0.0).collect();
        let slatah =
            active.iter().map(|meter| meter.full_s / meter.active_s).sum::<f64>() / active.len() as f64;
        let losses = self.lost.iter().zip(asked).filter(|(_, asked)| **asked > 0.0);
        let pdm = losses.map(|(lost, asked)| lost / asked).sum::<f64>() / asked.len() as f64;
        let sum = |of: fn(&HostMeter) -> f64| active.iter().map(|meter| of(meter)).sum::<f64>();
        let energy_kwh = sum(|meter| meter.energy_j) / 3_600_000.0;
        let slav = slatah * pdm;
        let duration_s = self.setup.steps() as f64 * STEP_S;
        Metrics {
            energy_kwh,
            slatah,
            pdm,
            slav,
            esv: energy_kwh * slav,
            moves: self.count,
            unserved: sum(|meter| meter.unserved) / asked.iter().sum::<f64>(),
            mean_hosts: sum(|meter| meter.active_s) / duration_s,
            starts: self.starts,
        }
    }
}
