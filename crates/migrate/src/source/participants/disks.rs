//! Copied disks as a participant: their writes are recorded by QEMU from before the first byte is read, and they are
//! sent before memory.

mod write_throttle;

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use ::memory::{BlockReader as _, PageSet, Reductions, RoundStats, ScanError, ScanStats};
use block::nbd::NbdError;
use engine::handover::source::SourceEvent;
use proto::message::{CopiedDisk, DiskMode, Message, Proposal};
use qemu::describe::VmDescription;
use qemu::preflight::OpenFiles;
use qemu::preflight::files::files_not_open;
use qemu::qmp::Qmp;
use qemu::recording::{RecordError, RecordedDisk, Recording};

use self::write_throttle::DiskWriteThrottle;
use super::participant::{Block, Comparison, Environment, Participant, PrepareProgress, Profile, UndoResult};
use crate::source::Goals;
use crate::source::agreement::Agreed;
use crate::source::failure::Failure;
use crate::source::telemetry::ShownBlock;
use api::report::{Disk, Report};
use host::disks::{DiskLog, LeavingDisk, SocketPath, drop_page_cache, first_pages};
use host::verification::{BlockHashes, DiskImage};
use host::{Context, SourceVm, ThrottleGuard, VmError};

/// Error of preparing the disks for sending.
#[derive(Debug, thiserror::Error)]
enum DiskError {
    /// A disk cannot be read.
    #[error("a disk cannot be read")]
    Read(#[from] NbdError),
    /// Writes to the disks are not recorded.
    #[error("writes to the disks cannot be recorded")]
    Record(#[from] RecordError),
    /// The socket for QEMU could not be made.
    #[error("cannot create the socket {path}, over which disks are read", path = path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// No guard could be started that would lift the throttle of writes if this agent died.
    #[error(
        "writes cannot be throttled: the guard process that would remove the throttle if this agent dies \
         cannot be started"
    )]
    ThrottleGuard(#[source] std::io::Error),
    /// The monitor failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The destination requests a disk that was not proposed for copying, or one twice.
    #[error(
        "the destination requested a copy of disk {0:?} that was not proposed to it, or requested it twice"
    )]
    Unknown(String),
}

/// Disks of a VM that leaves, of which those are copied that the destination does not have.
pub(super) struct Disks {
    environment: Environment,
    /// Description of the VM in the proposal.
    described: Option<VmDescription>,
    /// Disks that are copied, as the destination names them, and as QEMU records their writes.
    copied: Vec<CopiedDisk>,
    recorded: Vec<RecordedDisk>,
    /// The copied disks, until their blocks are requested.
    opened: Vec<LeavingDisk>,
    /// Names and lengths of the copied disks, in bytes.
    lengths: Vec<(String, u64)>,
    /// Dirty log of the copied disks, while their writes are recorded.
    log: Option<DiskLog>,
    /// Throttle of the guest's writes, if they are to be capped.
    write_throttle: Option<DiskWriteThrottle>,
}

/// Starts a guard: no guest is slowed down without one that ends this if the agent dies.
fn start_write_guard(context: &Context, vm: &SourceVm) -> Result<ThrottleGuard, DiskError> {
    ThrottleGuard::for_writes(&context.guard, &vm.process, &vm.qmp_path).map_err(DiskError::ThrottleGuard)
}

/// Returns the copied disks as QEMU records their writes.
fn recorded(
    described: Option<&VmDescription>,
    proposal: Option<&Proposal>,
    copied: &[CopiedDisk],
) -> Result<Vec<RecordedDisk>, DiskError> {
    let mut seen = BTreeSet::new();
    let recorded = |wanted: &CopiedDisk| {
        let disk = described.iter().flat_map(|vm| &vm.disks).find(|disk| disk.name == wanted.name);
        let mut proposed = proposal.iter().flat_map(|proposal| &proposal.disks);
        let proposed = proposed.find(|disk| disk.name == wanted.name && disk.wanted != DiskMode::Shared);
        let place = disk.and_then(|disk| disk.nodes.as_ref());
        let (place, proposed) = place.zip(proposed).filter(|_| seen.insert(wanted.name.clone()))?;
        Some(RecordedDisk { node: place.top.clone(), bytes: proposed.bytes })
    };
    let mut recorded = recorded;
    copied.iter().map(|disk| recorded(disk).ok_or_else(|| DiskError::Unknown(disk.name.clone()))).collect()
}

fn cannot_read(error: &DiskError) -> Failure {
    Failure::local("cannot read the pages to send", error)
}

impl Disks {
    pub(super) fn new(environment: &Environment) -> Self {
        Self {
            environment: environment.clone(),
            described: None,
            copied: Vec::new(),
            recorded: Vec::new(),
            opened: Vec::new(),
            lengths: Vec::new(),
            log: None,
            write_throttle: None,
        }
    }

    /// Returns the path of the socket on which QEMU serves the disks.
    fn socket(&self) -> PathBuf {
        let id = &self.environment.terms.migration;
        self.environment.context.config.run_dir.join(format!("{}@{}.nbd", id.vm, id.epoch))
    }

    /// Returns the path of the socket on which images are served for the comparison at the stop.
    fn compare_socket(&self) -> PathBuf {
        self.socket().with_extension("compare")
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(self.environment.context.config.timeouts.qmp_ms)
    }

    /// Lets QEMU record writes, and opens the disks for reading.
    fn record(&mut self, vm: &mut SourceVm) -> Result<(), DiskError> {
        let guard = self.write_throttle.as_ref().map(|_| start_write_guard(&self.environment.context, vm));
        let guard = guard.transpose()?;
        let socket = self.socket();
        let listener = UnixListener::bind(&socket)
            .map_err(|source| DiskError::Socket { path: socket.clone(), source })?;
        let (path, patience) = (SocketPath(socket.clone()), self.patience());
        vm.end_leftover_recording()?;
        let names: Vec<String> = self.copied.iter().map(|disk| disk.name.clone()).collect();
        let recording =
            Recording::begin(vm.monitor()?, listener.as_fd(), std::mem::take(&mut self.recorded))?;
        self.log = Some(DiskLog::new(recording, path, names.clone(), patience, guard));
        for (number, name) in names.into_iter().enumerate() {
            let disk = LeavingDisk::open(&name, number, &socket, patience)?;
            self.lengths.push((name, disk.bytes()));
            self.opened.push(disk);
        }
        Ok(())
    }

    /// Notes which disks keep the caps of another program, if writes are to be throttled.
    fn note_external_throttles(&self) {
        let log = self.log.as_ref().filter(|_| self.write_throttle.is_some());
        let kept: Vec<_> = log.into_iter().flat_map(DiskLog::throttled_by_others).collect();
        if !kept.is_empty() {
            let detail =
                format!("those to {}, which is already throttled by another program", kept.join(", "));
            self.environment.controls.note("writes-not-throttled", detail);
        }
    }

    /// Limits the guest's writes as the policy decides; returns the number of pages until the next decision, where a
    /// round has `pages`.
    fn throttle(&mut self, vm: &mut SourceVm, pages: u64) -> Result<u64, Failure> {
        let (Some(write_throttle), Some(log)) = (&mut self.write_throttle, &mut self.log) else {
            return Ok(u64::MAX);
        };
        let cannot =
            |error: &dyn std::error::Error| Failure::local("the guest's writes cannot be throttled", error);
        let monitor = vm.monitor().map_err(|error| cannot(&error))?;
        let cap = write_throttle.sample(log, monitor);
        let controls = &self.environment.controls;
        controls.report(|report| write_throttle.policy().update_report(&mut report.traces.others.writes));
        if let Some(cap) = cap.map_err(|error| cannot(&error))? {
            let detail = match (cap.bytes_per_s, cap.writes_per_s) {
                (Some(bytes), _) => format!("to {} KiB/s", bytes >> 10),
                (None, Some(writes)) => format!("to {writes} writes a second"),
                (None, None) => "not any more".to_owned(),
            };
            controls.note("writes-throttled", detail);
        }
        Ok(write_throttle.part_pages(pages))
    }

    /// Checks once more that the images are where QEMU opened them: a stopped guest's QEMU opens them anew by their
    /// paths, no matter which host the guest continues on.
    fn find_images_in_place(&self, vm: &mut SourceVm) -> Result<(), Failure> {
        let Some(described) = &self.described else { return Ok(()) };
        let open = OpenFiles::of(vm.process.pid());
        let open =
            open.map_err(|error| Failure::local("cannot list the files that QEMU has open", &error))?;
        let Some(stray) = files_not_open(described, &open).into_iter().next() else { return Ok(()) };
        // A changed medium is not a moved file.
        vm.check_unchanged().map_err(|error| Failure::local("the guest is not stopped", &error))?;
        let what = if stray.is_there { "another file is there now" } else { "no file is there now" };
        let reason = format!(
            "the guest is not stopped: QEMU has disk {} open from {}, and {what}; move the file that QEMU has open back",
            stray.disk, stray.path
        );
        Err(Failure::new(SourceEvent::Failed, reason))
    }

    /// Returns the images of the copied disks, to be opened anew.
    fn copied_images(&self) -> Result<Vec<DiskImage>, Failure> {
        let image = |name: &String| {
            let mut disks = self.described.iter().flat_map(|vm| &vm.disks);
            disks.find(|disk| disk.name == *name).and_then(DiskImage::of)
        };
        let not_there = |name: &String| {
            Failure::new(
                SourceEvent::Failed,
                format!("the destination did not report the place of disk {name}, so it cannot be compared"),
            )
        };
        self.copied.iter().map(|disk| image(&disk.name).ok_or_else(|| not_there(&disk.name))).collect()
    }

    /// Returns the files of the disks that the destination has copies of.
    fn leftover_images(&self) -> Vec<PathBuf> {
        let disks = self.described.iter().flat_map(|vm| &vm.disks);
        let left = disks.filter(|disk| self.copied.iter().any(|copied| copied.name == disk.name));
        left.filter_map(|disk| disk.file.as_ref().map(PathBuf::from)).collect()
    }

    /// Removes sockets of an agent before this one, and ends the server behind one of them; this agent's are gone by
    /// now.
    fn end_servers_of_a_predecessor(&self) {
        let _ = std::fs::remove_file(self.socket());
        block::image::end_unused_server(&self.compare_socket());
    }
}

impl Participant for Disks {
    /// Missing data of disks may not follow the guest, because QEMU would read it.
    fn profile(&self) -> Profile {
        Profile { name: "disks", can_post_copy: false, is_sent_first: true, irreversible: None }
    }

    /// The report names the copies of disks.
    fn report(&self, agreed: &Agreed<'_>, report: &mut Report) {
        let proposed = || agreed.proposal.iter().flat_map(|proposal| &proposal.disks);
        let disk = |copied: &CopiedDisk| Disk {
            name: copied.name.clone(),
            bytes: proposed().find(|disk| disk.name == copied.name).map_or(0, |disk| disk.bytes),
            path: copied.path.clone(),
            format: copied.format.clone(),
        };
        report.disks = agreed.acceptance.copied.iter().map(disk).collect();
    }

    fn check(&mut self, agreed: &Agreed<'_>) -> Result<(), Failure> {
        let description = agreed.proposal.map(|proposal| proposal.description.clone());
        self.described = description.and_then(|description| serde_json::from_value(description).ok());
        self.recorded = recorded(self.described.as_ref(), agreed.proposal, &agreed.acceptance.copied)
            .map_err(|error| cannot_read(&error))?;
        self.copied.clone_from(&agreed.acceptance.copied);
        let controls = &self.environment.controls;
        if self.copied.is_empty() {
            let goals = controls.change(Goals::disable_write_throttle);
            controls.report(|report| report.settings = goals.settings.clone());
        }
        self.write_throttle = DiskWriteThrottle::new(controls.goals().settings.throttle_writes);
        Ok(())
    }

    fn prepare(&mut self, vm: &mut SourceVm, _: &Reductions) -> Result<PrepareProgress, Failure> {
        if !self.copied.is_empty() {
            self.record(vm).map_err(|error| cannot_read(&error))?;
            self.note_external_throttles();
        }
        Ok(PrepareProgress::Done)
    }

    fn blocks(&mut self, _: &SourceVm) -> Result<Vec<Block>, Failure> {
        let block = |(disk, copied): (LeavingDisk, &CopiedDisk)| {
            let first = first_pages(&disk, copied.send_zeros)?;
            Ok(Block { reader: Box::new(disk), first })
        };
        let opened = std::mem::take(&mut self.opened).into_iter();
        opened
            .zip(&self.copied)
            .map(block)
            .collect::<Result<_, NbdError>>()
            .map_err(|error| cannot_read(&error.into()))
    }

    fn progress(&self) -> Vec<ShownBlock> {
        let shown = |(number, (name, bytes)): (usize, &(String, u64))| ShownBlock {
            number,
            kind: "disk",
            name: name.clone(),
            bytes: *bytes,
        };
        self.lengths.iter().enumerate().map(shown).collect()
    }

    fn before_round(&mut self, vm: &mut SourceVm, pages: u64) -> Result<u64, Failure> {
        self.throttle(vm, pages)
    }

    fn after_round(&mut self, stats: &RoundStats) {
        if let Some(write_throttle) = &mut self.write_throttle {
            write_throttle.record_sent(stats);
        }
    }

    fn scan(&mut self, qmp: Option<&mut Qmp>, into: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        match (&mut self.log, qmp) {
            (Some(log), Some(qmp)) => log.take(qmp, into),
            _ => Ok(ScanStats::default()),
        }
    }

    /// QEMU's frozen bitmaps are released.
    fn after_scan(&mut self, qmp: &mut Qmp) -> Result<(), Failure> {
        let tidied = self.log.as_mut().map_or(Ok(()), |log| log.tidy(qmp));
        tidied.map_err(|error| Failure::local("QEMU does not release a bitmap", &error))
    }

    fn before_stop(&mut self, vm: &mut SourceVm) -> Result<(), Failure> {
        self.find_images_in_place(vm)
    }

    fn message(&mut self) -> Option<Message> {
        None
    }

    /// Precedes the saving of the devices, because QEMU then releases the disks. The devices' requests are complete:
    /// `stop` waits for them.
    fn freeze(&mut self, vm: &mut SourceVm, _: Comparison, into: &mut [PageSet]) -> Result<(), Failure> {
        let Some(log) = &mut self.log else { return Ok(()) };
        let monitor = vm.monitor().map_err(|error| Failure::local("cannot query QEMU", &error))?;
        let found = log.take(monitor, into);
        found.map(drop).map_err(|error| Failure::local("cannot find the dirty pages", &error))
    }

    fn hash(
        &mut self,
        _: &mut SourceVm,
        first_block: usize,
        _: &[PageSet],
        hashes: &mut BlockHashes,
    ) -> Result<(), Failure> {
        let (images, socket) = (self.copied_images()?, self.compare_socket());
        hashes
            .add_disks(first_block, &images, &socket, self.patience())
            .map_err(|error| Failure::local("cannot read the pages to compare", &error))
    }

    fn ready(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        Ok(())
    }

    fn commit(&mut self) {}

    fn undo(&mut self, vm: Option<&mut SourceVm>) -> UndoResult {
        self.opened.clear();
        let log = self.log.take();
        let is_ended = vm.is_none_or(|vm| vm.stop_recording(log));
        self.end_servers_of_a_predecessor();
        if is_ended {
            return UndoResult::Done;
        }
        UndoResult::Retry(
            "QEMU does not confirm that it stopped recording writes, and a write throttle may remain: the next \
             migration that copies its disks removes both",
        )
    }

    fn running(&mut self) {}

    fn finish(&mut self) {
        self.end_servers_of_a_predecessor();
        drop_page_cache(self.leftover_images());
    }

    fn expects_message(&self) -> bool {
        false
    }

    fn learn(&mut self, _: &Message) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use crate::source::MigrationControls;
    use api::MigrationSettings;
    use host::testing::{Qemu, World, acceptance, proposal, terms};
    use proto::message::{Acceptance, ProposedDisk};

    #[test]
    fn the_report_names_what_is_copied() {
        let (world, terms, settings) = (World::new(), terms("a", "b"), MigrationSettings::default());
        let (source, destination) = (terms.source.clone(), terms.destination.clone());
        let mut report = Report::begin(terms.migration.clone(), source, destination, settings.clone());
        let goals = Goals::restored(settings, &world.context.config);
        let controls = Arc::new(MigrationControls::new(goals, report.clone(), Instant::now()));
        let context = Arc::clone(&world.context);
        let disks = Disks::new(&Environment { context, terms, controls, is_resumed: false });
        let proposed = |name: &str, bytes| ProposedDisk {
            name: name.to_owned(),
            bytes,
            allocated_bytes: 0,
            wanted: DiskMode::Auto,
            drop_snapshots: false,
        };
        let proposal = Proposal { disks: vec![proposed("sda", 10), proposed("sdb", 20)], ..proposal() };
        let [name, path, format] = ["sdb", "/pool/sdb", "raw"].map(str::to_owned);
        let copied = vec![CopiedDisk { name, path, format, send_zeros: false }];
        let acceptance = Acceptance { copied, ..acceptance() };
        let agreed = Agreed { proposal: Some(&proposal), acceptance: &acceptance, redirection: None };
        disks.report(&agreed, &mut report);
        let [name, path, format] = ["sdb", "/pool/sdb", "raw"].map(str::to_owned);
        assert_eq!(report.disks, [Disk { name, bytes: 20, path, format }]);
    }

    #[test]
    fn writes_are_not_throttled_where_no_guard_can_be_started() {
        let world = World::new();
        let qemu = Qemu::start(world.folder.path());
        let vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
        assert!(matches!(start_write_guard(&world.context, &vm), Err(DiskError::ThrottleGuard(_))));
    }
}
