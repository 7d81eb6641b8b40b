//! Operations on the sets of pages of 1 GiB in each round.

use std::hint::black_box;
use std::ops::Range;

use proto::limits::{CHUNK_PAGES, PAGE_BYTES};
use whimbrel_memory::PageSet;

use crate::harness::{Amount, Benches};

const BYTES: u64 = 1 << 30;
const PAGES: u64 = BYTES / PAGE_BYTES;

/// Pages as a scan finds them, in runs.
#[allow(clippy::single_range_in_vec_init, reason = "one run of all pages")]
fn written(kind: &str) -> Vec<Range<u64>> {
    match kind {
        // One page of every eighth chunk.
        "few" => (0..PAGES).step_by(8 * CHUNK_PAGES as usize).map(|page| page..page + 1).collect(),
        // Every second page: as many runs as can be.
        "scattered" => (0..PAGES).step_by(2).map(|page| page..page + 1).collect(),
        "all" => vec![0..PAGES],
        other => panic!("no kind {other}"),
    }
}

fn bitmap(kind: &str) -> PageSet {
    let mut bitmap = PageSet::new(BYTES);
    for run in written(kind) {
        bitmap.set(run);
    }
    bitmap
}

pub(crate) fn cases(benches: &mut Benches) {
    for kind in ["few", "scattered", "all"] {
        let gib = Amount::Of(1, "GiB");
        benches.counted(&format!("bitmap, set_bytes/{kind}"), gib, || {
            let (runs, mut bitmap) = (written(kind), PageSet::new(BYTES));
            move || {
                for run in black_box(&runs) {
                    bitmap.set_bytes(run.start * PAGE_BYTES..run.end * PAGE_BYTES);
                }
                black_box(&bitmap);
            }
        });
        benches.counted(&format!("bitmap, runs/{kind}"), gib, || {
            let bitmap = bitmap(kind);
            move || {
                black_box(black_box(&bitmap).runs().map(|run| run.end - run.start).sum::<u64>());
            }
        });
        benches.counted(&format!("bitmap, nonempty_chunks/{kind}"), gib, || {
            let bitmap = bitmap(kind);
            move || {
                black_box(black_box(&bitmap).nonempty_chunks().sum::<u64>());
            }
        });
    }
    // These visit every word, whatever its content.
    let gib = Amount::Of(1, "GiB");
    benches.counted("bitmap, insert", gib, || {
        let (other, mut bitmap) = (bitmap("few"), bitmap("few"));
        move || bitmap.insert(black_box(&other))
    });
    benches.counted("bitmap, clear all", gib, || {
        let mut bitmap = bitmap("all");
        move || black_box(&mut bitmap).clear_all()
    });
    benches.counted("bitmap, count", gib, || {
        let bitmap = bitmap("few");
        move || {
            black_box(black_box(&bitmap).count());
        }
    });
}
