//! One attempt to make all changes: reads, updates, and reads back. What fails is left to the next attempt.

use std::collections::{BTreeMap, BTreeSet};

use tracing::{debug, info};

use crate::answer::{self, UpdateResult, ZoneState};
use crate::change::{ChangeState, Goal, Lag, LagReason, Rrset, RrsetChange};
use crate::change_set::{ChangeSet, ChangeSetFile};
use crate::client::{Client, now_s};
use crate::config::Server;
use crate::decide::{self, Step};
use crate::failure::Failure;
use crate::name::Name;
use crate::rdata::RecordType;
use crate::relocation::order;
use crate::zones::{Zone, Zones};

/// Number of updates of one change in one attempt: other clients may change the name in between.
const MOST_UPDATES: u32 = 3;

/// Serial number of a zone before the first update of an attempt.
#[derive(Clone, Copy)]
struct FirstSerial {
    serial: u32,
    /// True if the server has made an update since.
    is_changed: bool,
}

/// Connections to the servers that accept updates, each made when it is first used.
struct Primaries<'a> {
    zones: &'a Zones,
    open: BTreeMap<Name, Result<Client<'a>, Failure>>,
    serials: BTreeMap<Name, FirstSerial>,
}

impl<'a> Primaries<'a> {
    /// Asks the primary of a zone. After an error of the connection the zone fails in this attempt.
    fn ask<T>(
        &mut self,
        zone: &Name,
        ask: impl FnOnce(&mut Client<'a>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let zones = self.zones;
        let connect = || zones.zone(zone).and_then(|zone| Client::connect(zone.primary, Some(zone.key)));
        let client = self.open.entry(zone.clone()).or_insert_with(connect);
        let result = client.as_mut().map_err(|failure| failure.clone()).and_then(ask);
        if let Err(failure) = &result
            && failure.is_of_connection()
        {
            *client = Err(failure.clone());
        }
        result
    }
}

/// Result of the first look at records.
enum Learned {
    /// They are the VM's.
    Known,
    /// There are none, and there need not be any.
    NotNeeded,
    /// They are another client's.
    Foreign,
}

/// Result of an attempt.
enum Advance {
    /// The records are what is aimed at.
    Reached(Rrset),
    /// No record was changed, and none has to be.
    Untouched,
    /// The records are another client's.
    Conflict(Rrset),
}

/// Brings all changes nearer to the goal of the set. What was found is in the file before anything is changed.
pub(crate) fn attempt_all(zones: &Zones, change_set: &mut ChangeSet, file: &ChangeSetFile) {
    let mut primaries = Primaries { zones, open: BTreeMap::new(), serials: BTreeMap::new() };
    let mut reached: BTreeMap<Name, Vec<(usize, Rrset)>> = BTreeMap::new();
    for index in order(&change_set.changes, change_set.goal) {
        if file.is_given_up() {
            return;
        }
        if let Some(observed) = attempt_one(&mut primaries, change_set, index, file) {
            reached.entry(change_set.changes[index].zone.clone()).or_default().push((index, observed));
        }
    }
    for (zone, reached) in reached {
        if file.is_given_up() {
            return;
        }
        confirm(&mut primaries, change_set, &zone, reached);
    }
    require_addresses(change_set);
    if let Err(error) = file.save(change_set) {
        // What was found is in it already: the next agent reads how far the changes are from the servers.
        debug!("cannot record the progress of changes of DNS records: {error}");
    }
}

/// Reports names that have none of the VM's addresses: each may be missing, but not all.
fn require_addresses(change_set: &mut ChangeSet) {
    if change_set.goal == Goal::Undone {
        return;
    }
    let is_address = |change: &&RrsetChange| matches!(change.kind, RecordType::A | RecordType::Aaaa);
    let addresses = change_set.changes.iter().filter(is_address);
    let having = addresses.filter(|change| change.state != ChangeState::NotNeeded);
    let having: BTreeSet<_> = having.map(|change| change.owner.clone()).collect();
    for change in &mut change_set.changes {
        let is_missing = change.state == ChangeState::NotNeeded && !having.contains(&change.owner);
        if is_missing && is_address(&&*change) {
            change.state = ChangeState::Conflict { found: Rrset::default() };
        }
    }
}

/// Tries one change. Returns the records if they are what is aimed at; else keeps the reason.
fn attempt_one(
    primaries: &mut Primaries<'_>,
    change_set: &mut ChangeSet,
    index: usize,
    file: &ChangeSetFile,
) -> Option<Rrset> {
    let goal = change_set.goal;
    let result = advance(primaries, change_set, index, file);
    let change = &mut change_set.changes[index];
    change.state = match result {
        Ok(Advance::Reached(_)) if goal == Goal::Undone && change.may_still_apply => {
            // The update whose answer was lost may still come: the records are read again when it had its time.
            change.may_still_apply = false;
            ChangeState::Failed { failure: Failure::LostAnswer }
        }
        Ok(Advance::Reached(observed)) => return Some(observed),
        Ok(Advance::Untouched) => ChangeState::NotNeeded,
        Ok(Advance::Conflict(found)) => ChangeState::Conflict { found },
        Err(failure) => ChangeState::Failed { failure },
    };
    debug!("{change}: {}", change.state);
    None
}

/// Reads and updates the records of one change until they are what is aimed at.
fn advance(
    primaries: &mut Primaries<'_>,
    change_set: &mut ChangeSet,
    index: usize,
    file: &ChangeSetFile,
) -> Result<Advance, Failure> {
    let goal = change_set.goal;
    let RrsetChange { zone, owner, kind, original, .. } = change_set.changes[index].clone();
    if original.is_none() && goal == Goal::Undone {
        return Ok(Advance::Untouched);
    }
    let server = primaries.zones.zone(&zone)?.primary;
    for _ in 0..=MOST_UPDATES {
        let observed = primaries.ask(&zone, |client| client.records(&zone, &owner, kind))?;
        match learn(change_set, index, &observed, file)? {
            Learned::Known => {}
            Learned::NotNeeded => return Ok(Advance::Untouched),
            Learned::Foreign => return Ok(Advance::Conflict(observed)),
        }
        let change = &mut change_set.changes[index];
        let Some(original) = &change.original else { return Ok(Advance::Conflict(observed)) };
        let update = match decide::next_step(change, original, goal, &observed) {
            Step::Done => return Ok(Advance::Reached(observed)),
            Step::Conflict => return Ok(Advance::Conflict(observed)),
            Step::Update(update) => update,
        };
        if !primaries.serials.contains_key(&zone) {
            let serial = primaries.ask(&zone, |client| client.serial(&zone))?;
            primaries.serials.insert(zone.clone(), FirstSerial { serial, is_changed: false });
        }
        match primaries.ask(&zone, |client| client.update(&update)) {
            Ok(UpdateResult::Made) => {
                info!("{change}: updated at {server}");
                if let Some(first) = primaries.serials.get_mut(&zone) {
                    first.is_changed = true;
                }
            }
            Ok(UpdateResult::PrerequisiteFailed(code)) => debug!("{change}: {code}, to be read again"),
            Err(failure) => {
                change.may_still_apply |= failure.is_of_connection();
                return Err(failure);
            }
        }
    }
    Err(Failure::Contended { server })
}

/// Keeps what the records show, in the file if that is new.
fn learn(
    change_set: &mut ChangeSet,
    index: usize,
    observed: &Rrset,
    file: &ChangeSetFile,
) -> Result<Learned, Failure> {
    let old = change_set.changes[index].clone();
    let change = &mut change_set.changes[index];
    if let Some(original) = &mut change.original {
        decide::refresh(&old, original, observed);
    } else {
        let Some((original, rdata_changes)) = decide::read_original(change, observed) else {
            return Ok(Learned::Foreign);
        };
        if rdata_changes.is_empty() {
            return Ok(Learned::NotNeeded);
        }
        change.original = Some(original);
        change.rdata_changes = rdata_changes;
    }
    if *change != old
        && let Err(error) = file.save(change_set)
    {
        // Nothing is changed that the next agent could not undo.
        change_set.changes[index] = old;
        return Err(Failure::NotRecorded { reason: error.to_string() });
    }
    Ok(Learned::Known)
}

/// Reads changes of a zone back from its secondaries, and keeps that they are made.
fn confirm(
    primaries: &mut Primaries<'_>,
    change_set: &mut ChangeSet,
    zone: &Name,
    reached: Vec<(usize, Rrset)>,
) {
    let (goal, at_s) = (change_set.goal, now_s());
    let serial = primaries.ask(zone, |client| client.serial(zone));
    let (serial, servers) = match serial.and_then(|serial| Ok((serial, primaries.zones.zone(zone)?))) {
        Ok((serial, servers)) => (serial, servers),
        Err(failure) => {
            for (index, _) in reached {
                change_set.changes[index].state = ChangeState::Failed { failure: failure.clone() };
            }
            return;
        }
    };
    let first = primaries.serials.get(zone);
    let stands = first.is_some_and(|first| first.is_changed && !answer::is_older(first.serial, serial));
    let mut lags = vec![Vec::new(); reached.len()];
    for server in servers.secondaries {
        let found = read_back(*server, &servers, change_set, serial, &reached);
        for (lags, reason) in lags.iter_mut().zip(found) {
            lags.extend(reason.map(|reason| Lag { server: *server, reason }));
        }
    }
    for ((index, observed), mut lags) in reached.into_iter().zip(lags) {
        if stands {
            lags.push(Lag { server: servers.primary, reason: LagReason::SerialNotIncremented { serial } });
        }
        let change = &mut change_set.changes[index];
        if let Some(original) = &mut change.original {
            if goal.is_lowered() {
                original.lowered_at_s.get_or_insert(at_s);
            }
            if goal.is_destination() {
                original.switched_at_s.get_or_insert(at_s);
            }
        }
        change.state = ChangeState::Made { goal, ttl_s: observed.ttl_s, serial, lags };
        debug!("{change}: {}", change.state);
    }
}

/// Returns for each change what a server lacks.
fn read_back(
    server: Server,
    zone: &Zone<'_>,
    change_set: &ChangeSet,
    serial: u32,
    reached: &[(usize, Rrset)],
) -> Vec<Option<LagReason>> {
    let failed = |failure: Failure| Some(LagReason::Failed { failure });
    let asked = Client::connect(server, None)
        .and_then(|mut client| client.serial(zone.name).map(|serial| (client, serial)));
    let (mut client, its_serial) = match asked {
        Ok(asked) => asked,
        Err(failure) => return vec![failed(failure); reached.len()],
    };
    let reasons = reached.iter().map(|(index, observed)| {
        let change = &change_set.changes[*index];
        match client.records(zone.name, &change.owner, change.kind) {
            Ok(records) => {
                let primary = ZoneState { serial, records: observed.clone() };
                answer::lag(&primary, &ZoneState { serial: its_serial, records })
            }
            Err(failure) => failed(failure),
        }
    });
    reasons.collect()
}
