//! Connections to the destination during the phases, and the messages on them.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::handover::source::SourceEvent;
use engine::session::{
    ConnectionFacts, NoticeContext, NoticeMeaning, ReconnectStep, Reconnection, SourceWait,
};
use link::transport::{BulkSettings, MessageSender, TransportError};
use proto::Purpose;
use proto::message::Message;
use tracing::warn;

use super::SourceDriver;
use super::failure::{Failure, unexpected};
use super::inbox::SourceNotice;
use super::payload::Payload;
use super::phases::ControlStream;
use super::streams::{OpenedStreams, Streams};
use api::progress::Phase;
use host::peers;

impl SourceDriver {
    pub(super) fn connect_control(&mut self) -> Result<ControlStream, peers::PeerError> {
        let migration = self.terms.migration.clone();
        self.connect(Purpose::Control { migration, generation: self.connections.generation })
    }

    /// Opens the data streams, and the connection for page requests if post-copy was proposed.
    pub(super) fn connect_streams(&self) -> Result<OpenedStreams, peers::PeerError> {
        // The number in the proposal: an agent that restarts may have another configuration.
        let streams = self
            .agreement
            .proposal
            .as_ref()
            .map_or(self.controls.goals().settings.streams, |proposal| proposal.streams);
        let (context, to) = (&self.context, &self.terms.destination);
        let stall = Duration::from_millis(context.config.timeouts.stall_ms);
        let settings = BulkSettings { stall, limit: Some(Arc::clone(&self.controls.rate)) };
        let data = (0..streams).map(|stream| {
            let data = peers::open_bulk(context, to, self.stream_purpose(stream), &settings)?;
            self.telemetry.count(Arc::clone(&data.handle));
            Ok(data)
        });
        let data = data.collect::<Result<_, _>>()?;
        let mut page_stream = None;
        if self.agreement.proposal.as_ref().is_some_and(|proposal| proposal.post_copy) {
            let opened = peers::open_page_requests(context, to, self.stream_purpose(streams), stall)?;
            self.telemetry.count(opened.handle());
            page_stream = Some(opened);
        }
        Ok(OpenedStreams { data, page_stream })
    }

    fn stream_purpose(&self, stream: u16) -> Purpose {
        let (migration, generation) = (self.terms.migration.clone(), self.connections.generation);
        Purpose::Data { migration, generation, stream }
    }

    /// Makes a new set of connections after a cut, and retries until the configured time is over. The guest keeps
    /// running.
    pub(super) fn reconnect(&mut self, payload: &Payload, cause: String) -> Result<Streams, Failure> {
        self.phase(Phase::Reconnecting);
        self.note("link-lost", cause);
        // Nothing is sent in the meantime, no matter how slow the guest is.
        self.lift_cpu_throttle();
        let timeouts = &self.context.config.timeouts;
        let give_up_after = Duration::from_millis(timeouts.give_up_after_ms);
        let (now, pause) = (self.clock.read(), self.retry());
        let mut reconnection = Reconnection::begin(self.connection_facts(), give_up_after, pause, now);
        loop {
            match reconnection.next_step() {
                ReconnectStep::AwaitReason(wait) => {
                    self.await_reason(wait)?;
                    self.connections.control = None;
                }
                ReconnectStep::Connect(generation) => {
                    self.connections.generation = generation;
                    match self.resume_streams() {
                        Ok(opened) => return self.start_reconnected(payload, opened),
                        Err(failure) if reconnection.tries_again(&failure.event, self.clock.read()) => {
                            warn!(reason = failure.reason, "not reconnected yet");
                        }
                        Err(failure) => return Err(failure),
                    }
                }
                ReconnectStep::Pause(pause) => {
                    self.connections.control = None;
                    self.pause(pause)?;
                }
            }
        }
    }

    fn start_reconnected(&mut self, payload: &Payload, opened: OpenedStreams) -> Result<Streams, Failure> {
        self.note("reconnected", format!("generation {}", self.connections.generation));
        self.controls.report(|report| report.reconnections += 1);
        self.telemetry.update(|progress| progress.reconnections += 1);
        self.phase(Phase::PreCopy);
        self.start_sender(payload, opened)
    }

    /// Waits for the reason of a destination that gives up: it sends the reason on the control stream, and its data
    /// streams may end a moment before. An unreachable destination sends nothing.
    fn await_reason(&mut self, patience: Duration) -> Result<(), Failure> {
        let until = Instant::now() + patience;
        while let Some(notice) = self.inbox.wait(until) {
            if self.handle_notice(notice, SourceWait::Reason)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn resume_streams(&mut self) -> Result<OpenedStreams, Failure> {
        let control =
            self.connect_control().map_err(|error| Failure::peer("cannot reach the destination", &error))?;
        self.connections.control = Some(control);
        self.send_message(&Message::Resume)?;
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        match self.receive_message(Instant::now() + patience)? {
            Message::Resumed => {}
            other => return Err(unexpected(&other)),
        }
        self.connect_streams().map_err(|error| Failure::peer("cannot open the data streams", &error))
    }

    pub(super) fn send_message(&mut self, message: &Message) -> Result<(), Failure> {
        self.send("cannot send to the destination", |writer| writer.send(message))
    }

    /// Runs `send` on the control stream's writer; `doing` begins the error message.
    pub(super) fn send(
        &mut self,
        doing: &str,
        send: impl FnOnce(&mut dyn MessageSender) -> Result<(), TransportError>,
    ) -> Result<(), Failure> {
        let Some(control) = &mut self.connections.control else { return Err(self.control_loss()) };
        let connection_id = control.connection_id;
        send(&mut *control.writer).map_err(|error| self.send_failure(connection_id, doing, &error))
    }

    /// Returns the failure behind a failed write. A connection that no longer accepts data has ended for its reading
    /// thread too, whose last notice is about to arrive. That notice is reported instead of the write's error, which
    /// may be only its consequence: of a peer's violation of the protocol, or of its last message.
    fn send_failure(&mut self, connection_id: u64, doing: &str, error: &TransportError) -> Failure {
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        let silence = Instant::now() + patience;
        // While the guest is stopped, the write had a deadline, which holds for its error too.
        let written_by = self.connections.control.as_ref().and_then(|control| control.writer.deadline());
        let deadline = written_by.map_or(silence, |written_by| silence.min(written_by));
        while let Some(notice) = self.inbox.wait(deadline) {
            match notice {
                SourceNotice::Message { message: Message::Ping, .. } => {}
                SourceNotice::Lost { connection_id: lost, error: None } if lost == connection_id => break,
                notice => {
                    if let Err(failure) = self.handle_notice(notice, SourceWait::Answer) {
                        return failure;
                    }
                }
            }
        }
        Failure::peer(doing, error)
    }

    /// Waits for the destination's next message.
    pub(super) fn receive_message(&mut self, deadline: Instant) -> Result<Message, Failure> {
        loop {
            if let Some(notice) = self.inbox.wait(deadline)
                && let ControlFlow::Break(Some(message)) = self.handle_notice(notice, SourceWait::Answer)?
            {
                return Ok(message);
            }
            // This holds no matter how many other messages arrive.
            if Instant::now() >= deadline {
                return Err(Failure::new(SourceEvent::PeerSilent, "the destination does not answer"));
            }
        }
    }

    /// Waits for some time, and handles the notices that arrive in it.
    pub(super) fn pause(&mut self, pause: Duration) -> Result<(), Failure> {
        let until = Instant::now() + pause;
        while let Some(notice) = self.inbox.wait(until) {
            // No notice ends the pause, unless it ends the migration.
            let _: ControlFlow<_> = self.handle_notice(notice, SourceWait::Link)?;
        }
        Ok(())
    }

    /// Handles the notices that arrived while the guest runs. The end of the control stream is then like any other cut:
    /// it is mended before the next round is sent ([`SourceDriver::send_scanned`]).
    pub(super) fn handle_notices(&mut self) -> Result<(), Failure> {
        while let Some(notice) = self.inbox.waiting() {
            let _: ControlFlow<_> = self.handle_notice(notice, SourceWait::NextStep)?;
        }
        Ok(())
    }

    /// Handles the notices that arrived. Fails without a control stream: the guest is stopped, or about to be.
    pub(super) fn handle_last_notices(&mut self) -> Result<(), Failure> {
        self.handle_notices()?;
        if self.connections.control.is_none() { Err(self.control_loss()) } else { Ok(()) }
    }

    /// Returns the failure for a lost control stream.
    pub(super) fn control_loss(&self) -> Failure {
        let why = self.connections.control_lost.as_deref().unwrap_or("it was ended on this side");
        Failure::new(SourceEvent::PeerLost, format!("the control stream was lost: {why}"))
    }

    /// Handles notices after a broken round: those that end the migration are reported instead of the cut, which may be
    /// only their consequence.
    pub(super) fn handle_notices_after_cut(&mut self, cause: &::memory::SendError) -> Result<(), Failure> {
        let connection = cause.is_connection() || matches!(cause, ::memory::SendError::Cancelled);
        while let Some(notice) = self.inbox.waiting() {
            let _: ControlFlow<_> = self.handle_notice(notice, SourceWait::Link)?;
        }
        if connection { Ok(()) } else { Err(Failure::local("cannot send the guest's memory", cause)) }
    }

    /// Returns the state of the connections.
    pub(super) fn connection_facts(&self) -> ConnectionFacts {
        ConnectionFacts {
            has_control: self.connections.control.is_some(),
            generation: self.connections.generation,
        }
    }

    /// Returns true if `connection_id` is the present control connection.
    pub(super) fn is_control(&self, connection_id: u64) -> bool {
        self.connections.control.as_ref().is_some_and(|control| control.connection_id == connection_id)
    }

    /// Handles a notice during the phases. Breaks when the wait is over; with the message if that is the answer that
    /// the source waits for.
    fn handle_notice(
        &mut self,
        notice: SourceNotice,
        wait: SourceWait,
    ) -> Result<ControlFlow<Option<Message>>, Failure> {
        match (self.meaning(&notice, wait), notice) {
            (NoticeMeaning::Nothing, SourceNotice::OfferEnded) => self.registry.is_offering = false,
            (NoticeMeaning::Ping, _) => {
                // If that fails, the reading thread reports the loss of the connection, which may be no end.
                if let Some(control) = &mut self.connections.control {
                    drop(control.writer.send(&Message::Pong));
                }
            }
            (NoticeMeaning::Answer, SourceNotice::Message { message, .. }) => {
                return Ok(ControlFlow::Break(Some(message)));
            }
            (NoticeMeaning::Question, SourceNotice::Asked { epoch, reply }) => self.asked(epoch, reply),
            (NoticeMeaning::ControlLost, SourceNotice::Lost { error, .. }) => {
                self.connections.control = None;
                self.connections.control_lost = error;
            }
            (NoticeMeaning::WaitOver, _) => return Ok(ControlFlow::Break(None)),
            (NoticeMeaning::End(event), notice) => {
                let reason = self.end_reason(notice);
                return Err(Failure::new(event, reason));
            }
            (
                NoticeMeaning::Nothing
                | NoticeMeaning::Answer
                | NoticeMeaning::Question
                | NoticeMeaning::ControlLost,
                _,
            ) => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    fn meaning(&self, notice: &SourceNotice, wait: SourceWait) -> NoticeMeaning {
        let facts = NoticeContext {
            wait,
            epoch: self.terms.epoch(),
            generation: self.connections.generation,
            is_querying_templates: self.agreement.is_querying_templates,
        };
        self.session.meaning(notice.in_phases(|connection_id| self.is_control(connection_id)), facts)
    }

    /// Returns the reason for users, of a notice that ends the migration.
    fn end_reason(&mut self, notice: SourceNotice) -> String {
        match notice {
            SourceNotice::Message { message: Message::Refused { reason, .. }, .. } => {
                format!("the destination aborted: {reason}")
            }
            SourceNotice::Message { message, .. } => unexpected(&message).reason,
            SourceNotice::Lost { error, .. } => {
                self.connections.control_lost = error;
                self.control_loss().reason
            }
            SourceNotice::ServingEnded { error, .. } => {
                error.unwrap_or_else(|| "the destination ended the page stream too early".to_owned())
            }
            SourceNotice::Asked { .. } => {
                "the destination has lost its state and queries the source".to_owned()
            }
            SourceNotice::Event(SourceEvent::Cancel) => "cancelled by a user".to_owned(),
            SourceNotice::Event(SourceEvent::QemuDied) => self.qemu_end_reason().to_owned(),
            SourceNotice::Event(_) | SourceNotice::OfferEnded => "ended from outside".to_owned(),
        }
    }
}
