//! Measuring: turn by turn, contender by contender.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::toml;

use super::case::Case;
use super::contender::Contender;
use super::echo_client::EchoClient;
use super::guest_clock::GuestClock;
use super::mover::{MoveInput, MoveOutcome, Moved};
use super::neighbours::{NeighbourClocks, Neighbours};
use super::ours::{by_whimbrel, runs};
use super::program::{Disturbance, Moments, UNDISTURBED, compute_disturbance};
use super::program_run::ProgramRun;
use super::qemu::{by_qemu, credentials};
use super::result::{CaseResult, Measured, Provenance, Run, Spread};
use super::subject::{SavedGuest, VM, boot, clear};
use super::tracked;
use super::usage::{Meter, peak_bytes, processes_of, reset_peak, sent_so_far};
use crate::agents::Agents;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig};
use crate::migrating::{adopt, forget};
use crate::pki::Pki;
use crate::run::Daemon;
use crate::serial::Serial;

/// A laboratory with agents, for one case.
#[derive(Debug)]
pub struct Bench {
    case: Case,
    environment: Environment,
    whimbrel: PathBuf,
    subject: SavedGuest,
    neighbours: Option<Neighbours>,
    /// Number of measurements so far.
    measurements: Cell<u8>,
    agents: Agents,
    // Ended before the laboratory is taken down.
    _daemons: Vec<Daemon>,
    lab: Lab,
}

impl Bench {
    /// Makes a laboratory for a case, with agents by the program `whimbrel`; boots the guest and saves it.
    pub fn prepare(prefix: &str, case: Case, whimbrel: &Path) -> Result<Self> {
        case.check()?;
        let environment = Environment::discover();
        let lab = Lab::up(&LabConfig::new(prefix))?;
        lab.set_rate(case.link_bytes_per_s)?;
        lab.set_packets(&case.packets)?;
        let mut agents = Agents::new(&lab, &environment, whimbrel).with_qemu(case.qemu);
        if !case.tls {
            agents = agents.plain();
        }
        if let Some(percent) = case.guest_wait_percent {
            agents = agents.with(toml! { tuning = { guest_wait_percent = percent } });
        }
        agents.write()?;
        let daemons = agents.start_all()?;
        if case.tls {
            let pki = Pki::new(&lab.a.directory().with_file_name("qemu-pki"))?;
            for host in [&lab.a, &lab.b] {
                credentials(host, &pki.issue(host.name(), &[host.address().into()])?)?;
            }
        }
        let subject = boot(&lab, &environment, &case)?;
        if case.tracked_connections > 0 {
            tracked::add_clients(&lab.router)?;
            [&lab.a, &lab.b].into_iter().try_for_each(tracked::begin)?;
        }
        let neighbours = case.neighbours.then(|| Neighbours::start(&lab, &environment, &case)).transpose()?;
        let whimbrel = whimbrel.to_owned();
        Ok(Self {
            case,
            environment,
            whimbrel,
            subject,
            neighbours,
            measurements: Cell::new(0),
            agents,
            _daemons: daemons,
            lab,
        })
    }

    /// Lets all contenders migrate the guest in `turns` turns, after a warm-up; `say` receives each run.
    pub fn run(&self, contenders: &[Contender], turns: u32, mut say: impl FnMut(&Run)) -> Result<CaseResult> {
        let made = Provenance::now(&self.environment, self.case.qemu)?;
        let mut result = CaseResult { case: self.case.clone(), made, runs: Vec::new() };
        let movers: Vec<_> =
            contenders.iter().copied().filter(|one| *one != Contender::NoMigration).collect();
        for turn in 0..=turns {
            let mut runs = Vec::new();
            // Each contender is the first in one of the turns.
            let first = turn as usize % movers.len().max(1);
            for &contender in movers[first..].iter().chain(&movers[..first]) {
                runs.push(self.measure(contender, turn, Duration::ZERO)?);
                runs.last().into_iter().for_each(&mut say);
            }
            if contenders.contains(&Contender::NoMigration) {
                // Watched for as long as the migrated ones: a longer time has a longer stall.
                let totals =
                    runs.iter().filter_map(|run| run.measured.as_ref()).map(|measured| measured.total_ms);
                let window_ms = Spread::of(totals).map_or(0.0, |spread| spread.median);
                runs.push(self.measure(
                    Contender::NoMigration,
                    turn,
                    Duration::from_secs_f64(window_ms / 1e3),
                )?);
                runs.last().into_iter().for_each(&mut say);
            }
            if turn > 0 {
                result.runs.extend(runs);
            }
        }
        Ok(result)
    }

    /// Migrates the guest, or leaves it alone for as long as `window`.
    fn measure(&self, contender: Contender, turn: u32, window: Duration) -> Result<Run> {
        let guest = self.subject.start(&self.lab.a, &self.environment)?;
        let program_run = self.case.has_end().then(|| ProgramRun::begin(guest.serial()));
        // Adoption happens once, long before a migration, and is no part of it.
        if contender.is_whimbrel() {
            adopt(&self.agents, &self.lab.a, &guest)?;
        }
        let client = self.case.client.then(|| EchoClient::start(&self.lab.router)).transpose()?;
        let clock = GuestClock { serial: guest.serial(), is_reported: self.case.has_load() };
        let settled = clock.now()?;
        let neighbours = self.neighbours.as_ref().map(NeighbourClocks::settled).transpose()?;
        clock.wait_until(settled + UNDISTURBED)?;
        // Right before the request: the machine's host may reclaim free memory soon.
        self.subject.warm_memory(&self.lab.b, &self.environment)?;

        if self.case.tracked_connections > 0 {
            // Each measurement has connections of its own.
            let run = self.measurements.get();
            self.measurements.set(run.wrapping_add(1));
            tracked::fill(&self.lab.router, self.case.tracked_connections, run)?;
        }
        client.iter().for_each(EchoClient::forget);
        let requested = clock.now()?;
        let beside = neighbours.map(NeighbourClocks::requested).transpose()?;
        let finish = |at: Option<&Serial>| program_run.map(|program_run| program_run.finish(at)).transpose();
        let mut run = Run::new(contender, turn);
        if contender == Contender::NoMigration {
            let moments = Moments::new(settled, requested, requested + window, requested + window);
            run.disturbance = Self::disturbance(&clock, moments)?;
            run.noises = beside.map(|beside| beside.noises_for(window)).transpose()?;
            run.client = client.map(EchoClient::finish).transpose()?;
            run.program = finish(None)?;
        } else {
            match self.move_guest(contender, &guest)? {
                None => run.program = finish(None)?,
                Some((measured, moved)) => {
                    run.client = client.map(EchoClient::finish).transpose()?;
                    let ended = beside.as_ref().map(|beside| beside.at(moved.resumed)).transpose()?;
                    let clock = GuestClock { serial: &moved.serial, is_reported: self.case.has_load() };
                    let resumed = clock.at(moved.resumed)?.max(requested);
                    // Its last page arrived a moment ago.
                    let complete = if moved.has_switched_to_post_copy == Some(true) {
                        clock.now()?
                    } else {
                        Duration::ZERO
                    };
                    let moments = Moments::new(settled, requested, resumed, complete);
                    run.disturbance = Self::disturbance(&clock, moments)?;
                    run.noises = beside.zip(ended).map(|(beside, at)| beside.noises(at)).transpose()?;
                    if turn == 0 && self.case.has_load() && !moved.serial.check()?.ok {
                        return Err(Error::Config(format!("{contender}: memory is wrong after the move")));
                    }
                    run.measured = Some(measured);
                    run.program = finish(Some(&moved.serial))?;
                }
            }
        }
        if turn == 0 && run.program.is_some_and(|program| !program.verified) {
            return Err(Error::Config(format!("{contender}: what the guest computed is wrong")));
        }
        drop(guest);
        forget(&self.agents, [&self.lab.a, &self.lab.b], VM);
        clear([&self.lab.a, &self.lab.b], VM)?;
        Ok(run)
    }

    /// Migrates the guest. Returns `None` if the migration was given up.
    fn move_guest(&self, contender: Contender, guest: &Guest) -> Result<Option<(Measured, Box<Moved>)>> {
        let agents = [&self.lab.a, &self.lab.b].map(|host| processes_of(host, runs(&self.whimbrel)));
        let [ours, theirs] = agents;
        let (ours, theirs) = (ours?, theirs?);
        for pid in ours.iter().chain(&theirs) {
            reset_peak(*pid)?;
        }
        let (sent, received) = (sent_so_far(&self.lab.a)?, sent_so_far(&self.lab.b)?);
        let meter = Meter::begin(guest.pid(), [&ours[..], &theirs].concat())?;
        let stage = MoveInput {
            lab: &self.lab,
            environment: &self.environment,
            agents: &self.agents,
            subject: &self.subject,
            case: &self.case,
            source: guest,
            meter: &meter,
        };
        let end = match contender {
            Contender::Qemu(mode) => by_qemu(&stage, mode)?,
            Contender::NoMigration => MoveOutcome::GivenUp,
            _ => by_whimbrel(&stage, contender)?,
        };
        let MoveOutcome::Moved(moved) = end else { return Ok(None) };
        let peak = |pids: &[u32]| -> Result<u64> { pids.iter().map(|pid| peak_bytes(*pid)).sum() };
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let sent_bytes = sent_so_far(&self.lab.a)? - sent;
        let rate = |(share, time): (f64, Duration)| share * sent_bytes as f64 / time.as_secs_f64().max(1e-6);
        let measured = Measured {
            total_ms: ms(moved.total),
            start_ms: ms(moved.start),
            downtime_ms: ms(moved.downtime),
            events_ms: moved.events.map(ms),
            parts: moved.parts,
            last_scans_ms: moved.last_scans.map(ms),
            sent_bytes,
            received_bytes: sent_so_far(&self.lab.b)? - received,
            cpu_ms: ms(moved.used.all),
            agents_cpu_ms: ms(moved.used.agents),
            source_agent_peak_bytes: peak(&ours)?,
            destination_agent_peak_bytes: peak(&theirs)?,
            rounds: moved.rounds,
            stop: moved.stop.clone(),
            has_switched_to_post_copy: moved.has_switched_to_post_copy,
            packing: moved.packing,
            first_round_bytes_per_s: moved.first_round.map(rate),
        };
        Ok(Some((measured, moved)))
    }

    /// Returns the disturbance recorded by the guest's program, if it records any, up to the last of these moments.
    fn disturbance(clock: &GuestClock<'_>, moments: Moments) -> Result<Option<Disturbance>> {
        if !clock.is_reported {
            return Ok(None);
        }
        clock.wait_until(moments.seen_until)?;
        let progress = clock.serial.progress(moments.settled)?;
        Ok(Some(compute_disturbance(&progress, moments)))
    }
}
