//! Soft pages of a migration: the guest is asked, page cache is put off, and taken back before the stop.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use ::memory::{Owed, Readable, Soft};
use guest::protocol::{Cache, PORT};

use super::guest::Guest;
use super::memory::Cargo;
use super::phases::Failure;
use super::{Controls, Driver, VmError};
use crate::api::SoftPages;
use crate::report;

/// How long the next line of an answer may be waited for, and all of one before the stop. Giving a large page cache back takes
/// seconds.
const ANSWER: Duration = Duration::from_secs(30);
/// How long the first round waits for an answer that says what of the page cache to put off.
const FIRST_ANSWER: Duration = Duration::from_secs(3);
/// How often it is looked meanwhile whether something else has happened.
const LOOK: Duration = Duration::from_millis(50);
/// Where fewer pages are to be sent (64 MiB), asking costs the guest more than sending costs us.
const WORTH_ASKING: u64 = 1 << 14;
/// From one question to the next: to answer takes the guest some processor time.
const PAUSE: Duration = Duration::from_secs(1);
/// The guest answers for no more than one part in so many of the time.
const ANSWERING: u32 = 5;

/// What is known of a guest that says which of its memory need not be sent.
#[derive(Debug)]
pub(super) struct Softening {
    guest: Guest,
    soft: Arc<Soft>,
    cache: Cache,
    /// When it was asked last.
    asked: Option<Instant>,
    /// Page cache that was not sent in the first round. It is owed.
    put_off: Option<Owed>,
    told: report::Soft,
    controls: Arc<Controls>,
}

impl Driver {
    /// From here on pages may be left out, if that is wished for and the guest has a port over which it can say which.
    pub(super) fn may_leave_out(&mut self, cargo: &mut Cargo) {
        if self.controls.aims().soft_pages == SoftPages::None {
            return;
        }
        if self.vm.as_ref().is_some_and(|vm| vm.has_guest_port(PORT)) {
            cargo.leave_out(Arc::new(Soft::new(cargo.ram_bytes().iter().copied())));
        } else if self.controls.aims().soft_pages != SoftPages::Free {
            self.note(
                "guest",
                format!(
                    "all of its memory is sent: it has no port {PORT}, see docs/operations/reductions.md"
                ),
            );
        }
    }

    /// Finds somebody in the guest who can be asked; none where there is nobody. That is only a saving: what goes wrong with
    /// it is told in the report. To be called right before memory is sent, so that the port is taken for no longer.
    pub(super) fn meet_guest(&mut self, cargo: &Cargo) -> Option<Softening> {
        let soft = cargo.soft()?;
        let wanted = self.controls.aims().soft_pages;
        let cache = match wanted {
            SoftPages::None => return None,
            SoftPages::Free => Cache::None,
            SoftPages::Cold => Cache::Cold,
            SoftPages::All => Cache::All,
        };
        match self.vm.as_mut()?.running_guest(PORT) {
            Ok(Some((connection, seen))) => {
                let guest = Guest::new(connection, seen, Arc::clone(&soft), cache, ANSWER);
                let failed = |error| self.note("guest", format!("it is not asked: {error}"));
                let guest = guest.map_err(failed).ok()?;
                let told = report::Soft { wanted, ..report::Soft::default() };
                let controls = Arc::clone(&self.controls);
                Some(Softening { guest, soft, cache, asked: None, put_off: None, told, controls })
            }
            Ok(None) | Err(VmError::Gone) => None,
            Err(error) => {
                self.note("guest", format!("all of its memory is sent: {}", crate::chain(&error)));
                None
            }
        }
    }

    /// Asks before a round whose marks have been cleared, if it is worth it. In the first one, in which all of
    /// memory goes, what could be given back later is put off.
    pub(super) fn ask_guest(
        &mut self,
        softening: &mut Softening,
        readable: Readable,
        is_first: bool,
    ) -> Result<Readable, Failure> {
        if is_first && softening.cache != Cache::None && softening.asked.is_none() {
            let told = softening.ask(false);
            self.hear_guest(softening, told, FIRST_ANSWER)?;
            let (readable, put_off) = readable.without(&softening.soft.cache());
            softening.told.put_off_pages = put_off.pages();
            softening.put_off = (put_off.pages() > 0).then_some(put_off);
            return Ok(readable);
        }
        if softening.is_due() && (is_first || readable.pages() >= WORTH_ASKING) {
            // Those pages are left out that have not been sent when the guest says so.
            drop(softening.ask(false));
        }
        Ok(readable)
    }

    /// Before the stop: has the guest give back what was put off, and owes it in this round, whose marks have been cleared.
    /// What it has not given back is sent as it is.
    pub(super) fn take_back(
        &mut self,
        softening: &mut Softening,
        readable: Readable,
    ) -> Result<Readable, Failure> {
        let Some(put_off) = softening.put_off.take() else { return Ok(readable) };
        self.note("guest", "gives its page cache back".to_owned());
        let told = softening.ask(true);
        self.hear_guest(softening, told, ANSWER)?;
        softening.told.given_back_pages = softening.soft.free_of(put_off.blocks());
        Ok(readable.and(&put_off))
    }

    /// Waits for an answer, but no longer than that, and listens to everybody else meanwhile.
    fn hear_guest(
        &mut self,
        softening: &Softening,
        told: Option<Receiver<()>>,
        patience: Duration,
    ) -> Result<(), Failure> {
        let Some(told) = told else { return Ok(()) };
        let deadline = Instant::now() + patience;
        while told.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            self.take_notices()?;
            if Instant::now() >= deadline {
                softening.guest.withdraw();
                break;
            }
        }
        Ok(())
    }
}

impl Softening {
    fn ask(&mut self, give_back: bool) -> Option<Receiver<()>> {
        self.asked = Some(Instant::now());
        self.guest.ask(give_back)
    }

    fn is_due(&self) -> bool {
        let took = self.guest.answers().1;
        self.asked.is_none_or(|asked| !self.guest.is_asked() && asked.elapsed() >= pause_after(took))
    }

    /// Whether the first answer is still waited for.
    pub(super) fn waits_for_first(&self) -> bool {
        self.guest.answers().0 == 0 && self.guest.is_asked()
    }

    /// Whether anything is put off, that has to be taken back before the stop.
    pub(super) fn has_put_off(&self) -> bool {
        self.put_off.is_some()
    }
}

/// How long after a question that was answered in so long the next one is asked.
fn pause_after(took: Duration) -> Duration {
    PAUSE.max(took.saturating_mul(ANSWERING))
}

impl Drop for Softening {
    /// Tells the report what became of it.
    fn drop(&mut self) {
        let heard = self.guest.heard();
        let told = report::Soft {
            answers: heard.answers,
            longest_answer_us: heard.longest.as_micros() as u64,
            poisoned: heard.poisoned,
            notes: heard.notes,
            ..self.told.clone()
        };
        self.controls.report(|report| report.soft = Some(told));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_answers_for_a_fifth_of_the_time_at_most() {
        let pause = |took_ms| pause_after(Duration::from_millis(took_ms)).as_millis();
        assert_eq!([0, 200, 201, 3000].map(pause), [1000, 1000, 1005, 15_000]);
        assert_eq!(pause_after(Duration::MAX), Duration::MAX);
    }
}
