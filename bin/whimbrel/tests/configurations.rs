//! Guests of random configurations: each migrates there and back, or is refused by `--check` with a true reason. `make
//! test` tries 20, `make soak` 200 more; `WHIMBREL_SEED` draws others. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::draw::{Generator, seed};
use common::{Cluster, Guest, GuestSpec, Load, QemuVersion};
use lab::configurations::{DeviceType, PluggedDevice, device_types, plug};
use serde_json::Value;

/// Configurations of one machine that `make test` and `make soak` try.
const FEW: usize = 10;
const MANY: usize = 100;
/// Devices of one configuration.
const DEVICES: usize = 4;

/// Counts of the configurations' outcomes.
#[derive(Default)]
struct Tally {
    moved: usize,
    /// Those of them that migrated with all of their devices.
    moved_as_drawn: usize,
    refused: BTreeMap<String, usize>,
    /// Devices with which QEMU itself does not start as they are plugged here, and its errors.
    not_started: BTreeMap<String, String>,
    occurred: BTreeSet<String>,
    /// Devices with which the guest does not boot.
    silent: Vec<String>,
    /// Configurations that failed.
    failed: Vec<String>,
}

/// A guest on its way through the test.
struct Trial<'a> {
    cluster: &'a Cluster,
    qemu: QemuVersion,
    machine: &'static str,
}

impl Trial<'_> {
    fn spec(&self, devices: &[PluggedDevice]) -> GuestSpec {
        let load = Load { fill_mib: 4, wss_mib: 2, rate_mib_per_s: 2, ..Load::default() };
        // Where memory may be plugged, Linux uses 64 MiB for its bounce buffers.
        let tiny = GuestSpec::tiny("vm1", load);
        let mut spec = GuestSpec { qemu: self.qemu, memory_mib: 256, ..tiny };
        self.machine.clone_into(&mut spec.machine);
        spec.extra = devices.iter().flat_map(|device| device.words.clone()).collect();
        spec
    }

    fn start(&self, devices: &[PluggedDevice]) -> Result<Guest, String> {
        let started = Guest::start(&self.cluster.lab.a, &self.cluster.environment, &self.spec(devices));
        started.map_err(|error| {
            let log = self.cluster.lab.a.directory().join("vm1/qemu.log");
            let message = fs::read_to_string(log).unwrap_or_default();
            let last = message.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
            format!("{error}: {last}")
        })
    }

    /// Returns the devices with which QEMU starts.
    fn startable(&self, devices: Vec<PluggedDevice>, tally: &mut Tally) -> Vec<PluggedDevice> {
        if self.start(&devices).is_ok() {
            return devices;
        }
        let mut kept: Vec<PluggedDevice> = Vec::new();
        for device in devices {
            let with_it = [&kept[..], std::slice::from_ref(&device)].concat();
            match self.start(&with_it) {
                Ok(_) => kept = with_it,
                Err(message) if kept.is_empty() => drop(tally.not_started.insert(device.name, message)),
                // Not beside the devices before it.
                Err(_) => {}
            }
        }
        kept
    }

    /// Returns the blockers that `--check` finds.
    fn blockers(&self) -> Vec<Value> {
        let check = self.cluster.a.cli(&["migrate", "vm1", "--to", "b", "--check"]).json();
        let of = |side: &str| check[side].as_array().unwrap_or_else(|| panic!("{check:#}")).clone();
        let all = [of("source_findings"), of("destination_findings")].concat();
        let blockers: Vec<_> = all.into_iter().filter(|one| one["severity"] == "blocker").collect();
        assert_eq!(check["possible"], blockers.is_empty(), "{check:#}");
        blockers
    }

    /// Migrates a guest with such devices there and back, or returns those that `--check` names.
    fn run(&self, devices: &[PluggedDevice], tally: &mut Tally) -> Option<Vec<PluggedDevice>> {
        let guest = self.start(devices).unwrap();
        let ticks = guest.wait_for_load(4).is_ok();
        let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
        println!("{}: {}", self.machine, names.join(" "));
        if !ticks {
            tally.silent.push(names.join(" "));
        }
        let cluster = self.cluster;
        cluster.a.cli(&["vm", "adopt", "--pid", &guest.pid().to_string()]).ok();
        let blockers = self.blockers();
        if blockers.is_empty() {
            for (from, to) in [("a", "b"), ("b", "a")] {
                cluster.migrate("vm1", from, to, &[]);
                if ticks {
                    cluster.assert_guest_whole(to, "vm1");
                }
            }
            tally.moved += 1;
            let pid = cluster.a.vm("vm1").unwrap()["pid"].as_u64().unwrap() as u32;
            lab::kill_pid(pid).unwrap();
        }
        drop(guest);
        cluster.a.cli(&["vm", "forget", "vm1"]).ok();
        fs::remove_dir_all(cluster.lab.a.directory().join("vm1")).unwrap();
        if blockers.is_empty() {
            return None;
        }
        for blocker in &blockers {
            *tally.refused.entry(blocker["code"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        let words = |one: &Value| [one["what"].to_string(), one["advice"].to_string()];
        let text = blockers.iter().flat_map(words).collect::<Vec<_>>().join("\n");
        println!("refused: {text}");
        let is_named = |device: &&PluggedDevice| {
            let id =
                device.words.last().unwrap().split(',').nth(1).unwrap().trim_start_matches("id=").to_owned();
            let of_it = |word: &str| {
                // QEMU's own name for a device may be the beginning of its type's name.
                let is_it =
                    |one: &str| one == word || (one.len() > 3 && word.starts_with(&format!("{one}-")));
                text.split(|at: char| !(at.is_alphanumeric() || "-_.".contains(at))).any(is_it)
            };
            let number = &id[1..];
            of_it(&device.name)
                || of_it(&id)
                || ["r", "f", "l", "n", "d"].iter().any(|kind| of_it(&format!("{kind}{number}")))
        };
        let (named, rest): (Vec<_>, Vec<_>) = devices.iter().partition(is_named);
        assert!(!named.is_empty(), "no device is named: {blockers:#?}\n{devices:#?}");
        Some(rest.into_iter().cloned().collect())
    }
}

fn configurations(machine: &'static str, count: usize) {
    let version = QemuVersion::Installed;
    let mut cluster = Cluster::new();
    let Ok(qemu) = cluster.environment.qemu(version) else { return };
    let mut draw = Generator(seed(0x5eed) ^ machine.len() as u64);
    let all = device_types(&qemu).unwrap();
    assert!(all.len() > 150, "{}", all.len());
    let mut deck: Vec<DeviceType> = Vec::new();
    let mut tally = Tally::default();
    for _ in 0..count {
        let directory = cluster.lab.shared_directory().unwrap();
        let mut devices = Vec::new();
        while devices.len() < DEVICES {
            if deck.is_empty() {
                deck.clone_from(&all);
            }
            let device = deck.swap_remove(draw.below(deck.len()));
            tally.occurred.insert(device.name.clone());
            devices.push(plug(&device, devices.len(), &directory).unwrap());
        }
        let trial = Trial { cluster: &cluster, qemu: version, machine };
        let devices = trial.startable(devices, &mut tally);
        let tried = catch_unwind(AssertUnwindSafe(|| {
            let rest = trial.run(&devices, &mut tally);
            tally.moved_as_drawn += usize::from(rest.is_none());
            if let Some(rest) = rest {
                let second = trial.run(&rest, &mut tally);
                assert!(second.is_none(), "without what was named it is refused again");
            }
        }));
        if tried.is_err() {
            let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
            tally.failed.push(format!("{machine}: {}", names.join(" ")));
            // Remains of the failed one.
            drop(cluster);
            cluster = Cluster::new();
        }
    }
    println!(
        "{count} configurations of {machine}: {} moved as they were, refused: {:?}; QEMU does not start: {:#?}, the guest does \
         not boot: {:#?}",
        tally.moved_as_drawn, tally.refused, tally.not_started, tally.silent
    );
    assert!(tally.failed.is_empty(), "{:#?}", tally.failed);
    assert_eq!(tally.moved, count, "one that was refused moves without what was named");
    if count == MANY {
        assert_eq!(tally.occurred.len(), all.len(), "every device occurs");
        assert!(
            10 * tally.moved_as_drawn >= 7 * count,
            "{} of {count} move as they are",
            tally.moved_as_drawn
        );
    }
}

#[test]
fn a_few_configurations_of_pc() {
    configurations("pc", FEW);
}

#[test]
fn a_few_configurations_of_q35() {
    configurations("q35", FEW);
}

#[test]
#[ignore = "takes half an hour"]
fn many_configurations_of_pc() {
    configurations("pc", MANY);
}

#[test]
#[ignore = "takes half an hour"]
fn many_configurations_of_q35() {
    configurations("q35", MANY);
}
