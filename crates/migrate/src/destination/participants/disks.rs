//! Disks as an arriving participant: images of copied disks are made before QEMU is started, and closed while QEMU
//! loads the devices; no image may be replaced before QEMU opens it once more.

use std::path::PathBuf;
use std::time::Duration;

use ::memory::ReceiverHandle;
use proto::message::{Message, Proposal};

use super::participant::{
    ArrivalEnvironment, ArrivalPlan, ArrivingParticipant, ArrivingProfile, GuestRan, Incomparable,
    LastMessage, Leftover, OpenBlocks, ReceivedRound,
};
use crate::destination::inbox::DestinationNotice;
use host::disks::{CopiedImages, KnownFile, PlannedDisk};
use host::pool::PoolWatch;
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm};

/// Disks of a VM that arrives, of which those are copied that this host does not have.
pub(super) struct ArrivingDisks {
    environment: ArrivalEnvironment,
    /// Disks whose images are to be made.
    planned: Vec<PlannedDisk>,
    /// Number of streams that write to an image at the same time.
    streams: u16,
    /// Images that QEMU opens once more before the guest runs.
    files: Vec<KnownFile>,
    /// Images of copied disks, until all of their content has arrived.
    images: CopiedImages,
    /// Watch of the images' pool, for as long.
    watch: Option<PoolWatch>,
}

impl ArrivingDisks {
    pub(super) fn new(environment: &ArrivalEnvironment) -> Self {
        Self {
            environment: environment.clone(),
            planned: Vec::new(),
            streams: 0,
            files: Vec::new(),
            images: CopiedImages::default(),
            watch: None,
        }
    }

    /// Ends the migration when arriving disks would use more of the pool than allowed.
    fn watch_pool(&self) -> Result<Option<PoolWatch>, ArrivalError> {
        let pool = self.environment.context.config.pool.as_ref();
        let Some(pool) = pool.filter(|_| !self.images.is_empty()) else { return Ok(None) };
        let notices = self.environment.mailbox.clone();
        let is_short = move |error| {
            notices.put(DestinationNotice::ParticipantFailed { error });
        };
        PoolWatch::start(pool, is_short).map_err(ArrivalError::Watch)
    }
}

impl ArrivingParticipant for ArrivingDisks {
    /// QEMU reads disks without being seen: all of their content precedes the guest.
    fn profile(&self) -> ArrivingProfile {
        ArrivingProfile { name: "disks", can_post_copy: false, irreversible: None }
    }

    fn check(&mut self, proposal: &Proposal, plan: &ArrivalPlan) -> Result<(), ArrivalError> {
        self.planned.clone_from(&plan.copied);
        self.files.clone_from(&plan.shared_files);
        self.streams = proposal.streams;
        Ok(())
    }

    fn prepare(&mut self, artifacts: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        let patience = Duration::from_millis(self.environment.context.config.timeouts.stall_ms);
        let planned = std::mem::take(&mut self.planned);
        self.images = CopiedImages::make(planned, &artifacts.directory, self.streams, patience)?;
        artifacts.made = self.images.made();
        let made = artifacts.made.iter().filter_map(|made| KnownFile::at(&made.path));
        self.files.extend(made.map(KnownFile::at_full_length));
        Ok(())
    }

    fn open(&mut self, _: &mut ArrivingVm) -> Result<OpenBlocks, ArrivalError> {
        self.watch = self.watch_pool()?;
        let (flushing, mailbox) = (self.images.flushing(), self.environment.mailbox.clone());
        // A disk that fails is detected after a round, not only when the guest is stopped.
        let after_round = move |_: &ReceivedRound, _: &ReceiverHandle| {
            let notices = mailbox.clone();
            flushing.flush(move |error| {
                // The driver waits for the thread that flushes, and gets the error from it, too.
                notices.try_put(DestinationNotice::ParticipantFailed { error });
            });
        };
        Ok(OpenBlocks { writers: self.images.writers().collect(), after_round: Box::new(after_round) })
    }

    fn learn(&mut self, _: &Message) {}

    fn compare(
        &mut self,
        vm: &mut ArrivingVm,
        block: usize,
        first_chunk: u64,
        theirs: &[String],
    ) -> Result<Vec<u64>, Incomparable> {
        let patience = Duration::from_millis(self.environment.context.config.timeouts.qmp_ms);
        let directory = &vm.artifacts.directory;
        Ok(self.images.differences(block, first_chunk, theirs, directory, patience)?)
    }

    /// Flushing needs time, which QEMU needs for loading anyway. QEMU acquires the disks when it is to run the guest,
    /// and not before.
    fn freeze(&mut self) -> Result<(), ArrivalError> {
        self.watch = None;
        Ok(std::mem::take(&mut self.images).finish()?)
    }

    fn ready(&mut self, _: &mut ArrivingVm) -> Result<(), ArrivalError> {
        self.files
            .iter()
            .find_map(KnownFile::changed)
            .map_or(Ok(()), |what| Err(ArrivalError::Replaced(what)))
    }

    fn before_cont(&mut self) {}

    fn commit(&mut self, _: &mut ArrivingVm, _: Option<Duration>) {}

    /// The images' servers end.
    fn abandon(&mut self) {
        self.watch = None;
        self.images = CopiedImages::default();
    }

    fn undo(&mut self, artifacts: &ArrivalArtifacts, execution: GuestRan) -> Option<Leftover> {
        // A guest that may have run may have written to its disks.
        if execution == GuestRan::Possibly {
            return None;
        }
        let left = artifacts.remove_images();
        if left.is_empty() {
            return None;
        }
        let each: Vec<_> = left.iter().map(|(image, why)| format!("{} ({why})", image.display())).collect();
        let notice = format!(
            "the VM did not arrive, and images of its disks remain here: {}; if they are not removed \
             later, remove them by hand",
            each.join(", ")
        );
        let artifacts = artifacts.clone();
        Some(Leftover { notice, remove: Box::new(move || artifacts.remove_images().is_empty()) })
    }

    /// A volume may not be visible yet after a boot.
    fn places(&self) -> Vec<PathBuf> {
        ArrivalArtifacts::of(&self.environment.context, &self.environment.migration).images
    }

    fn last_message(&mut self) -> Option<LastMessage> {
        None
    }

    fn finish(&mut self, _: Option<&ArrivingVm>) {}
}
