//! Guests that compute during a migration: kernels of the NAS Parallel Benchmarks, each of which verifies its own
//! result. A page that was lost, or is an older one, makes a wrong result, or leads out of an array. Every migration
//! compares all of memory by a path of its own (`--verify`). Needs root.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{Cluster, Device, GuestSpec, Load};
use lab::{Nas, Net, Peer, vm_address};

/// Port on which one of two guests listens for the other.
const PORT: u16 = 7000;

/// Returns a guest that runs a kernel for ever, and has a little memory beside it that it can check.
fn spec(name: &str, nas: Nas) -> GuestSpec {
    let load = Load { fill_mib: 8, wss_mib: 4, rate_mib_per_s: 2, verify_mib_per_s: 2, ..Load::default() };
    let load = Load { nas: Some(nas), ..load };
    GuestSpec { memory_mib: 192, ..GuestSpec::tiny(name, load) }
}

/// Migrates there and back in the midst of its work, twice; each time a run that had begun before verifies afterwards.
fn verifies_after_a_move(kernel: &str) {
    let cluster = Cluster::new();
    let guest = cluster.guest(&spec("vm1", Nas::forever(kernel, "S")));
    guest.serial().wait_for_nas().unwrap();
    for (from, to) in [("a", "b"), ("b", "a")] {
        cluster.migrate("vm1", from, to, &[]);
        // Its output there, from the beginning: the first run was under way during the migration.
        let mut output = cluster.serial(to, "vm1").follow().unwrap();
        for _ in 0..2 {
            assert!(output.wait_for_nas_run().unwrap(), "{kernel} at {to}");
        }
        cluster.assert_guest_whole(to, "vm1");
    }
}

#[test]
fn kernel_cg_verifies_after_a_move() {
    verifies_after_a_move("CG");
}

#[test]
fn kernel_ep_verifies_after_a_move() {
    verifies_after_a_move("EP");
}

#[test]
fn kernel_ft_verifies_after_a_move() {
    verifies_after_a_move("FT");
}

#[test]
fn kernel_is_verifies_after_a_move() {
    verifies_after_a_move("IS");
}

#[test]
fn kernel_mg_verifies_after_a_move() {
    verifies_after_a_move("MG");
}

/// Two guests share a kernel's work over one connection, which neither reopens. One of them is migrated to the other
/// host and back: each run needs the other one's data, so both verify only if the connection has arrived intact.
#[test]
fn two_guests_go_on_exchanging_while_one_is_moved() {
    let cluster = Cluster::new();
    let shared = |name: &str, n: u8, peer: Peer| {
        let mut spec = spec(name, Nas { peer: Some(peer), ..Nas::forever("CG", "S") });
        spec.devices.push(Device::Net(Net::new(n)));
        if let lab::Boot::Tiny(load) = &mut spec.boot {
            load.address = Some(vm_address(n));
        }
        cluster.lab.b.tap(&Net::new(n).tap).unwrap();
        cluster.guest(&spec)
    };
    let listening = shared("vm1", 1, Peer::Listen(PORT));
    let at = std::net::SocketAddrV4::new(vm_address(1), PORT);
    let connecting = shared("vm2", 2, Peer::At(at));
    for guest in [&listening, &connecting] {
        guest.serial().wait_for_nas().unwrap();
    }
    for (from, to) in [("a", "b"), ("b", "a")] {
        cluster.migrate("vm1", from, to, &[]);
        let moved = cluster.serial(to, "vm1").follow().unwrap();
        let stayed = connecting.serial().follow_from_now().unwrap();
        for (mut output, vm) in [(moved, "vm1"), (stayed, "vm2")] {
            for _ in 0..2 {
                assert!(output.wait_for_nas_run().unwrap(), "{vm}, which was moved to {to} or works for it");
            }
        }
        cluster.assert_guest_whole(to, "vm1");
    }
}
