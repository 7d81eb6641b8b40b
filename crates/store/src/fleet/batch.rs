//! Batches of changes to a controller's records, and the records that are read at its start.

use rusqlite::{Connection, Row, Transaction, params};

use super::{COMMANDS_KEPT, EVENTS_KEPT};

/// Changes that are written together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetBatch {
    /// Hosts; those without a document are removed, with their VMs.
    pub hosts: Vec<HostDocument>,
    /// VMs; those without a document are removed.
    pub vms: Vec<VmDocument>,
    /// Commands that are sent.
    pub commands: Vec<StoredCommand>,
    /// Answers to commands; those to commands that were not stored are not either.
    pub answers: Vec<StoredAnswer>,
    /// Evacuations; those without a state are removed.
    pub evacuations: Vec<StoredEvacuation>,
    /// New events.
    pub events: Vec<NewEvent>,
}

/// Record of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDocument {
    /// Host.
    pub host: String,
    /// Document.
    pub document: Option<String>,
}

/// Record of a VM on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmDocument {
    /// Host.
    pub host: String,
    /// VM.
    pub vm: String,
    /// Document.
    pub document: Option<String>,
}

/// Record of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCommand {
    /// Id.
    pub id: String,
    /// Host whose agent carries it out.
    pub host: String,
    /// The command, as JSON.
    pub command: String,
    /// Time at which it was sent first, in milliseconds since 1970.
    pub sent_unix_ms: u64,
}

/// Answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredAnswer {
    /// Id of the command.
    pub id: String,
    /// Host whose agent has answered: only answers of the host to which the command was sent are written.
    pub host: String,
    /// The answer, as JSON.
    pub answer: String,
}

/// Record of an evacuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEvacuation {
    /// Id.
    pub id: String,
    /// Number, in the order of requests.
    pub number: u64,
    /// Document of the controller beside the state, as JSON.
    pub options: String,
    /// State, as JSON.
    pub state: Option<String>,
}

/// Event that has no number yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewEvent {
    /// Time, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Kind.
    pub kind: String,
    /// Host, if it is about one.
    pub host: Option<String>,
    /// VM, if it is about one.
    pub vm: Option<String>,
    /// Evacuation, if it belongs to one.
    pub evacuation: Option<String>,
    /// Description for people.
    pub text: String,
}

/// Event with its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEvent {
    /// Number.
    pub number: u64,
    /// The event.
    pub event: NewEvent,
}

/// Records that a controller begins with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetRecords {
    /// Hosts, by name.
    pub hosts: Vec<HostDocument>,
    /// VMs, by host and name.
    pub vms: Vec<VmDocument>,
    /// Evacuations, in the order of requests.
    pub evacuations: Vec<StoredEvacuation>,
    /// Number of the last event.
    pub last_event: u64,
}

impl FleetBatch {
    /// Returns true if there is nothing to write.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds the record of a host, in place of an earlier one.
    pub fn put_host(&mut self, host: HostDocument) {
        self.hosts.retain(|earlier| earlier.host != host.host);
        self.hosts.push(host);
    }

    /// Adds the record of a VM, in place of an earlier one.
    pub fn put_vm(&mut self, vm: VmDocument) {
        self.vms.retain(|earlier| (&earlier.host, &earlier.vm) != (&vm.host, &vm.vm));
        self.vms.push(vm);
    }

    /// Adds the record of an evacuation, in place of an earlier one.
    pub fn put_evacuation(&mut self, evacuation: StoredEvacuation) {
        self.evacuations.retain(|earlier| earlier.id != evacuation.id);
        self.evacuations.push(evacuation);
    }

    pub(super) fn write(&self, transaction: &Transaction<'_>) -> rusqlite::Result<u64> {
        for HostDocument { host, document } in &self.hosts {
            if let Some(document) = document {
                let sql = "INSERT OR REPLACE INTO hosts (host, document) VALUES (?1, ?2)";
                transaction.prepare_cached(sql)?.execute([host, document])?;
            } else {
                transaction.prepare_cached("DELETE FROM hosts WHERE host = ?1")?.execute([host])?;
                transaction.prepare_cached("DELETE FROM vms WHERE host = ?1")?.execute([host])?;
            }
        }
        for VmDocument { host, vm, document } in &self.vms {
            if let Some(document) = document {
                let sql = "INSERT OR REPLACE INTO vms (host, vm, document) VALUES (?1, ?2, ?3)";
                transaction.prepare_cached(sql)?.execute([host, vm, document])?;
            } else {
                let sql = "DELETE FROM vms WHERE host = ?1 AND vm = ?2";
                transaction.prepare_cached(sql)?.execute([host, vm])?;
            }
        }
        self.write_commands(transaction)?;
        for StoredEvacuation { id, number, options, state } in &self.evacuations {
            if let Some(state) = state {
                let sql =
                    "INSERT OR REPLACE INTO evacuations (id, number, options, state) VALUES (?1, ?2, ?3, ?4)";
                transaction.prepare_cached(sql)?.execute(params![id, *number as i64, options, state])?;
            } else {
                transaction.prepare_cached("DELETE FROM evacuations WHERE id = ?1")?.execute([id])?;
            }
        }
        self.write_events(transaction)
    }

    fn write_commands(&self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        for StoredCommand { id, host, command, sent_unix_ms } in &self.commands {
            let sql =
                "INSERT OR IGNORE INTO commands (id, host, command, sent_unix_ms) VALUES (?1, ?2, ?3, ?4)";
            transaction.prepare_cached(sql)?.execute(params![id, host, command, *sent_unix_ms as i64])?;
        }
        for StoredAnswer { id, host, answer } in &self.answers {
            transaction
                .prepare_cached("UPDATE commands SET answer = ?2 WHERE id = ?1 AND host = ?3")?
                .execute([id, answer, host])?;
        }
        if !self.commands.is_empty() {
            let sql = "DELETE FROM commands WHERE number <= (SELECT max(number) FROM commands) - ?1";
            transaction.prepare_cached(sql)?.execute([COMMANDS_KEPT])?;
        }
        Ok(())
    }

    /// Writes events, removes the oldest ones beyond those that are kept, and returns the last number.
    fn write_events(&self, transaction: &Transaction<'_>) -> rusqlite::Result<u64> {
        let mut last = last_event(transaction)?;
        if self.events.is_empty() {
            return Ok(last);
        }
        for NewEvent { unix_ms, kind, host, vm, evacuation, text } in &self.events {
            last += 1;
            let sql = "INSERT INTO events (number, unix_ms, kind, host, vm, evacuation, text)
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
            let values = params![last as i64, *unix_ms as i64, kind, host, vm, evacuation, text];
            transaction.prepare_cached(sql)?.execute(values)?;
        }
        transaction.prepare_cached("UPDATE numbers SET event = ?1")?.execute([last as i64])?;
        let oldest = last.saturating_sub(EVENTS_KEPT) as i64;
        transaction.prepare_cached("DELETE FROM events WHERE number <= ?1")?.execute([oldest])?;
        Ok(last)
    }
}

impl FleetRecords {
    pub(super) fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let mut hosts = connection.prepare("SELECT host, document FROM hosts ORDER BY host")?;
        let host = |row: &Row<'_>| Ok(HostDocument { host: row.get(0)?, document: Some(row.get(1)?) });
        let mut vms = connection.prepare("SELECT host, vm, document FROM vms ORDER BY host, vm")?;
        let vm = |row: &Row<'_>| {
            Ok(VmDocument { host: row.get(0)?, vm: row.get(1)?, document: Some(row.get(2)?) })
        };
        let sql = "SELECT id, number, options, state FROM evacuations ORDER BY number";
        let mut evacuations = connection.prepare(sql)?;
        let evacuation = |row: &Row<'_>| {
            Ok(StoredEvacuation {
                id: row.get(0)?,
                number: row.get::<_, i64>(1)? as u64,
                options: row.get(2)?,
                state: Some(row.get(3)?),
            })
        };
        Ok(Self {
            hosts: hosts.query_map([], host)?.collect::<Result<_, _>>()?,
            vms: vms.query_map([], vm)?.collect::<Result<_, _>>()?,
            evacuations: evacuations.query_map([], evacuation)?.collect::<Result<_, _>>()?,
            last_event: last_event(connection)?,
        })
    }
}

impl StoredEvent {
    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            number: row.get::<_, i64>(0)? as u64,
            event: NewEvent {
                unix_ms: row.get::<_, i64>(1)? as u64,
                kind: row.get(2)?,
                host: row.get(3)?,
                vm: row.get(4)?,
                evacuation: row.get(5)?,
                text: row.get(6)?,
            },
        })
    }
}

fn last_event(connection: &Connection) -> rusqlite::Result<u64> {
    connection.query_row("SELECT event FROM numbers", [], |row| Ok(row.get::<_, i64>(0)? as u64))
}
