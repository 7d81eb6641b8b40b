//! Phases in which the guest is stopped: each ends by itself, no matter how the destination behaves.

use host::VmError;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{
    CompletedRound, DirtyLog, InterruptedRound, OwedPages, ReductionStage, RoundStats, ScanFailed, Sender,
};
use engine::handover::source::SourceEvent;
use engine::session::StopTimeouts;
use proto::message::Message;
use tracing::warn;

use super::Ready;
use crate::device_state;
use crate::source::failure::{Failure, gone, unexpected};
use crate::source::participants::Comparison;
use crate::source::reductions::hints::ActiveHints;
use crate::source::stages::{Stopped, StreamingRecords};
use crate::source::streams::Streams;
use crate::source::{SourceDriver, payload};
use crate::state_machine::StateMachine;
use api::progress::Phase;
use api::report::Round;

/// Result of a round of the stopped guest.
struct StoppedRound {
    sender: Sender,
    owed: OwedPages,
    /// Statistics of the round; none if there was nothing to send.
    sent: Option<RoundStats>,
    dirty_pages: u64,
    scan_us: u64,
}

/// Error of a round of the stopped guest.
enum StoppedRoundError {
    Scan(ScanFailed),
    Link(Box<InterruptedRound>),
}

/// Sends the owed pages and the log's dirty pages; without any, nothing is sent. No drain: QEMU's `stop` has drained.
fn stopped_round(
    sender: Sender,
    owed: OwedPages,
    log: &mut dyn DirtyLog,
    acknowledged_by: Instant,
) -> Result<StoppedRound, StoppedRoundError> {
    let cleared = owed.clear_marks(log).map_err(StoppedRoundError::Scan)?;
    let (dirty_pages, scan_us) = (cleared.pages(), cleared.scan().duration_us);
    if dirty_pages == 0 {
        return Ok(StoppedRound { sender, owed: cleared.give_up(), sent: None, dirty_pages, scan_us });
    }
    let sent =
        sender.send_round_by(cleared.skip_drain(), acknowledged_by).map_err(StoppedRoundError::Link)?;
    let CompletedRound { sender, owed, stats } = sent;
    Ok(StoppedRound { sender, owed, sent: Some(stats), dirty_pages, scan_us })
}

/// Runs both at the same time, `there` in a separate thread. If the system cannot start a thread, `there` runs first:
/// the guest is then stopped a little longer. An error is a panic of `there`.
fn run_concurrently<H, T: Send>(
    here: impl FnOnce() -> H,
    there: impl FnMut() -> T + Send,
) -> (H, thread::Result<T>) {
    let there = Mutex::new(there);
    let run = || (there.lock().unwrap_or_else(PoisonError::into_inner))();
    thread::scope(|scope| match thread::Builder::new().name("save".to_owned()).spawn_scoped(scope, run) {
        Ok(thread) => (here(), thread.join()),
        Err(error) => {
            warn!(%error, "cannot start a thread to save the device state; it is saved before the round");
            let done = run();
            (here(), Ok(done))
        }
    })
}

pub(super) fn cannot_save(error: &VmError) -> Failure {
    match error {
        VmError::RunState(_) => Failure::local("the guest is not migrated", error),
        _ => Failure::local("cannot save the device state", error),
    }
}

impl SourceDriver {
    pub(super) fn stop(&mut self) -> Result<(), Failure> {
        self.phase(Phase::LastRound);
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        self.resources.participants.before_stop(vm)?;
        for message in self.resources.participants.messages() {
            self.send_message(&message)?;
        }
        let cannot = |error: VmError| Failure::local("the guest is not migrated", &error);
        let prepared = self.vm()?.prepare_to_save();
        prepared.map_err(|error| Failure::local("cannot prepare to save the device state", &error))?;
        // Later changes of the guest's state are detected when its devices are saved.
        let run = self.vm()?.check_run_state().map_err(cannot)?;
        self.inbox.guest_stops();
        self.feed(&SourceEvent::Stop { run })
            .map_err(|error| Failure::local("cannot stop the guest", &error))?;
        self.reporter.stop_clock.measured.stop_us = self.since_stop_us();
        self.note("stopped", "");
        Ok(())
    }

    /// Finds and sends the remaining pages. In the meantime QEMU saves its device state; because saving may write guest
    /// memory, one more round follows. Returns the device state, and the streams, which have done their work.
    pub(super) fn last_pages(
        &mut self,
        streams: Streams,
        owed: OwedPages,
        stopped: &Stopped,
    ) -> Result<(Vec<u8>, Streams), Failure> {
        let began = Instant::now();
        let Streams { generation, sender, page_stream } = streams;
        let payload = &stopped.payload;
        let acknowledged_by = self.switchover_deadline();
        // No program gives memory back from now on.
        payload.end_reductions(ReductionStage::GuestStopped);
        let stop = if self.controls.goals().verify { Comparison::Compared } else { Comparison::NotCompared };
        let mut owed = owed;
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        let participants = &mut self.resources.participants;
        participants.freeze(vm, stop, &mut owed)?;
        let round = || stopped_round(sender, owed, &mut participants.log(None), acknowledged_by);
        let save = || {
            let began = Instant::now();
            vm.save_devices().map(|state| (state, began.elapsed()))
        };
        let (round, saved) = run_concurrently(round, save);
        let (sender, owed) = self.last_round(round)?;
        let (state, saving) = saved
            .map_err(|_| Failure::new(SourceEvent::Failed, "saving the device state panicked"))?
            .map_err(|error| cannot_save(&error))?;
        self.reporter.stop_clock.measured.save_us = saving.as_micros() as u64;
        payload.end_reductions(ReductionStage::DevicesSaved);
        let acknowledged_by = self.switchover_deadline();
        let mut log = self.resources.participants.log(None);
        let round = stopped_round(sender, owed, &mut log, acknowledged_by);
        drop(log);
        let (sender, owed) = self.last_round(round)?;
        if owed.pages() > 0 {
            let reason =
                format!("{} pages were not sent in the last round; please report this", owed.pages());
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        self.inbox.interrupt_nothing();
        self.telemetry.follow(None);
        self.handle_last_notices()?;
        self.reporter.stop_clock.measured.last_pages_us = began.elapsed().as_micros() as u64;
        Ok((state, Streams { generation, sender, page_stream }))
    }

    /// Sets the deadline for messages to the destination while the guest is stopped.
    pub(crate) fn set_control_deadline(&mut self, deadline: Option<Instant>) {
        if let Some(control) = &mut self.connections.control {
            control.writer.set_deadline(deadline);
        }
    }

    /// Returns the patience with the destination while the guest is stopped.
    fn stop_patience(&self) -> StopTimeouts {
        let standstill = Duration::from_millis(self.context.config.timeouts.standstill_ms);
        StopTimeouts { expected_downtime: self.reporter.stop_clock.expected_downtime, standstill }
    }

    /// Returns the time until which the stopped guest waits for the destination's next answer.
    pub(super) fn switchover_deadline(&mut self) -> Instant {
        let answer_by = self.stop_patience().answer_by(self.clock.read());
        self.clock.instant(answer_by)
    }

    /// Adds a round of the stopped guest to the report.
    fn last_round(
        &mut self,
        round: Result<StoppedRound, StoppedRoundError>,
    ) -> Result<(Sender, OwedPages), Failure> {
        let round = match round {
            Ok(round) => round,
            Err(StoppedRoundError::Scan(failed)) => {
                return Err(Failure::local("cannot scan for dirty pages", &failed));
            }
            Err(StoppedRoundError::Link(interrupted)) => {
                return Err(self.lost_while_stopped(&interrupted.cause));
            }
        };
        let StoppedRound { sender, owed, sent, dirty_pages, scan_us } = round;
        self.reporter.stop_clock.measured.last_scans_us += scan_us;
        if let Some(stats) = sent {
            self.controls.report(|report| {
                let round = payload::round_report(&stats);
                report.rounds.push(Round { stopped: true, dirty_pages, scan_us, ..round });
            });
        }
        Ok((sender, owed))
    }

    /// Returns the failure for a lost link: the guest is stopped, and would have to wait for the link too, so the
    /// migration ends.
    pub(super) fn lost_while_stopped(&mut self, cause: &::memory::SendError) -> Failure {
        self.inbox.interrupt_nothing();
        match self.handle_notices_after_cut(cause) {
            Err(failure) => failure,
            Ok(()) => Failure::new(
                SourceEvent::PeerLost,
                format!("the link was lost while the guest was stopped: {}", crate::chain(cause)),
            ),
        }
    }

    pub(super) fn verify(&mut self, stopped: &Stopped) -> Result<(), Failure> {
        self.phase(Phase::Verifying);
        let began = Instant::now();
        // Otherwise memory that was plugged in the meantime would be taken for lost memory.
        self.check_unchanged()?;
        let hints = stopped.reductions.find::<ActiveHints>();
        let left_out = hints.map_or_else(Vec::new, |hints| hints.left_out());
        let left_out_pages = left_out.iter().map(::memory::PageSet::count).sum();
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        let hashes = self.resources.participants.hashes(vm, &left_out)?;
        let (chunks, compared_bytes) = (hashes.chunks, hashes.bytes);
        let compared_by = self.stop_patience().compared_by(self.clock.read(), began.elapsed());
        let different = self.compare(hashes.messages, self.clock.instant(compared_by))?;
        let duration_us = began.elapsed().as_micros() as u64;
        self.reporter.stop_clock.measured.verify_us = duration_us;
        self.controls.report(|report| {
            report.verification = Some(api::report::Verification {
                compared_bytes,
                chunks,
                different_chunks: different,
                left_out_pages,
                duration_us,
            });
        });
        if different > 0 {
            let reason = format!(
                "{different} of {chunks} chunks of memory and disks differ between the two sides; this is a \
                 bug in Whimbrel, please report it. The VM continues here"
            );
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        Ok(())
    }

    /// Returns how many chunks differ at the destination. All of its answers have to arrive by `compared_by`: no matter
    /// how many there are, the guest is stopped for them.
    pub(crate) fn compare(
        &mut self,
        hashes: impl IntoIterator<Item = Message>,
        compared_by: Instant,
    ) -> Result<u64, Failure> {
        self.set_control_deadline(Some(compared_by));
        let mut different = 0;
        for message in hashes {
            self.send_message(&message)?;
            match self.receive_message(compared_by)? {
                Message::Verified { different_chunks } => different += different_chunks.len() as u64,
                other => return Err(unexpected(&other)),
            }
        }
        Ok(different)
    }

    /// Sends the device state, and waits until the destination has loaded it. Streams and records are no longer needed;
    /// to end them needs time, which the destination needs for loading anyway.
    pub(super) fn load(
        &mut self,
        state: &[u8],
        stopped: &Stopped,
        streams: Option<Streams>,
        records: StreamingRecords,
    ) -> Result<Ready, Failure> {
        self.phase(Phase::DeviceState);
        let began = Instant::now();
        let digest = blake3::hash(state).to_hex().to_string();
        let sent_by = self.switchover_deadline();
        self.set_control_deadline(Some(sent_by));
        let compressed = device_state::compress(state)
            .map_err(|error| Failure::local("cannot compress the device state", &error))?;
        let (bytes, state_bytes) = (compressed.len() as u64, state.len() as u64);
        self.send_message(&Message::DeviceState { bytes, state_bytes, digest: digest.clone() })?;
        for piece in compressed.chunks(proto::limits::BLOB_BYTES) {
            self.send("cannot send the device state", |writer| writer.send_blob(piece))?;
        }
        // This runs while the destination loads. Its READY then implies that the source's QEMU is frozen.
        drop((streams, records));
        self.check_unchanged()?;
        let vm = self.resources.vm.as_mut().ok_or_else(gone)?;
        self.resources.participants.ready(vm)?;
        self.freeze()?;
        let run = self.session.runs_afterwards();
        // Even if sending fails, the message may have arrived.
        self.session.set_destination_may_be_complete(stopped.server.is_none());
        self.send_message(&Message::Frozen { epoch: self.terms.epoch(), run })?;
        let answer_by = self.switchover_deadline();
        match self.receive_message(answer_by)? {
            Message::Ready { epoch, incarnation, digest: loaded, load_us } => {
                if epoch != self.terms.epoch() || loaded != digest {
                    return Err(Failure::new(
                        SourceEvent::Failed,
                        "the destination loaded a device state that differs from the one that was sent",
                    ));
                }
                self.reporter.stop_clock.measured.load_us = load_us;
                self.reporter.stop_clock.measured.save_to_ready_us = began.elapsed().as_micros() as u64;
                self.note("ready", "");
                Ok(Ready { incarnation })
            }
            other => Err(unexpected(&other)),
        }
    }

    fn check_unchanged(&mut self) -> Result<(), Failure> {
        let unchanged = self.vm()?.check_unchanged();
        unchanged.map_err(|error| Failure::local("the guest has changed", &error))
    }

    /// Ensures that no `cont` has reached the guest before READY, and that none can from here on: QEMU is frozen first,
    /// and then checked. If the handover fails, the guest's `cont` lets QEMU go, or the undo does.
    pub(crate) fn freeze(&mut self) -> Result<(), Failure> {
        self.vm()?.freeze().map_err(|error| Failure::local("cannot freeze QEMU", &error))?;
        if self.vm()?.has_been_resumed().map_err(|error| Failure::local("QEMU's monitor failed", &error))? {
            let reason = "another program resumed the guest while it was stopped for the handover";
            return Err(Failure::new(SourceEvent::Failed, reason));
        }
        Ok(())
    }

    pub(crate) fn since_stop_us(&self) -> u64 {
        self.reporter.stop_clock.stopped_at.map_or(0, |at| at.elapsed().as_micros() as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn both_closures_run_concurrently() {
        let meeting = Barrier::new(2);
        let (here, there) = run_concurrently(|| meeting.wait().is_leader(), || meeting.wait().is_leader());
        assert!(here != there.unwrap());
        let (here, there) = run_concurrently(|| 1, || panic!("as planned"));
        let _: Box<dyn std::any::Any + Send> = there.map(|never: u8| never).unwrap_err();
        assert_eq!(here, 1);
    }

    /// Runs in a separate process, in which no thread can be started.
    #[test]
    #[ignore = "what the next test starts"]
    fn work_is_done_without_a_second_thread() {
        if thread::Builder::new().spawn(|| {}).is_ok() {
            return;
        }
        let order = Mutex::new(Vec::new());
        let note = |what| order.lock().unwrap().push(what);
        let (here, there) = run_concurrently(|| note("here"), || note("there"));
        assert_eq!((here, there.unwrap()), ((), ()));
        assert_eq!(order.into_inner().unwrap(), ["there", "here"]);
        println!("done alone");
    }

    #[test]
    fn without_a_second_thread_both_run_one_after_the_other() {
        let test = "source::phases::switchover::tests::work_is_done_without_a_second_thread";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture", "--test-threads=1", test])
            // No address space has room for such a stack.
            .env("RUST_MIN_STACK", (1_u64 << 60).to_string())
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("done alone"), "{output:?}");
        assert!(output.status.success(), "{output:?}");
    }
}
