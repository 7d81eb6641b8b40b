//! A blocking client of the QEMU Machine Protocol.
//!
//! One [`Qmp`] owns one connection to one monitor. QEMU serves a single client per monitor, so an
//! open connection keeps other clients off it. Everything has a deadline: a stopped QEMU (SIGSTOP,
//! a debugger) or a monitor with another client never answers, and a migration must detect that and
//! not hang.
//!
//! Each command has an id, and its answer is matched by that id. An answer that arrives after its
//! deadline is recognised by its id and discarded, so that the connection stays usable. Events may
//! arrive at any time in between; they are collected, and [`Qmp::wait_event`] waits for them.
//!
//! Lines are limited to [`MAX_LINE_BYTES`] before memory is allocated for them, and the queue of
//! events to [`MAX_EVENTS`] (the oldest are dropped first): QEMU is trusted less than this program.

mod connect;
mod reply;
mod types;

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub(crate) use connect::connect_by;
use reply::{Reply, parse_greeting};
pub use types::{Event, QmpError, Version};

/// Maximum length of a line that is accepted from QEMU, in bytes. The largest answers that are
/// requested here (device trees, block graphs) have some hundred KiB.
pub const MAX_LINE_BYTES: usize = 16 << 20;

/// Maximum number of events that are kept for a later query.
pub const MAX_EVENTS: usize = 4096;

/// Time limit of a command, unless [`Qmp::set_timeout`] changes it.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// A command that was sent and may not be answered yet.
#[derive(Debug)]
pub struct PendingCommand {
    command: String,
    id: u64,
    at: SystemTime,
}

impl PendingCommand {
    /// Returns the time at which the command was sent, by the clock of QEMU's events.
    pub fn at(&self) -> SystemTime {
        self.at
    }
}

/// A connection to a monitor, past the negotiation of capabilities.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    path: PathBuf,
    buffer: Vec<u8>,
    searched: usize,
    events: VecDeque<Event>,
    next_id: u64,
    timeout: Duration,
    version: Version,
}

impl Qmp {
    /// Connects to the monitor at `path` and negotiates, all of it within `timeout`.
    ///
    /// # Errors
    /// [`QmpError::Connect`] if there is no such socket, [`QmpError::Busy`] if QEMU does not greet
    /// in time.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        Self::connect_if(path, timeout, |_| true)
    }

    /// Like [`Qmp::connect`], but sends nothing to a process that is not `wanted`: the one that made the socket
    /// listen.
    ///
    /// # Errors
    /// [`QmpError::WrongProcess`] for such a process.
    pub fn connect_if(
        path: &Path,
        timeout: Duration,
        wanted: impl FnOnce(u32) -> bool,
    ) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        let stream = connect_by(path, deadline)?;
        let listener = getsockopt(&stream, PeerCredentials)
            .map_err(|errno| QmpError::Connect { path: path.to_owned(), source: errno.into() })?;
        // The number is 0 for a process of another PID namespace; no process has that number here.
        let pid = listener.pid().unsigned_abs();
        if !wanted(pid) {
            return Err(QmpError::WrongProcess { path: path.to_owned(), pid });
        }
        let mut qmp = Self {
            stream,
            path: path.to_owned(),
            buffer: Vec::new(),
            searched: 0,
            events: VecDeque::new(),
            next_id: 1,
            timeout: DEFAULT_TIMEOUT,
            version: Version { major: 0, minor: 0, micro: 0, package: String::new() },
        };
        let greeting = match qmp.read_message(deadline, "the greeting") {
            Err(QmpError::Timeout { .. }) => return Err(QmpError::Busy { path: path.to_owned() }),
            other => other?,
        };
        qmp.version = parse_greeting(&greeting)?;
        qmp.execute_by::<Value>("qmp_capabilities", Value::Null, deadline)?;
        Ok(qmp)
    }

    /// Returns the socket of this connection.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns QEMU's version.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Returns the time limit of each command.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the time limit of each following [`execute`](Self::execute).
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Runs a command and returns its answer. `args` is an object, or `Null` for none.
    pub fn execute<T: DeserializeOwned>(&mut self, command: &str, args: Value) -> Result<T, QmpError> {
        let deadline = Instant::now() + self.timeout;
        self.execute_by(command, args, deadline)
    }

    /// Like [`execute`](Self::execute), for commands whose answer does not matter.
    pub fn run(&mut self, command: &str, args: Value) -> Result<(), QmpError> {
        self.execute::<Value>(command, args).map(drop)
    }

    /// Like [`execute`](Self::execute), with a deadline of its own.
    pub fn execute_by<T: DeserializeOwned>(
        &mut self,
        command: &str,
        args: Value,
        deadline: Instant,
    ) -> Result<T, QmpError> {
        self.exchange(command, args, None, deadline)
    }

    /// Sends a command without waiting for the answer; [`Qmp::wait_answer`] waits for it, once or repeatedly.
    pub fn send_command(&mut self, command: &str, args: Value) -> Result<PendingCommand, QmpError> {
        let at = SystemTime::now();
        let (id, line) = self.message(command, args);
        self.send(command, &line, None, Instant::now() + self.timeout)?;
        Ok(PendingCommand { command: command.to_owned(), id, at })
    }

    /// Waits for the answer to a command that was sent. No other command may be sent before it has arrived:
    /// the answer would be discarded.
    ///
    /// # Errors
    /// [`QmpError::Timeout`] after the deadline; the answer may still arrive later.
    pub fn wait_answer<T: DeserializeOwned>(
        &mut self,
        asked: &PendingCommand,
        deadline: Instant,
    ) -> Result<T, QmpError> {
        self.answer(&asked.command, asked.id, deadline)
    }

    /// Runs a command that accepts a file descriptor (`add-fd`, `getfd`). QEMU gets a duplicate;
    /// the caller's descriptor stays open.
    pub fn execute_with_fd<T: DeserializeOwned>(
        &mut self,
        command: &str,
        args: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<T, QmpError> {
        let deadline = Instant::now() + self.timeout;
        self.exchange(command, args, Some(fd), deadline)
    }

    /// Runs a command of the human monitor and returns its output. QEMU prints errors of the human
    /// monitor too: the caller has to check the text.
    pub fn hmp(&mut self, command_line: &str) -> Result<String, QmpError> {
        self.execute("human-monitor-command", json!({ "command-line": command_line }))
    }

    /// Runs several commands of the human monitor and returns the output of each, in their order.
    pub fn hmp_all(&mut self, command_lines: &[String]) -> Result<Vec<String>, QmpError> {
        let command = |line: &String| ("human-monitor-command", json!({ "command-line": line }));
        let answers = self.execute_all(command_lines.iter().map(command))?;
        answers
            .into_iter()
            .map(|answer| answer.and_then(|value| decode("human-monitor-command", value)))
            .collect()
    }

    /// Runs several commands and returns the answer to each, in their order. All are sent before the first answer is
    /// awaited: QEMU answers one after the other, but no process has to wake up in between. A command runs whatever
    /// the result of those before it.
    ///
    /// # Errors
    /// If the monitor fails. A command that QEMU refuses has an error as its answer.
    pub fn execute_all<'a>(
        &mut self,
        commands: impl IntoIterator<Item = (&'a str, Value)>,
    ) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        let deadline = Instant::now() + self.timeout;
        let mut asked = Vec::new();
        let mut lines = Vec::new();
        for (command, args) in commands {
            let (id, line) = self.message(command, args);
            asked.push((command, id));
            lines.extend(line);
        }
        let Some((first, _)) = asked.first() else { return Ok(Vec::new()) };
        self.send(first, &lines, None, deadline)?;
        let mut answers = Vec::with_capacity(asked.len());
        for (command, id) in asked {
            match self.answer(command, id, deadline) {
                Err(error) if !matches!(error, QmpError::CommandFailed { .. }) => return Err(error),
                answer => answers.push(answer),
            }
        }
        Ok(answers)
    }

    /// Returns the next event with that name: the oldest collected one, or else the first that
    /// arrives before the deadline. Events with other names stay collected.
    pub fn wait_event(&mut self, name: &str, deadline: Instant) -> Result<Event, QmpError> {
        let started = Instant::now();
        loop {
            if let Some(at) = self.events.iter().position(|event| event.name == name)
                && let Some(event) = self.events.remove(at)
            {
                return Ok(event);
            }
            let waiting = format!("the event {name}");
            let message = self.read_message(deadline, &waiting).map_err(|error| match error {
                QmpError::Timeout { waiting_for, .. } => {
                    QmpError::Timeout { waiting_for, after_ms: millis(started.elapsed()) }
                }
                other => other,
            })?;
            self.collect(message)?;
        }
    }

    /// Removes and returns all events collected so far, reading those that have already arrived, without waiting.
    pub fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        loop {
            match self.read_message(Instant::now(), "events") {
                Ok(message) => self.collect(message)?,
                Err(QmpError::Timeout { .. }) => return Ok(self.events.drain(..).collect()),
                Err(other) => return Err(other),
            }
        }
    }

    /// Returns all events collected so far, also of a QEMU that has ended, reading those that have already arrived.
    pub fn last_events(&mut self) -> &VecDeque<Event> {
        while let Ok(message) = self.read_message(Instant::now(), "events") {
            if self.collect(message).is_err() {
                break;
            }
        }
        &self.events
    }

    /// Discards the collected events with that name, e.g. before a command whose event is then waited for.
    pub fn discard_events(&mut self, name: &str) {
        self.events.retain(|event| event.name != name);
    }

    /// Returns the time of the last collected event with that name, by the host's wall clock.
    pub fn last_event_time(&self, name: &str) -> Option<SystemTime> {
        let event = self.events.iter().rev().find(|event| event.name == name)?;
        Some(SystemTime::UNIX_EPOCH + Duration::from_micros(event.timestamp_us))
    }

    fn exchange<T: DeserializeOwned>(
        &mut self,
        command: &str,
        args: Value,
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<T, QmpError> {
        let (id, line) = self.message(command, args);
        self.send(command, &line, fd, deadline)?;
        self.answer(command, id, deadline)
    }

    /// Returns a command in the form in which it is sent, and its id.
    fn message(&mut self, command: &str, args: Value) -> (u64, Vec<u8>) {
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({ "execute": command, "id": id });
        if !args.is_null() {
            message["arguments"] = args;
        }
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        (id, line)
    }

    fn answer<T: DeserializeOwned>(
        &mut self,
        command: &str,
        id: u64,
        deadline: Instant,
    ) -> Result<T, QmpError> {
        let started = Instant::now();
        loop {
            let message = self.read_message(deadline, command).map_err(|error| match error {
                QmpError::Timeout { waiting_for, .. } => {
                    QmpError::Timeout { waiting_for, after_ms: millis(started.elapsed()) }
                }
                other => other,
            })?;
            match Reply::of(message, id)? {
                Reply::Matched(Ok(value)) => {
                    tracing::trace!(command, duration_us = started.elapsed().as_micros() as u64, "answered");
                    return decode(command, value);
                }
                Reply::Matched(Err((class, desc))) => {
                    return Err(QmpError::CommandFailed { command: command.to_owned(), class, desc });
                }
                Reply::Stale => {}
                Reply::Event(event) => self.push(event),
            }
        }
    }

    fn send(
        &mut self,
        command: &str,
        line: &[u8],
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), QmpError> {
        let mut rest = line;
        let mut fd = fd;
        while !rest.is_empty() {
            let left = remaining(deadline).ok_or_else(|| timeout(command))?;
            self.stream
                .set_write_timeout(Some(left))
                .map_err(|source| QmpError::Io { during: command.to_owned(), source })?;
            let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let sent = rustix::net::sendmsg(
                self.stream.as_fd(),
                &[io::IoSlice::new(rest)],
                &mut control,
                SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(count) => {
                    fd = None;
                    rest = rest.get(count..).unwrap_or_default();
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(timeout(command)),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                    return Err(QmpError::Closed { during: command.to_owned() });
                }
                Err(errno) => {
                    return Err(QmpError::Io { during: command.to_owned(), source: errno.into() });
                }
            }
        }
        Ok(())
    }

    fn collect(&mut self, message: Value) -> Result<(), QmpError> {
        // No command is waiting, so any answer is a late one.
        if let Reply::Event(event) = Reply::of(message, u64::MAX)? {
            self.push(event);
        }
        Ok(())
    }

    fn push(&mut self, event: Event) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Reads one line. After the deadline it still returns a line that has already arrived.
    fn read_message(&mut self, deadline: Instant, during: &str) -> Result<Value, QmpError> {
        let failed = |source| QmpError::Io { during: during.to_owned(), source };
        loop {
            if let Some(line) = self.next_line() {
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return serde_json::from_slice(&line)
                    .map_err(|error| QmpError::Protocol { what: format!("not JSON: {error}") });
            }
            if self.buffer.len() >= MAX_LINE_BYTES {
                return Err(QmpError::Protocol {
                    what: format!("a line of more than {MAX_LINE_BYTES} bytes"),
                });
            }
            let mut chunk = [0; 16 << 10];
            // A timeout of zero would mean "for ever", so the last check does not block.
            let left = remaining(deadline);
            self.stream.set_nonblocking(left.is_none()).map_err(failed)?;
            if left.is_some() {
                self.stream.set_read_timeout(left).map_err(failed)?;
            }
            let read = self.stream.read(&mut chunk);
            if left.is_none() {
                self.stream.set_nonblocking(false).map_err(failed)?;
            }
            match read {
                Ok(0) => return Err(QmpError::Closed { during: during.to_owned() }),
                Ok(count) => self.buffer.extend_from_slice(chunk.get(..count).unwrap_or_default()),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        if left.is_none() || remaining(deadline).is_none() {
                            return Err(timeout(during));
                        }
                    }
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                        return Err(QmpError::Closed { during: during.to_owned() });
                    }
                    _ => return Err(failed(error)),
                },
            }
        }
    }

    fn next_line(&mut self) -> Option<Vec<u8>> {
        let fresh = self.buffer.get(self.searched..).unwrap_or_default();
        let Some(at) = fresh.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.buffer.len();
            return None;
        };
        let rest = self.buffer.split_off(self.searched + at + 1);
        self.searched = 0;
        Some(std::mem::replace(&mut self.buffer, rest))
    }
}

fn remaining(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

fn timeout(waiting_for: &str) -> QmpError {
    QmpError::Timeout { waiting_for: waiting_for.to_owned(), after_ms: 0 }
}

/// Decodes an answer to the expected type.
pub(crate) fn decode<T: DeserializeOwned>(command: &str, value: Value) -> Result<T, QmpError> {
    serde_json::from_value(value).map_err(|source| QmpError::Answer { command: command.to_owned(), source })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(crate) mod tests;
