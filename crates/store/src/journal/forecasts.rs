//! Measurements for forecasts, and forecasts beside their outcomes. Nothing that a migration needs depends on them.

use engine::forecast::Calibration;
use engine::forecast::calibration::CalibrationRecord;
use engine::forecast::history::{PathMemory, PathSample};
use proto::{Epoch, HostId, MigrationId, VmName};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::record::{json, parsed};
use super::{Durability, Journal, JournalError, TransactionError, WriteSpace};
use api::{ForecastOutcome, VmMeasurement};

/// Space for a document of this kind, in bytes.
const DOCUMENT_BYTES: usize = 16 << 10;

impl Journal {
    /// Returns the last measurement of a VM.
    pub fn measurement(&self, vm: &VmName) -> Result<Option<VmMeasurement>, JournalError> {
        self.read("read a measurement", |connection| measurement(connection, &of_vm(vm)))
    }

    /// Stores a measurement of a VM, in place of the one before.
    pub fn put_measurement(&self, vm: &VmName, measured: &VmMeasurement) -> Result<(), JournalError> {
        let room = WriteSpace::Free(DOCUMENT_BYTES);
        self.write("keep a measurement", Durability::Process, room, |transaction| {
            put(transaction, &of_vm(vm), measured)
        })
    }

    /// Returns what is remembered of the path to a host.
    pub fn path_memory(&self, host: &HostId) -> Result<PathMemory, JournalError> {
        let read = |connection: &Connection| measurement(connection, &of_path(host));
        Ok(self.read("read the memory of a path", read)?.unwrap_or_default())
    }

    /// Changes what is remembered of the path to a host.
    pub fn change_path_memory(
        &self,
        host: &HostId,
        change: impl FnOnce(&mut PathMemory),
    ) -> Result<(), JournalError> {
        let room = WriteSpace::Free(DOCUMENT_BYTES);
        self.write("keep the memory of a path", Durability::Process, room, |transaction| {
            let subject = of_path(host);
            let mut memory: PathMemory = measurement(transaction, &subject)?.unwrap_or_default();
            change(&mut memory);
            put(transaction, &subject, &memory)
        })
    }

    /// Records the facts that a migration to a host has shown.
    pub fn learn_path(&self, host: &HostId, sample: PathSample) -> Result<(), JournalError> {
        self.change_path_memory(host, |memory| memory.learn(sample))
    }

    /// Records a forecast with its outcome, and forgets the oldest beyond [`Calibration::MOST_RECORDS`].
    pub fn learn_outcome(&self, id: &MigrationId, record: &CalibrationRecord) -> Result<(), JournalError> {
        let text = json(serde_json::to_string(record), || format!("forecast of {id}"))?;
        let room = WriteSpace::Free(DOCUMENT_BYTES);
        self.write("keep a forecast", Durability::Process, room, |transaction| {
            transaction.execute(
                "INSERT INTO forecasts (vm, epoch, record) VALUES (?1, ?2, ?3)",
                params![id.vm.as_str(), id.epoch.0 as i64, text],
            )?;
            transaction.execute(
                "DELETE FROM forecasts WHERE number <= (SELECT max(number) FROM forecasts) - ?1",
                params![Calibration::MOST_RECORDS as i64],
            )?;
            Ok(())
        })
    }

    /// Returns the forecasts with their outcomes, the oldest first.
    pub fn outcomes(&self) -> Result<Vec<ForecastOutcome>, JournalError> {
        self.read("read forecasts", |connection| {
            let mut statement =
                connection.prepare_cached("SELECT vm, epoch, record FROM forecasts ORDER BY number")?;
            let rows = statement.query_map([], columns)?;
            rows.map(|row| outcome(&row?)).collect()
        })
    }

    /// Returns the record by which forecasts are corrected.
    pub fn calibration(&self) -> Result<Calibration, JournalError> {
        let mut calibration = Calibration::default();
        self.outcomes()?.into_iter().for_each(|outcome| calibration.learn(outcome.record));
        Ok(calibration)
    }
}

fn of_vm(vm: &VmName) -> String {
    format!("vm/{vm}")
}

fn of_path(host: &HostId) -> String {
    format!("path/{host}")
}

fn measurement<T: DeserializeOwned>(
    connection: &Connection,
    subject: &str,
) -> Result<Option<T>, TransactionError> {
    let text: Option<String> = connection
        .prepare_cached("SELECT measurement FROM measurements WHERE subject = ?1")?
        .query_row([subject], |row| row.get(0))
        .optional()?;
    text.map(|text| parsed(&text, || format!("measurement of {subject}"))).transpose()
}

fn put(
    transaction: &Transaction<'_>,
    subject: &str,
    measured: &impl Serialize,
) -> Result<(), TransactionError> {
    let text = json(serde_json::to_string(measured), || format!("measurement of {subject}"))?;
    transaction
        .prepare_cached("INSERT OR REPLACE INTO measurements (subject, measurement) VALUES (?1, ?2)")?
        .execute(params![subject, text])?;
    Ok(())
}

type OutcomeColumns = (String, i64, String);

fn columns(row: &Row<'_>) -> rusqlite::Result<OutcomeColumns> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?))
}

fn outcome((vm, epoch, record): &OutcomeColumns) -> Result<ForecastOutcome, TransactionError> {
    let what = || format!("forecast of {vm}");
    let migration = MigrationId {
        vm: parsed(&serde_json::Value::from(vm.as_str()).to_string(), what)?,
        epoch: Epoch(*epoch as u64),
    };
    Ok(ForecastOutcome { migration, record: parsed(record, what)? })
}
