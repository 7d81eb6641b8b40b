//! The fleet as agents have reported it: hosts, their VMs and migrations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use engine::evacuation::HostContents;
use engine::planner::Inventory;
use proto::message::{HostFacts, HostLoad, MigrationFacts, MigrationStanding, VmFacts};
use proto::{HostId, MigrationId, VmName};
use serde::{Deserialize, Serialize};
use store::fleet::{FleetBatch, FleetRecords, HostDocument, VmDocument};
use tracing::{error, warn};

/// Most migrations of a host that are kept, those that are not over aside.
const MIGRATIONS_KEPT: usize = 512;

/// All hosts that were ever connected, and are not forgotten.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    hosts: BTreeMap<HostId, HostEntry>,
    /// Number of VMs that have appeared so far.
    appeared: u64,
    /// Records that have changed since they were stored: hosts, and VMs of hosts.
    changed_hosts: BTreeSet<HostId>,
    changed_vms: BTreeSet<(HostId, VmName)>,
    /// The fleet as the planner sees it; none if it has changed since.
    pub(crate) inventory: Option<Arc<Inventory>>,
}

/// A host.
#[derive(Debug, Default)]
pub(crate) struct HostEntry {
    /// Facts; none for a host that has not reported any yet.
    pub(crate) facts: Option<HostFacts>,
    /// Use.
    pub(crate) load: HostLoad,
    /// Contents; none if they are not known.
    pub(crate) contents: Option<HostContents>,
    /// VMs that it owns and runs.
    pub(crate) vms: BTreeMap<VmName, VmEntry>,
    /// VMs that it has handed over, as it knew them, until their migrations are over.
    pub(crate) leaving: BTreeMap<VmName, VmFacts>,
    /// Migrations from and to it.
    pub(crate) migrations: BTreeMap<MigrationId, MigrationFacts>,
    /// Its cordon.
    pub(crate) cordon: CordonState,
    /// True if its agent is connected, and has reported everything once.
    pub(crate) connected: bool,
    /// Time of the last report, in milliseconds since 1970; 0 if there was none.
    pub(crate) last_report_unix_ms: u64,
    /// Highest rate at which it has sent, in bytes per second.
    pub(crate) measured_bytes_per_s: u64,
}

/// A VM of a host.
#[derive(Debug)]
pub(crate) struct VmEntry {
    /// Facts.
    pub(crate) facts: VmFacts,
    /// Number of its appearance: of two hosts that report it, the later one has it.
    pub(crate) appeared: u64,
}

/// Cordon of a host: requested, and reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct CordonState {
    /// A user has requested it.
    pub(crate) by_user: bool,
    /// An evacuation has requested it.
    pub(crate) by_evacuation: bool,
    /// State that the agent has reported last; none at first.
    pub(crate) reported: Option<bool>,
}

impl CordonState {
    /// Returns true if the host is to accept no VMs.
    pub(crate) fn is_wanted(&self) -> bool {
        self.by_user || self.by_evacuation
    }

    /// Takes the state that the agent reports. A change that was not requested here was made on the host, by its user.
    /// Returns true if the agent needs a command.
    pub(crate) fn take_report(&mut self, cordoned: bool) -> bool {
        let is_local = cordoned != self.is_wanted() && self.reported != Some(cordoned);
        if is_local {
            self.by_user = cordoned;
            self.by_evacuation &= cordoned;
        }
        self.reported = Some(cordoned);
        cordoned != self.is_wanted()
    }
}

/// Record of a host in the store.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct HostRecord {
    facts: Option<HostFacts>,
    cordon: CordonState,
    last_report_unix_ms: u64,
    measured_bytes_per_s: u64,
}

impl Fleet {
    /// Returns the fleet as it was stored. No agent is connected.
    pub(crate) fn restore(records: &FleetRecords) -> Self {
        let mut fleet = Self::default();
        for HostDocument { host, document } in &records.hosts {
            let Ok(name) = HostId::new(host.as_str()) else { continue };
            let record = document.as_deref().map(serde_json::from_str::<HostRecord>);
            match record.transpose() {
                Ok(record) => {
                    let HostRecord { facts, cordon, last_report_unix_ms, measured_bytes_per_s } =
                        record.unwrap_or_default();
                    let entry = HostEntry {
                        facts,
                        cordon,
                        last_report_unix_ms,
                        measured_bytes_per_s,
                        ..HostEntry::default()
                    };
                    fleet.hosts.insert(name, entry);
                }
                Err(error) => {
                    warn!(host, %error, "the record of a host is damaged; its agent reports it anew");
                }
            }
        }
        for VmDocument { host, vm, document } in &records.vms {
            let facts = document.as_deref().map(serde_json::from_str::<VmFacts>);
            let (Some(Ok(facts)), Ok(host)) = (facts, HostId::new(host.as_str())) else {
                warn!(host, vm, "the record of a VM is damaged; its agent reports it anew");
                continue;
            };
            fleet.appeared += 1;
            let appeared = fleet.appeared;
            if let Some(entry) = fleet.hosts.get_mut(&host) {
                entry.vms.insert(facts.vm.clone(), VmEntry { facts, appeared });
            }
        }
        fleet
    }

    /// Returns all hosts, by name.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = (&HostId, &HostEntry)> {
        self.hosts.iter()
    }

    /// Returns a host.
    pub(crate) fn host(&self, host: &HostId) -> Option<&HostEntry> {
        self.hosts.get(host)
    }

    /// Changes a host, which is added if it is not known. The change is stored.
    pub(crate) fn change<T>(&mut self, host: &HostId, change: impl FnOnce(&mut HostEntry) -> T) -> T {
        self.changed_hosts.insert(host.clone());
        self.change_load(host, change)
    }

    /// Changes a host in a way that is not worth storing.
    pub(crate) fn change_load<T>(&mut self, host: &HostId, change: impl FnOnce(&mut HostEntry) -> T) -> T {
        self.inventory = None;
        change(self.hosts.entry(host.clone()).or_default())
    }

    /// Forgets a host.
    pub(crate) fn remove(&mut self, host: &HostId) {
        self.inventory = None;
        self.hosts.remove(host);
        self.changed_hosts.insert(host.clone());
        self.changed_vms.retain(|(of, _)| of != host);
    }

    /// Enters a VM of a host. Returns true if the host did not have it before.
    pub(crate) fn put_vm(&mut self, host: &HostId, facts: VmFacts) -> bool {
        self.inventory = None;
        let name = facts.vm.clone();
        let next = self.appeared + 1;
        let vms = &mut self.hosts.entry(host.clone()).or_default().vms;
        let known = vms.get(&name);
        let is_new = known.is_none();
        // How busy it is changes all the time.
        let is_worth_storing = known
            .is_none_or(|known| VmFacts { busy_milli: facts.busy_milli, ..known.facts.clone() } != facts);
        let appeared = known.map_or(next, |known| known.appeared);
        vms.insert(name.clone(), VmEntry { facts, appeared });
        if is_new {
            self.appeared = next;
        }
        if is_worth_storing {
            self.changed_vms.insert((host.clone(), name));
        }
        is_new
    }

    /// Removes a VM of a host. Returns true if the host had it.
    pub(crate) fn remove_vm(&mut self, host: &HostId, vm: &VmName) -> bool {
        self.inventory = None;
        let is_leaving = self.open_migration(host, vm).is_some();
        let Some(entry) = self.hosts.get_mut(host) else { return false };
        let Some(removed) = entry.vms.remove(vm) else { return false };
        if is_leaving {
            entry.leaving.insert(vm.clone(), removed.facts);
        }
        self.changed_vms.insert((host.clone(), vm.clone()));
        true
    }

    /// Enters a migration. Returns its standing before.
    pub(crate) fn put_migration(
        &mut self,
        host: &HostId,
        facts: MigrationFacts,
    ) -> Option<MigrationStanding> {
        self.inventory = None;
        let entry = self.hosts.entry(host.clone()).or_default();
        let before = entry.migrations.get(&facts.migration).map(|before| before.standing);
        if facts.standing.is_over() {
            entry.leaving.remove(&facts.migration.vm);
        }
        entry.migrations.insert(facts.migration.clone(), facts);
        while entry.migrations.len() > MIGRATIONS_KEPT {
            let over = entry.migrations.iter().find(|(_, facts)| facts.standing.is_over());
            let Some(id) = over.map(|(id, _)| id.clone()) else { break };
            entry.migrations.remove(&id);
        }
        let sent: u64 = entry
            .migrations
            .values()
            .filter(|facts| facts.from == *host && !facts.standing.is_over())
            .filter_map(|facts| facts.progress.as_ref())
            .map(|progress| progress.rate_bytes_per_s)
            .sum();
        entry.measured_bytes_per_s = entry.measured_bytes_per_s.max(sent);
        before
    }

    /// Returns the host that has each VM: of several that report it, one that is connected, and the one at which it has
    /// appeared last.
    pub(crate) fn places(&self) -> BTreeMap<&VmName, &HostId> {
        let mut found: BTreeMap<&VmName, ((bool, u64), &HostId)> = BTreeMap::new();
        for (host, entry) in &self.hosts {
            for (vm, known) in &entry.vms {
                let place = ((entry.connected, known.appeared), host);
                let best = found.entry(vm).or_insert(place);
                *best = place.max(*best);
            }
        }
        found.into_iter().map(|(vm, (_, host))| (vm, host)).collect()
    }

    /// Returns the migration of a VM that has left a host and is not over, as its source knows it.
    pub(crate) fn open_migration(&self, host: &HostId, vm: &VmName) -> Option<&MigrationFacts> {
        let migrations = &self.hosts.get(host)?.migrations;
        migrations
            .values()
            .rev()
            .find(|facts| facts.migration.vm == *vm && facts.from == *host && !facts.standing.is_over())
    }

    /// Returns a migration of a host that may still need it: it is not over as far as both of its hosts know.
    pub(crate) fn unresolved_migration(&self, host: &HostId) -> Option<&MigrationFacts> {
        let is_over_elsewhere = |facts: &MigrationFacts| {
            let other = if facts.from == *host { &facts.to } else { &facts.from };
            let Some(other) = self.hosts.get(other) else { return true };
            match other.migrations.get(&facts.migration) {
                Some(known) => known.standing.is_over(),
                // It has never begun there, or was over long ago.
                None => other.connected,
            }
        };
        let mut open = self.hosts.get(host)?.migrations.values().filter(|facts| !facts.standing.is_over());
        open.find(|facts| !is_over_elsewhere(facts))
    }

    /// Moves records that have changed into a batch.
    pub(crate) fn take_changes(&mut self, batch: &mut FleetBatch) {
        for host in std::mem::take(&mut self.changed_hosts) {
            let record = self.hosts.get(&host).map(|entry| HostRecord {
                facts: entry.facts.clone(),
                cordon: entry.cordon.clone(),
                last_report_unix_ms: entry.last_report_unix_ms,
                measured_bytes_per_s: entry.measured_bytes_per_s,
            });
            match record.as_ref().map(serde_json::to_string).transpose() {
                Ok(document) => batch.put_host(HostDocument { host: host.into(), document }),
                Err(error) => error!(%host, %error, "the record of a host cannot be written"),
            }
        }
        for (host, vm) in std::mem::take(&mut self.changed_vms) {
            let facts = self.hosts.get(&host).and_then(|entry| entry.vms.get(&vm)).map(|entry| &entry.facts);
            match facts.map(serde_json::to_string).transpose() {
                Ok(document) => batch.put_vm(VmDocument { host: host.into(), vm: vm.into(), document }),
                Err(error) => error!(%host, %vm, %error, "the record of a VM cannot be written"),
            }
        }
    }
}

#[cfg(test)]
mod tests;
