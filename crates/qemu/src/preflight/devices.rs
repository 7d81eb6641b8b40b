//! Checks of the guest's devices: those that the destination's QEMU would show differently, and those whose state it
//! does not load.

use super::findings::{Finding, Severity, add, major_minor};
use super::input::{DestinationFacts, SourceFacts};
use crate::tree::{Difference, GEOMETRY_PROPERTIES, VHOST_PROPERTIES};

/// Devices whose state makes QEMU end instead of loading it: seen with 7.2, and not with 10.0.
const NOT_LOADED: [&str; 1] = ["isa-cirrus-vga"];
/// First version that is assumed to load it, major and minor.
const LOADED_SINCE: (u64, u64) = (8, 0);

pub(super) fn devices(source: &SourceFacts, destination: &DestinationFacts, findings: &mut Vec<Finding>) {
    let devices = source.vm.options.iter().filter(|option| option.name == "device");
    let drivers = devices.filter_map(|option| option.parse_value().get("driver"));
    let version = &destination.qemu_version;
    for driver in drivers.filter(|driver| NOT_LOADED.contains(&driver.as_str())) {
        if major_minor(version) < LOADED_SINCE {
            add(
                findings,
                Severity::Blocker,
                "device-refused",
                format!(
                    "device {driver} cannot be migrated to QEMU {version}, which crashes when it loads its \
                     state"
                ),
                "install QEMU 10.0 there, or start the guest without the device",
            );
        }
    }
    for difference in destination.device_differences.iter().flatten() {
        add(
            findings,
            Severity::Blocker,
            "devices-differ",
            format!("the guest would see different devices at the destination: {difference}"),
            advice(difference),
        );
    }
}

fn advice(difference: &Difference) -> String {
    match difference {
        Difference::Property { property, second, .. }
            if VHOST_PROPERTIES.contains(&property.as_str()) && second == "false" =>
        {
            format!(
                "the destination's kernel does not support this for vhost-net: start the guest with \
                 {property}=off on this device, or with vhost=off on its network, next time; or run a newer \
                 kernel there"
            )
        }
        Difference::Property { property, .. } if GEOMETRY_PROPERTIES.contains(&property.as_str()) => {
            "QEMU derives this from the disk's length, which has changed since the guest was started: shut the guest down and \
             start it again, or give the disk a device of its own (-device) with its geometry"
                .to_owned()
        }
        _ => "if devices were plugged during the check, check again; otherwise give the devices fixed addresses \
              (-device …,addr=) when the guest is started next"
            .to_owned(),
    }
}
