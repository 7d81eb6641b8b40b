//! Reasons for which a VM does not arrive.

use std::path::PathBuf;

use proto::message::Finding;
use qemu::device_state::LoadError;
use qemu::process::StartError;
use qemu::qmp::QmpError;
use qemu::ram::RamError;
use tracee::ProcessError;

use crate::freeze::FreezeError;
use store::journal::JournalError;

/// Reason for which a VM does not arrive.
#[derive(Debug, thiserror::Error)]
pub enum ArrivalError {
    /// A directory for its sockets and logs cannot be made.
    #[error(
        "cannot create {path}; check `run_dir` and `log_dir` in the configuration",
        path = path.display()
    )]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// QEMU does not start.
    #[error("QEMU does not start")]
    Start(#[from] StartError),
    /// QEMU's process cannot be used.
    #[error("QEMU's process cannot be used")]
    Process(#[from] ProcessError),
    /// The guest's memory was not found.
    #[error("the guest's memory was not found")]
    Ram(#[from] RamError),
    /// The started QEMU does not fit the guest; the findings include blockers.
    #[error("the QEMU that was started does not match the guest")]
    Refused(Vec<Finding>),
    /// Connections of a VM that moves to another network cannot be redirected.
    #[error("the VM's connections cannot be redirected: {0}")]
    Redirection(String),
    /// A RAM block differs from the source's.
    #[error("RAM block {name} {what}; both sides need the same QEMU version and machine")]
    BlockDiffers {
        /// Name of the block.
        name: String,
        /// Description of the difference.
        what: String,
    },
    /// The device state cannot be loaded.
    #[error("the device state cannot be loaded")]
    Load(#[from] LoadError),
    /// A command to QEMU's monitor failed.
    #[error("QEMU's monitor failed")]
    Qmp(#[from] QmpError),
    /// The guest's memory cannot be accessed.
    #[error("the guest's memory cannot be reached")]
    Access(#[from] ::memory::ram::RamError),
    /// The VM's files and process cannot be journalled.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// QEMU cannot be held.
    #[error(transparent)]
    Hold(#[from] FreezeError),
    /// An image for a disk cannot be made or written.
    #[error("a disk cannot be received")]
    Image(#[from] block::image::ImageError),
    /// The thread that watches the pool of its images cannot be started.
    #[error("the pool for images cannot be watched")]
    Watch(#[source] std::io::Error),
    /// Another client continued the guest here.
    #[error("another program resumed the guest here before this host owned it")]
    AlreadyContinued,
    /// The file of one of its disks was replaced.
    #[error("{0}")]
    Replaced(String),
    /// A part of the VM could not be removed again if the migration ended early.
    #[error("{participant} cannot undo its step {step} at the destination; please report this")]
    Irreversible {
        /// Name of the participant.
        participant: &'static str,
        /// Name of the step.
        step: &'static str,
    },
    /// QEMU is gone, or has loaded a device state before.
    #[error("QEMU is gone")]
    Gone,
}
