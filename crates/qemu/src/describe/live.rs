//! QEMU's answers about a running guest, as far as they are needed to build it again.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::graph::{self, Backend, Node};
use crate::qmp::{Qmp, QmpError, Version};
use crate::tree::{GEOMETRY_PROPERTIES, VHOST_PROPERTIES};

/// A device that a user requested, on the command line or later.
#[derive(Debug, Clone, Default)]
pub(super) struct LiveDevice {
    pub(super) path: String,
    /// Id; `None` for a device without one.
    pub(super) id: Option<String>,
    pub(super) driver: String,
    /// True if the device was added after the machine was built.
    pub(super) hotplugged: bool,
    pub(super) bus: Option<Bus>,
    /// Address on the bus, as properties of the device: `addr`, `port`, `scsi-id`, …
    pub(super) place: BTreeMap<String, Value>,
    /// A disk's geometry as the guest sees it, as properties of the device. QEMU derives it from the disk's length and
    /// partition table at the start, and another start may derive other values.
    pub(super) geometry: BTreeMap<String, Value>,
    /// Features that a virtio device does not have. With vhost-net the host's kernel decides about some, and another
    /// host's may have more.
    pub(super) missing_features: Vec<String>,
}

/// Bus that a device is attached to.
#[derive(Debug, Clone, Default)]
pub(super) struct Bus {
    pub(super) name: String,
    /// QOM path of the bus.
    pub(super) path: String,
    /// QOM type of the bus, e.g. `PCI` or `usb-bus`.
    pub(super) kind: String,
}

impl Bus {
    pub(super) fn is_pci(&self) -> bool {
        ["PCI", "PCIE", "CXL", "pxb-bus", "pxb-pcie-bus", "pxb-cxl-bus"].contains(&self.kind.as_str())
    }

    pub(super) fn is_usb(&self) -> bool {
        self.kind == "usb-bus"
    }
}

/// A network back end, from `info network`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NetBackend {
    pub(super) id: String,
    pub(super) kind: String,
    pub(super) details: String,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct LiveChardev {
    pub(super) label: String,
    pub(super) filename: String,
}

/// A user-made object.
#[derive(Debug, Clone)]
pub(super) struct Object {
    pub(super) id: String,
    pub(super) kind: String,
}

/// All answers about a guest.
#[derive(Debug, Clone)]
pub(super) struct LiveState {
    pub(super) version: Version,
    pub(super) machine_type: String,
    pub(super) default_ram_id: Option<String>,
    pub(super) base_memory_bytes: u64,
    pub(super) plugged_memory_bytes: u64,
    pub(super) name: Option<String>,
    pub(super) uuid: Option<String>,
    pub(super) kvm: bool,
    pub(super) cpu_type: String,
    pub(super) cpus: usize,
    pub(super) devices: Vec<LiveDevice>,
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) backends: Vec<Backend>,
    pub(super) jobs: Vec<String>,
    pub(super) nets: Vec<NetBackend>,
    pub(super) usernet: String,
    pub(super) chardevs: Vec<LiveChardev>,
    pub(super) objects: Vec<Object>,
    pub(super) ram_blocks: Vec<(String, u64)>,
}

#[derive(Deserialize)]
struct Property {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default, rename = "default-value")]
    default: Option<Value>,
}

/// Properties for a device's address on its bus.
const ADDRESS_PROPERTIES: &[&str] = &["addr", "port", "scsi-id", "channel", "lun", "unit", "nr", "slot"];

/// Properties for a processor's address.
const CPU_ADDRESS_PROPERTIES: &[&str] = &[
    "node-id",
    "drawer-id",
    "book-id",
    "socket-id",
    "die-id",
    "cluster-id",
    "module-id",
    "core-id",
    "thread-id",
];

impl LiveState {
    pub(super) fn query(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let machine_type = crate::device_state::machine_type(qmp)?;
        let machines: Vec<Value> = qmp.execute("query-machines", Value::Null)?;
        let default_ram_id = machines
            .iter()
            .find(|machine| machine["name"] == machine_type.as_str())
            .and_then(|machine| machine["default-ram-id"].as_str())
            .map(str::to_owned);
        let memory: Value = qmp.execute("query-memory-size-summary", Value::Null)?;
        let bytes = |key| memory.get(key).and_then(Value::as_u64).unwrap_or(0);
        let name: Value = qmp.execute("query-name", Value::Null)?;
        let uuid: Value = qmp.execute("query-uuid", Value::Null)?;
        let kvm: Value = qmp.execute("query-kvm", Value::Null)?;
        let cpus: Vec<Value> = qmp.execute("query-cpus-fast", Value::Null)?;
        let cpu_path = cpus.first().and_then(|cpu| cpu["qom-path"].as_str()).unwrap_or_default();
        let cpu_type = get(qmp, cpu_path, "type")?.as_str().unwrap_or_default().to_owned();
        let jobs: Vec<Value> = qmp.execute("query-block-jobs", Value::Null)?;
        let job = |job: &Value| job["device"].as_str().unwrap_or("?").to_owned();
        let ram: Value = qmp.execute("x-query-ramblock", Value::Null)?;
        let ram_text = ram["human-readable-text"].as_str().unwrap_or_default().to_owned();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let (nodes, backends) = graph::query(qmp)?;
        Ok(Self {
            version: qmp.version().clone(),
            machine_type,
            default_ram_id,
            base_memory_bytes: bytes("base-memory"),
            plugged_memory_bytes: bytes("plugged-memory"),
            name: text(&name["name"]),
            uuid: text(&uuid["UUID"]).filter(|uuid| uuid.bytes().any(|b| b != b'0' && b != b'-')),
            kvm: kvm["enabled"].as_bool().unwrap_or(false),
            cpu_type,
            cpus: cpus.len(),
            devices: devices(qmp)?,
            nodes,
            backends,
            jobs: jobs.iter().map(job).collect(),
            nets: nets(&qmp.hmp("info network")?),
            usernet: qmp.hmp("info usernet")?,
            chardevs: qmp.execute("query-chardev", Value::Null)?,
            objects: objects(qmp)?,
            ram_blocks: crate::ram::names(&ram_text),
        })
    }
}

fn get(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value, QmpError> {
    qmp.execute("qom-get", json!({ "path": path, "property": property }))
}

fn list(qmp: &mut Qmp, path: &str) -> Result<Vec<Property>, QmpError> {
    qmp.execute("qom-list", json!({ "path": path }))
}

/// Returns the type in `child<type>`.
fn child(kind: &str) -> Option<&str> {
    kind.strip_prefix("child<")?.strip_suffix('>')
}

fn devices(qmp: &mut Qmp) -> Result<Vec<LiveDevice>, QmpError> {
    let mut found = Vec::new();
    for (container, with_id) in [("/machine/peripheral", true), ("/machine/peripheral-anon", false)] {
        for property in list(qmp, container)? {
            let Some(driver) = child(&property.kind) else { continue };
            let path = format!("{container}/{}", property.name);
            let (place, geometry) = place_and_geometry(qmp, &path)?;
            let missing_features = missing_features(qmp, driver, &path)?;
            found.push(LiveDevice {
                id: with_id.then(|| property.name.clone()),
                driver: driver.to_owned(),
                hotplugged: get(qmp, &path, "hotplugged")?.as_bool().unwrap_or(false),
                bus: bus(qmp, &path)?,
                place,
                geometry,
                missing_features,
                path,
            });
        }
    }
    // Without an id they are named device[N] in the order of their creation; QOM lists them in any order.
    let number = |device: &LiveDevice| {
        let digits: String = device.path.chars().filter(char::is_ascii_digit).collect();
        (device.id.is_some(), device.id.is_none().then(|| digits.parse::<u64>().ok()).flatten())
    };
    found.sort_by_key(number);
    Ok(found)
}

fn bus(qmp: &mut Qmp, path: &str) -> Result<Option<Bus>, QmpError> {
    let parent = match get(qmp, path, "parent_bus") {
        Ok(parent) => parent,
        Err(error) if error.is_refusal() => return Ok(None),
        Err(error) => return Err(error),
    };
    let path = parent.as_str().unwrap_or_default();
    let Some((_, name)) = path.rsplit_once('/') else { return Ok(None) };
    let kind = get(qmp, path, "type")?.as_str().unwrap_or_default().to_owned();
    Ok(Some(Bus { name: name.to_owned(), path: path.to_owned(), kind }))
}

fn missing_features(qmp: &mut Qmp, driver: &str, path: &str) -> Result<Vec<String>, QmpError> {
    let mut without = Vec::new();
    if !driver.starts_with("virtio-net") {
        return Ok(without);
    }
    for property in
        list(qmp, path)?.into_iter().filter(|found| VHOST_PROPERTIES.contains(&found.name.as_str()))
    {
        if get(qmp, path, &property.name)? == Value::Bool(false) {
            without.push(property.name);
        }
    }
    Ok(without)
}

type Properties = BTreeMap<String, Value>;

fn place_and_geometry(qmp: &mut Qmp, path: &str) -> Result<(Properties, Properties), QmpError> {
    let (mut place, mut geometry) = (BTreeMap::new(), BTreeMap::new());
    for property in list(qmp, path)? {
        if GEOMETRY_PROPERTIES.contains(&property.name.as_str()) {
            let value = get(qmp, path, &property.name)?;
            geometry.insert(property.name, value);
            continue;
        }
        if !ADDRESS_PROPERTIES.contains(&property.name.as_str()) {
            continue;
        }
        let value = get(qmp, path, &property.name)?;
        let value = match (property.name.as_str(), value.as_u64(), value.as_str()) {
            // PCI encodes slot and function in one number.
            ("addr", Some(number), _) if number < 256 => {
                format!("{:02x}.{:x}", number >> 3, number & 7).into()
            }
            (_, _, Some("")) => continue,
            _ => value,
        };
        place.insert(property.name, value);
    }
    // Without a disk there is no geometry.
    if geometry.get("cyls").and_then(Value::as_u64).unwrap_or(0) == 0 {
        geometry.clear();
    }
    Ok((place, geometry))
}

/// Returns all properties of a device that differ from its defaults, for `-device` in JSON.
pub(super) fn device_properties(qmp: &mut Qmp, device: &LiveDevice) -> Result<Map<String, Value>, QmpError> {
    let listed: Vec<Property> =
        qmp.execute("device-list-properties", json!({ "typename": device.driver }))?;
    let is_cpu = device.driver.ends_with("-cpu");
    let mut properties = Map::new();
    for property in listed {
        let name = property.name.as_str();
        // For a CPU only its address; its features are part of -cpu.
        if (is_cpu && !CPU_ADDRESS_PROPERTIES.contains(&name))
            || ADDRESS_PROPERTIES.contains(&name)
            || child(&property.kind).is_some()
        {
            continue;
        }
        // Values that are not configuration: where the guest put a bus, QEMU's own file for a ROM, a state.
        if ["busnr", "romfile", "attached"].contains(&name) {
            continue;
        }
        // The size of a memory module is that of its back end.
        if name == "size" && (device.driver.contains("dimm") || device.driver.starts_with("virtio-mem")) {
            continue;
        }
        let value = match get(qmp, &device.path, name) {
            Ok(value) => value,
            Err(error) if error.is_refusal() => continue,
            Err(error) => return Err(error),
        };
        if value.is_null() || value == "" || property.default.as_ref() == Some(&value) {
            continue;
        }
        if name == "bootindex" && value == -1 {
            continue;
        }
        if property.kind.starts_with("link<") {
            // A user's object is named by its id; QEMU itself makes other links.
            let object = value.as_str().and_then(|path| path.strip_prefix("/objects/"));
            if let Some(id) = object {
                properties.insert(property.name, id.into());
            }
            continue;
        }
        properties.insert(property.name, value);
    }
    Ok(properties)
}

/// Returns the properties of an object, as `-object` in JSON expects them.
pub(super) fn object_properties(qmp: &mut Qmp, object: &Object) -> Result<Map<String, Value>, QmpError> {
    let path = format!("/objects/{}", object.id);
    let mut properties = Map::new();
    for property in list(qmp, &path)? {
        let name = property.name.as_str();
        if name == "type" || child(&property.kind).is_some() || property.kind.starts_with("link<") {
            continue;
        }
        match get(qmp, &path, name) {
            Ok(value) if !value.is_null() && value != "" => {
                properties.insert(property.name, value);
            }
            Ok(_) => {}
            Err(error) if error.is_refusal() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(properties)
}

fn objects(qmp: &mut Qmp) -> Result<Vec<Object>, QmpError> {
    let is_object = |property: Property| {
        let kind = child(&property.kind)?.to_owned();
        Some(Object { id: property.name, kind })
    };
    Ok(list(qmp, "/objects")?.into_iter().filter_map(is_object).collect())
}

/// Returns the back ends in `info network`, e.g. ` \ n0: index=0,type=user,net=10.0.2.0,restrict=off`.
fn nets(text: &str) -> Vec<NetBackend> {
    let net = |line: &str| {
        let line = line.trim().trim_start_matches("\\ ");
        let (id, details) = line.split_once(": ")?;
        // In a hub the port precedes it: `hub0port1: #net185: index=0,…`.
        let (id, details) = details.split_once(": ").unwrap_or((id, details));
        let kind = details.split(',').find_map(|part| part.trim().strip_prefix("type="))?;
        (kind != "nic" && kind != "hubport").then(|| NetBackend {
            id: id.to_owned(),
            kind: kind.to_owned(),
            details: details.to_owned(),
        })
    };
    text.lines().filter_map(net).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_ends_are_read_from_info_network() {
        let text = "hub 0
 \\ hub0port1: #net185: index=0,type=user,net=10.0.2.0,restrict=off
 \\ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56
hnic: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:57
 \\ hn0: index=0,type=tap,ifname=tap3,script=no,downscript=no
";
        let found = nets(text);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].id.as_str(), found[0].kind.as_str()), ("#net185", "user"));
        assert_eq!(found[1].details, "index=0,type=tap,ifname=tap3,script=no,downscript=no");
    }
}
