//! Affinity groups, the units of moves: VMs that follow one another.

use std::collections::{BTreeMap, BTreeSet};

use super::inventory::Inventory;
use super::refusal::Refusal;

/// Affinity groups: each VM is in one, most of them alone.
pub(super) struct AffinityGroups {
    /// VMs of each unit, in an order in which none follows a later one.
    pub(super) members: Vec<Vec<u32>>,
    /// Unit of each VM.
    pub(super) of: Vec<u32>,
    /// VMs that each VM follows.
    pub(super) leaders: BTreeMap<u32, Vec<u32>>,
}

/// Puts the VMs together that follow one another.
pub(super) fn group(
    inventory: &Inventory,
    vms: &BTreeMap<&str, u32>,
    labels: &[Vec<u32>],
    label_names: &[&str],
) -> Result<AffinityGroups, Refusal> {
    let leaders = leaders(inventory, vms)?;
    let mut neighbours: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (vm, leads) in &leaders {
        for leader in leads {
            neighbours.entry(*vm).or_default().push(*leader);
            neighbours.entry(*leader).or_default().push(*vm);
        }
    }
    let count = inventory.vms.len();
    let (mut members, mut of) = (Vec::new(), vec![u32::MAX; count]);
    for vm in 0..count as u32 {
        if of[vm as usize] != u32::MAX {
            continue;
        }
        let unit = members.len() as u32;
        let (mut found, mut open) = (Vec::new(), vec![vm]);
        of[vm as usize] = unit;
        while let Some(next) = open.pop() {
            found.push(next);
            for other in neighbours.get(&next).into_iter().flatten() {
                if of[*other as usize] == u32::MAX {
                    of[*other as usize] = unit;
                    open.push(*other);
                }
            }
        }
        let has_leaders = found.iter().any(|vm| leaders.contains_key(vm));
        let found = if has_leaders { in_order(inventory, &leaders, &found)? } else { found };
        check_labels(inventory, &found, labels, label_names)?;
        members.push(found);
    }
    Ok(AffinityGroups { members, of, leaders })
}

fn leaders(inventory: &Inventory, vms: &BTreeMap<&str, u32>) -> Result<BTreeMap<u32, Vec<u32>>, Refusal> {
    let mut leaders: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (vm, spec) in inventory.vms.iter().enumerate() {
        for name in &spec.rules.follows {
            let unknown = || Refusal::UnknownVm { vm: name.clone(), named_by: format!("VM {}", spec.name) };
            let leader = *vms.get(name.as_str()).ok_or_else(unknown)?;
            leaders.entry(vm as u32).or_default().push(leader);
        }
    }
    Ok(leaders)
}

/// Returns the VMs of a unit in an order in which none follows a later one; an error if there is none.
fn in_order(
    inventory: &Inventory,
    leaders: &BTreeMap<u32, Vec<u32>>,
    unit: &[u32],
) -> Result<Vec<u32>, Refusal> {
    let mut left: BTreeSet<u32> = unit.iter().copied().collect();
    let mut order = Vec::new();
    while !left.is_empty() {
        let is_free = |vm: &&u32| {
            let mut leads = leaders.get(*vm).into_iter().flatten();
            leads.all(|leader| !left.contains(leader))
        };
        let Some(next) = left.iter().find(is_free).copied() else {
            let vms = circle(leaders, &left);
            let name = |vm: u32| inventory.vms[vm as usize].name.clone();
            return Err(Refusal::CyclicAffinity { vms: vms.into_iter().map(name).collect() });
        };
        left.remove(&next);
        order.push(next);
    }
    Ok(order)
}

/// Returns a circle of VMs each of which follows another one of them.
fn circle(leaders: &BTreeMap<u32, Vec<u32>>, among: &BTreeSet<u32>) -> Vec<u32> {
    let (mut way, mut next) = (Vec::new(), among.first().copied());
    while let Some(vm) = next {
        if let Some(begin) = way.iter().position(|before| *before == vm) {
            return way.split_off(begin);
        }
        way.push(vm);
        next = leaders.get(&vm).into_iter().flatten().find(|leader| among.contains(leader)).copied();
    }
    way
}

/// Checks that no two VMs of a unit have to stay apart.
fn check_labels(
    inventory: &Inventory,
    unit: &[u32],
    labels: &[Vec<u32>],
    label_names: &[&str],
) -> Result<(), Refusal> {
    let mut seen: BTreeMap<u32, u32> = BTreeMap::new();
    for vm in unit.iter().filter(|_| unit.len() > 1) {
        for label in &labels[*vm as usize] {
            if let Some(other) = seen.insert(*label, *vm) {
                let name = |vm: u32| inventory.vms[vm as usize].name.clone();
                let label = label_names[*label as usize].to_owned();
                return Err(Refusal::ContradictoryAffinity { vm: name(other), other: name(*vm), label });
            }
        }
    }
    Ok(())
}
