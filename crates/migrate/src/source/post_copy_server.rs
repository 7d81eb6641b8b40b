//! Post-copy server: pages for a guest that already runs at the destination.
//!
//! Two threads serve each set of connections. One answers page requests on the page stream; since the guest is stopped
//! at the source for good, any page can be read at any time, and sent as often as it is requested. The other pushes the
//! remaining pages over the data streams, those that will be requested next first, in parts that delay no answer for
//! long.
//!
//! The destination itself reports the remaining pages whenever connections are made anew, so that the source agent has
//! to remember only where the guest's memory is. Nothing is pushed before this report.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ::memory::{
    CompletedRound, InterruptedRound, RecentWrites, Reductions, RemainingPages, RequestsEnd, SendError,
    Sender, SenderHandle, SourceRam, answer_page_requests, receive_missing_pages,
};
use engine::push::{PushPolicy, PushedPart};
use engine::trace::TracedPolicy;
use link::RateLimit;
use link::transport::{Channel, ConnectionHandle};
use proto::Generation;
use tracing::info;

use super::inbox::{SourceMailbox, SourceNotice};
use super::telemetry::RemainingCounter;
use api::report::PostCopy;

/// State of post-copy for a guest that runs at the destination.
pub(super) struct PostCopyServer {
    pub(super) readers: SourceRam,
    pub(super) counted: Arc<ServingCounts>,
    /// The guest's recent writes, as far as this agent has recorded them.
    recency: RecentWrites,
    /// Rate limit of all data streams.
    rate: Arc<RateLimit>,
    /// Reductions that apply to pushed pages, too.
    pub(super) reductions: Reductions,
    /// Counts of an agent before this one.
    pub(super) before: PostCopy,
    /// Time at which post-copy began, as far as the source knows.
    pub(super) began: Instant,
    /// Sending threads; none while there are no connections.
    pub(super) serving: Option<SenderThreads>,
    /// Error that ended the last connections, until it is handled.
    pub(super) lost: Option<String>,
    /// True if the destination has reported over the last connections that it has all pages.
    pub(super) is_complete: bool,
}

/// Counts of pages and the push policy's trace, for the report.
#[derive(Debug)]
pub(super) struct ServingCounts {
    /// Pages that were requested.
    pub(super) requested: AtomicU64,
    /// Pages that were pushed.
    pub(super) pushed: AtomicU64,
    /// Pages that remain to be pushed.
    remaining_counter: RemainingCounter,
    /// Push policy; it begins anew with each set of connections.
    push: Mutex<TracedPolicy<PushPolicy>>,
}

impl ServingCounts {
    pub(super) fn push_policy(&self) -> MutexGuard<'_, TracedPolicy<PushPolicy>> {
        self.push.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PostCopyServer {
    pub(super) fn new(
        readers: SourceRam,
        recency: RecentWrites,
        remaining_counter: RemainingCounter,
        rate: Arc<RateLimit>,
    ) -> Self {
        let counted = Arc::new(ServingCounts {
            requested: AtomicU64::new(0),
            pushed: AtomicU64::new(0),
            remaining_counter,
            push: Mutex::new(TracedPolicy::new(PushPolicy::default())),
        });
        let (before, began) = (PostCopy::default(), Instant::now());
        Self {
            readers,
            counted,
            recency,
            rate,
            reductions: Reductions::default(),
            before,
            began,
            serving: None,
            lost: None,
            is_complete: false,
        }
    }

    /// Sends pages over these connections until they end. The destination first reports the remaining pages, and only
    /// when it is ready for them: a page that arrived before it waits for pages would occupy the place of a missing
    /// page, and be discarded.
    pub(super) fn serve(
        &mut self,
        generation: Generation,
        sender: Sender,
        page_stream: Channel,
        mailbox: SourceMailbox,
    ) -> std::io::Result<()> {
        let (handle, pushing) = (page_stream.handle(), sender.handle());
        let (readers, counted) = (SourceRam::clone(&self.readers), Arc::clone(&self.counted));
        let (rate, recency) = (Arc::clone(&self.rate), self.recency.clone());
        let hang_up = Arc::clone(&handle);
        let work = move || {
            let ended = run_page_stream(&readers, &recency, sender, page_stream, &counted, &rate);
            hang_up.shutdown();
            let error = (!ended.is_complete()).then(|| crate::chain(&ended));
            info!(%generation, end = crate::chain(&ended), "nothing more is sent over these connections");
            // The driver may be waiting for this thread; in that case it notices the thread's end anyway.
            mailbox.try_put(SourceNotice::ServingEnded { generation, error });
        };
        let thread = thread::Builder::new().name("serve".to_owned()).spawn(work)?;
        self.serving = Some(SenderThreads { handle, sender: pushing, thread: Some(thread) });
        Ok(())
    }

    /// Returns the counts until now, of `remaining_pages` pages in total.
    pub(super) fn statistics(&self, remaining_pages: u64) -> PostCopy {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PostCopy {
            remaining_pages,
            requested_pages: self.before.requested_pages + of(&self.counted.requested),
            pushed_pages: self.before.pushed_pages + of(&self.counted.pushed),
            duration_us: self.before.duration_us + self.began.elapsed().as_micros() as u64,
        }
    }

    /// Returns true if no thread sends although the destination may need pages.
    pub(super) fn is_cut(&self) -> bool {
        let has_ended = |serving: &SenderThreads| serving.thread.as_ref().is_none_or(JoinHandle::is_finished);
        !self.is_complete && self.serving.as_ref().is_none_or(has_ended)
    }
}

/// Ends the page stream, and so the thread that reads from it, if the thread that owns this ends before all pages are
/// pushed.
struct StreamShutdown {
    handle: Arc<dyn ConnectionHandle>,
    all_pushed: bool,
}

impl Drop for StreamShutdown {
    fn drop(&mut self) {
        if !self.all_pushed {
            self.handle.shutdown();
        }
    }
}

/// Removes the pace limit of pushed pages when it is dropped.
struct PaceReset<'a>(&'a RateLimit);

impl Drop for PaceReset<'_> {
    fn drop(&mut self) {
        self.0.set_pace(None);
    }
}

/// Threads that send. Dropping it ends them.
pub(super) struct SenderThreads {
    handle: Arc<dyn ConnectionHandle>,
    sender: SenderHandle,
    thread: Option<JoinHandle<()>>,
}

impl Drop for SenderThreads {
    fn drop(&mut self) {
        self.handle.shutdown();
        self.sender.cancel();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Cause of the end of a set of connections.
#[derive(Debug, thiserror::Error)]
enum ServingEnd {
    #[error(transparent)]
    Requests(#[from] RequestsEnd),
    #[error("the data streams ended")]
    Push(#[from] SendError),
    #[error("cannot start a thread to push pages")]
    Thread(#[from] std::io::Error),
}

impl ServingEnd {
    /// Returns true if the destination has all pages.
    fn is_complete(&self) -> bool {
        matches!(self, Self::Requests(RequestsEnd::Complete))
    }
}

fn run_page_stream(
    readers: &SourceRam,
    recency: &RecentWrites,
    sender: Sender,
    page_stream: Channel,
    counted: &ServingCounts,
    rate: &RateLimit,
) -> ServingEnd {
    let hang_up = page_stream.handle();
    let (mut reader, mut writer) = page_stream.split();
    let remaining = match receive_missing_pages(&mut *reader, readers, recency) {
        Ok(remaining) => remaining,
        Err(ended) => return ended.into(),
    };
    let cancel = sender.handle();
    thread::scope(|scope| {
        let push = || {
            let mut ends = StreamShutdown { handle: hang_up, all_pushed: false };
            let pushed = push(sender, &remaining, counted, rate);
            ends.all_pushed = pushed.is_ok();
            pushed
        };
        let pushing = match thread::Builder::new().name("push".to_owned()).spawn_scoped(scope, push) {
            Ok(pushing) => pushing,
            Err(error) => return error.into(),
        };
        let sent = || {
            counted.requested.fetch_add(1, Ordering::Relaxed);
        };
        let ended: ServingEnd =
            match answer_page_requests(&mut *reader, &mut *writer, readers, &remaining, sent) {
                Ok(never) => match never {},
                Err(ended) => ended.into(),
            };
        cancel.cancel();
        match pushing.join() {
            // The destination has closed the data streams, too.
            _ if ended.is_complete() => ended,
            // This error is why the source ended the page stream.
            Ok(Err(error)) if !matches!(error, SendError::Cancelled) => error.into(),
            _ => ended,
        }
    })
}

/// Pushes the remaining pages, part by part.
fn push(
    mut sender: Sender,
    remaining: &RemainingPages,
    counted: &ServingCounts,
    rate: &RateLimit,
) -> Result<(), SendError> {
    counted.push_policy().reset();
    let mut most_pages = counted.push_policy().policy().pages();
    let _pace_reset = PaceReset(rate);
    while let Some(part) = remaining.take(most_pages) {
        counted.remaining_counter.set(remaining.pages());
        let (pages, began) = (part.pages(), Instant::now());
        let sent = sender.send_round(part).map_err(|interrupted| {
            let InterruptedRound { cause, .. } = *interrupted;
            cause
        })?;
        let CompletedRound { sender: next_sender, owed, stats } = sent;
        sender = next_sender;
        counted.pushed.fetch_add(stats.contents.pages(), Ordering::Relaxed);
        remaining.give_back(&owed);
        let duration_ns = began.elapsed().as_nanos() as u64;
        let (data_pages, wire_bytes) = (stats.contents.data, stats.wire_bytes);
        let part = PushedPart { pages, data_pages, wire_bytes, duration_ns };
        let next = counted.push_policy().decide_on(part);
        most_pages = next.pages;
        rate.set_pace(next.pace_bytes_per_s);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
