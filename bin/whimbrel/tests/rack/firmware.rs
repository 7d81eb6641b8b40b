//! Guests that UEFI boots.

use lab::{Device, GuestSpec, Net};

use crate::support::{kvm_guest, move_guest, rack, run_in_guest, two, with_shell};
use crate::tried::Trial;

/// The directory of the firmware's variables in the guest, and the end of their names.
const VARIABLES: &str = "/sys/firmware/efi/efivars/";
const OWNER: &str = "-2b8a30f9-93b1-4c59-a3c3-6d4f3d2ec001";

/// A guest whose firmware keeps its variables in a disk of its own. QEMU has its interrupt controllers: with KVM's the
/// firmware writes to the processor's task priority register without an exit, at which the QEMU that emulates the host may end.
fn uefi_guest() -> GuestSpec {
    let flash = |unit: u8, more: &str, file: &str| {
        ["-drive".to_owned(), format!("if=pflash,format=raw,unit={unit}{more},file={file}")]
    };
    let code = flash(0, ",readonly=on", "/usr/share/OVMF/OVMF_CODE_4M.fd");
    let extra = [code, flash(1, "", "/srv/images/variables.fd")].concat();
    let devices = vec![Device::Net(Net::new(1))];
    let machine = "q35,kernel-irqchip=off".to_owned();
    GuestSpec { machine, memory_mib: 256, devices, extra, ..with_shell(kvm_guest()) }
}

/// Variables that were set before arrive, also in the disk: a guest that boots anew has them.
#[test]
#[ignore = "make rack"]
fn variables_of_uefi_arrive() {
    let Some(rack) = rack(&two()) else { return };
    let trial = Trial::begin(&rack, "UEFI: variables set before, read after and after a reboot")
        .storage("flash, copied");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    alpha.run(&["cp", "/usr/share/OVMF/OVMF_VARS_4M.fd", "/srv/images/variables.fd"]).unwrap();
    let _serial = rack.start_guest(alpha, &uefi_guest()).unwrap();
    // Its attributes: kept, and visible while an operating system runs.
    let set = |name: &str, value: &str| {
        run_in_guest(&rack, &format!("printf '\\007\\000\\000\\000{value}' >{VARIABLES}{name}{OWNER}\n"))
    };
    let get = |name: &str| {
        run_in_guest(&rack, &format!("busybox tail -c +5 {VARIABLES}{name}{OWNER}\n")).trim().to_owned()
    };
    set("RackFirst", "before");
    assert_eq!(get("RackFirst"), "before");
    let (_, serial) = move_guest(&rack, alpha, beta, &["--disks", "copy"]);
    assert_eq!(get("RackFirst"), "before");
    set("RackSecond", "there");

    let mut boots = serial.follow_from_now().unwrap();
    run_in_guest(&rack, "(busybox sleep 1; echo b >/proc/sysrq-trigger) </dev/null >/dev/null 2>&1 &\n");
    // Its firmware takes as long as at the start.
    let longest = std::time::Duration::from_mins(5);
    boots.wait_for("the guest boots anew", longest, |line| line.contains("FILLED")).unwrap();
    assert_eq!((get("RackFirst"), get("RackSecond")), ("before".to_owned(), "there".to_owned()));
    move_guest(&rack, beta, alpha, &["--disks", "copy"]);
    assert_eq!((get("RackFirst"), get("RackSecond")), ("before".to_owned(), "there".to_owned()));
    trial.works();
}
