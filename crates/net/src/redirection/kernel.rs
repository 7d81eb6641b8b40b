//! Objects of the kernel, made and removed by netlink, in the network namespace of the calling thread.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use rustix::io::Errno;

use super::encoding;
use super::kernel_names::PROTOCOL;
use super::model::Prefix;
use super::objects::{
    DeviceKind, DeviceObject, KernelObject, PolicyRule, RouteObject, Sysctl, TunnelEndpoint,
};
use super::rules::{ChainHook, RuleChain, RuleExpression, RuleFamily, RuleTable};
use super::tunnel::{Key, TunnelKind};
use super::wireguard;
use crate::divert::TABLE_START;
use crate::ethernet::Mac;
use crate::netlink::{ACKNOWLEDGE, CREATE, EXCLUSIVE, REPLACE, Requests, Socket};
use crate::own_objects;

/// Numbers of `linux/rtnetlink.h`, `linux/if_link.h` and their like.
mod abi {
    pub(super) const NEW_LINK: u16 = 16;
    pub(super) const DELETE_LINK: u16 = 17;
    pub(super) const SET_LINK: u16 = 19;
    pub(super) const NEW_ADDRESS: u16 = 20;
    pub(super) const DELETE_ADDRESS: u16 = 21;
    pub(super) const NEW_ROUTE: u16 = 24;
    pub(super) const DELETE_ROUTE: u16 = 25;
    pub(super) const NEW_NEIGHBOUR: u16 = 28;
    pub(super) const DELETE_NEIGHBOUR: u16 = 29;
    pub(super) const NEW_RULE: u16 = 32;
    pub(super) const DELETE_RULE: u16 = 33;
    pub(super) const FAMILY_IPV4: u8 = 2;
    pub(super) const FAMILY_BRIDGE: u8 = 7;
    pub(super) const FAMILY_IPV6: u8 = 10;
    pub(super) const IS_UP: u32 = 1;
    pub(super) const LINK_ADDRESS: u16 = 1;
    pub(super) const LINK_NAME: u16 = 3;
    pub(super) const LINK_MTU: u16 = 4;
    pub(super) const LINK_MASTER: u16 = 10;
    pub(super) const LINK_INFO: u16 = 18;
    pub(super) const LINK_ALIAS: u16 = 20;
    pub(super) const LINK_FAMILY: u16 = 26;
    pub(super) const INFO_KIND: u16 = 1;
    pub(super) const INFO_DATA: u16 = 2;
    pub(super) const VETH_PEER: u16 = 1;
    pub(super) const BRIDGE_VLAN: u16 = 2;
    /// VLAN of frames without a tag, in and out.
    pub(super) const VLAN_UNTAGGED: u16 = 2 | 4;
    /// VLAN that a bridge gives to a new port.
    pub(super) const FIRST_VLAN: u16 = 1;
    pub(super) const TABLE_BY_NUMBER: u8 = 0;
    pub(super) const SCOPE_ALL: u8 = 0;
    pub(super) const SCOPE_LINK: u8 = 253;
    pub(super) const UNICAST: u8 = 1;
    pub(super) const ON_LINK: u32 = 4;
    pub(super) const TO_TABLE: u8 = 1;
    pub(super) const PERMANENT: u16 = 0x80;
    pub(super) const PROXY: u8 = 0x08;
    pub(super) const NO_DUPLICATES: u32 = 0x02;
    pub(super) const NO_PREFIX_ROUTE: u32 = 0x200;
    pub(super) const GRE_KEY: u16 = 0x2000;
    pub(super) const TTL: u8 = 64;
}

/// Errors of removals after which the object is certainly not there.
const ABSENT: [Errno; 5] = [Errno::NOENT, Errno::SRCH, Errno::NODEV, Errno::NXIO, Errno::ADDRNOTAVAIL];

/// Makes an object. One that is there already is left as it is, or made anew; a device of another migration is an error.
/// `key` returns the private key of a tunnel of `WireGuard`.
pub fn make(object: &KernelObject, key: &dyn Fn() -> io::Result<Key>) -> io::Result<()> {
    match object {
        KernelObject::Device(device) => make_device(device, key),
        KernelObject::Sysctl(Sysctl { path, value, before }) => {
            if before.is_some() {
                unless_gone(set(path, value))
            } else {
                set(path, value)
            }
        }
        KernelObject::Port { device, bridge, vlan } => join(device, bridge, *vlan),
        KernelObject::Up { device } => change_link(device, |_| {}, abi::IS_UP),
        KernelObject::Address { device, address } => {
            present(address_request(abi::NEW_ADDRESS, device, *address)?)
        }
        KernelObject::Neighbour { device, address, mac } => {
            let mut request = neighbour(abi::NEW_NEIGHBOUR, device, *address, 0)?;
            request.attribute(2, &mac.0);
            present(request)
        }
        KernelObject::Proxy { device, address } => {
            present(neighbour(abi::NEW_NEIGHBOUR, device, *address, abi::PROXY)?)
        }
        KernelObject::Route(route) => present(route_request(abi::NEW_ROUTE, route)?),
        KernelObject::Policy(rule) => present(policy_request(abi::NEW_RULE, rule)),
        KernelObject::Rules(table) => {
            let route = Socket::route()?;
            Socket::netfilter()?.confirm(encoding::make(table, |device| route.index_of(device))?)
        }
    }
}

/// Removes an object; one that is not there is no error. Sysctls of the host as a whole are set back; those of our own
/// devices end with these.
pub fn remove(object: &KernelObject) -> io::Result<()> {
    match object {
        KernelObject::Device(device) => remove_device(device),
        KernelObject::Sysctl(Sysctl { path, before, .. }) => {
            before.as_ref().map_or(Ok(()), |before| unless_gone(set(path, before)))
        }
        // They end with their device.
        KernelObject::Port { .. } | KernelObject::Up { .. } => Ok(()),
        KernelObject::Address { device, address } => {
            gone(address_request(abi::DELETE_ADDRESS, device, *address))
        }
        KernelObject::Neighbour { device, address, .. } => {
            gone(neighbour(abi::DELETE_NEIGHBOUR, device, *address, 0))
        }
        KernelObject::Proxy { device, address } => {
            gone(neighbour(abi::DELETE_NEIGHBOUR, device, *address, abi::PROXY))
        }
        KernelObject::Route(route) => gone(route_request(abi::DELETE_ROUTE, route)),
        KernelObject::Policy(rule) => gone(Ok(policy_request(abi::DELETE_RULE, rule))),
        KernelObject::Rules(table) => Socket::netfilter()?.confirm(encoding::remove(table)),
    }
}

/// Sends a request to make something that may be there already.
fn present(request: Requests) -> io::Result<()> {
    match Socket::route()?.confirm(request) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// Sends a request to remove something that may be gone, or whose device may be.
fn gone(request: io::Result<Requests>) -> io::Result<()> {
    match request.and_then(|request| Socket::route()?.confirm(request)) {
        Err(error) if Errno::from_io_error(&error).is_some_and(|code| ABSENT.contains(&code)) => Ok(()),
        result => result,
    }
}

/// Writes a value of `/proc/sys`. A device whose packets are too small for IPv6 has no sysctls of IPv6.
fn set(path: &str, value: &str) -> io::Result<()> {
    match fs::write(Path::new("/proc/sys").join(path), value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.ends_with("/disable_ipv6") => Ok(()),
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot set {path} to {value}: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// Takes it for a success that a device which is not ours has gone, with its sysctls.
fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn family_of(address: IpAddr) -> u8 {
    if address.is_ipv4() { abi::FAMILY_IPV4 } else { abi::FAMILY_IPV6 }
}

fn address_attribute(requests: &mut Requests, kind: u16, address: IpAddr) {
    match address {
        IpAddr::V4(address) => requests.attribute(kind, &address.octets()),
        IpAddr::V6(address) => requests.attribute(kind, &address.octets()),
    };
}

/// Composes the structure with which messages about devices begin.
fn link_header(family: u8, index: u32, flags: u32) -> Vec<u8> {
    [u32::from_ne_bytes([family, 0, 0, 0]), index, flags, flags].map(u32::to_ne_bytes).as_flattened().to_vec()
}

fn make_device(device: &DeviceObject, key: &dyn Fn() -> io::Result<Key>) -> io::Result<()> {
    let mut request = Requests::default();
    request.request(abi::NEW_LINK, ACKNOWLEDGE | CREATE | EXCLUSIVE, &link_header(0, 0, 0));
    request.text(abi::LINK_NAME, &device.name);
    request.attribute(abi::LINK_MTU, &device.mtu.to_ne_bytes());
    if let Some(mac) = device.mac {
        request.attribute(abi::LINK_ADDRESS, &mac.0);
    }
    request.nest(abi::LINK_INFO);
    match &device.kind {
        DeviceKind::Veth { peer, peer_mac } => {
            request.text(abi::INFO_KIND, "veth").nest(abi::INFO_DATA);
            peer_device(&mut request, peer, *peer_mac, device.mtu);
            request.end();
        }
        DeviceKind::Tunnel(end) => tunnel(&mut request, *end),
        DeviceKind::WireGuard { .. } => {
            request.text(abi::INFO_KIND, "wireguard");
        }
    }
    request.end();
    match Socket::route()?.confirm(request) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => own(device)?,
        result => result?,
    }
    if let DeviceKind::Veth { peer, .. } = &device.kind {
        name(peer, &device.alias)?;
    }
    name(&device.name, &device.alias)?;
    if let DeviceKind::WireGuard { end, peer } = &device.kind {
        wireguard::configure(&device.name, &key()?, *end, peer)?;
    }
    Ok(())
}

/// Appends what is peculiar to the other device of a pair, which begins like a message about a device.
fn peer_device(request: &mut Requests, peer: &str, mac: Mac, mtu: u32) {
    let mut inner = Requests::default();
    inner
        .text(abi::LINK_NAME, peer)
        .attribute(abi::LINK_ADDRESS, &mac.0)
        .attribute(abi::LINK_MTU, &mtu.to_ne_bytes());
    request.attribute(abi::VETH_PEER, &[link_header(0, 0, 0), inner.finish()].concat());
}

/// Appends the description of a tunnel's end.
fn tunnel(request: &mut Requests, end: TunnelEndpoint) {
    let is_v6 = end.local.is_ipv6();
    let key = end.identifier;
    match end.kind {
        TunnelKind::Vxlan => {
            request.text(abi::INFO_KIND, "vxlan").nest(abi::INFO_DATA);
            request.attribute(1, &key.to_ne_bytes());
            address_attribute(request, if is_v6 { 16 } else { 2 }, end.remote);
            address_attribute(request, if is_v6 { 17 } else { 4 }, end.local);
            request.attribute(5, &[abi::TTL]).attribute(7, &[0]).attribute(15, &end.port.to_be_bytes());
        }
        TunnelKind::Gre => {
            request.text(abi::INFO_KIND, if is_v6 { "ip6gre" } else { "gre" }).nest(abi::INFO_DATA);
            let flags = abi::GRE_KEY.to_be_bytes();
            request.attribute(2, &flags).attribute(3, &flags).number(4, key).number(5, key);
            address_attribute(request, 6, end.local);
            address_attribute(request, 7, end.remote);
            request.attribute(8, &[abi::TTL]);
        }
        TunnelKind::Ipip => {
            request.text(abi::INFO_KIND, "ipip").nest(abi::INFO_DATA);
            address_attribute(request, 2, end.local);
            address_attribute(request, 3, end.remote);
            request.attribute(4, &[abi::TTL]);
        }
        // It has a description of its own.
        TunnelKind::WireGuard => return,
    }
    request.end();
}

/// Confirms that a device is of this migration, or has no name of a migration yet.
fn own(device: &DeviceObject) -> io::Result<()> {
    let found = own_objects::devices()?.into_iter().find(|found| found.name == device.name);
    match found.and_then(|found| found.migration) {
        Some(other) if other != device.alias => {
            let text = format!("device {} belongs to migration {other}", device.name);
            Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
        }
        _ => Ok(()),
    }
}

/// Gives a device its migration's name.
fn name(device: &str, alias: &str) -> io::Result<()> {
    let add = |request: &mut Requests| {
        request.attribute(abi::LINK_ALIAS, alias.as_bytes());
    };
    change_link(device, add, 0)
}

fn change_link(device: &str, add: impl FnOnce(&mut Requests), flags: u32) -> io::Result<()> {
    let route = Socket::route()?;
    let mut request = Requests::default();
    request.request(abi::NEW_LINK, ACKNOWLEDGE, &link_header(0, route.index_of(device)?, flags));
    add(&mut request);
    route.confirm(request)
}

/// Removes a device, unless it belongs to another migration. The other device of a pair goes with it.
fn remove_device(device: &DeviceObject) -> io::Result<()> {
    let found = own_objects::devices()?.into_iter().find(|found| found.name == device.name);
    let Some(found) = found else { return Ok(()) };
    if found.migration.is_some_and(|other| other != device.alias) {
        return Ok(());
    }
    let mut request = Requests::default();
    request.request(abi::DELETE_LINK, ACKNOWLEDGE, &link_header(0, 0, 0)).text(abi::LINK_NAME, &device.name);
    gone(Ok(request))
}

/// Makes a device a port of a bridge, in one VLAN if the bridge knows VLANs.
fn join(device: &str, bridge: &str, vlan: Option<u16>) -> io::Result<()> {
    let route = Socket::route()?;
    let (index, bridge) = (route.index_of(device)?, route.index_of(bridge)?);
    let master = |request: &mut Requests| {
        request.attribute(abi::LINK_MASTER, &bridge.to_ne_bytes());
    };
    change_link(device, master, 0)?;
    let Some(vlan) = vlan else { return Ok(()) };
    let with_vlan = |kind: u16, vlan: u16| {
        let mut request = Requests::default();
        request.request(kind, ACKNOWLEDGE, &link_header(abi::FAMILY_BRIDGE, index, 0));
        let value = [abi::VLAN_UNTAGGED.to_ne_bytes(), vlan.to_ne_bytes()];
        request.nest(abi::LINK_FAMILY).attribute(abi::BRIDGE_VLAN, value.as_flattened()).end();
        request
    };
    present(with_vlan(abi::SET_LINK, vlan))?;
    if vlan == abi::FIRST_VLAN { Ok(()) } else { gone(Ok(with_vlan(abi::DELETE_LINK, abi::FIRST_VLAN))) }
}

fn address_request(kind: u16, device: &str, address: Prefix) -> io::Result<Requests> {
    let scope = match address.address {
        IpAddr::V6(address) if address.is_unicast_link_local() => abi::SCOPE_LINK,
        _ => abi::SCOPE_ALL,
    };
    let index = Socket::route()?.index_of(device)?.to_ne_bytes();
    let mut request = Requests::default();
    let fixed = [[family_of(address.address), address.length, 0, scope], index].concat();
    request.request(kind, flags(kind == abi::NEW_ADDRESS), &fixed);
    address_attribute(&mut request, 2, address.address);
    address_attribute(&mut request, 1, address.address);
    request.attribute(8, &(abi::NO_DUPLICATES | abi::NO_PREFIX_ROUTE).to_ne_bytes());
    Ok(request)
}

fn flags(is_made: bool) -> u16 {
    if is_made { ACKNOWLEDGE | CREATE | EXCLUSIVE } else { ACKNOWLEDGE }
}

/// Composes a request about a neighbour, or about an address for which the host answers.
fn neighbour(kind: u16, device: &str, address: IpAddr, proxy: u8) -> io::Result<Requests> {
    let index = Socket::route()?.index_of(device)?.to_ne_bytes();
    let [state_low, state_high] = abi::PERMANENT.to_ne_bytes();
    let fixed = [[family_of(address), 0, 0, 0], index, [state_low, state_high, proxy, 0]].concat();
    let mut request = Requests::default();
    // One that the kernel has learnt in the meantime is replaced.
    let making = if proxy == 0 { ACKNOWLEDGE | CREATE | REPLACE } else { flags(true) };
    request.request(kind, if kind == abi::NEW_NEIGHBOUR { making } else { ACKNOWLEDGE }, &fixed);
    address_attribute(&mut request, 1, address);
    Ok(request)
}

fn route_request(kind: u16, route: &RouteObject) -> io::Result<Requests> {
    let RouteObject { table, destination, device, next_hop } = route;
    let scope = match next_hop {
        None if destination.address.is_ipv4() => abi::SCOPE_LINK,
        _ => abi::SCOPE_ALL,
    };
    let family = family_of(destination.address);
    let first = [family, destination.length, 0, 0];
    let second = [abi::TABLE_BY_NUMBER, PROTOCOL, scope, abi::UNICAST];
    // For IPv6 the kernel asks the main table, where the host's own device has the network of the next hop. There the route
    // to this network in the same table suffices.
    let flag = if next_hop.is_some_and(|hop| hop.is_ipv4()) { abi::ON_LINK } else { 0 };
    let mut request = Requests::default();
    let fixed = [first, second, flag.to_ne_bytes()].concat();
    request.request(kind, flags(kind == abi::NEW_ROUTE), &fixed);
    request.attribute(15, &table.to_ne_bytes());
    if destination.length > 0 {
        address_attribute(&mut request, 1, destination.address);
    }
    request.attribute(4, &Socket::route()?.index_of(device)?.to_ne_bytes());
    if let Some(next_hop) = next_hop {
        address_attribute(&mut request, 5, *next_hop);
    }
    Ok(request)
}

fn policy_request(kind: u16, rule: &PolicyRule) -> Requests {
    let bits: u8 = if rule.is_v6() { 128 } else { 32 };
    let length = |address: Option<IpAddr>| if address.is_some() { bits } else { 0 };
    let family = if rule.is_v6() { abi::FAMILY_IPV6 } else { abi::FAMILY_IPV4 };
    let first = [family, length(rule.to), length(rule.from), 0];
    let fixed = [first, [0, 0, 0, abi::TO_TABLE], [0; 4]].concat();
    let mut request = Requests::default();
    request.request(kind, flags(kind == abi::NEW_RULE), &fixed);
    request.attribute(6, &rule.priority.to_ne_bytes()).attribute(15, &rule.table.to_ne_bytes());
    request.attribute(21, &[PROTOCOL]);
    for (kind, address) in [(1, rule.to), (2, rule.from)] {
        if let Some(address) = address {
            address_attribute(&mut request, kind, address);
        }
    }
    if let Some((mark, mask)) = rule.mark {
        request.attribute(10, &mark.to_ne_bytes()).attribute(16, &mask.to_ne_bytes());
    }
    request
}

/// Makes a device of a kind, and removes it: returns true if this kernel has the kind.
///
/// # Errors
/// Others than that it does not have it.
pub fn has_tunnel(kind: TunnelKind, name: &str, ends: [IpAddr; 2]) -> io::Result<bool> {
    let [local, remote] = ends;
    let end = TunnelEndpoint { kind, identifier: 0x57_ffff, local, remote, port: 0, other_port: 0 };
    let device = DeviceObject {
        name: name.to_owned(),
        alias: "a pre-flight check".to_owned(),
        mac: None,
        mtu: super::tunnel::LEAST_V6_MTU,
        kind: DeviceKind::Tunnel(end),
    };
    let mut request = Requests::default();
    request.request(abi::NEW_LINK, ACKNOWLEDGE | CREATE | EXCLUSIVE, &link_header(0, 0, 0));
    request.text(abi::LINK_NAME, name).nest(abi::LINK_INFO);
    if kind == TunnelKind::WireGuard {
        request.text(abi::INFO_KIND, "wireguard");
    } else {
        tunnel(&mut request, end);
    }
    request.end();
    match Socket::route()?.confirm(request) {
        Ok(()) => remove_device(&device).map(|()| true),
        // No module of the kernel knows the kind.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes a table with a rule for frames that the host sends, and removes it: returns true if this kernel has such rules.
///
/// # Errors
/// Others than that it does not have them.
pub fn has_egress() -> io::Result<bool> {
    let hook = ChainHook::Egress("lo".to_owned());
    let rules = vec![vec![RuleExpression::Arp, RuleExpression::Accept]];
    let chain = RuleChain { name: "try".to_owned(), translates: false, hook, priority: 0, rules };
    let name = format!("{TABLE_START}a-pre-flight-check");
    let table = RuleTable { family: RuleFamily::Netdev, name, chains: vec![chain] };
    let requests = encoding::make(&table, |_| Err(io::ErrorKind::NotFound.into()))?;
    match Socket::netfilter()?.confirm(requests) {
        Ok(()) => Socket::netfilter()?.confirm(encoding::remove(&table)).map(|()| true),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => Ok(false),
        // A kernel that knows no such place takes it for one of no meaning.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_a_device_that_is_gone_need_nothing() {
        let no_key = || Err(io::ErrorKind::NotFound.into());
        let setting = |before: Option<&str>| {
            let path = "net/ipv6/conf/whimbrel-no-such/accept_ra".to_owned();
            let before = before.map(str::to_owned);
            KernelObject::Sysctl(Sysctl { path, value: "2".to_owned(), before })
        };
        remove(&setting(Some("1"))).unwrap();
        make(&setting(Some("1")), &no_key).unwrap();
        // One of our own is to be there.
        make(&setting(None), &no_key).unwrap_err();
    }
}
