//! Bad input gets a clear error and changes nothing: requests that name nothing, peers that cannot be trusted, noise at
//! the port, hosts without room, VMs that another program works on. After each, the guest keeps running at its source,
//! nothing is left at the destination, and no descriptor is left in its QEMU. Needs root.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::needless_pass_by_value,
    clippy::unnecessary_debug_formatting,
    clippy::unreadable_literal,
    reason = "a test may fail"
)]

#[path = "../common/mod.rs"]
mod common;
mod noise;
mod occupied;
mod peers;
mod requests;
mod room;
mod stranger;
mod watched;

use std::thread;
use std::time::{Duration, Instant};

use common::{CommandOutput, DEADLINE};

/// Asserts that the program failed with this exit code, and with these words, which name the object and give advice.
#[track_caller]
fn assert_fails(output: &CommandOutput, code: i32, words: &[&str]) {
    assert_eq!(output.code, code, "{words:?}: {output:#?}");
    let text = format!("{}{}", output.stdout, output.stderr);
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {output:#?}");
    }
}

/// Waits until an event has happened by itself.
#[track_caller]
fn eventually(what: &str, mut happened: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + DEADLINE;
    while let Err(how) = happened() {
        assert!(Instant::now() < deadline, "{what}: {how}");
        thread::sleep(Duration::from_millis(20));
    }
}
