//! Two networks of VMs with a router between them: the second host is in one of its own.

use std::net::Ipv4Addr;

use lab::lab::{VM_BRIDGE, VM_GATEWAY};
use lab::{Net, vm_address};

use super::{Boot, Cluster, Device, Guest, GuestSpec, Load};

/// Port of the guest that echoes.
pub const SERVICE: u16 = 7000;
/// The other network: its router, the host there, and the guest.
pub const NEW_GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 94, 0, 254);
pub const NEW_HOST: Ipv4Addr = Ipv4Addr::new(10, 94, 0, 2);
pub const NEW: Ipv4Addr = Ipv4Addr::new(10, 94, 0, 1);
/// The first host in the network that the guest has at first.
pub const OLD_HOST: Ipv4Addr = Ipv4Addr::new(10, 92, 0, 2);
/// Settings of agents that soon see that no connection is left.
pub const SOON: &str = "[network.redirection]\ntrusted_path = true\nleast_s = 1\nquiet_s = 1\n";

/// Puts the second host behind the router, into a network of its own.
pub fn separate(cluster: &Cluster) {
    let router = &cluster.lab.router;
    router.run(&["ip", "link", "set", "dev", "b", "nomaster"]).unwrap();
    router.run(&["ip", "addr", "add", &format!("{NEW_GATEWAY}/24"), "dev", "b"]).unwrap();
    let hosts = [(&cluster.lab.a, OLD_HOST, VM_GATEWAY), (&cluster.lab.b, NEW_HOST, NEW_GATEWAY)];
    for (host, address, gateway) in hosts {
        host.run(&["ip", "addr", "add", &format!("{address}/24"), "dev", VM_BRIDGE]).unwrap();
        host.run(&["ip", "route", "add", "default", "via", &gateway.to_string()]).unwrap();
        // As strict as hosts may be.
        host.within(|| std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1")).unwrap().unwrap();
    }
}

pub fn answering_guest(cluster: &Cluster, name: &str) -> Guest {
    let load = Load { fill_mib: 32, wss_mib: 8, rate_mib_per_s: 5, ..Load::default() };
    let mut spec = GuestSpec::tiny(name, load);
    spec.devices.push(Device::Net(Net::new(1)));
    if let Boot::Tiny(load) = &mut spec.boot {
        (load.address, load.port) = (Some(vm_address(1)), SERVICE);
    }
    cluster.lab.b.tap(&Net::new(1).tap).unwrap();
    cluster.guest(&spec)
}
