//! VMs that the agent has adopted.

use std::path::PathBuf;

use proto::VmName;
use rusqlite::{OptionalExtension, Row, params};
use tracee::{Process, ProcessError};

use super::record::parsed;
use super::{Durability, Journal, JournalError, TransactionError, WriteSpace};
use api::report::unix_ms_now;

/// A VM that the agent has adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmRecord {
    /// Name of the VM.
    pub vm: VmName,
    /// Its description, as `qemu::VmDescription`; from the journal, without secrets.
    pub description: serde_json::Value,
    /// Process id of its QEMU.
    pub pid: u32,
    /// Start time of that process, in clock ticks since boot: field 22 of `/proc/PID/stat`.
    pub start_time_ticks: u64,
    /// The host's boot in which those two name a process; empty in entries of older agents.
    pub boot_id: String,
    /// Its QMP socket.
    pub qmp: PathBuf,
    /// Time at which the agent adopted it, in milliseconds since 1970.
    pub adopted_unix_ms: u64,
}

impl VmRecord {
    /// Creates the record of a VM that is adopted now.
    pub fn new(
        vm: VmName,
        description: serde_json::Value,
        (pid, start_time_ticks): (u32, u64),
        boot_id: &str,
        qmp: PathBuf,
    ) -> Self {
        let boot_id = boot_id.to_owned();
        Self { vm, description, pid, start_time_ticks, boot_id, qmp, adopted_unix_ms: unix_ms_now() }
    }

    /// Opens its QEMU's process, on a host of this boot. After another boot the process id and the start time may
    /// belong to another process.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] if the process has ended, or is of another boot.
    pub fn process(&self, boot_id: &str) -> Result<Process, ProcessError> {
        if !self.boot_id.is_empty() && self.boot_id != boot_id {
            return Err(ProcessError::Gone { pid: self.pid });
        }
        Process::open_exact(self.pid, self.start_time_ticks)
    }
}

impl Journal {
    /// Stores a VM, in place of an earlier record under its name.
    ///
    /// # Errors
    /// For lack of space, or if the journal's file is gone.
    pub fn put_vm(&self, record: &VmRecord) -> Result<(), JournalError> {
        self.keep_vm(record, WriteSpace::Free)
    }

    /// Stores a VM as [`put_vm`](Self::put_vm), for a VM that has arrived and runs, even if the journal's file was
    /// moved or deleted.
    ///
    /// # Errors
    /// For lack of space.
    pub fn put_arrived_vm(&self, record: &VmRecord) -> Result<(), JournalError> {
        self.keep_vm(record, WriteSpace::ForEvent)
    }

    fn keep_vm(&self, record: &VmRecord, room: impl FnOnce(usize) -> WriteSpace) -> Result<(), JournalError> {
        let description = (self.redact)(&record.description).to_string();
        let room = room(description.len());
        self.write("keep a VM", Durability::Synced, room, |transaction| {
            transaction
                .prepare_cached(
                    "INSERT OR REPLACE INTO vms
                         (vm, description, pid, start_time_ticks, qmp, adopted_unix_ms, boot_id)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                )?
                .execute(params![
                    record.vm.as_str(),
                    description,
                    record.pid,
                    record.start_time_ticks as i64,
                    record.qmp.to_string_lossy(),
                    record.adopted_unix_ms as i64,
                    record.boot_id,
                ])?;
            Ok(())
        })
    }

    /// Returns one VM.
    ///
    /// # Errors
    /// If the database cannot be read, or the record is damaged.
    pub fn vm(&self, vm: &VmName) -> Result<Option<VmRecord>, JournalError> {
        self.read("read a VM", |connection| {
            let mut statement = connection.prepare_cached(&format!("{SELECT} WHERE vm = ?1"))?;
            let columns = statement.query_row([vm.as_str()], columns).optional()?;
            columns.map(record).transpose()
        })
    }

    /// Returns all VMs, by name.
    ///
    /// # Errors
    /// If the database cannot be read, or a record is damaged.
    pub fn vms(&self) -> Result<Vec<VmRecord>, JournalError> {
        self.read("read the VMs", |connection| {
            let mut statement = connection.prepare_cached(&format!("{SELECT} ORDER BY vm"))?;
            let rows = statement.query_map([], columns)?;
            rows.map(|row| record(row?)).collect()
        })
    }

    /// Forgets a VM; returns true if it was known. Its migrations and epochs are not forgotten.
    ///
    /// # Errors
    /// If SQLite cannot write, for which space is reserved.
    pub fn remove_vm(&self, vm: &VmName) -> Result<bool, JournalError> {
        self.write("forget a VM", Durability::Synced, WriteSpace::Reserved, |transaction| {
            Ok(transaction.prepare_cached("DELETE FROM vms WHERE vm = ?1")?.execute([vm.as_str()])? > 0)
        })
    }
}

const SELECT: &str = "SELECT vm, description, pid, start_time_ticks, qmp, adopted_unix_ms, boot_id FROM vms";

type VmColumns = (String, String, u32, i64, String, i64, String);

fn columns(row: &Row<'_>) -> rusqlite::Result<VmColumns> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?))
}

fn record(
    (vm, description, pid, start, qmp, adopted, boot_id): VmColumns,
) -> Result<VmRecord, TransactionError> {
    let what = || format!("record of VM {vm}");
    Ok(VmRecord {
        vm: parsed(&serde_json::Value::from(vm.as_str()).to_string(), what)?,
        description: parsed(&description, what)?,
        pid,
        start_time_ticks: start as u64,
        boot_id,
        qmp: PathBuf::from(qmp),
        adopted_unix_ms: adopted as u64,
    })
}
