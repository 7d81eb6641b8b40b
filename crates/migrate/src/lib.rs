//! Drivers of a migration, one for each role: they carry out what the engine decides.

mod clock;
pub mod destination;
mod device_state;
mod repeated_announcement;
pub mod source;
mod state_machine;
pub mod unexpected_page;

pub(crate) use api::with_causes as chain;
