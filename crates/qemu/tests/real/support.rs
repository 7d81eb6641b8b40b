//! Shared parts of the tests on a real QEMU: the versions to test, a guest of 512 bytes, waiting.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use whimbrel_qemu::process::{Launch, StartedQemu, start};
use whimbrel_qemu::qmp::Qmp;
use whimbrel_qemu::ram::ram_blocks;

/// Boot sector that increments the word at 0x600 and writes a dot to the first serial port at each
/// tick of the BIOS's clock (18 a second), and sleeps between:
///
/// ```text
///   cli; xor %ax,%ax; mov %ax,%ds; mov %ax,%ss; mov $0x7000,%sp; sti
/// 1: hlt; incl 0x600; mov $0x3f8,%dx; mov $'.',%al; out %al,%dx; jmp 1b
/// ```
const TICKER: [u8; 25] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x70, 0xfb, 0xf4, 0x66, 0xff, 0x06, 0x00, 0x06,
    0xba, 0xf8, 0x03, 0xb0, 0x2e, 0xee, 0xeb, 0xf2,
];
/// Address at which [`TICKER`] counts.
pub(crate) const COUNTER: u64 = 0x600;

/// A QEMU to test with.
#[derive(Debug, Clone)]
pub(crate) struct Version {
    pub(crate) name: &'static str,
    pub(crate) binary: PathBuf,
    pub(crate) data: Vec<PathBuf>,
}

/// Reports a test that could not be tried on this machine; `make test` lists it at its end.
pub(crate) fn not_tried(what: &str) {
    println!("NOT TRIED: {what}");
    if let Some(list) = std::env::var_os("WHIMBREL_NOT_TRIED") {
        let list = OpenOptions::new().append(true).create(true).open(list);
        list.and_then(|mut list| std::io::Write::write_all(&mut list, format!("{what}\n").as_bytes()))
            .unwrap();
    }
}

/// Returns the QEMUs to test: `WHIMBREL_QEMU_7` and `WHIMBREL_QEMU_10` (with
/// `WHIMBREL_QEMU_10_DATA`), or the one on the PATH.
pub(crate) fn versions() -> Vec<Version> {
    let mut found = Vec::new();
    for name in ["7", "10"] {
        let Some(binary) = std::env::var_os(format!("WHIMBREL_QEMU_{name}")) else {
            not_tried(&format!("QEMU itself: WHIMBREL_QEMU_{name} is not set"));
            continue;
        };
        let data = std::env::var(format!("WHIMBREL_QEMU_{name}_DATA")).unwrap_or_default();
        let data = data.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect();
        found.push(Version { name, binary: binary.into(), data });
    }
    if found.is_empty() {
        found.push(Version { name: "PATH", binary: "qemu-system-x86_64".into(), data: Vec::new() });
    }
    found
}

/// A running guest, killed when dropped.
pub(crate) struct Vm {
    pub(crate) qmp: Qmp,
    pub(crate) started: StartedQemu,
    pub(crate) dir: PathBuf,
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.started.pid as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        self.started.wait(deadline());
    }
}

/// Returns a deadline that only a hanging test reaches.
pub(crate) fn deadline() -> Instant {
    Instant::now() + Duration::from_mins(1)
}

/// Polls until the condition holds.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = deadline();
    while !condition() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn args(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

impl Version {
    /// Returns the first arguments of every command line of this version.
    pub(crate) fn argv(&self) -> Vec<OsString> {
        let mut argv = vec![self.binary.clone().into_os_string()];
        for dir in &self.data {
            argv.push("-L".into());
            argv.push(dir.into());
        }
        argv
    }

    /// Starts a QEMU with its files (monitor, log, serial) in `dir`, named `name`.
    pub(crate) fn start(&self, dir: &Path, name: &str, arguments: &[String]) -> Vm {
        let mut argv = self.argv();
        let qmp = dir.join(format!("{name}.qmp"));
        argv.extend(["-accel", "tcg", "-display", "none", "-qmp"].map(OsString::from));
        argv.push(format!("unix:{},server=on,wait=off", qmp.display()).into());
        argv.extend(arguments.iter().map(OsString::from));
        launch(dir, name, argv, qmp)
    }
}

/// Starts exactly this command line, whose monitor is `qmp`.
pub(crate) fn launch(dir: &Path, name: &str, argv: Vec<OsString>, qmp: PathBuf) -> Vm {
    let launch = Launch {
        argv,
        env: Vec::new(),
        cwd: Some(dir.to_owned()),
        log: dir.join(format!("{name}.log")),
        qmp,
        scope: None,
        oom_score_adj: 0,
    };
    let (started, qmp) = start(&launch, deadline()).unwrap();
    Vm { qmp, started, dir: dir.to_owned() }
}

impl Vm {
    pub(crate) fn pid(&self) -> u32 {
        self.started.pid
    }

    pub(crate) fn command(&mut self, command: &str, args: Value) -> Value {
        self.qmp.execute(command, args).unwrap()
    }

    /// Returns guest-physical memory as QEMU itself reads it.
    pub(crate) fn physical(&mut self, address: u64, length: u64) -> Vec<u8> {
        let file = self.dir.join(format!("physical.{}", self.pid()));
        self.command("pmemsave", json!({"val": address, "size": length, "filename": file}));
        std::fs::read(&file).unwrap()
    }

    /// Returns the count of [`TICKER`].
    pub(crate) fn count(&mut self) -> u32 {
        u32::from_le_bytes(self.physical(COUNTER, 4).try_into().unwrap())
    }

    /// Waits until the guest ticks.
    pub(crate) fn wait_ticking(&mut self) {
        let before = self.count();
        until("the guest ticks", || self.count() != before);
    }
}

/// Writes a disk image with [`TICKER`] on it, and returns options that boot from it.
pub(crate) fn ticker_disk(dir: &Path) -> String {
    let path = dir.join("boot.img");
    let mut sector = TICKER.to_vec();
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector.resize(1 << 20, 0);
    std::fs::write(&path, sector).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Creates an empty qcow2 image.
pub(crate) fn qcow2(path: &Path, size: &str) {
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(path)
        .arg(size)
        .status()
        .unwrap();
    assert!(made.success());
}

/// Copies all RAM blocks from one guest to the other, which must have the same.
pub(crate) fn copy_memory(source: &mut Vm, destination: &mut Vm) {
    for_all_memory(source, destination, |from, to, chunk| {
        from.0.read_exact_at(chunk, from.1).unwrap();
        to.0.write_all_at(chunk, to.1).unwrap();
    });
}

pub(crate) fn assert_memory_equal(source: &mut Vm, destination: &mut Vm) {
    let mut other = Vec::new();
    for_all_memory(source, destination, |from, to, chunk| {
        from.0.read_exact_at(chunk, from.1).unwrap();
        other.resize(chunk.len(), 0);
        to.0.read_exact_at(&mut other, to.1).unwrap();
        assert!(*chunk == other, "memory differs near {:#x} of the source", from.1);
    });
}

fn for_all_memory(
    source: &mut Vm,
    destination: &mut Vm,
    mut with: impl FnMut((&File, u64), (&File, u64), &mut Vec<u8>),
) {
    let (from, to) = (source.pid(), destination.pid());
    let ours = ram_blocks(&mut source.qmp, from).unwrap();
    let theirs = ram_blocks(&mut destination.qmp, to).unwrap();
    assert_eq!(ours.len(), theirs.len());
    let open = |pid: u32| OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let (from, to) = (open(from), open(to));
    for block in &ours {
        let other = theirs.iter().find(|other| other.name == block.name);
        let other = other.unwrap_or_else(|| panic!("no block {} on the destination", block.name));
        assert_eq!(block.used_bytes, other.used_bytes, "{}", block.name);
        let mut at = 0;
        while at < block.used_bytes {
            let mut chunk = vec![0; (block.used_bytes - at).min(4 << 20) as usize];
            with((&from, block.host_address + at), (&to, other.host_address + at), &mut chunk);
            at += chunk.len() as u64;
        }
    }
}
