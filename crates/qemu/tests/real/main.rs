//! Tests on real QEMUs; see `support` for which.

mod handover;
mod ram;
mod support;
