//! A guest that UEFI boots moves with its variables. Needs root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::fs;
use std::path::Path;

use common::{Cluster, Device, Guest, GuestSpec, Load, Setup};
use lab::guest_shell::{run_in_guest, with_shell};
use lab::{Net, until, vm_address};

const VM: &str = "vm1";
/// Firmware of Debian's package, and the content of its variables at first.
const CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const NO_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";
/// Directory of variables in the guest, and the end of their names.
const VARIABLES: &str = "/sys/firmware/efi/efivars/";
const OWNER: &str = "-2b8a30f9-93b1-4c59-a3c3-6d4f3d2ec001";

/// A guest whose firmware has its variables in a file.
fn uefi_guest(variables: &Path) -> GuestSpec {
    let load =
        Load { fill_mib: 8, wss_mib: 2, rate_mib_per_s: 1, address: Some(vm_address(1)), ..Load::default() };
    let flash = |unit: u8, more: &str, file: &str| {
        ["-drive".to_owned(), format!("if=pflash,format=raw,unit={unit}{more},file={file}")]
    };
    let variables = variables.display().to_string();
    let extra = [flash(0, ",readonly=on", CODE), flash(1, "", &variables)].concat();
    let machine = "q35,smm=off".to_owned();
    let devices = vec![Device::Net(Net::new(1))];
    with_shell(GuestSpec { machine, memory_mib: 256, devices, extra, ..GuestSpec::tiny(VM, load) })
}

fn run(cluster: &Cluster, script: &str) -> String {
    run_in_guest(&cluster.lab.client, vm_address(1), script).unwrap()
}

/// Sets a variable that the firmware keeps, and that is visible while an operating system runs.
fn set(cluster: &Cluster, name: &str, value: &str) {
    run(cluster, &format!("printf '\\007\\000\\000\\000{value}' >{VARIABLES}{name}{OWNER}\n"));
}

/// Asserts the values of the two variables of this test; an empty one does not exist.
#[track_caller]
fn assert_values(cluster: &Cluster, first: &str, second: &str) {
    let get = |name: &str| {
        let script = format!("busybox tail -c +5 {VARIABLES}{name}{OWNER} 2>/dev/null\n");
        run(cluster, &script).trim().to_owned()
    };
    assert_eq!([get("First"), get("Second")], [first, second]);
}

/// Variables that were set before arrive: in the flash, with which a guest boots again, and in its file, with which QEMU
/// starts again.
#[test]
fn variables_of_uefi_arrive() {
    let cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    cluster.lab.b.tap(&Net::new(1).tap).unwrap();
    let variables = cluster.lab.a.directory().join("variables.fd");
    fs::copy(NO_VARIABLES, &variables).unwrap();
    let guest = cluster.guest(&uefi_guest(&variables));
    set(&cluster, "First", "before");
    assert_values(&cluster, "before", "");

    let report = cluster.migrate(VM, "a", "b", &["--disks", "copy"]);
    assert_eq!(report["disks"].as_array().unwrap().len(), 1, "the variables alone: {report:#}");
    assert_values(&cluster, "before", "");
    set(&cluster, "Second", "there");
    drop(guest);

    let mut boots = cluster.serial("b", VM).follow_from_now().unwrap();
    run(&cluster, "(busybox sleep 1; echo b >/proc/sysrq-trigger) </dev/null >/dev/null 2>&1 &\n");
    boots.wait_for_text("FILLED").unwrap();
    assert_values(&cluster, "before", "there");
    let report = cluster.migrate(VM, "b", "a", &["--disks", "copy"]);
    assert_values(&cluster, "before", "there");
    cluster.assert_guest_whole("a", VM);

    let file = report["disks"][0]["path"].as_str().unwrap();
    assert_ne!(Path::new(file), variables, "it is the one that came back");
    let pid = cluster.a.vm(VM).unwrap()["pid"].as_u64().unwrap() as u32;
    lab::kill_pid(pid).unwrap();
    until("QEMU has ended", || !Path::new(&format!("/proc/{pid}")).exists());
    cluster.a.cli(&["vm", "forget", VM]).ok();
    fs::remove_dir_all(cluster.lab.a.directory().join(VM)).unwrap();
    let _guest =
        Guest::start_and_wait(&cluster.lab.a, &cluster.environment, &uefi_guest(Path::new(file))).unwrap();
    assert_values(&cluster, "before", "there");
}
