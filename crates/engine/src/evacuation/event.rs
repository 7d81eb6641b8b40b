//! Events that evacuations take.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::command::{CommandId, CommandState, MoveEnd, MoveProgress};
use super::contents::HostContents;

/// Event that evacuations take. All of them may come late, repeatedly, and in any order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum EvacuationEvent {
    /// The controller was started, or has become the leader: nothing that was known about hosts counts any longer.
    Restarted,
    /// An agent has connected.
    HostConnected {
        /// Host.
        host: String,
    },
    /// The connection to an agent was lost. Migrations of the host go on.
    HostLost {
        /// Host.
        host: String,
    },
    /// An agent has answered [`super::EvacuationAction::AskFacts`].
    Facts {
        /// The facts.
        facts: HostFacts,
    },
    /// A migration has begun.
    MoveStarted {
        /// The command.
        command: CommandId,
    },
    /// A migration has progressed.
    MoveProgressed {
        /// The command.
        command: CommandId,
        /// Its progress.
        progress: MoveProgress,
    },
    /// A migration has ended, or is in doubt.
    MoveEnded {
        /// The command.
        command: CommandId,
        /// Its end.
        end: MoveEnd,
    },
    /// A host owns and runs a VM that it did not have before.
    VmAppeared {
        /// VM.
        vm: String,
        /// Host.
        host: String,
    },
    /// A VM that a host had is not there any longer.
    VmVanished {
        /// VM.
        vm: String,
        /// Host.
        host: String,
    },
    /// An agent has reported the contents of its host without being asked.
    ContentsChanged {
        /// The contents.
        contents: HostContents,
    },
    /// Time has passed.
    Tick,
}

/// Facts about a host, as its agent knows them when it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFacts {
    /// Host.
    pub host: String,
    /// VMs that the host owns and runs.
    pub vms: BTreeSet<String>,
    /// State of each command that was asked about.
    pub commands: BTreeMap<CommandId, CommandState>,
    /// Contents of the host.
    pub contents: HostContents,
}
