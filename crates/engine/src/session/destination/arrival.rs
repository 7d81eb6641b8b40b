//! Arrival of a VM: what the source's connections and messages mean, and when each of them is valid.

use proto::limits::DEVICE_STATE_BYTES;
use proto::message::Message;
use proto::{Epoch, Generation};

use super::DestinationSession;
use crate::handover::destination::DestinationState;

/// Control stream of the source, and its generation. A newer one replaces it, and ends all connections of the older
/// generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ControlGeneration {
    generation: Generation,
    /// Number of the connection, by the driver's count; none while there is none.
    connection_id: Option<u64>,
}

impl ControlGeneration {
    /// Creates the state before the first control stream.
    pub fn new() -> Self {
        Self { generation: Generation(1), connection_id: None }
    }

    /// Returns the present generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the number of the control stream, if there is one.
    pub fn connection_id(&self) -> Option<u64> {
        self.connection_id
    }

    /// Returns true if this connection is the control stream.
    pub fn is_connection(&self, connection_id: u64) -> bool {
        self.connection_id == Some(connection_id)
    }

    /// Returns true if this is the present generation. What comes over connections of any other is not applied.
    pub fn is_present(&self, generation: Generation) -> bool {
        self.generation == generation
    }

    /// Records a connection of the source, with its generation if it is a control stream. Returns the connection that
    /// is closed for it: the replaced control stream; or, for a generation that has ended, the new connection itself.
    /// The source notices that, and makes a newer one.
    pub fn connected(&mut self, connection_id: u64, generation: Option<Generation>) -> Option<u64> {
        let generation = generation?;
        if generation < self.generation {
            return Some(connection_id);
        }
        self.generation = generation;
        self.connection_id.replace(connection_id)
    }

    /// Records the end of a connection. Returns true if it was the control stream.
    pub fn lost(&mut self, connection_id: u64) -> bool {
        self.connection_id.take_if(|control| *control == connection_id).is_some()
    }
}

impl Default for ControlGeneration {
    fn default() -> Self {
        Self::new()
    }
}

/// Treatment of a message of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Admission {
    /// It is an event of the handover: it names its epoch, and is valid on every connection.
    Handover,
    /// It belongs to the arrival, and this is the time for it.
    Arrival,
    /// It shows that the source lives, and nothing else.
    SignOfLife,
    /// It is not valid now.
    Unexpected,
}

/// Facts on which the treatment of a message depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageContext {
    /// True if the message came over the control stream.
    pub is_on_control: bool,
    /// True if pages are missing, or their waits have not ended.
    pub has_missing_pages: bool,
    /// Epoch of the migration.
    pub epoch: Epoch,
}

/// Payload that is sent in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PayloadKind {
    /// Pages that are to be discarded, because they will be missing when the guest runs.
    Discard,
    /// Pages that are missing when the guest runs.
    MissingPages,
    /// The state of the guest's devices.
    Devices,
}

/// Reason for which a payload is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusedPayload {
    /// It is too large.
    TooLarge,
    /// It names missing pages, but post-copy is not possible, or has begun.
    NoPostCopy,
}

/// Reason for which a host is not ready although the source is frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NotReady {
    /// The device state is not loaded.
    NotLoaded,
    /// Pages are missing for a guest that stays paused: nothing would request them.
    MissingForPaused,
}

impl DestinationSession {
    /// Returns true if the control stream may bring parts of the VM: up to READY and no further. After that the loaded
    /// copy must not be touched, and may run.
    pub fn is_arriving(&self, is_on_control: bool) -> bool {
        is_on_control && self.core.state == DestinationState::Prepared
    }

    /// Returns the treatment of a message of the source.
    pub fn admission(&self, message: &Message, facts: MessageContext) -> Admission {
        let is_arriving = self.is_arriving(facts.is_on_control);
        let is_valid = match message {
            Message::Go { .. }
            | Message::Abort { .. }
            | Message::Inquire { .. }
            | Message::Verdict { .. } => {
                return Admission::Handover;
            }
            Message::Ping | Message::Pong => return Admission::SignOfLife,
            // Missing pages arrive whatever else is decided.
            Message::Resume => is_arriving || facts.is_on_control && facts.has_missing_pages,
            Message::QueryTemplates { .. }
            | Message::Verify { .. }
            | Message::Discard { .. }
            | Message::MissingPages { .. }
            | Message::Claims { .. }
            | Message::DeviceState { .. } => is_arriving,
            Message::Frozen { epoch, .. } => is_arriving && *epoch == facts.epoch,
            // The first message of a migration precedes its driver; all others are a destination's, or belong to other
            // connections.
            Message::Propose(_)
            | Message::Accept(_)
            | Message::Reject { .. }
            | Message::Resumed
            | Message::TemplatePages { .. }
            | Message::Verified { .. }
            | Message::Discarded { .. }
            | Message::RequestPages { .. }
            | Message::PagesComplete
            | Message::Flows { .. }
            | Message::FlowsInstalled { .. }
            | Message::Ready { .. }
            | Message::Running { .. }
            | Message::Incomplete { .. }
            | Message::FirstFrames { .. }
            | Message::MeasureLink { .. }
            | Message::LinkMeasured { .. }
            | Message::AskRedirection
            | Message::RedirectionStands { .. }
            | Message::AskTunnelEnd(_)
            | Message::TunnelEnd { .. }
            | Message::Repoint { .. }
            | Message::Repointed { .. }
            | Message::ControllerTerm { .. }
            | Message::FleetCommand { .. }
            | Message::HostEvacuation(_)
            | Message::FleetReport { .. }
            | Message::Refused { .. }
            | Message::Crashed { .. }
            | Message::Ask { .. }
            | Message::RegistryRequest(_)
            | Message::RegistryReply(_) => false,
        };
        if is_valid { Admission::Arrival } else { Admission::Unexpected }
    }

    /// Decides whether a payload of `bytes` bytes is received. `can_begin_post_copy` is true if post-copy was proposed
    /// and no pages are missing yet.
    pub fn admit_payload(
        kind: PayloadKind,
        bytes: u64,
        can_begin_post_copy: bool,
    ) -> Result<(), RefusedPayload> {
        let is_of_pages = matches!(kind, PayloadKind::Discard | PayloadKind::MissingPages);
        if bytes > DEVICE_STATE_BYTES {
            Err(RefusedPayload::TooLarge)
        } else if is_of_pages && (bytes == 0 || !can_begin_post_copy) {
            Err(RefusedPayload::NoPostCopy)
        } else {
            Ok(())
        }
    }

    /// Decides whether this host becomes READY: the source is frozen, and cannot go on by itself. `run` is true if
    /// the guest is to run.
    pub fn admit_frozen(is_loaded: bool, has_missing_pages: bool, run: bool) -> Result<(), NotReady> {
        if !is_loaded {
            Err(NotReady::NotLoaded)
        } else if has_missing_pages && !run {
            Err(NotReady::MissingForPaused)
        } else {
            Ok(())
        }
    }

    /// Returns true if post-copy ends now: the guest runs here, all of its pages are present, and it is not to be
    /// stopped before that.
    pub fn ends_post_copy(&self, has_all_pages: bool, is_to_be_stopped: bool) -> bool {
        let is_completing = matches!(self.core.state, DestinationState::Completing { .. });
        has_all_pages && is_completing && !is_to_be_stopped
    }
}

#[cfg(test)]
mod tests;
