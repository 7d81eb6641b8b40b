//! Guests with disks: volumes of LVM, and NFS.

use std::path::{Path, PathBuf};

use lab::rack::{HostSpec, Rack, RackHost};
use lab::{Boot, Device, Disk, Environment, GuestSpec, Load, QemuVersion, disk};
use toml::{Table, toml};

use crate::support::{VM, blockers, kvm_guest, move_guest, rack_of, two, with_patience};
use crate::tried::Trial;

/// Size of the guest's disk.
const MIB: u64 = 32;
/// The name of its first content on the disk with what a run brings along.
pub(crate) const CONTENT: &str = "disk.raw";

/// Starts hosts to which a disk's first content is brought along.
pub(crate) fn rack_with_disk(specs: &[HostSpec]) -> Option<Rack> {
    let image: PathBuf = std::env::temp_dir().join(format!("whimbrel-rack-{}.raw", std::process::id()));
    if let Ok(qemu) = Environment::discover().qemu(QemuVersion::Installed) {
        disk::known_content(&qemu, &image, "raw", MIB).unwrap();
    }
    let rack = rack_of(specs, |tools| tools.with_file(&image, CONTENT));
    let _ = std::fs::remove_file(&image);
    rack
}

/// The guest of these tests: it reads its disk, and rewrites the second half.
pub(crate) fn guest_with(path: &str, format: &str) -> GuestSpec {
    let mut guest = kvm_guest();
    if let Boot::Tiny(load) = &mut guest.boot {
        *load = Load { disk_threads: 1, disk_writers: 1, disk_mib: 4, ..load.clone() };
    }
    guest.devices.push(Device::Disk(Disk::new("disk0", Path::new(path), format)));
    guest
}

/// Makes a volume group in a file of the host, with a thin pool of this size.
fn make_group(host: &RackHost, pool_mib: u64) {
    let script = format!(
        "truncate -s 700M /var/lib/group; device=$(losetup --find --show /var/lib/group)
        pvcreate -qq $device; vgcreate -qq vg0 $device
        lvcreate -qq --type thin-pool --size {pool_mib}M --name pool vg0 >/dev/null"
    );
    host.shell(&script).unwrap();
}

/// Compares the half of a disk that the guest does not write with its first content, past the page cache.
pub(crate) fn assert_first_half(host: &RackHost, disk: &str) {
    host.shell(&format!(
        "dd if={disk} bs=1M count={0} iflag=direct 2>/dev/null | cmp -n {1} - /mnt/rack/{CONTENT}",
        MIB / 2,
        (MIB / 2) << 20
    ))
    .unwrap();
}

/// Returns the path of one of the guest's disks on a host.
pub(crate) fn disk_at(rack: &Rack, host: &RackHost, name: &str) -> String {
    let shown = rack.whimbrel(host, &["vm", "show", VM]).ok().json();
    let mut disks = shown["description"]["disks"].as_array().into_iter().flatten();
    let disk = disks.find(|disk| disk["name"] == name).and_then(|disk| disk["file"].as_str());
    disk.unwrap_or_else(|| panic!("no disk {name}: {shown:#}")).to_owned()
}

/// From a thick volume into a thick one, and into a thin one, which is thin still.
#[test]
#[ignore = "make rack"]
fn a_disk_in_volumes_of_lvm() {
    let Some(rack) = rack_with_disk(&two()) else { return };
    let trial = Trial::begin(&rack, "volumes of LVM: thick to thick, thick to thin").storage("LVM");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    for host in [alpha, beta] {
        make_group(host, 300);
    }
    let thick = toml! { disks = { pool = { volume_group = "vg0" } } };
    rack.install_agents(&with_patience(&thick)).unwrap();
    let script = format!(
        "lvcreate -qq --yes --size {MIB}M --name first vg0; dd if=/mnt/rack/{CONTENT} of=/dev/vg0/first bs=1M"
    );
    alpha.shell(&script).unwrap();
    let _serial = rack.start_guest(alpha, &guest_with("/dev/vg0/first", "raw")).unwrap();
    move_guest(&rack, alpha, beta, &["--disks", "copy"]);
    assert_first_half(beta, &disk_at(&rack, beta, "disk0"));

    let thin = toml! { disks = { pool = { volume_group = "vg0", thin_pool = "pool" } } };
    rack.configure(alpha, &with_patience(&thin)).unwrap();
    move_guest(&rack, beta, alpha, &["--disks", "copy"]);
    let volume = disk_at(&rack, alpha, "disk0");
    assert_first_half(alpha, &volume);
    let kind = alpha.run(&["lvs", "--noheadings", "--options", "segtype", &volume]).unwrap();
    assert_eq!(kind.trim(), "thin");
    trial.works();
}

/// A pool that is too small for the disk: refused before anything is sent.
#[test]
#[ignore = "make rack"]
fn a_thin_pool_that_is_too_small() {
    let Some(rack) = rack_with_disk(&two()) else { return };
    let trial = Trial::begin(&rack, "a thin pool of LVM that is too small is refused").storage("LVM, thin");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    make_group(beta, 20);
    let thin = toml! { disks = { pool = { volume_group = "vg0", thin_pool = "pool" } } };
    rack.install_agents(&with_patience(&thin)).unwrap();
    alpha.shell(&format!("cp /mnt/rack/{CONTENT} /srv/images/disk.raw")).unwrap();
    let _serial = rack.start_guest(alpha, &guest_with("/srv/images/disk.raw", "raw")).unwrap();
    assert_eq!(blockers(&rack, alpha, beta), ["disk-space"]);
    let refused = rack.migrate(VM, alpha, beta, &["--disks", "copy"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    let volumes = beta.run(&["lvs", "--noheadings", "--options", "lv_name", "vg0"]).unwrap();
    assert_eq!(volumes.trim(), "pool", "nothing is left");
    trial.works();
}

/// A disk on NFS, which both hosts mount from a third one, is shared: it is not copied, and stays whole.
#[test]
#[ignore = "make rack"]
fn a_disk_on_nfs() {
    let specs = ["alpha", "beta", "store"].map(HostSpec::new);
    let Some(rack) = rack_with_disk(&specs) else { return };
    let trial =
        Trial::begin(&rack, "a disk on NFS that both hosts mount, there and back").storage("NFS v4.2, raw");
    let (alpha, beta, store) = (&rack.hosts[0], &rack.hosts[1], &rack.hosts[2]);
    // Without the time in which clients of an earlier start could claim their locks again.
    store
        .shell(&format!(
            "systemctl --quiet unmask rpcbind.service rpcbind.socket nfs-server nfs-mountd nfs-idmapd nfsdcld rpc-statd \
                run-rpc_pipefs.mount fsidd 2>/dev/null
            mkdir -p /srv/nfs; cp /mnt/rack/{CONTENT} /srv/nfs/disk.raw
            echo '/srv/nfs *(rw,sync,no_root_squash,no_subtree_check,fsid=0)' >/etc/exports
            modprobe nfsd; mount -t nfsd nfsd /proc/fs/nfsd 2>/dev/null || true
            echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime
            systemctl start nfs-server"
        ))
        .unwrap();
    rack.install_agents(&with_patience(&Table::new())).unwrap();
    for host in [alpha, beta] {
        host.shell(&format!("mkdir -p /srv/nfs; mount -t nfs4 {}:/ /srv/nfs", store.address())).unwrap();
    }
    let _serial = rack.start_guest(alpha, &guest_with("/srv/nfs/disk.raw", "raw")).unwrap();
    for (from, to) in [(alpha, beta), (beta, alpha)] {
        let (report, serial) = move_guest(&rack, from, to, &[]);
        assert_eq!(report["disks"].as_array().map_or(0, Vec::len), 0, "it is not copied: {report:#}");
        serial.wait_for_disk_writes().unwrap();
        assert_first_half(to, "/srv/nfs/disk.raw");
    }
    trial.works();
}
