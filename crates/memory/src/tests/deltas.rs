//! Pages that are sent again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fake_ram::{FakeRam, PAGE};
use super::pair::Pair;
use super::parts::Parts;
use crate::reductions::deltas::MARKS_BYTES;
use crate::{Deltas, OwedPages, RoundStats};

const PAGES: u64 = 1000;

/// A source full of pages that are all different, with room for marks of `marks_bytes` bytes, and marks of these bits.
fn full(marks_bytes: usize, bits: u16) -> (Pair, OwedPages, Arc<Deltas>) {
    let source = FakeRam::new(&[PAGES]);
    for page in 0..PAGES {
        source.0[0].guest_fills(page, &std::array::from_fn(|at| (page as usize * 7 + at * at) as u8 | 1));
    }
    let deltas = Arc::new(Deltas::with_bits(1, marks_bytes, bits));
    deltas.set(true);
    let owed = source.everything();
    let saving = Parts { deltas: Some(Arc::clone(&deltas)), ..Parts::default() };
    (Pair::new(source, &saving, Vec::new()), owed, deltas)
}

const ALL: usize = (PAGES as usize + 10) * MARKS_BYTES;

/// Sends everything once.
fn sent_once(marks_bytes: usize, bits: u16) -> (Pair, OwedPages, Arc<Deltas>) {
    let (pair, owed, deltas) = full(marks_bytes, bits);
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((stats.contents.data, stats.contents.delta), (PAGES, 0));
    (pair, owed, deltas)
}

fn counts(stats: &RoundStats) -> (u64, u64, u64) {
    (stats.contents.data, stats.contents.delta, stats.refused_pages)
}

#[test]
fn what_changed_is_sent() {
    let (pair, owed, deltas) = sent_once(ALL, u16::MAX);
    for page in 0..PAGES {
        pair.source.0[0].guest_writes(page, page, (page * 61 % 4096) as usize);
    }
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((counts(&stats), owed.pages()), ((0, PAGES, 0), 0));
    // A head and a piece or two of each page.
    assert!(stats.wire_bytes < PAGES * 120, "{stats:?}");
    assert!(pair.is_equal());
    let counted = deltas.count();
    assert_eq!(counted.pages, PAGES);
    assert!(counted.bytes < stats.wire_bytes && counted.bytes >= PAGES * 80, "{counted:?}");
    // Some pages are rewritten with their old content, others with another content in each piece.
    let contents = pair.source.0[0].contents(3).unwrap();
    pair.source.0[0].guest_fills(3, &contents);
    pair.source.0[0].guest_fills(9, &contents.map(|byte| byte ^ 1));
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((counts(&stats), owed.pages()), ((1, 1, 0), 0));
    assert!(stats.wire_bytes < PAGE as u64 + 200 && pair.is_equal(), "{stats:?}");
}

#[test]
fn pages_that_were_holes_meanwhile_are_sent_in_full() {
    let (pair, owed, _) = sent_once(ALL, u16::MAX);
    pair.source.0[0].guest_zeroes(7);
    pair.source.0[0].is_punched(8);
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((stats.contents.zero + stats.contents.hole, counts(&stats)), (2, (0, 0, 0)));
    (6..10).for_each(|page| pair.source.0[0].guest_writes(page, 3, 0));
    let (pair, _, stats) = pair.round(owed);
    assert_eq!(counts(&stats), (2, 2, 0));
    assert!(pair.is_equal());
}

/// Different pieces with the same mark: the destination refuses the page, and receives it in full.
#[test]
fn wrong_deltas_are_refused() {
    let (pair, owed, deltas) = sent_once(ALL, 0);
    (0..PAGES).for_each(|page| pair.source.0[0].guest_writes(page, page, 8));
    let before = pair.destination.0[0].contents(5);
    let (pair, owed, stats) = pair.round(owed);
    // Some were rewritten with their old content.
    let refused = stats.refused_pages;
    assert!(refused > PAGES / 2 && counts(&stats) == (0, PAGES, refused), "{stats:?}");
    assert_eq!((owed.pages(), deltas.count().pages), (refused, PAGES - refused));
    assert!(pair.destination.0[0].contents(5) == before && !pair.is_equal());
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((counts(&stats), owed.pages()), ((refused, 0, 0), 0));
    assert!(pair.is_equal());
}

/// The destination has other content than was assumed, in pages here and there of a run.
#[test]
fn what_the_destination_has_lost_is_sent_in_full() {
    let (pair, owed, _) = sent_once(ALL, u16::MAX);
    for page in [0, 5, 6, 511, 512, 999] {
        pair.destination.0[0].guest_writes(page, 1, 4000);
    }
    (0..PAGES).for_each(|page| pair.source.0[0].guest_writes(page, page, 8));
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((counts(&stats), owed.pages()), ((0, PAGES, 6), 6));
    let (pair, _, stats) = pair.round(owed);
    assert_eq!(counts(&stats), (6, 0, 0));
    assert!(pair.is_equal());
}

#[test]
fn stopped_guest_gets_deltas_and_full_pages_in_the_last_round() {
    let (pair, owed, deltas) = sent_once(ALL, 1);
    (0..PAGES).for_each(|page| pair.source.0[0].guest_writes(page, page, 8));
    let deadline = Instant::now() + Duration::from_mins(1);
    let readable = owed.clear_marks(&mut pair.source.log()).unwrap().skip_drain();
    let sent = pair.sender.send_round_by(readable, deadline).unwrap();
    assert!(sent.stats.contents.delta == PAGES && sent.stats.refused_pages > 0, "{:?}", sent.stats);
    deltas.end();
    let readable = sent.owed.clear_marks(&mut pair.source.log()).unwrap().skip_drain();
    let last = sent.sender.send_round_by(readable, deadline).unwrap();
    assert_eq!(counts(&last.stats), (sent.stats.refused_pages, 0, 0));
    assert_eq!(last.owed.pages(), 0);
    assert!(pair.source.first_difference(&pair.destination).is_none());
}

#[test]
fn what_there_is_no_room_for_is_sent_in_full() {
    let (pair, owed, _) = sent_once(103 * MARKS_BYTES, u16::MAX);
    let write = |pair: &Pair, pages: std::ops::Range<u64>| {
        pages.for_each(|page| pair.source.0[0].guest_writes(page, page, 8));
    };
    write(&pair, 0..200);
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!(counts(&stats), (100, 100, 0));
    // Pages that are not written make room for those that are.
    write(&pair, 900..950);
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!(counts(&stats), (50, 0, 0));
    write(&pair, 900..950);
    let (pair, _, stats) = pair.round(owed);
    assert_eq!(counts(&stats), (0, 50, 0));
    assert!(pair.is_equal());
}
