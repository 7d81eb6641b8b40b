//! Guests that do something drastic by themselves in the middle of a migration.

use std::io::Write;
use std::os::unix::net::UnixStream;

use lab::guest_shell::with_shell;
use lab::rack::{Rack, RackHost, RackSerial};
use lab::{Boot, GuestSpec, Monitor, until};
use serde_json::json;

use crate::support::{
    VM, assert_moved, assert_whole, begin, blockers, guest_at, kvm_guest, move_guest, qemus, rack,
    run_in_guest, two, wait_for_sent, wait_settled,
};
use crate::tried::Trial;

/// The guest, whose kernel obeys the keys of its serial line, and stands still after a panic.
fn obedient_guest() -> GuestSpec {
    let mut guest = GuestSpec { second_monitor: true, ..kvm_guest() };
    if let Boot::Tiny(load) = &mut guest.boot {
        "sysrq_always_enabled panic=0".clone_into(&mut load.kernel);
    }
    guest
}

/// Presses a key of the kernel's own (`b`: reboot, `o`: power off, `c`: crash) on the guest's serial line.
fn press(host: &RackHost, serial: &RackSerial, key: char) {
    // QEMU accepts a break over its monitor, and passes it to the guest before what is typed afterwards.
    let monitor = host.forward(&format!("/srv/vms/{VM}/lab.sock")).unwrap();
    let mut line = UnixStream::connect(serial.socket()).unwrap();
    let command = json!({ "id": "serial0" });
    Monitor::connect(&monitor).unwrap().command("chardev-send-break", &command).unwrap();
    line.write_all(key.to_string().as_bytes()).unwrap();
    line.flush().unwrap();
    // The line stays connected until the guest has read it.
    std::mem::forget(line);
}

struct Scene {
    rack: Rack,
    serial: RackSerial,
    trial: Trial,
}

/// Begins a slow migration of such a guest, and presses a key in its middle.
fn pressed_in_the_middle(subject: &str, key: char) -> Option<(Scene, std::process::Output)> {
    let rack = rack(&two())?;
    let trial = Trial::begin(&rack, subject);
    let serial = rack.start_guest(&rack.hosts[0], &with_shell(obedient_guest())).unwrap();
    let migration = begin(&rack.hosts[0], &rack.hosts[1], &["--bandwidth", "3M"]);
    wait_for_sent(&rack, &rack.hosts[0], 4 << 20);
    press(&rack.hosts[0], &serial, key);
    let output = migration.wait_with_output().unwrap();
    Some((Scene { rack, serial, trial }, output))
}

/// It boots anew while it is moved, and where it has arrived, and finds its memory as it writes it then.
#[test]
#[ignore = "make rack"]
fn a_guest_that_reboots() {
    let Some((scene, output)) = pressed_in_the_middle("a guest that reboots during the migration", 'b')
    else {
        return;
    };
    assert!(output.status.success(), "{output:?}");
    let (rack, beta) = (&scene.rack, &scene.rack.hosts[1]);
    assert_moved(&rack.whimbrel(&rack.hosts[0], &["report", VM]).ok().json());
    let there = rack.serial_at(beta, VM).unwrap();
    there.next_tick().unwrap();
    // The load has begun anew: its ticks are counted from the boot.
    let numbers: Vec<_> = scene.serial.ticks().unwrap().into_iter().map(|tick| tick.n).collect();
    let later = there.ticks().unwrap().into_iter().map(|tick| tick.n);
    let all: Vec<_> = numbers.into_iter().chain(later).collect();
    assert!(all.windows(2).any(|pair| pair[1] < pair[0]), "it has not rebooted: {all:?}");
    assert_whole(rack, beta);
    // Where it has arrived, its devices are reset, too.
    let before = there.next_tick().unwrap().n;
    run_in_guest(rack, "(busybox sleep 1; echo b >/proc/sysrq-trigger) </dev/null >/dev/null 2>&1 &\n");
    until("it has booted anew", || there.next_tick().is_ok_and(|tick| tick.n < before));
    assert_whole(rack, beta);
    move_guest(rack, beta, &rack.hosts[0], &[]);
    scene.trial.works();
}

/// It powers itself off: the migration ends, and nothing of it is left at the destination.
#[test]
#[ignore = "make rack"]
fn a_guest_that_powers_itself_off() {
    let Some((scene, output)) =
        pressed_in_the_middle("a guest that powers itself off during the migration", 'o')
    else {
        return;
    };
    assert!(!output.status.success(), "{output:?}");
    let rack = &scene.rack;
    for host in &rack.hosts {
        wait_settled(rack, host);
        until("no QEMU is left", || qemus(host) == 0);
    }
    assert!(guest_at(rack, &rack.hosts[1]).is_none(), "the destination has nothing of it");
    scene.trial.works();
}

/// It panics, and stands still since: it arrives as it is.
#[test]
#[ignore = "make rack"]
fn a_guest_that_panics() {
    let Some((scene, output)) = pressed_in_the_middle("a guest that panics during the migration", 'c') else {
        return;
    };
    assert!(output.status.success(), "{output:?}");
    let rack = &scene.rack;
    assert_moved(&rack.whimbrel(&rack.hosts[0], &["report", VM]).ok().json());
    scene.serial.follow().unwrap().wait_for_text("Kernel panic").unwrap();
    assert_eq!((qemus(&rack.hosts[0]), qemus(&rack.hosts[1])), (0, 1));
    assert_eq!(guest_at(rack, &rack.hosts[1]).unwrap()["state"], "running");
    scene.trial.works();
}

/// Waits until a migration has failed for a reason, and nothing of it is left at the destination.
#[track_caller]
fn assert_failed(rack: &Rack, migration: std::process::Child, reason: &str) {
    let output = migration.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains(reason), "{output:?}");
    wait_settled(rack, &rack.hosts[1]);
    until("the destination has nothing of it", || qemus(&rack.hosts[1]) == 0);
}

/// It suspends itself (S3): that ends the migration, and is refused until it wakes up. Then it is moved.
#[test]
#[ignore = "make rack"]
fn a_guest_that_suspends_itself() {
    let Some(rack) = rack(&two()) else { return };
    let trial = Trial::begin(&rack, "a guest that suspends itself (S3) during the migration");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let serial = rack.start_guest(alpha, &with_shell(obedient_guest())).unwrap();
    let monitor = alpha.forward(&format!("/srv/vms/{VM}/lab.sock")).unwrap();
    let mut monitor = Monitor::connect(&monitor).unwrap();
    let migration = begin(alpha, beta, &["--bandwidth", "3M"]);
    wait_for_sent(&rack, alpha, 4 << 20);
    run_in_guest(&rack, "(busybox sleep 1; echo mem >/sys/power/state) </dev/null >/dev/null 2>&1 &\n");
    monitor.wait_for_event(|event| event.name == "SUSPEND").unwrap();
    assert_failed(&rack, migration, "the guest is in run state suspended");
    assert_eq!(blockers(&rack, alpha, beta), ["run-state"]);
    monitor.command("system_wakeup", &json!({})).unwrap();
    monitor.wait_for_event(|event| event.name == "WAKEUP").unwrap();
    serial.next_tick().unwrap();
    assert_whole(&rack, alpha);
    move_guest(&rack, alpha, beta, &[]);
    trial.works();
}
