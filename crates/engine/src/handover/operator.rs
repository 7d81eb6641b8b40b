use serde::{Deserialize, Serialize};

/// Decision of an operator, at either host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "kebab-case")]
pub enum OperatorDecision {
    /// The guest is to run at this host.
    RunHere {
        /// At the source: also if the destination owns the VM in the registry.
        force: bool,
    },
    /// The guest is to run at the other host, or nowhere: this host's copy is discarded.
    DiscardCopy,
    /// One of the two by the operator's decision alone: the registry is lost, and is not asked.
    WithoutRegistry {
        /// True if the guest is to run at this host.
        run_here: bool,
    },
}
