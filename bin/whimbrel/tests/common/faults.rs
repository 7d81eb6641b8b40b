//! The server behind `[faults] socket`: agents report the fault points that they reach, and wait here.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Lets agents pass every fault point except the wanted one.
pub struct FaultServer {
    directory: PathBuf,
    wanted: Arc<Mutex<Option<String>>>,
    seen: Arc<Mutex<BTreeMap<String, u64>>>,
    held: Receiver<HeldAgent>,
}

/// An agent that is held at the fault point.
pub struct HeldAgent {
    /// The agent.
    pub agent: &'static str,
    /// The fault point.
    pub point: String,
    stream: UnixStream,
}

impl HeldAgent {
    /// Lets it continue.
    pub fn release(mut self) {
        // It may have been killed in the meantime.
        let _ = self.stream.write_all(b"go\n");
    }
}

impl FaultServer {
    pub fn new(directory: &Path) -> Self {
        let (sender, held) = mpsc::channel();
        let harness =
            Self { directory: directory.to_owned(), wanted: Arc::default(), seen: Arc::default(), held };
        for agent in ["a", "b", "w"] {
            harness.serve(agent, sender.clone());
        }
        harness
    }

    pub fn socket(&self, agent: &str) -> PathBuf {
        self.directory.join(format!("faults-{agent}.sock"))
    }

    fn serve(&self, agent: &'static str, sender: Sender<HeldAgent>) {
        let listener = UnixListener::bind(self.socket(agent)).unwrap();
        let (wanted, seen) = (Arc::clone(&self.wanted), Arc::clone(&self.seen));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let mut point = String::new();
                let mut reader = BufReader::new(stream);
                if reader.read_line(&mut point).is_err() {
                    continue;
                }
                let point = point.trim().to_owned();
                *seen.lock().unwrap().entry(point.clone()).or_default() += 1;
                let held = HeldAgent { agent, point, stream: reader.into_inner() };
                let mut wanted = wanted.lock().unwrap();
                if wanted.as_deref() == Some(held.point.as_str()) {
                    *wanted = None;
                    if sender.send(held).is_err() {
                        return;
                    }
                } else {
                    held.release();
                }
            }
        });
    }

    /// Holds the next agent that reaches a point.
    pub fn want(&self, point: &str) {
        *self.wanted.lock().unwrap() = Some(point.to_owned());
    }

    /// Returns true if no agent has reached the wanted point yet.
    pub fn is_wanted(&self) -> bool {
        self.wanted.lock().unwrap().is_some()
    }

    /// Waits until an agent is held at the wanted point; returns `None` if that does not happen in time.
    pub fn held(&self, patience: Duration) -> Option<HeldAgent> {
        self.held.recv_timeout(patience).ok()
    }

    /// Wants no point any longer.
    pub fn forget(&self) {
        *self.wanted.lock().unwrap() = None;
        while let Ok(held) = self.held.try_recv() {
            held.release();
        }
    }

    /// Returns all fault points that were reached so far, with their counts.
    pub fn seen(&self) -> BTreeMap<String, u64> {
        self.seen.lock().unwrap().clone()
    }
}
