//! Guests of random configurations: machines and devices drawn from what a QEMU offers.

use std::path::Path;
use std::process::Command;

use crate::environment::Qemu;
use crate::error::{Context, Result};

/// A type of device that QEMU lets its user plug.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceType {
    /// Its name for `-device`.
    pub name: String,
    /// The kind of bus that it needs; `None` for the few devices that are on no bus.
    pub bus: Option<String>,
}

/// A device of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggedDevice {
    /// Its type.
    pub name: String,
    /// Words of QEMU's command line: the device, and what it needs (a controller, a back end).
    pub words: Vec<String>,
}

/// Returns the types of devices that `-device help` lists, except processors.
///
/// # Errors
/// Fails if QEMU does not start.
pub fn device_types(qemu: &Qemu) -> Result<Vec<DeviceType>> {
    let output = Command::new(&qemu.program)
        .args(qemu.arguments())
        .args(["-device", "help"])
        .output()
        .context(|| format!("cannot start {}", qemu.program.display()))?;
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(help: &str) -> Vec<DeviceType> {
    let device = |line: &str| {
        let name = line.strip_prefix("name \"")?.split('"').next()?.to_owned();
        let bus =
            line.split_once(", bus ").map(|(_, rest)| rest.split(',').next().unwrap_or(rest).to_owned());
        (!name.ends_with("-x86_64-cpu")).then_some(DeviceType { name, bus })
    };
    help.lines().filter_map(device).collect()
}

/// Network cards, by the beginning of their names.
const CARDS: [&str; 10] =
    ["e1000", "i825", "i82801", "igb", "ne2k_", "pcnet", "rtl8139", "tulip", "usb-net", "vmxnet3"];
/// Devices with an image behind them, by the beginning of their names.
const DISKS: [&str; 10] = [
    "floppy",
    "ide-hd",
    "nvme",
    "scsi-hd",
    "sd-card",
    "usb-storage",
    "virtio-blk",
    "ide-cf",
    "emmc",
    "ufs-lu",
];
/// Devices with a character device behind them, by the beginning of their names.
const LINES: [&str; 8] = [
    "isa-serial",
    "pci-serial",
    "usb-serial",
    "isa-debugcon",
    "isa-parallel",
    "virtconsole",
    "virtserialport",
    "ccid-card-passthru",
];

/// Describes how to plug `device` as the configuration's `number`th; files that it needs are made in `directory`.
///
/// # Errors
/// Fails if a file cannot be made.
pub fn plug(device: &DeviceType, number: usize, directory: &Path) -> Result<PluggedDevice> {
    let name = device.name.as_str();
    let begins = |list: &[&str]| list.iter().any(|start| name.starts_with(start));
    let mut line = OptionLine { words: Vec::new(), number };
    let mut properties = vec![name.to_owned(), format!("id=x{number}")];
    let bus = match device.bus.as_deref() {
        Some("usb-bus") => Some(("qemu-xhci", "u")),
        Some("SCSI") => Some(("virtio-scsi-pci", "s")),
        Some("virtio-serial-bus") => Some(("virtio-serial-pci", "v")),
        Some("HDA") => Some(("intel-hda", "h")),
        Some("IndustryPack") => Some(("tpci200", "i")),
        Some("sd-bus") => Some(("sdhci-pci", "m")),
        Some("ccid-bus") => Some(("usb-ccid", "c")),
        _ => None,
    };
    if let Some((controller, letter)) = bus {
        if controller == "usb-ccid" {
            line.device("qemu-xhci", "u");
        }
        line.device(controller, letter);
        properties.push(format!("bus={letter}{number}.0"));
    }
    if begins(&DISKS) && !name.starts_with("nvme-subsys") {
        let image = directory.join(format!("x{number}.raw"));
        let file = std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20));
        file.context(|| format!("cannot make {}", image.display()))?;
        line.option("-drive", format!("if=none,id=d{number},file={},format=raw", image.display()));
        properties.push(format!("drive=d{number}"));
    }
    if begins(&CARDS) || name.starts_with("virtio-net") {
        line.option("-netdev", format!("user,id=n{number}"));
        properties.push(format!("netdev=n{number}"));
    }
    if begins(&LINES) {
        line.option("-chardev", format!("null,id=l{number}"));
        properties.push(match name {
            "pci-serial-2x" | "pci-serial-4x" => format!("chardev1=l{number}"),
            _ => format!("chardev=l{number}"),
        });
    }
    if name.contains("-ipmi-") {
        line.device("ipmi-bmc-sim", "b");
        properties.push(format!("bmc=b{number}"));
    }
    match name {
        "pc-dimm" | "nvdimm" | "virtio-mem-pci" | "virtio-pmem-pci" | "ivshmem-plain" | "acpi-erst" => {
            let share = if name == "ivshmem-plain" { "on" } else { "off" };
            line.option("-m", "slots=16,maxmem=4G".to_owned());
            line.option("-object", format!("memory-backend-ram,id=r{number},size=128M,share={share}"));
            properties.push(format!("memdev=r{number}"));
        }
        "virtio-crypto-pci" => {
            line.option("-object", format!("cryptodev-backend-builtin,id=k{number}"));
            properties.push(format!("cryptodev=k{number}"));
        }
        "nvme" => properties.push(format!("serial=s{number}")),
        "nvme-ns" => {
            line.option("-device", format!("nvme,id=e{number},serial=s{number}"));
            properties.push(format!("bus=e{number}"));
        }
        "ioh3420" | "pcie-root-port" | "xio3130-downstream" | "pci-bridge" | "cxl-rp" => {
            properties.push(format!("chassis={}", number + 1));
        }
        "pxb" | "pxb-pcie" => properties.push(format!("bus_nr={}", 0x60 + 8 * number)),
        "isa-debugcon" => properties.push(format!("iobase={:#x}", 0x402 + 16 * number)),
        "virtio-9p-pci" | "virtio-9p-pci-transitional" | "virtio-9p-pci-non-transitional" => {
            line.option(
                "-fsdev",
                format!("local,id=f{number},path={},security_model=none", directory.display()),
            );
            properties.push(format!("fsdev=f{number},mount_tag=t{number}"));
        }
        _ => {}
    }
    line.option("-device", properties.join(","));
    Ok(PluggedDevice { name: name.to_owned(), words: line.words })
}

struct OptionLine {
    words: Vec<String>,
    number: usize,
}

impl OptionLine {
    fn option(&mut self, name: &str, value: String) {
        self.words.extend([name.to_owned(), value]);
    }

    fn device(&mut self, kind: &str, letter: &str) {
        let number = self.number;
        let bus = if kind == "usb-ccid" { format!(",bus=u{number}.0") } else { String::new() };
        self.option("-device", format!("{kind},id={letter}{number}{bus}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_read_and_devices_get_what_they_need() {
        let help = "USB devices:\nname \"usb-tablet\", bus usb-bus\n\nname \"e1000\", bus PCI, alias \"e1000-82540em\", desc \"x\"\n\
                    CPU devices:\nname \"max-x86_64-cpu\"\nname \"pc-dimm\", desc \"DIMM\"\n";
        let found = parse(help);
        let names: Vec<_> =
            found.iter().map(|device| (device.name.as_str(), device.bus.as_deref())).collect();
        assert_eq!(names, [("usb-tablet", Some("usb-bus")), ("e1000", Some("PCI")), ("pc-dimm", None)]);
        let words = |at: usize| plug(&found[at], 3, Path::new("/")).unwrap().words.join(" ");
        assert_eq!(words(0), "-device qemu-xhci,id=u3 -device usb-tablet,id=x3,bus=u3.0");
        assert_eq!(words(1), "-netdev user,id=n3 -device e1000,id=x3,netdev=n3");
    }
}
