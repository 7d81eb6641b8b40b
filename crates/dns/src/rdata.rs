//! Records that a VM's names have: their types, and their data.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::name::Name;
use crate::wire::{Malformed, Reader};

/// Type of a record. In the order in which records are changed: addresses before the services that refer to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum RecordType {
    /// IPv4 address of a name.
    A,
    /// IPv6 address of a name.
    Aaaa,
    /// Host and port of a service.
    Srv,
    /// Name of an address.
    Ptr,
}

impl RecordType {
    /// Returns its number in messages.
    pub(crate) fn code(self) -> u16 {
        match self {
            Self::A => 1,
            Self::Ptr => 12,
            Self::Aaaa => 28,
            Self::Srv => 33,
        }
    }
}

impl fmt::Display for RecordType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "A",
            Self::Aaaa => "AAAA",
            Self::Srv => "SRV",
            Self::Ptr => "PTR",
        })
    }
}

/// Place of a service: the data of an SRV record (RFC 2782).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SrvData {
    /// The lowest is tried first.
    pub priority: u16,
    /// Share among those of the same priority.
    pub weight: u16,
    /// Port of the service.
    pub port: u16,
    /// Name of the host that provides it.
    pub target: Name,
}

/// Data of a record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Rdata {
    /// IPv4 address.
    A(Ipv4Addr),
    /// IPv6 address.
    Aaaa(Ipv6Addr),
    /// Place of a service.
    Srv(SrvData),
    /// Name of an address.
    Ptr(Name),
}

impl Rdata {
    /// Returns the record of an address.
    pub fn address(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::A(address),
            IpAddr::V6(address) => Self::Aaaa(address),
        }
    }

    /// Returns the address, if the record is one.
    pub fn to_address(&self) -> Option<IpAddr> {
        match self {
            Self::A(address) => Some(IpAddr::V4(*address)),
            Self::Aaaa(address) => Some(IpAddr::V6(*address)),
            Self::Srv(_) | Self::Ptr(_) => None,
        }
    }

    /// Returns the type of the record.
    pub fn kind(&self) -> RecordType {
        match self {
            Self::A(_) => RecordType::A,
            Self::Aaaa(_) => RecordType::Aaaa,
            Self::Srv(_) => RecordType::Srv,
            Self::Ptr(_) => RecordType::Ptr,
        }
    }

    /// Appends its length and its encoding.
    pub(crate) fn write(&self, message: &mut Vec<u8>) {
        let start = message.len();
        message.extend([0, 0]);
        match self {
            Self::A(address) => message.extend(address.octets()),
            Self::Aaaa(address) => message.extend(address.octets()),
            Self::Srv(place) => {
                for number in [place.priority, place.weight, place.port] {
                    message.extend(number.to_be_bytes());
                }
                place.target.write(message);
            }
            Self::Ptr(name) => name.write(message),
        }
        // A name has at most 255 bytes.
        let length = (message.len() - start - 2) as u16;
        message[start..start + 2].copy_from_slice(&length.to_be_bytes());
    }

    /// Reads the data of a record of the type with this number; none of other types.
    pub(crate) fn read(code: u16, reader: &mut Reader<'_>) -> Result<Option<Self>, Malformed> {
        Ok(Some(match code {
            1 => Self::A(Ipv4Addr::from(reader.array::<4>()?)),
            12 => Self::Ptr(Name::read(reader)?),
            28 => Self::Aaaa(Ipv6Addr::from(reader.array::<16>()?)),
            33 => {
                let (priority, weight, port) = (reader.u16()?, reader.u16()?, reader.u16()?);
                Self::Srv(SrvData { priority, weight, port, target: Name::read(reader)? })
            }
            _ => return Ok(None),
        }))
    }
}

impl fmt::Display for Rdata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::A(address) => write!(f, "{address}"),
            Self::Aaaa(address) => write!(f, "{address}"),
            Self::Srv(SrvData { priority, weight, port, target }) => {
                write!(f, "{priority} {weight} {port} {target}")
            }
            Self::Ptr(name) => write!(f, "{name}"),
        }
    }
}
