//! Placements that are possible: for each VM and host the reasons against it; and the CPU model that all hosts have.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::index::Fleet;
use super::inventory::{CpuModel, HostPlatform, Inventory};
use super::obstacle::Obstacle;
use super::occupancy::Occupancy;
use super::refusal::Refusal;

/// VMs and hosts, each pair with what keeps them apart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementMatrix {
    /// VMs.
    pub rows: Vec<PlacementMatrixRow>,
    /// CPU model that all hosts have; none if the inventory has no models, or none that all have.
    pub common_cpu: Option<CommonCpuModel>,
}

/// A VM, and all hosts but its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementMatrixRow {
    /// VM.
    pub vm: String,
    /// Its host.
    pub host: String,
    /// Other hosts.
    pub cells: Vec<PlacementMatrixCell>,
}

/// A host, as a target for a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementMatrixCell {
    /// Host.
    pub host: String,
    /// All obstacles; empty if the VM can move there now.
    pub obstacles: Vec<Obstacle>,
}

/// The highest CPU model that all hosts have: with it, VMs can run on each of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommonCpuModel {
    /// Name of the model.
    pub model: String,
    /// Argument of QEMU, exactly: the model, the features that all hosts have beside it, and `enforce`, with which QEMU
    /// refuses to start where one is missing.
    pub option: String,
    /// Next higher model, and the hosts that do not have it; none if there is no higher one.
    pub next: Option<NextCpuModel>,
}

/// A CPU model that some hosts lack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextCpuModel {
    /// Name of the model.
    pub model: String,
    /// Hosts that lack it.
    pub hosts: Vec<String>,
}

/// Returns which VMs could move to which hosts now, for some VMs or all; and the CPU model that all hosts have.
pub fn matrix(
    inventory: &Inventory,
    vms: &[String],
    most_load_percent: u32,
) -> Result<PlacementMatrix, Refusal> {
    let fleet = Fleet::new(inventory)?;
    let occupancy = Occupancy::new(&fleet, most_load_percent);
    let vms = if vms.is_empty() {
        (0..fleet.vm_count()).collect()
    } else {
        vms.iter().map(|name| fleet.find_vm(name, "the request")).collect::<Result<Vec<u32>, _>>()?
    };
    let row = |vm: u32| {
        let from = fleet.home[vm as usize];
        let others = (0..fleet.host_count()).filter(|host| *host != from);
        PlacementMatrixRow {
            vm: fleet.vm(vm).name.clone(),
            host: fleet.host(from).name.clone(),
            cells: others.map(|host| cell(&fleet, &occupancy, vm, host)).collect(),
        }
    };
    Ok(PlacementMatrix { rows: vms.into_iter().map(row).collect(), common_cpu: common_cpu(&fleet) })
}

fn cell(fleet: &Fleet<'_>, occupancy: &Occupancy<'_>, vm: u32, host: u32) -> PlacementMatrixCell {
    let mut obstacles: Vec<Obstacle> = fleet.hold(vm).into_iter().collect();
    if fleet.host(host).cordoned {
        obstacles.push(Obstacle::Cordoned);
    }
    if !fleet.is_allowed(vm, host) {
        obstacles.push(Obstacle::NotAmongItsHosts);
    }
    obstacles.extend(fleet.lasting_obstacles(vm, fleet.home[vm as usize], host));
    if fleet.moving_to[vm as usize] != Some(host) {
        let shortage = occupancy.shortage(vm, host);
        obstacles.extend(shortage.map(|shortage| occupancy.explain(vm, shortage)));
    }
    PlacementMatrixCell { host: fleet.host(host).name.clone(), obstacles }
}

/// Returns true if a host can offer a model.
fn offers(platform: &HostPlatform, model: &CpuModel) -> bool {
    (model.vendor.is_empty() || model.vendor == platform.cpu_vendor)
        && model.features.is_subset(&platform.cpu_features)
}

fn common_cpu(fleet: &Fleet<'_>) -> Option<CommonCpuModel> {
    let inventory = fleet.inventory;
    let platforms: Vec<_> = inventory.hosts.iter().map(|host| fleet.host_platform(host)).collect();
    // Of models with as many features the one that is named last, which is the newer version of the two.
    let rank = |(place, model): &(usize, &CpuModel)| (model.features.len(), *place);
    let models = || inventory.cpu_models.iter().enumerate();
    let all_offer =
        |(_, model): &(usize, &CpuModel)| platforms.iter().all(|platform| offers(platform, model));
    let (place, model) = models().filter(all_offer).max_by_key(rank)?;
    let mut common: BTreeSet<&String> = platforms.first()?.cpu_features.iter().collect();
    common.retain(|feature| platforms.iter().all(|platform| platform.cpu_features.contains(*feature)));
    let mut option = format!("-cpu {}", model.name);
    for feature in common.into_iter().filter(|feature| !model.features.contains(*feature)) {
        option.push_str(",+");
        option.push_str(feature);
    }
    option.push_str(",enforce");
    let higher = models().filter(|other| rank(other) > rank(&(place, model)));
    let lacking = higher.map(|(place, other)| {
        let hosts = inventory.hosts.iter().zip(&platforms).filter(|(_, platform)| !offers(platform, other));
        let hosts: Vec<String> = hosts.map(|(host, _)| host.name.clone()).collect();
        (hosts.len(), rank(&(place, other)), NextCpuModel { model: other.name.clone(), hosts })
    });
    // The one that fewest hosts lack, but not all of them.
    let raised = lacking.filter(|(count, ..)| *count < inventory.hosts.len());
    let next = raised.min_by_key(|(count, rank, _)| (*count, *rank)).map(|(.., raised)| raised);
    Some(CommonCpuModel { model: model.name.clone(), option, next })
}
