//! Post-copy: pages of the guest that arrive while it runs here.
//!
//! ```text
//! missing pages named ─► userfaultfd registered ─► present ones discarded ─► blocks switched ─► device state loaded
//! ```
//!
//! From then on every thread that touches such a page waits, including QEMU while it loads the device state, and a
//! thread of the agent requests the page on the page stream. Another thread places the pages that arrive on that
//! stream ([`PageRequests`]); the remaining pages arrive over the data streams. Neither needs the driver, which may
//! itself wait for QEMU.
//!
//! QEMU holds a second descriptor, and a file ([`MissingPagesFile`]) lists the missing pages: if this agent dies, the
//! threads keep waiting, and the next agent takes over ([`PostCopyReceiver::take_over`]).

use std::sync::Arc;

use ::memory::ram::RamRegion;
use ::memory::{
    BlockWriter, DiscardMethod, MissingPages, MissingPagesFile, PageRequests, PageSet, WriterSwitch,
    decode_set,
};
use link::transport::{Channel, TransportError};
use proto::limits::{CHUNK_BYTES, MISSING_PAGES_BYTES};
use proto::message::{Finding, PageRequest, Severity};
use proto::missing_pages::ENTRY_BYTES;
use tracee::{AddressRange, Injector, LastingUserfaultfd, PageFaultHandler, Process};
use tracing::{info, warn};

use super::discarding::{DiscardedPages, check_discarded, discard_range, runs_of};
use super::inbox::{DestinationMailbox, DestinationNotice};
use super::post_copy_error::{PostCopyError, SHARED_HUGE_PAGES};
use host::ArrivingVm;
use host::Context;
use host::missing_pages_record::MissingPagesRecord;
use host::ram::{self, JournalledRegion};

/// Pages that are still to arrive.
pub(super) struct PostCopyReceiver {
    pages: Arc<MissingPages<PageFaultHandler>>,
    record: MissingPagesRecord,
    requests: PageRequests<PageFaultHandler>,
    mailbox: DestinationMailbox,
}

/// Checks that this QEMU's memory can arrive while the guest runs; the error has the reason. Leaves nothing behind.
pub(super) fn try_out(
    injector: &Injector,
    vm: &ArrivingVm,
    writers: &[Box<dyn BlockWriter>],
) -> Result<(), PostCopyError> {
    if longest_list(writers.iter().map(|writer| writer.bytes())) > MISSING_PAGES_BYTES {
        return Err(PostCopyError::TooMuch);
    }
    if let Some(writer) = writers.iter().find(|writer| writer.discard_method() == DiscardMethod::Never) {
        return Err(PostCopyError::Block(writer.name().to_owned()));
    }
    if writers.iter().any(|writer| writer.discard_method() == DiscardMethod::FromOutside) {
        let setting = std::fs::read_to_string(SHARED_HUGE_PAGES).unwrap_or_default();
        let chosen = setting.split(['[', ']']).nth(1).unwrap_or("never");
        if ["always", "within_size", "force"].contains(&chosen) {
            return Err(PostCopyError::HugePages(chosen.to_owned()));
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.process.pid()))?;
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    if locked.is_some_and(|kib| kib.trim().split(' ').next() != Some("0")) {
        return Err(PostCopyError::Locked);
    }
    let LastingUserfaultfd { here, there } = injector.create_lasting_userfaultfd(&vm.process)?;
    let ranges = ranges(&ram::regions(&vm.blocks));
    let tried = PageFaultHandler::begin(&vm.process, here, &ranges).and_then(|waits| waits.end());
    injector.close_lasting(&vm.process, there)?;
    Ok(tried?)
}

/// Returns the largest possible size of a list of pages of blocks of these sizes, in bytes.
fn longest_list(blocks: impl Iterator<Item = u64>) -> u64 {
    blocks.map(|bytes| bytes.div_ceil(CHUNK_BYTES) * ENTRY_BYTES as u64).sum()
}

/// Turns the error into a finding for users.
pub(super) fn finding(error: &PostCopyError) -> Finding {
    Finding {
        severity: Severity::Warning,
        code: "no-post-copy".to_owned(),
        what: crate::chain(error),
        advice: "without post-copy the guest must write more slowly than the link can send".to_owned(),
    }
}

impl PostCopyReceiver {
    /// Makes every thread that touches one of these pages wait for it, and places pages that arrive.
    pub(super) fn begin(
        context: &Context,
        vm: &ArrivingVm,
        (writers, switch): (&[Box<dyn BlockWriter>], &WriterSwitch),
        set: &[u8],
        discarded_pages: &DiscardedPages,
        mailbox: &DestinationMailbox,
        keep: impl FnOnce(&MissingPagesRecord) -> Result<(), std::io::Error>,
    ) -> Result<Self, PostCopyError> {
        let regions = ram::regions(&vm.blocks);
        let missing = decode_set(set, regions.iter().map(|region| region.bytes))?;
        discarded_pages.check(&regions, &missing)?;
        let LastingUserfaultfd { here, there } = context.injector.create_lasting_userfaultfd(&vm.process)?;
        let blocks = regions.iter().zip(writers);
        let kept = blocks.map(|(region, writer)| JournalledRegion::with_missing_pages(region, &**writer));
        let record = MissingPagesRecord {
            descriptor: there,
            file: vm.artifacts.directory.join("missing-pages"),
            regions: kept.collect(),
            unexpected_page: None,
        };
        let file = MissingPagesFile::create(&record.file, &missing)?;
        keep(&record)?;
        let placer = PageFaultHandler::begin(&vm.process, here, &ranges(&regions))?;
        discard_range(&context.injector, &vm.process, (&regions, writers), runs_of(&missing))?;
        check_discarded((&regions, writers), runs_of(&missing))?;
        let this = Self::over(placer, record, regions, missing, file, mailbox, false)?;
        switch.switch(this.pages.writers());
        Ok(this)
    }

    /// Takes over the missing pages of an agent that died; all waiting threads are reported again. Returns none if all
    /// pages are present: that agent may have ended the waits already.
    pub(super) fn take_over(
        process: &Process,
        record: &MissingPagesRecord,
        mailbox: &DestinationMailbox,
    ) -> Result<Option<Self>, PostCopyError> {
        let regions = record.regions();
        let (file, missing) =
            MissingPagesFile::open(&record.file, regions.iter().map(|region| region.bytes))?;
        if missing.iter().all(PageSet::is_empty) {
            return Ok(None);
        }
        let placer = PageFaultHandler::take_over(process, record.descriptor, &ranges(&regions))?;
        Self::over(placer, record.clone(), regions, missing, file, mailbox, true).map(Some)
    }

    fn over(
        placer: PageFaultHandler,
        record: MissingPagesRecord,
        regions: Vec<RamRegion>,
        missing: Vec<PageSet>,
        file: MissingPagesFile,
        mailbox: &DestinationMailbox,
        is_taken_over: bool,
    ) -> Result<Self, PostCopyError> {
        let notices = mailbox.clone();
        // The driver may wait for this thread, so the notice is dropped if the inbox is full; the driver also checks by
        // itself.
        let notify = move || notices.try_put(DestinationNotice::MissingPages);
        let places_zeros: Vec<_> = record.regions.iter().map(|region| region.places_zeros).collect();
        let pages =
            MissingPages::new(placer, regions, missing, notify).with_file(file).placing_zeros(places_zeros);
        let pages = Arc::new(if is_taken_over { pages.taken_over() } else { pages });
        let requests = PageRequests::begin(Arc::clone(&pages))?;
        info!(pages = pages.pages(), "post-copy begins: pages arrive while the guest runs");
        Ok(Self { pages, record, requests, mailbox: mailbox.clone() })
    }

    /// Creates the receiver of one missing page of a guest that has no QEMU: no thread waits for it.
    #[cfg(test)]
    pub(super) fn without_qemu(mailbox: &DestinationMailbox) -> Self {
        use std::os::fd::AsRawFd as _;

        let (silent, other) = std::os::unix::net::UnixStream::pair().unwrap();
        // Closed, it would seem to report page faults.
        std::mem::forget(other);
        let own = Process::open(std::process::id()).unwrap();
        let placer = PageFaultHandler::take_over(&own, silent.as_raw_fd(), &[]).unwrap();
        let region = RamRegion { name: "ram".to_owned(), bytes: 4096, page_bytes: 4096, address: 4096 };
        let pages = Arc::new(MissingPages::new(placer, vec![region], vec![PageSet::full(4096)], || ()));
        let requests = PageRequests::begin(Arc::clone(&pages)).unwrap();
        let file = std::path::PathBuf::from("/nonexistent");
        let record = MissingPagesRecord { descriptor: -1, file, regions: Vec::new(), unexpected_page: None };
        Self { pages, record, requests, mailbox: mailbox.clone() }
    }

    /// Returns the number of missing pages.
    pub(super) fn remaining_pages(&self) -> u64 {
        self.pages.pages()
    }

    /// Returns a page that was present although it was still to arrive.
    pub(super) fn unexpected_page(&self) -> Option<PageRequest> {
        self.pages.unexpected_page()
    }

    /// Returns the blocks into which pages are received.
    pub(super) fn writers(&self) -> Vec<Box<dyn BlockWriter>> {
        self.pages.writers()
    }

    /// Attaches the source's page stream. `round` is the last round that was received.
    pub(super) fn attach(&self, connection: Channel, round: u32) -> Result<(), TransportError> {
        let mailbox = self.mailbox.clone();
        self.requests.attach(connection, round, move |error| {
            let error = crate::chain(&error);
            warn!(error, "the page stream ended");
            mailbox.try_put(DestinationNotice::PageStreamLost { error });
        })
    }

    /// Informs the source that all pages are present, before the connections are closed: that is no loss.
    pub(super) fn report_complete(&self) {
        self.requests.report_complete();
    }

    /// Ends the waits, because every page is present, and closes the descriptor in QEMU. After an error it must be
    /// called again.
    pub(super) fn end(&mut self, injector: &Injector, process: &Process) -> Result<(), PostCopyError> {
        self.hang_up();
        self.pages.placer().end()?;
        close(&self.record, injector, process)
        // The file stays: an agent that starts before ACTIVE is in the journal learns from it that all pages have
        // arrived.
    }

    /// Ends the threads and the page stream. Waiting threads keep waiting.
    pub(super) fn hang_up(&mut self) {
        self.requests.hang_up();
    }
}

/// Ends the waits that a previous agent, which found all pages present, may have left registered.
pub(super) fn end_leftover_waits(
    record: &MissingPagesRecord,
    injector: &Injector,
    process: &Process,
) -> Result<(), PostCopyError> {
    if record.is_open(process) {
        PageFaultHandler::take_over(process, record.descriptor, &ranges(&record.regions()))?.end()?;
    }
    close(record, injector, process)
}

/// Closes the descriptor inside QEMU, if it is still open.
fn close(record: &MissingPagesRecord, injector: &Injector, process: &Process) -> Result<(), PostCopyError> {
    if record.is_open(process) {
        injector.close_lasting(process, record.descriptor)?;
    }
    Ok(())
}

/// Returns the ranges of all blocks: an agent that takes over need not know which of them have missing pages.
fn ranges(regions: &[RamRegion]) -> Vec<AddressRange> {
    regions.iter().map(RamRegion::range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the source would find the list too long when the guest is stopped already.
    #[test]
    fn memory_beyond_one_list_is_reported_before_the_stop() {
        assert!(longest_list([4 << 40, 1 << 40].into_iter()) < MISSING_PAGES_BYTES);
        assert!(longest_list([4 << 40, 4 << 40].into_iter()) > MISSING_PAGES_BYTES);
    }
}
