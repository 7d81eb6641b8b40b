//! The register of owners: ownership by compare-and-set on (VM, epoch).
//!
//! The register keeps one record for each VM. [`apply`] is all of its behaviour; the witness calls it inside a
//! transaction of its store. The other functions make the requests of the two roles and read the answers.
//!
//! With `e` the epoch of an attempt, a record takes these values and no others, so that a request that arrives late or
//! twice finds its comparison failed:
//!
//! ```text
//!                      destination takes
//!   (b < e, source) ─────────────────────────► (e, destination)
//!        │                                        │
//!        │ source reclaims, or                    │ destination gives back,
//!        │ destination shuts the door             │ or the operator's force
//!        └──────────────► (e, source) ◄───────────┘
//! ```
//!
//! `b` is the epoch in which the source holds the VM. Pre-flight reads it, so that nobody has to read while the guest
//! stands still; but it can grow until `e` is decided, when the destination of an older attempt, back from a reboot,
//! shuts the door for that attempt. Who finds another `b` in the answer compares with that one next.
//!
//! An *offer* beside (b, source) says that the source has journalled COMMITTED. It is a GO that a destination can read
//! when the source's host is gone.

use proto::message::{Offer, Ownership, RegisterReply, RegisterRequest};
use proto::{Epoch, HostId, Incarnation, VmName};
use serde::{Deserialize, Serialize};

use super::Terms;

/// What the register does with a request: the reply, and the record to store where it changes.
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

/// What an agent knows after it has asked the register.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegisterAnswer {
    /// This record stands.
    Stands(Option<Ownership>),
    /// The request was not carried out: no connection, or the register said so.
    Unreachable,
    /// The request was sent and no answer came: it may have been carried out.
    Unknown,
}

impl RegisterAnswer {
    /// What a reply to a request tells.
    pub fn from_reply(request: &RegisterRequest, reply: RegisterReply) -> Self {
        match (reply, request) {
            (RegisterReply::Set, RegisterRequest::CompareAndSet { new, .. }) => {
                Self::Stands(Some(new.clone()))
            }
            (RegisterReply::Stands { record }, _) => Self::Stands(record),
            (RegisterReply::Failed { .. }, _) => Self::Unreachable,
            // A peer that answers a read with `Set` has told nothing.
            (RegisterReply::Set, RegisterRequest::Read { .. }) => Self::Unknown,
        }
    }
}

/// What a record means for one migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has taken this epoch.
    Open {
        /// The epoch in which the source holds the VM.
        since: Epoch,
        /// What the source has offered.
        offer: Option<Offer>,
    },
    /// The destination took this epoch.
    Destination,
    /// The source has this epoch: the destination can take it no more.
    Source,
    /// A later epoch stands with one of the two: this one was decided long ago, for the destination or not.
    MovedOn,
    /// No record, or one that none of this migration's requests leads to. Wait, and tell the operator.
    Foreign,
}

/// Reads a record.
pub fn standing(terms: &Terms, record: Option<&Ownership>) -> Standing {
    let Some(record) = record else { return Standing::Foreign };
    if record.epoch > terms.epoch() {
        // A third host has it by a migration of this one's source, or by a lie: the register does not tell. The source
        // does, when it is asked.
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

/// Why the register is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// To know what stands there.
    Read,
    /// To record COMMITTED for a destination that cannot ask. Best effort.
    Offer,
    /// To own the VM in this epoch.
    Take,
    /// To make sure that the source owns the VM in this epoch, so that the destination never can.
    GiveBack,
}

impl Use {
    /// The effect's name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read-register",
            Self::Offer => "offer-in-register",
            Self::Take => "take-ownership",
            Self::GiveBack => "give-back-ownership",
        }
    }
}

/// Enters a VM that the register does not know yet, as owned by a host. For adoption, not for a migration.
pub fn enrol(vm: VmName, epoch: Epoch, owner: HostId) -> RegisterRequest {
    RegisterRequest::CompareAndSet {
        vm,
        expected: None,
        new: Ownership { epoch, owner, offer: None, released: false },
    }
}

/// Asks what stands.
pub fn read(terms: &Terms) -> RegisterRequest {
    RegisterRequest::Read { vm: terms.migration.vm.clone() }
}

/// (since, source) → (since, source) with an offer.
pub fn offer(terms: &Terms, since: Epoch, incarnation: &Incarnation, run: bool) -> RegisterRequest {
    let offer = Offer { epoch: terms.epoch(), incarnation: incarnation.clone(), run };
    change(terms, (since, &terms.source), (since, &terms.source), Some(offer))
}

/// (since, source) → (e, destination).
pub fn take_by_destination(terms: &Terms, since: Epoch) -> RegisterRequest {
    change(terms, (since, &terms.source), (terms.epoch(), &terms.destination), None)
}

/// (since, source) → (e, source).
pub fn take_by_source(terms: &Terms, since: Epoch) -> RegisterRequest {
    change(terms, (since, &terms.source), (terms.epoch(), &terms.source), None)
}

/// (e, destination) → (e, source). The destination's to give back, and the operator's to force.
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
