//! Durable records: the journal of this host's VMs and migrations, and the registry of which host owns which VM.

pub mod journal;
mod private;
pub mod registry;
