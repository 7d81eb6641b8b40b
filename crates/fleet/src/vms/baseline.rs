//! Baselines: static, THR-MMT and LR-MMT, as CloudSim has them.

use super::placement::{HostUse, Placement};
use super::regression::{VALUES, forecast_factors};
use super::setup::STEP_S;
use super::simulation::{Policy, Snapshot};

/// Rule by which a host is overloaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Overload {
    /// Its use exceeds a share of its MIPS.
    Threshold(f64),
    /// The use that a local regression predicts, multiplied by a safety factor, is 100% or more. As long as fewer than
    /// ten values are known, use above 70%.
    LocalRegression(f64),
}

/// Power of a host that is off, where the growth of power is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakePower {
    /// Power of an idle host, as in CloudSim: waking a host is free for this comparison.
    LikeIdle,
    /// None, so that waking a host costs what it needs when idle.
    Zero,
}

/// Use above which a host is overloaded before a regression is possible.
const FALLBACK: f64 = 0.7;

/// A baseline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Baseline {
    /// Moves nothing.
    Static,
    /// Moves VMs from overloaded hosts, those that move fastest first (MMT), each to the host whose power grows least;
    /// then empties hosts, those of least use first, if all of their VMs fit elsewhere.
    Dynamic(Overload, WakePower),
}

impl Baseline {
    /// THR-MMT with its usual threshold, as in CloudSim.
    pub const THR_MMT: Self = Self::Dynamic(Overload::Threshold(0.8), WakePower::LikeIdle);
    /// LR-MMT with its usual safety factor, as in CloudSim.
    pub const LR_MMT: Self = Self::Dynamic(Overload::LocalRegression(1.2), WakePower::LikeIdle);
    /// LR-MMT that counts the power of a host that it wakes.
    pub const LR_MMT_WAKING: Self = Self::Dynamic(Overload::LocalRegression(1.2), WakePower::Zero);
}

impl Policy for Baseline {
    fn decide(&mut self, snapshot: &Snapshot<'_>) -> Vec<(usize, usize)> {
        let Self::Dynamic(overload, wake) = *self else { return Vec::new() };
        let Snapshot { setup, demand, past, host_of, .. } = snapshot;
        let memory_mb = snapshot.memory_mb.to_vec();
        let placement = Placement::new(setup, demand, past, host_of, memory_mb);
        let mut round = Round { snapshot, overload, wake, placement, factors: Vec::new() };
        round.relieve();
        round
            .placement
            .host_of
            .iter()
            .zip(snapshot.host_of)
            .enumerate()
            .filter(|(_, (to, from))| to != from)
            .map(|(vm, (to, _))| (vm, *to as usize))
            .collect()
    }
}

/// One decision.
struct Round<'a> {
    snapshot: &'a Snapshot<'a>,
    overload: Overload,
    wake: WakePower,
    placement: Placement<'a>,
    /// Factors of the regression, by the number of steps ahead less one.
    factors: Vec<[f64; VALUES]>,
}

impl Round<'_> {
    fn relieve(&mut self) {
        let hosts = self.placement.hosts.len();
        // All moves that are possible here; longer ones than a day are not.
        self.factors = (1..=300).map(|ahead| forecast_factors(f64::from(ahead))).collect();
        let longest: Vec<usize> = (0..hosts).map(|host| self.longest_move_steps(host)).collect();
        let mut is_closed: Vec<bool> = (0..hosts)
            .map(|host| self.is_overloaded(host, &self.placement.hosts[host], longest[host]))
            .collect();
        let overloaded: Vec<usize> = (0..hosts).filter(|host| is_closed[*host]).collect();
        let mut leaving = Vec::new();
        for host in &overloaded {
            self.select(*host, longest[*host], &mut leaving);
        }
        let sources: Vec<u32> = leaving.iter().map(|vm| self.snapshot.host_of[*vm]).collect();
        let mut order: Vec<usize> = (0..leaving.len()).collect();
        let demand = |at: &usize| self.placement.demand(leaving[*at]);
        order.sort_by(|a, b| demand(b).total_cmp(&demand(a)));
        let all: Vec<usize> = (0..hosts).collect();
        for at in order {
            // A VM for which there is no host stays.
            let host = self.find(leaving[at], &all, &is_closed).unwrap_or(sources[at] as usize);
            self.placement.add(leaving[at], host);
        }
        self.empty_hosts(&mut is_closed);
    }

    /// Takes VMs from an overloaded host, those that move fastest first, until it is not overloaded.
    fn select(&mut self, host: usize, longest: usize, leaving: &mut Vec<usize>) {
        loop {
            let movable = self.placement.hosts[host].vms.iter().map(|vm| *vm as usize);
            let setup = self.placement.setup;
            let fastest = movable
                .filter(|vm| !self.snapshot.is_moving[*vm])
                .min_by(|a, b| setup.vms[*a].memory_mb.total_cmp(&setup.vms[*b].memory_mb));
            let Some(vm) = fastest else { return };
            self.placement.remove(vm);
            leaving.push(vm);
            if !self.is_overloaded(host, &self.placement.hosts[host], longest) {
                return;
            }
        }
    }

    /// Empties hosts, those of least use first, if all of their VMs fit on others that are on.
    fn empty_hosts(&mut self, is_closed: &mut [bool]) {
        let is_on = |host: &usize| !self.placement.hosts[*host].vms.is_empty();
        let on: Vec<usize> = (0..is_closed.len()).filter(|host| is_on(host) && !is_closed[*host]).collect();
        let mut is_done = vec![false; is_closed.len()];
        loop {
            let usage = |host: usize| self.placement.hosts[host].mips / self.placement.setup.hosts[host].mips;
            let least = on
                .iter()
                .copied()
                .filter(|host| !is_done[*host])
                .min_by(|a, b| usage(*a).total_cmp(&usage(*b)));
            let Some(host) = least else { return };
            is_done[host] = true;
            is_closed[host] = true;
            let vms: Vec<usize> = self.placement.hosts[host].vms.iter().map(|vm| *vm as usize).collect();
            if vms.iter().any(|vm| self.snapshot.is_moving[*vm]) {
                continue;
            }
            for target in self.empty(host, vms, &on, is_closed) {
                is_done[target] = true;
            }
        }
    }

    /// Moves all VMs of a host to others; returns their new hosts, or moves none.
    fn empty(&mut self, host: usize, mut vms: Vec<usize>, on: &[usize], is_closed: &[bool]) -> Vec<usize> {
        vms.sort_by(|a, b| self.placement.demand(*b).total_cmp(&self.placement.demand(*a)));
        let mut targets = Vec::new();
        for (count, vm) in vms.iter().enumerate() {
            if let Some(target) = self.find(*vm, on, is_closed) {
                self.placement.remove(*vm);
                self.placement.add(*vm, target);
                targets.push(target);
                continue;
            }
            for vm in &vms[..count] {
                self.placement.remove(*vm);
                self.placement.add(*vm, host);
            }
            return Vec::new();
        }
        targets
    }

    /// Returns the host whose power grows least by a VM, and that is not overloaded by it.
    fn find(&self, vm: usize, among: &[usize], is_closed: &[bool]) -> Option<usize> {
        let setup = self.placement.setup;
        let mips = self.placement.demand(vm);
        let mut best = (f64::INFINITY, None);
        for host in among.iter().copied().filter(|host| !is_closed[*host]) {
            let (spec, now) = (&setup.hosts[host], &self.placement.hosts[host]);
            if mips > spec.core_mips || now.mips + mips > spec.mips {
                continue;
            }
            let is_off = now.vms.is_empty();
            let before = if is_off && self.wake == WakePower::Zero {
                0.0
            } else {
                spec.power.watts(now.mips / spec.mips)
            };
            let growth = spec.power.watts((now.mips + mips) / spec.mips) - before;
            if growth >= best.0 {
                continue;
            }
            let after = self.placement.with(vm, host);
            let longest = self.longest_move_steps(host).max(self.move_steps(vm));
            if self.placement.has_memory(vm, host) && (is_off || !self.is_overloaded(host, &after, longest)) {
                best = (growth, Some(host));
            }
        }
        best.1
    }

    fn is_overloaded(&self, host: usize, usage: &HostUse, longest_move_steps: usize) -> bool {
        let mips = self.placement.setup.hosts[host].mips;
        match self.overload {
            Overload::Threshold(share) => usage.mips > share * mips,
            Overload::LocalRegression(_) if self.placement.known_steps() < VALUES => {
                usage.mips > FALLBACK * mips
            }
            Overload::LocalRegression(safety) => {
                let factors = &self.factors[longest_move_steps.clamp(1, self.factors.len()) - 1];
                let predicted: f64 =
                    factors.iter().zip(usage.history).map(|(factor, value)| factor * value).sum();
                safety * predicted >= mips
            }
        }
    }

    fn longest_move_steps(&self, host: usize) -> usize {
        let vms = self.placement.hosts[host].vms.iter();
        vms.map(|vm| self.move_steps(*vm as usize)).max().unwrap_or(1)
    }

    fn move_steps(&self, vm: usize) -> usize {
        (self.placement.setup.move_s(vm) / STEP_S).ceil() as usize
    }
}
