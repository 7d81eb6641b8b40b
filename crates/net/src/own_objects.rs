//! Inventory of a host's kernel: the tables of netfilter, devices, routes and policy rules that this program has made there.
//!
//! Each bears the name of its migration: a table in its own name, a device as its alias. Routes and policy rules have the
//! number of our protocol, and lead through such a device. So they are found without any record of them, also those of an
//! agent that was killed, and those that another program has made in our name.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

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
    pub(super) const GET_ROUTE: u16 = 26;
    pub(super) const GET_RULE: u16 = 34;
    /// Bytes of the structures with which messages about routes and about policy rules begin.
    pub(super) const ROUTE_BYTES: usize = 12;
    pub(super) const ROUTE_DESTINATION: u16 = 1;
    pub(super) const ROUTE_DEVICE: u16 = 4;
    pub(super) const TABLE: u16 = 15;
    pub(super) const RULE_TO: u16 = 1;
    pub(super) const RULE_FROM: u16 = 2;
    pub(super) const RULE_PRIORITY: u16 = 6;
    pub(super) const RULE_PROTOCOL: u16 = 21;
    pub(super) const FAMILY_IPV6: u8 = 10;
}

/// Number of our protocol in routes and policy rules: "W".
pub(crate) const REDIRECTION_PROTOCOL: u8 = 0x57;
/// End of the names of a redirection's tables, before a number.
pub(crate) const REDIRECTION_TABLE: &str = "-redirection-";

/// Kind of what a migration has in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnObjectKind {
    /// A table of netfilter, with the rules in it.
    Table,
    /// A network device.
    Device,
    /// A route in a routing table of our own.
    Route,
    /// A policy rule, which chooses such a table.
    Rule,
}

/// Something of a migration in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnObject {
    /// Kind.
    pub kind: OwnObjectKind,
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
pub fn tables() -> io::Result<Vec<OwnObject>> {
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
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn devices() -> io::Result<Vec<OwnObject>> {
    let mut request = Requests::default();
    request.request(abi::GET_LINK, DUMP, &[0; abi::LINK_BYTES]);
    let mut found = Vec::new();
    Socket::route()?.dump(request, |body| found.extend(device(body)))?;
    found.sort_unstable();
    Ok(found)
}

/// Lists our routes and policy rules, in the network namespace of this thread.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn routing() -> io::Result<Vec<OwnObject>> {
    let route = Socket::route()?;
    let mut names = BTreeMap::new();
    let mut request = Requests::default();
    request.request(abi::GET_LINK, DUMP, &[0; abi::LINK_BYTES]);
    route.dump(request, |body| names.extend(index(body).zip(device(body))))?;
    let (mut migrations, mut found) = (BTreeMap::new(), Vec::new());
    let mut request = Requests::default();
    request.request(abi::GET_ROUTE, DUMP, &[0; abi::ROUTE_BYTES]);
    route.dump(request, |body| {
        let Some((table, item)) = route_item(body, &names) else { return };
        if let Some(migration) = &item.migration {
            migrations.insert(table, migration.clone());
        }
        found.push(item);
    })?;
    let mut request = Requests::default();
    request.request(abi::GET_RULE, DUMP, &[0; abi::ROUTE_BYTES]);
    route.dump(request, |body| found.extend(rule_item(body, &migrations)))?;
    found.sort();
    Ok(found)
}

/// Returns the number of the device that a message describes.
fn index(body: &[u8]) -> Option<u32> {
    body.get(4..)?.first_chunk().map(|index| u32::from_ne_bytes(*index))
}

/// Returns the option of `ip` for a family of addresses.
fn option(body: &[u8]) -> &'static str {
    if body.first() == Some(&abi::FAMILY_IPV6) { "-6 " } else { "" }
}

/// Returns the route that a message describes, with its table, if it is ours.
fn route_item(body: &[u8], devices: &BTreeMap<u32, OwnObject>) -> Option<(u32, OwnObject)> {
    let attributes = body.get(abi::ROUTE_BYTES..)?;
    if *body.get(5)? != REDIRECTION_PROTOCOL {
        return None;
    }
    let table = number(attributes, abi::TABLE)?;
    let device = number(attributes, abi::ROUTE_DEVICE).and_then(|device| devices.get(&device));
    let destination = match address(attributes, abi::ROUTE_DESTINATION) {
        Some(destination) => format!("{destination}/{}", body.get(1)?),
        None => "default".to_owned(),
    };
    let name = format!("{destination} table {table}");
    let item = OwnObject {
        kind: OwnObjectKind::Route,
        migration: device.and_then(|device| device.migration.clone()),
        interfaces: device.map(|device| device.name.clone()).into_iter().collect(),
        removal: format!("ip {}route delete {name}", option(body)),
        name,
    };
    Some((table, item))
}

/// Returns the policy rule that a message describes, if it is ours. `migrations` are those of routing tables.
fn rule_item(body: &[u8], migrations: &BTreeMap<u32, String>) -> Option<OwnObject> {
    let attributes = body.get(abi::ROUTE_BYTES..)?;
    if attribute(attributes, abi::RULE_PROTOCOL)?.first() != Some(&REDIRECTION_PROTOCOL) {
        return None;
    }
    let (priority, table) = (number(attributes, abi::RULE_PRIORITY)?, number(attributes, abi::TABLE)?);
    let ends = [("from", abi::RULE_FROM), ("to", abi::RULE_TO)];
    let ends = ends.map(|(word, kind)| address(attributes, kind).map(|address| format!("{word} {address} ")));
    let ends: String = ends.into_iter().flatten().collect();
    let name = format!("{ends}table {table}");
    Some(OwnObject {
        kind: OwnObjectKind::Rule,
        migration: migrations.get(&table).cloned(),
        interfaces: Vec::new(),
        removal: format!("ip {}rule delete {name} priority {priority}", option(body)),
        name,
    })
}

fn number(bytes: &[u8], kind: u16) -> Option<u32> {
    attribute(bytes, kind)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

fn address(bytes: &[u8], kind: u16) -> Option<IpAddr> {
    let bytes = attribute(bytes, kind)?;
    let short = <[u8; 4]>::try_from(bytes).map(|bytes| Ipv4Addr::from(bytes).into());
    short.ok().or_else(|| <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).into()))
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

    fn items(self) -> Vec<OwnObject> {
        let item = |((family, name), Table { handle, interfaces }): ((u8, String), Table)| {
            let family = family_name(family);
            OwnObject {
                kind: OwnObjectKind::Table,
                migration: name.strip_prefix(TABLE_START).map(|name| migration(name).to_owned()),
                interfaces: interfaces.into_iter().collect(),
                // Its name cannot be typed: `#` begins a comment there.
                removal: format!("nft delete table {family} handle {handle}"),
                name: format!("{family} {name}"),
            }
        };
        self.0.into_iter().map(item).collect()
    }
}

/// Returns the migration in the end of a table's name. That of a redirection also has a number.
fn migration(name: &str) -> &str {
    let end = |(_, number): &(&str, &str)| number.bytes().all(|letter| letter.is_ascii_digit());
    name.rsplit_once(REDIRECTION_TABLE).filter(end).map_or(name, |(migration, _)| migration)
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
fn device(body: &[u8]) -> Option<OwnObject> {
    let attributes = body.get(abi::LINK_BYTES..)?;
    let name = text(attributes, abi::LINK_NAME)?;
    let number = name.strip_prefix(OWN_NAME_START)?;
    if number.is_empty() || !number.bytes().all(|letter| letter.is_ascii_digit()) {
        return None;
    }
    Some(OwnObject {
        kind: OwnObjectKind::Device,
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
        let of = |item: &OwnObject| (item.name.clone(), item.interfaces.join(" "), item.removal.clone());
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

    #[test]
    fn tables_of_redirections_name_their_migration() {
        for (name, expected) in [
            ("web#3-redirection-712", "web#3"),
            ("web#3", "web#3"),
            ("a-redirection-b#3", "a-redirection-b#3"),
            ("a-redirection-1#3-redirection-7", "a-redirection-1#3"),
        ] {
            assert_eq!(migration(name), expected, "{name}");
        }
    }

    #[test]
    fn routes_and_policy_rules_name_the_migration_of_their_device() {
        let of_web = device(&link("whimbrel1000000", Some("web#3"))).unwrap();
        let devices = BTreeMap::from([(7, of_web)]);
        let route = |protocol: u8, device: u32| {
            let fixed = [2, 32, 0, 0, 0, protocol, 0, 1, 0, 0, 0, 0];
            message(&fixed, |requests| {
                requests.attribute(abi::ROUTE_DESTINATION, &[10, 0, 0, 7]);
                requests.attribute(abi::TABLE, &1_460_000_000_u32.to_ne_bytes());
                requests.attribute(abi::ROUTE_DEVICE, &device.to_ne_bytes());
            })
        };
        assert_eq!(route_item(&route(3, 7), &devices), None, "another program's");
        let (table, item) = route_item(&route(REDIRECTION_PROTOCOL, 7), &devices).unwrap();
        assert_eq!((table, item.migration.as_deref()), (1_460_000_000, Some("web#3")));
        assert_eq!(item.removal, "ip route delete 10.0.0.7/32 table 1460000000");
        assert_eq!(route_item(&route(REDIRECTION_PROTOCOL, 8), &devices).unwrap().1.migration, None);
        let rule = |protocol: u8| {
            message(&[10, 128, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0], |requests| {
                requests.attribute(abi::RULE_PROTOCOL, &[protocol]);
                requests.attribute(abi::RULE_TO, &Ipv6Addr::LOCALHOST.octets());
                requests.attribute(abi::RULE_PRIORITY, &5702_u32.to_ne_bytes());
                requests.attribute(abi::TABLE, &1_460_000_000_u32.to_ne_bytes());
            })
        };
        let migrations = BTreeMap::from([(table, "web#3".to_owned())]);
        assert_eq!(rule_item(&rule(2), &migrations), None, "the kernel's");
        let item = rule_item(&rule(REDIRECTION_PROTOCOL), &migrations).unwrap();
        assert_eq!(item.migration.as_deref(), Some("web#3"));
        assert_eq!(item.removal, "ip -6 rule delete to ::1 table 1460000000 priority 5702");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut found = Tables::default();
            found.add_chain(&bytes);
            found.add_table(&bytes);
            prop_assert!(found.items().len() <= 1);
            device(&bytes);
            route_item(&bytes, &BTreeMap::new());
            rule_item(&bytes, &BTreeMap::new());
        }
    }
}
