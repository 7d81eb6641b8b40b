//! QEMU's command line, option by option.

use std::path::Path;

use super::{Device, Disk, Net};

/// A command line that grows.
#[derive(Default)]
pub(super) struct CommandLine(pub(super) Vec<String>);

impl CommandLine {
    pub(super) fn option(&mut self, name: &str, value: &str) -> &mut Self {
        self.flags([name, value])
    }

    pub(super) fn flags<const N: usize>(&mut self, words: [&str; N]) -> &mut Self {
        self.0.extend(words.map(str::to_owned));
        self
    }

    pub(super) fn kernel(&mut self, kernel: &Path, initrd: &Path, append: &str) {
        self.option("-kernel", &kernel.display().to_string());
        self.option("-initrd", &initrd.display().to_string()).option("-append", append);
    }

    pub(super) fn device(&mut self, device: &Device) {
        match device {
            Device::Vga => self.option("-device", "VGA"),
            Device::Usb => self
                .option("-device", "qemu-xhci,id=usb")
                .option("-device", "usb-tablet,bus=usb.0")
                .option("-device", "usb-kbd,bus=usb.0"),
            Device::Balloon => self.option("-device", "virtio-balloon-pci"),
            Device::Rng => self
                .option("-object", "rng-random,id=rng0,filename=/dev/urandom")
                .option("-device", "virtio-rng-pci,rng=rng0"),
            Device::VirtioSerial => self
                .option("-device", "virtio-serial-pci")
                .option("-chardev", "null,id=port0")
                .option("-device", "virtserialport,chardev=port0,name=lab"),
            Device::Net(Net { id, tap, mac, vhost }) => self
                .option(
                    "-netdev",
                    &format!(
                        "tap,id={id},ifname={tap},script=no,downscript=no{}",
                        if *vhost { ",vhost=on" } else { "" }
                    ),
                )
                .option("-device", &format!("virtio-net-pci,netdev={id},mac={mac}")),
            Device::Disk(disk) => self.disk(disk),
            Device::GuestPort => self,
        };
    }

    pub(super) fn guest_port(&mut self, socket: &str) {
        self.option("-device", "virtio-serial-pci,id=guest")
            .option("-chardev", &format!("socket,id=guest0,path={socket},server=on,wait=off"))
            .option("-device", "virtserialport,bus=guest.0,chardev=guest0,name=org.whimbrel.guest.0");
    }

    pub(super) fn disk(&mut self, disk: &Disk) -> &mut Self {
        let Disk { id, format, aio, .. } = disk;
        let path = disk.path.display();
        let on = |yes: bool| if yes { "on" } else { "off" };
        let (direct, read_only) = (on(disk.direct), on(disk.read_only));
        if disk.named_nodes {
            let cache = format!("cache.direct={direct},cache.no-flush=off,read-only={read_only}");
            self.option(
                "-blockdev",
                &format!("driver=file,node-name={id}-file,filename={path},aio={aio},{cache}"),
            );
            self.option("-blockdev", &format!("driver={format},node-name={id},file={id}-file,{cache}"));
        } else {
            let cache = if disk.direct { "none" } else { "writeback" };
            self.option(
                "-drive",
                &format!(
                    "if=none,id={id},file={path},format={format},cache={cache},aio={aio},readonly={read_only}"
                ),
            );
        }
        self.option("-device", &format!("virtio-blk-pci,drive={id}"))
    }
}
