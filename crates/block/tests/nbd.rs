//! The NBD client against QEMU's own servers, and against servers that violate the protocol.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "all of this is tests")]

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use whimbrel_block::nbd::{ALLOCATION, Client, Extent, HOLE, NbdError, ZERO};

const TIMEOUT: Duration = Duration::from_mins(1);
const MIB: u64 = 1 << 20;

/// A `qemu-nbd`, ended when dropped.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn new(directory: &Path, image: &Path, format: &str) -> Self {
        let socket = directory.join("nbd.sock");
        let child = Command::new("qemu-nbd")
            .args(["-f", format, "--discard=unmap", "-x", "disk", "-t", "-e", "8", "-k"])
            .arg(&socket)
            .arg(image)
            .spawn()
            .unwrap();
        let end = Instant::now() + TIMEOUT;
        while !socket.exists() {
            assert!(Instant::now() < end, "qemu-nbd does not start");
            thread::sleep(Duration::from_millis(5));
        }
        Self { child, socket }
    }

    fn client(&self, context: Option<&str>) -> Result<Client, NbdError> {
        Client::connect(&self.socket, "disk", context, TIMEOUT)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn image(directory: &Path, format: &str, size: &str) -> PathBuf {
    let path = directory.join(format!("image.{format}"));
    if format == "raw" {
        // `qemu-img` would write the first block.
        let mib: u64 = size.strip_suffix('M').unwrap().parse().unwrap();
        fs::File::create(&path).unwrap().set_len(mib * MIB).unwrap();
        return path;
    }
    let made = Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&path).arg(size).status();
    assert!(made.unwrap().success());
    path
}

fn extent(start: u64, end: u64, status: u32) -> Extent {
    Extent { bytes: start..end, status }
}

#[test]
fn what_is_written_is_read_and_holes_are_told() {
    for format in ["raw", "qcow2"] {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::new(directory.path(), &image(directory.path(), format, "64M"), format);
        let mut client = server.client(Some(ALLOCATION)).unwrap();
        assert_eq!(client.size_bytes(), 64 * MIB);
        assert_eq!(client.status(0..64 * MIB).unwrap(), [extent(0, 64 * MIB, HOLE | ZERO)], "{format}");

        client.write(MIB, &vec![7; MIB as usize]).unwrap();
        client.write(10 * MIB, &vec![9; 2 * MIB as usize]).unwrap();
        client.write_zeroes(11 * MIB..12 * MIB).unwrap();
        client.flush().unwrap();
        let expected = [
            extent(0, MIB, HOLE | ZERO),
            extent(MIB, 2 * MIB, 0),
            extent(2 * MIB, 10 * MIB, HOLE | ZERO),
            extent(10 * MIB, 11 * MIB, 0),
        ];
        let found = client.status(0..64 * MIB).unwrap();
        assert_eq!(found[..4], expected, "{format}");
        assert!(found[4..].iter().all(|extent| extent.status & ZERO != 0), "{format}: {found:?}");

        // Data, and holes before and after it; into memory that is not zero.
        let mut other = server.client(None).unwrap();
        let mut read = vec![1; 4 * MIB as usize];
        other.read(9 * MIB, &mut read).unwrap();
        let part = |from: usize, to: usize| &read[from * MIB as usize..to * MIB as usize];
        assert!(part(0, 1).iter().all(|byte| *byte == 0), "{format}");
        assert!(part(1, 2).iter().all(|byte| *byte == 9), "{format}");
        assert!(part(2, 4).iter().all(|byte| *byte == 0), "{format}");
    }
}

#[test]
fn what_is_not_to_be_had_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("nobody.sock");
    let error = Client::connect(&missing, "disk", None, TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("nobody.sock"), "{error}");

    let server = Server::new(directory.path(), &image(directory.path(), "raw", "1M"), "raw");
    let error = Client::connect(&server.socket, "other", None, TIMEOUT).unwrap_err();
    assert!(matches!(&error, NbdError::Lacks { what, .. } if what.contains("other")), "{error}");
    let error = server.client(Some("qemu:dirty-bitmap:none")).unwrap_err();
    assert!(matches!(&error, NbdError::Lacks { what, .. } if what.contains("none")), "{error}");

    // The connection is usable after a refusal.
    let mut client = server.client(None).unwrap();
    let error = client.read(MIB, &mut [0; 512]).unwrap_err();
    assert!(matches!(error, NbdError::Failed { command: "read", .. }), "{error}");
    client.read(0, &mut [0; 512]).unwrap();
}

#[test]
fn a_full_disk_is_told_from_other_failures() {
    let directory = tempfile::tempdir().unwrap();
    let mount = directory.path().join("small");
    fs::create_dir(&mount).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "none"]).arg(&mount).status();
    if !mounted.is_ok_and(|status| status.success()) {
        println!("NOT TRIED: a full disk, which takes root");
        return;
    }
    let server = Server::new(directory.path(), &image(&mount, "raw", "16M"), "raw");
    let mut client = server.client(None).unwrap();
    let mut at = 0;
    let error = loop {
        match client.write(at, &vec![1; 256 << 10]) {
            Ok(()) => at += 256 << 10,
            Err(error) => break error,
        }
    };
    drop((client, server));
    assert!(Command::new("umount").arg(&mount).status().unwrap().success());
    assert!(error.is_full(), "{error}: {error:?}");
}

/// A server that sends these bytes to each client, and then waits for the client to close the connection.
fn serve_bytes(directory: &Path, bytes: Vec<u8>) -> PathBuf {
    let path = directory.join("says.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        let _ = socket.write_all(&bytes);
        let _ = socket.read_to_end(&mut Vec::new());
    });
    path
}

#[test]
fn a_server_that_breaks_the_protocol_is_left() {
    let mut long = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
    // A reply to the first option with a payload of 4 GiB.
    long.extend(0x0003_e889_0455_65a9_u64.to_be_bytes());
    long.extend([0, 0, 0, 8, 0, 0, 0, 3, 0xff, 0xff, 0xff, 0xff]);
    let cases = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "greeting"),
        (b"NBDMAGICIHAVEOPT\x00\x00\x00\x00".to_vec(), "old"),
        (long, "too large"),
    ];
    for (bytes, expected) in cases {
        let directory = tempfile::tempdir().unwrap();
        let path = serve_bytes(directory.path(), bytes);
        let error = Client::connect(&path, "disk", None, TIMEOUT).unwrap_err();
        assert!(matches!(&error, NbdError::Protocol(what) if what.contains(expected)), "{error}");
    }
    // A server that does not answer is not waited for.
    let directory = tempfile::tempdir().unwrap();
    let path = serve_bytes(directory.path(), Vec::new());
    let error = Client::connect(&path, "disk", None, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, NbdError::Lost(_)), "{error}");
}
