//! Free page hints of a migration: the guest is asked, page cache is deferred, and requested back before the stop.

mod guest;

use host::VmError;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use ::guest::protocol::{Cache, PORT};
use ::memory::{HintedPages, LinkCounters, OwedPages, PageSet, ReadablePages, Reduction};

use super::active::{ActiveReduction, ActiveReductions, Interval, ReductionProgress};
use crate::source::failure::Failure;
use crate::source::payload::Payload;
use crate::source::{MigrationControls, SourceDriver};
use api::HintedMemory;
use api::report::{self, Report};
use guest::Guest;
use proto::packed::CompressionTrial;

/// Time limit for the next line of an answer, and for all of an answer before the stop. To give back a large page cache
/// needs seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Time that the first round waits for an answer that lists the page cache to defer.
const FIRST_ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// Interval of the checks for notices in the meantime.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Minimum number of pages to be sent (64 MiB) for a question: below it, the answer costs the guest more than the
/// sending costs the agent.
const MIN_PAGES: u64 = 1 << 14;
/// Minimum interval of questions: an answer needs some of the guest's processor time.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Divisor of the time: the guest spends at most one part in `TIME_DIVISOR` on answers.
const TIME_DIVISOR: u32 = 5;

/// Free page hints of a migration.
#[derive(Debug)]
pub(in crate::source) struct ActiveHints {
    hinted: Arc<HintedPages>,
}

impl ActiveHints {
    /// Returns, for each block of memory, the pages that are zeros at the destination because the guest did not use
    /// them.
    pub(in crate::source) fn left_out(&self) -> Vec<PageSet> {
        self.hinted.left_out()
    }
}

/// No policy decides about hints: the guest knows.
impl ActiveReduction for ActiveHints {
    fn of_streams(&self) -> Arc<dyn Reduction> {
        Arc::clone(&self.hinted) as Arc<dyn Reduction>
    }

    fn progress(&self) -> ReductionProgress {
        ReductionProgress::default()
    }

    fn take_trials(&self) -> Vec<CompressionTrial> {
        Vec::new()
    }

    fn needs_samples(&self, _: bool) -> bool {
        false
    }

    fn interrupted(&self, _: bool) {}

    fn sampled(&self, _: &Interval<'_>, _: &MigrationControls) {}

    fn link_is_slow(&self, _: &Arc<MigrationControls>) {}

    /// The questions to the guest are reported, when they have ended.
    fn report(&self, _: &LinkCounters, _: &mut Report) {}
}

/// State of the questions to a guest that reports which of its memory need not be sent.
#[derive(Debug)]
pub(in crate::source) struct FreePageHints {
    guest: Guest,
    hinted: Arc<HintedPages>,
    cache: Cache,
    /// Time of the last question.
    asked: Option<Instant>,
    /// Page cache that was deferred in the first round. It is owed.
    deferred: Option<OwedPages>,
    stats: report::FreePageHintStats,
    controls: Arc<MigrationControls>,
}

impl SourceDriver {
    /// Returns free page hints, if they are requested and the guest has the port for them.
    pub(super) fn free_page_hints(&self, payload: &Payload) -> Option<ActiveHints> {
        if self.controls.goals().settings.free_page_hints == HintedMemory::None {
            return None;
        }
        if self.resources.vm.as_ref().is_some_and(|vm| vm.has_guest_port(PORT)) {
            let hinted = Arc::new(HintedPages::new(payload.ram_bytes().iter().copied()));
            return Some(ActiveHints { hinted });
        }
        if self.controls.goals().settings.free_page_hints != HintedMemory::Free {
            self.note(
                "guest",
                format!(
                    "all of its memory is sent: it has no port {PORT}, see docs/operations/reductions.md"
                ),
            );
        }
        None
    }

    /// Connects to the program in the guest; returns none if there is no such program. This only saves bytes: its
    /// errors are noted in the report. The caller calls this right before memory is sent, so that the port is occupied
    /// no longer than needed.
    pub(in crate::source) fn connect_to_guest(
        &mut self,
        reductions: &ActiveReductions,
    ) -> Option<FreePageHints> {
        let hinted = Arc::clone(&reductions.find::<ActiveHints>()?.hinted);
        let wanted = self.controls.goals().settings.free_page_hints;
        let cache = match wanted {
            HintedMemory::None => return None,
            HintedMemory::Free => Cache::None,
            HintedMemory::Cold => Cache::Cold,
            HintedMemory::All => Cache::All,
        };
        match self.resources.vm.as_mut()?.connect_guest(PORT) {
            Ok(Some((connection, seen))) => {
                let guest = Guest::new(connection, seen, Arc::clone(&hinted), cache, ANSWER_LIMIT);
                let failed = |error| self.note("guest", format!("it cannot be queried: {error}"));
                let guest = guest.map_err(failed).ok()?;
                let stats = report::FreePageHintStats { wanted, ..report::FreePageHintStats::default() };
                let controls = Arc::clone(&self.controls);
                Some(FreePageHints { guest, hinted, cache, asked: None, deferred: None, stats, controls })
            }
            Ok(None) | Err(VmError::Gone) => None,
            Err(error) => {
                self.note("guest", format!("all of its memory is sent: {}", crate::chain(&error)));
                None
            }
        }
    }

    /// Asks the guest before a round whose marks have been cleared, if that is worthwhile. In the first round, which
    /// sends all of memory, page cache that could be given back later is deferred.
    pub(in crate::source) fn ask_guest(
        &mut self,
        hints: &mut FreePageHints,
        readable: ReadablePages,
        is_first: bool,
    ) -> Result<ReadablePages, Failure> {
        if is_first && hints.cache != Cache::None && hints.asked.is_none() {
            let answer_ended = hints.ask(false);
            self.wait_for_guest(hints, answer_ended, FIRST_ANSWER_LIMIT)?;
            let (readable, deferred) = readable.without(&hints.hinted.cache());
            hints.stats.deferred_pages = deferred.pages();
            hints.deferred = (deferred.pages() > 0).then_some(deferred);
            return Ok(readable);
        }
        if hints.is_due() && (is_first || readable.pages() >= MIN_PAGES) {
            // Pages that have not been sent when the answer arrives are left out.
            drop(hints.ask(false));
        }
        Ok(readable)
    }

    /// Lets the guest give back the deferred page cache before the stop, and adds it to this round, whose marks have
    /// been cleared. Pages that the guest has not given back are sent as they are.
    pub(in crate::source) fn take_back(
        &mut self,
        hints: &mut FreePageHints,
        readable: ReadablePages,
    ) -> Result<ReadablePages, Failure> {
        let Some(deferred) = hints.deferred.take() else { return Ok(readable) };
        self.note("guest", "frees its page cache".to_owned());
        let answer_ended = hints.ask(true);
        self.wait_for_guest(hints, answer_ended, ANSWER_LIMIT)?;
        hints.stats.freed_pages = hints.hinted.count_free(deferred.blocks());
        Ok(readable.and(&deferred))
    }

    /// Waits for an answer, at most for `patience`, and handles notices in the meantime.
    fn wait_for_guest(
        &mut self,
        hints: &FreePageHints,
        answer_ended: Option<Receiver<()>>,
        patience: Duration,
    ) -> Result<(), Failure> {
        let Some(answer_ended) = answer_ended else { return Ok(()) };
        let deadline = Instant::now() + patience;
        while answer_ended.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            self.handle_notices()?;
            if Instant::now() >= deadline {
                hints.guest.withdraw();
                break;
            }
        }
        Ok(())
    }
}

impl FreePageHints {
    fn ask(&mut self, give_back: bool) -> Option<Receiver<()>> {
        self.asked = Some(Instant::now());
        self.guest.ask(give_back)
    }

    fn is_due(&self) -> bool {
        let took = self.guest.answers().1;
        self.asked
            .is_none_or(|asked| !self.guest.has_pending_answer() && asked.elapsed() >= pause_after(took))
    }

    /// Returns true if the first answer is still pending.
    pub(in crate::source) fn is_first_pending(&self) -> bool {
        self.guest.answers().0 == 0 && self.guest.has_pending_answer()
    }

    /// Returns true if page cache is deferred that has to be requested back before the stop.
    pub(in crate::source) fn has_deferred(&self) -> bool {
        self.deferred.is_some()
    }
}

/// Returns the interval from a question to the next, if its answer lasted `took`.
fn pause_after(took: Duration) -> Duration {
    MIN_INTERVAL.max(took.saturating_mul(TIME_DIVISOR))
}

impl Drop for FreePageHints {
    /// Adds the statistics to the report.
    fn drop(&mut self) {
        let answer_statistics = self.guest.answer_statistics();
        let stats = report::FreePageHintStats {
            answers: answer_statistics.answers,
            longest_answer_us: answer_statistics.longest.as_micros() as u64,
            poisoned: answer_statistics.poisoned,
            notes: answer_statistics.notes,
            ..self.stats.clone()
        };
        self.controls.report(|report| report.free_page_hints = Some(stats));
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
