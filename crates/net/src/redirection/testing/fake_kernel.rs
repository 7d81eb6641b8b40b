//! Kernel in memory, which refuses what a test wants.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::redirection::host_kernel::HostKernel;
use crate::redirection::objects::{DeviceKind, KernelObject, Sysctl};
use crate::redirection::plan::KernelFeatures;
use crate::redirection::tunnel::Key;

/// Setting by which a host forwards packets of IPv6.
const FORWARDING: &str = "net/ipv6/conf/all/forwarding";
/// The sysctl that the kernel clears for an encrypted tunnel.
const SEND_REDIRECTS: &str = "net/ipv4/conf/all/send_redirects";

/// Kernel in memory.
#[derive(Debug, Default)]
pub struct FakeKernel(Mutex<FakeState>);

#[derive(Debug, Default)]
struct FakeState {
    objects: Vec<KernelObject>,
    sysctls: BTreeMap<String, String>,
    /// Parts of the descriptions of objects that it does not make.
    refused: BTreeSet<String>,
    /// Parts of the descriptions of objects that it does not remove.
    kept: BTreeSet<String>,
    /// Ports of UDP that something else has.
    ports: BTreeSet<u16>,
}

impl FakeKernel {
    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes no more objects whose description has this part.
    pub fn refuse(&self, part: &str) {
        self.state().refused.insert(part.to_owned());
    }

    /// Removes no more objects whose description has this part.
    pub fn keep(&self, part: &str) {
        self.state().kept.insert(part.to_owned());
    }

    /// Gives a port of UDP to something else.
    pub fn occupy(&self, port: u16) {
        self.state().ports.insert(port);
    }

    /// Makes and removes everything again.
    pub fn mend(&self) {
        let mut state = self.state();
        state.refused.clear();
        state.kept.clear();
    }

    /// Forgets all objects, as when the host starts anew.
    pub fn start_anew(&self) {
        let mut state = self.state();
        state.objects.clear();
        state.sysctls.clear();
    }

    /// Returns all that is there, in one order.
    pub fn shown(&self) -> Vec<String> {
        let state = self.state();
        let objects = state.objects.iter().map(|object| format!("{object:?}"));
        let usual = [(FORWARDING, "0"), (SEND_REDIRECTS, "1")];
        let sysctls =
            state.sysctls.iter().filter(|(path, value)| !usual.contains(&(path.as_str(), value.as_str())));
        let mut all: Vec<_> =
            objects.chain(sysctls.map(|(path, value)| format!("{path} = {value}"))).collect();
        all.sort();
        all
    }

    /// Returns true if there is an object whose description has this part.
    pub fn has(&self, part: &str) -> bool {
        self.state().objects.iter().any(|object| object.to_string().contains(part))
    }

    /// Returns true if the host forwards packets of IPv6.
    pub fn forwards(&self) -> bool {
        self.state().sysctls.get(FORWARDING).is_some_and(|value| value == "1")
    }
}

impl HostKernel for FakeKernel {
    fn kernel_features(&self) -> io::Result<KernelFeatures> {
        Ok(KernelFeatures {
            has_v6: true,
            v6_forwarding: if self.forwards() { "1" } else { "0" }.to_owned(),
            send_redirects: "1".to_owned(),
            has_egress: true,
            ..KernelFeatures::default()
        })
    }

    fn make(&self, object: &KernelObject, key: &dyn Fn() -> io::Result<Key>) -> io::Result<()> {
        let mut state = self.state();
        let text = object.to_string();
        if state.refused.iter().any(|part| text.contains(part)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        match object {
            KernelObject::Sysctl(Sysctl { path, value, .. }) => {
                state.sysctls.insert(path.clone(), value.clone());
                return Ok(());
            }
            KernelObject::Device(device) => {
                if let DeviceKind::WireGuard { .. } = device.kind {
                    key()?;
                }
                state.check_device(object)?;
            }
            KernelObject::Up { device } => state.check_port(device)?,
            KernelObject::Rules(_) => state.objects.retain(|other| other.to_string() != text),
            _ => {}
        }
        if !state.objects.contains(object) {
            state.objects.push(object.clone());
        }
        Ok(())
    }

    fn remove(&self, object: &KernelObject) -> io::Result<()> {
        let mut state = self.state();
        let text = object.to_string();
        if state.kept.iter().any(|part| text.contains(part)) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        match object {
            KernelObject::Sysctl(Sysctl { path, before: Some(before), .. }) => {
                state.sysctls.insert(path.clone(), before.clone());
            }
            KernelObject::Device(device) => {
                let mut names = vec![device.name.clone()];
                if let DeviceKind::Veth { peer, .. } = &device.kind {
                    names.push(peer.clone());
                }
                state.objects.retain(|other| !is_of(other, &names));
                let is_its = |path: &str| names.iter().any(|name| path.contains(&format!("/{name}/")));
                state.sysctls.retain(|path, _| !is_its(path));
            }
            KernelObject::Port { .. } | KernelObject::Up { .. } | KernelObject::Sysctl(_) => {}
            _ => state.objects.retain(|other| other != object),
        }
        Ok(())
    }

    fn public_key(&self, private: &Key, _: &str) -> io::Result<Key> {
        if self.state().refused.contains("key") {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(private.map(|byte| !byte))
    }

    fn is_port_free(&self, port: u16) -> bool {
        let state = self.state();
        let is_of_tunnel = |object: &KernelObject| match object {
            KernelObject::Up { device } => state.port(device).is_some_and(|(_, used)| used == port),
            _ => false,
        };
        !state.ports.contains(&port) && !state.objects.iter().any(is_of_tunnel)
    }
}

impl FakeState {
    /// Refuses a device whose name another migration has.
    fn check_device(&self, object: &KernelObject) -> io::Result<()> {
        let KernelObject::Device(device) = object else { return Ok(()) };
        let is_other = |other: &KernelObject| matches!(other, KernelObject::Device(other) if other.name == device.name && other.alias != device.alias);
        if self.objects.iter().any(is_other) { Err(io::ErrorKind::AlreadyExists.into()) } else { Ok(()) }
    }

    /// Returns the port of a tunnel that no other kind, and no other tunnel of `WireGuard`, can have at the same time.
    fn port(&self, name: &str) -> Option<(bool, u16)> {
        self.objects.iter().find_map(|object| match object {
            KernelObject::Device(device) if device.name == name => match &device.kind {
                DeviceKind::WireGuard { end, .. } => Some((true, end.port)),
                DeviceKind::Tunnel(end) if end.port != 0 => Some((false, end.port)),
                _ => None,
            },
            _ => None,
        })
    }

    fn check_port(&self, device: &str) -> io::Result<()> {
        let Some((is_alone, port)) = self.port(device) else { return Ok(()) };
        let ups = self.objects.iter().filter_map(|object| match object {
            KernelObject::Up { device: other } if other != device => Some(other),
            _ => None,
        });
        if self.ports.contains(&port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let mut others = ups.filter_map(|other| self.port(other)).filter(|(_, other)| *other == port);
        if others.any(|(other_is_alone, _)| is_alone || other_is_alone) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(())
    }
}

/// Returns true if an object is one of these devices, or ends with one of them.
fn is_of(object: &KernelObject, names: &[String]) -> bool {
    let device = match object {
        KernelObject::Device(device) => &device.name,
        KernelObject::Port { device, .. }
        | KernelObject::Up { device }
        | KernelObject::Address { device, .. }
        | KernelObject::Neighbour { device, .. }
        | KernelObject::Proxy { device, .. } => device,
        KernelObject::Route(route) => &route.device,
        KernelObject::Sysctl(_) | KernelObject::Policy(_) | KernelObject::Rules(_) => return false,
    };
    names.contains(device)
}
