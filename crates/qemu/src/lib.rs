//! QEMU from outside: talking to it, finding it, describing it, starting another one like it.
pub mod cmdline;
pub mod command;
pub mod control;
pub mod describe;
pub mod device_state;
pub mod find;
mod maps;
pub mod options;
pub mod preflight;
pub mod process;
pub mod qmp;
pub mod ram;
pub mod tree;
pub mod vmfile;
