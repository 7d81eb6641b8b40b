//! VMs on hosts: a scratch copy on which a baseline tries its moves.

use std::collections::VecDeque;

use super::regression::VALUES;
use super::setup::Setup;

/// Use of a host by its VMs, now and in the last steps.
#[derive(Clone, Debug, Default)]
pub(super) struct HostUse {
    /// VMs, in the order in which they came.
    pub(super) vms: Vec<u32>,
    /// Demand, in MIPS.
    pub(super) mips: f64,
    /// Demand of the present VMs in the last steps, the oldest first.
    pub(super) history: [f64; VALUES],
}

/// Placement of all VMs.
#[derive(Clone, Debug)]
pub(super) struct Placement<'a> {
    pub(super) setup: &'a Setup,
    /// Demand of each VM now.
    demand: &'a [f32],
    /// Demand of the last steps, the newest last.
    past: &'a VecDeque<&'a [f32]>,
    pub(super) hosts: Vec<HostUse>,
    pub(super) host_of: Vec<u32>,
    /// Memory in use on each host, in MB. A VM that is to leave uses it until it has left, which is after this
    /// decision.
    memory_mb: Vec<f64>,
    /// Host of each VM before this decision.
    origin: &'a [u32],
}

impl<'a> Placement<'a> {
    pub(super) fn new(
        setup: &'a Setup,
        demand: &'a [f32],
        past: &'a VecDeque<&'a [f32]>,
        origin: &'a [u32],
        memory_mb: Vec<f64>,
    ) -> Self {
        let hosts = vec![HostUse::default(); setup.hosts.len()];
        let host_of = origin.to_vec();
        let mut placement = Self { setup, demand, past, hosts, host_of, memory_mb, origin };
        for (vm, host) in origin.iter().enumerate() {
            placement.add(vm, *host as usize);
        }
        placement
    }

    /// Returns the demand of a VM, in MIPS.
    pub(super) fn demand(&self, vm: usize) -> f64 {
        f64::from(self.demand[vm])
    }

    /// Puts a VM on a host.
    pub(super) fn add(&mut self, vm: usize, host: usize) {
        self.change(vm, host, 1.0);
        self.hosts[host].vms.push(vm as u32);
        self.host_of[vm] = host as u32;
    }

    /// Takes a VM from its host.
    pub(super) fn remove(&mut self, vm: usize) {
        let host = self.host_of[vm] as usize;
        self.change(vm, host, -1.0);
        self.hosts[host].vms.retain(|other| *other as usize != vm);
        if self.hosts[host].vms.is_empty() {
            // Nothing is left of sums that were not exact.
            self.hosts[host] = HostUse::default();
        }
    }

    /// Returns the demand of a VM `ago` steps ago, in MIPS.
    fn past(&self, vm: usize, ago: usize) -> f64 {
        f64::from(self.past[self.past.len() - 1 - ago][vm])
    }

    fn change(&mut self, vm: usize, host: usize, sign: f64) {
        let mips = self.demand(vm);
        if self.origin[vm] as usize != host {
            self.memory_mb[host] += sign * self.setup.room_mb(vm);
        }
        for ago in 0..self.past.len().min(VALUES) {
            self.hosts[host].history[VALUES - 1 - ago] += sign * self.past(vm, ago);
        }
        self.hosts[host].mips += sign * mips;
    }

    /// Returns the use of a host if a VM came to it, without its list of VMs.
    pub(super) fn with(&self, vm: usize, host: usize) -> HostUse {
        let now = &self.hosts[host];
        let mut history = now.history;
        for ago in 0..self.past.len().min(VALUES) {
            history[VALUES - 1 - ago] += self.past(vm, ago);
        }
        HostUse { vms: Vec::new(), mips: now.mips + self.demand(vm), history }
    }

    /// Returns true if a host has memory for a VM.
    pub(super) fn has_memory(&self, vm: usize, host: usize) -> bool {
        let needed_mb = if self.origin[vm] as usize == host { 0.0 } else { self.setup.room_mb(vm) };
        self.memory_mb[host] + needed_mb <= self.setup.hosts[host].memory_mb
    }

    /// Returns the number of steps whose demand is known.
    pub(super) fn known_steps(&self) -> usize {
        self.past.len()
    }
}
