//! Disks of VMs, without access to a running QEMU: a client of the servers that read and write images, and the images
//! and volumes for arriving disks.
//!
//! | module | is |
//! |---|---|
//!  | [`nbd`] | NBD client |
//! | [`image`] | images that are created and filled |
//! | [`volume`] | logical volumes for arriving disks |
//! | [`thin`] | thin pools of such volumes, and writing to a new thin volume |
//! | [`reading`] | images that are read while other programs have them open |
//! | [`compare`] | comparison of two images |
//!
//! The crate does not depend on a migration. Only QEMU's own tools know image formats.

pub mod compare;
pub mod image;
pub mod nbd;
mod program;
pub mod reading;
pub mod thin;
pub mod volume;
