//! Connections to one disk's server, each used by one thread at a time.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use block::nbd::{Client, NbdError};

type Connect = dyn Fn() -> Result<Client, NbdError> + Send + Sync;

/// As many connections as there were threads at the same time.
pub(super) struct Connections {
    connect: Box<Connect>,
    idle: Mutex<Vec<Client>>,
}

impl Connections {
    pub(super) fn new(connect: impl Fn() -> Result<Client, NbdError> + Send + Sync + 'static) -> Self {
        Self { connect: Box::new(connect), idle: Mutex::default() }
    }

    /// Lends a connection.
    pub(super) fn with<T>(
        &self,
        ask: impl FnOnce(&mut Client) -> Result<T, NbdError>,
    ) -> Result<T, NbdError> {
        let waiting = self.idle().pop();
        let mut client = waiting.map_or_else(|| (self.connect)(), Ok)?;
        let answer = ask(&mut client);
        // After a refusal a connection is as good as before. Where one broke in the middle of an answer, nobody knows
        // what comes next on it.
        if matches!(answer, Ok(_) | Err(NbdError::Failed { .. })) {
            self.idle().push(client);
        }
        answer
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Client>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").field("idle", &self.idle().len()).finish_non_exhaustive()
    }
}
