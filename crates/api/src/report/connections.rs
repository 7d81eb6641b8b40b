//! Connections of the guest: those that were carried, and those that are redirected.

use std::fmt::{self, Write as _};
use std::net::IpAddr;

use proto::message::FailedFlow;
use serde::{Deserialize, Serialize};

use super::Report;
use super::numbers::milliseconds;
use crate::new_address::NewAddress;

/// Redirection of the connections of a guest that moved to another network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectedConnections {
    /// Addresses of the guest, with those by which it is reached at the destination.
    pub addresses: Vec<NewAddress>,
    /// Kind of the tunnel.
    pub tunnel: String,
    /// Ends of the tunnel: addresses of the source and of the destination.
    pub ends: [IpAddr; 2],
    /// Largest packet that passes the tunnel, in bytes.
    pub mtu: u32,
    /// Duration of making the source's end, right before the stop, in microseconds.
    pub prepare_us: Option<u64>,
    /// Duration of taking the guest's place at the source, after it ran at the destination, in microseconds.
    pub switch_us: Option<u64>,
}

/// Tracked connections of the guest, as the destination has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrackedConnections {
    /// Number of connections that were installed there.
    pub carried: u32,
    /// Connections that could not be installed, each with the reason; not more than a message names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<FailedFlow>,
    /// Number of others that could not be installed either.
    #[serde(default)]
    pub more_failed: u32,
}

impl TrackedConnections {
    /// Returns the number of connections that could not be installed.
    pub fn not_carried(&self) -> u64 {
        self.failed.len() as u64 + u64::from(self.more_failed)
    }
}

/// Writes the lines about connections, for people.
pub(super) fn write(report: &Report, out: &mut String) -> fmt::Result {
    if let Some(redirected) = &report.redirection {
        let RedirectedConnections { addresses, tunnel, ends: [from, to], mtu, prepare_us, switch_us } =
            redirected;
        let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        writeln!(out, "  redirection {} by {tunnel} from {from} to {to}, {mtu} bytes", addresses.join(", "))?;
        if let (Some(prepare_us), Some(switch_us)) = (*prepare_us, *switch_us) {
            let (prepared, switched) = (milliseconds(prepare_us), milliseconds(switch_us));
            writeln!(out, "              prepared in {prepared}, switched in {switched}")?;
        }
    }
    let Some(connections) = &report.connections else { return Ok(()) };
    write!(out, "  connections {} tracked connections carried", connections.carried)?;
    match connections.not_carried() {
        0 => writeln!(out)?,
        count => writeln!(out, ", {count} not:")?,
    }
    for FailedFlow { flow, reason } in &connections.failed {
        writeln!(out, "              {flow}: {reason}")?;
    }
    if connections.more_failed > 0 {
        writeln!(out, "              and {} more", connections.more_failed)?;
    }
    Ok(())
}
