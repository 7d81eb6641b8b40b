//! A guest is described, built again from the description, compared, and handed over to it.

use std::path::Path;

use serde_json::{Value, json};
use whimbrel_qemu::command::{HostRules, RamPlan, build};
use whimbrel_qemu::control::{blocked_reasons, cont, stop};
use whimbrel_qemu::describe::{Disk, VmDescription, describe};
use whimbrel_qemu::device_state::{DiskOwnership, Incoming, capture, complete, machine_type};
use whimbrel_qemu::find::{Selector, find};
use whimbrel_qemu::ram::{RamKind, ram_blocks};
use whimbrel_qemu::tree::{compare, device_tree};

use crate::support::{
    Version, Vm, args, assert_memory_equal, copy_memory, deadline, launch, not_tried, qcow2, ticker_disk,
    until, versions,
};

pub(crate) struct World {
    dir: tempfile::TempDir,
    pub(crate) version: Version,
}

impl World {
    pub(crate) fn each(test: impl Fn(&World)) {
        for version in versions() {
            println!("QEMU {}", version.name);
            test(&World { dir: tempfile::tempdir().unwrap(), version });
        }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn rules(&self) -> HostRules {
        let run_dir = self.dir().join("run");
        std::fs::create_dir_all(&run_dir).unwrap();
        HostRules { data_dirs: self.version.data.clone(), ..HostRules::new(&self.version.binary, run_dir) }
    }

    /// Describes, builds and starts the destination.
    pub(crate) fn rebuild(source: &mut Vm, rules: &HostRules) -> (VmDescription, Vm) {
        let process = find(&Selector::Pid(source.pid())).unwrap();
        let described = describe(&mut source.qmp, &process.start_command()).unwrap();
        // A description that is sent to another host is the same after decoding.
        let text = serde_json::to_string(&described).unwrap();
        assert_eq!(serde_json::from_str::<VmDescription>(&text).unwrap(), described);
        let built = build(&described, rules).unwrap();
        let words: Vec<_> = built.argv.iter().map(|word| word.to_string_lossy()).collect();
        println!("{}", words.join(" "));
        let destination = launch(&rules.run_dir, "whimbrel-qemu", built.argv, built.qmp);
        (described, destination)
    }

    /// Moves the guest and checks that it runs on.
    pub(crate) fn hand_over(source: &mut Vm, destination: &mut Vm) {
        Self::move_over(source, destination);
        destination.wait_ticking();
        let differences = compare(&mut source.qmp, &mut destination.qmp).unwrap();
        assert!(differences.is_empty(), "{differences:#?}");
    }

    fn move_over(source: &mut Vm, destination: &mut Vm) {
        let differences = compare(&mut source.qmp, &mut destination.qmp).unwrap();
        assert!(differences.is_empty(), "{differences:#?}");
        let incoming = Incoming::prepare(&mut destination.qmp, Some(&destination.started.log)).unwrap();
        stop(&mut source.qmp).unwrap();
        let machine = machine_type(&mut source.qmp).unwrap();
        let state = complete(&capture(&mut source.qmp, DiskOwnership::Held).unwrap(), &machine).unwrap();
        copy_memory(source, destination);
        incoming.load(&mut destination.qmp, &state, deadline()).unwrap();
        assert_memory_equal(source, destination);
        cont(&mut destination.qmp).unwrap();
    }
}

#[test]
fn a_usual_guest() {
    World::each(|world| {
        let boot = ticker_disk(world.dir());
        qcow2(&world.dir().join("disk.qcow2"), "16M");
        let mut source = world.version.start(
            world.dir(),
            "src",
            &args(&format!(
                "-M q35 -m 64 -smp 2 -name guest=web1,debug-threads=on -uuid 11111111-2222-3333-4444-555555555555
                 -vga std -usb -device qemu-xhci -device usb-tablet -device usb-kbd,id=kbd
                 -device virtio-balloon -device virtio-rng-pci -device virtio-serial,id=vs
                 -chardev socket,id=port,path={port},server=on,wait=off -device virtserialport,chardev=port,name=a.b
                 -device virtio-scsi-pci,id=scsi -drive if=none,id=cd,media=cdrom -device scsi-cd,drive=cd,bus=scsi.0
                 -drive file={boot},format=raw,if=ide -drive file=disk.qcow2,if=virtio,cache=none,aio=native
                 -netdev user,id=n0 -device virtio-net-pci,netdev=n0,mac=52:54:00:aa:bb:cc -nic user,model=e1000
                 -rtc base=utc -boot order=cd -global ICH9-LPC.disable_s3=1 -msg timestamp=on
                 -fw_cfg name=opt/org.example/a,string=b -smbios type=1,serial=7
                 -serial file:{serial} -monitor unix:{monitor},server,nowait",
                port = world.path("port"),
                serial = world.path("serial.log"),
                monitor = world.path("monitor"),
            )),
        );
        source.wait_ticking();
        let (described, mut destination) = World::rebuild(&mut source, &world.rules());
        assert_eq!(described.name.as_deref(), Some("web1"));
        assert!(described.machine.machine_type.starts_with("pc-q35-"));
        assert_eq!((described.machine.cpus, described.machine.accelerator.as_str()), (2, "tcg"));
        assert_eq!(described.memory.base_bytes, 64 << 20);
        let disk = described.disks.iter().find(|disk| disk.name == "virtio0").unwrap();
        assert!(disk.direct && disk.format.as_deref() == Some("qcow2"));
        assert!(described.problems.is_empty(), "{:#?}", described.problems);
        // Default memory there, a shared memfd here, of the same name.
        let pid = destination.pid();
        let blocks = ram_blocks(&mut destination.qmp, pid).unwrap();
        let ram = blocks.iter().find(|block| block.name == "pc.ram").unwrap();
        assert!(matches!(ram.kind, RamKind::SharedFile(_)), "{ram:?}");
        World::hand_over(&mut source, &mut destination);
        assert!(world.dir().join("run/serial.log").metadata().unwrap().len() > 0);
        assert!(world.dir().join("run/monitor").exists() && world.dir().join("run/port").exists());
        // The moved guest can be described and moved again.
        source.command("quit", Value::Null);
        source.started.wait(deadline());
        let rules =
            HostRules { run_dir: world.dir().join("again"), ram: RamPlan::Anonymous, ..world.rules() };
        std::fs::create_dir_all(&rules.run_dir).unwrap();
        let (_, mut back) = World::rebuild(&mut destination, &rules);
        let pid = back.pid();
        let blocks = ram_blocks(&mut back.qmp, pid).unwrap();
        assert_eq!(blocks.iter().find(|block| block.name == "pc.ram").unwrap().kind, RamKind::Anonymous);
        let _ = std::fs::remove_file(world.dir().join("state"));
        World::hand_over(&mut destination, &mut back);
    });
}

#[test]
fn an_old_fashioned_guest() {
    World::each(|world| {
        let boot = ticker_disk(world.dir());
        let mut source = world.version.start(
            world.dir(),
            "src",
            &args(&format!("-m 64 -nographic -snapshot-off {boot}").replace("-snapshot-off ", "")),
        );
        source.wait_ticking();
        let (_, mut destination) = World::rebuild(&mut source, &world.rules());
        World::hand_over(&mut source, &mut destination);
    });
}

#[test]
fn numa_nodes_and_their_memory() {
    World::each(|world| {
        let boot = ticker_disk(world.dir());
        let mut source = world.version.start(
            world.dir(),
            "src",
            &args(&format!(
                "-machine pc -m 128 -smp 2
                 -object memory-backend-memfd,id=near,size=64M,share=on -numa node,cpus=0,memdev=near
                 -object memory-backend-ram,id=far,size=64M -numa node,cpus=1,memdev=far
                 -drive file={boot},format=raw"
            )),
        );
        source.wait_ticking();
        let (_, mut destination) = World::rebuild(&mut source, &world.rules());
        World::hand_over(&mut source, &mut destination);
    });
}

#[test]
fn snapshots_taken_since_the_start() {
    World::each(|world| {
        let boot = ticker_disk(world.dir());
        for name in ["a.qcow2", "b.qcow2", "c.qcow2"] {
            qcow2(&world.dir().join(name), "16M");
        }
        let mut source = world.version.start(
            world.dir(),
            "src",
            &args(&format!(
                "-machine q35 -m 64 -drive file={boot},format=raw,if=ide
                 -drive file=a.qcow2,if=virtio,cache=none
                 -blockdev driver=qcow2,node-name=b,file.driver=file,file.filename=b.qcow2,file.aio=threads
                 -device virtio-blk-pci,drive=b,id=vb
                 -blockdev driver=file,node-name=cf,filename=c.qcow2 -blockdev driver=qcow2,node-name=c,file=cf
                 -device virtio-blk-pci,drive=c,id=vc"
            )),
        );
        source.wait_ticking();
        // A snapshot of a drive, of a named node, and without a name for the overlay.
        source.command(
            "blockdev-snapshot-sync",
            json!({"device": "virtio0", "snapshot-file": world.path("a1.qcow2")}),
        );
        source.command(
            "blockdev-snapshot-sync",
            json!({"device": "virtio0", "snapshot-file": world.path("a2.qcow2")}),
        );
        source.command(
            "blockdev-snapshot-sync",
            json!({"node-name": "b", "snapshot-file": world.path("b1.qcow2"), "snapshot-node-name": "b1"}),
        );
        // Mirrored elsewhere: the device sits on a node that QEMU named by itself.
        source.command(
            "drive-mirror",
            json!({"job-id": "m", "device": "c", "target": world.path("c1.qcow2"), "sync": "full", "format": "qcow2"}),
        );
        source.qmp.wait_event("BLOCK_JOB_READY", deadline()).unwrap();
        source.command("block-job-complete", json!({"device": "m"}));
        source.qmp.wait_event("BLOCK_JOB_COMPLETED", deadline()).unwrap();
        let (described, mut destination) = World::rebuild(&mut source, &world.rules());
        let files: Vec<&str> = described.disks.iter().filter_map(|disk| disk.file.as_deref()).collect();
        for name in ["a2.qcow2", "b1.qcow2", "c1.qcow2"] {
            assert!(files.contains(&world.path(name).as_str()), "{files:?}");
        }
        let layers = |top: &str| -> Vec<(String, String)> {
            let top = world.path(top);
            let disk = described.disks.iter().find(|disk| disk.file.as_ref() == Some(&top)).unwrap();
            disk.layers.iter().map(|layer| (layer.file.clone(), layer.format.clone())).collect()
        };
        let qcow2 = |names: &[&str]| -> Vec<_> {
            names.iter().map(|name| (world.path(name), "qcow2".to_owned())).collect()
        };
        assert_eq!(layers("a2.qcow2"), qcow2(&["a2.qcow2", "a1.qcow2", "a.qcow2"]));
        assert_eq!(layers("b1.qcow2"), qcow2(&["b1.qcow2", "b.qcow2"]));
        assert_eq!(layers("c1.qcow2"), qcow2(&["c1.qcow2"]));
        let process = find(&Selector::Pid(destination.pid())).unwrap();
        let there = describe(&mut destination.qmp, &process.start_command()).unwrap();
        // QEMU names nodes by itself, another way each time.
        let without_names = |vm: &VmDescription| {
            vm.disks
                .iter()
                .map(|disk| Disk { name: String::new(), nodes: None, ..disk.clone() })
                .collect::<Vec<_>>()
        };
        assert_eq!(without_names(&there), without_names(&described));
        // The image below an overlay is only read, on both hosts.
        for vm in [&mut source, &mut destination] {
            let nodes = vm.command("query-named-block-nodes", json!({"flat": true}));
            let node =
                nodes.as_array().unwrap().iter().find(|node| node["node-name"] == "b").unwrap().clone();
            assert_eq!(node["ro"], true);
        }
        World::hand_over(&mut source, &mut destination);
    });
}

#[test]
fn plugged_and_unplugged_since_the_start() {
    World::each(|world| {
        let boot = ticker_disk(world.dir());
        qcow2(&world.dir().join("hot.qcow2"), "16M");
        let mut source = world.version.start(
            world.dir(),
            "src",
            &args(&format!(
                "-machine pc -m 64,slots=2,maxmem=256M -smp 1,maxcpus=2 -drive file={boot},format=raw,if=ide
                 -nic none -netdev user,id=first -device virtio-net-pci,netdev=first,id=gone
                 -device virtio-rng-pci -device qemu-xhci,id=usb -device usb-tablet,id=tablet
                 -device virtio-scsi-pci,id=scsi -device virtio-balloon-pci,id=balloon"
            )),
        );
        source.wait_ticking();
        // Unplugging needs the guest's help, which ours does not provide; before it runs, QEMU does
        // not ask it. So only devices that can be removed without its help are removed here: USB,
        // SCSI.
        source.command("device_del", json!({"id": "tablet"}));
        source.qmp.wait_event("DEVICE_DELETED", deadline()).unwrap();
        source.command("netdev_add", json!({"type": "user", "id": "hot", "restrict": true}));
        source.command(
            "device_add",
            json!({"driver": "virtio-net-pci", "netdev": "hot", "id": "hotnic", "mac": "52:54:00:01:02:03", "addr": "1e.0", "mq": true, "vectors": 6}),
        );
        source.command(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": "hotdisk", "cache": {"direct": true},
                   "file": {"driver": "file", "filename": "hot.qcow2", "cache": {"direct": true}}}),
        );
        source.command("object-add", json!({"qom-type": "iothread", "id": "io1"}));
        source.command(
            "device_add",
            json!({"driver": "virtio-blk-pci", "drive": "hotdisk", "id": "hotblk", "iothread": "io1", "serial": "abc", "num-queues": 1}),
        );
        source.command("blockdev-add", json!({"driver": "null-co", "node-name": "spare", "size": 1 << 20}));
        source.command("blockdev-del", json!({"node-name": "spare"}));
        source.command("chardev-add", json!({"id": "hotchr", "backend": {"type": "socket", "data": {
            "addr": {"type": "unix", "data": {"path": world.path("hotchr")}}, "server": true, "wait": false}}}));
        source.command("device_add", json!({"driver": "virtio-serial-pci", "id": "hotser"}));
        source.command(
            "device_add",
            json!({"driver": "virtserialport", "bus": "hotser.0", "chardev": "hotchr", "name": "x.y", "id": "hotport"}),
        );
        source.command("device_add", json!({"driver": "usb-kbd", "id": "hotkbd"}));
        source.command("device_add", json!({"driver": "virtio-rng-pci"}));
        source.command(
            "object-add",
            json!({"qom-type": "memory-backend-ram", "id": "dimm0", "size": 128 << 20}),
        );
        source.command("device_add", json!({"driver": "pc-dimm", "id": "d0", "memdev": "dimm0"}));
        let spare = source.command("query-hotpluggable-cpus", Value::Null);
        let spare =
            spare.as_array().unwrap().iter().find(|cpu| cpu.get("qom-path").is_none()).unwrap().clone();
        let mut cpu = spare["props"].clone();
        cpu["driver"] = spare["type"].clone();
        cpu["id"] = "cpu1".into();
        source.command("device_add", cpu);

        let (described, mut destination) = World::rebuild(&mut source, &world.rules());
        assert_eq!(described.machine.cpus, 2);
        let ids: Vec<String> =
            device_tree(&mut destination.qmp).unwrap().devices.into_iter().map(|device| device.id).collect();
        for id in ["hotnic", "hotblk", "hotport", "hotkbd", "gone"] {
            assert!(ids.iter().any(|other| other == id), "no {id} in {ids:?}");
        }
        assert!(!ids.contains(&"tablet".to_owned()));
        World::hand_over(&mut source, &mut destination);
    });
}

#[test]
fn all_obstacles_are_reported() {
    World::each(|world| {
        let boot = ticker_disk(world.dir());
        let share = world.path("");
        let mut source = world.version.start(
            world.dir(),
            "src",
            &args(&format!(
                "-machine q35 -m 64 -snapshot -drive file={boot},format=raw,if=ide -fsdev local,id=f0,path={share},security_model=none
                 -device virtio-9p-pci,fsdev=f0,mount_tag=t
                 -device nvme,serial=1"
            )),
        );
        source.command("blockdev-add", json!({"driver": "null-co", "node-name": "spare", "size": 1 << 20}));
        source.command(
            "chardev-add",
            json!({"id": "log", "backend": {"type": "file", "data": {"out": world.path("log")}}}),
        );
        let process = find(&Selector::Pid(source.pid())).unwrap();
        let described = describe(&mut source.qmp, &process.start_command()).unwrap();
        // Blockers of QEMU that xen-save-devices-state does not check.
        let reasons = blocked_reasons(&mut source.qmp).unwrap();
        assert!(reasons.iter().any(|reason| reason.contains("nvme")), "{reasons:?}");
        let error = build(&described, &world.rules()).unwrap_err();
        let codes: Vec<&str> = error.problems.iter().map(|problem| problem.code.as_str()).collect();
        for code in ["device-refused", "disk-unclear", "chardev-unclear", "option-refused"] {
            assert!(codes.contains(&code), "no {code} in {codes:?}");
        }
    });
}

#[test]
fn from_an_older_qemu_to_a_newer_one() {
    let versions = versions();
    let [older, newer] = versions.as_slice() else {
        not_tried("from an older QEMU to a newer one: there is one only");
        return;
    };
    let world = World { dir: tempfile::tempdir().unwrap(), version: newer.clone() };
    let boot = ticker_disk(world.dir());
    let mut source = older.start(
        world.dir(),
        "src",
        &args(&format!(
            "-machine q35 -m 64 -no-hpet -vga std -usb -device usb-tablet -device virtio-balloon-pci -device virtio-rng-pci
             -netdev user,id=n0 -device virtio-net-pci,netdev=n0 -drive file={boot},format=raw,if=ide"
        )),
    );
    source.wait_ticking();
    let (described, mut destination) = World::rebuild(&mut source, &world.rules());
    assert_eq!(described.machine.machine_type, machine_type(&mut destination.qmp).unwrap());
    World::hand_over(&mut source, &mut destination);
}

/// Machine types up to 2.3 expect neither a configuration section nor, up to 2.2, a description.
#[test]
fn old_machine_types_move() {
    World::each(|world| {
        let help = std::process::Command::new(&world.version.binary).args(["-machine", "help"]).output();
        let known = String::from_utf8(help.unwrap().stdout).unwrap();
        let boot = ticker_disk(world.dir());
        for kind in ["pc-i440fx-2.1", "pc-i440fx-2.3", "pc-i440fx-2.4", "pc-q35-2.4"] {
            if !known.lines().any(|line| line.split(' ').next() == Some(kind)) {
                continue;
            }
            let options =
                format!("-machine {kind} -m 64 -serial file:console -drive file={boot},format=raw,if=ide");
            let mut source = world.version.start(world.dir(), kind, &args(&options));
            source.wait_ticking();
            let (_, mut destination) = World::rebuild(&mut source, &world.rules());
            World::hand_over(&mut source, &mut destination);
            drop(destination);
            std::fs::remove_dir_all(world.path("run")).unwrap();
        }
    });
}

/// A real kernel with its load, if one is available, on a disk that it does not use.
#[test]
fn a_linux_guest() {
    let (Ok(kernel), Ok(initrd)) = (std::env::var("WHIMBREL_KERNEL"), std::env::var("WHIMBREL_INITRD"))
    else {
        not_tried("a Linux guest under QEMU itself: WHIMBREL_KERNEL and WHIMBREL_INITRD are not set");
        return;
    };
    World::each(|world| {
        qcow2(&world.dir().join("disk.qcow2"), "16M");
        let mut source = world.version.start(
            world.dir(),
            "src",
            &args(&format!(
                "-machine pc -m 256 -vga std -device virtio-rng-pci,id=gone -device qemu-xhci -device usb-tablet
                 -device virtio-balloon-pci -device virtio-rng-pci -device virtio-serial-pci -netdev user,id=n0 -device virtio-net-pci,netdev=n0
                 -drive file=disk.qcow2,if=virtio,cache=none -serial file:{}
                 -kernel {kernel} -initrd {initrd}",
                world.path("console")
            ))
            .into_iter()
            .chain(["-append".to_owned(), "console=ttyS0 panic=-1 d=32,16,20".to_owned()])
            .collect::<Vec<_>>(),
        );
        let length = |path: &str| std::fs::metadata(path).map_or(0, |meta| meta.len());
        let content_of = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let console = world.path("console");
        until("the load ticks", || content_of(&console).contains("tick"));
        // The kernel releases a card. Those after it keep their addresses, and the gap stays.
        source.command("device_del", json!({"id": "gone"}));
        source.qmp.wait_event("DEVICE_DELETED", deadline()).unwrap();
        let (_, mut destination) = World::rebuild(&mut source, &world.rules());
        World::move_over(&mut source, &mut destination);
        let there = world.path("run/console");
        until("the kernel goes on", || length(&there) > 0);
        assert!(!content_of(&there).contains("Linux version"), "it did not boot again");
    });
}
