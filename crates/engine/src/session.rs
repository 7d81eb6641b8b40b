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
mod time;

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
pub use time::{Contact, Time};
