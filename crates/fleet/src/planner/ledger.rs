//! Ledger of a decision: the fleet as it will be after the moves that were decided so far.

use super::forecast::{ERRORS, Forecast};
use super::model::{Host, PowerState, View, Vm};
use super::plan::{HostChange, Move, Plan, Reason};
use super::settings::Settings;

/// A host in the ledger.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// VMs, by their places in the view.
    pub(super) vms: Vec<u32>,
    pub(super) used: f64,
    pub(super) level: f64,
    unknown: f64,
    errors: [f32; ERRORS],
    /// Memory in use, in MB. VMs that leave use it until they have left.
    memory_mb: f64,
    /// Accepts VMs.
    pub(super) is_open: bool,
    /// Is on, or is woken by this plan.
    pub(super) is_on: bool,
}

/// The fleet after the moves so far.
pub(super) struct Ledger<'a> {
    pub(super) view: &'a View<'a>,
    pub(super) settings: &'a Settings,
    pub(super) forecasts: Vec<Forecast>,
    pub(super) entries: Vec<Entry>,
    /// Host of each VM.
    pub(super) host_of: Vec<u32>,
    /// Hosts that accept VMs: the most efficient first.
    pub(super) open: Vec<u32>,
    /// Reason of the move of each VM.
    pub(super) reasons: Vec<Option<Reason>>,
    /// VMs that were moved, in their order.
    pub(super) moved: Vec<u32>,
    pub(super) woken: usize,
    /// Watts of each host for each average VM.
    efficiency: Vec<f64>,
    /// VMs use a larger share of all memory than of all processors.
    is_memory_scarce: bool,
}

/// Share of the limit on processors that a host with ample ones uses at most.
const AMPLE: f64 = 0.6;

impl<'a> Ledger<'a> {
    pub(super) fn new(view: &'a View<'a>, settings: &'a Settings, forecasts: Vec<Forecast>) -> Self {
        let entry = |host: &Host| Entry {
            vms: Vec::new(),
            used: 0.0,
            level: 0.0,
            unknown: 0.0,
            errors: [0.0; ERRORS],
            memory_mb: host.reserved_mb,
            is_open: host.state == PowerState::On && !host.is_cordoned,
            is_on: host.state == PowerState::On,
        };
        let entries = view.hosts.iter().map(entry).collect();
        let host_of = view.vms.iter().map(|vm| vm.host).collect();
        let (reasons, moved, woken) = (vec![None; view.vms.len()], Vec::new(), 0);
        let (open, efficiency) = (Vec::new(), efficiency(view, &forecasts));
        let is_memory_scarce = is_memory_scarce(view, &forecasts);
        let mut ledger = Self {
            view,
            settings,
            forecasts,
            entries,
            host_of,
            open,
            reasons,
            moved,
            woken,
            efficiency,
            is_memory_scarce,
        };
        for (at, vm) in view.vms.iter().enumerate() {
            ledger.add(at, vm.host as usize, 1.0);
            ledger.entries[vm.host as usize].vms.push(at as u32);
            ledger.entries[vm.host as usize].memory_mb += vm.memory_mb;
        }
        let open = |host: &u32| ledger.entries[*host as usize].is_open;
        let mut open: Vec<u32> = (0..view.hosts.len() as u32).filter(open).collect();
        open.sort_by(|a, b| ledger.watts_per_vm(*a).total_cmp(&ledger.watts_per_vm(*b)));
        ledger.open = open;
        ledger
    }

    pub(super) fn host(&self, host: usize) -> &'a Host {
        &self.view.hosts[host]
    }

    pub(super) fn vm(&self, vm: usize) -> &'a Vm {
        &self.view.vms[vm]
    }

    /// Returns the watts that a host needs for each average VM, when as many of them run on it as fit.
    pub(super) fn watts_per_vm(&self, host: u32) -> f64 {
        self.efficiency[host as usize]
    }

    /// Returns the need of a host with one VM more, if any: the forecast of its VMs, and headroom.
    fn need_of(&self, entry: &Entry, more: Option<usize>) -> f64 {
        let mut errors = entry.errors;
        let (mut level, mut unknown) = (entry.level, entry.unknown);
        if let Some(vm) = more {
            let forecast = &self.forecasts[vm];
            level += f64::from(forecast.level);
            unknown += f64::from(forecast.unknown);
            for (sum, error) in errors.iter_mut().zip(forecast.errors) {
                *sum += error;
            }
        }
        errors.sort_unstable_by(f32::total_cmp);
        // Headroom costs nothing where memory fills the hosts: the largest error counts.
        let percentile =
            if self.is_memory_scarce { 1.0 } else { f64::from(self.settings.headroom_percentile) };
        let rank = (percentile * ERRORS as f64).ceil() as usize;
        level + unknown + f64::from(errors[rank.clamp(1, ERRORS) - 1].max(0.0))
    }

    /// Returns true if a VM may run on a host whose need then stays below a share of its capacity.
    pub(super) fn fits(&self, vm: usize, host: usize, share: f64) -> bool {
        let (spec, entry, forecast) = (self.host(host), &self.entries[host], &self.forecasts[vm]);
        let one = self.vm(vm);
        let is_home = one.host as usize == host;
        let limit = share * spec.cpu;
        entry.is_open
            && entry.level + f64::from(forecast.level) <= limit
            && f64::from(forecast.used).min(one.core) <= spec.core
            && (is_home || entry.memory_mb + one.memory_mb <= spec.memory_mb)
            && !self.has_neighbour(vm, host)
            && self.need_of(entry, Some(vm)) <= limit
    }

    /// Returns true if a host has a VM that has to run apart from this one.
    fn has_neighbour(&self, vm: usize, host: usize) -> bool {
        let group = self.vm(vm).apart;
        let others = &self.entries[host].vms;
        group.is_some()
            && others.iter().any(|other| *other as usize != vm && self.vm(*other as usize).apart == group)
    }

    /// Returns the host for a VM: of the most efficient that have room, the fullest.
    ///
    /// Hosts that memory fills have processors to spare: a host with ample ones is preferred then.
    pub(super) fn find(&self, vm: usize, not: usize, share: f64) -> Option<usize> {
        let ample = self.is_memory_scarce.then(|| self.find_below(vm, not, share * AMPLE)).flatten();
        ample.or_else(|| self.find_below(vm, not, share))
    }

    fn find_below(&self, vm: usize, not: usize, share: f64) -> Option<usize> {
        let mut best: Option<(f64, f64, usize)> = None;
        for host in self.open.iter().map(|host| *host as usize).filter(|host| *host != not) {
            let efficiency = self.watts_per_vm(host as u32);
            // Hosts are in the order of their efficiency: worse ones follow.
            if best.is_some_and(|(least, ..)| efficiency > least) {
                break;
            }
            let room = self.room(vm, host, share);
            let is_better = best.is_none_or(|(_, least, _)| room < least);
            if is_better && self.fits(vm, host, share) {
                best = Some((efficiency, room, host));
            }
        }
        best.map(|(.., host)| host)
    }

    /// Returns the share of its capacity that a host has left with one VM more, of processors or of memory, whichever
    /// is scarcer.
    fn room(&self, vm: usize, host: usize, share: f64) -> f64 {
        let (spec, entry) = (self.host(host), &self.entries[host]);
        let level = entry.level + f64::from(self.forecasts[vm].level);
        let memory_mb = entry.memory_mb + self.vm(vm).memory_mb;
        (share - level / spec.cpu).min(1.0 - memory_mb / spec.memory_mb)
    }

    /// Returns the share of a host's capacity that is in use, of processors or of memory, whichever is larger.
    pub(super) fn filled(&self, host: usize) -> f64 {
        let (spec, entry) = (self.host(host), &self.entries[host]);
        (entry.level / spec.cpu).max(entry.memory_mb / spec.memory_mb)
    }

    /// Moves a VM.
    pub(super) fn move_vm(&mut self, vm: usize, to: usize) {
        let (from, home, memory_mb) =
            (self.host_of[vm] as usize, self.vm(vm).host as usize, self.vm(vm).memory_mb);
        self.add(vm, from, -1.0);
        self.entries[from].vms.retain(|other| *other as usize != vm);
        self.add(vm, to, 1.0);
        self.entries[to].vms.push(vm as u32);
        self.host_of[vm] = to as u32;
        // Memory at home is free only after the move, which is after this plan.
        if from != home {
            self.entries[from].memory_mb -= memory_mb;
        }
        if to != home {
            self.entries[to].memory_mb += memory_mb;
        }
    }

    fn add(&mut self, vm: usize, host: usize, sign: f64) {
        let (forecast, entry) = (&self.forecasts[vm], &mut self.entries[host]);
        entry.used += sign * f64::from(forecast.used);
        entry.level += sign * f64::from(forecast.level);
        entry.unknown += sign * f64::from(forecast.unknown);
        for (sum, error) in entry.errors.iter_mut().zip(forecast.errors) {
            *sum += sign as f32 * error;
        }
    }

    /// Records the reason of a VM's move.
    pub(super) fn record(&mut self, vm: usize, reason: Reason) {
        if self.reasons[vm].is_none() {
            self.moved.push(vm as u32);
        }
        self.reasons[vm] = Some(reason);
    }

    /// Opens a sleeping host.
    pub(super) fn wake(&mut self, host: usize) {
        self.entries[host].is_open = true;
        self.entries[host].is_on = true;
        self.woken += 1;
        let efficiency = self.watts_per_vm(host as u32);
        let at = self.open.partition_point(|other| self.watts_per_vm(*other) <= efficiency);
        self.open.insert(at, host as u32);
    }

    /// Closes a host: it accepts no VM any more in this plan.
    pub(super) fn close(&mut self, host: usize) {
        self.entries[host].is_open = false;
        self.open.retain(|other| *other as usize != host);
    }

    /// Returns the fullest host if its VMs would find no room on others that are on, should it fail; `without` are
    /// hosts that are to sleep.
    ///
    /// Forecasts count without headroom here: the failure of a host is an emergency, and VMs that are restarted may be
    /// slower for a while. Memory has to be there.
    pub(super) fn lacks_restart_room(&self, without: usize) -> Option<u32> {
        let hosts = || self.open.iter().map(|host| *host as usize).filter(|host| *host != without);
        let fullest = hosts().max_by(|a, b| self.filled(*a).total_cmp(&self.filled(*b)))?;
        let mut others: Vec<(usize, f64, f64)> = hosts()
            .filter(|host| *host != fullest)
            .map(|host| {
                let (spec, entry) = (self.host(host), &self.entries[host]);
                (host, spec.cpu - entry.level, spec.memory_mb - entry.memory_mb)
            })
            .collect();
        let mut vms = self.entries[fullest].vms.clone();
        vms.sort_by(|a, b| self.vm(*b as usize).memory_mb.total_cmp(&self.vm(*a as usize).memory_mb));
        for vm in vms {
            let (level, memory_mb) =
                (f64::from(self.forecasts[vm as usize].level), self.vm(vm as usize).memory_mb);
            let room = others.iter_mut().find(|(host, cpu, memory)| {
                *cpu >= level && *memory >= memory_mb && !self.has_neighbour(vm as usize, *host)
            });
            let Some((_, cpu, memory)) = room else { return Some(fullest as u32) };
            *cpu -= level;
            *memory -= memory_mb;
        }
        None
    }

    /// Writes the moves, and the hosts that are woken and put to sleep, into the plan.
    pub(super) fn finish(mut self, plan: &mut Plan) {
        for vm in std::mem::take(&mut self.moved) {
            let (from, to) = (self.vm(vm as usize).host, self.host_of[vm as usize]);
            if let Some(reason) = self.reasons[vm as usize].take().filter(|_| from != to) {
                plan.moves.push(Move { vm: self.vm(vm as usize).id, from, to, reason });
            }
        }
        let empty = |(host, entry): &(usize, &Entry)| {
            self.host(*host).state == PowerState::On && entry.vms.is_empty() && entry.is_on
        };
        let sleeping = self.entries.iter().enumerate().filter(empty);
        let kept = |host: u32| plan.keep.iter().any(|change| change.host == host);
        let sleep: Vec<HostChange> = sleeping
            .map(|(host, _)| HostChange { host: host as u32, reason: Reason::Empty })
            .filter(|change| !kept(change.host))
            .collect();
        plan.sleep = sleep;
    }
}

/// Returns for each host the watts for each average VM, when as many of them run on it as fit.
fn efficiency(view: &View<'_>, forecasts: &[Forecast]) -> Vec<f64> {
    let count = view.vms.len().max(1) as f64;
    let cpu = forecasts.iter().map(|forecast| f64::from(forecast.level)).sum::<f64>() / count;
    let memory_mb = view.vms.iter().map(|vm| vm.memory_mb).sum::<f64>() / count;
    let watts = |host: &Host| {
        let vms = (host.cpu / cpu.max(1e-9)).min(host.memory_mb / memory_mb.max(1e-9));
        host.power.watts(vms * cpu / host.cpu) / vms
    };
    view.hosts.iter().map(watts).collect()
}

fn is_memory_scarce(view: &View<'_>, forecasts: &[Forecast]) -> bool {
    let used = forecasts.iter().map(|forecast| f64::from(forecast.level)).sum::<f64>();
    let cpu = view.hosts.iter().map(|host| host.cpu).sum::<f64>();
    let used_mb = view.vms.iter().map(|vm| vm.memory_mb).sum::<f64>();
    let memory_mb = view.hosts.iter().map(|host| host.memory_mb).sum::<f64>();
    used_mb / memory_mb > used / cpu
}
