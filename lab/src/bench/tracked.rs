//! Hosts that track and translate connections to the guest, like a firewall with NAT: each has some thousands of them
//! when the guest is moved.

use std::fs;
use std::net::UdpSocket;

use crate::error::{Context, Result};
use crate::host::Host;
use crate::lab::{VM_BRIDGE, VM_GATEWAY, vm_address};

/// Closed port of the guest, to which each client sends one datagram.
const CLOSED_PORT: u16 = 9;
/// First port of a client.
const FIRST_PORT: u16 = 10_000;
/// Addresses of clients, which take turns: a kernel forgets a connection without answer after 30 seconds.
const CLIENTS: u8 = 16;
/// Last part of the first client's address.
const FIRST_CLIENT: u8 = 100;

/// Makes a host track and translate what it passes on to the guest.
pub(super) fn begin(host: &Host) -> Result<()> {
    const BRIDGED: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";
    host.within(|| fs::write(BRIDGED, "1"))?.context(|| format!("cannot write {BRIDGED}"))?;
    let guest = vm_address(1);
    let rules = format!(
        "table ip translating {{ \
           chain pass {{ type filter hook forward priority 0; ct state established,related accept; }}; \
           chain translate {{ type nat hook postrouting priority 100; \
             ip daddr {guest} udp dport {CLOSED_PORT} snat to {VM_GATEWAY} fully-random; }}; }}"
    );
    host.run(&["nft", &rules]).map(drop)
}

/// Gives the clients' host all addresses.
pub(super) fn add_clients(router: &Host) -> Result<()> {
    (0..CLIENTS).try_for_each(|client| {
        let address = format!("{}/24", vm_address(FIRST_CLIENT + client));
        router.run(&["ip", "addr", "add", &address, "dev", VM_BRIDGE]).map(drop)
    })
}

/// Sends a datagram from each of so many ports. `run` counts the measurements.
pub(super) fn fill(router: &Host, connections: u16, run: u8) -> Result<()> {
    let client = vm_address(FIRST_CLIENT + run % CLIENTS);
    let send = || {
        (FIRST_PORT..FIRST_PORT + connections).try_for_each(|port| {
            UdpSocket::bind((client, port))?.send_to(b"?", (vm_address(1), CLOSED_PORT)).map(drop)
        })
    };
    router.within(send)?.context(|| format!("{client} cannot send to the guest"))
}
