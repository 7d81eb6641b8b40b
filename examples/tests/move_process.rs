//! The example `move_process` runs, and its second process goes on where the first one was stopped.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::process::Command;

/// The second process checks every word of its memory before it goes on.
#[test]
fn the_example_moves_a_process() {
    let run = Command::new(env!("CARGO_BIN_EXE_move_process")).output().unwrap();
    let printed = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{run:?}");
    assert!(printed.contains("checked every page"), "{printed}");
    let number_after = |words: &str| -> u64 {
        let (_, rest) = printed.split_once(words).unwrap();
        rest.split(|end: char| !end.is_ascii_digit()).next().unwrap().parse().unwrap()
    };
    assert_eq!(number_after("was stopped at step "), number_after("found step "), "{printed}");
}
