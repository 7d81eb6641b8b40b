//! Disks that are copied: their writes are recorded from before the first byte is read, and rounds of disks alone go ahead
//! of memory.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use ::memory::{Owed, Sender};
use engine::bulk::{self, DiskRound, Next};
use engine::handover::source::SourceEvent;
use proto::limits::PAGE_BYTES;
use proto::message::{CopiedDisk, DiskWish};
use qemu::describe::VmDescription;
use qemu::recording::{RecordedDisk, Recording};

use super::{Failure, gone};
use crate::disks::{DiskLog, LeavingDisk};
use crate::source::memory::{Cargo, CargoError};
use crate::source::{Driver, VmError};
use crate::verification::DiskImage;

impl Driver {
    /// Everything that will go over the streams. Writes to disks are recorded from here on.
    pub(super) fn cargo(&mut self, copied: &[CopiedDisk]) -> Result<Cargo, Failure> {
        let failed = |error: CargoError| Failure::local("cannot read what is to be sent", &error);
        let disks = if copied.is_empty() { None } else { Some(self.record(copied).map_err(failed)?) };
        let vm = self.vm.as_ref().ok_or_else(gone)?;
        Cargo::new(vm, disks).map_err(failed)
    }

    /// The VM as it was proposed.
    fn described(&self) -> Option<VmDescription> {
        let description = self.proposal.as_ref()?.description.clone();
        serde_json::from_value(description).ok()
    }

    /// Images of the copied disks, to be opened anew.
    pub(super) fn copied_images(&self, cargo: &Cargo) -> Result<Vec<DiskImage>, Failure> {
        let described = self.described();
        let image = |name: &String| {
            let disk = described.iter().flat_map(|vm| &vm.disks).find(|disk| disk.name == *name)?;
            let format = disk.nodes.as_ref()?.format.as_str();
            // Without a format of its own an image is raw.
            let format = if ["file", "host_device"].contains(&format) { "raw" } else { format };
            Some(DiskImage { path: disk.file.clone()?, format: format.to_owned() })
        };
        let not_there = |name: &String| {
            Failure::new(
                SourceEvent::Failed,
                format!("where disk {name} is was not told, so it cannot be compared"),
            )
        };
        cargo.disk_names().iter().map(|name| image(name).ok_or_else(|| not_there(name))).collect()
    }

    /// Where QEMU serves the disks.
    pub(crate) fn disk_socket(&self) -> PathBuf {
        let id = &self.terms.migration;
        self.context.config.run_dir.join(format!("{}@{}.nbd", id.vm, id.epoch))
    }

    /// Has QEMU record writes, and opens the disks for reading.
    fn record(&mut self, copied: &[CopiedDisk]) -> Result<(DiskLog, Vec<LeavingDisk>), CargoError> {
        let description = self.described();
        let mut disks = Vec::new();
        let mut seen = BTreeSet::new();
        for wanted in copied {
            let disk = description.iter().flat_map(|vm| &vm.disks).find(|disk| disk.name == wanted.name);
            let mut proposed = self.proposal.iter().flat_map(|proposal| &proposal.disks);
            let proposed = proposed.find(|disk| disk.name == wanted.name && disk.wanted != DiskWish::Shared);
            let place = disk.and_then(|disk| disk.nodes.as_ref());
            match place.zip(proposed).filter(|_| seen.insert(&wanted.name)) {
                Some((place, proposed)) => {
                    disks.push(RecordedDisk { node: place.top.clone(), bytes: proposed.bytes });
                }
                None => return Err(CargoError::Unknown(wanted.name.clone())),
            }
        }
        let socket = self.disk_socket();
        let listener = UnixListener::bind(&socket)
            .map_err(|source| CargoError::Socket { path: socket.clone(), source })?;
        let patience = Duration::from_millis(self.context.config.timeouts.qmp_ms);
        let vm = self.vm.as_mut().ok_or(VmError::Gone)?;
        vm.end_left_recording()?;
        let names: Vec<String> = copied.iter().map(|disk| disk.name.clone()).collect();
        let recording = Recording::begin(vm.monitor()?, listener.as_fd(), disks)?;
        let log = DiskLog::new(recording, socket.clone(), names.clone(), patience);
        let open = |(number, name): (usize, &String)| LeavingDisk::open(name, number, &socket, patience);
        let disks: Result<Vec<_>, _> = names.iter().enumerate().map(open).collect();
        match disks {
            Ok(disks) => Ok((log, disks)),
            Err(error) => {
                // What ended it comes first.
                let _ = log.end(vm.monitor()?);
                Err(error.into())
            }
        }
    }

    /// Rounds of disks alone, until memory shall begin.
    pub(super) fn send_disks(&mut self, cargo: &mut Cargo) -> Result<(Sender, Owed), Failure> {
        let mut sender = self.open_streams(cargo)?;
        let mut owed = cargo.disks_alone();
        let mut sent_bytes = None;
        loop {
            let looked = self.look(owed, cargo)?;
            let dirty_bytes = looked.readable.pages() * PAGE_BYTES;
            if let Some((round, sent_bytes)) = sent_bytes {
                let observed = DiskRound { round, dirty_bytes, sent_bytes };
                if bulk::next(&observed, cargo.total_ram_bytes()) == Next::Memory {
                    return Ok((sender, looked.readable.give_up()));
                }
            }
            self.take_notices()?;
            let sent = self.send_looked(sender, looked, cargo)?;
            sent_bytes = sent.stats.map(|stats| (stats.round, dirty_bytes));
            (sender, owed) = (sent.sender, sent.owed);
        }
    }
}
