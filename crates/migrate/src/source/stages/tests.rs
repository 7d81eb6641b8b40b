//! Each way back returns what its stage owns; nothing of it ends by itself.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use ::memory::{BlockReader, RamError, SourceRam};
use link::RateLimit;

use super::*;
use crate::source::telemetry::Telemetry;
use api::progress::Publisher;

/// Names of the parts that have ended, in their order.
#[derive(Clone, Default)]
struct Ends(Arc<Mutex<Vec<&'static str>>>);

impl Ends {
    /// Returns the parts that have ended since the last call.
    fn take(&self) -> Vec<&'static str> {
        mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn block(&self, part: &'static str) -> Box<dyn BlockReader> {
        Box::new(Block { part, ends: self.clone() })
    }

    /// Returns the stage of a stopped guest, of whose memory pages are sent later if `is_served`.
    fn stopped(&self, is_served: bool) -> Stopped {
        let (mut stopped, _) = self.accepted().stream().stop();
        stopped.server = is_served.then(|| self.server());
        stopped
    }

    fn accepted(&self) -> Accepted {
        Proposed::default().accept(Payload::new(vec![self.block("payload")], 1))
    }

    fn server(&self) -> PostCopyServer {
        let readers: SourceRam = [self.block("server")].into();
        let telemetry = Telemetry::new(Publisher::new(), Instant::now());
        let rate = Arc::new(RateLimit::new(None));
        PostCopyServer::new(readers, RecentWrites::default(), telemetry.remaining(), rate)
    }
}

/// A block of a part, which records the part's end.
struct Block {
    part: &'static str,
    ends: Ends,
}

impl BlockReader for Block {
    fn name(&self) -> &str {
        self.part
    }

    fn bytes(&self) -> u64 {
        0
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), RamError> {
        Ok(())
    }

    fn first_present(&self, range: Range<u64>) -> Result<u64, RamError> {
        Ok(range.start)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.ends.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.part);
    }
}

const NONE: [&str; 0] = [];

#[test]
fn a_proposal_leaves_nothing_to_undo() {
    let RolledBack { server, payload, .. } = Proposed::default().roll_back();
    assert!(server.is_none() && payload.is_none());
}

#[test]
fn a_failure_before_the_stop_returns_the_payload() {
    let ends = Ends::default();
    let ways_back: [fn(Accepted) -> RolledBack; 2] =
        [Accepted::roll_back, |accepted| accepted.stream().roll_back()];
    for roll_back in ways_back {
        let rolled_back = roll_back(ends.accepted());
        assert_eq!(ends.take(), NONE, "the guest continues first");
        let mut stage = SourceStage::RolledBack(rolled_back);
        stage.roll_back().end();
        assert_eq!(ends.take(), ["payload"]);
        assert!(matches!(stage, SourceStage::Initial));
    }
}

#[test]
fn a_failure_after_the_stop_ends_the_server_first() {
    let ends = Ends::default();
    for (is_served, expected) in [(false, &["payload"][..]), (true, &["server", "payload"][..])] {
        let mut stage = SourceStage::Stopped(ends.stopped(is_served));
        assert_eq!(stage.server().is_some(), is_served);
        let rolled_back = stage.roll_back();
        assert_eq!(ends.take(), NONE, "the guest continues first");
        assert!(stage.server().is_none());
        rolled_back.end();
        assert_eq!(ends.take(), expected);
    }
}

#[test]
fn a_vm_that_is_returned_ends_the_server_first() {
    let ends = Ends::default();
    for (is_served, expected) in [(false, &["payload"][..]), (true, &["server", "payload"][..])] {
        let mut stage = SourceStage::Stopped(ends.stopped(is_served));
        stage.commit();
        assert!(matches!(
            (is_served, &stage),
            (false, SourceStage::Committed(_)) | (true, SourceStage::Serving(_))
        ));
        assert_eq!(stage.server_mut().is_some(), is_served);
        // COMMITTED may be written again, for example after the registry was asked.
        stage.commit();
        stage.roll_back().end();
        assert_eq!(ends.take(), expected);
    }
}

#[test]
fn the_payload_outlives_the_server_of_a_vm_that_has_left() {
    let ends = Ends::default();
    let mut stage = SourceStage::Stopped(ends.stopped(true));
    stage.commit();
    stage.end_serving();
    assert_eq!(ends.take(), ["server"]);
    let committed = stage.finish().unwrap();
    assert_eq!(ends.take(), NONE);
    assert!(committed.references().is_none(), "no references were sent");
    drop(committed);
    assert_eq!(ends.take(), ["payload"]);
}

/// QEMU may be lost before COMMITTED, while the destination has all of the guest.
#[test]
fn a_vm_that_left_without_commit_settles_like_another() {
    let ends = Ends::default();
    let mut stage = SourceStage::Stopped(ends.stopped(true));
    stage.end_serving();
    assert_eq!(ends.take(), ["server"]);
    assert!(matches!(&stage, SourceStage::Stopped(stopped) if stopped.server.is_none()));
    assert!(stage.finish().is_some());
    assert_eq!(ends.take(), ["payload"]);
}

#[test]
fn an_agent_that_goes_on_serving_owns_the_server_alone() {
    let ends = Ends::default();
    let mut stage = SourceStage::Unread(Vec::new());
    assert!(stage.server().is_none());
    assert!(stage.take_unread().is_some());
    assert!(matches!(stage, SourceStage::Initial), "it is read once");
    stage = SourceStage::resumed(ends.server());
    assert!(stage.take_unread().is_none());
    assert!(stage.server().is_some(), "the stage stays");
    stage.roll_back().end();
    assert_eq!(ends.take(), ["server"]);
    stage = SourceStage::resumed(ends.server());
    stage.end_serving();
    assert_eq!(ends.take(), ["server"]);
    assert!(stage.finish().is_none());
}

#[test]
fn the_result_of_undoing_stays_until_the_end() {
    let mut stage = SourceStage::Undone(vec!["the throttle stays"]);
    assert!(stage.finish().is_none());
    assert_eq!(stage.remaining(), ["the throttle stays"]);
    // Undoing again has nothing more to end.
    let RolledBack { server, payload, .. } = stage.roll_back();
    assert!(server.is_none() && payload.is_none());
    assert!(stage.remaining().is_empty());
}
