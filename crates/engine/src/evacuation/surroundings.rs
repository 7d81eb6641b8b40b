//! Surroundings of an evacuation: the fleet, connections, and what other evacuations reserved.

use std::collections::{BTreeMap, BTreeSet};

use super::command::EvacuationId;
use super::state::{Evacuation, VmStanding};
use crate::planner::inventory::{HostSpec, VmSpec};
use crate::planner::{Inventory, link_bytes_per_s};

/// Surroundings of an evacuation, when it decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings<'a> {
    pub(super) inventory: &'a Inventory,
    /// Hosts that are connected.
    pub(super) connected: &'a BTreeSet<String>,
    pub(super) others: &'a [Reservations],
    pub(super) now_ns: u64,
}

impl Surroundings<'_> {
    pub(super) fn all_hosts(&self) -> BTreeSet<String> {
        self.inventory.hosts.iter().map(|spec| spec.name.clone()).collect()
    }
}

/// Reservations of another evacuation.
#[derive(Clone, Debug)]
pub(super) struct Reservations {
    pub(super) id: EvacuationId,
    pub(super) is_running: bool,
    /// Hosts that accept no VMs of others, because they are to be emptied.
    pub(super) closes: Vec<String>,
    /// Moves that have not ended, and those that are planned.
    pub(super) moves: Vec<ReservedMove>,
}

/// Move of another evacuation.
#[derive(Clone, Debug)]
pub(super) struct ReservedMove {
    pub(super) vm: String,
    pub(super) from: String,
    pub(super) to: String,
    /// Use of links, if it is under way.
    pub(super) active: Option<ActiveMove>,
}

/// Move that uses links and processors.
#[derive(Clone, Debug)]
pub(super) struct ActiveMove {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) priority: i32,
    /// Rate that it can use, in bytes per second.
    pub(super) demand: u64,
    /// True if it is of the evacuation that decides, and so uses its budget.
    pub(super) is_own: bool,
}

/// Use of the rest of a fleet by other evacuations, as a plan sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OthersView {
    /// Their VMs need room on both of their hosts.
    AsTheyAre,
    /// Their moves have ended.
    Ended,
    /// Their VMs stay where they are, and their hosts accept VMs.
    Absent,
}

/// Links and idle processors of a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostCapacity<'a> {
    pub(super) spec: &'a HostSpec,
    /// Processors that no VM uses, in thousandths of one.
    pub(super) idle_milli: u64,
}

/// Links and idle processors of hosts, by name.
pub(super) type Capacities<'a> = BTreeMap<&'a str, HostCapacity<'a>>;

impl Reservations {
    /// Returns the reservations of an evacuation, as another one sees them that began at a time.
    pub(super) fn of(one: &Evacuation, seen_by: &Evacuation) -> Self {
        let order = |evacuation: &Evacuation| (evacuation.begun_ns, evacuation.id.clone());
        let closes_hosts = !one.is_finished() && (one.has_begun() || order(one) < order(seen_by));
        let unsettled = one.unsettled().map(|(number, record)| ReservedMove {
            vm: record.planned.vm.clone(),
            from: record.planned.from.clone(),
            to: record.planned.to.clone(),
            active: record
                .is_active()
                .then(|| ActiveMove { is_own: false, ..one.active_move(number, record) }),
        });
        let planned = one.queue.iter().filter(|queued| queued.number.is_none()).map(|queued| ReservedMove {
            vm: queued.planned.vm.clone(),
            from: queued.planned.from.clone(),
            to: queued.planned.to.clone(),
            active: None,
        });
        Self {
            id: one.id.clone(),
            is_running: !one.is_finished(),
            closes: if closes_hosts { one.request.goal.emptied().to_vec() } else { Vec::new() },
            moves: unsettled.chain(planned).collect(),
        }
    }
}

/// The fleet as an evacuation sees it: with its own knowledge of moves, and the reservations of others.
pub(super) struct FleetView<'e, 'a> {
    evacuation: &'e Evacuation,
    around: Surroundings<'a>,
    /// Places of VMs: host, and the host to which it moves.
    places: BTreeMap<&'e str, (&'e str, Option<&'e str>)>,
    /// Memory that second moves of others need, by host and VM.
    second: Vec<(&'e str, &'e str)>,
    /// Hosts that accept no VMs.
    closed: BTreeSet<&'e str>,
    /// True if VMs avoid the hosts to which their last attempts failed.
    avoids_failed: bool,
}

impl<'e, 'a: 'e> FleetView<'e, 'a> {
    pub(super) fn new(
        evacuation: &'e Evacuation,
        around: &Surroundings<'a>,
        others: OthersView,
        avoids_failed: bool,
    ) -> Self {
        let mut places: BTreeMap<&str, (&str, Option<&str>)> = BTreeMap::new();
        let mut second = Vec::new();
        for reserved in around.others.iter().flat_map(|reservations| &reservations.moves) {
            let (vm, from, to) = (reserved.vm.as_str(), reserved.from.as_str(), reserved.to.as_str());
            match others {
                OthersView::Absent => {}
                // The last one counts.
                OthersView::Ended => {
                    places.insert(vm, (to, None));
                }
                OthersView::AsTheyAre if places.contains_key(vm) => second.push((to, vm)),
                OthersView::AsTheyAre => {
                    places.insert(vm, (from, Some(to)));
                }
            }
        }
        for (_, one) in evacuation.unsettled() {
            places.insert(&one.planned.vm, (&one.planned.from, Some(&one.planned.to)));
        }
        let mut closed = BTreeSet::new();
        if others != OthersView::Absent {
            closed.extend(
                around.others.iter().flat_map(|reservations| &reservations.closes).map(String::as_str),
            );
        }
        Self { evacuation, around: *around, places, second, closed, avoids_failed }
    }

    /// Returns the VMs of the inventory. It may be older than the end of a VM on a host that is to be emptied: such a VM
    /// is left out, or else it would be moved.
    fn specs(&self) -> impl Iterator<Item = &'a VmSpec> {
        let vms = self.around.inventory.vms.iter();
        vms.filter(|spec| self.ended_on(&spec.name).is_none_or(|host| host != spec.host))
    }

    /// Returns the host that is to be emptied and on which a VM has ended.
    fn ended_on(&self, vm: &str) -> Option<&'e str> {
        let record = self.evacuation.vms.get(vm).filter(|record| record.standing == VmStanding::Gone)?;
        self.evacuation.is_emptied(&record.at).then_some(record.at.as_str())
    }

    /// Returns the host of a VM, and the one to which it moves.
    fn place<'s>(&'s self, spec: &'s VmSpec) -> (&'s str, Option<&'s str>) {
        if let Some(place) = self.places.get(spec.name.as_str()) {
            return *place;
        }
        let record = self.evacuation.vms.get(&spec.name);
        // The inventory may be older than the end of the move.
        let has_left = record.filter(|record| record.left.as_deref() == Some(spec.host.as_str()));
        match has_left {
            Some(record) => (&record.at, None),
            None => (&spec.host, spec.moving_to.as_deref()),
        }
    }

    fn vm(&self, spec: &VmSpec) -> VmSpec {
        let (host, moving_to) = self.place(spec);
        let mut seen =
            VmSpec { host: host.to_owned(), moving_to: moving_to.map(str::to_owned), ..spec.clone() };
        if let Some(priority) = self.evacuation.request.priorities.get(&spec.name) {
            seen.rules.priority = *priority;
        }
        // One that has ended is not there to be followed.
        seen.rules.follows.retain(|leader| self.ended_on(leader).is_none());
        let record = self.evacuation.vms.get(&spec.name);
        let avoided: BTreeSet<&str> = record.map_or_else(BTreeSet::new, |record| {
            let failed = record.failed_at.iter().filter(|_| self.avoids_failed);
            record.refused_by.keys().chain(failed).map(String::as_str).collect()
        });
        if !avoided.is_empty() {
            let hosts = self.around.inventory.hosts.iter().map(|host| &host.name);
            let is_allowed =
                |host: &&String| seen.rules.only_on.is_empty() || seen.rules.only_on.contains(host);
            let others = hosts.filter(is_allowed).filter(|host| !avoided.contains(host.as_str()));
            // Its own host is always there, so that the list is not empty, which would mean all hosts.
            seen.rules.only_on = others.chain([&seen.host]).cloned().collect();
        }
        let has_given_up = record.is_some_and(|record| record.has_given_up);
        if has_given_up || (moving_to.is_none() && !self.around.connected.contains(host)) {
            seen.rules.pinned = true;
        }
        seen
    }

    fn host(&self, spec: &HostSpec) -> HostSpec {
        let mut seen = spec.clone();
        let is_goal_of_return =
            !self.evacuation.is_emptied(&spec.name) && self.evacuation.goal_hosts().contains(&spec.name);
        if is_goal_of_return {
            seen.cordoned = false;
        }
        if self.closed.contains(spec.name.as_str()) || !self.around.connected.contains(&spec.name) {
            seen.cordoned = true;
        }
        for (_, vm) in self.second.iter().filter(|(host, _)| *host == spec.name) {
            let reserved = self.around.inventory.vms.iter().find(|reserved| reserved.name == *vm);
            seen.reserved_mib = seen.reserved_mib.saturating_add(reserved.map_or(0, |vm| vm.memory_mib));
        }
        seen
    }

    /// Returns the whole fleet.
    pub(super) fn inventory(&self) -> Inventory {
        let from = self.around.inventory;
        Inventory {
            hosts: from.hosts.iter().map(|spec| self.host(spec)).collect(),
            vms: self.specs().map(|spec| self.vm(spec)).collect(),
            host_platforms: from.host_platforms.clone(),
            vm_platforms: from.vm_platforms.clone(),
            cpu_models: from.cpu_models.clone(),
        }
    }

    /// Returns two hosts with what is on them, and a VM.
    pub(super) fn two_hosts(&self, vm: &str, from: &str, to: &str) -> Inventory {
        let whole = self.around.inventory;
        let is_here = |host: &str| host == from || host == to;
        let hosts = whole.hosts.iter().filter(|spec| is_here(&spec.name));
        let here = self.specs().filter(|spec| {
            let (host, moving_to) = self.place(spec);
            spec.name == vm || is_here(host) || moving_to.is_some_and(is_here)
        });
        let vms = here.map(|spec| {
            let mut seen = self.vm(spec);
            // Hosts and VMs elsewhere are not known in so small a fleet.
            seen.rules.follows.clear();
            if !seen.rules.only_on.is_empty() {
                let is_allowed = seen.rules.only_on.iter().any(|host| host == to);
                seen.rules.only_on = vec![if is_allowed { to.to_owned() } else { from.to_owned() }];
            }
            // A place elsewhere needs no room here, and one of two is enough.
            if !is_here(&seen.host) {
                seen.host = seen.moving_to.take().unwrap_or_else(|| to.to_owned());
            }
            seen.moving_to = seen.moving_to.filter(|host| is_here(host));
            seen
        });
        Inventory {
            hosts: hosts.map(|spec| self.host(spec)).collect(),
            vms: vms.collect(),
            host_platforms: whole.host_platforms.clone(),
            vm_platforms: whole.vm_platforms.clone(),
            cpu_models: whole.cpu_models.clone(),
        }
    }

    /// Returns the links and idle processors of hosts.
    pub(super) fn capacities(&self, hosts: &BTreeSet<&str>) -> Capacities<'a> {
        let specs = self.around.inventory.hosts.iter().filter(|spec| hosts.contains(spec.name.as_str()));
        let mut found: Capacities<'a> = specs
            .map(|spec| {
                let idle_milli = u64::from(spec.processors) * 1000;
                (spec.name.as_str(), HostCapacity { spec, idle_milli })
            })
            .collect();
        for spec in self.specs() {
            let (host, moving_to) = self.place(spec);
            for host in [Some(host), moving_to].into_iter().flatten() {
                if let Some(capacity) = found.get_mut(host) {
                    capacity.idle_milli = capacity.idle_milli.saturating_sub(spec.busy_milli);
                }
            }
        }
        found
    }
}

/// Returns hosts with their links alone, as if no processor was idle.
pub(super) fn links_of<'a>(inventory: &'a Inventory, hosts: &BTreeSet<&str>) -> Capacities<'a> {
    let specs = inventory.hosts.iter().filter(|spec| hosts.contains(spec.name.as_str()));
    specs.map(|spec| (spec.name.as_str(), HostCapacity { spec, idle_milli: 0 })).collect()
}

/// Returns the rate of the fastest link of a host; 0 if the host is not known.
pub(super) fn fastest_link(hosts: &Capacities<'_>, host: &str) -> u64 {
    let links = hosts.get(host).into_iter().flat_map(|capacity| &capacity.spec.links);
    links.map(|link| link.bytes_per_s).max().unwrap_or(0)
}

/// Returns the rate of the link between two hosts; 0 if there is none.
pub(super) fn link_between(hosts: &Capacities<'_>, from: &str, to: &str) -> u64 {
    let pair = hosts.get(from).zip(hosts.get(to));
    pair.and_then(|(from, to)| link_bytes_per_s(from.spec, to.spec)).unwrap_or(0)
}
