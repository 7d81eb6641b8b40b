//! Samples of the flows of datagrams that a guest sends: a host knows no others of a guest in its bridge.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use tracee::PacketSocket;

use crate::conntrack::ConntrackEntry;
use crate::ethernet::{Frame, Mac};
use crate::filter;

/// Most flows that are remembered.
const MOST_FLOWS: usize = 4096;

/// Samples of the flows of a guest's datagrams. Between two looks the kernel keeps some of the guest's datagrams and drops
/// the others, so that this costs hardly anything; the flows with most packets are found first.
#[derive(Debug)]
pub struct DatagramSampler {
    sockets: Vec<(PacketSocket, Mac)>,
    flows: BTreeMap<Vec<u8>, (ConntrackEntry, Instant)>,
}

impl DatagramSampler {
    /// Begins to sample the cards behind these interfaces, which are in the network namespace of this thread.
    ///
    /// # Errors
    /// If an interface does not exist, or this process may not open packet sockets.
    pub fn start<'a>(cards: impl IntoIterator<Item = (&'a str, Mac)>) -> io::Result<Self> {
        let socket = |(interface, mac): (&str, Mac)| -> io::Result<(PacketSocket, Mac)> {
            Ok((PacketSocket::listen(interface, &filter::datagrams_from(mac))?, mac))
        };
        let sockets = cards.into_iter().map(socket).collect::<io::Result<_>>()?;
        Ok(Self { sockets, flows: BTreeMap::new() })
    }

    /// Returns the entries of the flows that were seen until `now`, without those that have ended since.
    ///
    /// # Errors
    /// If an interface is gone.
    pub fn look(&mut self, now: Instant) -> io::Result<impl Iterator<Item = &ConntrackEntry>> {
        let mut buffer = [0; filter::FRAME_BYTES];
        for (socket, mac) in &self.sockets {
            while let Some(received) = socket.receive(&mut buffer)? {
                let bytes = buffer.get(..received.bytes).unwrap_or(&buffer);
                let frame = Frame::parse(bytes, received.vlan).filter(|frame| frame.source == *mac);
                let frame = frame.filter(|frame| !received.is_outgoing && frame.vlan.is_none());
                let Some(entry) = frame.and_then(|frame| ConntrackEntry::of_datagram(&frame)) else {
                    continue;
                };
                if self.flows.len() < MOST_FLOWS || self.flows.contains_key(&entry.key()) {
                    self.flows.insert(entry.key(), (entry, now));
                }
            }
        }
        let is_over = |(entry, seen): &(ConntrackEntry, Instant)| {
            now.saturating_duration_since(*seen) > Duration::from_secs(entry.timeout_s().into())
        };
        self.flows.retain(|_, flow| !is_over(flow));
        Ok(self.flows.values().map(|(entry, _)| entry))
    }
}
