//! Hosts with different kernels and QEMUs.

use lab::rack::{GuestQemu, HostSpec, Kernel};
use lab::{GuestSpec, Net};

use crate::support::{VM, assert_whole, blockers, guest_at, kvm_guest, move_guest, rack};
use crate::tried::Trial;

/// A guest whose processors are of a model that every host can provide: each kernel passes on others of the host's own.
fn guest_of_a_model() -> GuestSpec {
    GuestSpec { cpu: Some("EPYC".to_owned()), ..kvm_guest() }
}

/// From Linux 6.12 to 6.1, from which it cannot leave: that is announced before, and refused then.
#[test]
#[ignore = "make rack"]
fn to_an_older_kernel_and_not_back() {
    let older = HostSpec::new("beta").kernel(Kernel::Debian12);
    let Some(rack) = rack(&[HostSpec::new("alpha"), older]) else { return };
    let trial = Trial::begin(&rack, "to an older kernel; the way back is refused");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let (newer, old) = (alpha.run(&["uname", "-r"]).unwrap(), beta.run(&["uname", "-r"]).unwrap());
    assert!(newer.starts_with("6.12.") && old.starts_with("6.1."), "{newer} {old}");

    // What the older kernel cannot serve is refused: the finding names the property.
    let serial = rack.start_guest(alpha, &guest_of_a_model()).unwrap();
    assert_eq!(blockers(&rack, alpha, beta), ["devices-differ"]);
    drop(serial);
    alpha.run(&["systemctl", "stop", "vm-vm1"]).unwrap();
    // Unless the agent has done so by itself.
    let _ = rack.whimbrel(alpha, &["vm", "forget", VM]);

    let mut guest = GuestSpec { devices: Vec::new(), ..guest_of_a_model() };
    let Net { tap, mac, .. } = Net::new(1);
    rack.tap(&tap).unwrap();
    let netdev = format!("tap,id=net0,ifname={tap},script=no,downscript=no,vhost=on");
    guest.extra =
        ["-netdev", &netdev, "-device", &format!("virtio-net-pci,netdev=net0,mac={mac},queue_reset=off")]
            .map(str::to_owned)
            .into();
    let _serial = rack.start_guest(alpha, &guest).unwrap();
    let check = rack.whimbrel(alpha, &["migrate", VM, "--to", "beta", "--check"]).ok().json();
    assert!(check.to_string().contains("destination-kernel-old"), "{check:#}");
    move_guest(&rack, alpha, beta, &[]);
    let blockers = blockers(&rack, beta, alpha);
    assert!(blockers.iter().any(|code| code.starts_with("kernel")), "{blockers:?}");
    let refused = rack.migrate(VM, beta, alpha, &[]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stdout.contains("6.7"), "it says what is needed: {refused:?}");
    assert_whole(&rack, beta);
    trial.works();
}

/// From QEMU 7.2 to 10.0, with the machine type of the older; back to the older it is refused, and stays.
#[test]
#[ignore = "make rack"]
fn to_a_newer_qemu_and_not_back() {
    let older = HostSpec::new("alpha").qemu(GuestQemu::OfThisMachine);
    let Some(rack) = rack(&[older, HostSpec::new("beta")]) else { return };
    let trial = Trial::begin(&rack, "to a newer QEMU; the way back is refused");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let _serial = rack.start_guest(alpha, &guest_of_a_model()).unwrap();
    move_guest(&rack, alpha, beta, &[]);
    assert_eq!(blockers(&rack, beta, alpha), ["qemu-older"]);
    assert_eq!(rack.migrate(VM, beta, alpha, &[]).code, 1);
    assert!(guest_at(&rack, beta).is_some());
    assert_whole(&rack, beta);
    trial.works();
}
