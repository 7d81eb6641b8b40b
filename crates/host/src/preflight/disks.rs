//! The choice of the disks that are copied, and of their destinations.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use proto::MigrationId;
use proto::message::{DiskMode, Finding, ProposedDisk, Severity};
use qemu::cmdline::QemuOption;
use qemu::command::HostRules;
use qemu::describe::{Disk, VmDescription};
use qemu::options::Value;
use qemu::preflight::DestinationFile;
use qemu::preflight::files::NeededFile;

use crate::arrivals::ImageNeed;
use crate::disks::PlannedDisk;
use crate::pool::Pool;
use api::{MigrateRequest, Problem, ProblemKind};

/// Returns the disks that a guest writes to, and the user's choice for each.
///
/// # Errors
/// When the user names a disk that does not exist.
pub fn proposed_disks(disks: &[Disk], request: &MigrateRequest) -> Result<Vec<ProposedDisk>, Problem> {
    let written: Vec<_> =
        disks.iter().filter(|disk| !disk.read_only && disk.nodes.is_some() && disk.bytes > Some(0)).collect();
    if let Some(unknown) = request.disk.keys().find(|name| written.iter().all(|disk| disk.name != **name)) {
        let names: Vec<_> = written.iter().map(|disk| disk.name.as_str()).collect();
        let error = format!("{} has no writable disk {unknown}", request.vm);
        let advice = match names.as_slice() {
            [] => "it has no writable disk".to_owned(),
            names => format!("it has {}", names.join(", ")),
        };
        return Err(Problem::new(ProblemKind::BadRequest, error, advice));
    }
    let is_copied =
        |disk: &&&Disk| request.disk.get(&disk.name).unwrap_or(&request.disks) != &DiskMode::Shared;
    let unreadable = |disk: &&&Disk| disk.part.as_ref().is_some_and(|part| part.offset_bytes.is_none());
    if request.verify
        && let Some(disk) = written.iter().filter(is_copied).find(unreadable)
    {
        let error = format!(
            "disk {} is only a part of a file, so its image cannot be opened a second time to verify the \
             copy",
            disk.name
        );
        return Err(Problem::new(
            ProblemKind::BadRequest,
            error,
            "omit --verify, or use `--disk NAME=shared`",
        ));
    }
    let proposed = |disk: &Disk| ProposedDisk {
        name: disk.name.clone(),
        bytes: disk.bytes.unwrap_or_default(),
        allocated_bytes: disk.used_bytes.or(disk.bytes).unwrap_or_default(),
        wanted: request.disk.get(&disk.name).copied().unwrap_or(request.disks),
        drop_snapshots: request.drop_snapshots,
    };
    // Two devices on one node are one disk, which both name by the node.
    let mut seen = BTreeSet::new();
    Ok(written.into_iter().filter(|disk| seen.insert(&disk.name)).map(proposed).collect())
}

/// Returns the disk with the image that it will have here, as it is journalled until the VM's QEMU itself is queried.
pub(super) fn with_local_image(mut disk: Disk, here: &HostRules) -> Disk {
    if let Some(image) = here.images.get(&disk.name) {
        disk.file = Some(image.path.display().to_string());
        disk.format = Some(image.format.clone());
        // Only the content that the guest sees was copied.
        (disk.backing_files, disk.layers, disk.snapshots, disk.bitmaps) = <_>::default();
        (disk.data_files, disk.part) = <_>::default();
    } else {
        let layers = disk.layers.iter_mut().map(|layer| &mut layer.file);
        let files =
            disk.file.iter_mut().chain(&mut disk.backing_files).chain(&mut disk.data_files).chain(layers);
        files.for_each(|file| *file = here.local_path(file));
    }
    disk
}

/// Decisions about a guest's disks.
#[derive(Debug, Default)]
pub(super) struct DiskPlan {
    pub(super) copied: Vec<PlannedDisk>,
    /// Blockers, warnings and information about it.
    pub(super) findings: Vec<Finding>,
}

/// Decides for each disk whether it is copied, and where to. `sights` are the disks' files as this host sees them.
pub(super) fn plan(
    pool: Option<&Pool>,
    id: &MigrationId,
    vm: &VmDescription,
    proposed: &[ProposedDisk],
    sights: &[DestinationFile],
) -> DiskPlan {
    let mut plan = DiskPlan::default();
    for wanted in proposed {
        let Some(disk) = vm.disks.iter().find(|disk| disk.name == wanted.name) else { continue };
        let is_copied = match wanted.wanted {
            DiskMode::Shared => false,
            DiskMode::Copy => true,
            DiskMode::Auto => pool.is_some() && is_not_shared(disk, sights),
        };
        if !is_copied {
            continue;
        }
        let Some(pool) = pool else {
            plan.findings.push(Finding::new(
                Severity::Blocker,
                "disk-no-pool",
                format!("disk {} is to be copied, and the destination has no pool for images", wanted.name),
                "name a directory or a volume group under [disks.pool] in the destination's configuration",
            ));
            continue;
        };
        if disk.encrypted {
            plan.findings.push(Finding::new(
                Severity::Blocker,
                "disk-encrypted-copy",
                format!("disk {} is encrypted, and its copy would be plain text", wanted.name),
                "put it on shared storage and use `--disk NAME=shared`, or encrypt within the guest",
            ));
            continue;
        }
        let peril = shared_file_finding(disk, &vm.disks)
            .or_else(|| iothread_finding(disk, vm))
            .or_else(|| copy_on_read_finding(disk, &vm.options));
        plan.findings.extend(peril);
        plan.findings
            .extend(snapshots_finding(disk, wanted.drop_snapshots).into_iter().chain(bitmaps_finding(disk)));
        let location = pool.location(id, &wanted.name, disk.format.as_deref(), &unique_word());
        plan.findings.push(Finding::new(
            Severity::Info,
            "disk-copied",
            format!(
                "disk {} ({} of {} MiB in use) is copied to {}",
                wanted.name,
                wanted.allocated_bytes >> 20,
                wanted.bytes >> 20,
                location.path.display()
            ),
            "the image at the source is kept after the migration; `whimbrel images` lists and removes such \
             images",
        ));
        let needed_bytes = location.needed_bytes(wanted.bytes, wanted.allocated_bytes);
        let name = wanted.name.clone();
        plan.copied.push(PlannedDisk { name, bytes: wanted.bytes, needed_bytes, location });
    }
    plan
}

/// Returns a finding if another drive uses the disk's file. Two drives over one file see each other's writes; with an
/// image each they would not. The same holds for two devices on one node, which is one disk with one name.
fn shared_file_finding(disk: &Disk, all: &[Disk]) -> Option<Finding> {
    let file = disk.file.as_ref()?;
    let is_other = |other: &&Disk| !std::ptr::eq(*other, disk) && other.file.as_ref() == Some(file);
    let other = all.iter().find(is_other)?;
    let what = format!(
        "disks {} and {} are the same file, {file}, and would be copied to two files",
        disk.name, other.name
    );
    let advice = "put it on shared storage and use `--disk NAME=shared` for both";
    Some(Finding::new(Severity::Blocker, "disk-twice-copy", what, advice))
}

/// Returns a finding for copy-on-read, with which QEMU writes everything that is read from a backing image into the
/// overlay: to copy the disk would fill it, and the source's storage with it.
fn copy_on_read_finding(disk: &Disk, options: &[QemuOption]) -> Option<Finding> {
    const COPY_ON_READ: &str = "copy-on-read";
    if disk.backing_files.is_empty() {
        return None;
    }
    let is_its = |given: &Value| match given.get("id") {
        Some(id) => id == disk.name,
        None => given.get("file").or_else(|| given.get("file.filename")) == disk.file,
    };
    // A filter over the image has a node of its own.
    let is_above = |given: &Value| {
        disk.nodes.as_ref().is_some_and(|nodes| given.get("node-name").as_ref() == Some(&nodes.top))
    };
    let is_on = |option: &QemuOption| {
        let given = option.parse_value();
        match option.name.as_str() {
            "drive" => is_its(&given) && given.get(COPY_ON_READ).is_some_and(|word| word != "off"),
            "blockdev" => is_above(&given) && given.get("driver").as_deref() == Some(COPY_ON_READ),
            _ => false,
        }
    };
    if !options.iter().any(is_on) {
        return None;
    }
    let what = format!(
        "disk {} has copy-on-read: copying it would write all of {} into its own image",
        disk.name,
        disk.backing_files.join(", ")
    );
    let advice =
        "start the VM without copy-on-read; or put the disk on shared storage and use `--disk NAME=shared`";
    Some(Finding::new(Severity::Blocker, "disk-copy-on-read-copy", what, advice))
}

/// Returns a finding for QEMU versions that are unsafe to read from. Up to QEMU 8 the server from which a disk is read
/// ends QEMU (`nbd_blockdev_client_closed: Assertion qemu_in_main_thread() failed`) when a connection to a disk of an
/// iothread is closed: seen with 7.2, and not with 10.0.
fn iothread_finding(disk: &Disk, vm: &VmDescription) -> Option<Finding> {
    const SAFE_SINCE: u32 = 9;
    let major = vm.program.version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    let is_iothread = |option: &QemuOption| {
        option.name == "object" && option.value.as_ref().is_some_and(|value| value.contains("iothread"))
    };
    if major.is_some_and(|major| major >= SAFE_SINCE) || !vm.options.iter().any(is_iothread) {
        return None;
    }
    let what = format!(
        "QEMU {} can crash, and the guest with it, when a disk of a guest with iothreads is copied, as disk \
         {} would be",
        vm.program.version, disk.name
    );
    let advice = "start the VM with QEMU 9.0 or newer, or without iothreads; or put the disk on shared \
                  storage and use `--disk NAME=shared`";
    Some(Finding::new(Severity::Blocker, "disk-iothread-copy", what, advice))
}

/// Returns a finding for internal snapshots, because only the present content that the guest sees is copied.
fn snapshots_finding(disk: &Disk, accepted: bool) -> Option<Finding> {
    let severity = if accepted { Severity::Warning } else { Severity::Blocker };
    let what = format!(
        "the image of disk {} has internal snapshots ({}), which are not copied",
        disk.name,
        disk.snapshots.join(", ")
    );
    let advice = if accepted {
        "they stay in the image at the source: keep that image as long as they are needed"
    } else {
        "delete them, copy the disk without them (`--without-snapshots`), or share the disk (`--disk NAME=shared`)"
    };
    (!disk.snapshots.is_empty()).then(|| Finding::new(severity, "disk-snapshots-copy", what, advice))
}

/// Returns a finding for dirty bitmaps: they belong to the image at the source, which does not record later writes.
fn bitmaps_finding(disk: &Disk) -> Option<Finding> {
    let what = format!(
        "disk {} has dirty bitmaps of a backup program ({}), which are not copied",
        disk.name,
        disk.bitmaps.join(", ")
    );
    let advice = "make the next backup of this disk a full one";
    (!disk.bitmaps.is_empty()).then(|| Finding::new(Severity::Warning, "disk-bitmaps-copy", what, advice))
}

impl DiskPlan {
    /// Returns the needs of the images, for a reservation.
    pub(super) fn images(&self) -> Vec<ImageNeed> {
        let need = |disk: &PlannedDisk| ImageNeed {
            path: disk.location.path.clone(),
            bytes: disk.needed_bytes,
            grows: disk.location.grows(),
        };
        self.copied.iter().map(need).collect()
    }

    /// Returns the pool's findings about the images, given the space that other arrivals will still use.
    pub(super) fn room(&self, pool: Option<&Pool>, reserved_bytes: u64) -> Vec<Finding> {
        let needed_bytes = self.copied.iter().map(|disk| disk.needed_bytes).fold(0, u64::saturating_add);
        let pool = pool.filter(|_| !self.copied.is_empty());
        pool.map(|pool| pool.check_space(needed_bytes, reserved_bytes)).unwrap_or_default()
    }
}

/// Returns the files that must exist at the destination: files that only copied disks have are omitted.
pub(super) fn needed_at_destination(
    files: Vec<NeededFile>,
    vm: &VmDescription,
    copied: &[PlannedDisk],
) -> Vec<NeededFile> {
    let is_copied = |disk: &&Disk| copied.iter().any(|copied| copied.name == disk.name);
    let of = |disk: &Disk, path: &str| {
        disk.file
            .iter()
            .chain(&disk.backing_files)
            .any(|file| file == path || file.ends_with(&format!(":{path}")))
    };
    let only_copied = |file: &NeededFile| {
        file.option.is_none()
            && vm.disks.iter().filter(is_copied).any(|disk| of(disk, &file.path))
            && !vm.disks.iter().filter(|disk| !is_copied(disk)).any(|disk| of(disk, &file.path))
    };
    files.into_iter().filter(|file| !only_copied(file)).collect()
}

/// Returns a finding for a started QEMU that has not opened an image that was made for it, or has it open twice: it
/// would run its guest with another disk than the copied one.
pub(super) fn unopened_image_finding(images: &[PathBuf], open: &[String]) -> Option<Finding> {
    let times = |image: &Path| open.iter().filter(|file| Path::new(file) == image).count();
    let image = images.iter().find(|image| times(image) != 1)?;
    let what = match times(image) {
        0 => format!("QEMU was started for the VM and has not opened {}", image.display()),
        times => format!("QEMU was started for the VM and has {} open {times} times", image.display()),
    };
    Some(Finding::new(Severity::Blocker, "disk-unclear", what, "this is a bug in Whimbrel; please report it"))
}

/// True if the disk is known not to be on shared storage. If nothing is known, the user has to choose.
fn is_not_shared(disk: &Disk, sights: &[DestinationFile]) -> bool {
    let Some(file) = &disk.file else { return false };
    let sight = sights.iter().find(|sight| sight.option.is_none() && sight.path == *file);
    sight.is_some_and(|sight| {
        !sight.marked_shared
            && match (&sight.source, &sight.destination) {
                (Some(ours), Some(theirs)) => {
                    ours != theirs && !ours.can_be_on_one_server(theirs) && !ours.can_be_same(theirs)
                }
                _ => !sight.exists,
            }
    })
}

/// Returns a word that no other migration has, even if journals were lost: removing files with this name never removes
/// another migration's files.
pub(super) fn unique_word() -> String {
    let mut word = [0_u8; 8];
    // Without random numbers from the kernel the clock is used.
    if rustix::rand::getrandom(&mut word, rustix::rand::GetRandomFlags::empty()) != Ok(word.len()) {
        word = api::report::unix_ms_now().to_be_bytes();
    }
    format!("{:016x}", u64::from_be_bytes(word))
}

#[cfg(test)]
mod tests {
    use qemu::describe::{DiskNodes, Layer};

    use qemu::command::NewImage;

    use super::*;

    fn disk((name, file): (&str, &str)) -> Disk {
        Disk {
            name: name.to_owned(),
            device: None,
            file: Some(file.to_owned()),
            format: Some("raw".to_owned()),
            backing_files: Vec::new(),
            layers: Vec::new(),
            read_only: false,
            encrypted: false,
            snapshots: Vec::new(),
            data_files: Vec::new(),
            part: None,
            bitmaps: Vec::new(),
            direct: false,
            removable: false,
            bytes: Some(1 << 20),
            used_bytes: None,
            nodes: None,
        }
    }

    #[test]
    fn two_drives_over_one_file_do_not_become_two_images() {
        let disks = [("one", "/srv/a.raw"), ("two", "/srv/a.raw"), ("three", "/srv/b.raw")].map(disk);
        let found: Vec<_> =
            disks.iter().map(|disk| shared_file_finding(disk, &disks).map(|it| it.what)).collect();
        assert!(found[0].as_ref().is_some_and(|what| what.contains("two") && what.contains("/srv/a.raw")));
        assert!(found[1].as_ref().is_some_and(|what| what.contains("one")));
        assert_eq!(found[2], None);
        // Two devices on one node.
        let disks = [("node", "/srv/a.raw"), ("node", "/srv/a.raw")].map(disk);
        assert!(disks.iter().all(|disk| shared_file_finding(disk, &disks).is_some()));
    }

    #[test]
    fn a_disk_that_would_fill_by_being_read_is_not_copied() {
        let over = |top: &str| Disk {
            backing_files: vec!["/srv/base.raw".to_owned()],
            layers: Vec::new(),
            nodes: Some(DiskNodes {
                top: top.to_owned(),
                image: "image".to_owned(),
                format: "qcow2".to_owned(),
                below: Vec::new(),
            }),
            ..disk(("one", "/srv/a.qcow2"))
        };
        let given = |name: &str, value: &str| [QemuOption::new(name, value)];
        let on = given("drive", "file=/srv/a.qcow2,id=one,copy-on-read=on");
        assert!(copy_on_read_finding(&over("image"), &on).is_some_and(|it| it.what.contains("base.raw")));
        let alone = Disk { backing_files: Vec::new(), ..over("image") };
        assert_eq!(copy_on_read_finding(&alone, &on), None);
        let others = given("drive", "file=/srv/b.qcow2,id=two,copy-on-read=on");
        assert_eq!(copy_on_read_finding(&over("image"), &others), None);
        let off = given("drive", "file=/srv/a.qcow2,id=one,copy-on-read=off");
        assert_eq!(copy_on_read_finding(&over("image"), &off), None);
        let nameless = given("drive", "file=/srv/a.qcow2,copy-on-read=on");
        assert!(copy_on_read_finding(&over("image"), &nameless).is_some());
        let filter =
            given("blockdev", "{\"driver\":\"copy-on-read\",\"node-name\":\"top\",\"file\":\"image\"}");
        assert!(copy_on_read_finding(&over("top"), &filter).is_some());
        assert_eq!(copy_on_read_finding(&over("another"), &filter), None);
    }

    #[test]
    fn a_disk_is_entered_as_it_is_here() {
        let image = NewImage {
            path: "/pool/one.qcow2".into(),
            format: "qcow2".to_owned(),
            cut_to_bytes: None,
            is_device: false,
        };
        let mut here = HostRules::new("qemu", "/run");
        here.disk_dirs.push(("/srv".into(), "/mnt".into()));
        here.images.insert("one".to_owned(), image);
        let layers = |directory: &str| {
            let layer = |name: &str| Layer { file: format!("{directory}/{name}"), format: "raw".to_owned() };
            vec![layer("own.raw"), layer("base.raw")]
        };
        let over_base = |given| Disk {
            backing_files: vec!["/srv/base.raw".to_owned()],
            layers: layers("/srv"),
            bitmaps: vec!["backup".to_owned()],
            ..disk(given)
        };
        let copied = with_local_image(over_base(("one", "/srv/a.raw")), &here);
        let wanted = disk(("one", "/pool/one.qcow2"));
        assert_eq!(copied, Disk { format: Some("qcow2".to_owned()), ..wanted });
        let shared = with_local_image(over_base(("two", "/srv/b.raw")), &here);
        let wanted = over_base(("two", "/mnt/b.raw"));
        let backing_files = vec!["/mnt/base.raw".to_owned()];
        assert_eq!(shared, Disk { backing_files, layers: layers("/mnt"), ..wanted });
    }
}
