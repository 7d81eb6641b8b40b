//! Changes of names in a thread of their own: a handover never waits for a server of DNS.

use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tracing::warn;

use crate::change::Goal;
use crate::pass::pass;
use crate::plan::{PlanError, Relocation, plan};
use crate::record::{ChangeJournal, Progress, RecordFile};
use crate::retry::delay;
use crate::zones::Zones;

/// Error of the preparation.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// A name is in no zone.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The record cannot be kept, or the thread cannot be started.
    #[error("cannot keep a record of the names' changes")]
    Record(#[from] io::Error),
}

/// Changes the records of one VM, in a thread, until the goal is reached. What fails is tried again. If this is dropped,
/// the thread ends after what it is doing, and the record stays.
#[derive(Debug)]
pub struct Updater {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    file: RecordFile,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
enum Command {
    /// Aims at another goal.
    Pursue(Goal),
    /// Tries at once, whatever the last attempts gave.
    Retry,
    /// Ends.
    End,
}

#[derive(Debug)]
struct Shared {
    standing: Mutex<Standing>,
    changed: Condvar,
}

#[derive(Debug)]
struct Standing {
    record: ChangeJournal,
    /// Goal that was asked for last.
    wanted: Goal,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Updater {
    /// Records the changes of a VM in a file, and begins to lower the TTLs of its records.
    ///
    /// # Errors
    /// If a name is in no zone, or the file exists already or cannot be written. Servers give no errors here: see
    /// [`record`](Self::record).
    pub fn prepare(zones: Zones, relocation: &Relocation, file: &Path) -> Result<Self, PrepareError> {
        let record = ChangeJournal::new(plan(zones.configs(), relocation)?);
        let file = RecordFile::new(file);
        file.create(&record)?;
        let started = Self::start(zones, record, file.clone());
        // Nothing has been changed.
        Ok(started.inspect_err(|_| drop(file.remove()))?)
    }

    /// Continues the changes that a file has; none if there is no file. They go on towards the goal that was recorded last.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn resume(zones: Zones, file: &Path) -> io::Result<Option<Self>> {
        let file = RecordFile::new(file);
        file.load()?.map(|record| Self::start(zones, record, file)).transpose()
    }

    fn start(zones: Zones, record: ChangeJournal, file: RecordFile) -> io::Result<Self> {
        let standing = Mutex::new(Standing { wanted: record.goal, record: record.clone() });
        let shared = Arc::new(Shared { standing, changed: Condvar::new() });
        let (commands, received) = mpsc::channel();
        let (its_shared, its_file) = (Arc::clone(&shared), file.clone());
        let thread = thread::Builder::new()
            .name("dns".to_owned())
            .spawn(move || work(&zones, record, &its_file, &received, &its_shared))?;
        Ok(Self { commands, shared, file, thread })
    }

    /// Changes the records to those of the destination: the VM runs there. Returns at once.
    pub fn switch(&self) {
        self.pursue(Goal::Switched);
    }

    /// Gives the records of the destination the TTL that was found. Returns at once.
    pub fn restore(&self) {
        self.pursue(Goal::Restored);
    }

    /// Gives the records back what was found, with their TTL: the VM stays at the source. Returns at once.
    pub fn undo(&self) {
        self.pursue(Goal::Undone);
    }

    /// Tries at once what has failed, for instance after a key was mended. Returns at once.
    pub fn retry(&self) {
        // The thread ends only by `End`.
        let _ = self.commands.send(Command::Retry);
    }

    fn pursue(&self, goal: Goal) {
        self.shared.lock().wanted = goal;
        let _ = self.commands.send(Command::Pursue(goal));
    }

    /// Returns the goal that was asked for last.
    pub fn goal(&self) -> Goal {
        self.shared.lock().wanted
    }

    /// Returns how far all changes are. The goal of this record may still be an older one.
    pub fn record(&self) -> ChangeJournal {
        self.shared.lock().record.clone()
    }

    /// Waits until the goal that was asked for last is reached at all servers, for a limited time. Returns how far all
    /// changes are then.
    pub fn wait(&self, limit: Duration) -> ChangeJournal {
        self.wait_until(limit, |record| record.progress() == Progress::Complete)
    }

    /// Waits until a condition is true of a record with the goal that was asked for last, for a limited time. Returns the
    /// record, whichever it is then.
    pub fn wait_until(&self, limit: Duration, is_enough: impl Fn(&ChangeJournal) -> bool) -> ChangeJournal {
        let deadline = Instant::now() + limit;
        let mut standing = self.shared.lock();
        while standing.record.goal != standing.wanted || !is_enough(&standing.record) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.changed.wait_timeout(standing, left);
            standing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        standing.record.clone()
    }

    /// Ends the thread, after what it is doing; the file stays for [`resume`](Self::resume). Returns how far all changes
    /// are.
    pub fn close(self) -> ChangeJournal {
        self.end();
        let Self { shared, thread, .. } = self;
        if thread.join().is_err() {
            warn!("the thread that changes names has panicked");
        }
        let standing = shared.lock();
        standing.record.clone()
    }

    /// Ends the thread, and removes the file: all changes are made, or the others are given up. Returns the changes.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn finish(self) -> io::Result<ChangeJournal> {
        let file = self.file.clone();
        let record = self.close();
        file.remove()?;
        Ok(record)
    }

    fn end(&self) {
        let _ = self.commands.send(Command::End);
    }
}

/// Body of the thread.
fn work(
    zones: &Zones,
    mut record: ChangeJournal,
    file: &RecordFile,
    commands: &Receiver<Command>,
    shared: &Shared,
) {
    let mut attempts = 0;
    let mut due = Some(Instant::now());
    loop {
        let command = match due {
            Some(due) => commands.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match command {
            Ok(Command::End) | Err(RecvTimeoutError::Disconnected) => break,
            Ok(Command::Pursue(goal)) => {
                record.goal = goal;
                attempts = 0;
                due = Some(Instant::now());
                if let Err(error) = file.save(&record) {
                    warn!("cannot record that names are to be changed: {error}");
                }
            }
            Ok(Command::Retry) => {
                attempts = 0;
                due = Some(Instant::now());
            }
            Err(RecvTimeoutError::Timeout) => {
                pass(zones, &mut record, file);
                attempts += 1;
                due = delay(&record, attempts).map(|delay| Instant::now() + delay);
                shared.lock().record.clone_from(&record);
                shared.changed.notify_all();
            }
        }
    }
}
