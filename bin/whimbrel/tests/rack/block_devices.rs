//! Raw block devices of a third host, which both hosts reach over the network.

use lab::rack::{HostSpec, Rack, RackHost};
use toml::{Table, toml};

use crate::storage::{CONTENT, assert_first_half, guest_with, rack_with_disk};
use crate::support::{VM, blockers, move_guest, with_patience};
use crate::tried::Trial;

/// Offers a disk as a namespace of `NVMe` over TCP.
fn offer_by_nvme(store: &RackHost) {
    let address = store.address();
    store
        .shell(&format!(
            "cp /mnt/rack/{CONTENT} /srv/nvme.raw; modprobe nvmet-tcp
            mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
            cd /sys/kernel/config/nvmet; mkdir subsystems/{NQN}; cd subsystems/{NQN}
            echo 1 >attr_allow_any_host; mkdir namespaces/1
            printf /srv/nvme.raw >namespaces/1/device_path
            echo 6d4f3d2e-93b1-4c59-a3c3-2b8a30f9c001 >namespaces/1/device_uuid; echo 1 >namespaces/1/enable
            mkdir ../../ports/1; cd ../../ports/1; echo tcp >addr_trtype; echo ipv4 >addr_adrfam
            echo {address} >addr_traddr; echo 4420 >addr_trsvcid
            ln -s /sys/kernel/config/nvmet/subsystems/{NQN} subsystems/{NQN}"
        ))
        .unwrap();
}

const NQN: &str = "nqn.2026-11.example:disk";

fn connect_by_nvme(host: &RackHost, store: &RackHost) {
    let address = store.address();
    host.shell(&format!(
        "modprobe nvme-tcp; printf 'transport=tcp,traddr={address},trsvcid=4420,nqn={NQN}' >/dev/nvme-fabrics
        for n in $(seq 200); do [ ! -b /dev/nvme0n1 ] || exit 0; sleep 0.1; done; dmesg | tail; exit 1"
    ))
    .unwrap();
}

/// Moves the guest there and back; its disk is not copied, and keeps its content.
fn there_and_back(rack: &Rack, disk: &str) {
    for (from, to) in [(0, 1), (1, 0)] {
        let (from, to) = (&rack.hosts[from], &rack.hosts[to]);
        let (report, serial) = move_guest(rack, from, to, &[]);
        assert_eq!(report["disks"].as_array().map_or(0, Vec::len), 0, "it is not copied: {report:#}");
        serial.wait_for_disk_writes().unwrap();
        assert_first_half(to, disk);
    }
}

/// A device with a name that is the same everywhere is known as shared. One without, over nbd, is refused until the
/// configuration says so.
#[test]
#[ignore = "make rack"]
fn a_raw_block_device_over_the_network() {
    let specs = ["alpha", "beta", "store"].map(HostSpec::new);
    let Some(rack) = rack_with_disk(&specs) else { return };
    let nvme =
        Trial::begin(&rack, "a raw block device over NVMe/TCP, there and back").storage("NVMe/TCP, raw");
    let (alpha, beta, store) = (&rack.hosts[0], &rack.hosts[1], &rack.hosts[2]);
    offer_by_nvme(store);
    rack.install_agents(&with_patience(&Table::new())).unwrap();
    for host in [alpha, beta] {
        connect_by_nvme(host, store);
    }
    let serial = rack.start_guest(alpha, &guest_with("/dev/nvme0n1", "raw")).unwrap();
    there_and_back(&rack, "/dev/nvme0n1");
    nvme.works();
    drop(serial);
    alpha.run(&["systemctl", "stop", &format!("whimbrel-vm-{VM}.scope")]).unwrap();
    // Unless the agent has done so by itself.
    let _ = rack.whimbrel(alpha, &["vm", "forget", VM]);

    let nbd = Trial::begin(&rack, "a raw block device over nbd, named as shared, there and back")
        .storage("nbd, raw");
    let address = store.address();
    store
        .shell(&format!(
            "cp /mnt/rack/{CONTENT} /srv/nbd.raw
            qemu-nbd --fork --persistent --shared=4 --format=raw --cache=none --port=10809 /srv/nbd.raw"
        ))
        .unwrap();
    for host in [alpha, beta] {
        host.shell(&format!("modprobe nbd; nbd-client {address} 10809 /dev/nbd0 >&2")).unwrap();
    }
    let _serial = rack.start_guest(alpha, &guest_with("/dev/nbd0", "raw")).unwrap();
    assert_eq!(blockers(&rack, alpha, beta), ["disk-unidentified"]);
    let shared = toml! { disks = { pool = { directory = "/srv/images" }, shared = ["/dev/nbd0"] } };
    for host in [alpha, beta] {
        rack.configure(host, &with_patience(&shared)).unwrap();
    }
    there_and_back(&rack, "/dev/nbd0");
    nbd.works();
}
