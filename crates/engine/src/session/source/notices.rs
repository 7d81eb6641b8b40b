//! Notices from outside before the handover: what each of them means, by what the source waits for.

use proto::message::Message;
use proto::{Epoch, Generation};

use super::SourceSession;
use crate::handover::source::{SourceEvent, SourceState};

/// Expected answer or event of a source when a notice arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceWait {
    /// An answer of the destination on the control stream.
    Answer,
    /// Nothing: it looks for notices between two steps, while the guest runs here.
    NextStep,
    /// The reason of a destination that gives up, after the data streams were lost.
    Reason,
    /// A link that is lost.
    Link,
}

/// Connection on which a message came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MessageOrigin {
    /// The control stream.
    Control,
    /// A connection that was replaced.
    Replaced,
    /// A connection that the destination has opened.
    Destination,
}

/// Notice from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PhaseNotice<'a> {
    /// A message of the destination.
    Message {
        /// Connection of the message.
        origin: MessageOrigin,
        /// The message.
        message: &'a Message,
    },
    /// A question that the destination asks on a connection of its own.
    Asked {
        /// Epoch that the question concerns.
        epoch: Epoch,
    },
    /// The end of a connection.
    Lost {
        /// True if it was the control stream.
        is_control: bool,
    },
    /// The end of post-copy over a set of connections.
    ServingEnded {
        /// Generation of the connections.
        generation: Generation,
    },
    /// The end of an offer to the ownership registry.
    OfferEnded,
    /// A user's command, QEMU's end, an answer of the registry.
    Event(&'a SourceEvent),
}

/// Facts on which the meaning of a notice depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoticeContext {
    /// Expected answer or event.
    pub wait: SourceWait,
    /// Epoch of the migration.
    pub epoch: Epoch,
    /// The present generation of connections.
    pub generation: Generation,
    /// True while the destination's answer about its templates is not complete.
    pub is_querying_templates: bool,
}

/// Meaning of a notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoticeMeaning {
    /// It changes nothing.
    Nothing,
    /// The destination asks for a sign of life, and gets it.
    Ping,
    /// It is the answer that the source waits for.
    Answer,
    /// The destination's question is answered from the journal.
    Question,
    /// The control stream is lost. That is mended before the next round, like any other cut.
    ControlLost,
    /// Nothing will arrive any more: the source waits no longer.
    WaitOver,
    /// The migration ends with this event.
    End(SourceEvent),
}

/// Facts about a round that is being sent, as far as the threads know them that pass on notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptContext {
    /// Epoch of the migration.
    pub epoch: Epoch,
    /// Generation of the round's connections.
    pub generation: Generation,
    /// True if the guest is stopped, or about to be.
    pub is_stopped: bool,
}

/// Returns true if a notice ends a round that is being sent: its [meaning](SourceSession::meaning) before the next step
/// is the end of the migration, or of the connections, and it is no answer that comes while a round is sent.
pub fn interrupts_round(notice: PhaseNotice<'_>, facts: InterruptContext) -> bool {
    // The source waits for answers to discards between two rounds.
    if matches!(notice, PhaseNotice::Message { message: Message::Discarded { .. }, .. }) {
        return false;
    }
    let InterruptContext { epoch, generation, is_stopped } = facts;
    let wait = SourceWait::NextStep;
    let facts = NoticeContext { wait, epoch, generation, is_querying_templates: false };
    matches!(meaning_for(is_stopped, notice, facts), NoticeMeaning::End(_) | NoticeMeaning::ControlLost)
}

impl SourceSession {
    /// Returns the meaning of a notice that arrives before the handover.
    pub fn meaning(&self, notice: PhaseNotice<'_>, facts: NoticeContext) -> NoticeMeaning {
        meaning_for(matches!(self.core.state, SourceState::Stopped { .. }), notice, facts)
    }
}

/// Returns the meaning of a notice while the guest runs, or is stopped.
fn meaning_for(is_stopped: bool, notice: PhaseNotice<'_>, facts: NoticeContext) -> NoticeMeaning {
    match notice {
        // It answers no question of the present connection.
        PhaseNotice::Message { origin: MessageOrigin::Replaced, .. } => NoticeMeaning::Nothing,
        PhaseNotice::Message { origin, message } => meaning_of(message, origin, facts),
        // This concerns another attempt.
        PhaseNotice::Asked { epoch } if epoch != facts.epoch => NoticeMeaning::Nothing,
        PhaseNotice::Asked { .. } if is_stopped => NoticeMeaning::Question,
        // A destination that asks while the guest runs here has lost its state.
        PhaseNotice::Asked { epoch } => NoticeMeaning::End(SourceEvent::Asked { epoch }),
        PhaseNotice::Lost { is_control: true } => match facts.wait {
            SourceWait::Answer => NoticeMeaning::End(SourceEvent::PeerLost),
            SourceWait::NextStep => NoticeMeaning::ControlLost,
            SourceWait::Reason => NoticeMeaning::WaitOver,
            SourceWait::Link => NoticeMeaning::Nothing,
        },
        // The guest is still stopped at the source.
        PhaseNotice::ServingEnded { generation } if generation == facts.generation => {
            NoticeMeaning::End(SourceEvent::PeerLost)
        }
        PhaseNotice::Lost { is_control: false }
        | PhaseNotice::ServingEnded { .. }
        | PhaseNotice::OfferEnded
        | PhaseNotice::Event(SourceEvent::Repeat) => NoticeMeaning::Nothing,
        PhaseNotice::Event(event) => NoticeMeaning::End(event.clone()),
    }
}

/// Returns the meaning of a message on a connection that was not replaced.
fn meaning_of(message: &Message, origin: MessageOrigin, facts: NoticeContext) -> NoticeMeaning {
    match message {
        Message::Ping => NoticeMeaning::Ping,
        Message::Pong => NoticeMeaning::Nothing,
        // An answer that arrives after the source has stopped waiting for it.
        Message::TemplatePages { .. } if !facts.is_querying_templates => NoticeMeaning::Nothing,
        // This concerns another attempt.
        Message::Refused { epoch, .. } if *epoch != facts.epoch => NoticeMeaning::Nothing,
        Message::Refused { epoch, .. } => NoticeMeaning::End(SourceEvent::Refused { epoch: *epoch }),
        // Answers arrive on the connection on which the question was sent.
        _ if origin == MessageOrigin::Control && facts.wait == SourceWait::Answer => NoticeMeaning::Answer,
        _ => NoticeMeaning::End(SourceEvent::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Epoch = Epoch(7);
    const WAITS: [SourceWait; 4] =
        [SourceWait::Answer, SourceWait::NextStep, SourceWait::Reason, SourceWait::Link];

    fn facts(wait: SourceWait) -> NoticeContext {
        NoticeContext { wait, epoch: EPOCH, generation: Generation(3), is_querying_templates: false }
    }

    fn meaning(notice: PhaseNotice<'_>, facts: NoticeContext) -> NoticeMeaning {
        SourceSession::new(SourceState::Prepared { run: true }).meaning(notice, facts)
    }

    /// Returns the meanings of a notice for all that a source may wait for.
    fn meanings(notice: PhaseNotice<'_>) -> [NoticeMeaning; 4] {
        WAITS.map(|wait| meaning(notice, facts(wait)))
    }

    fn message(origin: MessageOrigin, message: &Message) -> PhaseNotice<'_> {
        PhaseNotice::Message { origin, message }
    }

    #[test]
    fn an_answer_is_expected_on_the_control_stream_alone() {
        use NoticeMeaning::{Answer, End, Nothing};

        let failed = || End(SourceEvent::Failed);
        let control = meanings(message(MessageOrigin::Control, &Message::Resumed));
        assert_eq!(control, [Answer, failed(), failed(), failed()]);
        let destination = meanings(message(MessageOrigin::Destination, &Message::Resumed));
        assert_eq!(destination, [failed(), failed(), failed(), failed()]);
        let replaced = meanings(message(MessageOrigin::Replaced, &Message::Resumed));
        assert_eq!(replaced, [Nothing, Nothing, Nothing, Nothing]);
    }

    #[test]
    fn the_loss_of_the_control_stream_means_what_is_awaited() {
        use NoticeMeaning::{ControlLost, End, Nothing, WaitOver};

        let lost = meanings(PhaseNotice::Lost { is_control: true });
        assert_eq!(lost, [End(SourceEvent::PeerLost), ControlLost, WaitOver, Nothing]);
        let other = meanings(PhaseNotice::Lost { is_control: false });
        assert_eq!(other, [Nothing, Nothing, Nothing, Nothing]);
    }

    #[test]
    fn signs_of_life_and_late_answers_change_nothing() {
        let pages = Message::TemplatePages { template: 0, runs: vec![], last: true };
        for wait in WAITS {
            let on_control = |message| self::message(MessageOrigin::Control, message);
            assert_eq!(meaning(on_control(&Message::Ping), facts(wait)), NoticeMeaning::Ping);
            assert_eq!(meaning(on_control(&Message::Pong), facts(wait)), NoticeMeaning::Nothing);
            assert_eq!(meaning(on_control(&pages), facts(wait)), NoticeMeaning::Nothing);
        }
        let querying = NoticeContext { is_querying_templates: true, ..facts(SourceWait::Answer) };
        assert_eq!(meaning(message(MessageOrigin::Control, &pages), querying), NoticeMeaning::Answer);
    }

    #[test]
    fn a_refusal_ends_its_own_attempt_on_whatever_connection() {
        let refused = |epoch| Message::Refused { epoch, reason: String::new() };
        for origin in [MessageOrigin::Control, MessageOrigin::Destination] {
            for wait in WAITS {
                let own = meaning(message(origin, &refused(EPOCH)), facts(wait));
                assert_eq!(own, NoticeMeaning::End(SourceEvent::Refused { epoch: EPOCH }));
                let other = meaning(message(origin, &refused(Epoch(8))), facts(wait));
                assert_eq!(other, NoticeMeaning::Nothing);
            }
        }
    }

    #[test]
    fn questions_are_answered_once_the_guest_is_stopped() {
        let asked = |state, epoch| {
            let notice = PhaseNotice::Asked { epoch };
            SourceSession::new(state).meaning(notice, facts(SourceWait::Answer))
        };
        let (runs, stopped) = (SourceState::Prepared { run: true }, SourceState::Stopped { run: true });
        assert_eq!(asked(stopped.clone(), EPOCH), NoticeMeaning::Question);
        let ended = NoticeMeaning::End(SourceEvent::Asked { epoch: EPOCH });
        assert_eq!(asked(runs.clone(), EPOCH), ended);
        for state in [runs, stopped] {
            assert_eq!(asked(state, Epoch(6)), NoticeMeaning::Nothing);
        }
    }

    #[test]
    fn a_round_ends_with_the_migration_or_its_connections() {
        let refused = Message::Refused { epoch: Epoch(8), reason: String::new() };
        let own_refusal = Message::Refused { epoch: EPOCH, reason: String::new() };
        let (present, former) = (Generation(3), Generation(2));
        // Each with true if it ends a round while the guest runs, and one while it is stopped.
        let table = [
            (message(MessageOrigin::Control, &Message::Ping), [false, false]),
            (message(MessageOrigin::Control, &Message::Resumed), [true, true]),
            (message(MessageOrigin::Replaced, &own_refusal), [false, false]),
            (message(MessageOrigin::Destination, &own_refusal), [true, true]),
            (message(MessageOrigin::Destination, &refused), [false, false]),
            (PhaseNotice::Lost { is_control: true }, [true, true]),
            (PhaseNotice::Lost { is_control: false }, [false, false]),
            (PhaseNotice::Asked { epoch: EPOCH }, [true, false]),
            (PhaseNotice::Asked { epoch: Epoch(6) }, [false, false]),
            (PhaseNotice::ServingEnded { generation: present }, [true, true]),
            (PhaseNotice::ServingEnded { generation: former }, [false, false]),
            (PhaseNotice::OfferEnded, [false, false]),
            (PhaseNotice::Event(&SourceEvent::Repeat), [false, false]),
            (PhaseNotice::Event(&SourceEvent::Cancel), [true, true]),
        ];
        for (notice, expected) in table {
            for (is_stopped, expected) in [false, true].into_iter().zip(expected) {
                let facts = InterruptContext { epoch: EPOCH, generation: present, is_stopped };
                assert_eq!(interrupts_round(notice, facts), expected, "{notice:?}, {is_stopped}");
            }
        }
    }

    #[test]
    fn only_the_present_connections_end_post_copy() {
        for wait in WAITS {
            let ended = |generation| meaning(PhaseNotice::ServingEnded { generation }, facts(wait));
            assert_eq!(ended(Generation(3)), NoticeMeaning::End(SourceEvent::PeerLost));
            assert_eq!(ended(Generation(2)), NoticeMeaning::Nothing);
        }
    }

    #[test]
    fn events_from_outside_end_the_migration_whatever_is_awaited() {
        for wait in WAITS {
            for event in [SourceEvent::Cancel, SourceEvent::QemuDied, SourceEvent::Failed] {
                let ended = meaning(PhaseNotice::Event(&event), facts(wait));
                assert_eq!(ended, NoticeMeaning::End(event));
            }
            for notice in [PhaseNotice::Event(&SourceEvent::Repeat), PhaseNotice::OfferEnded] {
                assert_eq!(meaning(notice, facts(wait)), NoticeMeaning::Nothing);
            }
        }
    }

    /// Otherwise a round during which the destination answers would be taken for a lost link.
    #[test]
    fn an_answer_to_a_discard_interrupts_no_round() {
        let discarded = Message::Discarded { duration_us: 1 };
        for is_stopped in [false, true] {
            let facts = InterruptContext { epoch: EPOCH, generation: Generation(3), is_stopped };
            assert!(!interrupts_round(message(MessageOrigin::Control, &discarded), facts));
            assert!(interrupts_round(message(MessageOrigin::Control, &Message::Resumed), facts));
        }
    }
}
