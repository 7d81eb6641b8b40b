//! The part inside a guest that finds the memory that need not be sent in a migration (*soft pages*; Koto et al.,
//! `SonicMigration`, section 3).
//!
//! | module | does |
//! |---|---|
//! | [`protocol`] | requests and answers over a port of virtio-serial |
//! | [`pages`] | use of each page of memory, from the kernel |
//! | [`give_back`] | makes the kernel reclaim its page cache |
//! | [`port`] | finds the port, and answers until it is gone |
//!
//! The program decides nothing. It reports the present state on request; the agent knows the pages written since then.

pub mod give_back;
pub mod pages;
pub mod port;
pub mod protocol;
