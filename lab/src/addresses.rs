//! Names and addresses of the laboratory's networks.

use std::net::Ipv4Addr;

/// The bridge in each host to which VMs' taps are attached.
pub const VM_BRIDGE: &str = "vms";
/// The device of the migration link in each host.
pub const MIGRATION_LINK: &str = "mig";

/// The router's address in the VMs' network: the VMs' gateway.
pub const VM_GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 92, 0, 254);

/// Returns the address of the `n`th VM (1 to 253) in the VMs' network.
pub const fn vm_address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 92, 0, n)
}

/// A direction of the migration link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From host `a` to host `b`.
    AToB,
    /// From host `b` to host `a`.
    BToA,
}
