//! Hosts that are short of memory: they swap, are full, or end programs.

use lab::rack::{Rack, RackHost};
use lab::{Boot, GuestSpec, until};

use crate::support::{
    VM, assert_moved, assert_whole, begin, blockers, guest_at, kvm_guest, move_guest, qemu_status, qemus,
    rack, two, wait_for_sent, wait_settled,
};
use crate::tried::Trial;

/// Returns the number of pages that a host has written to its swap.
fn swapped_out(host: &RackHost) -> u64 {
    host.run(&["awk", "/^pswpout / { print $2 }", "/proc/vmstat"]).unwrap().trim().parse().unwrap()
}

/// A guest with memory that it hardly touches.
fn lazy_guest() -> GuestSpec {
    let mut guest = GuestSpec { memory_mib: 192, ..kvm_guest() };
    if let Boot::Tiny(load) = &mut guest.boot {
        (load.fill_mib, load.verify_mib_per_s) = (64, 1);
    }
    guest
}

/// Ends the program of the worst rating on a host, as its kernel does when there is no memory. That is the guest's QEMU,
/// whose rating moves with it.
fn run_out_of_memory(host: &RackHost) {
    host.shell("echo f >/proc/sysrq-trigger").unwrap();
    until("the kernel has ended QEMU", || {
        host.shell("dmesg")
            .unwrap()
            .lines()
            .any(|line| line.contains("Killed process") && line.contains("qemu"))
    });
}

/// Moves a guest of which a part is in swap to a host that swaps all the time.
fn move_through_swap(rack: &Rack, from: &RackHost, to: &RackHost) {
    for host in [from, to] {
        let make =
            "fallocate -l 512M /var/swap; chmod 600 /var/swap; mkswap /var/swap >/dev/null; swapon /var/swap";
        host.shell(make).unwrap();
    }
    // The kernel may find less than it is asked for.
    from.shell("echo 96M >/sys/fs/cgroup/system.slice/vm-vm1.service/memory.reclaim || true").unwrap();
    let kib = qemu_status(from, "VmSwap");
    let kib: u64 = kib.trim_end_matches(" kB").parse().unwrap();
    assert!(kib > 8 << 10, "{kib} KiB of QEMU are in swap");
    let before = swapped_out(to);
    let reclaim = "while sleep 0.3; do for group in whimbrel.service whimbrel-vm-vm1.scope; do \
        echo 16M >/sys/fs/cgroup/system.slice/$group/memory.reclaim; done; done 2>/dev/null";
    to.run(&["systemd-run", "--quiet", "--unit=reclaim", "sh", "-c", reclaim]).unwrap();
    let output = begin(from, to, &["--bandwidth", "8M"]).wait_with_output().unwrap();
    // Otherwise the guest would wait for its pages more than it works.
    to.run(&["systemctl", "stop", "reclaim"]).unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_moved(&rack.whimbrel(from, &["report", VM]).ok().json());
    assert_whole(rack, to);
    assert!(swapped_out(to) > before, "{} has not swapped", to.name());
}

/// Swap on both hosts; a host with too little memory is refused; one on which QEMU is ended for lack of memory leaves the
/// guest where it is; and one whose own guest is ended so leaves nothing at the destination.
#[test]
#[ignore = "make rack"]
fn hosts_that_swap_and_run_out_of_memory() {
    let Some(rack) = rack(&two()) else { return };
    let swap = Trial::begin(&rack, "a guest that is partly in swap, to a host that swaps");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let _serial = rack.start_guest(alpha, &lazy_guest()).unwrap();
    move_through_swap(&rack, alpha, beta);
    swap.works();

    let full = Trial::begin(&rack, "a host without memory for the guest is refused");
    let fill = "mount -o remount,size=100% /dev/shm
        free=$(awk '/^MemAvailable/ { print $2 }' /proc/meminfo); fallocate -l $((free - 300000))K /dev/shm/full";
    alpha.shell(fill).unwrap();
    assert_eq!(blockers(&rack, beta, alpha), ["memory-short"]);
    alpha.run(&["rm", "/dev/shm/full"]).unwrap();
    full.works();

    let killed =
        Trial::begin(&rack, "the kernel ends QEMU for lack of memory: at the destination, at the source");
    beta.shell("echo 1000 >/proc/$(pgrep --exact qemu-system-x86)/oom_score_adj").unwrap();
    let migration = begin(beta, alpha, &["--bandwidth", "3M"]);
    wait_for_sent(&rack, beta, 4 << 20);
    run_out_of_memory(alpha);
    let output = migration.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_whole(&rack, beta);
    wait_settled(&rack, alpha);
    assert_eq!((qemus(alpha), qemus(beta)), (0, 1));

    move_guest(&rack, beta, alpha, &[]);
    alpha.run(&["dmesg", "--clear"]).unwrap();
    let migration = begin(alpha, beta, &["--bandwidth", "3M"]);
    wait_for_sent(&rack, alpha, 4 << 20);
    run_out_of_memory(alpha);
    let output = migration.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    for host in [alpha, beta] {
        wait_settled(&rack, host);
        until("no QEMU is left", || qemus(host) == 0);
    }
    assert!(guest_at(&rack, beta).is_none(), "the destination has nothing of it");
    killed.works();
}
