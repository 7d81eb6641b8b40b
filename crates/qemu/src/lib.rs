//! QEMU from outside: talking to it, finding it, describing it, starting another one like it.
//!
//! Nothing here changes QEMU or needs it to be built or started in a special way. The crate stands
//! alone: it knows no other crate of the project, opens no connection to a peer, and injects
//! nothing. It reads `/proc`, speaks QMP, and starts processes.
//!
//! In the order in which a migration needs them:
//!
//! | module | for |
//! |---|---|
//! | [`find`] | which QEMUs run here, which monitor of theirs is free |
//! | [`qmp`] | commands, events, deadlines |
//! | [`describe`] | what the guest is now: the command line as it would have to be today |
//! | [`ram`] | where its memory lies |
//! | [`guest_port`] | asking a program in the guest |
//! | [`preflight`] | whether it can be moved |
//! | [`command`] | the command line on the other host |
//! | [`process`] | starting that |
//! | [`tree`] | whether both show the guest the same devices |
//! | [`drives`] | whether these still have the same disks |
//! | [`control`] | drain, stop, continue, announce |
//! | [`recording`] | which blocks of its disks are written, and what is in them |
//! | [`device_state`] | taking the devices' state out of one and into the other |
//!
//! [`cmdline`] and [`options`] read QEMU's options; [`vmfile`] is for guests that the agent starts
//! itself.

pub mod cmdline;
pub mod command;
pub mod control;
pub mod describe;
pub mod device_state;
pub mod drives;
pub mod find;
pub mod guest_port;
mod maps;
pub mod options;
pub mod preflight;
pub mod process;
pub mod qmp;
pub mod queues;
pub mod ram;
pub mod recording;
pub mod tree;
pub mod units;
pub mod vmfile;
