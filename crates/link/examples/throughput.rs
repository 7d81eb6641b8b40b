//! How fast frames go over loopback, with TLS and without: `cargo run --release -p whimbrel-link --example throughput`.
//!
//! Sends frames of 64 KiB and of 2 MiB, the largest there are, on one connection; then shows how much of a limit of
//! bandwidth is used.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a program for developers")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::IoSlice;
use std::time::Instant;

use common::{both_kinds, connected, plain};
use proto::frame::{Header, Kind};
use whimbrel_link::{Connection, RateLimit};

fn main() {
    for (kind, a, b) in both_kinds() {
        measure(kind, a, b);
    }
    limited();
}

fn measure(kind: &str, a: Connection, b: Connection) {
    let (_keep_reader, mut writer) = a.split();
    let (mut reader, _keep_writer) = b.split();
    for (frame_bytes, frames) in [(64_usize << 10, 40_000_u32), (2 << 20, 1_500)] {
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let page = vec![7; frame_bytes];
                let header = Header::new(Kind::Pages, frame_bytes).unwrap();
                for _ in 0..frames {
                    writer.write_frame(header, &[IoSlice::new(&page)]).unwrap();
                }
            });
            let mut payload = Vec::new();
            for _ in 0..frames {
                reader.read_frame(&mut payload).unwrap();
            }
        });
        let rate = f64::from(frames) * frame_bytes as f64 / start.elapsed().as_secs_f64();
        println!("{kind:5} frames of {:4} KiB: {:.2} GB/s", frame_bytes >> 10, rate / 1e9);
    }
}

/// How much of a limit is used.
fn limited() {
    for rate in [12_500_000_u64, 125_000_000, 1_250_000_000] {
        let (a, b) = connected(&plain("host-a"), plain("host-b"));
        let (_keep_reader, mut writer) = a.split();
        let (mut reader, _keep_writer) = b.split();
        writer.set_rate_limit(Some(RateLimit::new(Some(rate)).into()));
        let frames = rate * 2 / (1 << 20);
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let page = vec![7; 1 << 20];
                let header = Header::new(Kind::Pages, page.len()).unwrap();
                for _ in 0..frames {
                    writer.write_frame(header, &[IoSlice::new(&page)]).unwrap();
                }
            });
            let mut payload = Vec::new();
            for _ in 0..frames {
                reader.read_frame(&mut payload).unwrap();
            }
        });
        let used = frames as f64 * f64::from(1 << 20) / start.elapsed().as_secs_f64() / rate as f64;
        println!("limit {:4} MB/s: {:.1} % used", rate / 1_000_000, used * 100.0);
    }
}
