//! QEMU from outside: talking to it, finding it, describing it, starting another one like it.
pub mod control;
pub mod device_state;
mod maps;
pub mod process;
pub mod qmp;
pub mod ram;
