//! Stages of a migration at the source, one type each. A stage owns what exists in it, neither before nor after it, and
//! is moved into the next one. Its way back returns what it owns.
//!
//! ```text
//! Proposed ─accept─► Accepted ─stream─► Streaming ─stop─► Stopped ─commit─► Committed ─serve─► Serving
//!     │                  │                  │                │                  │   ◄──end──      │
//!     └──────────────────┴──────────────────┴── roll_back ───┴──────────────────┴─────────────────┘
//!                                               │
//!                                               ▼
//!                        RolledBack ─end─► Undone, once the guest continues here
//! ```
//!
//! The phases own their stage. When they have ended, the driver has it as a [`SourceStage`] until the handover is
//! over: then an event decides whether it goes on or back.

use std::mem;
use std::sync::Arc;

use ::memory::RecentWrites;

use super::payload::Payload;
use super::post_copy_server::PostCopyServer;
use super::pressure::PressureMeter;
use super::reductions::ActiveReductions;
use super::reductions::references::ActiveReferences;
use super::requested_discards::RequestedDiscards;
use host::ram::JournalledRegion;

/// The migration is proposed, and nothing is known of the destination.
#[derive(Default)]
pub(super) struct Proposed {
    /// Measurement of what copying costs the guest, if the host can measure it.
    pub(super) pressure: Option<PressureMeter>,
}

impl Proposed {
    /// Moves on: the destination has accepted, and `payload` is to be sent.
    pub(super) fn accept(self, payload: Payload) -> Accepted {
        Accepted { payload, reductions: ActiveReductions::default(), pressure: self.pressure }
    }

    /// Returns what has to be undone: nothing.
    pub(super) fn roll_back(self) -> RolledBack {
        // To measure changes nothing on this host.
        drop(self.pressure);
        RolledBack::default()
    }
}

/// The destination has accepted; the participants are being prepared, and no pages are sent yet.
pub(super) struct Accepted {
    /// Content of the participants for the streams.
    pub(super) payload: Payload,
    /// Reductions of the data that is sent; none before they are started.
    pub(super) reductions: ActiveReductions,
    pressure: Option<PressureMeter>,
}

impl Accepted {
    /// Moves on: the streams are open.
    pub(super) fn stream(self) -> Streaming {
        let Self { payload, reductions, pressure } = self;
        let (discards, writes) = (RequestedDiscards::new(), RecentWrites::default());
        Streaming { payload, reductions, records: StreamingRecords { pressure, discards, writes } }
    }

    /// Returns what has to be undone.
    pub(super) fn roll_back(self) -> RolledBack {
        let Self { payload, reductions, .. } = self;
        RolledBack { server: None, payload: Some(payload), reductions }
    }
}

/// Rounds are sent while the guest runs.
pub(super) struct Streaming {
    pub(super) payload: Payload,
    pub(super) reductions: ActiveReductions,
    pub(super) records: StreamingRecords,
}

impl Streaming {
    /// Moves on: the guest is stopped. What was recorded until then is of use for the last pages only.
    pub(super) fn stop(self) -> (Stopped, StreamingRecords) {
        let Self { payload, reductions, records } = self;
        (Stopped { payload, reductions, server: None }, records)
    }

    /// Returns what has to be undone.
    pub(super) fn roll_back(self) -> RolledBack {
        let Self { payload, reductions, .. } = self;
        RolledBack { server: None, payload: Some(payload), reductions }
    }
}

/// Records of a guest that runs while rounds are sent.
pub(super) struct StreamingRecords {
    /// Measurement of what copying costs the guest, if the host can measure it.
    pub(super) pressure: Option<PressureMeter>,
    /// Pages that the destination was asked to discard.
    pub(super) discards: RequestedDiscards,
    /// The guest's recent writes, recorded if post-copy is possible.
    pub(super) writes: RecentWrites,
}

/// The guest is stopped, and it is not decided yet which host runs it.
pub(super) struct Stopped {
    pub(super) payload: Payload,
    pub(super) reductions: ActiveReductions,
    /// Post-copy server, if pages were announced that are sent after the guest.
    pub(super) server: Option<PostCopyServer>,
}

impl Stopped {
    /// Moves on: COMMITTED is in the journal.
    fn commit(self) -> SourceStage {
        let Self { payload, reductions, server } = self;
        let committed = Committed { payload, reductions };
        match server {
            Some(server) => SourceStage::Serving(committed.serve(server)),
            None => SourceStage::Committed(committed),
        }
    }

    /// Returns what has to be undone.
    fn roll_back(self) -> RolledBack {
        let Self { payload, reductions, server } = self;
        RolledBack { server, payload: Some(payload), reductions }
    }
}

/// COMMITTED is in the journal. The destination needs no page of this host.
pub(super) struct Committed {
    payload: Payload,
    reductions: ActiveReductions,
}

impl Committed {
    /// Moves on: the destination's guest needs pages.
    fn serve(self, server: PostCopyServer) -> Serving {
        Serving { server, committed: Some(self) }
    }

    /// Returns what has to be undone if the VM is returned to this host.
    fn roll_back(self) -> RolledBack {
        RolledBack { server: None, payload: Some(self.payload), reductions: self.reductions }
    }

    /// Returns the number of the first block behind memory, and the references of the migration, if there are any.
    pub(super) fn references(&self) -> Option<(usize, Arc<ActiveReferences>)> {
        Some((self.payload.ram_blocks(), self.reductions.find()?))
    }
}

/// COMMITTED is in the journal, and the destination's guest may need pages of this host.
pub(super) struct Serving {
    server: PostCopyServer,
    /// None if an agent before this one has sent the rounds.
    committed: Option<Committed>,
}

impl Serving {
    /// Moves on: the destination has all pages, and the server's threads end.
    fn end(self) -> SourceStage {
        drop(self.server);
        self.committed.map_or(SourceStage::Initial, SourceStage::Committed)
    }

    /// Returns what has to be undone if the VM is returned to this host.
    fn roll_back(self) -> RolledBack {
        let before = self.committed.map(Committed::roll_back).unwrap_or_default();
        RolledBack { server: Some(self.server), ..before }
    }
}

/// Parts that a stage has owned, on the way back. The guest continues here before they end.
#[derive(Default)]
pub(super) struct RolledBack {
    server: Option<PostCopyServer>,
    payload: Option<Payload>,
    reductions: ActiveReductions,
}

impl RolledBack {
    /// Ends all parts. The server ends first: its threads read the payload's blocks.
    pub(super) fn end(self) {
        let Self { server, payload, reductions } = self;
        drop(server);
        drop(payload);
        drop(reductions);
    }
}

/// Stage of a migration while no phase runs.
#[derive(Default)]
pub(super) enum SourceStage {
    /// Nothing exists: the phases have not ended, or an agent before this one ran them.
    #[default]
    Initial,
    /// The phases have failed while the guest ran.
    RolledBack(RolledBack),
    /// The phases have ended, or failed, while the guest was stopped. If QEMU is lost, the destination may have the
    /// only copy of the guest.
    Stopped(Stopped),
    /// COMMITTED is in the journal.
    Committed(Committed),
    /// The destination's guest may need pages of this host.
    Serving(Serving),
    /// Memory that an agent before this one has left to send, while it cannot be read.
    Unread(Vec<JournalledRegion>),
    /// The participants have undone their changes of this host, except for these, which have to be undone again.
    Undone(Vec<&'static str>),
}

impl SourceStage {
    /// Creates the stage of an agent that sends the pages which an agent before it has left.
    pub(super) fn resumed(server: PostCopyServer) -> Self {
        Self::Serving(Serving { server, committed: None })
    }

    /// Returns the post-copy server, if there are pages that the destination's guest may need.
    pub(super) fn server(&self) -> Option<&PostCopyServer> {
        match self {
            Self::Stopped(stopped) => stopped.server.as_ref(),
            Self::Serving(serving) => Some(&serving.server),
            _ => None,
        }
    }

    /// Returns the post-copy server like [`server`](Self::server).
    pub(super) fn server_mut(&mut self) -> Option<&mut PostCopyServer> {
        match self {
            Self::Stopped(stopped) => stopped.server.as_mut(),
            Self::Serving(serving) => Some(&mut serving.server),
            _ => None,
        }
    }

    /// Moves on from [`Stopped`], if this is the stage: COMMITTED is in the journal.
    pub(super) fn commit(&mut self) {
        *self = match mem::take(self) {
            Self::Stopped(stopped) => stopped.commit(),
            other => other,
        };
    }

    /// Ends the post-copy server, if there is one.
    pub(super) fn end_serving(&mut self) {
        *self = match mem::take(self) {
            Self::Serving(serving) => serving.end(),
            Self::Stopped(stopped) => Self::Stopped(Stopped { server: None, ..stopped }),
            other => other,
        };
    }

    /// Takes the memory that an agent before this one has left to send, if it was not read yet.
    pub(super) fn take_unread(&mut self) -> Option<Vec<JournalledRegion>> {
        match mem::take(self) {
            Self::Unread(regions) => Some(regions),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Goes back from whichever stage this is, and returns what it owned.
    pub(super) fn roll_back(&mut self) -> RolledBack {
        match mem::take(self) {
            Self::RolledBack(rolled_back) => rolled_back,
            Self::Stopped(stopped) => stopped.roll_back(),
            Self::Committed(committed) => committed.roll_back(),
            Self::Serving(serving) => serving.roll_back(),
            Self::Initial | Self::Unread(_) | Self::Undone(_) => RolledBack::default(),
        }
    }

    /// Returns the changes of this host that have to be undone again, for users; none in a stage that did not go back.
    pub(super) fn remaining(&self) -> &[&'static str] {
        if let Self::Undone(remaining) = self { remaining } else { &[] }
    }

    /// Ends the stage of a migration that is over; returns what was sent to a host that has the VM. The result of
    /// undoing stays.
    pub(super) fn finish(&mut self) -> Option<Committed> {
        self.commit();
        self.end_serving();
        match mem::take(self) {
            Self::Committed(committed) => Some(committed),
            undone @ Self::Undone(_) => {
                *self = undone;
                None
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
