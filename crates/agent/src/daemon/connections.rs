//! Connections that peers open, and their purposes.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use engine::handover::destination::DestinationEvent;
use link::transport::Channel;
use link::{ConnectedPeer, Incoming, Rejected};
use proto::message::{Message, Verdict};
use proto::{Epoch, Generation, MigrationId, Purpose};
use tracing::{debug, warn};

use super::{Daemon, DriverMailbox};
use host::{link_rate, repointing};
use migrate::destination::{DestinationMailbox, answers_from_journal};
use migrate::source as from;

/// Longest wait for a proposal on a new connection.
const PROPOSAL_PATIENCE: Duration = Duration::from_secs(10);

impl Daemon {
    /// Handles a connection attempt of a peer. Runs on a thread of the connection's own.
    pub(super) fn arrival(self: &Arc<Self>, arrival: Result<ConnectedPeer, Rejected>) {
        let arrival = match arrival {
            Ok(arrival) => arrival,
            Err(rejected) => {
                warn!(error = crate::chain(&rejected), "a connection was refused");
                return;
            }
        };
        if let Err(reason) = self.check_peer_is_participant(&arrival) {
            warn!(from = %arrival.host(), reason, "a connection was refused");
            return arrival.refuse(reason);
        }
        let Some(arrival) = self.context.transport.router.deliver(arrival) else { return };
        match arrival.purpose().clone() {
            Purpose::Registry => match &self.witness {
                Some(witness) => witness.serve(arrival),
                None => arrival.refuse(
                    "this agent is not a witness; check `registry` in the configuration of both hosts",
                ),
            },
            Purpose::Controller => arrival.refuse(
                "this is an agent, not a controller; check `[controller]` in the configuration of your agent",
            ),
            _ if self.witness.is_some() => {
                arrival.refuse("this agent is a witness; VMs cannot be migrated here");
            }
            Purpose::Control { migration, generation } => {
                self.control_stream(arrival, &migration, generation);
            }
            Purpose::Handover { migration } => self.questions(arrival, &migration),
            Purpose::Frames { migration } => {
                self.of_network(arrival, &migration, DestinationMailbox::receive_frames);
            }
            Purpose::Flows { migration } => {
                self.of_network(arrival, &migration, DestinationMailbox::receive_flows);
            }
            Purpose::Redirection { migration } => {
                if let Some(connection) = accepted(arrival) {
                    self.about_redirection(connection, &migration);
                }
            }
            Purpose::Measurement if !self.drivers().is_empty() => {
                arrival.refuse("a migration uses the link of this host; measure it later");
            }
            Purpose::Measurement => {
                if let Some(connection) = accepted(arrival) {
                    link_rate::answer(connection);
                }
            }
            Purpose::Data { .. } => arrival.refuse("no data stream is expected here"),
        }
    }

    /// Checks that the peer is one of the migration's two hosts: any other host with a certificate could make false
    /// statements about it. Hosts that the VM has left before ask about its redirections, too; orders about these are checked
    /// by the records of redirections.
    fn check_peer_is_participant(&self, arrival: &ConnectedPeer) -> Result<(), String> {
        let host = arrival.host();
        let (id, questions) = match arrival.purpose() {
            Purpose::Control { migration, .. }
            | Purpose::Data { migration, .. }
            | Purpose::Frames { migration }
            | Purpose::Flows { migration } => (migration, false),
            Purpose::Handover { migration } => (migration, true),
            Purpose::Redirection { .. } | Purpose::Registry | Purpose::Measurement | Purpose::Controller => {
                return Ok(());
            }
        };
        if i64::try_from(id.epoch.0).is_err() {
            return Err(format!("{} is not a valid epoch", id.epoch));
        }
        let known = self.context.journal.migration(id);
        let known = known.map_err(|_| "the journal of this host cannot be read now; try again".to_owned())?;
        let Some(record) = known else { return Ok(()) };
        let terms = &record.terms;
        let other = if terms.source == self.context.config.host { &terms.destination } else { &terms.source };
        if host == other && (questions || *host == terms.source) {
            Ok(())
        } else {
            Err(format!("{host} has no role in migration {id} that allows this"))
        }
    }

    fn control_stream(self: &Arc<Self>, arrival: ConnectedPeer, id: &MigrationId, generation: Generation) {
        match self.mailbox(id) {
            Some(DriverMailbox::Destination(mailbox)) => {
                if let Some(connection) = accepted(arrival)
                    && let Err(error) = mailbox.connected(connection, Some(generation))
                {
                    warn!(migration = %id, %error, "cannot start a thread for a control stream");
                }
            }
            Some(DriverMailbox::Source(_)) => arrival.refuse(format!("this host is the source of {id}")),
            None if generation != Generation(1) => self.refuse_late_source(arrival, id),
            None => {
                let Some(mut connection) = accepted(arrival) else { return };
                match connection.recv(Some(Instant::now() + PROPOSAL_PATIENCE)) {
                    Ok(Incoming::Message(Message::Propose(proposal))) => {
                        self.proposed(connection, id, *proposal);
                    }
                    Ok(_) => warn!(migration = %id, "the source did not begin with a proposal"),
                    Err(error) => warn!(migration = %id, %error, "received no proposal"),
                }
            }
        }
    }

    /// Refuses a source that reconnects to a migration that is over here. The source may not know that this host has
    /// discarded its copy, and would otherwise try again and again.
    fn refuse_late_source(&self, arrival: ConnectedPeer, id: &MigrationId) {
        let final_reply =
            answers_from_journal(&self.context, id, &DestinationEvent::Asked { epoch: id.epoch });
        match final_reply.into_iter().find(|final_reply| matches!(final_reply, Message::Refused { .. })) {
            Some(refused) => {
                let Some(mut connection) = accepted(arrival) else { return };
                if let Err(error) = connection.send(&refused) {
                    warn!(
                        migration = %id,
                        error = crate::chain(&error),
                        "cannot notify the source that the migration has ended"
                    );
                }
                // If the connection were closed with unread data, the message could be lost.
                let until =
                    Instant::now() + Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
                while connection.recv(Some(until)).is_ok() {}
            }
            None => arrival.refuse(format!("migration {id} is no longer under way here")),
        }
    }

    /// Handles a connection on which the peer of a handover asks questions, or repeats its messages.
    fn questions(&self, arrival: ConnectedPeer, id: &MigrationId) {
        match self.mailbox(id) {
            Some(DriverMailbox::Destination(mailbox)) => {
                if let Some(connection) = accepted(arrival)
                    && let Err(error) = mailbox.connected(connection, None)
                {
                    warn!(migration = %id, %error, "cannot start a thread for a connection");
                }
            }
            _ => {
                if let Some(connection) = accepted(arrival) {
                    self.answer(connection, id);
                }
            }
        }
    }

    /// Handles a connection on which the source sends frames for the guest, or its tracked connections.
    fn of_network(
        &self,
        arrival: ConnectedPeer,
        id: &MigrationId,
        receive: impl FnOnce(&DestinationMailbox, Channel) -> std::io::Result<()>,
    ) {
        let Some(DriverMailbox::Destination(mailbox)) = self.mailbox(id) else {
            return arrival.refuse(format!("nothing is expected for the network of {id}"));
        };
        if let Some(connection) = accepted(arrival)
            && let Err(error) = receive(&mailbox, connection)
        {
            warn!(migration = %id, %error, "cannot start a thread for the guest's network");
        }
    }

    /// Answers questions about a redirection, and obeys orders, until the peer closes the connection.
    fn about_redirection(&self, mut connection: Channel, id: &MigrationId) {
        let peer = connection.peer().clone();
        let mut until = Some(Instant::now() + PROPOSAL_PATIENCE);
        while let Ok(Incoming::Message(message)) = connection.recv(until) {
            let Some(answer) = repointing::answer(&self.context, &peer, id, message) else { return };
            if let Err(error) = connection.send(&answer) {
                debug!(migration = %id, error = crate::chain(&error), "cannot answer about a redirection");
                return;
            }
            // The next order comes when the guest runs at its new place.
            until = None;
        }
    }

    /// Answers questions until the peer closes the connection.
    fn answer(&self, mut connection: Channel, id: &MigrationId) {
        loop {
            let message = match connection.recv(None) {
                Ok(Incoming::Message(message)) => message,
                Ok(Incoming::Blob(_)) => return,
                Err(error) => {
                    debug!(migration = %id, %error, "end of a query connection");
                    return;
                }
            };
            let Some(answers) = self.answers(id, message) else {
                warn!(
                    migration = %id,
                    peer = %connection.peer(),
                    "closed a connection: the message is not a query"
                );
                return;
            };
            for answer in answers {
                if connection.send(&answer).is_err() {
                    return;
                }
            }
        }
    }

    /// Returns the answers to a message; none if the message is not a question.
    fn answers(&self, id: &MigrationId, message: Message) -> Option<Vec<Message>> {
        Some(match message {
            Message::Ping => vec![Message::Pong],
            Message::Ask { epoch } => vec![self.verdict(id, epoch)],
            Message::Go { epoch, incarnation, run } => {
                answers_from_journal(&self.context, id, &DestinationEvent::Go { epoch, incarnation, run })
            }
            Message::Inquire { epoch } => {
                answers_from_journal(&self.context, id, &DestinationEvent::Asked { epoch })
            }
            Message::Running { .. }
            | Message::Refused { .. }
            | Message::Crashed { .. }
            | Message::Ready { .. } => {
                self.pass_on(id, message);
                vec![]
            }
            Message::Abort { .. } | Message::Pong => vec![],
            _ => return None,
        })
    }

    fn pass_on(&self, id: &MigrationId, message: Message) {
        if let Some(DriverMailbox::Source(mailbox)) = self.mailbox(id) {
            mailbox.put(from::SourceNotice::Message { connection_id: None, message });
        }
    }

    /// Returns the decision of this host as the source, from its driver or the journal.
    fn verdict(&self, id: &MigrationId, epoch: Epoch) -> Message {
        if let Some(DriverMailbox::Source(mailbox)) = self.mailbox(id) {
            let (reply, answer) = mpsc::sync_channel(1);
            if mailbox.put(from::SourceNotice::Asked { epoch, reply }) {
                let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
                let undecided = Message::Verdict { epoch, verdict: Verdict::Undecided };
                return answer.recv_timeout(patience).unwrap_or(undecided);
            }
        }
        from::answer_from_journal(&self.context, id, epoch)
    }
}

fn accepted(arrival: ConnectedPeer) -> Option<Channel> {
    match arrival.accept() {
        Ok(connection) => Some(connection.into()),
        Err(error) => {
            warn!(error = crate::chain(&error), "a connection was lost");
            None
        }
    }
}
