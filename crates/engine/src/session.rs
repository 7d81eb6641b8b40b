//! Sessions decide the next step of each role of a migration. One session for each role ([`SourceSession`],
//! [`DestinationSession`]), and their common parts: time as a value, contact with the peer, the queue of requests to
//! the ownership registry.
//!
//! A session accompanies the handover. What a source does before it, in this order, has types of its own, which exist
//! as long as their part of the migration:
//!
//! - [`check_acceptance`]: the destination's acceptance is enough for the goals, or not;
//! - [`StartOrder`], [`DiskRounds`]: rounds of disks alone, before memory;
//! - [`Rounds`]: rounds while the guest runs, discards before the stop ([`PreStopDiscards`]), and the stop itself;
//! - [`ConnectionFacts`], [`Reconnection`]: the connections over which rounds are sent, and new ones after a cut;
//! - [`SwitchoverPlan`]: the remaining pages, and their comparison, while the guest is stopped.
//!
//! After COMMITTED, a [`ServingAttempt`] mends the connections for pages that follow the guest.
//!
//! In the meantime, [`SourceSession::meaning`] is what a notice from outside means, and [`interrupts_round`] is true if it
//! ends a round.
//!
//! At the destination it is the session that admits each message of an arriving VM ([`Admission`]), and
//! [`ControlGeneration`] that ends a generation of connections.
//!
//! The driver reads its clock once for each event and hands the time over with it, so that all decisions about one
//! event have the same time, and can be made again.

mod destination;
mod driver_step;
mod registry_client;
mod source;
mod stop_timeouts;

use std::time::Duration;

pub use destination::{
    Admission, ControlGeneration, DestinationRepetition, DestinationSession, MessageContext, NotReady,
    PayloadKind, RefusedPayload, RepetitionContext, SilenceLimits,
};
pub use driver_step::DriverStep;
pub use registry_client::RegistryClient;
pub use source::{
    AcceptedTerms, ConnectionFacts, DecidedRound, DiskRounds, FailedDiscard, InterruptContext, MessageOrigin,
    NoticeContext, NoticeMeaning, PageSelection, PhaseNotice, PostCopyRequirement, PreStopDiscards,
    ReconnectStep, Reconnection, RoundContext, RoundStep, Rounds, ScanResult, SentRound, ServingAttempt,
    ServingContext, ServingStep, SourceRepetition, SourceSession, SourceWait, StartOrder, SwitchoverKind,
    SwitchoverPlan, UnmetRequirement, check_acceptance, interrupts_round, is_plausible_epoch,
};
pub use stop_timeouts::StopTimeouts;

/// Time since an origin that the driver has chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(Duration);

impl Time {
    /// Returns the time at this distance from the origin.
    pub fn since_origin(distance: Duration) -> Self {
        Self(distance)
    }

    /// Returns the distance from the origin.
    pub fn from_origin(self) -> Duration {
        self.0
    }

    /// Returns the time `span` later.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// Returns the time that has passed since `earlier`; zero if that is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Contact with the peer: the time of its last sign of life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Contact(Time);

impl Contact {
    /// Records a sign of life.
    pub fn record(&mut self, now: Time) {
        self.0 = now;
    }

    /// Returns the time since the last sign of life.
    pub fn silence(&self, now: Time) -> Duration {
        now.since(self.0)
    }

    /// Returns true if there was no sign of life for as long as `limit`. The next call then waits for as long again.
    pub fn take_contact_loss(&mut self, limit: Duration, now: Time) -> bool {
        let is_lost = self.silence(now) >= limit;
        if is_lost {
            self.record(now);
        }
        is_lost
    }
}

#[cfg(test)]
mod tests;
