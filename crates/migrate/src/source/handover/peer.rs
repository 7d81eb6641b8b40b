//! Messages to and from the destination once ownership is at stake: its messages become events.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::source::SourceEvent;
use engine::pre_copy::FixedCost;
use link::transport::{Incoming, TransportError};
use proto::message::Message;
use proto::{Epoch, Purpose};
use tracing::warn;

use super::effects::SourceEffectError;
use crate::source::SourceDriver;
use crate::source::failure::unexpected;
use crate::source::inbox::{Reply, SourceNotice};
use crate::source::phases::ControlStream;
use crate::state_machine::StateMachine;
use api::report::Downtime;
use host::peers;

impl SourceDriver {
    /// Handles a question that the destination asks on a connection of its own, on which it waits for the answer.
    pub(crate) fn asked(&mut self, epoch: Epoch, reply: Reply) {
        self.connections.asker = Some(reply);
        self.take(&SourceEvent::Asked { epoch });
        self.connections.asker = None;
    }

    /// Handles a message. Messages about the handover name their epoch and are valid on every connection.
    pub(super) fn message(&mut self, connection_id: Option<u64>, message: Message) {
        self.session.record_contact(self.clock.now());
        let own = self.terms.epoch();
        let event = match message {
            Message::Running { epoch, continue_us, since_us, resumed_us, agent_cpu_us, unexpected_page } => {
                if epoch == own {
                    self.record_unexpected_page(unexpected_page);
                    self.controls.report(|report| {
                        let known = &mut report.destination.agent_cpu_us;
                        *known = known.or(agent_cpu_us);
                    });
                    self.running(continue_us, since_us, resumed_us);
                    self.report_served();
                    if self.resources.stage.server().is_some() {
                        // The pages' connection may end later than this agent does.
                        self.keep_report();
                    }
                }
                SourceEvent::Running { epoch }
            }
            Message::Incomplete { epoch, generation, continue_us, since_us, resumed_us, unexpected_page } => {
                if epoch == own {
                    self.record_unexpected_page(unexpected_page);
                    // An agent that restarted does not know how many sets of connections there were.
                    self.connections.generation = self.connections.generation.max(generation);
                    self.running(continue_us, since_us, resumed_us);
                }
                SourceEvent::Incomplete { epoch }
            }
            Message::Refused { epoch, reason } => {
                if epoch == own {
                    self.record_reason(&format!("the destination could not run the guest: {reason}"));
                }
                SourceEvent::Refused { epoch }
            }
            Message::Crashed { epoch, reason } => {
                if epoch == own {
                    self.record_reason(&reason);
                }
                SourceEvent::Crashed { epoch }
            }
            message @ Message::FirstFrames { .. } => return self.resources.participants.learn(&message),
            Message::Ready { epoch, incarnation, .. } => SourceEvent::Ready { epoch, incarnation },
            Message::Ask { epoch } => SourceEvent::Asked { epoch },
            Message::Ping => return self.send_to_destination(&Message::Pong),
            Message::Pong => return,
            other => return self.broken_protocol(connection_id, &unexpected(&other).reason),
        };
        match self.feed(&event) {
            Err(SourceEffectError::Illegal(illegal)) => {
                self.broken_protocol(connection_id, &illegal.to_string());
            }
            done => self.done(&event, done),
        }
    }

    /// Handles a violation of the protocol by the destination: its connection is closed, and a migration that is not
    /// committed ends.
    fn broken_protocol(&mut self, connection_id: Option<u64>, what: &str) {
        warn!(migration = %self.terms.migration, what, "the destination violates the protocol");
        if connection_id.is_some_and(|connection_id| self.is_control(connection_id)) {
            self.connections.control = None;
        }
        if self.session.precedes_commit() {
            self.record_reason(what);
            self.take(&SourceEvent::Failed);
        }
    }

    /// Handles RUNNING: computes the parts of the guest's downtime.
    pub(super) fn running(&mut self, continue_us: u64, since_us: u64, resumed_us: Option<u64>) {
        if self.reporter.stop_clock.stopped_at.is_none() || self.reporter.stop_clock.measured.total_us > 0 {
            return;
        }
        self.reporter.stop_clock.measured.total_us = self.since_stop_us().saturating_sub(since_us);
        self.reporter.stop_clock.measured.continue_us = continue_us;
        self.reporter.stop_clock.measured.resumed_us = resumed_us;
        let measured = self.reporter.stop_clock.measured;
        let downtime = Downtime::from_measured(measured);
        let known =
            downtime.stop_us + downtime.last_pages_us + downtime.verify_us + measured.save_to_ready_us;
        // With post-copy, loading includes the wait for some pages.
        if self.resources.stage.server().is_none() {
            let cost = FixedCost {
                stop_ns: downtime.stop_us * 1000,
                save_ns: measured.save_us * 1000,
                load_ns: measured.save_to_ready_us * 1000,
                continue_ns: downtime.total_us.saturating_sub(known) * 1000,
            };
            self.fixed_costs(|history| history.learn(cost));
        }
        self.controls.report(|report| report.downtime = Some(downtime));
        self.telemetry.update(|progress| progress.downtime_us = Some(downtime.total_us));
        self.note("running", "");
        if self.resources.stage.server().is_some() {
            // Post-copy lasts for a while: an agent that restarts needs the report of everything before it.
            self.keep_report();
        }
    }

    /// Records the report as it is now, for an agent that continues the migration.
    pub(super) fn keep_report(&self) {
        let report = self.controls.report(|report| report.clone());
        if let Err(error) = self.context.journal.put_report(&report) {
            warn!(error = crate::chain(&error), "cannot record the report in the journal yet");
        }
    }

    /// Sends a message to the destination, over the control stream or, if that is lost, over a new connection. If
    /// neither works, the state's repetition tries again.
    pub(super) fn send_to_destination(&mut self, message: &Message) {
        if self.connections.control.is_none() {
            match self.connect(Purpose::Handover { migration: self.terms.migration.clone() }) {
                Ok(control) => self.connections.control = Some(control),
                Err(error) => {
                    warn!(to = %self.terms.destination, error = crate::chain(&error), "cannot reach the destination");
                    return;
                }
            }
        }
        let Some(control) = &mut self.connections.control else { return };
        if let Err(error) = control.writer.send(message) {
            let error = crate::chain(&error);
            warn!(to = %self.terms.destination, error, "cannot send to the destination");
            self.control_lost(error);
        }
    }

    /// Opens a connection to the destination; a thread passes its messages to the inbox.
    pub(crate) fn connect(&mut self, purpose: Purpose) -> Result<ControlStream, peers::PeerError> {
        let connection = peers::connect(&self.context, &self.terms.destination, None, purpose)?;
        let handle = connection.handle();
        self.telemetry.count(Arc::clone(&handle));
        let (mut reader, writer) = connection.split();
        let mailbox = self.inbox.mailbox();
        let connection_id = self.inbox.next_connection_id();
        let read = move || loop {
            let notice = match reader.recv(None) {
                Ok(Incoming::Message(message)) => {
                    SourceNotice::Message { connection_id: Some(connection_id), message }
                }
                Ok(Incoming::Blob(_)) => SourceNotice::Lost {
                    connection_id,
                    error: Some("the destination sent device state".to_owned()),
                },
                Err(TransportError::Closed) => SourceNotice::Lost { connection_id, error: None },
                Err(error) => SourceNotice::Lost { connection_id, error: Some(crate::chain(&error)) },
            };
            let last = matches!(notice, SourceNotice::Lost { .. });
            if !mailbox.put(notice) || last {
                return;
            }
        };
        thread::Builder::new().name("control".to_owned()).spawn(read).map_err(peers::PeerError::Thread)?;
        Ok(ControlStream { writer, handle, connection_id })
    }

    /// Informs the destination that this epoch is aborted. If it cannot be reached, a thread retries for a while: the
    /// destination would find out by itself, but later.
    pub(super) fn send_abort(&mut self) {
        let reason = self.telemetry.now().message.unwrap_or_default();
        let message = Message::Abort { epoch: self.terms.epoch(), reason };
        if let Some(mut control) = self.connections.control.take()
            && control.writer.send(&message).and_then(|()| control.writer.finish()).is_ok()
        {
            // The reading thread ends when the destination has closed its side.
            self.connections.aborted_control = Some(control);
            return;
        }
        let (context, terms) = (Arc::clone(&self.context), self.terms.clone());
        let patience = Duration::from_millis(context.config.timeouts.give_up_after_ms);
        let retry = self.retry();
        let send = move || {
            let until = Instant::now() + patience;
            let purpose = Purpose::Handover { migration: terms.migration.clone() };
            while Instant::now() < until {
                let sent = peers::connect(&context, &terms.destination, None, purpose.clone())
                    .is_ok_and(|mut connection| connection.send(&message).is_ok());
                if sent {
                    return;
                }
                thread::sleep(retry);
            }
        };
        if let Err(error) = thread::Builder::new().name("abort".to_owned()).spawn(send) {
            warn!(%error, "cannot notify the destination now that the migration is aborted; it will ask");
        }
    }
}
