//! Common parts of the tests on a rack.

use std::path::Path;
use std::process::{Child, Stdio};

use lab::rack::{HostSpec, Rack, RackHost, RackSerial, Tools};
use lab::{Accel, Device, Environment, GuestSpec, Load, Net, not_tried, until, vm_address};
use serde_json::Value;
use toml::{Table, toml};

/// The guest of most tests.
pub(crate) const VM: &str = "vm1";

/// Starts hosts with agents. `None` where this machine cannot have a rack.
pub(crate) fn rack(specs: &[HostSpec]) -> Option<Rack> {
    rack_with(specs, &Table::new())
}

/// Starts hosts with agents that have these tables in their configuration.
pub(crate) fn rack_with(specs: &[HostSpec], more: &Table) -> Option<Rack> {
    let rack = bare_rack(specs)?;
    rack.install_agents(&with_patience(more)).unwrap();
    Some(rack)
}

/// Starts hosts without agents.
pub(crate) fn bare_rack(specs: &[HostSpec]) -> Option<Rack> {
    rack_of(specs, |tools| tools)
}

/// Starts hosts without agents, which have more files.
pub(crate) fn rack_of(specs: &[HostSpec], more: impl Fn(Tools) -> Tools) -> Option<Rack> {
    let environment = Environment::discover();
    if let Err(why) = Rack::check(&environment) {
        not_tried(format!("whole machines as hosts: {why}"));
        return None;
    }
    let tools = more(Tools::new(Path::new(env!("CARGO_BIN_EXE_whimbrel"))));
    Some(Rack::up(&environment, &tools, specs).unwrap())
}

/// Two hosts of the usual kind.
pub(crate) fn two() -> [HostSpec; 2] {
    ["alpha", "beta"].map(HostSpec::new)
}

/// Adds timeouts for emulated hosts, unless there are others.
pub(crate) fn with_patience(more: &Table) -> Table {
    let mut config = toml! {
        timeouts = { qmp_ms = 60_000, qemu_start_ms = 120_000, connect_ms = 20_000, peer_silence_ms = 30_000, standstill_ms = 60_000 }
    };
    config.extend(more.clone());
    config
}

/// Returns the tiny guest on KVM, with a network card that the kernel serves, and an echo server at port 7.
pub(crate) fn kvm_guest() -> GuestSpec {
    let load = Load {
        fill_mib: 16,
        wss_mib: 4,
        rate_mib_per_s: 1,
        verify_mib_per_s: 4,
        address: Some(vm_address(1)),
        port: 7,
        ..Load::default()
    };
    let devices = vec![Device::Net(Net { vhost: true, ..Net::new(1) })];
    GuestSpec { accel: Accel::Kvm, devices, ..GuestSpec::tiny(VM, load) }
}

/// Runs a script of busybox's shell in the guest, and returns its output.
#[track_caller]
pub(crate) fn run_in_guest(rack: &Rack, script: &str) -> String {
    lab::guest_shell::run_in_guest(&rack.switch, vm_address(1), script).unwrap()
}

/// Migrates the guest with `--verify`, and returns the report. Nothing may differ, all of it must have been compared,
/// and the guest itself must find every page as it wrote it. Returns its serial line at the destination, too.
#[track_caller]
pub(crate) fn move_guest(rack: &Rack, from: &RackHost, to: &RackHost, more: &[&str]) -> (Value, RackSerial) {
    // A stop takes long where all is emulated.
    let output = rack.migrate(VM, from, to, &[&["--on-limit", "stop"], more].concat());
    let report = output.json();
    assert_eq!(output.code, 0, "{}: {}", report["outcome"], report["reason"]);
    assert_moved(&report);
    (report, assert_whole(rack, to))
}

/// Starts a migration of the guest; its command's output is kept for the caller.
pub(crate) fn begin(from: &RackHost, to: &RackHost, more: &[&str]) -> Child {
    let mut words =
        vec!["whimbrel", "--json", "migrate", VM, "--to", to.name(), "--verify", "--on-limit", "stop"];
    words.extend(more);
    let mut command = from.command(&words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until a host's last migration satisfies `enough`.
#[track_caller]
pub(crate) fn wait_for_migration(rack: &Rack, host: &RackHost, what: &str, enough: impl Fn(&Value) -> bool) {
    until(what, || {
        let list = rack.whimbrel(host, &["migrations"]);
        serde_json::from_str::<Value>(list.stdout.trim()).is_ok_and(|list| enough(&list[0]))
    });
}

/// Waits until a host has sent this many bytes of the guest.
#[track_caller]
pub(crate) fn wait_for_sent(rack: &Rack, host: &RackHost, bytes: u64) {
    let is_so = |migration: &Value| migration["progress"]["sent_bytes"].as_u64() >= Some(bytes);
    wait_for_migration(rack, host, &format!("{bytes} bytes are sent"), is_so);
}

/// Waits until no migration of a host is open.
#[track_caller]
pub(crate) fn wait_settled(rack: &Rack, host: &RackHost) {
    until(&format!("{} has no open migration", host.name()), || {
        let list = rack.whimbrel(host, &["vm", "list"]);
        let list = serde_json::from_str::<Value>(list.stdout.trim());
        list.is_ok_and(|list| {
            list.as_array().is_some_and(|list| list.iter().all(|vm| vm["migration"].is_null()))
        })
    });
}

/// Returns the guest as a host's agent shows it, if it has it.
pub(crate) fn guest_at(rack: &Rack, host: &RackHost) -> Option<Value> {
    let list = rack.whimbrel(host, &["vm", "list"]).ok().json();
    list.as_array().unwrap().iter().find(|vm| vm["vm"] == VM).cloned()
}

/// Returns the codes of a pre-flight check's blockers.
pub(crate) fn blockers(rack: &Rack, from: &RackHost, to: &RackHost) -> Vec<String> {
    let check = rack.whimbrel(from, &["migrate", VM, "--to", to.name(), "--check"]).json();
    let findings = |side: &str| check[side].as_array().unwrap_or_else(|| panic!("{check:#}")).clone();
    let all = [findings("source_findings"), findings("destination_findings")].concat();
    let blockers = all.iter().filter(|one| one["severity"] == "blocker");
    blockers.map(|one| one["code"].as_str().unwrap().to_owned()).collect()
}

/// Returns the number of QEMUs on a host.
pub(crate) fn qemus(host: &RackHost) -> usize {
    // The kernel keeps 15 letters of a program's name.
    host.shell("pgrep --count --exact qemu-system-x86 || true").unwrap().trim().parse().unwrap()
}

/// Returns the number of the kernel's workers for network cards. Linux 6.1 has them as processes, newer ones as threads
/// of QEMU.
pub(crate) fn vhost_threads(host: &RackHost) -> usize {
    host.run(&["ps", "-eLo", "comm"]).unwrap().lines().filter(|name| name.starts_with("vhost-")).count()
}

/// Returns a field of the kernel's status of the only QEMU on a host.
#[track_caller]
pub(crate) fn qemu_status(host: &RackHost, field: &str) -> String {
    let status = host.shell("cat /proc/$(pgrep --exact qemu-system-x86)/status").unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.unwrap_or_else(|| panic!("{field}: {status}")).trim().to_owned()
}

/// Asserts that a guest was moved, and that all of it was compared.
#[track_caller]
pub(crate) fn assert_moved(report: &Value) {
    assert_eq!(report["outcome"], "moved", "{report:#}");
    assert_eq!(report["verification"]["different_chunks"], 0, "{report:#}");
    let bytes = |block: &Value| block["bytes"].as_u64().unwrap();
    let sum = |of: &str| report[of].as_array().into_iter().flatten().map(bytes).sum::<u64>();
    assert_eq!(report["verification"]["compared_bytes"], sum("ram_blocks") + sum("disks"), "{report:#}");
}

/// Asserts that the guest at a host finds everything as it wrote it. Returns its serial line.
#[track_caller]
pub(crate) fn assert_whole(rack: &Rack, host: &RackHost) -> RackSerial {
    let serial = rack.serial_at(host, VM).unwrap();
    let check = serial.check().unwrap();
    assert!(check.ok && check.wrong == 0, "{check:?}");
    serial
}
