//! Frames over loopback, plain and with TLS, with both ends on this machine: by wall time, and by the processor time of
//! each end, which is what it could reach with a processor for itself. The cipher alone is the upper bound for TLS.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for developers")]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../../../benches/harness.rs"]
mod harness;

use std::io::IoSlice;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use common::{both_kinds, connected, plain};
use harness::{Amount, Benches};
use proto::frame::{FrameKind, Header};
use rustix::time::{ClockId, clock_gettime};
use whimbrel_link::{Connection, RateLimit, Writer};

/// Frames sent at a time, so that waking the reader is a small part.
const FRAMES: u64 = 64;
/// Length of a record of TLS.
const RECORD_BYTES: usize = 16 << 10;

/// One of the times of [`Spent`].
type Picked = fn(&Spent) -> Duration;

fn main() {
    let mut benches = Benches::from_arguments();
    cipher(&mut benches);
    for (kind, near, far) in both_kinds() {
        let mut ends = Ends::new(near, far);
        for frame_bytes in [64_usize << 10, 256 << 10] {
            let payload = vec![7; frame_bytes];
            let amount = Amount::Bytes(FRAMES * frame_bytes as u64);
            let case = format!("frames, {kind}/{} KiB", frame_bytes >> 10);
            let by: [(&str, Picked); 3] = [
                ("", |spent| spent.wall),
                (", writer's processor", |spent| spent.writer),
                (", reader's processor", |spent| spent.reader),
            ];
            for (whose, time) in by {
                let (ends, payload) = (&mut ends, &payload);
                let case = format!("{case}{whose}");
                benches.timed_in_part(&case, amount, || move || time(&ends.send(FRAMES, payload)));
            }
        }
    }
    for megabytes in [12_u64, 125, 1250] {
        limited(&mut benches, megabytes * 1_000_000);
    }
    benches.finish();
}

/// Processor time that this thread has used so far.
fn processor_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Encryption of TLS's records, and nothing else.
fn cipher(benches: &mut Benches) {
    benches.timed("AES-256-GCM alone/16 KiB", Amount::Bytes(RECORD_BYTES as u64), || {
        let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).unwrap());
        let mut record = vec![0; RECORD_BYTES];
        let mut count = 0_u64;
        move || {
            let mut nonce = [0; 12];
            nonce[..8].copy_from_slice(&count.to_le_bytes());
            count += 1;
            let nonce = Nonce::assume_unique_for_key(nonce);
            drop(key.seal_in_place_separate_tag(nonce, Aad::empty(), &mut record).unwrap());
        }
    });
}

/// Frames under a limit: the throughput is the part of it that is used.
fn limited(benches: &mut Benches, bytes_per_s: u64) {
    const FRAME_BYTES: u64 = 64 << 10;
    // A tenth of a second each time.
    let frames = bytes_per_s / 10 / FRAME_BYTES;
    let case = format!("frames, limit of {} MB/s/64 KiB", bytes_per_s / 1_000_000);
    benches.timed_in_part(&case, Amount::Bytes(frames * FRAME_BYTES), || {
        let (near, far) = connected(&plain("host-a"), plain("host-b"));
        let mut ends = Ends::new(near, far);
        ends.writer.set_rate_limit(Some(RateLimit::new(Some(bytes_per_s)).into()));
        let payload = vec![7; FRAME_BYTES as usize];
        move || ends.send(frames, &payload).wall
    });
}

/// Time of some frames.
struct Spent {
    wall: Duration,
    writer: Duration,
    reader: Duration,
}

/// A connection: this thread writes, another one reads.
struct Ends {
    writer: Writer,
    /// Processor time of the reader since its last report, after each number of frames that `expected` asks for.
    all_read: Receiver<Duration>,
    expected: mpsc::Sender<u64>,
}

impl Ends {
    fn new(near: Connection, far: Connection) -> Self {
        let (acks, writer) = near.split();
        let (mut reader, others_acks) = far.split();
        let (ended, all_read) = mpsc::channel();
        let (expected, asked) = mpsc::channel();
        // The thread ends with the other end of its channel.
        thread::spawn(move || {
            let _kept = (acks, others_acks);
            let mut payload = Vec::new();
            while let Ok(frames) = asked.recv() {
                let before = processor_time();
                for _ in 0..frames {
                    reader.read_frame(&mut payload).unwrap();
                }
                if ended.send(processor_time().saturating_sub(before)).is_err() {
                    return;
                }
            }
        });
        Self { writer, all_read, expected }
    }

    /// Sends frames of this content, and waits until all were read.
    fn send(&mut self, frames: u64, payload: &[u8]) -> Spent {
        let header = Header::new(FrameKind::Pages, payload.len()).unwrap();
        let (start, before) = (Instant::now(), processor_time());
        self.expected.send(frames).unwrap();
        for _ in 0..frames {
            self.writer.write_frame(header, &[IoSlice::new(payload)]).unwrap();
        }
        let writer = processor_time().saturating_sub(before);
        let reader = self.all_read.recv().unwrap();
        Spent { wall: start.elapsed(), writer, reader }
    }
}
