//! Stock guests on KVM, busy, with network cards that the kernel serves.

use std::time::{Duration, Instant, SystemTime};

use lab::guest_shell::with_shell;
use lab::rack::{Rack, RackHost, RackSerial};
use lab::{Boot, GuestSpec, Load, Ram, until, vm_address};

use crate::echo::Echo;
use crate::support::{
    VM, assert_whole, begin, kvm_guest, move_guest, qemus, rack, run_in_guest, two, wait_for_sent,
};
use crate::tried::Trial;

/// A guest with two processors that writes as fast as pages can hardly be sent here.
fn busy_guest(ram: Ram) -> GuestSpec {
    let guest = kvm_guest();
    let Boot::Tiny(load) = guest.boot else { unreachable!("the tiny guest") };
    let load = Load { fill_mib: 96, wss_mib: 32, rate_mib_per_s: 20, verify_mib_per_s: 8, ..load };
    GuestSpec { vcpus: 2, memory_mib: 224, ram, boot: Boot::Tiny(load), ..guest }
}

/// Moves a busy guest there, by post-copy where its memory permits, and back by pre-copy, with which all of it is compared,
/// while a connection to it is used.
fn there_and_back(ram: Ram, prepare: impl Fn(&RackHost), check: impl Fn(&RackHost)) {
    let Some(rack) = rack(&two()) else { return };
    let subject = match ram {
        Ram::Hugetlb => "two processors under load, hugetlb: hybrid is refused, pre-copy there and back",
        _ => "two processors under load, transparent huge pages: hybrid, then pre-copy",
    };
    let trial = Trial::begin(&rack, subject);
    rack.hosts.iter().for_each(prepare);
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let can_post_copy = ram != Ram::Hugetlb;
    let _serial = rack.start_guest(alpha, &busy_guest(ram)).unwrap();
    check(alpha);
    let echo = Echo::start(&rack.switch, vm_address(1));
    echo.wait_for_more();
    let hybrid = ["migrate", VM, "--to", "beta", "--policy", "hybrid", "--on-limit", "post-copy"];
    let output = rack.whimbrel(alpha, &hybrid);
    let report = output.json();
    if can_post_copy {
        assert_eq!(output.code, 0, "{}: {}", report["outcome"], report["reason"]);
        assert!(report["post_copy"].is_object(), "no page has followed the guest");
        assert_whole(&rack, beta);
    } else {
        assert_eq!(output.code, 1, "{report:#}");
        assert!(report.to_string().contains("post-copy is not possible"), "{report:#}");
        assert_whole(&rack, alpha);
        // Its huge pages are needed again.
        until("the destination has nothing of it", || qemus(beta) == 0);
        move_guest(&rack, alpha, beta, &[]);
    }
    echo.wait_for_more();
    check(beta);
    move_guest(&rack, beta, alpha, &[]);
    echo.wait_for_more();
    check(alpha);
    echo.finish();
    trial.works();
}

#[test]
#[ignore = "make rack"]
fn a_busy_guest_in_transparent_huge_pages() {
    let enable = |host: &RackHost| {
        host.shell("echo always >/sys/kernel/mm/transparent_hugepage/enabled").unwrap();
    };
    there_and_back(Ram::Anonymous, enable, |host| {
        let count = "awk '/^AnonHugePages/ { sum += $2 } END { print sum }' /proc/$(pgrep --exact qemu-system-x86)/smaps";
        let kib: u64 = host.shell(count).unwrap().trim().parse().unwrap();
        assert!(kib > 0, "{VM} on {} has no huge pages", host.name());
    });
}

#[test]
#[ignore = "make rack"]
fn a_busy_guest_in_hugetlb_pages() {
    let reserve = |host: &RackHost| {
        // Before memory is fragmented.
        host.shell("echo 130 >/proc/sys/vm/nr_hugepages; [ $(cat /proc/sys/vm/nr_hugepages) = 130 ]")
            .unwrap();
    };
    there_and_back(Ram::Hugetlb, reserve, |host| {
        let free = host.run(&["awk", "/^HugePages_Free/ { print $2 }", "/proc/meminfo"]).unwrap();
        assert!(free.trim().parse::<u64>().unwrap() < 130, "{VM} on {} is in no huge pages", host.name());
    });
}

/// A guest's clock, whether it is the host's (kvmclock) or the processor's counter, has no jump that it did not have
/// before, although the clocks of the two hosts differ by an hour, and are set anew in the middle.
#[test]
#[ignore = "make rack"]
fn the_clock_of_a_guest_stands_still_with_it() {
    let Some(rack) = rack(&two()) else { return };
    for (source, words) in [("kvm-clock", ""), ("tsc", "clocksource=tsc tsc=reliable")] {
        let trial =
            Trial::begin(&rack, &format!("{source}, and the hosts' clocks set anew during the migration"));
        let mut guest = kvm_guest();
        if let Boot::Tiny(load) = &mut guest.boot {
            words.clone_into(&mut load.kernel);
        }
        let serial = rack.start_guest(&rack.hosts[0], &with_shell(guest)).unwrap();
        let used = "busybox cat /sys/devices/system/clocksource/clocksource0/current_clocksource\n";
        assert_eq!(run_in_guest(&rack, used).trim(), source);
        move_while_clocks_are_set(&rack, &serial, &trial);
        drop(serial);
        // Room for the next guest.
        let beta = &rack.hosts[1];
        beta.run(&["systemctl", "stop", &format!("whimbrel-vm-{VM}.scope")]).unwrap();
        // Unless the agent has done so by itself.
        let _ = rack.whimbrel(beta, &["vm", "forget", VM]);
        trial.works();
    }
}

/// Moves a guest, and compares the time that passes for it with the time that passes here.
fn move_while_clocks_are_set(rack: &Rack, serial: &RackSerial, trial: &Trial) {
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let hour = Duration::from_hours(1);
    beta.set_clock(SystemTime::now() + hour).unwrap();
    let (before, began) = (serial.now().unwrap(), Instant::now());
    let migration = begin(alpha, beta, &["--bandwidth", "2M"]);
    wait_for_sent(rack, alpha, 1 << 20);
    alpha.set_clock(SystemTime::now() - hour).unwrap();
    beta.set_clock(SystemTime::now() - hour).unwrap();
    let output = migration.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let there = assert_whole(rack, beta);
    let (passed, real) = (there.now().unwrap().saturating_sub(before), began.elapsed());
    // It stands still while the guest is stopped, and never runs ahead.
    assert!(passed <= real, "{passed:?} passed in the guest in {real:?}");
    let report = rack.whimbrel(alpha, &["report", VM]).ok().json();
    let stopped = Duration::from_micros(report["downtime"]["total_us"].as_u64().unwrap());
    trial.notes(&format!(
        "the guest's clock advanced by {passed:.1?} in {real:.1?}, of which it was stopped {stopped:.1?}"
    ));
    assert!(
        passed + stopped + hour / 60 > real,
        "{passed:?} passed in the guest in {real:?}, stopped for {stopped:?}"
    );
}
