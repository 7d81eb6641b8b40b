//! Connection to the controller: reports of this host, and commands that come back.
//!
//! One thread reports, one receives, and each command has a thread of its own. Nothing here holds up a migration: the
//! controller may be away for any time, and learns from the next snapshot what has happened.

mod commands;
mod contents;
mod facts;
mod moves;
mod tracker;
mod vms;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use api::Limits;
use api::report::unix_ms_now;
use host::config::ControllerConfig;
use link::{Connection, Endpoint, Incoming, LinkError, Peer, Reader, Writer};
use proto::message::{EvacuationStanding, FleetReport, HostEvacuation, Message};
use proto::{CommandId, Purpose};
use store::journal::JournalError;
use tracing::{debug, info, warn};

use super::Daemon;
use tracker::Tracker;

/// Pause after the first failed attempt to reach the controller; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// Time for the controller to send its term.
const TERM_PATIENCE: Duration = Duration::from_secs(10);
/// Time for the controller to take a report.
const SEND_PATIENCE: Duration = Duration::from_secs(20);
/// Longest time between two looks at this host while a migration is under way.
const BUSY_PAUSE: Duration = Duration::from_millis(500);
/// Longest time between two looks at this host otherwise.
const IDLE_PAUSE: Duration = Duration::from_secs(2);
/// Shortest time between two looks at this host.
const LEAST_PAUSE: Duration = Duration::from_millis(50);
/// Longest time between two reports.
const REPORT_PAUSE: Duration = Duration::from_secs(5);
/// Most commands that are carried out at the same time; more wait on the connection.
const MOST_COMMANDS: usize = 64;

/// Reason for which a connection to the controller has ended.
#[derive(Debug, thiserror::Error)]
enum ControllerLinkError {
    /// It cannot be reached.
    #[error(transparent)]
    Connect(#[from] link::ConnectError),
    /// The connection was lost.
    #[error("the connection to the controller was lost")]
    Link(#[from] LinkError),
    /// The journal failed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// It did not begin with its term.
    #[error("the controller did not begin with its term; use the same version of whimbrel on all hosts")]
    NoTerm,
    /// It has been replaced.
    #[error(
        "the controller has term {term}, and another one has had term {largest}: it was replaced, or its state is old"
    )]
    Replaced {
        /// Its term.
        term: u64,
        /// The largest term that this agent has seen.
        largest: u64,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread for the controller")]
    Thread(#[source] io::Error),
}

/// State of the connection to the controller, which requests of users read and change.
#[derive(Debug, Default)]
pub(super) struct ControllerLink {
    state: Mutex<LinkState>,
    /// Commands that are being carried out.
    underway: Mutex<BTreeSet<CommandId>>,
    /// Limits of moves that have not begun their migrations yet.
    early_limits: Mutex<BTreeMap<CommandId, Limits>>,
}

#[derive(Debug, Default)]
struct LinkState {
    is_connected: bool,
    /// Reports for the controller of the present connection.
    outgoing: Option<Sender<FleetReport>>,
    /// Evacuation that this host has asked for.
    evacuation: Option<AskedEvacuation>,
}

/// Evacuation of this host that a user has asked for.
#[derive(Debug)]
struct AskedEvacuation {
    /// State, as the controller has reported it last.
    state: HostEvacuation,
    /// Time by which it is to end; none if there is no limit.
    until: Option<Instant>,
}

impl AskedEvacuation {
    /// Returns the request for the controller, with the time that is left.
    fn report(&self) -> FleetReport {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        FleetReport::EvacuateHost { request: self.state.request, within_s: left.map(|left| left.as_secs()) }
    }
}

impl ControllerLink {
    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn underway(&self) -> MutexGuard<'_, BTreeSet<CommandId>> {
        self.underway.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn early_limits(&self) -> MutexGuard<'_, BTreeMap<CommandId, Limits>> {
        self.early_limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the agent is connected to its controller.
    pub(super) fn is_connected(&self) -> bool {
        self.state().is_connected
    }

    /// Asks the controller to evacuate this host. Returns false if there is no connection.
    pub(super) fn ask_for_evacuation(&self, within_s: Option<u64>) -> bool {
        let mut state = self.state();
        // Larger than that of each earlier request, also of those before a restart.
        let earlier = state.evacuation.as_ref().map_or(0, |earlier| earlier.state.request);
        let request = unix_ms_now().max(earlier + 1);
        let asked = AskedEvacuation {
            state: HostEvacuation {
                request,
                evacuation: None,
                standing: EvacuationStanding::Underway,
                text: "the controller was asked".to_owned(),
            },
            until: within_s.and_then(|s| Instant::now().checked_add(Duration::from_secs(s))),
        };
        let is_sent = state.outgoing.as_ref().is_some_and(|outgoing| outgoing.send(asked.report()).is_ok());
        if is_sent {
            state.evacuation = Some(asked);
        }
        is_sent
    }

    /// Takes the state of an evacuation. One that answers an earlier request states nothing about the present one.
    fn take_evacuation(&self, reported: HostEvacuation) {
        let mut state = self.state();
        if let Some(asked) = &mut state.evacuation
            && asked.state.request == reported.request
        {
            asked.state = reported;
        }
    }

    /// Returns the request for an evacuation whose end the controller has not reported.
    fn open_request(&self) -> Option<FleetReport> {
        let state = self.state();
        let asked = state.evacuation.as_ref();
        let open = asked.filter(|asked| asked.state.standing == EvacuationStanding::Underway);
        open.map(AskedEvacuation::report)
    }

    /// Returns the state of the evacuation that this host has asked for. It counts as done only if nothing is left here.
    pub(super) fn evacuation(&self, daemon: &Arc<Daemon>) -> Option<HostEvacuation> {
        let reported = self.state().evacuation.as_ref().map(|asked| asked.state.clone())?;
        if reported.standing != EvacuationStanding::Done {
            return Some(reported);
        }
        let config = daemon.context.config.controller.as_ref();
        let namespaces_are_hosts = config.is_some_and(|config| config.namespaces_are_hosts);
        let remaining = contents::contents(daemon, namespaces_are_hosts).what_remains();
        if remaining.is_empty() {
            return Some(reported);
        }
        let remaining: Vec<_> = remaining.iter().map(ToString::to_string).collect();
        let text = format!("{}; but this host still has: {}", reported.text, remaining.join(", "));
        Some(HostEvacuation { standing: EvacuationStanding::Failed, text, ..reported })
    }
}

/// Starts the thread that keeps a connection to the controller, as long as the agent runs.
pub(super) fn start(daemon: &Arc<Daemon>, endpoint: Endpoint, config: ControllerConfig) -> io::Result<()> {
    let daemon = Arc::downgrade(daemon);
    let run = move || keep_connected(&daemon, &endpoint, &config);
    thread::Builder::new().name("controller".to_owned()).spawn(run).map(drop)
}

fn keep_connected(daemon: &Weak<Daemon>, endpoint: &Endpoint, config: &ControllerConfig) {
    let mut pause = FIRST_PAUSE;
    let mut last_error = String::new();
    while let Some(daemon) = daemon.upgrade() {
        let began = Instant::now();
        let Err(error) = converse(&daemon, endpoint, config);
        daemon.controller_link.state().is_connected = false;
        daemon.controller_link.state().outgoing = None;
        drop(daemon);
        if began.elapsed() > LONGEST_PAUSE {
            pause = FIRST_PAUSE;
            last_error.clear();
        }
        let text = crate::chain(&error);
        if text == last_error {
            debug!(controller = %config.name, error = text, "the controller cannot be reached");
        } else {
            warn!(controller = %config.name, error = text, "the controller cannot be reached; VMs are moved without it");
            last_error = text;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connects, and reports until the connection ends.
fn converse(
    daemon: &Arc<Daemon>,
    endpoint: &Endpoint,
    config: &ControllerConfig,
) -> Result<std::convert::Infallible, ControllerLinkError> {
    let peer = Peer { host: config.name.clone(), address: config.address.clone() };
    let patience = Duration::from_millis(daemon.context.config.timeouts.connect_ms);
    let mut connection = endpoint.connect(&peer, Purpose::Controller, Instant::now() + patience)?;
    let term = first_term(&mut connection)?;
    let largest = daemon.context.journal.learn_term(term)?;
    if largest > term {
        // It reports this to its users.
        let _ = connection.send(&Message::ControllerTerm { term: largest });
        return Err(ControllerLinkError::Replaced { term, largest });
    }
    info!(controller = %config.name, term, "connected to the controller");
    let handle = connection.handle();
    let (reader, writer) = connection.split();
    let (outgoing, reports) = mpsc::channel();
    {
        let mut state = daemon.controller_link.state();
        state.is_connected = true;
        state.outgoing = Some(outgoing.clone());
    }
    let receiving =
        Receiving { daemon: Arc::clone(daemon), outgoing, ended: Arc::default(), running: Arc::default() };
    let ended = Arc::clone(&receiving.ended);
    thread::Builder::new()
        .name("controller-in".to_owned())
        .spawn(move || receiving.run(reader))
        .map_err(ControllerLinkError::Thread)?;
    let result = Reporting::new(daemon, config, writer).run(&reports, &ended);
    handle.shutdown();
    result
}

fn first_term(connection: &mut Connection) -> Result<u64, ControllerLinkError> {
    match connection.recv(Some(Instant::now() + TERM_PATIENCE))? {
        Incoming::Message(Message::ControllerTerm { term }) => Ok(term),
        _ => Err(ControllerLinkError::NoTerm),
    }
}

/// The half of a connection that reports.
struct Reporting<'a> {
    daemon: &'a Arc<Daemon>,
    writer: Writer,
    tracker: Tracker,
    /// Number of the last report.
    seq: u64,
    last_sent: Instant,
}

impl<'a> Reporting<'a> {
    fn new(daemon: &'a Arc<Daemon>, config: &ControllerConfig, writer: Writer) -> Self {
        let tracker = Tracker::new(config.namespaces_are_hosts);
        Self { daemon, writer, tracker, seq: 0, last_sent: Instant::now() }
    }

    /// Reports until the connection ends.
    fn run(
        mut self,
        reports: &Receiver<FleetReport>,
        ended: &AtomicBool,
    ) -> Result<std::convert::Infallible, ControllerLinkError> {
        let mut seen = self.daemon.context.journal.wait_for_change(0, Duration::ZERO);
        let host = Box::new(facts::host_facts(self.daemon));
        self.tracker.set_host(&host);
        self.send(FleetReport::Begin { host })?;
        self.send_changes()?;
        self.send(FleetReport::Complete)?;
        // The request, or its answer, may have been lost with the last connection.
        if let Some(request) = self.daemon.controller_link.open_request() {
            self.send(request)?;
        }
        loop {
            let is_busy = !self.daemon.drivers().is_empty();
            let pause = if is_busy { BUSY_PAUSE } else { IDLE_PAUSE };
            seen = self.daemon.context.journal.wait_for_change(seen, pause);
            if ended.load(Ordering::Acquire) {
                return Err(LinkError::Ended.into());
            }
            while let Ok(report) = reports.try_recv() {
                self.send(report)?;
            }
            self.send_changes()?;
            if self.last_sent.elapsed() >= REPORT_PAUSE {
                self.send(FleetReport::Changed { changes: Vec::new() })?;
            }
            // A migration changes the journal several times in a moment.
            thread::sleep(LEAST_PAUSE);
        }
    }

    fn send_changes(&mut self) -> Result<(), ControllerLinkError> {
        for changes in self.tracker.changes(self.daemon)? {
            self.send(FleetReport::Changed { changes })?;
        }
        Ok(())
    }

    fn send(&mut self, report: FleetReport) -> Result<(), ControllerLinkError> {
        self.seq += 1;
        self.writer.set_deadline(Some(Instant::now() + SEND_PATIENCE));
        self.writer.send(&Message::FleetReport { seq: self.seq, report })?;
        self.last_sent = Instant::now();
        Ok(())
    }
}

/// The half of a connection that receives.
struct Receiving {
    daemon: Arc<Daemon>,
    outgoing: Sender<FleetReport>,
    ended: Arc<AtomicBool>,
    /// Number of commands that are being carried out.
    running: Arc<AtomicUsize>,
}

impl Receiving {
    fn run(self, mut reader: Reader) {
        loop {
            match reader.recv(None) {
                Ok(Incoming::Message(message)) => {
                    if self.take(message).is_break() {
                        break;
                    }
                }
                Ok(Incoming::Blob(_)) => {
                    warn!("the controller sent something that is no message");
                    break;
                }
                Err(error) => {
                    debug!(error = crate::chain(&error), "the connection to the controller ended");
                    break;
                }
            }
        }
        self.ended.store(true, Ordering::Release);
        self.daemon.context.journal.wake();
    }

    fn take(&self, message: Message) -> ControlFlow<()> {
        match message {
            Message::FleetCommand { term, id, command } => {
                let (daemon, outgoing) = (Arc::clone(&self.daemon), self.outgoing.clone());
                let running = Arc::clone(&self.running);
                let is_in_order = command.is_in_order();
                let carry_out = move || {
                    let answer = commands::carry_out(&daemon, term, &id, &command);
                    // If the connection has ended, the controller asks again over the next one.
                    let _ = outgoing.send(FleetReport::Answer { id, answer });
                    daemon.context.journal.wake();
                };
                if is_in_order || running.load(Ordering::Acquire) >= MOST_COMMANDS {
                    carry_out();
                    return ControlFlow::Continue(());
                }
                running.fetch_add(1, Ordering::AcqRel);
                let work = move || {
                    carry_out();
                    running.fetch_sub(1, Ordering::AcqRel);
                };
                if let Err(error) = thread::Builder::new().name("command".to_owned()).spawn(work) {
                    warn!(%error, "cannot start a thread for a command of the controller");
                    return ControlFlow::Break(());
                }
                ControlFlow::Continue(())
            }
            Message::HostEvacuation(evacuation) => {
                self.daemon.controller_link.take_evacuation(evacuation);
                ControlFlow::Continue(())
            }
            Message::Ping => ControlFlow::Continue(()),
            other => {
                let message = std::mem::discriminant(&other);
                warn!(?message, "the controller sent a message that is not for agents");
                ControlFlow::Break(())
            }
        }
    }
}

#[cfg(test)]
mod tests;
