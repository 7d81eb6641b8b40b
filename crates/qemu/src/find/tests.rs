use super::*;

#[test]
fn selectors() {
    assert_eq!(Selector::parse("42"), Selector::Pid(42));
    assert_eq!(Selector::parse("./qmp"), Selector::Socket("./qmp".into()));
    assert_eq!(Selector::parse("web1"), Selector::Name("web1".to_owned()));
}

#[test]
fn command_lines_keep_empty_words() {
    assert_eq!(split_cmdline(b"qemu\0-append\0\0-S\0"), ["qemu", "-append", "", "-S"]);
    assert_eq!(split_cmdline(b""), Vec::<String>::new());
}

#[test]
fn names() {
    let name = |text: &str| guest_name(&[QemuOption::new("name", text)]);
    assert_eq!(name("web1").as_deref(), Some("web1"));
    assert_eq!(name("guest=web1,debug-threads=on").as_deref(), Some("web1"));
    assert_eq!(name("process=x"), None);
}

#[test]
fn restart_units() {
    assert_eq!(unit("0::/system.slice/vm@web1.service\n").as_deref(), Some("vm@web1.service"));
    assert_eq!(unit("0::/machine.slice/qemu.scope/libvirt/emulator\n").as_deref(), Some("qemu.scope"));
    assert_eq!(unit("0::/\n"), None);
    let hybrid = "9:name=systemd:/\n4:memory:/user.slice\n0::/system.slice/web1.service\n";
    assert_eq!(unit(hybrid).as_deref(), Some("web1.service"));
    assert_eq!(user_of_unit(hybrid), None);
    let own = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/web1.service\n";
    assert_eq!((unit(own).as_deref(), user_of_unit(own)), (Some("web1.service"), Some(1000)));
}

#[test]
fn sockets_are_read() {
    let table = "Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 100 /run/a b
0000000000000000: 00000003 00000000 00000000 0001 03 101 /run/a b
0000000000000000: 00000002 00000000 00010000 0001 01 102 /run/other
0000000000000000: 00000003 00000000 00000000 0001 03 103
";
    let sockets =
        Sockets::parse(table, &[(100, "5".to_owned()), (101, "9".to_owned()), (103, "8".to_owned())].into());
    assert_eq!(sockets.listening, ["/run/a b".to_owned()].into());
    assert_eq!(sockets.connected, ["/run/a b".to_owned()].into());
    let passed = crate::options::Value::parse("socket,id=m,fd=5", Some("backend"));
    assert_eq!(sockets.path_of(&passed).as_deref(), Some("/run/a b"));
}

#[test]
fn what_cannot_be_read_is_not_absent() {
    use std::io::{Error, ErrorKind};
    let errno = |errno: rustix::io::Errno| Error::from_raw_os_error(errno.raw_os_error());
    assert_eq!(there(Ok(1)).unwrap(), Some(1));
    for gone in [errno(rustix::io::Errno::NOENT), errno(rustix::io::Errno::SRCH)] {
        assert_eq!(there::<()>(Err(gone)).unwrap(), None, "the process has ended");
    }
    let denied = there::<()>(Err(errno(rustix::io::Errno::ACCESS))).unwrap_err();
    assert_eq!(denied.kind(), ErrorKind::PermissionDenied);
}

#[test]
fn qemus_have_known_names() {
    for (path, is_qemu) in [
        ("/usr/bin/qemu-system-x86_64", true),
        ("/nix/store/x/bin/.qemu-system-x86_64-wrapped", true),
        ("/usr/libexec/qemu-kvm", true),
        ("/usr/bin/qemu-img", false),
        ("/usr/bin/firecracker", false),
        ("/", false),
    ] {
        assert_eq!(is_qemu_program(Path::new(path)), is_qemu, "{path}");
    }
}

#[test]
fn this_process_is_seen_and_is_no_vm() {
    let own = std::process::id();
    assert!(all_processes().unwrap().contains(&own));
    let survey = survey().unwrap();
    assert!(survey.found.iter().all(|found| found.pid != own));
    assert!(survey.unknown.iter().all(|(pid, _)| *pid != own), "{:?}", survey.unknown);
    assert!(!other_kvm_processes().contains(&own));
}
