use super::*;
use crate::describe::{Disk, DiskNodes, Machine, Memory, MemoryBlock, Program, SCHEMA};
use crate::tree::DeviceTree;

fn vm(arguments: &str) -> VmDescription {
    let words: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
    let options = cmdline::parse(&words);
    let block = |name| MemoryBlock { name, page_size_bytes: 4096 };
    let objects = options.iter().filter(|option| option.name == "object");
    let used = objects.filter_map(|option| option.parse_value().get("id")).filter(|id| id != "unused");
    VmDescription {
        schema: SCHEMA,
        name: None,
        uuid: None,
        program: Program {
            binary: "/usr/bin/qemu".into(),
            version: "7.2.0".to_owned(),
            working_dir: "/".into(),
        },
        machine: Machine {
            machine_type: "pc-q35-7.2".to_owned(),
            accelerator: "tcg".to_owned(),
            cpu_type: "max-x86_64-cpu".to_owned(),
            cpu_option: None,
            cpus: 1,
        },
        memory: Memory {
            base_bytes: 256 << 20,
            plugged_bytes: 0,
            default_block: Some("pc.ram".to_owned()),
            blocks: std::iter::once("pc.ram".to_owned()).chain(used).map(block).collect(),
        },
        disks: Vec::new(),
        networks: Vec::new(),
        chardevs: Vec::new(),
        devices: DeviceTree::default(),
        options,
        problems: Vec::new(),
    }
}

fn rules() -> HostRules {
    HostRules { ram: RamPlan::Anonymous, ..HostRules::new("/usr/bin/qemu", "/run/vm") }
}

/// Returns the arguments between the program and those that are always added.
fn built(arguments: &str, rules: &HostRules) -> String {
    let built = build(&vm(arguments), rules).unwrap();
    let words: Vec<String> = built.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let text = words[1..].join(" ");
    let end = text.find(" -chardev socket,id=whimbrel-qmp").unwrap_or_else(|| panic!("{text}"));
    text[..end].to_owned()
}

fn codes(arguments: &str, rules: &HostRules) -> Vec<String> {
    let error = build(&vm(arguments), rules).unwrap_err();
    error.problems.into_iter().map(|problem| problem.code).collect()
}

#[test]
fn what_is_always_added() {
    let built = build(&vm("-display none"), &rules()).unwrap();
    let words: Vec<&str> = built.argv.iter().filter_map(|word| word.to_str()).collect();
    assert_eq!(
        words,
        [
            "/usr/bin/qemu",
            "-display",
            "none",
            "-chardev",
            "socket,id=whimbrel-qmp,path=/run/vm/whimbrel-qmp.sock,server=on,wait=on",
            "-mon",
            "chardev=whimbrel-qmp,mode=control",
            "-S",
            "-incoming",
            "defer"
        ]
    );
    // The monitor that an earlier agent added is not copied.
    let equivalent = "-display none -chardev socket,id=whimbrel-qmp,path=/x,server=on -mon chardev=whimbrel-qmp,mode=control";
    assert_eq!(build(&vm(equivalent), &rules()).unwrap(), built);
}

#[test]
fn sockets_files_and_terminals() {
    for (there, here) in [
        ("-qmp unix:/tmp/q.sock,server,nowait", "-qmp unix:/run/vm/q.sock,server=on,wait=off"),
        ("-monitor unix:/a/m,server=on,wait=off", "-monitor unix:/run/vm/m,server=on,wait=off"),
        ("-serial file:/log/serial", "-serial file:/run/vm/serial"),
        ("-serial unix:/there/peer", "-serial unix:/there/peer"),
        ("-serial null", "-serial null"),
        ("-serial stdio -monitor none", "-serial file:/run/vm/serial0.log -monitor none"),
        ("-serial mon:stdio", "-monitor none -serial file:/run/vm/serial0.log"),
        ("-monitor stdio", "-monitor none"),
        (
            "-chardev socket,id=c,path=/x/s,server=on,wait=off -serial chardev:c",
            "-chardev backend=socket,id=c,path=/run/vm/s,server=on,wait=off -serial chardev:c",
        ),
        ("-chardev file,id=c,path=/x/log", "-chardev backend=file,id=c,path=/run/vm/log"),
        ("-chardev stdio,id=c,mux=on", "-chardev backend=file,id=c,mux=on,path=/run/vm/c.log"),
        ("-vnc unix:/x/vnc", "-vnc unix:/run/vm/vnc"),
        ("-vnc :3,password=on", "-vnc :3,password=on"),
        // Equal names do not collide.
        ("-serial file:/a/log -serial file:/b/log", "-serial file:/run/vm/log -serial file:/run/vm/log.2"),
    ] {
        assert_eq!(built(&format!("{there} -display none"), &rules()), format!("{here} -display none"));
    }
    assert_eq!(built("-nographic", &rules()), "-nographic -serial file:/run/vm/serial0.log -monitor none");
    assert_eq!(built("-display gtk", &rules()), "-display none");
    assert_eq!(codes("-serial /dev/ttyS0", &rules()), ["chardev-of-host"]);
    assert_eq!(codes("-chardev tty,id=a,path=/dev/ttyS0", &rules()), ["chardev-of-host"]);
}

#[test]
fn networks() {
    let rules = HostRules {
        tap: [("tap0", "tap7"), ("net1", "tap8"), ("br0", "br5")]
            .map(|(from, to)| (from.to_owned(), to.to_owned()))
            .into(),
        ..rules()
    };
    for (there, here) in [
        ("tap,id=net0,ifname=tap0,script=no", "type=tap,id=net0,ifname=tap7,script=no"),
        ("tap,id=net9,ifname=tap9,script=no", "type=tap,id=net9,ifname=tap9,script=no"),
        (
            "tap,id=net1,fds=3:4,vhostfds=5:6",
            "type=tap,id=net1,script=no,downscript=no,queues=2,vhost=on,ifname=tap8",
        ),
        ("bridge,id=n,br=br0", "type=bridge,id=n,br=br5"),
        ("user,id=n,hostfwd=tcp::1-:2", "type=user,id=n,hostfwd=tcp::1-:2"),
    ] {
        assert_eq!(
            built(&format!("-netdev {there} -display none"), &rules),
            format!("-netdev {here} -display none")
        );
    }
    assert_eq!(codes("-netdev tap,id=other,fd=3", &rules), ["tap-descriptor"]);
    assert_eq!(codes("-netdev socket,id=other,fd=3", &rules), ["network-descriptor"]);
}

#[test]
fn directories_of_disks() {
    let dirs = [("/vm", "/mnt"), ("/vm/fast", "/ssd")];
    let rules = HostRules { disk_dirs: dirs.map(|(from, to)| (from.into(), to.into())).to_vec(), ..rules() };
    assert_eq!(
        built(
            "-drive file=/vm/a.img -blockdev driver=file,node-name=n,filename=/vm/fast/b -kernel /vm/k -display none",
            &rules
        ),
        "-drive file=/mnt/a.img -blockdev driver=file,node-name=n,filename=/ssd/b -kernel /mnt/k -display none"
    );
    let mut vm = vm("-drive file=/vm/a.img");
    vm.disks.push(Disk {
        name: "d".to_owned(),
        device: None,
        file: Some("/vm/a.img".to_owned()),
        format: Some("qcow2".to_owned()),
        backing_files: vec!["/vm/base".to_owned()],
        layers: Vec::new(),
        read_only: false,
        direct: false,
        removable: false,
        bytes: None,
        used_bytes: None,
        encrypted: false,
        snapshots: Vec::new(),
        data_files: Vec::new(),
        part: None,
        bitmaps: Vec::new(),
        nodes: None,
    });
    let error = build(&vm, &rules).unwrap_err();
    assert_eq!(error.problems[0].code, "disk-backing-moved");
}

#[test]
fn memory_keeps_its_names() {
    let memfd = HostRules { ram: RamPlan::Memfd { hugepage_bytes: None }, ..rules() };
    let off = "x-use-canonical-path-for-ramblock-id=off";
    assert_eq!(
        built("-machine pc-q35-7.2,mem-merge=off -display none", &memfd),
        format!(
            "-object qom-type=memory-backend-memfd,id=pc.ram,size=268435456b,share=on,{off},merge=off -machine type=pc-q35-7.2,mem-merge=off,memory-backend=pc.ram -display none"
        )
    );
    let numa = "-machine pc-q35-7.2 -object memory-backend-file,id=r0,size=1G,mem-path=/dev/shm/x,share=on -numa node,memdev=r0 -display none";
    assert_eq!(
        built(numa, &memfd),
        format!(
            "-machine pc-q35-7.2 -object qom-type=memory-backend-memfd,id=r0,size=1G,share=on,{off} -numa node,memdev=r0 -display none"
        )
    );
    let huge = HostRules { ram: RamPlan::Memfd { hugepage_bytes: Some(2 << 20) }, ..rules() };
    let block = |name: &str, page_size_bytes| MemoryBlock { name: name.to_owned(), page_size_bytes };
    let mut all_huge = vm(numa);
    all_huge.memory.blocks = vec![block("r0", 2 << 20)];
    let words = build(&all_huge, &huge).unwrap().argv;
    assert!(
        words.iter().any(|word| word.to_string_lossy().contains("share=on,hugetlb=on,hugetlbsize=2097152,"))
    );
    // One of two nodes had huge pages; the other one gets none on this host either.
    let mut mixed = vm(
        "-object memory-backend-file,id=r0,size=1G,mem-path=/dev/hugepages -object memory-backend-ram,id=r1,size=1G -numa node,memdev=r0 -numa node,memdev=r1 -display none",
    );
    mixed.memory.blocks = vec![block("r0", 2 << 20), block("r1", 4096)];
    let words = build(&mixed, &huge).unwrap().argv;
    let object = |id: &str| {
        let is_it = |word: &&OsString| word.to_string_lossy().contains(&format!("id={id},"));
        words.iter().find(is_it).unwrap().to_string_lossy().into_owned()
    };
    assert!(object("r0").contains("hugetlb=on,hugetlbsize=2097152"), "{words:?}");
    assert!(!object("r1").contains("hugetlb"), "{words:?}");
    let anonymous = HostRules { ram: RamPlan::Anonymous, ..rules() };
    assert!(
        built(numa, &anonymous).contains(&format!("-object qom-type=memory-backend-ram,id=r0,size=1G,{off}"))
    );
    assert_eq!(built("-machine pc-q35-7.2 -display none", &anonymous), "-machine pc-q35-7.2 -display none");
    // A guest with preallocated memory gets preallocated memory on this host, too.
    for plan in [&memfd, &anonymous] {
        assert!(built("-machine pc-q35-7.2 -mem-prealloc -display none", plan).contains(" -mem-prealloc "));
        let object =
            "-object memory-backend-ram,id=r0,size=1G,prealloc=on -numa node,memdev=r0 -display none";
        assert!(built(object, plan).contains(",prealloc=on"));
    }
    assert_eq!(
        codes("-object memory-backend-file,id=r,size=1G,mem-path=/x,pmem=on", &memfd),
        ["memory-persistent"]
    );
}

#[test]
fn memory_that_was_bound_to_nodes_of_its_host_is_warned_of() {
    let warnings = |more: &str, ram| {
        let object =
            format!("-object memory-backend-ram,id=r0,size=1G{more} -numa node,memdev=r0 -display none");
        let built = build(&vm(&object), &HostRules { ram, ..rules() }).unwrap();
        let text: Vec<_> = built.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        assert!(!text.join(" ").contains("host-nodes"), "{text:?}");
        built.warnings.into_iter().map(|warning| (warning.code, warning.what)).collect::<Vec<_>>()
    };
    for ram in [RamPlan::Anonymous, RamPlan::Memfd { hugepage_bytes: None }] {
        for none in ["", ",policy=default", ",prealloc=on"] {
            assert_eq!(warnings(none, ram), []);
        }
        for (more, named) in [
            (",host-nodes=0-1,policy=bind", "(host-nodes, policy)"),
            (",host-nodes.0=1,policy=interleave", "(host-nodes, policy)"),
            (",prealloc=on,prealloc-context=t0", "(prealloc-context)"),
        ] {
            let found = warnings(more, ram);
            let [(code, what)] = &found[..] else { panic!("{more}: {found:?}") };
            assert_eq!(code, "memory-unbound");
            assert!(what.contains("memory r0 ") && what.contains(named), "{what}");
        }
    }
    let json = r#"{"qom-type":"memory-backend-ram","id":"r1","size":4096,"host-nodes":[0],"policy":"bind"}"#;
    let built =
        build(&vm(&format!("-object {json} -display none")), &HostRules::new("/usr/bin/qemu", "/run/vm"));
    assert_eq!(built.unwrap().warnings.len(), 1);
    // QEMU describes an object that was added after the start in this way.
    let json =
        r#"{"qom-type":"memory-backend-ram","id":"r1","size":4096,"host-nodes":[],"policy":"default"}"#;
    let built =
        build(&vm(&format!("-object {json} -display none")), &HostRules::new("/usr/bin/qemu", "/run/vm"));
    assert_eq!(built.unwrap().warnings, []);
}

#[test]
fn memory_that_no_device_has_stays_behind() {
    for object in [
        "memory-backend-ram,id=unused,size=64M",
        "memory-backend-file,id=unused,size=64M,mem-path=/x,pmem=on",
        r#"{"qom-type":"memory-backend-ram","id":"unused","size":4096,"host-nodes":[0],"policy":"bind"}"#,
    ] {
        let built = build(&vm(&format!("-object {object} -display none")), &rules()).unwrap();
        let words: Vec<_> = built.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        assert!(!words.join(" ").contains("unused"), "{words:?}");
        let [warning] = &built.warnings[..] else { panic!("{:?}", built.warnings) };
        assert_eq!(warning.code, "memory-unused");
        assert!(warning.advice.contains("object-del unused"), "{warning}");
    }
}

#[test]
fn memory_of_a_device_on_a_bus_is_kept() {
    let mut vm = vm(
        "-object memory-backend-ram,id=unused,size=64M -device virtio-mem-pci,memdev=unused -display none",
    );
    let page_size_bytes = 4096;
    for name in ["0000:00:02.0/unused", "0000:00:02.0//objects/unused", "/objects/unused", "unused"] {
        vm.memory.blocks = vec![MemoryBlock { name: name.to_owned(), page_size_bytes }];
        assert_eq!(build(&vm, &rules()).unwrap().warnings, [], "{name}");
    }
}

#[test]
fn unknown_options_are_refused_unless_allowed() {
    assert_eq!(codes("-frobnicate 3", &rules()), ["option-unknown"]);
    assert_eq!(
        codes("-snapshot -readconfig x -object sev-guest,id=s", &rules()),
        ["option-refused", "option-refused", "object-refused"]
    );
    assert_eq!(codes("-machine q35,confidential-guest-support=s", &rules()), ["guest-encrypted"]);
    let allow = HostRules { allow_options: vec!["frobnicate".to_owned(), "object:x".to_owned()], ..rules() };
    assert_eq!(
        built("-frobnicate 3 -object x,id=1 -display none", &allow),
        "-frobnicate 3 -object x,id=1 -display none"
    );
    assert_eq!(
        built("-S -daemonize -pidfile x -D y -incoming defer -display none", &rules()),
        "-display none"
    );
    let long = HostRules { run_dir: "/run/".to_owned().repeat(30).into(), ..rules() };
    assert_eq!(codes("-display none", &long), ["run-dir-too-long"]);
    let mut vm = vm("");
    vm.problems.push(Problem::new("x", "it is so", "do something"));
    let error = build(&vm, &rules()).unwrap_err();
    assert_eq!(error.to_string(), "the guest cannot be started on the destination: it is so; do something");
}

/// Returns the description of a disk with this name and image.
fn disk(name: &str, file: &str, nodes: (&str, &str, &[&str])) -> Disk {
    let (top, image, below) = nodes;
    Disk {
        name: name.to_owned(),
        device: None,
        file: Some(file.to_owned()),
        format: Some("qcow2".to_owned()),
        backing_files: Vec::new(),
        layers: Vec::new(),
        read_only: false,
        direct: true,
        removable: false,
        bytes: Some(1 << 20),
        used_bytes: None,
        encrypted: false,
        snapshots: Vec::new(),
        data_files: Vec::new(),
        part: None,
        bitmaps: Vec::new(),
        nodes: Some(DiskNodes {
            format: "raw".to_owned(),
            top: top.to_owned(),
            image: image.to_owned(),
            below: below.iter().map(|name| (*name).to_owned()).collect(),
        }),
    }
}

/// Returns the arguments of a guest one of whose disks is copied.
fn built_with_image(arguments: &str, disks: Vec<Disk>, name: &str, image: NewImage) -> String {
    let vm = VmDescription { disks, ..vm(arguments) };
    let images = [(name.to_owned(), image)].into();
    let built = build(&vm, &HostRules { images, ..rules() }).unwrap();
    let words: Vec<String> = built.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let text = words[1..].join(" ");
    text.split_once(" -display none").unwrap().0.to_owned()
}

fn image(format: &str) -> NewImage {
    NewImage { path: "/pool/a,1".into(), format: format.to_owned(), cut_to_bytes: None, is_device: false }
}

#[test]
fn a_copied_drive_keeps_its_ways_and_loses_its_old_image() {
    let arguments = "-drive if=none,id=d0,file=/old/a,cache=none,aio=native,format=qcow2,l2-cache-size=4M,\
                     backing.file.filename=/old/base,discard=unmap,throttling.iops-total=9";
    let arguments = arguments.replace("                     ", "");
    let disks = || vec![disk("d0", "/old/a", ("#1", "#1", &["#2", "#3"]))];
    assert_eq!(
        built_with_image(&arguments, disks(), "d0", image("qcow2")),
        "-drive if=none,id=d0,cache=none,aio=native,discard=unmap,throttling.iops-total=9,file=/pool/a,,1,format=qcow2"
    );
    let volume = NewImage { cut_to_bytes: Some(1 << 20), is_device: true, ..image("raw") };
    assert_eq!(
        built_with_image("-drive if=ide,file=/old/a,file.locking=off", disks(), "d0", volume),
        "-drive if=ide,file=/pool/a,,1,format=raw,file.locking=off,size=1048576"
    );
    // Another one stays as it is.
    let other = "-drive if=none,id=d1,file=/old/b,format=raw";
    let both = built_with_image(&format!("-drive id=d0,file=/old/a {other}"), disks(), "d0", image("raw"));
    assert!(both.ends_with(other) && !both.contains("/old/a"), "{both}");
}

#[test]
fn a_copied_disk_without_an_option_is_refused() {
    let refused = |arguments: &str, allow: &[&str]| {
        let vm = VmDescription { disks: vec![disk("d0", "/old/a", ("#1", "#1", &["#2"]))], ..vm(arguments) };
        let allow_options = allow.iter().map(|&name| name.to_owned()).collect();
        let images = [("d0".to_owned(), image("raw"))].into();
        let error = build(&vm, &HostRules { images, allow_options, ..rules() }).unwrap_err();
        error.problems[0].code.clone()
    };
    assert_eq!(refused("-drive if=none,id=d1,file=/old/b", &[]), "disk-unclear");
    assert_eq!(refused("-drive if=none,id=d0,file=/old/a", &["drive"]), "disk-unclear");
    assert_eq!(refused("-drive id=d0,file=/old/a -drive if=ide,file=/old/a", &[]), "disk-unclear");
}

#[test]
fn copied_nodes_make_way_for_the_new_image() {
    let arguments = r#"-blockdev {"driver":"file","node-name":"f0","filename":"/old/base"}
        -blockdev {"driver":"raw","node-name":"base","file":"f0","read-only":true}
        -blockdev {"driver":"file","node-name":"f1","filename":"/old/a","aio":"io_uring","cache":{"direct":true}}
        -blockdev {"driver":"qcow2","node-name":"n1","file":"f1","backing":"base","discard":"unmap","l2-cache-size":1}
        -blockdev {"driver":"throttle","node-name":"t1","file":"n1","throttle-group":"g"}
        -blockdev driver=qcow2,node-name=n2,file.driver=file,file.filename=/old/b,backing=base"#;
    let first = disk("t1", "/old/a", ("t1", "n1", &["base", "f0", "f1"]));
    let second = disk("n2", "/old/b", ("n2", "n2", &["base", "f0", "#1"]));
    // The second disk uses the base image, too.
    let both = built_with_image(arguments, vec![first.clone(), second], "t1", image("raw"));
    let new = r#"{"discard":"unmap","driver":"raw","file":{"aio":"io_uring","cache":{"direct":true},"driver":"file","filename":"/pool/a,1","node-name":"f1"},"node-name":"n1"}"#;
    assert_eq!(
        both,
        format!(
            r#"-blockdev {{"driver":"file","node-name":"f0","filename":"/old/base"}} -blockdev {{"driver":"raw","node-name":"base","file":"f0","read-only":true}} -blockdev {new} -blockdev {{"driver":"throttle","node-name":"t1","file":"n1","throttle-group":"g"}} -blockdev driver=qcow2,node-name=n2,file.driver=file,file.filename=/old/b,backing=base"#
        )
    );
    let alone = built_with_image(arguments, vec![first], "t1", image("raw"));
    assert!(!alone.contains("/old/base") && !alone.contains("/old/a"), "{alone}");
}
