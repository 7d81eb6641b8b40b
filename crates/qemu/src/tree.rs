//! Device tree: the guest's view of its machine, and its comparison between two QEMUs.
//!
//! The tree is read from `info qtree`, the only listing that has all buses, all devices and all
//! their properties in one answer. Two trees are equal if they have the same devices at the same
//! addresses with the same properties.
//!
//! Properties of the host (which drive or netdev is behind a device) and those that the guest
//! itself sets while it runs (bus numbers, windows) are omitted: a destination that has not loaded
//! its state yet must compare equal to a running source.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::qmp::{Qmp, QmpError, Version};

/// Properties that name a device's back end.
const HOST_PROPERTIES: &[&str] = &[
    "drive", "netdev", "chardev", "iothread", "audiodev", "romfile", "fsdev", "memdev", "rng", "logfile",
    "filename", "file", "display",
];
/// Properties that the running guest sets: they belong to its state, not to its devices.
const GUEST_PROPERTIES: &[&str] = &["busnr", "MCFG", "smb_io_base", "hpet-offset-saved", "attached"];
/// Properties that are part of [`Device::place`], where the actual value counts, not the requested
/// one.
const ADDRESS_PROPERTIES: &[&str] = &["addr", "port", "nr", "unit", "scsi-id", "lun"];

/// Properties for the geometry of a disk.
pub(crate) const GEOMETRY_PROPERTIES: &[&str] = &["cyls", "heads", "secs", "bios-chs-trans"];

/// Length of `isa-applesmc`'s key in bytes.
const OSK_BYTES: usize = 64;

/// Properties of virtio devices that the kernel of the host decides where vhost-net serves them.
pub const VHOST_PROPERTIES: &[&str] =
    &["queue_reset", "packed", "event_idx", "indirect_desc", "mrg_rxbuf", "iommu_platform", "hash", "rss"];

/// One device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Path of buses and devices above it, the bus it is attached to last: `main-system-bus/q35-pcihost/pcie.0`.
    pub on: String,
    /// Type of the device.
    pub driver: String,
    /// Id; empty if it has none.
    pub id: String,
    /// Address on its bus, if the bus has addresses: `02.0` on PCI, `1.2` on USB.
    pub place: String,
    /// Properties as `info qtree` prints them.
    pub properties: BTreeMap<String, String>,
}

impl Device {
    /// Returns a human-readable name, unique within a tree as far as the devices themselves are.
    pub fn label(&self) -> String {
        let id = if self.id.is_empty() { String::new() } else { format!(" {:?}", self.id) };
        let place = if self.place.is_empty() { String::new() } else { format!(" at {}", self.place) };
        format!("{}{id}{place} on {}", self.driver, self.on)
    }
}

/// All devices of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct DeviceTree {
    /// In a fixed order, whatever the order of their creation.
    pub devices: Vec<Device>,
}

/// A difference between two trees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "difference")]
pub enum Difference {
    /// A device that only the first tree has.
    Missing {
        /// Label of the device: [`Device::label`].
        device: String,
    },
    /// A device that only the second tree has.
    Added {
        /// Label of the device: [`Device::label`].
        device: String,
    },
    /// A device that both have, with another property.
    Property {
        /// Label of the device: [`Device::label`].
        device: String,
        /// Name of the property.
        property: String,
        /// Value in the first tree.
        first: String,
        /// Value in the second tree.
        second: String,
    },
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { device } => write!(f, "{device} is missing"),
            Self::Added { device } => write!(f, "{device} was not there before"),
            Self::Property { device, property, first, second } => {
                write!(f, "{device}: {property} is {second}, not {first}")
            }
        }
    }
}

/// Reads the device tree of a QEMU.
pub fn device_tree(qmp: &mut Qmp) -> Result<DeviceTree, QmpError> {
    Ok(DeviceTree::parse(&qmp.hmp("info qtree")?))
}

/// Returns the differences between two trees; empty if the guest cannot distinguish them. If the
/// versions differ, only properties that both know are compared.
pub fn compare_device_trees(first: &DeviceTree, second: &DeviceTree) -> Vec<Difference> {
    let (first, second) = (first.by_place(), second.by_place());
    let mut differences = Vec::new();
    for (key, one) in &first {
        let Some(other) = second.get(key) else {
            differences.push(Difference::Missing { device: one.label() });
            continue;
        };
        for (property, value) in &one.properties {
            let Some(others) = other.properties.get(property) else { continue };
            if value != others && !is_ignored(property) {
                differences.push(Difference::Property {
                    device: one.label(),
                    property: property.clone(),
                    first: value.clone(),
                    second: others.clone(),
                });
            }
        }
    }
    let added = second.iter().filter(|(key, _)| !first.contains_key(*key));
    differences.extend(added.map(|(_, device)| Difference::Added { device: device.label() }));
    differences
}

fn is_ignored(property: &str) -> bool {
    [HOST_PROPERTIES, GUEST_PROPERTIES, ADDRESS_PROPERTIES].iter().any(|list| list.contains(&property))
}

/// Reads the trees of two QEMUs and compares them.
pub fn compare(source: &mut Qmp, destination: &mut Qmp) -> Result<Vec<Difference>, QmpError> {
    let same_version = |one: &Version, other: &Version| (one.major, one.minor) == (other.major, other.minor);
    let (first, second) = (device_tree(source)?, device_tree(destination)?);
    let same = same_version(source.version(), destination.version());
    Ok(differences(&first, &second, same))
}

/// Returns the differences between the trees of two QEMUs. If their versions differ, the devices' properties are not
/// compared: their printed form changed between versions (enumerations, sizes). Addresses, types and the features of
/// virtio devices are compared, because their form did not change.
pub fn differences(first: &DeviceTree, second: &DeviceTree, same_version: bool) -> Vec<Difference> {
    let mut differences = compare_device_trees(first, second);
    differences.retain(|difference| match difference {
        Difference::Property { property, .. } => {
            same_version || VHOST_PROPERTIES.contains(&property.as_str())
        }
        Difference::Missing { .. } | Difference::Added { .. } => true,
    });
    differences
}

impl DeviceTree {
    /// Returns true if this is still the same machine: the same devices with all their properties except those that
    /// the guest itself sets, which may change at any time (for example at a reboot).
    pub fn is_same_machine(&self, earlier: &Self) -> bool {
        let of_machine = |device: &Device| {
            let mut device = device.clone();
            device.properties.retain(|property, _| !GUEST_PROPERTIES.contains(&property.as_str()));
            device
        };
        self.devices.iter().map(of_machine).eq(earlier.devices.iter().map(of_machine))
    }

    /// Parses the output of `info qtree`. Lines that are not recognised are not part of the tree.
    pub fn parse(text: &str) -> Self {
        let mut devices: Vec<Device> = Vec::new();
        // (indent, name, true if it is a bus) of the open entries.
        let mut open: Vec<(usize, String)> = Vec::new();
        let mut current: Option<(usize, usize)> = None;
        for line in text.lines() {
            let content = line.trim_start();
            let indent = line.len() - content.len();
            let is_node = content.starts_with("bus: ") || content.starts_with("dev: ");
            if is_node {
                while open.last().is_some_and(|(at, _)| *at >= indent) {
                    open.pop();
                }
                current = None;
            }
            if let Some(name) = content.strip_prefix("bus: ") {
                open.push((indent, name.trim().to_owned()));
            } else if let Some(rest) = content.strip_prefix("dev: ") {
                let (driver, id) = rest.split_once(", id ").unwrap_or((rest, ""));
                let on = open.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join("/");
                current = Some((indent, devices.len()));
                let id = id.trim().trim_matches('"').to_owned();
                let step = if id.is_empty() { driver.to_owned() } else { format!("{driver}({id})") };
                devices.push(Device {
                    on,
                    driver: driver.to_owned(),
                    id,
                    place: String::new(),
                    properties: BTreeMap::new(),
                });
                open.push((indent, step));
            } else if let Some((at, index)) = current
                && indent > at
                && let Some(device) = devices.get_mut(index)
            {
                device.read(content);
            }
        }
        devices.sort_by(|one, other| one.key().cmp(&other.key()));
        Self { devices }
    }

    /// Returns the devices by a key that distinguishes them; equal ones (memory modules' EEPROMs) are numbered.
    fn by_place(&self) -> BTreeMap<(String, String, String, String, usize), &Device> {
        let mut map = BTreeMap::new();
        for device in &self.devices {
            let (on, driver, place, id) = device.key();
            let mut key = (on.to_owned(), driver.to_owned(), place.to_owned(), id.to_owned(), 0);
            while map.contains_key(&key) {
                key.4 += 1;
            }
            map.insert(key, device);
        }
        map
    }
}

impl Device {
    fn key(&self) -> (&str, &str, &str, &str) {
        (&self.on, &self.driver, &self.place, &self.id)
    }

    fn read(&mut self, content: &str) {
        if let Some((key, value)) = content.split_once(" = ") {
            let mut value = value.trim();
            match key {
                "addr" | "port" | "nr" | "unit" if self.place.is_empty() => {
                    value.trim_matches('"').clone_into(&mut self.place);
                }
                "scsi-id" | "lun" => {
                    let number = value.split_whitespace().next().unwrap_or_default();
                    if !self.place.is_empty() {
                        self.place.push('.');
                    }
                    self.place.push_str(number);
                }
                // QEMU does not terminate its own default with a zero, and prints the memory that follows it.
                "osk" => value = value.get(..1 + OSK_BYTES).unwrap_or(value).trim_end_matches('"'),
                _ => {}
            }
            self.properties.insert(key.to_owned(), value.to_owned());
        } else if content.starts_with("addr ")
            && let Some((_, rest)) = content.split_once(", port ")
        {
            // A USB device: the guest chooses the address, we choose the port.
            rest.split(',').next().unwrap_or_default().trim().clone_into(&mut self.place);
        } else if content.starts_with("class ")
            && let Some((_, identity)) = content.split_once("pci id ")
        {
            self.properties.insert("pci id".to_owned(), identity.trim().to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_after_the_key_is_not_part_of_it() {
        let key = "This is a dummy key. Enter the real key using the -osk parameter";
        let osk = |value: &str| {
            let tree =
                DeviceTree::parse(&format!("bus: isa.0\n  dev: isa-applesmc, id \"\"\n    osk = {value}\n"));
            tree.devices[0].properties["osk"].clone()
        };
        assert_eq!(osk(&format!("\"{key}\u{fffd}9x\"")), format!("\"{key}"));
        assert_eq!(osk(&format!("\"{key}\"")), format!("\"{key}"));
        assert_eq!(osk("\"short\""), "\"short");
    }

    const TEXT: &str = r#"bus: main-system-bus
  type System
  dev: q35-pcihost, id ""
    MCFG = -1 (0xffffffffffffffff)
    bus: pcie.0
      type PCIE
      dev: virtio-net-pci, id "net0"
        addr = 03.0
        busnr = 0 (0x0)
        class Ethernet controller, addr 00:03.0, pci id 1af4:1000 (sub 1af4:0001)
        bar 0: i/o at 0xc000 [0xc01e]
        bus: virtio-bus
          type virtio-pci-bus
          dev: virtio-net-device, id ""
            mac = "52:54:00:12:34:56"
            netdev = "n0"
      dev: qemu-xhci, id ""
        addr = 02.0
        bus: usb-bus.0
          type usb-bus
          dev: usb-tablet, id ""
            port = ""
            addr 1.0, port 1, speed 480, name QEMU USB Tablet, attached
      dev: smbus-eeprom, id ""
        address = 80 (0x50)
      dev: smbus-eeprom, id ""
        address = 81 (0x51)
"#;

    #[test]
    fn the_tree_is_read() {
        let tree = DeviceTree::parse(TEXT);
        assert_eq!(tree.devices.len(), 7);
        let labels: Vec<String> = tree.devices.iter().map(Device::label).collect();
        assert!(
            labels.contains(
                &"virtio-net-device on main-system-bus/q35-pcihost/pcie.0/virtio-net-pci(net0)/virtio-bus"
                    .to_owned()
            )
        );
        assert!(labels.contains(
            &"usb-tablet at 1 on main-system-bus/q35-pcihost/pcie.0/qemu-xhci/usb-bus.0".to_owned()
        ));
        assert!(labels.iter().any(|label| label.starts_with("virtio-net-pci \"net0\" at 03.0 on")));
    }

    #[test]
    fn order_host_and_guest_matters_do_not_count() {
        let tree = DeviceTree::parse(TEXT);
        let (head, tail) = TEXT.split_once("      dev: qemu-xhci").unwrap();
        let (xhci, eeproms) = tail.split_once("      dev: smbus-eeprom").unwrap();
        let (top, net) = head.split_once("      dev: virtio-net-pci").unwrap();
        let net = net.replace("busnr = 0", "busnr = 7").replace("\"n0\"", "\"n1\"");
        let turned = format!(
            "{top}      dev: qemu-xhci{xhci}      dev: virtio-net-pci{net}      dev: smbus-eeprom{eeproms}"
        );
        assert_eq!(compare_device_trees(&tree, &DeviceTree::parse(&turned)), []);
    }

    #[test]
    fn a_guest_that_boots_again_is_the_same_machine() {
        let tree = DeviceTree::parse(TEXT);
        let is_same_machine = |from: &str, to: &str| {
            assert!(TEXT.contains(from));
            DeviceTree::parse(&TEXT.replacen(from, to, 1)).is_same_machine(&tree)
        };
        assert!(is_same_machine("busnr = 0 (0x0)", "busnr = 7 (0x7)"));
        assert!(is_same_machine("MCFG = -1 (0xffffffffffffffff)", "MCFG = 2952790016 (0xb0000000)"));
        // Unlike between two hosts, a device's back end counts.
        assert!(!is_same_machine("\"n0\"", "\"n1\""));
        assert!(!is_same_machine("34:56", "34:57"));
        assert!(!is_same_machine("      dev: smbus-eeprom, id \"\"\n        address = 81 (0x51)\n", ""));
    }

    #[test]
    fn differences_visible_to_the_guest_are_found() {
        let tree = DeviceTree::parse(TEXT);
        let other = |from: &str, to: &str| {
            assert!(TEXT.contains(from));
            compare_device_trees(&tree, &DeviceTree::parse(&TEXT.replacen(from, to, 1)))
        };
        assert_eq!(other("34:56", "34:57").len(), 1);
        assert_eq!(other("1af4:1000", "1af4:1041").len(), 1);
        // Moved: one missing, one added, and the devices below it stay with it.
        assert_eq!(other("addr = 03.0", "addr = 04.0").len(), 2);
        assert!(!other("id \"net0\"", "id \"net1\"").is_empty());
        assert_eq!(other(", port 1,", ", port 2,").len(), 2);
        assert_eq!(other("address = 81", "address = 82").len(), 1);
        assert_eq!(compare_device_trees(&tree, &DeviceTree::default()).len(), 7);
    }

    proptest::proptest! {
        #[test]
        fn no_printed_text_panics(text in "( {0,4}(dev: |bus: )?[a-z=\", ]{0,12}\n){0,12}") {
            let tree = DeviceTree::parse(&text);
            proptest::prop_assert_eq!(compare_device_trees(&tree, &tree), []);
        }
    }
}
