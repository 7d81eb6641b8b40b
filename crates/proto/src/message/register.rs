//! The register of owners: what stands in it, and what is said to it.

use serde::{Deserialize, Serialize};

use crate::ids::{Epoch, HostId, Incarnation, VmName};

/// Who owns a VM.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ownership {
    /// The epoch in which the owner took it.
    pub epoch: Epoch,
    /// The host that may run it.
    pub owner: HostId,
    /// The next epoch's COMMITTED, recorded by the owner for a destination that cannot ask it any more.
    pub offer: Option<Box<Offer>>,
    /// Whether the owner has let go of it: its VM has ended there and was forgotten, and another host that has a VM of
    /// this name may become its owner. To a migration under way it means nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub released: bool,
}

/// A COMMITTED, recorded in the register.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Offer {
    /// Which migration.
    pub epoch: Epoch,
    /// Which process is to run.
    pub incarnation: Incarnation,
    /// Whether the guest is to run on.
    pub run: bool,
}

/// To the register of owners. Every change compares first and says what it found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum RegisterRequest {
    /// What stands there?
    Read {
        /// Of which VM.
        vm: VmName,
    },
    /// Put `new` in place of `expected`.
    CompareAndSet {
        /// Of which VM.
        vm: VmName,
        /// What must stand there; the offer is not compared.
        expected: Option<(Epoch, HostId)>,
        /// What is to stand there.
        new: Ownership,
    },
}

/// From the register of owners.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum RegisterReply {
    /// What stands there, for a read and for a comparison that failed.
    Stands {
        /// The record.
        record: Option<Ownership>,
    },
    /// The new record stands.
    Set,
    /// The register could not do it; nothing changed.
    Failed {
        /// Why.
        reason: String,
    },
}
