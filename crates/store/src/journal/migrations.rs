//! Migrations, their epochs, and the states of their handovers.

use std::collections::BTreeMap;

use engine::handover::Role;
use engine::handover::destination::DestinationState;
use engine::handover::source::SourceState;
use proto::message::Proposal;
use proto::{Epoch, MigrationId, VmName};
use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::record::{MigrationColumns, MigrationRecord, NewMigration, json, parsed};
use super::{Durability, Journal, JournalError, TransactionError, WriteSpace};
use api::report::unix_ms_now;

impl Journal {
    /// Returns an epoch for a new migration of a VM: larger than all that were ever seen, and never returned again.
    ///
    /// # Errors
    /// If it cannot be recorded, for lack of space or because the journal's file is gone.
    pub fn next_epoch(&self, vm: &VmName) -> Result<Epoch, JournalError> {
        self.write("find a new epoch", Durability::Synced, WriteSpace::Free(0), |transaction| {
            let next = largest_epoch(transaction, vm)?.next();
            record_epoch(transaction, vm, next)?;
            Ok(next)
        })
    }

    /// Records an epoch that a peer or the ownership registry has used.
    ///
    /// # Errors
    /// If it cannot be recorded, for lack of space or because the journal's file is gone.
    pub fn learn_epoch(&self, vm: &VmName, epoch: Epoch) -> Result<(), JournalError> {
        if self.largest_epoch(vm)? >= epoch {
            return Ok(());
        }
        self.write("note an epoch", Durability::Synced, WriteSpace::Free(0), |transaction| {
            record_epoch(transaction, vm, epoch)
        })
    }

    /// Returns the largest epoch of a VM that was ever seen; 0 for none.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn largest_epoch(&self, vm: &VmName) -> Result<Epoch, JournalError> {
        self.read("read an epoch", |connection| largest_epoch(connection, vm))
    }

    /// Begins a migration, synced. Refused while the VM has an open one. The source's epoch comes from
    /// [`Journal::next_epoch`]; a destination is refused an epoch that is not larger than all that it has seen.
    pub fn begin(&self, new: &NewMigration<'_>) -> Result<(), JournalError> {
        let id = &new.terms.migration;
        let state = json(new.state.to_json(), || format!("state of {id}"))?;
        let terms = json(serde_json::to_string(new.terms), || format!("terms of {id}"))?;
        let description = (self.redact)(&new.proposal.description);
        let kept = Proposal { description, ..new.proposal.clone() };
        let proposal = json(serde_json::to_string(&kept), || format!("proposal of {id}"))?;
        let now = unix_ms_now() as i64;
        let room = WriteSpace::Free(proposal.len());
        self.write("begin a migration", Durability::Synced, room, |transaction| {
            if let Some(open) = open_migration(transaction, &id.vm)? {
                return Err(JournalError::AlreadyOpen {
                    open: MigrationId { vm: id.vm.clone(), epoch: open },
                }
                .into());
            }
            let largest = largest_epoch(transaction, &id.vm)?;
            let used = exists(transaction, id)?;
            let fits =
                if new.state.role() == Role::Source { id.epoch >= largest } else { id.epoch > largest };
            if used || !fits {
                return Err(JournalError::OldEpoch { vm: id.vm.clone(), offered: id.epoch, largest }.into());
            }
            record_epoch(transaction, &id.vm, id.epoch)?;
            transaction.execute(
                "INSERT INTO migrations
                     (vm, epoch, role, terms, state, open, details, created_unix_ms, updated_unix_ms)
                 VALUES (?1, ?2, ?3, ?4, ?5, 1, 'null', ?6, ?6)",
                params![id.vm.as_str(), id.epoch.0 as i64, new.state.role().to_string(), terms, state, now],
            )?;
            transaction.execute(
                "INSERT INTO proposals (vm, epoch, proposal) VALUES (?1, ?2, ?3)",
                params![id.vm.as_str(), id.epoch.0 as i64, proposal],
            )?;
            Ok(())
        })
    }

    /// Records a transition of the source.
    ///
    /// # Errors
    /// [`JournalError::NoMigration`] for one that was never begun. For lack of space, or without the journal's file,
    /// only entries up to COMMITTED fail: later ones use the reserve.
    pub fn record_source(
        &self,
        id: &MigrationId,
        state: &SourceState,
        durability: Durability,
    ) -> Result<(), JournalError> {
        // If an entry before COMMITTED fails, the migration ends, and the guest goes on.
        let safe_to_fail = matches!(
            state,
            SourceState::Idle
                | SourceState::Prepared { .. }
                | SourceState::Stopped { .. }
                | SourceState::Committed { .. }
        );
        let room = if safe_to_fail { WriteSpace::Free(0) } else { WriteSpace::Reserved };
        self.record(id, Role::Source, state, durability, room)
    }

    /// Records a transition of the destination.
    ///
    /// # Errors
    /// [`JournalError::NoMigration`] for one that was never begun. For lack of space, or without the journal's file,
    /// only entries up to READY fail: later ones use the reserve.
    pub fn record_destination(
        &self,
        id: &MigrationId,
        state: &DestinationState,
        durability: Durability,
    ) -> Result<(), JournalError> {
        // After READY the guest may be stopped until this entry is written.
        let safe_to_fail = matches!(
            state,
            DestinationState::Idle | DestinationState::Prepared | DestinationState::Ready { .. }
        );
        let room = if safe_to_fail { WriteSpace::Free(0) } else { WriteSpace::Reserved };
        self.record(id, Role::Destination, state, durability, room)
    }

    fn record(
        &self,
        id: &MigrationId,
        role: Role,
        state: &impl Serialize,
        durability: Durability,
        room: WriteSpace,
    ) -> Result<(), JournalError> {
        let state = json(serde_json::to_string(state), || format!("state of {id}"))?;
        self.update(
            "record a transition",
            id,
            durability,
            room,
            "state = ?4 WHERE vm = ?1 AND epoch = ?2 AND role = ?5",
            params![id.vm.as_str(), id.epoch.0 as i64, unix_ms_now() as i64, state, role.to_string()],
        )
    }

    /// Records the data that this side needs in order to go on or to clean up after a restart.
    ///
    /// # Errors
    /// [`JournalError::NoMigration`]; others for lack of space, or if the journal's file is gone.
    pub fn set_details(
        &self,
        id: &MigrationId,
        details: &impl Serialize,
        durability: Durability,
    ) -> Result<(), JournalError> {
        let text = json(serde_json::to_string(details), || format!("details of {id}"))?;
        self.set(id, "note details of a migration", "details = ?4", text, durability)
    }

    /// Records a human-readable message about the migration's state.
    ///
    /// # Errors
    /// [`JournalError::NoMigration`]; others for lack of space, or if the journal's file is gone.
    pub fn set_message(&self, id: &MigrationId, message: &str) -> Result<(), JournalError> {
        let message = shortened(message);
        self.set(id, "note a message", "message = ?4", message, Durability::Process)
    }

    /// Closes a migration: its state is final and everything has been cleaned up. Synced. If no other migration is
    /// open, and so no guest is stopped, the log is folded into the database.
    ///
    /// # Errors
    /// [`JournalError::NoMigration`]; others if SQLite cannot write, for which space is reserved.
    pub fn close(&self, id: &MigrationId) -> Result<(), JournalError> {
        let values = params![id.vm.as_str(), id.epoch.0 as i64, unix_ms_now() as i64];
        let clause = "open = 0 WHERE vm = ?1 AND epoch = ?2";
        self.update("close a migration", id, Durability::Synced, WriteSpace::Reserved, clause, values)?;
        let open: i64 = self.read("count migrations", |connection| {
            Ok(connection
                .query_row("SELECT count(*) FROM migrations WHERE open = 1", [], |row| row.get(0))?)
        })?;
        if open == 0
            && let Err(error) = self.tidy()
        {
            // The entry is in the log, which is folded in at another time.
            warn!(error = api::with_causes(&error), "cannot compact the journal's log");
        }
        Ok(())
    }

    fn set(
        &self,
        id: &MigrationId,
        doing: &'static str,
        assignment: &str,
        value: impl rusqlite::ToSql,
        durability: Durability,
    ) -> Result<(), JournalError> {
        let clause = format!("{assignment} WHERE vm = ?1 AND epoch = ?2");
        let now = unix_ms_now() as i64;
        self.update(
            doing,
            id,
            durability,
            WriteSpace::Free(0),
            &clause,
            params![id.vm.as_str(), id.epoch.0 as i64, now, value],
        )
    }

    fn update(
        &self,
        doing: &'static str,
        id: &MigrationId,
        durability: Durability,
        room: WriteSpace,
        clause: &str,
        values: &[&dyn rusqlite::ToSql],
    ) -> Result<(), JournalError> {
        self.write(doing, durability, room, |transaction| {
            let sql = format!("UPDATE migrations SET updated_unix_ms = ?3, {clause}");
            match transaction.prepare_cached(&sql)?.execute(values)? {
                0 => Err(JournalError::NoMigration(id.clone()).into()),
                _ => Ok(()),
            }
        })
    }

    /// Returns one migration.
    ///
    /// # Errors
    /// If the database cannot be read, or the record is damaged.
    pub fn migration(&self, id: &MigrationId) -> Result<Option<MigrationRecord>, JournalError> {
        let values = params![id.vm.as_str(), id.epoch.0 as i64];
        Ok(self.migrations_where("WHERE vm = ?1 AND epoch = ?2", values)?.pop())
    }

    /// Returns the migration with the largest epoch of a VM.
    ///
    /// # Errors
    /// If the database cannot be read, or the record is damaged.
    pub fn latest(&self, vm: &VmName) -> Result<Option<MigrationRecord>, JournalError> {
        let clause = "WHERE vm = ?1 ORDER BY epoch DESC LIMIT 1";
        Ok(self.migrations_where(clause, params![vm.as_str()])?.pop())
    }

    /// Returns all migrations, newest first: in the order in which they were recorded, however the host's clock was set.
    ///
    /// # Errors
    /// If the database cannot be read, or a record is damaged.
    pub fn migrations(&self) -> Result<Vec<MigrationRecord>, JournalError> {
        self.migrations_where("ORDER BY rowid DESC", &[])
    }

    /// Returns the newest `count` migrations, newest first.
    pub fn newest_migrations(&self, count: u32) -> Result<Vec<MigrationRecord>, JournalError> {
        self.migrations_where("ORDER BY rowid DESC LIMIT ?1", params![count])
    }

    /// Returns the number of migrations by role and by state of the handover; `damaged` is the state of one that cannot be
    /// read.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn migration_counts(&self) -> Result<Vec<(String, String, u64)>, JournalError> {
        self.read("count migrations", |connection| {
            let sql = "SELECT role, state, count(*) FROM migrations GROUP BY role, state";
            let mut statement = connection.prepare_cached(sql)?;
            let rows = statement.query_map([], |row| {
                let state: String = row.get(1)?;
                Ok((row.get::<_, String>(0)?, state_name(&state), row.get::<_, i64>(2)? as u64))
            })?;
            let mut counts: BTreeMap<(String, String), u64> = BTreeMap::new();
            for row in rows {
                let (role, name, count) = row?;
                *counts.entry((role, name)).or_default() += count;
            }
            Ok(counts.into_iter().map(|((role, name), count)| (role, name, count)).collect())
        })
    }

    /// Returns the migrations that are not closed, oldest first: a restarted agent begins with these.
    ///
    /// # Errors
    /// If the database cannot be read, or a record is damaged.
    pub fn open_migrations(&self) -> Result<Vec<MigrationRecord>, JournalError> {
        self.migrations_where("WHERE open = 1 ORDER BY rowid", &[])
    }

    fn migrations_where(
        &self,
        clause: &str,
        values: &[&dyn rusqlite::ToSql],
    ) -> Result<Vec<MigrationRecord>, JournalError> {
        self.read("read migrations", |connection| {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT vm, epoch, role, terms, state, open, details, message, created_unix_ms, updated_unix_ms
                 FROM migrations {clause}"
            ))?;
            let rows = statement.query_map(values, MigrationColumns::read)?;
            rows.map(|row| row?.record()).collect()
        })
    }

    /// Returns the source's proposal.
    ///
    /// # Errors
    /// If the database cannot be read, or the document is damaged.
    pub fn proposal(&self, id: &MigrationId) -> Result<Option<Proposal>, JournalError> {
        self.document(id, "read a proposal", "SELECT proposal FROM proposals WHERE vm = ?1 AND epoch = ?2")
    }

    /// Returns the report of a migration.
    ///
    /// # Errors
    /// If the database cannot be read, or the document is damaged.
    pub fn report(&self, id: &MigrationId) -> Result<Option<api::report::Report>, JournalError> {
        self.document(id, "read a report", "SELECT report FROM reports WHERE vm = ?1 AND epoch = ?2")
    }

    /// Stores the report of a migration, in place of an earlier one.
    ///
    /// # Errors
    /// For lack of space, or if the journal's file is gone.
    pub fn put_report(&self, report: &api::report::Report) -> Result<(), JournalError> {
        let id = &report.migration;
        let text = json(serde_json::to_string(report), || format!("report of {id}"))?;
        let room = WriteSpace::Free(text.len());
        self.write("keep a report", Durability::Process, room, |transaction| {
            transaction.execute(
                "INSERT OR REPLACE INTO reports (vm, epoch, report) VALUES (?1, ?2, ?3)",
                params![id.vm.as_str(), id.epoch.0 as i64, text],
            )?;
            Ok(())
        })
    }

    fn document<T: DeserializeOwned>(
        &self,
        id: &MigrationId,
        doing: &'static str,
        sql: &str,
    ) -> Result<Option<T>, JournalError> {
        self.read(doing, |connection| {
            let text: Option<String> = connection
                .prepare_cached(sql)?
                .query_row(params![id.vm.as_str(), id.epoch.0 as i64], |row| row.get(0))
                .optional()?;
            text.map(|text| parsed(&text, || format!("document of {id}"))).transpose()
        })
    }
}

/// Returns the part of a text that is stored: a message of a peer, or a QEMU's log, may be long.
fn shortened(text: &str) -> &str {
    const MESSAGE_BYTES: usize = 4 << 10;
    &text[..text.floor_char_boundary(MESSAGE_BYTES)]
}

fn largest_epoch(connection: &Connection, vm: &VmName) -> Result<Epoch, TransactionError> {
    let largest: Option<i64> = connection
        .prepare_cached("SELECT largest FROM epochs WHERE vm = ?1")?
        .query_row([vm.as_str()], |row| row.get(0))
        .optional()?;
    Ok(Epoch(largest.unwrap_or(0) as u64))
}

fn record_epoch(connection: &Connection, vm: &VmName, epoch: Epoch) -> Result<(), TransactionError> {
    connection
        .prepare_cached(
            "INSERT INTO epochs (vm, largest) VALUES (?1, ?2)
             ON CONFLICT (vm) DO UPDATE SET largest = max(largest, excluded.largest)",
        )?
        .execute(params![vm.as_str(), epoch.0 as i64])?;
    Ok(())
}

fn open_migration(connection: &Connection, vm: &VmName) -> Result<Option<Epoch>, TransactionError> {
    let epoch: Option<i64> = connection
        .query_row("SELECT epoch FROM migrations WHERE vm = ?1 AND open = 1", [vm.as_str()], |row| row.get(0))
        .optional()?;
    Ok(epoch.map(|epoch| Epoch(epoch as u64)))
}

fn exists(connection: &Connection, id: &MigrationId) -> Result<bool, TransactionError> {
    let sql = "SELECT 1 FROM migrations WHERE vm = ?1 AND epoch = ?2";
    Ok(connection
        .query_row(sql, params![id.vm.as_str(), id.epoch.0 as i64], |_| Ok(()))
        .optional()?
        .is_some())
}

/// Returns the name of a state, without its fields. SQLite is built without JSON.
fn state_name(state: &str) -> String {
    let parsed: Option<serde_json::Value> = serde_json::from_str(state).ok();
    let name = parsed.as_ref().and_then(|state| state["state"].as_str());
    name.unwrap_or("damaged").to_owned()
}
