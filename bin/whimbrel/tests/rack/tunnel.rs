//! Agents that reach each other through a tunnel over a bad link.

use lab::rack::{Rack, RackHost};
use lab::vm_address;
use toml::{Table, Value};

use crate::echo::Echo;
use crate::support::{kvm_guest, move_guest, rack, two, with_patience};
use crate::tried::Trial;

/// Makes the end of a tunnel on a host, and returns its public key.
fn make_end(host: &RackHost) -> String {
    let address = inside(host);
    let script = format!(
        "umask 077; wg genkey >/etc/tunnel.key; ip link add wg0 type wireguard
        wg set wg0 private-key /etc/tunnel.key listen-port 51820
        ip addr add {address}/24 dev wg0; ip link set wg0 up; wg pubkey </etc/tunnel.key"
    );
    host.shell(&script).unwrap().trim().to_owned()
}

/// Returns a host's address in the tunnel.
fn inside(host: &RackHost) -> String {
    host.address().to_string().replace("10.93.", "10.94.")
}

/// Returns the agents' configuration of a host that listens in the tunnel only.
fn in_tunnel(rack: &Rack, host: &RackHost) -> Table {
    let listen = |host: &RackHost| Value::from(format!("{}:7740", inside(host)));
    let peer = |host: &RackHost| {
        let address = Table::from_iter([("address".to_owned(), listen(host))]);
        (host.name().to_owned(), Value::from(address))
    };
    let hosts = rack.hosts.iter().map(peer).collect::<Table>();
    Table::from_iter([("listen".to_owned(), listen(host)), ("hosts".to_owned(), hosts.into())])
}

/// Returns the bytes that a host has sent through the tunnel.
fn sent_through(host: &RackHost) -> u64 {
    let transfer = host.run(&["wg", "show", "wg0", "transfer"]).unwrap();
    transfer.split_whitespace().nth(2).unwrap().parse().unwrap()
}

/// Everything goes through the tunnel, over a link that delays packets and loses one in a hundred.
#[test]
#[ignore = "make rack"]
fn a_tunnel_of_wireguard_over_a_lossy_link() {
    let Some(rack) = rack(&two()) else { return };
    let trial = Trial::begin(&rack, "WireGuard over a link of 10 ms that loses packets, there and back");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let keys = [alpha, beta].map(make_end);
    for (host, peer, key) in [(alpha, beta, &keys[1]), (beta, alpha, &keys[0])] {
        let (endpoint, there) = (peer.address(), inside(peer));
        host.shell(&format!(
            "wg set wg0 peer '{key}' endpoint {endpoint}:51820 allowed-ips {there}/32
            tc qdisc add dev eth1 root netem delay 5ms 1ms loss 1%"
        ))
        .unwrap();
        rack.configure(host, &with_patience(&in_tunnel(&rack, host))).unwrap();
    }
    let _serial = rack.start_guest(alpha, &kvm_guest()).unwrap();
    let echo = Echo::start(&rack.switch, vm_address(1));
    for (from, to) in [(alpha, beta), (beta, alpha)] {
        let before = sent_through(from);
        let (report, _serial) = move_guest(&rack, from, to, &[]);
        let sent = sent_through(from) - before;
        // The guest's random pages cannot be compressed.
        assert!(sent > 16 << 20, "{sent} bytes went through the tunnel: {report:#}");
        echo.wait_for_more();
    }
    echo.finish();
    for host in [alpha, beta] {
        let shown = host.run(&["tc", "-s", "qdisc", "show", "dev", "eth1"]).unwrap();
        assert!(shown.contains("netem") && !shown.contains("dropped 0,"), "{shown}");
    }
    trial.works();
}
