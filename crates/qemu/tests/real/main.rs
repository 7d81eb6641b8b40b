//! Tests on real QEMUs; see `support` for which.

mod describe;
mod handover;
mod ram;
mod support;
