//! Stages of a VM's arrival, one type each. A stage owns what exists in it, neither before nor after it, and is moved
//! into the next one. Its way back returns what it owns.
//!
//! ```text
//!            ┌─load─► Idle     (the device state is loaded, and no pages are missing)
//! Receiving ─┴─place─► Placing ─finish─► Placed ─► Idle     (post-copy)
//!     │                   │                │
//!     └───────────── abandon ──────────────┘
//!                         │
//!                         ▼
//!     AbandonedArrival ─end─► CopyDestroyed, once QEMU has ended
//! ```

use std::mem;

use link::transport::Channel;

use super::discarding::DiscardedPages;
use super::participants::Leftover;
use super::post_copy_receiver::PostCopyReceiver;
use super::receiving::PageReceiver;

/// Pages are received while the guest is at the source.
pub(super) struct Receiving {
    pub(super) pages: PageReceiver,
    /// Pages that were discarded before the guest was stopped.
    pub(super) discarded: DiscardedPages,
    /// The source's connection for page requests, until missing pages are placed.
    page_stream: Option<Channel>,
}

impl Receiving {
    /// Begins with a QEMU that was started.
    pub(super) fn new(pages: PageReceiver) -> Self {
        Self { pages, discarded: DiscardedPages::default(), page_stream: None }
    }

    /// Moves on: pages are missing for a guest that is about to run here. Returns the connection for page requests,
    /// too, if the source has made it.
    pub(super) fn place(self, missing: PostCopyReceiver) -> (Placing, Option<Channel>) {
        (Placing { pages: self.pages, missing }, self.page_stream)
    }

    /// Moves on: all pages have arrived. The caller has [shut](PageReceiver::shut) them.
    pub(super) fn end(self) {
        self.pages.end();
    }

    /// Returns what ends with the copy.
    fn abandon(self) -> AbandonedArrival {
        AbandonedArrival { missing: None, pages: Some(self.pages), page_stream: self.page_stream }
    }
}

/// Missing pages are placed as they arrive; the guest may run here.
pub(super) struct Placing {
    pub(super) pages: PageReceiver,
    pub(super) missing: PostCopyReceiver,
}

impl Placing {
    /// Moves on: all pages are present. Returns the receiver of pages, which the caller ends.
    fn finish(self) -> (Placed, PageReceiver) {
        (Placed { missing: self.missing }, self.pages)
    }

    /// Returns what ends with the copy.
    fn abandon(self) -> AbandonedArrival {
        AbandonedArrival { missing: Some(self.missing), pages: Some(self.pages), page_stream: None }
    }
}

/// All pages are present; the waits for them in QEMU have to end.
pub(super) struct Placed {
    pub(super) missing: PostCopyReceiver,
}

impl Placed {
    /// Returns what ends with the copy.
    fn abandon(self) -> AbandonedArrival {
        AbandonedArrival { missing: Some(self.missing), pages: None, page_stream: None }
    }
}

/// Parts that a stage has owned, of a copy that is about to be discarded.
#[derive(Default)]
pub(super) struct AbandonedArrival {
    missing: Option<PostCopyReceiver>,
    pages: Option<PageReceiver>,
    page_stream: Option<Channel>,
}

impl AbandonedArrival {
    /// Ends all threads that receive pages. Returns the waits for missing pages, which exist until QEMU has ended.
    pub(super) fn end(self) -> Option<PostCopyReceiver> {
        let Self { mut missing, pages, page_stream } = self;
        if let Some(missing) = &mut missing {
            missing.hang_up();
        }
        if let Some(pages) = pages {
            pages.end();
        }
        drop(page_stream);
        missing
    }
}

/// Stage of an arrival.
#[derive(Default)]
pub(super) enum ArrivalStage {
    /// Nothing is received: QEMU was not started, or was found by this agent, or has all pages.
    #[default]
    Idle,
    /// Pages are received while the guest is at the source.
    Receiving(Receiving),
    /// Missing pages are placed; the guest may run here.
    Placing(Placing),
    /// All pages are present; the waits for them in QEMU have to end.
    Placed(Placed),
    /// All pages that an agent before this one waited for are present, and the waits have ended. Unlike in
    /// [`Idle`](Self::Idle), it is not reported yet that post-copy is complete.
    FoundComplete,
    /// The copy is discarded; this is what the participants could not remove from this host.
    CopyDestroyed(Vec<Leftover>),
}

impl ArrivalStage {
    /// Returns the receiver of pages, while pages are received.
    pub(super) fn pages(&self) -> Option<&PageReceiver> {
        match self {
            Self::Receiving(receiving) => Some(&receiving.pages),
            Self::Placing(placing) => Some(&placing.pages),
            _ => None,
        }
    }

    /// Returns the missing pages, if the guest runs here, or will run, before all of its pages have arrived.
    pub(super) fn missing(&self) -> Option<&PostCopyReceiver> {
        match self {
            Self::Placing(placing) => Some(&placing.missing),
            Self::Placed(placed) => Some(&placed.missing),
            _ => None,
        }
    }

    /// Returns true if pages were missing, and all of them are present now.
    pub(super) fn is_complete(&self) -> bool {
        matches!(self, Self::FoundComplete)
            || self.missing().is_some_and(|missing| missing.remaining_pages() == 0)
    }

    /// Forgets the discarded pages: the source sends all of memory again, in rounds or after the guest.
    pub(super) fn forget_discarded(&mut self) {
        if let Self::Receiving(receiving) = self {
            receiving.discarded.forget();
        }
    }

    /// Keeps the source's connection for page requests until missing pages are placed. Returns it if they are already.
    pub(super) fn keep_page_stream(&mut self, stream: Channel) -> Option<Channel> {
        match self {
            Self::Receiving(receiving) => {
                receiving.page_stream = Some(stream);
                None
            }
            _ => Some(stream),
        }
    }

    /// Takes the stage if it is [`Receiving`], to move on from it.
    pub(super) fn take_receiving(&mut self) -> Option<Receiving> {
        match mem::take(self) {
            Self::Receiving(receiving) => Some(receiving),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Moves on from [`Placing`], if this is the stage: all pages are present. Returns the receiver of pages, which the
    /// caller ends.
    pub(super) fn finish_placing(&mut self) -> Option<PageReceiver> {
        match mem::take(self) {
            Self::Placing(placing) => {
                let (placed, pages) = placing.finish();
                *self = Self::Placed(placed);
                Some(pages)
            }
            other => {
                *self = other;
                None
            }
        }
    }

    /// Goes back from whichever stage this is, and returns what it owned.
    pub(super) fn abandon(&mut self) -> AbandonedArrival {
        match mem::take(self) {
            Self::Receiving(receiving) => receiving.abandon(),
            Self::Placing(placing) => placing.abandon(),
            Self::Placed(placed) => placed.abandon(),
            Self::Idle | Self::FoundComplete | Self::CopyDestroyed(_) => AbandonedArrival::default(),
        }
    }

    /// Takes what a discarded copy has left on this host.
    pub(super) fn take_leftovers(&mut self) -> Vec<Leftover> {
        match mem::take(self) {
            Self::CopyDestroyed(left) => left,
            other => {
                *self = other;
                Vec::new()
            }
        }
    }
}

#[cfg(test)]
mod tests;
