//! Migrations during which the link is cut, at random moments.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use lab::Direction;
use serde_json::Value;

use super::draw::{Generator, seed};
use super::{Cluster, has_event};

/// The longest cut.
const LONGEST_CUT: Duration = Duration::from_secs(3);

/// Interval of checks of the sent bytes.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Cuts of one migration after the other.
pub struct Cuts {
    draw: Generator,
    /// Bytes that a migration sends, as the last one did: unknown before the first, which is cut near its beginning.
    bytes_of_a_move: u64,
    /// Migrations whose link was cut before they had ended.
    pub made: usize,
}

impl Cuts {
    pub fn new(usual_seed: u64) -> Self {
        let seed = seed(usual_seed);
        println!("cuts drawn with WHIMBREL_SEED={seed}");
        Self { draw: Generator(seed), bytes_of_a_move: 1 << 20, made: 0 }
    }
}

/// Records the end of a migration, also of a failed one.
struct EndMark<'a>(&'a AtomicBool);

impl Drop for EndMark<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

impl Cluster {
    /// Migrates a VM as [`Cluster::migrate`] does. At some moment, possibly during its handover, the link is cut in one
    /// direction or in both, and healed.
    #[track_caller]
    pub fn migrate_through_any_cut(
        &self,
        vm: &str,
        from: &str,
        to: &str,
        more: &[&str],
        cuts: &mut Cuts,
    ) -> Value {
        let there = if from == "a" { Direction::AToB } else { Direction::BToA };
        let before = self.lab.sent_bytes(there).unwrap();
        let at = before + cuts.draw.below(cuts.bytes_of_a_move as usize) as u64;
        let which: &[Direction] =
            [&[Direction::AToB, Direction::BToA][..], &[Direction::AToB], &[Direction::BToA]]
                [cuts.draw.below(3)];
        let length = Duration::from_millis(cuts.draw.below(LONGEST_CUT.as_millis() as usize) as u64);
        let is_over = AtomicBool::new(false);
        let lab = &self.lab;
        let (mut report, is_cut) = thread::scope(|scope| {
            let cutter = scope.spawn(|| {
                while lab.sent_bytes(there).unwrap() < at {
                    if is_over.load(Relaxed) {
                        return false;
                    }
                    thread::sleep(CHECK_INTERVAL);
                }
                for direction in which {
                    lab.cut(*direction).unwrap();
                }
                // Duration of a fault; there is no event to wait for.
                thread::sleep(length);
                lab.heal().unwrap();
                true
            });
            let over = EndMark(&is_over);
            let words = [&["migrate", vm, "--to", to, "--verify", "--on-limit", "stop"], more].concat();
            let output = self.agent(from).cli(&words);
            drop(over);
            (output.last_json(), cutter.join().unwrap())
        });
        cuts.made += usize::from(is_cut);
        cuts.bytes_of_a_move = self.lab.sent_bytes(there).unwrap() - before;
        println!(
            "{vm} to {to}: cut {which:?} for {length:?} after {} of {} bytes: {is_cut}, {} reconnections",
            at - before,
            cuts.bytes_of_a_move,
            report["reconnections"]
        );
        // Before a byte has been sent, and while the guest is stopped, the migration does not wait for a link: the
        // guest continues at the source, and is migrated once more.
        let is_underway = has_event(&report, "accepted") && !has_event(&report, "stopped");
        if is_cut && report["outcome"] == "aborted" && !is_underway {
            println!("{vm} goes on where it is: {}", report["reason"]);
            self.agent(from).wait_settled();
            self.agent(to).wait_settled();
            report = self.migrate(vm, from, to, more);
        }
        self.assert_moved(from, &report);
        report
    }
}
