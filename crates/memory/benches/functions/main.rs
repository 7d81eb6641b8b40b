//! Sets of pages, the sender's loop over pages, the receiver's loop over frames.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for developers")]

#[path = "../../../../benches/harness.rs"]
mod harness;

mod bitmap;
mod receiver;
mod sender;

use harness::Benches;

fn main() {
    let mut benches = Benches::from_arguments();
    bitmap::cases(&mut benches);
    sender::cases(&mut benches);
    receiver::cases(&mut benches);
    benches.finish();
}
