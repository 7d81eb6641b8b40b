//! Post-copy: pages of the guest that arrive while it runs here.
//!
//! ```text
//! missing pages named ─► userfaultfd registered ─► present ones discarded ─► blocks switched ─► device state loaded
//! ```
//!
//! From then on every thread that touches such a page waits, including QEMU while it loads the device state, and a
//! thread of the agent requests the page on the page stream. Another thread places the pages that arrive on that
//! stream; the remaining pages arrive over the data streams. Neither needs the driver, which may itself wait for QEMU.
//!
//! QEMU holds a second descriptor, and a file ([`MissingPagesFile`]) lists the missing pages: if this agent dies, the
//! threads keep waiting, and the next agent takes over ([`PostCopyReceiver::take_over`]).

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ::memory::ram::{RamError, RamRegion};
use ::memory::{
    BlockWriter, DiscardMethod, MissingPages, MissingPagesFile, PageSet, WriterSwitch, decode_set, encode_set,
};
use link::transport::{Channel, ConnectionHandle, Incoming, MessageReceiver, MessageSender, TransportError};
use proto::awaited::{BadMissingPages, ENTRY_BYTES, decode_page};
use proto::limits::{BLOB_BYTES, CHUNK_BYTES, MISSING_PAGES_BYTES, PAGE_BYTES, REQUESTED_PAGES};
use proto::message::{Finding, Message, PageRequest, Severity};
use tracee::{AddressRange, Injector, LastingUserfaultfd, PageFaultError, PageFaultHandler, Process};
use tracing::{info, warn};

use super::discarding::{DiscardedPages, check_discarded, discard_range, runs_of};
use super::inbox::{DestinationMailbox, DestinationNotice};
use super::post_copy_error::{PostCopyError, SHARED_HUGE_PAGES};
use host::ArrivingVm;
use host::Context;
use host::missing_pages_record::MissingPagesRecord;
use host::ram::{self, JournalledRegion};

/// Delay before the placement of a zero page is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Pages that are still to arrive.
pub(super) struct PostCopyReceiver {
    pages: Arc<MissingPages<PageFaultHandler>>,
    trace: MissingPagesRecord,
    stream: Arc<PageStream>,
    /// The thread that reads page faults; it ends when this socket closes.
    fault_reader: Option<(UnixStream, JoinHandle<()>)>,
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
        let awaited = decode_set(set, regions.iter().map(|region| region.bytes))?;
        discarded_pages.check(&regions, &awaited)?;
        let LastingUserfaultfd { here, there } = context.injector.create_lasting_userfaultfd(&vm.process)?;
        let blocks = regions.iter().zip(writers);
        let kept = blocks.map(|(region, writer)| JournalledRegion::with_missing_pages(region, &**writer));
        let trace = MissingPagesRecord {
            descriptor: there,
            file: vm.artifacts.directory.join("awaited"),
            regions: kept.collect(),
            untrusted: None,
        };
        let file = MissingPagesFile::create(&trace.file, &awaited)?;
        keep(&trace)?;
        let placer = PageFaultHandler::begin(&vm.process, here, &ranges(&regions))?;
        discard_range(&context.injector, &vm.process, (&regions, writers), runs_of(&awaited))?;
        check_discarded((&regions, writers), runs_of(&awaited))?;
        let this = Self::over(placer, trace, regions, awaited, file, mailbox, false)?;
        switch.switch(this.pages.writers());
        Ok(this)
    }

    /// Takes over the missing pages of an agent that died; all waiting threads are reported again. Returns none if all
    /// pages are present: that agent may have ended the waits already.
    pub(super) fn take_over(
        process: &Process,
        trace: &MissingPagesRecord,
        mailbox: &DestinationMailbox,
    ) -> Result<Option<Self>, PostCopyError> {
        let regions = trace.regions();
        let (file, awaited) = MissingPagesFile::open(&trace.file, regions.iter().map(|region| region.bytes))?;
        if awaited.iter().all(PageSet::is_empty) {
            return Ok(None);
        }
        let placer = PageFaultHandler::take_over(process, trace.descriptor, &ranges(&regions))?;
        Self::over(placer, trace.clone(), regions, awaited, file, mailbox, true).map(Some)
    }

    fn over(
        placer: PageFaultHandler,
        trace: MissingPagesRecord,
        regions: Vec<RamRegion>,
        awaited: Vec<PageSet>,
        file: MissingPagesFile,
        mailbox: &DestinationMailbox,
        is_taken_over: bool,
    ) -> Result<Self, PostCopyError> {
        let notices = mailbox.clone();
        // The driver may wait for this thread, so the notice is dropped if the inbox is full; the driver also checks by
        // itself.
        let notify = move || notices.try_put(DestinationNotice::MissingPages);
        let places_zeros: Vec<_> = trace.regions.iter().map(|region| region.places_zeros).collect();
        let pages =
            MissingPages::new(placer, regions, awaited, notify).with_file(file).placing_zeros(places_zeros);
        let pages = Arc::new(if is_taken_over { pages.taken_over() } else { pages });
        let stream = Arc::new(PageStream::default());
        let (end, ended) = UnixStream::pair()?;
        let (waits, asks) = (Arc::clone(&pages), Arc::clone(&stream));
        let thread = thread::Builder::new().name("waits".to_owned()).spawn(move || {
            if let Err(error) = read_faults(&waits, &asks, &ended) {
                warn!(error = crate::chain(&error), "page faults of QEMU are not handled any more");
            }
        })?;
        info!(pages = pages.pages(), "post-copy begins: pages arrive while the guest runs");
        Ok(Self { pages, trace, stream, fault_reader: Some((end, thread)), mailbox: mailbox.clone() })
    }

    /// Returns the number of missing pages.
    pub(super) fn remaining_pages(&self) -> u64 {
        self.pages.pages()
    }

    /// Returns a page that was present although it was still to arrive.
    pub(super) fn untrusted(&self) -> Option<PageRequest> {
        self.pages.untrusted()
    }

    /// Returns the blocks into which pages are received.
    pub(super) fn writers(&self) -> Vec<Box<dyn BlockWriter>> {
        self.pages.writers()
    }

    /// Attaches the source's page stream. Sends the set of missing pages, before which the source sends nothing.
    /// `round` is the last round that was received.
    pub(super) fn attach(&self, connection: Channel, round: u32) -> Result<(), TransportError> {
        let handle = connection.handle();
        let (reader, mut writer) = connection.split();
        let set = encode_set(&self.pages.set());
        let digest = blake3::hash(&set).to_hex().to_string();
        writer.send(&Message::MissingPages { bytes: set.len() as u64, digest, round })?;
        set.chunks(BLOB_BYTES).try_for_each(|piece| writer.send_blob(piece))?;
        let (writers, ended, mailbox) = (self.pages.writers(), Arc::clone(&handle), self.mailbox.clone());
        let place = move || {
            if let Err(error) = place_all(reader, &writers) {
                let error = crate::chain(&error);
                warn!(error, "the page stream ended");
                ended.shutdown();
                mailbox.try_put(DestinationNotice::PageStreamLost { error });
            }
        };
        let placing =
            thread::Builder::new().name("place".to_owned()).spawn(place).map_err(TransportError::local)?;
        self.stream.replace(Some(Connected { writer, handle, placing }));
        self.stream.ask(&self.pages.requested());
        Ok(())
    }

    /// Informs the source that all pages are present, before the connections are closed: that is no loss.
    pub(super) fn report_complete(&self) {
        self.stream.send(&Message::PagesComplete);
    }

    /// Ends the waits, because every page is present, and closes the descriptor in QEMU. After an error it must be
    /// called again.
    pub(super) fn end(&mut self, injector: &Injector, process: &Process) -> Result<(), PostCopyError> {
        self.hang_up();
        self.pages.placer().end()?;
        close(&self.trace, injector, process)
        // The file stays: an agent that starts before ACTIVE is in the journal learns from it that all pages have
        // arrived.
    }

    /// Ends the threads and the page stream. Waiting threads keep waiting.
    pub(super) fn hang_up(&mut self) {
        self.stream.replace(None);
        if let Some((end, thread)) = self.fault_reader.take() {
            drop(end);
            drop(thread.join());
        }
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

/// Requests pages that threads wait for, until the other end of `ended` is closed.
fn read_faults(
    pages: &MissingPages<PageFaultHandler>,
    stream: &PageStream,
    ended: &UnixStream,
) -> Result<(), PageFaultError> {
    let mut found = Vec::new();
    while pages.placer().wait(ended, &mut found)? {
        let (mut wanted, mut unresolved) = (Vec::new(), Vec::new());
        for address in found.drain(..) {
            match pages.handle_fault(address) {
                Ok(page) => wanted.extend(page),
                Err(PageFaultError::Ended) => return Ok(()),
                Err(error) => {
                    // The thread waits on, and its fault is reported again: there may be memory then.
                    warn!(error = crate::chain(&error), "cannot request a page for a waiting thread");
                    unresolved.push(address);
                }
            }
        }
        stream.ask(&wanted);
        if !unresolved.is_empty() {
            thread::sleep(RETRY_DELAY);
            for address in unresolved {
                pages.placer().report_again(address);
            }
        }
    }
    Ok(())
}

/// Reason for the end of a page stream.
#[derive(Debug, thiserror::Error)]
enum PageError {
    #[error("the page stream failed")]
    Stream(#[from] TransportError),
    #[error("received something other than a page on the page stream")]
    Bad(#[from] BadMissingPages),
    #[error("a page that block {block} does not have: {page}")]
    Outside { block: u16, page: u64 },
    #[error("a message instead of a page")]
    Message,
    #[error("cannot place a page")]
    Ram(#[from] RamError),
}

/// Places the pages that arrive until the stream ends.
fn place_all(
    mut reader: Box<dyn MessageReceiver>,
    writers: &[Box<dyn BlockWriter>],
) -> Result<(), PageError> {
    loop {
        let Incoming::Blob(blob) = reader.recv(None)? else { return Err(PageError::Message) };
        let (block, page, bytes) = decode_page(&blob)?;
        let outside = PageError::Outside { block, page };
        let Some(writer) = writers.get(usize::from(block)) else { return Err(outside) };
        if page >= writer.bytes() / PAGE_BYTES {
            return Err(outside);
        }
        let offset = page * PAGE_BYTES;
        if bytes.is_empty() {
            writer.drop_pages(offset..offset + PAGE_BYTES)?;
        } else {
            writer.write(offset, bytes)?;
        }
    }
}

/// The connection for page requests, if there is one.
#[derive(Default)]
struct PageStream(Mutex<Option<Connected>>);

struct Connected {
    writer: Box<dyn MessageSender>,
    handle: Arc<dyn ConnectionHandle>,
    /// The thread that places the pages that arrive.
    placing: JoinHandle<()>,
}

impl PageStream {
    /// Sends page requests; requests that are lost are sent again on the next connection.
    fn ask(&self, wanted: &[PageRequest]) {
        for pages in wanted.chunks(REQUESTED_PAGES) {
            self.send(&Message::RequestPages { pages: pages.to_vec() });
        }
    }

    /// Sends a message if there is a connection.
    fn send(&self, message: &Message) {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connected) = &mut *stream
            && connected.writer.send(message).is_err()
        {
            connected.handle.shutdown();
        }
    }

    /// Replaces the current connection, and waits until no more of its pages are placed.
    fn replace(&self, new: Option<Connected>) {
        let old = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), new);
        if let Some(Connected { handle, placing, .. }) = old {
            handle.shutdown();
            drop(placing.join());
        }
    }
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
