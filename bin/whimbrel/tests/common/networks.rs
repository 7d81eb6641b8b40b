//! State of a host's networks, for comparisons.

use lab::Host;
use serde_json::Value;

/// Properties of a link that are compared: not the states, which settle.
const LINK_PROPERTIES: [&str; 7] = ["ifname", "address", "ifalias", "mtu", "master", "qdisc", "txqlen"];

/// Returns the links of a host with their addresses, one text each.
pub fn links(host: &Host) -> Vec<String> {
    let links: Value = serde_json::from_str(&host.run(&["ip", "-json", "addr"]).unwrap()).unwrap();
    let describe = |link: &Value| {
        let properties = LINK_PROPERTIES.map(|name| link[name].to_string()).join(" ");
        let addresses = link["addr_info"].as_array().unwrap().iter();
        let addresses: Vec<_> =
            addresses.map(|address| format!("{}/{}", address["local"], address["prefixlen"])).collect();
        format!("{properties} {}", addresses.join(" "))
    };
    links.as_array().unwrap().iter().map(describe).collect()
}
