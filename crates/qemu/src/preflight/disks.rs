//! Whether the destination sees the guest's disks, and the same ones.

use super::Severity::{Blocker, Warning};
use super::checks::{Findings, add};
use super::facts::FileIdentity;
use super::{DestinationFacts, DiskSight};

/// Whether both sides see the same disks.
pub(super) fn check(destination: &DestinationFacts, findings: &mut Findings) {
    for disk in &destination.disks {
        one_disk(disk, findings);
    }
}

fn one_disk(disk: &DiskSight, findings: &mut Findings) {
    let DiskSight { path, path_there, .. } = disk;
    if !disk.exists {
        add(
            findings,
            Blocker,
            "disk-missing",
            format!("the destination has no {path_there} (here {path})"),
            "mount the shared storage there, or name its directory there (disk directories)",
        );
        return;
    }
    match (&disk.source, &disk.destination) {
        _ if disk.marked_shared => {}
        (Some(ours), Some(theirs)) if ours == theirs => {}
        (Some(ours), Some(theirs)) if may_be_one(ours, theirs) => {
            add(
                findings,
                Warning,
                "disk-mounted-differently",
                format!(
                    "{path} is on {} here and on {} there, with the same inode",
                    ours.mounted, theirs.mounted
                ),
                "if it is one file on one server, mark the directory as shared",
            );
        }
        (Some(_), Some(_)) => {
            add(
                findings,
                Blocker,
                "disk-differs",
                format!("{path} here and {path_there} there are different files"),
                "put the disk on storage that both hosts see (NFS, Ceph, …), and mount it on both",
            );
            return;
        }
        _ => {
            add(
                findings,
                Warning,
                "disk-unidentified",
                format!("it cannot be seen whether {path} here and {path_there} there are the same"),
                "make sure, and mark it as shared",
            );
        }
    }
    let shared = disk.source.as_ref().is_some_and(FileIdentity::is_on_shared_storage);
    if shared && !disk.direct {
        add(
            findings,
            Warning,
            "disk-cached",
            format!(
                "{path} goes through the page cache; the destination may read stale data of its own cache"
            ),
            "use cache=none for disks on shared storage",
        );
    }
    if !disk.locked {
        add(
            findings,
            Warning,
            "disk-unlocked",
            format!("{path} is not locked (file.locking=off); nothing keeps two QEMUs from writing to it"),
            "leave locking on, so that mistakes are refused",
        );
    }
}

/// Whether two files may be one of a server that the hosts know by different names.
fn may_be_one(ours: &FileIdentity, theirs: &FileIdentity) -> bool {
    let shared = ours.is_on_shared_storage() && theirs.is_on_shared_storage();
    shared && ours.inode == theirs.inode && ours.mounted != theirs.mounted
}
