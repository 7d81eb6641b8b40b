//! Handover of a guest from one QEMU to another by the crate's own means, and the recipe for the
//! destination: before it is resumed, no virtual CPU has run, no image lock is acquired, no packet
//! was sent. Each ingredient is also omitted once, to show the failure that it prevents.

use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use whimbrel_qemu::control::{announce_self, blocked_reasons, cont, drain, status, stop};
use whimbrel_qemu::device_state::{
    DiskOwnership, Incoming, LoadError, StateError, capture, complete, disks, machine_type,
};
use whimbrel_qemu::recording::{RecordedDisk, Recording};

use crate::support::{
    Version, Vm, args, assert_memory_equal, copy_memory, deadline, launch, qcow2, ticker_disk, until,
    versions,
};

/// Two QEMUs of one guest, and their shared files.
struct Pair {
    source: Vm,
    destination: Vm,
    disk: PathBuf,
    /// Socket on which packets that the destination's guest (or QEMU for it) sends arrive.
    wire: UnixDatagram,
    dir: tempfile::TempDir,
}

const DEVICES: &str = "-machine q35 -m 64 -vga std -device qemu-xhci -device usb-tablet
    -device virtio-balloon-pci -device virtio-rng-pci -device virtio-serial-pci";

impl Pair {
    fn new(version: &Version, destination_options: &str) -> Self {
        Self::with(version, destination_options, false)
    }

    /// Starts both; `has_cd` adds a read-only image to each.
    fn with(version: &Version, destination_options: &str, has_cd: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let boot = ticker_disk(dir.path());
        let disk = path("disk.qcow2");
        qcow2(&disk, "16M");
        let cd = path("cd.iso");
        std::fs::File::create(&cd).unwrap().set_len(1 << 20).unwrap();
        let cd = format!("-drive file={},if=ide,index=2,media=cdrom,format=raw", cd.display());
        let more = args(if has_cd { &cd } else { "" });
        let options = |name: &str| {
            let mut options = args(&format!(
                "{DEVICES} -serial file:{serial} -drive file={boot},format=raw,if=ide,readonly=off
                 -drive file={disk},if=none,id=d0,cache=none,format=qcow2 -device virtio-blk-pci,drive=d0
                 -netdev dgram,id=n0,local.type=unix,local.path={local},remote.type=unix,remote.path={remote}
                 -device virtio-net-pci,netdev=n0 -device e1000,netdev=n1
                 -netdev dgram,id=n1,local.type=unix,local.path={local}1,remote.type=unix,remote.path={remote}",
                serial = path(&format!("{name}.serial")).display(),
                disk = disk.display(),
                local = path(&format!("{name}.net")).display(),
                remote = path(&format!("{name}.wire")).display(),
            ));
            options.extend(more.clone());
            options
        };
        let wire = UnixDatagram::bind(path("dst.wire")).unwrap();
        wire.set_nonblocking(true).unwrap();
        let mut source = version.start(dir.path(), "src", &options("src"));
        source.wait_ticking();
        let mut arguments = options("dst");
        arguments.extend(args(destination_options));
        let destination = version.start(dir.path(), "dst", &arguments);
        Self { source, destination, disk, wire, dir }
    }

    /// Stops the source, saves its device state and copies its memory.
    fn save(&mut self) -> Vec<u8> {
        stop(&mut self.source.qmp).unwrap();
        let raw = capture(&mut self.source.qmp, DiskOwnership::Held).unwrap();
        // After saving, because saving may write guest memory.
        copy_memory(&mut self.source, &mut self.destination);
        raw
    }

    fn prepare(&mut self) -> Incoming {
        let log = self.destination.started.log.clone();
        Incoming::prepare(&mut self.destination.qmp, Some(&log)).unwrap()
    }

    fn hand_over(&mut self) {
        let incoming = self.prepare();
        let raw = self.save();
        let machine = machine_type(&mut self.source.qmp).unwrap();
        let state = complete(&raw, &machine).unwrap();
        incoming.load(&mut self.destination.qmp, &state, deadline()).unwrap();
    }

    fn packets(&self) -> usize {
        let mut packet = [0; 2048];
        std::iter::from_fn(|| self.wire.recv(&mut packet).ok()).count()
    }
}

/// Returns the number of locks on an image whose owner writes, or forbids others to write. QEMU
/// marks permissions by read locks on single bytes: 100 + p where it has permission p, 200 + p where
/// it does not let others have it, and p is 1 for writing. A lock on byte 100 alone, held by a 7.2
/// that released its image, only means that it would like to read, and blocks no other process.
fn locks(path: &Path) -> usize {
    let inode = format!(":{}", path.metadata().unwrap().ino());
    let locks = std::fs::read_to_string("/proc/locks").unwrap();
    let is_held = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "->").collect();
        let byte = |at: usize| words[at].parse().unwrap_or(u64::MAX);
        words[5].ends_with(&inode) && [101, 201].iter().any(|wanted| (byte(6)..=byte(7)).contains(wanted))
    };
    locks.lines().filter(is_held).count()
}

fn registers(vm: &mut Vm) -> String {
    vm.qmp.hmp("info registers").unwrap()
}

fn instruction_pointer(vm: &mut Vm) -> String {
    let text = registers(vm);
    text.split_whitespace()
        .find(|word| word.starts_with("EIP=") || word.starts_with("RIP="))
        .unwrap()
        .to_owned()
}

fn on_each(options: &str, test: impl Fn(&mut Pair)) {
    for version in versions() {
        println!("QEMU {}", version.name);
        test(&mut Pair::new(&version, options));
    }
}

const RECIPE: &str = "-S -incoming defer";

#[test]
fn nothing_happens_before_the_guest_is_resumed() {
    on_each(RECIPE, |pair| {
        assert!(locks(&pair.disk) > 0, "the source holds its image");
        pair.hand_over();
        let disk = pair.disk.clone();
        let (source, destination) = (&mut pair.source, &mut pair.destination);
        // No virtual CPU has run.
        assert_eq!(status(&mut destination.qmp).unwrap().status, "paused");
        assert_eq!(registers(source), registers(destination));
        let counted = source.count();
        assert_eq!(destination.count(), counted);
        assert_eq!(destination.dir.join("dst.serial").metadata().unwrap().len(), 0);
        // No lock is held: the source has released its locks.
        assert_eq!(locks(&disk), 0);
        for vm in [&mut *source, &mut *destination] {
            assert_eq!(disks(&mut vm.qmp).unwrap(), DiskOwnership::Released);
        }
        // No packet was sent.
        assert_eq!(pair.packets(), 0);
        assert_memory_equal(&mut pair.source, &mut pair.destination);

        cont(&mut pair.destination.qmp).unwrap();
        assert!(locks(&disk) > 0, "the destination holds the image now");
        pair.destination.wait_ticking();
        assert!(pair.destination.count() > counted, "it went on where it was");
        until("dots appear", || pair.destination.dir.join("dst.serial").metadata().unwrap().len() > 0);
        // QEMU announces it by itself from now on, and on request.
        let mut announced = 0;
        let mut until_announced = |pair: &mut Pair, times: usize| {
            until("both cards are announced", || {
                announced += pair.packets();
                announced >= 2 * times
            });
        };
        until_announced(pair, 1);
        announce_self(&mut pair.destination.qmp).unwrap();
        until_announced(pair, 2);
    });
}

#[test]
fn the_source_can_take_the_guest_back() {
    on_each(RECIPE, |pair| {
        pair.hand_over();
        let counted = pair.source.count();
        assert_eq!(locks(&pair.disk), 0);
        cont(&mut pair.source.qmp).unwrap();
        assert!(locks(&pair.disk) > 0);
        pair.source.wait_ticking();
        assert!(pair.source.count() > counted);
        // The state can be saved a second time.
        stop(&mut pair.source.qmp).unwrap();
        assert!(capture(&mut pair.source.qmp, DiskOwnership::Held).unwrap().len() > 1000);
    });
}

/// Disks that are copied are read through exports. These acquire the disks again from a guest that has released
/// everything, or never held it since it arrived, but not read-only images: QEMU 7.2 would end if those were released
/// again.
#[test]
fn released_disks_can_be_copied() {
    let exported = |vm: &mut Vm, dir: &Path| {
        let blocks = vm.command("query-block", Value::Null);
        let writable = blocks.as_array().unwrap().iter().filter(|block| block["inserted"]["ro"] == false);
        let recorded: Vec<_> = writable
            .map(|block| RecordedDisk {
                node: block["inserted"]["node-name"].as_str().unwrap().to_owned(),
                bytes: block["inserted"]["image"]["virtual-size"].as_u64().unwrap(),
            })
            .collect();
        assert_eq!(recorded.len(), 2);
        let socket = dir.join("nbd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let recording = Recording::begin(&mut vm.qmp, listener.as_fd(), recorded).unwrap();
        std::fs::remove_file(&socket).unwrap();
        recording
    };
    for version in versions() {
        println!("QEMU {}", version.name);
        let mut pair = Pair::with(&version, RECIPE, true);
        let dir = pair.dir.path().to_owned();
        stop(&mut pair.source.qmp).unwrap();
        assert!(capture(&mut pair.source.qmp, DiskOwnership::Held).unwrap().len() > 1000);
        assert_eq!(locks(&pair.disk), 0);
        for _ in 0..2 {
            let recording = exported(&mut pair.source, &dir);
            assert!(locks(&pair.disk) > 0);
            let whose = disks(&mut pair.source.qmp).unwrap();
            assert!(capture(&mut pair.source.qmp, whose).unwrap().len() > 1000);
            recording.end(&mut pair.source.qmp).unwrap();
        }
        cont(&mut pair.source.qmp).unwrap();
        pair.source.wait_ticking();
        stop(&mut pair.source.qmp).unwrap();
        // The guest arrives, is not resumed, is copied, but does not leave; and then it does.
        pair.hand_over();
        let recording = exported(&mut pair.destination, &dir);
        recording.end(&mut pair.destination.qmp).unwrap();
        for _ in 0..2 {
            let whose = disks(&mut pair.destination.qmp).unwrap();
            assert!(capture(&mut pair.destination.qmp, whose).unwrap().len() > 1000);
        }
        cont(&mut pair.destination.qmp).unwrap();
        assert!(locks(&pair.disk) > 0);
        pair.destination.wait_ticking();
    }
}

/// A guest that stays paused keeps its disks released, and they cannot be released twice: an earlier save failed,
/// or the guest arrived paused. `cont` acquires them again in the end.
#[test]
fn a_paused_guest_is_saved_twice_and_moves_on() {
    on_each(RECIPE, |pair| {
        stop(&mut pair.source.qmp).unwrap();
        for whose in [DiskOwnership::Held, DiskOwnership::Released, DiskOwnership::Released] {
            assert_eq!(disks(&mut pair.source.qmp).unwrap(), whose);
            assert_eq!(locks(&pair.disk) > 0, whose == DiskOwnership::Held);
            assert!(capture(&mut pair.source.qmp, whose).unwrap().len() > 1000);
            assert_eq!(locks(&pair.disk), 0);
        }
        cont(&mut pair.source.qmp).unwrap();
        pair.source.wait_ticking();
        stop(&mut pair.source.qmp).unwrap();
        assert_eq!(disks(&mut pair.source.qmp).unwrap(), DiskOwnership::Held);
        assert!(locks(&pair.disk) > 0);
        // The guest arrives, is not resumed, and leaves again.
        pair.hand_over();
        assert_eq!(disks(&mut pair.destination.qmp).unwrap(), DiskOwnership::Released);
        assert!(capture(&mut pair.destination.qmp, DiskOwnership::Released).unwrap().len() > 1000);
        assert_eq!(locks(&pair.disk), 0);
        cont(&mut pair.destination.qmp).unwrap();
        assert!(locks(&pair.disk) > 0);
        pair.destination.wait_ticking();
    });
}

#[test]
fn there_and_back() {
    for version in versions() {
        let mut pair = Pair::new(&version, RECIPE);
        pair.hand_over();
        cont(&mut pair.destination.qmp).unwrap();
        pair.destination.wait_ticking();
        let counted = pair.destination.count();
        // The second destination replaces the first source.
        pair.source.command("quit", Value::Null);
        pair.source.started.wait(deadline());
        let command = std::fs::read(format!("/proc/{}/cmdline", pair.destination.pid())).unwrap();
        let argv = command
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(|word| std::ffi::OsString::from(String::from_utf8_lossy(word).replace("/dst.", "/back.")))
            .collect();
        let back = launch(pair.dir.path(), "back", argv, pair.dir.path().join("back.qmp"));
        pair.source = std::mem::replace(&mut pair.destination, back);
        pair.hand_over();
        cont(&mut pair.destination.qmp).unwrap();
        pair.destination.wait_ticking();
        assert!(pair.destination.count() > counted);
    }
}

#[test]
fn without_s_the_guest_runs_at_once() {
    on_each("-incoming defer", |pair| {
        let incoming = pair.prepare();
        let raw = pair.save();
        let state = complete(&raw, &machine_type(&mut pair.source.qmp).unwrap()).unwrap();
        let error = incoming.load(&mut pair.destination.qmp, &state, deadline()).unwrap_err();
        assert!(matches!(error, LoadError::NotPaused { .. }), "{error}");
        pair.destination.wait_ticking();
    });
}

/// Loads without one of the ingredients that [`Incoming::prepare`] provides.
fn load_bare(pair: &mut Pair, late_block_activate: bool, announce_rounds: Option<u64>, state: &[u8]) -> bool {
    let socket = pair.dir.path().join("state");
    let destination = &mut pair.destination;
    destination.command(
        "migrate-set-capabilities",
        json!({"capabilities": [
            {"capability": "late-block-activate", "state": late_block_activate},
            {"capability": "events", "state": true}]}),
    );
    if let Some(rounds) = announce_rounds {
        destination.command("migrate-set-parameters", json!({"announce-rounds": rounds}));
    }
    destination.command("migrate-incoming", json!({"uri": format!("unix:{}", socket.display())}));
    {
        use std::io::Write as _;
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let _ = stream.write_all(state);
    }
    loop {
        match destination.qmp.wait_event("MIGRATION", deadline()) {
            Ok(event) if event.data["status"] == "completed" => return true,
            Ok(event) if event.data["status"] == "failed" => return false,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

#[test]
fn without_late_block_activate_locks_are_taken() {
    on_each(RECIPE, |pair| {
        let raw = pair.save();
        let state = complete(&raw, &machine_type(&mut pair.source.qmp).unwrap()).unwrap();
        assert_eq!(locks(&pair.disk), 0);
        assert!(load_bare(pair, false, Some(0), &state));
        // 10.0 does not acquire images under -S even so; 7.2 does, and there is no way back.
        println!("locks after loading without late-block-activate: {}", locks(&pair.disk));
        if pair.destination.qmp.version().major == 7 {
            assert!(locks(&pair.disk) > 0);
            assert!(cont(&mut pair.source.qmp).is_err());
        }
    });
}

#[test]
fn with_the_default_announcement_packets_leave_unasked() {
    // Under -S they are queued until the guest is resumed; otherwise they are sent at once.
    for (options, let_go) in [(RECIPE, true), ("-incoming defer", false)] {
        on_each(options, |pair| {
            let raw = pair.save();
            let state = complete(&raw, &machine_type(&mut pair.source.qmp).unwrap()).unwrap();
            assert!(load_bare(pair, true, None, &state));
            if let_go {
                println!("packets before it is let go: {}", pair.packets());
                cont(&mut pair.destination.qmp).unwrap();
            }
            until("packets leave that nobody asked for", || pair.packets() > 0);
        });
    }
}

#[test]
fn an_incomplete_or_foreign_state_is_refused_with_qemus_reason() {
    for version in versions() {
        let machine = |pair: &mut Pair| machine_type(&mut pair.source.qmp).unwrap();
        // Without the configuration section.
        let mut pair = Pair::new(&version, RECIPE);
        let incoming = pair.prepare();
        let raw = pair.save();
        let error = incoming.load(&mut pair.destination.qmp, &raw, deadline()).unwrap_err();
        println!("{error}");
        assert!(matches!(&error, LoadError::Failed { reason } if !reason.is_empty()), "{error:?}");
        // State of another machine.
        let mut pair = Pair::new(&version, RECIPE);
        let incoming = pair.prepare();
        let raw = pair.save();
        let state = complete(&raw, "pc-i440fx-2.1").unwrap();
        let error = incoming.load(&mut pair.destination.qmp, &state, deadline()).unwrap_err();
        println!("{error}");
        assert!(
            matches!(&error, LoadError::Failed { reason } if reason.contains("pc-i440fx-2.1")),
            "{error:?}"
        );
        // State that is cut in the middle.
        let mut pair = Pair::new(&version, RECIPE);
        let incoming = pair.prepare();
        let raw = pair.save();
        let state = complete(&raw, &machine(&mut pair)).unwrap();
        let error =
            incoming.load(&mut pair.destination.qmp, &state[..state.len() / 2], deadline()).unwrap_err();
        println!("{error}");
        assert!(matches!(error, LoadError::Failed { .. }), "{error:?}");
        // None of this harmed the source.
        cont(&mut pair.source.qmp).unwrap();
        pair.source.wait_ticking();
    }
}

#[test]
fn completed_states_equal_those_of_qemu() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let mut vm = version.start(dir.path(), "a", &args(DEVICES));
        stop(&mut vm.qmp).unwrap();
        let state = complete(
            &capture(&mut vm.qmp, DiskOwnership::Held).unwrap(),
            &machine_type(&mut vm.qmp).unwrap(),
        )
        .unwrap();
        let file = dir.path().join("native");
        vm.command(
            "migrate-set-capabilities",
            json!({"capabilities": [{"capability": "events", "state": true}]}),
        );
        let part = dir.path().join("part");
        // QEMU reports `completed` before all of its output has left its pipe: the file gets its name once it is
        // complete.
        let uri =
            format!("exec:cat > {part} && mv {part} {file}", part = part.display(), file = file.display());
        vm.command("migrate", json!({"uri": uri}));
        while vm.qmp.wait_event("MIGRATION", deadline()).unwrap().data["status"] != "completed" {}
        let until = deadline();
        let native = loop {
            assert!(std::time::Instant::now() < until, "{} does not appear", file.display());
            match std::fs::read(&file) {
                Ok(native) => break native,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        // Header, 0x07, length and name of the machine.
        let name = machine_type(&mut vm.qmp).unwrap();
        let head = 8 + 1 + 4 + name.len();
        assert_eq!(state[..head], native[..head]);
        // The description begins with 0x06 and its length, and ends the stream.
        let description = native.iter().rposition(|byte| *byte == 0).unwrap();
        let text = native[description..].iter().position(|byte| *byte == b'{').unwrap() + description;
        assert_eq!(native[text - 5], 0x06);
        let length = u32::from_be_bytes(native[text - 4..text].try_into().unwrap()) as usize;
        assert_eq!(native.len(), text + length);
        assert_eq!(native[text - 6], 0, "end of sections");
    }
}

#[test]
fn a_running_guest_is_not_saved() {
    on_each(RECIPE, |pair| {
        assert!(matches!(
            capture(&mut pair.source.qmp, DiskOwnership::Held),
            Err(StateError::NotStopped { .. })
        ));
        drain(&mut pair.source.qmp).unwrap();
        assert_eq!(blocked_reasons(&mut pair.source.qmp).unwrap(), Vec::<String>::new());
        // A destination that does not wait is detected, too.
        let error = Incoming::prepare(&mut pair.source.qmp, None).unwrap_err();
        assert!(matches!(error, LoadError::NotWaiting { .. }));
        assert!(instruction_pointer(&mut pair.source).contains("IP="));
    });
}
