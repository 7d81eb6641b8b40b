//! Ownership of the images of arriving disks.
//!
//! The agent makes them. A QEMU that drops its privileges when it has started (`-runas`, `-run-with user=`) opens them
//! for reading before that, and for writing when the guest is to run: then it is too late to detect that it has no
//! permission.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;

use proto::message::{Finding, Severity};
use qemu::preflight::facts::{self, Account};
use rustix::process::{DumpableBehavior, Gid, Uid, dumpable_behavior, set_dumpable_behavior};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// Changes the owner of images to the user that a QEMU has become; returns a blocker if that user still cannot open
/// them. QEMU must have answered already, so that it has its final user.
pub(crate) fn give_ownership(images: &[PathBuf], pid: u32) -> Result<(), Finding> {
    let Some(account) = facts::account(pid).filter(|it| it.user != rustix::process::geteuid().as_raw())
    else {
        return Ok(());
    };
    images.iter().try_for_each(|image| {
        let given = chown(image, Some(account.user), Some(account.group));
        given.and_then(|()| check_can_open(image, &account)).map_err(|error| Finding {
            severity: Severity::Blocker,
            code: "disk-user".to_owned(),
            what: format!("QEMU runs as user {} there, and cannot open {}: {error}", account.user, image.display()),
            advice: "give that user access to the directory of [disks.pool] at the destination and to those above it (chmod o+x)"
                .to_owned(),
        })
    })
}

/// Checks that the user that a QEMU has become can open a file for writing.
pub(crate) fn check_can_open_as(pid: u32, path: &Path) -> io::Result<()> {
    match facts::account(pid).filter(|it| it.user != rustix::process::geteuid().as_raw()) {
        Some(account) => check_can_open(path, &account),
        None => OpenOptions::new().read(true).write(true).open(path).map(drop),
    }
}

/// Checks that a user can open a file for writing. The kernel decides: a thread becomes that user and opens the file.
fn check_can_open(path: &Path, account: &Account) -> io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // While one thread has another user, other processes may not inspect this process, and it leaves no core dump, as
    // if the whole process had become that user.
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = dumpable_behavior()?;
    let opened = as_another(path, account);
    if before == DumpableBehavior::Dumpable {
        set_dumpable_behavior(before)?;
    }
    opened
}

fn as_another(path: &Path, account: &Account) -> io::Result<()> {
    thread::scope(|scope| {
        let become_and_open = || -> io::Result<()> {
            let groups: Vec<Gid> = account.groups.iter().map(|group| Gid::from_raw(*group)).collect();
            let (user, group) = (Uid::from_raw(account.user), Gid::from_raw(account.group));
            set_thread_groups(&groups)?;
            set_thread_res_gid(group, group, group)?;
            set_thread_res_uid(user, user, user)?;
            OpenOptions::new().read(true).write(true).open(path).map(drop)
        };
        let thread =
            thread::Builder::new().name("as-another".to_owned()).spawn_scoped(scope, become_and_open)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that tried it has failed")))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// The calling thread also keeps its user.
    #[test]
    fn who_may_open_a_file_is_found_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        write(&path, "x").unwrap();
        let nobody = Account { user: 65534, group: 65534, groups: vec![12] };
        let may = |mode: u32, owner: u32, group: u32, directory: u32| {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            chown(&path, Some(owner), Some(group)).unwrap();
            set_permissions(folder.path(), Permissions::from_mode(directory)).unwrap();
            check_can_open(&path, &nobody).is_ok()
        };
        assert!(may(0o600, 65534, 0, 0o711));
        assert!(may(0o060, 0, 12, 0o711));
        assert!(!may(0o600, 0, 0, 0o711));
        assert!(!may(0o600, 65534, 0, 0o700));
        assert!(rustix::process::geteuid().is_root());
        assert!(write(&path, "y").is_ok());
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::Dumpable);
    }
}
