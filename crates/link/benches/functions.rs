//! Frames over loopback, plain and with TLS: bytes for each second of wall time, with both ends on this machine.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "for developers")]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../../../benches/harness.rs"]
mod harness;

use std::io::IoSlice;
use std::sync::mpsc;
use std::thread;

use common::both_kinds;
use harness::{Amount, Benches};
use proto::frame::{FrameKind, Header};

/// Frames sent at a time, so that waking the reader is a small part.
const FRAMES: u64 = 64;

fn main() {
    let mut benches = Benches::from_arguments();
    for (kind, near, far) in both_kinds() {
        let (_acks, mut writer) = near.split();
        let (mut reader, _acks) = far.split();
        let (ended, all_read) = mpsc::channel();
        // The thread ends with the connection.
        thread::spawn(move || {
            let mut payload = Vec::new();
            let mut frames = 0;
            while reader.read_frame(&mut payload).is_ok() {
                frames += 1;
                if frames % FRAMES == 0 {
                    ended.send(()).unwrap();
                }
            }
        });
        for frame_bytes in [64_usize << 10, 256 << 10] {
            let header = Header::new(FrameKind::Pages, frame_bytes).unwrap();
            let payload = vec![7; frame_bytes];
            let (writer, all_read) = (&mut writer, &all_read);
            let bytes = Amount::Bytes(FRAMES * frame_bytes as u64);
            benches.timed(&format!("frames, {kind}/{} KiB", frame_bytes >> 10), bytes, || {
                move || {
                    for _ in 0..FRAMES {
                        writer.write_frame(header, &[IoSlice::new(&payload)]).unwrap();
                    }
                    all_read.recv().unwrap();
                }
            });
        }
    }
    benches.finish();
}
