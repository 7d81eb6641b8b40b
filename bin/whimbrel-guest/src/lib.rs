//! Inside a guest: which of its memory need not be sent when it is moved (*soft pages*; Koto et al.,
//! `SonicMigration`, section 3).
//!
//! | module | does |
//! |---|---|
//! | [`protocol`] | what is asked and answered over a port of virtio-serial |
//! | [`pages`] | what each page of memory is used for, as the kernel tells |
//! | [`give_back`] | makes the kernel give its page cache back |
//! | [`port`] | finds the port, and answers until it is gone |
//!
//! The program decides nothing. It tells what is so when it is asked; whoever asked knows what was written since then.

pub mod give_back;
pub mod pages;
pub mod port;
pub mod protocol;
