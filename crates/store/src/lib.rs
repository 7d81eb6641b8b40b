//! Durable records: the journal of this host's VMs and migrations, the registry of which host owns which VM, and a
//! controller's records of its fleet.

pub mod fleet;
pub mod journal;
mod private;
pub mod registry;
