//! The reasons for which a VM does not arrive.

use std::path::PathBuf;

use proto::message::Finding;
use qemu::device_state::LoadError;
use qemu::process::StartError;
use qemu::qmp::QmpError;
use qemu::ram::RamError;
use tracee::ProcessError;

use crate::hold::HoldError;
use crate::journal::JournalError;

/// Why a VM does not arrive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArriveError {
    /// No place for its sockets and logs.
    #[error("cannot make {path}; check `run_dir` and `log_dir` in the configuration", path = path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Its QEMU does not start.
    #[error("QEMU does not start")]
    Start(#[from] StartError),
    /// Its QEMU's process cannot be used.
    #[error("QEMU's process cannot be used")]
    Process(#[from] ProcessError),
    /// Its memory was not found.
    #[error("the guest's memory was not found")]
    Ram(#[from] RamError),
    /// What was started is not what the guest needs; blockers are among what was found.
    #[error("the QEMU that was started is not what the guest needs")]
    Refused(Vec<Finding>),
    /// Its memory is not as the source has it.
    #[error("RAM block {name} {what}; both sides need the same QEMU version and machine")]
    Differs {
        /// The block.
        name: String,
        /// How.
        what: String,
    },
    /// The device state cannot be loaded.
    #[error("the device state cannot be loaded")]
    Load(#[from] LoadError),
    /// QEMU does not do what it is told.
    #[error("QEMU's monitor failed")]
    Qmp(#[from] QmpError),
    /// Its memory cannot be reached.
    #[error("the guest's memory cannot be reached")]
    Access(#[from] ::memory::ram::RamError),
    /// The journal does not take where its things are.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// It cannot be held.
    #[error(transparent)]
    Hold(#[from] HoldError),
    /// An image for a disk cannot be made or written.
    #[error("a disk cannot be received")]
    Image(#[from] block::image::ImageError),
    /// No thread is to be had that watches the pool of its images.
    #[error("the pool for images cannot be watched")]
    Watch(#[source] std::io::Error),
    /// Somebody else continued the guest here.
    #[error("somebody else continued the guest here before it was this host's")]
    Ran,
    /// One of its disks is not what it was.
    #[error("{0}")]
    Replaced(String),
    /// It is not there, or was loaded before.
    #[error("QEMU is gone")]
    Gone,
}
