//! Throughput of frames over loopback, with TLS and without.
//!
//! `cargo run --release -p whimbrel-link --example throughput`
//!
//! Sends frames of 64 KiB and of 2 MiB, the largest possible, on one connection. Prints the rate, and the rate that
//! each side could reach with a processor for itself (bytes by CPU time), which is more meaningful on a busy machine.
//! AES-GCM alone is the upper bound for TLS. Then prints the share of a bandwidth limit that is used.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a program for developers")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::IoSlice;
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use common::{both_kinds, connected, plain};
use proto::frame::{FrameKind, Header};
use rustix::time::{ClockId, clock_gettime};
use whimbrel_link::{RateLimit, Reader, Writer};

fn main() {
    cipher();
    for (kind, a, b) in both_kinds() {
        let (_keep_reader, mut writer) = a.split();
        let (mut reader, _keep_writer) = b.split();
        for (frame_bytes, frames) in [(64_usize << 10, 32_000_u32), (2 << 20, 1_000)] {
            let (wall, writing, reading) = send(&mut writer, &mut reader, frame_bytes, frames);
            let total = f64::from(frames) * frame_bytes as f64;
            println!(
                "{kind:5} frames of {:4} KiB: {:5.2} GB/s; by CPU time: writer {:5.2}, reader {:5.2} GB/s",
                frame_bytes >> 10,
                gigabytes_per_s(total, wall),
                gigabytes_per_s(total, writing),
                gigabytes_per_s(total, reading),
            );
        }
    }
    for rate in [12_500_000, 125_000_000, 1_250_000_000] {
        limited(rate);
    }
}

fn gigabytes_per_s(bytes: f64, time: Duration) -> f64 {
    bytes / time.as_secs_f64() / 1e9
}

/// CPU time used by this thread so far.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Prints the minimum cost of encrypting records of TLS.
fn cipher() {
    const RECORDS: u32 = 64_000;
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).unwrap());
    let mut record = vec![0; 16 << 10];
    let before = cpu_time();
    for at in 0..RECORDS {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&at.to_le_bytes());
        let nonce = Nonce::assume_unique_for_key(nonce);
        drop(key.seal_in_place_separate_tag(nonce, Aad::empty(), &mut record).unwrap());
    }
    let total = f64::from(RECORDS) * record.len() as f64;
    println!(
        "AES-256-GCM alone, by CPU time: {:5.2} GB/s",
        gigabytes_per_s(total, cpu_time().saturating_sub(before))
    );
}

/// Sends the frames. Returns wall time, and CPU time of writer and reader.
fn send(
    writer: &mut Writer,
    reader: &mut Reader,
    frame_bytes: usize,
    frames: u32,
) -> (Duration, Duration, Duration) {
    let start = Instant::now();
    let (writing, reading) = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let page = vec![7; frame_bytes];
            let header = Header::new(FrameKind::Pages, frame_bytes).unwrap();
            for _ in 0..frames {
                writer.write_frame(header, &[IoSlice::new(&page)]).unwrap();
            }
            cpu_time()
        });
        let reading = scope.spawn(|| {
            let mut payload = Vec::new();
            for _ in 0..frames {
                reader.read_frame(&mut payload).unwrap();
            }
            cpu_time()
        });
        (writing.join().unwrap(), reading.join().unwrap())
    });
    (start.elapsed(), writing, reading)
}

fn limited(rate: u64) {
    let (a, b) = connected(&plain("host-a"), plain("host-b"));
    let (_keep_reader, mut writer) = a.split();
    let (mut reader, _keep_writer) = b.split();
    writer.set_rate_limit(Some(RateLimit::new(Some(rate)).into()));
    let frames = (rate * 2 / (1 << 20)) as u32;
    let (wall, ..) = send(&mut writer, &mut reader, 1 << 20, frames);
    let used = f64::from(frames) * f64::from(1 << 20) / wall.as_secs_f64() / rate as f64;
    println!(
        "limit of {:4} MB/s: {:.1} % used in {:.1} s, burst included",
        rate / 1_000_000,
        used * 100.0,
        wall.as_secs_f64()
    );
}
