//! Communication with the source: messages from it become events; answers and questions are sent to it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::session::{Admission, MessageContext, PayloadKind};
use link::transport::Incoming;
use proto::message::{Acceptance, Finding, Message, Severity};
use proto::{Epoch, Purpose};
use tracing::{info, warn};

use super::effects::DestinationEffectError;
use crate::destination::DestinationDriver;
use crate::destination::inbox::DestinationNotice;
use crate::state_machine::StateMachine;
use host::peers;

impl DestinationDriver {
    /// Sends the acceptance to the source.
    pub fn accept(&mut self, acceptance: Acceptance) {
        self.send_message(&Message::Accept(acceptance));
    }

    /// Rejects the migration: sends the reasons to the source, and undoes PREPARED.
    pub fn reject(mut self, findings: Vec<Finding>, largest_epoch: Option<Epoch>) {
        let blockers = findings.iter().filter(|finding| finding.severity == Severity::Blocker);
        let what = blockers.map(|finding| finding.what.as_str()).collect::<Vec<_>>().join("; ");
        warn!(migration = %self.terms.migration, what, "the VM cannot be received");
        self.send_message(&Message::Reject { findings, largest_epoch });
        if *self.session.state() != DestinationState::Idle {
            self.reporter.reason = Some(what);
            self.take(&DestinationEvent::Failed);
            self.run_to_end();
        }
    }

    /// Processes a message of the source.
    pub(super) fn message(&mut self, connection_id: u64, message: Message) {
        let facts = MessageContext {
            is_on_control: self.connections.control.is_connection(connection_id),
            has_missing_pages: self.resources.stage.missing().is_some(),
            epoch: self.terms.epoch(),
        };
        if self.session.admission(&message, facts) == Admission::Unexpected {
            return self.handle_unexpected_message(connection_id, &kind(&message));
        }
        let event = match message {
            Message::Go { epoch, incarnation, run } => {
                self.reporter.go_received_at.get_or_insert_with(Instant::now);
                DestinationEvent::Go { epoch, incarnation, run }
            }
            Message::Abort { epoch, reason } => {
                self.reporter.reason.get_or_insert(reason);
                DestinationEvent::AbortReceived { epoch }
            }
            Message::Inquire { epoch } => DestinationEvent::Asked { epoch },
            Message::Verdict { epoch, verdict } => DestinationEvent::SourceAnswered { epoch, verdict },
            Message::Ping => return self.send_message(&Message::Pong),
            Message::Pong => return,
            Message::Resume => return self.resume(),
            Message::QueryTemplates { hashes } => return self.query_templates(hashes),
            Message::Verify { block, first_chunk, hashes } => {
                return self.verify(block, first_chunk, &hashes);
            }
            Message::Discard { bytes, digest } => {
                return self.begin_payload(PayloadKind::Discard, bytes, None, digest);
            }
            Message::MissingPages { bytes, digest, .. } => {
                return self.begin_payload(PayloadKind::MissingPages, bytes, None, digest);
            }
            message @ Message::Claims { .. } => return self.resources.participants.learn(&message),
            Message::DeviceState { bytes, state_bytes, digest } => {
                return self.begin_payload(PayloadKind::Devices, bytes, Some(state_bytes), digest);
            }
            Message::Frozen { run, .. } => return self.enter_ready(run),
            other => return self.handle_unexpected_message(connection_id, &kind(&other)),
        };
        if !self.admit(&event) {
            return;
        }
        match self.feed(&event) {
            Err(DestinationEffectError::Illegal(illegal)) => {
                self.handle_protocol_violation(connection_id, &illegal.to_string());
            }
            done => self.done(&event, done),
        }
    }

    /// Handles a message that is not valid in this state. It is ignored if it arrives late from a replaced connection.
    /// The connection is closed if the source does not know yet that its migration ended here, for example because this
    /// host was rebooted.
    pub(super) fn handle_unexpected_message(&mut self, connection_id: u64, what: &str) {
        if !self.connections.open.contains_key(&connection_id) {
            return;
        }
        if *self.session.state() == DestinationState::Prepared {
            return self.handle_protocol_violation(
                connection_id,
                &format!("the source sent an unexpected message `{what}`"),
            );
        }
        info!(
            migration = %self.terms.migration,
            what,
            "the source continues a connection that has ended here; it will reconnect"
        );
        self.hang_up(connection_id);
    }

    /// Closes a connection on which the source violates the protocol, and fails the migration if neither host depends
    /// on this copy yet.
    fn handle_protocol_violation(&mut self, connection_id: u64, what: &str) {
        warn!(migration = %self.terms.migration, what, "the source violates the protocol");
        if let Some((_, handle)) = self.connections.open.remove(&connection_id) {
            handle.shutdown();
        }
        if *self.session.state() == DestinationState::Prepared {
            self.fail(what);
        }
    }
    /// Sends a message on all connections of the source, because it is not known which of them the source still reads.
    pub(crate) fn send_message(&mut self, message: &Message) {
        self.connections.open.retain(|_, (writer, _)| writer.send(message).is_ok());
    }

    pub(super) fn ask_source(&mut self) {
        if self.questions.is_asking_source {
            return;
        }
        let (context, terms) = (Arc::clone(&self.context), self.terms.clone());
        let (mailbox, address) = (self.inbox.mailbox(), self.proposal.reply_to.clone());
        let ask = move || {
            let event = match query_source(&context, &terms, &address) {
                Ok(event) => event,
                Err(error) => {
                    warn!(source = %terms.source, error, "the source does not answer");
                    DestinationEvent::PeerLost
                }
            };
            mailbox.put(DestinationNotice::SourceReplied(event));
        };
        self.questions.is_asking_source =
            thread::Builder::new().name("ask-source".to_owned()).spawn(ask).is_ok();
    }
}

/// Returns a message's name in the protocol.
fn kind(message: &Message) -> String {
    let value = serde_json::to_value(message).unwrap_or_default();
    value["type"].as_str().unwrap_or_default().to_owned()
}

/// Asks the source's agent for the state in its journal; it may not know either, and ask back.
fn query_source(
    context: &host::Context,
    terms: &engine::handover::MigrationTerms,
    address: &str,
) -> Result<DestinationEvent, String> {
    let purpose = Purpose::Handover { migration: terms.migration.clone() };
    let patience = Duration::from_millis(context.config.timeouts.peer_silence_ms);
    let mut connection = peers::connect(context, &terms.source, Some(address), purpose)
        .map_err(|error| crate::chain(&error))?;
    connection.send(&Message::Ask { epoch: terms.epoch() }).map_err(|error| crate::chain(&error))?;
    let deadline = Instant::now() + patience;
    loop {
        match connection.recv(Some(deadline)).map_err(|error| crate::chain(&error))? {
            Incoming::Message(Message::Verdict { epoch, verdict }) if epoch == terms.epoch() => {
                return Ok(DestinationEvent::SourceAnswered { epoch, verdict });
            }
            Incoming::Message(Message::Inquire { epoch }) if epoch == terms.epoch() => {
                return Ok(DestinationEvent::Asked { epoch });
            }
            Incoming::Message(_) => {}
            Incoming::Blob(_) => return Err("the source sent device state".to_owned()),
        }
    }
}
