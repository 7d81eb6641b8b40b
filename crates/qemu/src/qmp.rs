//! A blocking client of the QEMU Machine Protocol.
//!
//! One [`Qmp`] owns one connection to one monitor. QEMU serves a single client per monitor, so
//! holding the connection is what keeps others off it. Everything has a deadline: a stopped QEMU
//! (SIGSTOP, a debugger) or a monitor held by somebody else never answers, and a migration must
//! notice that and not hang.
//!
//! Commands carry a number of ours and their answers are matched by it. An answer that comes after
//! its deadline is recognised by its number and thrown away, so that the connection stays usable.
//! Events may arrive at any place between; they are collected and can be waited for with
//! [`Qmp::wait_event`].
//!
//! Lines are capped at [`MAX_LINE_BYTES`] before memory is taken for them, and the queue of events
//! at [`MAX_EVENTS`] (the oldest go first): QEMU is trusted less than this program.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Longest line that is accepted from QEMU, in bytes. The largest answers that are asked for here
/// (device trees, block graphs) have some hundred KiB.
pub const MAX_LINE_BYTES: usize = 16 << 20;

/// How many events are kept for somebody who asks for them later.
pub const MAX_EVENTS: usize = 4096;

/// How long a command may take unless [`Qmp::set_timeout`] says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// What can go wrong between us and a monitor.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket could not be opened.
    #[error(
        "cannot connect to the QMP socket {path}; check that the path is that of a QEMU started with -qmp unix:PATH,server=on,wait=off and that this user may open it"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The socket is there, but nobody greets: QEMU serves one client at a time.
    #[error(
        "the QMP monitor at {path} does not answer: another client (libvirt, a script) holds it, or QEMU is stopped; end that client, or give QEMU a second monitor"
    )]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// QEMU answered a command with an error.
    #[error("QEMU refused {command}: {desc}")]
    CommandFailed {
        /// The command's name.
        command: String,
        /// QMP's error class, usually `GenericError`.
        class: String,
        /// QEMU's own words.
        desc: String,
    },
    /// QEMU closed the connection, usually because it ended.
    #[error("QEMU closed the monitor during {during}; it has probably ended, see its log")]
    Closed {
        /// What was going on.
        during: String,
    },
    /// A deadline passed.
    #[error("no answer from QEMU to {waiting_for} in {after_ms} ms")]
    Timeout {
        /// What was waited for.
        waiting_for: String,
        /// How long, in milliseconds.
        after_ms: u64,
    },
    /// Something came that is not QMP.
    #[error("the monitor does not speak QMP as it should: {what}")]
    Protocol {
        /// What was wrong.
        what: String,
    },
    /// An answer was well-formed, but is not what the command answers.
    #[error("cannot read QEMU's answer to {command}")]
    Answer {
        /// The command's name.
        command: String,
        /// What did not fit.
        source: serde_json::Error,
    },
    /// Reading from or writing to the socket failed.
    #[error("the connection to QEMU failed during {during}")]
    Io {
        /// What was going on.
        during: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl QmpError {
    /// Whether QEMU itself said no (the connection is fine, the command was not done).
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::CommandFailed { .. })
    }

    /// Whether this QEMU does not know the command.
    pub fn is_unknown_command(&self) -> bool {
        matches!(self, Self::CommandFailed { class, .. } if class == "CommandNotFound")
    }
}

/// An event that QEMU sent on its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its name, e.g. `STOP` or `MIGRATION`.
    pub name: String,
    /// What it carries; `Null` when nothing.
    pub data: Value,
    /// When QEMU sent it, by its host's wall clock, in microseconds since 1970.
    pub timestamp_us: u64,
}

/// QEMU's version, from the greeting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// E.g. 10.
    pub major: u64,
    /// E.g. 0.
    pub minor: u64,
    /// E.g. 2.
    pub micro: u64,
    /// The distribution's own version, may be empty.
    pub package: String,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
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
    /// [`QmpError::Connect`] when there is no such socket, [`QmpError::Busy`] when QEMU does not
    /// greet in time.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        let stream = connect_by(path, deadline)?;
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

    /// The socket this is connected to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// QEMU's version.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Sets how long each following [`execute`](Self::execute) may take.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Runs a command and returns its answer. `args` is an object, or `Null` for none.
    pub fn execute<T: DeserializeOwned>(&mut self, command: &str, args: Value) -> Result<T, QmpError> {
        let deadline = Instant::now() + self.timeout;
        self.execute_by(command, args, deadline)
    }

    /// As [`execute`](Self::execute), for commands whose answer does not matter.
    pub fn run(&mut self, command: &str, args: Value) -> Result<(), QmpError> {
        self.execute::<Value>(command, args).map(drop)
    }

    /// As [`execute`](Self::execute), with a deadline of its own.
    pub fn execute_by<T: DeserializeOwned>(
        &mut self,
        command: &str,
        args: Value,
        deadline: Instant,
    ) -> Result<T, QmpError> {
        self.exchange(command, args, None, deadline)
    }

    /// Runs a command that takes a file descriptor (`add-fd`, `getfd`). QEMU gets a duplicate; the
    /// caller's stays open.
    pub fn execute_with_fd<T: DeserializeOwned>(
        &mut self,
        command: &str,
        args: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<T, QmpError> {
        let deadline = Instant::now() + self.timeout;
        self.exchange(command, args, Some(fd), deadline)
    }

    /// Runs a command of the human monitor and returns what it printed. QEMU prints errors of the
    /// human monitor too: the caller has to look at the text.
    pub fn human(&mut self, command_line: &str) -> Result<String, QmpError> {
        self.execute("human-monitor-command", json!({ "command-line": command_line }))
    }

    /// The next event of that name: the oldest collected one, or else the first that comes before
    /// the deadline. Events of other names stay collected.
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

    /// Takes all events collected so far, reading those that have already arrived, without waiting.
    pub fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        loop {
            match self.read_message(Instant::now(), "events") {
                Ok(message) => self.collect(message)?,
                Err(QmpError::Timeout { .. }) => return Ok(self.events.drain(..).collect()),
                Err(other) => return Err(other),
            }
        }
    }

    /// Forgets the collected events of that name, e.g. before an act whose event is then waited for.
    pub fn forget_events(&mut self, name: &str) {
        self.events.retain(|event| event.name != name);
    }

    fn exchange<T: DeserializeOwned>(
        &mut self,
        command: &str,
        args: Value,
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<T, QmpError> {
        let started = Instant::now();
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({ "execute": command, "id": id });
        if !args.is_null() {
            message["arguments"] = args;
        }
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        self.send(command, &line, fd, deadline)?;
        loop {
            let message = self.read_message(deadline, command).map_err(|error| match error {
                QmpError::Timeout { waiting_for, .. } => {
                    QmpError::Timeout { waiting_for, after_ms: millis(started.elapsed()) }
                }
                other => other,
            })?;
            match Reply::of(message, id)? {
                Reply::Ours(Ok(value)) => {
                    return serde_json::from_value(value)
                        .map_err(|source| QmpError::Answer { command: command.to_owned(), source });
                }
                Reply::Ours(Err((class, desc))) => {
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
        // No command is waiting, so that any answer is a late one.
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

    /// Reads one line. With a deadline that has passed it still takes what has already arrived.
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
            // A timeout of zero would mean "for ever", so the last look is taken without blocking.
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

enum Reply {
    Ours(Result<Value, (String, String)>),
    Stale,
    Event(Event),
}

impl Reply {
    fn of(mut message: Value, id: u64) -> Result<Self, QmpError> {
        if let Some(name) = message.get("event").and_then(Value::as_str) {
            let at = |key| message.pointer(key).and_then(Value::as_u64).unwrap_or(0);
            let timestamp_us = at("/timestamp/seconds")
                .saturating_mul(1_000_000)
                .saturating_add(at("/timestamp/microseconds"));
            let name = name.to_owned();
            return Ok(Self::Event(Event { name, data: message["data"].take(), timestamp_us }));
        }
        let theirs = message.get("id").and_then(Value::as_u64);
        let error = message.get("error").map(|error| {
            let text = |key| error.get(key).and_then(Value::as_str).unwrap_or("?").to_owned();
            (text("class"), text("desc"))
        });
        match (theirs, error, message.get_mut("return")) {
            (Some(number), _, _) if number != id => Ok(Self::Stale),
            // Without an id: QEMU could not even parse what we sent.
            (None, Some((_, desc)), _) => Err(QmpError::Protocol { what: desc }),
            (Some(_), Some(error), _) => Ok(Self::Ours(Err(error))),
            (Some(_), None, Some(value)) => Ok(Self::Ours(Ok(value.take()))),
            _ => Err(QmpError::Protocol { what: "neither answer, error nor event".to_owned() }),
        }
    }
}

fn parse_greeting(greeting: &Value) -> Result<Version, QmpError> {
    #[derive(Deserialize)]
    struct Numbers {
        major: u64,
        minor: u64,
        micro: u64,
    }
    let version = greeting.pointer("/QMP/version").ok_or_else(|| QmpError::Protocol {
        what: "no greeting; is this a human monitor (-monitor)? a QMP monitor (-qmp) is needed".to_owned(),
    })?;
    let numbers: Numbers = serde_json::from_value(version["qemu"].clone())
        .map_err(|source| QmpError::Answer { command: "the greeting".to_owned(), source })?;
    Ok(Version {
        major: numbers.major,
        minor: numbers.minor,
        micro: numbers.micro,
        package: version.get("package").and_then(Value::as_str).unwrap_or_default().to_owned(),
    })
}

/// Connects without ever blocking past the deadline: when a held monitor's backlog is full, a
/// blocking `connect` would wait for ever.
fn connect_by(path: &Path, deadline: Instant) -> Result<UnixStream, QmpError> {
    let failed = |source: io::Error| QmpError::Connect { path: path.to_owned(), source };
    let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
    loop {
        let socket: OwnedFd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(|errno| failed(errno.into()))?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false).map_err(failed)?;
                return Ok(stream);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                if remaining(deadline).is_none() {
                    return Err(QmpError::Busy { path: path.to_owned() });
                }
                // There is no event to wait for: the kernel tells nobody when a backlog empties.
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}

fn remaining(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

fn timeout(waiting_for: &str) -> QmpError {
    QmpError::Timeout { waiting_for: waiting_for.to_owned(), after_ms: 0 }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
