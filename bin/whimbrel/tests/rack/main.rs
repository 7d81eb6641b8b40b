//! Whole machines as hosts: what the namespaces of one kernel do not have (docs/rack.md). One smoke test runs always;
//! the others are those of `make rack`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod block_devices;
mod confined;
#[allow(unreachable_pub, reason = "other test programs have it as a part of a module")]
#[path = "../common/draw.rs"]
mod draw;
mod echo;
mod guest_events;
mod hotplug;
mod kvm;
mod memory;
mod power;
mod smoke;
mod storage;
mod support;
mod throttle;
mod tried;
mod tunnel;
mod units;
mod versions;
