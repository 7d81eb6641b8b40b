//! Ports of bridges: the place of a tap in the networks of its host, and the gateways of a bridge.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::ethernet::Mac;
use crate::netlink::{ACKNOWLEDGE, DUMP, Requests, Socket, attribute, attributes};

/// Numbers of `linux/rtnetlink.h`, `linux/if_link.h`, `linux/if_bridge.h` and `linux/neighbour.h`.
mod abi {
    pub(super) const GET_LINK: u16 = 18;
    pub(super) const LINK_BYTES: usize = 16;
    pub(super) const LINK_NAME: u16 = 3;
    pub(super) const LINK_MASTER: u16 = 10;
    pub(super) const LINK_PORT: u16 = 12;
    pub(super) const LINK_INFO: u16 = 18;
    pub(super) const INFO_DATA: u16 = 2;
    pub(super) const FILTERS_VLANS: u16 = 7;
    pub(super) const LINK_FAMILY: u16 = 26;
    pub(super) const LINK_MASK: u16 = 29;
    pub(super) const PORT_STATE: u16 = 1;
    pub(super) const FORWARDING: u8 = 3;
    pub(super) const BRIDGE_VLAN: u16 = 2;
    pub(super) const WITH_VLANS: u32 = 2;
    pub(super) const VLAN_UNTAGGED_IN: u16 = 2;
    pub(super) const VLAN_UNTAGGED_OUT: u16 = 4;
    pub(super) const FAMILY_BRIDGE: u8 = 7;
    pub(super) const GET_ROUTE: u16 = 26;
    pub(super) const ROUTE_BYTES: usize = 12;
    pub(super) const ROUTE_DEVICE: u16 = 4;
    pub(super) const ROUTE_GATEWAY: u16 = 5;
    pub(super) const DELETE_NEIGHBOUR: u16 = 29;
    pub(super) const GET_NEIGHBOUR: u16 = 30;
    pub(super) const NEIGHBOUR_BYTES: usize = 12;
    pub(super) const NEIGHBOUR_ADDRESS: u16 = 1;
    pub(super) const NEIGHBOUR_LLADDR: u16 = 2;
    /// Entry of a bridge, not of the port alone.
    pub(super) const OF_MASTER: u8 = 4;
    /// States in which an entry has a MAC address: reachable, stale, delayed, probed, permanent.
    pub(super) const KNOWN: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x80;
}

/// Place of an interface in a bridge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BridgePort {
    /// Name of the bridge, or of another switch of the host.
    pub bridge: String,
    /// Index of that device.
    pub bridge_index: u32,
    /// VLAN of frames without a tag; none if the bridge knows no VLANs.
    pub vlan: Option<u16>,
    /// The same for the host itself.
    pub host_vlan: Option<u16>,
    /// VLANs whose frames pass the port with a tag.
    pub tagged: Vec<u16>,
    /// True if the port passes frames on; a bridge may wait with that for a while.
    pub is_forwarding: bool,
}

/// Returns the place of an interface of this thread's network namespace; none if it is in no bridge.
///
/// # Errors
/// `NotFound` if there is no such interface; others if the kernel refuses the request.
pub fn bridge_port(interface: &str) -> io::Result<Option<BridgePort>> {
    let links = links(0)?;
    let Some(link) = links.iter().find(|link| link.name == interface) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let Some(bridge) = links.iter().find(|bridge| Some(bridge.index) == link.master) else { return Ok(None) };
    // A kernel without bridges has other switches all the same.
    let ports = links_of_bridges().unwrap_or_default();
    Ok(Some(place(link.index, bridge, &ports)))
}

fn links_of_bridges() -> io::Result<Vec<Link>> {
    links(abi::FAMILY_BRIDGE)
}

/// Returns all devices, or those of bridges with their VLANs.
fn links(family: u8) -> io::Result<Vec<Link>> {
    let mut fixed = [0; abi::LINK_BYTES];
    fixed[0] = family;
    let mut request = Requests::default();
    request.request(abi::GET_LINK, DUMP, &fixed);
    if family == abi::FAMILY_BRIDGE {
        request.attribute(abi::LINK_MASK, &abi::WITH_VLANS.to_ne_bytes());
    }
    let mut links = Vec::new();
    Socket::route()?.dump(request, |body| links.extend(Link::parse(body)))?;
    Ok(links)
}

/// A device, as a message describes it.
#[derive(Debug)]
struct Link {
    index: u32,
    name: String,
    master: Option<u32>,
    /// State of a port.
    state: Option<u8>,
    /// VLANs: flags and number.
    vlans: Vec<(u16, u16)>,
    /// True for a bridge that has networks of their own for VLANs; others pass tags on as they are.
    filters_vlans: bool,
}

impl Link {
    fn parse(body: &[u8]) -> Option<Self> {
        let rest = body.get(abi::LINK_BYTES..)?;
        let name = attribute(rest, abi::LINK_NAME)?;
        let name = name.strip_suffix(&[0]).unwrap_or(name);
        let port = attribute(rest, abi::LINK_PORT);
        let vlans = attribute(rest, abi::LINK_FAMILY).into_iter().flat_map(attributes);
        let vlans = vlans.filter(|(kind, _)| *kind == abi::BRIDGE_VLAN).filter_map(|(_, value)| {
            Some((
                u16::from_ne_bytes(*value.first_chunk()?),
                u16::from_ne_bytes(*value.get(2..)?.first_chunk()?),
            ))
        });
        let data = attribute(rest, abi::LINK_INFO).and_then(|info| attribute(info, abi::INFO_DATA));
        let filters = data.and_then(|data| attribute(data, abi::FILTERS_VLANS));
        Some(Self {
            filters_vlans: filters.is_some_and(|filters| filters.first() == Some(&1)),
            index: number(body.get(4..)?)?,
            name: String::from_utf8_lossy(name).into_owned(),
            master: attribute(rest, abi::LINK_MASTER).and_then(number),
            state: port.and_then(|port| attribute(port, abi::PORT_STATE)?.first().copied()),
            vlans: vlans.collect(),
        })
    }

    /// Returns the VLAN of frames without a tag.
    fn untagged(&self) -> Option<u16> {
        self.vlans.iter().find(|(flags, _)| flags & abi::VLAN_UNTAGGED_IN != 0).map(|(_, vlan)| *vlan)
    }
}

/// Describes the port with this index of a bridge. `ports` are the devices of all bridges.
fn place(index: u32, bridge: &Link, ports: &[Link]) -> BridgePort {
    let of = |index| ports.iter().find(move |port| port.index == index);
    let untagged = |index| of(index).filter(|_| bridge.filters_vlans).and_then(Link::untagged);
    let tagged = |port: &Link| {
        let is_tagged = |flags: u16| flags & (abi::VLAN_UNTAGGED_IN | abi::VLAN_UNTAGGED_OUT) == 0;
        port.vlans.iter().filter(|(flags, _)| is_tagged(*flags)).map(|(_, vlan)| *vlan).collect()
    };
    let port = of(index);
    BridgePort {
        bridge: bridge.name.clone(),
        bridge_index: bridge.index,
        vlan: untagged(index),
        host_vlan: untagged(bridge.index),
        tagged: port.filter(|_| bridge.filters_vlans).map(tagged).unwrap_or_default(),
        // Other switches have no such state.
        is_forwarding: port.and_then(|port| port.state).is_none_or(|state| state == abi::FORWARDING),
    }
}

/// Returns the gateways of this host behind a device whose MAC addresses the host knows.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn gateways(device: u32) -> io::Result<Vec<IpAddr>> {
    let (next, mut known) = (next_hops(device)?, BTreeSet::new());
    let mut request = Requests::default();
    request.request(abi::GET_NEIGHBOUR, DUMP, &[0; abi::NEIGHBOUR_BYTES]);
    Socket::route()?.dump(request, |body| known.extend(neighbour(body, device)))?;
    Ok(next.intersection(&known).copied().collect())
}

/// Returns the neighbours behind a device, with their MAC addresses; none if there is no such device.
pub(crate) fn neighbours(device: &str) -> io::Result<Vec<(IpAddr, Mac)>> {
    let route = Socket::route()?;
    let Ok(index) = route.index_of(device) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    let mut request = Requests::default();
    request.request(abi::GET_NEIGHBOUR, DUMP, &[0; abi::NEIGHBOUR_BYTES]);
    route.dump(request, |body| found.extend(neighbour(body, index).zip(mac(body))))?;
    Ok(found)
}

/// Returns the MAC address of the neighbour that a message describes.
fn mac(body: &[u8]) -> Option<Mac> {
    let mac = attribute(body.get(abi::NEIGHBOUR_BYTES..)?, abi::NEIGHBOUR_LLADDR)?;
    mac.try_into().ok().map(Mac)
}

/// Returns the next hops of routes that lead through a device, whether or not they are known as neighbours.
pub(crate) fn next_hops(device: u32) -> io::Result<BTreeSet<IpAddr>> {
    let mut next = BTreeSet::new();
    let mut request = Requests::default();
    request.request(abi::GET_ROUTE, DUMP, &[0; abi::ROUTE_BYTES]);
    Socket::route()?.dump(request, |body| next.extend(next_hop(body, device)))?;
    Ok(next)
}

/// Returns the next hop of a route that leads through a device.
fn next_hop(body: &[u8], device: u32) -> Option<IpAddr> {
    let rest = body.get(abi::ROUTE_BYTES..)?;
    let leads = attribute(rest, abi::ROUTE_DEVICE).and_then(number) == Some(device);
    attribute(rest, abi::ROUTE_GATEWAY).filter(|_| leads).and_then(address)
}

/// Returns the address of a neighbour behind a device whose MAC address is known.
fn neighbour(body: &[u8], device: u32) -> Option<IpAddr> {
    let rest = body.get(abi::NEIGHBOUR_BYTES..)?;
    let state = u16::from_ne_bytes(*body.get(8..)?.first_chunk()?);
    let is_known = number(body.get(4..)?)? == device && state & abi::KNOWN != 0;
    attribute(rest, abi::NEIGHBOUR_ADDRESS).filter(|_| is_known).and_then(address)
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let short = <[u8; 4]>::try_from(bytes).map(|bytes| Ipv4Addr::from(bytes).into());
    short.ok().or_else(|| <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).into()))
}

/// Makes a bridge forget that a MAC address is behind a port, which it has learnt from a frame.
///
/// # Errors
/// Among others if the bridge does not know the address.
pub fn forget(interface: &str, mac: Mac) -> io::Result<()> {
    let links = links(0)?;
    let link = links.iter().find(|link| link.name == interface).ok_or(io::ErrorKind::NotFound)?;
    let mut fixed = [0; abi::NEIGHBOUR_BYTES];
    fixed[0] = abi::FAMILY_BRIDGE;
    fixed[4..8].copy_from_slice(&link.index.to_ne_bytes());
    fixed[10] = abi::OF_MASTER;
    let mut request = Requests::default();
    request.request(abi::DELETE_NEIGHBOUR, ACKNOWLEDGE, &fixed);
    request.attribute(abi::NEIGHBOUR_LLADDR, &mac.0);
    Socket::route()?.confirm(request)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netlink::answers;

    /// Returns the body of a message with attributes.
    fn message(fixed: &[u8], add: impl FnOnce(&mut Requests)) -> Vec<u8> {
        let mut requests = Requests::default();
        requests.request(0, 0, fixed);
        add(&mut requests);
        let bytes = requests.finish();
        answers(&bytes).next().unwrap().body.to_vec()
    }

    fn link(index: u32, name: &str, master: Option<u32>, vlans: &[(u16, u16)]) -> Link {
        let mut fixed = [0; abi::LINK_BYTES];
        fixed[4..8].copy_from_slice(&index.to_ne_bytes());
        let body = message(&fixed, |requests| {
            requests.text(abi::LINK_NAME, name);
            if let Some(master) = master {
                requests.attribute(abi::LINK_MASTER, &master.to_ne_bytes());
                requests.nest(abi::LINK_PORT).attribute(abi::PORT_STATE, &[abi::FORWARDING]).end();
            }
            requests.nest(abi::LINK_FAMILY);
            for (flags, vlan) in vlans {
                let value = [flags.to_ne_bytes(), vlan.to_ne_bytes()];
                requests.attribute(abi::BRIDGE_VLAN, value.as_flattened());
            }
            requests.end();
        });
        Link::parse(&body).unwrap()
    }

    #[test]
    fn a_port_has_the_vlans_of_its_bridge() {
        const BOTH: u16 = abi::VLAN_UNTAGGED_IN | abi::VLAN_UNTAGGED_OUT;
        let bridge = Link { filters_vlans: true, ..link(3, "br0", None, &[]) };
        let ports = [
            link(7, "tap0", Some(3), &[(BOTH, 5), (0, 6), (abi::VLAN_UNTAGGED_OUT, 7)]),
            link(3, "br0", None, &[(BOTH, 1)]),
        ];
        let port = place(7, &bridge, &ports);
        let expected = BridgePort {
            bridge: "br0".to_owned(),
            bridge_index: 3,
            vlan: Some(5),
            host_vlan: Some(1),
            tagged: vec![6],
            is_forwarding: true,
        };
        assert_eq!(port, expected);
        let unfiltered = place(7, &Link { filters_vlans: false, ..link(3, "br0", None, &[]) }, &ports);
        assert_eq!(unfiltered, BridgePort { vlan: None, host_vlan: None, tagged: Vec::new(), ..expected });
        let unknown = place(8, &bridge, &ports);
        assert_eq!((unknown.vlan, unknown.tagged.len(), unknown.is_forwarding), (None, 0, true));
        let blocked = Link { state: Some(1), ..link(8, "tap1", Some(3), &[]) };
        assert!(!place(8, &bridge, &[blocked]).is_forwarding);
    }

    #[test]
    fn a_bridge_says_if_it_filters_vlans() {
        for (filters, value) in [(true, 1), (false, 0)] {
            let body = message(&[0; abi::LINK_BYTES], |requests| {
                requests.text(abi::LINK_NAME, "br0");
                requests.nest(abi::LINK_INFO).nest(abi::INFO_DATA).attribute(abi::FILTERS_VLANS, &[value]);
            });
            assert_eq!(Link::parse(&body).unwrap().filters_vlans, filters);
        }
    }

    #[test]
    fn gateways_are_next_hops_behind_the_device() {
        let gateway = [10, 0, 0, 254];
        let route = |device: u32| {
            message(&[0; abi::ROUTE_BYTES], |requests| {
                requests.attribute(abi::ROUTE_DEVICE, &device.to_ne_bytes());
                requests.attribute(abi::ROUTE_GATEWAY, &gateway);
            })
        };
        let expected = Some(IpAddr::from(gateway));
        assert_eq!((next_hop(&route(3), 3), next_hop(&route(4), 3)), (expected, None));
        let entry = |device: u32, state: u16| {
            let mut fixed = [0; abi::NEIGHBOUR_BYTES];
            fixed[4..8].copy_from_slice(&device.to_ne_bytes());
            fixed[8..10].copy_from_slice(&state.to_ne_bytes());
            message(&fixed, |requests| {
                requests.attribute(abi::NEIGHBOUR_ADDRESS, &gateway);
            })
        };
        let (stale, failed) = (4, 0x20);
        assert_eq!(neighbour(&entry(3, stale), 3), expected);
        assert_eq!((neighbour(&entry(3, failed), 3), neighbour(&entry(4, stale), 3)), (None, None));
        assert_eq!(address(&[1, 2, 3]), None);
        assert_eq!(address(&Ipv6Addr::LOCALHOST.octets()), Some(IpAddr::from(Ipv6Addr::LOCALHOST)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(Link::parse(&bytes));
            prop_assert!(next_hop(&bytes, 0).is_none() || bytes.len() > abi::ROUTE_BYTES);
            prop_assert!(neighbour(&bytes, 0).is_none() || bytes.len() > abi::NEIGHBOUR_BYTES);
        }
    }
}
