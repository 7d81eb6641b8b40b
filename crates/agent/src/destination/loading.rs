//! What comes on the control stream while a VM arrives: new connections, hashes to compare, the device state.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::destination::DestinationEvent;
use proto::message::Message;
use tracing::{info, warn};

use super::inbox::Notice;
use super::{ArriveError, Driver};
use crate::verification;

/// A device state on its way.
pub(crate) struct StateComing {
    bytes: u64,
    digest: String,
    received: Vec<u8>,
}

impl Driver {
    pub(super) fn resume(&mut self) {
        let Some(receiving) = &self.receiving else { return self.fail("nothing is being received") };
        match receiving.begin(self.generation) {
            Ok(()) => {
                info!(migration = %self.terms.migration, generation = %self.generation, "resumed");
                self.state_coming = None;
                self.say(&Message::Resumed);
            }
            Err(error) => self.fail(&format!("no thread for the data streams: {error}")),
        }
    }

    /// The source seeks pages among this host's templates.
    pub(super) fn seek(&mut self, names: Vec<String>) {
        let Some(receiving) = &self.receiving else { return self.fail("nothing is being received") };
        let told = Arc::clone(receiving.told());
        if !told.is_first() {
            return self.fail("the source asks after templates again");
        }
        let (context, mailbox) = (Arc::clone(&self.context), self.inbox.mailbox());
        let choose = move || {
            for message in told.choose(&context.templates, &names) {
                if !mailbox.put(Notice::Say(Box::new(message))) {
                    return;
                }
            }
        };
        // Where there is no thread for it, the source waits a while and goes on without.
        if let Err(error) = thread::Builder::new().name("choose".to_owned()).spawn(choose) {
            warn!(migration = %self.terms.migration, %error, "no thread to look for templates");
        }
    }

    pub(super) fn verify(&mut self, block: u16, first_chunk: u64, hashes: &[String]) {
        let (index, ram) = (usize::from(block), &self.proposal.ram);
        let Some(vm) = &mut self.vm else { return self.fail("there is nothing to compare") };
        let compared = if let Some(block) = ram.get(index) {
            let pid = vm.process.pid();
            match vm.qmp() {
                Ok(qmp) => verification::differences(qmp, pid, &block.name, first_chunk, hashes),
                Err(error) => return self.fail(&format!("QEMU does not answer: {}", crate::chain(&error))),
            }
        } else {
            // Disks are behind the RAM blocks.
            let patience = Duration::from_millis(self.context.config.timeouts.qmp_ms);
            let (disk, directory) = (index - ram.len(), &vm.traces.directory);
            self.images.differences(disk, first_chunk, hashes, directory, patience)
        };
        match compared {
            Ok(different_chunks) => self.say(&Message::Verified { different_chunks }),
            Err(error) => self.fail(&format!("the two sides cannot be compared: {}", crate::chain(&error))),
        }
    }

    pub(super) fn expect_state(&mut self, bytes: u64, digest: String) {
        if bytes > proto::limits::DEVICE_STATE_BYTES {
            return self.fail(&format!("a device state of {bytes} bytes is too large"));
        }
        self.state_coming = Some(StateComing { bytes, digest, received: Vec::new() });
    }

    pub(super) fn blob(&mut self, blob: &[u8]) {
        let Some(coming) = &mut self.state_coming else { return self.fail("device state came unannounced") };
        coming.received.extend_from_slice(blob);
        if (coming.received.len() as u64) < coming.bytes {
            return;
        }
        let Some(coming) = self.state_coming.take() else { return };
        let digest = blake3::hash(&coming.received).to_hex().to_string();
        if coming.received.len() as u64 != coming.bytes || digest != coming.digest {
            return self.fail("the device state was damaged on its way");
        }
        self.load(&coming.received, digest);
    }

    /// The source cannot go on by itself any more: with what is loaded, this side is ready.
    pub(super) fn held(&mut self, run: bool) {
        let Some(vm) = self.vm.as_mut().filter(|_| self.loaded.is_some()) else {
            return self.fail("the source is held before all has come");
        };
        match vm.hold() {
            Ok(()) => {
                let incarnation = vm.incarnation(&self.context.boot_id, self.generation);
                self.take(&DestinationEvent::Loaded { incarnation, run });
            }
            Err(error) => self.fail(&crate::chain(&error)),
        }
    }

    pub(super) fn load(&mut self, state: &[u8], digest: String) {
        let began = Instant::now();
        let receiving = self.receiving.take();
        if let Some(receiving) = &receiving {
            receiving.shut();
        }
        // To join its threads and to put the disks on stable storage takes time, which QEMU needs for loading anyway.
        // It takes the disks when it is to run the guest, and not before.
        let images = std::mem::take(&mut self.images);
        let mut disks = Ok(());
        let tidy_up = || {
            if let Some(receiving) = receiving {
                receiving.end();
            }
            disks = images.finish();
        };
        let patience = Duration::from_millis(self.context.config.timeouts.qmp_ms);
        let Some(vm) = &mut self.vm else { return self.fail("QEMU is gone") };
        match vm.load(state, patience, tidy_up).and(disks.map_err(ArriveError::Image)) {
            Ok(()) => self.loaded = Some((digest, began.elapsed().as_micros() as u64)),
            Err(error) => self.fail(&crate::chain(&error)),
        }
    }
}
