//! Post-copy: pages that a guest needs which runs at the destination already.
//!
//! Two threads for each set of connections. One answers what is asked for on the page stream; since the guest stands still
//! here for good, any page can be read at any time, and sent as often as it is asked for. The other pushes what is left
//! over the data streams, what will be wanted next first, in parts that hold up no answer for long. What is left the
//! destination says itself whenever connections are made anew, so that this side has nothing to remember but where the
//! guest's memory is; and nothing is pushed before it has said so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ::memory::ram::zero::is_zero;
use ::memory::{
    BadSet, Interrupted, Packing, RamError, Recency, Remaining, SendError, Sender, SenderHandle, Sent,
    SourceRam, decode_set,
};
use engine::push::{Part, Push};
use engine::trace::Traced;
use link::{Connection, Handle, Incoming, LinkError, RateLimit, Reader, Writer};
use proto::Generation;
use proto::awaited::encode_page;
use proto::limits::PAGE_BYTES;
use proto::message::{Message, WantedPage};
use tracing::info;

use super::inbox::{Mailbox, Notice};
use super::telemetry::Left;
use crate::report::PostCopy;

/// What a guest that runs elsewhere needs of what is here.
pub(super) struct Later {
    pub(super) readers: SourceRam,
    pub(super) counted: Arc<Counted>,
    /// What the guest wrote last, as far as this agent has seen it.
    recency: Recency,
    /// What all data streams keep to.
    rate: Arc<RateLimit>,
    /// How the last round was compressed, and what is pushed is.
    pub(super) packing: Option<Arc<Packing>>,
    /// What an agent before this one had sent.
    pub(super) before: PostCopy,
    /// When the guest ran on there for all that is known here.
    pub(super) began: Instant,
    /// None while there are no connections.
    pub(super) serving: Option<Serving>,
    /// Why those before ended, until something is done about it.
    pub(super) lost: Option<String>,
}

/// Pages, and how they were pushed, for the report.
#[derive(Debug)]
pub(super) struct Counted {
    /// Those that somebody waited for.
    pub(super) wanted: AtomicU64,
    /// Those that were pushed.
    pub(super) pushed: AtomicU64,
    /// Those that are left to be pushed.
    left: Left,
    /// How they are pushed; anew over each set of connections.
    push: Mutex<Traced<Push>>,
}

impl Counted {
    pub(super) fn push(&self) -> MutexGuard<'_, Traced<Push>> {
        self.push.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Later {
    pub(super) fn new(readers: SourceRam, recency: Recency, left: Left, rate: Arc<RateLimit>) -> Self {
        let counted = Arc::new(Counted {
            wanted: AtomicU64::new(0),
            pushed: AtomicU64::new(0),
            left,
            push: Mutex::new(Traced::new(Push::default())),
        });
        let (before, began) = (PostCopy::default(), Instant::now());
        Self { readers, counted, recency, rate, packing: None, before, began, serving: None, lost: None }
    }

    /// Sends over these connections, until they end. The destination says first what is left, and so that it is there for
    /// it: what came before it waits for pages would be in the place of those, and taken away.
    pub(super) fn serve(
        &mut self,
        generation: Generation,
        sender: Sender,
        page_stream: Connection,
        mailbox: Mailbox,
    ) -> std::io::Result<()> {
        let (handle, pushing) = (page_stream.handle(), sender.handle());
        let (readers, counted) = (SourceRam::clone(&self.readers), Arc::clone(&self.counted));
        let (rate, recency) = (Arc::clone(&self.rate), self.recency.clone());
        let hang_up = handle.clone();
        let work = move || {
            let ended = serve(&readers, &recency, sender, page_stream, &counted, &rate);
            hang_up.shutdown();
            let error = crate::chain(&ended);
            info!(%generation, error, "nothing more is sent over these connections");
            // The driver may be waiting for this thread; that it has ended he sees in any case.
            mailbox.try_put(Notice::ServingEnded { generation, error });
        };
        let thread = thread::Builder::new().name("serve".to_owned()).spawn(work)?;
        self.serving = Some(Serving { handle, sender: pushing, thread: Some(thread) });
        Ok(())
    }

    /// What was sent so far, of so many pages.
    pub(super) fn so_far(&self, left_pages: u64) -> PostCopy {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PostCopy {
            left_pages,
            wanted_pages: self.before.wanted_pages + of(&self.counted.wanted),
            pushed_pages: self.before.pushed_pages + of(&self.counted.pushed),
            duration_us: self.before.duration_us + self.began.elapsed().as_micros() as u64,
        }
    }

    /// Whether nothing is sent.
    pub(super) fn is_cut(&self) -> bool {
        self.serving
            .as_ref()
            .is_none_or(|serving| serving.thread.as_ref().is_none_or(JoinHandle::is_finished))
    }
}

/// Ends the page stream, and so whoever reads from it, when the thread that has this ends before all is pushed.
struct EndsStream {
    handle: Handle,
    all_pushed: bool,
}

impl Drop for EndsStream {
    fn drop(&mut self) {
        if !self.all_pushed {
            self.handle.shutdown();
        }
    }
}

/// Ends the pace to which what is pushed keeps.
struct LetsGo<'a>(&'a RateLimit);

impl Drop for LetsGo<'_> {
    fn drop(&mut self) {
        self.0.set_pace(None);
    }
}

/// The threads that send. Dropping it ends them.
pub(super) struct Serving {
    handle: Handle,
    sender: SenderHandle,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.handle.shutdown();
        self.sender.cancel();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Why nothing more is sent.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the page stream ended")]
    Stream(#[from] LinkError),
    #[error("the data streams ended")]
    Push(#[from] SendError),
    #[error("the destination said on the page stream what does not belong there")]
    Message,
    #[error("the destination's list of pages cannot be used")]
    Set(#[from] BadSet),
    #[error("the destination's list of pages was damaged on its way")]
    Digest,
    #[error("the destination wants page {} of block {}, which is not there", .0.page, .0.block)]
    Outside(WantedPage),
    #[error("the guest's memory cannot be read")]
    Ram(#[from] RamError),
    #[error("no thread to push pages in")]
    Thread(#[from] std::io::Error),
}

fn serve(
    readers: &SourceRam,
    recency: &Recency,
    sender: Sender,
    page_stream: Connection,
    counted: &Counted,
    rate: &RateLimit,
) -> Ended {
    let hang_up = page_stream.handle();
    let (mut reader, mut writer) = page_stream.split();
    let remaining = match hear_what_is_left(&mut reader, readers, recency) {
        Ok(remaining) => remaining,
        Err(ended) => return ended,
    };
    let cancel = sender.handle();
    thread::scope(|scope| {
        let push = || {
            let mut ends = EndsStream { handle: hang_up, all_pushed: false };
            let pushed = push(sender, &remaining, counted, rate);
            ends.all_pushed = pushed.is_ok();
            pushed
        };
        let pushing = match thread::Builder::new().name("push".to_owned()).spawn_scoped(scope, push) {
            Ok(pushing) => pushing,
            Err(error) => return error.into(),
        };
        let ended = match answer(&mut reader, &mut writer, readers, &remaining, counted) {
            Ok(never) => match never {},
            Err(ended) => ended,
        };
        cancel.cancel();
        match pushing.join() {
            // Why the page stream was ended here.
            Ok(Err(error)) if !matches!(error, SendError::Cancelled) => error.into(),
            _ => ended,
        }
    })
}

/// What the destination awaits, as it says first.
fn hear_what_is_left(
    reader: &mut Reader,
    readers: &SourceRam,
    recency: &Recency,
) -> Result<Remaining, Ended> {
    let Incoming::Message(Message::Awaited { bytes, digest, round }) = reader.recv(None)? else {
        return Err(Ended::Message);
    };
    let mut set = Vec::new();
    while (set.len() as u64) < bytes {
        let Incoming::Blob(piece) = reader.recv(None)? else { return Err(Ended::Message) };
        set.extend_from_slice(&piece);
    }
    if blake3::hash(&set).to_hex().to_string() != digest {
        return Err(Ended::Digest);
    }
    let blocks = decode_set(&set, readers.iter().map(|reader| reader.bytes()))?;
    Ok(Remaining::of(blocks, round, recency))
}

/// Pushes what is left, part by part.
fn push(
    mut sender: Sender,
    remaining: &Remaining,
    counted: &Counted,
    rate: &RateLimit,
) -> Result<(), SendError> {
    counted.push().begin_anew();
    let mut most_pages = counted.push().policy().pages();
    let _lets_go = LetsGo(rate);
    while let Some(part) = remaining.take(most_pages) {
        counted.left.set(remaining.pages());
        let (pages, began) = (part.pages(), Instant::now());
        let sent = sender.send_round(part).map_err(|interrupted| {
            let Interrupted { cause, .. } = *interrupted;
            cause
        })?;
        let Sent { sender: again, owed, stats } = sent;
        sender = again;
        counted.pushed.fetch_add(stats.contents.pages(), Ordering::Relaxed);
        remaining.give_back(&owed);
        let duration_ns = began.elapsed().as_nanos() as u64;
        let (data_pages, wire_bytes) = (stats.contents.data, stats.wire_bytes);
        let part = Part { pages, data_pages, wire_bytes, duration_ns };
        let next = counted.push().decide_on(part);
        most_pages = next.pages;
        rate.set_pace(next.pace_bytes_per_s);
    }
    Ok(())
}

/// Answers what is asked for, until the connection ends.
fn answer(
    reader: &mut Reader,
    writer: &mut Writer,
    readers: &SourceRam,
    remaining: &Remaining,
    counted: &Counted,
) -> Result<std::convert::Infallible, Ended> {
    let mut bytes = vec![0; PAGE_BYTES as usize];
    loop {
        let Incoming::Message(Message::Want { pages }) = reader.recv(None)? else {
            return Err(Ended::Message);
        };
        // On its way already or not, each is sent: it is not known how long the way is.
        for &wanted in &pages {
            let page = readers
                .get(usize::from(wanted.block))
                .filter(|block| wanted.page < block.bytes() / PAGE_BYTES);
            let Some(block) = page else { return Err(Ended::Outside(wanted)) };
            block.read(wanted.page * PAGE_BYTES, &mut bytes)?;
            let content = if is_zero(&bytes) { &[] } else { &bytes[..] };
            writer.send_blob(&encode_page(wanted.block, wanted.page, content))?;
            counted.wanted.fetch_add(1, Ordering::Relaxed);
        }
        remaining.take_out(&pages);
    }
}
