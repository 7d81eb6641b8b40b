//! How much room what is in a guest's disks takes where it is copied to.
//!
//! What an image takes on its host may be far less: qcow2 has compressed clusters, some file systems compress what is
//! written to them, and a copy is not compressed. So the map of what the image holds is asked for, too, from outside,
//! because a guest whose move is only thought about is not to notice. QEMU may keep some of its map to itself for a while:
//! the larger of the two counts.

use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use block::image::ImageError;
use proto::message::{DiskWish, ProposedDisk};
use qemu::describe::Disk;

use super::disks::unique;
use crate::verification::DiskImage;

/// In such pieces images take their room: clusters of qcow2, chunks of thin pools, in bytes.
const PIECE_BYTES: u64 = 64 << 10;
/// How long all disks together are looked at. Where that does not do, what the image takes on its host has to.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of a disk at a time, in bytes.
const STEP_BYTES: u64 = 16 << 30;

/// What the sockets of such looks end with.
const SOCKET: &str = "room";

/// Looks at the images of disks that may be copied; `run_dir` is for sockets of servers.
pub(crate) fn measure(disks: &[Disk], proposed: &mut [ProposedDisk], run_dir: &Path) {
    // A VM that begins to move may be looked at by somebody else as well.
    let socket = &run_dir.join(unique()).with_extension(SOCKET);
    let deadline = Instant::now() + PATIENCE;
    for wanted in proposed.iter_mut().filter(|disk| disk.wanted != DiskWish::Shared) {
        let disk = disks.iter().find(|disk| disk.name == wanted.name && !disk.encrypted);
        let Some(image) = disk.and_then(DiskImage::of) else { continue };
        match content_bytes(&image, socket, deadline) {
            Ok(Some(bytes)) => wanted.allocated_bytes = wanted.allocated_bytes.max(bytes).min(wanted.bytes),
            Ok(None) => tracing::info!(disk = wanted.name, "its map takes too long to look at"),
            // It may not be there by its name: a descriptor, a server with a password.
            Err(error) => tracing::info!(
                disk = wanted.name,
                error = crate::chain(&error),
                "what it holds was not looked at"
            ),
        }
    }
}

/// Ends the servers that an agent before this one started for such a look when it was killed: they would wait for ever, and
/// keep their images.
pub(crate) fn end_looks(run_dir: &Path) {
    let Ok(entries) = std::fs::read_dir(run_dir) else { return };
    let sockets = entries.flatten().map(|entry| entry.path());
    for socket in sockets.filter(|path| path.extension().is_some_and(|end| end == SOCKET)) {
        block::image::end_unused(&socket);
        if let Err(error) = std::fs::remove_file(&socket) {
            tracing::debug!(socket = %socket.display(), %error, "it was removed already");
        }
    }
}

/// What the pieces take that are not all zeros; none if that is not known in time.
fn content_bytes(image: &DiskImage, socket: &Path, deadline: Instant) -> Result<Option<u64>, ImageError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Ok(None);
    }
    let mut reading = image.open(socket, left)?;
    let end = reading.size_bytes();
    let mut content = Vec::new();
    for start in (0..end).step_by(STEP_BYTES as usize) {
        if Instant::now() >= deadline {
            return Ok(None);
        }
        content.extend(reading.allocated(start..end.min(start.saturating_add(STEP_BYTES)))?);
    }
    Ok(Some(in_pieces(&content)))
}

/// Bytes of all pieces that these ranges, which ascend, have a part of.
fn in_pieces(content: &[Range<u64>]) -> u64 {
    let mut counted = 0;
    let pieces = content.iter().map(|range| {
        let (first, end) = (range.start / PIECE_BYTES, range.end.div_ceil(PIECE_BYTES));
        let new = end.saturating_sub(first.max(counted));
        counted = counted.max(end);
        new
    });
    pieces.sum::<u64>().saturating_mul(PIECE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_nobody_came_to_does_not_wait_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let (image, socket) = (folder.path().join("disk.raw"), folder.path().join("left.room"));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let server = std::process::Command::new("qemu-nbd")
            .args(["--format", "raw", "--export-name", "disk", "--socket"])
            .args([&socket, &image])
            .spawn()
            .unwrap();
        let server = std::sync::Mutex::new(server);
        // It listens when the kernel says so; whoever connects would end it.
        crate::testing::eventually("nobody listens", || {
            let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
            let listens = |line: &str| line.split_whitespace().nth(3) == Some("00010000");
            sockets.lines().any(|line| line.ends_with(socket.to_str().unwrap()) && listens(line))
        });
        end_looks(folder.path());
        assert!(!socket.exists());
        crate::testing::eventually("it waits", || server.lock().unwrap().try_wait().unwrap().is_some());
    }

    #[test]
    fn a_piece_is_taken_whole_and_once() {
        const KIB: u64 = 1 << 10;
        assert_eq!(in_pieces(&[]), 0);
        let one = |range: Range<u64>| in_pieces(std::slice::from_ref(&range));
        assert_eq!(one(0..1), PIECE_BYTES);
        // Two in one piece, one over a border, one that follows it.
        let scattered = [4 * KIB..8 * KIB, 60 * KIB..64 * KIB, 127 * KIB..129 * KIB, 129 * KIB..192 * KIB];
        assert_eq!(in_pieces(&scattered), 3 * PIECE_BYTES);
        assert_eq!(one(PIECE_BYTES..3 * PIECE_BYTES), 2 * PIECE_BYTES);
    }
}
