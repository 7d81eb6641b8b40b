//! The trial of `--check`: starts the QEMU that the VM would get, checks it, and ends it.
//!
//! Only a start shows that a port is free, that a tap is unused, and that the guest would have the same devices. The
//! trial leaves nothing behind, whenever the agent ends: the images of disks that would be copied have no names any
//! more when QEMU opens them, and the directory is removed like that of a probe.

use std::fs::{File, OpenOptions, remove_file};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::image::{self, ImageError};
use proto::message::{Finding, RamBlock as ProposedBlock, Severity};
use qemu::command::{self, HostRules, NewImage};
use qemu::process::{Launch, StartError};
use qemu::qmp::Qmp;
use qemu::ram::RamBlock;

use super::disks::unique_word;
use super::{AcceptableProposal, Comparison};
use crate::Context;
use crate::disks::PlannedDisk;
use crate::emulators::PREFIX;
use crate::{ArrivalArtifacts, ArrivalError, ArrivingVm};

/// A prepared trial.
pub struct Trial {
    compared: Comparison,
    launch: Launch,
    artifacts: ArrivalArtifacts,
    blocks: Vec<ProposedBlock>,
    /// Held until QEMU has ended.
    _images: Vec<File>,
}

impl Trial {
    /// Makes the files that an acceptable proposal needs, under other names.
    ///
    /// # Errors
    /// When an image or the directory cannot be made.
    pub fn prepare(context: &Context, considered: AcceptableProposal) -> Result<Self, ArrivalError> {
        let AcceptableProposal { mut compared, launch, proposal, copied, here, .. } = considered;
        let run_dir = &context.config.run_dir;
        let directory = run_dir.join(format!("{PREFIX}t"));
        let mut rules = HostRules { run_dir: directory.clone(), log_dir: None, ..here };
        let mut images = Vec::new();
        for disk in &copied {
            let (image, file) = make_stand_in(disk, run_dir)?;
            rules.images.insert(disk.name.clone(), image);
            images.push(file);
        }
        let built = command::build(&compared.theirs.vm, &rules)
            .map_err(|error| ArrivalError::Refused(super::problems(&error.problems)))?;
        compared.images = rules.images.into_values().map(|image| image.path).collect();
        let launch = Launch {
            argv: built.argv,
            log: built.log,
            qmp: built.qmp,
            scope: launch.scope.map(|scope| format!("{scope}-check")),
            ..launch
        };
        let artifacts = ArrivalArtifacts { directory, ..ArrivalArtifacts::default() };
        Ok(Self { compared, launch, artifacts, blocks: proposal.ram, _images: images })
    }

    /// Starts QEMU, and ends it; the findings are those of a real start.
    ///
    /// # Errors
    /// When it does not start, or does not fit the guest.
    pub fn run(self, patience: Duration) -> Result<Vec<Finding>, ArrivalError> {
        let Self { compared, launch, artifacts, blocks, _images: images } = self;
        artifacts.make_directory()?;
        let look = |qmp: &mut Qmp, blocks: &[RamBlock], pid: u32| compared.check_started(qmp, blocks, pid);
        let started = ArrivingVm::start(artifacts.clone(), &launch, &blocks, patience, look);
        let findings = started.map(|(vm, findings)| {
            vm.destroy();
            findings
        });
        artifacts.remove();
        drop(images);
        findings
    }
}

/// Makes an image like the one that would be made for a disk, open and without a name.
fn make_stand_in(disk: &PlannedDisk, run_dir: &Path) -> Result<(NewImage, File), ImageError> {
    // A volume would allocate its space at once; a file has the same bytes.
    let directory = match disk.location.path.parent() {
        Some(parent) if !disk.location.is_device() => parent,
        _ => run_dir,
    };
    let path = directory.join(format!("{PREFIX}{}", unique_word()));
    let failed = |source| ImageError::Make { path: path.clone(), source };
    image::create(&path, disk.location.format, disk.bytes)?;
    let opened = OpenOptions::new().read(true).write(true).open(&path);
    remove_file(&path).map_err(failed)?;
    let file = opened.map_err(failed)?;
    let held = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
    Ok((NewImage { path: held, is_device: false, ..disk.new_image() }, file))
}

/// Returns the result of a QEMU that was started, or findings with the reason for its failure.
pub fn started_or_findings<T>(started: Result<T, ArrivalError>) -> Result<T, Vec<Finding>> {
    started.map_err(|error| {
        const SEE_DISK: &str = "make sure that the destination's disk is not full";
        let advice = match &error {
            ArrivalError::Refused(_) => "",
            ArrivalError::Journal(_) | ArrivalError::Directory { .. } => SEE_DISK,
            ArrivalError::Image(_) => "check the directory for images, [disks.pool], at the destination",
            ArrivalError::Start(StartError::Ended { log, .. } | StartError::Silent { log, .. })
                if !log.is_empty() =>
            {
                "fix what QEMU's message names at the destination, or start the VM without it"
            }
            _ => "see the log of the agent at the destination",
        };
        let what = crate::chain(&error);
        match error {
            ArrivalError::Refused(findings) => findings,
            _ => vec![Finding {
                severity: Severity::Blocker,
                code: "qemu-start-failed".to_owned(),
                what,
                advice: advice.to_owned(),
            }],
        }
    })
}
