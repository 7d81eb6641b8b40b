//! Connections to the destination during the phases, and what is said and heard on them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::{DataStream, Sender};
use engine::handover::source::SourceEvent;
use proto::Purpose;
use proto::message::Message;
use tracing::warn;

use super::inbox::Notice;
use super::phases::{Control, Failure, no_control, unexpected};
use super::{Driver, memory};
use crate::peers;
use crate::progress::Phase;

impl Driver {
    pub(super) fn connect_control(&mut self) -> Result<Control, peers::PeerError> {
        let migration = self.terms.migration.clone();
        self.connect(Purpose::Control { migration, generation: self.generation })
    }

    pub(super) fn connect_streams(&self) -> Result<Vec<DataStream>, peers::PeerError> {
        (0..self.controls.aims().streams)
            .map(|stream| {
                let purpose = Purpose::Data {
                    migration: self.terms.migration.clone(),
                    generation: self.generation,
                    stream,
                };
                let connection = peers::connect(&self.context, &self.terms.destination, None, purpose)?;
                self.telemetry.count(connection.handle());
                Ok(DataStream::over(connection, Some(Arc::clone(&self.controls.rate))))
            })
            .collect()
    }

    /// Makes a new set of connections after a cut, for as long as the configuration has patience. The guest runs on.
    pub(super) fn reconnect(
        &mut self,
        tracked: &memory::Tracked,
        cause: &::memory::SendError,
    ) -> Result<Sender, Failure> {
        self.phase(Phase::Reconnecting);
        self.note("link-lost", crate::chain(cause));
        let timeouts = &self.context.config.timeouts;
        let give_up = Instant::now() + Duration::from_millis(timeouts.give_up_after_ms);
        let pause = Duration::from_millis(timeouts.retry_ms);
        self.control = None;
        loop {
            self.generation = self.generation.next();
            let tried = self
                .context
                .journal
                .set_generation(&self.terms.migration, self.generation)
                .map_err(|error| Failure::local("cannot note the new connections", &error))
                .and_then(|()| self.resume_streams());
            match tried {
                Ok(streams) => {
                    self.note("reconnected", format!("generation {}", self.generation));
                    self.controls.report(|report| report.reconnections += 1);
                    self.telemetry.update(|progress| progress.reconnections += 1);
                    self.phase(Phase::PreCopy);
                    return self.start_sender(tracked, streams);
                }
                Err(failure)
                    if !matches!(failure.event, SourceEvent::PeerLost | SourceEvent::PeerSilent)
                        || Instant::now() >= give_up =>
                {
                    return Err(failure);
                }
                Err(failure) => warn!(reason = failure.reason, "not reconnected yet"),
            }
            self.control = None;
            self.pause(pause)?;
        }
    }

    pub(super) fn resume_streams(&mut self) -> Result<Vec<DataStream>, Failure> {
        let control =
            self.connect_control().map_err(|error| Failure::peer("cannot reach the destination", &error))?;
        self.control = Some(control);
        self.say(&Message::Resume)?;
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        match self.hear(Instant::now() + patience)? {
            Message::Resumed => {}
            other => return Err(unexpected(&other)),
        }
        self.connect_streams().map_err(|error| Failure::peer("cannot open the data streams", &error))
    }

    pub(super) fn say(&mut self, message: &Message) -> Result<(), Failure> {
        let control = self.control.as_mut().ok_or_else(no_control)?;
        control.writer.send(message).map_err(|error| Failure::peer("cannot send to the destination", &error))
    }

    /// Waits for the destination's next message.
    pub(super) fn hear(&mut self, deadline: Instant) -> Result<Message, Failure> {
        loop {
            let Some(notice) = self.inbox.wait(deadline) else {
                return Err(Failure::new(SourceEvent::PeerSilent, "the destination does not answer"));
            };
            if let Some(message) = self.noticed(notice)? {
                return Ok(message);
            }
        }
    }

    /// Lets some time pass, but not what happens in it.
    pub(super) fn pause(&mut self, pause: Duration) -> Result<(), Failure> {
        let until = Instant::now() + pause;
        while let Some(notice) = self.inbox.wait(until) {
            if let Notice::Lost { .. } = notice {
                continue;
            }
            if let Some(message) = self.noticed(notice)? {
                return Err(unexpected(&message));
            }
        }
        Ok(())
    }

    pub(super) fn take_notices(&mut self) -> Result<(), Failure> {
        while let Some(notice) = self.inbox.waiting() {
            if let Some(message) = self.noticed(notice)? {
                return Err(unexpected(&message));
            }
        }
        Ok(())
    }

    /// After a broken round: notices that end the migration come before the cut, which may be only their echo.
    pub(super) fn take_notices_or(&mut self, cause: &::memory::SendError) -> Result<(), Failure> {
        let connection = cause.is_connection() || matches!(cause, ::memory::SendError::Cancelled);
        while let Some(notice) = self.inbox.waiting() {
            if let Notice::Lost { .. } = notice {
                continue;
            }
            if let Some(message) = self.noticed(notice)? {
                return Err(unexpected(&message));
            }
        }
        if connection { Ok(()) } else { Err(Failure::local("cannot send the guest's memory", cause)) }
    }

    /// Deals with a notice during the phases: a message is given back, the rest ends the migration or is answered.
    pub(super) fn noticed(&mut self, notice: Notice) -> Result<Option<Message>, Failure> {
        match notice {
            Notice::Message(Message::Ping) => {
                self.say(&Message::Pong)?;
                Ok(None)
            }
            Notice::Message(Message::Pong) | Notice::Event(SourceEvent::Repeat) => Ok(None),
            // Of another attempt.
            Notice::Message(Message::Refused { epoch, .. }) | Notice::Asked { epoch, .. }
                if epoch != self.terms.epoch() =>
            {
                Ok(None)
            }
            Notice::Message(Message::Refused { epoch, reason }) => Err(Failure::new(
                SourceEvent::Refused { epoch },
                format!("the destination gave up: {reason}"),
            )),
            Notice::Message(message) => Ok(Some(message)),
            Notice::Lost { link, error }
                if self.control.as_ref().is_some_and(|control| control.link == link) =>
            {
                Err(Failure::new(SourceEvent::PeerLost, format!("the control stream was lost: {error}")))
            }
            Notice::Lost { .. } => Ok(None),
            Notice::Asked { epoch, reply } => {
                self.asker = Some(reply);
                Err(Failure::new(SourceEvent::Asked { epoch }, "the destination has lost its part and asks"))
            }
            Notice::Event(event) => {
                let reason = match &event {
                    SourceEvent::Cancel => "cancelled by a user",
                    SourceEvent::QemuDied => "QEMU ended by itself",
                    _ => "ended from outside",
                };
                Err(Failure::new(event, reason))
            }
        }
    }
}
