//! Copied disks: their writes are recorded from before the first byte is read, and rounds of disks alone precede
//! memory.

use host::{SourceVm, VmError};
use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use ::memory::{Owed, PageCursor, Sender};
use block::nbd::NbdError;
use engine::bulk::{DiskRound, DisksFirstPolicy, NextPhase};
use engine::handover::source::SourceEvent;
use engine::trace::TracedPolicy;
use proto::limits::PAGE_BYTES;
use proto::message::{CopiedDisk, DiskMode};
use qemu::describe::VmDescription;
use qemu::preflight::OpenFiles;
use qemu::preflight::files::files_not_open;
use qemu::recording::{RecordedDisk, Recording};

use super::rounds::DirtyScan;
use super::{Failure, gone};
use crate::source::memory::{Payload, PayloadError};
use crate::source::write_throttle::DiskWriteThrottle;
use crate::source::{Driver, Goals};
use api::OnLimit;
use host::Context;
use host::ThrottleGuard;
use host::disks::{DiskLog, LeavingDisk, SocketPath};
use host::verification::DiskImage;

/// Starts a guard: no guest is slowed down without one that ends this if the agent dies.
fn start_write_guard(context: &Context, vm: &SourceVm) -> Result<ThrottleGuard, PayloadError> {
    ThrottleGuard::for_writes(&context.guard, &vm.process, &vm.qmp_path).map_err(PayloadError::ThrottleGuard)
}

impl Driver {
    /// Prepares everything that the streams will send. Writes to disks are recorded from here on.
    pub(super) fn payload(&mut self, copied: &[CopiedDisk]) -> Result<Payload, Failure> {
        let failed = |error: PayloadError| Failure::local("cannot read the pages to send", &error);
        if copied.is_empty() {
            let goals = self.controls.change(Goals::disable_write_throttle);
            self.controls.report(|report| report.settings = goals.settings.clone());
        }
        let write_throttle = DiskWriteThrottle::new(self.controls.goals().settings.throttle_writes);
        let vm = self.resources.vm.as_ref().ok_or_else(gone)?;
        let guard = write_throttle.as_ref().map(|_| start_write_guard(&self.context, vm));
        let guard = guard.transpose().map_err(failed)?;
        let disks = if copied.is_empty() { None } else { Some(self.record(copied, guard).map_err(failed)?) };
        let vm = self.resources.vm.as_ref().ok_or_else(gone)?;
        let payload = Payload::new(vm, disks, write_throttle).map_err(failed)?;
        self.telemetry.publish_disks(payload.disks());
        Ok(payload)
    }

    /// Checks once more that the images are where QEMU opened them: a stopped guest's QEMU opens them anew by their
    /// paths, no matter which host the guest continues on.
    pub(super) fn find_images_in_place(&mut self) -> Result<(), Failure> {
        let Some(described) = self.described() else { return Ok(()) };
        let vm = self.vm()?;
        let open = OpenFiles::of(vm.process.pid());
        let open =
            open.map_err(|error| Failure::local("cannot list the files that QEMU has open", &error))?;
        let Some(stray) = files_not_open(&described, &open).into_iter().next() else { return Ok(()) };
        // A changed medium is not a moved file.
        vm.check_unchanged().map_err(|error| Failure::local("the guest is not stopped", &error))?;
        let what = if stray.is_there { "another file is there now" } else { "no file is there now" };
        let reason = format!(
            "the guest is not stopped: QEMU has disk {} open from {}, and {what}; move the file that QEMU has open back",
            stray.disk, stray.path
        );
        Err(Failure::new(SourceEvent::Failed, reason))
    }

    /// Returns the description of the VM in the proposal.
    fn described(&self) -> Option<VmDescription> {
        let description = self.agreement.proposal.as_ref()?.description.clone();
        serde_json::from_value(description).ok()
    }

    /// Returns the files of the disks that the destination has copies of.
    pub(crate) fn left_images(&self) -> Vec<PathBuf> {
        let copied = self.controls.report(|report| report.disks.clone());
        let disks = self.described().into_iter().flat_map(|vm| vm.disks);
        let left = disks.filter(|disk| copied.iter().any(|copied| copied.name == disk.name));
        left.filter_map(|disk| disk.file.map(PathBuf::from)).collect()
    }

    /// Returns the images of the copied disks, to be opened anew.
    pub(super) fn copied_images(&self, payload: &Payload) -> Result<Vec<DiskImage>, Failure> {
        let described = self.described();
        let image = |name: &String| {
            described.iter().flat_map(|vm| &vm.disks).find(|disk| disk.name == *name).and_then(DiskImage::of)
        };
        let not_there = |name: &String| {
            Failure::new(
                SourceEvent::Failed,
                format!("the destination did not report the place of disk {name}, so it cannot be compared"),
            )
        };
        payload.disk_names().iter().map(|name| image(name).ok_or_else(|| not_there(name))).collect()
    }

    /// Returns the path of the socket on which QEMU serves the disks.
    pub(crate) fn disk_socket(&self) -> PathBuf {
        let id = &self.terms.migration;
        self.context.config.run_dir.join(format!("{}@{}.nbd", id.vm, id.epoch))
    }

    /// Returns the path of the socket on which images are served for the comparison at the stop.
    pub(crate) fn compare_socket(&self) -> PathBuf {
        self.disk_socket().with_extension("compare")
    }

    /// Lets QEMU record writes, and opens the disks for reading.
    fn record(
        &mut self,
        copied: &[CopiedDisk],
        guard: Option<ThrottleGuard>,
    ) -> Result<(DiskLog, Vec<(LeavingDisk, bool)>), PayloadError> {
        let description = self.described();
        let mut disks = Vec::new();
        let mut seen = BTreeSet::new();
        for wanted in copied {
            let disk = description.iter().flat_map(|vm| &vm.disks).find(|disk| disk.name == wanted.name);
            let mut proposed = self.agreement.proposal.iter().flat_map(|proposal| &proposal.disks);
            let proposed = proposed.find(|disk| disk.name == wanted.name && disk.wanted != DiskMode::Shared);
            let place = disk.and_then(|disk| disk.nodes.as_ref());
            match place.zip(proposed).filter(|_| seen.insert(&wanted.name)) {
                Some((place, proposed)) => {
                    disks.push(RecordedDisk { node: place.top.clone(), bytes: proposed.bytes });
                }
                None => return Err(PayloadError::Unknown(wanted.name.clone())),
            }
        }
        let socket = self.disk_socket();
        let listener = UnixListener::bind(&socket)
            .map_err(|source| PayloadError::Socket { path: socket.clone(), source })?;
        let path = SocketPath(socket.clone());
        let patience = Duration::from_millis(self.context.config.timeouts.qmp_ms);
        let vm = self.resources.vm.as_mut().ok_or(VmError::Gone)?;
        vm.end_leftover_recording()?;
        let names: Vec<String> = copied.iter().map(|disk| disk.name.clone()).collect();
        let recording = Recording::begin(vm.monitor()?, listener.as_fd(), disks)?;
        let log = DiskLog::new(recording, path, names.clone(), patience, guard);
        let open = |(number, disk): (usize, &CopiedDisk)| {
            Ok((LeavingDisk::open(&disk.name, number, &socket, patience)?, disk.send_zeros))
        };
        let disks: Result<Vec<_>, NbdError> = copied.iter().enumerate().map(open).collect();
        match disks {
            Ok(disks) => Ok((log, disks)),
            Err(error) => {
                // The error that caused this is reported.
                let _ = log.end(vm.monitor()?);
                Err(error.into())
            }
        }
    }

    /// Sends rounds of disks alone, until the policy lets memory begin.
    pub(super) fn send_disks(&mut self, payload: &mut Payload) -> Result<(Sender, Owed), Failure> {
        let mut sender = self.open_streams(payload)?;
        let kept = payload.externally_throttled();
        if !kept.is_empty() {
            let detail =
                format!("those to {}, which is already throttled by another program", kept.join(", "));
            self.note("writes-not-throttled", detail);
        }
        let mut owed = payload.disks_alone();
        let mut sent_bytes = None;
        let mut ahead = TracedPolicy::new(DisksFirstPolicy { memory_bytes: payload.total_ram_bytes() });
        loop {
            let scanned = self.scan(owed, payload)?;
            let dirty_bytes = scanned.readable.pages() * PAGE_BYTES;
            if let Some(sent_bytes) = sent_bytes {
                let observed = DiskRound { dirty_bytes, sent_bytes };
                let next = ahead.decide_on(observed);
                self.controls.report(|report| ahead.update_report(&mut report.traces.others.disks));
                if next == NextPhase::Memory {
                    return Ok((sender, scanned.readable.give_up()));
                }
            }
            let sent = self.send_in_parts(sender, scanned, payload)?;
            sent_bytes = sent.is_whole.then_some(dirty_bytes);
            (sender, owed) = (sent.sender, sent.owed);
            self.has_time_for_memory()?;
        }
    }

    /// Fails if the limit on the total time has passed and the action at the limit is to abort: then there is nothing
    /// to wait for.
    fn has_time_for_memory(&self) -> Result<(), Failure> {
        let goals = self.controls.goals();
        let limit = goals
            .max_total_ms()
            .filter(|_| goals.settings.on_limit == OnLimit::Abort)
            .map(Duration::from_millis);
        if limit.is_some_and(|limit| self.controls.requested.elapsed() > limit) {
            let reason = "the time limit is reached before all memory was sent: allow more time, or a higher \
                          bandwidth";
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        Ok(())
    }

    /// Sends a round, with samples of the guest's writes in between if they are throttled: in a round of hours much can
    /// be written. Pages that are written in the meantime are sent in this round if they are further on, and otherwise
    /// in the next.
    fn send_in_parts(
        &mut self,
        mut sender: Sender,
        mut scanned: DirtyScan,
        payload: &mut Payload,
    ) -> Result<SentInParts, Failure> {
        let all = scanned.readable.pages();
        let (mut place, mut is_whole) = (PageCursor::default(), true);
        loop {
            self.throttle(payload)?;
            self.handle_notices()?;
            let pages =
                payload.write_throttle().map_or(u64::MAX, |write_throttle| write_throttle.part_pages(all));
            let (part, later, next) = scanned.part(place, pages);
            self.telemetry.begin_round(0, payload.waiting(&later));
            let sent = self.send_scanned(sender, part, None, payload)?;
            is_whole &= sent.stats.is_some();
            payload.record_sent(sent.stats.as_ref());
            let mut owed = sent.owed;
            owed.take_back(&later);
            sender = sent.sender;
            let Some(next) = next else { return Ok(SentInParts { sender, owed, is_whole }) };
            place = next;
            scanned = self.scan(owed, payload)?;
        }
    }

    /// Limits the guest's writes as the policy decides, if one was chosen.
    pub(super) fn throttle(&mut self, payload: &mut Payload) -> Result<(), Failure> {
        if payload.write_throttle().is_none() {
            return Ok(());
        }
        let cannot =
            |error: &dyn std::error::Error| Failure::local("the guest's writes cannot be throttled", error);
        let monitor = self.vm()?.monitor().map_err(|error| cannot(&error))?;
        let cap = payload.throttle(monitor);
        if let Some(write_throttle) = payload.write_throttle() {
            self.controls
                .report(|report| write_throttle.policy().update_report(&mut report.traces.others.writes));
        }
        if let Some(cap) = cap.map_err(|error| cannot(&error))? {
            let detail = match (cap.bytes_per_s, cap.writes_per_s) {
                (Some(bytes), _) => format!("to {} KiB/s", bytes >> 10),
                (None, Some(writes)) => format!("to {writes} writes a second"),
                (None, None) => "not any more".to_owned(),
            };
            self.note("writes-throttled", detail);
        }
        Ok(())
    }
}

/// A round that was sent in parts.
struct SentInParts {
    sender: Sender,
    owed: Owed,
    /// True if no part was cut off.
    is_whole: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::testing::{Qemu, World};

    #[test]
    fn writes_are_not_throttled_where_no_guard_can_be_started() {
        let world = World::new();
        let qemu = Qemu::start(world.folder.path());
        let vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
        assert!(matches!(start_write_guard(&world.context, &vm), Err(PayloadError::ThrottleGuard(_))));
    }
}
