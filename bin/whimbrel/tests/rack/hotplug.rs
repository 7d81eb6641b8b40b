//! Devices that are plugged and unplugged, before a migration and in its middle.

use std::net::Ipv4Addr;
use std::process::Child;

use lab::guest_shell::with_shell;
use lab::rack::{Rack, RackHost};
use lab::{DEADLINE, GuestSpec, Monitor, until};
use serde_json::{Value, json};

use crate::echo::Echo;
use crate::storage::disk_at;
use crate::support::{
    VM, assert_whole, begin, guest_at, kvm_guest, move_guest, qemus, rack, run_in_guest, two, vhost_threads,
    wait_for_sent, wait_settled,
};
use crate::tried::Trial;

/// The image of the plugged disk at the source, and its length in MiB.
const DISK: &str = "/srv/images/plugged.raw";
const MIB: u32 = 16;
/// The tap of the plugged card, and the guest's address on it: in the hosts' network, which its first card is not in.
const TAP: &str = "vm2";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 93, 0, 77);

/// A guest with room for two devices.
fn guest_with_ports() -> GuestSpec {
    let port = |n: u8| ["-device".to_owned(), format!("pcie-root-port,id=port{n},chassis={n}")];
    GuestSpec { second_monitor: true, extra: [port(1), port(2)].concat(), ..with_shell(kvm_guest()) }
}

/// Connects to the guest's second monitor, where it is now.
fn monitor_at(rack: &Rack, host: &RackHost) -> Monitor {
    let shown = rack.whimbrel(host, &["vm", "show", VM]).ok().json();
    let directory = shown["qmp"].as_str().unwrap().rsplit_once('/').unwrap().0;
    let mut monitor = Monitor::connect(&host.forward(&format!("{directory}/lab.sock")).unwrap()).unwrap();
    // The guest takes its time to give a device back, above all on an emulated processor.
    monitor.set_patience(DEADLINE).unwrap();
    monitor
}

fn plug_card(monitor: &mut Monitor) {
    let tap = json!({ "type": "tap", "id": "net1", "ifname": TAP, "script": "no", "downscript": "no", "vhost": true });
    let card = json!({ "driver": "virtio-net-pci", "netdev": "net1", "id": "card1", "bus": "port1", "mac": "52:54:00:00:01:02" });
    monitor.command("netdev_add", &tap).unwrap();
    monitor.command("device_add", &card).unwrap();
}

fn plug_disk(monitor: &mut Monitor) {
    let image = json!({
        "driver": "raw", "node-name": "disk1", "cache": { "direct": true },
        "file": { "driver": "file", "filename": DISK, "cache": { "direct": true } }
    });
    let disk = json!({ "driver": "virtio-blk-pci", "drive": "disk1", "id": "plugged1", "bus": "port2" });
    monitor.command("blockdev-add", &image).unwrap();
    monitor.command("device_add", &disk).unwrap();
}

/// Waits until the guest's kernel has a file, or has it no more.
fn wait_in_guest(rack: &Rack, file: &str, is_there: bool) {
    until(&format!("{file} in the guest is there: {is_there}"), || {
        let seen = run_in_guest(rack, &format!("[ -e {file} ] && echo there || echo not\n"));
        (seen.trim() == "there") == is_there
    });
}

/// Gives the guest an address on the plugged card, for which no other card answers.
fn set_address(rack: &Rack) {
    wait_in_guest(rack, "/sys/class/net/eth1", true);
    run_in_guest(
        rack,
        &format!(
            "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
            busybox ip addr add {ADDRESS}/24 dev eth1; busybox ip link set eth1 up\n"
        ),
    );
}

/// Returns the checksum of all of the disk, as the guest reads it. No program has it open before, so it is read from the device.
fn sum_in_guest(rack: &Rack) -> String {
    first_word(&run_in_guest(rack, "busybox md5sum </dev/vda\n"))
}

fn sum_at(host: &RackHost, file: &str) -> String {
    first_word(
        &host.shell(&format!("dd if={file} bs=1M count={MIB} iflag=direct 2>/dev/null | md5sum")).unwrap(),
    )
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

/// Ends a migration in whose middle a device was plugged or unplugged: the guest stays, and nothing of it is left at the
/// destination.
fn assert_ended(rack: &Rack, migration: Child, from: &RackHost, to: &RackHost) {
    rack.whimbrel(from, &["limit", VM, "--bandwidth", "none"]).ok();
    let output = migration.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let reason = "the guest's devices changed during the migration: a device was plugged or unplugged";
    assert!(String::from_utf8_lossy(&output.stdout).contains(reason), "{output:?}");
    for host in [from, to] {
        wait_settled(rack, host);
    }
    until("the destination has nothing of it", || qemus(to) == 0);
    assert_eq!(guest_at(rack, from).unwrap()["state"], "running");
    assert_whole(rack, from);
}

fn begin_slowly(rack: &Rack, from: &RackHost, to: &RackHost) -> Child {
    let migration = begin(from, to, &["--bandwidth", "3M"]);
    wait_for_sent(rack, from, 4 << 20);
    migration
}

/// A card that was plugged before comes along. A disk that is plugged in the middle ends the migration, and comes along in
/// the next one, with what it has. One that is unplugged in the middle ends it, too.
#[test]
#[ignore = "make rack"]
fn devices_are_plugged_and_unplugged() {
    let Some(rack) = rack(&two()) else { return };
    let trial =
        Trial::begin(&rack, "a card plugged before; a disk plugged, and unplugged, during the migration")
            .storage("raw, copied");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    alpha.shell(&format!("head -c {MIB}M /dev/urandom >{DISK}; sync")).unwrap();
    rack.tap(TAP).unwrap();
    let serial = rack.start_guest(alpha, &guest_with_ports()).unwrap();
    drop(serial);
    let mut monitor = monitor_at(&rack, alpha);
    plug_card(&mut monitor);
    set_address(&rack);
    let echo = Echo::start(&rack.switch, ADDRESS);

    let migration = begin_slowly(&rack, alpha, beta);
    plug_disk(&mut monitor);
    assert_ended(&rack, migration, alpha, beta);
    wait_in_guest(&rack, "/dev/vda", true);
    assert_eq!(sum_in_guest(&rack), sum_at(alpha, DISK));
    let write = "busybox dd if=/dev/urandom of=/dev/vda bs=1M count=2 conv=fsync,notrunc 2>/dev/null\n";
    run_in_guest(&rack, write);
    echo.wait_for_more();

    drop(monitor);
    let (report, _serial) = move_guest(&rack, alpha, beta, &[]);
    assert_eq!(report["disks"].as_array().map_or(0, Vec::len), 1, "{report:#}");
    assert_eq!(vhost_threads(beta), 2, "the kernel serves both cards");
    let sum = sum_at(alpha, DISK);
    assert_eq!((sum_in_guest(&rack), sum_at(beta, &disk_at(&rack, beta, "disk1"))), (sum.clone(), sum));
    run_in_guest(&rack, write);
    assert_eq!(sum_in_guest(&rack), sum_at(beta, &disk_at(&rack, beta, "disk1")));
    echo.wait_for_more();

    let mut monitor = monitor_at(&rack, beta);
    let migration = begin_slowly(&rack, beta, alpha);
    monitor.command("device_del", &json!({ "id": "plugged1" })).unwrap();
    let is_its = |data: &Value| data["device"] == "plugged1";
    monitor.wait_for_event(|event| event.name == "DEVICE_DELETED" && is_its(&event.data)).unwrap();
    assert_ended(&rack, migration, beta, alpha);
    wait_in_guest(&rack, "/dev/vda", false);
    monitor.command("blockdev-del", &json!({ "node-name": "disk1" })).unwrap();
    drop(monitor);
    move_guest(&rack, beta, alpha, &[]);
    echo.wait_for_more();
    assert!(echo.finish() > 0);
    trial.works();
}
