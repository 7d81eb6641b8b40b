//! Parts of messages about redirections of connections.

use serde::{Deserialize, Serialize};

use crate::ids::HostId;

/// Request for a host's end of a tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelRequest {
    /// MAC address of the guest's card.
    pub card: String,
    /// Host to which the tunnel is to lead.
    pub destination: HostId,
    /// True for a pre-flight check only: nothing is reserved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub check_only: bool,
}

/// Step by which a host that the guest has left before takes another end for its tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RepointStep {
    /// Makes what takes no packets yet.
    Prepare,
    /// Lets it take packets: the guest runs at the destination.
    Switch,
    /// Removes what was prepared: the guest stays where it is.
    Remove,
}
