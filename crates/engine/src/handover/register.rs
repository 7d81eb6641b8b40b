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

use proto::message::{Offer, Ownership, RegisterReply, RegisterRequest};
use proto::{Epoch, HostId, Incarnation, VmName};
use serde::{Deserialize, Serialize};

use super::Terms;

/// Processes a request. Returns the reply, and the record to store if it changes.
pub fn apply(request: &RegisterRequest, record: Option<&Ownership>) -> (RegisterReply, Option<Ownership>) {
    let stands = |record: Option<&Ownership>| RegisterReply::Stands { record: record.cloned() };
    match request {
        RegisterRequest::Read { .. } => (stands(record), None),
        RegisterRequest::CompareAndSet { expected, new, .. } => {
            let found = record.map(|record| (record.epoch, &record.owner));
            if found != expected.as_ref().map(|(epoch, owner)| (*epoch, owner)) {
                (stands(record), None)
            } else if found.is_some_and(|(epoch, _)| new.epoch < epoch) {
                let reason = format!("epoch {} would follow a later one; epochs only grow", new.epoch);
                (RegisterReply::Failed { reason }, None)
            } else {
                (RegisterReply::Set, Some(new.clone()))
            }
        }
    }
}

/// Knowledge of an agent after a request to the registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegisterAnswer {
    /// The present record.
    Stands(Option<Ownership>),
    /// The request was not carried out: there was no connection, or the registry has reported that.
    Unreachable,
    /// The request was sent and no answer arrived: it may have been carried out.
    Unknown,
}

impl RegisterAnswer {
    /// Returns the answer that follows from a reply.
    pub fn from_reply(request: &RegisterRequest, reply: RegisterReply) -> Self {
        match (reply, request) {
            (RegisterReply::Set, RegisterRequest::CompareAndSet { new, .. }) => {
                Self::Stands(Some(new.clone()))
            }
            (RegisterReply::Stands { record }, _) => Self::Stands(record),
            (RegisterReply::Failed { .. }, _) => Self::Unreachable,
            // A peer that answers a read with `Set` has returned no information.
            (RegisterReply::Set, RegisterRequest::Read { .. }) => Self::Unknown,
        }
    }
}

/// Meaning of a record for one migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
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
pub fn standing(terms: &Terms, record: Option<&Ownership>) -> Standing {
    let Some(record) = record else { return Standing::Foreign };
    if record.epoch > terms.epoch() {
        // A third host has it by a migration of this one's source, or by a false claim: the registry does not show
        // which. The source does, when it is asked.
        let ours = record.owner == terms.source || record.owner == terms.destination;
        if ours { Standing::MovedOn } else { Standing::Foreign }
    } else if record.epoch == terms.epoch() {
        match &record.owner {
            owner if *owner == terms.destination => Standing::Destination,
            owner if *owner == terms.source => Standing::Source,
            _ => Standing::Foreign,
        }
    } else if record.owner == terms.source {
        Standing::Open { since: record.epoch, offer: record.offer.as_deref().cloned() }
    } else {
        Standing::Foreign
    }
}

/// Purpose of a request to the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Read the record.
    Read,
    /// Record COMMITTED for a destination that cannot ask. Best effort.
    Offer,
    /// Acquire ownership of the VM in this epoch.
    Take,
    /// Make sure that the source owns the VM in this epoch, so that the destination never can.
    GiveBack,
}

impl Use {
    /// Returns the effect's name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read-register",
            Self::Offer => "offer-in-register",
            Self::Take => "take-ownership",
            Self::GiveBack => "give-back-ownership",
        }
    }
}

/// Returns the request that enters a VM, which the registry does not know yet, with its owner. For adoption, not for a
/// migration.
pub fn enrol(vm: VmName, epoch: Epoch, owner: HostId) -> RegisterRequest {
    RegisterRequest::CompareAndSet {
        vm,
        expected: None,
        new: Ownership { epoch, owner, offer: None, released: false },
    }
}

/// Returns the request for the record.
pub fn read(terms: &Terms) -> RegisterRequest {
    RegisterRequest::Read { vm: terms.migration.vm.clone() }
}

/// Returns the request (since, source) → (since, source) with an offer.
pub fn offer(terms: &Terms, since: Epoch, incarnation: &Incarnation, run: bool) -> RegisterRequest {
    let offer = Offer { epoch: terms.epoch(), incarnation: incarnation.clone(), run };
    change(terms, (since, &terms.source), (since, &terms.source), Some(offer))
}

/// Returns the request (since, source) → (e, destination).
pub fn take_by_destination(terms: &Terms, since: Epoch) -> RegisterRequest {
    change(terms, (since, &terms.source), (terms.epoch(), &terms.destination), None)
}

/// Returns the request (since, source) → (e, source).
pub fn take_by_source(terms: &Terms, since: Epoch) -> RegisterRequest {
    change(terms, (since, &terms.source), (terms.epoch(), &terms.source), None)
}

/// Returns the request (e, destination) → (e, source), which the destination makes to return the VM, and an operator
/// to force that.
pub fn give_back(terms: &Terms) -> RegisterRequest {
    change(terms, (terms.epoch(), &terms.destination), (terms.epoch(), &terms.source), None)
}

fn change(
    terms: &Terms,
    from: (Epoch, &HostId),
    to: (Epoch, &HostId),
    offer: Option<Offer>,
) -> RegisterRequest {
    RegisterRequest::CompareAndSet {
        vm: terms.migration.vm.clone(),
        expected: Some((from.0, from.1.clone())),
        new: Ownership { epoch: to.0, owner: to.1.clone(), offer: offer.map(Box::new), released: false },
    }
}
