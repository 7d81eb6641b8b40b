//! Redirections by tunnels that this machine's kernel may not have, on a host of the rack (docs/rack.md).

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

#[allow(dead_code, reason = "other tests use more of it")]
#[path = "redirection/network.rs"]
mod network;
#[allow(dead_code, reason = "other tests use more of it")]
#[path = "redirection/state.rs"]
mod state;
#[path = "redirection/tunnels.rs"]
mod tunnels;

use std::env;

use lab::rack::{HostSpec, Rack, Tools};
use lab::{Environment, not_tried};
use net::redirection::TunnelKind;
use network::Family;
use whimbrel_net as net;

/// Variable in the environment of this program on the host.
const ON_HOST: &str = "WHIMBREL_ON_RACK_HOST";

/// The program runs itself on the host, where every kind is to be there.
#[test]
#[ignore = "make rack"]
fn all_kinds_of_tunnels_carry_connections() {
    if env::var_os(ON_HOST).is_some() {
        for kind in TunnelKind::ALL {
            assert!(tunnels::carries(kind, Family::V4), "the kernel has no {kind}");
            assert!(kind == TunnelKind::Ipip || tunnels::carries(kind, Family::V6), "no {kind} over IPv6");
        }
        return;
    }
    let environment = Environment::discover();
    if let Err(why) = Rack::check(&environment) {
        not_tried(format!("whole machines as hosts: {why}"));
        return;
    }
    let rack =
        Rack::up(&environment, &Tools::new(&env::current_exe().unwrap()), &[HostSpec::new("alpha")]).unwrap();
    let name = "all_kinds_of_tunnels_carry_connections";
    let script = format!("{ON_HOST}=1 /mnt/rack/whimbrel --include-ignored --nocapture --exact {name} 2>&1");
    println!("{}", rack.hosts[0].shell(&script).unwrap());
}
