//! Two networks of VMs with a router between them: the second host is in one of its own.
//!
//! ```text
//! a ── vms, 10.92.0.0/24 ── router ── 10.94.0.0/24 ── b
//!                             │
//!                           client
//! ```
//!
//! The migration link between both hosts stays as it is: the way that their agents have to each other.

use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::emulator::{Emulator, Settings};
use crate::error::{Context, Result};
use crate::host::Host;
use crate::lab::{CLIENT, CLIENT_GATEWAY, Lab, MIGRATION_LINK, VM_BRIDGE, VM_GATEWAY};

/// The router in the other network.
pub const NEW_GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 94, 0, 254);
/// The second host in the other network.
pub const NEW_HOST: Ipv4Addr = Ipv4Addr::new(10, 94, 0, 2);
/// An address for a guest in the other network.
pub const NEW_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 94, 0, 1);
/// The first host in the network of the VMs.
pub const OLD_HOST: Ipv4Addr = Ipv4Addr::new(10, 92, 0, 2);

/// The third host, in a network of its own.
pub const THIRD_HOST: Ipv4Addr = Ipv4Addr::new(10, 95, 0, 2);
/// An address for a guest in that network.
pub const THIRD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 95, 0, 1);
/// The router in that network.
const THIRD_GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 95, 0, 254);

/// Device of a long way, at both of its ends.
const FAR: &str = "far";
/// Device of the client's long way, at both of its ends.
const FAR_CLIENT: &str = "farclient";
/// Largest packet of a long way.
const MTU: &str = "1500";

/// Puts the second host behind the router, into a network of its own.
pub fn separate(lab: &Lab) -> Result<()> {
    lab.router.run(&["ip", "link", "set", "dev", "b", "nomaster"])?;
    give_addresses(lab, "b")
}

/// Makes a third host behind the router, in a network of its own, after [`connect_third`] with
/// ways to the agents of the others.
pub fn add_third(lab: &Lab) -> Result<Host> {
    let host = lab.add_third_host(THIRD_HOST)?;
    lab.router.run(&["ip", "addr", "add", &format!("{THIRD_GATEWAY}/24"), "dev", host.name()])?;
    host.run(&["ip", "addr", "add", &format!("{THIRD_HOST}/24"), "dev", VM_BRIDGE])?;
    host.run(&["ip", "route", "add", "default", "via", &THIRD_GATEWAY.to_string()])?;
    Ok(host)
}

/// Lets the third host reach the agents of the others, whose addresses are on the link between them.
pub fn connect_third(lab: &Lab) -> Result<()> {
    for (host, next) in [(&lab.a, OLD_HOST), (&lab.b, NEW_HOST)] {
        let words = ["ip", "route", "add", &host.address().to_string(), "via", &next.to_string()];
        lab.router.run(&words)?;
    }
    Ok(())
}

/// Puts the second host and the client far away: packets from the router to either of them are on their way for
/// `delay`. The ways end with what is returned. The migration link gets the packets of such ways, and stays as it is else.
pub fn separate_far(lab: &Lab, delay: Duration) -> Result<[Emulator; 2]> {
    let settings = Settings { delay, ..Settings::default() };
    [&lab.a, &lab.b].into_iter().try_for_each(|host| set_usual_mtu(host, MIGRATION_LINK))?;
    // The other end goes with it.
    lab.router.run(&["ip", "link", "del", "dev", "b"])?;
    let to_host = way(&lab.router, &lab.b, FAR, settings.clone())?;
    lab.b.run(&["ip", "link", "set", "dev", FAR, "master", VM_BRIDGE])?;
    give_addresses(lab, FAR)?;

    lab.router.run(&["ip", "link", "del", "dev", "clients"])?;
    let to_client = way(&lab.router, &lab.client, FAR_CLIENT, settings)?;
    for (host, address) in [(&lab.router, CLIENT_GATEWAY), (&lab.client, CLIENT)] {
        host.run(&["ip", "addr", "add", &format!("{address}/24"), "dev", FAR_CLIENT])?;
    }
    lab.client.run(&["ip", "route", "add", "default", "via", &CLIENT_GATEWAY.to_string()])?;
    Ok([to_host, to_client])
}

/// Makes an emulated link whose packets are as small as on a network between sites.
fn way(from: &Host, to: &Host, device: &str, settings: Settings) -> Result<Emulator> {
    let emulator = Emulator::start(from, to, device, settings)?;
    [from, to].into_iter().try_for_each(|host| set_usual_mtu(host, device))?;
    Ok(emulator)
}

fn set_usual_mtu(host: &Host, device: &str) -> Result<()> {
    host.run(&["ip", "link", "set", "dev", device, "mtu", MTU]).map(drop)
}

/// Gives the router its address in the other network, and both hosts one and a way to the router.
fn give_addresses(lab: &Lab, router_device: &str) -> Result<()> {
    lab.router.run(&["ip", "addr", "add", &format!("{NEW_GATEWAY}/24"), "dev", router_device])?;
    for (host, address, gateway) in [(&lab.a, OLD_HOST, VM_GATEWAY), (&lab.b, NEW_HOST, NEW_GATEWAY)] {
        host.run(&["ip", "addr", "add", &format!("{address}/24"), "dev", VM_BRIDGE])?;
        host.run(&["ip", "route", "add", "default", "via", &gateway.to_string()])?;
        // As strict as hosts may be.
        host.within(|| fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1"))?
            .context(|| "cannot make a host check the ways of packets")?;
    }
    Ok(())
}
