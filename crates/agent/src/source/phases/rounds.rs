//! Pre-copy: rounds until the policy says stop.

use std::time::{Duration, Instant};

use ::memory::{DataStream, Interrupted, Owed, Sender, Sent};
use engine::handover::source::SourceEvent;
use engine::precopy::{Decision, Policy, RoundObservation};
use tracing::info;

use super::Failure;
use crate::progress::Phase;
use crate::report::Round;
use crate::source::{Driver, memory};

impl Driver {
    pub(super) fn open_streams(&mut self, tracked: &memory::Tracked) -> Result<Sender, Failure> {
        let streams =
            self.connect_streams().map_err(|error| Failure::peer("cannot open the data streams", &error))?;
        self.start_sender(tracked, streams)
    }

    pub(crate) fn start_sender(
        &mut self,
        tracked: &memory::Tracked,
        streams: Vec<DataStream>,
    ) -> Result<Sender, Failure> {
        let sender = Sender::start(tracked.ram(), streams)
            .map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        self.inbox.interrupts(Some(sender.handle()));
        self.telemetry.follow(Some(sender.handle()));
        Ok(sender)
    }

    /// Rounds until the policy says stop.
    pub(super) fn pre_copy(
        &mut self,
        sender: Sender,
        tracked: &mut memory::Tracked,
    ) -> Result<(Sender, Owed), Failure> {
        self.phase(Phase::PreCopy);
        let mut policy = memory::policy(&self.controls.aims(), self.context.fixed_costs().estimate());
        let mut owed = tracked.everything();
        let mut sender = sender;
        let mut sent_before = None;
        loop {
            let scanned_at = Instant::now();
            let cleared = owed
                .clear_marks(tracked.log())
                .map_err(|failed| Failure::local("cannot scan for dirty pages", &failed))?;
            let scan = cleared.scan();
            let drain_began = Instant::now();
            let vm = self.vm()?;
            let readable = cleared
                .drain(|| vm.drain())
                .map_err(|failed| Failure::local("cannot drain block I/O", &failed))?;
            let drain_us = drain_began.elapsed().as_micros() as u64;

            if let Some(sent) = sent_before.take() {
                let observed = memory::observe(&sent, scan, readable.pages(), scanned_at);
                policy.aim(memory::aim(&self.controls.aims()));
                let decision = policy.decide(&observed);
                self.decided(&observed, &decision);
                match decision {
                    Decision::NextRound { .. } => {}
                    Decision::StopAndCopy { expected_downtime_ns } => {
                        self.clock.expected_downtime = Duration::from_nanos(expected_downtime_ns);
                        return Ok((sender, readable.give_up()));
                    }
                    Decision::GiveUp { reason } => {
                        self.context.fixed_costs().forget();
                        return Err(Failure::new(SourceEvent::Failed, reason.to_string()));
                    }
                }
            }
            self.take_notices()?;

            let pages = readable.pages();
            match sender.send_round(readable) {
                Ok(Sent { sender: next, owed: left, stats }) => {
                    self.controls.report(|report| {
                        report.rounds.push(Round {
                            round: stats.round,
                            dirty_pages: pages,
                            scan_us: scan.duration_us,
                            drain_us,
                            ..memory::round_report(&stats)
                        });
                    });
                    sent_before = Some(memory::SentRound { stats, scanned_at });
                    (sender, owed) = (next, left);
                }
                Err(interrupted) => {
                    let Interrupted { owed: left, cause, .. } = *interrupted;
                    info!(%cause, "round interrupted");
                    self.inbox.interrupts(None);
                    self.take_notices_or(&cause)?;
                    sender = self.reconnect(tracked, &cause)?;
                    owed = left;
                }
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
