//! Messages by which a destination informs its source: those of the driver's effects, and those from the journal of a
//! migration without a driver.

use engine::handover::Step;
use engine::handover::destination::{DestinationEffect, DestinationEvent, destination};
use host::Context;
use proto::message::{Message, PageRequest};
use proto::{Epoch, MigrationId};
use store::journal::State;
use tracing::warn;

use crate::unexpected_page;

/// Facts about this host's copy that messages to the source report.
#[derive(Default)]
pub(super) struct CopyFacts {
    /// Reason for which the copy does not run.
    pub(super) reason: Option<String>,
    /// Duration of `cont`, in microseconds; 0 if another agent sent it.
    pub(super) continue_us: u64,
    /// Time since `cont` had returned, in microseconds; 0 if another agent sent it.
    pub(super) since_us: u64,
    /// The part of `continue_us` after the guest was resumed, in microseconds, if it is known.
    pub(super) resumed_us: Option<u64>,
    /// Processor time of this agent for the migration, in microseconds, if it was measured.
    pub(super) agent_cpu_us: Option<u64>,
    /// A page that was present before it arrived, if there is one.
    pub(super) unexpected_page: Option<PageRequest>,
}

/// Returns the message with which an effect ends the source's doubt; none for any other effect.
pub(super) fn message_of(effect: &DestinationEffect, epoch: Epoch, facts: CopyFacts) -> Option<Message> {
    match effect {
        DestinationEffect::SendRunning => {
            let CopyFacts { continue_us, since_us, resumed_us, agent_cpu_us, unexpected_page, .. } = facts;
            Some(Message::Running { epoch, continue_us, since_us, resumed_us, agent_cpu_us, unexpected_page })
        }
        DestinationEffect::SendRefused => {
            let reason = facts.reason.unwrap_or_else(|| "this copy was destroyed".to_owned());
            Some(Message::Refused { epoch, reason })
        }
        DestinationEffect::SendCrashed => {
            let reason = "its QEMU has ended, and may have run the guest".to_owned();
            Some(Message::Crashed { epoch, reason })
        }
        _ => None,
    }
}

/// Returns this host's answers, as the destination of a migration without a driver, to an event that asks for its state.
/// There are none if the event would change the state: its driver answers then, after the journal has the new state.
pub fn answers_from_journal(context: &Context, id: &MigrationId, event: &DestinationEvent) -> Vec<Message> {
    let record = match context.journal.migration(id) {
        Ok(Some(record)) => record,
        // PREPARED is synced before the source learns of it, and the source asks only a destination that has accepted:
        // this journal has been emptied or made anew. The VM may run here, so REFUSED could make two of it.
        Ok(None) => {
            crate::warn_not_in_journal(id);
            return vec![];
        }
        Err(error) => {
            warn!(migration = %id, error = crate::chain(&error), "cannot read the journal");
            return vec![];
        }
    };
    let State::Destination(state) = &record.state else { return vec![] };
    let step = match destination(&record.terms, state, event) {
        Ok(Step::Transition(step)) if step.to == *state => step,
        _ => return vec![],
    };
    let facts = || CopyFacts {
        reason: record.message.clone(),
        unexpected_page: unexpected_page::of_record(&record),
        ..CopyFacts::default()
    };
    step.effects.iter().filter_map(|effect| message_of(effect, record.terms.epoch(), facts())).collect()
}
