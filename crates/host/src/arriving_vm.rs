//! An arriving VM: the QEMU that waits for it, and the files that were made for that QEMU.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use engine::handover::QemuAtStart;
use proto::message::{Finding, RamBlock as ProposedBlock, Severity};
use proto::{Generation, Incarnation, MigrationId};
use qemu::device_state::Incoming;
use qemu::process::Launch;
use qemu::qmp::{DEFAULT_TIMEOUT, PendingCommand, Qmp, QmpError};
use qemu::ram::RamBlock;
use serde::{Deserialize, Serialize};
use tracee::{Process, Signal};
use tracing::{info, warn};

use crate::ArrivalError;
use crate::Context;
use crate::config::Config;
use crate::disks;
use crate::freeze::{self, FreezeError};
use crate::logs;
use crate::missing_pages_record::MissingPagesRecord;
use crate::pool::{self, MadeImage};
use crate::watch::ExitWatch;
use store::journal::{Durability, JournalError};

/// Longest wait for a killed process to exit.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// Journalled facts about an arriving VM, by which an agent that was started anew finds it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ArrivalArtifacts {
    /// Directory of its sockets and of QEMU's messages; it contains nothing else.
    pub directory: PathBuf,
    /// Directory of the files that QEMU writes for users; these files stay.
    #[serde(default)]
    pub(crate) log_directory: PathBuf,
    /// Names of those files; `directory` has links of the same names to them.
    #[serde(default)]
    pub(crate) logs: Vec<String>,
    /// Process id and start time of its QEMU, once it runs.
    pub process: Option<(u32, u64)>,
    /// Images that are made for it.
    #[serde(default)]
    pub images: Vec<PathBuf>,
    /// Identity of those images that are files, as they were made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub made: Vec<MadeImage>,
    /// Pages that arrive while the guest runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_pages: Option<MissingPagesRecord>,
}

/// Journalled details of a migration on the destination, for the driver's successor.
#[derive(Debug, Serialize, Deserialize)]
pub struct DestinationDetails {
    /// Id of the host's boot in which the migration began.
    pub boot_id: String,
    /// Files and processes that were made for the VM.
    #[serde(flatten)]
    pub artifacts: ArrivalArtifacts,
}

impl ArrivalArtifacts {
    /// Plans the directories of an arriving VM. No VM that was started here can have a name with `@` in it, so the
    /// directory is not another VM's.
    pub fn plan(config: &Config, migration: &MigrationId) -> Self {
        let name = format!("{}@{}", migration.vm, migration.epoch);
        Self {
            log_directory: logs::directory(config, &name),
            directory: config.run_dir.join("vms").join(name),
            ..Self::default()
        }
    }

    /// Records these artifacts in the journal.
    pub fn keep(
        &self,
        context: &Context,
        migration: &MigrationId,
        durability: Durability,
    ) -> Result<(), JournalError> {
        let details = DestinationDetails { boot_id: context.boot_id.clone(), artifacts: self.clone() };
        context.journal.set_details(migration, &details, durability)
    }

    /// Removes the images that were made for this VM, and returns those that remain, each with the reason. No VM may
    /// have run with them.
    pub fn remove_images(&self) -> Vec<(PathBuf, String)> {
        let mut left = Vec::new();
        for image in &self.images {
            // The identities are known once all images exist; an image that is made before that has a name that no
            // other file has.
            if self.made.iter().any(|made| made.path == *image && made.is_replaced()) {
                left.push((image.clone(), "another file has replaced it".to_owned()));
                continue;
            }
            match pool::remove(image) {
                Ok(true) => {
                    info!(image = %image.display(), "removed the image of a disk that did not arrive");
                }
                Ok(false) => {}
                Err(error) => {
                    let why = crate::chain(&error);
                    warn!(image = %image.display(), error = why, "cannot remove the image");
                    left.push((image.clone(), why));
                }
            }
        }
        left
    }

    /// Reads a migration's artifacts from the journal, or plans them.
    pub fn of(context: &Context, migration: &MigrationId) -> Self {
        let kept = context.journal.migration(migration).ok().flatten().map(|record| record.details);
        let this_boot = kept.as_ref().is_some_and(|details| details["boot_id"] == context.boot_id);
        let mut artifacts = kept
            .and_then(|details| serde_json::from_value(details).ok())
            .unwrap_or_else(|| Self::plan(&context.config, migration));
        if !this_boot {
            // After another boot the process id belongs to another process.
            artifacts.process = None;
        }
        artifacts
    }

    /// Returns the path of the monitor that QEMU opens for the agent.
    pub fn qmp(&self) -> PathBuf {
        self.directory.join(qemu::command::QMP_FILE)
    }

    /// Returns the path of the file to which QEMU writes its error messages.
    pub fn log(&self) -> PathBuf {
        self.directory.join(qemu::command::LOG_FILE)
    }

    /// Makes the directories, empty.
    pub fn make_directory(&self) -> Result<(), ArrivalError> {
        let failed = |source| ArrivalError::Directory { path: self.directory.clone(), source };
        if self.directory.exists() {
            fs::remove_dir_all(&self.directory).map_err(failed)?;
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(failed)?;
        logs::make(&self.log_directory, &self.logs, &self.directory)
            .map_err(|source| ArrivalError::Directory { path: self.log_directory.clone(), source })
    }

    /// Kills the QEMU that a previous agent started here, and removes its files. If the journal has only the start of
    /// that QEMU, it is identified by the monitor on its command line.
    pub fn remove(&self) {
        let process = match self.process {
            Some((pid, start)) => Process::open_exact(pid, start).ok(),
            None => crate::find_by_monitor(&self.qmp()),
        };
        if let Some(process) = process {
            kill(&process);
        }
        remove_directory(&self.directory);
        logs::remove_empty(&self.log_directory);
    }
}

/// Prefixes of the names of sockets at which images and templates are served.
const SERVER_SOCKET_PREFIXES: [&str; 3] = ["disk-", "compare.", "template-"];

/// Timeout of the monitor while the guest lacks pages.
const MONITOR_TIMEOUT_IN_POST_COPY: Duration = Duration::from_millis(500);

/// Outcome of `cont`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContOutcome {
    /// QEMU has not answered.
    Pending,
    /// The guest runs.
    Runs {
        /// Duration since QEMU's event RESUME.
        resumed: Option<Duration>,
    },
}

/// A QEMU that waits for its guest.
pub struct ArrivingVm {
    /// Its process.
    pub process: Process,
    /// Absent while QEMU is held by a previous agent: QEMU would not answer, and if it were released for a query, it
    /// would execute commands that other clients have sent to it.
    qmp: Option<Qmp>,
    /// Directory, files and process that were made for it.
    pub artifacts: ArrivalArtifacts,
    /// RAM blocks in the order of the proposal.
    pub blocks: Vec<RamBlock>,
    /// Absent once the device state was loaded.
    incoming: Option<Incoming>,
    watch: Option<ExitWatch>,
    /// A `cont` that QEMU has not answered yet, and the end of the wait for the answer.
    asked_to_cont: Option<(PendingCommand, Instant)>,
}

impl ArrivingVm {
    /// Starts QEMU, checks it with `look` (which receives its process id), and prepares it for an incoming device
    /// state. After an error nothing remains.
    pub fn start<T>(
        mut artifacts: ArrivalArtifacts,
        launch: &Launch,
        proposed: &[ProposedBlock],
        patience: Duration,
        look: impl FnOnce(&mut Qmp, &[RamBlock], u32) -> Result<T, ArrivalError>,
    ) -> Result<(Self, T), ArrivalError> {
        let (started, mut qmp) = qemu::process::start(launch, Instant::now() + patience)?;
        artifacts.process = Some((started.pid, started.start_time_ticks));
        let waiting = (|| {
            let process = Process::open_exact(started.pid, started.start_time_ticks)?;
            let blocks = qemu::ram::ram_blocks(&mut qmp, started.pid)?;
            disks::give_ownership(&artifacts.images, started.pid)
                .map_err(|finding| ArrivalError::Refused(vec![finding]))?;
            let seen = look(&mut qmp, &blocks, started.pid)?;
            check_can_save_devices(&mut qmp, &artifacts)?;
            let blocks = in_order(blocks, proposed)?;
            let incoming = Incoming::prepare(&mut qmp, Some(&artifacts.log()))?;
            Ok((process, blocks, incoming, seen))
        })();
        match waiting {
            Ok((process, blocks, incoming, seen)) => {
                let qmp = Some(qmp);
                let incoming = Some(incoming);
                let this =
                    Self { process, qmp, artifacts, blocks, incoming, watch: None, asked_to_cont: None };
                Ok((this, seen))
            }
            Err(error) => {
                artifacts.remove();
                Err(error)
            }
        }
    }

    /// Takes over a QEMU that a previous agent had prepared.
    pub fn find(artifacts: ArrivalArtifacts, patience: Duration) -> Result<Self, ArrivalError> {
        let (pid, start) = artifacts.process.ok_or(ArrivalError::Gone)?;
        let process = Process::open_exact(pid, start)?;
        // A QEMU that lacks pages may wait for them, and does not answer.
        let is_silent = freeze::is_frozen(&process) || artifacts.missing_pages.is_some();
        let qmp = if is_silent { None } else { Some(Qmp::connect(&artifacts.qmp(), patience)?) };
        let blocks = Vec::new();
        Ok(Self { process, qmp, artifacts, blocks, incoming: None, watch: None, asked_to_cont: None })
    }

    /// Calls `ended` when QEMU exits, for as long as this VM is kept.
    pub fn watch(&mut self, ended: impl FnOnce() + Send + 'static) {
        self.watch = ExitWatch::start(&self.process, ended);
    }

    /// Loads the device state, and runs `during_load` while QEMU loads it. The guest stays paused.
    pub fn load(
        &mut self,
        state: &[u8],
        patience: Duration,
        during_load: impl FnOnce(),
    ) -> Result<(), ArrivalError> {
        // While QEMU loads, other threads than this waiting one place pages.
        self.qmp()?;
        let (Some(incoming), Some(qmp)) = (self.incoming.take(), &mut self.qmp) else {
            return Err(ArrivalError::Gone);
        };
        Ok(incoming.load_while(qmp, state, Instant::now() + patience, during_load)?)
    }

    /// Returns the timeout of the monitor. A QEMU whose guest lacks pages may block on one of them in any command, and
    /// that page may be behind a connection that this driver has to replace first.
    fn patience(&self) -> Duration {
        let is_loaded = self.incoming.is_none();
        if is_loaded && self.artifacts.missing_pages.is_some() {
            MONITOR_TIMEOUT_IN_POST_COPY
        } else {
            DEFAULT_TIMEOUT
        }
    }

    /// Returns the monitor of a QEMU that is not held. Commands time out after [`patience`](Self::patience).
    pub fn qmp(&mut self) -> Result<&mut Qmp, QmpError> {
        let patience = self.patience();
        let mut qmp = match self.qmp.take() {
            Some(qmp) => qmp,
            None => Qmp::connect(&self.artifacts.qmp(), patience)?,
        };
        qmp.set_timeout(qmp.timeout().min(patience));
        Ok(self.qmp.insert(qmp))
    }

    /// Sends `cont`, or checks for the answer to an earlier one. Returns [`ContOutcome::Pending`] if there is no answer
    /// yet; the caller calls again later, because while this thread waits, it answers no connection on which QEMU may
    /// depend.
    pub fn cont(&mut self) -> Result<ContOutcome, QmpError> {
        let (asked, until) = match self.asked_to_cont.take() {
            Some(asked) => asked,
            None => (qemu::control::send_cont(self.qmp()?)?, Instant::now() + DEFAULT_TIMEOUT),
        };
        let qmp = self.qmp()?;
        let deadline = Instant::now() + qmp.timeout();
        match qemu::control::wait_cont(qmp, &asked, deadline) {
            Err(QmpError::Timeout { .. })
                if self.artifacts.missing_pages.is_some() && Instant::now() < until =>
            {
                self.asked_to_cont = Some((asked, until));
                Ok(ContOutcome::Pending)
            }
            result => result.map(|resumed| ContOutcome::Runs { resumed }),
        }
    }

    /// True if QEMU has not answered `cont` yet.
    pub fn is_cont_pending(&self) -> bool {
        self.asked_to_cont.is_some()
    }

    /// Holds a QEMU that has loaded everything: from here on only [`thaw`](Self::thaw) lets this copy run.
    /// Returns an error if QEMU cannot be held, or if another client continued the guest first.
    pub fn freeze(&mut self) -> Result<(), ArrivalError> {
        freeze::freeze(&self.process)?;
        // QEMU emits the event before a guest runs; the events that it has sent can be read without its help.
        let events = self.qmp()?.take_events()?;
        if events.iter().any(|event| event.name == "RESUME") {
            Err(ArrivalError::AlreadyContinued)
        } else {
            Ok(())
        }
    }

    /// Releases QEMU, because the guest is to run, or has run.
    pub fn thaw(&self) -> Result<(), FreezeError> {
        freeze::thaw(&self.process)
    }

    /// Returns the incarnation that GO must name.
    pub fn incarnation(&self, boot_id: &str, generation: Generation) -> Incarnation {
        Incarnation {
            boot_id: boot_id.to_owned(),
            pid: self.process.pid(),
            start_time_ticks: self.process.start_time(),
            generation,
        }
    }

    /// True if the monitor reports that the guest does not run.
    pub fn is_reported_paused(&mut self) -> bool {
        self.qmp().and_then(qemu::control::status).is_ok_and(|status| !status.running)
    }

    /// Returns the state of this QEMU, for an agent that was started anew.
    pub fn found(&mut self) -> QemuAtStart {
        if freeze::is_frozen(&self.process) {
            return QemuAtStart::Paused;
        }
        if self.artifacts.missing_pages.is_some() {
            return if self.process.is_alive() { QemuAtStart::Paused } else { QemuAtStart::Gone };
        }
        match self.qmp().and_then(qemu::control::status) {
            Ok(status) if status.running => QemuAtStart::Running,
            Ok(_) => QemuAtStart::Paused,
            Err(_) if self.process.is_alive() => QemuAtStart::Paused,
            Err(_) => QemuAtStart::Gone,
        }
    }

    /// Removes the record of missing pages, because all of them are present.
    pub fn remove_missing_pages_record(&self) {
        if let Some(record) = &self.artifacts.missing_pages {
            record.remove();
        }
    }

    /// Kills QEMU and removes the files that were made for it, except images: the caller decides about those.
    pub fn destroy(self) -> ArrivalArtifacts {
        kill(&self.process);
        remove_directory(&self.artifacts.directory);
        logs::remove_empty(&self.artifacts.log_directory);
        self.artifacts
    }
}

/// Checks that a QEMU with these devices can save their state, as the source's QEMU must.
fn check_can_save_devices(qmp: &mut Qmp, artifacts: &ArrivalArtifacts) -> Result<(), ArrivalError> {
    let Err(error) = qemu::device_state::try_save(qmp) else { return Ok(()) };
    let log_text = qemu::process::log_tail(&artifacts.log());
    let why = if log_text.is_empty() { crate::chain(&error) } else { log_text };
    Err(ArrivalError::Refused(vec![Finding {
        severity: Severity::Blocker,
        code: "devices-not-saved".to_owned(),
        what: format!("a QEMU with the guest's devices cannot save their state, and exits: {why}"),
        advice:
            "start the guest without the device that cannot be saved; QEMU's own migration would crash, too"
                .to_owned(),
    }]))
}

/// Returns the blocks in the order of the proposal; both hosts must have the same blocks.
fn in_order(mut blocks: Vec<RamBlock>, proposed: &[ProposedBlock]) -> Result<Vec<RamBlock>, ArrivalError> {
    let differs = |name: &str, what: String| ArrivalError::BlockDiffers { name: name.to_owned(), what };
    let mut ordered = Vec::with_capacity(proposed.len());
    for wanted in proposed {
        let Some(place) = blocks.iter().position(|block| block.name == wanted.name) else {
            return Err(differs(&wanted.name, "is only at the source".to_owned()));
        };
        let block = blocks.swap_remove(place);
        if block.used_bytes != wanted.bytes {
            let what = format!("has {} bytes at the source and {} here", wanted.bytes, block.used_bytes);
            return Err(differs(&wanted.name, what));
        }
        ordered.push(block);
    }
    match blocks.first() {
        Some(surplus) => Err(differs(&surplus.name, "is only at the destination".to_owned())),
        None => Ok(ordered),
    }
}

fn kill(process: &Process) {
    let pid = process.pid();
    match process.signal(Signal::KILL).and_then(|()| process.wait_exit(Some(KILL_PATIENCE))) {
        Ok(true) => info!(pid, "the arriving VM's QEMU was ended"),
        Ok(false) => warn!(pid, "the arriving VM's QEMU does not exit after SIGKILL"),
        Err(error) => info!(pid, %error, "the arriving VM's QEMU had exited already"),
    }
}

fn remove_directory(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if SERVER_SOCKET_PREFIXES.iter().any(|served| name.to_string_lossy().starts_with(served)) {
            block::image::end_unused_server(&entry.path());
        }
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            warn!(directory = %directory.display(), %error, "cannot remove the directory");
        }
        _ => {}
    }
}
