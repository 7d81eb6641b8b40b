//! Redirections by each kind of tunnel.

use net::redirection::tunnel::TunnelPorts;
use net::redirection::{NewAddressMode, TunnelKind, host_facts};
use whimbrel_net as net;

use crate::network::{BOTH, Family, NEW, Network, OLD, tunnel_between};

/// Moves a guest whose connections go on through a tunnel of this kind, whose ends have addresses of this family, and returns
/// true; false if this kernel has no such tunnels.
pub(crate) fn carries(kind: TunnelKind, outer: Family) -> bool {
    let network = Network::new();
    let ends = [NEW, OLD].map(|side| outer.host(side));
    if !network.host(NEW).within(|| host_facts::tunnels(7, ends)).unwrap().unwrap().contains(&kind) {
        return false;
    }
    // Modules that were loaded just now have devices of their own in each namespace.
    let before = network.state();
    // IPv4 in IPv4 is all that one of them carries.
    let families = if kind == TunnelKind::Ipip { &BOTH[..1] } else { &BOTH[..] };
    let mut tunnel = tunnel_between(kind, outer, OLD, NEW);
    if kind == TunnelKind::WireGuard {
        let ports = TunnelPorts { vxlan: 7741, wireguard: [7742, 7745] };
        let reserve = |side| network.at(side, |keeper| keeper.reserve("guest#3", 7, ports)).unwrap().unwrap();
        let [(old_key, old_port), (new_key, new_port)] = [OLD, NEW].map(reserve);
        (tunnel.keys, tunnel.ports) = (Some([old_key, new_key]), [old_port, new_port]);
    }
    let redirection = network.first_move(NewAddressMode::Nat, families, tunnel);
    let mut old: Vec<_> = families.iter().map(|family| network.connect(*family, OLD)).collect();
    let mut records = network.prepare(&redirection);
    network.move_guest(NEW);
    network.switch(&mut records);
    for connection in &mut old {
        connection.exchange();
    }
    for family in families {
        network.connect(*family, OLD).exchange();
        network.connect(*family, NEW).exchange();
    }
    drop(old);
    network.remove(records);
    for side in [OLD, NEW] {
        let directory = network.host(side).directory().join("redirections");
        assert_eq!(std::fs::read_dir(directory).unwrap().count(), 0, "no record and no key is left");
    }
    network.move_guest(OLD);
    assert_eq!(network.state(), before);
    true
}
