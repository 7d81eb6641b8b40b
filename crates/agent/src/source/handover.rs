//! The source's half of the handover: the loop that takes events until the matter is settled.
//!
//! What the engine wants done then is in [`effects`], what is said to the destination and by it in [`peer`].

mod effects;
mod peer;
mod postcopy;

use std::time::{Duration, Instant};

use engine::handover::Found;
use engine::handover::source::{SourceEvent, SourceState};
use proto::message::Proposal;
use tracing::{error, info, warn};

use self::effects::EffectError;
use super::inbox::Notice;
use super::phases::Failure;
use super::vm::{SourceVm, VmError};
use super::{Details, Driver};
use crate::config::Timeouts;
use crate::machine::Machine;
use crate::owners;
use crate::progress::Phase;

/// When the destination was last heard of.
#[derive(Debug)]
pub(crate) struct Contact {
    heard: Instant,
    patience: Duration,
    pub(super) retry: Duration,
}

impl Contact {
    pub(crate) fn new(timeouts: &Timeouts) -> Self {
        Self {
            heard: Instant::now(),
            patience: Duration::from_millis(timeouts.reclaim_after_ms),
            retry: Duration::from_millis(timeouts.retry_ms),
        }
    }

    /// Says once in every span of patience that it has passed.
    fn lost_for_good(&mut self) -> bool {
        let lost = self.heard.elapsed() >= self.patience;
        if lost {
            self.heard = Instant::now();
        }
        lost
    }
}

impl Driver {
    /// PREPARED: journalled, before anybody else hears of it.
    pub(crate) fn begin(&mut self, proposal: Proposal) -> Result<(), EffectError> {
        self.proposal = Some(proposal);
        let run = self.vm.as_mut().map_or(Err(VmError::Gone), SourceVm::is_running)?;
        self.feed(&SourceEvent::Begin { run })
    }

    /// A migration that has begun, to its end.
    pub(crate) fn run(mut self) -> SourceState {
        let event = match self.reach_ready() {
            Ok(ready) => SourceEvent::Ready { epoch: self.terms.epoch(), incarnation: ready.incarnation },
            Err(failure) => {
                let failure = self.or_the_vm_ended(failure);
                info!(migration = %self.terms.migration, reason = failure.reason, "the migration ends");
                self.because(&failure.reason);
                failure.event
            }
        };
        self.phases_ended(&event);
        self.settle()
    }

    /// What fails on this side often fails because the VM has ended, a moment before that is seen.
    fn or_the_vm_ended(&mut self, failure: Failure) -> Failure {
        if failure.event != SourceEvent::Failed || self.vm.as_mut().is_none_or(SourceVm::is_there) {
            return failure;
        }
        Failure::new(SourceEvent::QemuDied, self.how_it_ended())
    }

    /// Whatever it was that ended the phases: nobody sends any more.
    fn phases_ended(&mut self, event: &SourceEvent) {
        self.take(event);
        let waits_for_nothing = match self.state {
            // A stopped guest must not.
            SourceState::Prepared { .. } | SourceState::Stopped { .. } => true,
            // Nor must a destination that has not all of a guest that is gone here: it has no reason to give up while
            // this side asks it again and again.
            _ => self.is_nobodys(),
        };
        if waits_for_nothing {
            self.take(&SourceEvent::Failed);
        }
    }

    /// Whether the guest is gone here, and the destination cannot have all of it either.
    fn is_nobodys(&self) -> bool {
        matches!(self.state, SourceState::Bereft { incarnation: None, .. }) && !self.may_have_all
    }

    /// The migration has begun, and this side cannot go on with it: its last word.
    pub(crate) fn give_up(mut self, reason: &str) {
        self.because(reason);
        self.take(&SourceEvent::Failed);
        self.settle();
    }

    /// The QEMU that an agent before this one was moving: how it stands.
    pub(crate) fn found(&mut self, mut vm: SourceVm) -> Found {
        vm.watch(self.inbox.mailbox());
        let found = vm.found();
        self.vm = Some(vm);
        found
    }

    /// The QEMU that an agent before this one was moving is gone: whether the destination may have all of its guest. Where
    /// this host was not booted anew, the journal has COMMITTED if it was ever written.
    pub(crate) fn found_gone(&mut self, found: Found, details: Option<&Details>) -> Found {
        self.may_have_all = found != Found::Gone || details.is_none_or(|details| details.later.is_none());
        found
    }

    /// A migration that an agent before this one left behind.
    pub(crate) fn run_on(mut self, found: Found) -> SourceState {
        if matches!(self.state, SourceState::Prepared { .. } | SourceState::Stopped { .. }) {
            self.because("the source's agent was restarted during the migration");
        }
        self.take(&SourceEvent::Restarted(found));
        if self.is_nobodys() {
            self.take(&SourceEvent::Failed);
        }
        self.settle()
    }

    /// Takes events until the handover is over.
    fn settle(mut self) -> SourceState {
        self.contact.heard = Instant::now();
        // Whatever comes meanwhile: a peer that says something again and again must not put it off.
        let mut repeat_at = Instant::now() + self.contact.retry;
        loop {
            if let Some(event) = self.follow_ups.pop_front() {
                self.take(&event);
                continue;
            }
            if self.state.is_final() || self.state == SourceState::Idle {
                break;
            }
            self.phase(self.waiting_phase());
            let notice = (Instant::now() < repeat_at).then(|| self.inbox.wait(repeat_at)).flatten();
            let quiet = notice.is_none();
            match notice {
                Some(notice) => self.notice(notice),
                None => self.quiet(),
            }
            if quiet {
                // However long that took, what has come meanwhile is looked at first.
                repeat_at = Instant::now() + self.contact.retry;
            }
        }
        self.end();
        self.state
    }

    /// Some time has passed.
    fn quiet(&mut self) {
        self.serve_again();
        if self.contact.lost_for_good() {
            self.take(&SourceEvent::ContactLostForGood);
        } else if std::mem::take(&mut self.effects_failed) {
            // As after a restart: that QEMU is held comes before GO goes out.
            let found = self.vm.as_mut().map_or(Found::Gone, SourceVm::found);
            self.take(&SourceEvent::Restarted(found));
        } else {
            self.take(&SourceEvent::Repeat);
        }
    }

    /// What happens once the phases are over.
    pub(super) fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Message { link, message } => self.message(link, message),
            Notice::Asked { epoch, reply } => {
                self.contact.heard = Instant::now();
                self.asked(epoch, reply);
            }
            Notice::Event(event) => {
                if let SourceEvent::RegisterSays(answer) = &event {
                    let silence = self.register.silence(answer);
                    if let Some(request) = self.register.answered() {
                        self.send_to_register(request);
                    }
                    if silence >= self.contact.patience {
                        self.telemetry.update(|progress| {
                            owners::tell_of_silence(&self.terms.migration.vm, progress);
                        });
                    }
                }
                self.take(&event);
            }
            Notice::Lost { link, error } => {
                if self.is_control(link) {
                    self.control_lost(error.unwrap_or_else(|| "the control stream was closed".to_owned()));
                }
            }
            Notice::ServingEnded { generation, error } if generation == self.generation => {
                self.serving_ended(error);
            }
            Notice::ServingEnded { .. } => {}
        }
    }

    /// Pages went over the same link: that they do not go any more need not be found out once more, which takes as long as
    /// the kernel waits for an answer.
    pub(super) fn control_lost(&mut self, error: String) {
        self.control = None;
        self.serving_ended(error);
    }

    fn waiting_phase(&self) -> Phase {
        match self.state {
            SourceState::Committed { .. } if self.later.is_some() => Phase::PostCopy,
            SourceState::Aborting | SourceState::Returning => Phase::Undoing,
            SourceState::Bereft { .. } | SourceState::Reclaiming { .. } => Phase::InDoubt,
            _ => Phase::Handover,
        }
    }

    /// Takes an event; if an effect fails, what the state waits for is tried again later.
    fn take(&mut self, event: &SourceEvent) {
        let done = self.feed(event);
        self.done(event, done);
    }

    fn done(&mut self, event: &SourceEvent, done: Result<(), EffectError>) {
        let error = match done {
            Ok(()) => return,
            Err(EffectError::Illegal(illegal)) => return warn!(%illegal, "passed over"),
            Err(error) => error,
        };
        let reason = crate::chain(&error);
        error!(migration = %self.terms.migration, reason, "an effect failed");
        self.because(&reason);
        self.effects_failed = true;
        // Not COMMITTED, because that could not be journalled, or never tried: the guest goes on here.
        if matches!(self.state, SourceState::Prepared { .. } | SourceState::Stopped { .. })
            && *event != SourceEvent::Failed
        {
            self.take(&SourceEvent::Failed);
        }
    }
}

#[cfg(test)]
mod tests;
