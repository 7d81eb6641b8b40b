//! A disk behind a server, as the data plane sees it: an array of pages. Several threads use it, each over a connection
//! of its own.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ::memory::ram::RamError;
use block::nbd::{Client, NbdError};

/// A disk behind a server.
#[derive(Debug)]
pub(super) struct ServedDisk {
    pub(super) name: String,
    /// Length of the disk; bytes beyond, up to a whole page, read as zeros, and are not written.
    pub(super) bytes: u64,
    connections: Connections,
}

impl ServedDisk {
    pub(super) fn new(name: &str, bytes: u64, connections: Connections) -> Self {
        Self { name: name.to_owned(), bytes, connections }
    }

    /// Returns the part of a range that is on the disk.
    pub(super) fn on_disk(&self, range: Range<u64>) -> Range<u64> {
        range.start.min(self.bytes)..range.end.min(self.bytes)
    }

    /// Runs a request over a connection.
    pub(super) fn with<T>(
        &self,
        ask: impl FnOnce(&mut Client) -> Result<T, NbdError>,
    ) -> Result<T, NbdError> {
        self.connections.with(ask)
    }

    /// Ends all connections; later requests fail.
    pub(super) fn end(&self) {
        self.connections.end();
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        let there = self.on_disk(offset..offset + into.len() as u64);
        let (bytes, beyond) = into.split_at_mut((there.end - there.start) as usize);
        beyond.fill(0);
        self.with(|client| client.read(there.start, bytes)).map_err(failed)
    }
}

/// Converts an error of a disk into one of a RAM block.
pub(super) fn failed(error: NbdError) -> RamError {
    RamError::Other(Box::new(error))
}

type Connect = dyn Fn() -> Result<Client, NbdError> + Send + Sync;

/// A set of connections, as many as there were concurrent threads.
pub(super) struct Connections {
    connect: Box<Connect>,
    /// None after the end.
    idle: Mutex<Option<Vec<Client>>>,
}

impl Connections {
    pub(super) fn new(connect: impl Fn() -> Result<Client, NbdError> + Send + Sync + 'static) -> Self {
        Self { connect: Box::new(connect), idle: Mutex::new(Some(Vec::new())) }
    }

    /// Lends a connection.
    pub(super) fn with<T>(
        &self,
        ask: impl FnOnce(&mut Client) -> Result<T, NbdError>,
    ) -> Result<T, NbdError> {
        let Some(waiting) = self.idle().as_mut().map(Vec::pop) else {
            return Err(NbdError::Lost(std::io::Error::from(std::io::ErrorKind::NotConnected)));
        };
        let mut client = waiting.map_or_else(|| (self.connect)(), Ok)?;
        let answer = ask(&mut client);
        // After a refusal a connection can be used as before. If it broke in the middle of an answer, the next bytes on
        // it are undefined.
        if matches!(answer, Ok(_) | Err(NbdError::Failed { .. }))
            && let Some(idle) = self.idle().as_mut()
        {
            idle.push(client);
        }
        answer
    }

    /// Closes idle connections, and opens no more.
    pub(super) fn end(&self) {
        *self.idle() = None;
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Option<Vec<Client>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let idle = self.idle().as_ref().map(Vec::len);
        f.debug_struct("Connections").field("idle", &idle).finish_non_exhaustive()
    }
}
