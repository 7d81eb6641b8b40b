//! Messages by which a source answers its destination: those of the driver's effects, and those from the journal of a
//! migration without a driver.

use engine::handover::Step;
use engine::handover::source::{SourceEffect, SourceEvent, source};
use host::Context;
use proto::message::{Message, Verdict};
use proto::{Epoch, MigrationId};
use store::journal::State;
use tracing::warn;

/// Returns the message that an effect sends in answer to the destination's question; none for any other effect.
pub(super) fn message_of(effect: &SourceEffect, epoch: Epoch) -> Option<Message> {
    match effect {
        SourceEffect::Answer(verdict) => Some(Message::Verdict { epoch, verdict: verdict.clone() }),
        SourceEffect::AskDestination => Some(Message::Inquire { epoch }),
        _ => None,
    }
}

/// Returns this host's answer, as the source of a migration without a driver, to the destination's question for its
/// decision.
pub fn answer_from_journal(context: &Context, id: &MigrationId, epoch: Epoch) -> Message {
    let undecided = Message::Verdict { epoch, verdict: Verdict::Undecided };
    let record = match context.journal.migration(id) {
        Ok(Some(record)) => record,
        // PREPARED is journalled before the destination learns of a migration. If the journal does not have it, the peer
        // knows more than this journal, which must have been emptied or made anew. The answer is that nothing is
        // decided.
        Ok(None) => {
            crate::warn_not_in_journal(id);
            return undecided;
        }
        Err(error) => {
            warn!(migration = %id, error = crate::chain(&error), "cannot read the journal");
            return undecided;
        }
    };
    let State::Source(state) = &record.state else { return undecided };
    match source(&record.terms, state, &SourceEvent::Asked { epoch }) {
        Ok(Step::Transition(step)) if step.to == *state => {
            step.effects.iter().find_map(|effect| message_of(effect, epoch)).unwrap_or(undecided)
        }
        _ => undecided,
    }
}
