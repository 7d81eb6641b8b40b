//! Whole machines as hosts: what the namespaces of one kernel do not have (docs/rack.md). A smoke test: what
//! all others will stand on works.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod echo;
mod smoke;
mod support;
