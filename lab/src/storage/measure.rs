//! Measuring: turn by turn, mover by mover.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::case::{DiskCase, Mover, Workload};
use super::clients::{Clients, ClientsReport};
use super::freeze::{Copier, by_copying};
use super::guest::{NUMBER, QEMU, VM, boot, check};
use super::io::{self, IoTurn};
use super::mirror::by_mirror;
use super::mover::{DiskMoveInput, DiskMoveOutcome, MovedGuest};
use super::ours::by_whimbrel;
use super::overhead::{content, disk_content, payload_bytes};
use super::player::judge_film;
use super::result::{ClientObservations, DiskCaseResult, DiskMeasured, DiskRun};
use super::sampler::{Sampler, Samples, Timeline, at, by_seconds, gaps_by_seconds};
use crate::agents::Agents;
use crate::bench::Provenance;
use crate::bench::subject::{SavedGuest, clear};
use crate::environment::{Environment, Qemu};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig, vm_address};
use crate::migrating::{adopt, forget};
use crate::run::Daemon;
use crate::traffic::{Traffic, traffic};

/// Time that clients work before anything is watched, and then before the guest is migrated.
const WARM_UP: Duration = Duration::from_secs(10);
const UNDISTURBED: Duration = Duration::from_secs(15);
/// Time that they are watched after the guest has arrived and the first of them has an answer.
const WATCHED_AFTER: Duration = Duration::from_secs(10);
/// Time around the switchover in which silences belong to it.
const AROUND: Duration = Duration::from_secs(1);
/// The turn of which the timeline is kept.
const DRAWN_TURN: u32 = 1;

/// A laboratory with agents, for one case.
#[derive(Debug)]
pub struct DiskBench {
    case: DiskCase,
    environment: Environment,
    qemu: Qemu,
    subject: SavedGuest,
    agents: Agents,
    // Ended before the laboratory is taken down.
    _daemons: Vec<Daemon>,
    lab: Lab,
}

/// A result, reported at once.
#[derive(Debug)]
pub enum Measurement<'a> {
    /// A migration.
    DiskRun(&'a DiskRun),
    /// I/O in all states of the driver.
    Io(&'a IoTurn),
}

impl DiskBench {
    /// Makes a laboratory for a case, with agents by the program `whimbrel`; boots the guest and saves it.
    pub fn prepare(prefix: &str, case: DiskCase, whimbrel: &Path) -> Result<Self> {
        let environment = Environment::discover();
        let qemu = environment.qemu(QEMU)?;
        let lab = Lab::up(&LabConfig { link: case.link(), ..LabConfig::new(prefix) })?;
        // Only `ssh` encrypts, which cannot be turned off.
        let agents = Agents::new(&lab, &environment, whimbrel).with_qemu(QEMU).plain();
        agents.write()?;
        let daemons = agents.start_all()?;
        let subject = boot(&lab, &environment, &case)?;
        Ok(Self { case, environment, qemu, subject, agents, _daemons: daemons, lab })
    }

    /// Lets all movers migrate the guest in `turns` turns, after a warm-up; `say` receives each result.
    pub fn run(
        &self,
        movers: &[Mover],
        turns: u32,
        mut say: impl FnMut(Measurement<'_>),
    ) -> Result<DiskCaseResult> {
        let made = Provenance::now(&self.environment, QEMU)?;
        let mut result = DiskCaseResult { case: self.case.clone(), made, runs: Vec::new(), io: Vec::new() };
        for turn in 0..=turns {
            if self.case.workload == Workload::Io {
                let io = self.measure_io(turn)?;
                say(Measurement::Io(&io));
                result.io.extend((turn > 0).then_some(io));
            }
            // Each mover is the first in one of the turns.
            let first = turn as usize % movers.len().max(1);
            for &mover in movers[first..].iter().chain(&movers[..first]) {
                let run = self.measure(mover, turn)?;
                say(Measurement::DiskRun(&run));
                result.runs.extend((turn > 0).then_some(run));
            }
        }
        Ok(result)
    }

    fn measure_io(&self, turn: u32) -> Result<IoTurn> {
        let guest = self.subject.start(&self.lab.a, &self.environment)?;
        let held_bytes = disk_content(&self.qemu, self.saved_disk()?, self.lab.b.directory())?;
        let io = io::measure(&self.lab, &self.agents, &guest, turn, held_bytes)?;
        drop(guest);
        self.clear()?;
        Ok(io)
    }

    fn measure(&self, mover: Mover, turn: u32) -> Result<DiskRun> {
        let guest = self.subject.start(&self.lab.a, &self.environment)?;
        let posts = check(guest.serial(), false)?.posts;
        if mover.is_whimbrel() {
            adopt(&self.agents, &self.lab.a, &guest)?;
        }
        let service = (vm_address(NUMBER), 80).into();
        let clients = Clients::start(&self.lab.client, service, self.case.workload)?;
        let sampler = Sampler::start(&self.lab.a, &guest.directory().join("lab.sock"), clients.began())?;
        // A measurement needs time to pass; there is no event to wait for.
        thread::sleep(WARM_UP + UNDISTURBED);
        let before = self.traffic()?;
        let requested = clients.now();
        let stage = self.stage(&guest, turn);
        let end = move_guest(&stage, mover)?;
        let ended = clients.now();
        let sent = self.traffic()?.since(before);
        let resumed =
            if let DiskMoveOutcome::MovedGuest(moved) = &end { clients.moment(moved.resumed) } else { ended };
        clients.wait_for_answer(resumed)?;
        thread::sleep(WATCHED_AFTER);
        let until = clients.now();
        let moments = MigrationMoments {
            requested,
            switchover: match &end {
                DiskMoveOutcome::MovedGuest(moved) => Some(clients.moment(moved.stopped)..resumed),
                DiskMoveOutcome::GivenUp(_) => None,
            },
            until,
        };
        let watched = clients.finish();
        let sampled = sampler.finish();
        let seen = moments.judge(&watched, &sampled);
        let timeline = (turn == DRAWN_TURN).then(|| moments.timeline(&watched, &sampled));
        let (measured, given_up) = match end {
            DiskMoveOutcome::GivenUp(why) => (None, Some(why)),
            DiskMoveOutcome::MovedGuest(moved) => {
                check_guest(&moved, turn, posts + watched.counts.posted, mover)?;
                (Some(self.measured(&moved, sent, mover)?), None)
            }
        };
        drop(guest);
        self.clear()?;
        Ok(DiskRun { mover, turn, measured, given_up, seen, timeline })
    }

    fn stage<'a>(&'a self, source: &'a Guest, turn: u32) -> DiskMoveInput<'a> {
        DiskMoveInput {
            lab: &self.lab,
            environment: &self.environment,
            qemu: &self.qemu,
            agents: &self.agents,
            subject: &self.subject,
            case: &self.case,
            source,
            compare: turn == 0,
        }
    }

    fn traffic(&self) -> Result<BothWays> {
        Ok(BothWays { there: traffic(&self.lab.a)?, back: traffic(&self.lab.b)? })
    }

    fn measured(&self, moved: &MovedGuest, sent: BothWays, mover: Mover) -> Result<DiskMeasured> {
        let content = content(&moved.arrived, &self.qemu, self.case.memory_mib, self.lab.b.directory())?;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(DiskMeasured {
            total_ms: ms(moved.total),
            disk_ms: ms(moved.disk),
            memory_ms: ms(moved.memory),
            downtime_ms: ms(moved.downtime),
            resent_bytes: moved.resent_bytes,
            sent_bytes: sent.there.bytes,
            payload_bytes: payload_bytes(sent.there),
            received_bytes: sent.back.bytes,
            // On storage that both hosts see, it need not be sent.
            disk_content_bytes: if mover == Mover::MemoryOnly { 0 } else { content.disk_bytes },
            memory_content_bytes: content.memory_bytes,
        })
    }

    fn saved_disk(&self) -> Result<&Path> {
        self.subject.saved_disk().ok_or_else(|| Error::Config("the guest has no disk".to_owned()))
    }

    /// Removes the files of a measurement.
    fn clear(&self) -> Result<()> {
        let hosts = [&self.lab.a, &self.lab.b];
        forget(&self.agents, hosts, VM);
        for host in hosts {
            let pool = Agents::pool(host);
            let context = || format!("cannot empty {}", pool.display());
            for entry in fs::read_dir(&pool).context(context)? {
                fs::remove_file(entry.context(context)?.path()).context(context)?;
            }
        }
        clear(hosts, VM)
    }
}

/// Fails unless the guest has all expected content.
fn check_guest(moved: &MovedGuest, turn: u32, posts: u64, mover: Mover) -> Result<()> {
    let checked = check(&moved.arrived.serial(), turn == 0)?;
    if checked.wrong == "nothing" && checked.posts >= posts {
        return Ok(());
    }
    let (wrong, there) = (checked.wrong, checked.posts);
    Err(Error::Config(format!(
        "{mover}: after the move {wrong} is wrong; {there} posts of {posts} are there"
    )))
}

/// Traffic over the link in both directions.
#[derive(Clone, Copy, Debug)]
struct BothWays {
    there: Traffic,
    back: Traffic,
}

impl BothWays {
    fn since(self, before: Self) -> Self {
        Self { there: self.there.since(before.there), back: self.back.since(before.back) }
    }
}

/// Moments of a measurement, by the clients' clock.
struct MigrationMoments {
    requested: Duration,
    /// Time from the stop of the guest until it resumed.
    switchover: Option<Range<Duration>>,
    until: Duration,
}

impl MigrationMoments {
    fn undisturbed(&self) -> Range<Duration> {
        self.requested.saturating_sub(UNDISTURBED)..self.requested
    }

    /// Evaluates the clients' observations and the guest's writes.
    fn judge(&self, watched: &ClientsReport, sampled: &Samples) -> ClientObservations {
        let (before, during) = (self.undisturbed(), self.requested..self.until);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let around = self.switchover.as_ref().map(|it| it.start.saturating_sub(AROUND)..it.end + AROUND);
        let silence = around.as_ref().and_then(|around| watched.tally.longest_silence(around));
        let silence = silence.zip(self.switchover.as_ref());
        let apart = |later: Duration, earlier: Duration| (later.as_secs_f64() - earlier.as_secs_f64()) * 1e3;
        // Until it stopped, or until the end of the observation.
        let stopped = self.switchover.as_ref().map_or(self.until, |it| it.start);
        let grown = |growth| (at(growth, stopped) - at(growth, self.requested)).max(0.0) as u64;
        let ClientsReport { tally, counts, broken } = watched;
        ClientObservations {
            disruption_ms: ms(tally.longest_gap(&during)),
            switchover_gap_ms: around.map(|around| ms(tally.longest_gap(&around))),
            silent_before_stop_ms: silence.as_ref().map(|(silent, stood)| apart(stood.start, silent.start)),
            silent_after_resume_ms: silence.as_ref().map(|(silent, stood)| apart(silent.end, stood.end)),
            usual_gap_ms: ms(tally.longest_gap(&before)),
            answers_per_s: tally.answers_per_s(&during),
            usual_answers_per_s: tally.answers_per_s(&before),
            median_answer_ms: tally.median_answer(&during).map(ms),
            slowest_answer_ms: ms(tally.slowest_answer(&during)),
            posted: counts.posted,
            refused: counts.refused,
            broken: broken.clone(),
            film: (!counts.frames.is_empty()).then(|| judge_film(&counts.frames, &before, &during)),
            writes: grown(&sampled.writes),
            written_bytes: grown(&sampled.written_bytes),
            written_s: stopped.saturating_sub(self.requested).as_secs_f64(),
        }
    }

    fn timeline(&self, watched: &ClientsReport, sampled: &Samples) -> Timeline {
        let seconds = self.until.as_secs() as usize;
        let mut client_bytes = watched.tally.seconds().to_vec();
        client_bytes.resize(seconds, 0);
        Timeline {
            requested_s: self.requested.as_secs_f64(),
            stopped_s: self.switchover.as_ref().map(|it| it.start.as_secs_f64()),
            resumed_s: self.switchover.as_ref().map(|it| it.end.as_secs_f64()),
            client_bytes,
            link_bytes: by_seconds(&sampled.sent_bytes, seconds),
            written_bytes: by_seconds(&sampled.written_bytes, seconds),
            frame_gap_ms: if watched.counts.frames.is_empty() {
                Vec::new()
            } else {
                gaps_by_seconds(&watched.counts.frames, seconds)
            },
        }
    }
}

/// Migrates the guest.
fn move_guest(stage: &DiskMoveInput<'_>, mover: Mover) -> Result<DiskMoveOutcome> {
    match mover {
        Mover::Mirror => by_mirror(stage),
        Mover::Scp => by_copying(stage, Copier::Scp),
        Mover::Rsync => by_copying(stage, Copier::Rsync),
        _ => by_whimbrel(stage, mover),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_saw_is_judged_by_when_it_was() {
        let s = Duration::from_secs;
        let mut watched = ClientsReport::default();
        // An answer each second; none for 3 s while the guest was copied, none for 2 s at its switch-over.
        for at in (1..=100).filter(|at| ![50, 51, 90].contains(at)) {
            watched.tally.arrived(s(at), 1_000);
            watched.tally.answered(s(at), s(1));
        }
        let written = (0..=80).map(|at| (s(at), at as f64 * 10.0)).collect();
        let sampled = Samples { writes: written, ..Samples::default() };
        let moments = MigrationMoments { requested: s(40), switchover: Some(s(89)..s(90)), until: s(100) };
        let seen = moments.judge(&watched, &sampled);
        assert!((seen.disruption_ms - 3_000.0).abs() < 1e-6, "{seen:?}");
        assert!(seen.switchover_gap_ms.is_some_and(|gap| (gap - 2_000.0).abs() < 1e-6), "{seen:?}");
        // From the 89th second to the 91st.
        assert_eq!((seen.silent_before_stop_ms, seen.silent_after_resume_ms), (Some(0.0), Some(1_000.0)));
        assert!((seen.usual_gap_ms - 1_000.0).abs() < 1e-6, "{seen:?}");
        // The guest was sampled until its 80th second.
        assert_eq!(seen.writes, 400);
        assert_eq!(seen.film, None);
        let timeline = moments.timeline(&watched, &sampled);
        assert_eq!((timeline.client_bytes.len(), timeline.client_bytes[50]), (100, 0));
        assert_eq!(timeline.resumed_s, Some(90.0));
    }
}
