//! Each way back returns what its stage owns, and each stage is left with what it owns alone.

use super::*;
use crate::destination::inbox::DestinationInbox;
use host::testing::{Peer, World, id};

/// Returns a stage in which pages are received, and the other end of its connection for page requests.
fn receiving(world: &World) -> (ArrivalStage, Peer) {
    let mailbox = DestinationInbox::new().mailbox();
    let pages = PageReceiver::placing(&world.context, id(1), 1, Vec::new(), mailbox);
    let mut stage = ArrivalStage::Receiving(Receiving::new(pages));
    let (here, there) = World::from_peer();
    assert!(stage.keep_page_stream(here).is_none(), "it is kept");
    (stage, there)
}

#[test]
fn an_abandoned_arrival_returns_its_pages_and_connection() {
    let world = World::new();
    let (mut stage, mut source) = receiving(&world);
    assert!(stage.pages().is_some() && stage.missing().is_none() && !stage.is_complete());
    let abandoned = stage.abandon();
    assert!(stage.pages().is_none(), "nothing writes to a copy that is discarded");
    let AbandonedArrival { missing, pages, page_stream } = &abandoned;
    assert!(missing.is_none() && pages.is_some() && page_stream.is_some());
    assert!(abandoned.end().is_none(), "no waits remain");
    source.receive_until_closed();
    let AbandonedArrival { missing, pages, page_stream } = stage.abandon();
    assert!(missing.is_none() && pages.is_none() && page_stream.is_none());
}

/// Threads of QEMU wait until it has ended: without the waits they would read zeros.
#[test]
fn the_waits_for_missing_pages_outlive_an_abandoned_arrival() {
    for is_placed in [false, true] {
        let world = World::new();
        let mailbox = DestinationInbox::new().mailbox();
        let missing = PostCopyReceiver::without_qemu(&mailbox);
        let (here, mut source) = World::from_peer();
        missing.attach(here, 0).unwrap();
        let pages = PageReceiver::placing(&world.context, id(1), 1, Vec::new(), mailbox);
        let mut stage = ArrivalStage::Placing(Placing { pages, missing });
        assert!(stage.pages().is_some() && stage.missing().is_some() && !stage.is_complete());
        if is_placed {
            stage.finish_placing().unwrap().end();
            assert!(stage.pages().is_none() && stage.missing().is_some());
        }
        let abandoned = stage.abandon();
        assert_eq!(abandoned.pages.is_some(), !is_placed);
        assert!(matches!(stage, ArrivalStage::Idle));
        let waits = abandoned.end().expect("the waits end here");
        source.receive_until_closed();
        assert_eq!(waits.remaining_pages(), 1);
    }
}

#[test]
fn a_stage_that_moves_on_is_taken_once() {
    let world = World::new();
    let (mut stage, mut source) = receiving(&world);
    assert!(stage.finish_placing().is_none(), "no pages are placed");
    let receiving = stage.take_receiving().unwrap();
    assert!(matches!(stage, ArrivalStage::Idle));
    assert!(stage.take_receiving().is_none());
    receiving.end();
    source.receive_until_closed();
    let (here, _) = World::from_peer();
    assert!(stage.keep_page_stream(here).is_some(), "nothing needs it");
}

#[test]
fn pages_that_an_earlier_agent_placed_leave_nothing_to_end() {
    let mut stage = ArrivalStage::FoundComplete;
    assert!(stage.is_complete());
    assert!(stage.take_receiving().is_none() && stage.finish_placing().is_none());
    assert!(stage.is_complete(), "the stage stays");
    assert!(stage.abandon().end().is_none());
    assert!(!stage.is_complete());
}

#[test]
fn what_a_discarded_copy_leaves_is_taken_once() {
    let left = Leftover { notice: "an image remains".to_owned(), remove: Box::new(|| true) };
    let mut stage = ArrivalStage::CopyDestroyed(vec![left]);
    assert_eq!(stage.take_leftovers().len(), 1);
    assert!(stage.take_leftovers().is_empty());
    assert!(matches!(stage, ArrivalStage::Idle));
}
