//! `WireGuard` of the kernel: keys, and the other end of a tunnel.
//!
//! The kernel computes the public key of a private one, so that no other code handles keys.

use std::io;
use std::net::IpAddr;

use rustix::rand::{GetRandomFlags, getrandom};

use super::objects::TunnelEndpoint;
use super::tunnel::Key;
use crate::netlink::{ACKNOWLEDGE, CREATE, DUMP, EXCLUSIVE, Requests, Socket, attribute};

/// Seconds between packets that keep the way open in firewalls and NAT between the hosts.
const KEEP_ALIVE_S: u16 = 25;

/// Numbers of `linux/genetlink.h`, `linux/wireguard.h` and their like.
mod abi {
    pub(super) const CONTROL: u16 = 16;
    pub(super) const GET_FAMILY: u8 = 3;
    pub(super) const FAMILY_NUMBER: u16 = 1;
    pub(super) const FAMILY_NAME: u16 = 2;
    /// Bytes of the structure with which messages begin.
    pub(super) const HEADER_BYTES: usize = 4;
    pub(super) const GET_DEVICE: u8 = 0;
    pub(super) const SET_DEVICE: u8 = 1;
    pub(super) const DEVICE_NAME: u16 = 2;
    pub(super) const PRIVATE_KEY: u16 = 3;
    pub(super) const PUBLIC_KEY: u16 = 4;
    pub(super) const DEVICE_FLAGS: u16 = 5;
    pub(super) const LISTEN_PORT: u16 = 6;
    pub(super) const PEERS: u16 = 8;
    pub(super) const REPLACE_PEERS: u32 = 1;
    pub(super) const PEER_KEY: u16 = 1;
    pub(super) const PEER_FLAGS: u16 = 3;
    pub(super) const PEER_ENDPOINT: u16 = 4;
    pub(super) const PEER_KEEP_ALIVE: u16 = 5;
    pub(super) const PEER_ALLOWED: u16 = 9;
    pub(super) const REPLACE_ALLOWED: u32 = 2;
    pub(super) const ALLOWED_FAMILY: u16 = 1;
    pub(super) const ALLOWED_ADDRESS: u16 = 2;
    pub(super) const ALLOWED_LENGTH: u16 = 3;
    pub(super) const FAMILY_IPV4: u16 = 2;
    pub(super) const FAMILY_IPV6: u16 = 10;
    pub(super) const NEW_LINK: u16 = 16;
    pub(super) const DELETE_LINK: u16 = 17;
    pub(super) const LINK_BYTES: usize = 16;
    pub(super) const LINK_NAME: u16 = 3;
    pub(super) const LINK_INFO: u16 = 18;
    pub(super) const INFO_KIND: u16 = 1;
}

/// Returns a new private key.
///
/// # Errors
/// If the kernel gives no random bytes.
pub fn private_key() -> io::Result<Key> {
    let mut key = [0; 32];
    if getrandom(&mut key, GetRandomFlags::empty())? == key.len() {
        Ok(key)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Returns the public key of a private one. Makes a device with this name for that, and removes it.
///
/// # Errors
/// Among others if the kernel has no `WireGuard`.
pub fn public_key(private: &Key, device: &str) -> io::Result<Key> {
    let mut request = Requests::default();
    request.request(abi::NEW_LINK, ACKNOWLEDGE | CREATE | EXCLUSIVE, &[0; abi::LINK_BYTES]);
    request.text(abi::LINK_NAME, device).nest(abi::LINK_INFO).text(abi::INFO_KIND, "wireguard").end();
    Socket::route()?.confirm(request)?;
    let found = set_private(private, device).and_then(|()| read_public(device));
    let mut request = Requests::default();
    request.request(abi::DELETE_LINK, ACKNOWLEDGE, &[0; abi::LINK_BYTES]).text(abi::LINK_NAME, device);
    let removed = Socket::route()?.confirm(request);
    found.and_then(|key| removed.map(|()| key))
}

fn set_private(private: &Key, device: &str) -> io::Result<()> {
    let socket = Socket::generic()?;
    let mut request = Requests::default();
    request.request(family(&socket)?, ACKNOWLEDGE, &[abi::SET_DEVICE, 1, 0, 0]);
    request.text(abi::DEVICE_NAME, device).attribute(abi::PRIVATE_KEY, private);
    socket.confirm(request)
}

fn read_public(device: &str) -> io::Result<Key> {
    let socket = Socket::generic()?;
    let mut request = Requests::default();
    request.request(family(&socket)?, DUMP, &[abi::GET_DEVICE, 1, 0, 0]).text(abi::DEVICE_NAME, device);
    let mut key = None;
    socket.dump(request, |body| {
        let found = body.get(abi::HEADER_BYTES..).and_then(|rest| attribute(rest, abi::PUBLIC_KEY));
        key = key.or(found.and_then(<[u8]>::first_chunk).copied());
    })?;
    key.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Gives a device its key, its port and its only peer, through which all addresses are reached.
///
/// # Errors
/// If there is no such device, or the kernel has no `WireGuard`.
pub fn configure(device: &str, private: &Key, end: TunnelEndpoint, peer: &Key) -> io::Result<()> {
    let socket = Socket::generic()?;
    let mut request = Requests::default();
    request.request(family(&socket)?, ACKNOWLEDGE, &[abi::SET_DEVICE, 1, 0, 0]);
    describe(&mut request, device, private, end, peer);
    socket.confirm(request)
}

fn describe(request: &mut Requests, device: &str, private: &Key, end: TunnelEndpoint, peer: &Key) {
    request.text(abi::DEVICE_NAME, device).attribute(abi::PRIVATE_KEY, private);
    request.attribute(abi::DEVICE_FLAGS, &abi::REPLACE_PEERS.to_ne_bytes());
    request.attribute(abi::LISTEN_PORT, &end.port.to_ne_bytes());
    request.nest(abi::PEERS).nest(0);
    request.attribute(abi::PEER_KEY, peer);
    request.attribute(abi::PEER_FLAGS, &abi::REPLACE_ALLOWED.to_ne_bytes());
    request.attribute(abi::PEER_ENDPOINT, &endpoint(end.remote, end.other_port));
    request.attribute(abi::PEER_KEEP_ALIVE, &KEEP_ALIVE_S.to_ne_bytes());
    request.nest(abi::PEER_ALLOWED);
    for (family, bytes) in [(abi::FAMILY_IPV4, 4), (abi::FAMILY_IPV6, 16)] {
        request.nest(0).attribute(abi::ALLOWED_FAMILY, &family.to_ne_bytes());
        request.attribute(abi::ALLOWED_ADDRESS, &vec![0; bytes]).attribute(abi::ALLOWED_LENGTH, &[0]).end();
    }
    request.end().end().end();
}

/// Composes the structure of an address with a port.
fn endpoint(address: IpAddr, port: u16) -> Vec<u8> {
    let port = port.to_be_bytes();
    match address {
        IpAddr::V4(address) => {
            [&abi::FAMILY_IPV4.to_ne_bytes()[..], &port, &address.octets(), &[0; 8]].concat()
        }
        IpAddr::V6(address) => {
            [&abi::FAMILY_IPV6.to_ne_bytes()[..], &port, &[0; 4], &address.octets(), &[0; 4]].concat()
        }
    }
}

/// Returns the number by which the kernel knows `WireGuard`'s messages.
fn family(socket: &Socket) -> io::Result<u16> {
    let mut request = Requests::default();
    request.request(abi::CONTROL, ACKNOWLEDGE, &[abi::GET_FAMILY, 1, 0, 0]);
    request.text(abi::FAMILY_NAME, "wireguard");
    let mut family = None;
    socket.dump(request, |body| {
        let found = body.get(abi::HEADER_BYTES..).and_then(|rest| attribute(rest, abi::FAMILY_NUMBER));
        family = family.or(found.and_then(<[u8]>::first_chunk).map(|number| u16::from_ne_bytes(*number)));
    })?;
    family.ok_or_else(|| io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::answers;
    use crate::redirection::tunnel::TunnelKind;

    #[test]
    fn a_device_has_one_peer_for_all_addresses() {
        let (local, remote) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let kind = TunnelKind::WireGuard;
        let end = TunnelEndpoint { kind, identifier: 0, local, remote, port: 7743, other_port: 7742 };
        let mut request = Requests::default();
        request.request(30, 0, &[abi::SET_DEVICE, 1, 0, 0]);
        describe(&mut request, "whimbrel1000000", &[1; 32], end, &[2; 32]);
        let bytes = request.finish();
        let body = &answers(&bytes).next().unwrap().body[abi::HEADER_BYTES..];
        assert_eq!(attribute(body, abi::DEVICE_NAME), Some(&b"whimbrel1000000\0"[..]));
        assert_eq!(attribute(body, abi::PRIVATE_KEY), Some(&[1; 32][..]));
        let peer = attribute(attribute(body, abi::PEERS).unwrap(), 0).unwrap();
        assert_eq!(attribute(peer, abi::PEER_KEY), Some(&[2; 32][..]));
        assert_eq!(attribute(body, abi::LISTEN_PORT), Some(&7743_u16.to_ne_bytes()[..]));
        let endpoint = attribute(peer, abi::PEER_ENDPOINT).unwrap();
        assert_eq!((endpoint.len(), &endpoint[2..8]), (16, &[0x1e, 0x3e, 192, 0, 2, 2][..]));
        let allowed = attribute(peer, abi::PEER_ALLOWED).unwrap();
        assert_eq!(crate::netlink::attributes(allowed).count(), 2);
        assert_eq!(super::endpoint("::1".parse().unwrap(), 1).len(), 28);
    }

    #[test]
    fn private_keys_differ() {
        assert_ne!(private_key().unwrap(), private_key().unwrap());
    }
}
