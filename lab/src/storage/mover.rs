//! Movers: their common inputs and results.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use super::case::DiskCase;
use super::guest::VM;
use crate::agents::Agents;
use crate::bench::subject::{SavedGuest, waiting};
use crate::environment::{Environment, Qemu};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;
use crate::monitor::Monitor;
use crate::run::{kill_pid, run};
use crate::serial::Serial;
use crate::spec::Device;

/// Inputs of a migration.
pub(super) struct DiskMoveInput<'a> {
    pub(super) lab: &'a Lab,
    pub(super) environment: &'a Environment,
    pub(super) qemu: &'a Qemu,
    pub(super) agents: &'a Agents,
    pub(super) subject: &'a SavedGuest,
    pub(super) case: &'a DiskCase,
    /// The guest to migrate.
    pub(super) source: &'a Guest,
    /// True if both sides are to be compared, at any cost.
    pub(super) compare: bool,
}

/// A guest that has been migrated.
#[derive(Debug)]
pub(super) struct MovedGuest {
    /// Time from the request to the end of the source's QEMU.
    pub(super) total: Duration,
    /// The part of the total time in which the disk alone was copied.
    pub(super) disk: Duration,
    /// The part of the total time in which memory was copied, and the disk along with it.
    pub(super) memory: Duration,
    /// Time from QEMU's event STOP to its event RESUME.
    pub(super) downtime: Duration,
    pub(super) stopped: SystemTime,
    pub(super) resumed: SystemTime,
    /// Bytes of the disk that were resent because they were written during the migration, where that is reported.
    pub(super) resent_bytes: Option<u64>,
    pub(super) arrived: ArrivedGuest,
}

/// Outcome of a migration.
#[derive(Debug)]
pub(super) enum DiskMoveOutcome {
    MovedGuest(Box<MovedGuest>),
    /// Given up, by the bench or by the mover itself, with the reason. The guest runs where it ran.
    GivenUp(String),
}

impl DiskMoveInput<'_> {
    /// Returns the guest's disk at its source.
    pub(super) fn image(&self) -> Result<PathBuf> {
        let mut devices = self.subject.spec().devices.iter();
        devices
            .find_map(|device| if let Device::Disk(disk) = device { Some(disk.path.clone()) } else { None })
            .ok_or_else(|| Error::Config("the guest has no disk".to_owned()))
    }

    /// Returns the path of an image at the destination that the bench makes itself.
    pub(super) fn new_image(&self) -> PathBuf {
        Agents::pool(&self.lab.b).join(format!("{VM}.qcow2"))
    }

    /// Starts a QEMU at the destination that waits for the guest with this image, and for a command before it resumes
    /// it.
    pub(super) fn start_destination(&self, image: &Path) -> Result<Guest> {
        let mut spec = waiting(self.subject.spec().clone());
        spec.extra.push("-S".to_owned());
        for device in &mut spec.devices {
            if let Device::Disk(disk) = device {
                image.clone_into(&mut disk.path);
            }
        }
        Guest::start(&self.lab.b, self.environment, &spec)
    }

    /// Compares, in the warm-up, an image with the source's, while neither is written.
    pub(super) fn compare_images(&self, image: &Path) -> Result<()> {
        if !self.compare {
            return Ok(());
        }
        let mut command = Command::new(&self.qemu.img);
        run(command.args(["compare", "-q", "-U"]).arg(self.image()?).arg(image)).map(drop)
    }
}

/// The guest on its present host. Its QEMU ends when this is dropped.
#[derive(Debug)]
pub(super) struct ArrivedGuest {
    pid: u32,
    /// The directory with its sockets.
    directory: PathBuf,
    image: PathBuf,
    /// The guest, if the bench started it, and not an agent.
    guest: Option<Guest>,
}

impl ArrivedGuest {
    pub(super) fn of_guest(guest: Guest, image: &Path) -> Self {
        let (pid, directory) = (guest.pid(), guest.directory().to_owned());
        Self { pid, directory, image: image.to_owned(), guest: Some(guest) }
    }

    pub(super) fn of_agent(pid: u32, directory: &Path, image: &Path) -> Self {
        Self { pid, directory: directory.to_owned(), image: image.to_owned(), guest: None }
    }

    /// Returns its disk.
    pub(super) fn image(&self) -> &Path {
        &self.image
    }

    pub(super) fn monitor(&self) -> Result<Monitor> {
        let mut monitor = Monitor::connect(&self.directory.join("lab.sock"))?;
        monitor.set_patience(Duration::from_mins(5))?;
        Ok(monitor)
    }

    pub(super) fn serial(&self) -> Serial {
        Serial::new(&self.directory.join("serial.sock"), &self.directory.join("serial.log"), Some(self.pid))
    }
}

impl Drop for ArrivedGuest {
    fn drop(&mut self) {
        if self.guest.is_none() {
            // `Lab::down` kills remaining processes.
            let _ = kill_pid(self.pid);
        }
    }
}
