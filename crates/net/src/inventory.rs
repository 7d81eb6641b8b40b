//! Inventory of a host's kernel: the tables of netfilter and the devices that this program has made there.
//!
//! Each bears the name of its migration: a table in its own name, a device as its alias. So they are found without any
//! record of them, also those of an agent that was killed, and those that another program has made in our name.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use crate::divert::{OWN_NAME_START, TABLE_START};
use crate::netlink::{DUMP, Requests, Socket, attribute, attributes};

/// Numbers of `linux/netfilter/nf_tables.h`, `linux/if_link.h` and their like.
mod abi {
    pub(super) const NFTABLES: u16 = 10;
    pub(super) const GET_TABLE: u16 = NFTABLES << 8 | 1;
    pub(super) const GET_CHAIN: u16 = NFTABLES << 8 | 4;
    /// Bytes of the structure with which netfilter's messages begin: the family, and two other fields.
    pub(super) const NETFILTER_BYTES: usize = 4;
    pub(super) const TABLE_NAME: u16 = 1;
    pub(super) const TABLE_HANDLE: u16 = 4;
    pub(super) const CHAIN_TABLE: u16 = 1;
    pub(super) const CHAIN_HOOK: u16 = 4;
    pub(super) const HOOK_DEVICE: u16 = 3;
    pub(super) const HOOK_DEVICES: u16 = 4;
    pub(super) const GET_LINK: u16 = 18;
    /// Bytes of the structure with which messages about devices begin.
    pub(super) const LINK_BYTES: usize = 16;
    pub(super) const LINK_NAME: u16 = 3;
    pub(super) const LINK_ALIAS: u16 = 20;
}

/// Kind of what a migration has in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelItemKind {
    /// A table of netfilter, with the rules in it.
    Table,
    /// A network device.
    Device,
}

/// Something of a migration in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelItem {
    /// Kind.
    pub kind: KernelItemKind,
    /// Name in the kernel; that of a table with its family, as `nft list tables` prints it.
    pub name: String,
    /// Name of the migration that it bears; none if it bears none.
    pub migration: Option<String>,
    /// Interfaces to which the rules of a table apply.
    pub interfaces: Vec<String>,
    /// Command that removes it.
    pub removal: String,
}

/// Lists our tables, in the network namespace of this thread.
///
/// # Errors
/// Among others if the kernel has no nftables.
pub fn tables() -> io::Result<Vec<KernelItem>> {
    let netfilter = Socket::netfilter()?;
    let request = |kind| {
        let mut request = Requests::default();
        request.request(kind, DUMP, &[0; abi::NETFILTER_BYTES]);
        request
    };
    let mut found = Tables::default();
    netfilter.dump(request(abi::GET_TABLE), |body| found.add_table(body))?;
    netfilter.dump(request(abi::GET_CHAIN), |body| found.add_chain(body))?;
    Ok(found.items())
}

/// Lists our devices, in the network namespace of this thread.
pub fn devices() -> io::Result<Vec<KernelItem>> {
    let mut request = Requests::default();
    request.request(abi::GET_LINK, DUMP, &[0; abi::LINK_BYTES]);
    let mut found = Vec::new();
    Socket::route()?.dump(request, |body| found.extend(device(body)))?;
    found.sort_unstable();
    Ok(found)
}

/// Our tables, by family and name.
#[derive(Default)]
struct Tables(BTreeMap<(u8, String), Table>);

#[derive(Default)]
struct Table {
    handle: u64,
    interfaces: BTreeSet<String>,
}

impl Tables {
    /// Adds the table that a message describes, if it is ours.
    fn add_table(&mut self, body: &[u8]) {
        let Some((family, rest)) = netfilter_message(body) else { return };
        let Some(name) = text(rest, abi::TABLE_NAME).filter(|name| name.starts_with(TABLE_START)) else {
            return;
        };
        let handle = attribute(rest, abi::TABLE_HANDLE).and_then(<[u8]>::first_chunk);
        let handle = handle.map_or(0, |handle| u64::from_be_bytes(*handle));
        self.0.insert((family, name), Table { handle, ..Table::default() });
    }

    /// Adds the interfaces of the chain that a message describes to its table.
    fn add_chain(&mut self, body: &[u8]) {
        let Some((family, rest)) = netfilter_message(body) else { return };
        let Some(table) = text(rest, abi::CHAIN_TABLE) else { return };
        let Some(table) = self.0.get_mut(&(family, table)) else { return };
        let Some(hook) = attribute(rest, abi::CHAIN_HOOK) else { return };
        table.interfaces.extend(text(hook, abi::HOOK_DEVICE));
        let several = attribute(hook, abi::HOOK_DEVICES).unwrap_or_default();
        table.interfaces.extend(attributes(several).map(|(_, name)| printable(name)));
    }

    fn items(self) -> Vec<KernelItem> {
        let item = |((family, name), Table { handle, interfaces }): ((u8, String), Table)| {
            let family = family_name(family);
            KernelItem {
                kind: KernelItemKind::Table,
                migration: name.strip_prefix(TABLE_START).map(str::to_owned),
                interfaces: interfaces.into_iter().collect(),
                // Its name cannot be typed: `#` begins a comment there.
                removal: format!("nft delete table {family} handle {handle}"),
                name: format!("{family} {name}"),
            }
        };
        self.0.into_iter().map(item).collect()
    }
}

/// Divides a message of netfilter into the family and the attributes.
fn netfilter_message(body: &[u8]) -> Option<(u8, &[u8])> {
    let (fixed, attributes) = body.split_first_chunk::<{ abi::NETFILTER_BYTES }>()?;
    Some((fixed[0], attributes))
}

/// Returns the name of a family of tables.
fn family_name(family: u8) -> &'static str {
    match family {
        1 => "inet",
        2 => "ip",
        3 => "arp",
        5 => "netdev",
        7 => "bridge",
        10 => "ip6",
        _ => "?",
    }
}

/// Returns the device that a message describes, if it is ours.
fn device(body: &[u8]) -> Option<KernelItem> {
    let attributes = body.get(abi::LINK_BYTES..)?;
    let name = text(attributes, abi::LINK_NAME)?;
    let number = name.strip_prefix(OWN_NAME_START)?;
    if number.is_empty() || !number.bytes().all(|letter| letter.is_ascii_digit()) {
        return None;
    }
    Some(KernelItem {
        kind: KernelItemKind::Device,
        migration: text(attributes, abi::LINK_ALIAS),
        interfaces: Vec::new(),
        removal: format!("ip link delete dev {name}"),
        name,
    })
}

/// Returns an attribute that is a text.
fn text(bytes: &[u8], kind: u16) -> Option<String> {
    attribute(bytes, kind).map(printable)
}

/// Returns a text without the zero at its end.
fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(text.strip_suffix(&[0]).unwrap_or(text)).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netlink::answers;

    const NETDEV: [u8; abi::NETFILTER_BYTES] = [5, 0, 0, 0];

    /// Returns the body of a message with attributes.
    fn message(fixed: &[u8], add: impl FnOnce(&mut Requests)) -> Vec<u8> {
        let mut requests = Requests::default();
        requests.request(0, 0, fixed);
        add(&mut requests);
        let bytes = requests.finish();
        answers(&bytes).next().unwrap().body.to_vec()
    }

    fn table(name: &str, handle: u64) -> Vec<u8> {
        message(&NETDEV, |requests| {
            requests.text(abi::TABLE_NAME, name).attribute(abi::TABLE_HANDLE, &handle.to_be_bytes());
        })
    }

    fn chain(table: &str, devices: &[&str]) -> Vec<u8> {
        message(&NETDEV, |requests| {
            requests.text(abi::CHAIN_TABLE, table).nest(abi::CHAIN_HOOK).nest(abi::HOOK_DEVICES);
            for device in devices {
                requests.text(1, device);
            }
            requests.end();
            if let [device] = devices {
                requests.text(abi::HOOK_DEVICE, device);
            }
            requests.end();
        })
    }

    fn link(name: &str, alias: Option<&str>) -> Vec<u8> {
        message(&[0; abi::LINK_BYTES], |requests| {
            requests.text(abi::LINK_NAME, name);
            if let Some(alias) = alias {
                requests.text(abi::LINK_ALIAS, alias);
            }
        })
    }

    #[test]
    fn tables_of_ours_are_told_from_others() {
        let mut found = Tables::default();
        for (name, handle) in [("whimbrel-web#3", 7), ("filter", 8), ("whimbrel-db#12", 0x0102)] {
            found.add_table(&table(name, handle));
        }
        found.add_chain(&chain("whimbrel-db#12", &["tap1", "tap0"]));
        found.add_chain(&chain("whimbrel-web#3", &["tap2"]));
        found.add_chain(&chain("filter", &["eth0"]));
        let items = found.items();
        let of = |item: &KernelItem| (item.name.clone(), item.interfaces.join(" "), item.removal.clone());
        assert_eq!(
            items.iter().map(of).collect::<Vec<_>>(),
            [
                ("netdev whimbrel-db#12", "tap0 tap1", "nft delete table netdev handle 258"),
                ("netdev whimbrel-web#3", "tap2", "nft delete table netdev handle 7"),
            ]
            .map(|(name, on, removal)| (name.to_owned(), on.to_owned(), removal.to_owned()))
        );
        assert_eq!(items[0].migration.as_deref(), Some("db#12"));
    }

    #[test]
    fn devices_of_ours_are_told_from_others() {
        for other in ["whimbrel", "whimbrel-br", "whimbrel1x", "tap0", "eth0"] {
            assert_eq!(device(&link(other, Some("web#3"))), None, "{other}");
        }
        let found = device(&link("whimbrel12", Some("web#3"))).unwrap();
        assert_eq!((found.name.as_str(), found.migration.as_deref()), ("whimbrel12", Some("web#3")));
        assert_eq!(device(&link("whimbrel0", None)).unwrap().migration, None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut found = Tables::default();
            found.add_chain(&bytes);
            found.add_table(&bytes);
            prop_assert!(found.items().len() <= 1);
            device(&bytes);
        }
    }
}
