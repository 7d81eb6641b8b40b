//! Page references to content that the destination already has. Of the copied disks: the source agent asks about some
//! of their pages, and the destination reports the content of the templates that have such pages. Of memory and of
//! images that both hosts have, while the link is slow and as long as references pay.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{CONTENT_HASH_BYTES, ContentHash, ContentIndex, LinkCounters, Reduction, ReferenceOutcome};
use engine::handover::source::SourceEvent;
use engine::references::{ReferenceObservation, ReferencePolicy};
use engine::trace::TracedPolicy;
use proto::limits::{ADVERTISED_TEMPLATES, PAGE_BYTES, QUERIED_PAGES};
use proto::message::{Acceptance, Message};
use proto::packed::CompressionTrial;
use qemu::describe::VmDescription;
use rustix::process::setpriority_process;
use tracing::warn;

use super::active::{ActiveReduction, Interval, ReductionProgress};
use crate::source::failure::{Failure, unexpected};
use crate::source::payload::Payload;
use crate::source::{MigrationControls, SourceDriver};
use api::report::Report;
use host::templates::{
    IndexingStats, LeftoverTemplate, MAX_ADVERTISED_PAGES, SharedImage, Templates, from_hex, shared_images,
    to_hex,
};

/// Maximum number of sent pages that are remembered as targets of references: 4 GiB, for 18 MiB.
const MAX_SENT_PAGES: u64 = MAX_ADVERTISED_PAGES;
/// Niceness of the thread that reads images, in favour of guests and the data plane (`nice(2)`).
const NICE: i32 = 10;
/// Formats of images whose header names the images below them.
const FORMATS: [&str; 2] = ["raw", "qcow2"];

/// Page references of a migration.
#[derive(Debug)]
pub(in crate::source) struct ActiveReferences {
    known: Arc<ContentIndex>,
    /// Images that both hosts have. They are read only if the link is slow, as pages of memory are looked up only then.
    shared: Option<SharedImages>,
    /// Policy that watches whether references to memory pay.
    policy: Mutex<TracedPolicy<ReferencePolicy>>,
}

impl ActiveReferences {
    /// Prepares references to content that the destination is known to have.
    pub(super) fn new(known: ContentIndex, shared: Option<SharedImages>) -> Self {
        let policy = Mutex::new(TracedPolicy::new(ReferencePolicy::default()));
        Self { known: Arc::new(known), shared, policy }
    }

    fn policy(&self) -> MutexGuard<'_, TracedPolicy<ReferencePolicy>> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends references to memory, because the destination reads the content more slowly than the link would carry it.
    fn end_memory_references(&self, controls: &MigrationControls) {
        if !self.known.is_memory_lookup_enabled() {
            return;
        }
        self.known.disable_memory_lookup();
        let at_us = controls.requested.elapsed().as_micros() as u64;
        let detail = "page references are switched off: the destination reads pages more slowly than they \
                      can be sent, or has different content";
        controls.report(|report| report.event(at_us, "references", detail));
    }
}

impl ActiveReduction for ActiveReferences {
    fn of_streams(&self) -> Arc<dyn Reduction> {
        Arc::clone(&self.known) as Arc<dyn Reduction>
    }

    fn progress(&self) -> ReductionProgress {
        let ReferenceOutcome { taken_bytes, refused_bytes, awaited_bytes, interruptions } =
            self.known.referred();
        ReductionProgress {
            taken_bytes,
            refused_bytes,
            awaited_bytes,
            interruptions,
            ..ReductionProgress::default()
        }
    }

    fn take_trials(&self) -> Vec<CompressionTrial> {
        Vec::new()
    }

    fn needs_samples(&self, _: bool) -> bool {
        true
    }

    fn interrupted(&self, is_slow: bool) {
        self.policy().reset();
        if is_slow {
            self.known.enable_memory_lookup();
        }
    }

    fn sampled(&self, interval: &Interval<'_>, controls: &MigrationControls) {
        if !interval.is_slow {
            return;
        }
        let passed = ReferenceObservation {
            interval_ns: interval.length_ns,
            data_bytes: interval.data_bytes,
            referred_bytes: interval.progress.taken_bytes,
            refused_bytes: interval.progress.refused_bytes,
            is_awaited: interval.is_awaited,
            link_bytes_per_s: interval.decision.link_bytes_per_s,
            peer_is_busy: interval.decision.peer_is_busy,
        };
        let mut policy = self.policy();
        if !policy.decide_on(passed) {
            self.end_memory_references(controls);
        }
        controls.report(|report| policy.update_report(&mut report.traces.others.references));
    }

    fn link_is_slow(&self, controls: &Arc<MigrationControls>) {
        self.known.enable_memory_lookup();
        if let Some(shared) = &self.shared {
            shared.clone().learn(&self.known, controls);
        }
    }

    /// References have no section in the report: its rounds count them.
    fn report(&self, _: &LinkCounters, _: &mut Report) {}
}

impl SourceDriver {
    /// Returns true if page references are sent.
    pub(in crate::source) fn uses_references(&self, acceptance: &Acceptance) -> bool {
        self.controls.goals().settings.references && acceptance.references
    }

    /// Returns the images that both hosts have, if pages of them may be referred to.
    pub(in crate::source) fn shared_images(
        &self,
        acceptance: &Acceptance,
        payload: &Payload,
    ) -> Option<SharedImages> {
        let described = self
            .agreement
            .proposal
            .as_ref()
            .filter(|_| self.uses_references(acceptance))?
            .description
            .clone();
        let vm = serde_json::from_value::<VmDescription>(described).ok()?;
        let is_copied = |name: &str| acceptance.copied.iter().any(|copied| copied.name == name);
        let images = shared_images(&vm.disks, is_copied);
        let templates = Arc::clone(&self.context.templates);
        let memory_bytes = payload.ram_bytes().iter().sum();
        (!images.is_empty()).then_some(SharedImages { images, memory_bytes, templates })
    }

    /// Returns the index of the content that the destination reports to have.
    pub(in crate::source) fn query_destination_content(
        &mut self,
        acceptance: &Acceptance,
        payload: &Payload,
    ) -> Result<ContentIndex, Failure> {
        let seeks = acceptance.templates > 0 && !acceptance.copied.is_empty();
        let runs = if seeks { self.query_templates(payload)? } else { Vec::new() };
        let template_pages: usize = runs.iter().map(|run| run.hashes.len()).sum();
        let sent_pages =
            self.resources.participants.pages_sent_first().iter().map(::memory::PageSet::count).sum::<u64>();
        let blocks = payload.readers();
        let known = ContentIndex::new(
            blocks.iter().map(|block| block.bytes()),
            payload.ram_blocks(),
            template_pages,
            sent_pages.min(MAX_SENT_PAGES) as usize,
        );
        if template_pages > 0 {
            let templates = runs.iter().map(|run| run.template).collect::<BTreeSet<_>>().len();
            let mib = (template_pages as u64 * PAGE_BYTES) >> 20;
            self.note(
                "templates",
                format!("{templates} templates of the destination have pages in common, {mib} MiB in all"),
            );
        }
        for run in runs {
            known.learn(run.template, run.first_page, run.hashes);
        }
        Ok(known)
    }

    /// Remembers the leftover images of the VM's disks: the content that was sent is known, and stays
    /// in these images until they are removed. If the VM comes back, that content need not be sent.
    pub(in crate::source) fn remember_images(&self, first_disk: usize, references: &ActiveReferences) {
        let described = self.agreement.proposal.as_ref().map(|proposal| proposal.description.clone());
        let Some(vm) = described.and_then(|it| serde_json::from_value::<VmDescription>(it).ok()) else {
            return;
        };
        let copied = self.controls.report(|report| report.disks.clone());
        let mut images = Vec::new();
        for (block, copied) in (first_disk..).zip(copied) {
            let Some(disk) = vm.disks.iter().find(|disk| disk.name == copied.name) else { continue };
            let Some((path, format)) = disk.file.as_ref().map(PathBuf::from).zip(disk.format.clone()) else {
                continue;
            };
            let pages = u16::try_from(block)
                .map_or_else(|_| Vec::new(), |block| references.known.sent_pages_of(block));
            if FORMATS.contains(&format.as_str()) && !pages.is_empty() {
                images.push((LeftoverTemplate { path, format }, pages));
            }
        }
        self.context.templates.leftovers(images);
    }

    /// Asks about pages from all over the disks, and records the destination's answers. This only saves bytes: answers
    /// that are late, too many, or lost with the link are not needed.
    fn query_templates(&mut self, payload: &Payload) -> Result<Vec<TemplateRun>, Failure> {
        let hashes = sample_hashes(&self.resources.participants.pages_sent_first(), payload)
            .map_err(|error| Failure::local("cannot read the pages to send", &error))?;
        let patience = Duration::from_millis(self.context.config.timeouts.peer_silence_ms);
        let mut taken = Vec::new();
        self.agreement.is_querying_templates = true;
        let result = self
            .send_message(&Message::QueryTemplates { hashes })
            .and_then(|()| self.receive_templates(&mut taken, Instant::now() + patience));
        self.agreement.is_querying_templates = false;
        let why = match result {
            Ok(()) => return Ok(taken),
            Err(Failure { event: SourceEvent::PeerSilent, .. }) => {
                "the destination did not report the content of all its templates in time".to_owned()
            }
            // Mended before the first round is sent, like any other cut: see `open_streams`.
            Err(Failure { event: SourceEvent::PeerLost, reason, .. }) => {
                self.connections.control = None;
                self.connections.control_lost = Some(reason.clone());
                reason
            }
            Err(failure) => return Err(failure),
        };
        self.note("templates", why);
        Ok(taken)
    }

    fn receive_templates(&mut self, taken: &mut Vec<TemplateRun>, deadline: Instant) -> Result<(), Failure> {
        let mut pages = 0;
        loop {
            let (template, runs, last) = match self.receive_message(deadline)? {
                Message::TemplatePages { template, runs, last } => (template, runs, last),
                other => return Err(unexpected(&other)),
            };
            // Answers beyond the limits are not remembered, but received to their end.
            let is_too_much = template >= ADVERTISED_TEMPLATES || pages >= MAX_ADVERTISED_PAGES;
            for run in runs.into_iter().filter(|_| !is_too_much) {
                let digits = run.hashes.as_bytes().chunks_exact(2 * CONTENT_HASH_BYTES);
                let hashes =
                    digits.filter_map(|digits| from_hex(std::str::from_utf8(digits).ok()?)).collect();
                let run = TemplateRun { template, first_page: run.first_page, hashes };
                pages += run.hashes.len() as u64;
                taken.push(run);
            }
            if last {
                return Ok(());
            }
        }
    }
}

/// Images that both hosts have, to be read when that is worthwhile.
#[derive(Clone, Debug)]
pub(in crate::source) struct SharedImages {
    images: Vec<SharedImage>,
    memory_bytes: u64,
    templates: Arc<Templates>,
}

impl SharedImages {
    /// Indexes the images' content in a separate thread, until all is known or the index is no longer needed; the
    /// result is noted in the report.
    fn learn(self, known: &Arc<ContentIndex>, controls: &Arc<MigrationControls>) {
        let (known, controls) = (Arc::downgrade(known), Arc::clone(controls));
        let work = move || {
            // The servers that it starts inherit the niceness. Without permission for that, it works at normal
            // priority.
            let _ = setpriority_process(None, NICE);
            let IndexingStats { images, pages, read_pages } =
                self.templates.index_shared_images(&self.images, self.memory_bytes, &known);
            let mib = |pages: u64| (pages * PAGE_BYTES) >> 20;
            let detail = format!(
                "{images} of {} images that both hosts have are indexed, {} MiB in all, {} MiB of it read \
                 for this migration",
                self.images.len(),
                mib(pages),
                mib(read_pages)
            );
            let at_us = controls.requested.elapsed().as_micros() as u64;
            controls.report(|report| report.event(at_us, "shared-images", detail));
        };
        if let Err(error) = thread::Builder::new().name("shared images".to_owned()).spawn(work) {
            warn!(%error, "cannot start a thread to read images that both hosts have");
        }
    }
}

/// Adjacent pages of a template.
struct TemplateRun {
    template: u16,
    first_page: u64,
    hashes: Vec<ContentHash>,
}

/// Returns the hashes of pages from all over the disks, without pages of zeros.
fn sample_hashes(disks: &[::memory::PageSet], payload: &Payload) -> Result<Vec<String>, ::memory::RamError> {
    let readers = payload.readers();
    let all: u64 = disks.iter().map(::memory::PageSet::count).sum();
    let step = all.div_ceil(QUERIED_PAGES as u64 / 2).max(1);
    let mut hashes = Vec::new();
    let mut page = [0; PAGE_BYTES as usize];
    let mut seen = 0;
    for (disk, reader) in disks.iter().zip(&readers[payload.ram_blocks()..]) {
        for run in disk.runs() {
            // The next page whose number is a multiple of the step, counted over all disks.
            let mut at = run.start + (step - seen % step) % step;
            while at < run.end {
                reader.read(at * PAGE_BYTES, &mut page)?;
                if page.iter().any(|byte| *byte != 0) {
                    hashes.push(to_hex(ContentHash::of(&page)));
                }
                at += step;
            }
            seen += run.end - run.start;
        }
    }
    Ok(hashes)
}
