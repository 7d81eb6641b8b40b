//! Changes of a relocation: what the names of a VM say at the source, and what they say at the destination. Pure.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::change::{ChangeState, Goal, RdataChange, RrsetChange};
use crate::config::{VmNames, ZoneConfig, zone_of};
use crate::name::Name;
use crate::rdata::{Rdata, RecordType, SrvData};

/// Address of a VM at the source, and the one in its place at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressChange {
    /// Address at the source; none if it is new.
    pub before: Option<IpAddr>,
    /// Address at the destination; none if the VM has none of its kind there.
    pub after: Option<IpAddr>,
}

impl AddressChange {
    /// Returns the change from one address to another.
    pub fn new(before: IpAddr, after: IpAddr) -> Self {
        Self { before: Some(before), after: Some(after) }
    }
}

/// Place of a service at the source, and the one at the destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceChange {
    /// Name of the service.
    pub name: Name,
    /// Place at the source; none if it is new.
    pub before: Option<SrvData>,
    /// Place at the destination; none if the VM does not provide it there.
    pub after: Option<SrvData>,
}

/// Change of a VM's place, as far as DNS shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocation {
    /// Names that have the VM's addresses.
    pub names: Vec<Name>,
    /// Addresses. Those that no name has are left out.
    pub addresses: Vec<AddressChange>,
    /// Services.
    pub services: Vec<ServiceChange>,
}

/// Error of a relocation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelocationError {
    /// A name is in none of the zones.
    #[error("the name {0} is in none of the zones that the configuration has")]
    NoZone(Name),
}

impl Relocation {
    /// Returns the change from what a VM has at the source to what it has at the destination. Without the latter its
    /// services stay what they are.
    pub fn new(source: &VmNames, destination: Option<&VmNames>, addresses: Vec<AddressChange>) -> Self {
        let mut services: BTreeMap<&Name, ServiceChange> = BTreeMap::new();
        for service in &source.services {
            let change =
                ServiceChange { name: service.name.clone(), before: Some(service.place()), after: None };
            services.insert(&service.name, change);
        }
        for service in &destination.unwrap_or(source).services {
            let new = || ServiceChange { name: service.name.clone(), before: None, after: None };
            services.entry(&service.name).or_insert_with(new).after = Some(service.place());
        }
        let services = services.into_values().filter(|service| service.before != service.after).collect();
        Self { names: source.names.clone(), addresses, services }
    }

    /// Returns the records that change, with their owners; and true if they may be missing at the source. A name need
    /// not have all kinds of addresses that the VM has.
    fn rdata_changes(&self, zones: &[ZoneConfig]) -> Vec<(Name, RdataChange, bool)> {
        let mut all = Vec::new();
        for name in &self.names {
            for address in &self.addresses {
                let [before, after] =
                    [address.before, address.after].map(|address| address.map(Rdata::address));
                // A record has one type: another family's address is a change of another record.
                match (&before, &after) {
                    (Some(old), Some(new)) if old.kind() != new.kind() => {
                        all.push((name.clone(), RdataChange { before, after: None }, true));
                        all.push((name.clone(), RdataChange { before: None, after }, true));
                    }
                    _ => all.push((name.clone(), RdataChange { before, after }, true)),
                }
            }
        }
        for service in &self.services {
            let [before, after] =
                [&service.before, &service.after].map(|place| place.clone().map(Rdata::Srv));
            all.push((service.name.clone(), RdataChange { before, after }, false));
        }
        // The name of an address is the VM's first one.
        let Some(first) = self.names.first() else { return all };
        let is_served = |name: &Name| zone_of(zones, name).is_some();
        let pointer = || Some(Rdata::Ptr(first.clone()));
        for address in self.addresses.iter().filter(|address| address.before != address.after) {
            if let Some(name) = address.before.map(Name::reverse).filter(is_served) {
                all.push((name, RdataChange { before: pointer(), after: None }, true));
            }
            if let Some(name) = address.after.map(Name::reverse).filter(is_served) {
                all.push((name, RdataChange { before: None, after: pointer() }, true));
            }
        }
        all
    }
}

/// Plans the changes of records, each by its name and type.
///
/// # Errors
/// If a name of the VM is in none of the zones. Names of addresses are left out then.
pub fn changes_of(
    zones: &[ZoneConfig],
    relocation: &Relocation,
) -> Result<Vec<RrsetChange>, RelocationError> {
    let mut changes: BTreeMap<(Name, RecordType), RrsetChange> = BTreeMap::new();
    for (owner, rdata_change, is_optional) in relocation.rdata_changes(zones) {
        let Some(kind) = rdata_change.before.as_ref().or(rdata_change.after.as_ref()).map(Rdata::kind) else {
            continue;
        };
        if rdata_change.before == rdata_change.after {
            continue;
        }
        let zone = zone_of(zones, &owner).ok_or_else(|| RelocationError::NoZone(owner.clone()))?;
        let new = || RrsetChange {
            zone: zone.zone.clone(),
            owner: owner.clone(),
            kind,
            rdata_changes: Vec::new(),
            lowered_ttl_s: zone.lowered_ttl_s,
            new_ttl_s: zone.new_ttl_s,
            is_optional,
            original_ttl_s: None,
            original: None,
            may_still_apply: false,
            state: ChangeState::Pending,
        };
        let change = changes.entry((owner.clone(), kind)).or_insert_with(new);
        if !change.rdata_changes.contains(&rdata_change) {
            change.rdata_changes.push(rdata_change);
        }
    }
    Ok(changes.into_values().collect())
}

/// Returns the order in which changes are made, by their indices: first addresses, then services that may refer to
/// names which are new, then the names of addresses; what is removed comes last.
pub(crate) fn order(changes: &[RrsetChange], goal: Goal) -> Vec<usize> {
    let mut indices: Vec<_> = (0..changes.len()).collect();
    let removes = |change: &RrsetChange| {
        let wanted = if goal.is_destination() { change.after() } else { change.before() };
        wanted.is_empty()
    };
    // Stable: changes of one rank stay in the order of their names.
    indices.sort_by_key(|index| changes.get(*index).map(|change| (removes(change), change.kind)));
    indices
}
