//! The ownership registry: which host owns which VM, kept where neither of the two can lose it.
//!
//! A request's effect is [`engine::handover::registry::apply`], a pure function; this module stores the records and
//! makes them accessible:
//!
//! - [`SqliteRegistry`]: a database. Comparing and setting are one synced transaction.
//! - [`WitnessServer`]: serves one to other agents. The witness runs no VMs of those whose owners it records.
//! - [`WitnessClient`]: asks a witness over the network.
//!
//! # Unknown is an answer
//!
//! A request that was sent and not answered may have been carried out. The result is then [`RegistryAnswer::Unknown`],
//! never a failure; the engine reads again before it does anything. Only if no complete request can have reached the
//! registry is the answer [`RegistryAnswer::Unreachable`].

mod sqlite;
mod witness;

use engine::handover::registry::RegistryAnswer;
use proto::message::{Ownership, RegistryRequest};
use proto::{Epoch, HostId, VmName};

pub use sqlite::{RegistryError, SqliteRegistry};
pub use witness::{WitnessClient, WitnessServer};

/// A store of owners. Calls block; they end within the time-outs that it was made with.
pub trait Registry: Send + Sync {
    /// Sends a request, and returns what is known afterwards.
    fn ask(&self, request: &RegistryRequest) -> RegistryAnswer;

    /// Reads the record of a VM.
    fn read(&self, vm: &VmName) -> RegistryAnswer {
        self.ask(&RegistryRequest::Read { vm: vm.clone() })
    }

    /// Puts `new` in place of `expected`.
    fn compare_and_set(
        &self,
        vm: &VmName,
        expected: Option<(Epoch, HostId)>,
        new: Ownership,
    ) -> RegistryAnswer {
        self.ask(&RegistryRequest::CompareAndSet { vm: vm.clone(), expected, new })
    }
}

#[cfg(test)]
mod tests;
