//! Addresses of a VM that moves to another network.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::options::InvalidOption;

/// An address of the VM, and the one by which it is reached at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewAddress {
    /// Address that the VM has configured.
    pub old: IpAddr,
    /// Address by which it is reached at the destination; the same where it has configured the addresses of that
    /// network.
    pub new: IpAddr,
    /// Number of bits that the addresses of the new network have in common; absent to take that of the destination's
    /// own address there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<u8>,
}

/// Text that is no pair of addresses.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("write OLD=NEW or OLD=NEW/PREFIX with addresses of one family, e.g. 192.0.2.5=198.51.100.5/24")]
pub struct BadNewAddress;

impl FromStr for NewAddress {
    type Err = BadNewAddress;

    fn from_str(text: &str) -> Result<Self, BadNewAddress> {
        let (old, new) = text.split_once('=').ok_or(BadNewAddress)?;
        let (new, prefix) = match new.split_once('/') {
            Some((new, prefix)) => (new, Some(prefix.parse().map_err(|_| BadNewAddress)?)),
            None => (new, None),
        };
        let parse = |text: &str| text.parse().map_err(|_| BadNewAddress);
        Ok(Self { old: parse(old)?, new: parse(new)?, prefix })
    }
}

impl fmt::Display for NewAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.old, self.new)?;
        self.prefix.map_or(Ok(()), |prefix| write!(f, "/{prefix}"))
    }
}

impl NewAddress {
    /// Checks the addresses of one request.
    pub fn check_all(addresses: &[Self]) -> Result<(), InvalidOption> {
        addresses.iter().try_for_each(Self::check)?;
        for ends in [|one: &Self| one.old, |one: &Self| one.new] {
            let mut seen = BTreeSet::new();
            if let Some(twice) = addresses.iter().map(ends).find(|address| !seen.insert(*address)) {
                let advice = "name each address of the VM once, with one new address of its own";
                return Err(invalid(format!("{twice} is in --new-address twice"), advice));
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), InvalidOption> {
        let Self { old, new, prefix } = *self;
        if old.is_ipv4() != new.is_ipv4() {
            let what = format!("{old} and {new} are of different families");
            return Err(invalid(what, "choose a new address of the same family"));
        }
        if let Some(address) = [old, new].into_iter().find(|address| !is_routable_unicast(*address)) {
            let what = format!("{address} cannot be an address of a VM in a network");
            return Err(invalid(what, "name the VM's address in its network, and its new one"));
        }
        let bits = if new.is_ipv4() { 32 } else { 128 };
        match prefix.filter(|prefix| !(1..=bits).contains(prefix)) {
            Some(prefix) => {
                let what = format!("the network of {new} cannot have {prefix} bits in common");
                Err(invalid(what, &format!("choose 1 to {bits}")))
            }
            None => Ok(()),
        }
    }
}

/// Returns true if a single host can have the address, and be reached by it from other networks.
fn is_routable_unicast(address: IpAddr) -> bool {
    let is_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !is_local && !address.is_unspecified() && !address.is_loopback() && !address.is_multicast()
}

fn invalid(what: String, advice: &str) -> InvalidOption {
    InvalidOption { option: "new_addresses", what, advice: advice.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_addresses_are_read_and_written() {
        for text in ["192.0.2.5=198.51.100.5", "192.0.2.5=198.51.100.5/24", "fd00::5=fd01::5/64"] {
            let parsed: NewAddress = text.parse().unwrap();
            assert_eq!(parsed.to_string(), text);
            NewAddress::check_all(&[parsed]).unwrap();
            let json = serde_json::to_string(&parsed).unwrap();
            assert_eq!(serde_json::from_str::<NewAddress>(&json).unwrap(), parsed);
        }
        for bad in
            ["", "192.0.2.5", "192.0.2.5=", "=192.0.2.5", "a=b", "192.0.2.5=198.51.100.5/", "192.0.2.5=::1/x"]
        {
            assert_eq!(bad.parse::<NewAddress>(), Err(BadNewAddress), "{bad}");
        }
    }

    #[test]
    fn impossible_addresses_are_refused() {
        for bad in [
            "192.0.2.5=fd00::5",
            "192.0.2.5=0.0.0.0",
            "127.0.0.1=192.0.2.5",
            "192.0.2.5=224.0.0.1",
            "169.254.0.1=192.0.2.5",
            "fe80::1=fd00::1",
            "192.0.2.5=198.51.100.5/33",
            "192.0.2.5=198.51.100.5/0",
        ] {
            let refused = NewAddress::check_all(&[bad.parse().unwrap()]).unwrap_err();
            assert_eq!(refused.option, "new_addresses", "{bad}");
        }
        for (one, other) in [
            ("192.0.2.5=198.51.100.5", "192.0.2.5=198.51.100.6"),
            ("192.0.2.5=198.51.100.5", "192.0.2.6=198.51.100.5"),
        ] {
            let both = [one, other].map(|text| text.parse().unwrap());
            assert!(NewAddress::check_all(&both).unwrap_err().what.contains("twice"));
        }
        let both = ["192.0.2.5=198.51.100.5", "fd00::5=fd01::5"].map(|text| text.parse().unwrap());
        NewAddress::check_all(&both).unwrap();
    }
}
