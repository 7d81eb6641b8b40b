//! Pre-copy: rounds until the policy says stop.

use std::time::{Duration, Instant};

use ::memory::{DataStream, Interrupted, Owed, Place, Readable, RoundStats, ScanStats, Sender, Sent};
use engine::handover::source::SourceEvent;
use engine::precopy::{Decision, Policy, RoundObservation, Traced};
use tracing::info;

use super::Failure;
use crate::progress::Phase;
use crate::report::Round;
use crate::source::memory::Cargo;
use crate::source::{Driver, VmError, memory};

/// What a round has to send, found and fit to be read.
pub(super) struct Looked {
    pub(super) readable: Readable,
    disk_pages: u64,
    scan: ScanStats,
    scanned_at: Instant,
    drain_us: u64,
}

impl Looked {
    /// Only so many pages from a place on, what is left out, and where the next part begins; of a round of disks alone.
    pub(super) fn part(self, from: Place, pages: u64) -> (Self, Owed, Option<Place>) {
        let (readable, later, next) = self.readable.part(from, pages);
        let disk_pages = readable.pages();
        (Self { readable, disk_pages, ..self }, later, next)
    }
}

/// A round that was sent, or cut off.
pub(super) struct SentOrCut {
    pub(super) sender: Sender,
    pub(super) owed: Owed,
    /// None if it was cut off; the sender has new connections then.
    pub(super) stats: Option<RoundStats>,
}

impl Driver {
    pub(super) fn open_streams(&mut self, cargo: &Cargo) -> Result<Sender, Failure> {
        let streams =
            self.connect_streams().map_err(|error| Failure::peer("cannot open the data streams", &error))?;
        self.start_sender(cargo, streams)
    }

    pub(crate) fn start_sender(
        &mut self,
        cargo: &Cargo,
        streams: Vec<DataStream>,
    ) -> Result<Sender, Failure> {
        let started = Sender::saving(cargo.readers(), cargo.saving(), streams);
        let sender = started.map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        self.inbox.interrupts(Some(sender.handle()));
        self.telemetry.follow(Some(sender.handle()));
        Ok(sender)
    }

    /// Rounds until the policy says stop.
    pub(super) fn pre_copy(
        &mut self,
        sender: Sender,
        owed: Owed,
        cargo: &mut Cargo,
    ) -> Result<(Sender, Owed), Failure> {
        self.phase(Phase::PreCopy);
        let new_policy =
            |driver: &Self| memory::policy(&driver.controls.aims(), driver.context.fixed_costs().estimate());
        let mut policy = new_policy(self);
        let (mut sender, mut owed) = (sender, owed);
        let mut sent_before: Option<memory::SentRound> = None;
        let mut softening = self.meet_guest(cargo);
        let mut is_first = true;
        // Rounds of disks alone, and their parts, are none of these.
        let mut rounds_before = owed.round();
        loop {
            let mut looked = self.look(owed, cargo)?;
            let stop = match sent_before.take() {
                Some(sent) => self.is_to_stop(&mut policy, rounds_before, &sent, &looked, cargo)?,
                None => None,
            };
            let mut is_taking_back = false;
            match (stop, &mut softening) {
                (Some(_), Some(softening)) if softening.has_put_off() => {
                    is_taking_back = true;
                    rounds_before = looked.readable.owed().round();
                    looked.readable = self.take_back(softening, looked.readable)?;
                }
                (Some(expected_downtime), _) => {
                    self.clock.expected_downtime = expected_downtime;
                    return Ok((sender, looked.readable.give_up()));
                }
                (None, Some(softening)) => {
                    looked.readable = self.ask_guest(softening, looked.readable, is_first)?;
                }
                (None, None) => {}
            }
            self.throttle(cargo)?;
            self.take_notices()?;
            let scanned_at = looked.scanned_at;
            let sent = self.send_looked(sender, looked, cargo)?;
            cargo.drained(sent.stats.as_ref());
            if sent.stats.is_some() {
                is_first = false;
                cargo.end_references();
            }
            sent_before = sent.stats.map(|stats| memory::SentRound { stats, scanned_at });
            if is_taking_back {
                // The guest has written to what it keeps of each page that it gave back, for as long as that took: neither
                // says anything of the rounds that follow.
                (policy, sent_before) = (new_policy(self), None);
            }
            (sender, owed) = (sent.sender, sent.owed);
        }
    }

    /// Whether the policy says stop, after a round and the look that followed it; with the downtime that it expects.
    fn is_to_stop(
        &mut self,
        policy: &mut Traced,
        rounds_before: u32,
        sent: &memory::SentRound,
        looked: &Looked,
        cargo: &Cargo,
    ) -> Result<Option<Duration>, Failure> {
        let owed = looked.readable.owed();
        let pages = (owed.pages(), cargo.unknown_pages(owed));
        let observed = memory::observe(sent, looked.scan, pages, looked.scanned_at);
        let observed = RoundObservation { round: observed.round.saturating_sub(rounds_before), ..observed };
        policy.aim(memory::aim(&self.controls.aims()));
        let decision = policy.decide(&observed);
        self.decided(&observed, &decision);
        match decision {
            Decision::NextRound { .. } => Ok(None),
            Decision::StopAndCopy { expected_downtime_ns } => {
                Ok(Some(Duration::from_nanos(expected_downtime_ns)))
            }
            Decision::GiveUp { reason } => {
                self.context.fixed_costs().forget();
                Err(Failure::new(SourceEvent::Failed, reason.to_string()))
            }
        }
    }

    /// Takes what was written out of the logs, and lets what is in flight land.
    pub(super) fn look(&mut self, owed: Owed, cargo: &mut Cargo) -> Result<Looked, Failure> {
        let scanned_at = Instant::now();
        let cannot_ask = |error: VmError| Failure::local("QEMU cannot be asked", &error);
        let vm = self.vm()?;
        let cleared = owed
            .clear_marks(&mut cargo.log(vm.monitor().map_err(cannot_ask)?))
            .map_err(|failed| Failure::local("cannot find out what was written", &failed))?;
        let scan = cleared.scan();
        let drain_began = Instant::now();
        let readable = cleared
            .drain(|| vm.drain())
            .map_err(|failed| Failure::local("cannot drain block I/O", &failed))?;
        let drain_us = drain_began.elapsed().as_micros() as u64;
        cargo
            .tidy(vm.monitor().map_err(cannot_ask)?)
            .map_err(|error| Failure::local("QEMU does not let go of a bitmap", &error))?;
        let disk_pages = cargo.disk_pages(readable.owed());
        Ok(Looked { readable, disk_pages, scan, scanned_at, drain_us })
    }

    /// Sends a round. Where the link is cut, new connections are made; what did not arrive is owed.
    pub(super) fn send_looked(
        &mut self,
        sender: Sender,
        looked: Looked,
        cargo: &Cargo,
    ) -> Result<SentOrCut, Failure> {
        let Looked { readable, disk_pages, scan, drain_us, .. } = looked;
        let pages = readable.pages();
        match sender.send_round(readable) {
            Ok(Sent { sender, owed, stats }) => {
                self.controls.report(|report| {
                    report.rounds.push(Round {
                        round: stats.round,
                        dirty_pages: pages,
                        disk_pages,
                        scan_us: scan.duration_us,
                        drain_us,
                        ..memory::round_report(&stats)
                    });
                });
                Ok(SentOrCut { sender, owed, stats: Some(stats) })
            }
            Err(interrupted) => {
                let Interrupted { owed, cause, .. } = *interrupted;
                info!(%cause, "round interrupted");
                self.inbox.interrupts(None);
                self.take_notices_or(&cause)?;
                let sender = self.reconnect(cargo, &cause)?;
                Ok(SentOrCut { sender, owed, stats: None })
            }
        }
    }

    fn decided(&self, observed: &RoundObservation, decision: &Decision) {
        let (word, expected_us) = match decision {
            Decision::NextRound { expected_downtime_ns } => {
                ("another-round", Some(expected_downtime_ns / 1000))
            }
            Decision::StopAndCopy { expected_downtime_ns } => ("stop", Some(expected_downtime_ns / 1000)),
            Decision::GiveUp { .. } => ("abort", None),
        };
        self.controls.report(|report| {
            if let Some(round) = report.rounds.last_mut() {
                word.clone_into(&mut round.decision);
                round.expected_downtime_us = expected_us;
                round.dirty_rate_bytes_per_s = observed.dirty_rate_bytes_per_s();
            }
        });
        self.telemetry.update(|progress| {
            progress.expected_downtime_us = expected_us;
            progress.dirty_rate_bytes_per_s = observed.dirty_rate_bytes_per_s();
        });
    }
}
