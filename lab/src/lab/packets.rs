//! Sizes of the packets into which connections over the migration link are divided.

use serde::{Deserialize, Serialize};

use super::{Lab, MIGRATION, MIGRATION_LINK};
use crate::error::{Error, Result};

/// Ethernet's usual payload.
const USUAL_MTU_BYTES: u32 = 1500;
/// IPv4's header and TCP's.
const HEADERS_BYTES: u32 = 40;
/// Bytes that the kernel hands to a device at once by default.
const USUAL_BUFFER_BYTES: u32 = 65_536;
/// Below this, the kernel has no room for its headers.
const LEAST_BUFFER_BYTES: u32 = 1024;
/// The largest frames that are in use.
const MOST_MTU_BYTES: u32 = 9000;

/// Packet sizes of connections over the migration link. Sending programs are not involved: the kernel divides the data,
/// for all connections alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packets {
    /// The largest packet, in bytes; `None`: 1500, Ethernet's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu_bytes: Option<u32>,
    /// Bytes that a connection hands to its device at once; `None`: the kernel's choice, 64 KiB. If this is smaller
    /// than a packet, packets are that small.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer_bytes: Option<u32>,
}

impl Packets {
    /// Returns true if all sizes are the defaults.
    pub(crate) fn are_usual(&self) -> bool {
        *self == Self::default()
    }

    /// Describes the sizes that are not the defaults.
    pub(crate) fn describe(&self) -> Vec<String> {
        let mtu = self.mtu_bytes.map(|bytes| format!("packets of {bytes} bytes"));
        let buffer = self.buffer_bytes.map(|bytes| format!("{} KiB sent at once", bytes >> 10));
        mtu.into_iter().chain(buffer).collect()
    }

    /// Fails if the sizes are invalid.
    pub(crate) fn check(&self) -> Result<()> {
        let outside = |bytes: Option<u32>, range: std::ops::RangeInclusive<u32>| {
            bytes.is_some_and(|bytes| !range.contains(&bytes))
        };
        if outside(self.mtu_bytes, USUAL_MTU_BYTES..=MOST_MTU_BYTES)
            || outside(self.buffer_bytes, LEAST_BUFFER_BYTES..=USUAL_BUFFER_BYTES)
        {
            return Err(Error::Config(format!(
                "packets are {USUAL_MTU_BYTES} to {MOST_MTU_BYTES} bytes long, and {LEAST_BUFFER_BYTES} to {USUAL_BUFFER_BYTES} bytes are sent at once"
            )));
        }
        Ok(())
    }

    /// Returns the most bytes of a connection in a packet.
    fn segment_bytes(&self) -> u32 {
        let mtu = self.mtu_bytes.unwrap_or(USUAL_MTU_BYTES);
        self.buffer_bytes.unwrap_or(USUAL_BUFFER_BYTES).min(mtu - HEADERS_BYTES)
    }
}

impl Lab {
    /// Applies packet sizes to connections over the migration link that are opened from now on.
    pub fn set_packets(&self, packets: &Packets) -> Result<()> {
        packets.check()?;
        let mtu = packets.mtu_bytes.unwrap_or(USUAL_MTU_BYTES).to_string();
        let buffer = packets.buffer_bytes.unwrap_or(USUAL_BUFFER_BYTES).to_string();
        let segment = packets.segment_bytes().to_string();
        // Both ends first: a packet longer than the other end accepts is dropped.
        for host in [&self.a, &self.b] {
            host.run(&["ip", "link", "set", "dev", MIGRATION_LINK, "mtu", &mtu])?;
        }
        for (host, own) in [&self.a, &self.b].into_iter().zip(MIGRATION) {
            host.run(&["ip", "link", "set", "dev", MIGRATION_LINK, "gso_max_size", &buffer])?;
            let own = own.to_string();
            // The value that each end advertises limits the packets of the other end.
            let route = ["ip", "route", "replace", "10.90.0.0/24", "dev", MIGRATION_LINK, "proto", "kernel"];
            host.run(&[&route[..], &["scope", "link", "src", &own, "advmss", &segment]].concat())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_fits_into_packet_and_buffer() {
        let of = |mtu_bytes, buffer_bytes| Packets { mtu_bytes, buffer_bytes }.segment_bytes();
        assert_eq!(of(None, None), 1460);
        assert_eq!(of(Some(8000), None), 7960);
        assert_eq!(of(Some(8000), Some(1024)), 1024);
        assert_eq!(of(None, Some(32 << 10)), 1460);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(Packets::default().check().is_ok());
        assert!(Packets { mtu_bytes: Some(8000), buffer_bytes: Some(1024) }.check().is_ok());
        assert!(Packets { mtu_bytes: Some(100), buffer_bytes: None }.check().is_err());
        assert!(Packets { mtu_bytes: None, buffer_bytes: Some(100) }.check().is_err());
    }
}
