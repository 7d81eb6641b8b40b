//! Pre-copy: the decision to stop the guest.
//!
//! Memory is sent in rounds while the guest runs: the first round sends all of it, each later one the pages that were
//! written since. After each round the policy receives one [`RoundObservation`] and decides whether to send another
//! round, to stop the guest and send the remaining pages, or to give up.
//!
//! # Where the rule comes from
//!
//! KVM's rule (Ibrahim et al., *Optimized pre-copy live migration*, section II.A, Algorithm 1, lines 21 and 27–31):
//!
//! ```text
//! bandwidth         ← bytes_transferred / transfer_time
//! expected_downtime ← remaining_modified_data() / bandwidth
//! if expected_downtime < max_downtime then stop and send the rest
//! ```
//!
//! [`PatternPolicy`] keeps its idea and changes five things. The expected downtime has a *fixed part*, because
//! stopping, saving and loading devices and continuing take time even when no page remains; for few remaining pages
//! they are most of it. The bandwidth is not that of the last interval alone.
//!
//! Below the downtime limit rounds continue as long as a round is worth it. There are limits: section II.B shows that
//! a target below what is attainable keeps KVM's loop going for ever.
//!
//! And beyond the downtime limit the policy checks how the guest writes (section VII, Algorithm 2): where a
//! [`Pattern`] shows that rounds do not help, it stops before a limit is reached.
//!
//! [`SlaPolicy`] has a time limit beside the downtime limit, and picks the way that is expected to keep both.
//! [`HybridPolicy`] does not wait for the guest at all: the remaining pages after the first pass are sent in post-copy.
//! With the feature `comparison`, `TargetPolicy` is KVM's rule itself, `RoundCountPolicy` Xen's.
//!
//! # Replay
//!
//! [`TracedStopPolicy`] records the observations of a policy as a [`StopTrace`], which becomes part of the report, for
//! replay ([`crate::trace`]).

#[cfg(feature = "comparison")]
mod classic;
mod forecast;
mod hybrid;
mod pace;
mod pattern;
mod policy;
mod post_copy_start;
mod sla;
mod trace;

#[cfg(feature = "comparison")]
pub use classic::{RoundCountPolicy, TargetPolicy};
pub use forecast::{CostHistory, FixedCost};
pub use hybrid::HybridPolicy;
pub use pattern::{PatternPolicy, Sampling};
pub use policy::{
    Decision, GiveUp, Limit, OnLimit, Pattern, Policy, PreCopyGoals, RoundObservation, ThrottleChange,
};
pub use sla::{AvailableStrategies, ExpectedOutcome, MigrationStrategy, Outlook, SlaPolicy};
pub use trace::{AnyPolicy, PolicyEvent, StopTrace, TracedStopPolicy};

#[cfg(test)]
mod tests;
