//! QEMUs that may do less than usual, and one whose package is upgraded under it.

use lab::GuestSpec;
use lab::rack::RackHost;

use crate::support::{kvm_guest, move_guest, qemu_status, rack, two};
use crate::tried::Trial;

/// The user `nobody`.
const NOBODY: u32 = 65534;
/// The filter that libvirt asks for.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Asserts that a filter of system calls holds for all threads of QEMU.
#[track_caller]
fn assert_filtered(host: &RackHost) {
    let modes =
        "cat /proc/$(pgrep --exact qemu-system-x86)/task/*/status | awk '/^Seccomp:/ { print $2 }' | sort -u";
    assert_eq!(host.shell(modes).unwrap().trim(), "2", "{}", host.name());
}

/// Replaces the file of QEMU's program as a package manager does: by another one of the same name.
fn upgrade_qemu(host: &RackHost) {
    let script = "cd /usr/bin; cp --preserve qemu-system-x86_64 qemu-system-x86_64.dpkg-new
        mv qemu-system-x86_64.dpkg-new qemu-system-x86_64
        readlink /proc/$(pgrep --exact qemu-system-x86)/exe";
    let program = host.shell(script).unwrap();
    assert!(program.trim().ends_with(" (deleted)"), "{program}");
}

/// A user of its own runs QEMU without any privilege, and a filter forbids it system calls; the filter goes along. Then
/// its program is replaced while it runs.
#[test]
#[ignore = "make rack"]
fn a_confined_qemu_and_one_that_is_upgraded() {
    let Some(rack) = rack(&two()) else { return };
    let confined = Trial::begin(&rack, "QEMU of an unprivileged user with -sandbox on, there and back");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    alpha.shell("chgrp kvm /dev/kvm /dev/vhost-net; chmod 660 /dev/kvm /dev/vhost-net").unwrap();
    let extra = ["-sandbox", SANDBOX].map(str::to_owned).into();
    let _serial = rack.start_guest(alpha, &GuestSpec { user: Some(NOBODY), extra, ..kvm_guest() }).unwrap();
    assert_eq!(qemu_status(alpha, "Uid"), [NOBODY; 4].map(|user| user.to_string()).join("\t"));
    assert_eq!(qemu_status(alpha, "CapEff"), "0000000000000000");
    assert_filtered(alpha);
    move_guest(&rack, alpha, beta, &[]);
    assert_filtered(beta);
    move_guest(&rack, beta, alpha, &[]);
    assert_filtered(alpha);
    confined.works();

    let upgraded = Trial::begin(&rack, "QEMU's program replaced by an upgrade under a running guest");
    for (from, to) in [(alpha, beta), (beta, alpha)] {
        upgrade_qemu(from);
        move_guest(&rack, from, to, &[]);
    }
    upgraded.works();
}
