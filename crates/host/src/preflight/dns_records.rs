//! Names of a VM that moves to another network: which of its records of DNS change, and whether that is possible.

use std::net::IpAddr;

use api::NewAddress;
use dns::{AddressChange, Relocation, Zones};
use net::redirection::AddressPair;
use proto::message::Finding;
use proto::{HostId, VmName};
use tracing::warn;

use crate::config::Config;
use crate::redirections;

/// Returns the change of a VM's place as DNS shows it; none if the VM stays in its network, or has no names. Where the VM's
/// addresses are translated, DNS has those by which it is reached.
pub fn relocation(config: &Config, vm: &VmName, to: &HostId, addresses: &[NewAddress]) -> Option<Relocation> {
    let names = config.dns.vms.get(vm.as_str()).filter(|_| !addresses.is_empty())?;
    let reached_by = public_addresses(config, vm);
    let known =
        |own: IpAddr| reached_by.iter().find(|pair| pair.guest == own).map_or(own, |pair| pair.public);
    let addresses = addresses.iter().map(|address| AddressChange::new(known(address.old), address.new));
    Some(Relocation::new(&names.at(&config.host), Some(&names.at(to)), addresses.collect()))
}

/// Returns the addresses by which a VM that has moved to this host's network is reached.
fn public_addresses(config: &Config, vm: &VmName) -> Vec<AddressPair> {
    match redirections::of_vm_here(&redirections::keeper(config), &config.host, vm) {
        Ok(redirections) => {
            redirections.into_iter().flat_map(|redirection| redirection.place.attachment.pairs).collect()
        }
        Err(error) => {
            warn!(%vm, error = crate::chain(&error), "the addresses by which the VM is reached are not known");
            Vec::new()
        }
    }
}

/// Checks whether the names of a VM can follow it. Takes four seconds for each server that does not answer.
pub fn check_dns_records(
    config: &Config,
    vm: &VmName,
    to: &HostId,
    addresses: &[NewAddress],
) -> Vec<Finding> {
    let check = |relocation| dns::check(&Zones::load(&config.dns.zones), &relocation, config.dns.check);
    relocation(config, vm, to, addresses).map(check).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::{host, vm};

    const TEXT: &str = "host = \"a\"\nlisten = \"127.0.0.1:1\"\ntls.plain = true\n[[dns.zones]]\nzone = \"example.org\"\n\
                        servers = [\"192.0.2.53\"]\nkey_name = \"k\"\nkey_file = \"/nonexistent\"\n\
                        [dns.vms.web]\nnames = [\"web.example.org\"]\n\
                        [[dns.vms.web.services]]\nname = \"_http._tcp.example.org\"\nport = 80\ntarget = \"web.example.org\"\n\
                        [[dns.vms.web.services]]\nname = \"_http._tcp.example.org\"\nport = 8080\ntarget = \"web.example.org\"\n\
                        hosts = [\"b\"]\n";

    #[test]
    fn names_change_for_vms_that_get_new_addresses() {
        let config = Config::parse(Path::new("/agent.toml"), TEXT).unwrap();
        let moved: NewAddress = "192.0.2.10=198.51.100.7/24".parse().unwrap();
        let changes = |vm: &VmName, to: &str, addresses: &[NewAddress]| {
            let relocation = relocation(&config, vm, &host(to), addresses);
            relocation.map(|moved| (moved.names.len(), moved.addresses.len(), moved.services.len()))
        };
        assert_eq!(changes(&vm(), "b", &[moved]), Some((1, 1, 1)), "the service has another port there");
        assert_eq!(changes(&vm(), "c", &[moved]), Some((1, 1, 0)));
        assert_eq!(changes(&vm(), "b", &[]), None);
        assert_eq!(changes(&VmName::new("other").unwrap(), "b", &[moved]), None);
        let found = check_dns_records(&config, &vm(), &host("b"), &[moved]);
        assert_eq!(found.iter().map(|finding| finding.code.as_str()).collect::<Vec<_>>(), ["dns-key-file"]);
        assert_eq!(check_dns_records(&config, &vm(), &host("b"), &[]), []);
    }
}
