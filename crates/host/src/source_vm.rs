//! A VM that leaves this host: its process, its monitor, its memory.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use ::memory::PageSet;
use engine::handover::QemuAtStart;
use proto::message::RamBlock as ProposedBlock;
use qemu::device_state::{self, DiskOwnership, StateError, StateFile};
use qemu::drives::Media;
use qemu::find;
use qemu::guest_port::{self, PortError};
use qemu::qmp::{Qmp, QmpError};
use qemu::ram::{GuestMapping, RamBlock, RamError};
use qemu::tree::DeviceTree;
use tracee::{CpuLimit, Process, ProcessError, Signal};
use tracing::{info, warn};

use crate::Context;
use crate::disks::DiskLog;
use crate::freeze::{self, FreezeError};
use crate::logs;
use crate::runtime_files::RuntimeFiles;
use crate::verification::{self, BlockHashes, CompareError};
use crate::watch::ExitWatch;
use store::journal::VmRecord;

/// Time limit for a killed process to disappear.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Error of an operation on a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The VM's QEMU has ended.
    #[error("QEMU is gone")]
    Gone,
    /// QEMU's process cannot be examined.
    #[error("QEMU's process cannot be used")]
    Process(#[from] ProcessError),
    /// QEMU's monitor failed, or refused a command.
    #[error("QEMU's monitor at {path} failed", path = path.display())]
    Qmp {
        /// Path of the monitor's socket.
        path: PathBuf,
        /// Cause.
        source: QmpError,
    },
    /// The guest's memory was not found.
    #[error("the guest's memory was not found")]
    Ram(#[from] RamError),
    /// The device state was not saved.
    #[error("the state of the devices was not saved")]
    State(#[from] StateError),
    /// The VM was changed while it was moved (docs/traps.md, trap 12).
    #[error("{0} changed during the migration: a device was plugged or unplugged; try again")]
    Changed(String),
    /// The VM's disks differ from those with which the destination's QEMU was started.
    #[error(
        "the guest's drives changed during the migration: a snapshot was made, or a medium or a length was \
         changed; try again"
    )]
    OtherMedia,
    /// QEMU cannot be frozen, or let go.
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    /// No program in the guest can be asked.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The VM neither runs nor is paused by its user.
    #[error("{}", qemu::preflight::run_state_refusal(.0))]
    RunState(String),
}

/// A VM that leaves this host.
pub struct SourceVm {
    /// Its process.
    pub process: Process,
    pub(crate) qmp: Option<Qmp>,
    /// Path of its monitor's socket.
    pub qmp_path: PathBuf,
    pub(crate) machine_type: String,
    /// RAM blocks at the start of the migration; none if an agent before this one began it.
    pub blocks: Vec<RamBlock>,
    /// QEMU's table of RAM blocks at the start, to be compared at the stop.
    ram_table: String,
    /// Devices at the start of the migration, to be compared at the stop.
    devices: DeviceTree,
    /// Media in the drives at the start of the migration.
    media: Media,
    /// Files that QEMU made for itself, to be removed after its end.
    runtime_files: RuntimeFiles,
    qmp_patience: Duration,
    /// True if the guest ran at the last query.
    ran: bool,
    /// State of the disk images' ownership at the stop.
    disks: DiskOwnership,
    /// File into which QEMU is to save its device state.
    state_file: Option<StateFile>,
    watch: Option<ExitWatch>,
}

/// Returns QEMU's table of RAM blocks: names, sizes, addresses. To determine the agent's own addresses of the blocks
/// again would need much longer.
fn ram_table(qmp: &mut Qmp) -> Result<String, QmpError> {
    let table: serde_json::Value = qmp.execute("x-query-ramblock", serde_json::Value::Null)?;
    Ok(table["human-readable-text"].as_str().unwrap_or_default().to_owned())
}

impl SourceVm {
    /// Attaches to a VM that is to be moved.
    pub fn attach(context: &Context, record: &VmRecord) -> Result<Self, VmError> {
        let mut vm = Self::find(context, record)?;
        let pid = vm.process.pid();
        vm.blocks = qemu::ram::ram_blocks(vm.monitor()?, pid)?;
        vm.ram_table = vm.ask(ram_table)?;
        vm.machine_type = vm.ask(device_state::machine_type)?;
        vm.devices = vm.ask(qemu::tree::device_tree)?;
        vm.media = vm.ask(qemu::drives::media)?;
        Ok(vm)
    }

    /// Attaches to a VM that an earlier agent was moving, without any query: it may be frozen by SIGSTOP.
    pub fn find(context: &Context, record: &VmRecord) -> Result<Self, VmError> {
        let process = record.process(&context.boot_id)?;
        let runtime_files = RuntimeFiles::of(&process, logs::own_directories(&context.config, &record.qmp));
        Ok(Self {
            process,
            runtime_files,
            qmp: None,
            qmp_path: record.qmp.clone(),
            machine_type: String::new(),
            blocks: Vec::new(),
            ram_table: String::new(),
            devices: DeviceTree::default(),
            media: Media::default(),
            qmp_patience: Duration::from_millis(context.config.timeouts.qmp_ms),
            ran: false,
            disks: DiskOwnership::Held,
            state_file: None,
            watch: None,
        })
    }

    /// Returns the monitor, which is connected at its first use.
    pub fn monitor(&mut self) -> Result<&mut Qmp, VmError> {
        if self.qmp.is_none() {
            let mut qmp = find::connect_at(self.process.pid(), &self.qmp_path, self.qmp_patience)
                .map_err(|source| self.failed(source))?;
            qmp.set_timeout(self.qmp_patience);
            self.qmp = Some(qmp);
        }
        self.qmp.as_mut().ok_or(VmError::Gone)
    }

    /// Closes the connection to the monitor, which has room for one client. It is connected again at the next use.
    pub(crate) fn release_monitor(&mut self) {
        self.qmp = None;
    }

    /// Returns the bytes that the guest has written to its disks.
    pub(crate) fn written_to_disks(&mut self) -> Result<u64, VmError> {
        self.ask(qemu::control::written_to_disks)
    }

    fn failed(&self, source: QmpError) -> VmError {
        VmError::Qmp { path: self.qmp_path.clone(), source }
    }

    fn ask<T>(&mut self, question: impl FnOnce(&mut Qmp) -> Result<T, QmpError>) -> Result<T, VmError> {
        let answer = question(self.monitor()?);
        answer.map_err(|source| self.failed(source))
    }

    /// Returns true if its QEMU has not exited.
    pub fn is_alive(&self) -> bool {
        self.process.is_alive()
    }

    /// Returns QEMU's run state; none if QEMU does not report it.
    pub fn run_state(&mut self) -> Option<String> {
        self.ask(qemu::control::status).ok().map(|status| status.status)
    }

    /// Returns true if QEMU answers, or is alive nevertheless. A QEMU that ends closes its monitor a moment earlier.
    pub fn is_there(&mut self) -> bool {
        const END_PATIENCE: Duration = Duration::from_secs(1);
        self.run_state().is_some() || !matches!(self.process.wait_exit(Some(END_PATIENCE)), Ok(true))
    }

    /// Returns the reason why QEMU ended, from the last SHUTDOWN event on its monitor.
    pub fn shutdown_reason(&mut self) -> Option<String> {
        let qmp = self.qmp.as_mut()?;
        // The monitor is closed; everything that arrived before is read.
        let events = qmp.last_events();
        let last = events.iter().rev().find(|event| event.name == "SHUTDOWN")?;
        Some(last.data["reason"].as_str()?.to_owned())
    }

    /// Returns true if the guest runs; asks QEMU.
    pub fn is_running(&mut self) -> Result<bool, VmError> {
        Ok(self.ask(qemu::control::status)?.running)
    }

    /// Returns true if the guest runs, false if its user has paused it. In any other state it is not moved: the
    /// destination would turn a guest whose disk has failed, or that has crashed, into a paused one (docs/traps.md,
    /// trap 17).
    pub fn check_run_state(&mut self) -> Result<bool, VmError> {
        let status = self.ask(qemu::control::status)?;
        self.ran = status.status == "running";
        if self.ran || status.is_paused() { Ok(self.ran) } else { Err(VmError::RunState(status.status)) }
    }

    /// Returns the state in which a restarted agent finds the VM. A process that is frozen by SIGSTOP is not queried.
    pub fn found(&mut self) -> QemuAtStart {
        if !self.is_alive() {
            QemuAtStart::Gone
        } else if freeze::is_frozen(&self.process) {
            QemuAtStart::Paused
        } else if self.is_running().unwrap_or(false) {
            QemuAtStart::Running
        } else {
            QemuAtStart::Paused
        }
    }

    /// Returns true if the guest has a port with this name.
    pub fn has_guest_port(&self, name: &str) -> bool {
        guest_port::is_there(&self.devices, name)
    }

    /// Connects to a program in the guest over the port with this name, and returns the guest addresses of the memory
    /// blocks, too; none if the guest has no such port, or does not run.
    pub fn connect_guest(&mut self, name: &str) -> Result<Option<(UnixStream, Vec<GuestMapping>)>, VmError> {
        let pid = self.process.pid();
        if !self.is_running()? {
            return Ok(None);
        }
        let qmp = self.qmp.as_mut().ok_or(VmError::Gone)?;
        let Some(connection) = guest_port::connect(qmp, pid, &self.devices, name)? else { return Ok(None) };
        let seen = qemu::ram::guest_mappings(qmp, &self.blocks)?;
        Ok(Some((connection, seen)))
    }

    /// Returns the threads that run the guest's processors.
    pub fn processor_threads(&mut self) -> Result<Vec<u32>, VmError> {
        // Compared by their numbers in QEMU's PID namespace, because QEMU may be in a container.
        let own = self.ask(qemu::control::cpu_threads)?;
        let threads = self.process.threads()?;
        // A thread that ends in the meantime is no processor.
        let is_one =
            |thread: &u32| self.process.namespace_id(*thread).is_ok_and(|number| own.contains(&number));
        Ok(threads.into_iter().filter(is_one).collect())
    }

    /// Ends the limit on the guest's processors that an agent before this one may have left.
    pub fn lift_leftover_limit(&self) {
        match CpuLimit::end_leftover(&self.process) {
            Ok(false) => {}
            Ok(true) => {
                info!(pid = self.process.pid(), "removed a leftover CPU limit");
            }
            Err(error) => warn!(error = crate::chain(&error), "the guest's CPU limit may still be in effect"),
        }
    }

    /// Waits until block I/O in flight has completed.
    pub fn drain(&mut self) -> Result<(), VmError> {
        self.ask(qemu::control::drain)
    }

    /// Stops the guest, if it ran at the last query. A guest that was paused by its user stays as it is, and its disks
    /// may already be thawed: it arrived paused, or an earlier migration was attempted. Returns the time until QEMU
    /// reported that the guest had stopped, if it did.
    pub fn stop(&mut self) -> Result<Option<Duration>, VmError> {
        let ran = self.ran;
        let (disks, stopping) = self.ask(|qmp| {
            qmp.discard_events("RESUME");
            if ran {
                Ok((DiskOwnership::Held, qemu::control::stop(qmp)?))
            } else {
                Ok((device_state::disks(qmp)?, None))
            }
        })?;
        self.disks = disks;
        Ok(stopping)
    }

    /// Continues the guest. QEMU may still be frozen, for a handover that failed.
    pub fn cont(&mut self) -> Result<(), VmError> {
        self.thaw()?;
        self.ask(qemu::control::cont).map(drop)
    }

    /// Creates the file into which QEMU will save its device state.
    pub fn prepare_to_save(&mut self) -> Result<(), VmError> {
        self.state_file = Some(StateFile::prepare(self.monitor()?)?);
        Ok(())
    }

    /// Saves the state of the stopped guest's devices, as a stream that a QEMU like this one loads. Refuses a guest
    /// that has entered a state in which it is not moved, since it was stopped or right before.
    pub fn save_devices(&mut self) -> Result<Vec<u8>, VmError> {
        let disks = self.disks;
        let mut file = match self.state_file.take() {
            Some(file) => file,
            None => StateFile::prepare(self.monitor()?)?,
        };
        let raw = file.capture(self.monitor()?, disks);
        self.state_file = Some(file);
        match raw {
            Ok(raw) => Ok(device_state::complete(&raw, &self.machine_type)?),
            Err(StateError::NotStopped { status }) if status != "running" => Err(VmError::RunState(status)),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the file for the device state from a QEMU that keeps its guest.
    pub fn forget_state_file(&mut self) {
        let Some(file) = self.state_file.take() else { return };
        if let Err(error) = self.ask(|qmp| file.remove(qmp)) {
            warn!(error = crate::chain(&error), "QEMU keeps the file for its device state until it ends");
        }
    }

    /// Ends the recording of writes that an agent before this one may have left: only this agent may record this
    /// guest's writes.
    pub fn end_leftover_recording(&mut self) -> Result<(), VmError> {
        if self.ask(qemu::recording::end_leftover)? {
            info!(pid = self.process.pid(), "ended a leftover recording of writes");
        }
        Ok(())
    }

    /// Ends the recording of writes, of this agent or of one before it, in a QEMU that keeps its guest. Returns false
    /// if the recording may continue: the caller has to try again.
    pub fn stop_recording(&mut self, disks: Option<DiskLog>) -> bool {
        let ended = match disks {
            Some(disks) => self.ask(|qmp| disks.end(qmp)),
            None => self.end_leftover_recording(),
        };
        if let Err(error) = ended {
            warn!(
                error = crate::chain(&error),
                "QEMU may still record and throttle its guest's writes: check with query-block"
            );
            return false;
        }
        true
    }

    /// Fails if a device was plugged or unplugged since the start (docs/traps.md, trap 12), or if a drive has another
    /// disk: the destination's QEMU was started with those of the start. Needs some milliseconds, so the caller does
    /// this while it waits for something else.
    pub fn check_unchanged(&mut self) -> Result<(), VmError> {
        if self.ask(ram_table)? != self.ram_table {
            return Err(VmError::Changed("the guest's memory".to_owned()));
        }
        if !self.ask(qemu::tree::device_tree)?.is_same_machine(&self.devices) {
            return Err(VmError::Changed("the guest's devices".to_owned()));
        }
        if self.ask(qemu::drives::media)? != self.media {
            return Err(VmError::OtherMedia);
        }
        Ok(())
    }

    /// Returns true if the guest was continued since it was stopped: by another monitor's `cont`, or by an HA manager.
    /// The data that was sent is then out of date. QEMU emits its event before it lets the guest run, so that none is
    /// missed once QEMU is frozen; QEMU is not queried, and need not be able to answer.
    pub fn has_been_resumed(&mut self) -> Result<bool, VmError> {
        let events = self.ask(Qmp::take_events)?;
        Ok(events.iter().any(|event| event.name == "RESUME"))
    }

    /// Hashes all of the stopped guest's memory; pages that were left out count as zeros.
    pub fn hashes(&mut self, left_out: &[PageSet]) -> Result<BlockHashes, CompareError> {
        let names: Vec<_> = self.blocks.iter().map(|block| block.name.clone()).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let pid = self.process.pid();
        let qmp = self.monitor().map_err(|_| CompareError::NotThere("all".to_owned()))?;
        verification::hashes(qmp, pid, &names, left_out)
    }

    /// Freezes QEMU by SIGSTOP: from COMMITTED on no other `cont` may reach the guest (docs/traps.md, trap 18).
    pub fn freeze(&mut self) -> Result<(), VmError> {
        Ok(freeze::freeze(&self.process)?)
    }

    /// Lets QEMU itself go on, not yet the guest.
    pub fn thaw(&mut self) -> Result<(), VmError> {
        Ok(freeze::thaw(&self.process)?)
    }

    /// Kills QEMU and removes the files that it made for itself.
    ///
    /// QEMU has nothing left to do: its guest runs elsewhere, and its block devices are inactive or, for a paused
    /// guest whose disks' ownership could not be determined ([`device_state::disks`]), were flushed when it was paused.
    /// The command `quit` is not used: for that QEMU would have to be let go, and another program's `cont` may wait at
    /// another of its monitors.
    pub fn quit(self) {
        let pid = self.process.pid();
        // A limit that this agent has set ends with the process.
        if self.blocks.is_empty() {
            self.lift_leftover_limit();
        }
        match self.process.signal(Signal::KILL).and_then(|()| self.process.wait_exit(Some(KILL_PATIENCE))) {
            Ok(true) => info!(pid, "the source's QEMU has ended"),
            Ok(false) => warn!(pid, "the source's QEMU does not exit after SIGKILL"),
            Err(error) => info!(pid, %error, "the source's QEMU had exited already"),
        }
        self.runtime_files.remove();
    }

    /// Returns the RAM blocks in the form of a proposal.
    pub fn proposed_blocks(&self) -> Vec<ProposedBlock> {
        let proposed = |block: &RamBlock| ProposedBlock {
            name: block.name.clone(),
            bytes: block.used_bytes,
            page_bytes: block.page_size_bytes,
        };
        self.blocks.iter().map(proposed).collect()
    }

    /// Returns the kind of memory of the largest block, as text for users.
    pub fn ram_kind(&self) -> String {
        let largest = self.blocks.iter().max_by_key(|block| block.used_bytes);
        largest.map(crate::ram::kind).unwrap_or_default()
    }

    /// Calls `ended` when QEMU exits, for as long as this VM is kept.
    pub fn watch(&mut self, ended: impl FnOnce() + Send + 'static) {
        self.watch = ExitWatch::start(&self.process, ended);
    }
}
