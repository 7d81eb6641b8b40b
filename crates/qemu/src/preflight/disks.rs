//! Checks that the destination sees the guest's disks, and the same ones.

use super::findings::Severity::{Blocker, Warning};
use super::findings::{Findings, add};
use super::identity::FileIdentity;
use super::input::{DestinationFacts, DestinationFile, SourceFacts};
use crate::cmdline::QemuOption;

/// Checks that the paths of the guest's images lead to the files that its QEMU has open. Otherwise a destination that
/// opens such a path, and every later operation on the image by its name, would use another file.
pub(super) fn check_source(source: &SourceFacts, findings: &mut Findings) {
    for stray in &source.files_not_open {
        let path = &stray.path;
        let (code, what, advice) = if stray.is_there {
            ("file-replaced", "another file is there now", MOVE_BACK)
        } else if has_temporary_drive(source) {
            let what = "that file does not exist: a drive with `snapshot=on` writes into a temporary file without a \
                 name";
            (
                "file-deleted",
                what,
                "write it back (`commit all` on its monitor), and start the VM without `snapshot=on`",
            )
        } else if path.contains(char::REPLACEMENT_CHARACTER) {
            let what = "its name is not UTF-8 and cannot be read from QEMU's answers";
            ("file-deleted", what, "start the VM from a file whose name is UTF-8")
        } else {
            ("file-deleted", "that file does not exist any more", MOVE_BACK)
        };
        let what = format!("QEMU has disk {} open from {path}, and {what}", stray.disk);
        add(findings, Blocker, code, what, advice);
    }
}

/// Advice about a file that was moved or deleted under a running QEMU.
const MOVE_BACK: &str = "move the file that QEMU has open back to that path (`ls -l /proc/PID/fd` shows its \
                         current name); if it was deleted, mirror the disk to a new image (blockdev-mirror, \
                         `virsh blockcopy`); eject a removable medium";

/// True if a drive was given with `snapshot=on`.
fn has_temporary_drive(source: &SourceFacts) -> bool {
    let is_temporary = |option: &QemuOption| {
        option.name == "drive" && option.parse_value().get("snapshot").as_deref() == Some("on")
    };
    source.vm.options.iter().any(is_temporary)
}

/// Checks that the destination has the files that the guest needs, and that both hosts see the same disks. A guest that
/// finds another disk under the name of its own destroys both, so a user must confirm what cannot be verified.
pub(super) fn check(destination: &DestinationFacts, findings: &mut Findings) {
    for disk in &destination.disks {
        match &disk.option {
            Some(option) => file(disk, option, findings),
            None => one_disk(disk, findings),
        }
    }
}

fn file(file: &DestinationFile, option: &str, findings: &mut Findings) {
    let DestinationFile { path, path_there, .. } = file;
    if !file.exists {
        add(
            findings,
            Blocker,
            "file-missing",
            format!("the destination has no {path_there} (here {path}), which is named by {option}"),
            "put a copy there, or name its directory there ([disks.dirs]); a QEMU that was started with -daemonize needs \
             absolute paths",
        );
    }
}

fn one_disk(disk: &DestinationFile, findings: &mut Findings) {
    let DestinationFile { path, path_there, .. } = disk;
    if !disk.exists {
        add(
            findings,
            Blocker,
            "disk-missing",
            format!("the destination has no {path_there} (here {path})"),
            "mount the shared storage there, or name its directory there ([disks.dirs])",
        );
        return;
    }
    match (&disk.source, &disk.destination) {
        _ if disk.marked_shared => {}
        (Some(ours), Some(theirs)) if ours == theirs => {}
        (Some(ours), Some(theirs)) if ours.can_be_on_one_server(theirs) => {
            add(
                findings,
                Blocker,
                "disk-mounted-differently",
                format!(
                    "{path} is on {} here and on {} there, with the same inode",
                    ours.mounted, theirs.mounted
                ),
                "if it is the same file on the same server, configure that under [disks] at the destination",
            );
            return;
        }
        (Some(ours), Some(theirs)) if !ours.can_be_same(theirs) => {
            add(
                findings,
                Blocker,
                "disk-differs",
                format!("{path} here and {path_there} there are different files or devices"),
                "put the disk on shared storage (NFS, Ceph, …), and mount it on both hosts",
            );
            return;
        }
        _ => {
            add(
                findings,
                Blocker,
                "disk-unidentified",
                format!("cannot check whether {path} here and {path_there} there are the same"),
                "make sure that they are, and configure that under [disks] at the destination",
            );
            return;
        }
    }
    let shared = disk.source.as_ref().is_some_and(FileIdentity::is_on_shared_storage);
    if shared && !disk.direct {
        add(
            findings,
            Warning,
            "disk-cached",
            format!("{path} uses the page cache; the destination may read stale data from its own cache"),
            "use cache=none for disks on shared storage",
        );
    }
    if !disk.locked {
        add(
            findings,
            Warning,
            "disk-unlocked",
            format!("{path} is not locked (file.locking=off); two QEMUs could write to it"),
            "enable locking",
        );
    }
}
