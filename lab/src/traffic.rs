//! Traffic on the migration link, as the kernel counts it.

use serde_json::Value;

use crate::addresses::MIGRATION_LINK;
use crate::error::{Context, Error, Result};
use crate::host::Host;

/// Bytes and packets that a host has sent over the migration link so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Bytes with all headers.
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
}

impl Traffic {
    /// Returns the traffic since an earlier count.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(before.bytes),
            packets: self.packets.saturating_sub(before.packets),
        }
    }
}

/// Returns the traffic that a host has sent over the migration link so far. Where the link has a limit, the count is
/// the limiter's: the device itself counts one header for a large segment, which the limiter cuts into many.
pub(crate) fn traffic(host: &Host) -> Result<Traffic> {
    let query = |command: &[&str]| -> Result<Value> {
        let text = host.run(command)?;
        serde_json::from_str(&text)
            .map_err(std::io::Error::from)
            .context(|| format!("cannot read `{}`", command[0]))
    };
    let queues = query(&["tc", "-json", "-stats", "qdisc", "show", "dev", MIGRATION_LINK])?;
    let limited = queues.as_array().into_iter().flatten().find(|queue| queue["kind"] == "tbf").cloned();
    let counts = match limited {
        Some(queue) => queue,
        None => query(&["ip", "-json", "-stats", "link", "show", "dev", MIGRATION_LINK])?[0]["stats64"]["tx"]
            .clone(),
    };
    let traffic = || Some(Traffic { bytes: counts["bytes"].as_u64()?, packets: counts["packets"].as_u64()? });
    traffic().ok_or_else(|| Error::Config("neither `tc` nor `ip` reports how much was sent".to_owned()))
}
