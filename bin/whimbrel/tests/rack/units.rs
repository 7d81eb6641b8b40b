//! Guests that systemd runs, on hosts whose first process it is.

use lab::vm_address;

use crate::support::{VM, begin, blockers, guest_at, kvm_guest, move_guest, qemus, rack, two, wait_for_sent};
use crate::tried::Trial;

/// A unit that would start the guest again is refused, at once and at the next boot; an arrived guest is in a scope of
/// its own, which outlives the agent's unit.
#[test]
#[ignore = "make rack"]
fn a_unit_that_restarts_its_guest() {
    let Some(rack) = rack(&two()) else { return };
    let trial =
        Trial::begin(&rack, "a unit with Restart= or one that is enabled is refused; scopes of guests");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let _serial = rack.start_guest(alpha, &kvm_guest()).unwrap();
    assert_eq!(blockers(&rack, alpha, beta), [""; 0]);
    let unit = format!("/run/systemd/transient/vm-{VM}.service");
    alpha
        .shell(&format!(
            "mkdir -p /run/systemd/system/vm-{VM}.service.d; test -e {unit}
            printf '[Service]\\nRestart=always\\n' >/run/systemd/system/vm-{VM}.service.d/restart.conf; systemctl daemon-reload"
        ))
        .unwrap();
    assert_eq!(blockers(&rack, alpha, beta), ["unit-restarts"]);
    assert_eq!(rack.migrate(VM, alpha, beta, &[]).code, 1);
    let wants = "/etc/systemd/system/multi-user.target.wants";
    alpha
        .shell(&format!(
            "rm -r /run/systemd/system/vm-{VM}.service.d; ln -s {unit} {wants}/vm-{VM}.service; systemctl daemon-reload"
        ))
        .unwrap();
    assert_eq!(blockers(&rack, alpha, beta), ["unit-starts-at-boot"]);
    alpha.shell(&format!("rm {wants}/vm-{VM}.service; systemctl daemon-reload")).unwrap();

    move_guest(&rack, alpha, beta, &[]);
    assert_eq!(qemus(alpha), 0);
    // The agent's unit ends, and the guest runs on.
    beta.run(&["systemctl", "restart", "whimbrel"]).unwrap();
    let scope = format!("whimbrel-vm-{VM}.scope");
    assert_eq!(beta.run(&["systemctl", "is-active", &scope]).unwrap().trim(), "active");
    assert_eq!(qemus(beta), 1);
    lab::until("the agent has the guest again", || {
        guest_at(&rack, beta).is_some_and(|vm| vm["state"] == "running")
    });
    move_guest(&rack, beta, alpha, &[]);
    trial.works();
}

/// The cable is pulled in the middle, longer than connections live without an answer, and put back: the migration goes
/// on. Pulled for good: it ends, and the guest stays.
#[test]
#[ignore = "make rack"]
fn the_cable_is_pulled() {
    let more = toml::toml! {
        timeouts = { qmp_ms = 60_000, qemu_start_ms = 120_000, peer_silence_ms = 3000, connect_ms = 5000, give_up_after_ms = 30_000 }
    };
    let Some(rack) = crate::support::rack_with(&two(), &more) else { return };
    let trial = Trial::begin(&rack, "a cable that is pulled and put back; pulled for good");
    let (alpha, beta) = (&rack.hosts[0], &rack.hosts[1]);
    let _serial = rack.start_guest(alpha, &kvm_guest()).unwrap();
    let echo = crate::echo::Echo::start(&rack.switch, vm_address(1));
    let migration = begin(alpha, beta, &["--bandwidth", "3M"]);
    wait_for_sent(&rack, alpha, 4 << 20);
    alpha.set_cable(false).unwrap();
    let is_lost = |migration: &serde_json::Value| migration["progress"]["phase"] == "reconnecting";
    crate::support::wait_for_migration(&rack, alpha, "the loss is noticed", is_lost);
    alpha.set_cable(true).unwrap();
    let output = migration.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = rack.whimbrel(alpha, &["report", VM]).ok().json();
    assert!(report["reconnections"].as_u64() >= Some(1), "{report:#}");
    crate::support::assert_whole(&rack, beta);
    echo.wait_for_more();
    echo.finish();

    let migration = begin(beta, alpha, &["--bandwidth", "3M"]);
    wait_for_sent(&rack, beta, 4 << 20);
    beta.set_cable(false).unwrap();
    let output = migration.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    crate::support::assert_whole(&rack, beta);
    beta.set_cable(true).unwrap();
    crate::support::wait_settled(&rack, alpha);
    lab::until("nothing is left at the destination", || qemus(alpha) == 0);
    move_guest(&rack, beta, alpha, &[]);
    trial.works();
}
