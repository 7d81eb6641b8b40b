//! Writes to a guest's disks, recorded and read over QEMU's own NBD server.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::nbd::{ALLOCATION, Client, DIRTY, Extent, HOLE, dirty_bitmap};
use serde_json::{Value, json};
use whimbrel_qemu::recording::{RecordError, RecordedDisk, Recording, WriteCap, remove_leftovers};

use crate::support::{Version, Vm, args, qcow2, versions};

const PATIENCE: Duration = Duration::from_mins(1);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A QEMU with two disks, one qcow2 on a backing file and one raw, and a socket for its NBD server.
struct Disks {
    vm: Vm,
    socket: PathBuf,
    listener: UnixListener,
    dir: tempfile::TempDir,
}

impl Disks {
    fn new(version: &Version) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        qcow2(Path::new(&path("base.qcow2")), "32M");
        let overlay = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"];
        let made = std::process::Command::new("qemu-img")
            .args(overlay)
            .args([path("base.qcow2"), path("a.qcow2")])
            .status();
        assert!(made.unwrap().success());
        std::fs::File::create(path("b.raw")).unwrap().set_len(16 * MIB).unwrap();
        let options = args(&format!(
            "-S -nodefaults -m 16 -drive if=none,id=a,file={},format=qcow2,cache=none -device virtio-blk-pci,drive=a
             -blockdev driver=raw,node-name=b,file.driver=file,file.filename={} -device virtio-blk-pci,drive=b",
            path("a.qcow2"),
            path("b.raw"),
        ));
        let vm = version.start(dir.path(), "vm", &options);
        let socket = dir.path().join("nbd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        Self { vm, socket, listener, dir }
    }

    fn recorded(&mut self) -> Vec<RecordedDisk> {
        let blocks = self.vm.command("query-block", Value::Null);
        let disk = |block: &Value| RecordedDisk {
            node: block["inserted"]["node-name"].as_str().unwrap().to_owned(),
            bytes: block["inserted"]["image"]["virtual-size"].as_u64().unwrap(),
        };
        blocks.as_array().unwrap().iter().map(disk).collect()
    }

    fn begin(&mut self) -> Result<Recording, RecordError> {
        let disks = self.recorded();
        Recording::begin(&mut self.vm.qmp, self.listener.as_fd(), disks)
    }

    /// Writes as a guest would.
    fn write(&mut self, disk: usize, pattern: u8, offset: u64, bytes: u64) {
        let blocks = self.vm.command("query-block", Value::Null);
        let device = blocks[disk]["qdev"].as_str().unwrap();
        let reply = self.vm.qmp.hmp(&format!("qemu-io -d {device} \"write -P {pattern} {offset} {bytes}\""));
        // The tool reports the write on its standard output.
        assert_eq!(reply.unwrap(), "");
    }

    fn client(&self, export: &str, context: &str) -> Client {
        Client::connect(&self.socket, export, Some(context), PATIENCE).unwrap()
    }

    /// Returns the ranges that were written on each disk since the last call, as pairs of start and end.
    fn frozen(&mut self, recording: &mut Recording) -> Vec<Vec<(u64, u64)>> {
        let frozen = recording.freeze(&mut self.vm.qmp).unwrap().to_vec();
        let of_disk = |frozen: &whimbrel_qemu::recording::FrozenBitmap| {
            let mut client = self.client(&frozen.export, &dirty_bitmap(&frozen.bitmap));
            let whole = 0..client.size_bytes();
            let extents = client.status(whole).unwrap();
            let dirty = |extent: &Extent| extent.status & DIRTY != 0;
            extents.into_iter().filter(dirty).map(|extent| (extent.bytes.start, extent.bytes.end)).collect()
        };
        frozen.iter().map(of_disk).collect()
    }

    /// Checks that none of our objects is in QEMU.
    fn is_clean(&mut self) {
        assert_eq!(self.vm.command("query-block-exports", Value::Null), json!([]));
        let nodes = self.vm.command("query-named-block-nodes", json!({ "flat": true }));
        assert!(!nodes.to_string().contains("whimbrel-"), "{nodes}");
    }
}

#[test]
fn every_write_is_in_exactly_one_round() {
    for version in versions() {
        let mut disks = Disks::new(&version);
        let mut recording = disks.begin().unwrap();
        let none = Vec::new();
        assert_eq!(disks.frozen(&mut recording), [none.clone(), none.clone()], "{}", version.name);

        disks.write(0, 7, MIB, 100 * KIB);
        disks.write(1, 8, 5 * MIB, 4 * KIB);
        let found = disks.frozen(&mut recording);
        let written = [vec![(MIB, MIB + 100 * KIB)], vec![(5 * MIB, 5 * MIB + 4 * KIB)]];
        assert_eq!(found, written, "{}", version.name);

        // The old bitmaps are removed before the next ones are made.
        recording.thaw(&mut disks.vm.qmp).unwrap();
        disks.write(1, 9, 0, 4 * KIB);
        assert_eq!(disks.frozen(&mut recording), [none.clone(), vec![(0, 4 * KIB)]], "{}", version.name);
        assert_eq!(disks.frozen(&mut recording), [none.clone(), none], "{}", version.name);

        // The contents are the current ones.
        let mut client = disks.client(&Recording::data_export(0), ALLOCATION);
        let mut read = vec![0; 100 * KIB as usize];
        client.read(MIB, &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 7));
        let holes = client.status(0..32 * MIB).unwrap();
        assert!(
            holes.iter().any(|extent| extent.bytes.start == MIB && extent.status & HOLE == 0),
            "{holes:?}"
        );

        recording.end(&mut disks.vm.qmp).unwrap();
        disks.is_clean();
        // The server is free again.
        let listener = UnixListener::bind(disks.dir.path().join("again.sock")).unwrap();
        let recorded = disks.recorded();
        let second = Recording::begin(&mut disks.vm.qmp, listener.as_fd(), recorded).unwrap();
        second.end(&mut disks.vm.qmp).unwrap();
    }
}

#[test]
fn an_nbd_server_of_another_client_stays() {
    for version in versions() {
        let mut disks = Disks::new(&version);
        let path = disks.dir.path().join("theirs.sock");
        let address = json!({ "addr": { "type": "unix", "data": { "path": path } } });
        disks.vm.command("nbd-server-start", address);
        let error = disks.begin().unwrap_err();
        assert!(matches!(error, RecordError::ServerInUse(_)), "{error}");
        disks.is_clean();
        disks.vm.command("nbd-server-stop", Value::Null);
        // The descriptor's name is free again.
        disks.begin().unwrap().end(&mut disks.vm.qmp).unwrap();
    }
}

#[test]
fn leftovers_of_a_dead_agent_are_found() {
    for version in versions() {
        let mut disks = Disks::new(&version);
        let mut recording = disks.begin().unwrap();
        disks.write(0, 1, 0, 4 * KIB);
        let served = recording.freeze(&mut disks.vm.qmp).unwrap()[0].clone();
        let _client = disks.client(&served.export, &dirty_bitmap(&served.bitmap));
        drop(recording);
        assert!(remove_leftovers(&mut disks.vm.qmp).unwrap(), "{}", version.name);
        assert!(!remove_leftovers(&mut disks.vm.qmp).unwrap(), "{}", version.name);
        disks.is_clean();
        // Its server still runs: an agent that knows that it was ours stops it.
        disks.vm.command("nbd-server-stop", Value::Null);
    }
}

#[test]
fn a_node_that_is_not_there_leaves_nothing() {
    for version in versions() {
        let mut disks = Disks::new(&version);
        let mut recorded = disks.recorded();
        recorded[1].node = "none".to_owned();
        let listener = disks.listener.try_clone().unwrap();
        let error = Recording::begin(&mut disks.vm.qmp, listener.as_fd(), recorded).unwrap_err();
        assert!(error.to_string().contains("none"), "{error}");
        disks.is_clean();
        disks.begin().unwrap().end(&mut disks.vm.qmp).unwrap();
    }
}

/// Writes after a snapshot are in another node than the one that is recorded.
#[test]
fn a_disk_that_changes_is_detected() {
    for version in versions() {
        let mut disks = Disks::new(&version);
        let mut recording = disks.begin().unwrap();
        recording.freeze(&mut disks.vm.qmp).unwrap();
        // QEMU itself does not allow that on a disk that is served.
        let resized = disks.vm.qmp.run("block_resize", json!({ "node-name": "b", "size": 20 * MIB }));
        assert!(resized.unwrap_err().is_refusal(), "{}", version.name);
        recording.end(&mut disks.vm.qmp).unwrap();

        let stale = disks.recorded();
        disks.vm.command("block_resize", json!({ "node-name": "b", "size": 20 * MIB }));
        let listener = UnixListener::bind(disks.dir.path().join("stale.sock")).unwrap();
        let error = Recording::begin(&mut disks.vm.qmp, listener.as_fd(), stale).unwrap_err();
        assert!(error.to_string().contains("has 20971520 bytes and had 16777216"), "{error}");
        disks.is_clean();

        let listener = UnixListener::bind(disks.dir.path().join("again.sock")).unwrap();
        let recorded = disks.recorded();
        let mut recording = Recording::begin(&mut disks.vm.qmp, listener.as_fd(), recorded).unwrap();
        let snapshot = disks.dir.path().join("snapshot.qcow2");
        let snapshot = json!({ "device": "a", "snapshot-file": snapshot, "format": "qcow2" });
        disks.vm.command("blockdev-snapshot-sync", snapshot);
        disks.write(0, 5, 0, 4 * KIB);
        let error = recording.freeze(&mut disks.vm.qmp).unwrap_err();
        assert!(error.to_string().contains("snapshot"), "{error}");
        recording.end(&mut disks.vm.qmp).unwrap();
        disks.is_clean();
    }
}

/// Two caps, one after the other, for both disks together; removed with the recording, or when an agent that died
/// is cleaned up after. A disk that another client has throttled stays as it is.
#[test]
fn writes_are_counted_and_capped() {
    for version in versions() {
        let mut disks = Disks::new(&version);
        let caps = |disks: &mut Disks| -> Vec<(u64, u64, Option<String>)> {
            let blocks = disks.vm.command("query-block", Value::Null);
            let of = |block: &Value| {
                let inserted = &block["inserted"];
                let group = inserted["group"].as_str().map(str::to_owned);
                (inserted["bps_wr"].as_u64().unwrap(), inserted["iops_wr"].as_u64().unwrap(), group)
            };
            blocks.as_array().unwrap().iter().map(of).collect()
        };
        let none = [(0, 0, None), (0, 0, None)];
        let mut recording = disks.begin().unwrap();
        let before = recording.written(&mut disks.vm.qmp).unwrap();
        // Only this way of writing from inside counts as the guest's own.
        for (disk, bytes) in [(0, 8 * KIB), (1, 4 * KIB)] {
            let blocks = disks.vm.command("query-block", Value::Null);
            let device = blocks[disk]["qdev"].as_str().unwrap();
            for what in [format!("aio_write 0 {bytes}"), "aio_flush".to_owned()] {
                disks.vm.qmp.hmp(&format!("qemu-io -d {device} \"{what}\"")).unwrap();
            }
        }
        let after = recording.written(&mut disks.vm.qmp).unwrap();
        assert_eq!(
            (after.writes - before.writes, after.bytes - before.bytes),
            (2, 12 * KIB),
            "{}",
            version.name
        );

        let ours = Some("whimbrel-writes".to_owned());
        let cap = WriteCap { bytes_per_s: Some(MIB), writes_per_s: None };
        recording.cap_writes(&mut disks.vm.qmp, cap).unwrap();
        assert_eq!(caps(&mut disks), [(MIB, 0, ours.clone()), (MIB, 0, ours.clone())], "{}", version.name);
        let cap = WriteCap { bytes_per_s: None, writes_per_s: Some(488) };
        recording.cap_writes(&mut disks.vm.qmp, cap).unwrap();
        assert_eq!(caps(&mut disks), [(0, 488, ours.clone()), (0, 488, ours)], "{}", version.name);
        recording.cap_writes(&mut disks.vm.qmp, WriteCap::default()).unwrap();
        assert_eq!(caps(&mut disks), none, "{}", version.name);
        recording.cap_writes(&mut disks.vm.qmp, cap).unwrap();
        recording.end(&mut disks.vm.qmp).unwrap();
        assert_eq!(caps(&mut disks), none, "{}", version.name);
        disks.is_clean();

        let device = disks.vm.command("query-block", Value::Null)[1]["qdev"].clone();
        let theirs = json!({
            "id": device, "bps": 0, "bps_rd": 0, "bps_wr": 5 * MIB, "iops": 0, "iops_rd": 0, "iops_wr": 0,
        });
        disks.vm.command("block_set_io_throttle", theirs);
        let listener = UnixListener::bind(disks.dir.path().join("again.sock")).unwrap();
        let recorded = disks.recorded();
        let mut recording = Recording::begin(&mut disks.vm.qmp, listener.as_fd(), recorded).unwrap();
        recording.cap_writes(&mut disks.vm.qmp, cap).unwrap();
        let kept = |caps: &[(u64, u64, Option<String>)]| (caps[0].1, caps[1].0);
        assert_eq!(kept(&caps(&mut disks)), (488, 5 * MIB), "{}", version.name);
        // Its agent dies.
        drop(recording);
        assert!(remove_leftovers(&mut disks.vm.qmp).unwrap());
        assert_eq!(kept(&caps(&mut disks)), (0, 5 * MIB), "{}", version.name);
    }
}
