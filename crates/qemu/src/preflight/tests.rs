use serde_json::json;

use super::*;
use crate::cmdline::QemuOption;
use crate::command::RamPlan;
use crate::describe::{Disk, Machine, Memory, Problem, Program, SCHEMA, VmDescription};
use crate::ram::{MappedFile, RamBlock, RamKind};
use crate::restart_units::{RestartRisk, RestartTime};
use crate::tree::{DeviceTree, Difference};
use facts::{Mappers, MemoryFeatures};

fn block(name: &str, bytes: u64) -> RamBlock {
    RamBlock {
        name: name.to_owned(),
        page_size_bytes: 4096,
        used_bytes: bytes,
        max_bytes: bytes,
        host_address: 0x7f00_0000_0000,
        kind: RamKind::Anonymous,
    }
}

fn host() -> HostFacts {
    HostFacts {
        kernel: "6.18.0-1".to_owned(),
        cpu: "Maker Model 1".to_owned(),
        cpu_flags: ["sse2", "avx"].map(str::to_owned).into(),
        kvm: true,
        memory_available_bytes: 8 << 30,
        hugepages_free_bytes: [(2 << 20, 1 << 30)].into(),
    }
}

fn identity(file_system: &str, inode: u64) -> FileIdentity {
    FileIdentity { file_system: file_system.to_owned(), mounted: "server:/x".to_owned(), inode, host: None }
}

fn disk() -> DestinationFile {
    DestinationFile {
        path: "/vm/a".to_owned(),
        option: None,
        source: Some(identity("nfs4", 7)),
        path_there: "/vm/a".to_owned(),
        exists: true,
        destination: Some(identity("nfs4", 7)),
        marked_shared: false,
        direct: true,
        locked: true,
    }
}

/// Returns facts of two hosts for which the check has no findings.
fn facts() -> (SourceFacts, DestinationFacts) {
    let vm = VmDescription {
        schema: SCHEMA,
        name: None,
        uuid: None,
        program: Program {
            binary: "/usr/bin/qemu".into(),
            version: "7.2.22".to_owned(),
            working_dir: "/".into(),
        },
        machine: Machine {
            machine_type: "pc-q35-7.2".to_owned(),
            accelerator: "kvm".to_owned(),
            cpu_type: "Skylake-Client-x86_64-cpu".to_owned(),
            cpu_option: Some("Skylake-Client".to_owned()),
            cpus: 1,
        },
        memory: Memory { base_bytes: 1 << 30, plugged_bytes: 0, default_block: None, blocks: Vec::new() },
        disks: Vec::new(),
        networks: Vec::new(),
        chardevs: Vec::new(),
        devices: DeviceTree::default(),
        options: Vec::new(),
        problems: Vec::new(),
    };
    let source = SourceFacts {
        vm,
        host: host(),
        run_state: "running".to_owned(),
        blocked_reasons: Vec::new(),
        ram_blocks: vec![block("pc.ram", 1 << 30)],
        other_mappers: Mappers::default(),
        tracer_pid: 0,
        cpu_unavailable: vec!["hle".to_owned()],
        nested_guests: None,
        user: Some(0),
        oom_score_adj: 0,
        stuck_queues: Vec::new(),
        starts_again: Vec::new(),
        files_not_open: Vec::new(),
    };
    let destination = DestinationFacts {
        host: host(),
        user: 0,
        qemu_version: "7.2.22".to_owned(),
        machine_types: ["pc-q35-7.2".to_owned()].into(),
        hugepage_bytes: None,
        disks: vec![disk()],
        missing_interfaces: Vec::new(),
        problems: Vec::new(),
        ram_blocks: Some(vec![block("pc.ram", 1 << 30)]),
        device_differences: Some(Vec::new()),
        cpu_unavailable: Some(vec!["hle".to_owned()]),
    };
    (source, destination)
}

/// Returns the findings after a change to the good case, as `code` for blockers, `code?` for
/// warnings and `code.` for the rest.
fn found(change: impl FnOnce(&mut SourceFacts, &mut DestinationFacts)) -> String {
    let (mut source, mut destination) = facts();
    change(&mut source, &mut destination);
    let findings = check(&source, &destination);
    assert!(findings.iter().all(|finding| !finding.what.is_empty() && !finding.advice.is_empty()));
    let codes: Vec<String> = findings
        .iter()
        .map(|finding| match finding.severity {
            Severity::Blocker => finding.code.clone(),
            Severity::Warning => format!("{}?", finding.code),
            Severity::Info => format!("{}.", finding.code),
        })
        .collect();
    codes.join(" ")
}

#[test]
fn equal_hosts_have_no_findings() {
    assert_eq!(found(|_, _| ()), "");
}

#[test]
fn guest_findings_have_codes() {
    assert_eq!(found(|s, _| s.vm.problems.push(Problem::new("x", "a", "b"))), "x");
    assert_eq!(found(|_, d| d.problems.push(Problem::new("y", "a", "b"))), "y");
    assert_eq!(found(|s, _| s.blocked_reasons.push("non-migratable device".to_owned())), "qemu-refuses");
    assert_eq!(found(|s, _| s.run_state = "io-error".to_owned()), "run-state");
    assert_eq!(found(|s, _| s.run_state = "paused".to_owned()), "paused.");
    assert_eq!(found(|s, _| s.run_state = "prelaunch".to_owned()), "paused.");
    assert_eq!(found(|s, _| s.tracer_pid = 9), "debugger");
    let restart_finding = |when| {
        let (what, advice) = ("unit".to_owned(), "disable it".to_owned());
        found(move |s, _| s.starts_again.push(RestartRisk { when, what, advice }))
    };
    assert_eq!(found(|s, _| s.stuck_queues.push("queue 0 of d".to_owned())), "disk-stuck?");
    let emulated = |driver: &'static str, smp: &'static str| {
        found(move |s, _| {
            s.vm.machine.accelerator = "tcg".to_owned();
            s.vm.options.push(QemuOption::new("smp", smp));
            s.vm.devices = DeviceTree::parse(&format!("bus: main-system-bus\n  dev: {driver}, id \"\"\n"));
        })
    };
    assert_eq!(emulated("virtio-blk-pci", "1"), "virtio-emulated?");
    assert_eq!(emulated("virtio-blk-pci", "1,maxcpus=2"), "");
    assert_eq!(emulated("e1000", "1"), "");
    assert_eq!(restart_finding(RestartTime::AtOnce), "unit-restarts");
    assert_eq!(restart_finding(RestartTime::AtBoot), "unit-starts-at-boot");
    assert_eq!(restart_finding(RestartTime::Unknown), "unit-restart-unknown?");
    assert_eq!(found(|s, _| s.nested_guests = Some(true)), "nested-guests");
    assert_eq!(found(|s, _| s.nested_guests = Some(false)), "");
    assert_eq!(found(|s, _| s.vm.machine.cpu_option = Some("Skylake,+vmx".to_owned())), "nested-possible?");
    assert_eq!(found(|s, _| s.vm.machine.cpu_option = Some("host".to_owned())), "nested-possible?");
    assert_eq!(found(|s, _| s.vm.machine.cpu_option = Some("host,-vmx".to_owned())), "");
}

#[test]
fn programs() {
    assert_eq!(found(|_, d| d.machine_types.clear()), "machine-type-unknown");
    assert_eq!(found(|_, d| d.qemu_version = "7.1.0".to_owned()), "qemu-older");
    assert_eq!(found(|_, d| d.qemu_version = "10.0.2".to_owned()), "qemu-newer.");
    assert_eq!(found(|_, d| d.qemu_version = "7.2.1".to_owned()), "");
    assert_eq!(found(|s, _| s.vm.program.version = "6.2.0".to_owned()), "qemu-untried? qemu-newer.");
    let gone = Difference::Missing { device: "e1000".to_owned() };
    assert_eq!(found(|_, d| d.device_differences = Some(vec![gone])), "devices-differ");
    let with = |source: &mut SourceFacts| {
        let words = ["-device", "isa-cirrus-vga"].map(str::to_owned);
        source.vm.options.extend(crate::cmdline::parse(&words));
    };
    assert_eq!(found(|s, _| with(s)), "device-refused");
    assert_eq!(found(|s, d| (with(s), d.qemu_version = "10.0.2".to_owned()).1), "qemu-newer.");
}

#[test]
fn processors() {
    assert_eq!(found(|_, d| d.host.kvm = false), "kvm-missing");
    let tcg = |s: &mut SourceFacts| s.vm.machine.accelerator = "tcg".to_owned();
    assert_eq!(found(|s, d| (tcg(s), d.host.kvm = false).1), "");
    let host_model = |s: &mut SourceFacts| {
        s.nested_guests = Some(false);
        s.vm.machine.cpu_option = Some("host".to_owned());
    };
    assert_eq!(found(|s, d| (host_model(s), d.host.cpu = "Other".to_owned()).1), "cpu-host-differs");
    assert_eq!(found(|s, d| (host_model(s), d.host.cpu_flags.clear()).1), "cpu-host-differs");
    assert_eq!(found(|s, _| host_model(s)), "");
    let fewer = |d: &mut DestinationFacts| d.host.cpu_flags.clear();
    assert_eq!(found(|_, d| (fewer(d), d.cpu_unavailable = None).1), "cpu-flags?");
    // A started destination reports it exactly.
    assert_eq!(found(|_, d| fewer(d)), "");
    assert_eq!(found(|_, d| d.cpu_unavailable = Some(vec!["avx".to_owned()])), "cpu-features");
    assert_eq!(found(|_, d| d.cpu_unavailable = Some(Vec::new())), "");
    let max = |s: &mut SourceFacts| (tcg(s), s.vm.machine.cpu_option = Some("max".to_owned())).1;
    assert_eq!(found(|s, d| (max(s), d.qemu_version = "10.0.0".to_owned()).1), "cpu-max? qemu-newer.");
    assert_eq!(found(|s, _| max(s)), "");
}

#[test]
fn memory_findings_have_codes() {
    assert_eq!(found(|s, _| s.other_mappers.found.push("virtiofsd".to_owned())), "memory-shared");
    assert_eq!(found(|s, _| s.other_mappers.unreadable.push("x".to_owned())), "memory-shared-unknown?");
    assert_eq!(found(|s, _| s.ram_blocks.push(block("vga.vram", 1))), "ram-blocks-differ");
    assert_eq!(found(|_, d| d.ram_blocks = Some(vec![block("pc.ram", 2 << 30)])), "ram-blocks-differ");
    assert_eq!(
        found(|_, d| d.ram_blocks = Some(vec![block("pc.ram", 1 << 30), block("x.rom", 1)])),
        "ram-blocks-differ"
    );
    assert_eq!(found(|_, d| d.ram_blocks = None), "");
    assert_eq!(found(|_, d| d.host.memory_available_bytes = 1 << 30), "memory-short");
    assert_eq!(found(|s, _| s.vm.memory.plugged_bytes = 8 << 30), "memory-short");
    let huge = |s: &mut SourceFacts, d: &mut DestinationFacts| {
        s.ram_blocks[0].page_size_bytes = 2 << 20;
        (d.hugepage_bytes, d.ram_blocks) = (Some(2 << 20), None);
    };
    assert_eq!(found(huge), "");
    assert_eq!(found(|s, d| (huge(s, d), d.host.hugepages_free_bytes.clear()).1), "hugepages-short");
    // Only blocks that use huge pages need them.
    let mixed = |s: &mut SourceFacts, d: &mut DestinationFacts| {
        huge(s, d);
        s.vm.memory.base_bytes = 3 << 30;
        s.ram_blocks.push(block("node1", 2 << 30));
    };
    assert_eq!(found(mixed), "");
}

#[test]
fn storage() {
    let with = |change: fn(&mut DestinationFile)| found(move |_, d| d.disks.iter_mut().for_each(change));
    assert_eq!(with(|disk| disk.exists = false), "disk-missing");
    assert_eq!(with(|disk| disk.destination = Some(identity("nfs4", 8))), "disk-differs");
    assert_eq!(with(|disk| disk.destination = Some(identity("ext4", 7))), "disk-differs");
    assert_eq!(
        with(|disk| disk.destination =
            Some(FileIdentity { mounted: "10.0.0.1:/x".to_owned(), ..identity("nfs4", 7) })),
        "disk-mounted-differently"
    );
    assert_eq!(with(|disk| (disk.destination = Some(identity("nfs4", 8)), disk.marked_shared = true).1), "");
    // A local file system is a different one on every host, whatever its numbers.
    let local = |host: &str| Some(FileIdentity { host: Some(host.to_owned()), ..identity("ext4", 7) });
    assert_eq!(
        found(|_, d| d
            .disks
            .iter_mut()
            .for_each(|disk| (disk.source, disk.destination) = (local("a"), local("b")))),
        "disk-differs"
    );
    assert_eq!(
        found(|_, d| d
            .disks
            .iter_mut()
            .for_each(|disk| (disk.source, disk.destination) = (local("a"), local("a")))),
        ""
    );
    assert_eq!(with(|disk| disk.source = None), "disk-unidentified");
    assert_eq!(with(|disk| (disk.source = None, disk.marked_shared = true).1), "");
    // A device with a name of its own is identified by it, another one only within one host.
    let device = |name: &str, host: Option<&str>| {
        Some(FileIdentity {
            mounted: name.to_owned(),
            host: host.map(str::to_owned),
            ..identity("block device", 0)
        })
    };
    let pair = |ours: Option<FileIdentity>, theirs: Option<FileIdentity>| {
        found(|_, d| {
            let disk = &mut d.disks[0];
            (disk.source, disk.destination) = (ours, theirs);
        })
    };
    assert_eq!(pair(device("naa.6", None), device("naa.6", None)), "");
    assert_eq!(pair(device("naa.6", None), device("naa.60", None)), "disk-differs");
    assert_eq!(pair(device("253:3", Some("a")), device("253:3", Some("b"))), "disk-unidentified");
    assert_eq!(pair(device("naa.6", None), device("253:3", Some("b"))), "disk-unidentified");
    assert_eq!(pair(device("253:3", Some("a")), device("253:3", Some("a"))), "");
    assert_eq!(pair(device("253:3", Some("a")), device("253:4", Some("a"))), "disk-differs");
    assert_eq!(pair(device("naa.6", None), Some(identity("nfs4", 7))), "disk-differs");
    // Files that only have to exist.
    let file = |disk: &mut DestinationFile| disk.option = Some("-object secret".to_owned());
    assert_eq!(found(|_, d| (file(&mut d.disks[0]), d.disks[0].exists = false).1), "file-missing");
    assert_eq!(found(|_, d| (file(&mut d.disks[0]), d.disks[0].source = None).1), "");
    assert_eq!(with(|disk| disk.direct = false), "disk-cached?");
    assert_eq!(with(|disk| disk.locked = false), "disk-unlocked?");
}

/// Flash that is only read arrives as memory, so the destination may have another file; any other disk is the same one.
#[test]
fn firmware_only_has_to_exist() {
    let disk = |device: &str, file: &str, read_only: bool| -> Disk {
        let described = json!({
            "name": device, "device": device, "file": file, "format": "raw", "backing_files": [],
            "read_only": read_only, "direct": false, "removable": false
        });
        serde_json::from_value(described).unwrap()
    };
    let code = disk("/machine/system.flash0", "/code.fd", true);
    let variables = disk("/machine/system.flash1", "/variables.fd", false);
    let cdrom = disk("ide0-cd0", "/install.iso", true);
    let needed = |disks: &[&Disk]| -> Vec<_> {
        let (mut source, _) = facts();
        source.vm.disks = disks.iter().copied().cloned().collect();
        let files = files::needed_files(&source.vm).into_iter();
        files.map(|file| (file.path, file.option.is_some())).collect()
    };
    let file = |path: &str, only_exists| (path.to_owned(), only_exists);
    assert_eq!(
        needed(&[&code, &variables, &cdrom]),
        [file("/variables.fd", false), file("/install.iso", false), file("/code.fd", true)]
    );
    let twice = disk("disk0", "/code.fd", false);
    assert_eq!(needed(&[&code, &twice]), [file("/code.fd", false)]);
}

#[test]
fn host_findings_have_codes() {
    assert_eq!(found(|s, _| s.host.kernel = "6.1.0-56-amd64".to_owned()), "kernel-old");
    assert_eq!(found(|s, _| s.host.kernel = "6.7.0".to_owned()), "");
    assert_eq!(found(|_, d| d.host.kernel = "5.10.0".to_owned()), "destination-kernel-old?");
    assert_eq!(found(|_, d| d.missing_interfaces.push("tap0".to_owned())), "interface-missing");
    let option = |name: &'static str, value: &'static str| {
        found(move |s, _| s.vm.options.push(QemuOption::new(name, value)))
    };
    assert_eq!(option("netdev", "tap,id=a,vhost=on"), "");
    let advice = |property: &'static str| {
        let (source, mut destination) = facts();
        let (device, property) = ("virtio-net-device".to_owned(), property.to_owned());
        let (first, second) = ("true".to_owned(), "false".to_owned());
        destination.device_differences = Some(vec![Difference::Property { device, property, first, second }]);
        check(&source, &destination).remove(0).advice
    };
    assert!(advice("queue_reset").contains("queue_reset=off"));
    assert!(!advice("mac").contains("mac=off"));
    assert_eq!(option("netdev", "user,id=a"), "network-user.");
    assert_eq!(option("vnc", ":0"), "display-clients.");
    assert_eq!(found(|s, _| s.user = Some(107)), "user-differs?");
    assert_eq!(found(|s, d| (s.user, d.user) = (Some(107), 107)), "");
    assert_eq!(found(|s, _| (s.user = Some(107), s.vm.options.push(QemuOption::new("runas", "qemu"))).1), "");
    assert_eq!(
        found(|s, _| (s.user = Some(107), s.vm.options.push(QemuOption::new("run-with", "user=qemu"))).1),
        ""
    );
}

#[test]
fn memory_keeps_its_properties() {
    const MEMFD: RamPlan = RamPlan::Memfd { hugepage_bytes: None };
    let chosen = |here: MemoryFeatures, change: fn(&mut SourceFacts)| {
        let (mut source, _) = facts();
        // A guest always has smaller blocks of other kinds, too.
        source.ram_blocks.push(block("vga.vram", 16 << 20));
        change(&mut source);
        ram::choose(&source, &here).0
    };
    let nothing = MemoryFeatures::default();
    let anonymous_only = MemoryFeatures { huge_pages_anonymous: true, ..nothing };
    let both = MemoryFeatures { huge_pages_shared: true, ..anonymous_only };
    let ksm = MemoryFeatures { ksm: true, ..both };
    assert_eq!(chosen(nothing, |_| ()), MEMFD);
    assert_eq!(chosen(both, |_| ()), MEMFD);
    assert_eq!(chosen(anonymous_only, |_| ()), RamPlan::Anonymous);
    assert_eq!(chosen(ksm, |_| ()), RamPlan::Anonymous);

    let shared = |source: &mut SourceFacts| {
        let file = MappedFile { path: "/dev/shm/x".into(), inode: 7, device: (0, 1), offset_bytes: 0 };
        source.ram_blocks[0].kind = RamKind::SharedFile(file);
    };
    let huge = |source: &mut SourceFacts| source.ram_blocks[0].page_size_bytes = 2 << 20;
    for here in [nothing, anonymous_only, both, ksm] {
        assert_eq!(chosen(here, shared), MEMFD);
        assert_eq!(chosen(here, huge), RamPlan::Memfd { hugepage_bytes: Some(2 << 20) });
    }

    let unmerged: [fn(&mut SourceFacts); 2] = [
        |source| source.vm.options.push(QemuOption::new("machine", "q35,mem-merge=off".to_owned())),
        |source| {
            source.vm.options.push(QemuOption::new("object", "memory-backend-ram,id=m,merge=off".to_owned()));
        },
    ];
    for change in unmerged {
        assert_eq!(chosen(ksm, change), MEMFD);
        assert_eq!(chosen(anonymous_only, change), RamPlan::Anonymous);
    }
}
