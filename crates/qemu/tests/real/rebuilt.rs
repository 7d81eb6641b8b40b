//! Guests that are built again in their current state, not from their command line.

use std::path::PathBuf;

use serde_json::json;
use whimbrel_qemu::command::NewImage;

use crate::describe::World;
use crate::support::{Vm, args, not_tried, qcow2, ticker_disk, until};

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

/// The content of flash chips arrives as memory, whatever their files have at the destination. QEMU writes it into the
/// files of those that can be written, once the guest runs.
#[test]
fn flash_arrives_as_memory() {
    World::each(|world| {
        let shared = ["/usr/share/seabios", "/usr/share/qemu"].map(PathBuf::from);
        let mut places = world.version.data.iter().cloned().chain(shared).map(|at| at.join("bios-256k.bin"));
        let Some(bios) = places.find(|bios| bios.exists()) else {
            not_tried("flash: no bios-256k.bin of SeaBIOS");
            return;
        };
        let (code, variables, copy) = (world.path("code"), world.path("variables"), world.path("copy"));
        std::fs::copy(&bios, &code).unwrap();
        let content = vec![0xa5; 64 << 10];
        std::fs::write(&variables, &content).unwrap();
        std::fs::write(&copy, vec![0; content.len()]).unwrap();
        let options = format!(
            "-machine q35 -drive if=pflash,unit=0,format=raw,readonly=on,file={code}
             -drive if=pflash,unit=1,format=raw,file={variables}"
        );
        let mut source = started(world, &options);
        let mut rules = world.rules();
        let image =
            NewImage { path: (&copy).into(), format: "raw".to_owned(), cut_to_bytes: None, is_device: false };
        rules.images.insert("pflash1".to_owned(), image);
        let (described, mut destination) = World::rebuild(&mut source, &rules);
        let firmware = described.disks.iter().filter(|disk| disk.is_firmware()).map(|disk| &*disk.name);
        assert_eq!(firmware.collect::<Vec<_>>(), ["pflash0"]);
        World::hand_over(&mut source, &mut destination);
        until("the copy has what the flash has", || std::fs::read(&copy).unwrap() == content);
    });
}
