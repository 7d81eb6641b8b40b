//! Facts of this host for redirections, read from its kernel, in the network namespace of the calling thread.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use tracee::{PacketSocket, VIRTIO_HEADER_BYTES};

use super::kernel;
use super::kernel_names::{KernelNames, number_of_device};
use super::model::{Lan, MOST_NETWORKS, Prefix, Subnet};
use super::plan::KernelFeatures;
use super::preflight::{DropPolicyChain, RedirectionFacts};
use super::tunnel::{FreePorts, TunnelKind};
use crate::bridge_ports;
use crate::conntrack;
use crate::divert::MARK;
use crate::ethernet::{Frame, Mac};
use crate::filter;
use crate::netlink::{ACKNOWLEDGE, DUMP, Requests, Socket, attribute};
use crate::own_objects;
use crate::probe::{NetworkProof, question};

/// Directory of sysctls.
const SETTINGS: &str = "/proc/sys";
/// Pause between two looks for answers.
const PAUSE: Duration = Duration::from_millis(10);
/// Pause between two questions for the same address.
const QUESTION_PAUSE: Duration = Duration::from_millis(200);
/// Longest wait for a neighbour that has an address which the guest is to get.
const PATIENCE: Duration = Duration::from_secs(1);

/// Numbers of `linux/rtnetlink.h`, `linux/if_link.h` and `linux/netfilter/nf_tables.h`.
mod abi {
    pub(super) const GET_LINK: u16 = 18;
    pub(super) const LINK_BYTES: usize = 16;
    pub(super) const LINK_ADDRESS: u16 = 1;
    pub(super) const LINK_MTU: u16 = 4;
    pub(super) const LINK_INFO: u16 = 18;
    pub(super) const INFO_KIND: u16 = 1;
    pub(super) const TUN_DRIVER: &[u8] = b"tun\0";
    pub(super) const ETHERNET: u16 = 1;
    pub(super) const GET_ADDRESS: u16 = 22;
    pub(super) const ADDRESS_BYTES: usize = 8;
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const LOCAL: u16 = 2;
    pub(super) const GET_ROUTE: u16 = 26;
    pub(super) const ROUTE_BYTES: usize = 12;
    pub(super) const ROUTE_DESTINATION: u16 = 1;
    pub(super) const ROUTE_DEVICE: u16 = 4;
    pub(super) const ROUTE_METRICS: u16 = 8;
    pub(super) const METRIC_MTU: u16 = 2;
    pub(super) const GET_CHAIN: u16 = 10 << 8 | 4;
    pub(super) const NETFILTER_BYTES: usize = 4;
    pub(super) const CHAIN_TABLE: u16 = 1;
    pub(super) const CHAIN_NAME: u16 = 3;
    pub(super) const CHAIN_HOOK: u16 = 4;
    pub(super) const CHAIN_POLICY: u16 = 5;
    pub(super) const HOOK_NUMBER: u16 = 1;
    pub(super) const INPUT: u32 = 1;
    pub(super) const FORWARD: u32 = 2;
    pub(super) const DROP: u32 = 0;
}

fn setting(path: &str) -> Option<String> {
    fs::read_to_string(Path::new(SETTINGS).join(path)).ok().map(|value| value.trim().to_owned())
}

/// Returns what the host can do. `has_egress` is tried by a table that is removed at once.
///
/// # Errors
/// If the settings cannot be listed, or this process may not use netfilter.
pub fn kernel_features() -> io::Result<KernelFeatures> {
    let forwarding = setting("net/ipv6/conf/all/forwarding");
    let mut advertised_devices = Vec::new();
    if forwarding.is_some() {
        for entry in fs::read_dir(Path::new(SETTINGS).join("net/ipv6/conf"))? {
            let device = entry?.file_name().to_string_lossy().into_owned();
            let is_single = device != "all" && device != "default" && number_of_device(&device).is_none();
            let learns = setting(&format!("net/ipv6/conf/{device}/accept_ra")).as_deref() == Some("1");
            if is_single && learns {
                advertised_devices.push(device);
            }
        }
        advertised_devices.sort();
    }
    Ok(KernelFeatures {
        has_v6: forwarding.is_some(),
        forwards_v6_by_device: setting("net/ipv6/conf/all/force_forwarding").is_some(),
        v6_forwarding: forwarding.unwrap_or_default(),
        send_redirects: setting("net/ipv4/conf/all/send_redirects").unwrap_or_else(|| "1".to_owned()),
        advertised_devices,
        has_egress: kernel::has_egress()?,
    })
}

/// Returns the kinds of tunnels that the kernel has. Each is tried: a device with this number's name is made between two
/// addresses, and removed at once.
///
/// # Errors
/// If this process may not make devices. A kind that the kernel does not have is no error.
pub fn tunnels(number: u32, ends: [IpAddr; 2]) -> io::Result<BTreeSet<TunnelKind>> {
    let name = KernelNames(number).tunnel();
    let is_v6 = ends[0].is_ipv6();
    let mut found = BTreeSet::new();
    for kind in TunnelKind::ALL.into_iter().filter(|kind| !is_v6 || *kind != TunnelKind::Ipip) {
        match kernel::has_tunnel(kind, &name, ends) {
            Ok(true) => drop(found.insert(kind)),
            Ok(false) => {}
            // Another tunnel between these addresses stands against it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Returns the numbers of redirections whose devices are there.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn numbers() -> io::Result<BTreeSet<u32>> {
    Ok(own_objects::devices()?.iter().filter_map(|device| number_of_device(&device.name)).collect())
}

/// Returns true if connections can be tracked.
pub fn has_conntrack() -> bool {
    Socket::netfilter().and_then(|netfilter| conntrack::check(&netfilter)).is_ok()
}

/// Returns true if an interface is a tap.
///
/// # Errors
/// If there is no such interface, or the kernel refuses the request.
pub fn is_tap(interface: &str) -> io::Result<bool> {
    let route = Socket::route()?;
    let mut fixed = [0; abi::LINK_BYTES];
    fixed[4..8].copy_from_slice(&route.index_of(interface)?.to_ne_bytes());
    let mut request = Requests::default();
    request.request(abi::GET_LINK, ACKNOWLEDGE, &fixed);
    let mut is_tap = false;
    route.dump(request, |body| is_tap |= describes_tap(body).unwrap_or(false))?;
    Ok(is_tap)
}

/// Returns true if a message describes a device of the tun driver that has frames.
fn describes_tap(body: &[u8]) -> Option<bool> {
    let kind = u16::from_ne_bytes(*body.get(2..)?.first_chunk()?);
    let info = attribute(body.get(abi::LINK_BYTES..)?, abi::LINK_INFO)?;
    Some(kind == abi::ETHERNET && attribute(info, abi::INFO_KIND)? == abi::TUN_DRIVER)
}

/// Returns the addresses of the host, each with its network.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn own() -> io::Result<Vec<Prefix>> {
    Ok(own_by_device()?.into_iter().map(|(_, address)| address).collect())
}

/// Returns the addresses of the host, each with the number of its device.
fn own_by_device() -> io::Result<Vec<(u32, Prefix)>> {
    let mut request = Requests::default();
    request.request(abi::GET_ADDRESS, DUMP, &[0; abi::ADDRESS_BYTES]);
    let mut found = Vec::new();
    Socket::route()?.dump(request, |body| {
        let device = body.get(4..).and_then(<[u8]>::first_chunk).map(|index| u32::from_ne_bytes(*index));
        found.extend(device.zip(own_address(body)));
    })?;
    Ok(found)
}

/// Returns the network of an interface, behind which a guest's card is, as far as the host knows it: by its own
/// addresses there, its gateways, and the neighbours of IPv6 with which it has spoken.
///
/// # Errors
/// If there is no such interface, or the kernel refuses a request.
pub fn lan(interface: &str, card: Mac) -> io::Result<Lan> {
    let port = bridge_ports::bridge_port(interface)?;
    let index =
        port.as_ref().map_or_else(|| Socket::route()?.index_of(interface), |port| Ok(port.bridge_index))?;
    let mtu = device_mtu(index)?;
    let mut lan = Lan { bridge: None, vlan: None, mtu, subnets: Vec::new(), neighbours: Vec::new() };
    let Some(port) = port else { return Ok(lan) };
    // The host's own addresses in a bridge are in the guest's network only if they are in the same VLAN.
    if port.vlan == port.host_vlan {
        let own = own_by_device()?.into_iter().filter(|(device, _)| *device == port.bridge_index);
        let own = own.map(|(_, address)| address).filter(|own| !is_link_local(own.address));
        let gateways: Vec<_> = bridge_ports::next_hops(port.bridge_index)?.into_iter().collect();
        lan.subnets = subnets(own, &gateways);
        lan.neighbours = v6_neighbours(&lan.subnets, &bridge_ports::neighbours(&port.bridge)?, card);
    }
    (lan.bridge, lan.vlan) = (Some(port.bridge), port.vlan);
    Ok(lan)
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// Returns the networks of these addresses, each with its gateway.
fn subnets(own: impl Iterator<Item = Prefix>, gateways: &[IpAddr]) -> Vec<Subnet> {
    let gateway = |prefix: Prefix| {
        let is_there = |gateway: &&IpAddr| {
            prefix.contains(**gateway) || is_link_local(**gateway) && prefix.address.is_ipv6()
        };
        gateways.iter().find(is_there).copied()
    };
    own.map(|prefix| Subnet { prefix, gateway: gateway(prefix) }).collect()
}

/// Returns the addresses of IPv6 in these networks that are not the guest's: those of the host, and of its neighbours.
fn v6_neighbours(subnets: &[Subnet], known: &[(IpAddr, Mac)], card: Mac) -> Vec<Ipv6Addr> {
    let v6 = |address: IpAddr| match address {
        IpAddr::V6(address) => Some(address).filter(|address| !address.is_unicast_link_local()),
        IpAddr::V4(_) => None,
    };
    let is_there = |address: &IpAddr| subnets.iter().any(|network| network.prefix.contains(*address));
    let own: Vec<_> = subnets.iter().filter_map(|network| v6(network.prefix.address)).collect();
    let others = known.iter().filter(|(_, mac)| *mac != card).map(|(address, _)| *address);
    let others: BTreeSet<_> = others.filter(is_there).filter_map(v6).collect();
    let others = others.into_iter().filter(|address| !own.contains(address));
    own.iter().copied().chain(others).take(MOST_NETWORKS).collect()
}

/// Returns the facts of this host for a redirection with a tunnel of this number between these addresses, its own first.
/// `interface` is that of the guest's card, if it is here; `asked` are addresses that the guest is to get in its bridge. Which
/// ports are free the keeper knows.
///
/// # Errors
/// If an interface does not exist, the way to the other end is unknown, or the kernel refuses a request.
pub fn read_facts(
    interface: Option<&str>,
    number: u32,
    ends: [IpAddr; 2],
    asked: &[IpAddr],
) -> io::Result<RedirectionFacts> {
    let port = interface.map(bridge_ports::bridge_port).transpose()?.flatten();
    let bridge = port.filter(|port| port.vlan == port.host_vlan);
    let in_use = match bridge.filter(|_| !asked.is_empty()) {
        Some(port) => in_use(&port.bridge, asked, PATIENCE)?,
        None => BTreeSet::new(),
    };
    let numbers = numbers()?;
    // A number that is in use is a finding of its own.
    let tunnels = if numbers.contains(&number) { TunnelKind::ALL.into() } else { tunnels(number, ends)? };
    Ok(RedirectionFacts {
        tunnels,
        kernel_features: kernel_features()?,
        own: own()?,
        in_use,
        closed: drop_policy_chains()?,
        path_mtu: path_mtu(ends[1])?,
        numbers,
        has_conntrack: has_conntrack(),
        is_tap: interface.map_or(Ok(false), is_tap)?,
        ports: FreePorts::default(),
    })
}

fn own_address(body: &[u8]) -> Option<Prefix> {
    let listed = body.get(abi::ADDRESS_BYTES..)?;
    // The other one is the peer's address where both are there.
    let address = attribute(listed, abi::LOCAL).or_else(|| attribute(listed, abi::ADDRESS))?;
    Some(Prefix { address: address_of(address)?, length: *body.get(1)? })
}

fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    let short = <[u8; 4]>::try_from(bytes).map(|bytes| Ipv4Addr::from(bytes).into());
    short.ok().or_else(|| <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).into()))
}

fn number(bytes: &[u8], kind: u16) -> Option<u32> {
    attribute(bytes, kind)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// Returns the largest packet that the host sends on the way to an address, in bytes.
///
/// # Errors
/// If there is no route to the address.
pub fn path_mtu(to: IpAddr) -> io::Result<u32> {
    let (family, octets) = match to {
        IpAddr::V4(to) => (2, to.octets().to_vec()),
        IpAddr::V6(to) => (10, to.octets().to_vec()),
    };
    let mut fixed = [0; abi::ROUTE_BYTES];
    fixed[0] = family;
    fixed[1] = octets.len() as u8 * 8;
    let mut request = Requests::default();
    request.request(abi::GET_ROUTE, ACKNOWLEDGE, &fixed).attribute(abi::ROUTE_DESTINATION, &octets);
    let (mut device, mut learnt) = (None, None);
    Socket::route()?.dump(request, |body| {
        let listed = body.get(abi::ROUTE_BYTES..).unwrap_or_default();
        device = number(listed, abi::ROUTE_DEVICE);
        learnt = attribute(listed, abi::ROUTE_METRICS).and_then(|metrics| number(metrics, abi::METRIC_MTU));
    })?;
    let mtu = device_mtu(device.ok_or(io::ErrorKind::HostUnreachable)?)?;
    Ok(learnt.filter(|learnt| *learnt > 0).map_or(mtu, |learnt: u32| learnt.min(mtu)))
}

/// Returns the largest packet that a device sends, in bytes.
fn device_mtu(index: u32) -> io::Result<u32> {
    let mut fixed = [0; abi::LINK_BYTES];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut request = Requests::default();
    request.request(abi::GET_LINK, ACKNOWLEDGE, &fixed);
    let mut mtu = None;
    Socket::route()?.dump(request, |body| {
        mtu = mtu.or(number(body.get(abi::LINK_BYTES..).unwrap_or_default(), abi::LINK_MTU));
    })?;
    mtu.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Returns the chains of firewalls that let pass only what their rules name.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn drop_policy_chains() -> io::Result<Vec<DropPolicyChain>> {
    let mut request = Requests::default();
    request.request(abi::GET_CHAIN, DUMP, &[0; abi::NETFILTER_BYTES]);
    let mut found = Vec::new();
    Socket::netfilter()?.dump(request, |body| found.extend(drop_policy_chain(body)))?;
    found.sort();
    Ok(found)
}

fn drop_policy_chain(body: &[u8]) -> Option<DropPolicyChain> {
    let listed = body.get(abi::NETFILTER_BYTES..)?;
    let family = match body.first()? {
        1 => "inet",
        2 => "ip",
        10 => "ip6",
        _ => return None,
    };
    let big =
        |bytes: &[u8], kind| attribute(bytes, kind)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
    let hook = big(attribute(listed, abi::CHAIN_HOOK)?, abi::HOOK_NUMBER)?;
    let is_closed =
        big(listed, abi::CHAIN_POLICY)? == abi::DROP && [abi::INPUT, abi::FORWARD].contains(&hook);
    let text = |kind| {
        let text = attribute(listed, kind)?;
        Some(String::from_utf8_lossy(text.strip_suffix(&[0]).unwrap_or(text)).into_owned())
    };
    let name = format!("{family} {} {}", text(abi::CHAIN_TABLE)?, text(abi::CHAIN_NAME)?);
    is_closed.then_some(DropPolicyChain { name, forwards: hook == abi::FORWARD })
}

/// Asks in the network of a device of this host which of these addresses are in use, by duplicate address detection (RFC
/// 5227, RFC 4862), until all have answered, or for this long.
///
/// # Errors
/// If an interface does not exist, or this process may not open packet sockets.
pub fn in_use(device: &str, addresses: &[IpAddr], patience: Duration) -> io::Result<BTreeSet<IpAddr>> {
    let device_mac = device_mac(device)?;
    let listener = PacketSocket::listen(device, &filter::probe())?;
    let sender = PacketSocket::sender(device, MARK)?;
    let mut proof = NetworkProof::new(0, device_mac, &[], addresses);
    let (deadline, mut asked) = (Instant::now() + patience, None);
    let mut buffer = [0; filter::FRAME_BYTES];
    while proof.silent().next().is_some() && Instant::now() < deadline {
        if asked.is_none_or(|asked: Instant| asked.elapsed() >= QUESTION_PAUSE) {
            asked = Some(Instant::now());
            for address in proof.silent().collect::<Vec<_>>() {
                sender.send([0; VIRTIO_HEADER_BYTES], &question(address, device_mac))?;
            }
        }
        thread::sleep(PAUSE);
        while let Some(received) = listener.receive(&mut buffer)? {
            let bytes = buffer.get(..received.bytes).unwrap_or(&buffer);
            if let Some(frame) = Frame::parse(bytes, received.vlan).filter(|_| !received.is_outgoing) {
                proof.observe(&frame);
            }
        }
    }
    let silent: BTreeSet<_> = proof.silent().collect();
    Ok(addresses.iter().copied().filter(|address| !silent.contains(address)).collect())
}

/// Returns the MAC address of a device of this host.
fn device_mac(device: &str) -> io::Result<Mac> {
    let route = Socket::route()?;
    let mut fixed = [0; abi::LINK_BYTES];
    fixed[4..8].copy_from_slice(&route.index_of(device)?.to_ne_bytes());
    let mut request = Requests::default();
    request.request(abi::GET_LINK, ACKNOWLEDGE, &fixed);
    let mut found = None;
    route.dump(request, |body| {
        let listed = body.get(abi::LINK_BYTES..).unwrap_or_default();
        found = attribute(listed, abi::LINK_ADDRESS).and_then(|address| address.try_into().ok()).map(Mac);
    })?;
    found.ok_or_else(|| io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netlink::answers;

    /// Composes the description of a chain.
    fn chain(family: u8, hook: Option<u32>, policy: u32) -> Vec<u8> {
        let mut requests = Requests::default();
        requests.request(0, 0, &[family, 0, 0, 0]);
        requests.text(abi::CHAIN_TABLE, "filter").text(abi::CHAIN_NAME, "FORWARD");
        requests.number(abi::CHAIN_POLICY, policy);
        if let Some(hook) = hook {
            requests.nest(abi::CHAIN_HOOK).number(abi::HOOK_NUMBER, hook).end();
        }
        let bytes = requests.finish();
        answers(&bytes).next().unwrap().body.to_vec()
    }

    #[test]
    fn closed_chains_are_told_from_others() {
        let expected = DropPolicyChain { name: "ip filter FORWARD".to_owned(), forwards: true };
        assert_eq!(drop_policy_chain(&chain(2, Some(abi::FORWARD), abi::DROP)), Some(expected));
        assert!(!drop_policy_chain(&chain(1, Some(abi::INPUT), abi::DROP)).unwrap().forwards);
        for open in [
            chain(2, Some(abi::FORWARD), 1),
            chain(2, None, abi::DROP),
            chain(2, Some(3), abi::DROP),
            chain(5, Some(abi::FORWARD), abi::DROP),
        ] {
            assert_eq!(drop_policy_chain(&open), None);
        }
    }

    #[test]
    fn networks_have_the_gateways_in_them() {
        let prefix = |text: &str, length| Prefix { address: text.parse().unwrap(), length };
        let own = [prefix("10.0.0.2", 24), prefix("10.9.0.2", 24), prefix("fd00::2", 64)];
        let gateways = ["10.0.0.254", "fe80::1"].map(|text| text.parse().unwrap());
        let found = subnets(own.into_iter(), &gateways);
        let gateways = found.iter().map(|network| network.gateway.map(|gateway| gateway.to_string()));
        assert_eq!(gateways.collect::<Vec<_>>(), [Some("10.0.0.254".into()), None, Some("fe80::1".into())]);
    }

    #[test]
    fn neighbours_are_in_the_network_and_not_the_guest() {
        let subnet = |text: &str, length| Subnet {
            prefix: Prefix { address: text.parse().unwrap(), length },
            gateway: None,
        };
        let subnets = [subnet("10.0.0.2", 24), subnet("fd00::2", 64)];
        let (card, other) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
        let known = [("fd00::9", other), ("fd00::5", card), ("fe80::9", other), ("fd01::9", other)];
        let known = known.into_iter().chain([("10.0.0.9", other), ("fd00::2", other)]);
        let known: Vec<_> = known.map(|(text, mac)| (text.parse().unwrap(), mac)).collect();
        let found = v6_neighbours(&subnets, &known, card);
        assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), ["fd00::2", "fd00::9"]);
        let many: Vec<_> = (0..200).map(|host| (format!("fd00::1:{host}").parse().unwrap(), other)).collect();
        assert_eq!(v6_neighbours(&subnets, &many, card).len(), MOST_NETWORKS);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop_policy_chain(&bytes);
            describes_tap(&bytes);
            own_address(&bytes);
        }
    }
}
