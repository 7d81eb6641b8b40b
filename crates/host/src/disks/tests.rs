//! A disk that is written while it is copied, by a real QEMU into an image of another format.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::{BlockReader, BlockWriter, PageSet};
use block::image::{self, Format, Server};
use qemu::process::{Launch, StartedQemu};
use qemu::qmp::Qmp;
use qemu::recording::{RecordedDisk, Recording};

use super::*;

const PATIENCE: Duration = Duration::from_mins(1);
const MIB: u64 = 1 << 20;
/// A multiple of neither the page size nor the chunk size.
const BYTES: u64 = 9 * MIB + 1536;

/// A QEMU with one disk, to which it writes like a guest.
struct WritingQemu {
    qmp: Qmp,
    started: StartedQemu,
    disk: PathBuf,
}

impl WritingQemu {
    fn new(directory: &Path, format: Format) -> Self {
        let disk = directory.join("source");
        image::create(&disk, format, BYTES).unwrap();
        let monitor = directory.join("qmp");
        let drive = format!("if=none,id=d,format={format},discard=unmap,file={}", disk.display());
        let program = std::env::var_os("WHIMBREL_QEMU_7").unwrap_or("qemu-system-x86_64".into());
        let words = ["-S", "-nodefaults", "-display", "none", "-m", "16", "-accel", "tcg", "-drive", &drive];
        let mut argv = vec![program];
        argv.extend(words.map(Into::into));
        argv.extend(["-device", "virtio-blk-pci,drive=d"].map(Into::into));
        argv.extend(qemu::command::monitor(&monitor).map(Into::into));
        let launch = Launch {
            argv,
            env: Vec::new(),
            cwd: None,
            log: directory.join("log"),
            qmp: monitor,
            scope: None,
            oom_score_adj: 0,
        };
        let (started, qmp) = qemu::process::start(&launch, Instant::now() + PATIENCE).unwrap();
        Self { qmp, started, disk }
    }

    fn does(&mut self, what: &str) {
        let output =
            self.qmp.hmp(&format!("qemu-io -d /machine/peripheral-anon/device[0]/virtio-backend \"{what}\""));
        assert_eq!(output.unwrap(), "");
    }

    /// Records the writes to its disk, and reads it.
    fn begin_leaving(&mut self, directory: &Path) -> (LeavingDisk, DiskLog) {
        let socket = directory.join("nbd");
        let listener = UnixListener::bind(&socket).unwrap();
        let blocks: serde_json::Value = self.qmp.execute("query-block", serde_json::Value::Null).unwrap();
        let node = blocks[0]["inserted"]["node-name"].as_str().unwrap().to_owned();
        let recorded = vec![RecordedDisk { node, bytes: BYTES }];
        let recording = Recording::begin(&mut self.qmp, listener.as_fd(), recorded).unwrap();
        let disk = LeavingDisk::open("d", 0, &socket, PATIENCE).unwrap();
        (disk, DiskLog::new(recording, SocketPath(socket), vec!["d".to_owned()], PATIENCE, None))
    }
}

impl Drop for WritingQemu {
    fn drop(&mut self) {
        let _ = self.qmp.run("quit", serde_json::Value::Null);
        self.started.wait(Instant::now() + PATIENCE);
    }
}

/// Copies pages as the data plane does.
fn copy(pages: &PageSet, from: &dyn BlockReader, to: &dyn BlockWriter) {
    const PAGE: u64 = PAGE_BYTES;
    for run in pages.runs() {
        let (start, end) = (run.start * PAGE, run.end * PAGE);
        let present = from.first_present(start..end).unwrap().next_multiple_of(PAGE).min(end);
        to.drop_pages(start..present).unwrap();
        let mut bytes = vec![1; (end - present) as usize];
        from.read(present, &mut bytes).unwrap();
        to.write(present, &bytes).unwrap();
    }
}

fn same(one: &Path, other: &Path) -> bool {
    Command::new("qemu-img").args(["compare", "-q", "-U"]).args([one, other]).status().unwrap().success()
}

#[test]
fn what_is_written_meanwhile_arrives() {
    for (from, to) in [(Format::Raw, Format::Qcow2), (Format::Qcow2, Format::Raw)] {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("destination");
        image::create(&there, to, BYTES).unwrap();
        let server = Server::start(&there, to, &directory.path().join("image"), 2, PATIENCE).unwrap();
        let server = Arc::new(server);
        let copied = destination::CopiedDisk::new("d", BYTES, &server);

        let mut source = WritingQemu::new(directory.path(), from);
        source.does("write -P 1 1M 3M");
        // The last bytes of the disk.
        source.does(&format!("write -P 2 {} 1536", 9 * MIB));
        let (disk, mut log) = source.begin_leaving(directory.path());
        assert_eq!((disk.disk_bytes(), disk.bytes(), copied.bytes()), (BYTES, 9 * MIB + 4096, disk.bytes()));
        let first = first_pages(&disk, false).unwrap();
        assert!(first.contains(256) && !first.contains(2000), "{from}: only what is there");
        copy(&first, &disk, &copied);

        for round in 0..3 {
            source.does(&format!("write -P {} {}M 64k", 10 + round, 2 * round));
            source.does(&format!("write -P 7 {}k 512", 6000 + 512 * round));
            source.does(&format!("discard {}M 512k", 1 + round));
            let mut dirty = vec![PageSet::new(disk.bytes())];
            let scan = log.take(&mut source.qmp, &mut dirty).unwrap();
            assert_eq!(scan.pages, dirty[0].count());
            assert!(dirty[0].contains(512 * round) && !dirty[0].contains(2200), "{from}");
            copy(&dirty[0], &disk, &copied);
            log.tidy(&mut source.qmp).unwrap();
        }
        let mut dirty = vec![PageSet::new(disk.bytes())];
        assert_eq!(log.take(&mut source.qmp, &mut dirty).unwrap().pages, 0, "{from}");
        log.end(&mut source.qmp).unwrap();
        drop((disk, copied));
        Arc::into_inner(server).unwrap().finish().unwrap();
        // QEMU writes its in-memory metadata of an image when it ends.
        let left = source.disk.clone();
        drop(source);
        assert!(same(&left, &there), "{from} to {to}");
        // The recording detects writes of other programs.
        let write = ["-f", from.as_str(), "-c", "write -q -P 9 8M 512"];
        assert!(Command::new("qemu-io").args(write).arg(&left).status().unwrap().success());
        assert!(!same(&left, &there), "{from} to {to}");
    }
}
