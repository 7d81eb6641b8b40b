//! Post-copy after COMMITTED: connections that were cut are made anew for as long as the destination needs pages, by the
//! agent that began it or by the next one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::memory::{Saving, Sender};
use engine::handover::Found;
use engine::handover::source::{SourceEvent, SourceState};
use proto::message::{Message, Proposal, WantedPage};
use tracing::{info, warn};

use crate::destination::untrusted;
use crate::ram;
use crate::source::inbox::Notice;
use crate::source::phases::Failure;
use crate::source::serving::Later;
use crate::source::{Details, Driver, SourceVm};

impl Driver {
    /// What the destination was told by an agent before this one.
    pub(crate) fn proposed(&mut self, proposal: Option<Proposal>) {
        self.proposal = proposal;
    }

    /// As [`found`](Self::found); pages that the destination's guest may need can be read again.
    pub(crate) fn found_with(&mut self, vm: SourceVm, details: Option<&Details>) -> Found {
        let later = details.and_then(|details| details.later.as_ref());
        if let Some(regions) = later.filter(|_| self.may_be_needed()) {
            let regions: Vec<_> = regions.iter().map(ram::KeptRegion::region).collect();
            // This driver has nothing else to do yet, and the destination's guest may wait for it.
            while vm.is_alive() {
                match ::memory::open_source(&vm.process, &regions) {
                    Ok(readers) => {
                        let mut later = Later::new(
                            readers.into(),
                            ::memory::Recency::default(),
                            self.telemetry.left(),
                            Arc::clone(&self.controls.rate),
                        );
                        // How the one before pushed cannot be gone on with: what it had learnt is gone with it.
                        later.before = self.controls.report(|report| {
                            report.traces.others.push = None;
                            report.post_copy.unwrap_or_default()
                        });
                        self.later = Some(later);
                        break;
                    }
                    Err(error) => {
                        let error = crate::chain(&error);
                        warn!(error, "the memory that the destination may need cannot be read yet");
                        std::thread::sleep(self.contact.retry);
                    }
                }
            }
        }
        self.found(vm)
    }

    /// Nothing more goes over these connections.
    pub(super) fn serving_ended(&mut self, error: String) {
        let Some(serving) = self.later.as_mut().and_then(|later| later.serving.take()) else { return };
        drop(serving);
        if let Some(later) = &mut self.later {
            later.lost = Some(error);
        }
        // Should this agent die before the next connections are there, the report has what was decided so far.
        self.note_served();
        let report = self.controls.report(|report| report.clone());
        if let Err(error) = self.context.journal.put_report(&report) {
            warn!(error = crate::chain(&error), "the report is not in the journal yet");
        }
    }

    /// Whether the destination may need pages that are here. Whoever has the guest in the end, to read them harms nobody.
    fn may_be_needed(&self) -> bool {
        matches!(
            self.state,
            SourceState::Committed { .. }
                | SourceState::Reclaiming { .. }
                | SourceState::Bereft { incarnation: Some(_), .. }
        )
    }

    /// Makes connections anew where the destination may need pages and there are none.
    pub(super) fn serve_again(&mut self) {
        let is_cut = self.later.as_ref().is_some_and(Later::is_cut);
        if !is_cut || !self.may_be_needed() {
            return;
        }
        // When all pages are there, the destination ends them and says so in the next moment: then nothing was lost.
        if let Some(error) = self.later.as_mut().and_then(|later| later.lost.take()) {
            self.note("link-lost", error);
        }
        self.generation = self.generation.next();
        match self.resume_serving() {
            Ok(()) => {
                self.note("reconnected", format!("generation {}", self.generation));
                self.controls.report(|report| report.reconnections += 1);
                self.telemetry.update(|progress| progress.reconnections += 1);
                info!(migration = %self.terms.migration, generation = %self.generation, "pages go on");
            }
            Err(failure) => {
                warn!(migration = %self.terms.migration, reason = failure.reason, "no connections for pages yet");
                self.control = None;
                self.page_stream = None;
            }
        }
    }

    fn resume_serving(&mut self) -> Result<(), Failure> {
        let control =
            self.connect_control().map_err(|error| Failure::peer("cannot reach the destination", &error))?;
        let link = control.link;
        self.control = Some(control);
        self.say(&Message::Resume)?;
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        let deadline = Instant::now() + patience;
        loop {
            match self.inbox.wait(deadline) {
                Some(Notice::Message { link: Some(from), message: Message::Resumed }) if from == link => {
                    break;
                }
                // Whatever else it says, or has said, means what it always does.
                Some(notice) => self.notice(notice),
                None => {
                    return Err(Failure::new(SourceEvent::PeerSilent, "the destination does not answer"));
                }
            }
            if self.control.is_none() || self.later.is_none() {
                return Err(self.control_is_lost());
            }
        }
        let streams =
            self.connect_streams().map_err(|error| Failure::peer("cannot open the data streams", &error))?;
        let (Some(later), Some(page_stream)) = (&mut self.later, self.page_stream.take()) else {
            return Err(self.control_is_lost());
        };
        let saving = Saving { packing: later.packing.clone(), ..Saving::default() };
        let sender = Sender::saving(later.readers.clone(), saving, streams)
            .map_err(|error| Failure::local("cannot start the sending threads", &error))?;
        // The guest does not run here any more.
        sender.handle().gives_way_by(0);
        self.telemetry.follow(Some(sender.handle()));
        later
            .serve(self.generation, sender, page_stream, self.inbox.mailbox())
            .map_err(|error| Failure::local("no thread to send pages in", &error))
    }

    /// The destination found a page of the guest there that was to come, and has stopped the guest.
    pub(super) fn came_untrusted(&mut self, page: Option<WantedPage>) {
        let Some(page) = page.filter(|_| !self.came_untrusted) else { return };
        self.came_untrusted = true;
        let ram = self.proposal.as_ref().map_or(&[][..], |proposal| &proposal.ram);
        let (to, said) = (&self.terms.destination, untrusted::said(page, ram));
        let said = format!("the VM was stopped at {to}: {said}; see `whimbrel vm show` there");
        self.note("page-not-trusted", &*said);
        self.because(&said);
    }

    /// What was sent so far, and why so, is in the report.
    pub(super) fn note_served(&mut self) {
        let Some(later) = &self.later else { return };
        self.controls.report(|report| {
            let left_pages = report.post_copy.map_or(0, |before| before.left_pages);
            report.post_copy = Some(later.so_far(left_pages));
            later.counted.push().tell(&mut report.traces.others.push);
        });
    }
}
