//! Pre-flight checks: everything that prevents a migration, found before anything is changed.
//!
//! The source inspects its VM and sends the result as facts; the destination compares them with its own host. The rules
//! themselves are in `qemu::preflight`; this module gathers the facts.

mod disks;
mod dns_records;
mod findings;
mod kernel;
mod network_probe;
mod redirected_cards;
mod redirection;
mod registry;
mod room;
mod trial;
mod writable_shared_images;

pub use disks::proposed_disks;
pub use dns_records::{check_dns_records, relocation};
pub use kernel::kernel;
pub use net::Prober;
pub use network_probe::{SourceProbe, begin_probe};
pub use redirection::{offer_redirection, returning_addresses};
pub use room::{end_measurements, measure};
pub use trial::{Trial, started_or_findings};

use std::path::PathBuf;
use std::time::{Duration, Instant};

use engine::handover::MigrationTerms;
use link::Incoming;
use proto::message::{Acceptance, Finding, Message, Proposal, Severity, is_blocked};
use proto::{Generation, HostId, MigrationId, Purpose};
use qemu::command::{self, BuiltCommand, CommandError, HostRules, RamPlan};
use qemu::describe::{Disk, VmDescription};
use qemu::find::{self, Selector};
use qemu::preflight::facts::MemoryFeatures;
use qemu::preflight::files::{self, NeededFile};
use qemu::preflight::gather;
use qemu::preflight::{self as rules, DestinationFacts, SourceFacts};
use qemu::process::Launch;
use qemu::qmp::Qmp;
use qemu::ram::RamBlock;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::Context;
use crate::arrivals::{Needs, ReservationGuard};
use crate::disks::{KnownFile, PlannedDisk};
use crate::peers::{self, PeerError};
use crate::{ArrivalArtifacts, ArrivalError};
use crate::{SourceVm, VmError};
use api::RamChoice;
use disks::DiskPlan;
use findings::{
    changed_paths, finding, left_out, no_qemu_starts, problems, unreachable_source_finding, unreadable,
};
use kernel::kernel_finding;
use network_probe::ExpectedProbe;
use redirection::ExpectedRedirections;
use writable_shared_images::WritableSharedImage;

/// Result of the source's inspection of its VM.
pub struct SourceSurvey {
    /// Facts about the host and its kernel, for the destination.
    pub facts: serde_json::Value,
    /// Description of the VM, for the destination.
    pub description: serde_json::Value,
    /// Version of its QEMU.
    pub qemu_version: String,
    /// Findings, none of which stands in the way.
    pub findings: Vec<Finding>,
    /// Disks of the VM.
    pub disks: Vec<Disk>,
}

/// Reason for which a VM could not be inspected.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// The VM does not answer.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The VM's process was not found.
    #[error("QEMU's process was not found")]
    Find(#[from] find::FindError),
    /// The VM's monitor failed.
    #[error("QEMU did not report its properties")]
    Gather(#[from] qemu::qmp::QmpError),
    /// The facts cannot be converted to JSON.
    #[error("the facts found cannot be encoded")]
    Json(#[from] serde_json::Error),
}

/// Facts of the source about its host and its VM, beside the description.
#[derive(Serialize, Deserialize)]
struct Facts {
    source: serde_json::Value,
    files: Vec<NeededFile>,
}

/// Inspects a VM that is to leave.
pub fn source(vm: &mut SourceVm, allowed: &[String]) -> Result<SourceSurvey, SurveyError> {
    let process = find::find(&Selector::Pid(vm.process.pid()))?;
    let blocks = vm.blocks.clone();
    let facts = gather::source(vm.monitor()?, &process, blocks)?;
    let mut findings = description_findings(&facts.vm, allowed);
    // Only findings that end the migration here: the destination reports the rest, together with its own findings.
    for found in rules::check_source(&facts).into_iter().map(finding) {
        if found.severity == Severity::Blocker && !findings.contains(&found) {
            findings.push(found);
        }
    }
    findings.extend(kernel_finding());
    let files = files::needed_files(&facts.vm);
    let qemu_version = facts.vm.program.version.clone();
    let disks = facts.vm.disks.clone();
    let mut source = serde_json::to_value(&facts)?;
    // The description is sent separately.
    let description = source.as_object_mut().and_then(|facts| facts.remove("vm")).unwrap_or_default();
    let facts = serde_json::to_value(Facts { source, files })?;
    Ok(SourceSurvey { facts, description, qemu_version, findings, disks })
}

/// Returns findings for a VM whose description is not exact, because it cannot be built again.
pub(crate) fn description_findings(description: &VmDescription, allowed: &[String]) -> Vec<Finding> {
    let mut findings = problems(&description.problems);
    // The destination builds the command line; errors that any host would report are detected here already.
    let rules =
        HostRules { allow_options: allowed.to_vec(), ..HostRules::new("qemu", "/run/whimbrel/vms/x") };
    if let Err(error) = command::build(description, &rules) {
        for found in problems(&error.problems) {
            if !findings.contains(&found) {
                findings.push(found);
            }
        }
    }
    findings
}

/// A proposal that can be accepted.
pub struct AcceptableProposal {
    /// Hosts, VM and epoch of the migration.
    pub terms: MigrationTerms,
    /// Its VM is described with the images that it will have here.
    pub proposal: Proposal,
    /// Command line of the QEMU that waits for the VM.
    pub launch: Launch,
    /// Files that are made for that QEMU.
    pub artifacts: ArrivalArtifacts,
    /// Findings, none of which stands in the way.
    pub findings: Vec<Finding>,
    /// Compared once more after that QEMU has been started.
    pub compared: Comparison,
    /// Memory that is reserved for it; none if this is only a check.
    pub reserved: Option<ReservationGuard>,
    /// Kind of the QEMU's memory, as text for users.
    pub ram_kind: String,
    /// Version of the QEMU that would be started.
    pub qemu_version: String,
    /// Copied disks.
    pub copied: Vec<PlannedDisk>,
    /// This host's replacements for the source's settings.
    here: HostRules,
}

/// Facts of both hosts about a proposal, and this host's plan for its VM.
struct ArrivalFacts {
    theirs: SourceFacts,
    ours: DestinationFacts,
    /// This host's replacements for the source's settings.
    here: HostRules,
    artifacts: ArrivalArtifacts,
    /// Kind of the QEMU's memory, as text for users.
    ram_kind: String,
    disks: DiskPlan,
    /// Present if this host cannot connect to the source.
    unreachable_source_finding: Option<Finding>,
}

/// Result of a comparison without a blocker.
struct PassedComparison {
    built: BuiltCommand,
    findings: Vec<Finding>,
    /// Those findings that do not come from the comparison of the two hosts.
    others: Vec<Finding>,
    /// Memory and space for images; none if this is only a check.
    reserved: Option<ReservationGuard>,
}

/// Compares a proposal with this host. Returns findings with a blocker as the error.
pub fn destination(
    context: &Context,
    from: &HostId,
    id: &MigrationId,
    proposal: Proposal,
) -> Result<AcceptableProposal, Vec<Finding>> {
    let (mut facts, built) = gather_facts(context, from, id, &proposal)?;
    let passed = compare(context, from, &proposal, &mut facts, built)?;
    let terms = MigrationTerms {
        migration: id.clone(),
        source: from.clone(),
        destination: context.config.host.clone(),
        registry: proposal.registry_epoch,
        witness: proposal.witness.clone(),
    };
    assemble(context, terms, proposal, facts, passed)
}

/// Gathers the facts of both hosts, and builds the command line for the VM's QEMU here.
fn gather_facts(
    context: &Context,
    from: &HostId,
    id: &MigrationId,
    proposal: &Proposal,
) -> Result<(ArrivalFacts, Result<BuiltCommand, CommandError>), Vec<Finding>> {
    let (theirs, files) =
        theirs(proposal).map_err(|error| vec![unreadable("the facts cannot be read", &error)])?;
    let mut artifacts = ArrivalArtifacts::plan(&context.config, id);
    let (plan, ram_kind) = ram_plan(proposal.ram_kind.as_deref(), &theirs);
    let config = &context.config.qemu;
    let disk_dirs = context.config.disk_dirs.iter();
    let mut here = HostRules {
        data_dirs: config.data_dirs.clone(),
        tap: context.config.taps.clone(),
        disk_dirs: disk_dirs.map(|(there, here)| (there.clone(), here.clone())).collect(),
        ram: plan,
        allow_options: config.allow_options.iter().chain(&proposal.allow_options).cloned().collect(),
        ..HostRules::new(
            context.emulators.choose(&config.binaries, &theirs.vm.program.version),
            &artifacts.directory,
        )
    };
    here.log_dir = Some(artifacts.log_directory.clone());
    let sights = files::inspect_files(&files, &here, &shared(context));
    let disks = disks::plan(context.config.pool.as_ref(), id, &theirs.vm, &proposal.disks, &sights);
    let files = disks::needed_at_destination(files, &theirs.vm, &disks.copied);
    here.images = disks.copied.iter().map(|disk| (disk.name.clone(), disk.new_image())).collect();
    artifacts.images = disks.copied.iter().map(|disk| disk.location.path.clone()).collect();
    let built = command::build(&theirs.vm, &here);
    let problems = built.as_ref().err().map(|error| error.problems.clone()).unwrap_or_default();
    let emulator = context.emulators.ask(&context.config, &here);
    let emulator = emulator.map_err(|error| vec![no_qemu_starts(&here.qemu_binary, &error)])?;
    let ours = gather::destination(&emulator, &theirs.vm, &files, &here, &shared(context), problems);
    let unreachable_source_finding = unreachable_source_finding(context, from, id, &proposal.reply_to);
    let facts = ArrivalFacts { theirs, ours, here, artifacts, ram_kind, disks, unreachable_source_finding };
    Ok((facts, built))
}

/// Compares the facts of both hosts, and makes the reservation unless this is only a check. Returns findings with a
/// blocker as the error.
fn compare(
    context: &Context,
    from: &HostId,
    proposal: &Proposal,
    facts: &mut ArrivalFacts,
    built: Result<BuiltCommand, CommandError>,
) -> Result<PassedComparison, Vec<Finding>> {
    let ArrivalFacts { theirs, ours, disks, unreachable_source_finding, .. } = facts;
    // Until the memory is reserved no other migration may read the amount of free memory.
    let arrivals = context.arrivals.lock_reservations();
    let (hugepage_bytes, memory_bytes) = ours.memory_needed(theirs);
    let reserved_bytes = arrivals.reserved_bytes(hugepage_bytes);
    let reserved_image_bytes = arrivals.reserved_image_bytes();
    ours.refresh_memory(reserved_bytes);
    let images = disks.images();
    let room = disks.room(context.config.pool.as_ref(), reserved_image_bytes);
    let mut others = Vec::new();
    if let Ok(built) = &built {
        others.extend(left_out(&built.warnings));
        others.extend(changed_paths(&context.config.host, &built.notes));
    }
    others.extend(disks.findings.drain(..).chain(room));
    others.extend(unreachable_source_finding.take());
    others.extend(registry::finding(context.config.registry.as_ref(), from, proposal));
    let checked = rules::check(theirs, ours).into_iter().map(finding);
    let findings: Vec<_> = checked.chain(others.iter().cloned()).collect();
    let (Ok(built), false) = (built, is_blocked(&findings)) else { return Err(findings) };
    let needs = Needs { memory_bytes, hugepage_bytes, images };
    let reserved = (!proposal.check_only).then(|| arrivals.reservation(needs));
    Ok(PassedComparison { built, findings, others, reserved })
}

/// Assembles the proposal that can be accepted.
fn assemble(
    context: &Context,
    terms: MigrationTerms,
    proposal: Proposal,
    facts: ArrivalFacts,
    passed: PassedComparison,
) -> Result<AcceptableProposal, Vec<Finding>> {
    let ArrivalFacts { theirs, ours, here, mut artifacts, ram_kind, disks, .. } = facts;
    let PassedComparison { built, findings, others, reserved } = passed;
    artifacts.logs = built.logs;
    let launch = Launch {
        argv: built.argv,
        env: Vec::new(),
        cwd: None,
        log: built.log,
        qmp: built.qmp,
        scope: Some(format!("whimbrel-vm-{}", terms.migration.vm)),
        oom_score_adj: theirs.oom_score_adj,
    };
    let qemu_version = ours.qemu_version.clone();
    let disks_here =
        theirs.vm.disks.iter().map(|disk| disks::with_local_image(disk.clone(), &here)).collect();
    let described = serde_json::to_value(VmDescription { disks: disks_here, ..theirs.vm.clone() });
    let description =
        described.map_err(|error| vec![unreadable("the description cannot be stored", &error)])?;
    let proposal = Proposal { description, ..proposal };
    let images = here.images.values().map(|image| image.path.clone()).collect();
    let shared = writable_shared_images::of(&theirs.vm, &here);
    let probe = ExpectedProbe::of(&terms, proposal.probe.as_ref());
    let redirection = ExpectedRedirections::of(context, &terms, &proposal).map_err(|found| vec![found])?;
    let compared = Comparison { theirs, ours, images, others, shared, probe, redirection };
    let copied = disks.copied;
    Ok(AcceptableProposal {
        terms,
        proposal,
        launch,
        artifacts,
        findings,
        compared,
        reserved,
        ram_kind,
        qemu_version,
        copied,
        here,
    })
}

/// Facts of both hosts, for a second comparison with a QEMU that was started for the VM.
pub struct Comparison {
    theirs: SourceFacts,
    ours: DestinationFacts,
    /// Images that were made for the VM's disks.
    images: Vec<PathBuf>,
    /// Findings that do not come from the comparison of the two hosts.
    others: Vec<Finding>,
    /// Shared images that the VM will write to.
    shared: Vec<WritableSharedImage>,
    /// Probe of the VM's networks, if the source sends one.
    probe: Option<ExpectedProbe>,
    /// Redirection of the VM's connections, if the source offers one.
    redirection: Option<ExpectedRedirections>,
}

impl Comparison {
    /// Returns where the redirection of the VM's connections is found after the check of the started QEMU.
    pub fn agreed_redirections(&self) -> crate::redirections::AgreedRedirections {
        self.redirection.as_ref().map(ExpectedRedirections::agreed).unwrap_or_default()
    }

    /// Returns the current identities of the shared images.
    pub fn shared_files(&self) -> Vec<KnownFile> {
        self.shared.iter().filter_map(WritableSharedImage::known).collect()
    }

    /// Checks the started QEMU before the source goes on: a guest that does not get the devices or the CPU features
    /// that it had would fail after the commit point, or silently. The findings are those of both hosts.
    pub fn check_started(
        mut self,
        qmp: &mut Qmp,
        blocks: &[RamBlock],
        pid: u32,
    ) -> Result<Vec<Finding>, ArrivalError> {
        gather::started(&mut self.ours, &self.theirs, qmp, blocks)?;
        let checked = rules::check(&self.theirs, &self.ours).into_iter().map(finding);
        let mut findings: Vec<_> = checked.chain(self.others).collect();
        findings.extend(disks::unopened_image_finding(&self.images, &qemu::control::open_files(qmp)?));
        findings.extend(self.shared.iter().filter_map(|image| image.refused(pid)));
        if let Some(probe) = self.probe.filter(|_| !is_blocked(&findings)) {
            findings.extend(probe.look(qmp, pid));
        }
        if let Some(redirection) = self.redirection.filter(|_| !is_blocked(&findings)) {
            findings.extend(redirection.look(qmp, pid));
        }
        if is_blocked(&findings) { Err(ArrivalError::Refused(findings)) } else { Ok(findings) }
    }
}

/// Returns the source's facts, with the description in its place.
fn theirs(proposal: &Proposal) -> Result<(SourceFacts, Vec<NeededFile>), serde_json::Error> {
    let Facts { mut source, files } = serde_json::from_value(proposal.facts.clone())?;
    if let Some(facts) = source.as_object_mut() {
        facts.insert("vm".to_owned(), proposal.description.clone());
    }
    Ok((serde_json::from_value(source)?, files))
}

/// Returns the files of the proposal's VM at its source; none if the source did not send them.
pub(crate) fn files_of(proposal: &Proposal) -> Vec<NeededFile> {
    let facts: Result<Facts, _> = serde_json::from_value(proposal.facts.clone());
    facts.map(|facts| facts.files).unwrap_or_default()
}

/// Returns the directories, files and addresses that are the same on both hosts according to the configuration.
fn shared(context: &Context) -> Vec<String> {
    let dirs = context.config.disk_dirs.keys().map(|dir| dir.to_string_lossy().into_owned());
    dirs.chain(context.config.disks_shared.iter().cloned()).collect()
}

/// Returns the plan for the VM's memory here, and its name.
fn ram_plan(wanted: Option<&str>, theirs: &SourceFacts) -> (RamPlan, String) {
    let plan = match wanted {
        Some("anonymous") => RamPlan::Anonymous,
        Some("memfd") => RamPlan::Memfd { hugepage_bytes: rules::ram::hugepage_bytes(theirs) },
        _ => {
            let (plan, because) = rules::ram::choose(theirs, &MemoryFeatures::gather());
            info!(?plan, because, "kind of RAM chosen");
            plan
        }
    };
    let kind = match plan {
        RamPlan::Memfd { hugepage_bytes: Some(bytes) } => format!("memfd, pages of {} KiB", bytes >> 10),
        RamPlan::Memfd { hugepage_bytes: None } => "memfd".to_owned(),
        RamPlan::Anonymous => "anonymous".to_owned(),
    };
    (plan, kind)
}

/// Returns the protocol's word for a user's choice; none to let the destination choose.
pub fn wanted_ram(choice: RamChoice) -> Option<String> {
    match choice {
        RamChoice::Auto => None,
        RamChoice::Memfd => Some("memfd".to_owned()),
        RamChoice::Anonymous => Some("anonymous".to_owned()),
    }
}

/// Sends a proposal to the destination for a check. Returns its findings, and its acceptance if it would accept.
pub fn ask(
    context: &Context,
    to: &HostId,
    migration: MigrationId,
    proposal: Proposal,
) -> Result<(Vec<Finding>, Option<Acceptance>), PeerError> {
    let purpose = Purpose::Control { migration, generation: Generation(1) };
    let mut connection = peers::connect(context, to, None, purpose)?;
    let lost = |source| PeerError::Lost { host: to.clone(), source };
    connection.send(&Message::Propose(Box::new(proposal))).map_err(lost)?;
    let deadline = Instant::now() + Duration::from_millis(context.config.timeouts.qemu_start_ms);
    match connection.recv(Some(deadline)).map_err(lost)? {
        Incoming::Message(Message::Accept(acceptance)) => Ok((acceptance.findings.clone(), Some(acceptance))),
        Incoming::Message(Message::Reject { findings, .. }) => Ok((findings, None)),
        _ => Err(PeerError::NoSense(to.clone())),
    }
}
