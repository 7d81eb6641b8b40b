//! Images that are created, filled through their server, and closed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use whimbrel_block::image::{Format, ImageError, Server, create, end_unused_server};
use whimbrel_block::reading::ImageReader;

const TIMEOUT: Duration = Duration::from_mins(1);
const MIB: u64 = 1 << 20;

fn serve(directory: &Path, image: &Path, format: Format) -> Server {
    Server::start(image, format, &directory.join("image.sock"), 2, TIMEOUT).unwrap()
}

/// Returns the contents of an image, read by another of QEMU's tools.
fn contents(image: &Path, format: Format) -> Vec<u8> {
    let raw = image.with_extension("contents");
    let converted = Command::new("qemu-img")
        .args(["convert", "-f", format.as_str(), "-O", "raw"])
        .args([image, &raw])
        .status();
    assert!(converted.unwrap().success());
    fs::read(&raw).unwrap()
}

#[test]
fn an_image_is_filled_and_let_go_of() {
    for format in [Format::Raw, Format::Qcow2] {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk");
        // Not a multiple of anything but sectors.
        let bytes = 16 * MIB + 512;
        create(&image, format, bytes).unwrap();
        let server = serve(directory.path(), &image, format);
        let mut first = server.client().unwrap();
        let mut second = server.client().unwrap();
        assert_eq!(first.size_bytes(), bytes, "{format}");
        first.write(MIB, &[5; 4096]).unwrap();
        second.write(16 * MIB, &[6; 512]).unwrap();
        second.write(2 * MIB, &vec![7; 65536]).unwrap();
        first.write_zeroes(2 * MIB..2 * MIB + 65536).unwrap();
        drop((first, second));
        server.finish().unwrap();
        assert!(!directory.path().join("image.sock").exists());

        let mut expected = vec![0; bytes as usize];
        expected[MIB as usize..MIB as usize + 4096].fill(5);
        expected[16 * MIB as usize..].fill(6);
        assert!(contents(&image, format) == expected, "{format}");
        let allocated = fs::metadata(&image).unwrap().blocks() * 512;
        assert!(allocated < 2 * MIB, "{format}: {allocated} bytes");
    }
}

#[test]
fn an_existing_file_is_kept_and_errors_name_their_cause() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    fs::write(&image, "somebody's").unwrap();
    let error = create(&image, Format::Qcow2, MIB).unwrap_err();
    assert!(matches!(error, ImageError::Make { .. }), "{error}");
    assert_eq!(fs::read_to_string(&image).unwrap(), "somebody's");

    let nowhere = directory.path().join("no/where");
    let error = create(&nowhere, Format::Raw, MIB).unwrap_err();
    assert!(error.to_string().contains("no/where"), "{error}");

    let socket = directory.path().join("image.sock");
    let error = Server::start(&image, Format::Qcow2, &socket, 1, TIMEOUT).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, ImageError::Tool { tool: "qemu-nbd", .. }), "{message}");
    assert!(message.contains("qcow2"), "{message}");
}

#[test]
fn a_server_that_is_given_up_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    create(&image, Format::Qcow2, MIB).unwrap();
    let server = serve(directory.path(), &image, Format::Qcow2);
    let client = server.client().unwrap();
    drop(server);
    drop(client);
    // No process has it locked.
    serve(directory.path(), &image, Format::Qcow2).finish().unwrap();
}

/// A remaining connection keeps the server alive, and is reported.
#[test]
fn an_image_is_not_let_go_of_while_it_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    create(&image, Format::Raw, MIB).unwrap();
    let socket = directory.path().join("image.sock");
    let server = Server::start(&image, Format::Raw, &socket, 2, Duration::from_secs(5)).unwrap();
    let _client = server.client().unwrap();
    let error = server.finish().unwrap_err();
    assert!(error.to_string().contains("a connection is still open"), "{error}");
}

/// Images can be read while other programs have them open, and in any format.
#[test]
fn images_are_equal_when_what_is_in_them_is() {
    const CHUNK: u64 = MIB;
    let directory = tempfile::tempdir().unwrap();
    let bytes = 5 * MIB + 1536;
    let images = [Format::Raw, Format::Qcow2].map(|format| {
        let image = directory.path().join(format!("a,disk.{format}"));
        create(&image, format, bytes).unwrap();
        let socket = directory.path().join(format!("{format}.sock"));
        (image.clone(), format, Server::start(&image, format, &socket, 1, TIMEOUT).unwrap())
    });
    let hashes = |index: usize, chunks| {
        let (image, format, server) = &images[index];
        server.flush().unwrap();
        let socket = directory.path().join("compare.sock");
        let mut reading =
            ImageReader::open(image.to_str().unwrap(), format.as_str(), None, &socket, TIMEOUT).unwrap();
        assert_eq!(reading.size_bytes(), bytes);
        reading.hash_chunks(CHUNK, chunks).unwrap()
    };
    let write = |index: usize, at: u64, data: &[u8]| {
        let (.., server) = &images[index];
        server.client().unwrap().write(at, data).unwrap();
    };
    let empty = hashes(0, 0..u64::MAX);
    assert_eq!(empty.len(), 6);
    assert!(empty[..5].iter().all(|hash| *hash == empty[0]) && empty[5] != empty[0]);
    assert_eq!(empty, hashes(1, 0..u64::MAX));
    for index in [0, 1] {
        write(index, 2 * MIB - 512, &[9; 1024]);
        write(index, 5 * MIB + 1024, &[8; 512]);
    }
    let all = hashes(0, 0..u64::MAX);
    let differs = |chunk: usize| all[chunk] != empty[chunk];
    assert_eq!([0, 1, 2, 3, 4, 5].map(differs), [false, true, true, false, false, true]);
    assert_eq!(all, hashes(1, 0..u64::MAX));
    assert_eq!(all[1..3], hashes(1, 1..3));
    assert_eq!(hashes(1, 6..9).len(), 0);
    // Written zeros count the same as unwritten ranges.
    write(1, 3 * MIB, &vec![0; MIB as usize]);
    assert_eq!(all, hashes(1, 0..u64::MAX));
    write(1, 5 * MIB + 1535, &[7]);
    assert_ne!(all[5..], hashes(1, 5..6));
}

/// A server whose starter died before it connected would wait for ever, and hold the image.
#[test]
fn a_server_that_nobody_uses_is_ended() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("disk"), directory.path().join("disk-0.sock"));
    create(&image, Format::Raw, MIB).unwrap();
    let words = ["--format", "raw", "--shared", "3", "--export-name", "disk", "--socket"];
    let mut server = Command::new("qemu-nbd").args(words).args([&socket, &image]).spawn().unwrap();
    // It may not listen yet.
    while server.try_wait().unwrap().is_none() {
        end_unused_server(&socket);
    }
    // No server listens any more.
    end_unused_server(&socket);
}

/// Each image of a chain has its own content, while a QEMU has the chain open.
#[test]
fn an_image_is_read_without_those_below_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (base, over) = (at("base,1.qcow2"), at("over \"2\".qcow2"));
    create(&base, Format::Qcow2, 4 * MIB).unwrap();
    let fill = |image: &Path, offset: u64, byte: u8| {
        let server = Server::start(image, Format::Qcow2, &at("fill.sock"), 1, TIMEOUT).unwrap();
        server.client().unwrap().write(offset, &[byte; 4096]).unwrap();
        server.finish().unwrap();
    };
    fill(&base, 0, 1);
    fill(&base, 2 * MIB, 2);
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
        .args([&base, &over])
        .status()
        .unwrap();
    assert!(made.success());
    fill(&over, 2 * MIB, 3);
    let _in_use = Server::start(&over, Format::Qcow2, &at("use.sock"), 1, TIMEOUT).unwrap();
    let read = |image: &Path| {
        let mut reading = ImageReader::open_layer(image, "qcow2", &at("read.sock"), TIMEOUT).unwrap();
        let mut byte = [0];
        let bytes = [0, 2 * MIB].map(|offset| {
            reading.read(offset, &mut byte).unwrap();
            byte[0]
        });
        let allocated = reading.allocated(0..4 * MIB).unwrap();
        (bytes, allocated.iter().map(|extent| extent.start).collect::<Vec<_>>())
    };
    assert_eq!(read(&base), ([1, 2], vec![0, 2 * MIB]));
    assert_eq!(read(&over), ([0, 3], vec![2 * MIB]));
}
