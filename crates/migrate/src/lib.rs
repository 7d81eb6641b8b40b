//! Drivers of a migration, one for each role: they carry out what the engine decides.

mod clock;
pub mod destination;
mod device_state;
mod repeated_announcement;
pub mod source;
mod state_machine;
pub mod unexpected_page;

use proto::MigrationId;
use tracing::warn;

pub(crate) use api::with_causes as chain;

/// Warns that a peer asks about a migration that this host should have recorded.
fn warn_not_in_journal(id: &MigrationId) {
    warn!(migration = %id, "received a query about a migration that is not in the journal; is it the right journal?");
}
