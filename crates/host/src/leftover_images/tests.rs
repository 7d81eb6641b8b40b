//! Random histories of a file that was left: it is removed only if it is the one that was copied whole, and unchanged.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use proptest::prelude::*;
use qemu::describe::{DiskNodes, FilePart};
use rustix::mount::UnmountFlags;

use super::*;

/// Content of the disk.
const COPIED: &[u8; 4096] = &[7; 4096];

/// One event in the life of an image's path, in a directory of its own.
#[derive(Clone, Debug)]
enum PathEvent {
    /// A restored backup: another file with the same content is moved to the path.
    Replace,
    /// The file is moved away.
    MoveAway,
    /// A file that was moved away is moved back, unless another one is at the path.
    MoveBack,
    HardLink,
    /// The path becomes a symbolic link to the file.
    BecomesLink,
    /// The path becomes a symbolic link to another file.
    BecomesLinkToAnother,
    Write,
    Grow,
    /// A copy that may share the blocks is made beside it.
    Reflink,
    Touch,
    /// It is mounted elsewhere, too (as root).
    BoundElsewhere,
    /// Another file with the same content is mounted over it (as root).
    BoundOver,
}

/// The image as it was when it was copied.
#[derive(Clone, Copy, Debug)]
enum ImageKind {
    Whole,
    /// A part of the file, by QEMU's description.
    Part,
    /// The disk is shorter than the file.
    Longer,
    Snapshots,
    /// It was not copied: the VM arrived with it, and ended.
    Ended,
}

fn events() -> impl Strategy<Value = Vec<PathEvent>> {
    use PathEvent::{
        BecomesLink, BecomesLinkToAnother, BoundElsewhere, BoundOver, Grow, HardLink, MoveAway, MoveBack,
        Reflink, Replace, Touch, Write,
    };
    let all = [
        Replace,
        MoveAway,
        MoveBack,
        HardLink,
        BecomesLink,
        BecomesLinkToAnother,
        Write,
        Grow,
        Reflink,
        Touch,
        BoundElsewhere,
        BoundOver,
    ];
    proptest::collection::vec(proptest::sample::select(all.to_vec()), 0..4)
}

fn kinds() -> impl Strategy<Value = ImageKind> {
    prop_oneof![6 => Just(ImageKind::Whole), 3 => Just(ImageKind::Ended), 1 => Just(ImageKind::Part), 1 => Just(ImageKind::Longer), 1 => Just(ImageKind::Snapshots)]
}

fn left(path: &Path, kind: ImageKind) -> LeftoverFile {
    let node =
        DiskNodes { top: "n".to_owned(), image: "n".to_owned(), format: "raw".to_owned(), below: Vec::new() };
    let bytes = if matches!(kind, ImageKind::Longer) { 2048 } else { COPIED.len() as u64 };
    let disk = Disk {
        name: "disk0".to_owned(),
        device: None,
        file: Some(path.display().to_string()),
        format: Some("raw".to_owned()),
        backing_files: Vec::new(),
        data_files: Vec::new(),
        part: matches!(kind, ImageKind::Part).then_some(FilePart { offset_bytes: Some(0) }),
        layers: Vec::new(),
        read_only: false,
        encrypted: false,
        snapshots: if matches!(kind, ImageKind::Snapshots) { vec!["s".to_owned()] } else { Vec::new() },
        bitmaps: Vec::new(),
        direct: false,
        removable: false,
        bytes: Some(bytes),
        used_bytes: None,
        nodes: Some(node),
    };
    let meta = fs::metadata(path).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let how = match kind {
        ImageKind::Ended => LeavingReason::Ended,
        _ => LeavingReason::moved(&disk, i64::try_from(now.as_millis()).unwrap()),
    };
    LeftoverFile {
        disk: disk.name,
        path: path.to_owned(),
        identity: FileIdentity::of(path),
        created_unix_ns: created_unix_ns(&meta),
        how,
    }
}

/// Waits until changes get a later time than the one at which the VM had left.
fn until_after(left: &LeftoverFile) {
    let probe = tempfile::NamedTempFile::new().unwrap();
    loop {
        fs::write(probe.path(), "x").unwrap();
        let meta = fs::metadata(probe.path()).unwrap();
        let LeavingReason::Moved { gone_unix_ms, .. } = left.how else { break };
        if meta.ctime() * 1000 + meta.ctime_nsec() / 1_000_000 > gone_unix_ms {
            break;
        }
    }
}

/// Makes an event happen, and returns true if it could.
fn happen(event: &PathEvent, directory: &Path) -> bool {
    let path = |name: &str| directory.join(name);
    let (disk, away) = (path("disk"), path("away"));
    // The kernel does not move a file with something mounted over it.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    if mounts.lines().any(|line| line.split(' ').nth(4).is_some_and(|place| Path::new(place) == disk)) {
        return false;
    }
    let is_file = fs::symlink_metadata(&disk).is_ok_and(|meta| meta.is_file());
    match event {
        PathEvent::Replace => {
            fs::write(path("new"), COPIED).unwrap();
            fs::rename(path("new"), &disk).unwrap();
        }
        PathEvent::MoveAway if is_file => fs::rename(&disk, &away).unwrap(),
        PathEvent::MoveBack if away.exists() && fs::symlink_metadata(&disk).is_err() => {
            fs::rename(&away, &disk).unwrap();
        }
        PathEvent::HardLink if is_file && !path("hard").exists() => {
            fs::hard_link(&disk, path("hard")).unwrap();
        }
        PathEvent::BecomesLink if is_file => {
            fs::rename(&disk, &away).unwrap();
            symlink(&away, &disk).unwrap();
        }
        PathEvent::BecomesLinkToAnother if is_file => {
            fs::write(path("another"), COPIED).unwrap();
            fs::rename(&disk, &away).unwrap();
            symlink(path("another"), &disk).unwrap();
        }
        PathEvent::Write if is_file => fs::write(&disk, "others'").unwrap(),
        PathEvent::Grow if is_file => {
            File::options().write(true).open(&disk).unwrap().set_len(1 << 20).unwrap();
        }
        PathEvent::Reflink if is_file => drop(fs::copy(&disk, path("copy")).unwrap()),
        PathEvent::Touch if is_file => {
            let file = File::options().write(true).open(&disk).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        }
        PathEvent::BoundElsewhere if is_file && !path("elsewhere").exists() => {
            fs::write(path("elsewhere"), "").unwrap();
            bind(&disk, &path("elsewhere"));
        }
        PathEvent::BoundOver if is_file => {
            fs::write(path("over"), COPIED).unwrap();
            bind(&path("over"), &disk);
        }
        _ => return false,
    }
    true
}

/// Mounts a file over another, if this process may.
fn bind(file: &Path, over: &Path) {
    let _ = rustix::mount::mount_bind(file, over);
}

/// True if this process may mount.
fn can_bind() -> bool {
    let folder = tempfile::tempdir().unwrap();
    let mounted = folder.path().join("disk");
    fs::write(&mounted, "").unwrap();
    let _mounts = Mounts(folder.path());
    rustix::mount::mount_bind(&mounted, &mounted).is_ok()
}

/// Unmounts everything in a directory when it is dropped.
struct Mounts<'a>(&'a Path);

impl Drop for Mounts<'_> {
    fn drop(&mut self) {
        for name in ["disk", "away", "elsewhere"] {
            while rustix::mount::unmount(self.0.join(name), UnmountFlags::DETACH).is_ok() {}
        }
    }
}

/// Returns all names in a directory, each with its inode and its readable content.
fn names(directory: &Path) -> BTreeMap<PathBuf, (u64, Option<Vec<u8>>)> {
    let entry =
        |entry: fs::DirEntry| (entry.path(), (entry.metadata().unwrap().ino(), fs::read(entry.path()).ok()));
    fs::read_dir(directory).unwrap().map(|found| entry(found.unwrap())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn only_a_file_that_was_copied_whole_and_is_unchanged_goes(kind in kinds(), events in events()) {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        fs::write(&disk, COPIED).unwrap();
        let left = left(&disk, kind);
        // Its inode number is not used again as long as it is open: histories in which it is are in the test below.
        let inode = fs::metadata(&disk).unwrap().ino();
        until_after(&left);
        let _mounts = Mounts(folder.path());
        let happened: Vec<&PathEvent> = events.iter().filter(|event| happen(event, folder.path())).collect();
        let before = names(folder.path());
        let result = left.remove();
        let mut after = names(folder.path());
        if result.is_ok() {
            let is_ended = matches!(kind, ImageKind::Ended);
            prop_assert!(is_ended || matches!(kind, ImageKind::Whole), "not copied whole");
            let (removed, content) = &before[&disk];
            prop_assert_eq!(*removed, inode);
            prop_assert!(is_ended || content.as_deref() == Some(&COPIED[..]));
            // Every event that changes the file is detected; a copy is not.
            let cannot_bind = !can_bind();
            let is_harmless = |event: &&PathEvent| match event {
                PathEvent::Reflink | PathEvent::MoveBack => true,
                // Its guest wrote to it, and a file that is moved back is the same.
                PathEvent::Write | PathEvent::Grow | PathEvent::Touch | PathEvent::MoveAway => is_ended,
                PathEvent::BoundElsewhere | PathEvent::BoundOver => cannot_bind,
                _ => false,
            };
            prop_assert!(happened.iter().all(is_harmless), "{:?}", events);
            prop_assert!(!after.contains_key(&disk));
            after.insert(disk.clone(), before[&disk].clone());
        } else if happened.is_empty() {
            prop_assert!(!matches!(kind, ImageKind::Whole | ImageKind::Ended), "{:?}", result);
        }
        // Links to the removed file are the only ones that may read differently.
        prop_assert_eq!(before, after);
    }
}

#[test]
fn a_later_file_with_the_same_inode_number_stays() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::write(&disk, COPIED).unwrap();
    for kind in [ImageKind::Whole, ImageKind::Ended] {
        a_later_file_stays(&disk, kind);
    }
}

fn a_later_file_stays(disk: &Path, kind: ImageKind) {
    let known = left(disk, kind);
    // As if the number were used again by a file that was made before the VM's departure was recorded.
    let later = LeftoverFile {
        created_unix_ns: known.created_unix_ns.map(|created| created - 1),
        how: match known.how {
            LeavingReason::Moved { .. } => {
                LeavingReason::Moved { not_whole: None, bytes: None, gone_unix_ms: i64::MAX }
            }
            LeavingReason::Ended => LeavingReason::Ended,
        },
        ..left(disk, kind)
    };
    if known.created_unix_ns.is_some() {
        assert!(later.remove().unwrap_err().contains("later"));
    }
    assert!(disk.exists());
}
