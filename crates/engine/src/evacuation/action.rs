//! Actions that evacuations order.

use serde::{Deserialize, Serialize};

use super::command::{CommandId, EvacuationId};
use super::outcome::EvacuationOutcome;
use super::report::EvacuationReport;

/// Action that the controller carries out, after it has stored the evacuations that changed.
///
/// If one is lost, because the controller or a connection fails, it is ordered again once facts show that; a repeated
/// one changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum EvacuationAction {
    /// Ask the agent of a host for [`super::HostFacts`].
    AskFacts {
        /// Host.
        host: String,
        /// Commands of which it states what it knows.
        commands: Vec<CommandId>,
    },
    /// Let a host accept no VMs.
    Cordon {
        /// Host.
        host: String,
    },
    /// Let a host accept VMs again.
    Uncordon {
        /// Host.
        host: String,
    },
    /// Begin a migration, by the agent of `from`.
    StartMove {
        /// The move.
        order: MoveOrder,
    },
    /// Give a migration another rate, by the agent of `from`.
    SetBandwidth {
        /// The command.
        command: CommandId,
        /// Host of the agent.
        from: String,
        /// Highest rate, in bytes per second; none without a limit.
        bytes_per_s: Option<u64>,
    },
    /// Cancel a migration, by the agent of `from`. If the agent has never seen the command, it journals it as cancelled:
    /// a start with the same id that arrives later begins nothing.
    CancelMove {
        /// The command.
        command: CommandId,
        /// Host of the agent.
        from: String,
    },
    /// Report something to people.
    Report {
        /// Evacuation.
        evacuation: EvacuationId,
        /// The report.
        report: EvacuationReport,
    },
    /// The evacuation has ended.
    Finished {
        /// Evacuation.
        evacuation: EvacuationId,
        /// Its outcome.
        outcome: EvacuationOutcome,
    },
}

/// Order to begin a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveOrder {
    /// Id of the command.
    pub command: CommandId,
    /// VM.
    pub vm: String,
    /// Its host.
    pub from: String,
    /// Its next host.
    pub to: String,
    /// Highest rate, in bytes per second; none without a limit.
    pub bytes_per_s: Option<u64>,
}
