//! Changes of names in a thread of their own: a handover never waits for a server of DNS.

use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tracing::warn;

use crate::attempt::attempt_all;
use crate::change::Goal;
use crate::change_set::{ChangeSet, ChangeSetFile, Progress};
use crate::relocation::{Relocation, RelocationError, changes_of};
use crate::retry::delay;
use crate::zones::Zones;

/// Error of the preparation.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// A name is in no zone.
    #[error(transparent)]
    Plan(#[from] RelocationError),
    /// The file cannot be kept, or the thread cannot be started.
    #[error("cannot keep a file of the names' changes")]
    Record(#[from] io::Error),
}

/// Changes the records of one VM, in a thread, until the goal is reached. What fails is tried again. If this is dropped,
/// the thread ends after what it is doing, and the file stays.
#[derive(Debug)]
pub struct Updater {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    file: ChangeSetFile,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
enum Command {
    /// Aims at another goal.
    SetGoal(Goal),
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
    change_set: ChangeSet,
    /// Goal that was asked for last.
    wanted: Goal,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Updater {
    /// Records the changes of a VM in a file, and begins to lower the TTLs of its records. Changes of the same VM that are
    /// not finished, and are to be [abandoned](Self::abandon) then, tell the TTLs that they have lowered.
    ///
    /// # Errors
    /// If a name is in no zone, or the file exists already or cannot be written. Servers give no errors here: see
    /// [`change_set`](Self::change_set).
    pub fn prepare(
        zones: Zones,
        relocation: &Relocation,
        file: &Path,
        unfinished: &[ChangeSet],
    ) -> Result<Self, PrepareError> {
        let mut change_set = ChangeSet::new(changes_of(zones.configs(), relocation)?);
        change_set.adopt_ttls(unfinished);
        let file = ChangeSetFile::new(file);
        file.create(&change_set)?;
        let started = Self::start(zones, change_set, file.clone());
        // Nothing has been changed.
        Ok(started.inspect_err(|_| drop(file.remove()))?)
    }

    /// Continues the changes that a file has; none if there is no file. They go on towards the goal that was recorded last.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn resume(zones: Zones, file: &Path) -> io::Result<Option<Self>> {
        let file = ChangeSetFile::new(file);
        file.load()?.map(|change_set| Self::start(zones, change_set, file)).transpose()
    }

    fn start(zones: Zones, change_set: ChangeSet, file: ChangeSetFile) -> io::Result<Self> {
        let standing = Mutex::new(Standing { wanted: change_set.goal, change_set: change_set.clone() });
        let shared = Arc::new(Shared { standing, changed: Condvar::new() });
        let (commands, received) = mpsc::channel();
        let (its_shared, its_file) = (Arc::clone(&shared), file.clone());
        let thread = thread::Builder::new()
            .name("dns".to_owned())
            .spawn(move || work(&zones, change_set, &its_file, &received, &its_shared))?;
        Ok(Self { commands, shared, file, thread })
    }

    /// Changes the records to those of the destination: the VM runs there. Returns at once.
    pub fn switch(&self) {
        self.set_goal(Goal::Switched);
    }

    /// Gives the records of the destination the TTL that was found. Returns at once.
    pub fn restore_ttl(&self) {
        self.set_goal(Goal::Restored);
    }

    /// Gives the records back what was found, with their TTL: the VM stays at the source. Returns at once.
    pub fn undo(&self) {
        self.set_goal(Goal::Undone);
    }

    /// Tries at once what has failed, for instance after a key was mended. Returns at once.
    pub fn retry(&self) {
        // The thread ends only by `End`.
        let _ = self.commands.send(Command::Retry);
    }

    fn set_goal(&self, goal: Goal) {
        self.shared.lock().wanted = goal;
        let _ = self.commands.send(Command::SetGoal(goal));
    }

    /// Returns the goal that was asked for last.
    pub fn goal(&self) -> Goal {
        self.shared.lock().wanted
    }

    /// Returns how far all changes are. The goal of this set may still be an older one.
    pub fn change_set(&self) -> ChangeSet {
        self.shared.lock().change_set.clone()
    }

    /// Waits until the goal that was asked for last is reached at all servers, for a limited time. Returns how far all
    /// changes are then.
    pub fn wait(&self, limit: Duration) -> ChangeSet {
        self.wait_until(limit, |change_set| change_set.progress() == Progress::Complete)
    }

    /// Waits until a condition is true of a set with the goal that was asked for last, for a limited time. Returns the
    /// set, whichever it is then.
    pub fn wait_until(&self, limit: Duration, is_enough: impl Fn(&ChangeSet) -> bool) -> ChangeSet {
        let deadline = Instant::now() + limit;
        let mut standing = self.shared.lock();
        while standing.change_set.goal != standing.wanted || !is_enough(&standing.change_set) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.changed.wait_timeout(standing, left);
            standing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        standing.change_set.clone()
    }

    /// Ends the thread, after what it is doing; the file stays for [`resume`](Self::resume). Returns how far all changes
    /// are.
    pub fn suspend(self) -> ChangeSet {
        self.end();
        let Self { shared, thread, .. } = self;
        if thread.join().is_err() {
            warn!("the thread that changes DNS records has panicked");
        }
        let standing = shared.lock();
        standing.change_set.clone()
    }

    /// Ends the thread, and removes the file: all changes are made, or the others are given up. Returns the changes.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn finish(self) -> io::Result<ChangeSet> {
        let file = self.file.clone();
        let change_set = self.suspend();
        file.remove()?;
        Ok(change_set)
    }

    /// Removes the file, and lets the thread end by itself, so that the caller waits for no server. The thread sends no
    /// further update; one that it has sent already may have an effect.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn abandon(self) -> io::Result<()> {
        self.end();
        self.file.give_up()
    }

    fn end(&self) {
        let _ = self.commands.send(Command::End);
    }
}

/// Body of the thread.
fn work(
    zones: &Zones,
    mut change_set: ChangeSet,
    file: &ChangeSetFile,
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
            Ok(Command::SetGoal(goal)) => {
                change_set.goal = goal;
                attempts = 0;
                due = Some(Instant::now());
                if let Err(error) = file.save(&change_set) {
                    warn!("cannot record that DNS records are to be changed: {error}");
                }
            }
            Ok(Command::Retry) => {
                attempts = 0;
                due = Some(Instant::now());
            }
            Err(RecvTimeoutError::Timeout) => {
                attempt_all(zones, &mut change_set, file);
                attempts += 1;
                due = delay(&change_set, attempts).map(|delay| Instant::now() + delay);
                shared.lock().change_set.clone_from(&change_set);
                shared.changed.notify_all();
            }
        }
    }
}
