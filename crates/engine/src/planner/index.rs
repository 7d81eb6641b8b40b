//! The inventory with numbers in place of names, checked, and with hosts and VMs of the same kind put together.

use std::collections::{BTreeMap, BTreeSet};

use super::affinity_groups::{AffinityGroups, group};
use super::inventory::{HostPlatform, HostSpec, Inventory, LinkSpec, VmPlatform, VmSpec};
use super::obstacle::{Obstacle, link_bytes_per_s, platform_obstacles, surroundings_obstacles};
use super::refusal::Refusal;

/// A fleet by numbers: places in the inventory's lists.
pub(super) struct Fleet<'a> {
    pub(super) inventory: &'a Inventory,
    /// Host of each VM.
    pub(super) home: Vec<u32>,
    /// Host to which each VM moves already.
    pub(super) moving_to: Vec<Option<u32>>,
    /// Zone of each host.
    pub(super) zone: Vec<u32>,
    /// Labels of each VM that keep it apart from others.
    pub(super) labels: Vec<Vec<u32>>,
    pub(super) label_names: Vec<&'a str>,
    /// Hosts on which each VM may run, sorted; none for all.
    pub(super) only_on: Vec<Option<Vec<u32>>>,
    pub(super) units: AffinityGroups,
    /// Kind of each host. Hosts of one kind differ in name, zone, memory in use and the like only.
    pub(super) host_kind: Vec<u32>,
    /// A host of each kind.
    pub(super) kinds: Vec<u32>,
    /// Kind of each VM: VMs of one kind run on the same kinds of hosts.
    vm_kind: Vec<u32>,
    hosts: BTreeMap<&'a str, u32>,
    vms: BTreeMap<&'a str, u32>,
}

/// Properties that hosts of a kind share.
type HostKind<'a> = (&'a str, u32, u64, &'a [u64], BTreeSet<&'a str>, BTreeSet<&'a str>, &'a [LinkSpec]);
/// Properties that VMs of a kind share.
type VmKey<'a> = (&'a str, &'a BTreeSet<String>, &'a BTreeSet<String>);

/// Numbers for names or keys, in the order in which they are first seen.
struct Numbers<K>(BTreeMap<K, u32>);

impl<K: Ord> Numbers<K> {
    fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Returns the number of a key, and true if it is new.
    fn get(&mut self, key: K) -> (u32, bool) {
        let next = self.0.len() as u32;
        let number = *self.0.entry(key).or_insert(next);
        (number, number == next)
    }
}

fn by_name<'a>(names: impl Iterator<Item = &'a str>) -> Result<BTreeMap<&'a str, u32>, Refusal> {
    let mut numbers = BTreeMap::new();
    for (number, name) in names.enumerate() {
        if numbers.insert(name, number as u32).is_some() {
            return Err(Refusal::DuplicateName { name: name.to_owned() });
        }
    }
    Ok(numbers)
}

impl<'a> Fleet<'a> {
    /// Checks an inventory.
    pub(super) fn new(inventory: &'a Inventory) -> Result<Self, Refusal> {
        let hosts = by_name(inventory.hosts.iter().map(|host| host.name.as_str()))?;
        let vms = by_name(inventory.vms.iter().map(|vm| vm.name.as_str()))?;
        check_platforms(inventory)?;
        check_amounts(inventory)?;
        let find_host = |name: &str, vm: &VmSpec| {
            let unknown =
                || Refusal::UnknownHost { host: name.to_owned(), named_by: format!("VM {}", vm.name) };
            hosts.get(name).copied().ok_or_else(unknown)
        };
        let (mut home, mut moving_to, mut only_on) = (Vec::new(), Vec::new(), Vec::new());
        for vm in &inventory.vms {
            home.push(find_host(&vm.host, vm)?);
            moving_to.push(vm.moving_to.as_ref().map(|name| find_host(name, vm)).transpose()?);
            let mut allowed = Vec::new();
            for name in &vm.rules.only_on {
                allowed.push(find_host(name, vm)?);
            }
            allowed.sort_unstable();
            only_on.push((!allowed.is_empty()).then_some(allowed));
        }
        let (labels, label_names) = labels(inventory);
        let units = group(inventory, &vms, &labels, &label_names)?;
        let (host_kind, kinds) = host_kinds(inventory);
        let mut vm_kinds = Numbers::<VmKey<'a>>::new();
        let vm_kind =
            inventory.vms.iter().map(|vm| vm_kinds.get((vm.platform.as_str(), &vm.storage, &vm.networks)).0);
        Ok(Self {
            inventory,
            home,
            moving_to,
            zone: zones(inventory),
            labels,
            label_names,
            only_on,
            units,
            vm_kind: vm_kind.collect(),
            host_kind,
            kinds,
            hosts,
            vms,
        })
    }

    pub(super) fn host(&self, host: u32) -> &'a HostSpec {
        &self.inventory.hosts[host as usize]
    }

    pub(super) fn vm(&self, vm: u32) -> &'a VmSpec {
        &self.inventory.vms[vm as usize]
    }

    pub(super) fn host_count(&self) -> u32 {
        self.inventory.hosts.len() as u32
    }

    pub(super) fn vm_count(&self) -> u32 {
        self.inventory.vms.len() as u32
    }

    /// Returns the number of a host that a part of the request names.
    pub(super) fn find_host(&self, name: &str, named_by: &str) -> Result<u32, Refusal> {
        let unknown = || Refusal::UnknownHost { host: name.to_owned(), named_by: named_by.to_owned() };
        self.hosts.get(name).copied().ok_or_else(unknown)
    }

    /// Returns the number of a VM that a part of the request names.
    pub(super) fn find_vm(&self, name: &str, named_by: &str) -> Result<u32, Refusal> {
        let unknown = || Refusal::UnknownVm { vm: name.to_owned(), named_by: named_by.to_owned() };
        self.vms.get(name).copied().ok_or_else(unknown)
    }

    /// Returns the kind of a VM, and of its moves from a host: pairs that are equal have the same [`Self::targets`].
    pub(super) fn kind_of_move(&self, vm: u32, from: u32) -> (u32, u32) {
        (self.vm_kind[vm as usize], self.host_kind[from as usize])
    }

    /// Returns the kinds of hosts to which VMs of a kind can move from a host, each with the rate of the link, whatever
    /// the number of their processors is.
    pub(super) fn targets(&self, vm: u32, from: u32) -> Vec<(u32, u64)> {
        let matters = |obstacle: &Obstacle| !matches!(obstacle, Obstacle::Processors { .. });
        let kinds = self.kinds.iter().enumerate().filter_map(|(kind, host)| {
            let rate = link_bytes_per_s(self.host(from), self.host(*host))?;
            let is_possible = !self.lasting_obstacles(vm, from, *host).iter().any(matters);
            is_possible.then_some((kind as u32, rate))
        });
        kinds.collect()
    }

    /// Returns what keeps a VM from moving to a host, beside what VMs there use: platform, storage, networks, links.
    pub(super) fn lasting_obstacles(&self, vm: u32, from: u32, to: u32) -> Vec<Obstacle> {
        let (spec, source, target) = (self.vm(vm), self.host(from), self.host(to));
        let mut found = platform_obstacles(
            self.vm_platform(spec),
            &self.inventory.cpu_models,
            self.host_platform(source),
            self.host_platform(target),
        );
        found.extend(surroundings_obstacles(spec, target));
        if link_bytes_per_s(source, target).is_none() {
            found.push(Obstacle::NoLink);
        }
        if spec.vcpus > target.processors {
            found.push(Obstacle::Processors { needs: spec.vcpus, has: target.processors });
        }
        found
    }

    fn vm_platform(&self, vm: &VmSpec) -> &'a VmPlatform {
        &self.inventory.vm_platforms[&vm.platform]
    }

    /// Returns the platform of a host.
    pub(super) fn host_platform(&self, host: &HostSpec) -> &'a HostPlatform {
        &self.inventory.host_platforms[&host.platform]
    }

    /// Returns true if the rules of a VM allow a host.
    pub(super) fn is_allowed(&self, vm: u32, host: u32) -> bool {
        self.only_on[vm as usize].as_ref().is_none_or(|hosts| hosts.binary_search(&host).is_ok())
    }

    /// Returns the reason for which a VM may not be moved at all.
    pub(super) fn hold(&self, vm: u32) -> Option<Obstacle> {
        if self.moving_to[vm as usize].is_some() {
            Some(Obstacle::IsMoving)
        } else {
            self.vm(vm).rules.pinned.then_some(Obstacle::Pinned)
        }
    }
}

fn check_platforms(inventory: &Inventory) -> Result<(), Refusal> {
    let unknown = |platform: &str, named_by: String| {
        Err(Refusal::UnknownPlatform { platform: platform.to_owned(), named_by })
    };
    for host in &inventory.hosts {
        if !inventory.host_platforms.contains_key(&host.platform) {
            return unknown(&host.platform, format!("host {}", host.name));
        }
    }
    for vm in &inventory.vms {
        if !inventory.vm_platforms.contains_key(&vm.platform) {
            return unknown(&vm.platform, format!("VM {}", vm.name));
        }
    }
    Ok(())
}

/// Largest amount of anything: sums of a fleet stay far below what an integer holds.
const MOST: u64 = 1 << 40;

fn check_amounts(inventory: &Inventory) -> Result<(), Refusal> {
    let too_large = |name: &str, amounts: &[(&str, u64)]| {
        let wrong = amounts.iter().find(|(_, amount)| *amount > MOST);
        wrong.map(|(what, _)| Refusal::Setting { setting: format!("{what} of {name}") })
    };
    let of_hosts = inventory.hosts.iter().filter_map(|host| {
        let numa_mib = host.numa_mib.iter().copied().max().unwrap_or(0);
        let (memory_mib, disk_mib) = (host.memory_mib, host.disk_free_mib);
        too_large(
            &host.name,
            &[("memory_mib", memory_mib), ("disk_free_mib", disk_mib), ("numa_mib", numa_mib)],
        )
    });
    let of_vms = inventory.vms.iter().filter_map(|vm| {
        let amounts =
            [("memory_mib", vm.memory_mib), ("disk_mib", vm.disk_mib), ("busy_milli", vm.busy_milli)];
        too_large(&vm.name, &amounts)
    });
    of_hosts.chain(of_vms).next().map_or(Ok(()), Err)
}

fn labels(inventory: &Inventory) -> (Vec<Vec<u32>>, Vec<&str>) {
    let (mut numbers, mut names) = (Numbers::new(), Vec::new());
    let mut number_of = |label| {
        let (number, is_new) = numbers.get(label);
        if is_new {
            names.push(label);
        }
        number
    };
    let labels = inventory.vms.iter().map(|vm| {
        let labels: BTreeSet<u32> = vm.rules.apart.iter().map(|label| number_of(label.as_str())).collect();
        labels.into_iter().collect()
    });
    let labels = labels.collect();
    (labels, names)
}

/// Returns the kind of each host, and a host of each kind. Storage and networks that no VM needs make no difference.
fn host_kinds(inventory: &Inventory) -> (Vec<u32>, Vec<u32>) {
    let needed_storage: BTreeSet<_> = inventory.vms.iter().flat_map(|vm| &vm.storage).collect();
    let needed_networks: BTreeSet<_> = inventory.vms.iter().flat_map(|vm| &vm.networks).collect();
    let (mut numbers, mut kinds) = (Numbers::<HostKind<'_>>::new(), Vec::new());
    let mut host_kind = Vec::with_capacity(inventory.hosts.len());
    for (at, host) in inventory.hosts.iter().enumerate() {
        let storage = host.storage.iter().filter(|name| needed_storage.contains(name));
        let networks = host.networks.iter().filter(|name| needed_networks.contains(name));
        let (number, is_new) = numbers.get((
            host.platform.as_str(),
            host.processors,
            host.guest_mib(),
            host.numa_mib.as_slice(),
            storage.map(String::as_str).collect(),
            networks.map(String::as_str).collect(),
            host.links.as_slice(),
        ));
        if is_new {
            kinds.push(at as u32);
        }
        host_kind.push(number);
    }
    (host_kind, kinds)
}

/// Returns the zone of each host: the number of its name, or one of its own.
fn zones(inventory: &Inventory) -> Vec<u32> {
    let mut numbers = Numbers::new();
    let zone = |host: &'_ HostSpec| match &host.zone {
        Some(zone) => (true, zone.clone()),
        None => (false, host.name.clone()),
    };
    inventory.hosts.iter().map(|host| numbers.get(zone(host)).0).collect()
}
