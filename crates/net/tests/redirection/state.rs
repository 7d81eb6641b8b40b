//! The network state of a host.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lab::Host;
use net::own_objects;
use net::redirection::kernel_names::KernelNames;
use serde_json::Value;
use whimbrel_net as net;

use crate::network::{SECOND_TAP, TAP};

/// Returns the whole network state of a host, but for the guest's taps.
pub(crate) fn state(host: &Host) -> BTreeMap<String, String> {
    let commands = [
        "ip -j link",
        "ip -j addr",
        "ip -j rule",
        "ip -j -6 rule",
        "ip -j route show table all",
        "ip -j -6 route show table all",
        "ip -j neigh show nud permanent",
        "ip -j neigh show proxy",
        "ip -j -6 neigh show proxy",
        "bridge -j link",
        "nft -j list ruleset",
    ];
    let mut state = BTreeMap::new();
    for command in commands {
        let words: Vec<_> = command.split(' ').collect();
        let shown: Value = serde_json::from_str(&host.run(&words).unwrap()).unwrap_or_default();
        let mut items: Vec<_> = shown.as_array().cloned().unwrap_or_else(|| vec![shown]);
        items.iter_mut().for_each(without_handles);
        let names_tap =
            |item: &Value| ["ifname", "dev"].iter().any(|key| item[*key] == TAP || item[*key] == SECOND_TAP);
        items.retain(|item| !names_tap(item));
        state.insert(command.to_owned(), format!("{items:#?}"));
    }
    let mut settings = BTreeMap::new();
    host.within(|| {
        for group in ["net/ipv4/conf", "net/ipv4/neigh", "net/ipv6/conf", "net/ipv6/neigh"] {
            read_settings(&Path::new("/proc/sys").join(group), &mut settings);
        }
    })
    .unwrap();
    state.extend(settings);
    state
}

/// Removes the numbers that nftables gives to what is made, also when it is made again.
fn without_handles(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("handle");
            fields.values_mut().for_each(without_handles);
        }
        Value::Array(items) => items.iter_mut().for_each(without_handles),
        _ => {}
    }
}

fn read_settings(directory: &Path, into: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.ends_with(TAP) || path.ends_with(SECOND_TAP) {
            continue;
        }
        if path.is_dir() {
            read_settings(&path, into);
        } else if let Ok(value) = fs::read_to_string(&path) {
            into.insert(path.display().to_string(), value);
        }
    }
}

/// Makes the kernel of this thread's namespace forget a redirection, as if the host had started anew.
pub(crate) fn forget_all(number: u32) {
    for item in [own_objects::tables(), own_objects::devices()].map(Result::unwrap).concat() {
        let words: Vec<_> = item.removal.split(' ').collect();
        // The other end of a pair is gone already.
        let _ = lab::run(std::process::Command::new(words[0]).args(&words[1..]));
    }
    for item in own_objects::routing().unwrap() {
        let words: Vec<_> = item.removal.split(' ').collect();
        lab::run(std::process::Command::new(words[0]).args(&words[1..])).unwrap();
    }
    let names = KernelNames(number);
    assert!(
        [names.tunnel(), names.proxy_device()]
            .iter()
            .all(|name| !Path::new("/sys/class/net").join(name).exists())
    );
    assert_eq!(own_objects::routing().unwrap(), []);
}
