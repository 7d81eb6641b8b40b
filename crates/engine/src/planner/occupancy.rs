//! Resources that VMs use on hosts: memory, NUMA nodes, processors, disk space, and the labels that keep VMs apart.

use std::collections::BTreeMap;

use super::index::Fleet;
use super::obstacle::Obstacle;

/// A whole, in millionths.
pub(super) const WHOLE_PPM: u64 = 1_000_000;

/// Use of a host.
#[derive(Clone, Debug)]
struct HostUse {
    memory_mib: u64,
    busy_milli: u64,
    disk_mib: u64,
    /// Memory of VMs that need one node, for each node.
    nodes_mib: Vec<u64>,
}

/// Room that a host lacks for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    Memory { free_mib: u64 },
    Node { free_mib: u64 },
    Load { free_milli: u64 },
    Disk { free_mib: u64 },
    Apart { label: u32 },
}

/// Use of all hosts.
///
/// Memory of VMs that do not need one node lies anywhere: the kernel lets it make way. So a VM that needs one node fits
/// if the node has room beside the others of its sort, and the host beside all.
#[derive(Clone)]
pub(super) struct Occupancy<'a> {
    fleet: &'a Fleet<'a>,
    uses: Vec<HostUse>,
    /// Number of VMs of each label on each host.
    labels: BTreeMap<(u32, u32), u32>,
    /// Node of each VM that needs one, on each host that has it.
    nodes: BTreeMap<(u32, u32), usize>,
    /// Share of a host's processors that VMs may use when one is added, in hundredths.
    most_load_percent: u64,
}

impl<'a> Occupancy<'a> {
    /// Returns the use of hosts as it is: VMs that are moving use both hosts.
    pub(super) fn new(fleet: &'a Fleet<'a>, most_load_percent: u32) -> Self {
        let empty = |host: u32| HostUse {
            memory_mib: 0,
            busy_milli: 0,
            disk_mib: 0,
            nodes_mib: vec![0; fleet.host(host).numa_mib.len()],
        };
        let uses = (0..fleet.host_count()).map(empty).collect();
        let (labels, nodes) = (BTreeMap::new(), BTreeMap::new());
        let mut occupancy = Self { fleet, uses, labels, nodes, most_load_percent: most_load_percent.into() };
        for vm in 0..fleet.vm_count() {
            occupancy.add(vm, fleet.home[vm as usize]);
            if let Some(to) = fleet.moving_to[vm as usize].filter(|to| *to != fleet.home[vm as usize]) {
                occupancy.add(vm, to);
            }
        }
        occupancy
    }

    /// Returns the space that the disks of a VM take from the free space of a host. Disks that are there already, or on
    /// their way, are no part of it.
    fn disk_mib(&self, vm: u32, host: u32) -> u64 {
        let places = [Some(self.fleet.home[vm as usize]), self.fleet.moving_to[vm as usize]];
        if places.contains(&Some(host)) { 0 } else { self.fleet.vm(vm).disk_mib }
    }

    /// Adds a VM to a host.
    pub(super) fn add(&mut self, vm: u32, host: u32) {
        let spec = self.fleet.vm(vm);
        let (node, disk_mib) = (self.node_for(vm, host), self.disk_mib(vm, host));
        let used = &mut self.uses[host as usize];
        used.memory_mib += spec.memory_mib;
        used.busy_milli += spec.busy_milli;
        used.disk_mib += disk_mib;
        if let Some(node) = node {
            used.nodes_mib[node] += spec.memory_mib;
            self.nodes.insert((vm, host), node);
        }
        for label in &self.fleet.labels[vm as usize] {
            *self.labels.entry((host, *label)).or_default() += 1;
        }
    }

    /// Removes a VM from a host.
    pub(super) fn remove(&mut self, vm: u32, host: u32) {
        let (spec, disk_mib) = (self.fleet.vm(vm), self.disk_mib(vm, host));
        let used = &mut self.uses[host as usize];
        used.memory_mib -= spec.memory_mib;
        used.busy_milli -= spec.busy_milli;
        used.disk_mib -= disk_mib;
        if let Some(node) = self.nodes.remove(&(vm, host)) {
            used.nodes_mib[node] -= spec.memory_mib;
        }
        for label in &self.fleet.labels[vm as usize] {
            if let Some(count) = self.labels.get_mut(&(host, *label)) {
                *count -= 1;
                if *count == 0 {
                    self.labels.remove(&(host, *label));
                }
            }
        }
    }

    /// Returns what a host lacks for a VM that is not there.
    pub(super) fn shortage(&self, vm: u32, host: u32) -> Option<Shortage> {
        let (spec, used) = (self.fleet.vm(vm), &self.uses[host as usize]);
        let free_mib = self.free_mib(host);
        if spec.memory_mib > free_mib {
            return Some(Shortage::Memory { free_mib });
        }
        let most_milli = u64::from(self.fleet.host(host).processors) * 10 * self.most_load_percent;
        if used.busy_milli + spec.busy_milli > most_milli {
            return Some(Shortage::Load { free_milli: most_milli.saturating_sub(used.busy_milli) });
        }
        let free_mib = self.fleet.host(host).disk_free_mib.saturating_sub(used.disk_mib);
        if self.disk_mib(vm, host) > free_mib {
            return Some(Shortage::Disk { free_mib });
        }
        if spec.one_node && !used.nodes_mib.is_empty() {
            let free_mib = self.free_nodes(host).max().unwrap_or(0);
            if spec.memory_mib > free_mib {
                return Some(Shortage::Node { free_mib });
            }
        }
        let mut labels = self.fleet.labels[vm as usize].iter();
        let taken = labels.find(|label| self.labels.contains_key(&(host, **label)));
        taken.map(|label| Shortage::Apart { label: *label })
    }

    /// Returns a shortage as users see it.
    pub(super) fn explain(&self, vm: u32, shortage: Shortage) -> Obstacle {
        let spec = self.fleet.vm(vm);
        match shortage {
            Shortage::Memory { free_mib } => Obstacle::Memory { needs_mib: spec.memory_mib, free_mib },
            Shortage::Node { free_mib } => Obstacle::Node { needs_mib: spec.memory_mib, free_mib },
            Shortage::Load { free_milli } => Obstacle::Load { needs_milli: spec.busy_milli, free_milli },
            Shortage::Disk { free_mib } => Obstacle::Disk { needs_mib: spec.disk_mib, free_mib },
            Shortage::Apart { label } => {
                Obstacle::Apart { label: self.fleet.label_names[label as usize].to_owned() }
            }
        }
    }

    /// Returns the free memory of a host, in MiB; 0 for one that is overfull.
    pub(super) fn free_mib(&self, host: u32) -> u64 {
        self.fleet.host(host).guest_mib().saturating_sub(self.uses[host as usize].memory_mib)
    }

    /// Returns processors that no VM uses, in thousandths of one.
    pub(super) fn idle_milli(&self, host: u32) -> u64 {
        let all = u64::from(self.fleet.host(host).processors) * 1000;
        all.saturating_sub(self.uses[host as usize].busy_milli)
    }

    /// Returns the load of a host: the share of its memory or of its processors that is in use, whichever is larger, in
    /// millionths.
    pub(super) fn load_ppm(&self, host: u32) -> u64 {
        self.load_with(host, 0, 0)
    }

    /// Returns the load of a host with a VM more.
    pub(super) fn load_with_vm(&self, host: u32, vm: u32) -> u64 {
        let spec = self.fleet.vm(vm);
        self.load_with(host, spec.memory_mib, spec.busy_milli)
    }

    /// Returns the load of a host without one of its VMs.
    pub(super) fn load_without_vm(&self, host: u32, vm: u32) -> u64 {
        let (spec, used) = (self.fleet.vm(vm), &self.uses[host as usize]);
        self.load(host, used.memory_mib - spec.memory_mib, used.busy_milli - spec.busy_milli)
    }

    fn load_with(&self, host: u32, memory_mib: u64, busy_milli: u64) -> u64 {
        let used = &self.uses[host as usize];
        self.load(host, used.memory_mib + memory_mib, used.busy_milli + busy_milli)
    }

    fn load(&self, host: u32, memory_mib: u64, busy_milli: u64) -> u64 {
        let spec = self.fleet.host(host);
        let share = |part: u64, of: u64| {
            let ppm = u128::from(part) * u128::from(WHOLE_PPM) / u128::from(of.max(1));
            u64::try_from(ppm).unwrap_or(u64::MAX)
        };
        let processors = share(busy_milli, u64::from(spec.processors) * 1000);
        share(memory_mib, spec.guest_mib()).max(processors)
    }

    fn free_nodes(&self, host: u32) -> impl Iterator<Item = u64> {
        let nodes = &self.fleet.host(host).numa_mib;
        nodes.iter().zip(&self.uses[host as usize].nodes_mib).map(|(all, used)| all.saturating_sub(*used))
    }

    /// Returns the node for a VM that needs one: the fullest one with room, or the emptiest if none has room.
    fn node_for(&self, vm: u32, host: u32) -> Option<usize> {
        let spec = self.fleet.vm(vm);
        if !spec.one_node {
            return None;
        }
        let fitting = self.free_nodes(host).enumerate().filter(|(_, free_mib)| *free_mib >= spec.memory_mib);
        let fullest = fitting.min_by_key(|(node, free_mib)| (*free_mib, *node));
        let emptiest = || self.free_nodes(host).enumerate().max_by_key(|(_, free_mib)| *free_mib);
        fullest.or_else(emptiest).map(|(node, _)| node)
    }
}
