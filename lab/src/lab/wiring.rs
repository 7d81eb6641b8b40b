//! Wiring of a laboratory's hosts: cables, bridges, addresses, and the rules that cut a link.

use std::fs;
use std::net::Ipv4Addr;

use serde_json::Value;

use super::{
    CLIENT, CLIENT_GATEWAY, CONTROL, CONTROL_LINK, CUTS, Lab, Link, MIGRATION, MIGRATION_LINK, VM_BRIDGE,
    VM_GATEWAY,
};
use crate::emulator::Emulator;
use crate::error::{Context, Result};
use crate::host::Host;

impl Lab {
    /// Connects two hosts by a cable, made within them so that no name can clash with this machine's own devices.
    fn cable(from: &Host, device: &str, to: &Host, other: &str) -> Result<()> {
        from.run(&[
            "ip",
            "link",
            "add",
            device,
            "type",
            "veth",
            "peer",
            "name",
            other,
            "netns",
            to.namespace(),
        ])?;
        from.run(&["ip", "link", "set", "dev", device, "up"])?;
        to.run(&["ip", "link", "set", "dev", other, "up"])?;
        Ok(())
    }

    pub(super) fn connect_migration(&mut self, link: &Link) -> Result<()> {
        match link {
            Link::Emulated(settings) => {
                self.emulator = Some(Emulator::start(&self.a, &self.b, MIGRATION_LINK, settings.clone())?);
            }
            Link::Fast | Link::Limited { .. } => {
                Self::cable(&self.a, MIGRATION_LINK, &self.b, MIGRATION_LINK)?;
            }
        }
        address(&self.a, MIGRATION[0], MIGRATION_LINK)?;
        address(&self.b, MIGRATION[1], MIGRATION_LINK)?;
        match link {
            Link::Limited { rate_bytes_per_s } => self.set_rate(Some(*rate_bytes_per_s)),
            _ => Ok(()),
        }
    }

    pub(super) fn connect_witness(&self) -> Result<()> {
        bridge(&self.witness, CONTROL_LINK)?;
        address(&self.witness, CONTROL[2], CONTROL_LINK)?;
        for (host, own) in [(&self.a, CONTROL[0]), (&self.b, CONTROL[1])] {
            Self::cable(host, CONTROL_LINK, &self.witness, host.name())?;
            self.witness.run(&["ip", "link", "set", "dev", host.name(), "master", CONTROL_LINK])?;
            address(host, own, CONTROL_LINK)?;
        }
        Ok(())
    }

    pub(super) fn connect_vms(&self) -> Result<()> {
        bridge(&self.router, VM_BRIDGE)?;
        address(&self.router, VM_GATEWAY, VM_BRIDGE)?;
        for host in [&self.a, &self.b] {
            bridge(host, VM_BRIDGE)?;
            Self::cable(host, "trunk", &self.router, host.name())?;
            host.run(&["ip", "link", "set", "dev", "trunk", "master", VM_BRIDGE])?;
            self.router.run(&["ip", "link", "set", "dev", host.name(), "master", VM_BRIDGE])?;
        }
        Ok(())
    }

    pub(super) fn connect_third(&self, host: &Host) -> Result<()> {
        bridge(host, VM_BRIDGE)?;
        Self::cable(host, "trunk", &self.router, host.name())?;
        host.run(&["ip", "link", "set", "dev", "trunk", "master", VM_BRIDGE]).map(drop)
    }

    pub(super) fn connect_client(&self) -> Result<()> {
        Self::cable(&self.client, "net", &self.router, "clients")?;
        address(&self.client, CLIENT, "net")?;
        address(&self.router, CLIENT_GATEWAY, "clients")?;
        self.client.run(&["ip", "route", "add", "default", "via", &CLIENT_GATEWAY.to_string()])?;
        // The file belongs to the namespace of the process that opens it.
        self.router
            .within(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?
            .context(|| "cannot make the router route")
    }
}

fn address(host: &Host, address: Ipv4Addr, device: &str) -> Result<()> {
    host.run(&["ip", "addr", "add", &format!("{address}/24"), "dev", device]).map(drop)
}

fn bridge(host: &Host, device: &str) -> Result<()> {
    host.run(&["ip", "link", "add", "name", device, "type", "bridge", "forward_delay", "0"])?;
    let shown: Value = serde_json::from_str(&host.run(&["ip", "-j", "link", "show", "dev", device])?)
        .map_err(std::io::Error::from)
        .context(|| "cannot read what ip prints")?;
    let own = shown[0]["address"].as_str().unwrap_or_default();
    // An address that was set stays. Otherwise it is the lowest one of the ports, and changes when a tap comes or goes:
    // neighbours would send to the former one for a while.
    host.run(&["ip", "link", "set", "dev", device, "address", own, "up"]).map(drop)
}

/// Turns IPv6 off: the laboratory does not use it, and its devices would send by themselves, where tests count packets.
pub(crate) fn silence_ipv6(host: &Host) -> Result<()> {
    // The files belong to the namespace of the process that opens them.
    host.within(|| {
        ["all", "default"].into_iter().try_for_each(|which| {
            match fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1") {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                result => result,
            }
        })
    })?
    .context(|| "cannot turn IPv6 off")
}

/// Drops whatever arrives at a device, before anything in the host sees it. The sender receives no error.
pub(super) fn drop_arriving(host: &Host, device: &str) -> Result<()> {
    // One transaction. Cutting twice leaves one rule, and cuts of other devices stay.
    let rules = format!(
        "add table netdev {CUTS}; \
         add chain netdev {CUTS} {device} {{ type filter hook ingress device \"{device}\" priority 0; }}; \
         flush chain netdev {CUTS} {device}; \
         add rule netdev {CUTS} {device} counter drop"
    );
    host.run(&["nft", &rules]).map(drop)
}
