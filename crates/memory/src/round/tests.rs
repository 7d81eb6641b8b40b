use super::*;

const CUTS: [PartBoundary; 2] = [PartBoundary::Anywhere, PartBoundary::BetweenClusters];

struct Log(Vec<u64>, bool);

impl DirtyLog for Log {
    fn scan_dirty(&mut self, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        self.0.iter().for_each(|page| into[0].set(*page..page + 1));
        if self.1 {
            return Err(ScanError {
                block: "pc.ram".into(),
                source: TrackError::NotMapped { range: tracee::AddressRange::default() }.into(),
            });
        }
        Ok(ScanStats { pages: self.0.drain(..).count() as u64, duration_us: 0 })
    }
}

/// The parts from position to position make up the whole, each page once, for every boundary.
#[test]
fn parts_make_up_the_whole() {
    let mut blocks = vec![PageSet::new(0), PageSet::new(4 << 20), PageSet::new(9 << 20)];
    blocks[1].set(3..700);
    blocks[1].set(1023..1024);
    blocks[2].set(0..1);
    blocks[2].set(511..1500);
    let whole = OwedPages { blocks, round: 7 };
    let sizes = [1, 2, 512, 697, 698, 1000, 1688, 1689, u64::MAX];
    for (size, cut) in sizes.into_iter().flat_map(|size| CUTS.map(|cut| (size, cut))) {
        let unit = if cut == PartBoundary::Anywhere { 1 } else { 16 };
        let (mut owed, mut from) = (whole.clone(), Some(PageCursor::default()));
        let mut sent = OwedPages {
            blocks: owed.blocks.iter().map(|b| PageSet::new(b.pages() * 4096)).collect(),
            round: 7,
        };
        let mut count = 0;
        while let Some(place) = from {
            let (part, later, next) = ReadablePages { owed }.part(place, size, cut);
            assert!(part.pages() < size.saturating_add(unit), "{size}");
            assert_eq!(part.pages() + later.pages() + sent.pages(), whole.pages(), "{size}");
            assert!(next.is_none_or(|next| next.page.is_multiple_of(unit)), "{size}: {next:?}");
            count += part.pages();
            sent.take_back(part.owed());
            (owed, from) = (later, next);
        }
        assert_eq!((count, &sent, owed.pages()), (whole.pages(), &whole, 0), "{size}");
    }
    // Pages before the position have to wait.
    let from = PageCursor { block: 2, page: 600 };
    let (part, later, next) =
        ReadablePages { owed: whole.clone() }.part(from, u64::MAX, PartBoundary::Anywhere);
    assert_eq!((part.pages(), later.pages(), next), (900, whole.pages() - 900, None));
}

/// Round after round from the end of the last one, including pages that are dirty again: every page gets its turn.
#[test]
fn rounds_go_around() {
    let mut block = PageSet::new(4 << 20);
    block.set(0..1000);
    // A part includes the whole cluster in which it would end.
    let expected = [
        [(400, 400, false), (400, 800, false), (400, 200, true), (400, 600, false), (400, 1000, false)],
        [(400, 400, false), (400, 800, false), (408, 208, true), (400, 608, false), (408, 16, true)],
    ];
    for (cut, expected) in CUTS.into_iter().zip(expected) {
        let (mut owed, mut place) =
            (OwedPages { blocks: vec![block.clone()], round: 7 }, PageCursor::default());
        let parts = expected.map(|_| {
            let around = ReadablePages { owed: owed.clone() }.part_wrapping(place, 400, cut);
            let pages = around.readable.pages();
            assert_eq!(pages + around.later.pages(), 1000);
            // The guest writes all of them again.
            owed = around.readable.give_up();
            owed.take_back(&around.later);
            place = around.next;
            (pages, around.next.page, around.has_wrapped)
        });
        assert_eq!(parts, expected);
        let all = ReadablePages { owed }.part_wrapping(place, 2000, cut);
        assert_eq!((all.readable.pages(), all.later.pages(), all.has_wrapped), (1000, 0, true));
    }
}

/// Pages that are put off are not lost, and only pages that are owed are put off.
#[test]
fn pages_may_be_put_off() {
    let mut blocks = vec![PageSet::new(4 << 20), PageSet::new(2 << 20)];
    blocks[0].set(3..700);
    blocks[1].set(0..4);
    let whole = OwedPages { blocks, round: 7 };
    let mut pages = vec![PageSet::new(4 << 20)];
    pages[0].set(600..1000);
    let (now, later) = ReadablePages { owed: whole.clone() }.without(&pages);
    assert_eq!((now.pages(), later.pages(), later.round()), (597 + 4, 100, 7));
    assert_eq!(now.and(&later).give_up(), whole);
    let (these, others) = ReadablePages { owed: whole.clone() }.only(&pages);
    assert_eq!((these.owed(), others.pages()), (&later, 597 + 4));
}

#[test]
fn a_failure_at_any_stage_gives_the_pages_back() {
    let nothing = OwedPages { blocks: vec![PageSet::new(1 << 20)], round: 3 };
    let failed = nothing.clear_marks(&mut Log(vec![1, 5], true)).unwrap_err();
    assert_eq!(failed.owed.pages(), 2);
    let reported = failed.owed.clone().clear_marks_and_report(&mut Log(vec![1, 9], true), 1).unwrap_err();
    assert_eq!(reported.owed.pages(), 3);
    let reported = failed.owed.clone().clear_marks_and_report(&mut Log(vec![1, 9], false), 0).unwrap();
    assert_eq!((reported.0.pages(), reported.1.len()), (3, 0));
    let (cleared, found) = failed.owed.clear_marks_and_report(&mut Log(vec![7], false), 9).unwrap();
    assert_eq!((cleared.pages(), cleared.scan().pages), (3, 1));
    assert!(found[0].count() == 1 && found[0].contains(7));
    let failed = cleared.drain(|| Err(std::io::Error::from(std::io::ErrorKind::TimedOut))).unwrap_err();
    assert_eq!(failed.owed.pages(), 3);
    let cleared = failed.owed.clear_marks(&mut Log(vec![], false)).unwrap();
    let readable = cleared.drain(|| Ok::<(), std::io::Error>(())).unwrap();
    assert_eq!(readable.give_up().pages(), 3);
}
