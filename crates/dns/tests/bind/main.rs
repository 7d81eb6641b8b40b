//! Names of VMs in zones of real servers (BIND 9), in the network namespaces of a laboratory: needs root and `named`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod checking;
mod failing;
mod moving;
mod relay;
mod servers;
