//! Commands of the controller that were begun, with their outcomes; the largest term that was seen; and the cordon.

use proto::message::{CommandAnswer, CommandVerb};
use proto::{CommandId, Epoch};
use rusqlite::{Connection, OptionalExtension, params};

use super::record::{json, parsed};
use super::{Durability, Journal, JournalError, TransactionError, WriteSpace};

/// Number of commands that are kept. A controller repeats recent ones only.
const KEPT: i64 = 10_000;

/// The journal's record of a command that was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandRecord {
    /// The command.
    pub command: CommandVerb,
    /// Largest epoch of the VM that it moves, before the move was begun.
    pub largest_epoch: Option<Epoch>,
    /// Epoch of the migration that it has begun.
    pub epoch: Option<Epoch>,
    /// True once it was to be cancelled.
    pub is_cancelled: bool,
    /// The answer; none as long as it goes on.
    pub answer: Option<CommandAnswer>,
}

impl CommandRecord {
    /// Creates the record of a command that is begun now.
    pub fn new(command: CommandVerb) -> Self {
        Self { command, largest_epoch: None, epoch: None, is_cancelled: false, answer: None }
    }
}

impl Journal {
    /// Records a controller's term. Returns the largest one that was ever recorded: a controller with a smaller one has
    /// been replaced.
    pub fn learn_term(&self, term: u64) -> Result<u64, JournalError> {
        let largest = self.largest_term()?;
        if largest >= term {
            return Ok(largest);
        }
        self.write("note the controller's term", Durability::Synced, WriteSpace::Free(0), |transaction| {
            transaction.prepare_cached("UPDATE fleet SET term = max(term, ?1)")?.execute([term as i64])?;
            largest_term(transaction)
        })
    }

    /// Returns the largest term of a controller that was ever seen; 0 for none.
    pub fn largest_term(&self) -> Result<u64, JournalError> {
        self.read("read the controller's term", largest_term)
    }

    /// Records a command, synced, unless its id is known already. Returns the earlier record in that case.
    pub fn begin_command(
        &self,
        id: &CommandId,
        record: &CommandRecord,
    ) -> Result<Option<CommandRecord>, JournalError> {
        let command = json(serde_json::to_string(&record.command), || format!("command {id}"))?;
        let answer = record.answer.as_ref().map(serde_json::to_string).transpose();
        let answer = json(answer.map(Option::unwrap_or_default), || format!("answer to command {id}"))?;
        let room = WriteSpace::Free(command.len() + answer.len());
        self.write("note a command", Durability::Synced, room, |transaction| {
            if let Some(known) = command_record(transaction, id)? {
                return Ok(Some(known));
            }
            let sql = "INSERT INTO commands (id, command, largest_epoch, epoch, cancelled, answer)
                       VALUES (?1, ?2, ?3, ?4, ?5, nullif(?6, ''))";
            transaction.prepare_cached(sql)?.execute(params![
                id.as_str(),
                command,
                record.largest_epoch.map(|epoch| epoch.0 as i64),
                record.epoch.map(|epoch| epoch.0 as i64),
                record.is_cancelled,
                answer,
            ])?;
            let sql = "DELETE FROM commands WHERE number <= (SELECT max(number) FROM commands) - ?1";
            transaction.prepare_cached(sql)?.execute([KEPT])?;
            Ok(None)
        })
    }

    /// Returns the record of a command; none if the command was never seen.
    pub fn command(&self, id: &CommandId) -> Result<Option<CommandRecord>, JournalError> {
        self.read("read a command", |connection| command_record(connection, id))
    }

    /// Returns the ids of commands without an answer, in the order of their arrival.
    pub fn open_commands(&self) -> Result<Vec<CommandId>, JournalError> {
        self.read("read commands", |connection| {
            let sql = "SELECT id FROM commands WHERE answer IS NULL ORDER BY number";
            let mut statement = connection.prepare_cached(sql)?;
            let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
            rows.map(|id| command_id(id?)).collect()
        })
    }

    /// Records the migration that a command has begun, synced.
    pub fn set_command_epoch(&self, id: &CommandId, epoch: Epoch) -> Result<(), JournalError> {
        self.set_command(id, "epoch = ?2", epoch.0 as i64, 0)
    }

    /// Records that a command was to be cancelled, synced.
    pub fn set_command_cancelled(&self, id: &CommandId) -> Result<(), JournalError> {
        self.set_command(id, "cancelled = ?2", true, 0)
    }

    /// Records the answer to a command, synced. The first answer is kept: it may have been sent.
    pub fn answer_command(&self, id: &CommandId, answer: &CommandAnswer) -> Result<(), JournalError> {
        let text = json(serde_json::to_string(answer), || format!("answer to command {id}"))?;
        let bytes = text.len();
        self.set_command(id, "answer = coalesce(answer, ?2)", text, bytes)
    }

    fn set_command(
        &self,
        id: &CommandId,
        assignment: &str,
        value: impl rusqlite::ToSql,
        bytes: usize,
    ) -> Result<(), JournalError> {
        let room = WriteSpace::Free(bytes);
        self.write("note the course of a command", Durability::Synced, room, |transaction| {
            let sql = format!("UPDATE commands SET {assignment} WHERE id = ?1");
            transaction.prepare_cached(&sql)?.execute(params![id.as_str(), value])?;
            Ok(())
        })
    }

    /// Returns true if this host accepts no VMs.
    pub fn is_cordoned(&self) -> Result<bool, JournalError> {
        self.read("read the cordon", |connection| {
            let mut statement = connection.prepare_cached("SELECT cordoned FROM fleet")?;
            Ok(statement.query_row([], |row| row.get::<_, bool>(0))?)
        })
    }

    /// Records whether this host accepts VMs, synced.
    pub fn set_cordoned(&self, cordoned: bool) -> Result<(), JournalError> {
        self.write("note the cordon", Durability::Synced, WriteSpace::Free(0), |transaction| {
            transaction.prepare_cached("UPDATE fleet SET cordoned = ?1")?.execute([cordoned])?;
            Ok(())
        })
    }
}

fn largest_term(connection: &Connection) -> Result<u64, TransactionError> {
    let mut statement = connection.prepare_cached("SELECT term FROM fleet")?;
    Ok(statement.query_row([], |row| row.get::<_, i64>(0))? as u64)
}

fn command_id(text: String) -> Result<CommandId, TransactionError> {
    let what = format!("id of command {text}");
    parsed(&serde_json::Value::from(text).to_string(), || what)
}

type CommandColumns = (String, Option<i64>, Option<i64>, bool, Option<String>);

fn command_record(
    connection: &Connection,
    id: &CommandId,
) -> Result<Option<CommandRecord>, TransactionError> {
    let sql = "SELECT command, largest_epoch, epoch, cancelled, answer FROM commands WHERE id = ?1";
    let columns: Option<CommandColumns> = connection
        .prepare_cached(sql)?
        .query_row([id.as_str()], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?)))
        .optional()?;
    let Some((command, largest_epoch, epoch, is_cancelled, answer)) = columns else { return Ok(None) };
    let number = |epoch: Option<i64>| epoch.map(|epoch| Epoch(epoch as u64));
    Ok(Some(CommandRecord {
        command: parsed(&command, || format!("command {id}"))?,
        largest_epoch: number(largest_epoch),
        epoch: number(epoch),
        is_cancelled,
        answer: answer.map(|answer| parsed(&answer, || format!("answer to command {id}"))).transpose()?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(folder: &std::path::Path) -> Journal {
        Journal::open(folder, serde_json::Value::clone).unwrap()
    }

    fn id(text: &str) -> CommandId {
        CommandId::new(text).unwrap()
    }

    #[test]
    fn the_largest_term_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        {
            let journal = open(folder.path());
            assert_eq!(journal.largest_term().unwrap(), 0);
            assert_eq!(journal.learn_term(7).unwrap(), 7);
            assert_eq!(journal.learn_term(3).unwrap(), 7, "an older controller");
        }
        assert_eq!(open(folder.path()).learn_term(7).unwrap(), 7);
    }

    #[test]
    fn a_command_is_recorded_once_with_its_course() {
        let folder = tempfile::tempdir().unwrap();
        let record =
            CommandRecord { largest_epoch: Some(Epoch(4)), ..CommandRecord::new(CommandVerb::Cordon) };
        {
            let journal = open(folder.path());
            assert_eq!(journal.command(&id("e1/1")).unwrap(), None);
            assert_eq!(journal.begin_command(&id("e1/1"), &record).unwrap(), None);
            let later = CommandRecord::new(CommandVerb::Uncordon);
            assert_eq!(journal.begin_command(&id("e1/1"), &later).unwrap(), Some(record.clone()));
            assert_eq!(journal.open_commands().unwrap(), [id("e1/1")]);
            journal.set_command_epoch(&id("e1/1"), Epoch(5)).unwrap();
            journal.set_command_cancelled(&id("e1/1")).unwrap();
            journal.answer_command(&id("e1/1"), &CommandAnswer::Done).unwrap();
            let other = CommandAnswer::Stale { largest_term: 9 };
            journal.answer_command(&id("e1/1"), &other).unwrap();
        }
        let journal = open(folder.path());
        let expected = CommandRecord {
            epoch: Some(Epoch(5)),
            is_cancelled: true,
            answer: Some(CommandAnswer::Done),
            ..record.clone()
        };
        assert_eq!(journal.command(&id("e1/1")).unwrap(), Some(expected));
        assert!(journal.open_commands().unwrap().is_empty());
        let cancelled = CommandRecord { is_cancelled: true, answer: Some(CommandAnswer::Done), ..record };
        assert_eq!(journal.begin_command(&id("e1/2"), &cancelled).unwrap(), None);
        assert_eq!(journal.command(&id("e1/2")).unwrap(), Some(cancelled), "a command that came too late");
    }

    #[test]
    fn a_cordon_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        {
            let journal = open(folder.path());
            assert!(!journal.is_cordoned().unwrap());
            journal.set_cordoned(true).unwrap();
        }
        let journal = open(folder.path());
        assert!(journal.is_cordoned().unwrap());
        journal.set_cordoned(false).unwrap();
        assert!(!journal.is_cordoned().unwrap());
    }
}
