//! Hosts that are short of memory: they swap, refuse a guest, or end programs.

use lab::rack::{Rack, RackHost};
use lab::{Boot, GuestSpec, until};

use crate::support::{
    VM, assert_moved, assert_whole, begin, blockers, guest_at, kvm_guest, move_guest, qemus, rack, two,
    wait_for_sent, wait_settled,
};
use crate::tried::Trial;

/// A directory of memory that can neither be swapped nor given back by the kernel.
const FULL: &str = "/srv/full";
/// Bytes of the guest in swap that are enough for a test.
const SWAPPED: u64 = 24 << 20;

/// A guest with memory that it hardly touches.
fn lazy_guest() -> GuestSpec {
    let mut guest = GuestSpec { memory_mib: 192, ..kvm_guest() };
    if let Boot::Tiny(load) = &mut guest.boot {
        (load.fill_mib, load.verify_mib_per_s) = (64, 1);
    }
    guest
}

/// Makes [`FULL`].
fn prepare(host: &RackHost) {
    let script = format!("mkdir -p {FULL}; mount -t tmpfs -o noswap,size=100% full {FULL}");
    host.shell(&script).unwrap();
}

/// Takes so much more of a host's memory. The kernel ends programs where there is none left, and this one may fail.
fn take_memory(host: &RackHost, mib: u64) {
    let script = format!("fallocate -l {mib}M $(mktemp -p {FULL} 2>/dev/null) 2>/dev/null || true");
    host.shell(&script).unwrap();
}

/// A script that takes memory until no more than this much is available without swapping. If that is negative, the
/// kernel ends other programs.
fn all_but(mib: i64) -> String {
    format!(
        "free=$(awk '/^MemAvailable/ {{ print $2 }}' /proc/meminfo)
        choom --adjust -1000 -- fallocate -l $((free - ({mib} * 1024)))K {FULL}/all"
    )
}

fn take_all_but(host: &RackHost, mib: i64) {
    host.shell(&all_but(mib)).unwrap();
}

fn give_memory_back(host: &RackHost) {
    host.shell(&format!("rm -f {FULL}/*")).unwrap();
}

/// Returns the bytes of a host's only QEMU that are in swap, whatever kind of memory it has.
fn swapped(host: &RackHost) -> u64 {
    let sum = "awk '/^Swap:/ { print $2 }' /proc/$(pgrep --exact qemu-system-x86)/smaps_rollup";
    host.shell(sum).unwrap().trim().parse::<u64>().unwrap() << 10
}

/// Takes a host's memory step by step, until it has swapped a part of the guest out.
fn swap_out(host: &RackHost) {
    take_all_but(host, 48);
    until("the guest is partly in swap", || {
        let is_enough = swapped(host) >= SWAPPED;
        if !is_enough {
            take_memory(host, 8);
        }
        is_enough
    });
}

/// Returns the number of pages that a host has read from its swap.
fn swapped_in(host: &RackHost) -> u64 {
    host.run(&["awk", "/^pswpin / { print $2 }", "/proc/vmstat"]).unwrap().trim().parse().unwrap()
}

/// A host whose memory does not suffice: a part of the guest is in its swap when it leaves, and is swapped out again
/// while it arrives there.
#[test]
#[ignore = "make rack"]
fn a_guest_on_a_host_that_swaps() {
    let Some(rack) = rack(&two()) else { return };
    let trial = Trial::begin(&rack, "a host that swaps: a guest partly in swap leaves it, and comes back");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    prepare(alpha);
    let swap =
        "fallocate -l 512M /var/swap; chmod 600 /var/swap; mkswap /var/swap >/dev/null; swapon /var/swap";
    alpha.shell(swap).unwrap();
    let serial = rack.start_guest(alpha, &lazy_guest()).unwrap();
    swap_out(alpha);
    let (out, before) = (swapped(alpha), swapped_in(alpha));
    drop(serial);
    move_guest(&rack, alpha, beta, &[]);
    // All of it was read.
    let read = (swapped_in(alpha) - before) << 12;
    assert!(read >= SWAPPED, "of {out} bytes in swap {read} were read");

    // There is no room for it until memory is given back.
    assert_eq!(blockers(&rack, beta, alpha), ["memory-short"]);
    give_memory_back(alpha);
    let mut migration = begin(beta, alpha, &["--bandwidth", "2M"]);
    wait_for_sent(&rack, beta, 32 << 20);
    swap_out(alpha);
    assert_eq!(migration.try_wait().unwrap(), None, "it has arrived before it was swapped out");
    rack.whimbrel(beta, &["limit", VM, "--bandwidth", "none"]).ok();
    let output = migration.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_moved(&rack.whimbrel(beta, &["report", VM]).ok().json());
    assert_whole(&rack, alpha);
    trial.works();
}

/// Takes a host's memory until its kernel has ended QEMU, the program that has most of it.
fn exhaust(host: &RackHost) {
    // Otherwise the kernel evicts programs' code and reads it again, for minutes, before it ends one of them.
    host.shell("cd /sys/kernel/mm/lru_gen; echo y >enabled; echo 1000 >min_ttl_ms").unwrap();
    // At once: each further command would wait for its own program to be read. It may find less than it asks for.
    let _ = host.shell(&all_but(-32));
    until("the kernel has ended QEMU", || {
        let messages = host.shell("dmesg").unwrap();
        let has_ended = |line: &str| line.contains("Out of memory: Killed process") && line.contains("qemu");
        let is_so = messages.lines().any(has_ended);
        if !is_so {
            take_memory(host, 8);
        }
        is_so
    });
    give_memory_back(host);
}

/// Asserts that nothing of a migration is open, and that each host has so many QEMUs.
fn assert_settled(rack: &Rack, expected: [usize; 2]) {
    for (host, expected) in rack.hosts.iter().zip(expected) {
        wait_settled(rack, host);
        until(&format!("{} has {expected} QEMUs", host.name()), || qemus(host) == expected);
    }
}

/// A host without room for the guest refuses it. One whose memory others take while the guest arrives loses the guest's
/// copy alone. One that loses the guest itself leaves nothing at the destination.
#[test]
#[ignore = "make rack"]
fn hosts_that_run_out_of_memory() {
    let Some(rack) = rack(&two()) else { return };
    let full = Trial::begin(&rack, "a host without memory for the guest is refused");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    for host in [alpha, beta] {
        prepare(host);
    }
    let serial = rack.start_guest(alpha, &lazy_guest()).unwrap();
    take_all_but(beta, 160);
    assert_eq!(blockers(&rack, alpha, beta), ["memory-short"]);
    assert_eq!(rack.migrate(VM, alpha, beta, &[]).code, 1);
    assert_settled(&rack, [1, 0]);
    give_memory_back(beta);
    full.works();

    let there = Trial::begin(&rack, "the kernel ends QEMU for lack of memory: at the destination");
    let agent = beta.run(&["systemctl", "show", "--property=MainPID", "whimbrel"]).unwrap();
    let migration = begin(alpha, beta, &["--bandwidth", "3M"]);
    wait_for_sent(&rack, alpha, 24 << 20);
    exhaust(beta);
    let output = migration.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_settled(&rack, [1, 0]);
    assert_eq!(beta.run(&["systemctl", "show", "--property=MainPID", "whimbrel"]).unwrap(), agent);
    assert!(guest_at(&rack, beta).is_none(), "the destination has nothing of it");
    let check = serial.check().unwrap();
    assert!(check.ok && check.wrong == 0, "{check:?}");
    move_guest(&rack, alpha, beta, &[]);
    there.works();

    let here = Trial::begin(&rack, "the kernel ends QEMU for lack of memory: at the source");
    let migration = begin(beta, alpha, &["--bandwidth", "3M"]);
    wait_for_sent(&rack, beta, 4 << 20);
    exhaust(beta);
    let output = migration.wait_with_output().unwrap();
    // The guest has ended.
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert_settled(&rack, [0, 0]);
    assert!(guest_at(&rack, alpha).is_none(), "the destination has nothing of it");
    here.works();
}
