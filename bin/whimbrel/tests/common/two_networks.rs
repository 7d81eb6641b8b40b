//! A guest between two networks, and agents that redirect its connections.

use lab::{Net, vm_address};

use super::{Boot, Cluster, Device, Guest, GuestSpec, Load};

/// Port of the guest that echoes.
pub const SERVICE: u16 = 7000;
/// Settings of agents that soon see that no connection is left.
pub const SOON: &str = "[network.redirection]\ntrusted_path = true\nleast_s = 1\nquiet_s = 1\n";

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
