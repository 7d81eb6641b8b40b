//! Search for hosts: the placement as the goals change it, before moves are put in order.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::discriminant;

use super::cost::cost;
use super::index::Fleet;
use super::obstacle::Obstacle;
use super::occupancy::{Occupancy, WHOLE_PPM};
use super::plan::{MoveReason, StayReason, StayingVm};
use super::request::MoveLimits;

/// Placement of all VMs, which begins as it is.
///
/// Hosts of one kind differ in what they have in use only, so of each kind the least loaded one with room is the best.
/// A search looks at one host of each kind, and at more only where that one lacks something else than the load shows.
pub(super) struct Placer<'a> {
    pub(super) fleet: &'a Fleet<'a>,
    pub(super) occupancy: Occupancy<'a>,
    pub(super) limits: MoveLimits,
    /// Host of each VM.
    pub(super) host_of: Vec<u32>,
    /// VMs of each host.
    pub(super) vms_on: Vec<BTreeSet<u32>>,
    /// Reasons of the moves so far.
    pub(super) reasons: BTreeMap<u32, MoveReason>,
    pub(super) stays: Vec<StayingVm>,
    /// Reason for which a host accepts no VMs, for each host.
    closed: Vec<Option<Obstacle>>,
    /// Hosts of each kind that accept VMs, by load.
    by_load: Vec<BTreeSet<(u64, u32)>>,
    /// The same hosts by free memory.
    by_free_mib: Vec<BTreeSet<(u64, u32)>>,
    /// Kinds of hosts to which VMs of a kind can move from a kind of host, with the rates of the links.
    targets: BTreeMap<(u32, u32), Vec<(u32, u64)>>,
}

impl<'a> Placer<'a> {
    /// Returns the placement as it is. `closed` has what keeps each host from accepting VMs.
    pub(super) fn new(
        fleet: &'a Fleet<'a>,
        limits: MoveLimits,
        closed: Vec<Option<Obstacle>>,
        occupancy: Occupancy<'a>,
    ) -> Self {
        let mut vms_on = vec![BTreeSet::new(); fleet.host_count() as usize];
        for (vm, host) in fleet.home.iter().enumerate() {
            vms_on[*host as usize].insert(vm as u32);
        }
        let mut placer = Self {
            fleet,
            occupancy,
            limits,
            host_of: fleet.home.clone(),
            vms_on,
            reasons: BTreeMap::new(),
            stays: Vec::new(),
            closed,
            by_load: vec![BTreeSet::new(); fleet.kinds.len()],
            by_free_mib: vec![BTreeSet::new(); fleet.kinds.len()],
            targets: BTreeMap::new(),
        };
        for host in 0..fleet.host_count() {
            placer.list(host);
        }
        placer
    }

    /// Returns true if a host accepts VMs.
    pub(super) fn is_open(&self, host: u32) -> bool {
        self.closed[host as usize].is_none()
    }

    /// Returns true if a host is to be emptied.
    pub(super) fn is_drained(&self, host: u32) -> bool {
        self.closed[host as usize] == Some(Obstacle::Drained)
    }

    /// Returns the hosts that accept VMs.
    pub(super) fn open_hosts(&self) -> impl Iterator<Item = u32> {
        (0..self.fleet.host_count()).filter(move |host| self.is_open(*host))
    }

    fn list(&mut self, host: u32) {
        if self.is_open(host) {
            let kind = self.fleet.host_kind[host as usize] as usize;
            self.by_load[kind].insert((self.occupancy.load_ppm(host), host));
            self.by_free_mib[kind].insert((self.occupancy.free_mib(host), host));
        }
    }

    fn unlist(&mut self, host: u32) {
        let kind = self.fleet.host_kind[host as usize] as usize;
        self.by_load[kind].remove(&(self.occupancy.load_ppm(host), host));
        self.by_free_mib[kind].remove(&(self.occupancy.free_mib(host), host));
    }

    /// Moves a VM in the placement.
    pub(super) fn place(&mut self, vm: u32, to: u32) {
        let from = self.host_of[vm as usize];
        if from == to {
            return;
        }
        self.unlist(from);
        self.unlist(to);
        self.occupancy.remove(vm, from);
        self.occupancy.add(vm, to);
        self.list(from);
        self.list(to);
        self.vms_on[from as usize].remove(&vm);
        self.vms_on[to as usize].insert(vm);
        self.host_of[vm as usize] = to;
    }

    /// Moves all VMs of a unit in the placement.
    pub(super) fn place_unit(&mut self, unit: &[u32], to: u32) {
        for vm in unit {
            self.place(*vm, to);
        }
    }

    /// Returns the hosts of a unit's VMs.
    pub(super) fn hosts_of(&self, unit: &[u32]) -> Vec<u32> {
        unit.iter().map(|vm| self.host_of[*vm as usize]).collect()
    }

    /// Puts all VMs of a unit back.
    pub(super) fn put_back(&mut self, unit: &[u32], hosts: &[u32]) {
        for (vm, host) in unit.iter().zip(hosts) {
            self.place(*vm, *host);
        }
    }

    /// Returns the kinds of hosts to which a VM can move from where it was at first, with the rates of the links.
    pub(super) fn targets(&mut self, vm: u32) -> Vec<(u32, u64)> {
        let from = self.fleet.home[vm as usize];
        let fleet = self.fleet;
        let known = self.targets.entry(fleet.kind_of_move(vm, from));
        let targets = known.or_insert_with(|| fleet.targets(vm, from)).iter().copied();
        // VMs of a kind can have more processors than others.
        let vcpus = fleet.vm(vm).vcpus;
        targets.filter(|(kind, _)| fleet.host(fleet.kinds[*kind as usize]).processors >= vcpus).collect()
    }

    /// Returns the time of a move from a VM's first host over a link, in nanoseconds.
    pub(super) fn move_ns(&self, vm: u32, link_bytes_per_s: u64) -> u64 {
        let rate = link_bytes_per_s.min(self.limits.copy_bytes_per_s);
        let rate = self.limits.bytes_per_s.map_or(rate, |most| rate.min(most));
        cost(self.fleet.vm(vm), rate).total_ns.expected
    }

    /// Returns the best host for a unit, of those that `accepts` and that are not where all of it is, with its score.
    pub(super) fn best(&mut self, unit: &[u32], accepts: &dyn Fn(&Self, u32) -> bool) -> Option<(u64, u32)> {
        let mut found: Option<(u64, u32)> = None;
        for (kind, score) in self.kinds_for(unit) {
            // No load is worth less than none.
            if found.is_some_and(|(best, _)| best <= score) {
                continue;
            }
            if let Some(host) = self.first_of_kind(unit, kind, accepts) {
                let scored = (score.saturating_add(self.load_worth_ns(unit, host)), host);
                found = Some(found.map_or(scored, |best| best.min(scored)));
            }
        }
        found
    }

    /// Returns the best of some hosts for a unit, with its score.
    pub(super) fn best_of(&mut self, unit: &[u32], hosts: &[u32]) -> Option<(u64, u32)> {
        if hosts.is_empty() {
            return None;
        }
        let scores: BTreeMap<u32, u64> = self.kinds_for(unit).into_iter().collect();
        let mut found: Option<(u64, u32)> = None;
        for host in hosts.iter().copied() {
            let score = scores.get(&self.fleet.host_kind[host as usize]).copied();
            let Some(score) = score.filter(|_| self.is_open(host)) else { continue };
            if self.fits(unit, host) {
                let scored = (score.saturating_add(self.load_worth_ns(unit, host)), host);
                found = Some(found.map_or(scored, |best| best.min(scored)));
            }
        }
        found
    }

    /// Returns all hosts that have room for a unit, with their scores, the best first.
    pub(super) fn all(&mut self, unit: &[u32]) -> Vec<(u64, u32)> {
        let mut found = Vec::new();
        for (kind, score) in self.kinds_for(unit) {
            let hosts: Vec<u32> = self.by_load[kind as usize].iter().map(|(_, host)| *host).collect();
            for host in hosts {
                if self.fits(unit, host) {
                    found.push((score.saturating_add(self.load_worth_ns(unit, host)), host));
                }
            }
        }
        found.sort_unstable();
        found
    }

    /// Returns the kinds of hosts to which all VMs of a unit can move, each with the time that this takes.
    fn kinds_for(&mut self, unit: &[u32]) -> Vec<(u32, u64)> {
        let mut kinds: Option<BTreeMap<u32, u64>> = None;
        for vm in unit {
            let targets = self.targets(*vm);
            let times = targets.into_iter().map(|(kind, rate)| (kind, self.move_ns(*vm, rate)));
            kinds = Some(match kinds {
                None => times.collect(),
                Some(before) => times
                    .filter_map(|(kind, ns)| Some((kind, before.get(&kind)?.saturating_add(ns))))
                    .collect(),
            });
        }
        kinds.unwrap_or_default().into_iter().collect()
    }

    fn first_of_kind(
        &mut self,
        unit: &[u32],
        kind: u32,
        accepts: &dyn Fn(&Self, u32) -> bool,
    ) -> Option<u32> {
        let needs_mib: u64 = unit.iter().map(|vm| self.fleet.vm(*vm).memory_mib).sum();
        let most_mib = self.by_free_mib[kind as usize].last().map_or(0, |(free_mib, _)| *free_mib);
        // A unit that is partly there needs less.
        if unit.len() == 1 && needs_mib > most_mib {
            return None;
        }
        if let [vm] = unit {
            let hosts = self.by_load[kind as usize].iter().map(|(_, host)| *host);
            let mut fitting = hosts.filter(|host| self.fits_one(*vm, *host) && accepts(self, *host));
            return fitting.next();
        }
        let hosts: Vec<u32> = self.by_load[kind as usize].iter().map(|(_, host)| *host).collect();
        hosts.into_iter().find(|host| self.fits(unit, *host) && accepts(self, *host))
    }

    fn fits_one(&self, vm: u32, host: u32) -> bool {
        self.host_of[vm as usize] != host
            && self.fleet.is_allowed(vm, host)
            && self.occupancy.shortage(vm, host).is_none()
    }

    /// Returns true if a unit fits on a host. VMs that may not move have to be there.
    pub(super) fn fits(&mut self, unit: &[u32], host: u32) -> bool {
        if let [vm] = unit {
            return self.fits_one(*vm, host);
        }
        let before = self.hosts_of(unit);
        if before.iter().all(|from| *from == host) {
            return false;
        }
        let mut fits = true;
        for vm in unit {
            if self.host_of[*vm as usize] == host {
                continue;
            }
            fits = self.fleet.hold(*vm).is_none() && self.fits_one(*vm, host);
            if !fits {
                break;
            }
            self.place(*vm, host);
        }
        self.put_back(unit, &before);
        fits
    }

    /// Returns what the load of a host with a unit is worth, in nanoseconds.
    fn load_worth_ns(&self, unit: &[u32], host: u32) -> u64 {
        let load_ppm = match unit {
            [vm] => self.occupancy.load_with_vm(host, *vm),
            _ => self.occupancy.load_ppm(host),
        };
        let worth =
            (u128::from(load_ppm) * u128::from(self.limits.load_worth_s)).saturating_mul(1_000_000_000);
        u64::try_from(worth / u128::from(WHOLE_PPM)).unwrap_or(u64::MAX)
    }

    /// Returns the first obstacle of a VM on each other host, counted, the most frequent first.
    pub(super) fn obstacles(&self, vm: u32) -> Vec<(Obstacle, u32)> {
        let mut counts: Vec<(Obstacle, u32)> = Vec::new();
        let from = self.fleet.home[vm as usize];
        let mut lasting: BTreeMap<u32, Option<Obstacle>> = BTreeMap::new();
        for host in (0..self.fleet.host_count()).filter(|host| *host != from) {
            let of_kind = lasting
                .entry(self.fleet.host_kind[host as usize])
                .or_insert_with(|| self.fleet.lasting_obstacles(vm, from, host).into_iter().next());
            let shortage = || {
                let shortage = self.occupancy.shortage(vm, host)?;
                Some(self.occupancy.explain(vm, shortage))
            };
            let not_allowed = || (!self.fleet.is_allowed(vm, host)).then_some(Obstacle::NotAmongItsHosts);
            let closed = self.closed[host as usize].clone();
            let first = closed.or_else(not_allowed).or_else(|| of_kind.clone()).or_else(shortage);
            let Some(obstacle) = first else { continue };
            let is_alike = |other: &&mut (Obstacle, u32)| discriminant(&other.0) == discriminant(&obstacle);
            match counts.iter_mut().find(is_alike) {
                // The host that lacks least is shown.
                Some((shown, hosts)) => {
                    *hosts += 1;
                    *shown = obstacle.max(shown.clone());
                }
                None => counts.push((obstacle, 1)),
            }
        }
        counts.sort_by_key(|(_, hosts)| std::cmp::Reverse(*hosts));
        counts
    }

    /// Records that a VM stays.
    pub(super) fn stay(&mut self, vm: u32, why: StayReason) {
        let host = self.fleet.host(self.host_of[vm as usize]).name.clone();
        self.stays.push(StayingVm { vm: self.fleet.vm(vm).name.clone(), host, why });
    }
}
