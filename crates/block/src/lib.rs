//! Disks of VMs, as far as no QEMU is asked about them: a client of the servers that read and write images, and what is
//! made for a disk that arrives.
//!
//! | module | is |
//! |---|---|
//! | [`nbd`] | the client's side of NBD |
//! | [`image`] | images that are made and filled |
//! | [`volume`] | logical volumes in which disks arrive |
//! | [`thin`] | thin pools of such volumes, and how a new thin volume is written |
//! | [`reading`] | images that are read, whoever else has them open |
//! | [`compare`] | whether two images have the same in them |
//!
//! Nothing here knows of a migration. Image formats are known to QEMU's own tools alone.

pub mod compare;
pub mod image;
pub mod nbd;
pub mod reading;
pub mod thin;
pub mod volume;
