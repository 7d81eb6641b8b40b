//! The register of owners: which host has which VM, kept where neither of the two can lose it.
//!
//! What a request does is [`engine::handover::register::apply`], a pure function; here is where the records lie and how
//! they are reached:
//!
//! - [`SqliteRegister`]: a database. Comparing and setting are one synced transaction.
//! - [`WitnessServer`]: serves one to other agents. The witness runs no VMs of those whose owners it records.
//! - [`WitnessClient`]: asks a witness over the network.
//!
//! # Unknown is an answer
//!
//! A request that was sent and not answered may have been carried out. That is told as
//! [`RegisterAnswer::Unknown`], never as a failure; the engine reads again before it does anything. Only when no
//! complete request can have reached the register is the answer [`RegisterAnswer::Unreachable`].

mod sqlite;
mod witness;

use engine::handover::register::RegisterAnswer;
use proto::message::{Ownership, RegisterRequest};
use proto::{Epoch, HostId, VmName};

pub use sqlite::{RegisterError, SqliteRegister};
pub use witness::{WitnessClient, WitnessServer};

/// Something that keeps owners. Calls block; they end within the time-outs that it was made with.
pub trait Register: Send + Sync {
    /// Asks, and says what is known afterwards.
    fn ask(&self, request: &RegisterRequest) -> RegisterAnswer;

    /// What stands there?
    fn read(&self, vm: &VmName) -> RegisterAnswer {
        self.ask(&RegisterRequest::Read { vm: vm.clone() })
    }

    /// Puts `new` in place of `expected`.
    fn compare_and_set(
        &self,
        vm: &VmName,
        expected: Option<(Epoch, HostId)>,
        new: Ownership,
    ) -> RegisterAnswer {
        self.ask(&RegisterRequest::CompareAndSet { vm: vm.clone(), expected, new })
    }
}

#[cfg(test)]
mod tests;
