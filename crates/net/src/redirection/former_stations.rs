//! Stations of a network for a guest that is at home again, when the host no longer answers in their place.
//!
//! The guest has learnt the wire's MAC address for some of them. It would find that out by itself, but only after the
//! time for which neighbours count as known.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};

use super::names::Names;
use super::parts::Redirection;
use crate::announcement;
use crate::claims::Claim;
use crate::divert::MARK;
use crate::ethernet::Mac;
use crate::ports;

/// Neighbours that a host knows in the network of a guest.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FormerStations {
    interface: String,
    neighbours: Vec<(IpAddr, Mac)>,
    /// Those that are gateways.
    gateways: BTreeSet<IpAddr>,
}

impl FormerStations {
    /// Returns the neighbours that this host has answered for, if the guest is here and at home.
    pub(super) fn of(redirection: &Redirection, host: &str) -> io::Result<Self> {
        let place = &redirection.place;
        if place.host != host || !place.presence.is_home() {
            return Ok(Self::default());
        }
        let networks = place.presence.lan.networks.iter();
        Ok(Self {
            interface: place.interface.clone(),
            neighbours: ports::neighbours(&Names(place.number).station())?,
            gateways: networks.filter_map(|network| network.gateway).collect(),
        })
    }

    /// Announces to the guest alone their own MAC addresses.
    pub(super) fn introduce(&self) -> io::Result<()> {
        if self.neighbours.is_empty() {
            return Ok(());
        }
        let socket = PacketSocket::sender(&self.interface, MARK)?;
        for (address, mac) in &self.neighbours {
            let claim = Claim { vlan: None, address: *address, is_router: self.gateways.contains(address) };
            socket.send([0; VIRTIO_HEADER_BYTES], &announcement::of_address(*mac, &claim))?;
        }
        Ok(())
    }
}
