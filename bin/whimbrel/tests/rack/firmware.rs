//! Guests that UEFI boots.

use std::time::Duration;

use lab::rack::{Rack, RackHost};
use lab::{Device, GuestSpec, Net};

use crate::storage::disk_at;
use crate::support::{VM, kvm_guest, move_guest, rack, run_in_guest, two, with_shell};
use crate::tried::Trial;

/// The directory of the firmware's variables in the guest, and the end of their names.
const VARIABLES: &str = "/sys/firmware/efi/efivars/";
const OWNER: &str = "-2b8a30f9-93b1-4c59-a3c3-6d4f3d2ec001";
/// The first file of these variables.
const FLASH: &str = "/srv/images/variables.fd";

/// A guest whose firmware has its variables in a file. Its interrupt controllers are QEMU's: with KVM's the firmware
/// writes to the processor's task priority register without an exit, and the QEMU that emulates the host ends.
fn uefi_guest(variables: &str) -> GuestSpec {
    let flash = |unit: u8, more: &str, file: &str| {
        ["-drive".to_owned(), format!("if=pflash,format=raw,unit={unit}{more},file={file}")]
    };
    let code = flash(0, ",readonly=on", "/usr/share/OVMF/OVMF_CODE_4M.fd");
    let extra = [code, flash(1, "", variables)].concat();
    let devices = vec![Device::Net(Net::new(1))];
    let machine = "q35,smm=off,kernel-irqchip=off".to_owned();
    GuestSpec { machine, memory_mib: 256, devices, extra, ..with_shell(kvm_guest()) }
}

/// Sets a variable that the firmware keeps, and that is visible while an operating system runs.
fn set(rack: &Rack, name: &str, value: &str) {
    run_in_guest(rack, &format!("printf '\\007\\000\\000\\000{value}' >{VARIABLES}{name}{OWNER}\n"));
}

/// Asserts the values of the two variables.
#[track_caller]
fn assert_values(rack: &Rack, first: &str, second: &str) {
    let get = |name: &str| {
        run_in_guest(rack, &format!("busybox tail -c +5 {VARIABLES}{name}{OWNER} 2>/dev/null\n"))
            .trim()
            .to_owned()
    };
    assert_eq!((get("RackFirst"), get("RackSecond")), (first.to_owned(), second.to_owned()));
}

/// Ends the guest on a host.
fn end(rack: &Rack, host: &RackHost) {
    host.run(&["systemctl", "stop", &format!("whimbrel-vm-{VM}.scope")]).unwrap();
    // Unless the agent has done so by itself.
    let _ = rack.whimbrel(host, &["vm", "forget", VM]);
}

/// Variables that were set before arrive, in the flash, with which a guest boots anew, and in its file, with which QEMU
/// starts anew. The hosts share nothing: the variables are copied, and the firmware is each host's own.
#[test]
#[ignore = "make rack"]
fn variables_of_uefi_arrive() {
    let Some(rack) = rack(&two()) else { return };
    let trial = Trial::begin(&rack, "UEFI: variables set before, read after, after a reboot, after a start")
        .storage("flash, copied")
        .network("virtio");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    alpha.run(&["cp", "/usr/share/OVMF/OVMF_VARS_4M.fd", FLASH]).unwrap();
    let serial = rack.start_guest(alpha, &uefi_guest(FLASH)).unwrap();
    set(&rack, "RackFirst", "before");
    assert_values(&rack, "before", "");
    drop(serial);
    let (report, serial) = move_guest(&rack, alpha, beta, &[]);
    assert_eq!(report["disks"].as_array().map_or(0, Vec::len), 1, "the variables alone: {report:#}");
    assert_values(&rack, "before", "");
    set(&rack, "RackSecond", "there");

    let mut boots = serial.follow_from_now().unwrap();
    run_in_guest(&rack, "(busybox sleep 1; echo b >/proc/sysrq-trigger) </dev/null >/dev/null 2>&1 &\n");
    // Its firmware takes as long as at the start.
    let longest = Duration::from_mins(5);
    boots.wait_for("the guest boots anew", longest, |line| line.contains("FILLED")).unwrap();
    assert_values(&rack, "before", "there");
    let (_, serial) = move_guest(&rack, beta, alpha, &[]);
    assert_values(&rack, "before", "there");

    let file = disk_at(&rack, alpha, "pflash1");
    assert_ne!(file, FLASH, "it is the one that came back");
    drop(serial);
    end(&rack, alpha);
    let _serial = rack.start_guest(alpha, &uefi_guest(&file)).unwrap();
    assert_values(&rack, "before", "there");
    trial.works();
}
