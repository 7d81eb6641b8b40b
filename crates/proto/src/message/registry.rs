//! Records of the ownership registry, and the requests to it.

use serde::{Deserialize, Serialize};

use crate::ids::{Epoch, HostId, Incarnation, VmName};

/// Record of a VM's owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ownership {
    /// The epoch in which the owner became the owner.
    pub epoch: Epoch,
    /// The host that may run the VM.
    pub owner: HostId,
    /// COMMITTED of the next epoch, recorded by the owner for a destination that cannot ask it any more.
    pub offer: Option<Box<Offer>>,
    /// True if the owner has released the VM: it has ended there and was forgotten, and another host that has a VM of
    /// this name may become its owner. The flag has no meaning for a migration in progress.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub released: bool,
}

/// A COMMITTED, recorded in the registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Offer {
    /// The migration.
    pub epoch: Epoch,
    /// The process that is to run.
    pub incarnation: Incarnation,
    /// True if the guest is to run.
    pub run: bool,
}

/// Request to the ownership registry. Every change compares first, and the answer contains the record that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum RegistryRequest {
    /// Returns the record.
    Read {
        /// The VM.
        vm: VmName,
    },
    /// Replaces `expected` with `new`.
    CompareAndSet {
        /// The VM.
        vm: VmName,
        /// Expected owner and its epoch; the offer is not compared.
        expected: Option<(Epoch, HostId)>,
        /// The new record.
        new: Ownership,
    },
}

/// Answer of the ownership registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum RegistryReply {
    /// Present record, for a read and for a comparison that failed.
    Record {
        /// The record.
        record: Option<Ownership>,
    },
    /// The new record is stored.
    Set,
    /// The request failed; nothing changed.
    Failed {
        /// Reason.
        reason: String,
    },
}
