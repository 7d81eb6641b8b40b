//! Guests that are built again in their current state, not from their command line.

use serde_json::json;

use crate::describe::World;
use crate::support::{Vm, args, qcow2, ticker_disk};

/// Starts a guest of 64 MiB with these options, and waits until it has booted.
fn started(world: &World, options: &str) -> Vm {
    let boot = ticker_disk(world.dir());
    let usual = format!("-m 64 -drive file={boot},format=raw,if=ide {options}");
    let mut source = world.version.start(world.dir(), "src", &args(&usual));
    source.wait_ticking();
    source
}

/// Hands the guest over and returns the destination.
fn handed_over(world: &World, source: &mut Vm) -> Vm {
    let (_, mut destination) = World::rebuild(source, &world.rules());
    World::hand_over(source, &mut destination);
    destination
}

/// Geometry that QEMU derives from a disk's length or partition table at the start stays when either has changed.
#[test]
fn the_guest_keeps_the_geometry_of_its_disks() {
    World::each(|world| {
        qcow2(&world.dir().join("d.qcow2"), "1G");
        std::fs::File::create(world.dir().join("d.raw")).unwrap().set_len(1 << 30).unwrap();
        let options = format!(
            "-machine pc -drive file=d.qcow2,format=qcow2,if=virtio,id=short
             -drive file={d},format=raw,if=none,id=long,file.locking=off
             -drive file={d},format=raw,if=none,id=scsi,file.locking=off
             -drive file={d},format=raw,if=none,id=given,file.locking=off -device virtio-scsi-pci
             -device virtio-blk-pci,drive=long,share-rw=on -device scsi-hd,drive=scsi,share-rw=on
             -device virtio-blk-pci,drive=given,share-rw=on,cyls=100,heads=16,secs=63",
            d = world.path("d.raw")
        );
        let mut source = started(world, &options);
        for (device, bytes) in [("short", 2_u64 << 30), ("long", 2 << 30), ("scsi", 3 << 30)] {
            source.command("block_resize", json!({"device": device, "size": bytes}));
        }
        handed_over(world, &mut source);
    });
}

/// Objects that no device uses are no part of the guest.
#[test]
fn memory_without_a_device_is_left_out() {
    World::each(|world| {
        let options = "-machine pc -m slots=2,maxmem=256M -object memory-backend-ram,id=given,size=16M";
        let mut source = started(world, options);
        for (id, bytes) in [("added", 16 << 20), ("m0", 128 << 20)] {
            let object = json!({"qom-type": "memory-backend-ram", "id": id, "size": bytes});
            source.command("object-add", object);
        }
        source.command("device_add", json!({"driver": "pc-dimm", "id": "d0", "memdev": "m0"}));
        let mut destination = handed_over(world, &mut source);
        let objects = destination.command("qom-list", json!({"path": "/objects"})).to_string();
        assert!(!objects.contains("given") && !objects.contains("added"), "{objects}");
    });
}

/// A device's bus is the one that QEMU reports, not the one that its name suggests.
#[test]
fn usb_controllers_are_pci_devices() {
    World::each(|world| {
        let options = "-machine q35 -device usb-ehci,id=ehci -device pci-ohci,id=ohci -device usb-ehci
                       -device usb-tablet,bus=ehci.0,id=t";
        handed_over(world, &mut started(world, options));
    });
}
