//! Devices: which ones of the command line still exist, their addresses, and which were added later.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::Problem;
use super::blocks::NodeNames;
use super::live::{self, Bus, LiveDevice, LiveState};
use crate::cmdline::QemuOption;
use crate::options::Value;
use crate::qmp::{Qmp, QmpError};
use crate::tree::DeviceTree;

/// Devices that cannot be moved, by the prefix of their type's name.
const REFUSED_DEVICES: &[(&str, &str)] = &[
    ("vfio-", "it is a device of the host, which writes to the guest's memory by itself"),
    ("pci-assign", "it is a device of the host, which writes to the guest's memory by itself"),
    ("vhost-user-", "its back end is another process, which writes to the guest's memory by itself"),
    ("vhost-vdpa", "it is a device of the host, which writes to the guest's memory by itself"),
    ("vhost-scsi", "the kernel's SCSI target writes to the guest's memory by itself"),
    ("vhost-vsock", "its connections end on this host"),
    ("virtio-9p", "shared folders keep open files that cannot be moved"),
    ("ivshmem", "other processes map its memory"),
    ("usb-host", "it is a device of this host"),
    ("usb-mtp", "it keeps open files of this host"),
    ("scsi-generic", "it passes commands to a device of this host"),
    ("scsi-block", "it passes commands to a device of this host"),
    ("tpm-", "the state of a TPM lies outside QEMU"),
    ("nvdimm", "persistent memory is mapped from a file of the host"),
    ("virtio-pmem", "persistent memory is mapped from a file of the host"),
    ("virtio-gpu-gl", "its memory is shared with the host's graphics driver"),
    ("virtio-vga-gl", "its memory is shared with the host's graphics driver"),
    ("virtio-gpu-rutabaga", "its memory is shared with the host's graphics driver"),
    ("virtio-vga-rutabaga", "its memory is shared with the host's graphics driver"),
    ("virtio-input-host", "it is a device of this host"),
    ("x-vfio-user", "its back end is another process"),
    ("vmbus-bridge", "QEMU crashes, and the guest with it, when it saves the state of this device"),
    ("pci-serial-2x", "QEMU crashes, and the guest with it, when it saves the state of this device"),
];

/// Type names that are aliases of others in QEMU.
const ALIASES: &[(&str, &str)] = &[("e1000-82540em", "e1000"), ("ich9-ahci", "ahci"), ("lsi", "lsi53c895a")];

impl LiveState {
    /// Adds the USB ports that QEMU chose by itself, which only the tree shows.
    pub(super) fn add_usb_ports(&mut self, tree: &DeviceTree) {
        for device in &mut self.devices {
            let on_usb = device.bus.as_ref().is_some_and(Bus::is_usb);
            if !on_usb || device.place.contains_key("port") {
                continue;
            }
            let Some(id) = &device.id else { continue };
            if let Some(found) = tree.devices.iter().find(|found| &found.id == id)
                && !found.place.is_empty()
            {
                device.place.insert("port".to_owned(), found.place.clone().into());
            }
        }
    }
}

/// Drops devices that were unplugged, sets the addresses of the others, and returns those that were
/// added later.
pub(super) fn refresh<'a>(
    options: &mut Vec<QemuOption>,
    live: &'a LiveState,
    names: &NodeNames,
    problems: &mut Vec<Problem>,
) -> Vec<&'a LiveDevice> {
    let mut taken: Vec<&str> = Vec::new();
    let expected = expected_without_id(options);
    let mut kept = Vec::new();
    for mut option in std::mem::take(options) {
        if option.name != "device" {
            kept.push(option);
            continue;
        }
        let mut value = option.parse_value();
        let driver = value.get("driver").unwrap_or_default();
        let id = value.get("id");
        let alike: Vec<&LiveDevice> = live
            .devices
            .iter()
            .filter(|device| device.id == id && !device.hotplugged && is_same_driver(&driver, &device.driver))
            .collect();
        if id.is_none() && alike.len() != expected_of(&expected, &driver) {
            problems.push(Problem::new(
                "device-unclear",
                format!(
                    "one of several {driver} devices without an id was unplugged, and QEMU does not report \
                     which"
                ),
                "give devices an id (-device …,id=NAME) when the guest is started next",
            ));
        }
        let mut free = alike.into_iter().filter(|device| !taken.contains(&device.path.as_str()));
        // Of several without an id, the one with that drive; otherwise in the order of their creation.
        let drive = value.get("drive");
        let has_drive = |device: &&LiveDevice| drive.is_some() && names.drive_of(device, live) == drive;
        let found = free.clone().find(has_drive).or_else(|| free.next());
        let Some(device) = found else { continue };
        taken.push(&device.path);
        fix_address(&mut value, device);
        if value.get("drive").is_some()
            && let Some(drive) = names.drive_of(device, live)
        {
            value.set("drive", &drive);
        }
        option.value = Some(value.to_string());
        kept.push(option);
    }
    *options = kept;
    let mut later: Vec<&LiveDevice> = live
        .devices
        .iter()
        .filter(|device| device.hotplugged && !taken.contains(&device.path.as_str()))
        .collect();
    // A device follows the one whose bus it is attached to.
    later.sort_by_key(|device| depth(device, &live.devices));
    later
}

/// Returns how many devices without an id each type should have, from the options alone.
fn expected_without_id(options: &[QemuOption]) -> BTreeMap<String, usize> {
    let mut expected: BTreeMap<String, usize> = BTreeMap::new();
    for option in options {
        let value = option.parse_value();
        let driver = match option.name.as_str() {
            "device" if value.get("id").is_none() => value.get("driver"),
            // QEMU creates a device of its own for these.
            "drive" if value.get("if").as_deref() == Some("virtio") => Some("virtio-blk-pci".to_owned()),
            _ => None,
        };
        if let Some(driver) = driver {
            *expected.entry(driver).or_default() += 1;
        }
    }
    expected
}

/// Returns the expected number of devices of one type, under any of its names.
fn expected_of(expected: &BTreeMap<String, usize>, driver: &str) -> usize {
    let same = |name: &str| is_same_driver(name, driver) || is_same_driver(driver, name);
    expected.iter().filter(|(name, _)| same(name)).map(|(_, count)| count).sum()
}

fn is_same_driver(given: &str, live: &str) -> bool {
    let short = |suffix: &str| live.strip_suffix(suffix) == Some(given);
    given == live || short("-pci") || short("-device") || ALIASES.contains(&(given, live))
}

/// Records the device's address in the option, so that QEMU does not choose it again: after an
/// unplugging it would choose a different one.
fn fix_address(value: &mut Value, device: &LiveDevice) {
    for (key, at) in &device.place {
        if value.get(key).is_none() {
            value.set_json(key, at.clone());
        }
    }
    // QEMU completes a partly specified geometry in the same way at each start.
    if device.geometry.keys().all(|key| value.get(key).is_none()) {
        for (key, size) in &device.geometry {
            value.set_json(key, size.clone());
        }
    }
    for ability in &device.missing_features {
        if value.get(ability).is_none() {
            value.set_json(ability, false.into());
        }
    }
    if let Some(bus) = device.bus.as_ref().filter(|bus| bus.is_pci())
        && device.place.contains_key("addr")
        && value.get("bus").is_none()
    {
        value.set("bus", &bus.name);
    }
}

fn depth(device: &LiveDevice, all: &[LiveDevice]) -> usize {
    let parent = device
        .bus
        .as_ref()
        .and_then(|bus| all.iter().find(|other| bus.path.starts_with(&format!("{}/", other.path))));
    parent.map_or(0, |parent| if parent.path == device.path { 0 } else { 1 + depth(parent, all) })
}

/// Returns the `-device` that creates a device that was plugged later.
pub(super) fn describe(
    qmp: &mut Qmp,
    device: &LiveDevice,
    live: &LiveState,
    names: &mut NodeNames,
) -> Result<QemuOption, QmpError> {
    let mut map = live::device_properties(qmp, device)?;
    map.insert("driver".to_owned(), device.driver.clone().into());
    if let Some(id) = &device.id {
        map.insert("id".to_owned(), id.clone().into());
    }
    if let Some(bus) = device.bus.as_ref().filter(|bus| bus.name != "main-system-bus") {
        map.insert("bus".to_owned(), bus.name.clone().into());
    }
    for (key, at) in &device.place {
        map.insert(key.clone(), at.clone());
    }
    if let Some(drive) = names.drive_of(device, live) {
        map.insert("drive".to_owned(), drive.into());
    }
    Ok(QemuOption::new("device", Json::Object(map).to_string()))
}

/// Reports devices that cannot be moved.
pub(super) fn report_refused(options: &[QemuOption], problems: &mut Vec<Problem>) {
    for option in options {
        let value = option.parse_value();
        let mut report_refused = |what: String, why: &str| {
            problems.push(Problem::new(
                "device-refused",
                format!("{what} cannot be migrated: {why}"),
                "unplug it (device_del), or start the guest without it",
            ));
        };
        match option.name.as_str() {
            "device" => {
                let driver = value.get("driver").unwrap_or_default();
                let known = REFUSED_DEVICES.iter().find(|(start, _)| driver.starts_with(start));
                if let Some((_, why)) = known {
                    report_refused(format!("device {driver}"), why);
                }
                if value.get("blob").as_deref() == Some("on") || value.get("blob").as_deref() == Some("true")
                {
                    report_refused(
                        format!("device {driver} with blob=on"),
                        "its memory is shared with the host's graphics driver",
                    );
                }
            }
            "netdev" | "nic" => {
                let kind = value.get("type").unwrap_or_default();
                if kind.starts_with("vhost-") || kind == "af-xdp" || kind == "netmap" || kind == "passt" {
                    report_refused(
                        format!("network {kind}"),
                        "its back end is outside QEMU and may write to the guest's memory by itself",
                    );
                }
            }
            "usbdevice" if value.to_string().starts_with("host") => {
                report_refused("a USB device of the host".to_owned(), "it is a device of this host");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_cannot_be_moved_are_reported() {
        let options = crate::cmdline::parse(
            &[
                "-device",
                "vfio-pci,host=1",
                "-device",
                "virtio-gpu-pci,blob=on",
                "-device",
                "virtio-blk-pci",
                "-netdev",
                "vhost-user,id=a,chardev=b",
                "-netdev",
                "tap,id=c",
                "-device",
                r#"{"driver":"usb-host"}"#,
            ]
            .map(str::to_owned),
        );
        let mut problems = Vec::new();
        report_refused(&options, &mut problems);
        assert_eq!(problems.len(), 4, "{problems:#?}");
    }

    /// With vhost-net the source host's kernel does not have the feature, and the destination's may have
    /// it.
    #[test]
    fn missing_features_stay_missing_on_the_destination() {
        let device = LiveDevice { missing_features: vec!["queue_reset".to_owned()], ..LiveDevice::default() };
        for (given, there) in [
            ("virtio-net-pci,netdev=n", "virtio-net-pci,netdev=n,queue_reset=off"),
            ("virtio-net-pci,queue_reset=off", "virtio-net-pci,queue_reset=off"),
        ] {
            let mut value = QemuOption::new("device", given).parse_value();
            fix_address(&mut value, &device);
            assert_eq!(value.to_string(), QemuOption::new("device", there).parse_value().to_string());
        }
    }

    #[test]
    fn short_names_are_known() {
        assert!(is_same_driver("virtio-blk", "virtio-blk-pci"));
        assert!(is_same_driver("e1000", "e1000"));
        assert!(!is_same_driver("virtio-blk", "virtio-net-pci"));
    }
}
