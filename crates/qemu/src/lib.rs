//! QEMU from outside: monitor connection, search, description, and start of an equal QEMU.
//!
//! This crate does not change QEMU and does not need a special build or start of QEMU. It uses no
//! other crate of the project, opens no connection to a peer, and injects nothing. It reads
//! `/proc`, speaks QMP, and starts processes.
//!
//! In the order in which a migration needs them:
//!
//! | module | for |
//! |---|---|
//! | [`find`] | QEMUs of this host, and which of their monitors is free |
//! | [`qmp`] | commands, events, deadlines |
//! | [`describe`] | current state of the guest: the command line that would start it so today |
//! | [`ram`] | addresses of its memory |
//! | [`guest_port`] | queries to a program in the guest |
//! | [`preflight`] | check whether it can be moved |
//! | [`command`] | the command line on the other host |
//! | [`process`] | start of that QEMU |
//! | [`tree`] | check that both show the guest the same devices |
//! | [`drives`] | check that the devices still have the same disks |
//! | [`control`] | drain, stop, continue, announce |
//! | [`nics`] | the guest's network cards, and the taps behind them |
//! | [`recording`] | record of written blocks of its disks, and their contents |
//! | [`device_state`] | save of the device state, and load into the other QEMU |
//!
//! [`cmdline`] and [`options`] parse QEMU's options; [`vmfile`] is for guests that the agent starts
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
pub mod nics;
pub mod options;
pub mod preflight;
pub mod process;
pub mod qmp;
pub mod queues;
pub mod ram;
pub mod recording;
pub mod restart_units;
pub mod tree;
pub mod vmfile;
