//! Two or three networks with a router between them, a client behind it, and a guest that moves from one to the others.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use lab::lab::VM_BRIDGE;
use lab::{DEADLINE, Host, Lab, LabConfig, until};
use net::Mac;
use net::conntrack::{self, ConntrackEntry};
use net::netlink::Socket;
use net::redirection::keeper::RedirectionError;
use net::redirection::kernel_names::KernelNames;
use net::redirection::next_move::{NetworkMove, carried, next_redirection};
use net::redirection::preflight::RedirectionFacts;
use net::redirection::tunnel::FreePorts;
use net::redirection::{
    AddressPair, Attachment, GuestPlace, Lan, NewAddressMode, Prefix, Redirection, RedirectionKeeper,
    RedirectionRecord, Subnet, Tunnel, TunnelKind, host_facts, tunnel as tunnels,
};
use whimbrel_net as net;

/// The host that the guest leaves first, and the other one.
pub(crate) const OLD: usize = 0;
/// See [`OLD`].
pub(crate) const NEW: usize = 1;
/// The host to which the guest moves on.
pub(crate) const THIRD: usize = 2;

/// The device of a host behind which the guest's card is.
pub(crate) const TAP: &str = "tap0";
/// The same for a second card.
pub(crate) const SECOND_TAP: &str = "tap1";
/// MAC address of the guest's card.
pub(crate) const CARD: Mac = Mac([0x52, 0x54, 0, 0, 0, 7]);
/// More than a path holds at once, in segments of the largest size.
const PAYLOAD: usize = 300_000;

/// Family of addresses. In each network the router is .254 or `::fe`, a host .2 and the guest .5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) fn address(self, network: u8, v4: u8, v6: u16) -> IpAddr {
        match self {
            Self::V4 => [10, network, 0, v4].into(),
            Self::V6 => format!("fd{network}::{v6:x}").parse().unwrap(),
        }
    }

    pub(crate) fn network(side: usize) -> u8 {
        [92, 94, 95][side]
    }

    pub(crate) fn guest(self, side: usize) -> IpAddr {
        self.address(Self::network(side), 5, 5)
    }

    pub(crate) fn gateway(self, side: usize) -> IpAddr {
        self.address(Self::network(side), 254, 0xfe)
    }

    pub(crate) fn host(self, side: usize) -> IpAddr {
        self.address(Self::network(side), 2, 2)
    }

    pub(crate) fn client(self) -> IpAddr {
        self.address(93, 1, 1)
    }

    pub(crate) fn length(self) -> u8 {
        if self == Self::V4 { 24 } else { 64 }
    }
}

/// Both ends of a connection.
pub(crate) struct Ends(TcpStream, TcpStream);

impl Ends {
    /// Sends much to and fro at once.
    pub(crate) fn exchange(&mut self) {
        let one_way = |mut from: &TcpStream, mut to: &TcpStream, byte: u8| {
            thread::scope(|scope| {
                scope.spawn(move || from.write_all(&vec![byte; PAYLOAD]).unwrap());
                let mut buffer = vec![0; PAYLOAD];
                to.read_exact(&mut buffer).unwrap();
                assert!(buffer.iter().all(|got| *got == byte));
            });
        };
        one_way(&self.0, &self.1, 1);
        one_way(&self.1, &self.0, 2);
    }
}

/// Families of addresses of a test.
pub(crate) const BOTH: [Family; 2] = [Family::V4, Family::V6];

pub(crate) fn tunnel(kind: TunnelKind) -> Tunnel {
    tunnel_between(kind, Family::V4, OLD, NEW)
}

/// Returns the tunnel from a host that the guest has left to another one.
pub(crate) fn tunnel_between(kind: TunnelKind, outer: Family, from: usize, to: usize) -> Tunnel {
    let mtu = tunnels::mtu(kind, outer == Family::V6, 1500);
    let (old_endpoint, new_endpoint) = (outer.host(from), outer.host(to));
    let ports = if kind == TunnelKind::WireGuard { [7742, 7743] } else { [7741; 2] };
    Tunnel { kind, old_endpoint, new_endpoint, mtu, ports, keys: None }
}

/// Returns the tunnel for the way back.
pub(crate) fn turned(kind: TunnelKind) -> Tunnel {
    let there = tunnel(kind);
    let [old, new] = there.ports;
    Tunnel { old_endpoint: there.new_endpoint, new_endpoint: there.old_endpoint, ports: [new, old], ..there }
}

pub(crate) struct Network {
    lab: Lab,
    third: Option<Host>,
    /// Host that has the guest's taps.
    at: AtomicUsize,
    /// Number of these.
    taps: AtomicUsize,
}

impl Network {
    pub(crate) fn new() -> Self {
        Self::with(Lab::up(&LabConfig::for_test()).unwrap(), None)
    }

    /// Makes a third network with a host.
    pub(crate) fn with_third() -> Self {
        let lab = Lab::up(&LabConfig::for_test()).unwrap();
        let third = lab.add_third_host(Ipv4Addr::new(10, 95, 0, 2)).unwrap();
        Self::with(lab, Some(third))
    }

    fn with(lab: Lab, third: Option<Host>) -> Self {
        let (at, taps) = (AtomicUsize::new(OLD), AtomicUsize::new(0));
        let this = Self { lab, third, at, taps };
        let (lab, router) = (&this.lab, &this.lab.router);
        router.run(&["ip", "link", "set", "dev", "b", "nomaster"]).unwrap();
        let others = this.third.iter().map(|host| (host.name(), 95));
        for (device, network) in [(VM_BRIDGE, 92), ("b", 94), ("clients", 93)].into_iter().chain(others) {
            set(router, &format!("net/ipv6/conf/{device}/disable_ipv6"), "0");
            let v4 = Family::V4.address(network, 254, 0);
            if [94, 95].contains(&network) {
                address(router, device, v4, Family::V4);
            }
            address(router, device, Family::V6.address(network, 0, 0xfe), Family::V6);
        }
        set(router, "net/ipv6/conf/all/forwarding", "1");
        for side in this.sides() {
            let host = this.host(side);
            // As strict as hosts may be.
            set(host, "net/ipv4/conf/all/rp_filter", "1");
            // Addresses are there at once, and stay as they are.
            set(host, &format!("net/ipv6/conf/{VM_BRIDGE}/accept_dad"), "0");
            set(host, &format!("net/ipv6/conf/{VM_BRIDGE}/disable_ipv6"), "0");
            for family in [Family::V4, Family::V6] {
                address(host, VM_BRIDGE, family.host(side), family);
            }
            // Without a route to the sender of a packet that is too big nobody tells it.
            for family in BOTH {
                let gateway = family.gateway(side).to_string();
                host.run(&["ip", "route", "add", "default", "via", &gateway]).unwrap();
            }
        }
        set(&lab.client, "net/ipv6/conf/net/disable_ipv6", "0");
        address(&lab.client, "net", Family::V6.client(), Family::V6);
        let gateway = Family::V6.address(93, 0, 0xfe).to_string();
        lab.client.run(&["ip", "-6", "route", "add", "default", "via", &gateway]).unwrap();
        this.make_guest();
        this
    }

    /// Connects the guest, which is the laboratory's witness, with the old host.
    fn make_guest(&self) {
        self.add_card("eth0", CARD);
        let guest = self.guest();
        for family in [Family::V4, Family::V6] {
            address(guest, "eth0", family.guest(OLD), family);
            let gateway = family.gateway(OLD).to_string();
            guest.run(&["ip", "route", "add", "default", "via", &gateway]).unwrap();
        }
    }

    /// Gives the guest one more card.
    pub(crate) fn add_card(&self, device: &str, mac: Mac) {
        let tap = [TAP, SECOND_TAP][self.taps.fetch_add(1, Relaxed)];
        let (guest, mac, namespace) = (self.guest(), mac.to_string(), self.host(OLD).namespace());
        guest
            .run(&[
                "ip", "link", "add", device, "address", &mac, "type", "veth", "peer", "name", tap, "netns",
                namespace,
            ])
            .unwrap();
        guest.run(&["ip", "link", "set", "dev", device, "up"]).unwrap();
        set(guest, &format!("net/ipv6/conf/{device}/disable_ipv6"), "0");
        self.join(OLD, tap);
    }

    fn join(&self, side: usize, tap: &str) {
        self.host(side).run(&["ip", "link", "set", "dev", tap, "master", VM_BRIDGE, "up"]).unwrap();
    }

    pub(crate) fn client(&self) -> &Host {
        &self.lab.client
    }

    pub(crate) fn guest(&self) -> &Host {
        &self.lab.witness
    }

    pub(crate) fn host(&self, side: usize) -> &Host {
        [Some(&self.lab.a), Some(&self.lab.b), self.third.as_ref()][side].unwrap()
    }

    fn sides(&self) -> std::ops::Range<usize> {
        OLD..NEW + 1 + usize::from(self.third.is_some())
    }

    /// Cuts a host off from the router while something is done.
    pub(crate) fn without(&self, side: usize, work: impl FnOnce()) {
        let host = self.host(side);
        let cut = "table netdev away { chain cut { type filter hook ingress device trunk priority 0; \
                   policy drop; }; }";
        host.run(&["nft", cut]).unwrap();
        work();
        host.run(&["nft", "delete table netdev away"]).unwrap();
    }

    /// Moves the guest's taps to a host.
    pub(crate) fn move_guest(&self, to: usize) {
        let namespace = self.host(to).namespace();
        let from = self.at.swap(to, Relaxed);
        for tap in &[TAP, SECOND_TAP][..self.taps.load(Relaxed)] {
            self.host(from).run(&["ip", "link", "set", "dev", tap, "netns", namespace]).unwrap();
            self.join(to, tap);
        }
        // Until it has seen that the other end is up again, a veth device drops what it is to send. Guests' cards do not.
        until("the guest's cards are up", || {
            let links: serde_json::Value = serde_json::from_str(
                &self.guest().run(&["ip", "-j", "link", "show", "type", "veth"]).unwrap(),
            )
            .unwrap();
            links
                .as_array()
                .unwrap()
                .iter()
                .all(|link| link["operstate"] != "DOWN" && link["operstate"] != "LOWERLAYERDOWN")
        });
    }

    /// Gives the guest the new addresses itself, as something in the guest would.
    pub(crate) fn give_new_address(&self) {
        for family in BOTH {
            address(self.guest(), "eth0", family.guest(NEW), family);
            let (gateway, own) = (family.gateway(NEW).to_string(), family.guest(NEW).to_string());
            self.guest().run(&["ip", "route", "replace", "default", "via", &gateway, "src", &own]).unwrap();
        }
    }

    /// Returns a place of the guest.
    pub(crate) fn place(&self, side: usize, addressing: NewAddressMode, families: &[Family]) -> GuestPlace {
        let network = |family: &Family| Subnet {
            prefix: Prefix { address: family.gateway(side), length: family.length() },
            gateway: Some(family.gateway(side)),
        };
        let pair = |family: &Family| {
            let public = family.guest(side);
            let guest = if addressing == NewAddressMode::Configured { public } else { family.guest(OLD) };
            AddressPair { guest, public }
        };
        let lan = Lan {
            bridge: Some(VM_BRIDGE.to_owned()),
            vlan: None,
            mtu: 1500,
            subnets: families.iter().map(network).collect(),
            neighbours: Vec::new(),
        };
        let mac = if side == OLD { CARD } else { KernelNames(7).proxy_mac() };
        let attachment = Attachment { lan, mac, pairs: families.iter().map(pair).collect() };
        let host = self.host(side).name().to_owned();
        GuestPlace { host, interface: TAP.to_owned(), number: 7, attachment }
    }

    /// Returns the redirection of a guest that moves from the old host to the new one.
    pub(crate) fn first_move(
        &self,
        addressing: NewAddressMode,
        families: &[Family],
        tunnel: Tunnel,
    ) -> Redirection {
        let next = NetworkMove {
            migration: "guest#3".to_owned(),
            epoch: 3,
            card: CARD,
            addressing,
            from: self.place(OLD, addressing, families),
            to: self.place(NEW, addressing, families),
            tunnels: BTreeMap::from([("a".to_owned(), (7, tunnel))]),
        };
        next_redirection(None, next).unwrap().redirection.unwrap()
    }

    /// Works with the keeper of a host, as an agent there would.
    pub(crate) fn at<T: Send>(
        &self,
        side: usize,
        work: impl FnOnce(&RedirectionKeeper) -> Result<T, RedirectionError> + Send,
    ) -> Result<T, RedirectionError> {
        let host = self.host(side);
        let directory = host.directory().join("redirections");
        host.within(|| work(&RedirectionKeeper::new(host.name(), &directory))).unwrap()
    }

    /// Prepares a redirection on all hosts that take part, which are the first ones.
    pub(crate) fn prepare(&self, redirection: &Redirection) -> Vec<RedirectionRecord> {
        let prepare = |side| self.at(side, |keeper| keeper.prepare(redirection)).unwrap();
        (0..redirection.hosts().count()).map(prepare).collect()
    }

    /// Switches on all hosts, and confirms that.
    pub(crate) fn switch(&self, records: &mut [RedirectionRecord]) {
        for (side, record) in records.iter_mut().enumerate().rev() {
            self.at(side, |keeper| keeper.switch(record).and_then(|()| keeper.confirm(record))).unwrap();
        }
    }

    /// Ends a redirection on all hosts.
    pub(crate) fn remove(&self, records: Vec<RedirectionRecord>) {
        for (side, record) in records.into_iter().enumerate() {
            self.at(side, |keeper| keeper.remove(&record)).unwrap();
        }
    }

    /// Returns the entries of the guest's connections at a host.
    pub(crate) fn entries(&self, side: usize) -> Vec<ConntrackEntry> {
        let addresses = BOTH.iter().flat_map(|family| [OLD, NEW].map(|side| family.guest(side)));
        let addresses = addresses.collect();
        let list = || conntrack::list(&Socket::netfilter().unwrap(), &addresses, usize::MAX);
        self.host(side).within(list).unwrap().unwrap().0
    }

    /// Installs at a host what the entries of another host become there.
    pub(crate) fn carry(
        &self,
        to: usize,
        entries: &[ConntrackEntry],
        from: &str,
        old: Option<&Redirection>,
        new: &Redirection,
    ) {
        let carried: Vec<_> = entries.iter().filter_map(|entry| carried(entry, from, old, new)).collect();
        assert_eq!(carried.len(), entries.len());
        let install = || conntrack::install(&Socket::netfilter().unwrap(), &carried).unwrap().len();
        self.host(to).within(install).unwrap();
    }

    #[track_caller]
    fn connection(from: &Host, to: &Host, listen: IpAddr, connect: IpAddr) -> (Ends, IpAddr) {
        let listener = to.within(|| TcpListener::bind((listen, 0)).unwrap()).unwrap();
        let target = SocketAddr::new(connect, listener.local_addr().unwrap().port());
        let client = from.within(|| TcpStream::connect_timeout(&target, DEADLINE)).unwrap();
        let client = client.unwrap_or_else(|error| panic!("{target}: {error}"));
        let (server, peer) = listener.accept().unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
        }
        (Ends(client, server), peer.ip())
    }

    /// Connects the client with the guest by its address in one of the networks.
    pub(crate) fn connect(&self, family: Family, side: usize) -> Ends {
        self.connect_by(family.guest(side))
    }

    /// Connects the client with the guest by an address.
    #[track_caller]
    pub(crate) fn connect_by(&self, address: IpAddr) -> Ends {
        let any = if address.is_ipv4() { "0.0.0.0" } else { "::" };
        Self::connection(&self.lab.client, self.guest(), any.parse().unwrap(), address).0
    }

    /// Connects the guest with the client; returns the address by which the client knows it.
    pub(crate) fn connect_from_guest(&self, family: Family) -> (Ends, IpAddr) {
        Self::connection(self.guest(), &self.lab.client, family.client(), family.client())
    }

    /// Connects the guest with a neighbour in its old network.
    pub(crate) fn connect_to_neighbour(&self, family: Family) -> (Ends, IpAddr) {
        self.connect_to(family.gateway(OLD))
    }

    /// Connects the guest with a machine in its old network.
    pub(crate) fn connect_to(&self, address: IpAddr) -> (Ends, IpAddr) {
        let is_host = BOTH.iter().any(|family| family.host(OLD) == address);
        let machine = if is_host { self.host(OLD) } else { &self.lab.router };
        Self::connection(self.guest(), machine, address, address)
    }

    /// Gives the router one more address of IPv6 in the old network: that of a neighbour which is no gateway.
    pub(crate) fn add_neighbour(&self) {
        address(&self.lab.router, VM_BRIDGE, neighbour(), Family::V6);
    }

    /// Lets the old host speak with that neighbour, and with the guest.
    pub(crate) fn meet_neighbours(&self) {
        Self::connection(self.host(OLD), &self.lab.router, neighbour(), neighbour());
        let guest = Family::V6.guest(OLD);
        Self::connection(self.host(OLD), self.guest(), guest, guest);
    }

    /// Returns the whole network state of all hosts, but for the guest's tap, which moves, and for what the kernels learn
    /// and forget by themselves.
    pub(crate) fn state(&self) -> Vec<BTreeMap<String, String>> {
        self.sides().map(|side| crate::state::state(self.host(side))).collect()
    }
}

/// Returns the address of a neighbour in the old network that is no gateway.
pub(crate) fn neighbour() -> IpAddr {
    Family::V6.address(Family::network(OLD), 0, 9)
}

pub(crate) fn address(host: &Host, device: &str, address: IpAddr, family: Family) {
    let address = format!("{address}/{}", family.length());
    let words = ["ip", "addr", "add", &address, "dev", device, "nodad"];
    host.run(&words[..if family == Family::V4 { 6 } else { 7 }]).unwrap();
}

fn set(host: &Host, path: &str, value: &str) {
    host.within(|| fs::write(Path::new("/proc/sys").join(path), value)).unwrap().unwrap();
}

/// Reads facts with a closed firewall.
pub(crate) fn facts() -> RedirectionFacts {
    let rules = "table inet closed { chain forward { type filter hook forward priority 0; policy drop; }; \
                 chain input { type filter hook input priority 0; policy accept; }; }";
    lab::run(std::process::Command::new("nft").arg(rules)).unwrap();
    let ends = [Family::V4.host(NEW), Family::V4.host(OLD)];
    let asked = [Family::V4.gateway(NEW), Family::V4.guest(NEW)];
    until("the bridge forwards", || {
        host_facts::in_use(VM_BRIDGE, &asked[..1], Duration::from_secs(1)).unwrap().len() == 1
    });
    RedirectionFacts {
        tunnels: host_facts::tunnels(7, ends).unwrap(),
        kernel_features: host_facts::kernel_features().unwrap(),
        own: host_facts::own().unwrap(),
        in_use: host_facts::in_use(VM_BRIDGE, &asked, Duration::from_secs(2)).unwrap(),
        closed: host_facts::drop_policy_chains().unwrap(),
        path_mtu: host_facts::path_mtu(ends[1]).unwrap(),
        numbers: host_facts::numbers().unwrap(),
        has_conntrack: host_facts::has_conntrack(),
        is_tap: host_facts::is_tap(VM_BRIDGE).unwrap(),
        ports: FreePorts::default(),
    }
}
