//! Tests on real QEMUs; see `support` for which.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod describe;
mod handover;
mod images;
mod life;
mod ram;
mod rebuilt;
mod recording;
mod support;
