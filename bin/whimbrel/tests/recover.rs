//! `whimbrel recover` against real agents and QEMUs: a host is lost for good, or the registry is, and an operator
//! decides. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]
#![allow(unreachable_pub, missing_docs, reason = "what the modules of a test share is seen by them alone")]

mod common;

use std::process::{Child, Stdio};

use common::{Cluster, CommandOutput, DEADLINE, Guest, GuestSpec, Load, Setup, until};
use store::registry::SqliteRegistry;

/// A migration from a to b that is held at a fault point.
struct HeldMigration {
    cluster: Cluster,
    guest: Guest,
    migration: Child,
}

const NOT_DONE: i32 = 3;

impl HeldMigration {
    /// Holds a migration at a fault point, and runs `then` before the agent held there continues.
    fn at(point: &str, witness: bool, then: impl FnOnce(&mut Cluster)) -> Self {
        Self::of(point, witness, |_| {}, then)
    }

    /// Does the same after running `before` on the guest.
    fn of(point: &str, witness: bool, before: impl FnOnce(&Guest), then: impl FnOnce(&mut Cluster)) -> Self {
        let mut cluster = Cluster::with(&Setup { witness, fault_harness: true, ..Setup::impatient() });
        let load = Load { fill_mib: 16, wss_mib: 8, rate_mib_per_s: 10, ..Load::default() };
        let guest = cluster.guest(&GuestSpec { second_monitor: true, ..GuestSpec::tiny("vm1", load) });
        before(&guest);
        cluster.faults.as_ref().unwrap().want(point);
        let mut command = cluster.a.command(&["migrate", "vm1", "--to", "b", "--on-limit", "stop"]);
        let migration = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let held = cluster.faults.as_ref().unwrap().held(DEADLINE).unwrap();
        then(&mut cluster);
        held.release();
        Self { cluster, guest, migration }
    }

    fn wait_for(&self, agent: &str, state: &str) {
        until(&format!("{agent} is in {state}"), || {
            self.cluster.agent(agent).cli(&["migrations"]).ok().json()[0]["state"] == state
        });
    }

    /// Waits until the host reports that an operator has to decide.
    fn wait_for_operator(&self, agent: &str) {
        until(&format!("{agent} is in doubt"), || {
            self.cluster.agent(agent).cli(&["migrations"]).ok().json()[0]["standing"] == "in-doubt"
        });
    }

    /// Gives a decision to `whimbrel recover`, which does not carry it out without the word that the risk is known.
    fn decide(&self, agent: &str, words: &[&str]) {
        let words = [&["recover", "vm1"], words].concat();
        let state = || self.cluster.agent(agent).cli(&["migrations"]).ok().json()[0]["state"].clone();
        let before = state();
        let described = self.cluster.agent(agent).cli(&words);
        assert_eq!(described.code, NOT_DONE, "{described:?}");
        let report = described.json();
        assert_eq!(report["done"], false, "{report:#}");
        assert!(!report["risked"].as_array().unwrap().is_empty(), "{report:#}");
        assert!(report["message"].as_str().unwrap().contains("nothing was done"), "{report:#}");
        assert_eq!(state(), before, "nothing was done");
        let done = self.decide_knowing_risk(agent, &words[2..]);
        assert_eq!(done.code, 0, "{done:?}\n{}", self.cluster.agent(agent).log());
        assert_eq!(done.json()["done"], true, "{done:?}");
    }

    /// Gives a decision with that word.
    fn decide_knowing_risk(&self, agent: &str, words: &[&str]) -> CommandOutput {
        let words = [&["recover", "vm1"], words, &["--accept-risk"]].concat();
        self.cluster.agent(agent).cli(&words)
    }

    /// Asserts that it runs on that host alone, and finds its memory as it left it.
    fn assert_runs_at(&self, agent: &str) {
        let vm = self.cluster.agent(agent).vm("vm1").unwrap();
        assert_eq!(vm["state"], "running", "{vm}\n{}", self.cluster.agent(agent).log());
        let other = if agent == "a" { "b" } else { "a" };
        assert_eq!(qemus(&self.cluster, other), [0_u32; 0], "QEMUs at {other}");
        if agent == "a" {
            let check = self.guest.serial().check().unwrap();
            assert!(check.ok && check.wrong == 0, "{check:?}");
        } else {
            self.cluster.assert_guest_whole(agent, "vm1");
        }
    }

    /// Switches a host on again; open migrations come to their end, and the guest stays at its host.
    fn power_on(&mut self, agent: &str, guest_at: &str) {
        self.cluster.lab.heal().unwrap();
        self.cluster.agent_mut(agent).start();
        self.cluster.agent(agent).wait_settled();
        self.cluster.agent(guest_at).wait_settled();
        self.assert_runs_at(guest_at);
    }
}

impl Drop for HeldMigration {
    fn drop(&mut self) {
        let _ = self.migration.kill();
        let _ = self.migration.wait();
    }
}

fn qemus(cluster: &Cluster, name: &str) -> Vec<u32> {
    let host = if name == "a" { &cluster.lab.a } else { &cluster.lab.b };
    let is_qemu = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let zombie = stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'));
        let exe = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        !zombie && exe.to_string_lossy().contains("qemu-system")
    };
    host.processes().unwrap().into_iter().filter(is_qemu).collect()
}

/// Ends agent and QEMU of a host, as a loss of power does; its journal stays.
fn power_off(cluster: &mut Cluster, name: &str) {
    cluster.agent_mut(name).kill();
    for pid in qemus(cluster, name) {
        lab::kill_pid(pid).unwrap();
    }
}

const COMMITTED: &str = "source/stopped/ready[no-registry]:after-1-journal";
const COMMITTED_WITH_REGISTER: &str = "source/stopped/ready[registry]:after-1-journal";

#[test]
fn without_a_registry_the_source_s_operator_runs_it_here() {
    let mut doubt = HeldMigration::at(COMMITTED, false, |cluster| power_off(cluster, "b"));
    doubt.wait_for("a", "committed");
    let asked = doubt.cluster.a.cli(&["recover", "vm1"]);
    assert_eq!(asked.code, NOT_DONE, "{asked:?}");
    assert_eq!(asked.json()["risked"].as_array().unwrap().len(), 2, "both decisions: {asked:?}");
    doubt.decide("a", &["--run-here"]);
    doubt.assert_runs_at("a");
    doubt.power_on("b", "a");
}

#[test]
fn without_a_registry_the_destination_s_operator_runs_it_there() {
    let mut doubt = HeldMigration::at(COMMITTED, false, |cluster| {
        cluster.lab.cut_both().unwrap();
        power_off(cluster, "a");
    });
    doubt.wait_for("b", "ready");
    doubt.decide("b", &["--run-here"]);
    doubt.assert_runs_at("b");
    doubt.power_on("a", "b");
}

/// Trap 17: only the destination itself still knows that the guest was paused.
#[test]
fn the_destination_s_operator_leaves_a_guest_paused_that_was() {
    let stop = |guest: &Guest| {
        guest.monitor().unwrap().command("stop", &serde_json::json!({})).unwrap();
    };
    let doubt = HeldMigration::of(COMMITTED, false, stop, |cluster| {
        cluster.lab.cut_both().unwrap();
        power_off(cluster, "a");
    });
    doubt.wait_for("b", "ready");
    doubt.decide("b", &["--run-here"]);
    let vm = doubt.cluster.b.vm("vm1").unwrap();
    assert_eq!(vm["state"], "paused", "{vm}\n{}", doubt.cluster.b.log());
}

#[test]
fn a_copy_that_is_given_up_is_gone() {
    let doubt = HeldMigration::at(COMMITTED, false, |cluster| cluster.lab.cut_both().unwrap());
    doubt.wait_for("a", "committed");
    doubt.wait_for("b", "ready");
    doubt.decide("a", &["--discard-copy"]);
    assert!(doubt.cluster.a.vm("vm1").is_none());
    assert_eq!(qemus(&doubt.cluster, "a"), [0_u32; 0]);
    doubt.decide("b", &["--run-here"]);
    doubt.assert_runs_at("b");
}

/// The destination's QEMU is lost when `cont` may have been sent: no host knows whether the guest ran there.
#[test]
fn a_copy_whose_other_may_have_run_is_kept_for_the_operator() {
    let doubt =
        HeldMigration::at("destination/ready/go[no-registry,run]:after-1-journal", false, |cluster| {
            power_off(cluster, "b");
            cluster.b.start();
        });
    doubt.wait_for("b", "crashed");
    let message = "is lost and may have run";
    until("the source has heard of it", || doubt.cluster.a.log().contains(message));
    doubt.wait_for("a", "committed");
    // The destination may repeat it, but it is reported once.
    let seen = || doubt.cluster.faults.as_ref().unwrap().seen();
    let repeats = || seen().get("source/committed/crashed:after-effects").copied().unwrap_or(0);
    let first = repeats();
    until("it is said again", || repeats() > first + 2);
    let log = doubt.cluster.a.log();
    assert_eq!(log.lines().filter(|line| line.contains(message)).count(), 1, "{log}");
    doubt.decide("a", &["--run-here"]);
    doubt.assert_runs_at("a");
}

#[test]
fn an_operator_overrules_a_destination_that_won_the_registry() {
    let won = "destination/acquiring/registry-answered[destination-owns,run]:after-1-journal";
    let mut doubt = HeldMigration::at(won, true, |cluster| power_off(cluster, "b"));
    let owner = |doubt: &HeldMigration| {
        let path = doubt.cluster.witness.as_ref().unwrap().directory.join("state");
        SqliteRegistry::open(&path).unwrap().all().unwrap()[0].1.owner.to_string()
    };
    assert_eq!(owner(&doubt), "b");
    doubt.wait_for("a", "committed");
    // The registry is asked, and refuses.
    let asked = doubt.decide_knowing_risk("a", &["--run-here"]);
    assert_eq!(asked.code, NOT_DONE, "{asked:?}");
    doubt.wait_for("a", "committed");
    doubt.decide("a", &["--run-here", "--overrule-registry"]);
    assert_eq!(owner(&doubt), "a");
    doubt.assert_runs_at("a");
    doubt.power_on("b", "a");
}

#[test]
fn a_registry_that_is_lost_stops_no_operator() {
    let lose = |cluster: &mut Cluster| cluster.witness.as_mut().unwrap().kill();
    // The source waits for the registry to return the VM.
    let mut doubt = HeldMigration::at(COMMITTED_WITH_REGISTER, true, |cluster| {
        lose(cluster);
        power_off(cluster, "b");
    });
    doubt.wait_for("a", "reclaiming");
    doubt.wait_for_operator("a");
    doubt.decide("a", &["--run-here", "--without-registry"]);
    doubt.assert_runs_at("a");
    doubt.power_on("b", "a");
    drop(doubt);

    // The destination was given GO, and waits for the registry before it lets the guest run.
    let point = "destination/ready/go[registry]:after-1-journal";
    let doubt = HeldMigration::at(point, true, |cluster| {
        lose(cluster);
        power_off(cluster, "a");
    });
    doubt.wait_for("b", "acquiring");
    doubt.wait_for_operator("b");
    doubt.decide("b", &["--run-here", "--without-registry"]);
    doubt.assert_runs_at("b");
}
