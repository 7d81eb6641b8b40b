//! The table `[controller]`.

use proto::HostId;
use serde::{Deserialize, Serialize};

/// The controller to which an agent connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControllerConfig {
    /// Name of the controller, which its certificate has to bear. Commands are accepted from no other.
    pub name: HostId,
    /// Address of the controller, as `host:port`.
    pub address: String,
    /// True if the network namespaces of this machine stand for hosts, as in the laboratory: processes of others do not
    /// count as this host's.
    #[serde(default)]
    pub namespaces_are_hosts: bool,
}
