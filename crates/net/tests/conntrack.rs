//! Entries of connection tracking are removed and installed again while their connections go on: needs root.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};

use lab::{DEADLINE, Host, Lab, LabConfig, vm_address};
use net::conntrack::{self, ConntrackEntry};
use net::conntrack_installer::{ConntrackInstaller, remove_recorded};
use net::conntrack_sync::EntryChange;
use net::netlink::Socket;
use whimbrel_net as net;

/// Address at which the router answers for the server.
const PUBLIC: Ipv4Addr = Ipv4Addr::new(10, 93, 0, 254);
const PORT: u16 = 8000;

/// A server behind a router with NAT, which lets established connections pass and new ones only as long as
/// `policy` is `accept`.
struct Network {
    lab: Lab,
}

impl Network {
    fn new() -> Self {
        let lab = Lab::up(&LabConfig::for_test()).unwrap();
        // The server is host a itself, in the VMs' network.
        let server = format!("{}/24", vm_address(1));
        lab.a.run(&["ip", "addr", "add", &server, "dev", lab::lab::VM_BRIDGE]).unwrap();
        let rules = format!(
            "table ip t {{ \
               chain before {{ type nat hook prerouting priority -100; \
                 ip daddr {PUBLIC} meta l4proto {{ tcp, udp }} th dport 80 dnat to {}:{PORT}; }}; \
               chain after {{ type nat hook postrouting priority 100; oifname {} masquerade random; }}; \
             }}",
            vm_address(1),
            lab::lab::VM_BRIDGE,
        );
        lab.router.run(&["nft", &rules]).unwrap();
        let this = Self { lab };
        this.pass("ct state new ct mark set 0x77 accept");
        this
    }

    fn router(&self) -> &Host {
        &self.lab.router
    }

    /// Lets established connections pass, and what `more` says; nothing else.
    fn pass(&self, more: &str) {
        let rules = format!(
            "add table ip f; delete table ip f; table ip f {{ chain c {{ type filter hook forward priority 0; \
             policy drop; ct state established,related counter accept; {more}; }}; }}"
        );
        self.router().run(&["nft", &rules]).unwrap();
    }

    /// Returns the entries of the server's connections. Its kernel joins multicast groups at a time of its own: those
    /// entries are left out.
    fn entries(&self) -> Vec<ConntrackEntry> {
        let server = BTreeSet::from([IpAddr::from(vm_address(1))]);
        let list = || conntrack::list(&Socket::netfilter().unwrap(), &server, usize::MAX);
        let (entries, is_whole) = self.router().within(list).unwrap().unwrap();
        assert!(is_whole);
        entries.into_iter().filter(|entry| !entry.to_string().contains("224.0.0.")).collect()
    }

    /// Runs at the router.
    fn at_router<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.router().within(work).unwrap()
    }

    fn mark(&self) -> String {
        self.router().run(&["nft", "list", "table", "ip", "f"]).unwrap()
    }
}

/// Sends bytes to and fro.
fn exchange(client: &mut TcpStream, server: &mut TcpStream) {
    let mut buffer = [0; 5];
    for text in [b"there", b"again"] {
        client.write_all(text).unwrap();
        server.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, text);
        server.write_all(text).unwrap();
        client.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, text);
    }
}

#[test]
fn connections_with_nat_go_on_with_entries_that_were_copied() {
    let network = Network::new();
    let lab = &network.lab;
    let listener = lab.a.within(|| TcpListener::bind((vm_address(1), PORT)).unwrap()).unwrap();
    let connect = || TcpStream::connect_timeout(&SocketAddr::from((PUBLIC, 80)), DEADLINE).unwrap();
    let mut client = lab.client.within(connect).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
    }
    exchange(&mut client, &mut server);
    let datagrams = lab.client.within(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    let answers = lab.a.within(|| UdpSocket::bind((vm_address(1), PORT)).unwrap()).unwrap();
    for socket in [&datagrams, &answers] {
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
    }
    datagrams.connect((PUBLIC, 80)).unwrap();
    let mut buffer = [0; 8];
    datagrams.send(b"one").unwrap();
    let (_, from) = answers.recv_from(&mut buffer).unwrap();
    answers.send_to(b"two", from).unwrap();
    datagrams.recv(&mut buffer).unwrap();

    let entries = network.entries();
    assert_eq!(entries.len(), 2, "{entries:?}");
    let texts: BTreeSet<_> = entries.iter().map(ToString::to_string).collect();
    assert!(
        texts.iter().all(|text| text.contains("10.93.0.1:") && text.ends_with("→ 10.93.0.254:80")),
        "{texts:?}"
    );
    let copy = |entry: &ConntrackEntry| {
        let mut bytes = Vec::new();
        entry.encode(&mut bytes);
        let (copy, rest) = ConntrackEntry::decode(&bytes).unwrap();
        assert!(rest.is_empty() && ConntrackEntry::decode(&bytes[1..]).is_err());
        copy
    };
    let copied: Vec<_> = entries.iter().map(copy).collect();
    assert_eq!(copied, entries);

    // From now on only what is known passes, as at a host to which a guest has just moved.
    network.pass("ct mark 0x77 counter drop");
    let within = |work: &(dyn Fn(&Socket) -> std::io::Result<Vec<conntrack::RefusedEntry>> + Sync)| {
        network.router().within(|| work(&Socket::netfilter().unwrap())).unwrap().unwrap()
    };
    assert!(within(&|socket| conntrack::remove(socket, &entries)).is_empty());
    assert_eq!(network.entries(), []);
    let gone = within(&|socket| conntrack::remove(socket, &entries));
    assert_eq!(gone.len(), 2, "they are removed once");
    assert_eq!([gone[0].index, gone[1].index], [0, 1]);
    let failed = within(&|socket| conntrack::install(socket, &copied));
    assert!(failed.is_empty(), "{failed:?}");
    let again = within(&|socket| conntrack::install(socket, &copied));
    let exists =
        |refused: &conntrack::RefusedEntry| refused.error.kind() == std::io::ErrorKind::AlreadyExists;
    assert!(
        again.len() == 2 && again.iter().all(exists),
        "an entry that is there is not replaced: {again:?}"
    );
    exchange(&mut client, &mut server);
    answers.send_to(b"two", from).unwrap();
    datagrams.recv(&mut buffer).unwrap();
    datagrams.send(b"one").unwrap();
    let (_, from_again) = answers.recv_from(&mut buffer).unwrap();
    assert_eq!(from_again, from, "the same translation");
    assert_eq!(network.entries().len(), 2, "{}", network.mark());
}

#[test]
fn entries_of_others_are_left_alone() {
    let network = Network::new();
    let listener = network.lab.a.within(|| TcpListener::bind((vm_address(1), PORT)).unwrap()).unwrap();
    let connect = || TcpStream::connect_timeout(&SocketAddr::from((PUBLIC, 80)), DEADLINE).unwrap();
    let _client = network.lab.client.within(connect).unwrap();
    let _server = listener.accept().unwrap();
    let other = BTreeSet::from([IpAddr::from(vm_address(2))]);
    let list = || conntrack::list(&Socket::netfilter().unwrap(), &other, usize::MAX);
    assert_eq!(network.router().within(list).unwrap().unwrap().0, []);
    for (address, is_there) in [(vm_address(1), true), (vm_address(2), false)] {
        let addresses = BTreeSet::from([IpAddr::from(address)]);
        let any = || conntrack::any_of(Socket::netfilter().unwrap(), &addresses).unwrap();
        assert_eq!(network.at_router(any), is_there, "{address}");
    }
}

#[test]
fn entries_of_a_guest_that_does_not_arrive_are_removed() {
    let network = Network::new();
    let listener = network.lab.a.within(|| TcpListener::bind((vm_address(1), PORT)).unwrap()).unwrap();
    let connect = || TcpStream::connect_timeout(&SocketAddr::from((PUBLIC, 80)), DEADLINE).unwrap();
    let _client = network.lab.client.within(connect).unwrap();
    let _server = listener.accept().unwrap();
    let entries = network.entries();
    assert_eq!(entries.len(), 1);
    let install = || vec![EntryChange::Install(entries[0].clone())];
    let record = network.router().directory().join("flows");
    let start = || network.at_router(|| ConntrackInstaller::start(&record)).unwrap();

    let installer = start();
    let result = installer.apply(install()).unwrap();
    assert_eq!((result.installed, result.failed), (0, vec![]), "it is the router's own");
    network.at_router(|| installer.remove_all());
    assert_eq!(network.entries().len(), 1, "what was there before stays");
    assert!(!record.exists());

    let remove = || conntrack::remove(&Socket::netfilter().unwrap(), &entries).unwrap();
    assert!(network.at_router(remove).is_empty());
    assert_eq!(installer.apply(install()).unwrap().installed, 0, "it has ended");
    let installer = start();
    assert_eq!(installer.apply(install()).unwrap().installed, 1);
    let again = network.entries();
    assert!(matches!(&again[..], [again] if again.is_like(&entries[0])), "{again:?}, of {entries:?}");
    // As if this process had died.
    drop(installer);
    network.at_router(|| remove_recorded(&record));
    assert_eq!((network.entries(), record.exists()), (vec![], false));

    let installer = start();
    assert_eq!(installer.apply(install()).unwrap().installed, 1);
    installer.keep();
    assert_eq!((network.entries().len(), record.exists()), (1, false));

    // An entry with NAT is of use only where its address is.
    assert!(network.at_router(remove).is_empty());
    let own = || vec![EntryChange::InstallWithOwnAddress(entries[0].clone())];
    let elsewhere = network.lab.b.within(|| ConntrackInstaller::start(&record)).unwrap().unwrap();
    let failed = elsewhere.apply(own()).unwrap().failed;
    assert!(failed.len() == 1 && failed[0].1.contains("translated by an address of the host"), "{failed:?}");
    assert_eq!(installer.apply(own()).unwrap().installed, 1);
}
