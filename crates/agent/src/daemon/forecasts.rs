//! Forecasts of migrations: the check, the measurements as far as they are needed, the simulation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use engine::forecast::Calibration;
use engine::forecast::history::PathMemory;
use proto::{HostId, VmName};
use tracing::{debug, info, warn};

use super::Daemon;
use super::drive::{CheckedMigration, internal, refused};
use api::report::{rfc3339, unix_ms_now};
use api::{CalibrationReport, Forecast, ForecastRequest, MigrateRequest, VmMeasurement};
use api::{Problem, ProblemKind};
use host::measurement::{self, MeasureError};
use host::{link_rate, vms};
use migrate::source::{self, ForecastBasis, Goals, SimulatedForecast};

/// Pause between two looks at the VMs of this host, for those that are to be measured.
const LOOK_PAUSE: Duration = Duration::from_mins(1);

/// Measures all VMs at the interval of the configuration, as long as the agent runs.
pub(super) fn measure_regularly(daemon: &Arc<Daemon>) -> io::Result<()> {
    let longest_ms = daemon.context.config.forecast.measure_every_s.saturating_mul(1000);
    if longest_ms == 0 {
        return Ok(());
    }
    let daemon = Arc::downgrade(daemon);
    let look = move || {
        let mut failed = FailedAttempts::default();
        while let Some(daemon) = daemon.upgrade() {
            daemon.measure_all(longest_ms, &mut failed);
            drop(daemon);
            thread::sleep(LOOK_PAUSE);
        }
    };
    thread::Builder::new().name("forecasts".to_owned()).spawn(look).map(drop)
}

/// VMs and links that could not be measured, with the times of the attempts: each attempt costs the VM as much as a
/// measurement.
#[derive(Debug, Default)]
struct FailedAttempts {
    vms: BTreeMap<VmName, Instant>,
    links: BTreeMap<HostId, Instant>,
}

impl FailedAttempts {
    /// Forgets attempts that are older than an interval: what they failed at is tried again.
    fn forget_old(&mut self, longest: Duration, now: Instant) {
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < longest;
        self.vms.retain(|_, at| is_recent(at));
        self.links.retain(|_, at| is_recent(at));
    }
}

/// Returns true if a failed measurement of a VM has reached the VM. A VM that is in a migration, or is measured for
/// another forecast, was left alone.
fn was_attempted(problem: &Problem) -> bool {
    problem.kind != ProblemKind::Conflict
}

impl Daemon {
    /// Measures the links and the VMs whose last measurement is older than this, while no migration is under way, and
    /// those that could not be measured no earlier than after the same time.
    fn measure_all(&self, longest_ms: u64, failed: &mut FailedAttempts) {
        failed.forget_old(Duration::from_millis(longest_ms), Instant::now());
        let config = &self.context.config;
        let is_host = |host: &&HostId| config.registry.as_ref() != Some(*host);
        for host in config.peers().filter(is_host).filter(|_| self.drivers().is_empty()) {
            if failed.links.contains_key(host) {
                continue;
            }
            // Failures are logged there.
            if self.path(host, None, false).is_ok_and(|(_, problem)| problem.is_some()) {
                failed.links.insert(host.clone(), Instant::now());
            }
        }
        let vms = self.context.journal.vms().unwrap_or_else(|error| {
            warn!(error = crate::chain(&error), "cannot read the VMs that are to be measured");
            Vec::new()
        });
        for vm in vms.into_iter().map(|record| record.vm) {
            if !self.drivers().is_empty() {
                return;
            }
            if failed.vms.contains_key(&vm) {
                continue;
            }
            match self.measurement(&vm, Some(longest_ms)) {
                Ok(_) => debug!(%vm, "its measurement is recent"),
                // It may have ended, or be moved.
                Err(problem) => {
                    debug!(%vm, error = problem.error, "the VM is not measured");
                    if was_attempted(&problem) {
                        failed.vms.insert(vm, Instant::now());
                    }
                }
            }
        }
    }

    /// Forecasts a migration, if it is possible.
    pub(super) fn forecast_request(&self, request: &ForecastRequest) -> Result<Forecast, Problem> {
        let migration = MigrateRequest { check_only: true, ..request.migration.clone() };
        let checked = self.check_in_full(&migration)?;
        if !checked.report.possible {
            let found = [checked.report.source_findings, checked.report.destination_findings].concat();
            return Err(refused(&migration.vm, found));
        }
        self.forecast_checked(&checked, request.fresh)
    }

    /// Forecasts a migration that is possible. VM and link are measured if they were not measured lately, or if `fresh`
    /// is true.
    pub(super) fn forecast_checked(
        &self,
        checked: &CheckedMigration,
        fresh: bool,
    ) -> Result<Forecast, Problem> {
        let CheckedMigration { request, report, disks, acceptance } = checked;
        let goals = Goals::new(request, &self.context.config);
        let longest_ms = (!fresh).then_some(VmMeasurement::LONGEST_AGE_MS);
        let measurement = self.measurement(&request.vm, longest_ms)?;
        let (path, link_problem) = self.path(&request.to, goals.bandwidth_bytes_per_s(), fresh)?;
        let basis = ForecastBasis {
            measurement: &measurement,
            path: &path,
            copied_bytes: acceptance.as_ref().and_then(|acceptance| source::copied_bytes(disks, acceptance)),
            accept: acceptance
                .as_ref()
                .map_or(Duration::ZERO, |acceptance| Duration::from_micros(acceptance.qemu_start_us)),
        };
        let SimulatedForecast { facts, kind, simulated, found } =
            source::forecast(&self.context, &request.to, &goals, &basis);
        info!(vm = %request.vm, to = %request.to, forecast = %found, "made a forecast");
        Ok(Forecast {
            vm: report.vm.clone(),
            from: report.from.clone(),
            to: report.to.clone(),
            made: rfc3339(unix_ms_now()),
            found,
            simulated,
            kind,
            link: path.link(),
            measurement,
            link_problem,
            facts,
            accuracy: self
                .context
                .journal
                .calibration()
                .as_ref()
                .map(Calibration::accuracy)
                .unwrap_or_default(),
        })
    }

    /// Returns the record of all forecasts.
    pub(super) fn forecast_record(&self) -> Result<CalibrationReport, Problem> {
        let mut forecasts = self.context.journal.outcomes().map_err(|error| internal(&error))?;
        let mut calibration = Calibration::default();
        for forecast in &forecasts {
            calibration.learn(forecast.record.clone());
        }
        forecasts.reverse();
        Ok(CalibrationReport { accuracy: calibration.accuracy(), forecasts })
    }

    /// Returns the measurement of a VM: the last one, if it is not older than `longest_ms`, or a new one.
    fn measurement(&self, vm: &VmName, longest_ms: Option<u64>) -> Result<VmMeasurement, Problem> {
        let journal = &self.context.journal;
        // A migration that begins later ends the measurement.
        let exclusive = self.context.names.exclusive(vm);
        let record = self.known(vm)?;
        self.check_not_in_migration(vm)?;
        let process = (record.pid, record.start_time_ticks);
        let last = journal.measurement(vm).unwrap_or_else(|error| {
            warn!(%vm, error = crate::chain(&error), "cannot read the last measurement");
            None
        });
        let is_recent = |last: &VmMeasurement| {
            longest_ms.is_some_and(|longest| last.is_of(process, unix_ms_now(), longest))
        };
        if let Some(last) = last.filter(is_recent) {
            return Ok(last);
        }
        let running = self.measurements.begin(vm).ok_or_else(|| {
            let error = format!("{vm} is being measured for another forecast");
            Problem::new(ProblemKind::Conflict, error, "try again in some seconds")
        })?;
        drop(exclusive);
        let measured = measurement::measure(&self.context, &record, &running);
        drop(running);
        let measured = measured.map_err(|error| not_measured(vm, &error))?;
        info!(%vm, tracked_us = measured.tracked_us, cost_us = measured.cost_us(), "measured the VM");
        if let Err(error) = journal.put_measurement(vm, &measured) {
            warn!(%vm, error = crate::chain(&error), "cannot record the measurement in the journal");
        }
        Ok(measured)
    }

    /// Returns what is known of the path to a host, and the reason for which the link was not measured, if it was to be.
    fn path(
        &self,
        to: &HostId,
        cap: Option<u64>,
        fresh: bool,
    ) -> Result<(PathMemory, Option<String>), Problem> {
        let journal = &self.context.journal;
        let mut path = journal.path_memory(to).map_err(|error| internal(&error))?;
        if path.is_fresh(unix_ms_now()) && !fresh {
            return Ok((path, None));
        }
        if !self.drivers().is_empty() {
            let problem = "another migration uses the links of this host, so the link is not measured now";
            return Ok((path, Some(problem.to_owned())));
        }
        match link_rate::measure(&self.context, to, cap) {
            Ok(measured) => {
                path.measured = Some(measured);
                // With a cap this may not be the rate of the link.
                let keep = |memory: &mut PathMemory| memory.measured = Some(measured);
                if cap.is_none()
                    && let Err(error) = journal.change_path_memory(to, keep)
                {
                    warn!(%to, error = crate::chain(&error), "cannot record the measurement in the journal");
                }
                Ok((path, None))
            }
            Err(error) => {
                debug!(%to, error = crate::chain(&error), "cannot measure the link");
                Ok((path, Some(crate::chain(&error))))
            }
        }
    }
}

fn not_measured(vm: &VmName, error: &MeasureError) -> Problem {
    match error {
        MeasureError::Interrupted => {
            let advice = format!("`whimbrel watch {vm}` shows the migration, and when it is expected to end");
            Problem::caused_by(ProblemKind::Conflict, error, advice)
        }
        error => Problem::caused_by(ProblemKind::Unavailable, error, vms::advice(vm)),
    }
}

#[cfg(test)]
mod tests {
    use host::testing::{World, host, vm};

    use super::*;

    #[test]
    fn what_cannot_be_measured_is_left_alone_for_a_while() {
        let hour = Duration::from_hours(1);
        let now = Instant::now();
        let mut failed = FailedAttempts::default();
        failed.vms.insert(vm(), now);
        failed.links.insert(host("b"), now + hour / 2);
        failed.forget_old(hour, now + Duration::from_secs(3599));
        assert_eq!((failed.vms.len(), failed.links.len()), (1, 1));
        failed.forget_old(hour, now + hour);
        assert_eq!((failed.vms.len(), failed.links.len()), (0, 1));
    }

    #[test]
    fn links_that_cannot_be_measured_are_remembered() {
        let world = World::new();
        let daemon = Daemon::new(Arc::clone(&world.context), None);
        let mut failed = FailedAttempts::default();
        thread::scope(|scope| {
            scope.spawn(|| daemon.measure_all(3_600_000, &mut failed));
            // The peer answers nothing.
            drop(world.accept());
        });
        let first = failed.links[&host("b")];
        daemon.measure_all(3_600_000, &mut failed);
        assert_eq!(failed.links[&host("b")], first, "it was not tried again");
    }

    #[test]
    fn a_vm_in_a_migration_was_not_attempted() {
        assert!(!was_attempted(&Problem::new(ProblemKind::Conflict, "in a migration", "")));
        assert!(was_attempted(&Problem::new(ProblemKind::Unavailable, "taken", "")));
    }
}
