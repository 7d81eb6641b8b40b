//! The ownership registry: ownership by compare-and-set on (VM, epoch).
//!
//! The registry keeps one record for each VM. [`apply`] is all of its behaviour; the witness calls it inside a
//! transaction of its store. The other functions make the requests of the two roles and interpret the answers.
//!
//! With `e` the epoch of an attempt, a record has these values and no others, so that the comparison of a request that
//! arrives late or twice fails:
//!
//! ```text
//!                      destination acquires
//!   (b < e, source) ─────────────────────────► (e, destination)
//!        │                                        │
//!        │ source reclaims, or                    │ destination returns it,
//!        │ destination rules out acquisition      │ or the operator's force
//!        └──────────────► (e, source) ◄───────────┘
//! ```
//!
//! `b` is the epoch in which the source owns the VM. Pre-flight reads it, so that no agent has to read while the guest
//! stands still; but it can grow until `e` is decided, when the destination of an older attempt, after a reboot, rules
//! out any later acquisition for that attempt. An agent that finds another `b` in the answer compares with that one
//! next.
//!
//! An *offer* beside (b, source) records that the source has journalled COMMITTED. It is a GO that a destination can
//! read when the source's host is lost.

use proto::message::{Offer, Ownership, RegistryReply, RegistryRequest};
use proto::{Epoch, HostId, Incarnation};
use serde::{Deserialize, Serialize};

use super::terms::MigrationTerms;

/// Processes a request. Returns the reply, and the record to store if it changes.
pub fn apply(request: &RegistryRequest, record: Option<&Ownership>) -> (RegistryReply, Option<Ownership>) {
    let current = |record: Option<&Ownership>| RegistryReply::Record { record: record.cloned() };
    match request {
        RegistryRequest::Read { .. } => (current(record), None),
        RegistryRequest::CompareAndSet { expected, new, .. } => {
            let found = record.map(|record| (record.epoch, &record.owner));
            if found != expected.as_ref().map(|(epoch, owner)| (*epoch, owner)) {
                (current(record), None)
            } else if found.is_some_and(|(epoch, _)| new.epoch < epoch) {
                let reason = format!("epoch {} would follow a larger one; epochs only increase", new.epoch);
                (RegistryReply::Failed { reason }, None)
            } else {
                (RegistryReply::Set, Some(new.clone()))
            }
        }
    }
}

/// Knowledge of an agent after a request to the registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegistryAnswer {
    /// The present record.
    Record(Option<Ownership>),
    /// The request was not carried out: there was no connection, or the registry has reported that.
    Unreachable,
    /// The request was sent and no answer arrived: it may have been carried out.
    Unknown,
}

impl RegistryAnswer {
    /// Returns the answer that follows from a reply.
    pub fn from_reply(request: &RegistryRequest, reply: RegistryReply) -> Self {
        match (reply, request) {
            (RegistryReply::Set, RegistryRequest::CompareAndSet { new, .. }) => {
                Self::Record(Some(new.clone()))
            }
            (RegistryReply::Record { record }, _) => Self::Record(record),
            (RegistryReply::Failed { .. }, _) => Self::Unreachable,
            // A peer that answers a read with `Set` has returned no information.
            (RegistryReply::Set, RegistryRequest::Read { .. }) => Self::Unknown,
        }
    }
}

/// Meaning of a record for one migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordMeaning {
    /// Neither host has acquired this epoch.
    Open {
        /// The epoch in which the source owns the VM.
        since: Epoch,
        /// Offer of the source.
        offer: Option<Offer>,
    },
    /// The destination has acquired this epoch.
    Destination,
    /// The source has this epoch: the destination cannot acquire it any more.
    Source,
    /// One of the two hosts has a later epoch: this one was decided long ago, for the destination or not.
    MovedOn,
    /// No record, or one that no request of this migration leads to. The agent waits, and reports it to the operator.
    Foreign,
}

/// Interprets a record.
pub fn interpret_record(terms: &MigrationTerms, record: Option<&Ownership>) -> RecordMeaning {
    let Some(record) = record else { return RecordMeaning::Foreign };
    if record.epoch > terms.epoch() {
        // A third host has it by a migration of this one's source, or by a false claim: the registry does not show
        // which. The source does, when it is asked.
        let ours = record.owner == terms.source || record.owner == terms.destination;
        if ours { RecordMeaning::MovedOn } else { RecordMeaning::Foreign }
    } else if record.epoch == terms.epoch() {
        match &record.owner {
            owner if *owner == terms.destination => RecordMeaning::Destination,
            owner if *owner == terms.source => RecordMeaning::Source,
            _ => RecordMeaning::Foreign,
        }
    } else if record.owner == terms.source {
        RecordMeaning::Open { since: record.epoch, offer: record.offer.as_deref().cloned() }
    } else {
        RecordMeaning::Foreign
    }
}

/// Result of a request to the registry.
pub(super) enum RegistryResult {
    /// The record as it is now.
    Record(RecordMeaning),
    /// The registry was not reached: nothing has changed in it.
    Unreachable,
    /// It is not known whether the request was carried out.
    Unknown,
}

/// Interprets an answer of the registry.
pub(super) fn interpret(terms: &MigrationTerms, answer: &RegistryAnswer) -> RegistryResult {
    match answer {
        RegistryAnswer::Record(record) => RegistryResult::Record(interpret_record(terms, record.as_ref())),
        RegistryAnswer::Unreachable => RegistryResult::Unreachable,
        RegistryAnswer::Unknown => RegistryResult::Unknown,
    }
}

/// Purpose of a request to the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestPurpose {
    /// Read the record.
    Read,
    /// Record COMMITTED for a destination that cannot ask. Best effort.
    Offer,
    /// Acquire ownership of the VM in this epoch.
    Acquire,
    /// Make sure that the source owns the VM in this epoch, so that the destination never can.
    ReturnToSource,
}

impl RequestPurpose {
    /// Returns the effect's name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read-registry",
            Self::Offer => "offer-in-registry",
            Self::Acquire => "acquire-ownership",
            Self::ReturnToSource => "return-ownership",
        }
    }
}

/// Returns the request for the record.
pub fn read(terms: &MigrationTerms) -> RegistryRequest {
    RegistryRequest::Read { vm: terms.migration.vm.clone() }
}

/// Returns the request (since, source) → (since, source) with an offer.
pub fn offer(terms: &MigrationTerms, since: Epoch, incarnation: &Incarnation, run: bool) -> RegistryRequest {
    let offer = Offer { epoch: terms.epoch(), incarnation: incarnation.clone(), run };
    change(terms, (since, &terms.source), (since, &terms.source), Some(offer))
}

/// Returns the request (since, source) → (e, destination).
pub fn acquire_by_destination(terms: &MigrationTerms, since: Epoch) -> RegistryRequest {
    change(terms, (since, &terms.source), (terms.epoch(), &terms.destination), None)
}

/// Returns the request (since, source) → (e, source).
pub fn acquire_by_source(terms: &MigrationTerms, since: Epoch) -> RegistryRequest {
    change(terms, (since, &terms.source), (terms.epoch(), &terms.source), None)
}

/// Returns the request (e, destination) → (e, source), which the destination makes to return the VM, and an operator
/// to force that.
pub fn return_to_source(terms: &MigrationTerms) -> RegistryRequest {
    change(terms, (terms.epoch(), &terms.destination), (terms.epoch(), &terms.source), None)
}

fn change(
    terms: &MigrationTerms,
    from: (Epoch, &HostId),
    to: (Epoch, &HostId),
    offer: Option<Offer>,
) -> RegistryRequest {
    RegistryRequest::CompareAndSet {
        vm: terms.migration.vm.clone(),
        expected: Some((from.0, from.1.clone())),
        new: Ownership { epoch: to.0, owner: to.1.clone(), offer: offer.map(Box::new), released: false },
    }
}
