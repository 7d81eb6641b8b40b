//! Pages that the destination has already.

use std::sync::{Arc, Mutex};

use proto::frame::FrameKind;
use proto::limits::PAGE_BYTES;
use proto::pages::{Ack, PagesHeader};
use proto::reference::encode_missing;

use super::Dice;
use super::fake_ram::{FakeRam, PAGE, Page};
use super::fake_wire::{WHOLE, connection};
use super::pair::Pair;
use super::parts::Parts;
use crate::{
    ChunkPages, ContentHash, ContentIndex, Deltas, RamError, ReadablePages, SendError, Sender, Templates,
    lock,
};

/// Templates in vectors.
pub(super) struct FakeTemplates(pub(super) Vec<Mutex<Vec<Page>>>);

impl FakeTemplates {
    /// Creates two templates, of pages that the source has now, and their index: a tenth of it is wrong.
    pub(super) fn of(source: &FakeRam, dice: &mut Dice) -> (ContentIndex, Self) {
        let bytes = || source.0.iter().map(|block| block.pages.len() as u64 * PAGE_BYTES);
        let known = ContentIndex::new(bytes(), dice.below(2) as usize, 2000, 500);
        if dice.one_in(2) {
            known.enable_memory_lookup();
        }
        let template = |number| {
            let mut pages: Vec<Page> = Vec::new();
            for _ in 0..dice.below(20) {
                let (block, first) = source.any_page(dice);
                let run = (first..block.pages.len() as u64).take(dice.below(40) as usize);
                pages.extend(run.filter_map(|page| block.contents(page)));
            }
            known.learn(number, 0, pages.iter().map(|page| ContentHash::of(page)));
            pages.iter_mut().filter(|_| dice.one_in(10)).for_each(|page| page[7] ^= 1);
            Mutex::new(pages)
        };
        let templates = (0..2).map(template).collect();
        (known, Self(templates))
    }
}

impl Templates for FakeTemplates {
    fn read(&self, template: u16, first_page: u64, into: &mut [u8]) -> Result<(), RamError> {
        let pages = lock(&self.0[usize::from(template)]);
        for (page, into) in (first_page..).zip(into.chunks_exact_mut(PAGE)) {
            into.copy_from_slice(pages.get(page as usize).ok_or(RamError::Other("beyond the end".into()))?);
        }
        Ok(())
    }
}

pub(super) fn referring(known: Arc<ContentIndex>) -> Parts {
    Parts { known: Some(known), ..Parts::default() }
}

/// Pages that are all different, and all in a template, there three pages further on.
fn with_template(pages: u64) -> (FakeRam, ContentIndex, Vec<Page>) {
    let source = FakeRam::new(&[pages]);
    (0..pages).for_each(|page| source.0[0].guest_writes(page, page + 1, 0));
    let mut template = vec![[1; PAGE]; 3];
    template.extend((0..pages).map(|page| source.0[0].contents(page).unwrap()));
    let known = ContentIndex::new([pages * PAGE_BYTES], 0, pages as usize, 0);
    known.learn(0, 3, template[3..].iter().map(|page| ContentHash::of(page)));
    (source, known, template)
}

#[test]
fn what_is_in_a_template_is_not_sent() {
    let (source, known, template) = with_template(1000);
    source.0[0].guest_writes(77, 9, 8);
    let owed = source.everything();
    let (pair, owed, stats) = Pair::referring(source, known, template).round(owed);
    assert_eq!((stats.contents.reference, stats.contents.data, stats.refused_pages), (999, 1, 0));
    assert!(stats.wire_bytes < 2 * PAGE_BYTES, "{stats:?}");
    assert_eq!(owed.pages(), 0);
    assert!(pair.is_equal());
}

/// A template that was changed after its catalogue was made, and a missing one.
#[test]
fn pages_gone_from_a_template_are_sent_in_the_next_round() {
    for is_gone in [false, true] {
        let (source, known, mut template) = with_template(1000);
        if is_gone {
            template.clear();
        } else {
            template[503][0] ^= 1;
        }
        let owed = source.everything();
        let (pair, owed, stats) = Pair::referring(source, known, template).round(owed);
        assert_eq!(stats.contents.reference, 1000);
        assert!(stats.refused_pages > 0 && owed.pages() == stats.refused_pages, "{stats:?}");
        assert!(!pair.is_equal());
        let refused = owed.pages();
        let (pair, owed, stats) = pair.round(owed);
        assert_eq!((stats.contents.data, stats.contents.reference, owed.pages()), (refused, 0, 0));
        assert!(pair.is_equal());
    }
}

#[test]
fn what_was_sent_before_is_not_sent_again() {
    let source = FakeRam::new(&[600, 600]);
    (0..600).for_each(|page| source.0[1].guest_writes(page, page + 1, 0));
    let known = ContentIndex::new([600 * PAGE_BYTES; 2], 1, 0, 2000);
    let owed = source.everything();
    let (pair, owed, stats) = Pair::referring(source, known, Vec::new()).round(owed);
    assert_eq!((stats.contents.reference, stats.contents.data), (0, 600));
    // The same content elsewhere; in the first block it is not looked up.
    for page in 0..100 {
        let contents = pair.source.0[1].contents(400 + page).unwrap();
        pair.source.0[1].guest_fills(page, &contents);
        pair.source.0[0].guest_fills(page, &contents);
    }
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((stats.contents.reference, stats.contents.data), (100, 100), "{stats:?}");
    assert_eq!(owed.pages(), stats.refused_pages);
    let (pair, owed, _) = pair.round(owed);
    assert_eq!(owed.pages(), 0);
    assert!(pair.is_equal());
}

/// A guest that has read its disk: the disk's pages in memory are not sent again, and of those that it changed only the
/// deltas. A page that the disk no longer has is sent in full.
#[test]
fn memory_that_came_from_a_disk_is_read_from_there() {
    let source = FakeRam::new(&[600, 600]);
    (0..600).for_each(|page| source.0[1].guest_writes(page, page + 1, 0));
    let known = Arc::new(ContentIndex::new([600 * PAGE_BYTES; 2], 1, 0, 2000));
    let deltas = Arc::new(Deltas::with_bits(1, 1 << 20, u16::MAX));
    deltas.set(true);
    let (known_too, deltas_too) = (Some(Arc::clone(&known)), Some(Arc::clone(&deltas)));
    let saving = Parts { known: known_too, deltas: deltas_too, ..Parts::default() };
    let owed = source.everything();
    let (pair, owed, stats) = Pair::new(source, &saving, Vec::new()).round(owed);
    assert_eq!((stats.contents.reference, stats.contents.data), (0, 600));
    known.enable_memory_lookup();
    let ram = &pair.source.0[0];
    (0..500).for_each(|page| ram.guest_fills(page, &pair.source.0[1].contents(page + 50).unwrap()));
    (500..600).for_each(|page| ram.guest_writes(page, page + 9000, 0));
    pair.destination.0[1].guest_writes(100, 7, 0);
    let (pair, owed, stats) = pair.round(owed);
    // A run is present as a whole or not at all.
    let refused = stats.refused_pages;
    assert_eq!((stats.contents.reference, stats.contents.data), (500, 100), "{stats:?}");
    assert!(refused > 0 && refused < 500 && owed.pages() == refused, "{stats:?}");
    (0..600).for_each(|page| pair.source.0[0].guest_writes(page, 3, 8));
    let (pair, owed, stats) = pair.round(owed);
    assert_eq!((stats.contents.delta, stats.contents.data), (600 - refused, refused), "{stats:?}");
    assert_eq!((owed.pages(), deltas.count().pages), (0, 600 - refused));
    pair.destination.0[1].guest_fills(100, &pair.source.0[1].contents(100).unwrap());
    assert!(pair.is_equal());
}

/// For slow links. Files unpacked from an archive, for example, may be in memory twice.
#[test]
fn duplicate_pages_of_memory_are_sent_once() {
    for is_marked in [false, true] {
        let source = FakeRam::new(&[600]);
        (0..300).for_each(|page| source.0[0].guest_writes(page, page + 1, 0));
        let known = Arc::new(ContentIndex::new([600 * PAGE_BYTES], 1, 0, 0));
        known.enable_memory_lookup();
        let deltas = is_marked.then(|| Arc::new(Deltas::with_bits(1, 1 << 20, u16::MAX)));
        if let Some(deltas) = &deltas {
            deltas.set(true);
        }
        let saving = Parts { deltas, ..referring(Arc::clone(&known)) };
        let owed = source.everything();
        let (pair, owed, stats) = Pair::new(source, &saving, Vec::new()).round(owed);
        assert_eq!((stats.contents.reference, stats.contents.data), (0, 300));
        let ram = &pair.source.0[0];
        (300..500).for_each(|page| ram.guest_fills(page, &ram.contents(page - 300).unwrap()));
        let (pair, owed, stats) = pair.round(owed);
        assert_eq!((stats.contents.reference, stats.contents.data, owed.pages()), (200, 0, 0), "{stats:?}");
        assert!(pair.is_equal());
        // Nothing is remembered any more.
        known.disable_memory_lookup();
        known.enable_memory_lookup();
        let ram = &pair.source.0[0];
        (500..600).for_each(|page| ram.guest_fills(page, &ram.contents(page - 500).unwrap()));
        let (pair, owed, stats) = pair.round(owed);
        assert_eq!((stats.contents.reference, stats.contents.data, owed.pages()), (0, 100, 0), "{stats:?}");
        assert!(pair.is_equal());
    }
}

/// A page that is refused then would cost another round.
#[test]
fn nothing_is_referred_to_while_the_guest_stands_still() {
    let (source, known, template) = with_template(20);
    let owed = source.everything();
    let pair = Pair::referring(source, known, template);
    let readable: ReadablePages = owed.clear_marks(&mut pair.source.log()).unwrap().skip_drain();
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(1);
    let stats = pair.sender.send_round_by(readable, deadline).unwrap().stats;
    assert_eq!((stats.contents.reference, stats.contents.data), (0, 20));
}

/// Two or three pages arrive sooner as data.
#[test]
fn short_runs_are_sent() {
    let (source, known, template) = with_template(1000);
    for page in (0..1000).step_by(4) {
        source.0[0].guest_writes(page, page + 5000, 8);
    }
    let owed = source.everything();
    let (pair, owed, stats) = Pair::referring(source, known, template).round(owed);
    assert_eq!((stats.contents.reference, stats.contents.data, owed.pages()), (0, 1000, 0));
    assert!(pair.is_equal());
}

/// The unit in which writes to a disk are recorded is larger than a page: most pages that are sent again are unchanged.
#[test]
fn unchanged_disk_pages_are_sent_as_references() {
    let source = FakeRam::new(&[600]);
    (0..600).for_each(|page| source.0[0].guest_writes(page, page + 1, 0));
    let known = ContentIndex::new([600 * PAGE_BYTES], 0, 0, 2000);
    let owed = source.everything();
    let (pair, owed, _) = Pair::referring(source, known, Vec::new()).round(owed);
    for page in 160..176 {
        pair.source.0[0].guest_writes(page, page + 1, 0);
    }
    pair.source.0[0].guest_writes(163, 7, 0);
    let (pair, owed, stats) = pair.round(owed);
    // Three before it are too few.
    assert_eq!((stats.contents.reference, stats.contents.data, owed.pages()), (12, 4, 0), "{stats:?}");
    assert!(pair.is_equal());
}

/// A destination may report referenced pages as missing, once, and no others.
#[test]
fn pages_that_were_sent_cannot_be_missed() {
    let missing = |known: Option<ContentIndex>, pages: ChunkPages, times: u64| {
        let (source, template_known, _) = with_template(40);
        source.0[0].guest_writes(30, 99, 0);
        let known = Arc::new(known.unwrap_or(template_known));
        let (near, mut far) = connection(WHOLE, WHOLE);
        let sender =
            Sender::with_reductions(source.readers(), referring(known).reductions(), vec![near]).unwrap();
        let peer = std::thread::spawn(move || {
            let (mut payload, mut runs) = (Vec::new(), Vec::new());
            assert_eq!(far.source.receive(&mut payload).unwrap(), FrameKind::Pages);
            let (header, _) = PagesHeader::decode(&payload, &mut runs).unwrap();
            for _ in 0..times {
                far.sink.send(FrameKind::Missing, &[&encode_missing(header.seq, pages.words())]).unwrap();
            }
            far.sink.send(FrameKind::Ack, &[&Ack { seq: header.seq, waited_us: 0 }.encode()]).unwrap();
            far.sink.flush().unwrap();
            // Until the sender has processed everything.
            while far.source.receive(&mut payload).is_ok() {
                let _ = far.sink.send(FrameKind::Ack, &[&Ack { seq: header.seq + 1, waited_us: 0 }.encode()]);
                let _ = far.sink.flush();
            }
        });
        let readable = source.everything().clear_marks(&mut source.log()).unwrap().skip_drain();
        let sent = sender.send_round(readable);
        let outcome = sent.map(|sent| sent.owed.pages()).map_err(|interrupted| interrupted.cause);
        peer.join().unwrap();
        outcome
    };
    let page = |page| ChunkPages::from_range(page..page + 1);
    assert_eq!(missing(None, page(3), 1).unwrap(), 1);
    // A repeated page; a page that was sent as data; a page that is not in the frame.
    for outcome in [missing(None, page(3), 2), missing(None, page(30), 1), missing(None, page(41), 1)] {
        assert!(matches!(outcome, Err(SendError::WrongMissing { .. })), "{outcome:?}");
    }
    // If references are not in use, none can be missing.
    let nothing = ContentIndex::new([40 * PAGE_BYTES], 1, 0, 0);
    assert!(matches!(missing(Some(nothing), page(3), 1), Err(SendError::WrongMissing { .. })));
}
