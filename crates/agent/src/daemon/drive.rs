//! Setting drivers to work: a migration that a user asks for, a VM that a peer proposes.

use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use engine::handover::Terms;
use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use link::Connection;
use proto::message::{Acceptance, Finding, Message, Proposal, Severity};
use proto::{MigrationId, VmName};
use qemu::qmp::Qmp;
use tracing::{error, info, warn};

use super::{Daemon, Driven, Mail};
use crate::api::{CheckReport, MigrateRequest, MigrationStatus};
use crate::api::{Kind, Problem};
use crate::context::Context;
use crate::destination::{self, ArriveError, Arriving, Traces};
use crate::journal::{Durability, JournalError, VmRecord};
use crate::preflight;
use crate::progress::Publisher;
use crate::report::Report;
use crate::source::{self, Aims, Controls};
use crate::{owners, vms};

/// How long a migration that is decided may take to be over.
const LAST_ENTRIES: Duration = Duration::from_secs(2);

const SEE_DISK: &str = "see that the destination's disk is not full";

/// What the journal keeps of a migration for its driver's successor, on the destination.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct DestinationDetails {
    /// The boot of the host on which it began.
    pub(super) boot_id: String,
    /// Where to find what was started.
    #[serde(flatten)]
    pub(super) traces: Traces,
}

/// A VM that could be moved as far as this side knows.
struct Offer {
    vm: source::SourceVm,
    proposal: Proposal,
    findings: Vec<Finding>,
    qemu_version: String,
    ram_kind: String,
}

impl Daemon {
    /// Pre-flight of both sides; neither remembers anything of it.
    pub(super) fn check_both(&self, request: &MigrateRequest) -> Result<CheckReport, Problem> {
        let (vm, to) = (request.vm.clone(), request.to.clone());
        let record = self.known(&vm)?;
        self.reachable(request)?;
        // Its monitor is the migration's.
        self.not_in_migration(&vm)?;
        let offer = self.offer(&record, request, true)?;
        let mut report = CheckReport {
            vm: vm.clone(),
            from: self.context.config.host.clone(),
            to,
            possible: false,
            ram_kind: None,
            source_findings: offer.findings,
            destination_findings: Vec::new(),
        };
        let largest = self.context.journal.largest_epoch(&vm).map_err(|error| internal(&error))?;
        let id = MigrationId { vm, epoch: largest.next() };
        match preflight::ask(&self.context, &report.to, id, offer.proposal) {
            Ok((findings, ram_kind)) => (report.destination_findings, report.ram_kind) = (findings, ram_kind),
            Err(error) => {
                let advice = "see that the agent runs there, that the address is right, and that both use the same [tls]";
                return Err(Problem::caused_by(Kind::Unavailable, &error, advice));
            }
        }
        report.possible = !CheckReport::blocked(&report.source_findings)
            && !CheckReport::blocked(&report.destination_findings);
        Ok(report)
    }

    /// Begins a migration; its driver goes on by itself.
    pub(super) fn begin(self: &Arc<Self>, request: &MigrateRequest) -> Result<MigrationStatus, Problem> {
        self.reachable(request)?;
        self.let_the_last_one_end(&request.vm)?;
        let _alone = self.alone();
        let record = self.known(&request.vm)?;
        self.not_in_migration(&request.vm)?;
        let offer = self.offer(&record, request, false)?;
        if CheckReport::blocked(&offer.findings) {
            let error = format!("{} cannot be moved", request.vm);
            let advice = "see the findings; each says what to do";
            return Err(Problem::new(Kind::Refused, error, advice).with_findings(offer.findings));
        }
        let held = owners::held_since(&self.context, &request.vm)
            .map_err(|error| Problem::caused_by(Kind::Unavailable, &error, ""))?;
        let journal = &self.context.journal;
        if let Some(epoch) = held {
            journal.learn_epoch(&request.vm, epoch).map_err(|error| internal(&error))?;
        }
        let epoch = journal.next_epoch(&request.vm).map_err(|error| internal(&error))?;
        let terms = Terms {
            migration: MigrationId { vm: request.vm.clone(), epoch },
            source: self.context.config.host.clone(),
            destination: request.to.clone(),
            register: held,
            witness: self.context.config.register.clone(),
        };
        let aims = Aims::new(request, &self.context.config.limits);
        let proposal = Proposal { register_epoch: held, streams: aims.streams, ..offer.proposal };
        let mut report = Report::begin(
            terms.migration.clone(),
            terms.source.clone(),
            terms.destination.clone(),
            aims.objective(),
        );
        report.findings = offer.findings;
        report.source.qemu_version = Some(offer.qemu_version);
        report.source.ram_kind = Some(offer.ram_kind);
        report.ram_blocks.clone_from(&proposal.ram);
        let mut vm = offer.vm;
        report.run_state_before = vm.run_state().unwrap_or_default();
        let controls = Arc::new(Controls {
            rate: Arc::new(link::RateLimit::new(aims.bandwidth_bytes_per_s)),
            aims: Mutex::new(aims),
            report: Mutex::new(report),
        });
        let id = terms.migration.clone();
        self.set_out(terms, vm, proposal, controls)?;
        self.status(&id)
    }

    /// Journals PREPARED and sets a driver to work. Whatever it needs for that it has before.
    pub(super) fn set_out(
        self: &Arc<Self>,
        terms: Terms,
        vm: source::SourceVm,
        proposal: Proposal,
        controls: Arc<Controls>,
    ) -> Result<(), Problem> {
        let id = terms.migration.clone();
        let details = source::Details::of(&self.context, Some(&vm), false);
        let (mut driver, driven) = self.source_driver(terms, SourceState::Idle, Some(vm), controls);
        let place = self.place(&id, driven)?;
        driver.begin(proposal).map_err(|error| {
            Problem::caused_by(Kind::Internal, &error, "the VM is untouched; see the agent's log")
        })?;
        if let Err(error) = self.context.journal.set_details(&id, &details, Durability::Synced) {
            driver.give_up(&crate::chain(&error));
            return Err(internal(&error));
        }
        place.work(move || drop(driver.run()));
        Ok(())
    }

    /// A driver for a source, and how it is reached.
    pub(super) fn source_driver(
        &self,
        terms: Terms,
        state: SourceState,
        vm: Option<source::SourceVm>,
        controls: Arc<Controls>,
    ) -> (source::Driver, Driven) {
        let inbox = source::Inbox::new();
        let publisher = Publisher::new();
        let mailbox = Mail::Source(inbox.mailbox());
        let driven = Driven { mailbox, publisher: publisher.clone(), controls: Some(Arc::clone(&controls)) };
        let mut vm = vm;
        if let Some(vm) = &mut vm {
            vm.watch(inbox.mailbox());
        }
        let context = Arc::clone(&self.context);
        (source::Driver::new(context, terms, state, vm, inbox, controls, publisher), driven)
    }

    /// A peer proposes a VM.
    pub(super) fn proposed(
        self: &Arc<Self>,
        mut connection: Connection,
        id: &MigrationId,
        proposal: Proposal,
    ) {
        let from = connection.peer().clone();
        let check_only = proposal.check_only;
        info!(migration = %id, %from, check_only, "proposed");
        let answer = match self.consider(&from, id, proposal) {
            Err(findings) => Message::Reject { findings, largest_epoch: None },
            Ok(considered) if check_only => Message::Accept(Acceptance {
                findings: considered.findings,
                qemu_start_us: 0,
                ram_kind: considered.ram_kind,
                qemu_version: Some(considered.qemu_version),
            }),
            Ok(considered) => {
                self.receive(connection, id, considered);
                return;
            }
        };
        if let Err(error) = connection.send(&answer) {
            warn!(migration = %id, error = crate::chain(&error), "the source did not hear the answer");
        }
    }

    fn consider(
        &self,
        from: &proto::HostId,
        id: &MigrationId,
        proposal: Proposal,
    ) -> Result<preflight::Considered, Vec<Finding>> {
        proposal.validate().map_err(|error| {
            blocker("proposal", crate::chain(&error), "use the same version of whimbrel on both hosts")
        })?;
        self.nobody_has(id, proposal.check_only)?;
        preflight::destination(&self.context, from, id, proposal)
    }

    /// The name is free for a VM that comes.
    fn nobody_has(&self, id: &MigrationId, check_only: bool) -> Result<(), Vec<Finding>> {
        match self.context.journal.vm(&id.vm) {
            Ok(Some(_)) => {
                let what = format!("this host has a VM named {} already", id.vm);
                return Err(blocker("name-taken", what, "adopt one of the two under another name"));
            }
            Ok(None) => {}
            Err(error) => {
                return Err(blocker("journal", crate::chain(&error), "mend the journal on the destination"));
            }
        }
        if !check_only && let Err(problem) = self.not_in_migration(&id.vm) {
            return Err(blocker("in-migration", problem.error, &problem.advice));
        }
        Ok(())
    }

    fn receive(
        self: &Arc<Self>,
        mut connection: Connection,
        id: &MigrationId,
        considered: preflight::Considered,
    ) {
        let preflight::Considered { terms, proposal, launch, traces, compared, promised, ram_kind, .. } =
            considered;
        let proposed = proposal.ram.clone();
        let (mut driver, driven) = self.destination_driver(terms, DestinationState::Idle, proposal);
        // Pre-flight takes its time; the name may be another's by now.
        let alone = self.alone();
        let free = self.nobody_has(id, false);
        let place = free.and_then(|()| {
            let place = self.place(id, driven);
            place.map_err(|problem| blocker("in-migration", problem.error, &problem.advice))
        });
        let place = match place {
            Ok(place) => place,
            Err(findings) => {
                warn!(migration = %id, ?findings, "nobody receives it");
                drop(connection.send(&Message::Reject { findings, largest_epoch: None }));
                return;
            }
        };
        if let Err(error) = driver.meet(connection) {
            warn!(migration = %id, %error, "no thread for the control stream");
            return;
        }
        let prepared = driver.prepare();
        drop(alone);
        let context = Arc::clone(&self.context);
        let migration = id.clone();
        let work = move || {
            if let Err(error) = prepared {
                let (code, advice) = match error.largest_epoch() {
                    Some(_) => {
                        ("epoch", "try again: the source has learnt of that epoch, and takes a larger one")
                    }
                    None => ("journal", SEE_DISK),
                };
                driver.reject(blocker(code, crate::chain(&error), advice), error.largest_epoch());
                return;
            }
            let began = Instant::now();
            // Held until the VM is there or will not come.
            let promised = promised;
            let started = traces.make_directory().and_then(|()| {
                keep_traces(&context, &migration, &traces)?;
                let patience = Duration::from_millis(context.config.timeouts.qemu_start_ms);
                let look = |qmp: &mut Qmp, blocks: &[qemu::ram::RamBlock]| compared.with_started(qmp, blocks);
                let (vm, findings) = Arriving::start(traces, &launch, &proposed, patience, look)?;
                keep_traces(&context, &migration, &vm.traces)?;
                if let Some(promised) = &promised {
                    promised.taken_by(vm.process.pid());
                }
                Ok((vm, findings))
            });
            let started = started.and_then(|(mut vm, findings)| {
                let version = vm.qmp().ok().map(|qmp| qmp.version().to_string());
                driver.started(vm).map(|()| (version, findings))
            });
            match started {
                Ok((qemu_version, findings)) => {
                    driver.accept(Acceptance {
                        findings,
                        qemu_start_us: began.elapsed().as_micros() as u64,
                        ram_kind,
                        qemu_version,
                    });
                    driver.run();
                }
                Err(ArriveError::Refused(findings)) => driver.reject(findings, None),
                Err(error) => {
                    let advice = match error {
                        ArriveError::Journal(_) | ArriveError::Directory { .. } => SEE_DISK,
                        _ => "see the log of the destination's QEMU in the message",
                    };
                    driver.reject(blocker("start", crate::chain(&error), advice), None);
                }
            }
        };
        place.work(work);
    }

    /// A driver for a destination, and how it is reached.
    pub(super) fn destination_driver(
        &self,
        terms: Terms,
        state: DestinationState,
        proposal: Proposal,
    ) -> (destination::Driver, Driven) {
        let inbox = destination::Inbox::new();
        let publisher = Publisher::new();
        let mailbox = Mail::Destination(inbox.mailbox());
        let driven = Driven { mailbox, publisher: publisher.clone(), controls: None };
        let context = Arc::clone(&self.context);
        let driver = destination::Driver::new(context, terms, state, proposal, None, inbox, publisher);
        (driver, driven)
    }

    /// A place in the list of drivers, and a thread that waits for its work. To be had before anything is journalled that
    /// only a driver can end. Refused where another is at work: it must not be put out of reach.
    pub(super) fn place(self: &Arc<Self>, id: &MigrationId, driven: Driven) -> Result<Place, Problem> {
        match self.drivers().entry(id.clone()) {
            Entry::Vacant(free) => drop(free.insert(driven)),
            Entry::Occupied(_) => {
                let error = format!("{id} is under way already");
                return Err(Problem::new(Kind::Conflict, error, "wait for it"));
            }
        }
        let held = Held { daemon: Arc::clone(self), id: id.clone() };
        let (work, given) = mpsc::channel::<(Held, Work)>();
        let run = move || {
            if let Ok((held, work)) = given.recv() {
                let at_work = AtWork;
                work();
                drop((at_work, held));
            }
        };
        match thread::Builder::new().name(format!("driver-{}", id.vm)).spawn(run) {
            Ok(_) => Ok(Place { held, thread: work }),
            Err(error) => Err(Problem::caused_by(Kind::Internal, &error, "the system gives no more threads")),
        }
    }

    // ---- what a request has to pass

    pub(super) fn known(&self, vm: &VmName) -> Result<VmRecord, Problem> {
        self.context.journal.vm(vm).map_err(|error| internal(&error))?.ok_or_else(|| {
            let error = format!("no VM {vm} here");
            Problem::new(
                Kind::NotFound,
                error,
                "`whimbrel vm list` shows those that are; `whimbrel vm adopt` takes one",
            )
        })
    }

    fn reachable(&self, request: &MigrateRequest) -> Result<(), Problem> {
        let to = &request.to;
        if *to == self.context.config.host {
            let error = format!("{} is on {to} already", request.vm);
            return Err(Problem::new(Kind::BadRequest, error, "name another host with --to"));
        }
        if self.context.config.peer(to).is_none() {
            let error = format!("no host {to} in the configuration");
            return Err(Problem::new(Kind::NotFound, error, format!("add [hosts.{to}] with its address")));
        }
        if self.context.config.register.as_ref() == Some(to) {
            let error = format!("{to} keeps the register of owners");
            return Err(Problem::new(
                Kind::BadRequest,
                error,
                "the witness is neither of the two hosts; move to another",
            ));
        }
        let streams = request.streams.unwrap_or(self.context.config.limits.streams);
        if !(1..=proto::limits::STREAMS).contains(&streams) {
            let error = format!("{streams} streams are not possible");
            return Err(Problem::new(
                Kind::BadRequest,
                error,
                format!("1 to {} are", proto::limits::STREAMS),
            ));
        }
        Ok(())
    }

    /// Whoever was told that a VM has moved may move it on at once: the other side's last entries are a moment away.
    pub(super) fn let_the_last_one_end(&self, vm: &VmName) -> Result<(), Problem> {
        let deadline = Instant::now() + LAST_ENTRIES;
        loop {
            let driven = self.drivers().keys().any(|id| id.vm == *vm);
            let open = self.context.journal.open_migrations().map_err(|error| internal(&error))?;
            let undecided = open.iter().any(|record| record.id().vm == *vm && !record.state.is_final());
            if !driven || undecided || Instant::now() >= deadline {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn not_in_migration(&self, vm: &VmName) -> Result<(), Problem> {
        let open = self.context.journal.open_migrations().map_err(|error| internal(&error))?;
        let driven = self.drivers().keys().find(|id| id.vm == *vm).cloned();
        let open = open.into_iter().map(|record| record.terms.migration).find(|id| id.vm == *vm).or(driven);
        open.map_or(Ok(()), |id| {
            let error = format!("{vm} is in a migration already, {id}");
            let advice = format!("wait for it, `whimbrel cancel {vm}`, or `whimbrel recover {vm}`");
            Err(Problem::new(Kind::Conflict, error, advice))
        })
    }

    fn offer(&self, record: &VmRecord, request: &MigrateRequest, check_only: bool) -> Result<Offer, Problem> {
        let context = &self.context;
        let mut vm = source::SourceVm::attach(context, record)
            .map_err(|error| Problem::caused_by(Kind::Unavailable, &error, vms::advice(&record.vm)))?;
        let allowed: Vec<_> =
            context.config.qemu.allow_options.iter().chain(&request.allow_options).cloned().collect();
        let surveyed = preflight::source(&mut vm, &allowed)
            .map_err(|error| Problem::caused_by(Kind::Unavailable, &error, vms::advice(&record.vm)))?;
        let proposal = Proposal {
            reply_to: context.config.listen.to_string(),
            streams: request.streams.unwrap_or(context.config.limits.streams),
            ram: vm.proposed_blocks(),
            facts: surveyed.facts,
            description: surveyed.description,
            check_only,
            register_epoch: None,
            witness: context.config.register.clone(),
            ram_kind: preflight::wanted_ram(request.ram),
            allow_options: allowed,
        };
        Ok(Offer {
            ram_kind: vm.ram_kind(),
            qemu_version: surveyed.qemu_version,
            findings: surveyed.findings,
            vm,
            proposal,
        })
    }
}

/// The one thing that stands in the way.
fn blocker(code: &str, what: String, advice: &str) -> Vec<Finding> {
    vec![Finding { severity: Severity::Blocker, code: code.to_owned(), what, advice: advice.to_owned() }]
}

fn keep_traces(context: &Context, id: &MigrationId, traces: &Traces) -> Result<(), ArriveError> {
    let details = DestinationDetails { boot_id: context.boot_id.clone(), traces: traces.clone() };
    Ok(context.journal.set_details(id, &details, Durability::Synced)?)
}

pub(super) fn internal(error: &JournalError) -> Problem {
    Problem::caused_by(Kind::Internal, error, "see the agent's log")
}

type Work = Box<dyn FnOnce() + Send>;

/// A driver's place in the list, and a thread for it. Dropping it without work gives both back.
pub(super) struct Place {
    held: Held,
    thread: mpsc::Sender<(Held, Work)>,
}

impl Place {
    /// Sets the thread to work; the place is given back when that is done.
    pub(super) fn work(self, work: impl FnOnce() + Send + 'static) {
        // The thread waits for nothing else.
        drop(self.thread.send((self.held, Box::new(work))));
    }
}

/// A driver at work. One that panics leaves a migration that nobody goes on with: the agent ends, as if it had been
/// killed there, and whoever starts it again has it taken up.
struct AtWork;

impl Drop for AtWork {
    fn drop(&mut self) {
        if thread::panicking() {
            error!("a driver panicked; the agent ends, and takes the migration up when it is started again");
            std::process::abort();
        }
    }
}

/// An entry in the list of drivers.
struct Held {
    daemon: Arc<Daemon>,
    id: MigrationId,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.daemon.drivers().remove(&self.id);
    }
}
