//! Datagrams between the client and the guest.

use std::net::{IpAddr, UdpSocket};

use lab::DEADLINE;
use net::Mac;
use net::conntrack::{self, ConntrackEntry};
use net::ethernet::{Frame, IPV4, IPV6, compose};
use net::netlink::Socket;
use net::redirection::Redirection;
use whimbrel_net as net;

use crate::network::{CARD, Family, NEW, Network, OLD};

/// Sockets of the client and of the guest for datagrams: that of the client gets those of the guest's old address alone.
pub(crate) struct Datagrams {
    client: UdpSocket,
    guest: UdpSocket,
}

impl Datagrams {
    /// Makes the sockets, for datagrams to the guest's old address.
    pub(crate) fn new(network: &Network, family: Family) -> Self {
        let guest = network.guest().within(|| UdpSocket::bind((family.guest(OLD), 0)).unwrap()).unwrap();
        let client = network.client().within(|| UdpSocket::bind((family.client(), 0)).unwrap()).unwrap();
        client.connect(guest.local_addr().unwrap()).unwrap();
        for socket in [&client, &guest] {
            socket.set_read_timeout(Some(DEADLINE)).unwrap();
        }
        Self { client, guest }
    }

    /// Sends a datagram to the guest, which answers.
    pub(crate) fn exchange(&self) {
        self.client.send(b"question").unwrap();
        let (bytes, _) = self.guest.recv_from(&mut [0; 16]).unwrap();
        assert_eq!(bytes, 8);
        self.answer();
    }

    /// Sends a datagram of the guest.
    pub(crate) fn answer(&self) {
        self.guest.send_to(b"answer", self.client.local_addr().unwrap()).unwrap();
        assert_eq!(self.client.recv(&mut [0; 16]).unwrap(), 6);
    }

    /// Returns the frame of a datagram of the client.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let (from, to) = (self.client.local_addr().unwrap(), self.client.peer_addr().unwrap());
        let ports = [from.port(), to.port(), 8, 0].map(u16::to_be_bytes).concat();
        let (kind, packet) = match (from.ip(), to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let header = [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0];
                (IPV4, [&header[..], &from.octets(), &to.octets(), &ports].concat())
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let header = [0x60, 0, 0, 0, 0, 8, 17, 64];
                (IPV6, [&header[..], &from.octets(), &to.octets(), &ports].concat())
            }
            ends => panic!("{ends:?}"),
        };
        compose(CARD, Mac([2; 6]), None, kind, &packet)
    }
}

/// Installs the entry of a datagram that was held at the old host, as the new host does.
pub(crate) fn install_held(network: &Network, redirection: &Redirection, frame: &[u8]) {
    let entry = ConntrackEntry::of_datagram(&Frame::parse(frame, None).unwrap()).unwrap();
    let entry = entry.with_mark(redirection.home().unwrap().mark);
    let install = || conntrack::install(&Socket::netfilter().unwrap(), &[entry]).unwrap();
    let refused = network.host(NEW).within(install).unwrap();
    assert!(refused.is_empty(), "{refused:?}");
}
