//! Configuration: zones with their servers and keys, and the names of VMs.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use proto::HostId;
use serde::{Deserialize, Serialize};

use crate::name::Name;
use crate::rdata::SrvData;
use crate::tsig::Algorithm;

/// Port of DNS.
const PORT: u16 = 53;
/// Longest TTL that is of use while a VM moves, in seconds.
const LONGEST_LOWERED_TTL_S: u32 = 3600;
/// Usual longest time for which TTLs stay low after a move, in seconds.
const RESTORE_AFTER_S: u64 = 3600;

/// Table `[dns]` of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DnsConfig {
    /// Severity of what the pre-flight check finds.
    pub check: CheckMode,
    /// Longest time for which TTLs stay low after a VM has moved, in seconds. They get back what they were earlier if
    /// nothing uses its old addresses any longer.
    pub restore_after_s: u64,
    /// Zones that may be changed.
    pub zones: Vec<ZoneConfig>,
    /// Names of each VM, by the VM's name.
    pub vms: BTreeMap<String, VmNames>,
}

impl Default for DnsConfig {
    fn default() -> Self {
        Self {
            check: CheckMode::default(),
            restore_after_s: RESTORE_AFTER_S,
            zones: Vec::new(),
            vms: BTreeMap::new(),
        }
    }
}

/// Severity of what the pre-flight check finds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckMode {
    /// Names that could not follow their VM are blockers.
    #[default]
    Require,
    /// They are warnings.
    Warn,
}

/// Zone, with those that serve it and the key that may change it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneConfig {
    /// Name of the zone.
    pub zone: Name,
    /// Servers of the zone. The first one accepts updates; the change is read back from all.
    pub servers: Vec<Server>,
    /// Name of the key.
    pub key_name: Name,
    /// Algorithm of the key.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// File with the key, which only its owner can read.
    pub key_file: PathBuf,
    /// TTL of records while their VM moves, in seconds.
    #[serde(default = "default_lowered_ttl")]
    pub lowered_ttl_s: u32,
    /// TTL of records that did not exist before, in seconds.
    #[serde(default = "default_new_ttl")]
    pub new_ttl_s: u32,
}

fn default_lowered_ttl() -> u32 {
    5
}

fn default_new_ttl() -> u32 {
    300
}

/// Address of a server: `ADDRESS` or `ADDRESS:PORT`, with an IPv6 address in brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Server(pub SocketAddr);

/// Error of a text that is no address of a server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the address of a server; write an IP address, with a port if it is not 53: \"192.0.2.53\", \"[2001:db8::53]:5353\""
)]
pub struct ServerError(String);

impl TryFrom<String> for Server {
    type Error = ServerError;

    fn try_from(text: String) -> Result<Self, ServerError> {
        let with_port: Option<SocketAddr> = text.parse().ok();
        let address = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(&text);
        let without = || address.parse::<IpAddr>().ok().map(|address| SocketAddr::new(address, PORT));
        let address = with_port.or_else(without).filter(|address| address.port() != 0);
        address.map(Self).ok_or(ServerError(text))
    }
}

impl From<Server> for String {
    fn from(server: Server) -> Self {
        server.to_string()
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.port() == PORT { write!(f, "{}", self.0.ip()) } else { write!(f, "{}", self.0) }
    }
}

/// Names of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VmNames {
    /// Names that have the VM's addresses.
    pub names: Vec<Name>,
    /// Services that the VM provides.
    pub services: Vec<ServiceConfig>,
}

impl VmNames {
    /// Returns the names and services of the VM at a host.
    #[must_use]
    pub fn at(&self, host: &HostId) -> Self {
        let is_of_host = |service: &ServiceConfig| service.hosts.contains(host);
        let is_named =
            |name: &Name| self.services.iter().any(|other| other.name == *name && is_of_host(other));
        let is_there = |service: &&ServiceConfig| {
            is_of_host(service) || (service.hosts.is_empty() && !is_named(&service.name))
        };
        Self { names: self.names.clone(), services: self.services.iter().filter(is_there).cloned().collect() }
    }

    /// Returns a service that is there twice for one host.
    fn service_twice(&self) -> Option<&Name> {
        let is_same = |one: &ServiceConfig, other: &ServiceConfig| {
            let is_shared = one.hosts.is_empty() && other.hosts.is_empty()
                || one.hosts.iter().any(|host| other.hosts.contains(host));
            one.name == other.name && is_shared
        };
        let mut numbered = self.services.iter().enumerate();
        let twice = numbered
            .find(|(number, service)| self.services[..*number].iter().any(|other| is_same(service, other)));
        twice.map(|(_, service)| &service.name)
    }
}

/// Service of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceConfig {
    /// Name of the service, such as `_http._tcp.example.org`.
    pub name: Name,
    /// The lowest is tried first.
    #[serde(default)]
    pub priority: u16,
    /// Share among those of the same priority.
    #[serde(default)]
    pub weight: u16,
    /// Port of the service.
    pub port: u16,
    /// Name of the host that provides it.
    pub target: Name,
    /// Hosts at which the VM provides it so; none for all that no other entry of the same name has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostId>,
}

impl ServiceConfig {
    /// Returns the data of its record.
    pub(crate) fn place(&self) -> SrvData {
        let Self { priority, weight, port, ref target, .. } = *self;
        SrvData { priority, weight, port, target: target.clone() }
    }
}

/// Error of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DnsConfigError {
    /// A zone has no server.
    #[error("the zone {0} has no server: name at least the one that accepts updates")]
    NoServer(Name),
    /// A zone is there twice.
    #[error("the zone {0} is there twice")]
    SameZone(Name),
    /// A lowered TTL is of no use.
    #[error("`lowered_ttl_s` of the zone {zone} is {ttl_s}; 1 to 3600 seconds are possible")]
    LoweredTtl {
        /// The zone.
        zone: Name,
        /// Its value, in seconds.
        ttl_s: u32,
    },
    /// A name of a VM is in none of the zones.
    #[error(
        "the name {name} of the VM {vm} is in none of the zones: add [[dns.zones]] for it, or remove the name"
    )]
    NoZone {
        /// The name.
        name: Name,
        /// The VM.
        vm: String,
    },
    /// A service of a VM is there twice for one host.
    #[error(
        "the service {name} of the VM {vm} is there twice for one host: name other `hosts` in one of them"
    )]
    SameService {
        /// Name of the service.
        name: Name,
        /// The VM.
        vm: String,
    },
}

impl DnsConfig {
    /// Checks what the format does not show.
    ///
    /// # Errors
    /// The first value that is of no use.
    pub fn check(&self) -> Result<(), DnsConfigError> {
        for (index, zone) in self.zones.iter().enumerate() {
            if self.zones[..index].iter().any(|other| other.zone == zone.zone) {
                return Err(DnsConfigError::SameZone(zone.zone.clone()));
            }
            if zone.servers.is_empty() {
                return Err(DnsConfigError::NoServer(zone.zone.clone()));
            }
            if !(1..=LONGEST_LOWERED_TTL_S).contains(&zone.lowered_ttl_s) {
                let (zone, ttl_s) = (zone.zone.clone(), zone.lowered_ttl_s);
                return Err(DnsConfigError::LoweredTtl { zone, ttl_s });
            }
        }
        for (vm, names) in &self.vms {
            let services = names.services.iter().map(|service| &service.name);
            if let Some(name) =
                names.names.iter().chain(services).find(|name| zone_of(&self.zones, name).is_none())
            {
                return Err(DnsConfigError::NoZone { name: name.clone(), vm: vm.clone() });
            }
            if let Some(name) = names.service_twice() {
                return Err(DnsConfigError::SameService { name: name.clone(), vm: vm.clone() });
            }
        }
        Ok(())
    }
}

/// Returns the zone that has a name: the one nearest to it.
pub(crate) fn zone_of<'a>(zones: &'a [ZoneConfig], name: &Name) -> Option<&'a ZoneConfig> {
    let having = zones.iter().filter(|zone| name.is_within(&zone.zone));
    having.reduce(|nearest, zone| if zone.zone.is_within(&nearest.zone) { zone } else { nearest })
}
