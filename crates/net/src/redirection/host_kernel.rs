//! Kernel of a host, as far as the keeper of redirections uses it: the real one, or one in memory for tests.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use super::objects::KernelObject;
use super::plan::KernelFeatures;
use super::tunnel::Key;
use super::{host_facts, kernel, wireguard};

/// Kernel of a host.
pub trait HostKernel: fmt::Debug + Send + Sync {
    /// Returns what it can do.
    fn kernel_features(&self) -> io::Result<KernelFeatures>;

    /// Makes an object, see [`kernel::make`].
    fn make(&self, object: &KernelObject, key: &dyn Fn() -> io::Result<Key>) -> io::Result<()>;

    /// Removes an object, see [`kernel::remove`].
    fn remove(&self, object: &KernelObject) -> io::Result<()>;

    /// Returns the public key of a private one, by means of a device with this name.
    fn public_key(&self, private: &Key, device: &str) -> io::Result<Key>;

    /// Returns true if nothing has this port of UDP.
    fn is_port_free(&self, port: u16) -> bool;
}

/// The kernel, in the network namespace of the calling thread.
#[derive(Debug)]
pub struct NamespaceKernel;

impl HostKernel for NamespaceKernel {
    fn kernel_features(&self) -> io::Result<KernelFeatures> {
        host_facts::kernel_features()
    }

    fn make(&self, object: &KernelObject, key: &dyn Fn() -> io::Result<Key>) -> io::Result<()> {
        kernel::make(object, key)
    }

    fn remove(&self, object: &KernelObject) -> io::Result<()> {
        kernel::remove(object)
    }

    fn public_key(&self, private: &Key, device: &str) -> io::Result<Key> {
        wireguard::public_key(private, device)
    }

    fn is_port_free(&self, port: u16) -> bool {
        let bind = |address: IpAddr| UdpSocket::bind((address, port));
        // A tunnel needs it for both families, unless the host has no IPv6.
        let is_taken = |error: io::Error| error.kind() == io::ErrorKind::AddrInUse;
        bind(Ipv4Addr::UNSPECIFIED.into()).is_ok() && !bind(Ipv6Addr::UNSPECIFIED.into()).is_err_and(is_taken)
    }
}
