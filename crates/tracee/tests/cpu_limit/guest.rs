//! Repeats all tests of this program in a guest whose kernel has control groups of version two, independent of the
//! kernel on which the tests run.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Environment variable of the tests that run in the guest.
const THERE: &str = "WHIMBREL_VERSION_TWO";

/// Directory of the groups in the guest. Its virtual machine, whose role these tests play, is in a scope of a slice,
/// as with systemd.
pub(crate) const ROOT: &str = "/sys/fs/cgroup";
pub(crate) const SLICE: &str = "/sys/fs/cgroup/machine.slice";

/// Returns true if this process runs in the guest.
pub(crate) fn is_this_one() -> bool {
    std::env::var_os(THERE).is_some()
}

#[test]
fn all_of_it_holds_with_groups_of_version_two() {
    let Some(kernel) = std::env::var_os("WHIMBREL_KERNEL").filter(|_| !is_this_one()) else {
        println!("no kernel to boot: see scripts/test-env");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let initrd = initrd(folder.path());
    let log = folder.path().join("serial");
    // One processor: the guest's kernel patches its own code when the first limit begins, and with several emulated
    // ones QEMU 7.2 can execute the breakpoint of that patch for ever on one of them.
    let status = Command::new("qemu-system-x86_64")
        .args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "512", "-nodefaults", "-no-reboot"])
        .args(["-display", "none", "-append", "console=ttyS0 quiet panic=-1"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initrd)
        .arg("-serial")
        .arg(format!("file:{}", log.display()))
        .status()
        .unwrap();
    let console = fs::read(&log).unwrap();
    let console = String::from_utf8_lossy(&console);
    assert!(status.success() && console.contains("tests ended: 0"), "{status}\n{console}");
    assert!(console.contains("version_two::") && !console.contains(" 0 passed"), "{console}");
}

/// Returns the guest's first program: it mounts the needed file systems, enters the scope, and becomes the tests.
fn first_program(tests: &Path) -> String {
    let tests = tests.display();
    format!(
        "#!/bin/busybox sh\n\
         /bin/busybox --install -s /bin\n\
         export PATH=/bin {THERE}=1\n\
         mkdir -p /proc /sys /dev /tmp\n\
         mount -t proc proc /proc\n\
         mount -t sysfs sys /sys\n\
         mount -t devtmpfs dev /dev\n\
         mount -t cgroup2 cgroup {ROOT}\n\
         mkdir -p {SLICE}/vm.scope\n\
         echo +cpu > {ROOT}/cgroup.subtree_control\n\
         echo +cpu > {SLICE}/cgroup.subtree_control\n\
         sh -c 'echo $$ > {SLICE}/vm.scope/cgroup.procs; exec {tests} --test-threads=1'\n\
         status=$?\n\
         for n in 1 2 3; do echo tests ended: $status; done\n\
         poweroff -f\n"
    )
}

/// Creates an initial RAM disk with this program, those that it starts, and the libraries of both.
fn initrd(folder: &Path) -> PathBuf {
    let tree = folder.join("tree");
    let place = |file: &Path| {
        let there = tree.join(file.strip_prefix("/").unwrap());
        fs::create_dir_all(there.parent().unwrap()).unwrap();
        fs::copy(file, there).unwrap();
    };
    let tests = std::env::current_exe().unwrap();
    place(Path::new("/bin/busybox"));
    for program in [&tests, Path::new(env!("CARGO_BIN_EXE_tracee-test-victim"))] {
        place(program);
        let listed = Command::new("ldd").arg(program).output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        listed.split_whitespace().filter(|word| word.starts_with('/')).for_each(|file| place(file.as_ref()));
    }
    fs::write(tree.join("init"), first_program(&tests)).unwrap();
    fs::set_permissions(tree.join("init"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let initrd = folder.join("initrd");
    let mut cpio = Command::new("cpio")
        .args(["--quiet", "-o", "-H", "newc"])
        .current_dir(&tree)
        .stdin(Stdio::piped())
        .stdout(fs::File::create(&initrd).unwrap())
        .spawn()
        .unwrap();
    let mut names = String::new();
    list(&tree, &tree, &mut names);
    cpio.stdin.take().unwrap().write_all(names.as_bytes()).unwrap();
    assert!(cpio.wait().unwrap().success());
    initrd
}

/// Lists a directory recursively, a name a line, directories before their contents.
fn list(tree: &Path, directory: &Path, names: &mut String) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        names.push_str(path.strip_prefix(tree).unwrap().to_str().unwrap());
        names.push('\n');
        if entry.file_type().unwrap().is_dir() {
            list(tree, &path, names);
        }
    }
}
