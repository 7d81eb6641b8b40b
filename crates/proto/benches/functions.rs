//! Encoding and decoding of frames and messages.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for developers")]

#[path = "../../../benches/harness.rs"]
mod harness;

use std::hint::black_box;

use harness::{Amount, Benches};
use proto::limits::{CHUNK_PAGES, PAGE_BYTES};
use proto::pages::{Content, PageRun, PagesHeader};
use proto::{Epoch, Generation, Incarnation, Message};
use whimbrel_proto as proto;

const HEADER: PagesHeader = PagesHeader { seq: 7, round: 3, block: 1, chunk: 99 };

fn main() {
    let mut benches = Benches::from_arguments();
    pages(&mut benches);
    messages(&mut benches);
    benches.finish();
}

/// Returns `count` runs over a whole chunk, with contents in turn.
fn runs(count: u64) -> Vec<PageRun> {
    let pages = CHUNK_PAGES / count;
    let contents = [Content::Data, Content::Zero, Content::Hole].into_iter().cycle();
    let run = |(index, content)| PageRun { first_page: (index * pages) as u16, pages: pages as u16, content };
    (0..count).zip(contents).map(run).collect()
}

fn pages(benches: &mut Benches) {
    for count in [1, 64, 512] {
        benches.counted(&format!("pages, encode/{count} runs"), Amount::Of(count, "run"), || {
            let (runs, mut out) = (runs(count), Vec::new());
            move || {
                out.clear();
                black_box(HEADER).encode(black_box(&runs), &mut out);
                black_box(&out);
            }
        });
        benches.counted(&format!("pages, decode/{count} runs"), Amount::Of(count, "run"), || {
            let (runs, mut payload, mut found) = (runs(count), Vec::new(), Vec::new());
            HEADER.encode(&runs, &mut payload);
            let data = runs.iter().filter(|run| run.content == Content::Data).map(|run| u64::from(run.pages));
            payload.resize(payload.len() + (data.sum::<u64>() * PAGE_BYTES) as usize, 7);
            move || {
                black_box(PagesHeader::decode(black_box(&payload), &mut found).unwrap());
            }
        });
    }
}

fn messages(benches: &mut Benches) {
    let ready = || Message::Ready {
        epoch: Epoch(7),
        incarnation: Incarnation {
            boot_id: "6ab0b1d9-cf2f-4cbd-9f0f-1b2f0ff0d8a1".into(),
            pid: 4711,
            start_time_ticks: 123_456,
            generation: Generation(2),
        },
        digest: "c0ffee".repeat(11)[..64].into(),
        load_us: 3141,
    };
    let hashes = (0..4096_u64).map(|chunk| format!("{:016x}", chunk.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let verify = || Message::Verify { block: 0, first_chunk: 0, hashes: hashes.clone().collect() };
    one_message(benches, "ready", Amount::Of(1, "message"), ready);
    one_message(benches, "verify, 4096 hashes", Amount::Of(4096, "hash"), verify);
}

/// Benchmarks a message. As in `link`, a decoded message is also validated.
fn one_message(benches: &mut Benches, name: &str, amount: Amount, message: impl Fn() -> Message) {
    benches.counted(&format!("message, encode/{name}"), amount, || {
        let message = message();
        move || {
            black_box(serde_json::to_vec(black_box(&message)).unwrap());
        }
    });
    benches.counted(&format!("message, decode/{name}"), amount, || {
        let json = serde_json::to_vec(&message()).unwrap();
        move || {
            let message: Message = serde_json::from_slice(black_box(&json)).unwrap();
            message.validate().unwrap();
            black_box(message);
        }
    });
}
