//! The test that runs always: what all others stand on works.

use lab::{until, vm_address};

use crate::echo::Echo;
use crate::support::{VM, kvm_guest, move_guest, rack, two, vhost_threads};
use crate::tried::Trial;

/// A stock Linux on KVM, whose network card the kernel serves, moves there and back. Every page is compared by Whimbrel
/// and by the guest, and a connection to it, which is never reopened, is used all the time.
#[test]
fn a_stock_guest_on_kvm_with_vhost_there_and_back() {
    let Some(rack) = rack(&two()) else { return };
    let trial = Trial::begin(&rack, "a stock guest, there and back");
    let _serial = rack.start_guest(&rack.hosts[0], &kvm_guest()).unwrap();
    let echo = Echo::start(&rack.switch, vm_address(1));
    for (from, to) in [(0, 1), (1, 0)] {
        let (from, to) = (&rack.hosts[from], &rack.hosts[to]);
        echo.wait_for_more();
        move_guest(&rack, from, to, &[]);
        echo.wait_for_more();
        assert_eq!(vhost_threads(to), 1, "the kernel serves the card");
        until("the source has nothing of it", || vhost_threads(from) == 0);
        let left = rack.whimbrel(from, &["vm", "list"]).ok().json();
        assert!(left.as_array().unwrap().iter().all(|vm| vm["vm"] != VM), "it is on one side only: {left}");
    }
    assert!(echo.finish() > 0);
    trial.works();
}
