//! Space that the content of a guest's disks needs at the destination.
//!
//! An image may use far less space on its host: qcow2 has compressed clusters, some file systems compress their files,
//! and a copy is not compressed. So the image's allocation map is read, too, from outside QEMU, because a guest whose
//! migration is only considered must not be disturbed. QEMU may keep a part of its map in memory for a while: the
//! larger of the two values counts.

use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use block::image::ImageError;
use proto::message::{DiskMode, ProposedDisk};
use qemu::describe::Disk;

use super::disks::unique_word;
use crate::verification::DiskImage;

/// Unit in which images allocate space, in bytes: clusters of qcow2, chunks of thin pools.
const PIECE_BYTES: u64 = 64 << 10;
/// Time limit for the maps of all disks together. After it the space that the image uses on its host counts.
const PATIENCE: Duration = Duration::from_secs(10);
/// Part of a disk that is read at a time, in bytes.
const STEP_BYTES: u64 = 16 << 30;

/// Extension of the sockets of such servers.
const SOCKET: &str = "room";

/// Measures the images of disks that may be copied; `run_dir` is for sockets of servers.
pub fn measure(disks: &[Disk], proposed: &mut [ProposedDisk], run_dir: &Path) {
    // Another check of the same VM may run at the same time.
    let socket = &run_dir.join(unique_word()).with_extension(SOCKET);
    let deadline = Instant::now() + PATIENCE;
    for wanted in proposed.iter_mut().filter(|disk| disk.wanted != DiskMode::Shared) {
        let disk = disks.iter().find(|disk| disk.name == wanted.name && !disk.encrypted);
        let Some(image) = disk.and_then(DiskImage::of) else { continue };
        match content_bytes(&image, socket, deadline) {
            Ok(Some(bytes)) => wanted.allocated_bytes = wanted.allocated_bytes.max(bytes).min(wanted.bytes),
            Ok(None) => tracing::info!(disk = wanted.name, "measuring the disk takes too long"),
            // The image may not be reachable by its name: a descriptor, a server with a password.
            Err(error) => tracing::info!(
                disk = wanted.name,
                error = crate::chain(&error),
                "the disk's content was not measured"
            ),
        }
    }
}

/// Ends the servers for such measurements that a previous agent left when it was killed: they would wait for ever, and
/// keep their images open.
pub fn end_measurements(run_dir: &Path) {
    let Ok(entries) = std::fs::read_dir(run_dir) else { return };
    let sockets = entries.flatten().map(|entry| entry.path());
    for socket in sockets.filter(|path| path.extension().is_some_and(|end| end == SOCKET)) {
        block::image::end_unused_server(&socket);
        if let Err(error) = std::fs::remove_file(&socket) {
            tracing::debug!(socket = %socket.display(), %error, "the socket was already removed");
        }
    }
}

/// Returns the size of all units that are not all zeros; none if it is not known in time.
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
    Ok(Some(round_up_to_pieces(&content)))
}

/// Returns the size of all units that these ascending ranges touch, in bytes.
fn round_up_to_pieces(content: &[Range<u64>]) -> u64 {
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
    fn a_server_without_clients_does_not_wait_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let (image, socket) = (folder.path().join("disk.raw"), folder.path().join("left.room"));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let server = std::process::Command::new("qemu-nbd")
            .args(["--format", "raw", "--export-name", "disk", "--socket"])
            .args([&socket, &image])
            .spawn()
            .unwrap();
        let server = std::sync::Mutex::new(server);
        // The kernel shows when it listens; a connection would end it.
        crate::testing::eventually("nobody listens", || {
            let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
            let listens = |line: &str| line.split_whitespace().nth(3) == Some("00010000");
            sockets.lines().any(|line| line.ends_with(socket.to_str().unwrap()) && listens(line))
        });
        end_measurements(folder.path());
        assert!(!socket.exists());
        crate::testing::eventually("it waits", || server.lock().unwrap().try_wait().unwrap().is_some());
    }

    #[test]
    fn a_piece_is_taken_whole_and_once() {
        const KIB: u64 = 1 << 10;
        assert_eq!(round_up_to_pieces(&[]), 0);
        let one = |range: Range<u64>| round_up_to_pieces(std::slice::from_ref(&range));
        assert_eq!(one(0..1), PIECE_BYTES);
        // Two in one unit, one across a border, one that follows it.
        let scattered = [4 * KIB..8 * KIB, 60 * KIB..64 * KIB, 127 * KIB..129 * KIB, 129 * KIB..192 * KIB];
        assert_eq!(round_up_to_pieces(&scattered), 3 * PIECE_BYTES);
        assert_eq!(one(PIECE_BYTES..3 * PIECE_BYTES), 2 * PIECE_BYTES);
    }
}
