//! Keeper of a host's redirections: makes them in the order in which a migration needs them, and removes them.
//!
//! | step of a migration | here |
//! |---|---|
//! | the destination is known, both hosts have answered | [`new_key`](RedirectionKeeper::new_key), if the tunnel is `WireGuard`'s |
//! | just before the stop | [`prepare`](RedirectionKeeper::prepare), on all hosts |
//! | the guest runs at the destination | [`switch`](RedirectionKeeper::switch), at the destination first |
//! | repeated, as announcements are | [`announce`](RedirectionKeeper::announce) |
//! | abort | [`undo`](RedirectionKeeper::undo) |
//! | nothing needs it any more | [`release`](RedirectionKeeper::release) |
//! | an agent starts | [`restore`](RedirectionKeeper::restore) |
//!
//! All calls are for the network namespace of the calling thread.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};
use tracing::{debug, warn};

use super::former_stations::FormerStations;
use super::kernel;
use super::names::{Names, number_of_device};
use super::objects::KernelObject;
use super::onward::{NotOwner, may_change, settled};
use super::parts::Redirection;
use super::plan::{HostAbilities, HostPlan, NoPlan, plan};
use super::record::{RecordStage, RecordStore, RedirectionRecord};
use super::tunnel::Key;
use super::wireguard;
use crate::announcement;
use crate::claims::Claim;
use crate::divert::MARK;
use crate::ethernet::Mac;

/// Error of a redirection.
#[derive(Debug, thiserror::Error)]
pub enum RedirectionError {
    /// There is no plan.
    #[error("no redirection is possible")]
    Plan(#[from] NoPlan),
    /// Another host owns the guest.
    #[error(transparent)]
    NotOwner(#[from] NotOwner),
    /// A number belongs to another redirection.
    #[error("number {number} belongs to redirection {migration} on this host: choose a free one")]
    NumberInUse {
        /// The number.
        number: u32,
        /// Name of the other redirection's migration.
        migration: String,
    },
    /// The kernel refused an object.
    #[error("the kernel does not make {object}")]
    Kernel {
        /// Description of the object.
        object: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// Records cannot be read or written.
    #[error("records of redirections in {directory}")]
    Records {
        /// Directory of the records.
        directory: String,
        /// The error.
        source: io::Error,
    },
    /// Objects are left in the kernel.
    #[error("{count} objects of redirection {migration} remain in the kernel, the first of them {object}")]
    Remains {
        /// Name of the migration.
        migration: String,
        /// Number of objects.
        count: usize,
        /// One of them.
        object: String,
        /// The kernel's error for it.
        source: io::Error,
    },
}

/// Keeps the redirections of a host.
#[derive(Clone, Debug)]
pub struct RedirectionKeeper {
    host: String,
    directory: String,
    store: RecordStore,
}

impl RedirectionKeeper {
    /// Keeps the redirections of the host with this name; records and keys are in `directory`.
    pub fn new(host: &str, directory: &Path) -> Self {
        let store = RecordStore::new(directory);
        Self { host: host.to_owned(), directory: directory.display().to_string(), store }
    }

    /// Returns the records of all redirections.
    pub fn records(&self) -> Result<Vec<RedirectionRecord>, RedirectionError> {
        self.files(self.store.all())
    }

    /// Makes a private key for the tunnel with this number, and returns the public one. It is kept until the end of the
    /// redirection, or until [`forget_key`](Self::forget_key).
    pub fn new_key(&self, number: u32) -> Result<Key, RedirectionError> {
        let private = self.files(wireguard::private_key())?;
        self.files(self.store.put_key(number, &private))?;
        let public = wireguard::public_key(&private, &Names(number).tunnel());
        public.map_err(|source| RedirectionError::Kernel { object: "a public key".to_owned(), source })
    }

    /// Forgets the private key of a tunnel that is not made.
    pub fn forget_key(&self, number: u32) -> Result<(), RedirectionError> {
        self.files(self.store.remove_key(number))
    }

    /// Makes what takes no packets yet. It is recorded first; after an error nothing is left.
    ///
    /// # Errors
    /// Among others if a redirection of the same card is there that this migration may not change.
    pub fn prepare(
        &self,
        redirection: &Redirection,
        abilities: &HostAbilities,
    ) -> Result<RedirectionRecord, RedirectionError> {
        let records = self.records()?;
        for record in records.iter().filter(|record| record.is_of(redirection)) {
            may_change(&record.redirection, &redirection.migration, redirection.epoch)?;
            if record.stage == RecordStage::Active && record.redirection == *redirection {
                return Ok(record.clone());
            }
        }
        let mut plan = plan(redirection, &self.host, abilities)?;
        adopt_settings(&mut plan, &records);
        let record = RedirectionRecord {
            host: self.host.clone(),
            stage: RecordStage::Prepared,
            redirection: redirection.clone(),
            plan,
            since_unix_ms: unix_ms(),
        };
        let taken = records.iter().find(|other| other.names() == record.names());
        if let Some(other) = taken.filter(|other| other.redirection.migration != redirection.migration) {
            let (number, migration) = (record.names().0, other.redirection.migration.clone());
            return Err(RedirectionError::NumberInUse { number, migration });
        }
        self.files(self.store.put(&record))?;
        let made = self.make(record.plan.prepared.iter());
        if made.is_err() {
            self.discard(&record);
        }
        made.map(|()| record)
    }

    /// Makes what takes packets, in place of former redirections of the same card. Can be repeated after an error.
    pub fn switch(&self, record: &mut RedirectionRecord) -> Result<(), RedirectionError> {
        record.stage = RecordStage::Active;
        record.since_unix_ms = unix_ms();
        self.files(self.store.put(record))?;
        for former in self.formers(record)? {
            self.release(former)?;
        }
        self.make(record.plan.switched.iter())?;
        self.announce(record);
        Ok(())
    }

    /// Announces the guest's public addresses in the network of its station, as the guest itself would.
    pub fn announce(&self, record: &RedirectionRecord) {
        let Some((station, mac, addresses)) = &record.plan.announced else { return };
        if let Err(error) = announce(station, *mac, addresses) {
            warn!(%station, %error, "the VM's addresses are not announced");
        }
    }

    /// Makes a redirection again that another one had replaced, after the latter was removed.
    pub fn reinstate(&self, former: &RedirectionRecord) -> Result<(), RedirectionError> {
        self.files(self.store.put(former))?;
        self.make(former.plan.objects())
    }

    /// Forgets the keys of tunnels that no record names: no migration may be about to make one.
    pub fn forget_unused_keys(&self) -> Result<(), RedirectionError> {
        let records = self.records()?;
        let legs = records.iter().flat_map(|record| &record.redirection.legs);
        let used: BTreeSet<_> = legs.map(|leg| leg.number).collect();
        for number in self.files(self.store.keys())?.into_iter().filter(|number| !used.contains(number)) {
            self.forget_key(number)?;
        }
        Ok(())
    }

    /// Removes what was prepared for a migration that is aborted. What takes packets stays: the guest has moved.
    pub fn undo(&self, record: RedirectionRecord) -> Result<(), RedirectionError> {
        if record.stage == RecordStage::Active { Ok(()) } else { self.release(record) }
    }

    /// Removes everything of a redirection, and its record.
    ///
    /// # Errors
    /// If something remains: the record remains with it, and [`restore`](Self::restore) tries again.
    pub fn release(&self, mut record: RedirectionRecord) -> Result<(), RedirectionError> {
        record.stage = RecordStage::Ending;
        self.files(self.store.put(&record))?;
        let stations = FormerStations::of(&record.redirection, &self.host);
        let others = self.records()?;
        let mut remains = Vec::new();
        for object in record.plan.objects().rev() {
            if is_needed(object, &record, &others) {
                continue;
            }
            if let Err(source) = kernel::remove(object) {
                remains.push((object, source));
            }
        }
        let count = remains.len();
        if let Some((object, source)) = remains.into_iter().next() {
            let migration = record.redirection.migration.clone();
            return Err(RedirectionError::Remains { migration, count, object: describe(object), source });
        }
        if let Err(error) = stations.and_then(|stations| stations.introduce()) {
            debug!(%error, "the VM looks for its neighbours itself, a little later");
        }
        self.files(self.store.remove(&record))
    }

    /// Changes an active redirection, for example when a host no longer takes part: what both have in common stays.
    pub fn change(
        &self,
        record: &RedirectionRecord,
        redirection: &Redirection,
        abilities: &HostAbilities,
    ) -> Result<RedirectionRecord, RedirectionError> {
        may_change(&record.redirection, &redirection.migration, redirection.epoch)?;
        let mut next = RedirectionRecord { redirection: redirection.clone(), ..record.clone() };
        next.plan = plan(redirection, &self.host, abilities)?;
        adopt_settings(&mut next.plan, &self.records()?);
        let mut both = next.clone();
        both.plan.switched.extend(record.plan.objects().filter(|old| !has(&next.plan, old)).cloned());
        // Until it is done, the record names what is there before and after.
        self.files(self.store.put(&both))?;
        for old in
            record.plan.objects().rev().filter(|old| !has(&next.plan, old) && !is_replaced(old, &next.plan))
        {
            kernel::remove(old)
                .map_err(|source| RedirectionError::Kernel { object: describe(old), source })?;
        }
        self.make(next.plan.objects().filter(|object| !has(&record.plan, object)))?;
        self.files(self.store.put(&next))?;
        Ok(next)
    }

    /// Ends what old connections need. Where the guest needs its host for all others as well, their translation stays, and
    /// the record with it; otherwise everything is removed.
    pub fn settle(
        &self,
        record: RedirectionRecord,
        abilities: &HostAbilities,
    ) -> Result<(), RedirectionError> {
        let is_here = record.redirection.place.host == self.host;
        let Some(settled) = settled(&record.redirection).filter(|_| is_here) else {
            return self.release(record);
        };
        self.change(&record, &settled, abilities)?;
        record.redirection.legs.iter().try_for_each(|leg| self.forget_key(leg.number))
    }

    /// Restores the redirections that the records name, after a start of the agent or of the host: an active one is made
    /// again as far as something of it is missing; one that was being removed is removed. What was prepared is left to
    /// the migration, whose outcome decides: [`switch`](Self::switch) or [`undo`](Self::undo). Returns the records that
    /// remain, and the errors.
    pub fn restore(&self) -> Result<(Vec<RedirectionRecord>, Vec<RedirectionError>), RedirectionError> {
        let (mut remaining, mut errors) = (Vec::new(), Vec::new());
        for record in self.records()? {
            let result = match record.stage {
                RecordStage::Ending => {
                    errors.extend(self.release(record).err());
                    continue;
                }
                RecordStage::Prepared => Ok(()),
                RecordStage::Active => self.make(record.plan.objects()),
            };
            errors.extend(result.err());
            remaining.push(record);
        }
        Ok((remaining, errors))
    }

    fn make<'a>(&self, objects: impl Iterator<Item = &'a KernelObject>) -> Result<(), RedirectionError> {
        let key = |device: &str| {
            let number = number_of_device(device).ok_or(io::ErrorKind::NotFound)?;
            self.store.key(number)
        };
        for object in objects {
            kernel::make(object, &key)
                .map_err(|source| RedirectionError::Kernel { object: describe(object), source })?;
        }
        Ok(())
    }

    /// Removes what an attempt has left, as far as possible; the record remains with what is left.
    fn discard(&self, record: &RedirectionRecord) {
        if let Err(error) = self.release(record.clone()) {
            warn!(migration = %record.redirection.migration, %error, "left behind until the agent starts anew");
        }
    }

    /// Returns the records of the same card that are older.
    fn formers(&self, record: &RedirectionRecord) -> Result<Vec<RedirectionRecord>, RedirectionError> {
        let is_former = |other: &RedirectionRecord| {
            other.is_of(&record.redirection) && other.redirection.epoch < record.redirection.epoch
        };
        Ok(self.records()?.into_iter().filter(is_former).collect())
    }

    fn files<T>(&self, result: io::Result<T>) -> Result<T, RedirectionError> {
        result.map_err(|source| RedirectionError::Records { directory: self.directory.clone(), source })
    }
}

/// Takes over what other redirections know of settings that they have changed: the value before any of them.
fn adopt_settings(plan: &mut HostPlan, others: &[RedirectionRecord]) {
    for object in plan.prepared.iter_mut().chain(&mut plan.switched) {
        let KernelObject::Setting(setting) = object else { continue };
        let known = others.iter().flat_map(|record| record.plan.objects()).find_map(|other| match other {
            KernelObject::Setting(other) if other.path == setting.path => other.before.clone(),
            _ => None,
        });
        if known.is_some() {
            setting.before = known;
        }
    }
}

/// Returns true if another redirection needs a setting of the host, which is not restored then.
fn is_needed(object: &KernelObject, record: &RedirectionRecord, others: &[RedirectionRecord]) -> bool {
    let KernelObject::Setting(setting) = object else { return false };
    let others = others.iter().filter(|other| other.names() != record.names());
    setting.before.is_some()
        && others
            .flat_map(|other| other.plan.objects())
            .any(|other| matches!(other, KernelObject::Setting(other) if other.path == setting.path))
}

fn has(plan: &HostPlan, object: &KernelObject) -> bool {
    plan.objects().any(|other| other == object)
}

/// Returns true if a table takes the place of this one in one step.
fn is_replaced(object: &KernelObject, plan: &HostPlan) -> bool {
    let KernelObject::Rules(table) = object else { return false };
    let same = |other: &KernelObject| matches!(other, KernelObject::Rules(other) if (other.family, &other.name) == (table.family, &table.name));
    plan.objects().any(same)
}

/// Describes an object for an error.
fn describe(object: &KernelObject) -> String {
    match object {
        KernelObject::Device(device) => format!("device {}", device.name),
        KernelObject::Setting(setting) => format!("setting {}", setting.path),
        KernelObject::Port { device, bridge, .. } => format!("port {device} of bridge {bridge}"),
        KernelObject::Up { device } => format!("device {device} up"),
        KernelObject::Address { device, address } => format!("address {} of {device}", address.address),
        KernelObject::Neighbour { device, address, .. } => format!("neighbour {address} behind {device}"),
        KernelObject::Proxy { device, address } => format!("answers for {address} at {device}"),
        KernelObject::Route(route) => {
            format!(
                "a route to {}/{} by {}",
                route.destination.address, route.destination.length, route.device
            )
        }
        KernelObject::Policy(rule) => format!("policy rule {} to table {}", rule.priority, rule.table),
        KernelObject::Rules(table) => format!("table {}", table.name),
    }
}

fn announce(station: &str, mac: Mac, addresses: &[IpAddr]) -> io::Result<()> {
    let claim = |address: &IpAddr| Claim { vlan: None, address: *address, is_router: false };
    let claims: Vec<_> = addresses.iter().map(claim).collect();
    let socket = PacketSocket::sender(station, MARK)?;
    announcement::frames(mac, &claims)
        .iter()
        .try_for_each(|frame| socket.send([0; VIRTIO_HEADER_BYTES], frame))
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
