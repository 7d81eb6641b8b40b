//! A control that has no VMs, for tests of the API and the command line.
//!
//! The outcome of a migration depends on its destination: to `beta` it succeeds, to `tiny` the pre-flight check refuses
//! it, to `broken` it fails on the way, to `limbo` it ends in doubt, and to `far` it goes on until it is cancelled or
//! [`Fake::finish`]ed.

#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "only tests use it")]

mod forecasts;
mod network;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::api::progress::{Phase, Progress, Publisher, Standing, Watcher};
use crate::api::report::{Downtime, Measured, Outcome, Report, Round};
use crate::api::{
    AdoptRequest, Adopted, AgentInfo, CalibrationReport, CancelOutcome, CheckReport, ClaimReport,
    ClaimRequest, Control, Cordon, Epoch, EvacuateHostRequest, Finding, Forecast, ForecastRequest, Forgotten,
    HostEvacuation, HostId, KernelFeature, LeftoverImage, Limits, MigrateRequest, MigrationId,
    MigrationSettings, MigrationStatus, NetworkState, Problem, ProblemKind, RecoverAction, RecoverReport,
    RecoverRequest, Role, RunRequest, Severity, VmDetail, VmName, VmSummary,
};

pub(crate) use forecasts::{calibration, forecast};
pub(crate) use network::network_state;

/// The fake control; see the module.
#[derive(Default)]
pub(crate) struct Fake {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    vms: BTreeMap<String, VmSummary>,
    migrations: BTreeMap<MigrationId, Migration>,
    asked: Vec<String>,
}

struct Migration {
    to: HostId,
    progress: Publisher,
    limits: Limits,
}

pub(crate) fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

pub(crate) fn host(name: &str) -> HostId {
    HostId::new(name).unwrap()
}

fn summary(name: &str) -> VmSummary {
    VmSummary {
        vm: vm(name),
        pid: Some(4711),
        state: "running".into(),
        ram_bytes: 512 << 20,
        qemu_version: "10.0.2".into(),
        migration: None,
    }
}

fn finding(severity: Severity, code: &str, what: &str, advice: &str) -> Finding {
    Finding { severity, code: code.into(), what: what.into(), advice: advice.into() }
}

/// Returns the only image that was left.
pub(crate) fn left_image() -> LeftoverImage {
    LeftoverImage {
        ended: false,
        migration: MigrationId { vm: vm("web1"), epoch: Epoch(3) },
        to: host("beta"),
        disk: "drive0".to_owned(),
        path: "/srv/web1.qcow2".into(),
        used_bytes: 5 << 30,
        blocked_by: None,
    }
}

fn unknown_vm(name: &VmName) -> Problem {
    Problem::new(
        ProblemKind::NotFound,
        format!("no VM {name} on this host"),
        "`whimbrel vm list` lists its VMs",
    )
}

impl Fake {
    /// Creates a control that knows the VMs `web` and `db`.
    pub(crate) fn new() -> Arc<Self> {
        let fake = Self::default();
        for name in ["web", "db"] {
            fake.state.lock().unwrap().vms.insert(name.to_owned(), summary(name));
        }
        Arc::new(fake)
    }

    /// Returns the requests, in order.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.state.lock().unwrap().asked.clone()
    }

    /// Ends a migration to `far`.
    pub(crate) fn finish(&self, name: &str) {
        for (id, migration) in &self.state.lock().unwrap().migrations {
            if id.vm.as_str() == name {
                migration.progress.update(|p| (p.phase, p.standing) = (Phase::Ended, Standing::Done));
            }
        }
    }

    fn note(&self, what: impl Into<String>) {
        self.state.lock().unwrap().asked.push(what.into());
    }

    fn checked(&self, request: &MigrateRequest) -> Result<CheckReport, Problem> {
        if !self.state.lock().unwrap().vms.contains_key(request.vm.as_str()) {
            return Err(unknown_vm(&request.vm));
        }
        let mut report = CheckReport {
            vm: request.vm.clone(),
            from: host("alpha"),
            to: request.to.clone(),
            possible: true,
            ram_kind: Some("memfd".into()),
            source_findings: vec![finding(Severity::Info, "ram", "512 MiB in 1 block", "")],
            destination_findings: Vec::new(),
            forecast: None,
        };
        match request.to.as_str() {
            "beta" | "broken" | "limbo" | "far" => {}
            "tiny" => {
                let advice = "free some, or choose another host";
                report.destination_findings =
                    vec![finding(Severity::Blocker, "no-memory", "tiny has 10 MiB left", advice)];
                report.possible = false;
            }
            other => {
                let advice = "add it under [hosts] of the agent's configuration";
                return Err(Problem::new(ProblemKind::NotFound, format!("no host {other} is known"), advice));
            }
        }
        Ok(report)
    }

    fn status(id: &MigrationId, migration: &Migration) -> MigrationStatus {
        let progress = migration.progress.now();
        MigrationStatus {
            id: id.clone(),
            role: Role::Source,
            from: host("alpha"),
            to: migration.to.clone(),
            state: match progress.standing {
                Standing::Underway => "prepared",
                Standing::Done => "done",
                Standing::Failed | Standing::VmEnded => "aborted",
                Standing::InDoubt => "committed",
            }
            .into(),
            standing: progress.standing,
            message: progress.message.clone(),
            advice: None,
            created: "2026-01-01T00:00:00.000Z".into(),
            updated: "2026-01-01T00:00:01.000Z".into(),
            progress: Some(progress),
        }
    }

    fn with<T>(&self, id: &MigrationId, work: impl FnOnce(&mut Migration) -> T) -> Result<T, Problem> {
        match self.state.lock().unwrap().migrations.get_mut(id) {
            Some(migration) => Ok(work(migration)),
            None => Err(Problem::new(ProblemKind::NotFound, format!("no migration {id} is known here"), "")),
        }
    }
}

impl Control for Fake {
    fn agent(&self) -> AgentInfo {
        AgentInfo {
            version: "0.0.0-fake".into(),
            host: host("alpha"),
            role: "host".into(),
            listen: "127.0.0.1:7740".into(),
            peers: vec![host("beta")],
            registry: None,
            kernel: "6.18.0".into(),
            kernel_features: vec![KernelFeature {
                name: "PAGEMAP_SCAN".into(),
                present: true,
                advice: String::new(),
            }],
            templates: Vec::new(),
            pid: 1,
            cordoned: false,
            controller: None,
        }
    }

    fn vms(&self) -> Result<Vec<VmSummary>, Problem> {
        Ok(self.state.lock().unwrap().vms.values().cloned().collect())
    }

    fn vm(&self, name: &VmName) -> Result<VmDetail, Problem> {
        assert_ne!(name.as_str(), "panic", "as the test wanted it");
        let summary =
            self.state.lock().unwrap().vms.get(name.as_str()).cloned().ok_or_else(|| unknown_vm(name))?;
        Ok(VmDetail {
            summary,
            qmp: Some("/run/web.qmp".into()),
            adopted: "2026-01-01T00:00:00.000Z".into(),
            ram_kind: "anonymous".into(),
            description: serde_json::json!({
                "machine": {
                    "machine_type": "pc-i440fx-7.2", "accelerator": "kvm", "cpus": 2, "cpu_type": "qemu64",
                    "cpu_option": "Skylake-Client",
                },
                "disks": [
                    {"name": "cd0", "file": null},
                    {
                        "name": "disk0", "file": "/srv/web.qcow2", "format": "qcow2", "direct": true,
                        "backing_files": ["/srv/base.qcow2"],
                    },
                ],
                "networks": [{"id": "net0", "kind": "tap", "details": "index=0,type=tap,ifname=web"}],
                "options": [{"name": "nodefaults"}],
            }),
            needs_hosts: vec![host("alpha")],
            missing_pages: None,
            findings: Vec::new(),
        })
    }

    fn adopt(&self, request: AdoptRequest) -> Result<Adopted, Problem> {
        self.note(format!("adopt {}", serde_json::to_string(&request).unwrap()));
        if request.pid == Some(1) {
            return Err(Problem::new(
                ProblemKind::Refused,
                "process 1 is no QEMU",
                "give the process id of a QEMU",
            ));
        }
        let name = request.name.unwrap_or_else(|| vm("adopted"));
        let vm = summary(name.as_str());
        self.state.lock().unwrap().vms.insert(name.as_str().to_owned(), vm.clone());
        let restarts =
            finding(Severity::Warning, "unit-restarts", "web.service restarts it", "set Restart=no");
        Ok(Adopted { vm, findings: vec![restarts] })
    }

    fn run(&self, request: RunRequest) -> Result<Adopted, Problem> {
        self.note(format!("run {}", serde_json::to_string(&request).unwrap()));
        if request.text.contains("bad") {
            let text = format!("{}, line 1: unknown field `bad`", request.path.display());
            return Err(Problem::new(ProblemKind::BadRequest, text, "see docs/vm.example.toml"));
        }
        Ok(Adopted { vm: summary("fresh"), findings: Vec::new() })
    }

    fn forget(&self, name: &VmName) -> Result<Forgotten, Problem> {
        let forgotten = Forgotten { vm: name.clone(), pid: None, released: Some(true) };
        self.state
            .lock()
            .unwrap()
            .vms
            .remove(name.as_str())
            .map(|_| forgotten)
            .ok_or_else(|| unknown_vm(name))
    }

    fn claim(&self, name: &VmName, request: ClaimRequest) -> Result<ClaimReport, Problem> {
        let risked = vec!["two of it".to_owned()];
        Ok(ClaimReport { vm: name.clone(), owner: None, risked, done: request.accept_risk })
    }

    fn forecast(&self, request: ForecastRequest) -> Result<Forecast, Problem> {
        self.note(format!("forecast {}", serde_json::to_string(&request).unwrap()));
        let checked = self.checked(&request.migration)?;
        if !checked.possible {
            let problem = Problem::new(ProblemKind::Refused, "pre-flight says no", "see what was found");
            return Err(problem.with_findings(checked.destination_findings));
        }
        Ok(forecast(&request.migration))
    }

    fn calibration(&self) -> Result<CalibrationReport, Problem> {
        Ok(calibration())
    }

    fn check(&self, request: MigrateRequest) -> Result<CheckReport, Problem> {
        self.note(format!("check {}", serde_json::to_string(&request).unwrap()));
        let mut report = self.checked(&request)?;
        report.forecast = (request.forecast && report.possible).then(|| Box::new(forecast(&request)));
        Ok(report)
    }

    fn migrate(&self, request: MigrateRequest) -> Result<MigrationStatus, Problem> {
        self.note(format!("migrate {}", serde_json::to_string(&request).unwrap()));
        let checked = self.checked(&request)?;
        if !checked.possible {
            let problem = Problem::new(ProblemKind::Refused, "pre-flight says no", "see what was found");
            return Err(problem.with_findings(checked.destination_findings));
        }
        let progress = Publisher::new();
        progress.update(|p| {
            *p = Progress {
                phase: Phase::PreCopy,
                round: 2,
                ram_bytes: 512 << 20,
                round_bytes: 64 << 20,
                remaining_bytes: 16 << 20,
                sent_bytes: 560 << 20,
                rate_bytes_per_s: 1 << 30,
                dirty_rate_bytes_per_s: 100 << 20,
                expected_downtime_us: Some(12_000),
                elapsed_us: 800_000,
                ..Progress::default()
            }
        });
        let end = match request.to.as_str() {
            "beta" => Some((Standing::Done, Phase::Ended, None)),
            "broken" => Some((Standing::Failed, Phase::Ended, Some("the destination's disk is full"))),
            "limbo" => Some((Standing::InDoubt, Phase::InDoubt, Some("beta does not answer"))),
            _ => None,
        };
        if let Some((standing, phase, message)) = end {
            progress.update(|p| {
                (p.standing, p.phase, p.message) = (standing, phase, message.map(str::to_owned));
                p.downtime_us = (standing == Standing::Done).then_some(9_400);
            });
        }
        let mut state = self.state.lock().unwrap();
        let epoch = state.migrations.keys().filter(|id| id.vm == request.vm).map(|id| id.epoch).max();
        let id = MigrationId { vm: request.vm, epoch: epoch.unwrap_or(Epoch(6)).next() };
        let migration = Migration { to: request.to, progress, limits: Limits::default() };
        let status = Self::status(&id, &migration);
        state.migrations.insert(id, migration);
        Ok(status)
    }

    fn migrations(&self) -> Result<Vec<MigrationStatus>, Problem> {
        let state = self.state.lock().unwrap();
        Ok(state.migrations.iter().rev().map(|(id, migration)| Self::status(id, migration)).collect())
    }

    fn migration(&self, id: &MigrationId) -> Result<MigrationStatus, Problem> {
        self.with(id, |migration| Self::status(id, migration))
    }

    fn watch(&self, id: &MigrationId) -> Result<Watcher, Problem> {
        self.with(id, |migration| migration.progress.watch())
    }

    fn report(&self, id: &MigrationId) -> Result<Report, Problem> {
        let (to, progress) = self.with(id, |migration| (migration.to.clone(), migration.progress.now()))?;
        let settings = MigrationSettings { max_downtime_ms: 30, ..MigrationSettings::default() };
        let mut report = Report::begin(id.clone(), host("alpha"), to, settings);
        report.rounds = vec![Round { round: 1, dirty_pages: 131_072, ..Round::default() }];
        match progress.standing {
            Standing::Underway => {}
            Standing::Done => {
                let measured = Measured { total_us: 9_400, stop_us: 400, ..Measured::default() };
                report.downtime = Some(Downtime::from_measured(measured));
                report.end(Outcome::Moved, None, 1_200_000);
            }
            Standing::Failed => report.end(Outcome::Aborted, progress.message, 900_000),
            Standing::VmEnded => report.end(Outcome::VmEnded, progress.message, 900_000),
            Standing::InDoubt => report.outcome = Outcome::InDoubt,
        }
        Ok(report)
    }

    fn cancel(&self, id: &MigrationId) -> Result<CancelOutcome, Problem> {
        self.note(format!("cancel {id}"));
        self.with(id, |migration| match migration.progress.now().standing {
            Standing::Underway => {
                migration.progress.update(|p| {
                    (p.phase, p.standing) = (Phase::Ended, Standing::Failed);
                    p.message = Some("cancelled".into());
                });
                CancelOutcome::Cancelled
            }
            standing @ Standing::InDoubt => CancelOutcome::TooLate { standing, state: "committed".into() },
            standing => CancelOutcome::AlreadyOver { standing },
        })
    }

    fn recover(&self, id: &MigrationId, request: RecoverRequest) -> Result<RecoverReport, Problem> {
        self.note(format!("recover {id} {}", serde_json::to_string(&request).unwrap()));
        self.with(id, |migration| {
            let done = request.action != RecoverAction::Ask && request.accept_risk;
            if done {
                migration.progress.update(|p| (p.phase, p.standing) = (Phase::Ended, Standing::Failed));
            }
            let run_here = "--run-here: the guest continues here; risk: if beta runs it too, both write to the same disks";
            let discard_copy =
                "--discard-copy: the copy kept here is discarded; risk: if beta cannot run it, it is lost";
            let risked = match request.action {
                RecoverAction::Ask => vec![run_here.to_owned(), discard_copy.to_owned()],
                _ => vec![run_here.to_owned()],
            };
            RecoverReport {
                status: Self::status(id, migration),
                known: vec!["the migration was committed to beta".into(), "beta does not answer".into()],
                risked,
                done,
                message: if done { "the guest runs here again" } else { "still in doubt" }.into(),
            }
        })
    }

    fn set_limits(&self, id: &MigrationId, limits: Limits) -> Result<Limits, Problem> {
        self.with(id, |migration| {
            migration.limits.bandwidth_bytes_per_s =
                limits.bandwidth_bytes_per_s.or(migration.limits.bandwidth_bytes_per_s);
            migration.limits.clone()
        })
    }

    fn images(&self) -> Result<Vec<LeftoverImage>, Problem> {
        Ok(vec![left_image()])
    }

    fn remove_images(&self, vm: &VmName, epoch: Option<u64>) -> Result<Vec<LeftoverImage>, Problem> {
        self.note(format!("remove images of {vm} {epoch:?}"));
        match left_image() {
            image if image.migration.vm == *vm && epoch.is_none_or(|epoch| epoch == 3) => Ok(vec![image]),
            _ => Err(Problem::new(ProblemKind::NotFound, format!("{vm} has left no image here"), "")),
        }
    }

    fn network(&self) -> Result<NetworkState, Problem> {
        Ok(network_state())
    }

    fn set_cordoned(&self, cordoned: bool) -> Result<Cordon, Problem> {
        Ok(Cordon { host: host("alpha"), cordoned })
    }

    fn ask_for_evacuation(&self, _: &EvacuateHostRequest) -> Result<HostEvacuation, Problem> {
        Err(Problem::new(ProblemKind::Unavailable, "no controller", ""))
    }

    fn evacuation(&self) -> Result<HostEvacuation, Problem> {
        self.ask_for_evacuation(&EvacuateHostRequest::default())
    }

    fn metrics(&self) -> Result<String, Problem> {
        Ok("whimbrel_vms 1\n".to_owned())
    }

    fn release_network(&self, vm: &VmName, all: bool) -> Result<Vec<MigrationId>, Problem> {
        self.note(format!("release the network of {vm}, all: {all}"));
        Ok(network_state().redirections.into_iter().map(|standing| standing.migration).collect())
    }

    fn remove_ended_images(&self, vm: &VmName) -> Result<Vec<LeftoverImage>, Problem> {
        self.note(format!("remove images of {vm}, which ended"));
        let image = LeftoverImage { ended: true, ..left_image() };
        if image.migration.vm == *vm {
            Ok(vec![image])
        } else {
            Err(Problem::new(ProblemKind::NotFound, format!("{vm} has left no image here"), ""))
        }
    }
}
