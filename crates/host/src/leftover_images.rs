//! Leftover images of VMs that were here: when they moved away with their disks, or when they ended.
//!
//! A migration does not change the image at the source: it is there if the copy turns out to be unusable. A user
//! decides to remove it, and this module makes the checks. The journal must show that the copy was whole and on stable
//! storage at the other host when this one released the VM (COMMITTED follows READY), and the file must be the same
//! that it was then: the same inode, not changed since, and open nowhere.
//!
//! The image of a VM that arrived here and ended may be the only copy of its disk. It is removed only on a separate
//! request, and only if it is the very file that was made for it, open nowhere, and the VM is forgotten.

mod removal;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use proto::VmName;
use qemu::describe::{Disk, VmDescription};
use qemu::preflight::FileIdentity;
use qemu::preflight::files::created_unix_ns;
use tracee::FileLease;
use tracing::info;

use crate::Context;
use crate::DestinationDetails;
use crate::pool::MadeImage;
use crate::preflight::files_of;
use api::progress::Standing;
use api::{LeftoverImage, Problem, ProblemKind};
use removal::Removable;
pub(crate) use removal::is_same_file;
use store::journal::{JournalError, MigrationRecord, State};

/// Returns all leftover images that still exist, newest first.
pub fn list(context: &Context) -> Result<Vec<LeftoverImage>, JournalError> {
    Ok(found(context)?.into_iter().map(|(_, image)| image).collect())
}

/// Returns the same images, each with its recorded facts.
fn found(context: &Context) -> Result<Vec<(LeftoverFile, LeftoverImage)>, JournalError> {
    let others = OtherUsers::of(context)?;
    let mut images: Vec<(LeftoverFile, LeftoverImage)> = Vec::new();
    let records = context.journal.migrations()?;
    for record in &records {
        let ended = ended_here(context, record, &records)?;
        for left in images_left_by(context, record)?.into_iter().chain(ended) {
            // An image that was used again after it had been left was left again.
            if images.iter().all(|(known, _)| known.path != left.path)
                && let Some(image) = left.inspect(record, &others)
            {
                images.push((left, image));
            }
        }
    }
    Ok(images)
}

/// Returns the images that are as a VM left them when it moved away: an old state of its disks.
pub(crate) fn old_states(context: &Context) -> Result<Vec<LeftoverImage>, JournalError> {
    let is_old = |(left, _): &(LeftoverFile, LeftoverImage)| {
        let is_as_left = || fs::metadata(&left.path).is_ok_and(|found| left.not_as_left(&found).is_none());
        matches!(left.how, LeavingReason::Moved { .. }) && is_as_left()
    };
    Ok(found(context)?.into_iter().filter(is_old).map(|(_, image)| image).collect())
}

/// Selection of a VM's images that are to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageSelection {
    /// The images that it left when it moved away, or in that migration alone.
    MovedAway {
        /// Epoch of the migration; none for all.
        epoch: Option<u64>,
    },
    /// The images that it had when it ended here.
    Ended,
}

impl ImageSelection {
    fn selects(self, image: &LeftoverImage) -> bool {
        match self {
            Self::MovedAway { epoch } => {
                !image.ended && epoch.is_none_or(|epoch| image.migration.epoch.0 == epoch)
            }
            Self::Ended => image.ended,
        }
    }
}

/// Removes images of a VM. If one of them must stay, none is removed.
pub fn remove(context: &Context, vm: &VmName, which: ImageSelection) -> Result<Vec<LeftoverImage>, Problem> {
    // No migration of it may begin at the same time.
    let _exclusive = context.names.exclusive(vm);
    let failed =
        |error: JournalError| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log");
    let mut images = found(context).map_err(failed)?;
    images.retain(|(_, image)| image.migration.vm == *vm);
    let others: Vec<LeftoverImage> = images.iter().map(|(_, image)| image.clone()).collect();
    images.retain(|(_, image)| which.selects(image));
    if images.is_empty() {
        return Err(none_found(vm, which, &others));
    }
    let kept = |path: &Path, why: &str| {
        let error = format!("{} is not removed: {why}", path.display());
        Problem::new(
            ProblemKind::Conflict,
            error,
            "fix this and try again, or remove the file by hand if no VM needs it",
        )
    };
    if let Some((image, why)) = images.iter().find_map(|(_, image)| Some((image, image.blocked_by.as_ref()?)))
    {
        return Err(kept(&image.path, why));
    }
    for (left, image) in &images {
        left.remove().map_err(|why| kept(&image.path, &why))?;
        info!(
            migration = %image.migration,
            path = %image.path.display(),
            "removed a leftover image"
        );
    }
    Ok(images.into_iter().map(|(_, image)| image).collect())
}

/// The answer where a VM has no images of the kind that is to be removed; `others` are those that it has.
fn none_found(vm: &VmName, which: ImageSelection, others: &[LeftoverImage]) -> Problem {
    let error = match which {
        ImageSelection::MovedAway { epoch: None } => {
            format!("{vm} left no image here when it was migrated away")
        }
        ImageSelection::MovedAway { epoch: Some(epoch) } => {
            format!("{vm} left no image here in migration {epoch}")
        }
        ImageSelection::Ended => format!("there is no image of a {vm} that ended here and was forgotten"),
    };
    let epochs: Vec<_> =
        others.iter().filter(|image| !image.ended).map(|image| image.migration.epoch.to_string()).collect();
    let advice = if !epochs.is_empty() {
        format!("it left some in {}: `whimbrel images list` shows them", epochs.join(", "))
    } else if others.is_empty() {
        "`whimbrel images list` shows what is there".to_owned()
    } else {
        "there are images of a VM that ended here: `--ended` removes them, and there may be no other copy"
            .to_owned()
    };
    Problem::new(ProblemKind::NotFound, error, advice)
}

/// Files that VMs and templates of this host use, open or not.
struct OtherUsers {
    vms: Vec<(VmName, VmDescription)>,
    templates: Vec<PathBuf>,
}

impl OtherUsers {
    fn of(context: &Context) -> Result<Self, JournalError> {
        let described = |record: store::journal::VmRecord| {
            Some((record.vm, serde_json::from_value(record.description).ok()?))
        };
        let vms = context.journal.vms()?.into_iter().filter_map(described).collect();
        let templates = context.templates.infos().into_iter().map(|template| template.path).collect();
        Ok(Self { vms, templates })
    }

    /// Returns a user of the file, as a reason against its removal.
    fn users(&self, path: &Path) -> Option<String> {
        if self.templates.iter().any(|template| is_same_file(template, path)) {
            return Some("it is a template of this host".to_owned());
        }
        let has_it = |disk: &Disk| {
            let mut files = disk.file.iter().chain(&disk.backing_files).chain(&disk.data_files);
            files.any(|file| is_same_file(Path::new(file), path))
        };
        let (vm, _) = self.vms.iter().find(|(_, vm)| vm.disks.iter().any(has_it))?;
        Some(format!(
            "it is a disk of {vm}, which is on this host; if {vm} has ended, run `whimbrel vm forget {vm}` \
             first"
        ))
    }
}

/// A file of an image as it was when it was left.
struct LeftoverFile {
    /// The disk, by its name in the description.
    disk: String,
    path: PathBuf,
    identity: Option<FileIdentity>,
    created_unix_ns: Option<u64>,
    how: LeavingReason,
}

/// Reason for which an image was left.
enum LeavingReason {
    /// The VM moved away with its disks.
    Moved {
        /// Reason for which its copy is not whole, if it is not.
        not_whole: Option<String>,
        /// Largest possible size of the file's content; none if the format itself has the size.
        bytes: Option<u64>,
        /// Time at which the VM had left, in milliseconds since 1970.
        gone_unix_ms: i64,
    },
    /// The VM arrived here, and ended.
    Ended,
}

/// Returns the top images of the disks that were copied whole in a migration; images below them may belong to others as
/// well.
fn images_left_by(context: &Context, record: &MigrationRecord) -> Result<Vec<LeftoverFile>, JournalError> {
    // Without an incarnation it is not known that the destination was ever ready.
    let is_done = matches!(record.state, State::Source(SourceState::Done { incarnation: Some(_), .. }));
    if !is_done || record.open {
        return Ok(Vec::new());
    }
    let (report, proposal) = (context.journal.report(record.id())?, context.journal.proposal(record.id())?);
    let Some((report, proposal)) = report.zip(proposal) else { return Ok(Vec::new()) };
    let described: Option<VmDescription> = serde_json::from_value(proposal.description.clone()).ok();
    let files = files_of(&proposal);
    let disks = described.into_iter().flat_map(|vm| vm.disks);
    let copied = disks.filter(|disk| report.disks.iter().any(|copied| copied.name == disk.name));
    let left = |disk: &Disk, path: &String| {
        let file = files.iter().find(|file| file.option.is_none() && file.path == *path);
        let identity = file.and_then(|file| file.identity.clone());
        let created_unix_ns = file.and_then(|file| file.created_unix_ns);
        let gone_unix_ms = i64::try_from(record.updated_unix_ms).unwrap_or(i64::MAX);
        let (name, how) = (disk.name.clone(), LeavingReason::moved(disk, gone_unix_ms));
        LeftoverFile { disk: name, path: PathBuf::from(path), identity, created_unix_ns, how }
    };
    let files_of_one = |disk: Disk| -> Vec<LeftoverFile> {
        disk.file.iter().chain(&disk.data_files).map(|path| left(&disk, path)).collect()
    };
    Ok(copied.flat_map(files_of_one).collect())
}

/// Returns the images with which a VM arrived here, if it ended here. `records` are those of all migrations, newest
/// first.
fn ended_here(
    context: &Context,
    record: &MigrationRecord,
    records: &[MigrationRecord],
) -> Result<Vec<LeftoverFile>, JournalError> {
    if record.open || !matches!(record.state, State::Destination(DestinationState::Active { .. })) {
        return Ok(Vec::new());
    }
    let vm = &record.id().vm;
    // Failed attempts to move it left it here.
    let has_moved =
        |other: &&MigrationRecord| other.id().vm == *vm && other.state.standing() != Standing::Failed;
    let is_last = records.iter().find(has_moved).is_some_and(|last| last.id() == record.id());
    let lives =
        context.journal.vms()?.iter().any(|known| known.vm == *vm && known.process(&context.boot_id).is_ok());
    if !is_last || lives {
        return Ok(Vec::new());
    }
    let made = serde_json::from_value::<DestinationDetails>(record.details.clone());
    let made = made.map(|details| details.artifacts.made).unwrap_or_default();
    let left = |made: MadeImage| LeftoverFile {
        disk: made.disk,
        path: made.path,
        identity: Some(made.identity),
        created_unix_ns: made.created_unix_ns,
        how: LeavingReason::Ended,
    };
    Ok(made.into_iter().map(left).collect())
}

impl LeavingReason {
    fn moved(disk: &Disk, gone_unix_ms: i64) -> Self {
        let not_whole = if disk.snapshots.is_empty() {
            disk.part
                .as_ref()
                .map(|_| "the disk was only a part of it, and the rest was not copied".to_owned())
        } else {
            let names = disk.snapshots.join(", ");
            Some(format!("it has internal snapshots that the copy lacks ({names})"))
        };
        // With these formats the file's bytes are the disk's.
        let format = disk.nodes.as_ref().map_or("", |nodes| nodes.format.as_str());
        let is_raw = ["raw", "file"].contains(&format);
        let bytes = is_raw.then(|| disk.bytes.unwrap_or(0).next_multiple_of(512));
        Self::Moved { not_whole, bytes, gone_unix_ms }
    }
}

impl LeftoverFile {
    /// Returns the image in its present state; none if it does not exist any more.
    fn inspect(&self, record: &MigrationRecord, others: &OtherUsers) -> Option<LeftoverImage> {
        let found = fs::metadata(&self.path).ok()?;
        let blocked_by = self.changed(&found).or_else(|| others.users(&self.path));
        Some(LeftoverImage {
            migration: record.id().clone(),
            to: record.terms.destination.clone(),
            ended: matches!(self.how, LeavingReason::Ended),
            disk: self.disk.clone(),
            blocked_by: blocked_by.or_else(|| Removable::open(&self.path).err()),
            path: self.path.clone(),
            used_bytes: found.blocks() * 512,
        })
    }

    /// Removes the file if it is still the one that was left; otherwise returns the reason.
    fn remove(&self) -> Result<(), String> {
        let file = Removable::open(&self.path)?;
        let found = file.metadata().map_err(|error| format!("it cannot be inspected: {error}"))?;
        self.changed(&found).map_or(Ok(()), Err)?;
        file.remove()
    }

    /// Returns the reason for which the file found at its path is not the one that was left, or must not be removed.
    fn changed(&self, found: &fs::Metadata) -> Option<String> {
        if found.file_type().is_block_device() {
            return Some(format!(
                "it is a block device; if it is an LVM volume, run `lvremove {}`",
                self.path.display()
            ));
        }
        if let LeavingReason::Moved { not_whole, bytes, .. } = &self.how {
            if not_whole.is_some() {
                return not_whole.clone();
            }
            if bytes.is_some_and(|bytes| found.len() > bytes) {
                return Some("it is longer than the disk, and the rest was not copied".to_owned());
            }
        }
        self.not_as_left(found)
    }

    /// Returns the reason why the file found at its path is not the one that was left, or was changed since.
    fn not_as_left(&self, found: &fs::Metadata) -> Option<String> {
        let now = FileIdentity::of(&self.path);
        let is_left = |then: &FileIdentity| then.inode == found.ino();
        if !self.identity.as_ref().is_some_and(is_left)
            || !self.identity.as_ref().zip(now.as_ref()).is_some_and(|(then, now)| then.is_same_here(now))
        {
            return Some("it is not the file that was left".to_owned());
        }
        // Inode numbers are used again. If a file system does not record when an inode was made, the time of the last
        // change is used below; that is not possible for an image that its guest wrote to until it ended.
        let created = created_unix_ns(found);
        if self.created_unix_ns != created || (created.is_none() && matches!(self.how, LeavingReason::Ended))
        {
            return Some(
                "it cannot be identified as the file that was left; it may be a later one".to_owned(),
            );
        }
        if let Some(place) = mounted_at(found, &self.path) {
            return Some(format!("it is mounted at {}", place.display()));
        }
        let LeavingReason::Moved { gone_unix_ms, .. } = self.how else {
            return (found.nlink() > 1)
                .then(|| "it has another name (a hard link) and may be in use".to_owned());
        };
        let changed_unix_ms =
            found.ctime().saturating_mul(1000).saturating_add(found.ctime_nsec() / 1_000_000);
        (changed_unix_ms > gone_unix_ms).then(|| {
            let when = api::report::rfc3339(changed_unix_ms.unsigned_abs());
            format!("it was changed after the VM was migrated away, at {when}")
        })
    }
}

/// Returns the path at which a file is mounted by itself (`mount --bind`), as this process sees it. Mount points of
/// other files are not accessed: one of a server that is gone would not answer.
fn mounted_at(found: &fs::Metadata, path: &Path) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let place = |line: &str| {
        let mut fields = line.split(' ').skip(3).map(unescaped);
        let (root, place) = (PathBuf::from(fields.next()?), PathBuf::from(fields.next()?));
        (root.file_name() == path.file_name()).then_some(place)
    };
    let mut places = mounts.lines().filter_map(place);
    let is_it = |place: &PathBuf| {
        let meta = fs::symlink_metadata(place).ok().filter(fs::Metadata::is_file);
        meta.is_some_and(|meta| (meta.dev(), meta.ino()) == (found.dev(), found.ino()))
    };
    places.find(is_it)
}

/// Decodes a path in which the kernel wrote some characters as octal numbers (`\040` for a space).
fn unescaped(path: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(path.to_owned(), |path, (escape, letter)| path.replace(escape, letter))
}

/// Acquires a lease of a file, so that no process can open it while the lease is held; or returns the reason for which
/// there is none.
fn acquire_lease(file: File, path: &Path) -> Result<FileLease, String> {
    let cannot = |error: std::io::Error| format!("cannot check whether it is open elsewhere: {error}");
    match FileLease::take(file).map_err(cannot)? {
        Some(lease) => Ok(lease),
        None => Err(match holders(path) {
            found if found.is_empty() => "it is open, by the kernel or in another container".to_owned(),
            found => format!("open in {}", found.join(", ")),
        }),
    }
}

/// Returns the processes and loop devices that have a file open, human-readable. This process is not among them.
fn holders(path: &Path) -> Vec<String> {
    let Ok(file) = fs::metadata(path) else { return Vec::new() };
    let is_same = |path: &Path| {
        fs::metadata(path).is_ok_and(|open| (open.dev(), open.ino()) == (file.dev(), file.ino()))
    };
    let is_it = |link: fs::DirEntry| is_same(&link.path());
    let has_it = |process: &Path| fs::read_dir(process.join("fd")).into_iter().flatten().flatten().any(is_it);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let is_other = pid != std::process::id();
        (is_other && has_it(&entry.path())).then(|| qemu::preflight::facts::process_label(pid))
    });
    let loops = fs::read_dir("/sys/block").into_iter().flatten().flatten().filter_map(|entry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        is_same(Path::new(backing.trim_end()))
            .then(|| Path::new("/dev").join(entry.file_name()).display().to_string())
    });
    processes.chain(loops).collect()
}
