//! Keeper of a host's redirections: makes them in the order in which a migration needs them, and removes them.
//!
//! | step of a migration | here |
//! |---|---|
//! | the destination is known | [`free_ports`](RedirectionKeeper::free_ports); [`reserve`](RedirectionKeeper::reserve), if the tunnel may be `WireGuard`'s |
//! | just before the stop | [`prepare`](RedirectionKeeper::prepare), on all hosts |
//! | the guest is about to run at the destination; it runs there | [`switch`](RedirectionKeeper::switch), at the destination first |
//! | the guest can no longer return | [`confirm`](RedirectionKeeper::confirm) |
//! | repeated, as announcements are | [`announce`](RedirectionKeeper::announce) |
//! | abort | [`remove`](RedirectionKeeper::remove) |
//! | something could not be made | [`complete`](RedirectionKeeper::complete) |
//! | old connections have ended | [`drop_legs`](RedirectionKeeper::drop_legs) |
//! | nothing needs it any more | [`remove`](RedirectionKeeper::remove) |
//! | an agent starts | [`resume`](RedirectionKeeper::resume) |
//!
//! Records alone say what there is. The latest redirection of a card is in effect; the one before it keeps its record and its
//! keys until the later one is confirmed, so that it can be made again, by whichever agent.
//!
//! All calls are for the network namespace of the calling thread. Clones share a lock: no two of them change records, or
//! sysctls of the host as a whole, at the same time. A switch takes no lock and writes nothing, because the guest waits for
//! it; as long as a redirection is prepared for a card, only its migration changes redirections of this card.

mod error;
mod reservations;

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};
use tracing::{debug, warn};

use super::host_kernel::{HostKernel, NamespaceKernel};
use super::model::Redirection;
use super::neighbour_refresh::NeighbourRefresh;
use super::next_move::{may_change, without_legs};
use super::objects::KernelObject;
use super::plan::{HostPlan, plan};
use super::record::{RecordStage, RecordStore, RedirectionRecord};
use crate::announcement;
use crate::claims::Claim;
use crate::divert::MARK;
use crate::ethernet::Mac;
pub use error::RedirectionError;

/// Keeps the redirections of a host.
#[derive(Clone, Debug)]
pub struct RedirectionKeeper {
    host: String,
    directory: String,
    store: RecordStore,
    kernel: Arc<dyn HostKernel>,
    /// Held while records, or sysctls of the host as a whole, are changed.
    changing: Arc<Mutex<()>>,
}

impl RedirectionKeeper {
    /// Keeps the redirections of the host with this name; records and keys are in `directory`.
    pub fn new(host: &str, directory: &Path) -> Self {
        Self::with(host, directory, Arc::new(NamespaceKernel))
    }

    /// Keeps the redirections of a host with this kernel.
    pub fn with(host: &str, directory: &Path, kernel: Arc<dyn HostKernel>) -> Self {
        let (store, changing) = (RecordStore::new(directory), Arc::default());
        Self { host: host.to_owned(), directory: directory.display().to_string(), store, kernel, changing }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the records of all redirections.
    pub fn records(&self) -> Result<Vec<RedirectionRecord>, RedirectionError> {
        self.files(self.store.all())
    }

    /// Makes what takes no packets yet. It is recorded first; after an error nothing is left.
    ///
    /// # Errors
    /// Among others if a redirection of the same card is there that this migration may not change.
    pub fn prepare(&self, redirection: &Redirection) -> Result<RedirectionRecord, RedirectionError> {
        let _changing = self.lock();
        let records = self.records()?;
        for record in records.iter().filter(|record| record.is_of(redirection)) {
            may_change(&record.redirection, &redirection.migration, redirection.epoch)?;
            if record.stage == RecordStage::Active && record.redirection == *redirection {
                return Ok(record.clone());
            }
        }
        let record = RedirectionRecord {
            host: self.host.clone(),
            stage: RecordStage::Prepared,
            redirection: redirection.clone(),
            plan: self.plan(redirection, &records)?,
            is_incomplete: false,
            since_unix_ms: unix_ms(),
        };
        let taken = records.iter().find(|other| other.names() == record.names());
        let is_same = |other: &&RedirectionRecord| {
            other.redirection.migration == redirection.migration && other.is_of(redirection)
        };
        if let Some(other) = taken.filter(|other| !is_same(other)) {
            let (number, migration) = (record.names().0, other.redirection.migration.clone());
            return Err(RedirectionError::NumberInUse { number, migration });
        }
        self.files(self.store.put(&record))?;
        let made = record.plan.prepared.iter().try_for_each(|object| self.make_one(&record, object));
        if made.is_err()
            && let Err(error) = self.end(record.clone())
        {
            warn!(
                migration = %record.redirection.migration,
                %error,
                "a redirection was not made, and parts of it remain; they are removed later"
            );
        }
        made.map(|()| record)
    }

    /// Makes what takes packets, in place of former redirections of the same card, of which idle devices remain. Nothing
    /// is written: until [`confirm`](Self::confirm) it can be undone. Can be repeated.
    ///
    /// # Errors
    /// If something of a former one remains, or something of this one could not be made. All else is there then, and the
    /// record says whether this one is incomplete.
    pub fn switch(&self, record: &mut RedirectionRecord) -> Result<(), RedirectionError> {
        let mut result = Ok(());
        match self.records() {
            Ok(records) => {
                for former in formers(&records, record) {
                    result = result.and(self.remove_former(former, &record.plan));
                }
            }
            Err(error) => result = Err(error),
        }
        let made = self.make_all(record, record.plan.switched.iter());
        record.is_incomplete = made.is_err();
        self.announce(record);
        made.and(result)
    }

    /// Records that a switched redirection stays, and removes former ones of the same card with their records and keys.
    ///
    /// # Errors
    /// If it cannot be recorded, or if something of a former one remains: that is recorded as ending.
    pub fn confirm(&self, record: &mut RedirectionRecord) -> Result<(), RedirectionError> {
        let _changing = self.lock();
        record.stage = RecordStage::Active;
        record.since_unix_ms = unix_ms();
        self.files(self.store.put(record))?;
        let mut result = Ok(());
        for former in formers(&self.records()?, record) {
            result = result.and(self.end(former.clone()));
        }
        result
    }

    /// Announces the guest's public addresses in the network of the proxy device, as the guest itself would.
    pub fn announce(&self, record: &RedirectionRecord) {
        let Some((device, mac, addresses)) = &record.plan.announced else { return };
        if let Err(error) = announce(device, *mac, addresses) {
            warn!(%device, %error, "the VM's addresses are not announced");
        }
    }

    /// Removes everything of a redirection, and its record. One of the same card that it was about to replace, or had
    /// replaced without being confirmed, is made again.
    ///
    /// # Errors
    /// If something remains: the record remains with it, and the call is to be repeated.
    pub fn remove(&self, record: &RedirectionRecord) -> Result<(), RedirectionError> {
        let _changing = self.lock();
        // It may have ended, or have become another one, since the caller has read it.
        let present = present(&self.records()?, record).cloned();
        present.map_or(Ok(()), |record| self.end(record))
    }

    fn end(&self, mut record: RedirectionRecord) -> Result<(), RedirectionError> {
        let was_active = record.stage == RecordStage::Active;
        record.stage = RecordStage::Ending;
        if was_active {
            // Where an agent died before it had removed them.
            for former in
                formers(&self.records()?, &record).filter(|former| former.stage == RecordStage::Active)
            {
                let former = RedirectionRecord { stage: RecordStage::Ending, ..former.clone() };
                self.files(self.store.put(&former))?;
            }
        }
        self.files(self.store.put(&record))?;
        let neighbours = NeighbourRefresh::of(&record.redirection, &self.host);
        let others = self.records()?;
        let mut leftovers = Vec::new();
        for object in record.plan.objects().rev() {
            if is_needed(object, &record, &others) {
                continue;
            }
            if let Err(source) = self.kernel.remove(object) {
                leftovers.push((object, source));
            }
        }
        self.reinstate(&record, &others)?;
        let count = leftovers.len();
        if let Some((object, source)) = leftovers.into_iter().next() {
            let migration = record.redirection.migration.clone();
            return Err(RedirectionError::Leftover { migration, count, object: object.to_string(), source });
        }
        if let Err(error) = neighbours.and_then(|neighbours| neighbours.send_to_guest()) {
            debug!(%error, "the VM looks for its neighbours itself, a little later");
        }
        self.files(self.store.remove(&record))
    }

    /// Makes the redirection again that this one has replaced. What cannot be made is recorded, for
    /// [`complete`](Self::complete).
    fn reinstate(
        &self,
        ended: &RedirectionRecord,
        others: &[RedirectionRecord],
    ) -> Result<(), RedirectionError> {
        let is_replaced = |other: &RedirectionRecord| {
            other.stage == RecordStage::Active
                && other.is_of(&ended.redirection)
                && other.redirection.epoch < ended.redirection.epoch
                && !other.is_superseded(others)
        };
        let Some(mut former) = others.iter().find(|other| is_replaced(other)).cloned() else { return Ok(()) };
        let made = self.make_all(&former, former.plan.objects());
        if let Err(error) = &made {
            warn!(
                migration = %former.redirection.migration,
                %error,
                "the earlier redirection is not restored completely; it is tried again"
            );
        }
        self.set_incomplete(&mut former, made.is_err())
    }

    /// Makes what is missing of an active redirection, unless a later one of the same card is there.
    ///
    /// # Errors
    /// If something is still missing.
    pub fn complete(&self, record: &RedirectionRecord) -> Result<(), RedirectionError> {
        let _changing = self.lock();
        let records = self.records()?;
        let present = present(&records, record).filter(|record| record.stage == RecordStage::Active);
        match present.filter(|record| !record.is_superseded(&records)).cloned() {
            Some(record) => self.make_whole(record),
            None => Ok(()),
        }
    }

    fn make_whole(&self, mut record: RedirectionRecord) -> Result<(), RedirectionError> {
        let made = self.make_all(&record, record.plan.objects());
        self.set_incomplete(&mut record, made.is_err())?;
        made
    }

    fn set_incomplete(
        &self,
        record: &mut RedirectionRecord,
        is_incomplete: bool,
    ) -> Result<(), RedirectionError> {
        if record.is_incomplete == is_incomplete {
            return Ok(());
        }
        record.is_incomplete = is_incomplete;
        self.files(self.store.put(record))
    }

    /// Changes an active redirection: what both have in common stays.
    fn change(
        &self,
        record: &RedirectionRecord,
        redirection: &Redirection,
    ) -> Result<RedirectionRecord, RedirectionError> {
        let _changing = self.lock();
        let records = self.records()?;
        let is_same = |present: &&RedirectionRecord| {
            present.stage == record.stage && present.redirection == record.redirection
        };
        let record = present(&records, record)
            .filter(is_same)
            .ok_or_else(|| RedirectionError::Changed { migration: record.redirection.migration.clone() })?;
        may_change(&record.redirection, &redirection.migration, redirection.epoch)?;
        let mut next = RedirectionRecord { redirection: redirection.clone(), ..record.clone() };
        next.plan = self.plan(redirection, &records)?;
        let mut both = next.clone();
        both.plan.switched.extend(record.plan.objects().filter(|old| !has(&next.plan, old)).cloned());
        // Until it is done, the record names what is there before and after.
        self.files(self.store.put(&both))?;
        for old in
            record.plan.objects().rev().filter(|old| !has(&next.plan, old) && !is_replaced(old, &next.plan))
        {
            self.kernel
                .remove(old)
                .map_err(|source| RedirectionError::Kernel { object: old.to_string(), source })?;
        }
        self.make_all(&next, next.plan.objects().filter(|object| !has(&record.plan, object)))?;
        self.files(self.store.put(&next))?;
        Ok(next)
    }

    /// Ends what old connections need. Where the guest needs its host for all others as well, their translation stays, and
    /// the record with it; otherwise everything is removed.
    pub fn drop_legs(&self, record: &RedirectionRecord) -> Result<(), RedirectionError> {
        let is_here = record.redirection.place.host == self.host;
        let Some(without_legs) = without_legs(&record.redirection).filter(|_| is_here) else {
            return self.remove(record);
        };
        let changed = self.change(record, &without_legs)?;
        if self.files(self.store.is_shared(&changed))? {
            return Ok(());
        }
        self.forget_key(&record.redirection.migration)
    }

    /// Resumes the redirections that the records name, after a start of the agent or of the host: an active one is made
    /// again as far as something of it is missing; one that was being removed is removed. What was prepared is left to
    /// the migration, whose outcome decides: [`confirm`](Self::confirm) or [`remove`](Self::remove). Returns the records that
    /// remain, and the errors.
    pub fn resume(&self) -> Result<(Vec<RedirectionRecord>, Vec<RedirectionError>), RedirectionError> {
        let _changing = self.lock();
        let records = self.records()?;
        let mut errors = Vec::new();
        for record in &records {
            let result = match record.stage {
                RecordStage::Ending => self.end(record.clone()),
                RecordStage::Active if !record.is_superseded(&records) => self.make_whole(record.clone()),
                RecordStage::Active | RecordStage::Prepared => Ok(()),
            };
            errors.extend(result.err());
        }
        let mut remaining = self.records()?;
        remaining.retain(|record| record.stage != RecordStage::Ending);
        Ok((remaining, errors))
    }

    /// Plans this host's part of a redirection.
    fn plan(
        &self,
        redirection: &Redirection,
        others: &[RedirectionRecord],
    ) -> Result<HostPlan, RedirectionError> {
        let kernel_features = self.kernel.kernel_features().map_err(RedirectionError::Features)?;
        let mut plan = plan(redirection, &self.host, &kernel_features)?;
        adopt_sysctls(&mut plan, others);
        Ok(plan)
    }

    fn make_one(&self, record: &RedirectionRecord, object: &KernelObject) -> Result<(), RedirectionError> {
        let key = || self.store.end(&record.redirection.migration).map(|end| end.key);
        let made = self.kernel.make(object, &key);
        made.map_err(|source| RedirectionError::Kernel { object: object.to_string(), source })
    }

    /// Makes all that can be made. Returns the first error.
    fn make_all<'a>(
        &self,
        record: &RedirectionRecord,
        objects: impl Iterator<Item = &'a KernelObject>,
    ) -> Result<(), RedirectionError> {
        let mut result = Ok(());
        for object in objects {
            let made = self.make_one(record, object);
            result = result.and(made);
        }
        result
    }

    /// Removes what takes packets of a former redirection, but for what the next one needs. Sysctls that are not ours alone
    /// are restored when it ends; its devices end then, too, because a device takes tens of milliseconds to go, during
    /// which the guest would wait.
    fn remove_former(&self, former: &RedirectionRecord, next: &HostPlan) -> Result<(), RedirectionError> {
        let mut result = Ok(());
        let objects = former.plan.objects().rev();
        let stays = |object: &&KernelObject| {
            object.is_shared_sysctl() || matches!(object, KernelObject::Device(_)) || has(next, object)
        };
        for object in objects.filter(|object| !stays(object)) {
            let removed = self.kernel.remove(object);
            result = result.and(
                removed.map_err(|source| RedirectionError::Kernel { object: object.to_string(), source }),
            );
        }
        result
    }

    fn files<T>(&self, result: io::Result<T>) -> Result<T, RedirectionError> {
        result.map_err(|source| RedirectionError::Records { directory: self.directory.clone(), source })
    }
}

/// Returns the record that is there now in place of this one.
fn present<'a>(
    records: &'a [RedirectionRecord],
    record: &RedirectionRecord,
) -> Option<&'a RedirectionRecord> {
    let redirection = &record.redirection;
    let is_same = |other: &&RedirectionRecord| {
        other.redirection.migration == redirection.migration && other.is_of(redirection)
    };
    records.iter().find(is_same)
}

/// Returns the records of the same card that are older.
fn formers<'a>(
    records: &'a [RedirectionRecord],
    record: &'a RedirectionRecord,
) -> impl Iterator<Item = &'a RedirectionRecord> {
    let (redirection, epoch) = (&record.redirection, record.redirection.epoch);
    records.iter().filter(move |other| other.is_of(redirection) && other.redirection.epoch < epoch)
}

/// Takes over what other redirections know of sysctls that they have changed: the value before any of them.
fn adopt_sysctls(plan: &mut HostPlan, others: &[RedirectionRecord]) {
    for object in plan.prepared.iter_mut().chain(&mut plan.switched) {
        let KernelObject::Sysctl(sysctl) = object else { continue };
        let known = others.iter().flat_map(|record| record.plan.objects()).find_map(|other| match other {
            KernelObject::Sysctl(other) if other.path == sysctl.path => other.before.clone(),
            _ => None,
        });
        if known.is_some() {
            sysctl.before = known;
        }
    }
}

/// Returns true if another redirection needs a sysctl of the host, which is not restored then.
fn is_needed(object: &KernelObject, record: &RedirectionRecord, others: &[RedirectionRecord]) -> bool {
    let KernelObject::Sysctl(sysctl) = object else { return false };
    let others = others.iter().filter(|other| other.names() != record.names());
    sysctl.before.is_some()
        && others
            .flat_map(|other| other.plan.objects())
            .any(|other| matches!(other, KernelObject::Sysctl(other) if other.path == sysctl.path))
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

fn announce(device: &str, mac: Mac, addresses: &[IpAddr]) -> io::Result<()> {
    let claim = |address: &IpAddr| Claim { vlan: None, address: *address, is_router: false };
    let claims: Vec<_> = addresses.iter().map(claim).collect();
    let socket = PacketSocket::sender(device, MARK)?;
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
