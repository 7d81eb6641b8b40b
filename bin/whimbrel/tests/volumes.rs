//! Disks that arrive in logical volumes. The kernel here has no device mapper, so that programs with LVM's names make
//! loop devices instead, with old content, as a reused volume has.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use common::{Cluster, Device, Disk, GuestSpec, Load, QemuVersion, Setup, entries};
use lab::disk;

/// Programs in place of LVM, with a volume group of their own. Devices and files are removed when it is dropped.
struct Volumes {
    group: String,
    directory: PathBuf,
}

impl Volumes {
    fn new(directory: &Path) -> Self {
        let group = format!("whimbrel-test-{}", std::process::id());
        let directory = directory.join("lvm");
        std::fs::create_dir_all(directory.join("bin")).unwrap();
        let program = |name: &str, text: &str| {
            let path = directory.join("bin").join(name);
            let text = format!("#!/bin/sh\nset -e\ngroup={group}\nfiles={}\n{text}", directory.display());
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        program("vgs", "[ \"$6 $7\" = \"vg_size,vg_free $group\" ]; echo '  2147483648 1073741824'\n");
        // A thin pool of 1024 blocks of 1 MiB; a file has the number of used ones.
        std::fs::write(directory.join("used"), "100").unwrap();
        program(
            "dmsetup",
            r#"case "$*" in
"status --noflush --target thin-pool $(echo "$group" | sed s/-/--/g)-thin-tpool")
    echo "0 2097152 thin-pool 1 112/1024 $(cat "$files/used")/1024 - rw discard_passdown queue_if_no_space - 256" ;;
"table --target thin-pool $(echo "$group" | sed s/-/--/g)-thin-tpool") echo "0 2097152 thin-pool 253:0 253:1 2048 0 0" ;;
*) exit 1 ;;
esac
"#,
        );
        // Rounded up to whole extents, as LVM does.
        program(
            "lvcreate",
            r#"[ "$1 $2 $3 $4 $5 $6 $7" = "--quiet --yes --wipesignatures y --addtag whimbrel --name" ]
name=$8
bytes=${10%b}
[ "$9 ${11}" = "--size $group" ] || [ "$9 ${11} ${12}" = "--virtualsize --thinpool $group/thin" ]
[ ! -e "/dev/$group/$name" ]
bytes=$(((bytes + 4194303) / 4194304 * 4194304))
# What is not provisioned of a thin volume reads as zeros.
if [ "$9" = --virtualsize ]; then
    truncate -s "$bytes" "$files/$name"
else
    head -c "$bytes" /dev/zero | tr '\0' '\252' >"$files/$name"
fi
mkdir -p "/dev/$group"
ln -s "$(losetup --find --show "$files/$name")" "/dev/$group/$name"
"#,
        );
        program(
            "lvremove",
            r#"[ "$1 $2" = "--quiet --yes" ]
path=$3
[ -e "$path" ] || { echo "  Failed to find logical volume" >&2; exit 5; }
losetup --detach "$(readlink "$path")"
rm "$path" "$files/${path##*/}"
"#,
        );
        Self { group, directory }
    }

    /// Returns the command that starts an agent.
    fn starter(&self) -> Vec<String> {
        let path = std::env::var("PATH").unwrap();
        ["env".to_owned(), format!("PATH={}:{path}", self.directory.join("bin").display())].into()
    }

    /// Sets the number of used blocks of the thin pool's 1024.
    fn use_blocks(&self, count: u64) {
        let (new, used) = (self.directory.join("used.new"), self.directory.join("used"));
        std::fs::write(&new, count.to_string()).unwrap();
        std::fs::rename(new, used).unwrap();
    }

    fn devices(&self) -> Vec<String> {
        let directory = Path::new("/dev").join(&self.group);
        if directory.exists() { entries(&directory) } else { Vec::new() }
    }
}

impl Drop for Volumes {
    fn drop(&mut self) {
        let directory = Path::new("/dev").join(&self.group);
        for name in self.devices() {
            if let Ok(device) = std::fs::read_link(directory.join(name)) {
                let _ = std::process::Command::new("losetup").arg("--detach").arg(device).status();
            }
        }
        let _ = std::fs::remove_dir_all(directory);
    }
}

/// Into a volume with old content, which is longer than the disk; and from it into a file.
#[test]
fn a_disk_arrives_in_a_volume_and_leaves_it() {
    let mut cluster = Cluster::with(&Setup { pool: true, ..Setup::default() });
    let volumes = Volumes::new(&cluster.lab.shared_directory().unwrap());
    let config = cluster.b.directory.join("agent.toml");
    let images = cluster.lab.b.directory().join("images");
    let text = std::fs::read_to_string(&config).unwrap();
    let in_a_directory = format!("directory = {images:?}");
    assert!(text.contains(&in_a_directory), "{text}");
    std::fs::write(&config, text.replace(&in_a_directory, &format!("volume_group = {:?}", volumes.group)))
        .unwrap();
    cluster.b.starter = volumes.starter();
    cluster.b.kill();
    cluster.b.start();

    let qemu = cluster.environment.qemu(QemuVersion::Newer).unwrap();
    let image = cluster.lab.shared_directory().unwrap().join("disk.qcow2");
    disk::known_content(&qemu, &image, "qcow2", 62).unwrap();
    // The first half has holes: old content of the volume there has to be removed.
    let punch = ["-f", "qcow2", "-c", "discard 4M 8M", image.to_str().unwrap()];
    assert!(std::process::Command::new("qemu-io").args(punch).output().unwrap().status.success());
    let load = Load { fill_mib: 32, wss_mib: 8, rate_mib_per_s: 10, ..Load::default() };
    let mut spec = GuestSpec { qemu: QemuVersion::Newer, memory_mib: 128, ..GuestSpec::tiny("vm1", load) };
    spec.devices.push(Device::Disk(Disk::new("disk0", &image, "qcow2")));
    let _guest = cluster.guest(&spec);

    // A failed migration leaves no volume.
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "4M", "--detach"];
    cluster.a.cli(&words).ok();
    cluster.wait_for_sent(1 << 20);
    assert_eq!(volumes.devices().len(), 1);
    cluster.a.cli(&["cancel", "vm1"]).ok();
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    assert_eq!(volumes.devices(), [""; 0]);

    for thin in [false, true] {
        if thin {
            let text = std::fs::read_to_string(&config).unwrap();
            let group = format!("volume_group = {:?}", volumes.group);
            std::fs::write(&config, text.replace(&group, &format!("{group}\nthin_pool = \"thin\""))).unwrap();
            cluster.b.kill();
            cluster.b.start();
        }
        if thin {
            a_pool_is_not_filled(&cluster, &volumes);
        }
        let report = cluster.migrate("vm1", "a", "b", &["--disks", "copy"]);
        let volume = report["disks"][0]["path"].as_str().unwrap();
        assert!(volume.starts_with(&format!("/dev/{}/whimbrel-vm1+", volumes.group)), "{report:#}");
        if thin {
            // Holes of the guest's disk were not written.
            let file = volumes.directory.join(Path::new(volume).file_name().unwrap());
            let used_bytes = std::fs::metadata(file).unwrap().blocks() * 512;
            assert!(used_bytes <= 58 << 20, "{used_bytes} of 62 MiB, of which 8 are holes");
        }
        assert_eq!(report["disks"][0]["format"], "raw");
        cluster.assert_guest_whole("b", "vm1");

        let report = cluster.migrate("vm1", "b", "a", &["--disks", "copy"]);
        let images = cluster.lab.a.directory().join("images");
        assert!(Path::new(report["disks"][0]["path"].as_str().unwrap()).starts_with(images), "{report:#}");
        assert_eq!(report["disks"][0]["format"], "raw");
        cluster.assert_guest_whole("a", "vm1");
    }
}

/// Tests a pool that is too full at the beginning, and one that others fill while the disk arrives.
fn a_pool_is_not_filled(cluster: &Cluster, volumes: &Volumes) {
    let before = volumes.devices();
    // 5 % of 1024 blocks stay free: 9 of the 61 free blocks may be used, and the disk needs more.
    volumes.use_blocks(963);
    let refused = cluster.a.cli(&["migrate", "vm1", "--to", "b", "--disks", "copy", "--check"]).json();
    let blockers: Vec<_> = refused["destination_findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| finding["severity"] == "blocker")
        .map(|finding| finding["code"].as_str().unwrap())
        .collect();
    assert_eq!(blockers, ["disk-space"], "{refused:#}");

    volumes.use_blocks(100);
    let words = ["migrate", "vm1", "--to", "b", "--disks", "copy", "--bandwidth", "4M", "--detach"];
    cluster.a.cli(&words).ok();
    cluster.wait_for_sent(1 << 20);
    volumes.use_blocks(973);
    cluster.a.wait_settled();
    cluster.b.wait_settled();
    let report = cluster.a.cli(&["report", "vm1"]).json();
    assert_eq!(report["outcome"], "aborted", "{report:#}");
    assert!(report.to_string().contains("no space is left in the thin pool"), "{report:#}");
    assert_eq!(volumes.devices(), before);
    cluster.assert_guest_whole("a", "vm1");
    volumes.use_blocks(100);
}
