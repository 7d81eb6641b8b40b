//! Neighbours of a guest that is at home again are announced to it, when the host no longer answers in their place.
//!
//! The guest has learnt the bypass's MAC address for some of them. It would find that out by itself, but only after the
//! time for which neighbours count as known.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};

use super::kernel_names::KernelNames;
use super::model::Redirection;
use crate::announcement;
use crate::bridge_ports;
use crate::claims::Claim;
use crate::divert::MARK;
use crate::ethernet::Mac;

/// Neighbours that a host knows in the network of a guest.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NeighbourRefresh {
    interface: String,
    neighbours: Vec<(IpAddr, Mac)>,
    /// Those that are gateways.
    gateways: BTreeSet<IpAddr>,
}

impl NeighbourRefresh {
    /// Returns the neighbours that this host has answered for, if the guest is here and at home.
    pub(super) fn of(redirection: &Redirection, host: &str) -> io::Result<Self> {
        let place = &redirection.place;
        if place.host != host || !place.attachment.is_home() {
            return Ok(Self::default());
        }
        let subnets = place.attachment.lan.subnets.iter();
        Ok(Self {
            interface: place.interface.clone(),
            neighbours: bridge_ports::neighbours(&KernelNames(place.number).proxy_device())?,
            gateways: subnets.filter_map(|network| network.gateway).collect(),
        })
    }

    /// Announces to the guest alone their own MAC addresses.
    pub(super) fn send_to_guest(&self) -> io::Result<()> {
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
