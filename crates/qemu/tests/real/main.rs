//! Tests on real QEMUs; see `support` for which.

mod ram;
mod support;
